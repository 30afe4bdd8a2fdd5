// SPDX-License-Identifier: Apache-2.0
/*
 * A decision: terms of each slot, the policy's costs, the least of them.
 *
 * A pair takes two. The first finds the worker that decodes: it gets the prompt's blocks sent, which
 * costs a share of computing them (TRANSFER_COST). The second finds the worker that computes the
 * prompt, unless the first one has little left to compute.
 */
#include <math.h>

#include "select/impl.h"

#define SMOOTH_DECISIONS 200.0 /* over which the fleet's state is smoothed */
#define TRANSFER_COST 0.25

/* A decision's result. */
struct pick {
    uint32_t slot;
    enum kvsel_why why;
    uint32_t n_fits, n_ties;
    double cost;
};

/* Find the least cost of those that fit, and how many have it. */
static void find_least(const struct kvsel *s, struct pick *pick)
{
    double least = INFINITY;
    uint32_t fits = 0, ties = 0, first = KVSEL_NO_SLOT;

    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (s->reason[i] != KVSEL_FITS)
            continue;
        fits++;
        if (s->cost[i] < least || first == KVSEL_NO_SLOT) {
            least = s->cost[i];
            first = i;
            ties = 0;
        }
        ties += s->cost[i] == least;
    }
    *pick = (struct pick){.slot = first, .n_fits = fits, .n_ties = ties, .cost = least};
}

/* Draw one of the slots of least cost. */
static void draw_tie(struct kvsel *s, struct pick *pick)
{
    uint64_t nth = kvsel_random(s, pick->n_ties);

    for (uint32_t i = pick->slot; i < s->n_slots; i++) {
        if (s->reason[i] != KVSEL_FITS || s->cost[i] != pick->cost || nth-- > 0)
            continue;
        pick->slot = i;
        break;
    }
    pick->why = KVSEL_BY_TIE;
    s->stats.ties++;
}

/* Draw by the softmax of costs, which are first brought to 0 to 1. */
static void draw_soft(struct kvsel *s, struct pick *pick, double temperature)
{
    double most = pick->cost, sum = 0, at;

    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->reason[i] == KVSEL_FITS && s->cost[i] > most)
            most = s->cost[i];
    if (most <= pick->cost) {
        draw_tie(s, pick);
        return;
    }
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->reason[i] == KVSEL_FITS)
            sum += exp((pick->cost - s->cost[i]) / (most - pick->cost) / temperature);
    at = (double)kvsel_random(s, UINT64_C(1) << 53) / (double)(UINT64_C(1) << 53) * sum;
    pick->why = KVSEL_BY_CHANCE;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (s->reason[i] != KVSEL_FITS)
            continue;
        at -= exp((pick->cost - s->cost[i]) / (most - pick->cost) / temperature);
        if (at < 0 || pick->slot == KVSEL_NO_SLOT) {
            pick->slot = i;
            break;
        }
    }
}

/* Keep a session where it is, as long as its worker fits and isn't overloaded. */
static bool keep_session(struct kvsel *s, const struct kvsel_ask *ask, struct pick *pick)
{
    uint32_t slot;

    if (!ask->r.session || !s->opts.session_ns)
        return false;
    slot = kvsel_session_slot(s, ask->r.session, ask->now_ns);
    if (slot == KVSEL_NO_SLOT || s->reason[slot] != KVSEL_FITS ||
        s->waiting[slot] > (double)s->opts.session_waiting)
        return false;
    pick->slot = slot;
    pick->why = KVSEL_BY_SESSION;
    pick->cost = s->cost[slot];
    return true;
}

/* True when every worker that fits has enough to do. */
static bool all_full(const struct kvsel *s)
{
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->reason[i] == KVSEL_FITS && s->waiting[i] < (double)s->opts.queue_waiting)
            return false;
    return true;
}

