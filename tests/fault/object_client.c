// SPDX-License-Identifier: Apache-2.0
/*
 * A client of the object tier, for test_object_tier.py. Each input line is a command, answered by
 * one line.
 *
 *   put|get|exists FIRST N MS    blocks FIRST.. with a deadline, and wait: how many ended how
 *   storm THREADS MS DEADLINE    that many threads put and get for so long
 *   stats
 *
 * The bytes of a block follow from its number; blocks with other bytes are counted.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "tier/object/object.h"

enum { KEY = 8, MAX_N = 256, STORM_BLOCKS = 200, STORM_BATCH = 4, MAX_STORM = 16 };

static struct kvbm_object *object;
static size_t block_bytes;

struct tally {
    uint64_t ok, miss, bad, late, down, failed, wrong, over_ms;
};

struct job {
    struct kvbm_object_batch batch;
    struct kvbm_object_io ios[MAX_N];
    uint64_t keys[MAX_N], first, done_ns;
    uint8_t *data;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
};

static void fill(uint64_t number, uint8_t *data)
{
    uint64_t state = number * 977 + 1;

    for (size_t i = 0; i < block_bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        data[i] = (uint8_t)(state >> 56);
    }
}

static bool is_block(uint64_t number, const uint8_t *data)
{
    uint64_t state = number * 977 + 1;

    for (size_t i = 0; i < block_bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        if (data[i] != (uint8_t)(state >> 56))
            return false;
    }
    return true;
}

static void ended(struct kvbm_object_batch *batch)
{
    struct job *job = batch->arg;

    pthread_mutex_lock(&job->lock);
    job->done_ns = kv_now_ns();
    job->done = true;
    pthread_cond_signal(&job->ended);
    pthread_mutex_unlock(&job->lock);
}

static void count(const struct job *job, struct tally *t)
{
    for (uint32_t i = 0; i < job->batch.n; i++) {
        int status = job->ios[i].status;

        t->ok += status == 0;
        t->miss += status == -ENOENT;
        t->bad += status == -EBADMSG;
        t->late += status == -ETIMEDOUT;
        t->down += status == -EHOSTDOWN;
        t->failed += status < 0 && status != -ENOENT && status != -EBADMSG &&
                     status != -ETIMEDOUT && status != -EHOSTDOWN;
        t->wrong += status == 0 && job->batch.op == KVBM_OBJECT_GET &&
                    !is_block(job->first + i, job->ios[i].data);
    }
}

static int run(enum kvbm_object_op op, uint64_t first, uint32_t n, uint64_t ms, struct tally *t)
{
    struct job job = {.first = first, .data = calloc(n, block_bytes)};
    int rc;

    if (!job.data || n > MAX_N)
        return -ENOMEM;
    pthread_mutex_init(&job.lock, NULL);
    pthread_cond_init(&job.ended, NULL);
    for (uint32_t i = 0; i < n; i++) {
        job.keys[i] = first + i;
        job.ios[i].key = &job.keys[i];
        job.ios[i].data = job.data + i * block_bytes;
        if (op == KVBM_OBJECT_PUT)
            fill(first + i, job.ios[i].data);
    }
    job.batch =
        (struct kvbm_object_batch){.op = op,
                                   .flow = op == KVBM_OBJECT_PUT ? KVBM_OFFLOAD : KVBM_ONBOARD,
                                   .deadline_ns = kv_now_ns() + ms * KV_NS_PER_MS,
                                   .ios = job.ios,
                                   .n = n,
                                   .done = ended,
                                   .arg = &job};
    rc = kvbm_object_submit(object, &job.batch);
    pthread_mutex_lock(&job.lock);
    while (rc == 0 && !job.done)
        pthread_cond_wait(&job.ended, &job.lock);
    pthread_mutex_unlock(&job.lock);
    if (rc == 0) {
        count(&job, t);
        if (job.done_ns > job.batch.deadline_ns)
            t->over_ms = KV_MAX(t->over_ms, (job.done_ns - job.batch.deadline_ns) / KV_NS_PER_MS);
    } else {
        t->down += rc == -EHOSTDOWN ? n : 0;
        t->failed += rc == -EHOSTDOWN ? 0 : n;
    }
    free(job.data);
    return rc;
}

static void tell(const struct tally *t)
{
    printf("ok=%" PRIu64 " miss=%" PRIu64 " bad=%" PRIu64 " late=%" PRIu64 " down=%" PRIu64
           " failed=%" PRIu64 " wrong=%" PRIu64 " over_ms=%" PRIu64 "\n",
           t->ok, t->miss, t->bad, t->late, t->down, t->failed, t->wrong, t->over_ms);
}

/* -- storm ----------------------------------------------------------------------------------------- */

