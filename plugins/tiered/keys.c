// SPDX-License-Identifier: Apache-2.0
#include "tiered/keys.h"

#include "base/core/error.h"

enum { FIRST = 64 };

static XXH128_hash_t *slot_of(const struct trd_keys *keys, XXH128_hash_t key)
{
    size_t i = key.high64 & (keys->capacity - 1);

    while (keys->slots[i].low64 && !XXH128_isEqual(keys->slots[i], key))
        i = (i + 1) & (keys->capacity - 1);
    return &keys->slots[i];
}

static XXH128_hash_t digest(const void *hash, size_t hash_len)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);

    key.low64 |= 1;
    return key;
}

static int grow(struct trd_keys *keys)
{
    struct trd_keys wider = {.n = keys->n, .capacity = keys->capacity ? 2 * keys->capacity : FIRST};

    wider.slots = calloc(wider.capacity, sizeof(*wider.slots));
    if (!wider.slots)
        return -ENOMEM;
    for (size_t i = 0; i < keys->capacity; i++)
        if (keys->slots[i].low64)
            *slot_of(&wider, keys->slots[i]) = keys->slots[i];
    free(keys->slots);
    *keys = wider;
    return 0;
}

int trd_keys_add(struct trd_keys *keys, const void *hash, size_t hash_len)
{
    XXH128_hash_t key = digest(hash, hash_len), *slot;

    if (2 * keys->n >= keys->capacity && grow(keys) < 0)
        return -ENOMEM;
    slot = slot_of(keys, key);
    if (slot->low64)
        return 0;
    *slot = key;
    keys->n++;
    return 1;
}

bool trd_keys_has(const struct trd_keys *keys, const void *hash, size_t hash_len)
{
    return keys->n > 0 && slot_of(keys, digest(hash, hash_len))->low64;
}

void trd_keys_fini(struct trd_keys *keys)
{
    free(keys->slots);
    *keys = (struct trd_keys){0};
}

/* -- keys that wait for a publication ---------------------------------------------------------- */

void trd_pending_add(struct trd_pending *pending, const void *hash, size_t hash_len)
{
    int rc;

    if (pending->set.n >= TRD_PENDING_MAX && !trd_keys_has(&pending->set, hash, hash_len)) {
        pending->many = true;
        return;
    }
    rc = trd_keys_add(&pending->set, hash, hash_len);
    if (rc == 1) {
        kv_buf_putc(&pending->keys, (char)hash_len);
        kv_buf_append(&pending->keys, hash, hash_len);
    }
    pending->many |= rc < 0 || pending->keys.error;
}

bool trd_pending_next(const struct trd_pending *pending, size_t *at, const uint8_t **ret_hash,
                      size_t *ret_len)
{
    const uint8_t *next = (const uint8_t *)pending->keys.data + *at;

    if (pending->keys.error || *at >= pending->keys.len)
        return false;
    *ret_len = *next;
    *ret_hash = next + 1;
    *at += 1 + *ret_len;
    return true;
}

void trd_pending_merge(struct trd_pending *pending, const struct trd_pending *more)
{
    const uint8_t *hash;
    size_t at = 0, len;

    while (trd_pending_next(more, &at, &hash, &len))
        trd_pending_add(pending, hash, len);
    pending->many |= more->many;
}

void trd_pending_subtract(struct trd_pending *pending, const struct trd_pending *other)
{
    struct trd_pending rest = {.many = pending->many};
    const uint8_t *hash;
    size_t at = 0, len;

    while (trd_pending_next(pending, &at, &hash, &len))
        if (!trd_keys_has(&other->set, hash, len))
            trd_pending_add(&rest, hash, len);
    trd_pending_fini(pending);
    *pending = rest;
}

void trd_pending_fini(struct trd_pending *pending)
{
    trd_keys_fini(&pending->set);
    kv_buf_fini(&pending->keys);
    pending->many = false;
}
