// SPDX-License-Identifier: Apache-2.0
#include "grpc/frames.h"

#include <string.h>

void kg_frame_head(uint8_t *ret, uint32_t len)
{
    ret[0] = 0;
    ret[1] = (uint8_t)(len >> 24);
    ret[2] = (uint8_t)(len >> 16);
    ret[3] = (uint8_t)(len >> 8);
    ret[4] = (uint8_t)len;
}

static int read_head(struct kg_frames *f)
{
    const uint8_t *h = f->head;

    if (h[0] != 0)
        return -EPROTO;
    f->want = (size_t)h[1] << 24 | (size_t)h[2] << 16 | (size_t)h[3] << 8 | h[4];
    return f->want > f->max ? -EMSGSIZE : 0;
}

int kg_frames_feed(struct kg_frames *f, const void *data, size_t len, kg_frame_fn fn, void *arg)
{
    const char *p = data, *end = p + len;

    for (;;) {
        if (f->head_have < KG_HEAD) {
            size_t n = KV_MIN((size_t)KG_HEAD - f->head_have, (size_t)(end - p));
            int rc;

            if (n)
                memcpy(f->head + f->head_have, p, n);
            f->head_have += n;
            p += n;
            if (f->head_have < KG_HEAD)
                return 0;
            rc = read_head(f);
            if (rc < 0)
                return rc;
        }

        size_t n = KV_MIN(f->want - f->body.len, (size_t)(end - p));
        const char *message = p;

        p += n;
        if (f->body.len > 0 || n < f->want) { /* not in one piece: collect it */
            kv_buf_append(&f->body, message, n);
            if (f->body.error)
                return -ENOMEM;
            if (f->body.len < f->want)
                return 0;
            message = f->body.data;
        }
        f->head_have = 0;
        bool more = fn(arg, f->want ? message : "", f->want);

        if (f->body.capacity > ((size_t)64 << 10))
            kv_buf_fini(&f->body); /* large messages are rare: calls that wait hold no memory */
        else
            kv_buf_clear(&f->body);
        if (!more)
            return 0;
    }
}
