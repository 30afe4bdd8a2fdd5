// SPDX-License-Identifier: Apache-2.0
/* Checks with several threads. Each check runs until it has seen enough interleavings, not for a
 * time. A backend that fails rarely may still pass. */
#include <stdatomic.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "store/conformance/conformance.h"

#define N_THREADS 4
#define ROUNDS 16
#define GIVE_UP_NS (60 * KV_NS_PER_S)

/* Shared by the threads of a check. Keeps the first failure. */
struct crew {
    const kv_store_vtable *vt;
    kv_store_v1 *h;
    struct kvs_conf_key (*keys)[ROUNDS]; /* [N_THREADS] */
    const struct kvs_conf_key *shared;   /* [ROUNDS]: keys that all threads put */
    const char *const *names;            /* one per thread */
    _Atomic size_t ready;                /* number of rounds published */
    _Atomic bool stop, failed;
    char why[128]; /* written by the thread that set failed first */
};

struct member {
    struct crew *crew;
    unsigned number;
    pthread_t thread;
};

static void blame(struct crew *crew, const char *call, int rc)
{
    if (!atomic_exchange(&crew->failed, true))
        snprintf(crew->why, sizeof(crew->why), "%s returned %d, or other bytes than were put", call,
                 rc);
}

/* Generate the content of a key. Only the key decides it; sizes vary. */
static size_t content(const struct kvs_conf_key *key, uint8_t *data)
{
    uint64_t seed;
    size_t len;

    memcpy(&seed, key->bytes, sizeof(seed));
    len = 1000 + seed % 30000;
    kvs_conf_fill(data, len, seed);
    return len;
}

static bool put(struct crew *crew, const struct kvs_conf_key *key)
{
    uint8_t data[32000];
    size_t len = content(key, data);
    int rc = crew->vt->put_chunk(crew->h, key->bytes, key->len, data, len);

    if (rc != 0 && rc != 1)
        blame(crew, "put_chunk", rc);
    return rc == 0 || rc == 1;
}

static bool get(struct crew *crew, kv_store_v1 *h, const struct kvs_conf_key *key)
{
    uint8_t data[32000], *got = NULL;
    size_t len = content(key, data), got_len = 0;
    int rc = crew->vt->get_chunk(h, key->bytes, key->len, &got, &got_len);
    bool fine = rc == 0 && got && got_len == len && memcmp(got, data, len) == 0;

    if (rc == 0)
        free(got);
    if (!fine)
        blame(crew, "get_chunk", rc);
    return fine;
}

static bool publish(struct crew *crew, const char *name, const void *data, size_t len)
{
    int rc = crew->vt->put_manifest(crew->h, name, data, len);

    if (rc != 0)
        blame(crew, "put_manifest", rc);
    return rc == 0;
}

/* Start @n threads at @fn, run @meanwhile (may be NULL) and join. Returns the common verdict. */
static enum kvs_verdict run_crew(struct kvs_conf *c, struct crew *crew, unsigned n,
                                 void *(*fn)(void *), void (*meanwhile)(struct crew *, void *),
                                 void *arg)
{
    struct member members[N_THREADS];
    unsigned started = 0;

    for (; started < n; started++) {
        members[started] = (struct member){.crew = crew, .number = started};
        if (kv_thread_start(&members[started].thread, "conformance", fn, &members[started]) < 0) {
            blame(crew, "starting a thread", -EAGAIN);
            break;
        }
    }
    if (meanwhile && started == n)
        meanwhile(crew, arg);
    atomic_store(&crew->stop, true);
    for (unsigned i = 0; i < started; i++)
        pthread_join(members[i].thread, NULL);
    return atomic_load(&crew->failed) ? kvs_conf_fail(c, "%s", crew->why) : KVS_PASS;
}

