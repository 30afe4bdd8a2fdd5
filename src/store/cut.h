// SPDX-License-Identifier: Apache-2.0
/**
 * Cutting an object into chunks while it is read. Where cuts fall decides how much a later version
 * of the object shares with this one, never what is restored: chunks put together are the object,
 * whatever the parser of its format believed. One thread at a time.
 */
#ifndef KVS_CUT_H
#define KVS_CUT_H

#include "store/manifest.h"

#define KVS_CHUNK_BYTES (1u << 20)
#define KVS_CHUNK_BYTES_MIN 4096u
#define KVS_CHUNK_BYTES_MAX (16u << 20)
#define KVS_CHUNK_TOKENS 256u
#define KVS_CHUNK_TOKENS_MAX 65536u

/** The object as it is read: a window over it. */
struct kvs_source {
    kvs_read_fn read;
    void *arg;
    uint8_t *data; /* window: data[start, end) */
    size_t start, end, capacity;
    bool eof;
    int error; /* what read said, or -ENOMEM; sticks */
};

/** Bytes ahead, at least @want unless the object ends or reading fails: how many. */
size_t kvs_source_fill(struct kvs_source *s, size_t want);

/** Next piece that the parser of a format asks for. */
struct kvs_piece {
    size_t len;             /* 0: it has no opinion about the rest */
    struct kvs_weave weave; /* rows != 0: a region of len bytes, its chunks go column by column */
};

/** Where in a llama.cpp state we are (cut_llama.c). */
struct kvs_llama {
    int where;
    uint32_t chunk_tokens;
    size_t chunk_max;
    uint64_t left;             /* bytes of what is cut in fixed steps */
    size_t step, head;         /* step; bytes ahead that belong to the next piece */
    uint32_t streams, cells;   /* streams left; of this stream */
    uint32_t layers, n_layers; /* left of this kind; of each */
    uint32_t v_trans, values;  /* whether V lies transposed; whether we are at V */
    struct kvs_weave weave;    /* of the rows being cut */
};

struct kvs_cutter {
    struct kvs_source source;
    enum kvs_format format; /* BYTES or LLAMA */
    bool parsing;           /* the format's parser still has opinions */
    size_t min, avg, max;
    uint64_t mask_small, mask_large; /* before and after the average */
    struct kvs_llama llama;
    uint8_t *woven; /* a region column by column, being handed out */
    size_t woven_capacity, woven_at, woven_len, woven_step;
    uint64_t offset; /* of the object, handed out */
};

/** @opts: format, chunk_bytes, chunk_tokens. 0, -EINVAL, -ENOMEM, or what @read failed with. */
int kvs_cutter_init(struct kvs_cutter *c, const struct kvs_save_opts *opts, kvs_read_fn read,
                    void *arg);
void kvs_cutter_fini(struct kvs_cutter *c);

/**
 * The next chunk's bytes, valid until the next call. Returns 1, 0 at the end, a negative errno when
 * reading failed. A weave is noted in @m when its region's first chunk is handed out.
 */
int kvs_cutter_next(struct kvs_cutter *c, struct kvs_manifest *m, const uint8_t **ret,
                    size_t *ret_len);

/** How the next piece of a llama.cpp state is to be cut. */
void kvs_llama_init(struct kvs_llama *p, uint32_t chunk_tokens, size_t chunk_max);
bool kvs_llama_looks(const uint8_t *data, size_t len); /* like a state file's beginning */
struct kvs_piece kvs_llama_next(struct kvs_llama *p, struct kvs_source *s);

#endif
