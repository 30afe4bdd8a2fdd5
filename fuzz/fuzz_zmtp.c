// SPDX-License-Identifier: Apache-2.0
/* Bytes of a publisher, after a byte that says in which pieces they come. Messages, answers and the
 * verdict are the same for the whole and for pieces. The parser never asks for bytes that it has. */
#include <stdio.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "indexer/zmq/zmtp.h"
#include "require.h"

enum { LIMIT = 5000 };

static void show(const struct ki_zmtp_message *m, struct kv_buf *out)
{
    kv_buf_printf(out, "%zu ", m->n_frames);
    REQUIRE(m->n_frames > 0);
    for (size_t i = 0; i < KV_MIN(m->n_frames, (size_t)KVE_MAX_FRAMES); i++) {
        REQUIRE(m->spans[i].len <= LIMIT);
        kv_buf_printf(out, "%zu:", m->spans[i].len);
        kv_buf_append(out, m->spans[i].data, m->spans[i].len);
    }
}

/* Parse what is in @kept until more is needed. Returns the verdict. */
static int parse(struct ki_zmtp *z, struct kv_buf *kept, struct kv_buf *out)
{
    for (;;) {
        enum ki_zmtp_state before = z->state;
        struct ki_zmtp_message m;
        size_t used = 0;
        int rc = ki_zmtp_parse(z, (const uint8_t *)kept->data, kept->len, &m, &used);

        REQUIRE(used <= kept->len);
        if (rc == 1)
            show(&m, out);
        if (rc < 0)
            return rc;
        memmove(kept->data, kept->data + used, kept->len - used);
        kept->len -= used;
        REQUIRE(kept->len <= LIMIT + KI_ZMTP_SLACK + KI_ZMTP_MAX_COMMAND || kept->len < 1u << 20);
        if (rc == 0 && z->state == before) {
            REQUIRE(z->needed > kept->len);
            return 0;
        }
    }
}

static int run(const uint8_t *data, size_t size, size_t step, struct kv_buf *out)
{
    struct kv_buf kept = KV_BUF_INIT;
    struct ki_zmtp z;
    int rc = 0;

    ki_zmtp_init(&z, LIMIT);
    for (size_t at = 0; at < size && rc == 0; at += step) {
        kv_buf_append(&kept, data + at, KV_MIN(step, size - at));
        rc = parse(&z, &kept, out);
    }
    REQUIRE(z.out.len <= sizeof(z.out.bytes));
    kv_buf_printf(out, "%d %d ", (int)z.state, (int)z.peer_ttl_ds);
    kv_buf_append(out, z.out.bytes, z.out.len);
    kv_buf_fini(&kept);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_buf whole = KV_BUF_INIT, pieces = KV_BUF_INIT;

    if (size < 2)
        return 0;
    REQUIRE(run(data + 1, size - 1, size, &whole) ==
            run(data + 1, size - 1, 1 + data[0] % 80, &pieces));
    REQUIRE(whole.len == pieces.len && memcmp(whole.data, pieces.data, whole.len) == 0);
    kv_buf_fini(&whole);
    kv_buf_fini(&pieces);
    return 0;
}
