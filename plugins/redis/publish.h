// SPDX-License-Identifier: Apache-2.0
/** A save while it is published: by one script (publish.c), or step by step (publish_steps.c). */
#ifndef KV_PLUGINS_REDIS_PUBLISH_H
#define KV_PLUGINS_REDIS_PUBLISH_H

#include "redis/store.h"

struct rds_save {
    kv_store_v1 *self;
    const char *name; /* NULL: no manifest */
    const char *manifest;
    size_t manifest_len;
    bool opaque;        /* the manifest isn't of our own format */
    bool noted;         /* note the chunks that it may need */
    struct kv_buf more; /* keys that it may need besides refs */
    size_t n_more;
    size_t n_borrowed; /* refs at the end that are not pending: looked for, never sent */
    bool *missing;     /* per chunk of refs */
    bool script;       /* false: step by step */
    uint64_t now_s;    /* by the server's clock */
};

/** Count the hits among pending chunks. */
void rds_save_hits(struct rds_save *save);
/** Add the keys of save->more as arguments of the command begun last. */
void rds_save_more(struct rds_save *save, struct rds_batch *batch);
/** Add a command that stores a value under a key. */
void rds_save_value(struct rds_batch *batch, const char *key, size_t key_len, const void *value,
                    size_t len);
/** Add commands that store the missing chunks. -ENOSPC: one was sent before and is gone. */
int rds_save_missing(struct rds_save *save, struct rds_batch *batch);
/** Check the replies to the first @n commands, all of rds_save_missing. */
int rds_save_check(struct rds_save *save, const struct rds_batch *batch, size_t n);

/** Publish without one script for all: ask for each chunk, send the missing ones, the manifest. */
int rds_save_by_steps(struct rds_save *save);

#endif