struct storm {
    pthread_t thread;
    uint64_t until_ns, deadline_ms, random;
    struct tally tally;
};

static void *blow(void *arg)
{
    struct storm *s = arg;

    while (kv_now_ns() < s->until_ns) {
        s->random = s->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        if (run((enum kvbm_object_op)((s->random >> 40) % 3), (s->random >> 50) % STORM_BLOCKS,
                STORM_BATCH, s->deadline_ms, &s->tally) < 0)
            usleep(2000);
    }
    return NULL;
}

static void storm(unsigned n, uint64_t ms, uint64_t deadline_ms)
{
    struct storm storms[MAX_STORM] = {0};
    struct tally sum = {0};

    n = KV_MIN(n, (unsigned)MAX_STORM);
    for (unsigned i = 0; i < n; i++) {
        storms[i].until_ns = kv_now_ns() + ms * KV_NS_PER_MS;
        storms[i].deadline_ms = deadline_ms;
        storms[i].random = 7919u * (i + 1);
        if (pthread_create(&storms[i].thread, NULL, blow, &storms[i]))
            abort();
    }
    for (unsigned i = 0; i < n; i++) {
        const struct tally *t = &storms[i].tally;

        pthread_join(storms[i].thread, NULL);
        sum.ok += t->ok;
        sum.miss += t->miss;
        sum.bad += t->bad;
        sum.late += t->late;
        sum.down += t->down;
        sum.failed += t->failed;
        sum.wrong += t->wrong;
        sum.over_ms = KV_MAX(sum.over_ms, t->over_ms);
    }
    tell(&sum);
}

static void stats(void)
{
    struct kvbm_object_stats s;

    kvbm_object_get_stats(object, &s);
    printf("hits=%" PRIu64 " puts=%" PRIu64 " already=%" PRIu64 " bad=%" PRIu64 " late=%" PRIu64
           " left_behind=%" PRIu64 " open=%d opened=%" PRIu64 "\n",
           s.hits, s.puts, s.already, s.bad, s.late, s.left_behind, s.open, s.opened);
}

static void obey(const char *line)
{
    struct tally tally = {0};
    uint64_t a = 0, b = 0, c = 0;
    char word[16] = "";

    if (sscanf(line, "%15s %" SCNu64 " %" SCNu64 " %" SCNu64, word, &a, &b, &c) < 1)
        return;
    if (!strcmp(word, "storm")) {
        storm((unsigned)a, b, c);
    } else if (!strcmp(word, "stats")) {
        stats();
    } else {
        run(!strcmp(word, "put")   ? KVBM_OBJECT_PUT
            : !strcmp(word, "get") ? KVBM_OBJECT_GET
                                   : KVBM_OBJECT_EXISTS,
            a, (uint32_t)b, c, &tally);
        tell(&tally);
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct kvbm_object_opts opts = {.size = sizeof(opts),
                                    .fingerprint = "test",
                                    .key_len = KEY,
                                    .n_threads = 3,
                                    .breaker_failures = 3,
                                    .breaker_reopen_ms = 50};
    char line[200];
    int rc;

    if (argc != 4) {
        fprintf(stderr, "usage: object_client URI BLOCK_BYTES TIMEOUT_MS\n");
        return 2;
    }
    block_bytes = strtoull(argv[2], NULL, 10);
    opts.uri = argv[1];
    opts.block_bytes = block_bytes;
    opts.timeout_ms = (uint32_t)strtoul(argv[3], NULL, 10);
    rc = kvbm_object_open(&opts, &object);
    printf("%d\n", rc);
    fflush(stdout);
    if (rc < 0)
        return 1;
    while (fgets(line, sizeof(line), stdin))
        obey(line);
    kvbm_object_close(object);
    return 0;
}
