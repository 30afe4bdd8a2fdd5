// SPDX-License-Identifier: Apache-2.0
#include "http/files.h"

#include <string.h>

#define NOT_MODIFIED 304

/* Scripts, styles and pictures of this server alone; requests to it alone; no frames, no forms. */
static const char policy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static const struct kh_file *find(const struct kh_files *files, const char *path)
{
    for (size_t i = 0; i < files->n; i++)
        if (strcmp(files->items[i].path, path) == 0)
            return &files->items[i];
    return NULL;
}

/* Return true when the client has these contents. */
static bool is_known(const struct kh_request *request, const char *etag)
{
    struct kv_str tags;

    return kh_request_header(request, "If-None-Match", &tags) &&
           memmem(tags.p, tags.len, etag, strlen(etag));
}

void kh_files_reply(const struct kh_files *files, const char *path,
                    const struct kh_request *request, struct kh_reply *reply)
{
    const struct kh_file *file = find(files, path);

    if (!file) {
        kh_reply_error(reply, 404, "no such file");
        return;
    }
    kh_reply_header(reply, "Content-Security-Policy", policy);
    kh_reply_header(reply, "Referrer-Policy", "no-referrer");
    kh_reply_header(reply, "X-Content-Type-Options", "nosniff");
    kh_reply_header(reply, "X-Frame-Options", "DENY"); /* browsers before frame-ancestors */
    kh_reply_header(reply, "Cache-Control", "no-cache");
    kh_reply_header(reply, "ETag", file->etag);
    if (is_known(request, file->etag)) {
        reply->status = NOT_MODIFIED;
        reply->content_type = NULL;
        return;
    }
    reply->content_type = file->type;
    kv_buf_append(&reply->body, file->data, (size_t)(file->end - file->data));
}
