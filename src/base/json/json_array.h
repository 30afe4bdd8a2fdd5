// SPDX-License-Identifier: Apache-2.0
/*
 * Arrays of integers at memory speed.
 *
 * A stretch of text is taken in three steps, none of which branches on the data:
 *
 *        text     1 2 , 3 4 5 , 9 ]
 *     1. digits   1 1 . 1 1 1 . 1 .     bit masks, 64 bytes at a time
 *        commas   . . 1 . . . 1 . .
 *        stop     . . . . . . . . 1     the first byte that breaks `number,number,...`
 *     2. commas below the stop become a list of positions: 2, 6
 *     3. numbers are made from the 8 bytes before their comma, four at a time
 *
 * The masks check the grammar on the way: a comma follows a digit, no number has a leading zero,
 * and either no comma or every comma is followed by one space, as between the values before (so the
 * width of a number is the distance between two commas). Whatever breaks these rules, and also a
 * number that ends the array or the buffer, is left to the scalar reader in json.c, which knows all
 * of JSON and where an error lies. So this file never decides that something is wrong, only that it
 * isn't simple.
 *
 * Included by json_array.c and by json_array_avx*.c, which compile it for other instruction sets:
 *
 *     steps 1 and 3   64-bit words; SSE2; AVX2
 *     step 2          one position after the other; AVX-512 VBMI2
 */
#ifndef KV_BASE_JSON_ARRAY_H
#define KV_BASE_JSON_ARRAY_H

#include <endian.h>

#include "base/json/json_reader.h"

#if defined(__x86_64__) && !defined(KV_JSON_PORTABLE) /* SSE2 is part of x86-64 */
#include <immintrin.h>
#define HAVE_SSE2 1
#else
#define HAVE_SSE2 0
#endif

enum {
    BLOCK = 64, /* bytes per mask */
    STRETCH = 16 * BLOCK,
    BURST = 4,       /* positions are written so many at a time */
    MIN_BEFORE = 8,  /* readable bytes before the first number: loads end at its comma */
    SCALAR_RUN = 16, /* values read one by one after a stretch that the vector code refused */
    MANY = 4,        /* fewest values for which a stretch pays */
    /* Added to positions, so that the comma before the first number has one, too */
    BIAS = 2
};

/*
 * Force inlining: a shape is a constant, and the code that depends on it must be compiled for it.
 */
#define INLINE static inline __attribute__((always_inline))

/* Kind of numbers in an array; each combination gets a loop of its own. */
struct shape {
    bool wide;   /* 64-bit values, which may be negative; else u32 */
    bool spaced; /* a space after every comma */
};

/* -- step 1: masks ----------------------------------------------------------------------------- */

/* One bit per byte of a block, first byte lowest. */
struct block {
    uint64_t digit, comma, space, zero, minus;
};

#if HAVE_SSE2 && defined(__AVX512BW__)

INLINE struct block classify(const char *p, struct shape shape)
{
    __m512i v = _mm512_loadu_si512(p);
    __m512i low = _mm512_sub_epi8(v, _mm512_set1_epi8('0'));

    return (struct block){
        .digit = _mm512_cmplt_epu8_mask(low, _mm512_set1_epi8(10)),
        .comma = _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(',')),
        .space = shape.spaced ? _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(' ')) : 0,
        .zero = _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8('0')),
        .minus = shape.wide ? _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8('-')) : 0,
    };
}

#elif HAVE_SSE2 && defined(__AVX2__)

INLINE uint64_t mask64(__m256i low, __m256i high)
{
    return (unsigned)_mm256_movemask_epi8(low) | (uint64_t)(unsigned)_mm256_movemask_epi8(high)
                                                     << 32;
}

INLINE uint64_t equal(__m256i low, __m256i high, char c)
{
    __m256i each = _mm256_set1_epi8(c);

    return mask64(_mm256_cmpeq_epi8(low, each), _mm256_cmpeq_epi8(high, each));
}

