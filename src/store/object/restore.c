// SPDX-License-Identifier: Apache-2.0
/* Restoring an object: read its manifest, then its chunks in order, window by window. Each chunk is
 * verified before the caller gets a byte of it. Woven regions are first put together in memory (at
 * most KVS_WEAVE_MAX bytes). */
#include "base/core/log.h"
#include "store/object/fetch.h"

enum { WINDOW = 64 << 20 };

struct restoring {
    struct kvs_store *store;
    const char *name;
    const struct kvs_restore_opts *opts;
    struct kvs_manifest *manifest;
    struct kvs_window window;
    kvs_write_fn write;
    void *arg;
    uint64_t offset;    /* bytes of the object handed on or gathered */
    uint64_t handed;    /* bytes of the object handed on, also when not wanted */
    uint64_t from, end; /* range of the object that is wanted */
    size_t first, last; /* chunks that hold it: [first, last) */
    size_t weave;       /* index of the next weave in the manifest */
    uint32_t region;    /* number of its next region */
    uint8_t *woven, *plain;
    size_t gathered;      /* bytes of the region gathered in woven */
    uint64_t done, total; /* progress, as reported */
};

int kvs_manifest_get(struct kvs_store *store, const char *name, struct kvs_manifest **ret)
{
    void *data = NULL;
    char quoted[256];
    size_t len = 0;
    int rc = kvs_get_manifest(store, name, &data, &len);

    if (rc)
        return rc < 0 ? rc : -EPROTO;
    rc = kvs_manifest_decode(data, len, ret);
    free(data);
    if (rc == -EBADMSG)
        kv_log_error("store", "an object's manifest is damaged", "object=%s bytes=%zu",
                     kv_log_quote(quoted, sizeof(quoted), name), len);
    return rc;
}

/* -- handing on -------------------------------------------------------------------------------- */

/* Hand on the next @len bytes of the object, as far as they are wanted. */
static int hand_on(struct restoring *r, const uint8_t *data, size_t len)
{
    uint64_t at = r->handed, from = KV_MAX(at, r->from), end = KV_MIN(at + len, r->end);
    int rc = from < end ? r->write(r->arg, data + (from - at), (size_t)(end - from)) : 0;

    r->handed += len;
    return rc < 0 ? rc : 0;
}

/* Hand on the region that is now complete. */
static int hand_on_region(struct restoring *r, const struct kvs_weave *w)
{
    size_t len = kvs_weave_region(w);
    int rc;

    kvs_weave_out_of(w, r->woven, r->plain);
    rc = hand_on(r, r->plain, len);
    free(r->woven);
    free(r->plain);
    r->woven = r->plain = NULL;
    r->gathered = 0;
    if (++r->region == w->n) {
        r->region = 0;
        r->weave++;
    }
    return rc;
}

static int gather(struct restoring *r, const struct kvs_weave *w, const uint8_t *data, size_t len)
{
    size_t region = kvs_weave_region(w);

    if (!r->woven) {
        r->woven = malloc(region);
        r->plain = malloc(region);
        if (!r->woven || !r->plain)
            return -ENOMEM;
    }
    memcpy(r->woven + r->gathered, data, len);
    r->gathered += len;
    return r->gathered == region ? hand_on_region(r, w) : 0;
}

/* Accept verified bytes of the object, in the order of its chunks. */
static int take(struct restoring *r, const uint8_t *data, size_t len)
{
    int rc = 0;

    while (len && !rc) {
        const struct kvs_weave *w =
            r->weave < r->manifest->n_weaves ? &r->manifest->weaves[r->weave] : NULL;
        uint64_t begin = w ? w->offset + (uint64_t)kvs_weave_region(w) * r->region : UINT64_MAX;
        size_t n;

        if (!w || r->offset < begin) {
            n = (size_t)KV_MIN(begin - r->offset, (uint64_t)len);
            rc = hand_on(r, data, n);
        } else {
            n = KV_MIN(kvs_weave_region(w) - r->gathered, len);
            rc = gather(r, w, data, n);
        }
        r->offset += n;
        data += n;
        len -= n;
    }
    return rc;
}

/* -- reading ----------------------------------------------------------------------------------- */

static int tell(struct restoring *r, uint32_t len)
{
    kvs_progress_fn progress = KV_OPT(r->opts, progress, NULL);

    r->done += len;
    return progress && progress(KV_OPT(r->opts, progress_arg, NULL), r->done, r->total) ? -ECANCELED
                                                                                        : 0;
}

/* Read chunk @i of the object, the @at-th of the window. */
static int read_chunk(struct restoring *r, size_t i, size_t at, bool handing_on)
{
    const struct kvs_chunk_ref *ref = &r->manifest->chunks[i];
    void *data;
    int rc = kvs_window_take(&r->window, r->store, at, &data);

    if (rc) {
        rc = kvs_second_opinion(r->store, r->name, rc);
        kvs_fetch_failed(r->name, i, ref, rc);
        return rc;
    }
    if (handing_on)
        rc = take(r, data, ref->len);
    free(data);
    return rc ? rc : tell(r, ref->len);
}

