// SPDX-License-Identifier: Apache-2.0
/**
 * Names of manifests as names of files. A harmless name stays as it is, so that other programs of
 * this layout find it. Percent-encoded (upper-case hex) are: '/', control bytes, DEL, a leading
 * '.', the last '.' of a name that ends in ".tmp", and the first letter of "chunks"; also a '%'
 * that two upper-case hex digits follow. The last rule makes the mapping injective: in a file name,
 * a '%' with two such digits is always an encoded byte. A file is a manifest only when decoding and
 * encoding its name gives the same name.
 */
#include <stdio.h>
#include <string.h>

#include "store/file/file_impl.h"

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool is_escape(const char *at)
{
    return at[0] == '%' && digit(at[1]) >= 0 && digit(at[2]) >= 0;
}

static bool must_encode(const char *name, size_t i, size_t len)
{
    unsigned char c = (unsigned char)name[i];

    if (c < 0x20 || c == 0x7f || c == '/' || (i == 0 && c == '.') || is_escape(name + i))
        return true;
    if (i == 0 && strcmp(name, "chunks") == 0)
        return true;
    return len >= 4 && i == len - 4 && strcmp(name + i, ".tmp") == 0;
}

int kvs_file_name_encode(char ret[KVS_FILE_NAME], const char *name)
{
    size_t len = name ? strnlen(name, KVS_FILE_NAME) : 0, used = 0;

    if (len == 0)
        return -EINVAL;
    for (size_t i = 0; i < len; i++) {
        bool encode = must_encode(name, i, len);

        if (used + (encode ? 3 : 1) >= KVS_FILE_NAME)
            return -ENAMETOOLONG;
        if (encode)
            used += (size_t)sprintf(ret + used, "%%%02X", (unsigned char)name[i]);
        else
            ret[used++] = name[i];
    }
    ret[used] = '\0';
    return 0;
}

int kvs_file_name_decode(char ret[KVS_FILE_NAME], const char *file)
{
    char again[KVS_FILE_NAME];
    size_t used = 0;

    if (strlen(file) >= KVS_FILE_NAME)
        return -EINVAL;
    for (const char *at = file; *at; at++) {
        if (is_escape(at)) {
            ret[used++] = (char)(digit(at[1]) << 4 | digit(at[2]));
            at += 2;
        } else {
            ret[used++] = *at;
        }
    }
    ret[used] = '\0';
    if (strlen(ret) != used || kvs_file_name_encode(again, ret) < 0 || strcmp(again, file) != 0)
        return -EINVAL;
    return 0;
}

void kvs_file_hex(char ret[KVS_FILE_HEX], const uint8_t *key, size_t len)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < len; i++) {
        ret[2 * i] = digits[key[i] >> 4];
        ret[2 * i + 1] = digits[key[i] & 15];
    }
    ret[2 * len] = '\0';
}

int kvs_file_unhex(uint8_t ret[KVS_FILE_KEY_MAX], const char *hex)
{
    size_t len = strlen(hex);

    if (len == 0 || len % 2 || len >= KVS_FILE_HEX)
        return -EINVAL;
    for (size_t i = 0; i < len; i++) {
        int value = hex[i] >= 'a' && hex[i] <= 'f'   ? hex[i] - 'a' + 10
                    : hex[i] >= '0' && hex[i] <= '9' ? hex[i] - '0'
                                                     : -1;
        if (value < 0)
            return -EINVAL;
        ret[i / 2] = (uint8_t)(i % 2 ? ret[i / 2] | value : value << 4);
    }
    return (int)(len / 2);
}

int kvs_file_chunk_name(uint8_t ret[KVS_FILE_KEY_MAX], int *ret_len, const char *hex)
{
    int len = kvs_file_unhex(ret, hex);

    if (len < 0)
        return len;
    *ret_len = len;
    return kvs_file_fan(ret);
}

enum { WRITER = 16 };

bool kvs_file_is_writer(const char *name)
{
    return strspn(name, "0123456789abcdef") == WRITER && !name[WRITER];
}

bool kvs_file_is_tmp(const char *name)
{
    size_t digits;

    if (strspn(name, "0123456789abcdef") != WRITER || name[WRITER] != '.')
        return false;
    name += WRITER + 1;
    digits = strspn(name, "0123456789");
    name += digits;
    return digits && (!*name || strcmp(name, ".s") == 0 || strcmp(name, ".p") == 0);
}
