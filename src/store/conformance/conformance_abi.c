// SPDX-License-Identifier: Apache-2.0
/* Checks of the ABI's table, and of opening and closing, by one thread. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "store/conformance/conformance.h"

static enum kvs_verdict check_table(struct kvs_conf *c)
{
    const kv_store_vtable *vt = c->vt;

    if (vt->version < KV_STORE_VERSION_1)
        return kvs_conf_fail(c, "version is %u", vt->version);
    if (!vt->open || !vt->close || !vt->put_chunk || !vt->get_chunk || !vt->put_manifest ||
        !vt->get_manifest || !vt->delete_manifest)
        return kvs_conf_fail(c, "a function of version 1 is NULL");
    return KVS_PASS;
}

static enum kvs_verdict check_version(struct kvs_conf *c)
{
    /* A table of version 1 may end before the field, so don't read it. */
    if (c->vt->version > KV_STORE_VERSION_2)
        return kvs_conf_advise(c, "version is %u; 2 is the highest that is known", c->vt->version);
    if (c->vt->version == KV_STORE_VERSION_2 && !c->vt->prefetch_chunks)
        return kvs_conf_fail(c, "version is 2, but prefetch_chunks is NULL");
    return KVS_PASS;
}

static enum kvs_verdict check_exports(struct kvs_conf *c)
{
    char others[160];
    int n;

    if (!c->library)
        return kvs_conf_skip(c, "built in: no library whose symbols could clash");
    n = kvs_conf_exports(c->library, others, sizeof(others));
    if (n < 0)
        return kvs_conf_skip(c, "can't read the symbols of %.150s", c->library);
    return n == 0 ? KVS_PASS
                  : kvs_conf_advise(c, "%d more, which may clash with the engine's symbols: %s", n,
                                    others);
}

/* Close NULL in a child process: a crash fails this check and the other checks still run. */
static enum kvs_verdict check_close_null(struct kvs_conf *c)
{
    struct kvs_conf_job job = {.kind = KVS_CONF_CLOSE_NULL};
    int status;

    KVS_CONF_TRY(kvs_conf_child(c, &job, &status));
    if (WIFSIGNALED(status))
        return kvs_conf_fail(c, "signal %d killed it", WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? KVS_PASS : kvs_conf_fail(c, "it ended the process");
}

/* Count the descriptors that this process has open; 0 when /proc can't be read. */
static size_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    if (!dir)
        return 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static enum kvs_verdict check_open_close(struct kvs_conf *c)
{
    size_t before, after;
    kv_store_v1 *h;

    /* warm up: descriptors that a backend opens once and keeps are no leak */
    for (unsigned i = 0; i < 2; i++) {
        KVS_CONF_TRY(kvs_conf_open(c, &h));
        kvs_conf_close(c, h);
    }
    before = count_fds();
    for (unsigned i = 0; i < 16; i++) {
        KVS_CONF_TRY(kvs_conf_open(c, &h));
        kvs_conf_close(c, h);
    }
    after = count_fds();
    if (after >= before + 16)
        return kvs_conf_fail(c, "16 times open and close left %zu descriptors", after - before);
    return KVS_PASS;
}

static enum kvs_verdict check_signals(struct kvs_conf *c)
{
    static const int SIGNALS[] = {SIGPIPE, SIGINT, SIGTERM, SIGALRM, SIGUSR1, SIGCHLD};
    struct sigaction before[KV_COUNT(SIGNALS)], after;
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    kv_store_v1 *h;

    for (size_t i = 0; i < KV_COUNT(SIGNALS); i++)
        sigaction(SIGNALS[i], NULL, &before[i]);
    KVS_CONF_TRY(kvs_conf_open(c, &h));
    KVS_CONF_TRY(kvs_conf_put(c, h, &key, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(SIGNALS); i++) {
        sigaction(SIGNALS[i], NULL, &after);
        if (after.sa_handler != before[i].sa_handler)
            return kvs_conf_advise(c, "changed the host's handler of signal %d", SIGNALS[i]);
    }
    return KVS_PASS;
}

const struct kvs_conf_check KVS_CONF_ABI[] = {
    {"table: version 1 or more, no function NULL", check_table}, /* first: see run_check */
    {"table: the version says what there is", check_version},
    {"library: exports nothing but its tables", check_exports},
    {"close: NULL is a no-op", check_close_null},
    {"open, close: leave no descriptors open", check_open_close},
    {"open: leaves the host's signals alone", check_signals},
    {NULL, NULL},
};
