// SPDX-License-Identifier: Apache-2.0
/*
 * A layout as bytes for another process (docs/formats.md, "Layouts"): little-endian, fixed width,
 *
 *   magic, version, length | config | strides (the reader checks them) | places | XXH3-64
 */
#include <endian.h>
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/xxh.h"
#include "bm/storage/layout.h"

#define MAGIC "KVBMLYT\n"
#define VERSION 1
#define HEAD_BYTES 104
#define PLACE_BYTES 40
#define SUM_BYTES 8

/* ---- writing ---- */

static uint8_t *put32(uint8_t *to, uint64_t value)
{
    uint32_t le = htole32((uint32_t)value);

    memcpy(to, &le, sizeof(le));
    return to + sizeof(le);
}

static uint8_t *put64(uint8_t *to, uint64_t value)
{
    uint64_t le = htole64(value);

    memcpy(to, &le, sizeof(le));
    return to + sizeof(le);
}

static uint8_t *put_head(uint8_t *to, const struct kvbm_layout *layout, size_t len)
{
    const struct kvbm_layout_config *c = &layout->config;
    const struct kvbm_layout_shape *s = &layout->shape;
    const uint64_t numbers[] = {VERSION,      len,          c->kind,      c->num_layers,
                                c->outer_dim, c->page_size, c->inner_dim, c->dtype_width_bytes,
                                c->alignment, c->num_heads, c->dtype,     c->order};

    memcpy(to, MAGIC, 8);
    to += 8;
    for (size_t i = 0; i < KV_COUNT(numbers); i++)
        to = put32(to, numbers[i]);
    to = put64(to, c->num_blocks);
    to = put64(to, s->region_bytes);
    to = put64(to, s->outer_stride);
    to = put64(to, s->layer_stride);
    to = put64(to, s->block_stride);
    to = put32(to, layout->n);
    return put32(to, 0);
}

static uint8_t *put_place(uint8_t *to, const struct kvbm_place *place)
{
    to = put64(to, place->storage_addr);
    to = put64(to, place->storage_bytes);
    to = put64(to, place->addr);
    to = put64(to, place->device_id);
    to = put32(to, place->kind);
    return put32(to, 0);
}

long kvbm_layout_serialise(const struct kvbm_layout *layout, void *to, size_t cap, size_t *needed)
{
    size_t len = layout ? HEAD_BYTES + (size_t)layout->n * PLACE_BYTES + SUM_BYTES : 0;
    uint8_t *at = to;

    if (!layout)
        return -EINVAL;
    if (needed)
        *needed = len;
    if (!to || cap < len)
        return -ENOSPC;
    at = put_head(at, layout, len);
    for (uint32_t i = 0; i < layout->n; i++)
        at = put_place(at, &layout->places[i]);
    put64(at, kv_xxh64(to, len - SUM_BYTES, 0));
    return (long)len;
}

/* ---- reading ---- */

static uint32_t get32(const uint8_t **at)
{
    uint32_t le;

    memcpy(&le, *at, sizeof(le));
    *at += sizeof(le);
    return le32toh(le);
}

static uint64_t get64(const uint8_t **at)
{
    uint64_t le;

    memcpy(&le, *at, sizeof(le));
    *at += sizeof(le);
    return le64toh(le);
}

static int check_frame(const uint8_t *data, size_t len)
{
    const uint8_t *at = data + 8, *end;
    uint32_t version, said;

    if (len < 16 || memcmp(data, MAGIC, 8) != 0)
        return -EPROTO;
    version = get32(&at);
    said = get32(&at);
    if (version > VERSION) /* a newer version: only its number is understood */
        return -EPROTONOSUPPORT;
    if (version != VERSION || said != len || len < HEAD_BYTES + PLACE_BYTES + SUM_BYTES)
        return -EPROTO;
    end = data + len - SUM_BYTES;
    if (kv_xxh64(data, len - SUM_BYTES, 0) != get64(&end))
        return -EPROTO;
    return 0;
}

static struct kvbm_layout_config get_config(const uint8_t **at)
{
    struct kvbm_layout_config c = {.size = sizeof(c)};

    c.kind = get32(at);
    c.num_layers = get32(at);
    c.outer_dim = get32(at);
    c.page_size = get32(at);
    c.inner_dim = get32(at);
    c.dtype_width_bytes = get32(at);
    c.alignment = get32(at);
    c.num_heads = get32(at);
    c.dtype = get32(at);
    c.order = get32(at);
    c.num_blocks = get64(at);
    return c;
}

static bool same_strides(const struct kvbm_layout_shape *s, const uint8_t **at)
{
    bool same = s->region_bytes == get64(at);

    same = s->outer_stride == get64(at) && same;
    same = s->layer_stride == get64(at) && same;
    return s->block_stride == get64(at) && same;
}

/* Read a place. Its storage must be one that kvbm_layout_create would accept for the layout. */
static bool get_place(const struct kvbm_layout *layout, struct kvbm_place *p, const uint8_t **at)
{
    const struct kvbm_place *first = &layout->places[0];
    uint64_t alignment = layout->config.alignment;

    p->storage_addr = get64(at);
    p->storage_bytes = get64(at);
    p->addr = get64(at);
    p->device_id = get64(at);
    p->kind = get32(at);
    if (get32(at) || p->kind < KVBM_STORAGE_SYSTEM || p->kind > KVBM_STORAGE_NULL ||
        p->kind == KVBM_STORAGE_EXTERNAL) /* external memory states its own kind */
        return false;
    if (p->kind != first->kind ||
        (p->kind != KVBM_STORAGE_DISK && p->device_id != first->device_id))
        return false;
    if (p->addr % alignment || p->addr < p->storage_addr || p->addr - p->storage_addr >= alignment)
        return false;
    if (p->storage_bytes > UINT64_MAX - p->storage_addr)
        return false;
    return p->addr - p->storage_addr <= p->storage_bytes &&
           p->storage_bytes - (p->addr - p->storage_addr) >= layout->shape.data_bytes;
}

int kvbm_layout_deserialise(const void *data, size_t len, struct kvbm_layout **ret)
{
    const uint8_t *at = data;
    struct kvbm_layout_config config;
    struct kvbm_layout *layout;
    bool sound;
    int err = data && ret ? check_frame(data, len) : -EINVAL;

    if (err != 0)
        return err;
    at += 16;
    config = get_config(&at);
    /* before anything is allocated for them */
    if ((config.kind == KVBM_FULLY_CONTIGUOUS ? 1 : (uint64_t)config.num_layers) * PLACE_BYTES !=
            len - HEAD_BYTES - SUM_BYTES ||
        config.kind == KVBM_LAYER_SEPARATE || !config.dtype_width_bytes || !config.alignment)
        return -EPROTO; /* defaults are for callers; the bytes have all values */
    err = kvbm_layout_new(&config, &layout);
    if (err < 0)
        return err == -ENOMEM ? err : -EPROTO;
    sound = same_strides(&layout->shape, &at);
    sound = get32(&at) == layout->n && sound;
    sound = get32(&at) == 0 && sound;
    for (uint32_t i = 0; sound && i < layout->n; i++)
        sound = get_place(layout, &layout->places[i], &at);
    if (!sound) {
        kvbm_layout_destroy(layout);
        return -EPROTO;
    }
    *ret = layout;
    return 0;
}
