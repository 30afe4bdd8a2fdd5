// SPDX-License-Identifier: Apache-2.0
/**
 * The conformance kit, internal to the room. conformance.c runs the checks and has what they share;
 * conformance_abi.c, _chunks.c, _manifests.c, _names.c, _threads.c, _kill.c and _ext.c are the checks.
 * Each tests one promise of include/kv_store_abi.h (or kv_store_ext.h) through a fresh handle.
 *
 * Checks open, allocate, put and publish through these helpers. The runner releases and removes all
 * of that, so a check may return in the middle.
 */
#ifndef KV_STORE_CONFORMANCE_CONFORMANCE_H
#define KV_STORE_CONFORMANCE_CONFORMANCE_H

#include <sys/types.h>

#include "base/core/error.h"
#include "kv_store.h"

#define KVS_CONF_MAX_KEY 64
#define KVS_CONF_PREFIX "kvs-conformance-"

struct kvs_conf_key {
    size_t len;
    uint8_t bytes[KVS_CONF_MAX_KEY];
};

struct kvs_conf {
    const kv_store_vtable *vt;
    const kv_store_ext *ext; /* NULL: the backend has no extensions */
    const char *uri;
    const char *library; /* file the backend is in; NULL: built in */
    uint64_t run;        /* part of every key and name of this run */
    uint64_t n_made;
    char detail[256];
    char advice[256]; /* "": no advice */
    int nursery;      /* socket to the process that makes children; -1: there is none */
    pid_t nursery_pid;

    /* state of the check that runs */
    kv_store_v1 *h; /* handles[0] */
    kv_store_v1 **handles;
    void **blocks;
    char **names;
    struct kvs_conf_key *keys;
    size_t n_handles, n_blocks, n_names, n_keys;
};

typedef enum kvs_verdict (*kvs_conf_fn)(struct kvs_conf *c);
struct kvs_conf_check {
    const char *name;
    kvs_conf_fn run;
};

/** True when the backend's table is long enough to have @field, and the field isn't NULL. */
#define KVS_CONF_HAS(c, field)                                                                \
    ((c)->ext && (c)->ext->size >= offsetof(kv_store_ext, field) + sizeof((c)->ext->field) && \
     (c)->ext->field)

/** The checks. Each list ends with an entry whose name is NULL. */
extern const struct kvs_conf_check KVS_CONF_ABI[], KVS_CONF_CHUNKS[], KVS_CONF_MANIFESTS[],
    KVS_CONF_NAMES[], KVS_CONF_THREADS[], KVS_CONF_KILL[], KVS_CONF_EXT[];
enum { KVS_CONF_N_LISTS = 7 };
/** All lists, in the order in which the runner takes them. */
extern const struct kvs_conf_check *const KVS_CONF_LISTS[KVS_CONF_N_LISTS];

/**
 * Run all checks, or the one named @only, against a backend. The check of the table always comes
 * first. @library as in struct kvs_conf. Returns the number of failed checks, or -EIO when even
 * open fails.
 */
int kvs_conf_run(const kv_store_vtable *vt, const kv_store_ext *ext, const char *uri,
                 const char *library, const char *only, kvs_check_fn each, void *arg);

/** Record why the check fails, and return KVS_FAIL. */
enum kvs_verdict kvs_conf_fail(struct kvs_conf *c, const char *fmt, ...) KV_PRINTF(2, 3);
/**
 * Record a warning: the specification allows this behaviour, but some consumers trip over it.
 * Returns KVS_PASS.
 */
enum kvs_verdict kvs_conf_advise(struct kvs_conf *c, const char *fmt, ...) KV_PRINTF(2, 3);
enum kvs_verdict kvs_conf_skip(struct kvs_conf *c, const char *fmt, ...) KV_PRINTF(2, 3);

/** Leave the check when one of its steps did not pass. */
#define KVS_CONF_TRY(step)                      \
    do {                                        \
        enum kvs_verdict kvs_verdict_ = (step); \
        if (kvs_verdict_ != KVS_PASS)           \
            return kvs_verdict_;                \
    } while (0)

/**
 * Allocate memory that the runner frees after the check. Only @seed decides its content. Never
 * NULL.
 */
