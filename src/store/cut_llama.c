// SPDX-License-Identifier: Apache-2.0
/*
 * llama.cpp's saved sequence, as llama_state_seq_save_file writes it (little-endian; read from
 * llama.cpp's src/llama-kv-cache.cpp and llama-context.cpp):
 *
 *     file:    u32 'ggsq', u32 version, u32 n, n * i32 tokens       absent in a raw state
 *     cache:   u32 n_stream, then per stream
 *     stream:  u32 n_cells; if any: meta, u32 v_trans, u32 n_layer, K of all layers, V of all
 *     meta:    per cell i32 pos, u32 1, [8 bytes more where positions have several parts], i32 seq
 *     K, V:    per layer i32 type, u64 row_bytes, n_cells rows
 *     V if v_trans: per layer i32 type, u32 element_bytes, u32 n_rows, n_rows * n_cells elements
 *
 * A model may have a second cache behind the first (sliding windows), V may be missing (MLA).
 *
 * One more token makes every layer longer, so chunks cut by offset share nothing behind the first
 * layer. Here every layer's K and V begin a chunk and are cut after fixed numbers of tokens. A
 * longer sequence changes only the last chunk of each. Transposed V grows at the end of each of its
 * rows, so its rows go column by column, in groups (struct kvs_weave). Tokens and meta, which hold
 * the slot's number, have chunks of their own.
 *
 * The parser trusts no value. Where a value doesn't fit the format, parsing ends and the rest of
 * the object is cut by content; restoring never needs the format.
 */
#include "store/cut.h"

enum {
    MAGIC = 0x67677371,
    FILE_HEADER = 12,
    LAYER_HEADER = 12,
    MAX_TOKENS = 1 << 26,
    MAX_CELLS = 1 << 20,
    MAX_STREAMS = 256,
    MAX_LAYERS = 1024,
    MAX_TYPE = 255,
    MAX_ELEMENT = 16,
    MAX_ROWS = 1 << 20,
    MAX_HEAD = 4096,
    STEP = 64 << 10,      /* bytes of a chunk of tokens or meta */
    MIN_RANGE = 16 << 10, /* bytes: smaller rows put more tokens into a chunk */
    ROWS_WOVEN = 256
};

enum where { AT_FILE, AT_TOKENS, AT_CACHE, AT_STREAM, AT_META, AT_LAYER, AT_RANGES, AT_ROWS };

/* CUT: the handler decided on a piece. GO_ON: ask the handler of p->where next. */
enum verdict { GO_ON, CUT };

