// SPDX-License-Identifier: Apache-2.0
#include "event/extra_keys.h"

#include "base/xxh.h"

#define DIGEST_DIGITS 64 /* a 256-bit digest in hex */

/* -- strings ----------------------------------------------------------------------------------- */

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* A hex digest stands for its first 64 bits. */
static bool digest_of(struct kv_str s, uint64_t *ret)
{
    uint64_t value = 0;

    if (s.len != DIGEST_DIGITS)
        return false;
    for (size_t i = 0; i < s.len; i++) {
        int digit = hex_digit(s.p[i]);

        if (digit < 0)
            return false;
        if (i < 16)
            value = value << 4 | (uint64_t)digit;
    }
    *ret = value;
    return true;
}

static bool same(struct kv_str a, struct kv_str b)
{
    return a.len == b.len && a.len && memcmp(a.p, b.p, a.len) == 0;
}

static bool has_salt_prefix(struct kv_str s)
{
    return s.len >= sizeof(KVE_SALT_PREFIX) - 1 &&
           memcmp(s.p, KVE_SALT_PREFIX, sizeof(KVE_SALT_PREFIX) - 1) == 0;
}

static struct kv_str without_salt_prefix(struct kv_str s)
{
    size_t prefix = has_salt_prefix(s) ? sizeof(KVE_SALT_PREFIX) - 1 : 0;

    return (struct kv_str){s.p + prefix, s.len - prefix};
}

/* -- salt -------------------------------------------------------------------------------------- */

/*
 * A bare string in the first block is the salt when it says so by its prefix; or, where a chain
 * starts, when it is neither the adapter nor a digest. The salt comes after the objects: the last
 * counts.
 */
static struct kv_str salt_in_keys(const struct kve_raw_event *ev)
{
    struct kv_str found = {"", 0};
    struct kv_msgpack m;
    uint64_t digest;

    kv_msgpack_init(&m, ev->extra_keys.p, (size_t)(ev->extra_keys.end - ev->extra_keys.p));
    if (!kv_msgpack_array(&m) || kv_msgpack_peek(&m) != KV_MSGPACK_ARRAY)
        return found;
    for (uint32_t n = kv_msgpack_array(&m); n && !kv_msgpack_failed(&m); n--) {
        struct kv_str s;

        if (kv_msgpack_peek(&m) != KV_MSGPACK_STR) {
            kv_msgpack_skip(&m);
            continue;
        }
        s = kv_msgpack_str(&m);
        if (has_salt_prefix(s))
            return without_salt_prefix(s);
        if (!ev->has_parent && !same(s, ev->lora_name) && !digest_of(s, &digest))
            found = s;
    }
    return found;
}

struct kv_str kve_extra_salt(const struct kve_raw_event *ev)
{
    if (ev->cache_salt.len)
        return without_salt_prefix(ev->cache_salt);
    return ev->extra_keys.p ? salt_in_keys(ev) : (struct kv_str){"", 0};
}

/* -- identities -------------------------------------------------------------------------------- */

void kve_extra_walk_init(struct kve_extra_walk *walk, const struct kve_raw_event *ev)
{
    const struct kve_raw_value *value = ev->mm_infos.p ? &ev->mm_infos : &ev->extra_keys;

    walk->infos = ev->mm_infos.p != NULL;
    walk->salt = ev->cache_salt;
    walk->left = 0;
    if (!value->p)
        return;
    kv_msgpack_init(&walk->m, value->p, (size_t)(value->end - value->p));
    walk->left = kv_msgpack_array(&walk->m);
}

static bool identity_of_str(struct kv_str s, bool bare, struct kv_str salt, uint64_t *ret)
{
    if (bare && same(s, salt))
        return false;
    if (digest_of(s, ret))
        return true;
    /* Bare, it may be an adapter or a salt as well: only a pair is sure to name an object. */
    if (bare || !s.len)
        return false;
    *ret = kv_xxh64(s.p, s.len, 0);
    return true;
}

