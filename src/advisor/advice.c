// SPDX-License-Identifier: Apache-2.0
#include "advisor/advice.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { POINTS = 16 }; /* of a curve, halving from the room that finds all on */

struct group {
    char name[KVA_CURVE_NAME]; /* MODEL.TENANT, as a subject has them */
    struct kva_curve *curve;
    uint64_t references, bytes, first_s, last_s;
};

struct kva_advice {
    uint32_t samples;
    size_t n;
    struct group groups[KVA_CURVES];
};

static int add_group(struct kva_advice *advice, const char *name, size_t len)
{
    struct group *group = &advice->groups[advice->n];
    int rc = kva_curve_create(advice->samples, &group->curve);

    if (rc < 0)
        return rc;
    memcpy(group->name, name, len);
    group->name[len] = '\0';
    advice->n++;
    return 0;
}

int kva_advice_create(uint32_t samples, struct kva_advice **ret)
{
    struct kva_advice *advice = calloc(1, sizeof(*advice));
    int rc;

    if (!advice)
        return -ENOMEM;
    advice->samples = samples;
    rc = add_group(advice, "", 0);
    if (rc < 0)
        kva_advice_destroy(advice);
    else
        *ret = advice;
    return rc;
}

void kva_advice_destroy(struct kva_advice *advice)
{
    for (size_t i = 0; advice && i < advice->n; i++)
        kva_curve_destroy(advice->groups[i].curve);
    free(advice);
}

/* Find "MODEL.TENANT" in "kvasir.CLUSTER.MODEL.TENANT.WORKER". Returns its length; 0: another form. */
static size_t find_name(const char *subject, const char **ret)
{
    const char *at = subject, *end;

    for (int i = 0; i < 2 && at; i++) {
        at = strchr(at, '.');
        at = at ? at + 1 : NULL;
    }
    end = at ? strrchr(at, '.') : NULL;
    *ret = at;
    return end && end - at < KVA_CURVE_NAME ? (size_t)(end - at) : 0;
}

uint8_t kva_advice_group(struct kva_advice *advice, const char *subject)
{
    const char *name;
    size_t len = find_name(subject, &name);

    for (size_t i = 1; i < advice->n && len; i++)
        if (strlen(advice->groups[i].name) == len && memcmp(advice->groups[i].name, name, len) == 0)
            return (uint8_t)i;
    if (!len || advice->n == KVA_CURVES || add_group(advice, name, len) < 0)
        return KVA_ALL;
    return (uint8_t)(advice->n - 1);
}

static void use(struct group *group, uint64_t key, uint64_t bytes, uint64_t now_s)
{
    if (kva_curve_use(group->curve, &key, 1) < 0)
        return; /* no memory: this reference doesn't count */
    group->references++;
    group->bytes += bytes;
    if (!group->first_s)
        group->first_s = now_s;
    group->last_s = now_s;
}

void kva_advice_use(struct kva_advice *advice, uint8_t group, uint64_t key, uint64_t bytes,
                    uint64_t now_s)
{
    use(&advice->groups[KVA_ALL], key, bytes, now_s);
    if (group != KVA_ALL && advice->n > 2) /* that of one alone would be that of all */
        use(&advice->groups[group], key, bytes, now_s);
}

int kva_advice_copy(const struct kva_advice *advice, struct kva_advice **ret)
{
    struct kva_advice *copy = malloc(sizeof(*copy));

    if (!copy)
        return -ENOMEM;
    *copy = *advice;
    copy->n = 0;
    for (size_t i = 0; i < advice->n; i++) {
        if (kva_curve_copy(advice->groups[i].curve, &copy->groups[i].curve) < 0) {
            kva_advice_destroy(copy);
            return -ENOMEM;
        }
        copy->n++;
    }
    *ret = copy;
    return 0;
}

/* -- JSON -------------------------------------------------------------------------------------- */

