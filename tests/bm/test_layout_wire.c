// SPDX-License-Identifier: Apache-2.0
/* Layouts as bytes: reading gives the same addresses, and every changed byte is refused. */
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/xxh.h"
#include "base/unit.h"
#include "layout_unit.h"
#include "skip.h"
#include "starve.h"

#define CAP 4096

static size_t write_down(const struct kvbm_layout *layout, uint8_t bytes[CAP])
{
    long len = kvbm_layout_serialise(layout, bytes, CAP, NULL);

    assert_true(len > 0);
    return (size_t)len;
}

static int read_back(const void *data, size_t len)
{
    struct kvbm_layout *layout = NULL;
    int rc = kvbm_layout_deserialise(data, len, &layout);

    assert_true(rc == 0 ? layout != NULL : !layout);
    kvbm_layout_destroy(layout);
    return rc;
}

/* Change something, and put a checksum under it as if it had been written so. */
static void sign(uint8_t *bytes, size_t len)
{
    uint64_t sum = kv_xxh64(bytes, len - 8, 0);

    for (int i = 0; i < 8; i++)
        bytes[len - 8 + (size_t)i] = (uint8_t)(sum >> 8 * i);
}

static void put(uint8_t *to, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

/* ---- there and back ---- */

static void compare(const struct kvbm_layout *a, const struct kvbm_layout *b)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(a);
    struct kvbm_view va, vb;

    same_shape(kvbm_layout_get_shape(a), kvbm_layout_get_shape(b));
    same_config(c, kvbm_layout_get_config(b));
    for (uint64_t block = 0; block < c->num_blocks; block++) {
        for (uint32_t i = 0; i < c->num_layers * c->outer_dim; i++) {
            uint32_t layer = i / c->outer_dim, outer = i % c->outer_dim;

            assert_int_equal(kvbm_layout_region(a, block, layer, outer, &va), 0);
            assert_int_equal(kvbm_layout_region(b, block, layer, outer, &vb), 0);
            assert_true(va.addr == vb.addr && va.len == vb.len && va.kind == vb.kind &&
                        va.device_id == vb.device_id && va.storage == vb.storage);
        }
    }
    for (uint32_t layer = 0; layer < c->num_layers; layer++)
        assert_null(kvbm_layout_storage(b, layer));
}

static void test_round_trip(void **state)
{
    static const enum kvbm_storage_kind kinds[] = {KVBM_STORAGE_NULL, KVBM_STORAGE_SYSTEM,
                                                   KVBM_STORAGE_DISK};
    struct rng rng = {test_seed()};
    (void)state;

    for (long round = test_rounds(1000); round > 0; round--) {
        struct kvbm_layout_config c = random_config(&rng);
        struct kvbm_layout *layout, *back = NULL;
        uint8_t bytes[CAP], again[CAP];
        size_t len;

        if (rng_below(&rng, 2)) {
            c.inner_dim *= 3;
            c.num_heads = 3;
            c.order = rng_below(&rng, 2) ? KVBM_ORDER_HND : KVBM_ORDER_NHD;
        }
        layout = allocate(&c, kinds[rng_below(&rng, 3)]);
        len = write_down(layout, bytes);
        assert_int_equal(kvbm_layout_deserialise(bytes, len, &back), 0);
        compare(layout, back);
        assert_int_equal(write_down(back, again), len); /* handed on */
        assert_memory_equal(bytes, again, len);
        kvbm_layout_destroy(layout);
        kvbm_layout_destroy(back);
    }
}

/* A storage whose address isn't aligned: both addresses travel. */
static void test_unaligned(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
    char *memory = malloc(1 << 16);
    struct kvbm_storage *storage;
    struct kvbm_layout *layout, *back = NULL;
    uint8_t bytes[CAP];
    (void)state;

    assert_non_null(memory);
    storage = external((char *)((uintptr_t)memory / 256 * 256 + 256) + 3, 1 << 15);
    assert_int_equal(kvbm_layout_create(&c, &storage, 1, &layout), 0);
    assert_int_equal(kvbm_layout_deserialise(bytes, write_down(layout, bytes), &back), 0);
    compare(layout, back);
    kvbm_layout_destroy(layout);
    kvbm_layout_destroy(back);
    kvbm_storage_destroy(storage);
    free(memory);
}

