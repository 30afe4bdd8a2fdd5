// SPDX-License-Identifier: Apache-2.0
/* Keys of an owner: told by `kvasir peer share` (docs/formats.md, "Keys of a peer"), or read from a
 * file. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "bm/pool/pool.h"
#include "cli/peer/peer.h"
#include "peer/session/session.h"

#define ASK_KEYS 56
#define AT_ONCE 8192u
#define REQUEST_BYTES 16
#define NO_MORE UINT64_MAX
#define MOST_BYTES (256u << 20) /* of all keys that a peer tells */

/* ---- telling ---- */

/*
 * Append the keys of @tier from place *@at on, but those that a tier above has. Returns false at the
 * tier's end.
 */
static bool tell_tier(struct kc_owner *o, enum kv_tier tier, uint32_t group, uint32_t *at,
                      struct kv_buf *to)
{
    struct kvbm_pool *pool = kvbm_manager_pool(o->manager, tier);
    size_t len = o->key_len, n;

    if (!pool || kv_buf_reserve(to, AT_ONCE * len) < 0)
        return false;
    n = kvbm_pool_keys(pool, group, (1u << tier) - 1, at, to->data + to->len, AT_ONCE);
    to->len += n * len;
    return n == AT_ONCE;
}

/* Answer a request: where to go on (8), group (4), 0 (4). The answer: where to go on (8), keys. */
static void tell(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    static const enum kv_tier tiers[] = {KV_TIER_HOST, KV_TIER_DISK};
    struct kc_owner *o = arg;
    const uint8_t *body = request->body;
    struct kv_buf answer = KV_BUF_INIT;
    uint8_t next[8] = {0};
    uint64_t from, tier;
    uint32_t at;

    if (request->len != REQUEST_BYTES) {
        (void)kvbm_session_reply(session, request->id, -EPROTO, NULL, 0, -1);
        return;
    }
    from = kv_get_le64(body);
    tier = from >> 32;
    at = (uint32_t)from;
    kv_buf_append(&answer, next, sizeof(next));
    if (tier < KV_COUNT(tiers) &&
        !tell_tier(o, tiers[tier], (uint32_t)kv_get_le(body + 8, 4), &at, &answer)) {
        tier++;
        at = 0;
    }
    if (!answer.error)
        kv_put_le64((uint8_t *)answer.data, tier < KV_COUNT(tiers) ? tier << 32 | at : NO_MORE);
    (void)kvbm_session_reply(session, request->id, answer.error ? -ENOMEM : 0, answer.data,
                             answer.error ? 0 : answer.len, -1);
    kv_buf_fini(&answer);
}

int kc_keys_serve(struct kc_owner *owner)
{
    return kvbm_agent_serve(owner->agent, ASK_KEYS, tell, owner);
}

/* ---- asking ---- */

/* Ask once, and move *@from. Returns the number of keys, or an error. */
static long ask_some(struct kvbm_session *session, uint32_t group, uint32_t key_len,
                     uint64_t deadline_ns, uint64_t *from, struct kv_buf *ret)
{
    uint8_t request[REQUEST_BYTES] = {0};
    struct kvbm_reply reply;
    long n = 0;
    int rc;

    kv_put_le64(request, *from);
    request[8] = (uint8_t)group;
    rc = kvbm_session_call(session, ASK_KEYS, request, sizeof(request), -1, deadline_ns, &reply);
    if (rc < 0)
        return rc;
    if (reply.status < 0) {
        n = reply.status;
    } else if (reply.len < 8 || (reply.len - 8) % key_len) {
        n = -EPROTO;
    } else {
        n = (long)((reply.len - 8) / key_len);
        *from = kv_get_le64(reply.body);
        kv_buf_append(ret, (const char *)reply.body + 8, reply.len - 8);
    }
    kvbm_reply_fini(&reply);
    return ret->error ? -ENOMEM : n;
}

long kc_keys_ask(struct kvbm_session *session, uint32_t group, uint32_t key_len, uint64_t max,
                 uint64_t timeout_ms, struct kv_buf *ret)
{
    uint64_t from = 0, sum = 0, before;
    unsigned n_empty = 0;
    long n;

    do {
        before = from;
        n = ask_some(session, group, key_len, kv_now_ns() + timeout_ms * KV_NS_PER_MS, &from, ret);
        if (n < 0)
            return n;
        sum += (uint64_t)n;
        n_empty += n == 0;
        if (ret->len > MOST_BYTES || n_empty > KV_N_TIERS) /* it would go on for ever */
            return -EMSGSIZE;
    } while (from != NO_MORE && from > before && (!max || sum < max));
    if (max && sum > max) {
        ret->len -= (size_t)(sum - max) * key_len;
        sum = max;
    }
    return (long)sum;
}

/* ---- files ---- */

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : isxdigit((unsigned char)c) ? (c | 32) - 'a' + 10 : -1;
}

/* Read a key of 2 * @len digits; a number of 8 bytes may have fewer. */
static bool parse_key(const char *text, size_t n, uint32_t len, uint8_t *ret)
{
    uint64_t number = 0;

    if (n > 2 && text[0] == '0' && (text[1] | 32) == 'x') {
        text += 2;
        n -= 2;
    }
    if (!n || n > 2 * (size_t)len || (len != 8 && n != 2 * (size_t)len))
        return false;
    for (size_t i = 0; i < n; i++) {
        int digit = digit_of(text[i]);

        if (digit < 0)
            return false;
        number = number << 4 | (unsigned)digit;
        ret[i / 2] = (uint8_t)(i % 2 ? ret[i / 2] << 4 | digit : digit);
    }
    if (len == 8)
        memcpy(ret, &number, 8);
    return true;
}

long kc_keys_read(const char *path, uint32_t key_len, struct kv_buf *ret, struct kv_error *error)
{
    FILE *file = fopen(path, "r");
    char line[512];
    long n = 0, number = 0;

    if (!file)
        return kv_fail(error, -errno, 0, "%s: %s", path, strerror(errno));
    while (fgets(line, sizeof(line), file)) {
        char *text = line + strspn(line, " \t");
        size_t len = strcspn(text, " \t\r\n#");
        uint8_t key[KVBM_MAX_KEY];

        number++;
        if (len == 0)
            continue;
        if (!parse_key(text, len, key_len, key)) {
            n = kv_fail(error, -EINVAL, 0, "%s: line %ld is no key of %u bytes in hexadecimal",
                        path, number, key_len);
            break;
        }
        kv_buf_append(ret, key, key_len);
        n++;
    }
    fclose(file);
    return ret->error ? kv_fail(error, -ENOMEM, 0, "no memory") : n;
}

const char *kc_key_text(const void *key, uint32_t len, char ret[2 * KVBM_MAX_KEY + 1])
{
    const uint8_t *bytes = key;
    uint64_t number;

    if (len == sizeof(number)) {
        memcpy(&number, key, sizeof(number));
        snprintf(ret, 17, "%016llx", (unsigned long long)number);
        return ret;
    }
    for (uint32_t i = 0; i < len; i++)
        snprintf(ret + 2 * (size_t)i, 3, "%02x", bytes[i]);
    return ret;
}
