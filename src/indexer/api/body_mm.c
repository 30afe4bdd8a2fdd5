// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body_mm.h"

#include <errno.h>
#include <stdlib.h>

#include "indexer/api/body_msgpack.h"
#include "indexer/model/lookup.h"
#include "kv_event.h"

/* An object being read, and the members read so far. */
struct object {
    struct ki_mm_object value;
    bool has_identity, has_offset, has_length;
    uint64_t length;
};

/*
 * Finish an object. @block is its block, or -1 for an object with offset and length. Returns NULL,
 * or the missing member.
 */
static const char *finish(struct object *object, int64_t block, struct kv_buf *ret)
{
    if (!object->has_identity)
        return "an object without id or mm_hash";
    if (block < 0 && (!object->has_offset || !object->has_length || !object->length))
        return "an object without offset or length";
    object->value.start = block < 0 ? object->value.start : (uint64_t)block;
    object->value.end = block < 0 ? object->value.start + object->length : 0;
    kv_buf_append(ret, &object->value, sizeof(object->value));
    return NULL;
}

static void set_id(struct object *object, struct kv_str id)
{
    object->has_identity |= id.len > 0;
    object->value.identity = kve_mm_identity(id.p, id.len);
}

/* The ranges of an object's tokens in its block. A single range counts; several count as none. */
struct ranges {
    unsigned n;
    uint64_t from, to;
};

static void set_ranges(struct object *object, const struct ranges *ranges)
{
    bool usable = ranges->n == 1 && ranges->from < ranges->to && ranges->to <= UINT32_MAX;

    object->value.from = usable ? (uint32_t)ranges->from : 0;
    object->value.to = usable ? (uint32_t)ranges->to : 0;
}

/* -- JSON -------------------------------------------------------------------------------------- */

/* Read a number into @ret. Returns false when it can't be the edge of a range. */
static bool read_edge_json(struct kv_json *json, uint64_t *ret)
{
    double value = kv_json_double(json);

    if (!(value >= 0 && value <= UINT32_MAX))
        return false;
    *ret = (uint64_t)value;
    return !(value > (double)*ret);
}

/* Read a list of pairs of numbers. Any other value counts as no range. */
static void read_ranges_json(struct kv_json *json, struct object *object)
{
    struct ranges ranges = {0};

    if (kv_json_peek(json) != KV_JSON_ARRAY) {
        kv_json_skip(json);
        return;
    }
    kv_json_array(json);
    while (kv_json_next_item(json)) {
        bool ok = true;
        unsigned n = 0;

        if (kv_json_peek(json) != KV_JSON_ARRAY) {
            kv_json_skip(json);
            ranges.n = 2;
            continue;
        }
        kv_json_array(json);
        for (; kv_json_next_item(json); n++) {
            if (n > 1 || kv_json_peek(json) != KV_JSON_NUMBER) {
                kv_json_skip(json);
                ok = false;
            } else {
                ok &= read_edge_json(json, n ? &ranges.to : &ranges.from);
            }
        }
        ranges.n += ok && n == 2 ? 1 : 2;
    }
    set_ranges(object, &ranges);
}

static void read_object_json(struct kv_json *json, int64_t block, struct kv_buf *unescaped,
                             struct kv_buf *ret)
{
    struct object object = {.length = 0};
    const char *problem;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "id")) {
            set_id(&object, kv_json_str(json, unescaped));
        } else if (kv_str_eq(key, "mm_hash")) {
            object.value.identity = kv_json_bits64(json);
            object.has_identity = true;
        } else if (kv_str_eq(key, "offset") && block < 0) {
            object.value.start = kv_json_u64(json, UINT32_MAX);
            object.has_offset = true;
        } else if (kv_str_eq(key, "length") && block < 0) {
            object.length = kv_json_u64(json, UINT32_MAX);
            object.has_length = true;
        } else if (kv_str_eq(key, "offsets") && block >= 0) {
            read_ranges_json(json, &object);
        } else {
            kv_json_skip(json);
        }
    }
    if (kv_json_failed(json))
        return;
    problem = finish(&object, block, ret);
    if (problem)
        kv_json_fail(json, -EINVAL, problem);
}

static void read_list_json(struct kv_json *json, int64_t block, struct kv_buf *unescaped,
                           struct kv_buf *ret)
{
    kv_json_array(json);
    while (kv_json_next_item(json))
        read_object_json(json, block, unescaped, ret);
}

void ki_mm_read_json(struct kv_json *json, bool infos, struct kv_buf *unescaped, struct kv_buf *ret)
{
    struct kv_str key;

    if (!infos) {
        read_list_json(json, -1, unescaped, ret);
        return;
    }
    kv_json_array(json);
    for (int64_t block = 0; kv_json_next_item(json); block++) {
        if (kv_json_null(json))
            continue;
        kv_json_object(json);
        while (kv_json_next_key(json, &key)) {
            if (kv_str_eq(key, "mm_objects"))
                read_list_json(json, block, unescaped, ret);
            else
                kv_json_skip(json);
        }
    }
}

/* -- msgpack ----------------------------------------------------------------------------------- */

static uint32_t enter_map(struct kv_msgpack *m)
{
    return ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_MAP, "expected a map")
               ? kv_msgpack_map(m)
               : 0;
}

static uint32_t enter_array(struct kv_msgpack *m)
{
    return ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_ARRAY, "expected an array")
               ? kv_msgpack_array(m)
               : 0;
}

static uint64_t read_bits64(struct kv_msgpack *m)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    bool fits = type == KV_MSGPACK_UINT || type == KV_MSGPACK_INT;

    return ki_msgpack_expect(m, fits, "expected an integer") ? kv_msgpack_bits64(m) : 0;
}

