// SPDX-License-Identifier: Apache-2.0
/*
 * Two ways of cutting an object behind one window: pieces that a format's parser asks for, and
 * content-defined cuts for everything else.
 *
 * Content-defined: a gear hash rolls over the last 64 bytes, h = 2h + table[byte]. A chunk ends
 * where the hash's high bits are zero. More bits have to be zero before the average length than
 * after it (normalisation), which draws lengths towards the average. No chunk is below a quarter of
 * the average or above four times the average. Each step takes two bytes, since only the shift and
 * one addition depend on the step before.
 */
#include "store/object/cut.h"

#include <pthread.h>

/* -- the window -------------------------------------------------------------------------------- */

static int make_room(struct kvs_source *s, size_t want)
{
    if (s->start && s->start + want > s->capacity) {
        memmove(s->data, s->data + s->start, s->end - s->start);
        s->end -= s->start;
        s->start = 0;
    }
    if (want > s->capacity) {
        uint8_t *data = realloc(s->data, want);

        if (!data)
            return -ENOMEM;
        s->data = data;
        s->capacity = want;
    }
    return 0;
}

size_t kvs_source_fill(struct kvs_source *s, size_t want)
{
    if (s->end - s->start < want && !s->eof && !s->error)
        s->error = make_room(s, want);
    while (s->end - s->start < want && !s->eof && !s->error) {
        size_t room = s->capacity - s->end;
        int64_t n = s->read(s->arg, s->data + s->end, room);

        if (n < 0)
            s->error = n >= -4095 ? (int)n : -EIO;
        else if ((uint64_t)n > room)
            /* the caller's read function claims more bytes than the room it was given */
            s->error = -EINVAL;
        else
            s->end += (size_t)n;
        s->eof = n == 0;
    }
    return s->error ? 0 : s->end - s->start;
}

/* -- content-defined cuts ---------------------------------------------------------------------- */

static uint64_t gear[256], gear_twice[256];

/* Fill the gear table. It is part of the format: another table would cut elsewhere and share no
 * chunk with earlier saves. */
static void make_gear(void)
{
    uint64_t state = UINT64_C(0x6b76617369720001);

    for (size_t i = 0; i < KV_COUNT(gear); i++) { /* splitmix64 */
        uint64_t x = state += UINT64_C(0x9e3779b97f4a7c15);

        x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
        gear[i] = x ^ x >> 31;
        gear_twice[i] = gear[i] << 1;
    }
}

/* Mask of @bits high bits below the topmost bit, which a step of two bytes shifts out. */
static uint64_t high_bits(unsigned bits)
{
    return ((UINT64_C(1) << bits) - 1) << (63 - bits);
}

/* Find the offset in data[at, end) at which a chunk ends; @end when none does. @h_at carries the
 * hash on. */
static size_t roll(const uint8_t *data, size_t at, size_t end, uint64_t mask, uint64_t *h_at)
{
    uint64_t h = *h_at;

    for (; at + 2 <= end; at += 2) {
        uint64_t twice = (h << 2) + gear_twice[data[at]];

        if (KV_UNLIKELY(!(twice & (mask << 1))))
            return at + 1;
        h = twice + gear[data[at + 1]];
        if (KV_UNLIKELY(!(h & mask)))
            return at + 2;
    }
    if (at < end) {
        h = (h << 1) + gear[data[at]];
        at++;
    }
    *h_at = h;
    return at;
}

static size_t content_cut(const struct kvs_cutter *c, const uint8_t *data, size_t len)
{
    size_t middle = KV_MIN(c->avg, len), end = KV_MIN(c->max, len), cut;
    uint64_t h = 0;

    if (len <= c->min)
        return len;
    cut = roll(data, c->min, middle, c->mask_small, &h);
    return cut < middle ? cut : roll(data, middle, end, c->mask_large, &h);
}

/* -- the cutter -------------------------------------------------------------------------------- */

static void choose_format(struct kvs_cutter *c, enum kvs_format format)
{
    size_t n = format == KVS_FORMAT_BYTES ? 0 : kvs_source_fill(&c->source, KVS_LLAMA_LOOK);
    enum kvs_llama_look look = n ? kvs_llama_looks(c->source.data + c->source.start, n) : 0;

    c->told = format == KVS_FORMAT_LLAMA || look == KVS_LLAMA_YES;
    if (format == KVS_FORMAT_AUTO)
        format = look == KVS_LLAMA_NO ? KVS_FORMAT_BYTES : KVS_FORMAT_LLAMA;
    c->format = format;
    c->parsing = format == KVS_FORMAT_LLAMA;
}

