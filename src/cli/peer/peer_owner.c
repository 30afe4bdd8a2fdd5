// SPDX-License-Identifier: Apache-2.0
/* Tiers, and an agent that lends their blocks. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/error.h"
#include "cli/peer/peer.h"
#include "cli/show/format.h"
#include "tier/disk/disk.h"
#include "tier/manager/shape.h"

#define DIR_HOST (UINT64_C(512) << 20)
#define FILLED_AT_ONCE 256u
#define STOP_MS 10000

/* ---- form of a block ---- */

static kvx_dtype_t dtype_of(const char *word)
{
    static const char *const words[] = {
        [KVX_DTYPE_F16] = "f16",          [KVX_DTYPE_BF16] = "bf16",        [KVX_DTYPE_F32] = "f32",
        [KVX_DTYPE_F8_E4M3] = "fp8_e4m3", [KVX_DTYPE_F8_E5M2] = "fp8_e5m2", [KVX_DTYPE_U8] = "u8"};

    for (size_t i = 0; word && i < KV_COUNT(words); i++)
        if (words[i] && strcmp(words[i], word) == 0)
            return (kvx_dtype_t)i;
    return KVX_DTYPE_BF16;
}

static uint32_t width_of(kvx_dtype_t dtype)
{
    return dtype == KVX_DTYPE_F32 ? 4 : dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 ? 2 : 1;
}

/* Form of a block by the options. Returns an exit status. */
static int form(const char *command, const struct kc_peer_opts *opts,
                struct kvbm_layout_config *ret)
{
    uint64_t bytes = opts->block ? opts->block : 2 << 20, inner, rest;

    *ret = (struct kvbm_layout_config){
        .size = sizeof(*ret),
        .kind = KVBM_FULLY_CONTIGUOUS,
        .num_blocks = 1,
        .num_layers = (uint32_t)(opts->layers ? opts->layers : 32),
        .outer_dim = (uint32_t)(opts->parts ? opts->parts : 2),
        .page_size = (uint32_t)(opts->page ? opts->page : 16),
        .dtype = dtype_of(opts->dtype),
        .order = opts->order && strcmp(opts->order, "hnd") == 0 ? KVBM_ORDER_HND : KVBM_ORDER_NHD};
    ret->dtype_width_bytes = width_of(ret->dtype);
    rest = (uint64_t)ret->num_layers * ret->outer_dim * ret->page_size * ret->dtype_width_bytes;
    inner = bytes / rest;
    ret->inner_dim = (uint32_t)inner;
    ret->num_heads = (uint32_t)(opts->heads ? opts->heads : inner % 128 == 0 ? inner / 128 : 1);
    if (!inner || bytes % rest || ret->inner_dim % ret->num_heads)
        return kc_peer_fail(
            command, KC_PEER_USAGE,
            "--block must be a multiple of %s: layers x parts x tokens x %u bytes of "
            "an element; and --heads must divide its elements of a token",
            kc_bytes((double)rest).s, ret->dtype_width_bytes);
    return KC_PEER_OK;
}

/* ---- a directory ---- */

/* Check one directory, and count its slots. Returns an exit status. */
static int look_at(const char *command, const char *dir, const char *fingerprint,
                   struct kvbm_disk_seen *ret)
{
    int rc = kvbm_disk_look(dir, NULL, fingerprint, ret);

    if (rc < 0)
        return kc_peer_fail(command, KC_PEER_FAILED, "%s: %s", dir, strerror(-rc));
    if (!ret->found)
        return kc_peer_fail(command, KC_PEER_FAILED, "%s: no disk tier (kvbm-cache.slots) there",
                            dir);
    if (!ret->ours)
        return kc_peer_fail(command, KC_PEER_FAILED,
                            "%s: its blocks, of %s with keys of %u bytes, have another fingerprint "
                            "or form than the options say: give --fingerprint, --block, --layers, "
                            "--parts, --page, --heads, --dtype and --order as its engine has them",
                            dir, kc_bytes((double)ret->slot_bytes).s, ret->key_len);
    return KC_PEER_OK;
}