/* One extra key, taken whatever it is. */
static bool identity_of_key(struct kve_extra_walk *walk, uint64_t *ret)
{
    struct kv_msgpack *m = &walk->m;
    struct kv_str s;
    bool found = false;

    switch (kv_msgpack_peek(m)) {
    case KV_MSGPACK_STR:
        return identity_of_str(kv_msgpack_str(m), true, walk->salt, ret);
    case KV_MSGPACK_BIN:
        s = kv_msgpack_bin(m);
        *ret = kv_xxh64(s.p, s.len, 0);
        return s.len > 0;
    case KV_MSGPACK_ARRAY:
        for (uint32_t n = kv_msgpack_array(m), i = 0; i < n && !kv_msgpack_failed(m); i++) {
            if (i == 0 && kv_msgpack_peek(m) == KV_MSGPACK_STR)
                found = identity_of_str(kv_msgpack_str(m), false, walk->salt, ret);
            else
                kv_msgpack_skip(m);
        }
        return found;
    default:
        kv_msgpack_skip(m);
        return false;
    }
}

/* {"mm_hash": 7, "offsets": ...} or [7, ...], taken whatever it is. */
static bool identity_of_object(struct kv_msgpack *m, uint64_t *ret)
{
    bool map = kv_msgpack_peek(m) == KV_MSGPACK_MAP, found = false;
    uint32_t n;

    if (!map && kv_msgpack_peek(m) != KV_MSGPACK_ARRAY) {
        kv_msgpack_skip(m);
        return false;
    }
    n = map ? kv_msgpack_map(m) : kv_msgpack_array(m);
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        bool here = !map && i == 0;
        enum kv_msgpack_type type;

        if (map && kv_msgpack_peek(m) == KV_MSGPACK_STR)
            here = kv_str_eq(kv_msgpack_str(m), "mm_hash");
        else if (map)
            kv_msgpack_skip(m);
        type = kv_msgpack_peek(m);
        if (here && (type == KV_MSGPACK_UINT || type == KV_MSGPACK_INT)) {
            *ret = kv_msgpack_bits64(m);
            found = true;
        } else {
            kv_msgpack_skip(m);
        }
    }
    return found;
}

/* Enters the list of a block's keys or objects. Returns how many follow. */
static uint32_t enter_keys(struct kv_msgpack *m)
{
    if (kv_msgpack_peek(m) == KV_MSGPACK_ARRAY)
        return kv_msgpack_array(m);
    kv_msgpack_skip(m);
    return 0;
}

static int take_list(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    int n_mm = 0;

    for (uint32_t n = enter_keys(&walk->m); n && !kv_msgpack_failed(&walk->m); n--) {
        uint64_t identity;

        if (!(walk->infos ? identity_of_object(&walk->m, &identity)
                          : identity_of_key(walk, &identity)))
            continue;
        if (n_mm == KVE_MAX_MM)
            return -E2BIG;
        ret[n_mm++] = identity;
    }
    return n_mm;
}

/* A block's info is a map or an array around the list of objects. */
static int take_info(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    struct kv_msgpack *m = &walk->m;
    bool map = kv_msgpack_peek(m) == KV_MSGPACK_MAP;
    int n_mm = 0;

    if (!map && kv_msgpack_peek(m) != KV_MSGPACK_ARRAY) {
        kv_msgpack_skip(m);
        return 0;
    }
    for (uint32_t n = map ? kv_msgpack_map(m) : kv_msgpack_array(m), i = 0; i < n; i++) {
        bool here = !map && i == 0;

        if (map && kv_msgpack_peek(m) == KV_MSGPACK_STR)
            here = kv_str_eq(kv_msgpack_str(m), "mm_objects");
        else if (map)
            kv_msgpack_skip(m);
        if (here)
            n_mm = take_list(walk, ret);
        else
            kv_msgpack_skip(m);
        if (n_mm < 0 || kv_msgpack_failed(m))
            break;
    }
    return n_mm;
}

int kve_extra_walk_next(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    if (!walk->left)
        return 0;
    walk->left--;
    return walk->infos ? take_info(walk, ret) : take_list(walk, ret);
}
