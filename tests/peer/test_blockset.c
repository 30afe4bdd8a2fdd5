// SPDX-License-Identifier: Apache-2.0
/* Block sets as bytes and back: what a peer reads is what was exported, and all else is refused. */
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/unit.h"
#include "peer_unit.h"
#include "skip.h"
#include "starve.h"

static const struct kvbm_transport_key keys[] = {
    {KVBM_TRANSPORT_TCP, 14, "127.0.0.1:7777"}, {KVBM_TRANSPORT_SHM, 0, NULL}, {99, 3, "new"}};

static struct kvbm_blockset_opts full_opts(const struct kvbm_layout *layout)
{
    return (struct kvbm_blockset_opts){.size = sizeof(struct kvbm_blockset_opts),
                                       .id = 1,
                                       .layout = layout,
                                       .writable = true,
                                       .shard = {.rank = 1,
                                                 .n_ranks = 2,
                                                 .axis = KVBM_SHARD_HEADS,
                                                 .first_head = HEADS,
                                                 .total_heads = 2 * HEADS},
                                       .lifetime_ms = 3600 * 1000,
                                       .transports = keys,
                                       .n_transports = 3};
}

static void owner_init(struct owner *o)
{
    struct kvbm_blockset_opts opts;

    o->agent = agent_named("owner-1", 77);
    o->layout = small_layout();
    opts = full_opts(o->layout);
    assert_int_equal(kvbm_blockset_export(o->agent, &opts, &o->set), 0);
    o->len = bytes_of(o->set, o->bytes);
}

static void test_there_and_back(void **state)
{
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    struct kvbm_layout_config layout = KVBM_LAYOUT_CONFIG_INIT;
    struct kvbm_agent *reader = agent_named("reader", 5);
    struct kvbm_remote_set *set = NULL;
    struct owner o;
    char key[32];
    size_t needed;

    (void)state;
    owner_init(&o);
    assert_int_equal(kvbm_blockset_serialise(o.set, NULL, 0, &needed), -ENOSPC);
    assert_int_equal(needed, o.len);
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, o.len, &set), 0);
    assert_int_equal(kvbm_remote_set_get_info(set, &info), 0);
    assert_string_equal(info.agent, "owner-1");
    assert_int_equal(info.worker, 77);
    assert_true(info.incarnation != 0);
    assert_int_equal(info.generation, 1);
    assert_int_equal(info.id, 1);
    assert_true(info.writable && info.expires_ns);
    assert_int_equal(info.shard.rank, 1);
    assert_int_equal(info.shard.n_ranks, 2);
    assert_int_equal(info.shard.axis, KVBM_SHARD_HEADS);
    assert_int_equal(info.shard.first_head, HEADS);
    assert_int_equal(info.shard.total_heads, 2 * HEADS);
    assert_int_equal(kvbm_remote_set_layout(set, &layout), 0);
    assert_int_equal(layout.num_blocks, 6);
    assert_int_equal(layout.num_layers, 2);
    assert_int_equal(info.n_transports, 3);
    assert_int_equal(kvbm_remote_set_transport(set, KVBM_TRANSPORT_TCP, key, sizeof(key), NULL),
                     14);
    assert_memory_equal(key, "127.0.0.1:7777", 14);
    assert_int_equal(kvbm_remote_set_transport(set, KVBM_TRANSPORT_SHM, NULL, 0, &needed), 0);
    assert_int_equal(kvbm_remote_set_transport(set, KVBM_TRANSPORT_TCP, key, 13, &needed), -ENOSPC);
    assert_int_equal(needed, 14);
    assert_int_equal(kvbm_remote_set_transport(set, KVBM_TRANSPORT_UCX, key, 32, NULL), -ENOENT);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* Each byte changed, each prefix, and a longer one. */
