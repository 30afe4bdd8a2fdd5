// SPDX-License-Identifier: Apache-2.0
/*
 * Shared memory: what a reader sees of an owner's blocks, and descriptors that a hostile owner could
 * pass in its place. Every one of these must be refused before anything of it is read by address.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "bm/storage/layout.h"
#include "peer/set/shared.h"
#include "peer/set/shared_header.h"
#include "peer_unit.h"

struct region {
    struct kvbm_shared *shared;
    struct kvbm_layout *layout; /* the owner's */
    struct kvbm_layout *told;   /* as a reader gets it */
};

static void region_init(struct region *r, const struct kvbm_layout_config *config, bool huge)
{
    struct kvbm_layout_shape shape;
    struct kvbm_shared_opts opts = {.size = sizeof(opts), .huge_pages = huge};
    struct kvbm_allocator allocator;
    uint8_t bytes[4096];
    long len;

    memset(r, 0, sizeof(*r));
    assert_int_equal(kvbm_layout_compute(config, &shape), 0);
    opts.bytes = shape.n_storages * ((shape.required_bytes + 63) / 64 * 64);
    opts.n_blocks = (uint32_t)config->num_blocks;
    assert_int_equal(kvbm_shared_create(&opts, &r->shared), 0);
    allocator = kvbm_shared_allocator(r->shared);
    assert_int_equal(kvbm_layout_allocate(config, &allocator, &r->layout), 0);
    assert_true(kvbm_shared_holds(r->shared, r->layout));
    len = kvbm_layout_serialise(r->layout, bytes, sizeof(bytes), NULL);
    assert_true(len > 0);
    assert_int_equal(kvbm_layout_deserialise(bytes, (size_t)len, &r->told), 0);
}

static void region_fini(struct region *r)
{
    kvbm_layout_destroy(r->told);
    kvbm_layout_destroy(r->layout);
    kvbm_shared_destroy(r->shared);
}

static char *at_owner(const struct region *r, uint32_t block, uint32_t layer, uint32_t outer,
                      struct kvbm_view *view)
{
    assert_int_equal(kvbm_layout_region(r->layout, block, layer, outer, view), 0);
    return (char *)(uintptr_t)view->addr;
}

static void fill(const struct region *r, uint8_t salt)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(r->layout);
    struct kvbm_view view;

    for (uint32_t b = 0; b < c->num_blocks; b++) {
        for (uint32_t l = 0; l < c->num_layers; l++) {
            for (uint32_t o = 0; o < c->outer_dim; o++) {
                char *to = at_owner(r, b, l, o, &view);

                memset(to, (int)(salt + b * 31 + l * 7 + o), view.len);
            }
        }
    }
}

static void check_reader(const struct region *r, const struct kvbm_mapped *mapped, uint8_t salt)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(r->told);
    struct kvbm_view view;

    for (uint32_t b = 0; b < c->num_blocks; b++) {
        for (uint32_t l = 0; l < c->num_layers; l++) {
            for (uint32_t o = 0; o < c->outer_dim; o++) {
                const char *from;

                assert_int_equal(kvbm_layout_region(r->told, b, l, o, &view), 0);
                from = mapped->data + (view.addr - mapped->owner_addr);
                for (uint64_t i = 0; i < view.len; i++)
                    assert_int_equal((uint8_t)from[i], (uint8_t)(salt + b * 31 + l * 7 + o));
            }
        }
    }
}

/* Readers see what the owner writes, generations too, in layouts of every kind. */
static void test_reader_sees_the_owner(void **state)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};

    (void)state;
    for (size_t i = 0; i < 2 * KV_COUNT(kinds); i++) {
        struct kvbm_layout_config config = small_config();
        struct kvbm_mapped mapped;
        struct region r;

        config.kind = kinds[i / 2];
        config.alignment = i % 2 ? 4096 : 0;
        region_init(&r, &config, i % 2);
        assert_int_equal(kvbm_shared_map(r.shared->fd, r.shared->id, r.told, &mapped), 0);
        fill(&r, 3);
        check_reader(&r, &mapped, 3);
        fill(&r, 90);
        check_reader(&r, &mapped, 90);
        assert_int_equal(atomic_load(&mapped.table[5]), 1);
        atomic_fetch_add(&r.shared->table[5], 4);
        assert_int_equal(atomic_load(&mapped.table[5]), 5);
        kvbm_shared_unmap(&mapped);
        region_fini(&r);
    }
}

