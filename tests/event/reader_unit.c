// SPDX-License-Identifier: Apache-2.0
#include "reader_unit.h"
#include "base/unit.h"

struct kve_reader *reader;
struct kve_batch batch;
const uint32_t one_to_8[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

void use_reader(const struct kve_reader_opts *opts)
{
    struct kve_reader_opts defaults = {.size = sizeof(defaults), .block_size = 4, .rank = 9};

    kve_reader_destroy(reader);
    assert_int_equal(kve_reader_create(opts ? opts : &defaults, &reader), 0);
}

int set_up(void **state)
{
    (void)state;
    use_reader(NULL);
    return 0;
}

int tear_down(void **state)
{
    (void)state;
    kve_reader_destroy(reader);
    reader = NULL;
    return 0;
}

int decode_bytes(const void *data, size_t len)
{
    char *exact = malloc(len ? len : 1); /* so that asan sees what is read beyond */
    int rc;

    assert_non_null(exact);
    if (len)
        memcpy(exact, data, len);
    rc = kve_reader_decode(reader, exact, len, &batch);
    free(exact);
    return rc;
}

int decode(const char *text)
{
    struct kv_buf bytes = KV_BUF_INIT;
    int rc;

    pack(&bytes, "%s", text);
    rc = decode_bytes(bytes.data, bytes.len);
    kv_buf_fini(&bytes);
    return rc;
}

/* One event, in a batch of rank 0. */

void event(const char *fmt, ...)
{
    char text[4096], whole[4200];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    snprintf(whole, sizeof(whole), "[1.5, [%s], 0]", text);
    assert_int_equal(decode(whole), 0);
    assert_int_equal(batch.n_events, 1);
}

uint64_t local(const char *lora, const char *salt, size_t block)
{
    return kve_hash_block(kve_seed(lora, strlen(lora), salt, strlen(salt)), one_to_8 + 4 * block, 4,
                          NULL, 0);
}

void expect_skip(enum kve_skip skip)
{
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], i == (int)skip);
}

void expect_none(enum kve_skip skip)
{
    assert_int_equal(batch.n_ops, 0);
    expect_skip(skip);
}

const struct kve_op *expect_op(enum kve_op_type type, enum kv_tier tier, size_t n)
{
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], 0);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops[0].type, type);
    assert_int_equal(batch.ops[0].tier, tier);
    assert_int_equal(batch.ops[0].n, n);
    return &batch.ops[0];
}

void expect_block(uint64_t hash, uint64_t tokens_hash)
{
    const struct kve_op *op = expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);

    assert_true(op->blocks[0].hash == hash);
    assert_true(op->blocks[0].tokens_hash == tokens_hash);
}