/* Choose a slot from the columns. Returns 0 or -EHOSTUNREACH. */
static int choose(struct kvsel *s, const struct kvsel_ask *ask, bool session, struct pick *pick)
{
    struct kvsel_view view = kvsel_view_of(s, ask);

    ask->policy->cost(&view, s->cost);
    find_least(s, pick);
    if (pick->n_fits == 0)
        return -EHOSTUNREACH;
    if (ask->r.pinned)
        pick->why = KVSEL_BY_PIN;
    else if (session && keep_session(s, ask, pick))
        return 0;
    else if (ask->params.temperature > 0)
        draw_soft(s, pick, ask->params.temperature);
    else if (pick->n_ties > 1)
        draw_tie(s, pick);
    pick->cost = s->cost[pick->slot];
    return 0;
}

/* Return the distinct blocks of prompts that would run at a slot with this one. */
static double blocks_with(const struct kvsel *s, const struct kvsel_ask *ask, uint32_t slot)
{
    const struct kvsel_view view = kvsel_view_of(s, ask);

    return s->blocks[slot] + ceil(view.tokens / view.block_size) - kvsel_of(view.shared, slot);
}

/* Tell of the slot that computes the prompt. */
static void tell(const struct kvsel *s, const struct kvsel_ask *ask, const struct pick *pick,
                 struct kvsel_choice *ret)
{
    uint32_t slot = pick->slot, match = s->match[slot];
    double block = s->opts.block_size, reach = 0;

    for (int t = 0; t < KV_N_TIERS; t++) {
        double here = match ? ask->r.matches[match - 1].reach[t] * block : 0;

        reach = KV_MAX(reach, KV_MIN(here, (double)ask->r.tokens));
        ret->held[t] = (uint64_t)reach;
    }
    ret->predicted = s->held[slot] > reach ? (uint64_t)s->held[slot] : 0;
    ret->uncovered = (uint64_t)(s->uncovered[slot] + 0.5);
    ret->cost = s->cost[slot];
    ret->candidates = pick->n_fits;
    ret->left_out = s->n_used - pick->n_fits;
}

/* Return the label of @slot that begins with @prefix, or NULL. */
static const char *domain_of(const struct kvsel *s, uint32_t slot, const char *prefix)
{
    const struct kvsel_texts *labels = &s->slots[slot].labels;

    for (size_t i = 0; i < labels->n; i++)
        if (strncmp(labels->items[i], prefix, strlen(prefix)) == 0)
            return labels->items[i];
    return NULL;
}

/* Leave out, or charge, workers in another domain than @slot's. */
static void weigh_domain(struct kvsel *s, const struct kvsel_ask *ask, uint32_t slot)
{
    const char *domain = domain_of(s, slot, ask->r.domain);

    for (uint32_t i = 0; domain && i < s->n_slots; i++) {
        if (s->reason[i] != KVSEL_FITS || kvsel_texts_have(&s->slots[i].labels, domain))
            continue;
        if (ask->r.domain_weight > 0)
            s->extra[i] += ask->r.domain_weight * ask->params.preference_tokens;
        else
            s->reason[i] = KVSEL_DOMAIN;
    }
}

/* Smooth the share of busy workers. */
static void note_busy(struct kvsel *s)
{
    if (s->n_up)
        s->busy += ((double)s->n_busy / s->n_up - s->busy) / SMOOTH_DECISIONS;
}

/* Smooth the tokens asked for and those left to compute; equal weights keep their ratio a share. */
static void note_missing(struct kvsel *s, const struct kvsel_ask *ask,
                         const struct kvsel_choice *choice)
{
    s->asked += ((double)ask->r.tokens - s->asked) / SMOOTH_DECISIONS;
    s->computed += ((double)choice->uncovered - s->computed) / SMOOTH_DECISIONS;
}