INLINE __m256i is_digit(__m256i v)
{
    __m256i low = _mm256_sub_epi8(v, _mm256_set1_epi8('0'));

    return _mm256_cmpeq_epi8(_mm256_min_epu8(low, _mm256_set1_epi8(9)), low);
}

INLINE struct block classify(const char *p, struct shape shape)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(p + 32));

    return (struct block){
        .digit = mask64(is_digit(low), is_digit(high)),
        .comma = equal(low, high, ','),
        .space = shape.spaced ? equal(low, high, ' ') : 0,
        .zero = equal(low, high, '0'),
        .minus = shape.wide ? equal(low, high, '-') : 0,
    };
}

#elif HAVE_SSE2

INLINE uint64_t mask64(const __m128i *v)
{
    uint64_t low = (unsigned)_mm_movemask_epi8(v[0]) | (unsigned)_mm_movemask_epi8(v[1]) << 16;
    uint64_t high = (unsigned)_mm_movemask_epi8(v[2]) | (unsigned)_mm_movemask_epi8(v[3]) << 16;

    return low | high << 32;
}

INLINE uint64_t equal(const __m128i *v, char c)
{
    __m128i each = _mm_set1_epi8(c);

    return mask64((const __m128i[]){_mm_cmpeq_epi8(v[0], each), _mm_cmpeq_epi8(v[1], each),
                                    _mm_cmpeq_epi8(v[2], each), _mm_cmpeq_epi8(v[3], each)});
}

INLINE __m128i is_digit(__m128i v)
{
    /* '0'..'9' become the ten lowest signed bytes */
    __m128i low = _mm_add_epi8(v, _mm_set1_epi8(0x80 - '0'));

    return _mm_cmplt_epi8(low, _mm_set1_epi8(-128 + 10));
}

INLINE struct block classify(const char *p, struct shape shape)
{
    const __m128i v[] = {
        _mm_loadu_si128((const __m128i *)p), _mm_loadu_si128((const __m128i *)(p + 16)),
        _mm_loadu_si128((const __m128i *)(p + 32)), _mm_loadu_si128((const __m128i *)(p + 48))};
    struct block b;

    b.digit =
        mask64((const __m128i[]){is_digit(v[0]), is_digit(v[1]), is_digit(v[2]), is_digit(v[3])});
    b.comma = equal(v, ',');
    b.space = shape.spaced ? equal(v, ' ') : 0;
    b.zero = equal(v, '0');
    b.minus = shape.wide ? equal(v, '-') : 0;
    return b;
}

#else

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

/* Gather the high bits of the bytes of a word in a byte. */
INLINE uint64_t mask8(uint64_t high_bits, int at)
{
    return ((high_bits >> 7) * UINT64_C(0x0102040810204080) >> 56) << at;
}

/* High bit set in each byte of @word that is at most @max (below 0x80). */
INLINE uint64_t at_most(uint64_t word, unsigned max)
{
    return ~(((word & EACH(0x7F)) + EACH(0x7FU - max)) | word) & EACH(0x80);
}

INLINE uint64_t load64(const char *p)
{
    uint64_t word;

    memcpy(&word, p, sizeof(word));
    return le64toh(word);
}

INLINE struct block classify(const char *p, struct shape shape)
{
    struct block b = {0};

    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t word = load64(p + i);

        b.digit |= mask8(at_most(word ^ EACH('0'), 9), i); /* only digits share their high nibble */
        b.comma |= mask8(at_most(word ^ EACH(','), 0), i);
        if (shape.spaced)
            b.space |= mask8(at_most(word ^ EACH(' '), 0), i);
        b.zero |= mask8(at_most(word ^ EACH('0'), 0), i);
        if (shape.wide)
            b.minus |= mask8(at_most(word ^ EACH('-'), 0), i);
    }
    return b;
}

#endif

/* The last bit of each mask, carried into the next block. */
struct carry {
    uint64_t digit, comma, lead, body, minus;
};

INLINE uint64_t after(uint64_t mask, uint64_t carry)
{
    return mask << 1 | carry;
}

