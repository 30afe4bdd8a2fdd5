// SPDX-License-Identifier: Apache-2.0
/* Plans that are run: round trips between groups of other widths and forms, and ranks that fail. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "base/core/error.h"
#include "base/stalls.h"
#include "base/unit.h"
#include "plan_world.h"

#define N 24u
#define MANY 2048u
#define LONG_NS (60 * KV_NS_PER_S)
#define SLACK_NS (2 * KV_NS_PER_S) /* beside stalls of the machine */

static struct kvbm_copier *copier;
static uint64_t keys[MANY];
static uint32_t blocks[MANY];

static struct kvbm_session *open_to(struct kvbm_agent *agent, const char *at)
{
    struct kvbm_session_opts opts = {.size = sizeof(opts), .timeout_ms = 60000};
    struct kvbm_session *session = NULL;
    uint64_t until = kv_now_ns() + LONG_NS;

    while (kvbm_session_open(agent, at, &opts, &session) < 0) { /* its process has just begun */
        assert_true(kv_now_ns() < until);
        usleep(10000);
    }
    return session;
}

/** Options for all blocks of a group: key i + 1 into block i. */
static struct kvbm_plan_read_opts read_opts(const struct pw_rank *to, uint32_t n,
                                            const struct kvbm_plan_source *sources, uint8_t *ok)
{
    return (struct kvbm_plan_read_opts){.size = sizeof(struct kvbm_plan_read_opts),
                                        .copier = copier,
                                        .sources = sources,
                                        .keys = keys,
                                        .to = to->layout,
                                        .to_blocks = blocks,
                                        .n = n,
                                        .deadline_ns = kv_now_ns() + LONG_NS,
                                        .ok = ok};
}

/* Let each rank of @local read all blocks from @remote. */
static void read_all(struct pw_group *local, struct pw_group *remote)
{
    for (uint32_t i = 0; i < local->form.n_ranks; i++) {
        struct kvbm_plan_source sources[PW_MAX_RANKS] = {0};
        struct kvbm_plan *plan = pw_plan(local, i, remote);
        struct kvbm_plan_read_opts opts;
        uint8_t ok[MANY / 8];

        for (uint32_t r = 0; r < remote->form.n_ranks; r++)
            sources[r] = (struct kvbm_plan_source){
                .session = open_to(local->ranks[i].agent, remote->ranks[r].at), .set = 1};
        opts = read_opts(&local->ranks[i], N, sources, ok);
        assert_int_equal(kvbm_plan_read(plan, &opts), N);
        for (uint32_t k = 0; k < N; k++) {
            assert_true(ok[k / 8] >> k % 8 & 1);
            assert_true(pw_block(&local->ranks[i], k, keys[k], true));
        }
        for (uint32_t r = 0; r < remote->form.n_ranks; r++)
            assert_int_equal(kvbm_session_close(sources[r].session), 0);
        kvbm_plan_destroy(plan);
    }
}

/* From a group to another one and back to one like the first. */
static void round_trip(struct pw_form outer, struct pw_form inner)
{
    static struct pw_group first, middle, last;

    pw_init(&first, outer, N, "first");
    pw_lend(&first, true);
    pw_init(&middle, inner, N, "middle");
    read_all(&middle, &first);
    pw_lend(&middle, false);
    pw_init(&last, outer, N, "last");
    read_all(&last, &middle);
    for (uint32_t i = 0; i < outer.n_ranks; i++) {
        for (uint32_t k = 0; k < N; k++) {
            struct kvbm_view a, b;

            assert_int_equal(kvbm_layout_block(first.ranks[i].layout, k, &a), 0);
            assert_int_equal(kvbm_layout_block(last.ranks[i].layout, k, &b), 0);
            assert_int_equal(a.len, b.len);
            assert_memory_equal((void *)(uintptr_t)a.addr, (void *)(uintptr_t)b.addr, a.len);
        }
    }
    pw_fini(&last);
    pw_fini(&middle);
    pw_fini(&first);
}

static void test_round_trips(void **state)
{
    static const struct {
        enum kvbm_block_order order;
        kvx_dtype_t dtype;
        uint32_t width;
    } forms[] = {{KVBM_ORDER_NHD, KVX_DTYPE_BF16, 2},
                 {KVBM_ORDER_HND, KVX_DTYPE_BF16, 2},
                 {KVBM_ORDER_HND, KVX_DTYPE_F32, 4},
                 {KVBM_ORDER_NHD, KVX_DTYPE_F16, 2}};
    static const uint32_t widths[][2] = {{4, 2}, {2, 8}, {8, 1}};

    (void)state;
    for (size_t w = 0; w < KV_COUNT(widths); w++) {
        for (size_t a = 0; a < 2; a++) {
            for (size_t b = 0; b < KV_COUNT(forms); b++) {
                for (int way = 0; way < 3; way++) { /* shared memory, unix socket, tcp */
                    struct pw_form outer = {.n_ranks = widths[w][0],
                                            .order = forms[a].order,
                                            .dtype = forms[a].dtype,
                                            .width = forms[a].width,
                                            .shared = way == 0,
                                            .tcp = way == 2};
                    struct pw_form inner = {.n_ranks = widths[w][1],
                                            .order = forms[b].order,
                                            .dtype = forms[b].dtype,
                                            .width = forms[b].width,
                                            .shared = way == 0,
                                            .tcp = way == 2};

                    round_trip(outer, inner);
                }
            }
        }
    }
}

