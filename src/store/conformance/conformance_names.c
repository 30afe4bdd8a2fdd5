// SPDX-License-Identifier: Apache-2.0
/* Manifest names that a backend could get wrong. The specification says only "a C string". A
 * backend may refuse a name; a name that it accepts must give back its own bytes and never another
 * name's. */
#include <stdio.h>

#include "store/conformance/conformance.h"

#define MAX_NAMES 64

struct name {
    const char *text;
    bool taken;
};

/* Names without a prefix of this run, special to file systems and key spaces. Skipped where the
 * store already has such an object. */
static const char *const BARE[] = {"",
                                   ".",
                                   "..",
                                   "/",
                                   "chunks",
                                   "chunks/0",
                                   "./chunks",
                                   "CHUNKS",
                                   ".kvasir",
                                   "../kvs-conformance",
                                   "/tmp/kvs-conformance"};
/* Appended to a name of this run. */
static const char *const SUFFIXES[] = {
    "a",         "A",    "a.tmp", "a~",  "a b",  "a/b",  "a//b",   "a%2fb", "a%2Fb",
    "a\\b",      "a:b",  "a.",    "a.b", "*",    "?[a]", "{a}",    "\n",    "\x01",
    "\x7f",      "%",    "%25",   "#a",  "+",    "&b=c", "a/../b", "a/./b", "\xc3\xa9",
    "e\xcc\x81", "\xff", "\"",    "'",   "$(a)", "a\tb"};

static enum kvs_verdict put_all(struct kvs_conf *c, struct name *names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int rc = c->vt->put_manifest(c->h, names[i].text, (const uint8_t *)&i, sizeof(i));

        if (rc > 0)
            return kvs_conf_fail(c, "put_manifest returned %d", rc);
        names[i].taken = rc == 0;
    }
    return KVS_PASS;
}

static enum kvs_verdict check_all(struct kvs_conf *c, kv_store_v1 *h, struct name *names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        enum kvs_verdict verdict = names[i].taken
                                       ? kvs_conf_read(c, h, names[i].text, &i, sizeof(i))
                                       : kvs_conf_read_none(c, h, names[i].text);
        char why[sizeof(c->detail)];

        if (verdict == KVS_PASS)
            continue;
        snprintf(why, sizeof(why), "%s", c->detail);
        return kvs_conf_fail(c, "name \"%.100s\" (%s): %s", names[i].text,
                             names[i].taken ? "taken" : "refused", why);
    }
    return KVS_PASS;
}

static size_t make_names(struct kvs_conf *c, struct name *names)
{
    static const size_t LENS[] = {100, 200, 255, 256, 1000, 5000};
    const char *base = kvs_conf_name(c, "-");
    size_t n = 0, base_len = strlen(base);

    for (size_t i = 0; i < KV_COUNT(BARE); i++) {
        uint8_t *old = NULL;
        size_t len;

        if (c->vt->get_manifest(c->h, BARE[i], &old, &len) == 0)
            free(old); /* an object of the store's owner: don't replace it */
        else
            names[n++].text = BARE[i];
    }
    for (size_t i = 0; i < KV_COUNT(SUFFIXES); i++) {
        char *text = (char *)kvs_conf_alloc(c, base_len + 32);

        snprintf(text, base_len + 32, "%s%s", base, SUFFIXES[i]);
        names[n++].text = text;
    }
    /* names that differ only in length, or in the last byte */
    for (size_t i = 0; i < KV_COUNT(LENS); i++) {
        for (int last = 'x'; last <= 'y'; last++) {
            char *text = (char *)kvs_conf_alloc(c, LENS[i] + 1);

            memset(text, 'n', LENS[i]);
            memcpy(text, base, base_len);
            text[LENS[i] - 1] = (char)last;
            names[n++].text = text;
        }
    }
    return n;
}

static enum kvs_verdict check_odd_names(struct kvs_conf *c)
{
    struct name names[MAX_NAMES] = {{0}};
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    const char *canary = kvs_conf_name(c, "");
    kv_store_v1 *other;
    size_t n, n_taken = 0;

    _Static_assert(KV_COUNT(BARE) + KV_COUNT(SUFFIXES) + 12 <= MAX_NAMES, "room for all names");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "canary", 6, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, canary, "canary", 6));
    n = make_names(c, names);
    for (size_t i = 0; i < n; i++)
        kvs_conf_forget_name(c, names[i].text);
    KVS_CONF_TRY(put_all(c, names, n));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(check_all(c, other, names, n));
    for (size_t i = 0; i < n; i++) {
        n_taken += names[i].taken;
        c->vt->delete_manifest(c->h, names[i].text);
        names[i].taken = false;
        KVS_CONF_TRY(check_all(c, other, names + i, 1));
    }
    KVS_CONF_TRY(kvs_conf_read(c, other, canary, "canary", 6));
    KVS_CONF_TRY(kvs_conf_get(c, other, &key, "canary", 6));
    return n_taken ? KVS_PASS : kvs_conf_fail(c, "every name was refused");
}

/* Names that consumers use: letters, digits, '-', '_' and '.' within, up to 200 bytes. */
static enum kvs_verdict check_plain_names(struct kvs_conf *c)
{
    static const char *const PLAIN[] = {"slot-0", "model_7b.q4_k_m", "0123456789", "UPPER.bin"};
    char longest[128];

    memset(longest, 'l', sizeof(longest));
    longest[sizeof(longest) - 1] = '\0';
    for (size_t i = 0; i <= KV_COUNT(PLAIN); i++) {
        const char *name = kvs_conf_name(c, i < KV_COUNT(PLAIN) ? PLAIN[i] : longest);

        KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, name, strlen(name)));
        KVS_CONF_TRY(kvs_conf_read(c, c->h, name, name, strlen(name)));
    }
    return KVS_PASS;
}

/* Use the same bytes as a chunk's key and as a manifest's name: they must not clash. */
static enum kvs_verdict check_two_worlds(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 32);
    const char *name = kvs_conf_name(c, "");
    char hex[2 * 32 + 1];

    memcpy(key.bytes, name, 32);
    kvs_conf_forget_key(c, &key);
    for (size_t i = 0; i < key.len; i++)
        snprintf(hex + 2 * i, 3, "%02x", key.bytes[i]);
    kvs_conf_forget_name(c, hex);
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "chunk", 5, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, hex, "manifest", 8));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "chunk", 5));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, hex, "manifest", 8));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, hex));
    return kvs_conf_get(c, c->h, &key, "chunk", 5);
}

const struct kvs_conf_check KVS_CONF_NAMES[] = {
    {"names: plain ones are taken", check_plain_names},
    {"names: odd ones refused or kept, never mixed up", check_odd_names},
    {"names: no clash with keys of chunks", check_two_worlds},
    {NULL, NULL},
};