static int choose_whole(struct kvsel *s, const struct kvsel_ask *ask, struct kvsel_choice *ret)
{
    struct pick pick;
    int rc;

    kvsel_terms(s, ask, KVSEL_BOTH);
    rc = choose(s, ask, true, &pick);
    ret->candidates = pick.n_fits;
    ret->left_out = s->n_used - pick.n_fits;
    if (rc < 0)
        return rc;
    ret->worker = ret->prefill = s->slots[pick.slot].holder;
    ret->why = pick.why;
    ret->blocks = (uint64_t)blocks_with(s, ask, pick.slot);
    tell(s, ask, &pick, ret);
    s->turn = pick.slot + 1;
    return 0;
}

static int choose_pair(struct kvsel *s, const struct kvsel_ask *ask, struct kvsel_choice *ret)
{
    struct kvsel_ask second = *ask;
    struct pick decode, prefill;
    bool alone;
    int rc;

    kvsel_terms(s, ask, KVSEL_DECODE);
    for (uint32_t i = 0; i < s->n_slots; i++)
        s->uncovered[i] *= TRANSFER_COST;
    rc = choose(s, ask, true, &decode);
    for (uint32_t i = 0; i < s->n_slots; i++)
        s->uncovered[i] /= TRANSFER_COST; /* a power of two: exact */
    ret->candidates = decode.n_fits;
    ret->left_out = s->n_used - decode.n_fits;
    if (rc < 0)
        return rc;
    ret->worker = ret->prefill = s->slots[decode.slot].holder;
    ret->why = decode.why;
    ret->blocks = (uint64_t)blocks_with(s, ask, decode.slot);
    tell(s, ask, &decode, ret);
    s->turn = decode.slot + 1;
    alone = (s->slots[decode.slot].roles & KVSEL_PREFILL) != 0;
    if (s->uncovered[decode.slot] <= (double)ask->r.whole_tokens)
        return 0;
    second.r.pinned = NULL; /* a pin and a list name the worker that decodes */
    second.r.allowed = NULL;
    kvsel_terms(s, &second, KVSEL_PREFILL);
    if (ask->r.domain)
        weigh_domain(s, &second, decode.slot);
    if (choose(s, &second, false, &prefill) < 0)
        return alone ? 0 : -EHOSTUNREACH;
    if (prefill.slot != decode.slot) {
        ret->paired = true;
        ret->prefill = s->slots[prefill.slot].holder;
    }
    tell(s, &second, &prefill, ret);
    return 0;
}

/* Decide. Returns 0, -EHOSTUNREACH or -EAGAIN; the columns tell how. */
static int decide(struct kvsel *s, const struct kvsel_ask *ask, struct kvsel_choice *ret)
{
    int rc;

    *ret = (struct kvsel_choice){.size = sizeof(*ret), .policy = ask->policy->name};
    note_busy(s);
    rc = ask->r.stage == KVSEL_PAIR ? choose_pair(s, ask, ret) : choose_whole(s, ask, ret);
    if (rc < 0)
        ret->candidates = 0; /* also of a pair that lacks its second worker alone */
    if (rc == 0 && s->opts.queue_waiting && !ask->r.released && (s->queue.n > 0 || all_full(s)))
        return -EAGAIN;
    if (rc == 0)
        note_missing(s, ask, ret);
    s->stats.choices += rc == 0;
    s->stats.unfit += rc < 0;
    return rc;
}

static int begin(struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
                 const struct kvsel_choice *ret, struct kvsel_ask *ask)
{
    int rc = kvsel_ask(s, request, now_ns, ask);

    if (rc < 0 || !kv_sized(ret, "kvsel_choice"))
        return -EINVAL;
    return kvsel_stride(s, &ask->r);
}

int kvsel_select(struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
                 struct kvsel_choice *ret)
{
    struct kvsel_choice choice;
    struct kvsel_ask ask;
    int rc = begin(s, request, now_ns, ret, &ask);

    if (rc == 0)
        rc = decide(s, &ask, &choice);
    if (rc == 0)
        KV_GIVE(ret, &choice);
    return rc;
}