/*
 * Find the commas before the first byte that the vector code doesn't take. *ret_stop: such a byte
 * exists.
 */
INLINE uint64_t find_commas(const struct block *b, struct shape shape, struct carry *carry,
                            bool *ret_stop)
{
    uint64_t lead = b->zero & ~after(b->digit, carry->digit);
    uint64_t stop = ~(b->digit | b->minus | b->comma | b->space);

    stop |= b->comma & ~after(b->digit, carry->digit);
    stop |= b->digit & after(lead, carry->lead);
    if (shape.spaced)
        stop |= b->space ^ after(b->comma, carry->comma);
    if (shape.wide) {
        uint64_t body = b->digit | b->minus;

        stop |= b->minus & after(body, carry->body);
        stop |= after(b->minus, carry->minus) & ~b->digit;
        carry->body = body >> 63;
        carry->minus = b->minus >> 63;
    }
    carry->digit = b->digit >> 63;
    carry->comma = b->comma >> 63;
    carry->lead = lead >> 63;
    *ret_stop = stop != 0;
    return b->comma & ((stop & -stop) - 1); /* all when stop is 0 */
}

/* -- step 2: positions ------------------------------------------------------------------------- */

#ifdef __AVX512VBMI2__

/* Append the positions of all set bits of 64: one vector instruction gathers them at the front. */
INLINE uint16_t *put_positions(uint16_t *out, uint64_t bits, unsigned base, unsigned n_sure)
{
    static const uint8_t numbers[BLOCK] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    __m512i set = _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(numbers));
    __m512i each = _mm512_set1_epi16((short)base);
    __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(set));

    (void)n_sure;
    _mm512_storeu_si512(out, _mm512_add_epi16(low, each)); /* a comma follows a digit: 32 at most */
    return out + __builtin_popcountll(bits);
}

#else

