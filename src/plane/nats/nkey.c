// SPDX-License-Identifier: Apache-2.0
#include "plane/nats/nkey.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define SEED_LETTERS 58
#define SEED_BYTES 36 /* two of prefix, the seed, its CRC */
#define KEY_BYTES 35  /* one of prefix, the key, its CRC */
#define PREFIX_SEED (18 << 3)

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

/* CRC-16/XMODEM. */
static uint16_t crc16(const uint8_t *data, size_t len)
{
    uint16_t crc = 0;

    for (size_t i = 0; i < len; i++) {
        crc = (uint16_t)(crc ^ data[i] << 8);
        for (int bit = 0; bit < 8; bit++)
            crc = (uint16_t)(crc & 0x8000 ? crc << 1 ^ 0x1021 : crc << 1);
    }
    return crc;
}

static int decode(const char *text, uint8_t ret[SEED_BYTES])
{
    uint32_t bits = 0, n_bits = 0;
    size_t len = 0;

    for (size_t i = 0; i < SEED_LETTERS; i++) {
        const char *at = text[i] ? strchr(letters, text[i]) : NULL;

        if (!at)
            return -EBADMSG;
        bits = bits << 5 | (uint32_t)(at - letters);
        n_bits += 5;
        if (n_bits >= 8) {
            n_bits -= 8;
            ret[len++] = (uint8_t)(bits >> n_bits);
        }
    }
    OPENSSL_cleanse(&bits, sizeof(bits));
    return 0;
}

static void encode(const uint8_t key[KEY_BYTES], char ret[KVP_NKEY])
{
    for (size_t i = 0; i < KVP_NKEY - 1; i++)
        ret[i] =
            letters[(key[i * 5 / 8] << 8 | (i * 5 / 8 + 1 < KEY_BYTES ? key[i * 5 / 8 + 1] : 0)) >>
                        (11 - i * 5 % 8) &
                    31];
    ret[KVP_NKEY - 1] = '\0';
}

/* Find the line of @text that begins a seed. */
static const char *find_seed(const char *text)
{
    while (text && !(text[0] == 'S' && strspn(text, letters) >= SEED_LETTERS)) {
        text = strchr(text, '\n');
        text = text ? text + 1 : NULL;
    }
    return text;
}

static int public_of(const uint8_t seed[SEED_BYTES], char ret[KVP_NKEY])
{
    uint8_t key[KEY_BYTES];
    size_t len = 32;
    EVP_PKEY *pair;
    uint16_t crc;
    int ok;

    crc = crc16(seed, SEED_BYTES - 2);
    if ((seed[0] & 0xf8) != PREFIX_SEED || seed[SEED_BYTES - 2] != (crc & 0xff) ||
        seed[SEED_BYTES - 1] != crc >> 8)
        return -EBADMSG;
    pair = EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, NULL, seed + 2, 32);
    ok = pair && EVP_PKEY_get_raw_public_key(pair, key + 1, &len) == 1 && len == 32;
    EVP_PKEY_free(pair);
    if (!ok)
        return -EIO;
    key[0] = (uint8_t)((seed[0] & 7) << 5 | (seed[1] & 0xf8) >> 3);
    crc = crc16(key, KEY_BYTES - 2);
    key[KEY_BYTES - 2] = (uint8_t)crc;
    key[KEY_BYTES - 1] = (uint8_t)(crc >> 8);
    encode(key, ret);
    return 0;
}

int kvp_nkey_public(const char *file, char ret[KVP_NKEY])
{
    uint8_t seed[SEED_BYTES];
    int fd = open(file, O_RDONLY | O_CLOEXEC), err;
    char text[4096];
    const char *at;
    ssize_t len;

    if (fd < 0)
        return -errno;
    len = read(fd, text, sizeof(text) - 1);
    err = len < 0 ? -errno : 0;
    close(fd);
    if (err < 0)
        return err;
    text[len] = '\0';
    at = find_seed(text);
    err = at ? decode(at, seed) : -EBADMSG;
    if (err == 0)
        err = public_of(seed, ret);
    OPENSSL_cleanse(text, sizeof(text));
    OPENSSL_cleanse(seed, sizeof(seed));
    return err;
}
