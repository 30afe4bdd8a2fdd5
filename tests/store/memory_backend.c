// SPDX-License-Identifier: Apache-2.0
#include "memory_backend.h"
#include "base/core/xxh.h"
#include "base/unit.h"

static struct memory_space *memory_spaces;
static pthread_mutex_t memory_spaces_lock = PTHREAD_MUTEX_INITIALIZER;

struct memory_space *memory_space(const char *uri)
{
    struct memory_space *s;

    pthread_mutex_lock(&memory_spaces_lock);
    for (s = memory_spaces; s && strcmp(s->uri, uri) != 0; s = s->next)
        ;
    if (!s) {
        s = calloc(1, sizeof(*s));
        s->uri = strdup(uri);
        pthread_mutex_init(&s->lock, NULL);
        s->now_s = 1000000;
        s->next = memory_spaces;
        memory_spaces = s;
    }
    pthread_mutex_unlock(&memory_spaces_lock);
    return s;
}

static void memory_free_object(struct memory_object *o)
{
    free(o->name);
    free(o->hash);
    free(o->data);
    free(o->refs);
    free(o);
}

void memory_free_list(struct memory_object *o)
{
    while (o) {
        struct memory_object *next = o->next;

        memory_free_object(o);
        o = next;
    }
}

void memory_forget_all(void)
{
    while (memory_spaces) {
        struct memory_space *s = memory_spaces;

        memory_spaces = s->next;
        memory_free_list(s->chunks);
        memory_free_list(s->manifests);
        pthread_mutex_destroy(&s->lock);
        free(s->uri);
        free(s);
    }
}

/* Where the chunk is linked, or the end of the list. */
static struct memory_object **memory_chunk(struct memory_space *s, const void *hash,
                                           size_t hash_len)
{
    struct memory_object **o = &s->chunks;

    while (*o && ((*o)->hash_len != hash_len || memcmp((*o)->hash, hash, hash_len) != 0))
        o = &(*o)->next;
    return o;
}

static struct memory_object **memory_manifest(struct memory_space *s, const char *name)
{
    struct memory_object **o = &s->manifests;

    while (*o && strcmp((*o)->name, name) != 0)
        o = &(*o)->next;
    return o;
}

uint8_t *memory_copy(const void *data, size_t len)
{
    uint8_t *copy = malloc(len ? len : 1);

    if (len)
        memcpy(copy, data, len);
    return copy;
}

void memory_remove(struct memory_object **o)
{
    struct memory_object *gone = *o;

    *o = gone->next;
    memory_free_object(gone);
}

/* -- the ABI ----------------------------------------------------------------------------------- */

kv_store_v1 *memory_open(const char *uri)
{
    kv_store_v1 *self = calloc(1, sizeof(*self));

    self->space = memory_space(uri);
    pthread_mutex_lock(&self->space->lock);
    self->space->opens++;
    pthread_mutex_unlock(&self->space->lock);
    return self;
}

void memory_close(kv_store_v1 *self)
{
    if (!self)
        return;
    pthread_mutex_lock(&self->space->lock);
    self->space->opens--;
    pthread_mutex_unlock(&self->space->lock);
    free(self->refs);
    free(self);
}

static void memory_note_ref(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    if (self->ref_len != hash_len)
        self->n_refs = 0;
    self->ref_len = hash_len;
    self->refs = realloc(self->refs, (self->n_refs + 1) * hash_len);
    memcpy(self->refs + self->n_refs++ * hash_len, hash, hash_len);
}

static int memory_put_locked(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                             const uint8_t *data, size_t len)
{
    struct memory_space *s = self->space;
    struct memory_object **o = memory_chunk(s, hash, hash_len);

    if (s->fail_puts && s->fail_puts_after == 0)
        return s->fail_puts;
    s->fail_puts_after -= s->fail_puts_after > 0;
    memory_note_ref(self, hash, hash_len);
    if (*o) {
        (*o)->used_s = s->now_s;
        s->stats.put_hits++;
        return 1;
    }
    *o = calloc(1, sizeof(**o));
    (*o)->hash = memory_copy(hash, hash_len);
    (*o)->hash_len = hash_len;
    (*o)->data = memory_copy(data, len);
    (*o)->len = len;
    (*o)->used_s = s->now_s;
    s->stats.puts++;
    s->stats.bytes_written += len;
    return 0;
}

