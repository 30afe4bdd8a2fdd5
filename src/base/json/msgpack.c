// SPDX-License-Identifier: Apache-2.0
/*
 * The first byte of a value tells its type:
 *
 *     00..7f fixint    c0 nil         c4 c5 c6 bin 8/16/32     cc cd ce cf uint 8/16/32/64
 *     80..8f fixmap    c1 (never)     c7 c8 c9 ext 8/16/32     d0 d1 d2 d3 int 8/16/32/64
 *     90..9f fixarray  c2 c3 bool     ca cb float 32/64        d4..d8 fixext 1/2/4/8/16
 *     a0..bf fixstr    dc dd array 16/32   de df map 16/32     d9 da db str 8/16/32
 *     e0..ff negative fixint
 *
 * A failure moves p to the end: every later read then fails for lack of bytes, without a test of
 * the error. The first error stays.
 */
#include "base/json/msgpack.h"

#include <endian.h>

void kv_msgpack_init(struct kv_msgpack *m, const void *data, size_t len)
{
    m->start = m->p = data;
    m->end = m->p + len;
    m->error.code = 0;
    m->error.offset = 0;
    m->error.text[0] = '\0';
}

void kv_msgpack_fail(struct kv_msgpack *m, int code, const char *text)
{
    if (!m->error.code)
        kv_fail(&m->error, code, (size_t)(m->p - m->start), "%s", text);
    m->p = m->end;
}

static size_t left(const struct kv_msgpack *m)
{
    return (size_t)(m->end - m->p);
}

/*
 * Return the big-endian number of @width bytes behind the first byte. The caller has checked the
 * bounds.
 */
static uint64_t number_at(const uint8_t *p, unsigned width)
{
    uint16_t n16;
    uint32_t n32;
    uint64_t n64;

    switch (width) {
    case 1:
        return p[1];
    case 2:
        memcpy(&n16, p + 1, sizeof(n16));
        return be16toh(n16);
    case 4:
        memcpy(&n32, p + 1, sizeof(n32));
        return be32toh(n32);
    default:
        memcpy(&n64, p + 1, sizeof(n64));
        return be64toh(n64);
    }
}

/* Return the first byte of the next value; -1 with an error at the end. */
static int first_byte(struct kv_msgpack *m)
{
    if (KV_LIKELY(m->p < m->end))
        return *m->p;
    kv_msgpack_fail(m, -EPROTO, "ends where a value is due");
    return -1;
}

static bool has(struct kv_msgpack *m, uint64_t n)
{
    if (KV_LIKELY(left(m) >= n))
        return true;
    kv_msgpack_fail(m, -EPROTO, "a value is cut short");
    return false;
}

/* Read the first byte and the number of @width bytes behind it. */
static bool take_number(struct kv_msgpack *m, unsigned width, uint64_t *ret)
{
    if (!has(m, width + 1u))
        return false;
    *ret = number_at(m->p, width);
    m->p += width + 1u;
    return true;
}

enum kv_msgpack_type kv_msgpack_peek(const struct kv_msgpack *m)
{
    static const uint8_t types[] = {
        [0x00] = KV_MSGPACK_NIL,  [0x01] = KV_MSGPACK_NONE,  [0x02] = KV_MSGPACK_BOOL,
        [0x03] = KV_MSGPACK_BOOL, [0x04] = KV_MSGPACK_BIN,   [0x05] = KV_MSGPACK_BIN,
        [0x06] = KV_MSGPACK_BIN,  [0x07] = KV_MSGPACK_EXT,   [0x08] = KV_MSGPACK_EXT,
        [0x09] = KV_MSGPACK_EXT,  [0x0a] = KV_MSGPACK_FLOAT, [0x0b] = KV_MSGPACK_FLOAT,
        [0x0c] = KV_MSGPACK_UINT, [0x0d] = KV_MSGPACK_UINT,  [0x0e] = KV_MSGPACK_UINT,
        [0x0f] = KV_MSGPACK_UINT, [0x10] = KV_MSGPACK_INT,   [0x11] = KV_MSGPACK_INT,
        [0x12] = KV_MSGPACK_INT,  [0x13] = KV_MSGPACK_INT,   [0x14] = KV_MSGPACK_EXT,
        [0x15] = KV_MSGPACK_EXT,  [0x16] = KV_MSGPACK_EXT,   [0x17] = KV_MSGPACK_EXT,
        [0x18] = KV_MSGPACK_EXT,  [0x19] = KV_MSGPACK_STR,   [0x1a] = KV_MSGPACK_STR,
        [0x1b] = KV_MSGPACK_STR,  [0x1c] = KV_MSGPACK_ARRAY, [0x1d] = KV_MSGPACK_ARRAY,
        [0x1e] = KV_MSGPACK_MAP,  [0x1f] = KV_MSGPACK_MAP,
    };
    uint8_t b;

