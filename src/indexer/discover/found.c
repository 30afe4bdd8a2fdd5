// SPDX-License-Identifier: Apache-2.0
#include "indexer/discover/found.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/ascii.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/body_registration.h"
#include "indexer/configured.h"

/* -- a worker ---------------------------------------------------------------------------------- */

static void free_texts(struct ki_registration *r)
{
    free((char *)r->name);
    free((char *)r->endpoint);
    free((char *)r->replay_endpoint);
    free((char *)r->model);
    free((char *)r->tenant);
}

static bool copy_text(const char **text)
{
    *text = *text ? strdup(*text) : NULL;
    return *text;
}

/* Replace the texts by copies. Returns false, and frees the copies, without memory. */
static bool own_texts(struct ki_registration *r)
{
    bool name = r->name, replay = r->replay_endpoint, ok = true;

    ok &= copy_text(&r->name) || !name;
    ok &= copy_text(&r->endpoint);
    ok &= copy_text(&r->replay_endpoint) || !replay;
    ok &= copy_text(&r->model);
    ok &= copy_text(&r->tenant);
    if (!ok)
        free_texts(r);
    return ok;
}

int ki_found_defaults(const struct ki_options *options, struct ki_found *ret,
                      struct kv_error *error)
{
    struct ki_habits habits;
    int rc = ki_configured_habits(options, &habits, error);

    if (rc < 0)
        return rc;
    *ret = (struct ki_found){
        .registration = {.block_size = (uint32_t)options->block_size,
                         .habits = habits,
                         .model = options->model_name,
                         .tenant = options->tenant_id},
        .has_lookahead = options->hash_lookahead > 0,
        .lookahead = (uint32_t)options->hash_lookahead,
    };
    return 0;
}