/* A reader's mapping outlives the owner's. */
static void test_outlives_the_owner(void **state)
{
    struct kvbm_layout_config config = small_config();
    struct kvbm_mapped mapped;
    struct region r;

    (void)state;
    region_init(&r, &config, false);
    fill(&r, 17);
    assert_int_equal(kvbm_shared_map(r.shared->fd, r.shared->id, r.told, &mapped), 0);
    kvbm_layout_destroy(r.layout);
    kvbm_shared_destroy(r.shared);
    r.layout = NULL;
    r.shared = NULL;
    check_reader(&r, &mapped, 17);
    kvbm_shared_unmap(&mapped);
    region_fini(&r);
}

/* A reader that has the descriptor can neither write nor change its length. */
static void test_readers_cannot_write(void **state)
{
    struct kvbm_layout_config config = small_config();
    struct region r;
    char path[64];
    char byte = 1;
    int again;

    (void)state;
    region_init(&r, &config, false);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", r.shared->fd);
    again = open(path, O_RDWR | O_CLOEXEC);
    assert_true(again >= 0);
    assert_int_equal(ftruncate(again, 0), -1);
    assert_int_equal(ftruncate(again, (off_t)1 << 30), -1);
    assert_int_equal(fcntl(again, F_ADD_SEALS, F_SEAL_WRITE), -1);
    if (fcntl(again, F_GET_SEALS) & 0x0010 /* F_SEAL_FUTURE_WRITE, from Linux 5.1 on */) {
        assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0),
                         MAP_FAILED);
        assert_int_equal(pwrite(again, &byte, 1, 0), -1);
    }
    close(again);
    region_fini(&r);
}

/* ---- descriptors of liars ---- */

static void refused(int fd, const struct region *r)
{
    struct kvbm_mapped mapped = {0};

    assert_true(fd >= 0);
    assert_int_equal(kvbm_shared_map(fd, r->shared->id, r->told, &mapped), -EPROTO);
    assert_null(mapped.memory.memory);
    assert_null(mapped.generations.memory);
    close(fd);
}

