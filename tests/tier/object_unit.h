// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of the object tier: a store in a folder of its own, batches that can be
 * waited for, blocks whose bytes follow from their group and number, so that a wrong one is seen.
 */
#ifndef TESTS_TIER_OBJECT_UNIT_H
#define TESTS_TIER_OBJECT_UNIT_H

#include "support.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kv_store.h"
#include "tier/kitchen.h"
#include "tier/object/impl.h"
#include "tier/object/object.h"

enum { MAX_IOS = 700, KEY_LEN = 16, BLOCK = 5000 };

#define SOON_NS (60 * KV_NS_PER_S) /* only reached when something is broken */

static char folder[64], shaky_uri[100];

struct job {
    struct kvbm_object_batch batch;
    struct kvbm_object_io ios[MAX_IOS];
    uint8_t keys[MAX_IOS][KVBM_MAX_KEY];
    uint8_t *data;
    size_t block;
    uint64_t first;
    _Atomic int done;
    uint64_t done_ns;
    unsigned order; /* of the ends */
};

static _Atomic unsigned n_ended;

static inline void job_done(struct kvbm_object_batch *batch)
{
    struct job *job = batch->arg;

    job->done_ns = kv_now_ns();
    job->order = atomic_fetch_add(&n_ended, 1);
    for (uint32_t i = 0; i < batch->n; i++)
        if (batch->ios[i].status > 0 || batch->ios[i].status == -EINPROGRESS)
            abort();
    atomic_fetch_add(&job->done, 1);
}

static inline void block_key(uint64_t number, uint8_t key[KVBM_MAX_KEY])
{
    for (size_t i = 0; i < KVBM_MAX_KEY / 4; i++) {
        uint32_t word = (uint32_t)((number + 1) * (2 * i + 1) * 2654435761u);

        memcpy(key + 4 * i, &word, sizeof(word));
    }
}

static inline void block_bytes_of(uint32_t group, uint64_t number, uint8_t *ret, size_t len)
{
    uint64_t state = (number + 1) * 977 + group * UINT64_C(1000003) + 5;

    for (size_t i = 0; i < len; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        ret[i] = (uint8_t)(state >> 56);
    }
}

/* Blocks @first.. of group 0; for a put with their bytes, for a get with 0xee. */
static inline struct job *job_new(enum kvbm_object_op op, uint64_t first, uint32_t n, size_t block)
{
    struct job *job = calloc(1, sizeof(*job));

    assert_true(job && n <= MAX_IOS);
    job->block = block;
    job->first = first;
    job->data = malloc(n * block);
    memset(job->data, 0xee, n * block);
    for (uint32_t i = 0; i < n; i++) {
        block_key(first + i, job->keys[i]);
        if (op == KVBM_OBJECT_PUT)
            block_bytes_of(0, first + i, job->data + i * block, block);
        job->ios[i].status = -EINPROGRESS;
        job->ios[i].key = job->keys[i];
        job->ios[i].data = op == KVBM_OBJECT_EXISTS ? NULL : job->data + i * block;
    }
    job->batch =
        (struct kvbm_object_batch){.op = op,
                                   .flow = op == KVBM_OBJECT_PUT ? KVBM_OFFLOAD : KVBM_ONBOARD,
                                   .ios = job->ios,
                                   .n = n,
                                   .done = job_done,
                                   .arg = job};
    return job;
}

static inline void job_set_group(struct job *job, uint32_t group)
{
    for (uint32_t i = 0; i < job->batch.n; i++) {
        job->ios[i].group = group;
        if (job->batch.op == KVBM_OBJECT_PUT)
            block_bytes_of(group, job->first + i, job->ios[i].data, job->block);
    }
}

static inline void job_wait(struct job *job)
{
    uint64_t until = kv_now_ns() + SOON_NS;

    while (!job->done && kv_now_ns() < until)
        usleep(200);
    assert_int_equal(job->done, 1);
}

/* A block that is there is right. */
static inline bool job_is_right(const struct job *job, uint32_t i)
{
    const struct kvbm_object_io *io = &job->ios[i];
    uint8_t *want;
    bool right;

    if (job->batch.op != KVBM_OBJECT_GET || io->status != 0)
        return true;
    want = malloc(job->block);
    block_bytes_of(io->group, job->first + i, want, job->block);
    right = memcmp(want, io->data, job->block) == 0;
    free(want);
    return right;
}

static inline void job_free(struct job *job)
{
    for (uint32_t i = 0; i < job->batch.n; i++)
        assert_true(job_is_right(job, i));
    memset(job->data, 0xdd, job->batch.n * job->block); /* whoever still writes to it is seen */
    free(job->data);
    free(job);
}

/* Submitted, waited for, all of it with status @want. */
static inline void expect(struct kvbm_object *o, enum kvbm_object_op op, uint64_t first, uint32_t n,
                          int want)
{
    struct job *job = job_new(op, first, n, BLOCK);

    job->batch.deadline_ns = kv_now_ns() + SOON_NS; /* whatever timeout_ms the test has chosen */
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    job_wait(job);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(job->ios[i].status, want);
    job_free(job);
}

#define SLACK_NS (30 * KV_NS_PER_S) /* what a busy machine may add to a deadline */

static inline struct job *submit(struct kvbm_object *o, enum kvbm_object_op op, uint64_t first,
                                 uint32_t n, uint64_t ms)
{
    struct job *job = job_new(op, first, n, BLOCK);

    job->batch.deadline_ns = ms ? kv_now_ns() + ms * KV_NS_PER_MS : 0;
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    return job;
}

static inline void ends(struct job *job, int status)
{
    job_wait(job);
    for (uint32_t i = 0; i < job->batch.n; i++)
        assert_int_equal(job->ios[i].status, status);
    if (job->batch.deadline_ns)
        assert_true(job->done_ns < job->batch.deadline_ns + SLACK_NS);
    job_free(job);
}

static inline struct kvbm_object_opts default_opts(const char *uri)
{
    return (struct kvbm_object_opts){.size = sizeof(struct kvbm_object_opts),
                                     .uri = uri,
                                     .fingerprint = "model-a/fp16/16",
                                     .key_len = KEY_LEN,
                                     .block_bytes = BLOCK};
}

static inline struct kvbm_object *open_with(const struct kvbm_object_opts *opts)
{
    struct kvbm_object *o = NULL;

    assert_int_equal(kvbm_object_open(opts, &o), 0);
    assert_non_null(o);
    return o;
}

static inline struct kvbm_object_stats stats_of(struct kvbm_object *o)
{
    struct kvbm_object_stats stats;

    kvbm_object_get_stats(o, &stats);
    return stats;
}

static inline int fresh_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof(folder), "/tmp/kvbm-object-%d", (int)getpid());
    (void)remove_dir(folder);
    snprintf(shaky_uri, sizeof(shaky_uri), "shaky://%s", folder);
    if (shaky)
        memset(shaky, 0, sizeof(*shaky));
    return 0;
}

static inline int remove_folder(void **state)
{
    (void)state;
    (void)remove_dir(folder);
    return 0;
}

#endif
