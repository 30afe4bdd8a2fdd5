// SPDX-License-Identifier: Apache-2.0
#include "indexer/discover/table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void free_entry(struct ki_table_entry *e)
{
    ki_found_set_fini(&e->set);
    free(e->key);
}

void ki_table_fini(struct ki_table *table)
{
    for (size_t i = 0; i < table->n; i++)
        free_entry(&table->entries[i]);
    free(table->entries);
}

/* Find where @key is, or belongs. */
static size_t bound(const struct ki_table *table, const char *key)
{
    size_t low = 0, high = table->n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (strcmp(table->entries[mid].key, key) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static bool is_at(const struct ki_table *table, size_t at, const char *key)
{
    return at < table->n && strcmp(table->entries[at].key, key) == 0;
}

/* Insert an entry. Returns NULL without memory. */
static struct ki_table_entry *insert(struct ki_table *table, size_t at, const char *key)
{
    size_t capacity = KV_MAX(2 * table->capacity, (size_t)16);
    struct ki_table_entry *grown;
    char *copy;

    if (table->n == table->capacity) {
        grown = realloc(table->entries, capacity * sizeof(*grown));
        if (!grown)
            return NULL;
        table->entries = grown;
        table->capacity = capacity;
    }
    copy = strdup(key);
    if (!copy)
        return NULL;
    memmove(&table->entries[at + 1], &table->entries[at],
            (table->n - at) * sizeof(*table->entries));
    table->entries[at] = (struct ki_table_entry){.key = copy};
    table->n++;
    return &table->entries[at];
}

/* Find the entry of @key, or make it. Returns NULL, and notes why, when there is no room. */
static struct ki_table_entry *find_or_insert(struct ki_table *table, const char *key)
{
    struct ki_table_entry *e;
    size_t at = bound(table, key);

    if (is_at(table, at, key))
        return &table->entries[at];
    if (table->n >= KI_MAX_FOUND) { /* those of a list that wasn't ended may go */
        ki_table_end(table);
        at = bound(table, key);
    }
    if (table->n >= KI_MAX_FOUND) {
        table->fault = -ENOSPC;
        return NULL;
    }
    e = insert(table, at, key);
    if (!e)
        table->fault = -ENOMEM;
    return e;
}

int ki_table_put(struct ki_table *table, const char *key, struct ki_found_set *set)
{
    struct ki_table_entry *e = find_or_insert(table, key);

    if (!e) {
        ki_found_set_fini(set);
        return table->fault;
    }
    table->changed |= !ki_found_sets_equal(&e->set, set);
    ki_found_set_fini(&e->set);
    e->set = *set;
    e->round = table->round;
    *set = (struct ki_found_set){0};
    return 0;
}

static void remove_at(struct ki_table *table, size_t at)
{
    struct ki_table_entry *e = &table->entries[at];

    table->changed |= e->set.n || e->set.left_out;
    free_entry(e);
    memmove(e, e + 1, (table->n - at - 1) * sizeof(*e));
    table->n--;
}

void ki_table_remove(struct ki_table *table, const char *key)
{
    size_t at = bound(table, key);

    if (is_at(table, at, key))
        remove_at(table, at);
}

void ki_table_begin(struct ki_table *table)
{
    table->round++;
    table->fault = 0;
}

void ki_table_end(struct ki_table *table)
{
    size_t kept = 0;

    for (size_t i = 0; i < table->n; i++) {
        struct ki_table_entry *e = &table->entries[i];

        if (e->round == table->round) {
            table->entries[kept++] = *e;
            continue;
        }
        table->changed |= e->set.n || e->set.left_out;
        free_entry(e);
    }
    table->n = kept;
}

const char *ki_table_fault(const struct ki_table *table)
{
    return table->fault == -ENOSPC ? "too many keys, or pods" : "out of memory";
}

void ki_table_publish(struct ki_table *table, struct ki_source *source)
{
    struct ki_found_set all = {0};
    struct kv_error why = {0};
    int rc = 0;

    if (table->fault < 0) {
        ki_source_failed(source, "%s", ki_table_fault(table));
        return;
    }
    if (!table->changed) {
        ki_source_confirm(source);
        return;
    }
    for (size_t i = 0; i < table->n && rc == 0; i++) {
        const struct ki_table_entry *e = &table->entries[i];

        for (size_t r = 0; r < e->set.n && rc == 0; r++)
            rc = ki_found_add(&all, &e->set.items[r], &why);
        if (e->set.left_out && !all.left_out)
            memcpy(all.why, e->set.why, sizeof(all.why));
        all.left_out += e->set.left_out;
    }
    if (rc == 0) {
        table->changed = false;
        ki_source_publish(source, &all);
    } else {
        ki_source_failed(source, "%s", why.text);
    }
    ki_found_set_fini(&all);
}
