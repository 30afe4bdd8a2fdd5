// SPDX-License-Identifier: Apache-2.0
/*
 * llama.cpp's saved states (little-endian; read from llama.cpp's src/llama-context.cpp,
 * llama-kv-cache.cpp and llama-memory-recurrent.cpp):
 *
 *     sequence file:  u32 'ggsq', u32 version, u32 n, n * i32 tokens, caches
 *     session file:   u32 'ggsn', u32 version, u32 n, n * i32 tokens, whole context
 *     raw sequence:   [u32 0xaf143cd8, i32 sequence], caches
 *     whole context:  u32 len, len bytes: architecture; caches
 *     cache:          u32 n_stream, then per stream cells, fields, K, V (cut_llama_cells.c)
 *     K, V:           per layer i32 type, u64 row_bytes, n_cells rows
 *     V if v_trans:   per layer i32 type, u32 element_bytes, u32 n_rows, n_rows * n_cells elements
 *     R, S:           per recurrent layer i32 type, u64 row_bytes, n_cells rows
 *
 * A model may have a second cache behind the first (sliding windows) or a recurrent state (hybrid);
 * V may be missing (MLA).
 *
 * One more token makes every layer longer, so chunks cut by offset share nothing behind the first
 * layer. Here every layer's K and V begin a chunk, and chunks end at absolute positions: at
 * multiples of the range, and where positions jump. A longer sequence changes only the last chunk of
 * each. A sliding window changes only its first and last, wherever llama.cpp put its cells.
 * Transposed V grows at the end of each of its rows, so its rows go column by column, in groups
 * (struct kvs_weave). Tokens and cells, which hold the slot's number, have chunks of their own.
 *
 * The parser trusts no value. Where a value doesn't fit the format, parsing ends and the rest of
 * the object is cut by content; restoring never needs the format.
 */
#include "store/object/cut.h"

enum {
    MAGIC_SEQUENCE = 0x67677371,
    MAGIC_SESSION = 0x6767736e,
    FIRST_VERSION = 2,
    LAST_VERSION = 31,      /* plausible for years; later ones are bytes */
    SEQUENCE_ROTATIONS = 4, /* first version with rotation sizes */
    SESSION_ROTATIONS = 11,
    FILE_HEADER = 12,
    RAW_HEADER = 8,
    MAX_ARCH = 64, /* bytes of the architecture's name */
    MAX_TOKENS = 1 << 26,
    MAX_ELEMENT = 16,
    MAX_ROWS = 1 << 20,
    LEAST_PIECE = 1024, /* bytes */
    MAX_HEAD = 64 << 10,
    STEP = 16 << 10,      /* bytes of a chunk of tokens or cells */
    MIN_RANGE = 16 << 10, /* bytes: smaller rows put more tokens into a chunk */
    ROWS_WOVEN = 256
};

#define MAGIC_RAW 0xaf143cd8u

enum where {
    AT_FILE,
    AT_ARCH,
    AT_CACHE,
    AT_STREAM,
    AT_LAYER,
    AT_STEPS,
    AT_RANGES,
    AT_ROWS,
    AT_STATE
};

/* CUT: the handler decided on a piece. GO_ON: ask the handler of p->where next. */
enum verdict { GO_ON, CUT };

static bool ahead(struct kvs_source *s, size_t len)
{
    return kvs_source_fill(s, len) >= len;
}

/* -- beginnings -------------------------------------------------------------------------------- */

static uint32_t u32_of(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool is_file(uint32_t magic, uint32_t version)
{
    return (magic == MAGIC_SEQUENCE || magic == MAGIC_SESSION) && version >= FIRST_VERSION &&
           version <= LAST_VERSION;
}

/* Return the length of the architecture's name at the head of a whole context; 0: none. */
static size_t arch_len(const uint8_t *data, size_t len)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789-_.";
    uint32_t n = len >= 4 ? u32_of(data) : 0;

    if (!n || n > MAX_ARCH || len < 4 + (size_t)n)
        return 0;
    for (uint32_t i = 0; i < n; i++)
        if (!data[4 + i] || !strchr(letters, data[4 + i]))
            return 0;
    return n;
}

enum kvs_llama_look kvs_llama_looks(const uint8_t *data, size_t len)
{
    size_t n;

