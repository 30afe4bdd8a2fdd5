// SPDX-License-Identifier: Apache-2.0
#include "select/impl.h"

int kvsel_stride(struct kvsel *s, const struct kvsel_request *r)
{
    size_t stride = s->opts.stride, n = r->n_hashes / stride;

    if (n > s->strided_max) {
        size_t max = KV_MAX(n, 2 * s->strided_max);
        uint64_t *grown = realloc(s->strided, max * sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        s->strided = grown;
        s->strided_max = max;
    }
    for (size_t i = 0; i < n; i++)
        s->strided[i] = r->hashes[i * stride + stride - 1];
    s->n_strided = n;
    return 0;
}

/* ---- who is left out ---- */

/* Leave @slot out for @reason, unless it is already. */
static void leave_out(struct kvsel *s, size_t slot, enum kvsel_reason reason)
{
    if (s->reason[slot] == KVSEL_FITS)
        s->reason[slot] = (uint8_t)reason;
}

static void leave_out_unless(struct kvsel *s, size_t slot, bool fits, enum kvsel_reason reason)
{
    if (!fits)
        leave_out(s, slot, reason);
}

static int by_number(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void leave_out_denied(struct kvsel *s, const struct kvsel_request *r)
{
    uint64_t few[64], *sorted = r->n_allowed <= KV_COUNT(few) ? few : NULL;
    size_t bytes = r->n_allowed * sizeof(*sorted);

    if (!sorted)
        sorted = malloc(bytes);
    if (sorted && bytes) {
        memcpy(sorted, r->allowed, bytes);
        qsort(sorted, r->n_allowed, sizeof(*sorted), by_number);
    }
    for (uint32_t i = 0; i < s->n_slots; i++) {
        uint64_t worker = s->slots[i].holder.worker;

        leave_out_unless(
            s, i, sorted && bsearch(&worker, sorted, r->n_allowed, sizeof(worker), by_number),
            KVSEL_DENIED);
    }
    if (sorted != few)
        free(sorted);
}

static void leave_out_unlabelled(struct kvsel *s, const struct kvsel_request *r)
{
    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (s->reason[i] != KVSEL_FITS)
            continue;
        for (size_t k = 0; k < r->n_required; k++)
            leave_out_unless(s, i, kvsel_texts_have(&s->slots[i].labels, r->required[k]),
                             KVSEL_LABEL);
    }
}

static void fill_reasons(struct kvsel *s, const struct kvsel_request *r, uint32_t roles)
{
    uint32_t pinned = r->pinned ? kvsel_slot_find(s, *r->pinned) : KVSEL_NO_SLOT;

    if (s->n_slots)
        memcpy(s->reason, s->state, s->n_slots);
    for (uint32_t i = 0; s->n_limited && i < s->n_slots; i++) {
        uint32_t max = s->slots[i].max_requests;

        leave_out_unless(s, i, !max || s->requests[i] < max, KVSEL_FULL);
    }
    for (uint32_t i = 0; s->n_partial && i < s->n_slots; i++)
        leave_out_unless(s, i, (s->slots[i].roles & roles) == roles, KVSEL_ROLE);
    for (uint32_t i = 0; r->pinned && i < s->n_slots; i++)
        leave_out_unless(s, i, i == pinned, KVSEL_PINNED);
    if (r->allowed)
        leave_out_denied(s, r);
    for (size_t k = 0; k < r->n_avoided; k++) {
        uint32_t slot = kvsel_slot_find(s, r->avoided[k]);

        if (slot != KVSEL_NO_SLOT)
            leave_out(s, slot, KVSEL_AVOIDED);
    }
    if (r->n_required)
        leave_out_unlabelled(s, r);
}

/* ---- tokens that workers hold ---- */

/* Note one match: the tokens held, and those left to compute, with loads from lower tiers weighed. */
static void fill_match(struct kvsel *s, const struct kvsel_ask *ask, uint32_t slot, size_t number)
{
    const struct kvi_match *match = &ask->r.matches[number];
    double block = s->opts.block_size, tokens = (double)ask->r.tokens, saved = 0, before = 0;

    for (int t = 0; t < KV_N_TIERS; t++) {
        double reach = KV_MIN(match->reach[t] * block, tokens);

        if (reach <= before)
            continue;
        saved += (reach - before) * (1 - ask->params.tier_cost[t]);
        before = reach;
    }
    saved *= s->slots[slot].trust;
    s->uncovered[slot] = tokens - KV_MAX(saved, 0);
    s->held[slot] = before;
    s->match[slot] = (uint32_t)number + 1;
}

static void fill_matches(struct kvsel *s, const struct kvsel_ask *ask)
{
    double tokens = (double)ask->r.tokens;

    for (uint32_t i = 0; i < s->n_slots; i++)
        s->uncovered[i] = tokens;
    if (s->n_slots) {
        memset(s->held, 0, s->n_slots * sizeof(*s->held));
        memset(s->match, 0, s->n_slots * sizeof(*s->match));
    }
    for (size_t i = 0; i < ask->r.n_matches && i < UINT32_MAX; i++) {
        uint32_t slot = kvsel_slot_find(s, ask->r.matches[i].holder);

        if (slot != KVSEL_NO_SLOT)
            fill_match(s, ask, slot, i);
    }
}

/* A predicted prefix counts where it is longer than the match; where it is not, it is over. */
static void fill_predictions(struct kvsel *s, const struct kvsel_ask *ask)
{
    double step = (double)s->opts.stride * s->opts.block_size, tokens = (double)ask->r.tokens;
    size_t n;

    if (!s->soon_oldest || !s->n_strided)
        return;
    n = kvsel_claims_find(&s->claims, KVSEL_SOON, s->strided, s->n_strided, s->seen, s->found);
    for (size_t i = 0; i < n; i++) {
        uint32_t slot = s->found[i].slot;
        double predicted = s->found[i].n * step;

        if (predicted > s->held[slot]) {
            s->held[slot] = predicted;
            s->uncovered[slot] = KV_MIN(s->uncovered[slot], tokens - predicted);
        } else {
            kvsel_soon_covered(s, slot, s->found[i].n);
        }
    }
}

static void fill_shared(struct kvsel *s)
{
    size_t n =
        kvsel_claims_find(&s->claims, KVSEL_RUNNING, s->strided, s->n_strided, s->seen, s->found);

    memset(s->shared, 0, s->n_slots * sizeof(*s->shared));
    for (size_t i = 0; i < n; i++)
        s->shared[s->found[i].slot] = s->found[i].n * (double)s->opts.stride;
}

/* ---- costs beside the prompt's ---- */

static void fill_lora(struct kvsel *s, const struct kvsel_ask *ask)
{
    for (uint32_t i = 0; i < s->n_slots; i++) {
        const struct kvsel_slot *at = &s->slots[i];
        bool loaded = s->reason[i] == KVSEL_FITS && kvsel_texts_have(&at->loras, ask->r.lora);
        bool room = !at->max_loras || at->loras.n < at->max_loras;

        s->lora[i] = loaded ? 1 : room ? .8 : 0;
        s->extra[i] += loaded ? 0 : (room ? 1 : 2) * ask->params.lora_tokens;
    }
}

static bool has_extra(const struct kvsel_request *r)
{
    return (r->lora && *r->lora) || r->n_preferred || r->domain;
}

static void fill_extra(struct kvsel *s, const struct kvsel_ask *ask)
{
    if (s->n_slots)
        memset(s->extra, 0, s->n_slots * sizeof(*s->extra));
    if (ask->r.lora && *ask->r.lora)
        fill_lora(s, ask);
    for (size_t k = 0; k < ask->r.n_preferred; k++) {
        const struct kvsel_preference *want = &ask->r.preferred[k];

        for (uint32_t i = 0; i < s->n_slots; i++)
            if (s->reason[i] == KVSEL_FITS && !kvsel_texts_have(&s->slots[i].labels, want->label))
                s->extra[i] += want->weight * ask->params.preference_tokens;
    }
}

void kvsel_terms(struct kvsel *s, const struct kvsel_ask *ask, uint32_t roles)
{
    kvsel_slots_heal(s, ask->now_ns);
    kvsel_soon_expire(s, ask->now_ns);
    fill_reasons(s, &ask->r, roles);
    fill_matches(s, ask);
    fill_predictions(s, ask);
    if (ask->policy->shared && s->n_slots)
        fill_shared(s);
    if (has_extra(&ask->r))
        fill_extra(s, ask);
}

double kvsel_missing(const struct kvsel *s)
{
    return s->asked > 0 ? s->computed / s->asked : 1;
}

struct kvsel_view kvsel_view_of(const struct kvsel *s, const struct kvsel_ask *ask)
{
    bool lora = ask->r.lora && *ask->r.lora;

    return (struct kvsel_view){.n = s->n_slots,
                               .tokens = (double)ask->r.tokens,
                               .block_size = s->opts.block_size,
                               .busy = s->busy,
                               .missing = kvsel_missing(s),
                               .turn = s->turn,
                               .params = &ask->params,
                               .uncovered = s->uncovered,
                               .held = s->held,
                               .shared = ask->policy->shared ? s->shared : NULL,
                               .extra = has_extra(&ask->r) ? s->extra : NULL,
                               .lora = lora ? s->lora : NULL,
                               .waiting = s->waiting,
                               .context = s->context,
                               .requests = s->requests,
                               .queued = s->queued,
                               .blocks = s->blocks,
                               .capacity = s->capacity,
                               .factor = s->factor,
                               .reason = s->reason};
}