/* Every region of a layout says where it is. */
static uint64_t region_says(uint64_t block, uint32_t layer, uint32_t outer)
{
    return block * 1000000 + layer * 1000 + outer;
}

static void fill_regions(const struct kvbm_layout *layout)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct kvbm_view view;

    for (uint64_t block = 0; block < c->num_blocks; block++) {
        for (uint32_t i = 0; i < c->num_layers * c->outer_dim; i++) {
            uint64_t says = region_says(block, i / c->outer_dim, i % c->outer_dim);

            assert_int_equal(
                kvbm_layout_region(layout, block, i / c->outer_dim, i % c->outer_dim, &view), 0);
            memcpy((void *)(uintptr_t)view.addr, &says, sizeof(says));
        }
    }
}

/* A process with a layout of its own: writes it down to @out, and waits for @in to close. */
static void be_the_owner(const struct kvbm_layout_config *config, int out, int in)
{
    struct kvbm_layout *layout = allocate(config, KVBM_STORAGE_SYSTEM);
    uint8_t bytes[CAP];
    size_t len = write_down(layout, bytes);

    fill_regions(layout);
    assert_int_equal(write(out, bytes, len), len);
    close(out);
    assert_int_equal(read(in, bytes, 1), 0);
    kvbm_layout_destroy(layout);
}

/* A layout that another process serialised names addresses in that process: read each region
 * there. */
static void read_of_other(const struct kvbm_layout_config *config)
{
    int there[2], back[2], status;
    struct kvbm_layout *layout = NULL;
    struct kvbm_view view;
    uint8_t bytes[CAP];
    size_t len = 0;
    ssize_t n;
    pid_t pid;

    assert_true(pipe(there) == 0 && pipe(back) == 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(there[0]);
        close(back[1]);
        be_the_owner(config, there[1], back[0]);
        _exit(0);
    }
    close(there[1]);
    close(back[0]);
    while ((n = read(there[0], bytes + len, CAP - len)) > 0)
        len += (size_t)n;
    assert_int_equal(kvbm_layout_deserialise(bytes, len, &layout), 0);
    for (uint64_t block = 0; block < config->num_blocks; block++) {
        for (uint32_t i = 0; i < config->num_layers * config->outer_dim; i++) {
            uint32_t layer = i / config->outer_dim, outer = i % config->outer_dim;
            uint64_t says = 0;
            struct iovec here = {&says, sizeof(says)}, far;

            assert_int_equal(kvbm_layout_region(layout, block, layer, outer, &view), 0);
            far = (struct iovec){(void *)(uintptr_t)view.addr, sizeof(says)};
            assert_int_equal(process_vm_readv(pid, &here, 1, &far, 1, 0), sizeof(says));
            assert_int_equal(says, region_says(block, layer, outer));
        }
    }
    close(there[0]);
    close(back[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    kvbm_layout_destroy(layout);
}

static void test_other_process(void **state)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};
    struct iovec none = {NULL, 0};
    (void)state;

    if (process_vm_readv(getppid(), &none, 1, &none, 1, 0) < 0 && errno == ENOSYS)
        skip_because("no process_vm_readv");
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        struct kvbm_layout_config c = known_config(kinds[i]);

        read_of_other(&c);
    }
}

/* ---- the bytes of docs/formats.md ---- */

