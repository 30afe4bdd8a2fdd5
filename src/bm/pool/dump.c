// SPDX-License-Identifier: Apache-2.0
/* Human-readable reports: kvbm_pool_dump, and the list of held blocks when a pool can't be
 * destroyed. Blocks are copied in pieces with the lock and printed without it: a terminal may be
 * slow, a pool may have millions of blocks, and the loader has locks of its own (dladdr). */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/pool/pool.h"

#define PIECE 32        /* blocks printed between two lock periods */
#define LOOKED_AT 16384 /* blocks examined in one lock period */
#define MOST_LEAKS 100  /* lines in the log */
#define WHERE_LEN 320   /* bytes of where_text: a path and a name */

/* Copy of a block's state. */
struct row {
    struct kvbm_slot slot;
    uint32_t block;
    uint32_t position;
    uint64_t retained_ns; /* end of the priority; 0: none */
    uint32_t n_tokens;    /* tokens of a partial block */
    uint8_t group;
    uint8_t tiers;
    uint8_t key[KVBM_MAX_KEY];
    void *acquired;
};

static bool is_held(const struct kvbm_slot *slot)
{
    return slot->refs > 0;
}

static bool is_used(const struct kvbm_slot *slot)
{
    return slot->refs > 0 || slot->state != KVBM_RESET;
}

static void copy_row(const struct kvbm_pool *pool, uint32_t i, struct row *ret)
{
    *ret = (struct row){.slot = pool->slots[i], .block = i - 1};
    if (pool->acquired && ret->slot.refs)
        ret->acquired = pool->acquired[i];
    ret->retained_ns = kvbm_retain_end(pool, i);
    if (ret->slot.state == KVBM_PARTIAL)
        ret->n_tokens = kvbm_slot_start(pool, &ret->slot)->n_tokens;
    if (ret->slot.entry) {
        const struct kvbm_entry *e = kvbm_slot_entry(pool, &ret->slot);

        ret->position = e->position;
        ret->group = e->group;
        ret->tiers = e->tiers;
        memcpy(ret->key, e->key, pool->registry->key_len);
    }
}

/*
 * Copy up to @cap blocks that are @wanted, from slot *@at on, and move *@at behind them. Takes the
 * lock.
 */
static size_t next_rows(struct kvbm_pool *pool, bool (*wanted)(const struct kvbm_slot *),
                        uint32_t *at, struct row *ret, size_t cap)
{
    size_t n = 0;

    while (n == 0 && *at <= pool->n_blocks && cap) {
        uint32_t end = (uint32_t)KV_MIN((uint64_t)*at + LOOKED_AT, (uint64_t)pool->n_blocks + 1);

        kvbm_lock(pool->registry);
        for (; *at < end && n < cap; ++*at) {
            if (wanted(&pool->slots[*at]))
                copy_row(pool, *at, &ret[n++]);
        }
        kvbm_unlock(pool->registry);
    }
    return n;
}

/* Print a key of eight bytes as a number, others byte for byte. */
static const char *key_text(const struct kvbm_pool *pool, const struct row *row,
                            char text[2 * KVBM_MAX_KEY + 1])
{
    uint32_t len = pool->registry->key_len;
    uint64_t number;

    if (!row->slot.entry)
        return "-";
    if (len == sizeof(number)) {
        memcpy(&number, row->key, sizeof(number));
        snprintf(text, 17, "%016" PRIx64, number);
        return text;
    }
    for (uint32_t i = 0; i < len; i++)
        snprintf(text + 2 * (size_t)i, 3, "%02x", row->key[i]);
    return text;
}

/*
 * Name a code address: file(function+0x12), or file(+0x12) for addr2line when the function has no
 * name there.
 */
static const char *where_text(void *code, char text[WHERE_LEN])
{
    Dl_info from = {0};
    const char *base;

    if (!code || !dladdr(code, &from) || !from.dli_fname)
        return NULL;
    base = from.dli_saddr ? from.dli_saddr : from.dli_fbase;
    snprintf(text, WHERE_LEN, "%s(%s+0x%zx)", from.dli_fname, from.dli_sname ? from.dli_sname : "",
             (size_t)((const char *)code - base));
    return text;
}

/* Count the callers' handles. Subtract the references that duplicates hold on their primary. */
static uint32_t handles(const struct kvbm_slot *slot)
{
    return slot->refs ? slot->refs - slot->next : 0;
}

static const char *state_text(const struct kvbm_slot *slot)
{
    if (slot->flags & SLOT_INACTIVE)
        return "inactive";
    return slot->flags & SLOT_DUPLICATE ? "duplicate" : kvbm_state_name(slot->state);
}

/* ---- leaks ---- */

static void report_leak(const struct kvbm_pool *pool, const struct row *row)
{
    char key[2 * KVBM_MAX_KEY + 1], where[WHERE_LEN], name[80], from[WHERE_LEN + 80];
    const char *acquired = where_text(row->acquired, where);

    kv_log_warn("kvbm", "a block is still held",
                "pool=%s block=%u state=%s handles=%u key=%s acquired=%s",
                kv_log_quote(name, sizeof(name), pool->name), row->block, state_text(&row->slot),
                handles(&row->slot), key_text(pool, row, key),
                acquired ? kv_log_quote(from, sizeof(from), acquired) : "untracked");
}

void kvbm_report_leaks(struct kvbm_pool *pool, uint64_t mutable, uint64_t immutable)
{
    struct row rows[PIECE];
    size_t told = 0, n;
    uint32_t at = 1;
    char name[80];

    kv_log_warn("kvbm", "pool not destroyed: blocks are held",
                "pool=%s mutable=%" PRIu64 " immutable=%" PRIu64,
                kv_log_quote(name, sizeof(name), pool->name), mutable, immutable);
    do {
        n = next_rows(pool, is_held, &at, rows, KV_MIN((size_t)PIECE, MOST_LEAKS - told));
        for (size_t i = 0; i < n; i++)
            report_leak(pool, &rows[i]);
        told += n;
    } while (n);
}