    if (len >= FILE_HEADER && is_file(u32_of(data), u32_of(data + 4)))
        return KVS_LLAMA_YES;
    if (len >= RAW_HEADER + 4 && u32_of(data) == MAGIC_RAW)
        return KVS_LLAMA_YES;
    n = arch_len(data, len);
    if (!n || len < 4 + n + 8)
        return KVS_LLAMA_NO;
    return u32_of(data + 4 + n) - 1 < KVS_LLAMA_STREAMS_MAX ? KVS_LLAMA_MAYBE : KVS_LLAMA_NO;
}

void kvs_llama_init(struct kvs_llama *p, uint32_t chunk_tokens, size_t chunk_max)
{
    *p = (struct kvs_llama){.where = AT_FILE, .chunk_tokens = chunk_tokens, .chunk_max = chunk_max};
}

void kvs_llama_fini(struct kvs_llama *p)
{
    free(p->runs.at);
    p->runs = (struct kvs_llama_runs){0};
}

static enum verdict give_up(struct kvs_piece *ret)
{
    *ret = (struct kvs_piece){0};
    return CUT;
}

/* -- runs of fixed steps ----------------------------------------------------------------------- */

/* Cut the head and @len bytes behind it in steps of @step bytes; then go on at @then. */
static enum verdict begin_steps(struct kvs_llama *p, uint64_t len, size_t step, enum where then)
{
    p->left = p->head + len;
    p->head = 0;
    p->step = KV_MIN(step, p->chunk_max);
    p->then = then;
    p->where = AT_STEPS;
    return GO_ON;
}

static enum verdict at_steps(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    size_t len = (size_t)KV_MIN((uint64_t)p->step, p->left);

    (void)s;
    if (!p->left) {
        p->where = p->then;
        return GO_ON;
    }
    p->left -= len;
    *ret = (struct kvs_piece){.len = len};
    return CUT;
}

/* -- files and caches -------------------------------------------------------------------------- */

static enum verdict at_file(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    size_t n = kvs_source_fill(s, KVS_LLAMA_LOOK);
    const uint8_t *data = s->data + s->start;
    uint32_t magic, version, tokens;

    p->where = AT_CACHE;
    if (n >= RAW_HEADER && u32_of(data) == MAGIC_RAW)
        p->head = RAW_HEADER;
    else if (arch_len(data, n))
        p->where = AT_ARCH;
    if (n < FILE_HEADER || !is_file(u32_of(data), u32_of(data + 4)))
        return GO_ON;
    magic = u32_of(data);
    version = u32_of(data + 4);
    tokens = u32_of(data + 8);
    if (tokens > MAX_TOKENS)
        return give_up(ret);
    p->rotations = version >= (magic == MAGIC_SEQUENCE ? SEQUENCE_ROTATIONS : SESSION_ROTATIONS);
    return begin_steps(p, FILE_HEADER + (uint64_t)tokens * 4, STEP,
                       magic == MAGIC_SEQUENCE ? AT_CACHE : AT_ARCH);
}

static enum verdict at_arch(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    size_t n = kvs_source_fill(s, 4 + MAX_ARCH), len = arch_len(s->data + s->start, n);

    if (!len)
        return give_up(ret);
    p->head = 4 + len;
    p->where = AT_CACHE;
    return GO_ON;
}

/* The object ends where a cache may end. Cut what is left of it. */
static enum verdict at_end(struct kvs_llama *p, struct kvs_piece *ret)
{
    p->accepted = p->accepted || p->empty;
    return p->head ? begin_steps(p, 0, STEP, AT_CACHE) : give_up(ret);
}

static enum verdict at_cache(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    enum kvs_llama_cache cache;

    if (kvs_source_fill(s, p->head + 1) <= p->head)
        return at_end(p, ret);
    cache = p->head <= MAX_HEAD ? kvs_llama_cache_at(p, s, p->head) : KVS_LLAMA_NONE;
    if (cache == KVS_LLAMA_NONE)
        return give_up(ret);
    if (cache == KVS_LLAMA_STREAMS) {
        p->streams = kvs_llama_u32(s, p->head);
        p->head += 4;
        p->where = AT_STREAM;
        return GO_ON;
    }
    p->head += kvs_llama_recurrent_at(s, p->head, &p->cells, &p->layers);
    p->layers *= 2; /* R and S of each layer that has them */
    p->accepted = true;
    p->where = AT_STATE;
    return GO_ON;
}

