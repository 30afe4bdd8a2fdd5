// SPDX-License-Identifier: Apache-2.0
/*
 * Arrays of integers at memory speed.
 *
 * A stretch of text is taken in three steps, none of which branches on the data:
 *
 *        text     1 2 , 3 4 5 , 9 ]
 *     1. digits   1 1 . 1 1 1 . 1 .     bit masks, 64 bytes at a time
 *        commas   . . 1 . . . 1 . .
 *        edges    1 . 1 1 . . 1 1 .     where a number starts, or a comma ends it
 *        stop     . . . . . . . . 1     the first byte that breaks `number, number, ...`
 *     2. edges below the stop become a list of positions: start, comma, start, comma, ...
 *     3. numbers are made from the 8 bytes before their comma, four at a time
 *
 * The masks check the grammar on the way: a comma follows a digit, a space a comma, no number has a
 * leading zero. Whatever breaks these rules, and also a number that ends the array or the buffer,
 * is left to the scalar reader in json.c, which knows all of JSON and where an error lies. So this
 * file never decides that something is wrong, only that it isn't simple.
 *
 * Without SSE2 (or with KV_JSON_PORTABLE, for the tests) steps 1 and 3 use 64-bit words.
 */
#include <endian.h>

#include "base/json_reader.h"

#if defined(__SSE2__) && !defined(KV_JSON_PORTABLE)
#include <emmintrin.h>
#define HAVE_SSE2 1
#else
#define HAVE_SSE2 0
#endif

enum {
    BLOCK = 64, /* bytes per mask */
    STRETCH = 16 * BLOCK,
    BURST = 8,      /* positions are written so many at a time */
    MIN_BEFORE = 8, /* readable bytes before the first number: loads end at its comma */
    SCALAR_RUN = 16 /* values read one by one after a stretch that wasn't simple */
};

/* -- step 1: masks ----------------------------------------------------------------------------- */

/* One bit per byte of a block, first byte lowest. */
struct block {
    uint64_t digit, comma, space, zero, minus;
};

#if HAVE_SSE2

static inline uint64_t mask16(__m128i bytes, int at)
{
    return (uint64_t)(unsigned)_mm_movemask_epi8(bytes) << at;
}

static inline struct block classify(const char *p, bool is_signed)
{
    struct block b = {0};

    for (int i = 0; i < BLOCK; i += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(p + i));
        /* '0'..'9' become the ten lowest signed bytes */
        __m128i low = _mm_add_epi8(v, _mm_set1_epi8(0x80 - '0'));

        b.digit |= mask16(_mm_cmplt_epi8(low, _mm_set1_epi8(-128 + 10)), i);
        b.comma |= mask16(_mm_cmpeq_epi8(v, _mm_set1_epi8(',')), i);
        b.space |= mask16(_mm_cmpeq_epi8(v, _mm_set1_epi8(' ')), i);
        b.zero |= mask16(_mm_cmpeq_epi8(v, _mm_set1_epi8('0')), i);
        if (is_signed)
            b.minus |= mask16(_mm_cmpeq_epi8(v, _mm_set1_epi8('-')), i);
    }
    return b;
}

#else

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

/* The high bits of a word, gathered in a byte. */
static inline uint64_t mask8(uint64_t high_bits, int at)
{
    return ((high_bits >> 7) * UINT64_C(0x0102040810204080) >> 56) << at;
}

/* High bit set in each byte of @word that is at most @max (below 0x80). */
static inline uint64_t at_most(uint64_t word, unsigned max)
{
    return ~(((word & EACH(0x7F)) + EACH(0x7FU - max)) | word) & EACH(0x80);
}

static inline uint64_t load64(const char *p)
{
    uint64_t word;

    memcpy(&word, p, sizeof(word));
    return le64toh(word);
}

static inline struct block classify(const char *p, bool is_signed)
{
    struct block b = {0};

    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t word = load64(p + i);

        b.digit |= mask8(at_most(word ^ EACH('0'), 9), i); /* only digits share their high nibble */
        b.comma |= mask8(at_most(word ^ EACH(','), 0), i);
        b.space |= mask8(at_most(word ^ EACH(' '), 0), i);
        b.zero |= mask8(at_most(word ^ EACH('0'), 0), i);
        if (is_signed)
            b.minus |= mask8(at_most(word ^ EACH('-'), 0), i);
    }
    return b;
}

#endif

/* The last bit of each mask, carried into the next block. */
struct carry {
    uint64_t body, digit, comma, lead, minus;
};

static inline uint64_t after(uint64_t mask, uint64_t carry)
{
    return mask << 1 | carry;
}

/* The edges before the first byte that isn't simple; *ret_stop tells whether there is one. */
static inline uint64_t find_edges(const struct block *b, struct carry *carry, bool *ret_stop)
{
    uint64_t body = b->digit | b->minus;
    uint64_t start = body & ~after(body, carry->body);
    uint64_t lead = b->zero & b->digit & ~after(b->digit, carry->digit);
    uint64_t stop = ~(body | b->comma | b->space);

    stop |= b->comma & ~after(b->digit, carry->digit);
    stop |= b->space & ~after(b->comma, carry->comma);
    stop |= b->digit & after(lead, carry->lead);
    stop |= b->minus & ~start;
    stop |= after(b->minus, carry->minus) & ~b->digit;
    *carry = (struct carry){body >> 63, b->digit >> 63, b->comma >> 63, lead >> 63, b->minus >> 63};
    *ret_stop = stop != 0;
    return (start | b->comma) & ((stop & -stop) - 1); /* all bits when stop is 0 */
}

