// SPDX-License-Identifier: Apache-2.0
/* Registries broken on purpose, one number at a time: kvbm_registry_check reports each fault. In a
 * build that checks itself (without NDEBUG) a process that continues is aborted, with the fault in
 * its log. */
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"
#include "skip.h"

/* Blocks in every state: a chain of three inactive, one held twice by a duplicate, the rest mutable
 * or free. */
static struct world {
    struct bm bm;
    struct kvbm_mutable mutable;
    struct kvbm_complete complete;
    struct kvbm_immutable held, duplicate;
} w;

enum { CHAIN = 1, HELD = 9, STAGED = 20 }; /* keys */

static void open_world(enum kvbm_eviction eviction)
{
    const uint64_t chain[3] = {CHAIN, CHAIN + 1, CHAIN + 2}, held = HELD, staged = STAGED;
    struct kvbm_immutable blocks[3];

    bm_open(&w.bm, &(struct kvbm_pool_opts){.n_blocks = 9, .eviction = eviction});
    bm_put(w.bm.pool, chain, 3, blocks);
    assert_int_equal(kvbm_pool_release(w.bm.pool, blocks, 3), 0);
    bm_put(w.bm.pool, &held, 1, &w.held);
    bm_put(w.bm.pool, &held, 1, &w.duplicate);
    assert_int_equal(bm_complete_at(w.bm.pool, 0, NULL, 0, &staged, 1, &w.complete), 0);
    assert_int_equal(kvbm_pool_allocate(w.bm.pool, 1, &w.mutable, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(&w.mutable, NULL), 0);
    bm_told(&w.bm); /* its thread is idle: some of this is done in a child */
    assert_int_equal(kvbm_registry_check(w.bm.registry), 0);
}

static void close_world(void)
{
    assert_int_equal(kvbm_mutable_release(&w.mutable), 0);
    assert_int_equal(kvbm_complete_release(&w.complete), 0);
    assert_int_equal(kvbm_immutable_release(&w.duplicate), 0);
    assert_int_equal(kvbm_immutable_release(&w.held), 0);
    bm_close(&w.bm);
}

static struct kvbm_entry *entry_of(uint64_t key)
{
    struct kvbm_registry *r = w.bm.registry;
    uint64_t name[KVBM_MAX_KEY / 8] = {key}; /* as long as a key may be */
    uint32_t i = kvbm_find(r, 0, name, kvbm_tag(r, 0, name));

    assert_true(i > 0);
    return kvbm_entry(r, i);
}

static struct kvbm_slot *slot_of(uint64_t key)
{
    return &w.bm.pool->slots[entry_of(key)->slot[0]];
}

static struct kvbm_slot *duplicate(void)
{
    return &w.bm.pool->slots[w.duplicate.handle.block + 1];
}

/* ---- what can be broken ---- */

static void lose_free(void)
{
    w.bm.pool->n_free--;
}

static void count_mutable(void)
{
    w.bm.pool->n_mutable++;
}

/* The sum is right. */
static void count_another_way(void)
{
    w.bm.pool->n_immutable++;
    w.bm.pool->n_mutable--;
}

static void count_inactive(void)
{
    w.bm.pool->n_inactive = 0;
    w.bm.pool->n_free += 3;
}

static void free_twice(void)
{
    w.bm.pool->free[w.bm.pool->free_head] = w.bm.pool->free[w.bm.pool->free_head + 1];
}

static void free_held(void)
{
    w.bm.pool->free[w.bm.pool->free_head] = w.held.handle.block + 1;
}

static void leave_claimed(void)
{
    slot_of(HELD)->flags |= SLOT_CLAIMED;
}

static void lose_tokens(void)
{
    w.bm.pool->slots[w.mutable.handle.block + 1].tokens = 0;
}

static void forget_leaner(void)
{
    slot_of(HELD)->next--;
}

static void lean_on_nothing(void)
{
    duplicate()->prev = w.complete.handle.block + 1;
}

static void hold_inactive(void)
{
    slot_of(CHAIN)->refs++;
}

static void cut_list(void)
{
    slot_of(CHAIN + 2)->prev = w.held.handle.block + 1;
}

static void lose_bit(void)
{
    w.bm.pool->evict.summary[KVBM_PRIORITY_DEFAULT] = 0;
}

static void lose_list(void)
{
    memset(w.bm.pool->evict.words, 0, (size_t)101 * w.bm.pool->evict.n_words * 8);
    memset(w.bm.pool->evict.summary, 0, sizeof(uint64_t) * 101);
    memset(w.bm.pool->evict.priorities, 0, sizeof(w.bm.pool->evict.priorities));
}

static void change_priority(void)
{
    slot_of(CHAIN + 2)->priority = 99;
}

static void count_child(void)
{
    if (w.bm.pool->evict.children) /* lineage counts on its own */
        w.bm.pool->evict.children[slot_of(CHAIN)->entry]++;
    else
        entry_of(CHAIN)->n_children++;
}

static void count_slot(void)
{
    entry_of(HELD)->n_slots++;
}

static void lose_tier(void)
{
    entry_of(CHAIN + 1)->tiers = 0;
}

static void swap_primary(void)
{
    entry_of(HELD)->slot[0] = w.duplicate.handle.block + 1;
}

static void move_child(void)
{
    entry_of(CHAIN + 1)->position = 7;
}

static void lose_cell(void)
{
    uint32_t tag = entry_of(HELD)->tag;
    struct kvbm_bucket *home = &w.bm.registry->table[kvbm_home(w.bm.registry, tag)];

    home->entry[__builtin_ctz(kvbm_bucket_match(home->tag, tag))] = 0;
}

static void count_entry(void)
{
    w.bm.registry->live_entries++;
}

static const struct fault {
    const char *name;
    void (*make)(void);
} faults[] = {
    {"n_free", lose_free},
    {"n_mutable", count_mutable},
    {"n_immutable", count_another_way},
    {"n_inactive", count_inactive},
    {"free twice", free_twice},
    {"free and held", free_held},
    {"claimed", leave_claimed},
    {"tokens", lose_tokens},
    {"leaners", forget_leaner},
    {"primary", lean_on_nothing},
    {"refs", hold_inactive},
    {"list", cut_list},
    {"summary", lose_bit},
    {"words", lose_list},
    {"priority", change_priority},
    {"children", count_child},
    {"n_slots", count_slot},
    {"tiers", lose_tier},
    {"slot", swap_primary},
    {"position", move_child},
    {"cell", lose_cell},
    {"live_entries", count_entry},
};

/* Break a copy of the world in a child process. Returns its exit status; @log gets its log. */
static int in_child(const struct fault *fault, bool (*go_on)(void), char *log, size_t cap)
{
    struct rlimit no_core = {0, 0};
    int fds[2], status;
    size_t len = 0;
    pid_t child;

    assert_int_equal(pipe(fds), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        setrlimit(RLIMIT_CORE, &no_core);
        dup2(fds[1], STDERR_FILENO);
        fault->make();
        _exit(go_on() ? 0 : 1);
    }
    close(fds[1]);
    for (ssize_t n; (n = read(fds[0], log + len, cap - 1 - len)) > 0; len += (size_t)n)
        ;
    log[len] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static bool is_found(void)
{
    return kvbm_registry_check(w.bm.registry) == -EUCLEAN;
}

static void expect_found(enum kvbm_eviction eviction)
{
    char log[4096];

    open_world(eviction);
    for (size_t i = 0; i < KV_COUNT(faults); i++) {
        int status = in_child(&faults[i], is_found, log, sizeof(log));

        if (!strstr(log, "broken") || !strstr(log, "must="))
            fail_msg("%s: not in the log: %s", faults[i].name, log);
#ifdef KVBM_CHECKED /* kvbm_registry_check is a call, too: of those seen in constant time it doesn't return */
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT)
            continue;
#endif
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("%s was not found: status %x", faults[i].name, (unsigned)status);
    }
    close_world();
}

static void test_lru(void **state)
{
    (void)state;
    expect_found(KVBM_EVICT_LRU);
}

static void test_lineage(void **state)
{
    (void)state;
    expect_found(KVBM_EVICT_LINEAGE);
}

#ifdef KVBM_CHECKED
static bool call_a_while(void)
{
    for (int i = 0; i < KVBM_CHECK_EVERY; i++)
        kvbm_registry_locate(w.bm.registry, 63, &(uint64_t){5}, 1, &(uint8_t){0});
    return true;
}

static bool call_once(void)
{
    kvbm_registry_locate(w.bm.registry, 63, &(uint64_t){5}, 1, &(uint8_t){0});
    return true;
}

static void expect_abort(const struct fault *fault, bool (*go_on)(void))
{
    char log[4096];
    int status = in_child(fault, go_on, log, sizeof(log));

    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
        fail_msg("%s: not aborted: status %x, log %s", fault->name, (unsigned)status, log);
    if (!strstr(log, "must="))
        fail_msg("%s: not in the log: %s", fault->name, log);
}

static void tell_too_much(void)
{
    w.bm.registry->told++;
}

static void nothing(void)
{
}

static void test_each_call_checks(void **state)
{
    char log[4096];
    (void)state;

    open_world(KVBM_EVICT_LRU);
    for (size_t i = 0; i < KV_COUNT(faults); i++)
        expect_abort(&faults[i], call_a_while);
    expect_abort(&(struct fault){"told", tell_too_much}, call_a_while);
    for (size_t i = 0; i < 2; i++) /* the sum, at once */
        expect_abort(&faults[i], call_once);
    assert_int_equal(in_child(&(struct fault){"none", nothing}, call_a_while, log, sizeof(log)), 0);
    close_world();
}
#else
static void test_each_call_checks(void **state)
{
    (void)state;
    skip_because("a build with NDEBUG doesn't check itself");
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru),
        cmocka_unit_test(test_lineage),
        cmocka_unit_test(test_each_call_checks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