int memory_put_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t len)
{
    int rc;

    pthread_mutex_lock(&self->space->lock);
    rc = memory_put_locked(self, hash, hash_len, data, len);
    pthread_mutex_unlock(&self->space->lock);
    return rc;
}

static int memory_hand_out(struct memory_space *s, struct memory_object *o, uint8_t **ret,
                           size_t *ret_len)
{
    if (s->fail_gets)
        return s->fail_gets;
    if (!o)
        return -ENOENT;
    *ret = memory_copy(o->data, o->len);
    *ret_len = o->len;
    s->stats.bytes_read += o->len;
    return 0;
}

int memory_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                     size_t *ret_len)
{
    struct memory_space *s = self->space;
    int rc;

    pthread_mutex_lock(&s->lock);
    rc = memory_hand_out(s, *memory_chunk(s, hash, hash_len), ret, ret_len);
    s->stats.gets++;
    s->stats.get_misses += rc == -ENOENT;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int memory_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    struct memory_space *s = self->space;
    struct memory_object **o;
    int rc;

    pthread_mutex_lock(&s->lock);
    rc = s->fail_manifests;
    if (!rc) {
        o = memory_manifest(s, name);
        if (*o)
            memory_remove(o);
        o = memory_manifest(s, name); /* the end of the list */
        *o = calloc(1, sizeof(**o));
        (*o)->name = strdup(name);
        (*o)->data = memory_copy(data, len);
        (*o)->len = len;
        (*o)->used_s = s->now_s;
        (*o)->refs = self->refs;
        (*o)->n_refs = self->n_refs;
        (*o)->ref_len = self->ref_len;
        self->refs = NULL;
        self->n_refs = 0;
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int memory_get_manifest(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *ret_len)
{
    struct memory_space *s = self->space;
    int rc;

    pthread_mutex_lock(&s->lock);
    rc = memory_hand_out(s, *memory_manifest(s, name), ret, ret_len);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int memory_delete_manifest(kv_store_v1 *self, const char *name)
{
    struct memory_object **o;

    pthread_mutex_lock(&self->space->lock);
    o = memory_manifest(self->space, name);
    if (*o)
        memory_remove(o);
    pthread_mutex_unlock(&self->space->lock);
    return 0;
}

int memory_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    (void)hashes;
    (void)hash_len;
    pthread_mutex_lock(&self->space->lock);
    self->space->prefetched += (unsigned)n;
    pthread_mutex_unlock(&self->space->lock);
    return 0;
}

/* -- the extensions ---------------------------------------------------------------------------- */

int memory_exists_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present)
{
    pthread_mutex_lock(&self->space->lock);
    for (size_t i = 0; i < n; i++)
        ret_present[i] = *memory_chunk(self->space, hashes + i * hash_len, hash_len) != NULL;
    pthread_mutex_unlock(&self->space->lock);
    return 0;
}

int memory_get_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len)
{
    int found = 0;

    for (size_t i = 0; i < n; i++) {
        int rc = memory_get_chunk(self, hashes + i * hash_len, hash_len, &out_data[i], &out_len[i]);

        if (rc) {
            out_data[i] = NULL;
            out_len[i] = 0;
        }
        if (rc && rc != -ENOENT) {
            for (size_t j = 0; j < i; j++)
                free(out_data[j]);
            return rc;
        }
        found += rc == 0;
    }
    return found;
}

int memory_stream_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                        size_t room, kv_store_piece_fn each, void *arg)
{
    uint8_t *data;
    size_t len;
    int rc = memory_get_chunk(self, hash, hash_len, &data, &len);

    if (rc)
        return rc;
    for (size_t at = 0, n; (at < len || at == 0) && rc == 0; at += n ? n : 1) {
        n = len - at < room ? len - at : room;
        memcpy(buf, data + at, n);
        rc = each(arg, at, buf, n);
    }
    free(data);
    return rc;
}

