// SPDX-License-Identifier: Apache-2.0
/* Blocks by a carrier, and through the session where that fails: a peer out of reach costs time, no hits. */
#include "base/core/clock.h"
#include "peer/lease/borrow.h"
#include "peer/session/agent.h"

/* Time in which the first block must have come over a new connection. */
#define FIRST_NS KV_NS_PER_S

static bool has(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> i % 8 & 1;
}

/* Read the pairs without a bit in @ok through the session. Returns right blocks, or -ENOMEM. */
static long read_rest(const struct kvbm_reading *reading, uint8_t *ok)
{
    struct kvbm_reading rest = *reading;
    uint32_t *places = malloc(reading->n * sizeof(*places));
    uint32_t *blocks = malloc(reading->n * sizeof(*blocks));
    uint32_t *pairs = malloc(reading->n * sizeof(*pairs));
    uint8_t *bits = calloc((reading->n + 7) / 8, 1);
    long right = -ENOMEM;

    rest.n = 0;
    for (uint32_t i = 0; places && blocks && pairs && bits && i < reading->n; i++) {
        if (has(ok, i))
            continue;
        places[rest.n] = reading->places ? reading->places[i] : i;
        blocks[rest.n] = reading->to_blocks[i];
        pairs[rest.n++] = i;
    }
    rest.places = places;
    rest.to_blocks = blocks;
    rest.ok = bits;
    if (rest.n)
        right = kvbm_read_sent(&rest, NULL);
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

/*
 * True for an error of a carrier (UCX, NIXL): the session's own connection may still deliver the blocks.
 * False for errors of the lease itself (ended, unknown block, other layout, too large): the session
 * would get the same answer, so it isn't asked.
 */
static bool is_of_carrier(int err)
{
    return err < 0 && err != -ESTALE && err != -ERANGE && err != -EOPNOTSUPP && err != -EMSGSIZE;
}

/* Read by connection @turn, then the rest through the session. @ok has a bit for each pair. */
static long read_carried(const struct kvbm_reading *reading, enum kvbm_by by, uint64_t turn,
                         uint8_t *ok)
{
    struct kvbm_session *session = reading->lease->session;
    struct kvbm_reading carried = *reading;
    int why = 0;
    long right, rest;

    carried.by = kvbm_agent_carrier(kvbm_session_agent(session), by);
    carried.push = by == KVBM_BY_UCX ? KVBM_ASK_PUSH : KVBM_ASK_NIXL_PUSH;
    carried.ok = ok;
    if (!kvbm_link_is_proven(session, by, turn))
        carried.deadline_ns = KV_MIN(reading->deadline_ns, kv_now_ns() + FIRST_NS);
    right = kvbm_read_sent(&carried, &why);
    if (right > 0)
        kvbm_link_worked(session, by, turn);
    if (right < 0 || !is_of_carrier(why))
        return right;
    if (why != -ENOBUFS) /* which is of this side */
        kvbm_link_failed(session, by, turn);
    if (kv_now_ns() >= reading->deadline_ns || !kvbm_session_is_open(session))
        return right;
    rest = read_rest(reading, ok);
    return right + KV_MAX(rest, 0l);
}

long kvbm_read_best(const struct kvbm_reading *reading)
{
    uint8_t *ok = reading->ok;
    uint64_t turn = 0;
    long right;
    int by;

    for (by = 0; by < KVBM_N_CARRIERS; by++) {
        if (!(reading->without & 1u << by))
            turn = kvbm_link_agree(reading->lease->session, by, reading->deadline_ns);
        if (turn)
            break;
    }
    if (!turn)
        return kvbm_read_sent(reading, NULL);
    if (!ok)
        ok = calloc((reading->n + 7) / 8, 1);
    right = ok ? read_carried(reading, by, turn, ok) : -ENOMEM;
    if (ok != reading->ok)
        free(ok);
    return right;
}
