// SPDX-License-Identifier: Apache-2.0
#include "pack.h"
#include "base/core/ascii.h"
#include "base/unit.h"

static const char *pack_value(struct kv_buf *out, const char *p);

static const char *pack_space(const char *p)
{
    return p + strspn(p, " ,:\n");
}

static unsigned pack_nibble(char c)
{
    return c <= '9' ? (unsigned)(c - '0') : (unsigned)((c | 0x20) - 'a' + 10);
}

const char *pack_hex(struct kv_buf *out, const char *p)
{
    for (; p[0] && p[0] != '\'' && p[1]; p += 2)
        kv_buf_putc(out, (char)(pack_nibble(p[0]) << 4 | pack_nibble(p[1])));
    return p;
}

static const char *pack_items(struct kv_buf *out, const char *p, char close, uint32_t *ret_n)
{
    *ret_n = 0;
    for (p = pack_space(p); *p != close; p = pack_space(p)) {
        assert_int_not_equal(*p, '\0');
        p = pack_value(out, p);
        ++*ret_n;
    }
    return p + 1;
}

static const char *pack_number(struct kv_buf *out, const char *p)
{
    size_t len = strspn(p, "+-0123456789.e");
    char *end;

    assert_true(len > 0);
    if (memchr(p, '.', len))
        kv_msgpack_put_double(out, strtod_l(p, &end, kv_c_locale()));
    else if (*p == '-')
        kv_msgpack_put_i64(out, strtoll(p, &end, 10));
    else
        kv_msgpack_put_u64(out, strtoull(p, &end, 10));
    return p + len;
}

static const char *pack_value(struct kv_buf *out, const char *p)
{
    struct kv_buf inner = KV_BUF_INIT;
    uint32_t n;

    p = pack_space(p);
    if (*p == '[' || *p == '{') {
        bool map = *p == '{';

        p = pack_items(&inner, p + 1, map ? '}' : ']', &n);
        if (map)
            kv_msgpack_put_map(out, n / 2);
        else
            kv_msgpack_put_array(out, n);
        kv_buf_append(out, inner.data, inner.len);
    } else if (*p == '\'') {
        const char *end = strchr(++p, '\'');

        assert_non_null(end);
        kv_msgpack_put_strn(out, p, (size_t)(end - p));
        p = end + 1;
    } else if (p[0] == 'x' && p[1] == '\'') {
        p = pack_hex(&inner, p + 2) + 1;
        kv_msgpack_put_bin(out, inner.data, inner.len);
    } else if (strncmp(p, "nil", 3) == 0) {
        kv_msgpack_put_nil(out);
        p += 3;
    } else if (strncmp(p, "true", 4) == 0 || strncmp(p, "false", 5) == 0) {
        kv_msgpack_put_bool(out, *p == 't');
        p += *p == 't' ? 4 : 5;
    } else {
        p = pack_number(out, p);
    }
    kv_buf_fini(&inner);
    return p;
}

void pack(struct kv_buf *out, const char *fmt, ...)
{
    char text[8192];
    va_list args;
    int len;

    va_start(args, fmt);
    len = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    assert_true(len > 0 && (size_t)len < sizeof(text));
    assert_int_equal(*pack_space(pack_value(out, text)), '\0');
    assert_int_equal(out->error, 0);
}