/* One rank whose layout says neither how many heads it has nor what its elements are: the others' do. */
static void test_plain(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) {
        for (uint32_t n_ranks = 1; n_ranks <= 4; n_ranks *= 2) {
            struct pw_form plain = {.n_ranks = 1,
                                    .order = KVBM_ORDER_NHD,
                                    .dtype = KVX_DTYPE_BF16,
                                    .width = 2,
                                    .shared = way == 0,
                                    .tcp = way == 2,
                                    .plain = true};
            struct pw_form known = plain;

            known.n_ranks = n_ranks;
            known.plain = false;
            round_trip(known, plain);
            known.order = KVBM_ORDER_HND;
            round_trip(known, plain);
            round_trip(plain, known);
        }
    }
}

/* Make a reader slow: it asks before each copy. */
static bool slowly(void *arg)
{
    (void)arg;
    usleep(10000);
    return false;
}

/* Leases that end long before all blocks are here: the rest is leased anew. */
static void test_short_leases(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        const struct pw_form lender = {.n_ranks = 1,
                                       .order = KVBM_ORDER_NHD,
                                       .dtype = KVX_DTYPE_F32,
                                       .width = 4,
                                       .shared = shared,
                                       .lease_ms = 100};
        static struct pw_group owner, local;
        struct kvbm_plan_source source = {.set = 1};
        struct kvbm_plan_read_opts opts;
        struct kvbm_plan *plan;
        struct pw_form reader = lender;
        uint8_t ok[MANY / 8];

        reader.order = KVBM_ORDER_HND;
        reader.shared = false;
        pw_init(&owner, lender, MANY, "short");
        pw_lend(&owner, true);
        pw_init(&local, reader, MANY, "long");
        plan = pw_plan(&local, 0, &owner);
        source.session = open_to(local.ranks[0].agent, owner.ranks[0].at);
        opts = read_opts(&local.ranks[0], MANY, &source, ok);
        opts.cancelled = slowly;
        assert_int_equal(kvbm_plan_read(plan, &opts), MANY);
        for (uint32_t k = 0; k < MANY; k++)
            assert_true(pw_block(&local.ranks[0], k, keys[k], true));
        assert_int_equal(kvbm_session_close(source.session), 0);
        kvbm_plan_destroy(plan);
        pw_fini(&local);
        pw_fini(&owner);
    }
}

/* ---- ranks in processes of their own, which are killed and frozen ---- */

static struct pw_form owners_form(bool shared)
{
    return (struct pw_form){.n_ranks = 2,
                            .order = KVBM_ORDER_NHD,
                            .dtype = KVX_DTYPE_F32,
                            .width = 4,
                            .shared = shared};
}

/* Be a rank until somebody ends this process: argv is "owner" RANK SHARED ENDPOINT. */
__attribute__((noreturn)) static void be_owner(char **argv)
{
    uint32_t rank = (uint32_t)strtoul(argv[2], NULL, 10);
    static struct pw_group g;
    char name[16];

    g = (struct pw_group){.form = owners_form(argv[3][0] == '1'), .n_blocks = MANY};
    snprintf(name, sizeof(name), "owner-%u", rank);
    pw_rank_init(&g, rank, name, argv[4]);
    pw_rank_lend(&g, rank, true);
    for (;;)
        pause();
}

/* Two owners, and a reader of another group. */
static struct {
    struct pw_group owners, readers; /* owners: only their form */
    pid_t pids[2];
    char at[2][96];
    struct kvbm_plan *plan;
    struct kvbm_plan_source sources[2];
} t;

