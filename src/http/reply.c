// SPDX-License-Identifier: Apache-2.0
/* Fill a reply, and read arguments of requests, without the HTTP library. */
#include <stdio.h>

#include "base/args/args.h"
#include "base/json/json.h"
#include "http/http.h"

bool kh_request_u64(const struct kh_request *request, const char *name, uint64_t *ret)
{
    char text[KV_U64_TEXT_MAX + 1];
    struct kv_str value;

    if (!kh_request_param(request, name, &value))
        return true;
    if (value.len >= sizeof(text))
        return false;
    memcpy(text, value.p, value.len);
    text[value.len] = '\0';
    return kv_parse_u64(text, ret) == 0;
}

bool kh_request_passes(const struct kh_request *request, const char *name, const char *value)
{
    struct kv_str wanted;

    return !kh_request_param(request, name, &wanted) || kv_str_eq(wanted, value);
}

void kh_reply_header(struct kh_reply *reply, const char *name, const char *value)
{
    if (reply->n_headers == KH_REPLY_MAX_HEADERS)
        return;
    reply->headers[reply->n_headers].name = name;
    reply->headers[reply->n_headers++].value = value;
}

void kh_reply_error(struct kh_reply *reply, unsigned status, const char *fmt, ...)
{
    struct kv_json_writer w;
    char text[512];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    reply->status = status;
    reply->content_type = "application/json";
    kv_buf_clear(&reply->body);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "error", text);
    kv_json_end_object(&w);
}