static void test_changed_bytes(void **state)
{
    struct kvbm_agent *reader = agent_named("reader", 5);
    struct owner o;

    (void)state;
    owner_init(&o);
    for (size_t i = 0; i < o.len; i++) {
        int rc;

        o.bytes[i] ^= 0x10;
        rc = kvbm_blockset_import(reader, o.bytes, o.len, NULL);
        assert_true(rc == -EPROTO || (rc == -EPROTONOSUPPORT && i >= 8 && i < 12));
        o.bytes[i] ^= 0x10;
        assert_int_equal(kvbm_blockset_import(reader, o.bytes, i, NULL), -EPROTO);
    }
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, o.len + 8, NULL), -EPROTO);
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, o.len, NULL), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* Bytes that a liar has signed: each place in turn with numbers that cross a limit. */
static void test_lies(void **state)
{
    static const struct {
        size_t at, bytes;
        uint64_t value;
    } lies[] = {{24, 8, 0},           /* no incarnation */
                {32, 8, 0},           /* no generation */
                {52, 4, 2},           /* an unknown flag */
                {56, 4, 3},           /* keys too short */
                {56, 4, 65},          /* and too long */
                {60, 4, 2},           /* an unknown axis */
                {60, 4, 0},           /* heads without an axis */
                {64, 4, 2},           /* rank 2 of 2 */
                {68, 4, 65537},       /* too many ranks */
                {72, 4, HEADS + 1},   /* heads beyond the model's */
                {72, 4, UINT32_MAX},  /* and with an overflow */
                {76, 4, HEADS - 1},   /* fewer heads than the layout has */
                {80, 4, 0},           /* no name */
                {80, 4, 64},          /* a long one */
                {80, 4, UINT32_MAX},  /* beyond the bytes */
                {84, 4, UINT32_MAX},  /* a fingerprint, too */
                {88, 4, 9},           /* transports */
                {88, 4, 2},           /* fewer than there are */
                {88, 4, UINT32_MAX},  /* beyond the array */
                {92, 4, 0},           /* no layout */
                {92, 4, UINT32_MAX}}; /* beyond the bytes */
    struct kvbm_agent *reader = agent_named("reader", 5);
    struct owner o;

    (void)state;
    owner_init(&o);
    for (size_t i = 0; i < KV_COUNT(lies); i++) {
        uint8_t bytes[SET_CAP];
        int rc;

        memcpy(bytes, o.bytes, o.len);
        for (size_t j = 0; j < lies[i].bytes; j++)
            bytes[lies[i].at + j] = (uint8_t)(lies[i].value >> 8 * j);
        sign(bytes, o.len);
        rc = kvbm_blockset_import(reader, bytes, o.len, NULL);
        if (rc != -EPROTO)
            fail_msg("lie %zu: %d", i, rc);
    }
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* A version that doesn't exist yet: only its number is understood. */
static void test_newer(void **state)
{
    struct kvbm_agent *reader = agent_named("reader", 5);
    struct owner o;

    (void)state;
    owner_init(&o);
    o.bytes[8] = 2;
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, 16, NULL), -EPROTONOSUPPORT);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

static int try_export(struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts)
{
    struct kvbm_blockset *set = NULL;
    int rc = kvbm_blockset_export(agent, opts, &set);

    assert_true(rc == 0 ? set != NULL : !set);
    kvbm_blockset_destroy(set);
    return rc;
}

static void test_bad_exports(void **state)
{
    static const struct kvbm_transport_key twice[] = {{KVBM_TRANSPORT_TCP, 1, "a"},
                                                      {KVBM_TRANSPORT_TCP, 1, "b"}};
    static const struct kvbm_transport_key wrong[] = {
        {0, 1, "a"},
        {KVBM_TRANSPORT_TCP, KVBM_MAX_TRANSPORT_KEY + 1, "a"},
        {KVBM_TRANSPORT_TCP, 1, NULL}};
    struct kvbm_layout_config headless = small_config();
    struct kvbm_layout *nowhere, *foreign;
    struct kvbm_blockset_opts opts;
    uint8_t bytes[SET_CAP];
    struct owner o;
    long len;

    (void)state;
    owner_init(&o);
    opts = full_opts(o.layout);
    assert_int_equal(try_export(o.agent, &opts), -EEXIST);
    opts.id = 2;
    assert_int_equal(try_export(o.agent, &opts), 0);
    opts.layout = NULL;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.layout = nowhere = allocate(&headless, KVBM_STORAGE_NULL);
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    len = kvbm_layout_serialise(o.layout, bytes, sizeof(bytes), NULL);
    assert_int_equal(kvbm_layout_deserialise(bytes, (size_t)len, &foreign), 0);
    opts.layout = foreign;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.layout = o.layout;
    opts.shard.rank = 2;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.shard = (struct kvbm_shard){.reserved = {0, 0, 1}};
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.shard = (struct kvbm_shard){.rank = 3, .n_ranks = 8}; /* MLA: every rank has all */
    assert_int_equal(try_export(o.agent, &opts), 0);
    for (size_t i = 0; i < KV_COUNT(wrong); i++) {
        opts.transports = &wrong[i];
        opts.n_transports = 1;
        assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    }
    opts.transports = twice;
    opts.n_transports = 2;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.n_transports = KVBM_MAX_TRANSPORTS + 1;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    opts.transports = NULL;
    opts.n_transports = 1;
    assert_int_equal(try_export(o.agent, &opts), -EINVAL);
    kvbm_layout_destroy(foreign);
    kvbm_layout_destroy(nowhere);
    owner_fini(&o);
}