INLINE unsigned count_bits(uint64_t bits)
{
#ifdef __POPCNT__
    return (unsigned)__builtin_popcountll(bits);
#else
    bits -= bits >> 1 & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + (bits >> 2 & UINT64_C(0x3333333333333333));
    bits = (bits + (bits >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F);
    return (unsigned)(bits * UINT64_C(0x0101010101010101) >> 56);
#endif
}

/* Volatile stops gcc from gathering the stores in vectors, which takes longer than storing. */
INLINE uint64_t put_position(volatile uint16_t *out, uint64_t bits, unsigned base)
{
    const uint64_t last = UINT64_C(1) << 63; /* keeps the count of trailing zeros defined */

    *out = (uint16_t)(base + (unsigned)__builtin_ctzll(bits | last));
    return bits & (bits - 1);
}

/* Append BURST positions, spelled out because compilers don't unroll at -O2. */
INLINE uint64_t put_burst(uint16_t *out, uint64_t bits, unsigned base)
{
    bits = put_position(out, bits, base);
    bits = put_position(out + 1, bits, base);
    bits = put_position(out + 2, bits, base);
    return put_position(out + 3, bits, base);
}

/*
 * Append the positions of the bits, counted from @base. Always writes at least @n_sure positions;
 * the next call overwrites the excess. So the usual number of bits needs no unpredictable branch.
 */
INLINE uint16_t *put_positions(uint16_t *out, uint64_t bits, unsigned base, unsigned n_sure)
{
    unsigned n = count_bits(bits), i = 0;

    for (; i < n_sure; i += BURST)
        bits = put_burst(out + i, bits, base);
    for (; KV_UNLIKELY(i < n); i += BURST)
        bits = put_burst(out + i, bits, base);
    return out + n;
}

#endif

/*
 * Run steps 1 and 2 on up to STRETCH bytes. commas[1] and later are the ends of the numbers;
 * commas[0] is the comma before the first number, or the place where it would be. Returns the
 * number of numbers.
 */
INLINE size_t find_numbers(const char *p, const char *end, struct shape shape, uint16_t *commas)
{
    size_t len = KV_MIN((size_t)(end - p), (size_t)STRETCH);
    unsigned n_sure = shape.wide ? BURST : 4 * BURST; /* commas in 64 bytes: 3, and about 10 */
    uint16_t *out = commas;
    struct carry carry = {0};
    bool stop = false;

    *out++ = (uint16_t)(BIAS - 1 - shape.spaced);
    for (size_t at = 0; at < len && !stop; at += BLOCK) {
        char tail[BLOCK];
        const char *text = p + at;
        struct block block;

        /* Never read past the end: zero bytes behind it stop the search */
        if (len - at < BLOCK) {
            memset(tail, 0, sizeof(tail));
            memcpy(tail, text, len - at);
            text = tail;
        }
        block = classify(text, shape);
        out = put_positions(out, find_commas(&block, shape, &carry, &stop), (unsigned)at + BIAS,
                            n_sure);
    }
    return (size_t)(out - commas) - 1;
}

/* -- step 3: numbers --------------------------------------------------------------------------- */

/* Masks that keep the low nibbles of the last 0..8 bytes of a word. */
static const uint64_t last_nibbles[9] = {
    0,
    UINT64_C(0x0F00000000000000),
    UINT64_C(0x0F0F000000000000),
    UINT64_C(0x0F0F0F0000000000),
    UINT64_C(0x0F0F0F0F00000000),
    UINT64_C(0x0F0F0F0F0F000000),
    UINT64_C(0x0F0F0F0F0F0F0000),
    UINT64_C(0x0F0F0F0F0F0F0F00),
    UINT64_C(0x0F0F0F0F0F0F0F0F),
};

/* Convert the last @n digits before @end. Loads 8 bytes. */
INLINE uint64_t number8(const char *end, size_t n)
{
    uint64_t word;

    memcpy(&word, end - 8, sizeof(word));
    word = le64toh(word) & last_nibbles[n];
    word = (word * 10 + (word >> 8)) & UINT64_C(0x00FF00FF00FF00FF);
    word = (word * 100 + (word >> 16)) & UINT64_C(0x0000FFFF0000FFFF);
    return (word * 10000 + (word >> 32)) & UINT32_MAX;
}

/* Return the width of the number that ends at @comma. */
INLINE unsigned width(const uint16_t *comma, struct shape shape)
{
    return (unsigned)comma[0] - (unsigned)comma[-1] - 1 - shape.spaced;
}

/* Convert one number of any width. Returns false when it doesn't fit 32 bits. */
static bool one_u32(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    size_t n = width(comma, shape);
    const char *end = p + *comma - BIAS;
    uint64_t value;
    uint32_t low;

    if (n > 10)
        return false;
    value = n <= 8 ? number8(end, n) : number8(end - 8, n - 8) * 100000000 + number8(end, 8);
    low = (uint32_t)value;
    memcpy(out, &low, sizeof(low));
    return value <= UINT32_MAX;
}

#if HAVE_SSE2

/* Load the digits of two numbers, each into the last of 8 bytes. */
INLINE __m128i load_digits(const char *p, const uint16_t *comma, struct shape shape)
{
    __m128i a = _mm_loadl_epi64((const __m128i *)(p + comma[0] - BIAS - 8));
    __m128i b = _mm_loadl_epi64((const __m128i *)(p + comma[1] - BIAS - 8));
    __m128i mask_a = _mm_loadl_epi64((const __m128i *)&last_nibbles[width(comma, shape)]);
    __m128i mask_b = _mm_loadl_epi64((const __m128i *)&last_nibbles[width(comma + 1, shape)]);

    return _mm_and_si128(_mm_unpacklo_epi64(a, b), _mm_unpacklo_epi64(mask_a, mask_b));
}

/* Convert sixteen digits to four numbers of four digits. */
INLINE __m128i quads(__m128i digits)
{
    /* each 16-bit lane: tens + 256 * ones, times 2561 = 256 * 10 + 1 */
    __m128i pairs = _mm_srli_epi16(_mm_mullo_epi16(digits, _mm_set1_epi16(2561)), 8);

    return _mm_madd_epi16(pairs, _mm_set1_epi32(1 << 16 | 100));
}

/* Convert two numbers of eight digits from each of @a and @b. */
INLINE __m128i octets(__m128i a, __m128i b)
{
    return _mm_madd_epi16(_mm_packs_epi32(a, b), _mm_set1_epi32(1 << 16 | 10000));
}

INLINE bool four_u32(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    __m128i values;

    /* widths are 1 and up: one above 8 has a bit above the lowest three in width - 1 */
    if (KV_UNLIKELY(((width(comma, shape) - 1) | (width(comma + 1, shape) - 1) |
                     (width(comma + 2, shape) - 1) | (width(comma + 3, shape) - 1)) > 7))
        return false;
    values = octets(quads(load_digits(p, comma, shape)), quads(load_digits(p, comma + 2, shape)));
    _mm_storeu_si128((__m128i *)(void *)out, values);
    return true;
}

INLINE uint64_t number16(const char *end)
{
    __m128i nibbles = _mm_set1_epi8(0x0F);
    __m128i v = _mm_and_si128(_mm_loadu_si128((const __m128i *)(end - 16)), nibbles);
    uint64_t pair;

    v = quads(v);
    v = octets(v, v);
    pair = (uint64_t)_mm_cvtsi128_si64(v);
    return (pair & UINT32_MAX) * 100000000 + (pair >> 32);
}

#else

INLINE bool four_u32(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    for (int i = 0; i < 4; i++) {
        if (width(comma + i, shape) > 8)
            return false;
        one_u32(p, comma + i, shape, out + sizeof(uint32_t) * (size_t)i);
    }
    return true;
}

INLINE uint64_t number16(const char *end)
{
    return number8(end - 8, 8) * 100000000 + number8(end, 8);
}

#endif

#if HAVE_SSE2 && defined(__AVX2__)

/* Convert four numbers of up to 8 digits to four pairs of four digits. */
INLINE __m256i four_pairs(const char *p, const uint16_t *comma, __m128i shifts)
{
    __m128i a = _mm_loadl_epi64((const __m128i *)(const void *)(p + comma[0] - BIAS - 8));
    __m128i b = _mm_loadl_epi64((const __m128i *)(const void *)(p + comma[1] - BIAS - 8));
    __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)(p + comma[2] - BIAS - 8));
    __m128i d = _mm_loadl_epi64((const __m128i *)(const void *)(p + comma[3] - BIAS - 8));
    __m256i v = _mm256_set_m128i(_mm_unpacklo_epi64(c, d), _mm_unpacklo_epi64(a, b));

    /* keep the low nibbles of the number's own digits, the last ones */
    v = _mm256_and_si256(v,
                         _mm256_sllv_epi64(_mm256_set1_epi8(0x0F), _mm256_cvtepu16_epi64(shifts)));
    v = _mm256_maddubs_epi16(v, _mm256_set1_epi16(1 << 8 | 10));
    return _mm256_madd_epi16(v, _mm256_set1_epi32(1 << 16 | 100));
}

