// SPDX-License-Identifier: Apache-2.0
/* Checks that kill a process which uses the backend. SIGKILL takes the process's memory and threads,
 * not the kernel's page cache: whether data outlives a power cut is not checked. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "store/conformance/conformance.h"

/* How often each kind of death is tried: a backend's threads may win the race against the kill. */
#define ROUNDS 4

const size_t KVS_CONF_JOB_LENS[KVS_CONF_N_JOB_KEYS] = {1, 4096, 70000, 3 << 20};

static struct kvs_conf_job make_job(struct kvs_conf *c, enum kvs_conf_job_kind kind)
{
    struct kvs_conf_job job = {.kind = kind, .seed = c->run + c->n_made};

    for (size_t i = 0; i < KVS_CONF_N_JOB_KEYS; i++)
        job.keys[i] = kvs_conf_key(c, 32);
    snprintf(job.name, sizeof(job.name), "%s", kvs_conf_name(c, ""));
    return job;
}

/* Run the job in a child that must be killed by its own hand, or end with 0 when it saves. */
static enum kvs_verdict run_job(struct kvs_conf *c, const struct kvs_conf_job *job)
{
    static const char *const FAILED[] = {[KVS_CONF_OPEN_FAILED] = "open",
                                         [KVS_CONF_PUT_FAILED] = "put_chunk",
                                         [KVS_CONF_PUBLISH_FAILED] = "put_manifest or flush"};
    int status, wanted = job->kind == KVS_CONF_SAVE ? 0 : SIGKILL;

    KVS_CONF_TRY(kvs_conf_child(c, job, &status));
    if (WIFSIGNALED(status) && WTERMSIG(status) != wanted)
        return kvs_conf_fail(c, "signal %d ended a process that saved%s", WTERMSIG(status),
                             WTERMSIG(status) == SIGALRM ? ": it took too long" : "");
    if (WIFEXITED(status) && WEXITSTATUS(status) > 0)
        return kvs_conf_fail(c, "%s failed in another process",
                             WEXITSTATUS(status) < (int)KV_COUNT(FAILED)
                                 ? FAILED[WEXITSTATUS(status)]
                                 : "a call (it ended the process), or all");
    return status == wanted ? KVS_PASS : kvs_conf_fail(c, "a process ended early");
}

/* Find the job's chunks whole, through @h. */
static enum kvs_verdict find_chunks(struct kvs_conf *c, kv_store_v1 *h,
                                    const struct kvs_conf_job *job)
{
    for (size_t i = 0; i < KVS_CONF_N_JOB_KEYS; i++)
        KVS_CONF_TRY(kvs_conf_get(c, h, &job->keys[i],
                                  kvs_conf_data(c, KVS_CONF_JOB_LENS[i], job->seed + i),
                                  KVS_CONF_JOB_LENS[i]));
    return KVS_PASS;
}

/* Tell whether one process sees what another has saved: not so with a store in memory. */
static enum kvs_verdict see_other_process(struct kvs_conf *c)
{
    struct kvs_conf_job job = make_job(c, KVS_CONF_SAVE);
    uint8_t *data = NULL;
    size_t len;
    int rc;

    kvs_conf_close(c, c->h); /* so that a backend for one process at a time is right, too */
    KVS_CONF_TRY(run_job(c, &job));
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    rc = c->vt->get_manifest(c->h, job.name, &data, &len);
    if (rc < 0 && rc != -ENOENT)
        return kvs_conf_fail(c, "get_manifest returned %d for what another process has saved", rc);
    if (rc < 0)
        return kvs_conf_skip(c, "not tried, as a process doesn't see what another has saved: all "
                                "may be lost when an engine ends");
    free(data);
    KVS_CONF_TRY(kvs_conf_read(c, c->h, job.name, job.name, strlen(job.name)));
    KVS_CONF_TRY(find_chunks(c, c->h, &job));
    kvs_conf_close(c, c->h);
    return KVS_PASS;
}

/* Kill a process right behind its call of put_manifest or flush. All is there for a new handle. */
static enum kvs_verdict check_killed(struct kvs_conf *c)
{
    bool flushes = KVS_CONF_HAS(c, flush);

    KVS_CONF_TRY(see_other_process(c));
    for (unsigned i = 0; i < ROUNDS * (flushes ? 2 : 1); i++) {
        bool published = i < ROUNDS;
        struct kvs_conf_job job =
            make_job(c, published ? KVS_CONF_DIE_PUBLISHED : KVS_CONF_DIE_FLUSHED);

        KVS_CONF_TRY(run_job(c, &job));
        KVS_CONF_TRY(kvs_conf_open(c, &c->h));
        if (published)
            KVS_CONF_TRY(kvs_conf_read(c, c->h, job.name, job.name, strlen(job.name)));
        KVS_CONF_TRY(find_chunks(c, c->h, &job));
        kvs_conf_close(c, c->h);
    }
    return KVS_PASS;
}

/* Kill a process between its puts and put_manifest. What it left must not swallow the next put. */
static enum kvs_verdict check_killed_before(struct kvs_conf *c)
{
    KVS_CONF_TRY(see_other_process(c));
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct kvs_conf_job job = make_job(c, KVS_CONF_DIE_PUT);
        kv_store_v1 *other;

        KVS_CONF_TRY(run_job(c, &job));
        KVS_CONF_TRY(kvs_conf_open(c, &c->h));
        for (size_t k = 0; k < KVS_CONF_N_JOB_KEYS; k++)
            KVS_CONF_TRY(kvs_conf_put(c, c->h, &job.keys[k],
                                      kvs_conf_data(c, KVS_CONF_JOB_LENS[k], job.seed + k),
                                      KVS_CONF_JOB_LENS[k], -1));
        KVS_CONF_TRY(kvs_conf_publish(c, c->h, job.name, "m", 1));
        KVS_CONF_TRY(kvs_conf_open(c, &other));
        KVS_CONF_TRY(find_chunks(c, other, &job));
        kvs_conf_close(c, other);
        kvs_conf_close(c, c->h);
    }
    return KVS_PASS;
}

const struct kvs_conf_check KVS_CONF_KILL[] = {
    {"kill: what was published or flushed is there", check_killed},
    {"kill: chunks that nobody published can be put again", check_killed_before},
    {NULL, NULL},
};