static int memfd_of(unsigned flags, int seals, const void *data, size_t len, uint64_t size)
{
    int fd = memfd_create("liar", MFD_CLOEXEC | flags);

    if (fd < 0)
        return fd;
    assert_true(pwrite(fd, data, len, 0) == (ssize_t)len);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_true(!seals || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void test_not_a_sealed_memfd(void **state)
{
    struct kvbm_layout_config config = small_config();
    char path[] = "/dev/shm/kvbm-test-XXXXXX";
    int pipes[2], sockets[2], fd;
    struct region r;

    (void)state;
    region_init(&r, &config, false);
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    refused(pipes[0], &r);
    refused(pipes[1], &r);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
    refused(sockets[0], &r);
    refused(sockets[1], &r);
    refused(eventfd(0, EFD_CLOEXEC), &r);
    refused(open("/dev/zero", O_RDONLY | O_CLOEXEC), &r);
    refused(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), &r);
    fd = mkstemp(path); /* the same file system, but a file that its owner can cut */
    if (fd >= 0) {
        assert_true(pwrite(fd, r.shared->memory, r.shared->mapped, 0) > 0);
        assert_int_equal(unlink(path), 0);
        refused(fd, &r);
    }
    refused(memfd_of(MFD_ALLOW_SEALING, 0, r.shared->memory, r.shared->mapped, r.shared->mapped),
            &r);
    refused(memfd_of(MFD_ALLOW_SEALING, F_SEAL_GROW, r.shared->memory, r.shared->mapped,
                     r.shared->mapped),
            &r);
    refused(memfd_of(0, 0, r.shared->memory, r.shared->mapped, r.shared->mapped), &r);
    /* huge pages of which the owner can punch holes: SIGBUS once none is free */
    fd = memfd_create("liar", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
        refused(fd, &r);
    region_fini(&r);
}

/* A sealed memfd with a header of one's own, and a length. */
static int memfd_with(const struct region *r, const struct kvbm_shared_header *header, uint64_t len)
{
    return memfd_of(MFD_ALLOW_SEALING, F_SEAL_SHRINK, header, sizeof(*header),
                    len ? len : r->shared->mapped);
}

typedef void (*lie_fn)(struct kvbm_shared_header *h);

static void lie_magic(struct kvbm_shared_header *h)
{
    h->magic[3] ^= 1;
}
static void lie_version(struct kvbm_shared_header *h)
{
    h->version++;
}
static void lie_header(struct kvbm_shared_header *h)
{
    h->header_bytes = 8;
}
static void lie_id(struct kvbm_shared_header *h)
{
    h->id[15] ^= 1;
}
static void lie_total(struct kvbm_shared_header *h)
{
    h->total_bytes += 4096;
}
static void lie_table(struct kvbm_shared_header *h)
{
    h->table_at = h->total_bytes - 8;
}
static void lie_table_far(struct kvbm_shared_header *h)
{
    h->table_at = UINT64_MAX - 7;
}
static void lie_table_odd(struct kvbm_shared_header *h)
{
    h->table_at += 4;
}
static void lie_blocks(struct kvbm_shared_header *h)
{
    h->n_blocks = UINT64_MAX / 8;
}
static void lie_few_blocks(struct kvbm_shared_header *h)
{
    h->n_blocks = 5;
}
static void lie_data(struct kvbm_shared_header *h)
{
    h->data_at = UINT64_MAX - 4095;
}
static void lie_data_end(struct kvbm_shared_header *h)
{
    h->data_at += 4096;
}
static void lie_bytes(struct kvbm_shared_header *h)
{
    h->data_bytes = UINT64_MAX;
}
static void lie_few_bytes(struct kvbm_shared_header *h)
{
    h->data_bytes = 4096;
}
static void lie_addr(struct kvbm_shared_header *h)
{
    h->owner_addr += 4096;
}
static void lie_addr_low(struct kvbm_shared_header *h)
{
    h->owner_addr = 0;
}
static void lie_addr_end(struct kvbm_shared_header *h)
{
    h->owner_addr = UINT64_MAX;
}

static void test_headers_that_lie(void **state)
{
    static const lie_fn lies[] = {
        lie_magic,     lie_version,   lie_header, lie_id,         lie_total,   lie_table,
        lie_table_far, lie_table_odd, lie_blocks, lie_few_blocks, lie_data,    lie_data_end,
        lie_bytes,     lie_few_bytes, lie_addr,   lie_addr_low,   lie_addr_end};
    struct kvbm_layout_config config = small_config();
    struct kvbm_shared_header good;
    struct kvbm_mapped mapped;
    struct region r;
    int fd;

    (void)state;
    config.page_size = 64; /* more than a page of data */
    region_init(&r, &config, false);
    memcpy(&good, r.shared->memory, sizeof(good));
    fd = memfd_with(&r, &good, 0);
    assert_int_equal(kvbm_shared_map(fd, r.shared->id, r.told, &mapped), 0); /* it is as told */
    kvbm_shared_unmap(&mapped);
    close(fd);
    for (size_t i = 0; i < KV_COUNT(lies); i++) {
        struct kvbm_shared_header bad = good;

        lies[i](&bad);
        refused(memfd_with(&r, &bad, 0), &r); /* damaged */
        bad.sum = kvbm_shared_header_sum(&bad);
        refused(memfd_with(&r, &bad, 0), &r); /* meant so */
    }
    refused(memfd_with(&r, &good, 8), &r);
    refused(memfd_with(&r, &good, sizeof(good)), &r);
    refused(memfd_with(&r, &good, r.shared->mapped - 4096), &r);
    refused(memfd_with(&r, &good, r.shared->mapped + 4096), &r);
    region_fini(&r);
}

#define SETS 84
#define CLAIMED (UINT64_C(85) << 40)

/* A small set in sparse memfds of many terabytes: what it needs is mapped, and no more. */
static void test_claimed_length(void **state)
{
    static struct kvbm_mapped mapped[SETS];
    struct kvbm_layout_config config = small_config();
    struct kvbm_shared_header header;
    struct region r;

    (void)state;
    region_init(&r, &config, false);
    memcpy(&header, r.shared->memory, sizeof(header));
    header.total_bytes = CLAIMED;
    header.data_bytes = CLAIMED - header.data_at;
    if (header.owner_addr > UINT64_MAX - header.data_bytes)
        header.data_bytes = UINT64_MAX - header.owner_addr;
    header.sum = kvbm_shared_header_sum(&header);
    for (size_t i = 0; i < SETS; i++) {
        int fd = memfd_with(&r, &header, CLAIMED);

        assert_true(fd >= 0);
        assert_int_equal(kvbm_shared_map(fd, r.shared->id, r.told, &mapped[i]), 0);
        assert_true(mapped[i].memory.len + mapped[i].generations.len < 1 << 20);
        assert_int_equal(atomic_load(&mapped[i].table[5]), 0);
        close(fd);
    }
    for (size_t i = 0; i < SETS; i++)
        kvbm_shared_unmap(&mapped[i]);
    region_fini(&r);
}

/* A set that needs many terabytes itself, or some megabytes whose pages aren't there. */
static void set_without_memory(uint64_t num_blocks)
{
    const struct kvbm_storage_opts null = {.size = sizeof(null), .kind = KVBM_STORAGE_NULL};
    struct kvbm_allocator allocator = kvbm_allocator_of(&null);
    struct kvbm_layout_config config = small_config();
    struct kvbm_shared_header header;
    struct kvbm_layout *layout = NULL, *told = NULL;
    struct kvbm_mapped mapped = {0};
    struct region r;
    uint8_t bytes[4096];
    long len;
    int fd;

    region_init(&r, &config, false);
    config.num_blocks = num_blocks;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    len = kvbm_layout_serialise(layout, bytes, sizeof(bytes), NULL);
    assert_true(len > 0);
    assert_int_equal(kvbm_layout_deserialise(bytes, (size_t)len, &told), 0);
    memcpy(&header, r.shared->memory, sizeof(header));
    header.n_blocks = num_blocks;
    header.data_at = (header.table_at + num_blocks * 8 + 4095) / 4096 * 4096;
    header.owner_addr = told->places[0].addr / 4096 * 4096;
    header.data_bytes = told->shape.data_bytes + 8192;
    header.total_bytes = header.data_at + header.data_bytes;
    header.sum = kvbm_shared_header_sum(&header);
    fd = memfd_with(&r, &header, header.total_bytes);
    assert_true(fd >= 0);
    assert_int_equal(kvbm_shared_map(fd, r.shared->id, told, &mapped), -EPROTO);
    assert_null(mapped.memory.memory);
    close(fd);
    kvbm_layout_destroy(layout);
    kvbm_layout_destroy(told);
    region_fini(&r);
}

static void test_sets_without_memory(void **state)
{
    (void)state;
    set_without_memory(UINT64_C(1) << 31);
    set_without_memory(UINT64_C(1) << 14);
}

/* Holes that the owner punches read as zeros: old bytes or none, never the end of the reader. */
static void test_holes_are_zeros(void **state)
{
    struct kvbm_layout_config config = small_config();
    struct kvbm_shared_header good;
    struct kvbm_mapped mapped;
    struct region r;
    char byte = 1;
    int fd;

    (void)state;
    region_init(&r, &config, false);
    memcpy(&good, r.shared->memory, sizeof(good));
    fd = memfd_with(&r, &good, 0);
    assert_int_equal(kvbm_shared_map(fd, r.shared->id, r.told, &mapped), 0);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)good.data_at), 1);
    assert_int_equal(mapped.data[0], 1);
    assert_int_equal(
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)r.shared->mapped), 0);
    for (size_t i = 0; i < mapped.data_bytes; i++)
        assert_int_equal(mapped.data[i], 0);
    close(fd);
    kvbm_shared_unmap(&mapped);
    region_fini(&r);
}

