// SPDX-License-Identifier: Apache-2.0
/*
 *            max_failures in a row
 *   closed ─────────────────────────> open ── wait ──> one probe ──┐
 *      ^                                ^                 │        │ works
 *      │                                └── fails: wait doubles    │
 *      └───────────────────────────────────────────────────────────┘
 */
#include "base/core/breaker.h"

#include "base/core/error.h"

enum kv_gate kv_breaker_ask(struct kv_breaker *b, uint64_t now_ns)
{
    if (!b->open)
        return KV_GATE_PASS;
    if (b->probing || now_ns < b->next_ns)
        return KV_GATE_REFUSE;
    b->probing = true;
    return KV_GATE_PROBE;
}

static void wait_from(struct kv_breaker *b, uint64_t wait_ns, uint64_t now_ns)
{
    b->wait_ns = KV_MIN(wait_ns, b->max_wait_ns);
    b->next_ns = now_ns + b->wait_ns;
    b->probing = false;
}

bool kv_breaker_tell(struct kv_breaker *b, bool ok, bool probe, uint64_t now_ns)
{
    if (ok) {
        b->open = b->probing = false;
        b->failures = 0;
        return false;
    }
    if (b->open) { /* results of calls made before the breaker opened say nothing new */
        if (probe)
            wait_from(b, 2 * b->wait_ns, now_ns);
        return false;
    }
    if (++b->failures < b->max_failures)
        return false;
    b->open = true;
    b->opened++;
    wait_from(b, b->first_wait_ns, now_ns);
    return true;
}

void kv_breaker_release(struct kv_breaker *b)
{
    b->probing = false;
}

bool kv_breaker_counts(int rc)
{
    switch (rc) {
    case -ENOENT:
    case -EBADMSG:
    case -ENOSPC:
    case -EDQUOT:
    case -EROFS:
    case -EFBIG:
    case -ENOMEM:
    case -EINVAL:
    case -ENAMETOOLONG:
    case -ENOTSUP:
    case -ECANCELED:
        return false;
    default:
        return rc < 0;
    }
}