static void begin(bool shared, uint32_t n_readers)
{
    const struct pw_form form = {
        .n_ranks = n_readers, .order = KVBM_ORDER_HND, .dtype = KVX_DTYPE_BF16, .width = 2};

    t.owners = (struct pw_group){.form = owners_form(shared), .n_blocks = MANY};
    for (uint32_t i = 0; i < 2; i++) {
        char rank[2] = {(char)('0' + i), 0}, way[2] = {shared ? '1' : '0', 0};

        snprintf(t.at[i], sizeof(t.at[i]), "unix:/tmp/kvbm-plan-%d-owner-%u", (int)getpid(), i);
        t.pids[i] = fork();
        assert_true(t.pids[i] >= 0);
        if (t.pids[i] == 0) {
            execl("/proc/self/exe", "test", "owner", rank, way, t.at[i], (char *)NULL);
            _exit(127);
        }
    }
    pw_init(&t.readers, form, MANY, "reader");
    t.plan = pw_plan(&t.readers, 0, &t.owners);
    for (uint32_t i = 0; i < 2; i++) {
        t.sources[i] = (struct kvbm_plan_source){
            .session = open_to(t.readers.ranks[0].agent, t.at[i]), .set = 1};
    }
}

static void end(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        (void)kill(t.pids[i], SIGKILL);
        (void)waitpid(t.pids[i], NULL, 0);
        (void)kvbm_session_close(t.sources[i].session);
        unlink(t.at[i] + strlen("unix:"));
    }
    kvbm_plan_destroy(t.plan);
    pw_fini(&t.readers);
}

/* Check that every block which is said to be right is, and their number. */
static uint32_t check_right(const uint8_t *ok, long right)
{
    uint32_t n = 0;

    assert_true(right >= 0);
    for (uint32_t k = 0; k < MANY; k++) {
        if (!(ok[k / 8] >> k % 8 & 1))
            continue;
        assert_true(pw_block(&t.readers.ranks[0], k, keys[k], true));
        n++;
    }
    assert_int_equal(n, right);
    return n;
}

/* A set that a session's peer has exported comes a moment after it: wait for all blocks. */
static void read_whole(void)
{
    for (uint64_t end_ns = kv_now_ns() + LONG_NS;; usleep(10000)) {
        uint8_t ok[MANY / 8];
        struct kvbm_plan_read_opts opts = read_opts(&t.readers.ranks[0], MANY, t.sources, ok);

        if (check_right(ok, kvbm_plan_read(t.plan, &opts)) == MANY)
            return;
        assert_true(kv_now_ns() < end_ns);
    }
}

static uint64_t sum_of(const struct kvbm_layout *layout)
{
    uint64_t sum = 0;

    for (uint32_t k = 0; k < MANY; k++) {
        struct kvbm_view view;

        (void)kvbm_layout_block(layout, k, &view);
        for (uint64_t i = 0; i < view.len; i++)
            sum = sum * 31 + ((const uint8_t *)(uintptr_t)view.addr)[i];
    }
    return sum;
}

/* A frozen rank: nothing is right that needs it, all is that doesn't, and the call is back in time. */
static void test_frozen(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        for (uint32_t readers = 1; readers <= 4; readers += 3) {
            uint8_t ok[MANY / 8];
            struct kvbm_plan_read_opts opts;
            struct stalls before;
            uint64_t begun, sum, late;
            long right;

            begin(shared, readers);
            read_whole();
            assert_int_equal(kill(t.pids[1], SIGSTOP), 0);
            assert_int_equal(waitpid(t.pids[1], NULL, WUNTRACED), t.pids[1]); /* it has stopped */
            opts = read_opts(&t.readers.ranks[0], MANY, t.sources, ok);
            before = stalls_so_far();
            begun = kv_now_ns();
            opts.deadline_ns = begun + (readers == 1 ? KV_NS_PER_S / 5 : LONG_NS);
            right = kvbm_plan_read(t.plan, &opts);
            late = stalls_lateness(opts.deadline_ns, &before);
            assert_true(late < SLACK_NS);
            print_message("back %u ms after the deadline\n", (unsigned)(late / KV_NS_PER_MS));
            assert_int_equal(check_right(ok, right), readers == 1 ? 0 : MANY);
            sum = sum_of(t.readers.ranks[0].layout);
            assert_int_equal(kill(t.pids[1], SIGCONT), 0);
            usleep(50000);
            assert_true(sum == sum_of(t.readers.ranks[0].layout)); /* nothing comes late */
            end();
        }
    }
}

static void *strike(void *arg)
{
    usleep(*(const uint32_t *)arg % 20000);
    kill(t.pids[1], *(const uint32_t *)arg % 2 ? SIGKILL : SIGSTOP);
    return NULL;
}