/* Read a pair of numbers, to its end whatever it holds. Returns true for a valid range. */
static bool read_range_msgpack(struct kv_msgpack *m, struct ranges *ranges)
{
    uint64_t pair[2] = {0};
    bool ok = kv_msgpack_peek(m) == KV_MSGPACK_ARRAY;
    uint32_t n = ok ? kv_msgpack_array(m) : 0;

    if (!ok)
        kv_msgpack_skip(m);
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        if (i < 2 && kv_msgpack_peek(m) == KV_MSGPACK_UINT) {
            pair[i] = kv_msgpack_bits64(m);
        } else {
            kv_msgpack_skip(m);
            ok = false;
        }
    }
    ranges->from = pair[0];
    ranges->to = pair[1];
    return ok && n == 2;
}

static void read_ranges_msgpack(struct kv_msgpack *m, struct object *object)
{
    struct ranges ranges = {0};

    if (kv_msgpack_peek(m) != KV_MSGPACK_ARRAY) {
        kv_msgpack_skip(m);
        return;
    }
    for (uint32_t n = kv_msgpack_array(m); n && !kv_msgpack_failed(m); n--)
        ranges.n += read_range_msgpack(m, &ranges) ? 1 : 2;
    set_ranges(object, &ranges);
}

static void read_object_msgpack(struct kv_msgpack *m, int64_t block, struct kv_buf *ret)
{
    struct object object = {.length = 0};
    const char *problem;

    for (uint32_t n = enter_map(m); n && !kv_msgpack_failed(m); n--) {
        struct kv_str key = ki_msgpack_str(m);

        if (kv_str_eq(key, "id")) {
            set_id(&object, ki_msgpack_str(m));
        } else if (kv_str_eq(key, "mm_hash")) {
            object.value.identity = read_bits64(m);
            object.has_identity = true;
        } else if (kv_str_eq(key, "offset") && block < 0) {
            object.value.start = ki_msgpack_uint(m, UINT32_MAX);
            object.has_offset = true;
        } else if (kv_str_eq(key, "length") && block < 0) {
            object.length = ki_msgpack_uint(m, UINT32_MAX);
            object.has_length = true;
        } else if (kv_str_eq(key, "offsets") && block >= 0) {
            read_ranges_msgpack(m, &object);
        } else {
            kv_msgpack_skip(m);
        }
    }
    if (kv_msgpack_failed(m))
        return;
    problem = finish(&object, block, ret);
    if (problem)
        kv_msgpack_fail(m, -EINVAL, problem);
}

static void read_list_msgpack(struct kv_msgpack *m, int64_t block, struct kv_buf *ret)
{
    for (uint32_t n = enter_array(m); n && !kv_msgpack_failed(m); n--)
        read_object_msgpack(m, block, ret);
}

void ki_mm_read_msgpack(struct kv_msgpack *m, bool infos, struct kv_buf *ret)
{
    int64_t block = 0;

    if (!infos) {
        read_list_msgpack(m, -1, ret);
        return;
    }
    for (uint32_t n = enter_array(m); n && !kv_msgpack_failed(m); n--, block++) {
        if (kv_msgpack_nil(m))
            continue;
        for (uint32_t k = enter_map(m); k && !kv_msgpack_failed(m); k--) {
            if (kv_str_eq(ki_msgpack_str(m), "mm_objects"))
                read_list_msgpack(m, block, ret);
            else
                kv_msgpack_skip(m);
        }
    }
}

/* -- order ------------------------------------------------------------------------------------- */

static int by_start(const void *a, const void *b)
{
    const struct ki_mm_object *x = a, *y = b;

    return (x->start > y->start) - (x->start < y->start);
}

/*
 * Find the object in sorted @all that @object continues: the same one at the end of the block
 * before. Prompts with more than MAX_LOOK objects in two blocks are refused later.
 */
#define MAX_LOOK 512
static const struct ki_mm_object *
earlier_part(const struct ki_mm_object *all, const struct ki_mm_object *object, uint32_t block_size)
{
    size_t before = KV_MIN((size_t)(object - all), (size_t)MAX_LOOK);

    for (size_t i = 1; i <= before && object[-(ptrdiff_t)i].start + 1 >= object->start; i++) {
        const struct ki_mm_object *o = object - i;

        if (o->start + 1 == object->start && o->identity == object->identity && o->to == block_size)
            return o;
    }
    return NULL;
}

/* Objects are sorted by block, so the part in the block before has its place already. */
static void set_places(struct ki_mm_object *all, size_t n, uint32_t block_size)
{
    for (size_t i = 0; i < n; i++) {
        const struct ki_mm_object *earlier;

        if (all[i].end || !all[i].to)
            continue;
        earlier = all[i].from ? NULL : earlier_part(all, &all[i], block_size);
        all[i].place = earlier ? earlier->place - (int64_t)block_size : (int64_t)all[i].from;
    }
}

const char *ki_mm_sort(struct kv_buf *objects, size_t n_tokens, uint32_t block_size)
{
    struct ki_mm_object *all = (struct ki_mm_object *)(void *)objects->data;
    size_t n = objects->len / sizeof(*all);

    if (n > 1)
        qsort(all, n, sizeof(*all), by_start);
    for (size_t i = 0; i < n; i++) {
        if (all[i].end && all[i].end > n_tokens)
            return "an object of mm_objects ends beyond the prompt";
        if (i && all[i - 1].end > all[i].start)
            return "two objects of mm_objects overlap";
    }
    set_places(all, n, block_size);
    return NULL;
}
