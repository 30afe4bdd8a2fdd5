// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of volumes with a struct each: part of test_sizes.c, which includes this header once its own
 * state is declared.
 */
#ifndef TESTS_TIER_SIZES_VOLUME_H
#define TESTS_TIER_SIZES_VOLUME_H

static struct kvbm_volume *volume_of_peer; /* of t.agent: nobody has such a name */

static struct kvbm_volume_opts volume_ = {.name = "sizes", .peer = "nobody"};
static const struct kvbm_chain volume_chain = {.size = sizeof(volume_chain), .keys = &key_};
static struct kvbm_volume_io volume_io_ = {
    .chain = &volume_chain, .n = 1, .blocks = &other_block, .ok = ok_};

static void open_volume(void)
{
    volume_.size = sizeof(volume_);
    volume_.block = &t.w.block;
    volume_.agent = t.agent;
    volume_io_.layout = t.other;
    assert_int_equal(kvbm_volume_register(&volume_, &volume_of_peer), 0);
}

static int volume(void *opts)
{
    struct kvbm_volume *made = NULL;
    int rc = kvbm_volume_register(opts, &made);

    return rc < 0 ? rc : kvbm_volume_unregister(made, 10000);
}

static int volume_io(void *io)
{
    return (int)kvbm_volume_get(volume_of_peer, io);
}

static int volume_info(void *ret)
{
    return kvbm_volume_get_info(volume_of_peer, ret);
}

/* Rows of the table. */
#define VOLUME_ROWS                                                                             \
    {"kvbm_volume_opts", sizeof(volume_), UP_TO(kvbm_volume_opts, agent), &volume_, volume, 0}, \
        {"kvbm_volume_io", sizeof(volume_io_), UP_TO(kvbm_volume_io, blocks),                   \
         &volume_io_,      volume_io,          0},                                              \
    {                                                                                           \
        "kvbm_volume_info", sizeof(struct kvbm_volume_info), LEAST, NULL, volume_info, 0        \
    }

#endif
