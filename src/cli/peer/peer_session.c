// SPDX-License-Identifier: Apache-2.0
/* A session with an owner, and which of its blocks to look at. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "cli/peer/peer.h"
#include "peer/session/session.h"

#define TIMEOUT_MS 5000
#define MOST_AT_ONCE 16384u /* keys of a lookup */

static uint64_t timeout_ms(const struct kc_reader *r)
{
    return r->opts->timeout_ms ? r->opts->timeout_ms : TIMEOUT_MS;
}

uint64_t kc_reader_deadline(const struct kc_reader *reader)
{
    return kv_now_ns() + timeout_ms(reader) * KV_NS_PER_MS;
}

/* ---- opening ---- */

static int make_agent(struct kc_reader *r)
{
    const struct kc_peer_opts *opts = r->opts;
    char name[32];
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = opts->name ? opts->name : name,
                                        .fingerprint =
                                            opts->fingerprint ? opts->fingerprint : KC_PEER_DEMO,
                                        .key_len = r->key_len,
                                        .token_file = opts->token,
                                        .tls_cert = opts->tls_cert,
                                        .tls_key = opts->tls_key,
                                        .tls_ca = opts->tls_ca};
    int rc;

    snprintf(name, sizeof(name), "read-%d", (int)getpid());
    rc = kvbm_agent_create(&who, &r->agent); /* the log says what is wrong */
    return rc < 0 ? kc_peer_fail(r->command, KC_PEER_FAILED, "no agent: %s", strerror(-rc))
                  : KC_PEER_OK;
}

/* Advise a person whose session was refused; "" when the reason says it all. */
static const char *advice(const struct kc_reader *r, int rc)
{
    switch (rc) {
    case -EMEDIUMTYPE:
        return "\nBlocks of another model are never read. --fingerprint and --key-bytes must be "
               "the "
               "peer's.";
    case -EACCES:
        return r->opts->token ? "\nBoth sides need the same --token-file, and certificates of the "
                                "other's --tls-ca."
                              : "\nThe peer wants a token (--token-file) or a certificate.";
    case -EPROTONOSUPPORT:
        return "\nTLS must be used by both sides of a tcp endpoint, or by neither.";
    case -ENOENT:
    case -ECONNREFUSED:
        return "\nNobody listens there.";
    default:
        return "";
    }
}

static int open_session(struct kc_reader *r)
{
    char why[256] = "";
    const struct kvbm_session_opts opts = {.size = sizeof(opts),
                                           .timeout_ms = timeout_ms(r),
                                           .n_data = (uint32_t)r->opts->data,
                                           .tls_name = r->opts->tls_name,
                                           .why = why,
                                           .why_size = sizeof(why)};
    uint64_t start_ns = kv_now_ns();
    int rc = kvbm_session_open(r->agent, r->endpoint, &opts, &r->session);

    r->opened_ns = kv_now_ns() - start_ns;
    if (rc == -EINVAL)
        return kc_peer_fail(r->command, KC_PEER_USAGE,
                            "%s is no endpoint: unix:/PATH or tcp:HOST:PORT", r->endpoint);
    if (rc < 0)
        return kc_peer_fail(r->command, KC_PEER_REFUSED, "no session with %s: %s%s", r->endpoint,
                            *why ? why : strerror(-rc), advice(r, rc));
    r->info.size = sizeof(r->info);
    (void)kvbm_session_get_info(r->session, &r->info);
    return KC_PEER_OK;
}

/* Read the form of the set's blocks; without such a set num_blocks stays 0. */
static void look_at_set(struct kc_reader *r)
{
    struct kvbm_layout_shape shape;
    struct kvbm_remote_set *set;

    r->layout = (struct kvbm_layout_config){.size = sizeof(r->layout)};
    if (kvbm_remote_set_find(r->agent, r->info.worker, r->set, &set) < 0)
        return;
    if (kvbm_remote_set_layout(set, &r->layout) < 0)
        r->layout.num_blocks = 0;
    kvbm_remote_set_release(set);
    if (r->layout.num_blocks && kvbm_layout_compute(&r->layout, &shape) == 0)
        r->block_bytes = shape.natural_block_bytes;
    else
        r->layout.num_blocks = 0;
}

int kc_reader_open(const char *command, const char *endpoint, const struct kc_peer_opts *opts,
                   struct kc_reader *ret)
{
    int status;

    *ret = (struct kc_reader){.command = command,
                              .endpoint = endpoint,
                              .opts = opts,
                              .key_len = (uint32_t)(opts->key_len ? opts->key_len : 8),
                              .set = (uint32_t)opts->set,
                              .group = (uint32_t)opts->group};
    kv_log_set_level(KV_LOG_ERROR); /* warnings repeat what the command says itself */
    status = make_agent(ret);
    if (status == KC_PEER_OK)
        status = open_session(ret);
    if (status == KC_PEER_OK)
        look_at_set(ret);
    else
        kc_reader_close(ret);
    return status;
}

void kc_reader_close(struct kc_reader *reader)
{
    if (reader->session)
        (void)kvbm_session_close(reader->session);
    if (reader->agent)
        (void)kvbm_agent_destroy(reader->agent);
    kv_buf_fini(&reader->keys);
    free(reader->tiers);
    reader->tiers = NULL;
    reader->session = NULL;
    reader->agent = NULL;
}

const char *kc_reader_way(const struct kc_reader *reader, bool shared)
{
    return shared ? "shared memory" : reader->info.tls ? "a TLS socket" : "a socket";
}

/* ---- keys ---- */

static int get_keys(struct kc_reader *r)
{
    struct kv_error error = {0};
    long n;

    if (r->opts->keys) {
        n = kc_keys_read(r->opts->keys, r->key_len, &r->keys, &error);
        if (n < 0)
            return kc_peer_fail(r->command, KC_PEER_USAGE, "%s", error.text);
        if (r->opts->blocks && (uint64_t)n > r->opts->blocks)
            n = (long)r->opts->blocks;
    } else {
        n = kc_keys_ask(r->session, r->group, r->key_len, r->opts->blocks, timeout_ms(r), &r->keys);
        r->lists = n >= 0;
        if (n == -EOPNOTSUPP)
            n = 0;
    }
    if (n < 0)
        return kc_peer_fail(r->command, KC_PEER_FAILED, "%s doesn't tell its keys: %s",
                            r->info.agent, strerror((int)-n));
    r->n_keys = (size_t)n;
    return KC_PEER_OK;
}

int kc_reader_find(struct kc_reader *reader)
{
    struct kc_reader *r = reader;
    int status = get_keys(r), rc = 0;

    if (status != KC_PEER_OK)
        return status;
    r->tiers = malloc(r->n_keys + 1);
    if (!r->tiers)
        return kc_peer_fail(r->command, KC_PEER_FAILED, "no memory");
    for (size_t at = 0; at < r->n_keys && rc == 0; at += MOST_AT_ONCE)
        rc = kvbm_session_lookup(
            r->session, r->set, r->group, r->keys.data + at * (size_t)r->key_len,
            KV_MIN(r->n_keys - at, (size_t)MOST_AT_ONCE), kc_reader_deadline(r), r->tiers + at);
    if (rc == -ENOENT)
        return kc_peer_fail(r->command, KC_PEER_MISSES, "%s lends no blocks of set %u",
                            r->info.agent, r->set);
    return rc < 0 ? kc_peer_fail(r->command, KC_PEER_FAILED, "%s doesn't answer: %s", r->info.agent,
                                 strerror(-rc))
                  : KC_PEER_OK;
}
