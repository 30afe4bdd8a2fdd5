// SPDX-License-Identifier: Apache-2.0
/* Answers of etcd's gateway. Peers that are accepted are valid, under their own keys, and written as
 * an agent writes them, they are read again. Base64 that is accepted is written alike. */
#include <string.h>

#include "peer/directory/peer_record.h"
#include "require.h"

#define PREFIX "/kvasir/"

static const struct etcd_limits limits = {512, ETCD_MAX_VALUE};

static void on_peer(void *arg, const char *key, const struct kvbm_directory_peer *peer,
                    bool deleted)
{
    struct kv_buf value = KV_BUF_INIT;
    char own[KVBM_MAX_PEER_KEY + 1];

    (void)arg;
    REQUIRE(strlen(key) <= KVBM_MAX_PEER_KEY && !(peer && deleted));
    if (!peer)
        return;
    REQUIRE(etcd_peer_is_valid(peer));
    etcd_key(peer, own);
    REQUIRE(strcmp(own, key) == 0);
    etcd_write_peer(&value, peer);
    REQUIRE(value.error == 0);
    kv_buf_fini(&value);
}

static void on_key(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    REQUIRE(key.len <= limits.key && value.len <= limits.value);
    REQUIRE(etcd_tell_peer(PREFIX, key, value, deleted, on_peer, arg) == 0);
}

/* Require that others read of a peer what an agent writes. */
static void check_peer(const struct kvbm_directory_peer *peer)
{
    struct kv_buf value = KV_BUF_INIT;
    struct kvbm_directory_peer again;

    etcd_write_peer(&value, peer);
    REQUIRE(etcd_read_peer(value.data, value.len, &again) == 0);
    REQUIRE(strcmp(again.name, peer->name) == 0 && again.worker == peer->worker &&
            again.incarnation == peer->incarnation && again.n_endpoints == peer->n_endpoints);
    for (uint32_t i = 0; i < peer->n_endpoints; i++)
        REQUIRE(strcmp(again.endpoints[i], peer->endpoints[i]) == 0);
    kv_buf_fini(&value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *bytes = malloc(size + 1);
    struct kvbm_directory_peer peer;
    struct etcd_answer answer;
    long len;

    REQUIRE(bytes);
    (void)etcd_read(data, size, &limits, &answer, on_key, NULL);
    REQUIRE(memchr(answer.token, '\0', sizeof(answer.token)));
    REQUIRE(memchr(answer.error, '\0', sizeof(answer.error)));
    if (etcd_read_peer(data, size, &peer) == 0)
        check_peer(&peer);
    len = etcd_read_base64((const char *)data, size, bytes);
    if (len >= 0) {
        struct kv_buf again = KV_BUF_INIT;

        etcd_put_base64(&again, bytes, (size_t)len);
        REQUIRE(again.len == size && (!size || memcmp(again.data, data, size) == 0));
        kv_buf_fini(&again);
    }
    free(bytes);
    return 0;
}