/* A rank is killed or frozen in the middle of a read. */
static void test_struck_in_the_middle(void **state)
{
    const char *seed = getenv("KV_TEST_SEED");
    uint32_t random = seed ? (uint32_t)strtoul(seed, NULL, 10) : (uint32_t)kv_now_ns();

    (void)state;
    print_message("KV_TEST_SEED=%u\n", random);
    for (int round = 0; round < 12; round++) {
        uint8_t ok[MANY / 8];
        struct kvbm_plan_read_opts opts;
        struct stalls before;
        pthread_t thread;
        uint32_t when;
        long right;

        begin(round % 2, 1);
        read_whole();
        random = random * 1664525 + 1013904223;
        when = random >> 8;
        opts = read_opts(&t.readers.ranks[0], MANY, t.sources, ok);
        before = stalls_so_far();
        opts.deadline_ns = kv_now_ns() + KV_NS_PER_S / 2;
        assert_int_equal(pthread_create(&thread, NULL, strike, &when), 0);
        right = kvbm_plan_read(t.plan, &opts);
        assert_true(stalls_lateness(opts.deadline_ns, &before) < SLACK_NS);
        pthread_join(thread, NULL);
        check_right(ok, right);
        end();
    }
}

static atomic_uint n_asked;

static bool cancel_soon(void *arg)
{
    return atomic_fetch_add(&n_asked, 1) >= *(const uint32_t *)arg;
}

static void test_cancelled(void **state)
{
    (void)state;
    begin(false, 1);
    read_whole();
    for (uint32_t after = 0; after < 40; after += 8) {
        uint8_t ok[MANY / 8];
        struct kvbm_plan_read_opts opts = read_opts(&t.readers.ranks[0], MANY, t.sources, ok);

        opts.cancelled = cancel_soon;
        opts.arg = &after;
        atomic_store(&n_asked, 0);
        assert_true(check_right(ok, kvbm_plan_read(t.plan, &opts)) < MANY);
        assert_true(kv_now_ns() < opts.deadline_ns);
    }
    end();
}

/* ---- what doesn't fit ---- */

/* A rank that isn't there gives nothing; one that has exported other heads isn't believed. */
static void test_others(void **state)
{
    static struct pw_group owners, readers;
    struct kvbm_plan_source sources[2] = {0};
    struct kvbm_plan_read_opts opts;
    struct kvbm_plan *plan;
    uint8_t ok[MANY / 8];

    (void)state;
    pw_init(&owners, owners_form(true), N, "owner");
    pw_lend(&owners, true);
    pw_init(
        &readers,
        (struct pw_form){.n_ranks = 1, .order = KVBM_ORDER_NHD, .dtype = KVX_DTYPE_F32, .width = 4},
        N, "reader");
    plan = pw_plan(&readers, 0, &owners);
    sources[0] = (struct kvbm_plan_source){
        .session = open_to(readers.ranks[0].agent, owners.ranks[0].at), .set = 1};
    opts = read_opts(&readers.ranks[0], N, sources, ok);
    assert_int_equal(kvbm_plan_read(plan, &opts), 0); /* nobody for the second part */
    sources[1] = sources[0];
    assert_int_equal(kvbm_plan_read(plan, &opts), 0); /* rank 0's heads in place of rank 1's */
    sources[1] = (struct kvbm_plan_source){
        .session = open_to(readers.ranks[0].agent, owners.ranks[1].at), .set = 7};
    assert_int_equal(kvbm_plan_read(plan, &opts), 0); /* no such set */
    sources[1].set = 1;
    assert_int_equal(kvbm_plan_read(plan, &opts), N);
    keys[3] = 1000000; /* nobody has it */
    assert_int_equal(kvbm_plan_read(plan, &opts), N - 1);
    assert_int_equal(ok[0], 0xf7);
    keys[3] = 4;
    opts.no_shared = true;
    assert_int_equal(kvbm_plan_read(plan, &opts), N);
    opts.to = owners.ranks[0].layout; /* of another form */
    assert_int_equal(kvbm_plan_read(plan, &opts), -EINVAL);
    opts.to = readers.ranks[0].layout;
    blocks[5] = N;
    assert_int_equal(kvbm_plan_read(plan, &opts), -ERANGE);
    blocks[5] = 2; /* for two keys */
    assert_int_equal(kvbm_plan_read(plan, &opts), -EINVAL);
    blocks[5] = 5;
    opts.copier = NULL;
    assert_int_equal(kvbm_plan_read(plan, &opts), -EINVAL);
    assert_int_equal(kvbm_plan_read(NULL, &opts), -EINVAL);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kvbm_session_close(sources[i].session), 0);
    kvbm_plan_destroy(plan);
    pw_fini(&readers);
    pw_fini(&owners);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_leases),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_struck_in_the_middle),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_others),
    };
    const struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 2};
    int rc;

    if (argc == 5 && strcmp(argv[1], "owner") == 0)
        be_owner(argv);
    for (uint32_t i = 0; i < MANY; i++) {
        keys[i] = i + 1;
        blocks[i] = i;
    }
    stalls_begin();
    if (kvbm_copier_create(&opts, &copier) < 0)
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    kvbm_copier_destroy(copier);
    return rc;
}
