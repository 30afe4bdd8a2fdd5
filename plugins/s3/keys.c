// SPDX-License-Identifier: Apache-2.0
#include "s3/keys.h"

#include <stdlib.h>
#include <string.h>

#include "s3/sign.h"
#include "s3/xml.h"

char *s3_take_text(struct kv_buf *buf)
{
    char *ret = buf->error ? NULL : strdup(kv_buf_cstr(buf));

    kv_buf_fini(buf);
    return ret;
}

char *s3_chunk_path(const struct s3_config *config, const uint8_t *hash, size_t hash_len)
{
    struct kv_buf path = KV_BUF_INIT;

    kv_buf_printf(&path, "%sc/%02x/", config->base, hash[0]);
    s3_hex(&path, hash, hash_len);
    return s3_take_text(&path);
}

/* Append a manifest's name as it appears in keys. */
static void put_name(struct kv_buf *ret, const char *name)
{
    if (name[0] == '.') { /* "." and ".." would mean folders to some proxies */
        kv_buf_puts(ret, "%2E");
        name++;
    }
    s3_encode(ret, name, strlen(name), 0);
}

char *s3_manifest_path(const struct s3_config *config, const char *name)
{
    struct kv_buf key = KV_BUF_INIT, path = KV_BUF_INIT;

    put_name(&key, name);
    kv_buf_printf(&path, "%sm/", config->base);
    s3_encode(&path, kv_buf_cstr(&key), key.len, 0);
    kv_buf_fini(&key);
    return s3_take_text(&path);
}

char *s3_refs_folder(const char *name)
{
    struct kv_buf folder = KV_BUF_INIT;

    kv_buf_puts(&folder, "r/");
    put_name(&folder, name);
    kv_buf_putc(&folder, '/');
    return s3_take_text(&folder);
}

char *s3_refs_path(const struct s3_config *config, const char *name, const char *id)
{
    char *folder = s3_refs_folder(name);
    struct kv_buf path = KV_BUF_INIT;

    if (!folder)
        return NULL;
    kv_buf_puts(&path, config->base);
    s3_encode(&path, folder, strlen(folder), 1);
    s3_encode(&path, id, strlen(id), 0);
    free(folder);
    return s3_take_text(&path);
}

bool s3_is_note(const char *id)
{
    size_t hex = strspn(id, "0123456789abcdef");
    size_t number = hex == 32 && id[hex] == '-' ? strspn(id + hex + 1, "0123456789") : 0;

    return number > 0 && id[hex + 1 + number] == '\0';
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

size_t s3_chunk_of_key(const char *key, uint8_t ret[S3_MAX_HASH])
{
    size_t len = strlen(key);

    if (len < 5 || len % 2 == 0 || len - 3 > 2 * S3_MAX_HASH || key[2] != '/' ||
        memcmp(key, key + 3, 2) != 0)
        return 0;
    len = (len - 3) / 2;
    for (size_t i = 0; i < len; i++) {
        int high = digit(key[3 + 2 * i]), low = digit(key[4 + 2 * i]);

        if (high < 0 || low < 0)
            return 0;
        ret[i] = (uint8_t)(high * 16 + low);
    }
    return len;
}

bool s3_name_of_key(char *key)
{
    struct kv_buf again = KV_BUF_INIT;
    char *was = strdup(key);
    bool same = was && s3_decode(key, false) && *key;

    if (same) {
        put_name(&again, key);
        same = !again.error && strcmp(kv_buf_cstr(&again), was) == 0;
    }
    kv_buf_fini(&again);
    free(was);
    return same;
}
