// SPDX-License-Identifier: Apache-2.0
/**
 * Cutting an object into chunks while it is read. The cuts decide how many chunks a later version
 * of the object shares with this one. They never change what is restored: the chunks put together
 * are the object, even where a format's parser was wrong. One thread at a time.
 */
#ifndef KVS_CUT_H
#define KVS_CUT_H

#include "store/manifest.h"

#define KVS_CHUNK_BYTES (1u << 20)
#define KVS_CHUNK_BYTES_MIN 4096u
#define KVS_CHUNK_BYTES_MAX (16u << 20)
#define KVS_CHUNK_TOKENS 256u
#define KVS_CHUNK_TOKENS_MAX 65536u

/** An object being read, through a window. */
struct kvs_source {
    kvs_read_fn read;
    void *arg;
    uint8_t *data; /* window: data[start, end) */
    size_t start, end, capacity;
    bool eof;
    int error; /* read's errno, or -ENOMEM; stays set */
};

/**
 * Read until the window holds at least @want bytes, the object ends or reading fails. Returns the
 * number of bytes in the window.
 */
size_t kvs_source_fill(struct kvs_source *s, size_t want);

/** Next piece that the parser of a format asks for. */
struct kvs_piece {
    size_t len;             /* 0: the parser has no opinion about the rest */
    struct kvs_weave weave; /* rows != 0: a region of len bytes whose chunks go column by column */
};

/** Position of the parser in a llama.cpp state (cut_llama.c). */
struct kvs_llama {
    int where;
    uint32_t chunk_tokens;
    size_t chunk_max;
    uint64_t left;             /* bytes left of a run that is cut in fixed steps */
    size_t step, head;         /* bytes of a step; bytes ahead that belong to the next piece */
    uint32_t streams, cells;   /* streams left; cells of this stream */
    uint32_t layers, n_layers; /* layers left of this kind (K or V); layers of each kind */
    uint32_t v_trans, values;  /* 1 when V lies transposed; 1 when the parser is at V */
    struct kvs_weave weave;    /* of the rows being cut */
};

struct kvs_cutter {
    struct kvs_source source;
    enum kvs_format format; /* BYTES or LLAMA */
    bool parsing;           /* true until the format's parser gives up */
    size_t min, avg, max;
    uint64_t mask_small, mask_large; /* cut masks before and after the average length */
    struct kvs_llama llama;
    uint8_t *woven; /* region column by column, being handed out */
    size_t woven_capacity, woven_at, woven_len, woven_step;
    uint64_t offset; /* bytes of the object handed out so far */
};

/**
 * Prepare a cutter. @opts: format, chunk_bytes, chunk_tokens. Returns 0, -EINVAL, -ENOMEM, or the
 * error of @read.
 */
int kvs_cutter_init(struct kvs_cutter *c, const struct kvs_save_opts *opts, kvs_read_fn read,
                    void *arg);
void kvs_cutter_fini(struct kvs_cutter *c);

/**
 * Return the next chunk's bytes, valid until the next call. Returns 1, 0 at the end, or a negative
 * errno when reading failed. Notes a weave in @m when it hands out the first chunk of the weave's
 * region.
 */
int kvs_cutter_next(struct kvs_cutter *c, struct kvs_manifest *m, const uint8_t **ret,
                    size_t *ret_len);

/** Prepare the parser of llama.cpp states, which decides how the next piece is cut. */
void kvs_llama_init(struct kvs_llama *p, uint32_t chunk_tokens, size_t chunk_max);
/* true when @data begins like a state file */
bool kvs_llama_looks(const uint8_t *data, size_t len);
struct kvs_piece kvs_llama_next(struct kvs_llama *p, struct kvs_source *s);

#endif
