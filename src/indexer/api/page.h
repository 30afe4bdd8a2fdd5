// SPDX-License-Identifier: Apache-2.0
/** A page of a long list: ?limit= and ?offset= of a request. */
#ifndef KV_INDEXER_API_PAGE_H
#define KV_INDEXER_API_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json/json.h"
#include "http/http.h"

struct ki_page {
    bool given; /* the request has a limit; without, the page is the whole list */
    uint64_t offset, limit;
    uint64_t total; /* set by the caller: length of the list */
};

/** Read the page that @request asks for. Returns false when @reply has the error: no number. */
bool ki_page_of(const struct kh_request *request, struct kh_reply *reply, struct ki_page *ret);

/** Return true when item number @i, from 0, is on the page. */
bool ki_page_has(const struct ki_page *page, uint64_t i);

/** Write the members "total", "offset" and "limit". */
void ki_page_write(const struct ki_page *page, struct kv_json_writer *w);

#endif