static void put_point(const struct kva_worth *worth, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "bytes", (uint64_t)worth->bytes);
    kv_json_member_double(w, "hit_rate", worth->hits);
    kv_json_member_double(w, "tokens_saved_an_hour", worth->tokens);
    kv_json_member_double(w, "gpu_seconds_saved_an_hour", worth->gpu_seconds);
    kv_json_member_double(w, "next_gib_gpu_seconds_an_hour", worth->next_gpu_seconds);
}

static void put_points(const struct group *group, const struct kva_terms *terms,
                       struct kv_json_writer *w)
{
    double most = kva_worth_most(group->curve, terms);

    kv_json_key(w, "curve");
    kv_json_begin_array(w);
    for (int i = POINTS - 1; i >= 0; i--) {
        struct kva_worth worth;

        kva_worth_of(group->curve, terms, most / (double)(1u << i), &worth);
        kv_json_begin_object(w);
        put_point(&worth, w);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

static void put_tiers(const struct group *group, const struct kva_volumes *volumes,
                      const struct kva_advice_terms *given, const struct kva_terms *terms,
                      struct kv_json_writer *w)
{
    double before = 0;

    kv_json_key(w, "tiers");
    kv_json_begin_array(w);
    for (size_t m = 0; m < volumes->config.n_members; m++) {
        const struct trd_member_config *member = &volumes->config.members[m];
        double bytes = (double)member->capacity / 100 * given->share;
        struct kva_tier_worth worth;

        if (member->capacity == UINT64_MAX || member->read_only)
            continue;
        kva_worth_of_tier(group->curve, terms, before, bytes, (double)member->gib_month_nano / 1e9,
                          &worth);
        kv_json_begin_object(w);
        kv_json_member_str(w, "member", member->name);
        kv_json_member_double(w, "hit_rate_alone", worth.hits);
        put_point(&worth.total, w);
        kv_json_member_double(w, "cost_a_month", worth.cost);
        kv_json_member_double(w, "saved_a_month", worth.month);
        kv_json_member_u64(w, "best_bytes", (uint64_t)worth.best);
        kv_json_end_object(w);
        before += bytes;
    }
    kv_json_end_array(w);
}

static void put_group(const struct group *group, const struct kva_volumes *volumes,
                      const struct kva_advice_terms *given, struct kv_json_writer *w)
{
    double seconds = (double)(group->last_s - group->first_s);
    struct kva_terms terms = {.block_bytes = (double)group->bytes / (double)group->references,
                              .block_tokens = given->block_tokens,
                              .hours = seconds / 3600,
                              .prefill = given->prefill,
                              .gpu_hour = given->gpu_hour};
    struct kva_curve_info info;

    if (seconds < 1) /* rates of so short a time say nothing: those of all so far */
        terms.hours = 1;
    kva_curve_get(group->curve, &info);
    kv_json_member_str(w, "of", group->name[0] ? group->name : "all");
    kv_json_member_u64(w, "references", group->references);
    kv_json_member_double(w, "seconds", seconds);
    kv_json_member_double(w, "blobs", info.distinct);
    kv_json_member_double(w, "sampled_share", info.share);
    kv_json_member_double(w, "bytes_a_blob", terms.block_bytes);
    kv_json_member_u64(w, "knee_bytes", (uint64_t)kva_worth_knee(group->curve, &terms));
    put_points(group, &terms, w);
    put_tiers(group, volumes, given, &terms, w);
}

void kva_advice_json(const struct kva_advice *copy, const struct kva_volumes *volumes,
                     const struct kva_advice_terms *terms, struct kv_json_writer *w)
{
    kv_json_member_double(w, "prefill_tokens_a_second", terms->prefill);
    kv_json_member_double(w, "tokens_a_blob", terms->block_tokens);
    kv_json_member_double(w, "gpu_hour", terms->gpu_hour);
    kv_json_key(w, "advice");
    kv_json_begin_array(w);
    for (size_t i = 0; i < copy->n; i++) {
        if (!copy->groups[i].references || (i && copy->n == 2)) /* one model: that of all */
            continue;
        kv_json_begin_object(w);
        put_group(&copy->groups[i], volumes, terms, w);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}
