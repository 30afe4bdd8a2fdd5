// SPDX-License-Identifier: Apache-2.0
/**
 * Things that have a name, found by it and kept in the order of their last use: bookings, sessions.
 *
 *     buckets --> name --> name          oldest <-> ... <-> newest
 *
 * The owner embeds struct kvsel_name as its struct's first member, and owns name and text. A name is
 * any bytes, also none.
 */
#ifndef KV_SELECT_NAMES_H
#define KV_SELECT_NAMES_H

#include <stddef.h>
#include <stdint.h>

struct kvsel_name {
    struct kvsel_name *next;          /* in its bucket */
    struct kvsel_name *older, *newer; /* by use */
    uint64_t mix;
    const char *text;
    size_t len;
};

/** Invariant: n names are in the buckets, and the same n in the list. */
struct kvsel_names {
    struct kvsel_name **buckets; /* mask + 1 of them */
    size_t mask;
    size_t n;
    struct kvsel_name *oldest, *newest;
};

/** Make an empty set. Returns 0 or -ENOMEM. */
int kvsel_names_init(struct kvsel_names *names);
/** Free the set's own memory, not that of names in it. */
void kvsel_names_fini(struct kvsel_names *names);

/** Return the one of this name, or NULL. */
struct kvsel_name *kvsel_names_find(const struct kvsel_names *names, const char *text, size_t len);
/** Add @name, whose text and len are set and not in the set yet, as the newest. */
void kvsel_names_add(struct kvsel_names *names, struct kvsel_name *name);
/** Make @name the newest. */
void kvsel_names_touch(struct kvsel_names *names, struct kvsel_name *name);
void kvsel_names_remove(struct kvsel_names *names, struct kvsel_name *name);

#endif
