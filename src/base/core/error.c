// SPDX-License-Identifier: Apache-2.0
#include "base/core/error.h"

#include <stdio.h>

#include "base/core/log.h"

int kv_fail(struct kv_error *error, int code, size_t offset, const char *fmt, ...)
{
    va_list args;

    if (error) {
        error->code = code;
        error->offset = offset;
        va_start(args, fmt);
        vsnprintf(error->text, sizeof(error->text), fmt, args);
        va_end(args);
    }
    return code;
}

bool kv_refuse_size(const char *name, size_t size)
{
    kv_log_error("options", "a struct's size is not set",
                 "struct=%s size=%zu want=\"sizeof(struct %s)\"", name, size, name);
    return false;
}