/* Name the disk tier in the options of the tiers, as large as its files are. */
static int use_dirs(const char *command, const struct kc_peer_opts *opts,
                    const struct kvbm_layout_config *block, struct kvbm_manager_opts *tiers)
{
    char *list = strdup(opts->dir), *at = list, *dir, text[4096];
    struct kvbm_disk_seen seen = {.found = false};
    uint64_t most = 0, n = 0, stride = 0;
    int status = list ? KC_PEER_OK : KC_PEER_FAILED;

    kvbm_tier_fingerprint(tiers->fingerprint, block, &tiers->shard, text, sizeof(text));
    while (status == KC_PEER_OK && (dir = strsep(&at, ":")) != NULL) {
        if (!*dir)
            continue;
        status = look_at(command, dir, text, &seen);
        most = KV_MAX(most, (uint64_t)seen.n_slots);
        stride = seen.slot_bytes;
        n++;
    }
    free(list);
    if (status == KC_PEER_OK && !n)
        status = kc_peer_fail(command, KC_PEER_USAGE, "--dir names no directory");
    tiers->disk = opts->dir;
    tiers->disk_bytes = n * most * stride;
    tiers->key_len = seen.key_len;
    return status;
}

/* ---- tiers ---- */

static int make_tiers(const char *command, const struct kc_peer_opts *opts, struct kc_owner *o)
{
    uint64_t stride = ((opts->block ? opts->block : 2 << 20) + 4095) / 4096 * 4096;
    struct kvbm_manager_opts tiers = {.size = sizeof(tiers),
                                      .block = &o->block,
                                      .fingerprint = opts->fingerprint,
                                      .key_len = (uint32_t)opts->key_len,
                                      .host_bytes = opts->host,
                                      .host_shared = true};
    int status = KC_PEER_OK, rc;

    if (!tiers.host_bytes)
        tiers.host_bytes = opts->dir ? DIR_HOST : opts->demo * stride;
    if (opts->dir)
        status = use_dirs(command, opts, &o->block, &tiers);
    if (status != KC_PEER_OK)
        return status;
    o->key_len = tiers.key_len ? tiers.key_len : 8;
    rc = kvbm_manager_create(&tiers, &o->manager);
    if (rc == -EBUSY)
        return kc_peer_fail(
            command, KC_PEER_FAILED,
            "%s: another process uses it. An engine that runs lends its blocks itself", opts->dir);
    if (rc < 0)
        return kc_peer_fail(command, KC_PEER_FAILED, "the tiers can't be opened: %s",
                            strerror(-rc));
    return KC_PEER_OK;
}

/* Make up the blocks of @n keys from @first on. Returns how many were stored, or an error. */
static long fill_some(struct kc_owner *o, uint64_t first, uint32_t n)
{
    const struct kvbm_layout *host = kvbm_manager_host_layout(o->manager);
    uint32_t blocks[FILLED_AT_ONCE];
    uint64_t keys[FILLED_AT_ONCE];
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .scattered = true};
    struct kvbm_pin *pin;
    long rc;

    for (uint32_t i = 0; i < n; i++)
        keys[i] = first + i;
    rc = kvbm_manager_prepare_store(o->manager, &chain, n, &pin);
    if (rc < 0)
        return rc;
    (void)kvbm_pin_blocks(pin, blocks);
    for (uint32_t i = 0; i < n; i++) {
        struct kvbm_view view;

        if (blocks[i] == UINT32_MAX || kvbm_layout_block(host, blocks[i], &view) < 0)
            continue;
        kc_peer_fill(keys[i], (void *)(uintptr_t)view.addr, // NOLINT(performance-no-int-to-ptr)
                     view.len);
    }
    rc = kvbm_pin_commit(pin, NULL);
    kvbm_pin_release(pin);
    return rc;
}

