// SPDX-License-Identifier: Apache-2.0
/* Bodies of the requests about blocks, written and read. */
#include "peer/lease/lease_wire.h"

#include "base/core/error.h"
#include "base/core/le.h"

#define ASKED_BYTES 24
#define TOLD_BYTES 16
#define WANTED_BYTES 16
#define PUSHED_BYTES (WANTED_BYTES + 8)
#define WANT_SUMS 1u

static void put64(struct kv_buf *to, uint64_t value)
{
    uint8_t le[8];

    kv_put_le64(le, value);
    kv_buf_append(to, le, sizeof(le));
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)kv_get_le(at, 4);
}

void kvbm_asked_write(struct kv_buf *to, const struct kvbm_asked *asked, uint32_t key_len)
{
    put64(to, asked->generation);
    kvbm_put32(to, asked->set);
    kvbm_put32(to, asked->group);
    kvbm_put32(to, asked->n);
    kvbm_put32(to, asked->time_ms);
    kv_buf_append(to, asked->keys, (size_t)asked->n * key_len);
}

int kvbm_asked_read(const void *body, size_t len, uint32_t key_len, struct kvbm_asked *ret)
{
    const uint8_t *at = body;

    if (len < ASKED_BYTES)
        return -EPROTO;
    *ret = (struct kvbm_asked){.generation = kv_get_le64(at),
                               .set = get32(at + 8),
                               .group = get32(at + 12),
                               .n = get32(at + 16),
                               .time_ms = get32(at + 20),
                               .keys = at + ASKED_BYTES};
    return ret->n && ret->n <= KVBM_MAX_ASKED && ret->group < KVBM_MAX_GROUPS &&
                   len - ASKED_BYTES == (size_t)ret->n * key_len
               ? 0
               : -EPROTO;
}

void kvbm_told_write(struct kv_buf *to, uint64_t id, uint32_t time_ms, uint32_t n)
{
    put64(to, id);
    kvbm_put32(to, time_ms);
    kvbm_put32(to, n);
}

int kvbm_told_read(const void *body, size_t len, uint32_t n, struct kvbm_told *ret)
{
    const uint8_t *at = body;

    if (len < TOLD_BYTES)
        return -EPROTO;
    *ret = (struct kvbm_told){.id = kv_get_le64(at),
                              .time_ms = get32(at + 8),
                              .n = get32(at + 12),
                              .generations = at + TOLD_BYTES};
    if (ret->n > n || len - TOLD_BYTES != (size_t)ret->n * 12 || !ret->time_ms)
        return -EPROTO;
    ret->blocks = ret->generations + (size_t)ret->n * 8;
    return 0;
}

void kvbm_renewal_write(struct kv_buf *to, uint64_t id, uint32_t time_ms)
{
    put64(to, id);
    put64(to, time_ms);
}

int kvbm_renewal_read(const void *body, size_t len, uint64_t *id, uint32_t *time_ms)
{
    const uint8_t *at = body;

    if (len != 16 || get32(at + 12))
        return -EPROTO;
    *id = kv_get_le64(at);
    *time_ms = get32(at + 8);
    return 0;
}

void kvbm_number_write(struct kv_buf *to, uint64_t number)
{
    put64(to, number);
}

int kvbm_number_read(const void *body, size_t len, uint64_t *ret)
{
    if (len != 8)
        return -EPROTO;
    *ret = kv_get_le64(body);
    return 0;
}

static void put_wanted(struct kv_buf *to, uint64_t id, bool sums, uint32_t n)
{
    put64(to, id);
    kvbm_put32(to, sums ? WANT_SUMS : 0);
    kvbm_put32(to, n);
}

static int get_wanted(const uint8_t *at, size_t head, size_t len, struct kvbm_wanted *ret)
{
    uint32_t flags;

    if (len < head)
        return -EPROTO;
    flags = get32(at + 8);
    *ret = (struct kvbm_wanted){.id = kv_get_le64(at),
                                .sums = flags == WANT_SUMS,
                                .n = get32(at + 12),
                                .places = at + head};
    return flags <= WANT_SUMS && ret->n && ret->n <= KVBM_MAX_ASKED &&
                   len - head == (size_t)ret->n * 4
               ? 0
               : -EPROTO;
}

void kvbm_wanted_write(struct kv_buf *to, uint64_t id, bool sums, const uint32_t *places,
                       uint32_t n)
{
    put_wanted(to, id, sums, n);
    for (uint32_t i = 0; i < n; i++)
        kvbm_put32(to, places[i]);
}

int kvbm_wanted_read(const void *body, size_t len, struct kvbm_wanted *ret)
{
    return get_wanted(body, WANTED_BYTES, len, ret);
}

void kvbm_pushed_write(struct kv_buf *to, uint64_t id, bool sums, uint64_t tag,
                       const uint32_t *places, uint32_t n)
{
    put_wanted(to, id, sums, n);
    put64(to, tag);
    for (uint32_t i = 0; i < n; i++)
        kvbm_put32(to, places[i]);
}

int kvbm_pushed_read(const void *body, size_t len, struct kvbm_wanted *ret, uint64_t *tag)
{
    int err = get_wanted(body, PUSHED_BYTES, len, ret);

    if (err == 0)
        *tag = kv_get_le64((const uint8_t *)body + WANTED_BYTES);
    return err;
}