/* -- step 2: positions ------------------------------------------------------------------------- */

static inline unsigned count_bits(uint64_t bits)
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

/*
 * Append the positions of the bits, from @base on. Always at least @n_sure of them are written
 * (what is too much is overwritten later), so that the usual number of bits needs no unpredictable
 * branch.
 */
static inline uint16_t *put_positions(uint16_t *out, uint64_t bits, unsigned base, unsigned n_sure)
{
    const uint64_t last = UINT64_C(1) << 63; /* keeps the count of trailing zeros defined */
    unsigned n = count_bits(bits);

    for (unsigned i = 0; i < n_sure || i < n; i += BURST) {
        for (unsigned k = 0; k < BURST; k++) {
            out[i + k] = (uint16_t)(base + (unsigned)__builtin_ctzll(bits | last));
            bits &= bits - 1;
        }
    }
    return out + n;
}

/* Steps 1 and 2 on up to STRETCH bytes. Returns the number of complete `number,` pairs. */
static inline size_t find_numbers(const char *p, const char *end, bool is_signed, unsigned n_sure,
                                  uint16_t *edges)
{
    size_t len = KV_MIN((size_t)(end - p), (size_t)STRETCH);
    uint16_t *out = edges;
    struct carry carry = {0};
    bool stop = false;

    for (size_t at = 0; at < len && !stop; at += BLOCK) {
        char tail[BLOCK];
        const char *text = p + at;
        struct block block;

        if (len - at < BLOCK) { /* never read past the end: zero bytes stop the search */
            memset(tail, 0, sizeof(tail));
            memcpy(tail, text, len - at);
            text = tail;
        }
        block = classify(text, is_signed);
        out = put_positions(out, find_edges(&block, &carry, &stop), (unsigned)at, n_sure);
    }
    return (size_t)(out - edges) / 2;
}

/* -- step 3: numbers --------------------------------------------------------------------------- */

/* Keeps the low nibbles of the last 0..8 bytes of a word. */
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

/* The number that the last @n digits before @end make; loads 8 bytes. */
static inline uint64_t number8(const char *end, size_t n)
{
    uint64_t word;

    memcpy(&word, end - 8, sizeof(word));
    word = le64toh(word) & last_nibbles[n];
    word = (word * 10 + (word >> 8)) & UINT64_C(0x00FF00FF00FF00FF);
    word = (word * 100 + (word >> 16)) & UINT64_C(0x0000FFFF0000FFFF);
    return (word * 10000 + (word >> 32)) & UINT32_MAX;
}

static inline size_t width(const uint16_t *edge)
{
    return (size_t)(edge[1] - edge[0]);
}

/* One number of any width; false when it doesn't fit. */
static bool one_u32(const char *p, const uint16_t *edge, uint32_t *ret)
{
    size_t n = width(edge);
    const char *end = p + edge[1];
    uint64_t value;

    if (n > 10)
        return false;
    value = n <= 8 ? number8(end, n) : number8(end - 8, n - 8) * 100000000 + number8(end, 8);
    *ret = (uint32_t)value;
    return value <= UINT32_MAX;
}

#if HAVE_SSE2

static inline __m128i load_digits(const char *p, const uint16_t *edge)
{
    __m128i a = _mm_loadl_epi64((const __m128i *)(p + edge[1] - 8));
    __m128i b = _mm_loadl_epi64((const __m128i *)(p + edge[3] - 8));
    __m128i mask_a = _mm_loadl_epi64((const __m128i *)&last_nibbles[width(edge)]);
    __m128i mask_b = _mm_loadl_epi64((const __m128i *)&last_nibbles[width(edge + 2)]);

    return _mm_and_si128(_mm_unpacklo_epi64(a, b), _mm_unpacklo_epi64(mask_a, mask_b));
}

/* Sixteen digits to four numbers of four digits. */
static inline __m128i quads(__m128i digits)
{
    /* each 16-bit lane: tens + 256 * ones, times 2561 = 256 * 10 + 1 */
    __m128i pairs = _mm_srli_epi16(_mm_mullo_epi16(digits, _mm_set1_epi16(2561)), 8);

    return _mm_madd_epi16(pairs, _mm_set1_epi32(1 << 16 | 100));
}

/* Two numbers of eight digits from each of @a and @b. */
static inline __m128i octets(__m128i a, __m128i b)
{
    return _mm_madd_epi16(_mm_packs_epi32(a, b), _mm_set1_epi32(1 << 16 | 10000));
}