static void make_keys(struct kvs_conf *c, struct crew *crew, size_t len)
{
    struct kvs_conf_key(*keys)[ROUNDS] =
        (struct kvs_conf_key(*)[ROUNDS])kvs_conf_alloc(c, N_THREADS * sizeof(*keys));
    struct kvs_conf_key *shared =
        (struct kvs_conf_key *)kvs_conf_alloc(c, ROUNDS * sizeof(*shared));

    for (unsigned i = 0; i < N_THREADS; i++)
        for (unsigned k = 0; k < ROUNDS; k++)
            keys[i][k] = kvs_conf_key(c, len);
    for (unsigned k = 0; k < ROUNDS; k++)
        shared[k] = kvs_conf_key(c, len);
    crew->keys = keys;
    crew->shared = shared;
}

/* -- One handle, several savers ---------------------------------------------------------------- */

static void *saver(void *arg)
{
    struct member *me = arg;
    struct crew *crew = me->crew;

    for (unsigned k = 0; k < ROUNDS && !atomic_load(&crew->failed); k++) {
        if (!put(crew, &crew->keys[me->number][k]) || !put(crew, &crew->shared[k]) ||
            !publish(crew, crew->names[me->number], &k, sizeof(k)) ||
            !get(crew, crew->h, &crew->keys[me->number][k]) ||
            !get(crew, crew->h, &crew->shared[k]) ||
            !get(crew, crew->h, &crew->keys[me->number][0]))
            break;
    }
    return NULL;
}

static enum kvs_verdict check_savers(struct kvs_conf *c)
{
    const char *names[N_THREADS];
    struct crew crew = {.vt = c->vt, .h = c->h, .names = names};
    unsigned last = ROUNDS - 1;
    kv_store_v1 *other;

    make_keys(c, &crew, 8);
    for (unsigned i = 0; i < N_THREADS; i++)
        names[i] = kvs_conf_name(c, "");
    KVS_CONF_TRY(run_crew(c, &crew, N_THREADS, saver, NULL, NULL));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (unsigned i = 0; i < N_THREADS; i++) {
        KVS_CONF_TRY(kvs_conf_read(c, other, names[i], &last, sizeof(last)));
        for (unsigned k = 0; k < ROUNDS; k++)
            if (!get(&crew, other, &crew.keys[i][k]) || !get(&crew, other, &crew.shared[k]))
                return kvs_conf_fail(c, "afterwards: %.200s", crew.why);
    }
    return KVS_PASS;
}

/* -- A saver and a reader on two handles ------------------------------------------------------- */

/* Fill a manifest with one letter, 'a' + n % 26, repeated 20000 + 1000 n % 26 times. */
static size_t letters(unsigned n, uint8_t *data)
{
    memset(data, 'a' + (int)(n % 26), 20000 + 1000 * (n % 26));
    return 20000 + 1000 * (n % 26);
}

static void *replacer(void *arg)
{
    struct crew *crew = ((struct member *)arg)->crew;
    uint8_t data[46000];

    for (unsigned n = 1; !atomic_load(&crew->stop) && !atomic_load(&crew->failed); n++) {
        size_t len = letters(n, data);

        if (!publish(crew, crew->names[0], data, len))
            break;
        atomic_store(&crew->ready, n);
    }
    return NULL;
}

static void watch(struct crew *crew, void *arg)
{
    kv_store_v1 *reader = arg;
    uint64_t deadline_ns = kv_now_ns() + GIVE_UP_NS;
    uint8_t data[46000];

    for (unsigned i = 0; i < 300 || atomic_load(&crew->ready) < 30; i++) {
        uint8_t *got = NULL;
        size_t len = 0;
        int rc = crew->vt->get_manifest(reader, crew->names[0], &got, &len);
        bool whole = rc == 0 && got && len > 0 && letters((unsigned)(got[0] - 'a'), data) == len &&
                     memcmp(got, data, len) == 0;

        if (rc == 0)
            free(got);
        if (!whole && !atomic_exchange(&crew->failed, true))
            snprintf(crew->why, sizeof(crew->why),
                     rc == 0 ? "a reader saw a mixture of two manifests"
                             : "a reader found no manifest while it was replaced (%d)",
                     rc);
        if (atomic_load(&crew->failed) || kv_now_ns() > deadline_ns)
            return;
    }
}

