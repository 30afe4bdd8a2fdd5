// SPDX-License-Identifier: Apache-2.0
/** Calls of test_sizes.c that take the structs of directories. */
#ifndef KV_TEST_TIER_SIZES_DIRECTORY_H
#define KV_TEST_TIER_SIZES_DIRECTORY_H

#include "kvbm_directory.h"

static void ignore_peer(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    (void)arg;
    (void)peer;
    (void)there;
}

static int directory(void *opts)
{
    struct kvbm_directory *made = NULL;
    int rc = kvbm_directory_open(opts, &made);

    kvbm_directory_close(made);
    return rc;
}

static int directory_self(void *self)
{
    struct kvbm_directory_opts opts = {
        .size = sizeof(opts), .peers = "unix:/a", .changed = ignore_peer, .self = self};

    return directory(&opts);
}

/* Each call reads a directory of its own, at a time when its state no longer changes. */
static int directory_info(void *ret)
{
    struct kvbm_directory_opts opts = {
        .size = sizeof(opts), .peers = "unix:/a", .changed = ignore_peer};
    struct kvbm_directory_info settled = KVBM_DIRECTORY_INFO_INIT;
    struct kvbm_directory *made = NULL;
    int rc = kvbm_directory_open(&opts, &made);

    while (rc == 0 && !(settled.current && settled.n_peers == 1)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        rc = kvbm_directory_get_info(made, &settled);
    }
    if (rc == 0)
        rc = kvbm_directory_get_info(made, ret);
    kvbm_directory_close(made);
    return rc;
}

static struct kvbm_agent *follower_agent(void)
{
    const struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = "follower"};
    struct kvbm_agent *agent = NULL;

    (void)kvbm_agent_create(&opts, &agent);
    return agent;
}

static int follow(void *opts)
{
    struct kvbm_agent *agent = follower_agent();
    struct kvbm_follower *made = NULL;
    int rc = kvbm_agent_follow(agent, opts, &made);

    (void)kvbm_follower_close(made);
    (void)kvbm_agent_destroy(agent);
    return rc;
}

static struct kvbm_directory_opts nobody_ = {.size = sizeof(nobody_),
                                             .peers = "unix:/nobody/is/here"};
static struct kvbm_follow_opts follow_ = {.directory = &nobody_};

/* Nobody is in the directory: the state doesn't change. */
static int follower_info(void *ret)
{
    const struct kvbm_directory_opts empty = {.size = sizeof(empty), .peers = "file:/dev/null"};
    const struct kvbm_follow_opts opts = {.size = sizeof(opts), .directory = &empty};
    struct kvbm_agent *agent = follower_agent();
    struct kvbm_follower *made = NULL;
    int rc = kvbm_agent_follow(agent, &opts, &made);

    if (rc == 0)
        rc = kvbm_follower_get_info(made, ret);
    (void)kvbm_follower_close(made);
    (void)kvbm_agent_destroy(agent);
    return rc;
}

static struct kvbm_directory_opts directory_ = {.peers = "unix:/a", .changed = ignore_peer};
static struct kvbm_directory_peer directory_peer_ = {.n_endpoints = 1, .endpoints = {"unix:/b"}};

#endif