/* ---- kvbm_pool_dump ---- */

static void print_groups(uint64_t groups, FILE *to)
{
    if (groups == UINT64_MAX) {
        fprintf(to, "all groups");
        return;
    }
    fprintf(to, "group%s", groups & (groups - 1) ? "s" : "");
    for (; groups; groups &= groups - 1)
        fprintf(to, " %d", __builtin_ctzll(groups));
}

static unsigned percent(uint64_t part, uint64_t whole)
{
    return whole ? (unsigned)(part * 100 / whole) : 0;
}

static void print_summary(struct kvbm_pool *pool, FILE *to, uint64_t *used)
{
    static const char *const policies[] = {"default", "LRU", "LFU", "lineage"};
    struct kvbm_pool_stats s = {.size = sizeof(s)};

    kvbm_pool_get_stats(pool, &s);
    *used = s.total_blocks - s.reset_pool_size;
    fprintf(to, "pool %s: %u blocks of %u tokens, tier %s, ", pool->name, pool->n_blocks,
            pool->block_size, kvbm_tier_name(pool->tier));
    print_groups(pool->groups, to);
    fprintf(to, ", %s eviction\n", policies[pool->evict.policy]);
    fprintf(to,
            "  blocks      %" PRIu64 " free, %" PRIu64 " mutable, %" PRIu64 " immutable, %" PRIu64
            " inactive\n",
            s.reset_pool_size, s.inflight_mutable, s.inflight_immutable, s.inactive_pool_size);
    fprintf(to,
            "  allocated   %" PRIu64 " blocks: %" PRIu64 " free ones, %" PRIu64 " evicted; %" PRIu64
            " allocations refused\n",
            s.allocations, s.allocations_from_reset, s.evictions, s.allocation_failures);
    fprintf(to,
            "  registered  %" PRIu64 " keys, %" PRIu64 " of them again, %" PRIu64
            " kept as duplicates\n",
            s.registrations + s.registration_dedup, s.registration_dedup, s.duplicate_blocks);
    fprintf(to,
            "  found       %" PRIu64 " of %" PRIu64 " keys by prefix (%u %%), %" PRIu64
            " of %" PRIu64 " one by one (%u %%)\n",
            s.match_blocks_returned, s.match_hashes_requested,
            percent(s.match_blocks_returned, s.match_hashes_requested), s.scan_blocks_returned,
            s.scan_hashes_requested, percent(s.scan_blocks_returned, s.scan_hashes_requested));
    fprintf(to, "  metadata    %.1f bytes a block; %" PRIu64 " stale handles refused\n",
            (double)s.metadata_bytes / pool->n_blocks, s.stale_handles);
}

static void print_priority(const struct row *row, FILE *to)
{
    uint64_t now = kv_now_ns(), end = row->retained_ns;

    if (end && end <= now) /* the priority has ended, and no call has removed it yet */
        return;
    if (end || row->slot.priority != KVBM_PRIORITY_DEFAULT)
        fprintf(to, "  priority %u", row->slot.priority);
    if (end)
        fprintf(to, " for %.1f s more", (double)(end - now) / (double)KV_NS_PER_S);
}

static void print_row(const struct kvbm_pool *pool, const struct row *row, FILE *to)
{
    uint8_t others = row->tiers & (uint8_t) ~(1u << pool->tier);
    char key[2 * KVBM_MAX_KEY + 1], where[WHERE_LEN];

    fprintf(to, "%10u  %-10s  %7u", row->block, state_text(&row->slot), handles(&row->slot));
    if (row->slot.entry)
        fprintf(to, "  %5u  %8u  %s", row->group, row->position, key_text(pool, row, key));
    if (row->slot.state == KVBM_PARTIAL)
        fprintf(to, "  %u of %u tokens", row->n_tokens, pool->block_size);
    if (row->slot.flags & SLOT_DUPLICATE)
        fprintf(to, "  of block %u", row->slot.prev - 1);
    else if (row->slot.refs && row->slot.next)
        fprintf(to, "  %u duplicates", row->slot.next);
    print_priority(row, to);
    for (unsigned tier = 0; row->slot.state == KVBM_REGISTERED && tier < KV_N_TIERS; tier++) {
        if (others >> tier & 1)
            fprintf(to, "  also in %s", kvbm_tier_name(tier));
    }
    if (row->acquired && where_text(row->acquired, where))
        fprintf(to, "  acquired at %s", where);
    fputc('\n', to);
}

static int dump(struct kvbm_pool *pool, FILE *to, size_t max_blocks)
{
    struct row rows[PIECE];
    uint64_t used, shown = 0;
    uint32_t at = 1;
    size_t n;

    if (!pool || !to)
        return -EINVAL;
    print_summary(pool, to, &used);
    do {
        n = next_rows(pool, is_used, &at, rows, KV_MIN((size_t)PIECE, max_blocks - shown));
        if (n && !shown)
            fprintf(to, "     block  state       handles  group  position  key\n");
        for (size_t i = 0; i < n; i++)
            print_row(pool, &rows[i], to);
        shown += n;
    } while (n);
    if (used > shown)
        fprintf(to, "            and %" PRIu64 " more that aren't free\n", used - shown);
    return ferror(to) ? -EIO : 0;
}

int kvbm_pool_dump(struct kvbm_pool *pool, FILE *to, size_t max_blocks)
{
    locale_t before = uselocale(kv_c_locale());
    int rc = dump(pool, to, max_blocks);

    uselocale(before);
    return rc;
}
