// SPDX-License-Identifier: Apache-2.0
/** Workers of a source that tells of them one by one, by key: pods, keys of etcd. One thread. */
#ifndef KV_INDEXER_DISCOVER_TABLE_H
#define KV_INDEXER_DISCOVER_TABLE_H

#include "indexer/discover/source.h"

struct ki_table_entry {
    char *key;
    struct ki_found_set set; /* its ranks, or why it has none */
    uint64_t round;          /* of the list that has seen it */
};

/** Zero-initialise, with `changed` set so that an empty source is published, too. Sorted by key. */
struct ki_table {
    struct ki_table_entry *entries;
    size_t n, capacity;
    uint64_t round;
    bool changed; /* since ki_table_publish */
    int fault;    /* since ki_table_begin: -ENOSPC or -ENOMEM, a key isn't there; 0: all are */
};

void ki_table_fini(struct ki_table *table);
/** Note what @key is now; takes *@set over. Returns 0, -ENOMEM, or -ENOSPC: KI_MAX_FOUND keys are there. */
int ki_table_put(struct ki_table *table, const char *key, struct ki_found_set *set);
/** Note that @key is gone. */
void ki_table_remove(struct ki_table *table, const char *key);
/** Begin a list of all keys; the end removes those that it hasn't put. */
void ki_table_begin(struct ki_table *table);
void ki_table_end(struct ki_table *table);
/** Say in words why a key isn't there. */
const char *ki_table_fault(const struct ki_table *table);
/** Publish all ranks if any has changed, else confirm the last set. Fails while a key isn't there. */
void ki_table_publish(struct ki_table *table, struct ki_source *source);

#endif