int ki_found_compare(const struct ki_found *a, const struct ki_found *b)
{
    const struct ki_registration *x = &a->registration, *y = &b->registration;

    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

bool ki_found_equal(const struct ki_found *a, const struct ki_found *b)
{
    const struct ki_registration *x = &a->registration, *y = &b->registration;

    return a->incarnation == b->incarnation && a->has_lookahead == b->has_lookahead &&
           a->lookahead == b->lookahead && x->block_size == y->block_size &&
           x->num_blocks == y->num_blocks && x->has_publisher == y->has_publisher &&
           x->fed == y->fed && x->publisher == y->publisher && kv_same_text(x->name, y->name) &&
           kv_same_text(x->endpoint, y->endpoint) &&
           kv_same_text(x->replay_endpoint, y->replay_endpoint) &&
           kv_same_text(x->model, y->model) && kv_same_text(x->tenant, y->tenant) &&
           ki_habits_equal(&x->habits, &y->habits);
}

/* -- a set ------------------------------------------------------------------------------------- */

void ki_found_set_fini(struct ki_found_set *set)
{
    for (size_t i = 0; i < set->n; i++)
        free_texts(&set->items[i].registration);
    free(set->items);
    *set = (struct ki_found_set){0};
}

void ki_found_leave_out(struct ki_found_set *set, const char *who, const char *why)
{
    if (!set->left_out++)
        snprintf(set->why, sizeof(set->why), "%.60s: %.90s", who, why);
}

static int grow(struct ki_found_set *set)
{
    size_t capacity = KV_MAX(2 * set->capacity, (size_t)16);
    struct ki_found *items;

    if (set->n < set->capacity)
        return 0;
    items = realloc(set->items, capacity * sizeof(*items));
    if (!items)
        return -ENOMEM;
    set->items = items;
    set->capacity = capacity;
    return 0;
}

int ki_found_add(struct ki_found_set *set, const struct ki_found *found, struct kv_error *error)
{
    struct ki_found *item;

    if (!found->registration.block_size)
        return kv_fail(error, -EINVAL, 0,
                       "its block_size is told neither there nor by --block-size");
    if (set->n == KI_MAX_FOUND)
        return kv_fail(error, -ENOSPC, 0, "more than %d workers", KI_MAX_FOUND);
    if (grow(set) < 0)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    item = &set->items[set->n];
    *item = *found;
    if (!own_texts(&item->registration))
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    set->n++;
    return 0;
}

bool ki_found_sets_equal(const struct ki_found_set *a, const struct ki_found_set *b)
{
    bool same = a->n == b->n && a->left_out == b->left_out && strcmp(a->why, b->why) == 0;

    for (size_t i = 0; same && i < a->n; i++)
        same = ki_found_compare(&a->items[i], &b->items[i]) == 0 &&
               ki_found_equal(&a->items[i], &b->items[i]);
    return same;
}

int ki_found_set_copy(const struct ki_found_set *set, struct ki_found_set *ret)
{
    struct kv_error why;
    int rc = 0;

    for (size_t i = 0; i < set->n && rc == 0; i++)
        rc = ki_found_add(ret, &set->items[i], &why);
    if (rc < 0) {
        ki_found_set_fini(ret);
        return rc;
    }
    ret->left_out = set->left_out;
    memcpy(ret->why, set->why, sizeof(ret->why));
    return 0;
}

/* An item, and its place in the order of the source. */
struct placed {
    struct ki_found found;
    size_t place;
};

static int compare_placed(const void *a, const void *b)
{
    const struct placed *x = a, *y = b;
    int order = ki_found_compare(&x->found, &y->found);

    return order ? order : (x->place > y->place) - (x->place < y->place);
}

static void drop_doubles(struct ki_found_set *set)
{
    char digits[KV_INSTANCE_DIGITS];
    size_t kept = 0;

    for (size_t i = 0; i < set->n; i++) {
        struct ki_registration *r = &set->items[i].registration;

        if (kept && ki_found_compare(&set->items[kept - 1], &set->items[i]) == 0) {
            ki_found_leave_out(set, kv_instance_text(r->instance, r->name, digits),
                               "this rank is named twice");
            free_texts(r);
        } else {
            set->items[kept++] = set->items[i];
        }
    }
    set->n = kept;
}

void ki_found_sort(struct ki_found_set *set)
{
    struct placed *all = calloc(set->n + 1, sizeof(*all));

    /* Without memory: in any order of doubles. */
    for (size_t i = 0; all && i < set->n; i++)
        all[i] = (struct placed){set->items[i], i};
    if (all && set->n)
        qsort(all, set->n, sizeof(*all), compare_placed);
    else if (set->n)
        qsort(set->items, set->n, sizeof(*set->items),
              (int (*)(const void *, const void *))ki_found_compare);
    for (size_t i = 0; all && i < set->n; i++)
        set->items[i] = all[i].found;
    free(all);
    drop_doubles(set);
}

/* -- JSON -------------------------------------------------------------------------------------- */

/* Overlay the habits of @base that @body doesn't tell. */
static void inherit_habits(const struct ki_body *body, const struct ki_habits *base,
                           struct ki_habits *habits)
{
    if (!(body->present & KI_EAGLE_DROP)) {
        habits->eagle_drop = base->eagle_drop;
        habits->eagle_groups = base->eagle_groups;
    }
    if (!(body->present & KI_GROUPS))
        habits->groups = base->groups;
    if (!(body->present & KI_SILENT_WINDOWS))
        habits->silent_windows = base->silent_windows;
    if (!(body->present & KI_REPORT_MODE))
        habits->report_mode = base->report_mode;
}

/* Fill the fields of @found that @body doesn't have by those of @base. */
static void inherit(const struct ki_body *body, const struct ki_found *base, struct ki_found *found)
{
    struct ki_registration *r = &found->registration;
    const struct ki_registration *from = &base->registration;

    if (!(body->present & KI_INSTANCE_ID)) {
        r->instance = from->instance;
        r->name = from->name;
    }
    if (!(body->present & KI_DP_RANK))
        r->rank = from->rank;
    r->endpoint = r->endpoint ? r->endpoint : from->endpoint;
    r->replay_endpoint = r->replay_endpoint ? r->replay_endpoint : from->replay_endpoint;
    r->model = r->model ? r->model : from->model;
    if (!body->tenant_id)
        r->tenant = from->tenant;
    if (!(body->present & KI_NUM_BLOCKS))
        r->num_blocks = from->num_blocks;
    inherit_habits(body, &from->habits, &r->habits);
    found->has_lookahead = base->has_lookahead || body->present & KI_HASH_LOOKAHEAD;
    found->lookahead =
        body->present & KI_HASH_LOOKAHEAD ? (uint32_t)body->hash_lookahead : base->lookahead;
    found->incarnation = base->incarnation;
}

int ki_found_add_json(struct ki_found_set *set, struct kv_str text, uint32_t required,
                      const struct ki_found *base, struct ki_body *body, struct kv_error *error)
{
    const uint32_t all =
        KI_INSTANCE_ID | KI_ENDPOINT | KI_MODEL_NAME | KI_BLOCK_SIZE | KI_REGISTRATION_OPTIONAL;
    struct ki_found found = {0};
    int rc = ki_body_parse(KI_MEDIA_JSON, text, required, all & ~required, body, error);

    if (rc < 0)
        return rc;
    if (!(body->present & KI_BLOCK_SIZE))
        body->block_size = base->registration.block_size;
    if (!body->block_size)
        return kv_fail(error, -EINVAL, 0,
                       "its block_size is told neither there nor by --block-size");
    rc = ki_body_registration(body, &found.registration, error);
    if (rc < 0)
        return rc;
    inherit(body, base, &found);
    return ki_found_add(set, &found, error);
}

/* -- a file ------------------------------------------------------------------------------------ */

/* Add the objects of an array, whose text stays unchanged. */
static int add_array(struct ki_found_set *set, struct kv_json *json, const struct ki_found *base,
                     struct ki_body *body, struct kv_error *error)
{
    unsigned number = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        struct kv_error why = {0};
        struct kv_str text;
        int rc;

        (void)kv_json_peek(json);
        text.p = json->p;
        kv_json_skip(json);
        text.len = (size_t)(json->p - text.p);
        number++;
        if (kv_json_failed(json))
            break;
        rc = ki_found_add_json(set, text, KI_INSTANCE_ID | KI_ENDPOINT, base, body, &why);
        if (rc < 0)
            return kv_fail(error, rc, 0, "worker %u: %.160s", number, why.text);
    }
    return 0;
}

