// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of the index, events and stores with a struct each: part of test_sizes.c, which includes
 * this header once its own state is declared.
 */
#ifndef TESTS_TIER_SIZES_LIBRARIES_H
#define TESTS_TIER_SIZES_LIBRARIES_H

static int index_(void *opts)
{
    struct kvi_index *made = NULL;
    int rc = kvi_create(opts, &made);

    kvi_destroy(made);
    return rc;
}

static int index_stats(void *ret)
{
    return kvi_get_stats(t.index, ret);
}

static int index_holder(void *ret)
{
    return kvi_get_holder(t.index, (struct kv_holder){1, 0}, ret);
}

static int reader(void *opts)
{
    struct kve_reader *made = NULL;
    int rc = kve_reader_create(opts, &made);

    kve_reader_destroy(made);
    return rc;
}

static int publisher_of(void *opts)
{
    struct kve_publisher *made = NULL;
    int rc = kve_publisher_create(opts, &made);

    kve_publisher_destroy(made);
    return rc;
}

static int publish(void *event)
{
    return kve_publisher_publish(t.publisher, event, 1);
}

static int publisher_stats(void *ret)
{
    return kve_publisher_get_stats(t.quiet, ret);
}

static int64_t read_nothing(void *arg, void *buf, size_t cap)
{
    (void)arg, (void)buf, (void)cap;
    return 0;
}

static int64_t read_once(void *arg, void *buf, size_t cap)
{
    size_t *left = arg, n = *left < cap ? *left : cap;

    memset(buf, 'x', n);
    *left -= n;
    return (int64_t)n;
}

static int drop(void *arg, const void *data, size_t len)
{
    (void)arg, (void)data, (void)len;
    return 0;
}

static int save(void *opts)
{
    return kvs_save(t.store, "empty", read_nothing, NULL, opts, NULL);
}

static int restore(void *opts)
{
    return kvs_restore(t.store, "kept", drop, NULL, opts, NULL);
}

static int restored(void *ret)
{
    return kvs_restore(t.store, "kept", drop, NULL, NULL, ret);
}

static int verified(void *ret)
{
    return kvs_verify(t.store, "kept", NULL, NULL, NULL, ret);
}

static int gc(void *opts)
{
    return kvs_gc(t.store, opts, NULL);
}

static int gc_result(void *ret)
{
    const struct kvs_gc_opts opts = {.size = sizeof(opts), .dry_run = true};

    return kvs_gc(t.store, &opts, ret);
}

static int async_open(void *opts)
{
    struct kvs_async *async;
    int rc = kvs_async_open(t.store, opts, &async);

    return rc < 0 ? rc : kvs_async_close(async, 10000);
}

static int async_submit(void *request)
{
    struct kvs_async *async;
    int64_t rc;

    assert_int_equal(kvs_async_open(t.store, NULL, &async), 0);
    rc = kvs_async_submit(async, request);
    assert_int_equal(kvs_async_drain(async, 60000), 0);
    assert_int_equal(kvs_async_close(async, 60000), 0);
    return (int)KV_MIN(rc, 0);
}

static int open_llama(const struct kvl_opts *opts)
{
    struct kvl_cache *made = NULL;
    int rc = kvl_open(t.store, opts, &made);

    kvl_close(made);
    return rc;
}

static int llama(void *opts)
{
    return open_llama(opts);
}

static int libllama(void *table)
{
    const struct kvl_opts opts = {
        .size = sizeof(opts), .fingerprint = "model A", .libllama = table};

    return open_llama(&opts);
}

static struct kvl_cache *llama_cache(void)
{
    const struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "model A"};
    struct kvl_cache *made = NULL;

    assert_int_equal(kvl_open(t.store, &opts, &made), 0);
    return made;
}

static const int32_t llama_tokens[] = {1, 2, 3};

static int llama_saved(void *ret)
{
    struct kvl_cache *cache = llama_cache();
    int64_t n = kvl_save_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, "state", 5, NULL);

    assert_int_equal(n, 3); /* so that nothing of it is new below */
    n = kvl_save_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, "state", 5, ret);
    kvl_close(cache);
    return n < 0 ? (int)n : 0;
}

static int llama_loaded(void *ret)
{
    struct kvl_cache *cache = llama_cache();
    size_t len;
    void *state;
    int64_t n = kvl_load_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, &state, &len, ret);

    if (n > 0)
        free(state);
    kvl_close(cache);
    return n < 0 ? (int)n : 0;
}

static void open_others(void)
{
    struct kve_publisher_opts opts = KVE_PUBLISHER_OPTS_INIT;
    struct kvs_save_opts with = KVS_SAVE_OPTS_INIT;
    size_t left = 100000;
    char path[128];

    opts.endpoint = "tcp://127.0.0.1:*";
    assert_int_equal(kve_publisher_create(&opts, &t.publisher), 0);
    assert_int_equal(kve_publisher_create(&opts, &t.quiet), 0);
    assert_int_equal(kvi_create(NULL, &t.index), 0);
    assert_int_equal(kvi_store(t.index, (struct kv_holder){1, 0}, KV_TIER_DEVICE, NULL,
                               &(struct kv_block){7, 70}, 1, NULL),
                     0);
    snprintf(path, sizeof(path), "%s/store", t.w.dir);
    assert_int_equal(kvs_open(path, &t.store), 0);
    with.fingerprint = "model A";
    assert_int_equal(kvs_save(t.store, "kept", read_once, &left, &with, NULL), 0);
}

#endif
