// SPDX-License-Identifier: Apache-2.0
/**
 * Places: in which member a handle saw a blob last. A table of fixed size; what is old makes room. A
 * place is a hint, and may be wrong: whoever goes by it asks the other members, too.
 */
#ifndef KV_TIERED_PLACES_H
#define KV_TIERED_PLACES_H

#include <stddef.h>
#include <stdint.h>

struct trd_places;

/** Make a table of at least @n places, 8 bytes each. Returns 0 or -ENOMEM. */
int trd_places_create(uint64_t n, struct trd_places **ret);
void trd_places_destroy(struct trd_places *places);

/** Return the member (0 to 15) that was noted for a key; -1: unknown. Any thread, without a lock. */
int trd_places_find(const struct trd_places *places, const void *hash, size_t hash_len);

/** Note that @member (0 to 15) has the key's blob. Any thread, without a lock. */
void trd_places_note(struct trd_places *places, const void *hash, size_t hash_len, unsigned member);

/** Forget the place of a key. Any thread, without a lock. */
void trd_places_forget(struct trd_places *places, const void *hash, size_t hash_len);

#endif
