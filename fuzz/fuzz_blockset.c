// SPDX-License-Identifier: Apache-2.0
/* Block sets as a peer may send them, with their own checksum and with a correct one. An accepted
 * set tells what is within its limits, and lists of its blocks stay within its layout. */
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "kvbm_remote.h"
#include "peer/set/blockset.h"
#include "require.h"

static struct kvbm_agent *reader;

static void check_views(const struct kvbm_remote_set_info *info, const struct kvbm_layout_config *c)
{
    struct kvbm_block_at at = {.worker = info->worker, .set = info->id};
    struct kvbm_remote_blocks *blocks = NULL;
    struct kvbm_view view;

    at.block = (uint32_t)KV_MIN(c->num_blocks - 1, (uint64_t)UINT32_MAX);
    if (info->expires_ns)
        return;
    REQUIRE(kvbm_remote_blocks_immutable(reader, &at, 1, &blocks) == 0);
    REQUIRE(kvbm_remote_blocks_view(blocks, 0, c->num_layers - 1, c->outer_dim - 1, &view) == 0);
    REQUIRE(view.len && view.addr + view.len > view.addr);
    REQUIRE(kvbm_remote_blocks_view(blocks, 0, c->num_layers, 0, &view) == -ERANGE);
    kvbm_remote_blocks_destroy(blocks);
    if (c->num_blocks <= UINT32_MAX) {
        at.block = (uint32_t)c->num_blocks;
        REQUIRE(kvbm_remote_blocks_immutable(reader, &at, 1, &blocks) == -ERANGE);
    }
}

static void import(const uint8_t *data, size_t len)
{
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    struct kvbm_layout_config layout = KVBM_LAYOUT_CONFIG_INIT;
    struct kvbm_remote_set *set = NULL;
    static char key[KVBM_MAX_TRANSPORT_KEY];
    struct kvbm_facts *facts = NULL;

    if (kvbm_facts_parse(data, len, &facts) == 0) { /* accepted sets are written alike */
        struct kv_buf again = KV_BUF_INIT;

        REQUIRE(kvbm_facts_write(facts, facts->layout, &again) == 0);
        REQUIRE(again.len == len && memcmp(again.data, data, len) == 0);
        kv_buf_fini(&again);
        kvbm_facts_put(facts);
    }
    if (kvbm_blockset_import(reader, data, len, &set) != 0)
        return;
    REQUIRE(kvbm_remote_set_get_info(set, &info) == 0);
    REQUIRE(info.incarnation && info.generation && info.n_transports <= KVBM_MAX_TRANSPORTS);
    for (uint32_t i = 0; i < info.n_transports; i++)
        REQUIRE(kvbm_remote_set_transport(set, info.transports[i], key, sizeof(key), NULL) >= 0);
    REQUIRE(kvbm_remote_set_layout(set, &layout) == 0);
    check_views(&info, &layout);
    REQUIRE(kvbm_agent_forget(reader, info.agent) == 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *signed_ = malloc(size + 1);
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = "reader", .worker = 1, .fingerprint = "model"};

    if (!reader) {
        kv_log_set_level(KV_LOG_ERROR);
        REQUIRE(kvbm_agent_create(&opts, &reader) == 0);
    }
    import(data, size);
    REQUIRE(signed_);
    if (size >= 24) {
        uint64_t sum;

        memcpy(signed_, data, size);
        for (int i = 0; i < 4; i++)
            signed_[12 + i] = (uint8_t)(size >> 8 * i);
        sum = kv_xxh64(signed_, size - 8, 0);
        for (int i = 0; i < 8; i++)
            signed_[size - 8 + (size_t)i] = (uint8_t)(sum >> 8 * i);
        import(signed_, size);
    }
    free(signed_);
    return 0;
}