static void test_bad_agents(void **state)
{
    static const char *const names[] = {
        "", "a b", "a/b", "\xc3\xa4",
        "1234567890123456789012345678901234567890123456789012345678901234"};
    struct kvbm_agent_opts opts = {.size = sizeof(opts)};
    struct kvbm_agent *agent = NULL;
    char fingerprint[KVBM_MAX_FINGERPRINT + 2];

    (void)state;
    assert_int_equal(kvbm_agent_create(NULL, &agent), -EINVAL);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    for (size_t i = 0; i < KV_COUNT(names); i++) {
        opts.name = names[i];
        assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    }
    opts.name = "a";
    opts.key_len = 3;
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    opts.key_len = 0;
    opts.max_sets = (1u << 20) + 1;
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    opts.max_sets = 0;
    memset(fingerprint, 'x', sizeof(fingerprint));
    fingerprint[sizeof(fingerprint) - 1] = '\0';
    opts.fingerprint = fingerprint;
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    opts.fingerprint = "\xff";
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    fingerprint[KVBM_MAX_FINGERPRINT] = '\0';
    opts.fingerprint = fingerprint;
    assert_int_equal(kvbm_agent_create(&opts, &agent), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    assert_int_equal(kvbm_agent_destroy(NULL), 0);
}

/* Return the number that peers see of an agent whose engine is called so; 0: it is refused. */
static uint64_t number_of(const char *name, uint64_t number)
{
    const struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                         .name = "owner",
                                         .worker = number,
                                         .worker_name = name,
                                         .fingerprint = "model"};
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    struct kvbm_agent *reader;
    struct kvbm_remote_set *set = NULL;
    struct owner o = {0};
    struct kvbm_blockset_opts what;
    int rc = kvbm_agent_create(&opts, &o.agent);

    if (rc < 0) {
        assert_int_equal(rc, -EINVAL);
        return 0;
    }
    o.layout = small_layout();
    what = full_opts(o.layout);
    reader = agent_named("reader", 5);
    assert_int_equal(kvbm_blockset_export(o.agent, &what, &o.set), 0);
    o.len = bytes_of(o.set, o.bytes);
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, o.len, &set), 0);
    assert_int_equal(kvbm_remote_set_get_info(set, &info), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
    return info.worker;
}

/* The id that kv-indexer has of an engine, as text: a number or a name. */
static void test_worker_names(void **state)
{
    (void)state;
    assert_true(number_of("77", 0) == 77);
    assert_true(number_of("pod-a", 0) == UINT64_C(0x8646c1aac08e7b41));
    assert_true(number_of(NULL, 78) == 78);
    assert_true(number_of(NULL, 0) != 0); /* drawn */
    assert_true(number_of("pod-a", 78) == 0);
    assert_true(number_of("0", 0) == 0);
    assert_true(number_of("", 0) == 0);
    assert_true(number_of("a\nb", 0) == 0);
}

