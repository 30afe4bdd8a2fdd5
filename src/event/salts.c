// SPDX-License-Identifier: Apache-2.0
#include "event/salts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "event/unique.h"

#define MIN_CAPACITY 64

void kve_salts_init(struct kve_salts *salts, size_t limit)
{
    *salts =
        (struct kve_salts){.limit = limit, .secret = kve_secret(), .rank_secret = kve_secret()};
}

void kve_salts_fini(struct kve_salts *salts)
{
    free(salts->slots);
    salts->slots = NULL;
    salts->n = salts->capacity = 0;
}

static size_t home(const struct kve_salts *salts, uint32_t rank, uint64_t hash)
{
    return kve_slot_of(hash * salts->secret + rank * salts->rank_secret, salts->capacity);
}

static size_t after(const struct kve_salts *salts, size_t i)
{
    return (i + 1) & (salts->capacity - 1);
}

struct kve_salt_entry *kve_salts_find(const struct kve_salts *salts, uint32_t rank, uint64_t hash)
{
    if (!salts->n)
        return NULL;
    for (size_t i = home(salts, rank, hash); salts->slots[i].tiers; i = after(salts, i)) {
        if (salts->slots[i].hash == hash && salts->slots[i].rank == rank)
            return &salts->slots[i];
    }
    return NULL;
}

static struct kve_salt_entry *free_slot(struct kve_salts *salts, uint32_t rank, uint64_t hash)
{
    size_t i = home(salts, rank, hash);

    while (salts->slots[i].tiers)
        i = after(salts, i);
    return &salts->slots[i];
}

static int resize(struct kve_salts *salts, size_t capacity)
{
    struct kve_salts old = *salts;

    salts->slots = calloc(capacity, sizeof(*salts->slots));
    if (!salts->slots) {
        *salts = old;
        return -ENOMEM;
    }
    salts->capacity = capacity;
    for (size_t i = 0; i < old.capacity; i++) {
        const struct kve_salt_entry *entry = &old.slots[i];

        if (entry->tiers)
            *free_slot(salts, entry->rank, entry->hash) = *entry;
    }
    free(old.slots);
    return 0;
}

int kve_salts_reserve(struct kve_salts *salts, size_t n)
{
    size_t capacity = salts->capacity ? salts->capacity : MIN_CAPACITY;

    if (n > salts->limit - salts->n)
        return -ENOSPC;
    while ((salts->n + n) * 4 > capacity * 3)
        capacity *= 2;
    return capacity == salts->capacity ? 0 : resize(salts, capacity);
}

void kve_salts_put(struct kve_salts *salts, uint32_t rank, uint64_t hash, uint64_t salt,
                   enum kv_tier tier)
{
    struct kve_salt_entry *entry = kve_salts_find(salts, rank, hash);

    if (!entry) {
        entry = free_slot(salts, rank, hash);
        *entry = (struct kve_salt_entry){.hash = hash, .salt = salt, .rank = rank};
        salts->n++;
    }
    entry->tiers |= (uint8_t)(1u << tier);
    entry->ambiguous |= entry->salt != salt;
}

/*
 * Frees slot @hole and moves up what probed across it: each entry behind it, up to the next free
 * slot, whose home isn't between the hole and itself.
 */
static void remove_at(struct kve_salts *salts, size_t hole)
{
    size_t mask = salts->capacity - 1;

    for (size_t i = after(salts, hole); salts->slots[i].tiers; i = after(salts, i)) {
        size_t wanted = home(salts, salts->slots[i].rank, salts->slots[i].hash);

        if (((i - wanted) & mask) >= ((i - hole) & mask)) {
            salts->slots[hole] = salts->slots[i];
            hole = i;
        }
    }
    salts->slots[hole].tiers = 0;
    salts->n--;
}

void kve_salts_remove(struct kve_salts *salts, uint32_t rank, uint64_t hash, enum kv_tier tier)
{
    struct kve_salt_entry *entry = kve_salts_find(salts, rank, hash);

    if (!entry)
        return;
    entry->tiers &= (uint8_t) ~(1u << tier);
    if (entry->tiers)
        return;
    entry->tiers = 1; /* in use, while it is taken out */
    remove_at(salts, (size_t)(entry - salts->slots));
    if (!salts->n)
        kve_salts_fini(salts);
}

/* What moves up into a hole may wrap around behind the scan; hence again until nothing is found. */
void kve_salts_clear(struct kve_salts *salts, uint32_t rank)
{
    size_t before;

    do {
        before = salts->n;
        for (size_t i = salts->capacity; i-- > 0 && salts->n;) {
            while (salts->slots[i].tiers && salts->slots[i].rank == rank)
                remove_at(salts, i);
        }
    } while (salts->n && salts->n != before);
    if (!salts->n)
        kve_salts_fini(salts);
}

void kve_salts_reset(struct kve_salts *salts)
{
    kve_salts_fini(salts);
}
