// SPDX-License-Identifier: Apache-2.0
/* The web page at / for browsers. Its files lie in src/indexer/page/; what it shows comes from the API. */
#include "http/files.h"
#include "indexer/service.h"

extern const struct kh_files ki_page_files; /* made by cmake/KvEmbed.cmake */

void ki_api_page(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg;
    kh_reply_header(reply, "Vary", "Accept"); /* / answers other clients with JSON */
    kh_files_reply(&ki_page_files, request->route->path, request, reply);
}
