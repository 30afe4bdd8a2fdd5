// SPDX-License-Identifier: Apache-2.0
/** Workers of a source that tells of them one by one, by key: pods, keys of etcd. One thread. */
#ifndef KV_INDEXER_DISCOVER_TABLE_H
#define KV_INDEXER_DISCOVER_TABLE_H

#include "indexer/discover/source.h"

struct ki_table_entry {
    char *key;
    struct ki_found_set set; /* its ranks; none: it is no worker now */
    uint64_t round;          /* of the list that has seen it */
};

/** Zero-initialise, with `changed` set so that an empty source is published, too. Sorted by key. */
struct ki_table {
    struct ki_table_entry *entries;
    size_t n, capacity;
    uint64_t round;
    bool changed; /* since ki_table_publish */
};

void ki_table_fini(struct ki_table *table);
/** Note what @key is now; takes *@set over. Returns 0 or -ENOMEM. */
int ki_table_put(struct ki_table *table, const char *key, struct ki_found_set *set);
/** Note that @key is gone. */
void ki_table_remove(struct ki_table *table, const char *key);
/** Begin a list of all keys; the end removes those that it hasn't put. */
void ki_table_begin(struct ki_table *table);
void ki_table_end(struct ki_table *table);
/** Publish all ranks if any has changed, else confirm the last set. */
void ki_table_publish(struct ki_table *table, struct ki_source *source);

#endif