INLINE bool eight_u32(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    __m128i ends = _mm_loadu_si128((const __m128i *)(const void *)comma);
    __m128i starts = _mm_loadu_si128((const __m128i *)(const void *)(comma - 1));
    __m128i widths = _mm_sub_epi16(_mm_sub_epi16(ends, starts), _mm_set1_epi16(1 + shape.spaced));
    __m128i shifts = _mm_sub_epi16(_mm_set1_epi16(64), _mm_slli_epi16(widths, 3));
    __m256i v;

    if (KV_UNLIKELY(_mm_movemask_epi8(_mm_cmpgt_epi16(widths, _mm_set1_epi16(8)))))
        return false;
    v = _mm256_packus_epi32(four_pairs(p, comma, shifts),
                            four_pairs(p, comma + 4, _mm_unpackhi_epi64(shifts, shifts)));
    v = _mm256_madd_epi16(v, _mm256_set1_epi32(1 << 16 | 10000));
    /* Packing works on halves: put them in order */
    v = _mm256_permute4x64_epi64(v, _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i *)(void *)out, v);
    return true;
}

#else

INLINE bool eight_u32(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    return four_u32(p, comma, shape, out) && four_u32(p, comma + 4, shape, out + 16);
}

#endif

/*
 * Convert and store numbers up to the first that doesn't fit. @ret has room for @n. Returns their
 * count.
 */
