// SPDX-License-Identifier: Apache-2.0
/** Nkeys and JWTs of NATS, as nsc makes them: an operator, an account, users. */
#ifndef KV_TEST_PLANE_NATS_JWT_H
#define KV_TEST_PLANE_NATS_JWT_H

#include <openssl/evp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "support.h"

enum { NATS_OPERATOR = 14 << 3, NATS_ACCOUNT = 0, NATS_USER = 20 << 3 };

struct nats_key {
    EVP_PKEY *pair;
    char public[64], seed[64];
};

/* Encode bytes and their CRC-16 in base32. */
static inline void nats_base32(uint8_t *bytes, size_t n, char *ret)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    unsigned crc = 0, bits = 0, n_bits = 0;

    for (size_t i = 0; i < n; i++) {
        crc ^= (unsigned)bytes[i] << 8;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc << 1 ^ (crc & 0x8000 ? 0x1021 : 0)) & 0xffff;
    }
    bytes[n] = (uint8_t)crc;
    bytes[n + 1] = (uint8_t)(crc >> 8);
    for (size_t i = 0; i < n + 2; i++) {
        bits = bits << 8 | bytes[i];
        for (n_bits += 8; n_bits >= 5; n_bits -= 5)
            *ret++ = letters[bits >> (n_bits - 5) & 31];
    }
    if (n_bits)
        *ret++ = letters[bits << (5 - n_bits) & 31];
    *ret = '\0';
}

static inline void nats_key_make(struct nats_key *key, unsigned kind)
{
    uint8_t public[35], seed[36];
    size_t len = 32;

    key->pair = EVP_PKEY_Q_keygen(NULL, NULL, "ED25519");
    assert_non_null(key->pair);
    assert_int_equal(EVP_PKEY_get_raw_public_key(key->pair, public + 1, &len), 1);
    public[0] = (uint8_t)kind;
    nats_base32(public, 33, key->public);
    seed[0] = (uint8_t)(18 << 3 | kind >> 5);
    seed[1] = (uint8_t)(kind << 3);
    assert_int_equal(EVP_PKEY_get_raw_private_key(key->pair, seed + 2, &len), 1);
    nats_base32(seed, 34, key->seed);
}

static inline void nats_base64(const void *bytes, size_t n, char *ret)
{
    int len = EVP_EncodeBlock((unsigned char *)ret, bytes, (int)n);

    while (len > 0 && ret[len - 1] == '=')
        len--;
    ret[len] = '\0';
    for (char *at = ret; *at; at++)
        *at = (char)(*at == '+' ? '-' : *at == '/' ? '_' : *at);
}

/** Write the JWT in which @issuer says of @subject what @claims says, until @expires (0: for ever). */
static inline void nats_jwt(const struct nats_key *issuer, const struct nats_key *subject,
                            const char *claims, long expires, char *ret, size_t size)
{
    static const char head[] = "{\"typ\":\"JWT\",\"alg\":\"ed25519-nkey\"}";
    char body[1024], until[40] = "", parts[2][2048], sum[128];
    EVP_MD_CTX *sign = EVP_MD_CTX_new();
    uint8_t signature[64];
    size_t len = sizeof(signature);

    if (expires)
        snprintf(until, sizeof(until), ",\"exp\":%ld", expires);
    snprintf(body, sizeof(body),
             "{\"jti\":\"x\",\"iat\":1700000000%s,\"iss\":\"%s\",\"name\":\"n\",\"sub\":\"%s\","
             "\"nats\":{%s,\"version\":2}}",
             until, issuer->public, subject->public, claims);
    nats_base64(head, strlen(head), parts[0]);
    nats_base64(body, strlen(body), parts[1]);
    snprintf(ret, size, "%s.%s", parts[0], parts[1]);
    assert_int_equal(EVP_DigestSignInit(sign, NULL, NULL, NULL, issuer->pair), 1);
    assert_int_equal(EVP_DigestSign(sign, signature, &len, (const unsigned char *)ret, strlen(ret)),
                     1);
    EVP_MD_CTX_free(sign);
    nats_base64(signature, len, sum);
    len = strlen(ret);
    snprintf(ret + len, size - len, ".%s", sum);
}

/** Write a user's creds file. */
static inline void nats_creds(const char *path, const struct nats_key *account,
                              const struct nats_key *user, long expires)
{
    FILE *file = fopen(path, "w");
    char jwt[4096];

    nats_jwt(account, user, "\"type\":\"user\",\"subs\":-1,\"data\":-1,\"payload\":-1", expires,
             jwt, sizeof(jwt));
    assert_non_null(file);
    fprintf(file,
            "-----BEGIN NATS USER JWT-----\n%s\n------END NATS USER JWT------\n\n"
            "-----BEGIN USER NKEY SEED-----\n%s\n------END USER NKEY SEED------\n",
            jwt, user->seed);
    assert_int_equal(fclose(file), 0);
}

#endif