int memory_get_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts, size_t *len)
{
    struct kvs_cursor at = {0};
    size_t room = 0;
    uint8_t *data;
    int rc = memory_get_chunk(self, hash, hash_len, &data, len);

    if (rc)
        return rc;
    for (size_t i = 0; i < n_parts; i++)
        room += parts[i].iov_len;
    if (*len <= room)
        kvs_parts_scatter(parts, n_parts, &at, data, *len);
    free(data);
    return *len <= room ? 0 : -EMSGSIZE;
}

/* A chunk's version is the checksum of its bytes. */
static int memory_get_range(kv_store_v1 *self, kv_store_range *range)
{
    struct kvs_cursor at = {0};
    char tag[KV_STORE_TAG_MAX];
    uint8_t *data;
    size_t len;
    int rc = memory_get_chunk(self, range->hash, range->hash_len, &data, &len);

    if (rc)
        return rc;
    snprintf(tag, sizeof(tag), "%llx", (unsigned long long)XXH3_64bits(data, len));
    if (range->tag[0] && strcmp(tag, range->tag) != 0)
        rc = -ESTALE;
    else if (range->offset > len || range->len > len - range->offset)
        rc = -ERANGE;
    else
        kvs_parts_scatter(range->parts, range->n_parts, &at, data + range->offset, range->len);
    if (rc == 0)
        memcpy(range->tag, tag, sizeof(tag));
    free(data);
    return rc;
}

int memory_get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    int found = 0;

    for (size_t i = 0; i < n; i++) {
        ranges[i].rc = memory_get_range(self, &ranges[i]);
        found += ranges[i].rc == 0;
    }
    return found;
}

int memory_put_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts)
{
    size_t len = 0;
    uint8_t *data;
    int rc;

    for (size_t i = 0; i < n_parts; i++)
        len += parts[i].iov_len;
    data = malloc(len + 1);
    kvs_parts_gather(parts, n_parts, data);
    rc = memory_put_chunk(self, hash, hash_len, data, len);
    free(data);
    return rc;
}

int memory_put_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *len, int *ret_each)
{
    int result = 0;

    for (size_t i = 0; i < n; i++) {
        int rc = memory_put_chunk(self, hashes + i * hash_len, hash_len, data[i], len[i]);

        if (ret_each)
            ret_each[i] = rc;
        if (rc < 0 && result == 0)
            result = rc;
    }
    return result;
}

int memory_delete_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    struct memory_object **o;

    pthread_mutex_lock(&self->space->lock);
    o = memory_chunk(self->space, hash, hash_len);
    if (*o)
        memory_remove(o);
    pthread_mutex_unlock(&self->space->lock);
    return 0;
}

static int memory_delete_chunk_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                                  const uint8_t *data, size_t len)
{
    struct memory_object **o;
    bool same;

    pthread_mutex_lock(&self->space->lock);
    o = memory_chunk(self->space, hash, hash_len);
    same = *o && (*o)->len == len && memcmp((*o)->data, data, len) == 0;
    if (same)
        memory_remove(o);
    pthread_mutex_unlock(&self->space->lock);
    return same;
}

/* Nothing is buffered: put_chunk has told what was there. */
static int memory_new_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                             uint8_t *ret_new)
{
    (void)self, (void)hashes, (void)hash_len;
    memset(ret_new, 1, n);
    return 0;
}

static int memory_list(kv_store_v1 *self, bool chunks, kv_store_each_fn each, void *arg)
{
    struct memory_object *o;
    int rc = 0;

    pthread_mutex_lock(&self->space->lock);
    for (o = chunks ? self->space->chunks : self->space->manifests; o && !rc; o = o->next) {
        kv_store_entry entry = {.size = sizeof(entry),
                                .name = o->name,
                                .hash = o->hash,
                                .hash_len = o->hash_len,
                                .len = o->len,
                                .used_s = o->used_s};

        rc = each(arg, &entry);
    }
    pthread_mutex_unlock(&self->space->lock);
    return rc;
}