static void end_stream(struct kvs_llama *p)
{
    p->where = --p->streams ? AT_STREAM : AT_CACHE;
}

static enum verdict at_stream(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    struct kvs_llama_stream stream;

    if (p->head > MAX_HEAD || !ahead(s, p->head + 4))
        return give_up(ret);
    if (!kvs_llama_u32(s, p->head)) {
        p->empty = true;
        p->head += 4;
        end_stream(p);
        return GO_ON;
    }
    if (!kvs_llama_stream_at(p, s, p->head, &p->runs, &stream))
        return give_up(ret);
    p->accepted = true;
    p->cells = stream.cells;
    p->v_trans = stream.v_trans;
    p->layers = p->n_layers = stream.layers;
    p->values = 0;
    p->alone = p->runs.at[0].pos != 0;
    return begin_steps(p, stream.len, STEP, AT_LAYER);
}

/* -- K and V ----------------------------------------------------------------------------------- */

/* Tokens in a chunk of rows of @row bytes. Only the row length decides, or growth would move the
 * cuts. */
static uint32_t range_tokens(const struct kvs_llama *p, size_t row)
{
    size_t tokens = p->chunk_tokens, max = p->chunk_max - KVS_LLAMA_ROW_HEADER;

    if (tokens * row < MIN_RANGE)
        tokens *= (MIN_RANGE + tokens * row - 1) / (tokens * row);
    while (tokens > 1 && tokens * row > max)
        tokens /= 2;
    return (uint32_t)tokens;
}

static enum verdict at_rows_header(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t element = kvs_llama_u32(s, 4), n_rows = kvs_llama_u32(s, 8), row;
    size_t rows = ROWS_WOVEN, tokens = p->chunk_tokens;

    if (!element || element > MAX_ELEMENT || !n_rows || n_rows > MAX_ROWS)
        return give_up(ret);
    row = element * p->cells; /* at most 16 MiB */
    while (rows > 1 && rows * row > KVS_WEAVE_MAX)
        rows /= 2;
    while (tokens > 1 && rows * tokens * element > p->chunk_max)
        tokens /= 2;
    p->left = n_rows;
    p->weave = (struct kvs_weave){.rows = (uint32_t)rows,
                                  .row_bytes = (uint32_t)row,
                                  .piece_bytes = (uint32_t)KV_MIN(tokens * element, row),
                                  .n = 1};
    p->where = AT_ROWS;
    *ret = (struct kvs_piece){.len = KVS_LLAMA_ROW_HEADER};
    return CUT;
}

/* Begin the rows whose header is next. The header goes with the first range of a sequence that
 * begins at position 0; the first range of a sliding window may be shared, without a header. */
static enum verdict begin_rows(struct kvs_llama *p, size_t row, struct kvs_piece *ret)
{
    p->row = row;
    p->tokens = range_tokens(p, row);
    p->cell = 0;
    p->run = 0;
    p->where = AT_RANGES;
    if (!p->alone) {
        p->head = KVS_LLAMA_ROW_HEADER;
        return GO_ON;
    }
    *ret = (struct kvs_piece){.len = KVS_LLAMA_ROW_HEADER};
    return CUT;
}

/* Return whether the state goes on without V: it ends, or its next stream or cache is here. */
static bool lacks_values(const struct kvs_llama *p, struct kvs_source *s)
{
    struct kvs_llama_stream stream;

    if (!kvs_source_fill(s, 1))
        return true;
    return p->streams > 1 ? kvs_llama_stream_at(p, s, 0, NULL, &stream)
                          : kvs_llama_cache_at(p, s, 0) != KVS_LLAMA_NONE;
}

/* Go on to V when K of all layers is cut, then to what follows the stream. */
static enum verdict end_layers(struct kvs_llama *p, struct kvs_source *s)
{
    if (p->values || lacks_values(p, s)) {
        end_stream(p);
    } else {
        p->layers = p->n_layers;
        p->values = 1;
    }
    return GO_ON;
}

