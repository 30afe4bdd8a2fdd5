// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "select/impl.h"

void kvsel_set_log(kv_log_fn fn, void *arg)
{
    kv_log_set_user(fn, arg);
}

const char *kvsel_reason_name(enum kvsel_reason reason)
{
    static const char *const names[] = {"fits",   "gone",   "draining", "failed", "full",  "role",
                                        "pinned", "denied", "avoided",  "label",  "domain"};

    return (size_t)reason < KV_COUNT(names) ? names[reason] : NULL;
}

const char *kvsel_why_name(enum kvsel_why why)
{
    static const char *const names[] = {"cost", "tie", "pin", "session", "chance"};

    return (size_t)why < KV_COUNT(names) ? names[why] : NULL;
}

/* Return @value, or @fallback for 0; a negative number means 0. Others than finite ones clear *@ok. */
static double param(double value, double fallback, bool *ok)
{
    *ok = *ok && isfinite(value);
    if (value == 0)
        return fallback;
    return value > 0 ? value : 0;
}

/* Fill @ret from @given (may be NULL), and from @base what that leaves open. Returns 0 or -EINVAL. */
static int read_params(const struct kvsel_params *given, const struct kvsel_params *base,
                       struct kvsel_params *ret)
{
    struct kvsel_params p = {0};
    bool ok = true;

    if (!kv_sized_or_null(given, "kvsel_params"))
        return -EINVAL;
    if (given)
        KVSEL_READ(&p, given);
    *ret = *base;
#define PARAM(name) ret->name = param(p.name, base->name, &ok)
    for (int i = 0; i < KV_N_TIERS; i++)
        PARAM(tier_cost[i]);
    PARAM(own_weight);
    PARAM(max_own_weight);
    PARAM(context_weight);
    PARAM(lora_tokens);
    PARAM(preference_tokens);
    PARAM(overlap_credit);
    PARAM(prefill_scale);
    PARAM(request_weight);
    PARAM(temperature);
    PARAM(prefix_weight);
    PARAM(queue_weight);
    PARAM(use_weight);
    PARAM(lora_weight);
    PARAM(match_threshold);
    PARAM(balance_absolute);
    PARAM(balance_relative);
#undef PARAM
    return ok ? 0 : -EINVAL;
}

static const struct kvsel_params default_params = {.size = sizeof(default_params),
                                                   .tier_cost = {0, .25, .75, .75},
                                                   .max_own_weight = 6,
                                                   .context_weight = 0.05,
                                                   .lora_tokens = 2048,
                                                   .preference_tokens = 1024,
                                                   .overlap_credit = 1,
                                                   .prefill_scale = 1,
                                                   .prefix_weight = 2,
                                                   .queue_weight = 1,
                                                   .use_weight = 1,
                                                   .lora_weight = 1,
                                                   .match_threshold = 0.3,
                                                   .balance_absolute = 64,
                                                   .balance_relative = 1.5};

static void fill_opts(struct kvsel_opts *o)
{
#define DEFAULT(name, value) o->name = o->name ? o->name : (value)
    DEFAULT(policy, "adaptive");
    DEFAULT(block_size, 16);
    DEFAULT(stride, 4);
    DEFAULT(predict_ns, 2 * KV_NS_PER_S);
    DEFAULT(expiry_ns, 300 * KV_NS_PER_S);
    DEFAULT(max_bookings, UINT64_C(1) << 20);
    DEFAULT(max_workers, UINT64_C(1) << 16);
    DEFAULT(max_sessions, UINT64_C(1) << 18);
    DEFAULT(session_waiting, 32768);
    DEFAULT(queue_age_ns, 5 * KV_NS_PER_S);
    DEFAULT(queue_max, 4096);
    DEFAULT(queue_max_tokens, UINT64_C(1) << 26);
    DEFAULT(queue_max_wait_ns, 60 * KV_NS_PER_S);
#undef DEFAULT
    o->max_workers = KV_MIN(o->max_workers, UINT64_C(1) << 24);
}

