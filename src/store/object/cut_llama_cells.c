// SPDX-License-Identifier: Apache-2.0
/*
 * Cells of a llama.cpp state, and the fields behind them:
 *
 *     stream:     u32 n_cells; if any: cells, u32 v_trans, u32 n_layer, [u32, u32 rotations], K, V
 *     cell:       i32 pos, u32 n, [8 or 12 bytes: coordinates, token], n * i32 sequence
 *     recurrent:  u32 n_cells, cells, u32 0, u32 n_layer, R, S
 *
 * Nothing in the state says whether cells have coordinates (M-RoPE), nor whether rotation sizes
 * (file version 4) are there. The one reading is taken in which every cell is valid and a valid
 * header of rows follows. A cell names at least one sequence, except in a recurrent state.
 */
#include "store/object/cut.h"

enum {
    MAX_CELLS = 1 << 20,
    MAX_SEQUENCES = 256,
    MAX_SEQUENCE = 4096,       /* number of a sequence */
    MAX_CELL_BYTES = 32 << 20, /* of all cells of a stream, which the window holds */
    MAX_ROTATION = 1 << 16,
    RUNS_FREE = 64, /* runs that any stream may have; more when they are long */
    RUN_CELLS = 16
};

static bool ahead(struct kvs_source *s, size_t len)
{
    return kvs_source_fill(s, len) >= len;
}

bool kvs_llama_row_fits(uint32_t type, uint64_t row)
{
    /* bytes of a block of each type that a cache may have; 0: a type not known here */
    static const uint8_t blocks[] = {
        [0] = 4, [1] = 2, [2] = 18, [3] = 20, [6] = 22, [7] = 24, [8] = 34, [20] = 18, [30] = 2};
    uint32_t block = type < sizeof(blocks) ? blocks[type] : 0;

    return type <= KVS_LLAMA_TYPE_MAX && row && (!block || row % block == 0);
}

/* -- runs -------------------------------------------------------------------------------------- */

static bool extends(struct kvs_llama_run *r, uint32_t pos)
{
    if (r->n == 1 && pos - r->pos <= 1)
        r->step = pos - r->pos;
    if (pos != r->pos + r->step * r->n)
        return false;
    r->n++;
    return true;
}

/* Note the position of cell @i. Returns -ENOMEM, or 0. */
static int note(struct kvs_llama_runs *runs, uint32_t i, uint32_t pos, uint32_t cells)
{
    struct kvs_llama_run *at = runs->at;

    if (runs->n && extends(&at[runs->n - 1], pos))
        return 0;
    if (runs->n > RUNS_FREE + cells / RUN_CELLS)
        return 0; /* scattered cells: replaced by one run below */
    if (runs->n == runs->capacity) {
        size_t capacity = KV_MAX(runs->capacity * 2, (size_t)16);

        at = realloc(at, capacity * sizeof(*at));
        if (!at)
            return -ENOMEM;
        runs->at = at;
        runs->capacity = capacity;
    }
    at[runs->n++] = (struct kvs_llama_run){.first = i, .n = 1, .pos = pos, .step = 1};
    return 0;
}

/* Cells of sequences that grow in turns have no runs. Count such cells instead, so that they are
 * cut in equal ranges, rather than one by one. */
static void end_notes(struct kvs_llama_runs *runs, uint32_t cells)
{
    if (runs->n > RUNS_FREE + cells / RUN_CELLS) {
        runs->at[0] = (struct kvs_llama_run){.n = cells, .step = 1};
        runs->n = 1;
    }
}

/* -- cells ------------------------------------------------------------------------------------- */

/* Read one cell with @ext bytes of coordinates at byte *@at, and move *@at behind it. */
static bool read_cell(struct kvs_source *s, size_t *at, size_t ext, uint32_t least,
                      uint32_t *ret_pos)
{
    uint32_t n;

    if (*at > MAX_CELL_BYTES || !ahead(s, *at + 8 + ext))
        return false;
    *ret_pos = kvs_llama_u32(s, *at);
    n = kvs_llama_u32(s, *at + 4);
    if (*ret_pos > INT32_MAX || n < least || n > MAX_SEQUENCES)
        return false;
    *at += 8 + ext;
    if (!ahead(s, *at + 4 * (size_t)n))
        return false;
    for (; n; n--, *at += 4)
        if (kvs_llama_u32(s, *at) >= MAX_SEQUENCE)
            return false;
    return true;
}

/* Return the offset behind @cells cells at byte @at; 0 when they aren't valid. */
static size_t read_cells(struct kvs_source *s, size_t at, uint32_t cells, size_t ext,
                         struct kvs_llama_runs *runs)
{
    if (runs)
        runs->n = 0;
    for (uint32_t i = 0; i < cells; i++) {
        uint32_t pos;

        if (!read_cell(s, &at, ext, 1, &pos))
            return 0;
        if (runs && note(runs, i, pos, cells)) {
            s->error = -ENOMEM;
            return 0;
        }
    }
    if (runs)
        end_notes(runs, cells);
    return at;
}