/* Parse the head of K or V of one layer. */
static enum verdict at_layer(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t row;

    if (!p->layers)
        return end_layers(p, s);
    if (!ahead(s, KVS_LLAMA_ROW_HEADER)) {
        if (!p->values || kvs_source_fill(s, 1))
            return give_up(ret);
        end_stream(p); /* the last layers have no V */
        return GO_ON;
    }
    if (p->values && p->v_trans)
        return kvs_llama_u32(s, 0) <= KVS_LLAMA_TYPE_MAX ? at_rows_header(p, s, ret) : give_up(ret);
    row = kvs_llama_u64(s, 4);
    if (!kvs_llama_row_fits(kvs_llama_u32(s, 0), row) ||
        row > p->chunk_max - KVS_LLAMA_ROW_HEADER) {
        if (!p->values)
            return give_up(ret);
        end_stream(p); /* no more V: another stream or cache may follow */
        return GO_ON;
    }
    return begin_rows(p, (size_t)row, ret);
}

static void end_layer(struct kvs_llama *p)
{
    p->layers--;
    p->where = AT_LAYER;
}

/* Cut one range of rows: up to the next multiple of the range in positions (in cells, where
 * positions are equal), and to the end of the run at most. */
/*
 * A piece ends where a range does, and where positions jump. Short ones go on: a hostile state with
 * cells far apart would else become a chunk for each cell.
 */
static enum verdict at_ranges(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t least = KV_MIN((uint64_t)LEAST_PIECE, (uint64_t)p->tokens * p->row);
    uint64_t bytes = 0;

    (void)s;
    if (p->cell == p->cells) {
        end_layer(p);
        return GO_ON;
    }
    do {
        const struct kvs_llama_run *r = &p->runs.at[p->run];
        uint32_t at = p->cell - r->first;
        uint32_t n = KV_MIN(p->tokens - (r->step ? r->pos + at : at) % p->tokens, r->n - at);

        p->cell += n;
        p->run += n == r->n - at;
        bytes += (uint64_t)n * p->row;
    } while (p->cell < p->cells && bytes < least);
    *ret = (struct kvs_piece){.len = p->head + bytes};
    p->head = 0;
    return CUT;
}

static enum verdict at_rows(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    (void)s;
    if (!p->left) {
        end_layer(p);
        return GO_ON;
    }
    p->weave.rows = (uint32_t)KV_MIN((uint64_t)p->weave.rows, p->left);
    p->left -= p->weave.rows;
    *ret = (struct kvs_piece){.len = kvs_weave_region(&p->weave), .weave = p->weave};
    if (p->weave.row_bytes == p->weave.piece_bytes)
        ret->weave.rows = 0; /* one column: weaving changes nothing */
    return CUT;
}

/* -- recurrent states -------------------------------------------------------------------------- */

/* Parse the head of R or S of one layer. All of it changes with every token. */
static enum verdict at_state(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t row, len;

    (void)ret;
    p->where = AT_CACHE;
    if (!p->layers || !ahead(s, p->head + KVS_LLAMA_ROW_HEADER))
        return GO_ON;
    row = kvs_llama_u64(s, p->head + 4);
    if (kvs_llama_u32(s, p->head) > KVS_LLAMA_TYPE_MAX || row > KVS_LLAMA_STATE_ROW_MAX)
        return GO_ON;
    p->where = AT_STATE;
    p->layers--;
    p->head += KVS_LLAMA_ROW_HEADER;
    len = row * p->cells;
    if (p->head + len > STEP || !ahead(s, p->head + len))
        return begin_steps(p, len, p->chunk_max, AT_STATE);
    p->head += len; /* small rows share a chunk */
    return GO_ON;
}

struct kvs_piece kvs_llama_next(struct kvs_llama *p, struct kvs_source *s)
{
    static enum verdict (*const handlers[])(struct kvs_llama *, struct kvs_source *,
                                            struct kvs_piece *) = {
        [AT_FILE] = at_file,     [AT_ARCH] = at_arch,   [AT_CACHE] = at_cache,
        [AT_STREAM] = at_stream, [AT_LAYER] = at_layer, [AT_STEPS] = at_steps,
        [AT_RANGES] = at_ranges, [AT_ROWS] = at_rows,   [AT_STATE] = at_state,
    };
    struct kvs_piece ret = {0};

    while (handlers[p->where](p, s, &ret) == GO_ON)
        ;
    return ret;
}
