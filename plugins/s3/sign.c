// SPDX-License-Identifier: Apache-2.0
#include "s3/sign.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <string.h>

#define MAC_LEN 32

void s3_hex(struct kv_buf *ret, const void *data, size_t len)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = data;

    for (size_t i = 0; i < len; i++) {
        kv_buf_putc(ret, digits[bytes[i] >> 4]);
        kv_buf_putc(ret, digits[bytes[i] & 15]);
    }
}

static int is_unreserved(unsigned char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_' || c == '~';
}

void s3_encode(struct kv_buf *ret, const char *text, size_t len, int slashes)
{
    static const char digits[] = "0123456789ABCDEF";

    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];

        if (is_unreserved(c) || (slashes && c == '/')) {
            kv_buf_putc(ret, (char)c);
            continue;
        }
        kv_buf_putc(ret, '%');
        kv_buf_putc(ret, digits[c >> 4]);
        kv_buf_putc(ret, digits[c & 15]);
    }
}

void s3_stamp(time_t when, char ret[S3_STAMP])
{
    struct tm tm;

    gmtime_r(&when, &tm);
    strftime(ret, S3_STAMP, "%Y%m%dT%H%M%SZ", &tm);
}

int s3_sha256_hex(const void *data, size_t len, char ret[S3_SHA256_HEX])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t sum[MAC_LEN];

    if (!EVP_Digest(data ? data : "", len, sum, NULL, EVP_sha256(), NULL))
        return -EIO;
    for (size_t i = 0; i < MAC_LEN; i++) {
        ret[2 * i] = digits[sum[i] >> 4];
        ret[2 * i + 1] = digits[sum[i] & 15];
    }
    ret[2 * MAC_LEN] = '\0';
    return 0;
}

/* Compute key = HMAC(key, text). */
static int chain(uint8_t key[MAC_LEN], size_t key_len, const void *secret, const char *text,
                 size_t len)
{
    unsigned ret_len = MAC_LEN;
    uint8_t mac[MAC_LEN];

    if (!HMAC(EVP_sha256(), secret, (int)key_len, (const uint8_t *)text, len, mac, &ret_len))
        return -EIO;
    memcpy(key, mac, MAC_LEN);
    return 0;
}

static int derive_key(const struct s3_signing *in, uint8_t key[MAC_LEN])
{
    struct kv_buf secret = KV_BUF_INIT;
    int ret;

    kv_buf_printf(&secret, "AWS4%s", in->secret_key);
    ret = secret.error;
    if (!ret)
        ret = chain(key, secret.len, secret.data, in->stamp, 8);
    if (!ret)
        ret = chain(key, MAC_LEN, key, in->region, strlen(in->region));
    if (!ret)
        ret = chain(key, MAC_LEN, key, in->service, strlen(in->service));
    if (!ret)
        ret = chain(key, MAC_LEN, key, "aws4_request", 12);
    if (secret.data)
        OPENSSL_cleanse(secret.data, secret.len);
    kv_buf_fini(&secret);
    return ret;
}

static void put_header_names(const struct s3_signing *in, struct kv_buf *ret)
{
    for (size_t i = 0; i < in->n_headers; i++)
        kv_buf_printf(ret, "%s%s", i ? ";" : "", in->headers[i].name);
}

/* Hash the request's canonical form, which the server computes as well; only the hash is signed. */
static int hash_request(const struct s3_signing *in, char ret[S3_SHA256_HEX])
{
    struct kv_buf text = KV_BUF_INIT;
    int error;

    kv_buf_printf(&text, "%s\n%s\n%s\n", in->method, in->path, in->query);
    for (size_t i = 0; i < in->n_headers; i++)
        kv_buf_printf(&text, "%s:%s\n", in->headers[i].name, in->headers[i].value);
    kv_buf_putc(&text, '\n');
    put_header_names(in, &text);
    kv_buf_printf(&text, "\n%s", in->payload_sha256);
    error = text.error ? text.error : s3_sha256_hex(text.data, text.len, ret);
    kv_buf_fini(&text);
    return error;
}

int s3_sign(const struct s3_signing *in, struct kv_buf *ret)
{
    char request[S3_SHA256_HEX], scope[160];
    struct kv_buf text = KV_BUF_INIT;
    uint8_t key[MAC_LEN];
    int error = hash_request(in, request);

    snprintf(scope, sizeof(scope), "%.8s/%.100s/%.20s/aws4_request", in->stamp, in->region,
             in->service);
    kv_buf_printf(&text, "AWS4-HMAC-SHA256\n%s\n%s\n%s", in->stamp, scope, request);
    if (!error)
        error = text.error;
    if (!error)
        error = derive_key(in, key);
    if (!error)
        error = chain(key, MAC_LEN, key, text.data, text.len);
    kv_buf_fini(&text);
    if (error)
        return error;
    kv_buf_printf(ret, "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=", in->access_key, scope);
    put_header_names(in, ret);
    kv_buf_puts(ret, ", Signature=");
    s3_hex(ret, key, MAC_LEN);
    return ret->error;
}
