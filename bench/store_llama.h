// SPDX-License-Identifier: Apache-2.0
/* The llama.cpp row of store_bench: a saved conversation grows by 1 % and is saved again. The state
 * has the shape that llama.cpp writes for a model of 16 layers with 512 f16 values of K and of V
 * per token. Its bytes depend on layer, token and position only, as K/V of a prefix that is
 * computed once. The state is generated while it is read, so it need not fit in memory. */
#ifndef KV_BENCH_STORE_LLAMA_H
#define KV_BENCH_STORE_LLAMA_H

#include "store_measure.h"

enum { LLAMA_LAYERS = 16, LLAMA_ROW = 1024, LLAMA_CELL = 12, LLAMA_HEADER = 12 };

/* Runs of the state, one after the other. */
struct llama_state {
    uint32_t n_tokens, slot;
    uint64_t at, len; /* of the whole state */
    int part;        /* 0 header and tokens, 1 meta, 2 + i: layer i of K, then of V; then the end */
    uint64_t offset; /* in the part */
    uint8_t buf[LLAMA_ROW + 64];
    size_t buf_len, buf_at;
};

static inline uint64_t llama_len(uint32_t n_tokens)
{
    return 12 + 4 * (uint64_t)n_tokens + 8 + LLAMA_CELL * (uint64_t)n_tokens + 8 +
           2ull * LLAMA_LAYERS * (LLAMA_HEADER + (uint64_t)n_tokens * LLAMA_ROW);
}

static inline void llama_u32(struct llama_state *s, uint32_t value)
{
    memcpy(s->buf + s->buf_len, &value, sizeof(value));
    s->buf_len += sizeof(value);
}

static inline void llama_row(struct llama_state *s, uint32_t token)
{
    uint64_t seed = load_mix((uint64_t)s->part << 32 | token);

    for (int i = 0; i < LLAMA_ROW; i += 8) {
        seed += UINT64_C(0x9e3779b97f4a7c15);
        *(uint64_t *)(s->buf + i) = load_mix(seed);
    }
    s->buf_len = LLAMA_ROW;
}

/* Generate the next piece of the state into buf; empty at the end. */
static inline void llama_step(struct llama_state *s)
{
    uint32_t item = (uint32_t)s->offset++;

    s->buf_len = s->buf_at = 0;
    if (s->part >= 2 + 2 * LLAMA_LAYERS)
        return;
    if (item > s->n_tokens) {
        s->part++;
        s->offset = 0;
        llama_step(s);
        return;
    }
    if (item == 0) { /* a part's head */
        if (s->part == 0) {
            llama_u32(s, 0x67677371);
            llama_u32(s, 3);
            llama_u32(s, s->n_tokens);
        } else if (s->part == 1) {
            llama_u32(s, 1); /* streams */
            llama_u32(s, s->n_tokens);
        } else {
            if (s->part == 2) {
                llama_u32(s, 0); /* V is not transposed */
                llama_u32(s, LLAMA_LAYERS);
            }
            llama_u32(s, 1); /* f16 */
            llama_u32(s, LLAMA_ROW);
            llama_u32(s, 0);
        }
    } else if (s->part == 0) {
        llama_u32(s, (uint32_t)load_mix(item) % 100000);
    } else if (s->part == 1) {
        llama_u32(s, item - 1);
        llama_u32(s, 1);
        llama_u32(s, s->slot);
    } else {
        llama_row(s, item);
    }
}

static inline int64_t llama_read(void *arg, void *buf, size_t cap)
{
    struct llama_state *s = arg;
    size_t done = 0;

    while (done < cap) {
        size_t n;

        if (s->buf_at == s->buf_len)
            llama_step(s);
        if (!s->buf_len)
            break;
        n = s->buf_len - s->buf_at < cap - done ? s->buf_len - s->buf_at : cap - done;
        memcpy((uint8_t *)buf + done, s->buf + s->buf_at, n);
        s->buf_at += n;
        done += n;
    }
    s->at += done;
    return (int64_t)done;
}

static inline double llama_save(struct kvs_store *store, uint32_t n_tokens, uint32_t slot,
                                enum kvs_format format, struct kvs_result *ret)
{
    struct llama_state state = {.n_tokens = n_tokens, .slot = slot};
    struct kvs_save_opts opts = {.size = sizeof(opts), .format = format};
    uint64_t begin = kv_now_ns();
    int rc;

    *ret = (struct kvs_result){.size = sizeof(*ret)};
    rc = kvs_save(store, "conversation", llama_read, &state, &opts, ret);
    if (rc < 0)
        bench_die("save", rc);
    if (state.at != llama_len(n_tokens) || ret->bytes != state.at)
        bench_die("the state has another length", -EIO);
    return (double)(kv_now_ns() - begin);
}

static inline void llama_print(const char *what, const char *cut, uint32_t n_tokens, double ns,
                               const struct kvs_result *r)
{
    bench_line("store",
               "'figure':'llama.cpp state: "
               "%s','cut':'%s','tokens':%u,'bytes':%llu,'chunks':%llu,'new_bytes':%llu,'written_of_"
               "state':%.4f,'ms_with_making_it':%.1f",
               what, cut, n_tokens, (unsigned long long)r->bytes, (unsigned long long)r->n_chunks,
               (unsigned long long)(r->new_bytes + r->manifest_bytes),
               (double)(r->new_bytes + r->manifest_bytes) / (double)r->bytes, ns / 1e6);
}

/* Save the state grown by 1 %, then by one reply, then moved to another slot. */
static inline void bench_llama(struct kvs_store *store, uint32_t n_tokens, enum kvs_format format)
{
    const char *cut = format == KVS_FORMAT_BYTES ? "by content" : "by layer and tokens";
    uint32_t grown = n_tokens + n_tokens / 100;
    struct kvs_result r;
    double ns;

    ns = llama_save(store, n_tokens, 0, format, &r);
    llama_print("first save", cut, n_tokens, ns, &r);
    ns = llama_save(store, grown, 0, format, &r);
    llama_print("grown by 1 %", cut, grown, ns, &r);
    ns = llama_save(store, grown + 500, 0, format, &r);
    llama_print("grown by 500 tokens", cut, grown + 500, ns, &r);
    ns = llama_save(store, grown + 500, 3, format, &r);
    llama_print("in another slot", cut, grown + 500, ns, &r);
}

#endif