    if (m->p >= m->end)
        return KV_MSGPACK_NONE;
    b = *m->p;
    if (b < 0x80)
        return KV_MSGPACK_UINT;
    if (b < 0x90)
        return KV_MSGPACK_MAP;
    if (b < 0xa0)
        return KV_MSGPACK_ARRAY;
    if (b < 0xc0)
        return KV_MSGPACK_STR;
    if (b >= 0xe0)
        return KV_MSGPACK_INT;
    if (b >= 0xd0 && b <= 0xd3 && left(m) > 1 && m->p[1] < 0x80)
        return KV_MSGPACK_UINT; /* a non-negative number in a signed form */
    return types[b - 0xc0];
}

/* -- containers -------------------------------------------------------------------------------- */

/* Read the number of elements. @each is the smallest size of an element in bytes. */
static uint32_t take_count(struct kv_msgpack *m, uint8_t fix, uint8_t code16, unsigned each,
                           const char *wrong)
{
    const uint8_t *before = m->p;
    int b = first_byte(m);
    uint64_t n = 0;

    if (b < 0)
        return 0;
    if ((b & 0xf0) == fix) {
        n = (unsigned)b & 0x0f;
        m->p++;
    } else if (b == code16 || b == code16 + 1) {
        if (!take_number(m, b == code16 ? 2 : 4, &n))
            return 0;
    } else {
        kv_msgpack_fail(m, -EPROTO, wrong);
        return 0;
    }
    if (KV_UNLIKELY(n * each > left(m))) {
        m->p = before;
        kv_msgpack_fail(m, -EPROTO, "says it has more elements than bytes follow");
        return 0;
    }
    return (uint32_t)n;
}

uint32_t kv_msgpack_array(struct kv_msgpack *m)
{
    return take_count(m, 0x90, 0xdc, 1, "not an array");
}

uint32_t kv_msgpack_map(struct kv_msgpack *m)
{
    return take_count(m, 0x80, 0xde, 2, "not a map");
}

/* -- scalars ----------------------------------------------------------------------------------- */

/* Read any integer as a 64-bit pattern. @ret_negative: the pattern is a negative number. */
static uint64_t take_integer(struct kv_msgpack *m, bool *ret_negative)
{
    int b = first_byte(m);
    unsigned width;
    uint64_t n;

    *ret_negative = false;
    if (b < 0)
        return 0;
    if (b < 0x80 || b >= 0xe0) {
        m->p++;
        *ret_negative = b >= 0xe0;
        return (uint64_t)(int64_t)(int8_t)b;
    }
    if (b < 0xcc || b > 0xd3) {
        kv_msgpack_fail(m, -EPROTO, "not an integer");
        return 0;
    }
    width = 1u << (b & 3);
    if (!take_number(m, width, &n))
        return 0;
    if (b >= 0xd0) {
        unsigned unused = 64 - 8 * width;

        n = (uint64_t)((int64_t)(n << unused) >> unused);
        *ret_negative = (int64_t)n < 0;
    }
    return n;
}

uint64_t kv_msgpack_bits64(struct kv_msgpack *m)
{
    bool negative;

    return take_integer(m, &negative);
}

uint64_t kv_msgpack_u64(struct kv_msgpack *m)
{
    const uint8_t *before = m->p;
    bool negative;
    uint64_t n = take_integer(m, &negative);

    if (!negative)
        return n;
    m->p = before;
    kv_msgpack_fail(m, -ERANGE, "a negative number where none may be");
    return 0;
}