INLINE size_t convert_u32(const char *p, const uint16_t *comma, size_t n, struct shape shape,
                          char *out)
{
    size_t i = 0;

    while (i < n) {
        if (n - i >= 8 && eight_u32(p, comma + i, shape, out + sizeof(uint32_t) * i))
            i += 8;
        else if (n - i >= 4 && four_u32(p, comma + i, shape, out + sizeof(uint32_t) * i))
            i += 4;
        else if (one_u32(p, comma + i, shape, out + sizeof(uint32_t) * i))
            i++;
        else
            break;
    }
    return i;
}

/* Convert one number of 1..20 digits with or without a minus. Returns false when it doesn't fit. */
INLINE bool one_wide(const char *p, const uint16_t *comma, struct shape shape, char *out)
{
    const uint64_t ten16 = UINT64_C(10000000000000000);
    const char *end = p + *comma - BIAS;
    size_t n = width(comma, shape);
    bool negative = end[-(ptrdiff_t)n] == '-';
    uint64_t value, high;

    n -= negative;
    if (KV_LIKELY(n > 16)) {
        if (n > 20)
            return false;
        if (__builtin_mul_overflow(number8(end - 16, n - 16), ten16, &high) ||
            __builtin_add_overflow(high, number16(end), &value))
            return false;
    } else if (n > 8) {
        value = number8(end - 8, n - 8) * 100000000 + number8(end, 8);
    } else {
        value = number8(end, n);
    }
    if (negative && value > UINT64_C(1) << 63)
        return false;
    value = negative ? 0 - value : value;
    memcpy(out, &value, sizeof(value));
    return true;
}

INLINE size_t convert_wide(const char *p, const uint16_t *comma, size_t n, struct shape shape,
                           char *out)
{
    size_t i = 0;

    while (i < n && one_wide(p, comma + i, shape, out + sizeof(uint64_t) * i))
        i++;
    return i;
}

/* The analyzer doesn't see vector instructions store positions. */
#ifdef __clang_analyzer__
#define ANALYZER_ZEROED = {0}
#else
#define ANALYZER_ZEROED
#endif

/* -- stretches ------------------------------------------------------------------------------------ */

/*
 * Take as many simple numbers as the stretch has. A number is due at j->p; afterwards j->p is at
 * the comma behind the last one. Returns the number of values.
 */
INLINE size_t take_stretch(struct kv_json *j, struct kv_buf *ret, struct shape shape)
{
    const size_t size = shape.wide ? sizeof(uint64_t) : sizeof(uint32_t);
    uint16_t commas[1 + STRETCH + BLOCK] ANALYZER_ZEROED;
    size_t n = find_numbers(j->p, j->end, shape, commas);
    char *out;

    if (n == 0 || kv_buf_reserve(ret, n * size) < 0)
        return 0;
    out = ret->data + ret->len;
    n = shape.wide ? convert_wide(j->p, commas + 1, n, shape, out)
                   : convert_u32(j->p, commas + 1, n, shape, out);
    ret->len += n * size;
    if (n > 0)
        j->p += commas[n] - BIAS;
    return n;
}

static size_t take_many(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    char before;

    if (j->p - j->start < MIN_BEFORE)
        return 0;
    before = j->p[-1]; /* the byte before: of the previous value, or the bracket */
    if (wide)
        return before == ' ' ? take_stretch(j, ret, (struct shape){true, true})
                             : take_stretch(j, ret, (struct shape){true, false});
    return before == ' ' ? take_stretch(j, ret, (struct shape){false, true})
                         : take_stretch(j, ret, (struct shape){false, false});
}

#endif
