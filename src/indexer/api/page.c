// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/page.h"

bool ki_page_of(const struct kh_request *request, struct kh_reply *reply, struct ki_page *ret)
{
    struct kv_str unused;

    *ret = (struct ki_page){.limit = UINT64_MAX};
    ret->given = kh_request_param(request, "limit", &unused);
    if (kh_request_u64(request, "limit", &ret->limit) &&
        kh_request_u64(request, "offset", &ret->offset))
        return true;
    kh_reply_error(reply, 400, "limit and offset are numbers from 0 on");
    return false;
}

bool ki_page_has(const struct ki_page *page, uint64_t i)
{
    return i >= page->offset && i - page->offset < page->limit;
}

void ki_page_write(const struct ki_page *page, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "total", page->total);
    kv_json_member_u64(w, "offset", page->offset);
    if (page->limit != UINT64_MAX)
        kv_json_member_u64(w, "limit", page->limit);
}