static void test_exact_bytes(void **state)
{
    static const uint8_t head[] = {
        'K',  'V', 'B',  'M',  'L', 'Y', 'T', '\n', /* magic */
        1,    0,   0,    0,    152, 0,   0,   0,    /* version, length */
        1,    0,   0,    0,    5,   0,   0,   0,    /* kind, layers */
        2,    0,   0,    0,    4,   0,   0,   0,    /* outer_dim, page_size */
        14,   0,   0,    0,    4,   0,   0,   0,    /* inner_dim, dtype width */
        0,    1,   0,    0,    2,   0,   0,   0,    /* alignment, heads */
        3,    0,   0,    0,    1,   0,   0,   0,    /* F32, HND */
        7,    0,   0,    0,    0,   0,   0,   0,    /* blocks */
        224,  0,   0,    0,    0,   0,   0,   0,    /* region */
        224,  0,   0,    0,    0,   0,   0,   0,    /* outer stride */
        192,  1,   0,    0,    0,   0,   0,   0,    /* layer stride */
        0,    9,   0,    0,    0,   0,   0,   0,    /* block stride */
        1,    0,   0,    0,    0,   0,   0,   0,    /* storages */
        0x03, 0,   0x34, 0x12, 0,   0,   0,   0,    /* the storage's address */
        0x00, 0,   0x01, 0,    0,   0,   0,   0,    /* its bytes */
        0x00, 1,   0x34, 0x12, 0,   0,   0,   0,    /* where block 0 begins */
        5,    0,   0,    0,    0,   0,   0,   0,    /* device */
        3,    0,   0,    0,    0,   0,   0,   0,    /* kind of memory: device */
    };
    struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
    struct kvbm_storage_opts opts = {.size = sizeof(opts),
                                     .kind = KVBM_STORAGE_EXTERNAL,
                                     .of = KVBM_STORAGE_DEVICE,
                                     .device_id = 5,
                                     .bytes = 0x10000,
                                     .memory = (void *)0x12340003};
    struct kvbm_storage *storage;
    struct kvbm_layout *layout, *back = NULL;
    struct kvbm_view view;
    uint8_t bytes[CAP], sum[8];
    (void)state;

    c.inner_dim = 14;
    c.num_heads = 2;
    c.dtype = KVX_DTYPE_F32;
    c.order = KVBM_ORDER_HND;
    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    assert_int_equal(kvbm_layout_create(&c, &storage, 1, &layout), 0);
    assert_int_equal(write_down(layout, bytes), sizeof(head) + 8);
    assert_memory_equal(bytes, head, sizeof(head));
    put(sum, kv_xxh64(head, sizeof(head), 0), 8);
    assert_memory_equal(bytes + sizeof(head), sum, 8);
    assert_int_equal(kvbm_layout_deserialise(bytes, sizeof(head) + 8, &back), 0);
    assert_int_equal(kvbm_layout_region(back, 6, 4, 1, &view), 0);
    assert_true(view.addr == 0x12340100 + 6 * 2304 + 4 * 448 + 224);
    assert_true(view.kind == KVBM_STORAGE_DEVICE && view.device_id == 5 && view.len == 224);
    kvbm_layout_destroy(back);
    kvbm_layout_destroy(layout);
    kvbm_storage_destroy(storage);
}

static void test_room(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS);
    struct kvbm_layout *layout = allocate(&c, KVBM_STORAGE_NULL);
    uint8_t bytes[CAP];
    size_t needed = 0;
    (void)state;

    assert_int_equal(kvbm_layout_serialise(layout, NULL, 0, &needed), -ENOSPC);
    assert_int_equal(needed, 104 + 5 * 40 + 8);
    memset(bytes, 7, sizeof(bytes));
    assert_int_equal(kvbm_layout_serialise(layout, bytes, needed - 1, NULL), -ENOSPC);
    assert_int_equal(bytes[0], 7);
    assert_int_equal(kvbm_layout_serialise(layout, bytes, needed, NULL), needed);
    assert_int_equal(bytes[needed], 7);
    kvbm_layout_destroy(layout);
}

/* ---- what isn't believed ---- */

static size_t known_bytes(enum kvbm_layout_kind kind, uint8_t bytes[CAP])
{
    struct kvbm_layout_config c = known_config(kind);
    struct kvbm_layout *layout = allocate(&c, KVBM_STORAGE_NULL);
    size_t len = write_down(layout, bytes);

    kvbm_layout_destroy(layout);
    return len;
}

/* Every truncation, every flipped bit, and what follows the end. Copies are exact, for the
 * sanitizer. */