static int read_all(struct restoring *r, bool handing_on)
{
    uint64_t window = KV_OPT(r->opts, window_bytes, WINDOW);
    size_t i = r->first;
    int rc = 0;

    while (i < r->last && !rc) {
        size_t begin = i;
        int n =
            kvs_window_begin(&r->window, r->store, &r->manifest->chunks[i], r->last - i, window);

        if (n < 0) {
            kvs_fetch_failed(r->name, i, &r->manifest->chunks[i], n);
            return n;
        }
        for (; i < begin + (size_t)n && !rc; i++)
            rc = read_chunk(r, i, i - begin, handing_on);
    }
    return rc;
}

/* -- ranges ------------------------------------------------------------------------------------ */

/* Return the begin of the woven region that holds byte @at; @at when none does. Sets *@ret_end to
 * the region's end, or to @at. */
static uint64_t region_of(const struct kvs_manifest *m, uint64_t at, uint64_t *ret_end)
{
    for (size_t i = 0; i < m->n_weaves; i++) {
        const struct kvs_weave *w = &m->weaves[i];
        uint64_t region = kvs_weave_region(w), begin = w->offset;

        if (at < begin || at >= begin + region * w->n)
            continue;
        begin += (at - begin) / region * region;
        *ret_end = begin + region;
        return begin;
    }
    *ret_end = at;
    return at;
}

/* Move to the first weave with a region that ends behind byte @at. */
static void skip_weaves(struct restoring *r, uint64_t at)
{
    for (; r->weave < r->manifest->n_weaves; r->weave++) {
        const struct kvs_weave *w = &r->manifest->weaves[r->weave];
        uint64_t region = kvs_weave_region(w);

        if (at < w->offset + region * w->n) {
            r->region = at > w->offset ? (uint32_t)((at - w->offset) / region) : 0;
            return;
        }
    }
}

/* Find the chunks that hold the range. Those of a woven region are needed together. */
static int find_range(struct restoring *r)
{
    uint64_t offset = KV_OPT(r->opts, offset, 0), length = KV_OPT(r->opts, length, 0);
    const struct kvs_manifest *m = r->manifest;
    uint64_t begin, end, ignored, at = 0;

    if (offset > m->bytes || length > m->bytes - offset)
        return -ERANGE;
    r->from = offset;
    r->end = length ? offset + length : m->bytes;
    begin = region_of(m, r->from, &ignored);
    if (r->end > r->from)
        region_of(m, r->end - 1, &end);
    end = r->end > r->from ? KV_MAX(end, r->end) : r->from;
    for (; r->first < m->n_chunks && at + m->chunks[r->first].len <= begin; r->first++)
        at += m->chunks[r->first].len;
    /* a chunk that begins inside another region: go back to that region's first chunk */
    while (r->first > 0 && region_of(m, at, &ignored) < at)
        at -= m->chunks[--r->first].len;
    r->offset = r->handed = at;
    skip_weaves(r, at);
    for (r->last = r->first; r->last < m->n_chunks && at < end; r->last++) {
        at += m->chunks[r->last].len;
        r->total += m->chunks[r->last].len;
    }
    return 0;
}

static int check_fingerprint(const struct restoring *r)
{
    const char *wanted = KV_OPT(r->opts, fingerprint, NULL);
    char name[256], has[512];

    if (!wanted || strcmp(wanted, kvs_manifest_fingerprint(r->manifest)) == 0)
        return 0;
    kv_log_error("store", "the object belongs to another model", "object=%s fingerprint=%s",
                 kv_log_quote(name, sizeof(name), r->name),
                 kv_log_quote(has, sizeof(has), kvs_manifest_fingerprint(r->manifest)));
    return -ESTALE;
}

static void result_of(const struct restoring *r, struct kvs_result *ret)
{
    struct kvs_result result = {
        .bytes = r->end - r->from, .n_chunks = r->last - r->first, .format = r->manifest->format};

    if (!ret)
        return;
    result.size = ret->size;
    memcpy(ret, &result, KV_MIN(ret->size, sizeof(result)));
}

int kvs_restore(struct kvs_store *store, const char *name, kvs_write_fn write, void *arg,
                const struct kvs_restore_opts *opts, struct kvs_result *ret)
{
    struct restoring r = {.store = store, .name = name, .opts = opts, .write = write, .arg = arg};
    bool verify_first = KV_OPT(opts, verify_first, false);
    char quoted[256];
    int rc;

    if (!store || !name || !write || !kv_sized_or_null(opts, "kvs_restore_opts") ||
        !kv_sized_or_null(ret, "kvs_result"))
        return -EINVAL;
    rc = kvs_manifest_get(store, name, &r.manifest);
    if (rc == -EMEDIUMTYPE)
        kv_log_error("store", "an object was saved by something else, or a later version",
                     "object=%s", kv_log_quote(quoted, sizeof(quoted), name));
    if (rc)
        return rc;
    rc = check_fingerprint(&r);
    if (!rc)
        rc = find_range(&r);
    r.total *= verify_first ? 2 : 1;
    if (!rc)
        rc = tell(&r, 0); /* the object was found: later failures have other causes */
    if (!rc && verify_first)
        rc = read_all(&r, false);
    if (!rc)
        rc = read_all(&r, true);
    if (!rc)
        result_of(&r, ret);
    kvs_window_fini(&r.window);
    free(r.woven);
    free(r.plain);
    kvs_manifest_free(r.manifest);
    return rc;
}