int kvsel_create(const struct kvsel_opts *opts, struct kvsel **ret)
{
    struct kvsel_opts o = {0};
    struct kvsel *s;
    int rc = 0;

    if (!kv_sized_or_null(opts, "kvsel_opts") || !ret)
        return -EINVAL;
    if (opts)
        KVSEL_READ(&o, opts);
    fill_opts(&o);
    if (!kvsel_policy_find(o.policy) || (unsigned)o.queue_order > KVSEL_SHORTEST)
        return -EINVAL;
    s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->opts = o;
    s->policy = kvsel_policy_find(o.policy);
    s->random = o.seed ^ UINT64_C(0x9e3779b97f4a7c15);
    s->free_slot = KVSEL_NO_SLOT;
    rc = read_params(o.params, &default_params, &s->params);
    if (rc == 0 && (kvsel_names_init(&s->books) < 0 || kvsel_names_init(&s->sessions) < 0 ||
                    kvsel_claims_init(&s->claims) < 0))
        rc = -ENOMEM;
    if (rc < 0) {
        kvsel_destroy(s);
        return rc;
    }
    *ret = s;
    return 0;
}

void kvsel_destroy(struct kvsel *s)
{
    if (!s)
        return;
    kvsel_queue_fini(s);
    kvsel_books_fini(s);
    while (s->soon_oldest)
        kvsel_soon_end(s, s->soon_oldest);
    kvsel_workers_fini(s);
    kvsel_claims_fini(&s->claims);
    kvsel_names_fini(&s->books);
    kvsel_names_fini(&s->sessions);
    free(s);
}

/* SplitMix64: every seed is as good as another. */
uint64_t kvsel_random(struct kvsel *s, uint64_t n)
{
    __extension__ typedef unsigned __int128 wide;
    uint64_t z;

    s->random += UINT64_C(0x9e3779b97f4a7c15);
    z = s->random;
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint64_t)((wide)(z ^ z >> 31) * n >> 64);
}

int kvsel_ask(const struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
              struct kvsel_ask *ret)
{
    struct kvsel_request *r = &ret->r;

    if (!kv_sized(request, "kvsel_request"))
        return -EINVAL;
    memset(r, 0, sizeof(*r));
    KVSEL_READ(r, request);
    ret->now_ns = now_ns;
    ret->policy = r->policy ? kvsel_policy_find(r->policy) : s->policy;
    if (!ret->policy || (r->n_hashes && !r->hashes) || (r->n_matches && !r->matches) ||
        (r->n_allowed && !r->allowed) || (r->n_avoided && !r->avoided) ||
        (r->n_required && !r->required) || (r->n_preferred && !r->preferred) ||
        (unsigned)r->stage > KVSEL_PAIR || r->tokens > UINT32_MAX ||
        (r->session && strlen(r->session) > KVSEL_MAX_SESSION))
        return -EINVAL;
    if (!isfinite(r->domain_weight) || !isfinite(r->jump_s))
        return -EINVAL;
    for (size_t i = 0; i < r->n_preferred; i++)
        if (!r->preferred[i].label || !isfinite(r->preferred[i].weight))
            return -EINVAL;
    for (size_t i = 0; i < r->n_required; i++)
        if (!r->required[i])
            return -EINVAL;
    if (r->session && !*r->session)
        r->session = NULL;
    if (!r->whole_tokens)
        r->whole_tokens = 512;
    r->n_hashes = KV_MIN(r->n_hashes, (size_t)(r->tokens / s->opts.block_size));
    return read_params(r->params, &s->params, &ret->params);
}

int kvsel_get_stats(const struct kvsel *s, struct kvsel_stats *ret)
{
    struct kvsel_stats all = s->stats;

    if (!kv_sized(ret, "kvsel_stats"))
        return -EINVAL;
    all.bookings = s->books.n;
    all.sessions = s->sessions.n;
    all.workers = s->n_known;
    all.queued = s->queue.n;
    all.queued_tokens = (uint64_t)s->queue.tokens;
    all.busy = s->busy;
    all.missing = kvsel_missing(s);
    KV_GIVE(ret, &all);
    return 0;
}
