// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer read`: lease blocks in batches, copy them, compare them, time it. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/peer/peer.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"

#define BATCH_BYTES (UINT64_C(1) << 30) /* of memory, unless a block is longer */

/* One run of reading. */
struct work {
    struct kc_reader *r;
    struct kc_reading *out;
    struct kvbm_layout *to;
    uint32_t batch;
    uint32_t *numbers; /* 0, 1, 2 ... */
    uint8_t *ok;
    bool is_demo; /* the bytes of each key are known */
};

static void *block_at(const struct work *w, uint32_t i)
{
    struct kvbm_view view;

    (void)kvbm_layout_block(w->to, i, &view);
    return (void *)(uintptr_t)view.addr; // NOLINT(performance-no-int-to-ptr)
}

/* Count key @at, which the peer had no block for. */
static void count_absent(struct work *w, size_t at)
{
    if (w->r->tiers[at] == KVBM_NO_TIER)
        w->out->absent++;
    else
        w->out->gone++;
}

/* Count the @n keys from @at on that a lease covers. */
static void count(struct work *w, const struct kvbm_lease *lease, size_t at, uint32_t n)
{
    struct kvbm_block_at place;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t key = 0;

        if (kvbm_lease_block(lease, i, &place) < 0) {
            count_absent(w, at + i);
        } else if (!(w->ok[i / 8] >> (i % 8) & 1)) {
            w->out->lost++;
        } else {
            memcpy(&key, w->r->keys.data + (at + i) * w->r->key_len, KV_MIN(w->r->key_len, 8u));
            w->out->blocks++;
            w->out->bytes += w->r->block_bytes;
            w->out->wrong +=
                w->is_demo && !kc_peer_is_filled(key, block_at(w, i), w->r->block_bytes);
        }
    }
}

/* Copy what @lease covers. Returns the number of keys. */
static uint32_t copy(struct work *w, struct kvbm_lease *lease, size_t at, uint64_t start_ns)
{
    const struct kc_peer_opts *opts = w->r->opts;
    const struct kvbm_lease_read_opts what = {.size = sizeof(what),
                                              .to = w->to,
                                              .to_blocks = w->numbers,
                                              .n = (uint32_t)kvbm_lease_count(lease),
                                              .deadline_ns = kc_reader_deadline(w->r),
                                              .ok = w->ok,
                                              .no_checksums = opts->no_checksums,
                                              .no_shared = opts->no_shared};
    uint64_t leased_ns = kv_now_ns(), end_ns;

    memset(w->ok, 0, w->batch / 8 + 1);
    (void)kvbm_lease_read(lease, &what);
    end_ns = kv_now_ns();
    w->out->shared = kvbm_lease_is_shared(lease) && !opts->no_shared;
    w->out->lease_ns += leased_ns - start_ns;
    w->out->copy_ns += end_ns - leased_ns;
    w->out->longest_ns = KV_MAX(w->out->longest_ns, end_ns - start_ns);
    w->out->n_batches++;
    count(w, lease, at, what.n);
    return what.n;
}

/* Lease and copy up to a batch from key @at on. Returns the number of keys dealt with; 0: the
 * session has ended. */
static uint32_t read_batch(struct work *w, size_t at)
{
    struct kc_reader *r = w->r;
    uint32_t n = (uint32_t)KV_MIN(r->n_keys - at, (size_t)w->batch), done = 0;
    uint64_t start_ns = kv_now_ns();
    struct kvbm_lease *lease = NULL;
    int rc = kvbm_session_lease(r->session, r->set, r->group, r->keys.data + at * r->key_len, n, 0,
                                kc_reader_deadline(r), &lease);

    if (rc == 0)
        done = copy(w, lease, at, start_ns);
    kvbm_lease_release(lease);
    if (done)
        return done;
    if (rc == 0 || rc == -ENOSPC) {
        w->out->refused += n;
        return n;
    }
    if (rc != -ENOENT) {
        w->out->err = rc;
        return 0;
    }
    for (uint32_t i = 0; i < n; i++)
        count_absent(w, at + i);
    return n;
}