static int fill(const char *command, struct kc_owner *o, uint64_t n)
{
    for (uint64_t at = 0; at < n; at += FILLED_AT_ONCE) {
        uint32_t some = (uint32_t)KV_MIN(n - at, (uint64_t)FILLED_AT_ONCE);
        long rc = fill_some(o, 1 + at, some);

        if (rc != (long)some)
            return kc_peer_fail(command, KC_PEER_FAILED, "made-up blocks can't be stored: %s",
                                rc < 0 ? strerror((int)-rc) : "--host is too small for them");
    }
    return KC_PEER_OK;
}

/* ---- lending ---- */

static const char *default_endpoint(char *to, size_t size)
{
    const char *folder = getenv("XDG_RUNTIME_DIR");

    if (folder && *folder == '/')
        snprintf(to, size, "unix:%s/kvasir-peer", folder);
    else
        snprintf(to, size, "unix:/tmp/kvasir-peer-%u", (unsigned)getuid());
    return to;
}

static int make_agent(const char *command, const struct kc_peer_opts *opts, struct kc_owner *o)
{
    char path[128], name[32];
    const char *const fallback[] = {default_endpoint(path, sizeof(path))};
    struct kvbm_agent_opts who = {.size = sizeof(who),
                                  .name = opts->name,
                                  .fingerprint = opts->fingerprint,
                                  .key_len = o->key_len,
                                  .listen = opts->listen.n ? opts->listen.items : fallback,
                                  .n_listen = (uint32_t)(opts->listen.n ? opts->listen.n : 1),
                                  .unprotected = opts->unprotected,
                                  .token_file = opts->token,
                                  .tls_cert = opts->tls_cert,
                                  .tls_key = opts->tls_key,
                                  .tls_ca = opts->tls_ca};
    int rc;

    if (!who.name) {
        snprintf(name, sizeof(name), "share-%d", (int)getpid());
        who.name = name;
    }
    rc = kvbm_agent_create(&who, &o->agent); /* the log says what is wrong */
    if (rc == -EADDRINUSE)
        return kc_peer_fail(command, KC_PEER_FAILED,
                            "%s: another program listens there; --listen names another endpoint",
                            who.listen[0]);
    if (rc == -EPERM)
        return kc_peer_fail(command, KC_PEER_USAGE,
                            "an endpoint beyond this machine needs --token-file, --tls-ca or "
                            "--unprotected");
    if (rc < 0)
        return kc_peer_fail(command, KC_PEER_FAILED, "no agent: %s", strerror(-rc));
    return KC_PEER_OK;
}

static int lend(const char *command, const struct kc_peer_opts *opts, struct kc_owner *o)
{
    struct kvbm_block_source source = kvbm_manager_source(o->manager);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = KC_PEER_SET,
                                            .layout = kvbm_manager_host_layout(o->manager),
                                            .source = &source,
                                            .shared = kvbm_manager_shared(o->manager),
                                            .lease_share = (uint32_t)opts->lease_share};
    int rc = kc_keys_serve(o);

    if (rc == 0)
        rc = kvbm_blockset_export(o->agent, &what, &o->set);
    return rc < 0 ? kc_peer_fail(command, KC_PEER_FAILED, "the blocks can't be lent: %s",
                                 strerror(-rc))
                  : KC_PEER_OK;
}

int kc_owner_open(const char *command, const struct kc_peer_opts *opts, struct kc_owner *ret)
{
    int status;

    *ret = (struct kc_owner){.manager = NULL};
    status = form(command, opts, &ret->block);
    if (status == KC_PEER_OK)
        status = make_tiers(command, opts, ret);
    if (status == KC_PEER_OK && !opts->dir)
        status = fill(command, ret, opts->demo);
    if (status == KC_PEER_OK)
        status = make_agent(command, opts, ret);
    if (status == KC_PEER_OK)
        status = lend(command, opts, ret);
    if (status != KC_PEER_OK)
        kc_owner_close(ret);
    return status;
}

void kc_owner_close(struct kc_owner *owner)
{
    kvbm_blockset_destroy(owner->set);
    if (owner->agent)
        (void)kvbm_agent_destroy(owner->agent);
    if (owner->manager)
        (void)kvbm_manager_destroy(owner->manager, STOP_MS);
    *owner = (struct kc_owner){.manager = NULL};
}
