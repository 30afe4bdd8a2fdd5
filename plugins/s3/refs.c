// SPDX-License-Identifier: Apache-2.0
#include "s3/refs.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/xxh.h"
#include "base/metrics/history.h"
#include "base/thread/thread.h"
#include "s3/list.h"
#include "s3/ref_keys.h"

#define SEGMENT_BYTES (1u << 20)
#define MAX_SEGMENTS 1024 /* names whose last object is remembered: the latest ones */
#define MAX_SEGMENTS_BYTES (64u << 20)

/* -- chunks noted since, and objects stored last ----------------------------------------------- */

struct s3_ref_segment {
    struct s3_ref_segment *next;
    XXH128_hash_t name;
    uint64_t number;
    struct s3_ref_keys *keys;
};

/* One of the latest publications, with the chunks that it took (base/metrics/history.h). */
struct past {
    struct s3_ref_keys *keys; /* owned; NULL: none */
    uint64_t thread;          /* its number */
    bool opaque;
};

struct s3_refs {
    struct s3_client *client;
    const struct s3_config *config;
    uint64_t handle[2]; /* random: no two handles write the same object */
    pthread_mutex_t lock;
    struct s3_ref_keys *since; /* NULL: none yet */
    bool lost;                 /* out of memory: `since` is incomplete */
    uint64_t first;            /* number of the first thread that used it; 0: none yet */
    bool shared;               /* another one did as well */
    struct past past[KV_HISTORY_PUBLICATIONS]; /* ring: the last n_past end before next_past */
    size_t next_past, n_past, past_bytes;
    uint64_t last_number;
    struct s3_ref_segment *segments; /* latest first; taken out while being stored */
    size_t n_segments, segments_bytes;
};

/* Free a segment and those behind it. */
static void segment_free(struct s3_ref_segment *segment)
{
    while (segment) {
        struct s3_ref_segment *next = segment->next;

        s3_ref_keys_free(segment->keys);
        free(segment);
        segment = next;
    }
}

struct s3_refs *s3_refs_create(struct s3_client *client, const struct s3_config *config)
{
    struct s3_refs *refs = calloc(1, sizeof(*refs));

    if (!refs)
        return NULL;
    refs->client = client;
    refs->config = config;
    if (getrandom(refs->handle, sizeof(refs->handle), 0) != sizeof(refs->handle)) {
        refs->handle[0] = kv_wall_ns();
        refs->handle[1] = (uint64_t)(uintptr_t)refs;
    }
    pthread_mutex_init(&refs->lock, NULL);
    return refs;
}

void s3_refs_destroy(struct s3_refs *refs)
{
    if (!refs)
        return;
    segment_free(refs->segments);
    for (size_t i = 0; i < KV_HISTORY_PUBLICATIONS; i++)
        s3_ref_keys_free(refs->past[i].keys);
    s3_ref_keys_free(refs->since);
    pthread_mutex_destroy(&refs->lock);
    free(refs);
}

static struct s3_ref_keys *since(struct s3_refs *refs)
{
    if (!refs->since)
        refs->since = calloc(1, sizeof(*refs->since));
    if (!refs->since)
        refs->lost = true;
    return refs->since;
}

static void note_thread(struct s3_refs *refs)
{
    if (refs->first == 0)
        refs->first = kv_thread_number();
    refs->shared |= refs->first != kv_thread_number();
}

void s3_refs_add(struct s3_refs *refs, const uint8_t *hash, size_t hash_len)
{
    uint8_t record[1 + S3_MAX_HASH];
    struct s3_ref_keys *keys;

    record[0] = (uint8_t)hash_len;
    memcpy(record + 1, hash, hash_len);
    pthread_mutex_lock(&refs->lock);
    note_thread(refs);
    keys = since(refs);
    if (keys)
        s3_ref_keys_add(keys, record);
    pthread_mutex_unlock(&refs->lock);
}

/* -- The past ---------------------------------------------------------------------------------- */

static void drop_oldest(struct s3_refs *refs)
{
    struct past *past = &refs->past[(refs->next_past + KV_HISTORY_PUBLICATIONS - refs->n_past) %
                                    KV_HISTORY_PUBLICATIONS];

    refs->past_bytes -= past->keys ? past->keys->records.len : 0;
    s3_ref_keys_free(past->keys);
    past->keys = NULL;
    refs->n_past--;
}

static void remember(struct s3_refs *refs, struct s3_ref_keys *keys, bool opaque)
{
    struct past *past = &refs->past[refs->next_past];

    while (kv_history_is_full(refs->n_past + 1, 0))
        drop_oldest(refs);
    *past = (struct past){keys, kv_thread_number(), opaque};
    refs->next_past = (refs->next_past + 1) % KV_HISTORY_PUBLICATIONS;
    refs->n_past++;
    refs->past_bytes += keys ? keys->records.len : 0;
    while (kv_history_is_full(refs->n_past, refs->past_bytes))
        drop_oldest(refs);
}