/* Another process finds the owner's bytes where the set says they are. */
static void test_addresses(void **state)
{
    const struct kvbm_block_at at = {.worker = 77, .set = 1, .block = 4};
    struct kvbm_remote_blocks *blocks = NULL;
    struct kvbm_view view, own;
    struct kvbm_agent *reader;
    int there[2], back[2], status;
    char byte = 0;
    uint8_t got[64];
    struct owner o;
    bool allowed;
    pid_t child;
    ssize_t n;

    (void)state;
    reader = agent_named("reader", 5);
    assert_int_equal(pipe(there), 0);
    assert_int_equal(pipe(back), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(there[0]);
        close(back[1]); /* the parent's end: its death ends the read below */
        owner_init(&o);
        if (kvbm_layout_region(o.layout, 4, 1, 1, &own) != 0)
            _exit(1);
        memset((void *)(uintptr_t)own.addr, 0x5a, own.len);
        if (write(there[1], &o.len, sizeof(o.len)) < 0 || write(there[1], o.bytes, o.len) < 0 ||
            read(back[0], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    assert_int_equal(read(there[0], &o.len, sizeof(o.len)), sizeof(o.len));
    assert_int_equal(read(there[0], o.bytes, o.len), o.len);
    assert_int_equal(kvbm_blockset_import(reader, o.bytes, o.len, NULL), 0);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, &at, 1, &blocks), 0);
    assert_int_equal(kvbm_remote_blocks_view(blocks, 0, 1, 1, &view), 0);
    assert_int_equal(view.len, 4 * HEADS * 8 * 2);
    n = process_vm_readv(child, &(struct iovec){got, sizeof(got)}, 1,
                         &(struct iovec){(void *)(uintptr_t)view.addr, sizeof(got)}, 1, 0);
    allowed = n >= 0 || (errno != EPERM && errno != ENOSYS);
    assert_true(n == (ssize_t)sizeof(got) || !allowed);
    for (size_t i = 0; allowed && i < sizeof(got); i++)
        assert_int_equal(got[i], 0x5a);
    assert_int_equal(write(back[1], &byte, 1), 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    for (int i = 0; i < 2; i++) {
        close(there[i]);
        close(back[i]);
    }
    kvbm_remote_blocks_destroy(blocks);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    if (!allowed)
        skip_because("this system lets no process read another's memory");
}

/* Without memory nothing changes, and a later call succeeds. */
static void test_starved(void **state)
{
    const struct kvbm_block_at at = {.worker = 77, .set = 1, .block = 4};
    struct kvbm_agent *reader = agent_named("reader", 5);
    struct kvbm_remote_blocks *blocks = NULL;
    struct kvbm_blockset *second = NULL;
    struct kvbm_blockset_opts opts;
    struct owner o;
    long n = 1;
    int rc;

    (void)state;
    owner_init(&o);
    opts = full_opts(o.layout);
    opts.id = 2;
    do {
        starve_at(n++);
        rc = kvbm_blockset_export(o.agent, &opts, &second);
        assert_true(rc == (starved() ? -ENOMEM : 0));
    } while (rc < 0);
    starve_at(0);
    assert_int_equal(kvbm_blockset_update(o.set, &opts), -EINVAL); /* another id */
    opts.id = 1;
    for (n = 1, rc = -1; rc < 0; n++) {
        starve_at(n);
        rc = kvbm_blockset_update(o.set, &opts);
        assert_true(rc == (starved() ? -ENOMEM : 0));
    }
    starve_at(0);
    o.len = bytes_of(o.set, o.bytes);
    for (n = 1, rc = -1; rc < 0; n++) {
        starve_at(n);
        rc = kvbm_blockset_import(reader, o.bytes, o.len, NULL);
        assert_true(rc == (starved() ? -ENOMEM : 0));
    }
    for (n = 1, rc = -1; rc < 0; n++) {
        starve_at(n);
        rc = kvbm_remote_blocks_mutable(reader, &at, 1, &blocks);
        assert_true(rc == (starved() ? -ENOMEM : 0));
    }
    starve_at(0);
    kvbm_remote_blocks_destroy(blocks);
    kvbm_blockset_destroy(second);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back), cmocka_unit_test(test_changed_bytes),
        cmocka_unit_test(test_lies),           cmocka_unit_test(test_newer),
        cmocka_unit_test(test_bad_exports),    cmocka_unit_test(test_bad_agents),
        cmocka_unit_test(test_worker_names),   cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_starved),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
