// SPDX-License-Identifier: Apache-2.0
/* Restoring an object: read its manifest, then its chunks in order, window by window. Each chunk is
 * verified before the caller gets a byte of it. Woven regions are first put together in memory (at
 * most KVS_WEAVE_MAX bytes). */
#include "base/log.h"
#include "store/fetch.h"

enum { WINDOW = 64 << 20 };

struct restoring {
    struct kvs_store *store;
    const char *name;
    const struct kvs_restore_opts *opts;
    struct kvs_manifest *manifest;
    struct kvs_window window;
    kvs_write_fn write;
    void *arg;
    uint64_t offset; /* bytes of the object handed on or gathered */
    size_t weave;    /* index of the next weave in the manifest */
    uint32_t region; /* number of its next region */
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

static int hand_on(struct restoring *r, const void *data, size_t len)
{
    int rc = len ? r->write(r->arg, data, len) : 0;

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
    size_t i = 0;
    int rc = 0;

    while (i < r->manifest->n_chunks && !rc) {
        size_t begin = i;
        int n = kvs_window_begin(&r->window, r->store, &r->manifest->chunks[i],
                                 r->manifest->n_chunks - i, window);

        if (n < 0) {
            kvs_fetch_failed(r->name, i, &r->manifest->chunks[i], n);
            return n;
        }
        for (; i < begin + (size_t)n && !rc; i++)
            rc = read_chunk(r, i, i - begin, handing_on);
    }
    return rc;
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

static void result_of(const struct kvs_manifest *m, struct kvs_result *ret)
{
    struct kvs_result result = {.bytes = m->bytes, .n_chunks = m->n_chunks, .format = m->format};

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
    r.total = verify_first ? r.manifest->bytes * 2 : r.manifest->bytes;
    rc = check_fingerprint(&r);
    if (!rc)
        rc = tell(&r, 0); /* the object was found: later failures have other causes */
    if (!rc && verify_first)
        rc = read_all(&r, false);
    if (!rc)
        rc = read_all(&r, true);
    if (!rc)
        result_of(r.manifest, ret);
    kvs_window_fini(&r.window);
    free(r.woven);
    free(r.plain);
    kvs_manifest_free(r.manifest);
    return rc;
}