int memory_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return memory_list(self, false, each, arg);
}

int memory_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return memory_list(self, true, each, arg);
}

static int memory_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    struct memory_object *o;
    int rc = 0;

    pthread_mutex_lock(&self->space->lock);
    o = *memory_manifest(self->space, name);
    if (!o || !o->refs)
        rc = -ENOENT;
    for (size_t i = 0; o && i < o->n_refs && !rc; i++) {
        kv_store_entry entry = {.size = sizeof(entry),
                                .hash = o->refs + i * o->ref_len,
                                .hash_len = o->ref_len,
                                .len = UINT64_MAX};

        rc = each(arg, &entry);
    }
    pthread_mutex_unlock(&self->space->lock);
    return rc;
}

int memory_touch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int found = 0;

    pthread_mutex_lock(&self->space->lock);
    for (size_t i = 0; i < n; i++) {
        struct memory_object *o = *memory_chunk(self->space, hashes + i * hash_len, hash_len);

        found += o != NULL;
        if (o)
            o->used_s = self->space->now_s;
    }
    pthread_mutex_unlock(&self->space->lock);
    return found;
}

static int memory_flush(kv_store_v1 *self)
{
    (void)self;
    return 0;
}

int memory_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                        kv_store_swept *ret)
{
    struct memory_space *s = self->space;
    struct memory_object **o;

    pthread_mutex_lock(&s->lock);
    for (o = &s->chunks; *o;) {
        if (s->now_s - (*o)->used_s < min_age_s || live(arg, (*o)->hash, (*o)->hash_len)) {
            ret->kept++;
            o = &(*o)->next;
            continue;
        }
        ret->deleted++;
        ret->deleted_bytes += (*o)->len;
        memory_remove(o);
    }
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int memory_stats(kv_store_v1 *self, kv_store_stats *ret)
{
    size_t size = ret->size < sizeof(*ret) ? ret->size : sizeof(*ret);
    kv_store_stats stats;

    pthread_mutex_lock(&self->space->lock);
    stats = self->space->stats;
    for (struct memory_object *o = self->space->chunks; o; o = o->next) {
        stats.n_chunks++;
        stats.bytes += o->len;
    }
    for (struct memory_object *o = self->space->manifests; o; o = o->next) {
        stats.n_manifests++;
        stats.bytes += o->len;
    }
    pthread_mutex_unlock(&self->space->lock);
    stats.size = size;
    memcpy(ret, &stats, size);
    return 0;
}

const kv_store_vtable *memory_vtable(void)
{
    static const kv_store_vtable table = {
        .version = KV_STORE_VERSION_2,
        .open = memory_open,
        .close = memory_close,
        .put_chunk = memory_put_chunk,
        .get_chunk = memory_get_chunk,
        .put_manifest = memory_put_manifest,
        .get_manifest = memory_get_manifest,
        .delete_manifest = memory_delete_manifest,
        .prefetch_chunks = memory_prefetch_chunks,
    };

    return &table;
}

const kv_store_ext *memory_ext(void)
{
    static const kv_store_ext table = {
        .size = sizeof(table),
        .version = KV_STORE_EXT_VERSION,
        .exists_chunks = memory_exists_chunks,
        .get_chunks = memory_get_chunks,
        .put_chunks = memory_put_chunks,
        .delete_chunk = memory_delete_chunk,
        .list_manifests = memory_list_manifests,
        .list_chunks = memory_list_chunks,
        .list_refs = memory_list_refs,
        .touch_chunks = memory_touch_chunks,
        .flush = memory_flush,
        .sweep_chunks = memory_sweep_chunks,
        .stats = memory_stats,
        .stream_chunk = memory_stream_chunk,
        .get_parts = memory_get_parts,
        .get_ranges = memory_get_ranges,
        .put_parts = memory_put_parts,
        .delete_chunk_if = memory_delete_chunk_if,
        .new_chunks = memory_new_chunks,
    };

    return &table;
}

int memory_store(const char *uri, struct kvs_store **ret)
{
    return kvs_open_with(memory_vtable(), memory_ext(), uri, false, ret);
}
