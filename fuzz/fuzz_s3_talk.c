// SPDX-License-Identifier: Apache-2.0
/* A whole conversation of the S3 plugin with a malicious server, whose answers are the input. */
#include "talk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
    talk(data, size, "s3://b/p?endpoint=http://127.0.0.1:%d&timeout=1",
         "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    return 0;
}