/* Add chunks that earlier publications included and this thread's manifest may need. */
static void recall(struct s3_refs *refs, struct s3_ref_keys *ret)
{
    struct kv_history_walk walk = {.shared = refs->shared};

    for (size_t i = 1; i <= refs->n_past; i++) {
        const struct past *past =
            &refs->past[(refs->next_past + KV_HISTORY_PUBLICATIONS - i) % KV_HISTORY_PUBLICATIONS];

        if (!kv_history_counts(&walk, past->opaque && past->thread == kv_thread_number()))
            break;
        if (past->keys)
            s3_ref_keys_merge(ret, past->keys);
    }
}

/* -- A publication ----------------------------------------------------------------------------- */

static XXH128_hash_t hash_name(const char *name)
{
    return XXH3_128bits(name, strlen(name));
}

static struct s3_ref_segment *unlink_segment(struct s3_refs *refs, struct s3_ref_segment **at)
{
    struct s3_ref_segment *segment = *at;

    if (!segment)
        return NULL;
    *at = KV_STEAL(segment->next);
    refs->n_segments--;
    refs->segments_bytes -= s3_ref_keys_bytes(segment->keys);
    return segment;
}

/* Take a segment out of the list: no other thread writes its object until give_segment. */
static struct s3_ref_segment *take_segment(struct s3_refs *refs, XXH128_hash_t name)
{
    struct s3_ref_segment **at = &refs->segments;

    while (*at && !XXH128_isEqual((*at)->name, name))
        at = &(*at)->next;
    return unlink_segment(refs, at);
}

/* Put a segment back as the latest. Threads that publish one name at the same time have an object
 * each. Returns a list to free: the oldest segments beyond the limit. */
static struct s3_ref_segment *give_segment(struct s3_refs *refs, struct s3_ref_segment *segment)
{
    struct s3_ref_segment *out = NULL, **at, *oldest;

    segment->next = refs->segments;
    refs->segments = segment;
    refs->n_segments++;
    refs->segments_bytes += s3_ref_keys_bytes(segment->keys);
    while (segment->next &&
           (refs->n_segments > MAX_SEGMENTS || refs->segments_bytes > MAX_SEGMENTS_BYTES)) {
        for (at = &segment->next; (*at)->next; at = &(*at)->next)
            ;
        oldest = unlink_segment(refs, at);
        if (!oldest)
            break;
        oldest->next = out;
        out = oldest;
    }
    return out;
}

static struct s3_ref_segment *make_segment(const char *name, uint64_t number)
{
    struct s3_ref_segment *segment = calloc(1, sizeof(*segment));

    if (segment)
        segment->keys = calloc(1, sizeof(*segment->keys));
    if (!segment || !segment->keys) {
        segment_free(segment);
        return NULL;
    }
    segment->name = hash_name(name);
    segment->number = number;
    return segment;
}

static int send_segment(struct s3_refs *refs, const char *name, struct s3_noting *noting)
{
    struct s3_ref_keys *keys = noting->segment->keys;
    char id[80];

    if (keys->overflow)
        kv_buf_putc(&keys->records, '\0');
    if (keys->records.error)
        return -ENOMEM;
    snprintf(id, sizeof(id), "%016llx%016llx-%llu", (unsigned long long)refs->handle[0],
             (unsigned long long)refs->handle[1], (unsigned long long)noting->segment->number);
    noting->request = (struct s3_request){.method = "PUT",
                                          .path = s3_refs_path(refs->config, name, id),
                                          .body = keys->records.data,
                                          .len = keys->records.len};
    if (!noting->request.path)
        return -ENOMEM;
    noting->put.began_s = s3_client_now_s(refs->client);
    s3_sum(keys->records.data, keys->records.len, noting->put.sum);
    memcpy(noting->request.sum, noting->put.sum, sizeof(noting->request.sum));
    s3_submit(refs->client, &noting->request);
    noting->sent = true;
    return 0;
}

/* Store @wanted in @segment (taken over), or in a new one where there is none or it is full. */
static int note(struct s3_refs *refs, const char *name, uint64_t number,
                struct s3_ref_segment *segment, const struct s3_ref_keys *wanted,
                struct s3_noting *ret)
{
    size_t fresh;

    /* Keys already in the segment take no room. Otherwise repeated publications of the same many
     * chunks would each begin a new segment. */
    fresh = segment ? s3_ref_keys_fresh_bytes(wanted, segment->keys) : 0;
    if (fresh > 0 && segment->keys->records.len + fresh > SEGMENT_BYTES) {
        segment_free(segment); /* already stored */
        segment = NULL;
    }
    if (!segment)
        segment = make_segment(name, number);
    ret->segment = segment;
    if (!segment)
        return -ENOMEM;
    s3_ref_keys_merge(segment->keys, wanted);
    return send_segment(refs, name, ret);
}

void s3_refs_begin(struct s3_refs *refs, const char *name, bool opaque, bool empty,
                   struct s3_noting *ret)
{
    struct s3_ref_segment *segment = NULL;
    struct s3_ref_keys wanted = {.records = KV_BUF_INIT};
    uint64_t number;

