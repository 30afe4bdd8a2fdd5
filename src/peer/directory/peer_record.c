// SPDX-License-Identifier: Apache-2.0
#include "peer/directory/peer_record.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "base/core/error.h"
#include "base/json/json.h"
#include "peer/set/blockset.h"

void etcd_key(const struct kvbm_directory_peer *peer, char ret[KVBM_MAX_PEER_KEY + 1])
{
    snprintf(ret, KVBM_MAX_PEER_KEY + 1, "%s/%016" PRIx64, peer->name, peer->incarnation);
}

bool etcd_peer_is_valid(const struct kvbm_directory_peer *peer)
{
    if (!kvbm_agent_name_is_valid(peer->name, strnlen(peer->name, sizeof(peer->name))) ||
        !peer->incarnation || !peer->n_endpoints || peer->n_endpoints > KVBM_MAX_PEER_ENDPOINTS)
        return false;
    for (uint32_t i = 0; i < peer->n_endpoints; i++) {
        if (!memchr(peer->endpoints[i], '\0', sizeof(peer->endpoints[i])) ||
            !peer_endpoint_is_valid(peer->endpoints[i], NULL))
            return false;
    }
    return true;
}

void etcd_write_peer(struct kv_buf *out, const struct kvbm_directory_peer *peer)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_u64(&w, "v", 1);
    kv_json_member_str(&w, "name", peer->name);
    kv_json_member_u64(&w, "worker", peer->worker);
    kv_json_member_u64(&w, "incarnation", peer->incarnation);
    kv_json_key(&w, "endpoints");
    kv_json_begin_array(&w);
    for (uint32_t i = 0; i < peer->n_endpoints; i++)
        kv_json_put_str(&w, peer->endpoints[i]);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
}

static void read_endpoints(struct kv_json *j, struct kv_buf *scratch,
                           struct kvbm_directory_peer *ret)
{
    kv_json_array(j);
    for (ret->n_endpoints = 0; kv_json_next_item(j); ret->n_endpoints++) {
        if (ret->n_endpoints == KVBM_MAX_PEER_ENDPOINTS) {
            kv_json_fail(j, -E2BIG, "too many endpoints");
            return;
        }
        kv_json_copy_str(j, scratch, ret->endpoints[ret->n_endpoints], sizeof(ret->endpoints[0]));
    }
}

int etcd_read_peer(const void *json, size_t len, struct kvbm_directory_peer *ret)
{
    struct kvbm_directory_peer peer = {.size = sizeof(peer)};
    struct kv_buf scratch = {.limit = ETCD_MAX_VALUE};
    uint64_t version = 0;
    struct kv_str key;
    struct kv_json j;
    int err;

    kv_json_init(&j, json, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "v"))
            version = kv_json_u64(&j, UINT32_MAX);
        else if (kv_str_eq(key, "name"))
            kv_json_copy_str(&j, &scratch, peer.name, sizeof(peer.name));
        else if (kv_str_eq(key, "worker"))
            peer.worker = kv_json_u64(&j, UINT64_MAX);
        else if (kv_str_eq(key, "incarnation"))
            peer.incarnation = kv_json_u64(&j, UINT64_MAX);
        else if (kv_str_eq(key, "endpoints"))
            read_endpoints(&j, &scratch, &peer);
        else
            kv_json_skip(&j);
    }
    err = kv_json_finish_foreign(&j);
    kv_buf_fini(&scratch);
    if (err == 0 && (version != 1 || !etcd_peer_is_valid(&peer)))
        err = -EPROTO;
    if (err == 0)
        *ret = peer;
    return err;
}

int etcd_tell_peer(const char *prefix, struct kv_str key, struct kv_str value, bool deleted,
                   etcd_peer_fn fn, void *arg)
{
    size_t skip = strlen(prefix);
    char name[KVBM_MAX_PEER_KEY + 1], want[KVBM_MAX_PEER_KEY + 1] = "";
    struct kvbm_directory_peer peer;
    int err;

    if (key.len <= skip || key.len - skip >= sizeof(name) || memcmp(key.p, prefix, skip) != 0 ||
        memchr(key.p, '\0', key.len)) /* none that an agent has written */
        return 0;
    memcpy(name, key.p + skip, key.len - skip);
    name[key.len - skip] = '\0';
    if (deleted) {
        fn(arg, name, NULL, true);
        return 0;
    }
    err = etcd_read_peer(value.p, value.len, &peer);
    if (err == -ENOMEM)
        return err;
    if (err == 0)
        etcd_key(&peer, want);
    fn(arg, name, err == 0 && strcmp(name, want) == 0 ? &peer : NULL, false);
    return 0;
}
