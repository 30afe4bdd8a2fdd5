// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/core/error.h"
#include "kv_plane.h"

/* Append a token behind a dot. Returns the end, or NULL when there is no room. */
static char *put_token(char *at, const char *end, const char *name)
{
    static const char digits[] = "0123456789ABCDEF";

    if (end - at < 3)
        return NULL;
    *at++ = '.';
    if (!name || !*name)
        *at++ = '%';
    for (; name && *name; name++) {
        unsigned char c = (unsigned char)*name;
        bool plain = kv_is_alnum((char)c) || c == '-' || c == '_';

        if (end - at < (plain ? 2 : 4))
            return NULL;
        if (plain) {
            *at++ = (char)c;
        } else {
            *at++ = '%';
            *at++ = digits[c >> 4];
            *at++ = digits[c & 15];
        }
    }
    return at;
}

long kvp_subject(const char *cluster, const char *model, const char *tenant, const char *worker,
                 char ret[KVP_MAX_SUBJECT])
{
    const char *names[] = {cluster, model, tenant, worker};
    char text[KVP_MAX_SUBJECT] = "kvasir", *at = text + strlen(text);

    for (size_t i = 0; at && i < KV_COUNT(names); i++)
        at = put_token(at, text + sizeof(text), names[i]);
    if (!at)
        return -ENAMETOOLONG;
    *at = '\0';
    memcpy(ret, text, (size_t)(at - text) + 1);
    return at - text;
}
