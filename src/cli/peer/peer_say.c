// SPDX-License-Identifier: Apache-2.0
/* Messages of the commands of `kvasir peer`, and the bytes of made-up blocks. */
#include <stdarg.h>
#include <stdio.h>

#include "cli/peer/peer.h"

int kc_peer_fail(const char *command, int status, const char *fmt, ...)
{
    va_list args;

    fprintf(stderr, "kvasir %s%s: ", strchr(command, ' ') ? "" : "peer ", command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return status;
}

int kc_peer_json_end(struct kv_json_writer *json, struct kv_buf *out, int status)
{
    bool failed;

    kv_json_end_object(json);
    failed = printf("%s\n", kv_buf_cstr(out)) < 0 || fflush(stdout) != 0 || out->error;
    kv_buf_fini(out);
    return failed && status == KC_PEER_OK ? KC_PEER_FAILED : status;
}

const char *kc_peer_tier(unsigned tier)
{
    static const char *const words[KV_N_TIERS] = {[KV_TIER_DEVICE] = "device",
                                                  [KV_TIER_HOST] = "host",
                                                  [KV_TIER_DISK] = "disk",
                                                  [KV_TIER_EXTERNAL] = "object store"};

    return tier < KV_N_TIERS ? words[tier] : "nowhere";
}

/* Word @i of the block of @key. Blocks of other keys differ from it in each word. */
static inline uint64_t word_of(uint64_t key, size_t i)
{
    return (key + 1) * UINT64_C(0x9e3779b97f4a7c15) + i * UINT64_C(0xbf58476d1ce4e5b9);
}

void kc_peer_fill(uint64_t key, void *data, size_t len)
{
    uint64_t *words = data;

    for (size_t i = 0; i < len / 8; i++)
        words[i] = word_of(key, i);
}

bool kc_peer_is_filled(uint64_t key, const void *data, size_t len)
{
    const uint64_t *words = data;
    uint64_t differ = 0;

    for (size_t i = 0; i < len / 8; i++)
        differ |= words[i] ^ word_of(key, i);
    return differ == 0;
}