int64_t kv_msgpack_i64(struct kv_msgpack *m)
{
    const uint8_t *before = m->p;
    bool negative;
    uint64_t n = take_integer(m, &negative);

    if (negative || n <= INT64_MAX)
        return (int64_t)n;
    m->p = before;
    kv_msgpack_fail(m, -ERANGE, "a number above 2^63-1");
    return 0;
}

double kv_msgpack_double(struct kv_msgpack *m)
{
    int b = first_byte(m);
    uint64_t bits;
    uint32_t bits32;
    float f;
    double d;
    bool negative;

    if (b == 0xca) {
        if (!take_number(m, 4, &bits))
            return 0;
        bits32 = (uint32_t)bits;
        memcpy(&f, &bits32, sizeof(f));
        return (double)f;
    }
    if (b == 0xcb) {
        if (!take_number(m, 8, &bits))
            return 0;
        memcpy(&d, &bits, sizeof(d));
        return d;
    }
    bits = take_integer(m, &negative);
    return negative ? (double)(int64_t)bits : (double)bits;
}

bool kv_msgpack_bool(struct kv_msgpack *m)
{
    int b = first_byte(m);

    if (b == 0xc2 || b == 0xc3) {
        m->p++;
        return b == 0xc3;
    }
    kv_msgpack_fail(m, -EPROTO, "not a bool");
    return false;
}

bool kv_msgpack_nil(struct kv_msgpack *m)
{
    if (m->p >= m->end || *m->p != 0xc0)
        return false;
    m->p++;
    return true;
}

static struct kv_str take_bytes(struct kv_msgpack *m, uint8_t code8, const char *wrong)
{
    struct kv_str none = {"", 0}, s;
    int b = first_byte(m);
    uint64_t len = 0;

    if (b < 0)
        return none;
    if (code8 == 0xd9 && (b & 0xe0) == 0xa0) {
        len = (unsigned)b & 0x1f;
        m->p++;
    } else if (b >= code8 && b <= code8 + 2) {
        if (!take_number(m, 1u << (b - code8), &len))
            return none;
    } else {
        kv_msgpack_fail(m, -EPROTO, wrong);
        return none;
    }
    if (!has(m, len))
        return none;
    s.p = (const char *)m->p;
    s.len = (size_t)len;
    m->p += len;
    return s;
}

struct kv_str kv_msgpack_str(struct kv_msgpack *m)
{
    return take_bytes(m, 0xd9, "not a string");
}

struct kv_str kv_msgpack_bin(struct kv_msgpack *m)
{
    return take_bytes(m, 0xc4, "not binary");
}

/* -- skipping ---------------------------------------------------------------------------------- */

/* Compute the bytes to pass over for the value at p, and the number of values inside it. */
static bool span(struct kv_msgpack *m, uint64_t *ret_bytes, uint64_t *ret_values)
{
    /* For c0..df: the bytes besides the ones that a length counts, and the width of that length. */
    static const uint8_t fixed[32] = {1, 0, 1, 1, 2, 3, 5, 3,  4,  6, 5, 9, 2, 3, 5, 9,
                                      2, 3, 5, 9, 3, 4, 6, 10, 18, 2, 3, 5, 3, 5, 3, 5};
    static const uint8_t width[32] = {[4] = 1, 2, 4, 1, 2, 4, [25] = 1, 2, 4, 2, 4, 2, 4};
    uint8_t b = *m->p;
    uint64_t n = 0;

    *ret_bytes = 1;
    *ret_values = 0;
    if (b < 0x80 || b >= 0xe0)
        return true;
    if (b < 0xa0) {
        *ret_values = b < 0x90 ? 2u * (b & 0x0f) : b & 0x0f;
        return true;
    }
    if (b < 0xc0) {
        *ret_bytes = 1u + (b & 0x1f);
        return true;
    }
    b -= 0xc0;
    if (!fixed[b]) {
        kv_msgpack_fail(m, -EPROTO, "the byte c1 is no value");
        return false;
    }
    *ret_bytes = fixed[b];
    if (!width[b])
        return true;
    if (!has(m, fixed[b]))
        return false;
    n = number_at(m->p, width[b]);
    if (b >= 0x1c)
        *ret_values = b >= 0x1e ? 2 * n : n;
    else
        *ret_bytes += n;
    return true;
}