uint8_t *kvs_conf_alloc(struct kvs_conf *c, size_t len);
uint8_t *kvs_conf_data(struct kvs_conf *c, size_t len, uint64_t seed);
void kvs_conf_fill(uint8_t *data, size_t len, uint64_t seed);
/** Make a key (a name) that no check has used before. */
struct kvs_conf_key kvs_conf_key(struct kvs_conf *c, size_t len);
const char *kvs_conf_name(struct kvs_conf *c, const char *suffix);
/** Have the runner delete this manifest after the check. */
void kvs_conf_forget_name(struct kvs_conf *c, const char *name);
void kvs_conf_forget_key(struct kvs_conf *c, const struct kvs_conf_key *key);

enum kvs_verdict kvs_conf_open(struct kvs_conf *c, kv_store_v1 **ret);
/** Close a handle of kvs_conf_open, or c->h, before the end of the check. */
void kvs_conf_close(struct kvs_conf *c, kv_store_v1 *handle);

/** Make one call and check its result. @want: what put_chunk must return; -1: 0 or 1. */
enum kvs_verdict kvs_conf_put(struct kvs_conf *c, kv_store_v1 *h, const struct kvs_conf_key *key,
                              const void *data, size_t len, int want);
enum kvs_verdict kvs_conf_get(struct kvs_conf *c, kv_store_v1 *h, const struct kvs_conf_key *key,
                              const void *data, size_t len);
enum kvs_verdict kvs_conf_get_none(struct kvs_conf *c, kv_store_v1 *h,
                                   const struct kvs_conf_key *key);
enum kvs_verdict kvs_conf_publish(struct kvs_conf *c, kv_store_v1 *h, const char *name,
                                  const void *data, size_t len);
enum kvs_verdict kvs_conf_read(struct kvs_conf *c, kv_store_v1 *h, const char *name,
                               const void *data, size_t len);
enum kvs_verdict kvs_conf_read_none(struct kvs_conf *c, kv_store_v1 *h, const char *name);
enum kvs_verdict kvs_conf_delete(struct kvs_conf *c, kv_store_v1 *h, const char *name);

/* -- Child processes (conformance_child.c) ----------------------------------------------------- */

enum kvs_conf_job_kind {
    KVS_CONF_CLOSE_NULL,
    KVS_CONF_SAVE,          /* put, publish, close */
    KVS_CONF_DIE_PUT,       /* put, then SIGKILL */
    KVS_CONF_DIE_PUBLISHED, /* put and publish, then SIGKILL */
    KVS_CONF_DIE_FLUSHED    /* put and flush, then SIGKILL */
};

/* Exit status of a child. */
enum { KVS_CONF_OPEN_FAILED = 1, KVS_CONF_PUT_FAILED, KVS_CONF_PUBLISH_FAILED };

enum { KVS_CONF_N_JOB_KEYS = 4 };
/** Length of each chunk of a job. Its bytes are kvs_conf_fill's of the job's seed plus its number. */
extern const size_t KVS_CONF_JOB_LENS[KVS_CONF_N_JOB_KEYS];

struct kvs_conf_job {
    enum kvs_conf_job_kind kind;
    uint64_t seed;
    struct kvs_conf_key keys[KVS_CONF_N_JOB_KEYS];
    char name[64]; /* of the manifest, and its bytes */
};

/**
 * Start the process that makes children. Call it before the backend is opened, since that may start
 * threads. In a process with threads nothing is started, and checks with children are skipped.
 */
void kvs_conf_start_nursery(struct kvs_conf *c);
void kvs_conf_end_nursery(struct kvs_conf *c);

/**
 * Run a job in a child and write its wait status to @ret. A child that takes longer than 30 s is
 * ended by SIGALRM. Returns KVS_PASS, or skips the check when there can be no child.
 */
enum kvs_verdict kvs_conf_child(struct kvs_conf *c, const struct kvs_conf_job *job, int *ret);

/**
 * Write the names of the symbols that the shared object at @path exports into @ret, joined by ", ".
 * Leaves out those that a backend may export. Returns their number or a negative errno.
 */
int kvs_conf_exports(const char *path, char *ret, size_t size);

#endif