/* Read all keys --passes times; keys behind the session's end are lost. */
static void read_all(struct work *w)
{
    const struct kc_reader *r = w->r;
    uint64_t passes = r->opts->passes ? r->opts->passes : 1;
    struct kc_bar bar = {.label = "reading", .quiet = r->opts->json};

    for (uint64_t pass = 0; pass < passes && !w->out->err; pass++) {
        for (size_t at = 0; at < r->n_keys;) {
            uint32_t n = read_batch(w, at);

            if (!n)
                w->out->lost += (passes - pass) * r->n_keys - at;
            if (!n || kc_bar_progress(&bar, w->out->bytes, passes * r->n_keys * r->block_bytes)) {
                w->out->err = n ? -EINTR : w->out->err;
                break;
            }
            at += n;
        }
    }
    kc_bar_finish(&bar);
}

static bool is_demo(const struct kc_reader *r)
{
    const char *fingerprint = r->opts->fingerprint;

    return r->key_len == 8 && (!fingerprint || strcmp(fingerprint, KC_PEER_DEMO) == 0);
}

int kc_reader_read(struct kc_reader *reader, struct kc_reading *ret)
{
    /* Pages come with the bytes: the peer may announce blocks of any length. */
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    uint64_t batch = reader->opts->batch ? reader->opts->batch : KC_PEER_BATCH;
    struct work w = {.r = reader, .out = ret, .is_demo = is_demo(reader)};
    struct kvbm_layout_config config = reader->layout;
    int rc;

    *ret = (struct kc_reading){.blocks = 0};
    batch = KV_MIN(batch, KV_MAX(BATCH_BYTES / reader->block_bytes, UINT64_C(1)));
    w.batch = (uint32_t)KV_MIN(batch, (uint64_t)KV_MAX(reader->n_keys, (size_t)1));
    config.kind = KVBM_FULLY_CONTIGUOUS;
    config.num_blocks = w.batch;
    memset(config.tensor_shape, 0, sizeof(config.tensor_shape));
    w.numbers = malloc(w.batch * sizeof(*w.numbers));
    w.ok = malloc(w.batch / 8 + 1);
    rc = w.numbers && w.ok ? kvbm_layout_allocate(&config, &allocator, &w.to) : -ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < w.batch; i++)
        w.numbers[i] = i;
    if (rc == 0)
        read_all(&w);
    kvbm_layout_destroy(w.to);
    free(w.numbers);
    free(w.ok);
    return rc;
}

/* ---- reporting ---- */

static double seconds(const struct kc_reading *f)
{
    return (double)(f->lease_ns + f->copy_ns) / 1e9;
}

static double per_batch_us(const struct kc_reading *f, uint64_t ns)
{
    return f->n_batches ? (double)ns / (double)f->n_batches / 1e3 : 0;
}

static const char *compared(const struct kc_reader *r, const struct kc_reading *f)
{
    return is_demo(r)              ? "every byte with the made-up blocks"
           : f->shared             ? "generations, before and after the copy"
           : r->opts->no_checksums ? "nothing"
                                   : "the XXH3-128 of each block";
}

static int print_json(const struct kc_reader *r, const struct kc_reading *f, int status)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_str(&json, "agent", r->info.agent);
    kv_json_member_str(&json, "way", kc_reader_way(r, f->shared));
    kv_json_member_u64(&json, "keys", r->n_keys);
    kv_json_member_u64(&json, "block_bytes", r->block_bytes);
    kv_json_member_u64(&json, "blocks", f->blocks);
    kv_json_member_u64(&json, "bytes", f->bytes);
    kv_json_member_u64(&json, "wrong", f->wrong);
    kv_json_member_double(&json, "seconds", seconds(f));
    kv_json_member_double(&json, "gb_per_s", f->bytes ? (double)f->bytes / seconds(f) / 1e9 : 0);
    kv_json_member_double(&json, "lease_us", per_batch_us(f, f->lease_ns));
    kv_json_member_double(&json, "copy_us", per_batch_us(f, f->copy_ns));
    kv_json_member_double(&json, "longest_us", (double)f->longest_ns / 1e3);
    kv_json_member_u64(&json, "absent", f->absent);
    kv_json_member_u64(&json, "gone", f->gone);
    kv_json_member_u64(&json, "not_lent", f->refused);
    kv_json_member_u64(&json, "lost", f->lost);
    if (f->err)
        kv_json_member_str(&json, "error", strerror(-f->err));
    return kc_peer_json_end(&json, &out, status);
}