static void test_options(void **state)
{
    struct kvbm_shared_opts opts = {.size = sizeof(opts), .bytes = 100, .n_blocks = 1};
    struct kvbm_layout_config config = small_config();
    struct kvbm_shared *shared = NULL;
    struct kvbm_layout *layout = NULL;
    struct kvbm_allocator allocator;

    (void)state;
    assert_int_equal(kvbm_shared_create(NULL, &shared), -EINVAL);
    assert_int_equal(kvbm_shared_create(&opts, NULL), -EINVAL);
    opts.bytes = 0;
    assert_int_equal(kvbm_shared_create(&opts, &shared), -EINVAL);
    opts.bytes = UINT64_MAX;
    assert_int_equal(kvbm_shared_create(&opts, &shared), -EINVAL);
    opts.bytes = 100;
    opts.n_blocks = 0;
    assert_int_equal(kvbm_shared_create(&opts, &shared), -EINVAL);
    opts.n_blocks = 1;
    opts.bytes = (uint64_t)1 << 50; /* no machine has it */
    assert_int_equal(kvbm_shared_create(&opts, &shared), -ENOMEM);
    assert_null(shared);
    opts.bytes = 100;
    assert_int_equal(kvbm_shared_create(&opts, &shared), 0);
    allocator = kvbm_shared_allocator(shared);
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), -ENOSPC);
    kvbm_shared_destroy(shared);
    kvbm_shared_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reader_sees_the_owner),
        cmocka_unit_test(test_outlives_the_owner),
        cmocka_unit_test(test_readers_cannot_write),
        cmocka_unit_test(test_not_a_sealed_memfd),
        cmocka_unit_test(test_claimed_length),
        cmocka_unit_test(test_sets_without_memory),
        cmocka_unit_test(test_headers_that_lie),
        cmocka_unit_test(test_holes_are_zeros),
        cmocka_unit_test(test_options),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
