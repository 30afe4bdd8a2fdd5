// SPDX-License-Identifier: Apache-2.0
/*
 * Reading everything and comparing: one object, or all that the backend lists. Names are collected
 * before any is read, since a listing's callback may not call back into the backend. What can't be
 * checked, manifests that aren't this library's, is counted and left alone.
 */
#include "store/fetch.h"

#include <stdio.h>

enum { WINDOW = 64 << 20 };

struct verifying {
    struct kvs_store *store;
    kvs_report_fn report;
    kvs_progress_fn progress;
    void *arg;
    struct kvs_verify_result result;
};

struct names {
    char **at;
    size_t n, capacity;
};

static void KV_PRINTF(2, 3) report(const struct verifying *v, const char *fmt, ...)
{
    char line[512];
    va_list args;

    if (!v->report)
        return;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    v->report(v->arg, line);
}

static int verify_chunk(struct verifying *v, const char *name, const struct kvs_manifest *m,
                        size_t i)
{
    void *data = NULL;
    int rc = kvs_fetch(v->store, &m->chunks[i], &data);

    free(data);
    if (rc == -ENOMEM)
        return rc;
    v->result.chunks++;
    if (rc) {
        if (rc == -ENOENT)
            v->result.missing_chunks++;
        else
            v->result.bad_chunks++;
        report(v, "object %s: chunk %zu of %zu is %s (%s)", name, i, m->n_chunks,
               kvs_fetch_problem(rc), strerror(-rc));
    } else {
        v->result.bytes += m->chunks[i].len;
    }
    return v->progress && v->progress(v->arg, v->result.bytes, 0) ? -ECANCELED : 0;
}

static int verify_chunks(struct verifying *v, const char *name, const struct kvs_manifest *m)
{
    size_t i = 0;
    int rc = 0;

    while (i < m->n_chunks && !rc) {
        size_t end = i + kvs_fetch_ahead(v->store, m, i, WINDOW);

        while (i < end && !rc)
            rc = verify_chunk(v, name, m, i++);
    }
    return rc;
}

/* 0 when it was checked, whatever was found; -ENOENT when there is none. */
static int verify_object(struct verifying *v, const char *name)
{
    struct kvs_manifest *m;
    int rc = kvs_manifest_get(v->store, name, &m);

    if (rc == -ENOENT || rc == -ENOMEM || rc == -EINVAL)
        return rc;
    v->result.manifests++;
    if (rc == -EMEDIUMTYPE) {
        v->result.opaque_manifests++;
        return 0;
    }
    if (rc) {
        v->result.bad_manifests++;
        report(v, "object %s: its manifest is %s (%s)", name, kvs_fetch_problem(rc), strerror(-rc));
        return 0;
    }
    rc = verify_chunks(v, name, m);
    kvs_manifest_free(m);
    return rc;
}

static int collect(void *arg, const kv_store_entry *entry)
{
    struct names *names = arg;

    if (names->n == names->capacity) {
        size_t capacity = names->capacity ? names->capacity * 2 : 64;
        char **at = reallocarray(names->at, capacity, sizeof(*at));

        if (!at)
            return -ENOMEM;
        names->at = at;
        names->capacity = capacity;
    }
    names->at[names->n] = strdup(entry->name);
    if (!names->at[names->n])
        return -ENOMEM;
    names->n++;
    return 0;
}

static int verify_all(struct verifying *v)
{
    struct names names = {0};
    int rc = kvs_list(v->store, collect, &names);

    for (size_t i = 0; i < names.n && rc >= 0; i++) {
        rc = verify_object(v, names.at[i]);
        if (rc == -ENOENT)
            rc = 0; /* deleted since it was listed */
    }
    for (size_t i = 0; i < names.n; i++)
        free(names.at[i]);
    free(names.at);
    return rc < 0 ? rc : 0;
}

int kvs_verify(struct kvs_store *store, const char *name, kvs_report_fn report_fn,
               kvs_progress_fn progress, void *arg, struct kvs_verify_result *ret)
{
    struct verifying v = {.store = store, .report = report_fn, .progress = progress, .arg = arg};
    int rc;

    if (!store)
        return -EINVAL;
    rc = name ? verify_object(&v, name) : verify_all(&v);
    if (!rc && ret) {
        v.result.size = ret->size;
        memcpy(ret, &v.result, KV_MIN(ret->size, sizeof(v.result)));
    }
    return rc;
}
