// SPDX-License-Identifier: Apache-2.0
#include "cli/show/plain.h"

#include "base/core/utf8.h"

/* Return the scalar value of the @n bytes at @s, a valid sequence of UTF-8. */
static unsigned code_of(const unsigned char *s, int n)
{
    static const unsigned char first[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    unsigned code = s[0] & first[n];

    for (int i = 1; i < n; i++)
        code = code << 6 | (s[i] & 0x3fu);
    return code;
}

/* Return true for C0, C1, and what changes how the line is shown: directions, line ends, joiners. */
static bool is_hidden(unsigned code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c ||
           (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2060 && code <= 0x206f) || code == 0xfeff;
}

void kc_put_plain(struct kv_buf *out, const char *text, size_t len)
{
    const char *end = text + len;

    while (text < end) {
        int n = kv_utf8_sequence(text, end);
        unsigned code = n > 0 ? code_of((const unsigned char *)text, n) : 0;

        if (n <= 0) {
            kv_buf_printf(out, "\\x%02x", (unsigned char)*text);
            n = 1;
        } else if (is_hidden(code)) {
            kv_buf_printf(out, "\\u%04x", code);
        } else {
            if (code == '\\')
                kv_buf_putc(out, '\\');
            kv_buf_append(out, text, (size_t)n);
        }
        text += n;
    }
}