static int read_json(struct ki_found_set *set, struct kv_str text, const struct ki_found *base,
                     struct kv_error *error)
{
    struct ki_body body = {0};
    struct kv_json json;
    struct kv_str key;
    bool any = false;
    int rc = 0;

    kv_json_init(&json, text.p, text.len);
    if (kv_json_peek(&json) == KV_JSON_ARRAY) {
        rc = add_array(set, &json, base, &body, error);
    } else {
        kv_json_object(&json);
        while (rc == 0 && kv_json_next_key(&json, &key)) {
            if (!kv_str_eq(key, "workers")) {
                kv_json_skip(&json);
                continue;
            }
            if (any)
                rc = kv_fail(error, -EINVAL, 0, "\"workers\" is there twice");
            else
                rc = add_array(set, &json, base, &body, error);
            any = true;
        }
        if (rc == 0 && !any && !kv_json_failed(&json))
            rc = kv_fail(error, -EINVAL, 0, "an object without \"workers\"");
    }
    ki_body_fini(&body);
    if (rc == 0 && kv_json_finish(&json) < 0)
        rc = kv_fail(error, -EBADMSG, 0, "no JSON at byte %zu: %.120s", json.error.offset,
                     json.error.text);
    return rc;
}

int ki_found_add_line(struct ki_found_set *set, const char *line, const struct ki_found *base,
                      struct kv_error *error)
{
    struct ki_worker_spec *specs;
    long n = ki_worker_specs_parse(&(struct kv_arg_list){{line}, 1}, &specs, error);
    int rc = 0;

    for (long i = 0; i < n && rc == 0; i++) {
        struct ki_found found = *base;

        found.registration.instance = specs[i].instance;
        found.registration.name = specs[i].name;
        found.registration.rank = specs[i].rank;
        found.registration.endpoint = specs[i].endpoint;
        found.registration.replay_endpoint = specs[i].replay_endpoint;
        rc = ki_found_add(set, &found, error);
    }
    if (n >= 0)
        ki_worker_specs_free(specs, n);
    return n < 0 ? (int)n : rc;
}

/* Cut what follows a `#` at the start or behind a blank. Elsewhere it begins an endpoint's topic. */
static void cut_comment(char *line)
{
    for (char *p = strchr(line, '#'); p; p = strchr(p + 1, '#'))
        if (p == line || p[-1] == ' ' || p[-1] == '\t') {
            *p = '\0';
            return;
        }
}

/* Read lines. The last one must end, so that half of a file isn't taken for the whole. */
static int read_lines(struct ki_found_set *set, struct kv_str text, const struct ki_found *base,
                      struct kv_error *error)
{
    const char *p = text.p, *end = text.p + text.len;
    unsigned number = 1;
    int rc = 0;

    if (end[-1] != '\n')
        return kv_fail(error, -EBADMSG, 0, "the last line doesn't end: is it still being written?");
    for (; p < end && rc == 0; number++) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        char *line = strndup(p, (size_t)(newline - p));
        struct kv_error why = {0};

        if (!line)
            return kv_fail(error, -ENOMEM, 0, "out of memory");
        cut_comment(line);
        rc = ki_found_add_line(set, line, base, &why);
        if (rc < 0)
            kv_fail(error, rc, 0, "line %u: %.160s", number, why.text);
        free(line);
        p = newline + 1;
    }
    return rc;
}

int ki_found_read(struct ki_found_set *set, struct kv_str text, const struct ki_found *base,
                  struct kv_error *error)
{
    size_t blank = 0;

    while (blank < text.len && strchr(" \t\r\n", text.p[blank]))
        blank++;
    if (blank == text.len)
        return kv_fail(error, -EBADMSG, 0, "it is empty: write [] for no workers");
    if (memchr(text.p, '\0', text.len))
        return kv_fail(error, -EBADMSG, 0, "it has a NUL byte");
    if (text.p[blank] == '[' || text.p[blank] == '{')
        return read_json(set, text, base, error);
    return read_lines(set, text, base, error);
}