static enum kvs_verdict check_atomic(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");
    struct crew crew = {.vt = c->vt, .h = c->h, .names = &name};
    uint8_t first[46000];
    kv_store_v1 *reader;

    KVS_CONF_TRY(kvs_conf_open(c, &reader));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, first, letters(0, first)));
    return run_crew(c, &crew, 1, replacer, watch, reader);
}

/* -- One handle as the public Python consumer uses it: a writer thread, gets on other threads -- */

static void *writer(void *arg)
{
    struct crew *crew = ((struct member *)arg)->crew;

    for (unsigned k = 0; k < ROUNDS && !atomic_load(&crew->failed); k++) {
        for (unsigned i = 0; i < N_THREADS; i++)
            if (!put(crew, &crew->keys[i][k]))
                return NULL;
        if (!publish(crew, crew->names[0], "", 0)) /* an empty sentinel: it names no chunk */
            return NULL;
        atomic_store(&crew->ready, k + 1);
    }
    return NULL;
}

static void read_behind(struct crew *crew, void *arg)
{
    kv_store_v1 *reader = arg;
    uint64_t deadline_ns = kv_now_ns() + GIVE_UP_NS;
    size_t ready = 0;

    while (ready < ROUNDS && !atomic_load(&crew->failed)) {
        ready = atomic_load(&crew->ready);
        for (size_t k = ready > 2 ? ready - 2 : 0; k < ready; k++)
            for (unsigned i = 0; i < N_THREADS; i++)
                if (!get(crew, i % 2 ? reader : crew->h, &crew->keys[i][k]))
                    return;
        if (kv_now_ns() > deadline_ns) {
            blame(crew, "put_manifest (within a minute)", -ETIMEDOUT);
            return;
        }
    }
}

static enum kvs_verdict check_python_consumer(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "__index__");
    struct crew crew = {.vt = c->vt, .h = c->h, .names = &name};
    kv_store_v1 *reader;

    make_keys(c, &crew, 32);
    KVS_CONF_TRY(kvs_conf_open(c, &reader));
    KVS_CONF_TRY(run_crew(c, &crew, 1, writer, read_behind, reader));
    kvs_conf_close(c, c->h);
    /* a new handle finds every chunk; only the sentinel was published */
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, name, "", 0));
    for (unsigned i = 0; i < N_THREADS; i++)
        for (unsigned k = 0; k < ROUNDS; k++)
            if (!get(&crew, c->h, &crew.keys[i][k]))
                return kvs_conf_fail(c, "after re-open: %.200s", crew.why);
    return KVS_PASS;
}

/* -- Two handles save the same ----------------------------------------------------------------- */

static enum kvs_verdict check_same_chunks(struct kvs_conf *c)
{
    struct kvs_conf_key keys[8];
    kv_store_v1 *other, *third;

    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_open(c, &third));
    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        keys[i] = kvs_conf_key(c, 8);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
        KVS_CONF_TRY(kvs_conf_put(c, other, &keys[i], &i, sizeof(i), -1));
    }
    kvs_conf_close(c, c->h); /* closed without a manifest: the other handle's chunks must stay */
    KVS_CONF_TRY(kvs_conf_publish(c, other, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(keys); i++)
        KVS_CONF_TRY(kvs_conf_get(c, third, &keys[i], &i, sizeof(i)));
    return KVS_PASS;
}

const struct kvs_conf_check KVS_CONF_THREADS[] = {
    {"threads: savers on one handle", check_savers},
    {"threads: a manifest is the old or the new one", check_atomic},
    {"threads: gets beside a writer, 32-byte keys, empty sentinel", check_python_consumer},
    {"handles: the same chunks saved twice", check_same_chunks},
    {NULL, NULL},
};