int kvs_cutter_init(struct kvs_cutter *c, const struct kvs_save_opts *opts, kvs_read_fn read,
                    void *arg)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint32_t bytes = KV_OPT(opts, chunk_bytes, KVS_CHUNK_BYTES);
    uint32_t tokens = KV_OPT(opts, chunk_tokens, KVS_CHUNK_TOKENS);
    enum kvs_format format = KV_OPT(opts, format, KVS_FORMAT_AUTO);
    unsigned bits;

    memset(c, 0, sizeof(*c));
    if (bytes < KVS_CHUNK_BYTES_MIN || bytes > KVS_CHUNK_BYTES_MAX ||
        tokens > KVS_CHUNK_TOKENS_MAX || (unsigned)format > KVS_FORMAT_LLAMA)
        return -EINVAL;
    pthread_once(&once, make_gear);
    bits = 31 - (unsigned)__builtin_clz(bytes);
    c->avg = bytes;
    c->min = bytes / 4;
    c->max = (size_t)bytes * 4;
    c->mask_small = high_bits(bits + 1);
    c->mask_large = high_bits(bits - 1);
    c->source = (struct kvs_source){.read = read, .arg = arg, .capacity = c->max * 2};
    c->source.data = malloc(c->source.capacity);
    if (!c->source.data)
        return -ENOMEM;
    choose_format(c, format);
    kvs_llama_init(&c->llama, tokens, c->max);
    return c->source.error;
}

void kvs_cutter_fini(struct kvs_cutter *c)
{
    free(c->source.data);
    free(c->woven);
    kvs_llama_fini(&c->llama);
}

static const uint8_t *consume(struct kvs_cutter *c, size_t len)
{
    const uint8_t *data = c->source.data + c->source.start;

    c->source.start += len;
    return data;
}

/* Lay a region out column by column; the cutter then hands out its chunks from that copy. */
static int weave(struct kvs_cutter *c, struct kvs_manifest *m, const struct kvs_weave *w)
{
    size_t len = kvs_weave_region(w);
    int rc;

    if (c->woven_capacity < len) {
        uint8_t *memory = realloc(c->woven, len);

        if (!memory)
            return -ENOMEM;
        c->woven = memory;
        c->woven_capacity = len;
    }
    rc = kvs_manifest_add_weave(m, c->offset, w->rows, w->row_bytes, w->piece_bytes);
    if (rc)
        return rc;
    kvs_weave_into(w, consume(c, len), c->woven);
    c->woven_at = 0;
    c->woven_len = len;
    c->woven_step = (size_t)w->rows * w->piece_bytes;
    return 0;
}

static void next_woven(struct kvs_cutter *c, const uint8_t **ret, size_t *ret_len)
{
    *ret = c->woven + c->woven_at;
    *ret_len = KV_MIN(c->woven_step, c->woven_len - c->woven_at);
    c->woven_at += *ret_len;
}

/* Leave the rest of the object to cuts by content. An object in which the parser found no state is
 * nothing but bytes. */
static void stop_parsing(struct kvs_cutter *c)
{
    c->parsing = false;
    if (!c->llama.accepted) {
        c->format = KVS_FORMAT_BYTES;
        c->parsed = 0;
    }
}

/* Cut the next piece as the parser asks. An object that ends inside the piece is cut at its end. */
static int next_parsed(struct kvs_cutter *c, struct kvs_manifest *m, const uint8_t **ret,
                       size_t *ret_len)
{
    struct kvs_piece piece = kvs_llama_next(&c->llama, &c->source);
    size_t len = kvs_source_fill(&c->source, piece.len);
    int rc;

    if (c->source.error || !piece.len)
        return c->source.error;
    if (piece.weave.rows && len >= piece.len) {
        rc = weave(c, m, &piece.weave);
        if (rc)
            return rc;
        c->parsed += piece.len;
        next_woven(c, ret, ret_len);
        return 1;
    }
    *ret_len = KV_MIN(KV_MIN(piece.len, len), c->max);
    if (*ret_len < piece.len)
        stop_parsing(c); /* the object ends here, or the format no longer matches */
    else
        c->parsed += piece.len;
    *ret = consume(c, *ret_len);
    return *ret_len ? 1 : 0;
}

static int next_by_content(struct kvs_cutter *c, const uint8_t **ret, size_t *ret_len)
{
    size_t len = kvs_source_fill(&c->source, c->max);

    if (!len)
        return c->source.error;
    *ret_len = content_cut(c, c->source.data + c->source.start, len);
    *ret = consume(c, *ret_len);
    return 1;
}

int kvs_cutter_next(struct kvs_cutter *c, struct kvs_manifest *m, const uint8_t **ret,
                    size_t *ret_len)
{
    int rc = 0;

    if (c->woven_at < c->woven_len) {
        next_woven(c, ret, ret_len);
        rc = 1;
    }
    if (!rc && c->parsing) {
        rc = next_parsed(c, m, ret, ret_len);
        if (rc != 1)
            stop_parsing(c);
    }
    if (!rc)
        rc = next_by_content(c, ret, ret_len);
    if (rc == 1)
        c->offset += *ret_len;
    return rc;
}
