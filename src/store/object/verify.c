// SPDX-License-Identifier: Apache-2.0
/*
 * Verify one object, or all that the backend lists: read everything and compare. Names are
 * collected before any object is read, since a listing's callback may not call the backend.
 * Manifests of other formats can't be verified; they are counted and otherwise ignored.
 *
 * Objects share chunks. Each chunk is read once, and the finding is kept by key in an
 * open-addressed table. Keys are hashes already: their first bytes choose the slot.
 */
#include "store/object/fetch.h"

#include <stdio.h>

#include "base/core/log.h"
#include "store/object/verify_prefix.h"

/* QUOTED_MAX: a file name with every byte escaped. */
enum { WINDOW = 64 << 20, MAX_RUN = 1024, QUOTED_MAX = 1600 };

struct finding {
    struct kvs_chunk_ref chunk; /* len 0: free */
    int rc;
};

struct verifying {
    struct kvs_store *store;
    struct finding *findings;
    size_t n_findings, n_slots; /* n_slots: a power of 2, or 0 */
    kvs_report_fn report;
    kvs_progress_fn progress;
    void *arg;
    int denied;  /* error of the last chunk or manifest that this user may not read; 0 */
    bool single; /* one object, so the total size is known: */
    uint64_t total;
    struct kvs_window window;
    struct kvs_verify_result result;
};

struct names {
    char **at;
    size_t n, capacity;
};

static void KV_PRINTF(2, 3) report(const struct verifying *v, const char *fmt, ...)
{
    char line[QUOTED_MAX + 200];
    va_list args;

    if (!v->report)
        return;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    v->report(v->arg, line);
}

/* -- findings ---------------------------------------------------------------------------------- */

/* Return the chunk's slot, or the free one where it belongs. The table always has a free slot. */
static struct finding *slot_of(struct finding *slots, size_t n, const struct kvs_chunk_ref *chunk)
{
    uint64_t i;

    memcpy(&i, chunk->key, sizeof(i));
    while (slots[i & (n - 1)].chunk.len &&
           memcmp(&slots[i & (n - 1)].chunk, chunk, sizeof(*chunk)) != 0)
        i++;
    return &slots[i & (n - 1)];
}

static bool make_room(struct verifying *v)
{
    size_t n = v->n_slots ? v->n_slots * 2 : 1024;
    struct finding *slots;

    if (v->n_findings * 4 < v->n_slots * 3)
        return true;
    slots = calloc(n, sizeof(*slots));
    if (!slots)
        return false;
    for (size_t i = 0; i < v->n_slots; i++)
        if (v->findings[i].chunk.len)
            *slot_of(slots, n, &v->findings[i].chunk) = v->findings[i];
    free(v->findings);
    v->findings = slots;
    v->n_slots = n;
    return true;
}

/* Read and check a chunk, the @at-th of the window, unless it was checked before. */
static int look(struct verifying *v, const struct kvs_chunk_ref *chunk, size_t at)
{
    struct finding *slot = v->n_slots ? slot_of(v->findings, v->n_slots, chunk) : NULL;
    void *data = NULL;
    int rc;

    if (slot && slot->chunk.len)
        return slot->rc;
    rc = kvs_window_take(&v->window, v->store, at, &data);
    free(data);
    /* without room for the finding, the chunk is read again next time */
    if (rc != -ENOMEM && make_room(v)) {
        *slot_of(v->findings, v->n_slots, chunk) = (struct finding){*chunk, rc};
        v->n_findings++;
    }
    return rc;
}

/* -- objects ----------------------------------------------------------------------------------- */

/* Report progress every so often, also when no chunk had to be read. Returns non-zero to stop. */
static int tell(const struct verifying *v)
{
    return v->progress && v->progress(v->arg, v->result.bytes, v->total) ? -ECANCELED : 0;
}