/* Return whether the header of a layer's rows lies at byte @at. */
static bool header_at(const struct kvs_llama *p, struct kvs_source *s, size_t at)
{
    return ahead(s, at + KVS_LLAMA_ROW_HEADER) &&
           kvs_llama_row_fits(kvs_llama_u32(s, at), kvs_llama_u64(s, at + 4)) &&
           kvs_llama_u64(s, at + 4) <= p->chunk_max - KVS_LLAMA_ROW_HEADER;
}

/* Read the fields behind the cells, with or without rotation sizes. Returns their bytes, or 0. */
static size_t read_fields(const struct kvs_llama *p, struct kvs_source *s, size_t at,
                          bool rotations)
{
    if (!ahead(s, at + (rotations ? 16 : 8)) || kvs_llama_u32(s, at) > 1 ||
        kvs_llama_u32(s, at + 4) - 1 >= KVS_LLAMA_LAYERS_MAX)
        return 0;
    if (!rotations)
        return header_at(p, s, at + 8) ? 8 : 0;
    return kvs_llama_u32(s, at + 8) <= MAX_ROTATION && kvs_llama_u32(s, at + 12) <= MAX_ROTATION &&
                   header_at(p, s, at + 16)
               ? 16
               : 0;
}

bool kvs_llama_stream_at(const struct kvs_llama *p, struct kvs_source *s, size_t at,
                         struct kvs_llama_runs *runs, struct kvs_llama_stream *ret)
{
    static const size_t exts[] = {0, 8, 12};

    if (!ahead(s, at + 4))
        return false;
    *ret = (struct kvs_llama_stream){.cells = kvs_llama_u32(s, at)};
    if (!ret->cells || ret->cells > MAX_CELLS)
        return false;
    for (size_t i = 0; i < KV_COUNT(exts); i++) {
        size_t end = read_cells(s, at + 4, ret->cells, exts[i], runs), fields = 0;

        if (end)
            fields = read_fields(p, s, end, p->rotations);
        if (end && !fields)
            fields = read_fields(p, s, end, !p->rotations);
        if (!fields)
            continue;
        ret->v_trans = kvs_llama_u32(s, end);
        ret->layers = kvs_llama_u32(s, end + 4);
        ret->len = end + fields - at;
        return true;
    }
    return false;
}

/* -- caches ------------------------------------------------------------------------------------ */

size_t kvs_llama_recurrent_at(struct kvs_source *s, size_t at, uint32_t *ret_cells,
                              uint32_t *ret_layers)
{
    size_t end = at + 4;
    uint32_t pos;

    if (!ahead(s, end))
        return 0;
    *ret_cells = kvs_llama_u32(s, at);
    if (!*ret_cells || *ret_cells > MAX_SEQUENCES)
        return 0;
    for (uint32_t i = 0; i < *ret_cells; i++)
        if (!read_cell(s, &end, 0, 0, &pos))
            return 0;
    if (!ahead(s, end + 8 + KVS_LLAMA_ROW_HEADER) || kvs_llama_u32(s, end))
        return 0;
    *ret_layers = kvs_llama_u32(s, end + 4);
    if (!*ret_layers || *ret_layers > KVS_LLAMA_LAYERS_MAX ||
        !kvs_llama_row_fits(kvs_llama_u32(s, end + 8), kvs_llama_u64(s, end + 12)) ||
        kvs_llama_u64(s, end + 12) > KVS_LLAMA_STATE_ROW_MAX)
        return 0;
    return end + 8 - at;
}

enum kvs_llama_cache kvs_llama_cache_at(const struct kvs_llama *p, struct kvs_source *s, size_t at)
{
    struct kvs_llama_stream stream;
    uint32_t streams, empty = 0, cells, layers;

    if (!ahead(s, at + 8))
        return KVS_LLAMA_NONE;
    streams = kvs_llama_u32(s, at);
    if (streams - 1 < KVS_LLAMA_STREAMS_MAX) {
        while (empty < streams && ahead(s, at + 8 + 4 * (size_t)empty) &&
               !kvs_llama_u32(s, at + 4 + 4 * (size_t)empty))
            empty++;
        if (empty < streams && kvs_llama_stream_at(p, s, at + 4 + 4 * (size_t)empty, NULL, &stream))
            return KVS_LLAMA_STREAMS;
    }
    if (kvs_llama_recurrent_at(s, at, &cells, &layers))
        return KVS_LLAMA_RECURRENT;
    return streams && empty == streams ? KVS_LLAMA_STREAMS : KVS_LLAMA_NONE;
}