static inline bool four_u32(const char *p, const uint16_t *edge, char *out)
{
    __m128i values;

    /* widths are 1 and up: one above 8 has a bit above the lowest three in width - 1 */
    if (KV_UNLIKELY(((width(edge) - 1) | (width(edge + 2) - 1) | (width(edge + 4) - 1) |
                     (width(edge + 6) - 1)) > 7))
        return false;
    values = octets(quads(load_digits(p, edge)), quads(load_digits(p, edge + 4)));
    _mm_storeu_si128((__m128i *)(void *)out, values);
    return true;
}

static inline uint64_t number16(const char *end)
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

static inline bool four_u32(const char *p, const uint16_t *edge, char *out)
{
    for (int i = 0; i < 4; i++, edge += 2) {
        uint32_t value;

        if (width(edge) > 8)
            return false;
        value = (uint32_t)number8(p + edge[1], width(edge));
        memcpy(out + sizeof(value) * (size_t)i, &value, sizeof(value));
    }
    return true;
}

static inline uint64_t number16(const char *end)
{
    return number8(end - 8, 8) * 100000000 + number8(end, 8);
}

#endif

/* How many of the @n numbers fit and were stored; room for @n. */
static size_t convert_u32(const char *p, const uint16_t *edge, size_t n, char *out)
{
    size_t i = 0;

    while (i < n) {
        if (n - i >= 4 && four_u32(p, edge + 2 * i, out + 4 * i)) {
            i += 4;
        } else {
            uint32_t value;

            if (!one_u32(p, edge + 2 * i, &value))
                return i;
            memcpy(out + sizeof(value) * i, &value, sizeof(value));
            i++;
        }
    }
    return n;
}

/* One number of 1..20 digits with or without a minus; false when it doesn't fit. */
static inline bool one_bits64(const char *p, const uint16_t *edge, uint64_t *ret)
{
    const uint64_t ten16 = UINT64_C(10000000000000000);
    bool negative = p[edge[0]] == '-';
    size_t n = width(edge) - negative;
    const char *end = p + edge[1];
    uint64_t value, high;

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
    *ret = negative ? 0 - value : value;
    return !(negative && value > UINT64_C(1) << 63);
}

static size_t convert_bits64(const char *p, const uint16_t *edge, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t value;

        if (!one_bits64(p, edge + 2 * i, &value))
            return i;
        memcpy(out + i * sizeof(value), &value, sizeof(value));
    }
    return n;
}

/* -- arrays ------------------------------------------------------------------------------------ */

enum kind { U32, BITS64 };

/*
 * Take as many simple numbers as a stretch has, from where a number is due; j->p is left at the
 * comma behind the last. Returns their number.
 */
static inline size_t take_stretch(struct kv_json *j, struct kv_buf *ret, enum kind kind)
{
    const size_t size = kind == U32 ? sizeof(uint32_t) : sizeof(uint64_t);
    uint16_t edges[STRETCH + 2 * BLOCK];
    size_t n;

    if (j->p - j->start < MIN_BEFORE)
        return 0;
    n = find_numbers(j->p, j->end, kind == BITS64, kind == U32 ? 24 : 8, edges);
    if (n == 0 || kv_buf_reserve(ret, n * size) < 0)
        return 0;
    if (kind == U32)
        n = convert_u32(j->p, edges, n, ret->data + ret->len);
    else
        n = convert_bits64(j->p, edges, n, ret->data + ret->len);
    ret->len += n * size;
    if (n > 0)
        j->p += edges[2 * n - 1];
    return n;
}

static inline bool take_one(struct kv_json *j, struct kv_buf *ret, enum kind kind)
{
    bool negative;
    uint64_t value, at;

    if (*j->p != '-' && (*j->p < '0' || *j->p > '9')) {
        kv_json_u64(j, 0); /* says what is wrong */
        return false;
    }
    if (!kv_json_integer_(j, &negative, &value, &at))
        return false;
    if (kind == U32 && (negative || value > UINT32_MAX)) {
        kv_json_fail_at_(j, at, -ERANGE, "number out of range");
        return false;
    }
    if (kind == U32) {
        uint32_t low = (uint32_t)value;

        kv_buf_append(ret, &low, sizeof(low));
    } else {
        value = negative ? 0 - value : value;
        kv_buf_append(ret, &value, sizeof(value));
    }
    if (ret->error)
        kv_json_fail_at_(j, at, ret->error, "the array is too long");
    return !ret->error;
}

static inline size_t take_array(struct kv_json *j, struct kv_buf *ret, enum kind kind)
{
    unsigned scalar = 0;
    size_t n = 0;

    if (!kv_json_array(j))
        return 0;
    while (kv_json_next_item(j)) {
        if (scalar > 0) {
            scalar--;
        } else {
            size_t taken = take_stretch(j, ret, kind);

            n += taken;
            if (taken < 4)
                scalar = SCALAR_RUN;
            if (taken > 0)
                continue;
        }
        if (!take_one(j, ret, kind))
            break;
        n++;
    }
    return n;
}

size_t kv_json_u32_array(struct kv_json *j, struct kv_buf *ret)
{
    return take_array(j, ret, U32);
}

size_t kv_json_bits64_array(struct kv_json *j, struct kv_buf *ret)
{
    return take_array(j, ret, BITS64);
}
