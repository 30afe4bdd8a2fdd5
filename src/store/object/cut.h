// SPDX-License-Identifier: Apache-2.0
/**
 * Cutting an object into chunks while it is read. The cuts decide how many chunks a later version
 * of the object shares with this one. They never change what is restored: the chunks put together
 * are the object, even where a format's parser was wrong. One thread at a time.
 */
#ifndef KVS_OBJECT_CUT_H
#define KVS_OBJECT_CUT_H

#include "store/object/manifest.h"

#define KVS_CHUNK_BYTES (1u << 20)
#define KVS_CHUNK_BYTES_MIN 4096u
#define KVS_CHUNK_BYTES_MAX (16u << 20)
#define KVS_CHUNK_TOKENS 128u
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

/** Cells that follow each other in a stream of a llama.cpp state, and their positions. */
struct kvs_llama_run {
    uint32_t first, n; /* cells */
    uint32_t pos;      /* of the first */
    uint32_t step;     /* 1: positions rise by one; 0: all are equal (tokens of an image) */
};

/** Runs of a stream's cells. Freed by kvs_llama_fini. */
struct kvs_llama_runs {
    struct kvs_llama_run *at;
    size_t n, capacity;
};

/** Layout of a stream of a llama.cpp state, as far as its rows (cut_llama_cells.c). */
struct kvs_llama_stream {
    uint32_t cells, v_trans, layers;
    size_t len; /* bytes from the number of cells to the first row's header */
};

/** Position of the parser in a llama.cpp state (cut_llama.c). */
struct kvs_llama {
    int where, then; /* then: where to go on behind a run of fixed steps */
    bool accepted;   /* a cache was found: the object is a state */
    bool empty;      /* a stream without cells was found */
    bool rotations;  /* the version of the file has rotation sizes: tried first */
    bool alone;      /* the rows' header is a chunk of its own */
    uint32_t chunk_tokens;
    size_t chunk_max;
    uint64_t left;             /* bytes left of a run that is cut in fixed steps */
    size_t step, head;         /* bytes of a step; bytes ahead that belong to the next piece */
    uint32_t streams, cells;   /* streams left; cells of this stream */
    uint32_t layers, n_layers; /* layers left of this kind (K or V); layers of each kind */
    uint32_t v_trans, values;  /* 1 when V lies transposed; 1 when the parser is at V */
    uint32_t cell, tokens;     /* next cell of the rows being cut; tokens of a range */
    size_t row, run;           /* bytes of a row; run of that cell */
    struct kvs_llama_runs runs;
    struct kvs_weave weave; /* of the transposed rows being cut */
};

struct kvs_cutter {
    struct kvs_source source;
    enum kvs_format format; /* BYTES or LLAMA; final when the last chunk was handed out */
    bool parsing;           /* true until the format's parser gives up */
    bool told;              /* the caller, or a magic number, says that the object is a state */
    uint64_t parsed;        /* bytes cut as the format's parser asked */
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

/** Answer of kvs_llama_looks. */
enum kvs_llama_look { KVS_LLAMA_NO, KVS_LLAMA_MAYBE, KVS_LLAMA_YES };
/** Bytes of an object that kvs_llama_looks wants to see. */
#define KVS_LLAMA_LOOK 80u

/** Prepare the parser of llama.cpp states, which decides how the next piece is cut. */
void kvs_llama_init(struct kvs_llama *p, uint32_t chunk_tokens, size_t chunk_max);
void kvs_llama_fini(struct kvs_llama *p);
/**
 * Decide whether @data begins like a state: YES by a magic number, MAYBE like a whole context's,
 * which has none.
 */
enum kvs_llama_look kvs_llama_looks(const uint8_t *data, size_t len);
/**
 * Return the next piece; len 0 at the end of the state, where the parser gives up, or with
 * s->error set.
 */
struct kvs_piece kvs_llama_next(struct kvs_llama *p, struct kvs_source *s);

/* Limits of what the parser takes for a value of the format. */
enum {
    KVS_LLAMA_LAYERS_MAX = 1024,
    KVS_LLAMA_TYPE_MAX = 255,
    KVS_LLAMA_STREAMS_MAX = 256,
    KVS_LLAMA_STATE_ROW_MAX = 1 << 30, /* bytes: of a recurrent state */
    KVS_LLAMA_ROW_HEADER = 12          /* bytes: i32 type, u64 bytes of a row */
};

static inline uint32_t kvs_llama_u32(const struct kvs_source *s, size_t offset)
{
    const uint8_t *at = s->data + s->start + offset;

    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t kvs_llama_u64(const struct kvs_source *s, size_t offset)
{
    return kvs_llama_u32(s, offset) | (uint64_t)kvs_llama_u32(s, offset + 4) << 32;
}

/**
 * Read the stream at byte @at of the window: cells, and the fields behind them. Returns false when
 * there is none. @runs (NULL: not wanted) becomes the runs of its cells; on false its contents mean
 * nothing.
 */
bool kvs_llama_stream_at(const struct kvs_llama *p, struct kvs_source *s, size_t at,
                         struct kvs_llama_runs *runs, struct kvs_llama_stream *ret);
/** Kind of a cache. */
enum kvs_llama_cache { KVS_LLAMA_NONE, KVS_LLAMA_STREAMS, KVS_LLAMA_RECURRENT };
/** Return the kind of the cache that begins at byte @at of the window. */
enum kvs_llama_cache kvs_llama_cache_at(const struct kvs_llama *p, struct kvs_source *s, size_t at);
/**
 * Read the recurrent state at byte @at of the window. Returns the bytes of its head (cells, fields),
 * 0 when there is none.
 */
size_t kvs_llama_recurrent_at(struct kvs_source *s, size_t at, uint32_t *ret_cells,
                              uint32_t *ret_layers);
/** Return whether rows of @row bytes can hold values of llama.cpp's type @type. */
bool kvs_llama_row_fits(uint32_t type, uint64_t row);

#endif