/*
 * Count the values still due, at any depth, instead of keeping a stack. Each needs at least one
 * byte, so a header that promises more values than bytes left is refused.
 */
void kv_msgpack_skip(struct kv_msgpack *m)
{
    uint64_t due = 1;
    uint64_t bytes, values;

    do {
        if (first_byte(m) < 0 || !span(m, &bytes, &values) || !has(m, bytes))
            return;
        due += values - 1;
        if (KV_UNLIKELY(left(m) - bytes < due)) {
            kv_msgpack_fail(m, -EPROTO, "says it has more elements than bytes follow");
            return;
        }
        m->p += bytes;
    } while (due);
}

/* -- token ids --------------------------------------------------------------------------------- */

/*
 * Token ids mix widths of 1, 2, 3 and 5 bytes at random. A jump on each first byte would be
 * mispredicted every other token. So 16 tokens are read at a time: vector code computes the width
 * of a token at each of the next 80 bytes. The walk then costs one dependent load and one addition
 * a token; the value is two shifts of the eight bytes there.
 */
#define RUN 16
#define RUN_BYTES (RUN * 5) /* most bytes that RUN tokens take */
#define RUN_READ (RUN_BYTES + 8)

typedef uint8_t bytes16 __attribute__((vector_size(16)));

/* Compute for each byte the length of a token that begins with it; 0: no token begins with it. */
static inline void token_widths(const uint8_t *p, uint8_t *ret)
{
    bytes16 b, widths;

    memcpy(&b, p, sizeof(b));
    widths = ((bytes16)(b < 0x80) & 1) | ((bytes16)(b == 0xcc) & 2) | ((bytes16)(b == 0xcd) & 3) |
             ((bytes16)(b == 0xce) & 5);
    memcpy(ret, &widths, sizeof(widths));
}

/*
 * Read RUN tokens at @p, where RUN_READ bytes are readable. Returns their length in bytes; 0: some
 * value is no token.
 */
static unsigned take_run(const uint8_t *p, uint32_t *ret)
{
    /* By width: number of bits below the value in the first eight bytes, and the value's own bits. */
    static const uint8_t below[8] = {[1] = 56, [2] = 48, [3] = 40, [5] = 24};
    static const uint32_t mask[8] = {[1] = 0x7f, [2] = 0xff, [3] = 0xffff, [5] = UINT32_MAX};
    uint8_t widths[RUN_BYTES];
    unsigned at = 0, width = 0;

    for (unsigned i = 0; i < RUN_BYTES; i += 16)
        token_widths(p + i, widths + i);
    for (unsigned i = 0; i < RUN; i++) {
        uint64_t word;

        width = widths[at];
        memcpy(&word, p + at, sizeof(word));
        ret[i] = (uint32_t)(be64toh(word) >> below[width]) & mask[width];
        at += width;
    }
    /* Where no token begins @at stays, so that the last width is 0, too. */
    return width ? at : 0;
}

/* Read a number 0..2^32-1 in any integer form. */
static bool take_u32(struct kv_msgpack *m, uint32_t *ret)
{
    const uint8_t *before = m->p;
    uint64_t value = kv_msgpack_u64(m);

    if (kv_msgpack_failed(m))
        return false;
    if (value > UINT32_MAX) {
        m->p = before;
        kv_msgpack_fail(m, -ERANGE, "a number above 2^32-1");
        return false;
    }
    *ret = (uint32_t)value;
    return true;
}

bool kv_msgpack_u32s(struct kv_msgpack *m, uint32_t n, uint32_t *ret)
{
    uint32_t i = 0;

    while (i < n) {
        unsigned taken = 0;
        uint32_t stop = n;

        if (n - i >= RUN) {
            if (left(m) >= RUN_READ)
                taken = take_run(m->p, ret + i);
            stop = i + RUN;
        }
        if (taken) {
            m->p += taken;
            i = stop;
            continue;
        }
        for (; i < stop; i++) {
            if (!take_u32(m, ret + i))
                return false;
        }
    }
    return true;
}