static void test_damage(void **state)
{
    uint8_t bytes[CAP];
    size_t len = known_bytes(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, bytes);
    struct kvbm_layout *layout = NULL;
    (void)state;

    for (size_t cut = 0; cut <= len + 1; cut++) {
        uint8_t *copy = malloc(cut ? cut : 1);

        assert_non_null(copy);
        memcpy(copy, bytes, cut);
        assert_int_equal(read_back(copy, cut), cut == len ? 0 : -EPROTO);
        free(copy);
    }
    for (size_t bit = 0; bit < len * 8; bit++) {
        int rc;

        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        rc = read_back(bytes, len);
        assert_true(rc == -EPROTO || (rc == -EPROTONOSUPPORT && bit / 8 >= 8 && bit / 8 < 12));
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    assert_int_equal(read_back(bytes, len), 0);
    assert_int_equal(kvbm_layout_deserialise(NULL, len, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_deserialise(bytes, len, NULL), -EINVAL);
}

/* Of a newer version nothing but its number is known, not even that it is longer. */
static void test_versions(void **state)
{
    uint8_t bytes[CAP];
    size_t len = known_bytes(KVBM_FULLY_CONTIGUOUS, bytes);
    (void)state;

    put(bytes + 8, 2, 4);
    assert_int_equal(read_back(bytes, len), -EPROTONOSUPPORT);
    assert_int_equal(read_back(bytes, 16), -EPROTONOSUPPORT);
    assert_int_equal(read_back(bytes, 15), -EPROTO);
    put(bytes + 8, 0, 4);
    sign(bytes, len);
    assert_int_equal(read_back(bytes, len), -EPROTO);
}

/* Contradictions under a right checksum: each field changed to each of these. */
static void test_contradictions(void **state)
{
    static const struct {
        size_t at;
        int n;
        uint64_t value;
    } changes[] = {
        {12, 4, 311},
        {16, 4, 0},
        {16, 4, 1},
        {16, 4, 2},
        {16, 4, 4},
        {16, 4, 5},
        {20, 4, 4},
        {20, 4, 0},
        {20, 4, 0x66666667 + 5}, /* 40 times it, cut to 32 bits, is as long */

        {24, 4, 3},
        {28, 4, 0},
        {28, 4, 3},
        {28, 4, 8},
        {32, 4, 0},
        {32, 4, 14},
        {36, 4, 0},
        {36, 4, 2},
        {36, 4, 3},
        {40, 4, 0},
        {40, 4, 3},

        {44, 4, 2},
        {48, 4, 1},
        {48, 4, 99},
        {52, 4, 1},
        {52, 4, 2},
        {56, 8, 0},
        {56, 8, 8},
        {56, 8, UINT64_MAX},
        {64, 8, 209},
        {72, 8, 0},
        {80, 8, 1},
        {88, 8, 255},
        {96, 4, 4},
        {100, 4, 1},
        /* of the second storage */
        {144, 8, 0},
        {144, 8, UINT64_MAX},
        {144, 8, UINT64_C(0x100000001)},
        {152, 8, 0},
        {152, 8, 256 * 14 - 1},
        {152, 8, UINT64_MAX},
        {160, 8, 0},
        {160, 8, UINT64_C(0x100000001)},
        {160, 8, UINT64_C(0x100000100)},
        {160, 8, UINT64_C(0xff000000)},
        {168, 8, 1},
        {176, 4, 0},
        {176, 4, 5},
        {176, 4, 7},
        {176, 4, 1},
        {180, 4, 1},
    };
    uint8_t bytes[CAP], was[CAP];
    size_t len = known_bytes(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, was);
    (void)state;

    for (size_t i = 0; i < KV_COUNT(changes); i++) {
        memcpy(bytes, was, len);
        put(bytes + changes[i].at, changes[i].value, changes[i].n);
        sign(bytes, len);
        if (read_back(bytes, len) != -EPROTO)
            fail_msg("%llu at %zu is believed", (unsigned long long)changes[i].value,
                     changes[i].at);
    }
}

static void test_starved(void **state)
{
    uint8_t bytes[CAP];
    size_t len = known_bytes(KVBM_FULLY_CONTIGUOUS, bytes);
    struct kvbm_layout *layout = NULL;
    (void)state;

    starve_at(1);
    assert_int_equal(kvbm_layout_deserialise(bytes, len, &layout), -ENOMEM);
    starve_at(2);
    assert_null(layout);
    assert_int_equal(kvbm_layout_deserialise(bytes, len, &layout), 0);
    assert_false(starved());
    starve_at(0);
    kvbm_layout_destroy(layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_unaligned),
        cmocka_unit_test(test_other_process), cmocka_unit_test(test_exact_bytes),
        cmocka_unit_test(test_room),          cmocka_unit_test(test_damage),
        cmocka_unit_test(test_versions),      cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
