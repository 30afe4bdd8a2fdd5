// SPDX-License-Identifier: Apache-2.0
/**
 * Names of instances (base/args/instance.h), by their numbers. The index and the streams know numbers
 * alone; answers give back the names that clients gave.
 *
 * A name is needed as long as its instance has a registration, a removal note, or blocks from a
 * peer's dump. Nothing counts these: when the table has twice the names that were needed at the last
 * sweep, its owner marks the needed ones and sweeps the others out. So the table holds at most twice
 * what the tables of the registry hold, and KI_NAMES_SPARE.
 *
 * Threads: one writer at a time (the registry's admin lock); readers of any thread between
 * ki_names_read and ki_names_end, which may not wait, nor take another lock of the registry.
 */
#ifndef KV_INDEXER_REGISTRY_NAMES_H
#define KV_INDEXER_REGISTRY_NAMES_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/args/instance.h"

#define KI_NAMES_SPARE 64 /* names beside the needed ones, however few these are */

/** A name. Immutable for readers. */
struct ki_name {
    uint64_t number;
    const char *key; /* key of a JSON member: quoted, escaped, with its colon */
    uint32_t key_len;
    bool needed; /* the writer's: marked since the last sweep */
    char text[]; /* NUL-terminated; then the key */
};

/** A hash table by number. */
struct ki_names {
    pthread_rwlock_t lock;
    struct ki_name **slots; /* linear probing; NULL: free */
    size_t n_slots;         /* 0 or a power of two, more than twice n */
    size_t n;
    size_t sweep_at; /* number of names at which the next sweep is due */
};

void ki_names_init(struct ki_names *names);
void ki_names_fini(struct ki_names *names);

/** Begin to read. Names are valid until ki_names_end. */
void ki_names_read(struct ki_names *names);
void ki_names_end(struct ki_names *names);
/** Find the name of a number, between ki_names_read and _end, or as the writer. NULL: it has none. */
const struct ki_name *ki_names_find(const struct ki_names *names, uint64_t number);

/**
 * Note that @number is @name's, as the writer. Returns 1, or 0 when that is known; -EEXIST when it
 * is another name's, -ENOMEM.
 */
int ki_names_note(struct ki_names *names, uint64_t number, const char *name);

/** Return true when the owner should mark and sweep before it notes another name. */
bool ki_names_sweep_is_due(const struct ki_names *names);
void ki_names_mark(struct ki_names *names, uint64_t number);
/** Forget the names that weren't marked since the last sweep. */
void ki_names_sweep(struct ki_names *names);

#endif
