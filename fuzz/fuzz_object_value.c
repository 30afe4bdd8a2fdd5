// SPDX-License-Identifier: Apache-2.0
/* Values of the object tier as a store may return them. The first byte is the key's length. The
 * second chooses (bit 0: the block has the rest's length, else another). Four bytes are the group,
 * three choose a bit of a good value to flip; the rest is the value. The tier must accept exactly
 * the value that a put would have stored, and no other by a single bit. */
#include <string.h>

#include "require.h"
#include "tier/object/impl.h"

enum { HEAD = 9 };

struct asked {
    struct kvbm_object_format format;
    uint32_t group;
    uint8_t key[KVBM_MAX_KEY];
};

/* Read in two pieces, each in memory of exactly its size; the verdict must be the same. */
static void take_pieces(const struct asked *a, const uint8_t *value, size_t len, size_t cut,
                        bool whole)
{
    uint8_t *first = malloc(cut ? cut : 1), *second = malloc(len - cut ? len - cut : 1);
    uint8_t *block = malloc(a->format.block_bytes ? a->format.block_bytes : 1);
    struct kvbm_object_opening opening;
    bool right;

    REQUIRE(first && second && block);
    memcpy(first, value, cut);
    memcpy(second, value + cut, len - cut);
    kvbm_object_open_value(&opening, &a->format, a->group, a->key, block);
    right = kvbm_object_open_piece(&opening, first, cut) &&
            kvbm_object_open_piece(&opening, second, len - cut) &&
            kvbm_object_value_whole(&opening);
    REQUIRE(right == whole && right == !opening.wrong);
    if (right)
        REQUIRE(memcmp(block, value + KVBM_OBJECT_HEADER, a->format.block_bytes) == 0);
    free(first);
    free(second);
    free(block);
}

/* Use memory of exactly that size, so that a read beyond it is detected. */
static const void *unseal(const struct asked *a, const uint8_t *value, size_t len, uint8_t *memory)
{
    memcpy(memory, value, len);
    return kvbm_object_unseal(&a->format, a->group, a->key, memory, len);
}

/* Take the value as it came. */
static void take(const struct asked *a, const uint8_t *value, size_t len)
{
    uint8_t *memory = malloc(len ? len : 1), *again;
    const void *block = memory ? unseal(a, value, len, memory) : NULL;

    take_pieces(a, value, len, len ? value[0] * len / 256 : 0, block != NULL);
    if (block) {
        REQUIRE(block == memory + KVBM_OBJECT_HEADER);
        REQUIRE(len == kvbm_object_value_bytes(&a->format));
        again = malloc(len);
        REQUIRE(again);
        kvbm_object_seal(&a->format, a->group, a->key, block, again);
        REQUIRE(memcmp(again, value, len) == 0);
        free(again);
    }
    free(memory);
}

/* Another block's value, or this value for another block, must be refused. */
static void take_elsewhere(const struct asked *a, const uint8_t *good, size_t len, uint8_t *memory)
{
    struct asked other = *a;

    other.group++;
    REQUIRE(!unseal(&other, good, len, memory));
    other = *a;
    other.key[a->format.key_len - 1] ^= 1;
    REQUIRE(!unseal(&other, good, len, memory));
    other = *a;
    other.format.fingerprint[0] ^= 1;
    REQUIRE(!unseal(&other, good, len, memory));
    other = *a;
    other.format.block_bytes++;
    REQUIRE(!unseal(&other, good, len, memory));
    REQUIRE(!unseal(a, good, len - 1, memory));
}

/* Take this block's value, and the same with one bit flipped. */
static void take_good(const struct asked *a, const uint8_t *block, uint32_t flip)
{
    size_t len = kvbm_object_value_bytes(&a->format);
    uint8_t *good = malloc(len), *memory = malloc(len);
    const void *found;

    REQUIRE(good && memory);
    kvbm_object_seal(&a->format, a->group, a->key, block, good);
    found = unseal(a, good, len, memory);
    REQUIRE(found && memcmp(found, block, a->format.block_bytes) == 0);
    take_pieces(a, good, len, flip % len, true);
    take_elsewhere(a, good, len, memory);
    good[flip / 8 % len] ^= (uint8_t)(1u << flip % 8);
    REQUIRE(!unseal(a, good, len, memory));
    take_pieces(a, good, len, flip % len, false);
    free(good);
    free(memory);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct asked a = {.group = 0};
    const uint8_t *value = data + HEAD;
    size_t len = size - HEAD;
    uint32_t flip;

    if (size < HEAD + 1)
        return 0;
    memcpy(&a.group, data + 2, sizeof(a.group));
    a.group %= KVBM_MAX_GROUPS;
    flip = data[6] | (uint32_t)data[7] << 8 | (uint32_t)data[8] << 16;
    for (size_t i = 0; i < sizeof(a.key); i++) /* as in a value that should be accepted */
        a.key[i] = len > 64 + i ? value[64 + i] : (uint8_t)i;
    kvbm_object_format_init(&a.format, "model", 4 + data[0] % (KVBM_MAX_KEY - 3),
                            (data[1] & 1) && len > KVBM_OBJECT_HEADER ? len - KVBM_OBJECT_HEADER
                                                                      : len);
    take(&a, value, len);
    if (a.format.block_bytes <= len)
        take_good(&a, value + len - a.format.block_bytes, flip);
    return 0;
}
