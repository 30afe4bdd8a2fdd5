// SPDX-License-Identifier: Apache-2.0
/* Answers of an S3 server: strings end within their room, keys decode. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "s3/keys.h"
#include "s3/xml.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int on_object(void *arg, const struct s3_listed *object)
{
    struct s3_listed copy = *object;
    uint8_t hash[S3_MAX_HASH];

    (void)arg;
    if (!memchr(object->key, '\0', sizeof(object->key)) || !object->key[0] ||
        object->modified_s < 0)
        abort();
    if (s3_decode(copy.key, false) &&
        (strlen(copy.key) > strlen(object->key) || s3_chunk_of_key(copy.key, hash) > S3_MAX_HASH))
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[40];

    s3_read_listing(data, size, on_object, NULL, text, sizeof(text));
    if (s3_read_element(data, size, "UploadId", text, sizeof(text)) == 0 &&
        !memchr(text, '\0', sizeof(text)))
        abort();
    if (s3_check_root(data, size, "Error") == 0 && !s3_read_error(data, size, text, sizeof(text)))
        abort();
    s3_read_error(data, size, text, sizeof(text));
    if (!memchr(text, '\0', sizeof(text)))
        abort();
    return 0;
}