static void print_misses(const struct kc_reader *r, const struct kc_reading *f)
{
    if (f->absent)
        printf("  missing: %" PRIu64 " keys that no tier of %s has\n", f->absent, r->info.agent);
    if (f->gone)
        printf("  missing: %" PRIu64 " keys that %s has dropped since the lookup, or can't read\n",
               f->gone, r->info.agent);
    if (f->refused)
        printf("  missing: %" PRIu64 " not lent: readers hold as many blocks as %s lends "
               "(--lease-share)\n",
               f->refused, r->info.agent);
    if (f->lost)
        printf("  missing: %" PRIu64 " lost: %s\n", f->lost,
               f->err ? "the session ended" : "the lease ended before the copy, or bytes differed");
    if (f->wrong)
        printf("  WRONG: %" PRIu64 " blocks have other bytes than their keys\n", f->wrong);
}

static void print(const struct kc_reader *r, const struct kc_reading *f)
{
    printf("%" PRIu64 " blocks of %s from %s through %s: %s in %s, %s/s\n", f->blocks,
           kc_bytes((double)r->block_bytes).s, r->info.agent, kc_reader_way(r, f->shared),
           kc_bytes((double)f->bytes).s, kc_duration(f->lease_ns + f->copy_ns).s,
           kc_bytes(f->bytes ? (double)f->bytes / seconds(f) : 0).s);
    if (f->n_batches)
        printf("  a batch: %s to lease, %s to copy; the longest %s\n",
               kc_duration(f->lease_ns / f->n_batches).s, kc_duration(f->copy_ns / f->n_batches).s,
               kc_duration(f->longest_ns).s);
    if (f->blocks)
        printf("  compared: %s\n", compared(r, f));
    print_misses(r, f);
}

static int status_of(const struct kc_reader *r, const struct kc_reading *f)
{
    if (f->err == -EINTR)
        return KC_PEER_INTERRUPTED;
    return f->wrong || f->absent + f->gone + f->refused + f->lost || !r->n_keys ? KC_PEER_MISSES
                                                                                : KC_PEER_OK;
}

/* Tell why there is nothing to read. Returns an exit status. */
static int nothing(const struct kc_reader *r)
{
    if (!r->layout.num_blocks)
        return kc_peer_fail(r->command, KC_PEER_MISSES, "%s exports no block set %u", r->info.agent,
                            r->set);
    if (!r->opts->keys && !r->lists)
        return kc_peer_fail(r->command, KC_PEER_MISSES,
                            "%s doesn't tell its keys, as only `kvasir peer share` does: name some "
                            "with --keys",
                            r->info.agent);
    return kc_peer_fail(r->command, KC_PEER_MISSES, "%s has no keys", r->info.agent);
}

int kc_peer_read(const struct kc_peer_opts *opts, const char *endpoint)
{
    struct kc_reading figures;
    struct kc_reader r;
    int status = kc_reader_open("read", endpoint, opts, &r), rc = 0;

    if (status != KC_PEER_OK)
        return status;
    status = r.layout.num_blocks ? kc_reader_find(&r) : KC_PEER_OK;
    if (status == KC_PEER_OK && !r.n_keys)
        status = nothing(&r);
    if (status == KC_PEER_OK)
        rc = kc_reader_read(&r, &figures);
    if (rc < 0) {
        status = kc_peer_fail("read", KC_PEER_FAILED, "%s", strerror(-rc));
    } else if (status == KC_PEER_OK) {
        status = status_of(&r, &figures);
        if (opts->json)
            status = print_json(&r, &figures, status);
        else
            print(&r, &figures);
        if (figures.err && figures.err != -EINTR)
            (void)kc_peer_fail("read", status, "the session with %s has ended: %s", endpoint,
                               strerror(-figures.err));
    }
    kc_reader_close(&r);
    return status;
}