static uint32_t u32_at(const struct kvs_source *s, size_t offset)
{
    const uint8_t *at = s->data + s->start + offset;

    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t u64_at(const struct kvs_source *s, size_t offset)
{
    return u32_at(s, offset) | (uint64_t)u32_at(s, offset + 4) << 32;
}

static bool ahead(struct kvs_source *s, size_t len)
{
    return kvs_source_fill(s, len) >= len;
}

bool kvs_llama_looks(const uint8_t *data, size_t len)
{
    static const uint8_t magic[4] = {MAGIC & 255, MAGIC >> 8 & 255, MAGIC >> 16 & 255, MAGIC >> 24};

    /* Versions 2 and 3 are in use, 4 is proposed; all begin alike. */
    return len >= FILE_HEADER && memcmp(data, magic, 4) == 0 && data[4] >= 2 && data[4] < 16 &&
           !data[5] && !data[6] && !data[7];
}

void kvs_llama_init(struct kvs_llama *p, uint32_t chunk_tokens, size_t chunk_max)
{
    *p = (struct kvs_llama){.where = AT_FILE, .chunk_tokens = chunk_tokens, .chunk_max = chunk_max};
}

static enum verdict give_up(struct kvs_piece *ret)
{
    *ret = (struct kvs_piece){0};
    return CUT;
}

/* Cut one step of a run that goes in fixed steps, with the head before it. */
static enum verdict cut_step(struct kvs_llama *p, struct kvs_piece *ret)
{
    size_t len = (size_t)KV_MIN((uint64_t)p->step, p->left);

    p->left -= len;
    *ret = (struct kvs_piece){.len = p->head + len};
    p->head = 0;
    return CUT;
}

static enum verdict at_file(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    size_t n = kvs_source_fill(s, FILE_HEADER);
    uint32_t tokens;

    p->where = AT_CACHE;
    if (!n || !kvs_llama_looks(s->data + s->start, n))
        return GO_ON;
    tokens = u32_at(s, 8);
    if (tokens > MAX_TOKENS)
        return give_up(ret);
    p->left = FILE_HEADER + (uint64_t)tokens * 4;
    p->step = KV_MIN((size_t)STEP, p->chunk_max);
    p->where = AT_TOKENS;
    return GO_ON;
}

static enum verdict at_tokens(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    (void)s;
    if (p->left)
        return cut_step(p, ret);
    p->where = AT_CACHE;
    return GO_ON;
}

static enum verdict at_cache(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    if (p->head > MAX_HEAD || !ahead(s, p->head + 4))
        return give_up(ret);
    p->streams = u32_at(s, p->head);
    if (!p->streams || p->streams > MAX_STREAMS)
        return give_up(ret);
    p->head += 4;
    p->where = AT_STREAM;
    return GO_ON;
}

static void end_stream(struct kvs_llama *p)
{
    p->where = --p->streams ? AT_STREAM : AT_CACHE;
}

/* True when a valid stream header follows cells of @cell bytes, as it must behind meta. */
static bool meta_ends(struct kvs_llama *p, struct kvs_source *s, size_t cell)
{
    size_t end = p->head + cell * p->cells;

    if (u32_at(s, p->head + 4) != 1 || !ahead(s, end + 8 + LAYER_HEADER))
        return false;
    return u32_at(s, end) <= 1 && u32_at(s, end + 4) - 1 < MAX_LAYERS &&
           u32_at(s, end + 8) <= MAX_TYPE && u64_at(s, end + 12) - 1 < p->chunk_max;
}

static enum verdict at_stream(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    size_t cell, end;

    if (p->head > MAX_HEAD || !ahead(s, p->head + 4))
        return give_up(ret);
    p->cells = u32_at(s, p->head);
    p->head += 4;
    if (!p->cells) {
        end_stream(p);
        return GO_ON;
    }
    if (p->cells > MAX_CELLS || !ahead(s, p->head + 8))
        return give_up(ret);
    cell = meta_ends(p, s, 12) ? 12 : 20; /* 20: two more coordinates per position */
    if (cell == 20 && !meta_ends(p, s, 20))
        return give_up(ret);
    end = p->head + cell * p->cells;
    p->v_trans = u32_at(s, end);
    p->layers = p->n_layers = u32_at(s, end + 4);
    p->values = 0;
    p->left = end + 8;
    p->head = 0;
    p->step = KV_MIN((size_t)STEP, p->chunk_max);
    p->where = AT_META;
    return GO_ON;
}

static enum verdict at_meta(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    (void)s;
    if (p->left)
        return cut_step(p, ret);
    p->where = AT_LAYER;
    return GO_ON;
}

/* Tokens in a chunk of rows of @row bytes. Only the row length decides, or growth would move the
 * cuts. */
static size_t range_tokens(const struct kvs_llama *p, size_t row)
{
    size_t tokens = p->chunk_tokens, max = p->chunk_max - LAYER_HEADER;

    if (tokens * row < MIN_RANGE)
        tokens *= (MIN_RANGE + tokens * row - 1) / (tokens * row);
    while (tokens > 1 && tokens * row > max)
        tokens /= 2;
    return tokens;
}

static enum verdict at_rows_header(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t element = u32_at(s, 4), n_rows = u32_at(s, 8), row;
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
    *ret = (struct kvs_piece){.len = LAYER_HEADER};
    return CUT;
}

/* Parse the head of K or V of one layer. */
static enum verdict at_layer(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    uint64_t row;

    if (!p->layers && !p->values) {
        p->layers = p->n_layers;
        p->values = 1;
    }
    if (!p->layers) {
        end_stream(p);
        return GO_ON;
    }
    if (!ahead(s, LAYER_HEADER))
        return give_up(ret);
    if (p->values && p->v_trans)
        return u32_at(s, 0) <= MAX_TYPE ? at_rows_header(p, s, ret) : give_up(ret);
    row = u64_at(s, 4);
    if (u32_at(s, 0) > MAX_TYPE || row - 1 >= p->chunk_max - LAYER_HEADER) {
        if (!p->values)
            return give_up(ret);
        end_stream(p); /* no (more) V: another stream or cache may follow */
        return GO_ON;
    }
    p->head = LAYER_HEADER;
    p->left = row * p->cells;
    p->step = range_tokens(p, (size_t)row) * (size_t)row;
    p->where = AT_RANGES;
    return GO_ON;
}

static void end_layer(struct kvs_llama *p)
{
    p->layers--;
    p->where = AT_LAYER;
}

static enum verdict at_ranges(struct kvs_llama *p, struct kvs_source *s, struct kvs_piece *ret)
{
    (void)s;
    if (p->left)
        return cut_step(p, ret);
    end_layer(p);
    return GO_ON;
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

struct kvs_piece kvs_llama_next(struct kvs_llama *p, struct kvs_source *s)
{
    static enum verdict (*const handlers[])(struct kvs_llama *, struct kvs_source *,
                                            struct kvs_piece *) = {
        [AT_FILE] = at_file,     [AT_TOKENS] = at_tokens, [AT_CACHE] = at_cache,
        [AT_STREAM] = at_stream, [AT_META] = at_meta,     [AT_LAYER] = at_layer,
        [AT_RANGES] = at_ranges, [AT_ROWS] = at_rows,
    };
    struct kvs_piece ret = {0};

    while (handlers[p->where](p, s, &ret) == GO_ON)
        ;
    return ret;
}