    *ret = (struct s3_noting){.opaque = opaque};
    pthread_mutex_lock(&refs->lock);
    note_thread(refs);
    ret->taken = KV_STEAL(refs->since);
    if (opaque) { /* a snapshot notes nothing: what is lost stays so for the next one that does */
        ret->lost = wanted.overflow = KV_STEAL(refs->lost);
        if (ret->taken)
            s3_ref_keys_merge(&wanted, ret->taken);
        recall(refs, &wanted);
        segment = take_segment(refs, hash_name(name));
    }
    number = ++refs->last_number;
    pthread_mutex_unlock(&refs->lock);
    if (opaque && (segment || wanted.n || wanted.overflow || empty))
        ret->error = note(refs, name, number, segment, &wanted, ret);
    free(wanted.slots);
    kv_buf_fini(&wanted.records);
}

int s3_refs_wait(struct s3_refs *refs, struct s3_noting *noting)
{
    if (noting->sent) {
        noting->error = s3_wait(refs->client, &noting->request);
        if (!noting->error)
            noting->error = s3_confirm(refs->client, noting->request.path, &noting->put);
        s3_request_fini(&noting->request);
        noting->sent = false;
    }
    return noting->error;
}

void s3_refs_end(struct s3_refs *refs, struct s3_noting *noting, bool published)
{
    struct s3_ref_segment *old = NULL, *segment = noting->segment;

    s3_refs_wait(refs, noting);
    pthread_mutex_lock(&refs->lock);
    if (!published && noting->taken && since(refs))
        s3_ref_keys_merge(refs->since, noting->taken);
    if (!published && (noting->lost || (segment && segment->keys->overflow)))
        refs->lost = true;
    if (published)
        remember(refs, KV_STEAL(noting->taken), noting->opaque);
    if (published && segment && !segment->keys->overflow)
        old = give_segment(refs, KV_STEAL(segment));
    pthread_mutex_unlock(&refs->lock);
    segment_free(old);
    segment_free(segment); /* after a failure the object's content is unknown: begin another one */
    s3_ref_keys_free(noting->taken);
    *noting = (struct s3_noting){0};
}

/* -- listing and deleting ---------------------------------------------------------------------- */

struct walk {
    struct s3_refs *refs;
    const char *name;
    kv_store_each_fn each;
    void *arg;
    size_t n;      /* number of objects found */
    size_t n_keys; /* number of keys in them */
};

static int read_notes(struct walk *walk, const uint8_t *data, size_t len)
{
    int rc = 0;

    for (size_t at = 0; at < len && rc == 0;) {
        kv_store_entry entry = {
            .size = sizeof(entry), .hash = data + at + 1, .hash_len = data[at], .len = UINT64_MAX};

        at += 1 + entry.hash_len;
        walk->n_keys++;
        if (entry.hash_len == 0)
            rc = -ENOENT; /* the notes are incomplete */
        else
            rc =
                at > len || entry.hash_len > S3_MAX_HASH ? -EBADMSG : walk->each(walk->arg, &entry);
    }
    return rc;
}

static int on_notes(void *arg, const struct s3_listed *object)
{
    struct walk *walk = arg;
    uint8_t *data;
    size_t len;
    int rc;

    if (!s3_is_note(object->key))
        return 0;
    rc = s3_get(walk->refs->client, s3_refs_path(walk->refs->config, walk->name, object->key),
                &data, &len);
    if (rc == -ENOENT) /* deleted after it was listed, with its manifest */
        return 0;
    walk->n++;
    if (rc)
        return rc;
    rc = read_notes(walk, data, len);
    free(data);
    return rc;
}

static int walk_notes(struct walk *walk, s3_listed_fn on)
{
    char *folder = s3_refs_folder(walk->name);
    int rc = folder ? s3_list(walk->refs->client, walk->refs->config, folder, S3_PAGE, on, walk)
                    : -ENOMEM;

    free(folder);
    return rc;
}

int s3_refs_list(struct s3_refs *refs, const char *name, kv_store_each_fn each, void *arg,
                 size_t *ret_n)
{
    struct walk walk = {refs, name, each, arg, 0, 0};
    int rc = walk_notes(&walk, on_notes);

    *ret_n = walk.n_keys;
    return rc == 0 && walk.n == 0 ? -ENOENT : rc;
}

static int on_forget(void *arg, const struct s3_listed *object)
{
    struct walk *walk = arg;

    if (!s3_is_note(object->key)) /* of another store, whose prefix lies below these notes */
        return 0;
    return s3_delete(walk->refs->client, s3_refs_path(walk->refs->config, walk->name, object->key));
}

int s3_refs_forget(struct s3_refs *refs, const char *name)
{
    struct walk walk = {.refs = refs, .name = name};
    struct s3_ref_segment *segment, *gone = NULL;

    pthread_mutex_lock(&refs->lock);
    while ((segment = take_segment(refs, hash_name(name)))) {
        segment->next = gone;
        gone = segment;
    }
    pthread_mutex_unlock(&refs->lock);
    segment_free(gone);
    return walk_notes(&walk, on_forget);
}
