// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body_groups.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "indexer/api/body_msgpack.h"

/* Members that are numbers. */
static const struct {
    const char *name;
    size_t offset;
} numbers[] = {
    {"group", offsetof(struct kve_told_group, group)},
    {"block_size", offsetof(struct kve_told_group, block_size)},
    {"window", offsetof(struct kve_told_group, window)},
    {"chunk", offsetof(struct kve_told_group, chunk)},
};

static uint32_t *number_at(struct kve_told_group *group, size_t i)
{
    return (uint32_t *)(void *)((char *)group + numbers[i].offset);
}

static uint32_t *find_number(struct kve_told_group *group, struct kv_str key)
{
    for (size_t i = 0; i < KV_COUNT(numbers); i++)
        if (kv_str_eq(key, numbers[i].name))
            return number_at(group, i);
    return NULL;
}

/* -- JSON -------------------------------------------------------------------------------------- */

static void read_group_json(struct kv_json *json, struct kv_buf *unescaped, struct kve_told *ret)
{
    struct kve_told_group group = {.group = KVE_ANY_GROUP};
    const char *problem;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        uint32_t *to = find_number(&group, key);

        if (to)
            *to = (uint32_t)kv_json_u64(json, UINT32_MAX - 1);
        else if (kv_str_eq(key, "kind"))
            group.kind = kve_kind_of(kv_json_str(json, unescaped));
        else
            kv_json_skip(json);
    }
    if (kv_json_failed(json))
        return;
    problem = kve_told_add(ret, &group);
    if (problem)
        kv_json_fail(json, -EINVAL, problem);
}

void ki_told_read_json(struct kv_json *json, struct kv_buf *unescaped, struct kve_told *ret)
{
    kv_json_array(json);
    while (kv_json_next_item(json))
        read_group_json(json, unescaped, ret);
}

int ki_told_read_text(const char *text, struct kve_told *ret, struct kv_error *error)
{
    struct kv_buf unescaped = KV_BUF_INIT;
    struct kve_told told = {0};
    struct kv_json json;

    kv_json_init(&json, text, strlen(text));
    ki_told_read_json(&json, &unescaped, &told);
    kv_buf_fini(&unescaped);
    if (kv_json_finish(&json) < 0)
        return kv_fail(error, -EINVAL, json.error.offset, "%s (byte %zu)", json.error.text,
                       json.error.offset);
    *ret = told;
    return 0;
}

void ki_told_write(const struct kve_told *told, struct kv_json_writer *w)
{
    kv_json_begin_array(w);
    for (uint32_t i = 0; i < told->n; i++) {
        struct kve_told_group group = told->items[i];

        kv_json_begin_object(w);
        for (size_t k = 0; k < KV_COUNT(numbers); k++)
            if (k == 0 ? group.group != KVE_ANY_GROUP : *number_at(&group, k) > 0)
                kv_json_member_u64(w, numbers[k].name, *number_at(&group, k));
        if (group.kind) /* not one that only a later version knows */
            kv_json_member_str(w, "kind", kve_kind_name((enum kve_kind)group.kind));
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

/* A dump names the use of a group alone: the name is that of the plainest such kind. */
const char *ki_group_kind_name(const struct kve_group *g)
{
    static const char *const of_needs[] = {
        [KV_NEEDS_RUN] = "sliding_window",
        [KV_NEEDS_STATE] = "mamba",
        [KV_NEEDS_CHUNK] = "chunked_local_attention",
        [KV_NEEDS_ALL] = "full_attention",
    };

    if (g->kind)
        return kve_kind_name(g->kind);
    return g->is_main ? "full_attention" : g->is_window ? of_needs[g->needs] : "unknown";
}

static void write_needs(const struct kve_group *g, struct kv_json_writer *w)
{
    static const char *const names[] = {[KV_NEEDS_RUN] = "run",
                                        [KV_NEEDS_STATE] = "state",
                                        [KV_NEEDS_CHUNK] = "chunk",
                                        [KV_NEEDS_ALL] = "all"};
    bool has_number = g->needs == KV_NEEDS_RUN || g->needs == KV_NEEDS_CHUNK;

    if (g->is_main || g->is_window)
        kv_json_member_str(w, "needs", g->is_main ? "all" : names[g->needs]);
    else
        kv_json_member_bool(w, "followed", false);
    if (g->is_window && has_number)
        kv_json_member_u64(w, "blocks", g->need);
    if (g->is_window && g->window)
        kv_json_member_u64(w, g->needs == KV_NEEDS_CHUNK ? "chunk" : "window", g->window);
}

void ki_groups_write(const struct kve_listed_group *groups, uint32_t n, uint32_t block_size,
                     struct kv_json_writer *w)
{
    kv_json_begin_array(w);
    for (uint32_t i = 0; i < n; i++) {
        const struct kve_group *g = &groups[i].is;

        kv_json_begin_object(w);
        kv_json_member_u64(w, "group", g->group);
        kv_json_member_str(w, "kind", ki_group_kind_name(g));
        if (g->stride) /* else of no whole number, or part, of registered ones */
            kv_json_member_u64(w, "block_size", (uint64_t)block_size * g->stride / g->parts);
        write_needs(g, w);
        kv_json_member_str(w, "from", groups[i].seen ? "events" : "registration");
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

/* -- msgpack ----------------------------------------------------------------------------------- */

static void read_group_msgpack(struct kv_msgpack *m, struct kve_told *ret)
{
    struct kve_told_group group = {.group = KVE_ANY_GROUP};
    const char *problem;
    uint32_t n = 0;

    if (ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_MAP, "expected a map"))
        n = kv_msgpack_map(m);
    for (; n && !kv_msgpack_failed(m); n--) {
        struct kv_str key = ki_msgpack_str(m);
        uint32_t *to = find_number(&group, key);

        if (to)
            *to = (uint32_t)ki_msgpack_uint(m, UINT32_MAX - 1);
        else if (kv_str_eq(key, "kind"))
            group.kind = kve_kind_of(ki_msgpack_str(m));
        else
            kv_msgpack_skip(m);
    }
    if (kv_msgpack_failed(m))
        return;
    problem = kve_told_add(ret, &group);
    if (problem)
        kv_msgpack_fail(m, -EINVAL, problem);
}

void ki_told_read_msgpack(struct kv_msgpack *m, struct kve_told *ret)
{
    uint32_t n = 0;

    if (ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_ARRAY, "expected an array"))
        n = kv_msgpack_array(m);
    for (; n && !kv_msgpack_failed(m); n--)
        read_group_msgpack(m, ret);
}

/* -- check ------------------------------------------------------------------------------------- */

int ki_told_check(const struct kve_told *told, uint32_t block_size, struct kv_error *error)
{
    for (uint32_t i = 0; i < told->n; i++) {
        const char *problem = kve_told_problem(&told->items[i], block_size);

        if (problem)
            return kv_fail(error, -EINVAL, 0, "item %" PRIu32 " of groups, by number: %s", i,
                           problem);
    }
    return 0;
}