/* Return the terms of a slot's cost. */
static struct kvsel_candidate candidate_of(const struct kvsel *s, const struct kvsel_ask *ask,
                                           uint32_t slot)
{
    const struct kvsel_view view = kvsel_view_of(s, ask);
    uint32_t match = s->match[slot];
    double held = 0;

    for (int t = 0; match && t < KV_N_TIERS; t++)
        held = KV_MAX(held, ask->r.matches[match - 1].reach[t] * view.block_size);
    return (struct kvsel_candidate){
        .holder = s->slots[slot].holder,
        .reason = (enum kvsel_reason)s->reason[slot],
        .queued = (uint32_t)s->queued[slot],
        .cost = s->reason[slot] == KVSEL_FITS ? s->cost[slot] : INFINITY,
        .uncovered = s->uncovered[slot],
        .waiting = s->waiting[slot],
        .context = s->context[slot],
        .requests = s->requests[slot],
        .blocks = blocks_with(s, ask, slot),
        .factor = s->factor[slot],
        .extra = kvsel_of(view.extra, slot),
        .held = (uint64_t)KV_MIN(held, view.tokens),
        .predicted = s->held[slot] > held ? (uint64_t)s->held[slot] : 0};
}

/* Tell of all workers. Returns their number; at most @max are written. */
static long list_candidates(const struct kvsel *s, const struct kvsel_ask *ask,
                            struct kvsel_candidate *candidates, size_t max)
{
    size_t n = 0;

    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (!s->slots[i].used)
            continue;
        if (n < max)
            candidates[n] = candidate_of(s, ask, i);
        n++;
    }
    return (long)n;
}

long kvsel_explain(struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
                   struct kvsel_choice *ret, struct kvsel_candidate *candidates, size_t max)
{
    struct kvsel_choice choice;
    struct kvsel_ask ask;
    int rc = begin(s, request, now_ns, ret, &ask);

    if (rc == 0 && max && !candidates)
        rc = -EINVAL;
    if (rc == 0)
        rc = decide(s, &ask, &choice);
    if (rc < 0 && rc != -EHOSTUNREACH)
        return rc;
    KV_GIVE(ret, &choice);
    return list_candidates(s, &ask, candidates, max);
}

long kvsel_look(struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
                struct kvsel_candidate *candidates, size_t max)
{
    const struct kvsel_choice none = KVSEL_CHOICE_INIT;
    struct kvsel_ask ask;
    int rc = begin(s, request, now_ns, &none, &ask);

    if (rc == 0 && max && !candidates)
        rc = -EINVAL;
    if (rc < 0)
        return rc;
    kvsel_terms(s, &ask, KVSEL_BOTH);
    memset(s->cost, 0, s->n_slots * sizeof(*s->cost)); /* no policy has weighed them */
    return list_candidates(s, &ask, candidates, max);
}

int kvsel_reckon(struct kvsel *s, const struct kvsel_request *request, struct kv_holder holder,
                 uint64_t now_ns, struct kvsel_choice *ret)
{
    uint32_t slot = kvsel_slot_find(s, holder);
    struct kvsel_choice choice;
    struct kvsel_ask ask;
    int rc = begin(s, request, now_ns, ret, &ask);

    if (rc < 0)
        return rc;
    choice = (struct kvsel_choice){.size = sizeof(choice),
                                   .worker = holder,
                                   .prefill = holder,
                                   .why = KVSEL_BY_PIN,
                                   .policy = ask.policy->name,
                                   .uncovered = ask.r.tokens};
    if (slot != KVSEL_NO_SLOT) {
        struct pick pick = {.slot = slot, .why = KVSEL_BY_PIN, .n_fits = 1};
        struct kvsel_view view;

        kvsel_terms(s, &ask, 0);
        view = kvsel_view_of(s, &ask);
        ask.policy->cost(&view, s->cost);
        choice.blocks = (uint64_t)blocks_with(s, &ask, slot);
        tell(s, &ask, &pick, &choice);
    }
    KV_GIVE(ret, &choice);
    return 0;
}