static int verify_chunk(struct verifying *v, const char *name, const struct kvs_manifest *m,
                        size_t i, size_t at)
{
    char quoted[QUOTED_MAX];
    int rc = look(v, &m->chunks[i], at);

    if (kvs_is_denied(rc)) {
        report(v, "object %s: chunk %zu of %zu can't be read (%s)",
               kv_log_quote(quoted, sizeof(quoted), name), i, m->n_chunks, strerror(-rc));
        v->denied = rc;
        return tell(v);
    }
    if (rc == -ENOMEM || kvs_is_outage(rc) || kvs_second_opinion(v->store, name, rc) != rc)
        return rc == -ENOENT ? -EIO : rc;
    v->result.chunks++;
    if (rc) {
        if (rc == -ENOENT)
            v->result.missing_chunks++;
        else
            v->result.bad_chunks++;
        report(v, "object %s: chunk %zu of %zu is %s (%s)",
               kv_log_quote(quoted, sizeof(quoted), name), i, m->n_chunks, kvs_fetch_problem(rc),
               rc == -ENOENT ? "evicted, or deleted" : strerror(-rc));
    } else {
        v->result.bytes += m->chunks[i].len;
    }
    return tell(v);
}

/* Count the chunks from @i on that haven't been read yet, up to MAX_RUN. */
static size_t unread(const struct verifying *v, const struct kvs_manifest *m, size_t i)
{
    size_t n = 0;

    while (i + n < m->n_chunks && n < MAX_RUN &&
           (!v->n_slots || !slot_of(v->findings, v->n_slots, &m->chunks[i + n])->chunk.len))
        n++;
    return n;
}

static int verify_chunks(struct verifying *v, const char *name, const struct kvs_manifest *m)
{
    size_t i = 0;
    int rc = 0;

    while (i < m->n_chunks && !rc) {
        size_t begin = i, run = unread(v, m, i);
        int n = run ? kvs_window_begin(&v->window, v->store, &m->chunks[i], run, WINDOW) : 1;

        if (n < 0)
            return n;
        for (; i < begin + (size_t)n && !rc; i++)
            rc = verify_chunk(v, name, m, i, i - begin);
    }
    return rc;
}

/* Verify one object. Returns 0 when it was checked, whatever the finding; -ENOENT when it is
 * missing. */
static int verify_object(struct verifying *v, const char *name)
{
    char quoted[QUOTED_MAX];
    struct kvs_manifest *m;
    int rc = kvs_manifest_get(v->store, name, &m);

    if (rc == -ENOENT || rc == -ENOMEM || rc == -EINVAL || kvs_is_outage(rc))
        return rc;
    if (kvs_is_denied(rc)) {
        report(v, "object %s: its manifest can't be read (%s)",
               kv_log_quote(quoted, sizeof(quoted), name), strerror(-rc));
        v->denied = rc;
        return 0;
    }
    v->result.manifests++;
    if (rc == -EMEDIUMTYPE) {
        v->result.opaque_manifests++;
        return 0;
    }
    if (rc) {
        v->result.bad_manifests++;
        report(v, "object %s: its manifest is %s (%s)", kv_log_quote(quoted, sizeof(quoted), name),
               kvs_fetch_problem(rc), strerror(-rc));
        return 0;
    }
    if (v->single)
        v->total = m->bytes;
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
            rc = 0; /* deleted after it was listed */
        if (rc == 0)
            rc = tell(v);
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

    if (!store || !kv_sized_or_null(ret, "kvs_verify_result"))
        return -EINVAL;
    v.single = name;
    rc = name ? verify_object(&v, name) : verify_all(&v);
    if (!rc && !name)
        rc = kvs_verify_prefixes(store, report_fn, progress, arg, &v.result, &v.denied);
    kvs_window_fini(&v.window);
    free(v.findings);
    if (!rc)
        rc = v.denied;
    if ((!rc || rc == v.denied || rc == -ECANCELED) && ret) {
        v.result.size = ret->size;
        memcpy(ret, &v.result, KV_MIN(ret->size, sizeof(v.result)));
    }
    return rc;
}
