// SPDX-License-Identifier: Apache-2.0
/* Blocks by UCX, and through the session where UCX fails: a peer out of reach costs time, no hits. */
#include "agent.h"
#include "base/clock.h"
#include "borrow.h"
#include "ucx.h"

/* Time in which the first block must have come over a new connection. */
#define FIRST_NS KV_NS_PER_S

static bool has(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> i % 8 & 1;
}

/* Fetch the pairs without a bit in @ok through the session. Returns right blocks, or -ENOMEM. */
static long fetch_rest(const struct kvbm_fetch *fetch, uint8_t *ok)
{
    struct kvbm_fetch rest = *fetch;
    uint32_t *places = malloc(fetch->n * sizeof(*places));
    uint32_t *blocks = malloc(fetch->n * sizeof(*blocks));
    uint32_t *pairs = malloc(fetch->n * sizeof(*pairs));
    uint8_t *bits = calloc((fetch->n + 7) / 8, 1);
    long right = -ENOMEM;

    rest.n = 0;
    for (uint32_t i = 0; places && blocks && pairs && bits && i < fetch->n; i++) {
        if (has(ok, i))
            continue;
        places[rest.n] = fetch->places ? fetch->places[i] : i;
        blocks[rest.n] = fetch->to_blocks[i];
        pairs[rest.n++] = i;
    }
    rest.places = places;
    rest.to_blocks = blocks;
    rest.ok = bits;
    if (rest.n)
        right = kvbm_fetch_sent(&rest, NULL);
    for (uint32_t i = 0; i < rest.n; i++) {
        if (has(bits, i))
            ok[pairs[i] / 8] |= (uint8_t)(1u << pairs[i] % 8);
    }
    free(places);
    free(blocks);
    free(pairs);
    free(bits);
    return right;
}

/* Tell errors of the connection from those of the lease, which the session would meet, too. */
static bool is_of_ucx(int err)
{
    return err < 0 && err != -ESTALE && err != -ERANGE && err != -EOPNOTSUPP && err != -EMSGSIZE;
}

/* Fetch by connection @turn, then the rest through the session. @ok has a bit for each pair. */
static long fetch_by_ucx(const struct kvbm_fetch *fetch, uint64_t turn, uint8_t *ok)
{
    struct kvbm_session *session = fetch->lease->session;
    struct kvbm_fetch by_ucx = *fetch;
    int why = 0;
    long right, rest;

    by_ucx.ucx = kvbm_session_agent(session)->ucx;
    by_ucx.ok = ok;
    if (!kvbm_ucx_is_proven(session, turn))
        by_ucx.deadline_ns = KV_MIN(fetch->deadline_ns, kv_now_ns() + FIRST_NS);
    right = kvbm_fetch_sent(&by_ucx, &why);
    if (right > 0)
        kvbm_ucx_worked(session, turn);
    if (right < 0 || !is_of_ucx(why))
        return right;
    kvbm_ucx_failed(session, turn);
    if (kv_now_ns() >= fetch->deadline_ns || !kvbm_session_is_open(session))
        return right;
    rest = fetch_rest(fetch, ok);
    return right + KV_MAX(rest, 0l);
}

long kvbm_fetch_best(const struct kvbm_fetch *fetch)
{
    uint64_t turn = kvbm_ucx_agree(fetch->lease->session, fetch->deadline_ns);
    uint8_t *ok = fetch->ok;
    long right;

    if (!turn)
        return kvbm_fetch_sent(fetch, NULL);
    if (!ok)
        ok = calloc((fetch->n + 7) / 8, 1);
    right = ok ? fetch_by_ucx(fetch, turn, ok) : -ENOMEM;
    if (ok != fetch->ok)
        free(ok);
    return right;
}
