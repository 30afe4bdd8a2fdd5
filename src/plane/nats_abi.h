// SPDX-License-Identifier: Apache-2.0
/**
 * Calls between the event plane and libkv_nats (src/plane/nats), which holds all that needs libnats.
 * Both come from one build; `abi` refuses another one's.
 *
 * A link is one connection of libnats, which reconnects by itself. One thread calls it, with all
 * signals blocked. Callbacks come on libnats' threads.
 */
#ifndef KV_PLANE_NATS_ABI_H
#define KV_PLANE_NATS_ABI_H

#include "base/module/module.h"
#include "plane/nats.h"

#define KVP_NATS_ABI 2
#define KVP_NATS_SYMBOL "kv_nats_get_abi" /* a kv_module_get_fn */
#define KVP_NATS_LIBRARY "libkv_nats.so.0"

struct kvp_link;
struct kvp_link_sub;

enum kvp_link_state { KVP_LINK_UP, KVP_LINK_DOWN, KVP_LINK_CLOSED };

/** Hooks of a link. state runs on one thread at a time; error on any. */
struct kvp_link_hooks {
    /* CLOSED: libnats has given up (credentials refused twice); close the link. */
    void (*state)(void *arg, enum kvp_link_state state);
    void (*error)(void *arg, const char *text);
    void *arg;
};

struct kvp_nats_abi {
    struct kv_module_head head;

    /**
     * Connect, for at most timeout_ms a server; a link begins as UP, without a call of state. Returns
     * 0; -EACCES (credentials refused), -EHOSTDOWN, -EINVAL (files), -ENOMEM, -EIO, with @why.
     */
    int (*open)(const struct kvp_nats_opts *opts, const struct kvp_link_hooks *hooks,
                struct kvp_link **ret, char *why, size_t why_size);
    /** Close a link without subscriptions. No hook runs after the return. */
    void (*close)(struct kvp_link *link);
    /**
     * Publish a message. Returns 0; -EAGAIN (not connected: try again when it is); -EMSGSIZE; -EINVAL
     * (the subject); -ETIMEDOUT or -ENOENT (no acknowledgement, or no stream; with an id); -EPIPE, -EIO
     * (close the link, and publish the message again over another one).
     */
    int (*publish)(struct kvp_link *link, const struct kvp_nats_msg *msg);
    /** Wait until the server has all that was published. Returns 0; -ETIMEDOUT; -EAGAIN. */
    int (*flush)(struct kvp_link *link, uint32_t timeout_ms);
    /**
     * @durable NULL: plain NATS. Else of a JetStream stream: a message is acknowledged when @fn returns
     * without having set @again. Returns 0; -EINVAL; -ENOMEM; -EAGAIN; with @durable also -ENOENT (no
     * such stream, or no JetStream), -EBUSY (another subscriber has the consumer), -EIO, -ETIMEDOUT.
     */
    int (*subscribe)(struct kvp_link *link, const char *subject,
                     const struct kvp_nats_durable *durable, size_t pending_bytes, kvp_nats_fn fn,
                     void *arg, struct kvp_link_sub **ret);
    /** End a subscription, wait for its callback, and free it. */
    void (*unsubscribe)(struct kvp_link_sub *sub);
    /** Return the number of messages that a subscription has dropped. */
    uint64_t (*missed)(struct kvp_link_sub *sub);
    /** Write the server's URL. Returns the bytes that it takes in a message. */
    uint64_t (*server)(struct kvp_link *link, char *url, size_t size);
};

/** Open libkv_nats, once. Returns NULL without it; one log line says why. */
const struct kvp_nats_abi *kvp_nats_load(void);

#endif
