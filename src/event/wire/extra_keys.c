// SPDX-License-Identifier: Apache-2.0
#include "event/wire/extra_keys.h"

#include "base/core/xxh.h"
#include "hash/digest.h"

/* -- strings ----------------------------------------------------------------------------------- */

/* Read a hex digest. Its first 64 bits stand for it. */
static bool digest_of(struct kv_str s, uint64_t *ret)
{
    return kve_digest(s.p, s.len, ret);
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
    const size_t prefix = sizeof(KVE_SALT_PREFIX) - 1;

    return has_salt_prefix(s) ? (struct kv_str){s.p + prefix, s.len - prefix} : s;
}

/* -- keys -------------------------------------------------------------------------------------- */

enum key_type {
    KEY_NONE,    /* the key doesn't matter to the block's hash */
    KEY_STRING,  /* untagged: text */
    KEY_OBJECT,  /* text is the name of an object, or identity is set */
    KEY_SALT,    /* text */
    KEY_ADAPTER, /* text */
    KEY_ODD,     /* untagged, of a type without meaning */
    KEY_UNKNOWN  /* tagged, with an unknown tag */
};

struct key {
    enum key_type type;
    struct kv_str text;
    uint64_t identity; /* an object's identity when it has no text */
    bool has_offset;   /* an object has an offset from the start of the block */
    int64_t offset;
};

static struct kv_str take_text(struct kv_msgpack *m)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);

    if (type == KV_MSGPACK_STR)
        return kv_msgpack_str(m);
    if (type == KV_MSGPACK_BIN)
        return kv_msgpack_bin(m);
    kv_msgpack_skip(m);
    return (struct kv_str){"", 0};
}

static void take_offset(struct kv_msgpack *m, struct key *key)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);

    key->has_offset = type == KV_MSGPACK_UINT || type == KV_MSGPACK_INT;
    if (key->has_offset)
        key->offset = (int64_t)kv_msgpack_bits64(m);
    else
        kv_msgpack_skip(m);
}

static bool is_one_of(struct kv_str s, const char *a, const char *b, const char *c)
{
    return kv_str_eq(s, a) || kv_str_eq(s, b) || kv_str_eq(s, c);
}

static enum key_type type_of_tag(struct kv_str tag)
{
    if (is_one_of(tag, "mm", "multi_modal", "MultiModalKey") ||
        is_one_of(tag, "prompt_embeds", "PromptEmbedsKey", "prompt_embeddings"))
        return KEY_OBJECT;
    if (is_one_of(tag, "cache_salt", "salt", "CacheSaltKey"))
        return KEY_SALT;
    return is_one_of(tag, "lora", "lora_name", "LoRAKey") ? KEY_ADAPTER : KEY_UNKNOWN;
}

/*
 * Read {"type": "mm", "hash": "...", "block_offset": 0}: the tag and the members that its type
 * needs.
 */
static struct key take_tagged(struct kv_msgpack *m)
{
    struct key key = {.type = KEY_UNKNOWN, .text = {"", 0}};

    for (uint32_t n = kv_msgpack_map(m); n && !kv_msgpack_failed(m); n--) {
        struct kv_str name = take_text(m);

        if (kv_str_eq(name, "type"))
            key.type = type_of_tag(take_text(m));
        else if (is_one_of(name, "hash", "mm_hash", "identifier") ||
                 is_one_of(name, "salt", "cache_salt", "value") ||
                 is_one_of(name, "name", "lora_name", "id"))
            key.text = take_text(m);
        else if (is_one_of(name, "offset", "block_offset", "start_offset"))
            take_offset(m, &key);
        else
            kv_msgpack_skip(m);
    }
    if (!key.text.len)
        key.type = KEY_UNKNOWN;
    return key;
}

/* Read ["id", offset]. */
static struct key take_pair(struct kv_msgpack *m)
{
    struct key key = {.type = KEY_ODD, .text = {"", 0}};
    uint32_t n = kv_msgpack_array(m);

    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        if (i == 0)
            key.text = take_text(m);
        else if (i == 1)
            take_offset(m, &key);
        else
            kv_msgpack_skip(m);
    }
    if (key.text.len)
        key.type = KEY_OBJECT;
    return key;
}

static struct key take_key(struct kv_msgpack *m)
{
    struct key key = {.type = KEY_ODD, .text = {"", 0}};

    switch (kv_msgpack_peek(m)) {
    case KV_MSGPACK_STR:
        key.text = kv_msgpack_str(m);
        key.type = key.text.len ? KEY_STRING : KEY_NONE;
        break;
    case KV_MSGPACK_BIN:
        key.text = kv_msgpack_bin(m);
        key.identity = kv_xxh64(key.text.p, key.text.len, 0);
        key.type = key.text.len ? KEY_OBJECT : KEY_NONE;
        key.text.len = 0;
        break;
    case KV_MSGPACK_ARRAY:
        return take_pair(m);
    case KV_MSGPACK_MAP:
        return take_tagged(m);
    case KV_MSGPACK_NIL:
        key.type = KEY_NONE;
        kv_msgpack_skip(m);
        break;
    default:
        kv_msgpack_skip(m);
    }
    return key;
}

/* Enter the list of a block's keys or objects. Returns the number of entries. */
static uint32_t enter_keys(struct kv_msgpack *m)
{
    if (kv_msgpack_peek(m) == KV_MSGPACK_ARRAY)
        return kv_msgpack_array(m);
    kv_msgpack_skip(m);
    return 0;
}

/* -- adapter, salt ----------------------------------------------------------------------------- */

/*
 * Read the first block's keys. An untagged string with the salt's prefix is the salt. At the start
 * of a chain, so is the last one that is neither the adapter nor, in an array, a digest.
 */
static void read_first_keys(const struct kve_raw_event *ev, struct kv_str *salt,
                            struct kv_str *adapter)
{
    bool adapter_seen = false;
    struct kv_msgpack m;
    uint64_t digest;

    kv_msgpack_init(&m, ev->extra_keys.p, (size_t)(ev->extra_keys.end - ev->extra_keys.p));
    if (!kv_msgpack_array(&m))
        return;
    for (uint32_t n = enter_keys(&m); n && !kv_msgpack_failed(&m); n--) {
        struct key key = take_key(&m);

        if (key.type == KEY_ADAPTER) {
            *adapter = key.text;
        } else if (key.type == KEY_SALT || (key.type == KEY_STRING && has_salt_prefix(key.text))) {
            *salt = key.text;
            return;
        } else if (key.type == KEY_STRING && !adapter_seen && same(key.text, ev->lora_name)) {
            adapter_seen = true;
        } else if (key.type == KEY_STRING && !ev->has_parent &&
                   (ev->is_map || !digest_of(key.text, &digest))) {
            *salt = key.text;
        }
    }
}

struct kv_str kve_extra_salt(const struct kve_raw_event *ev)
{
    struct kv_str salt = ev->cache_salt, adapter = {"", 0};

    if (!salt.len && ev->extra_keys.p)
        read_first_keys(ev, &salt, &adapter);
    return without_salt_prefix(salt);
}

struct kv_str kve_extra_adapter(const struct kve_raw_event *ev)
{
    struct kv_str salt = {"", 0}, adapter = ev->lora_name;

    if (!adapter.len && ev->extra_keys.p)
        read_first_keys(ev, &salt, &adapter);
    return adapter;
}

/* -- identities -------------------------------------------------------------------------------- */

void kve_extra_walk_init(struct kve_extra_walk *walk, const struct kve_raw_event *ev)
{
    const struct kve_raw_value *value = ev->mm_infos.p ? &ev->mm_infos : &ev->extra_keys;

    walk->infos = ev->mm_infos.p != NULL;
    walk->is_map = ev->is_map;
    walk->is_first = !ev->has_parent;
    walk->no_ids = walk->no_offsets = walk->placed = false;
    walk->adapter = ev->lora_name;
    walk->salt = ev->cache_salt.len ? ev->cache_salt : kve_extra_salt(ev);
    walk->left = 0;
    if (!value->p)
        return;
    kv_msgpack_init(&walk->m, value->p, (size_t)(value->end - value->p));
    walk->left = kv_msgpack_array(&walk->m);
}

/*
 * Read an untagged string. In the first block of a map it is adapter or salt, whatever its form;
 * other blocks may repeat either. Returns 1 with an identity, 0 for none, -EINVAL when the meaning
 * is unknown.
 */
static int identity_of_string(const struct kve_extra_walk *walk, struct kv_str s, uint64_t *ret)
{
    if (same(s, walk->adapter) || has_salt_prefix(s) || same(s, walk->salt) ||
        (walk->is_map && walk->is_first))
        return 0;
    if (digest_of(s, ret))
        return 1;
    return walk->is_map ? -EINVAL : 0;
}

/* Read one extra key of any kind, to its end. Returns as identity_of_string. */
static int identity_of_key(struct kve_extra_walk *walk, uint64_t *ret)
{
    struct key key = take_key(&walk->m);

    switch (key.type) {
    case KEY_OBJECT:
        *ret = key.text.len ? kve_mm_identity(key.text.p, key.text.len) : key.identity;
        if (key.has_offset && !walk->no_offsets && !walk->no_ids) {
            *ret = kve_mm_placed(*ret, key.offset);
            walk->placed = true;
        }
        return 1;
    case KEY_STRING:
        return identity_of_string(walk, key.text, ret);
    case KEY_ODD:
        return walk->is_map ? -EINVAL : 0;
    case KEY_UNKNOWN:
        return -EINVAL;
    default:
        return 0;
    }
}

/* Read an object's identity: a number, a digest, or another name. Returns false for anything else. */
static bool take_identity(struct kv_msgpack *m, uint64_t *ret)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    struct kv_str text;

    if (type == KV_MSGPACK_UINT || type == KV_MSGPACK_INT) {
        *ret = kv_msgpack_bits64(m);
        return true;
    }
    text = take_text(m);
    if (text.len)
        *ret = kve_mm_identity(text.p, text.len);
    return text.len > 0;
}

/*
 * Read {"mm_hash": 7, "offsets": ...} or [7, ...], to its end whatever it holds. Returns 1, or
 * -EPROTO for an object without an identity.
 */
static int identity_of_object(struct kv_msgpack *m, uint64_t *ret)
{
    bool map = kv_msgpack_peek(m) == KV_MSGPACK_MAP, found = false;
    uint32_t n;

    if (!map && kv_msgpack_peek(m) != KV_MSGPACK_ARRAY) {
        kv_msgpack_skip(m);
        return -EPROTO;
    }
    n = map ? kv_msgpack_map(m) : kv_msgpack_array(m);
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        bool here = !map && i == 0;

        if (map && kv_msgpack_peek(m) == KV_MSGPACK_STR)
            here = kv_str_eq(kv_msgpack_str(m), "mm_hash");
        else if (map)
            kv_msgpack_skip(m);
        if (here)
            found = take_identity(m, ret);
        else
            kv_msgpack_skip(m);
    }
    return found ? 1 : -EPROTO;
}

static int identity_of(struct kve_extra_walk *walk, uint64_t *ret)
{
    int rc;

    if (walk->infos)
        return identity_of_object(&walk->m, ret);
    rc = identity_of_key(walk, ret);
    return rc > 0 && walk->no_ids ? 0 : rc;
}

static int take_list(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    int n_mm = 0;

    for (uint32_t n = enter_keys(&walk->m); n && !kv_msgpack_failed(&walk->m); n--) {
        uint64_t identity;
        int rc = identity_of(walk, &identity);

        if (rc > 0 && n_mm == KVE_MAX_MM)
            return -E2BIG;
        if (rc < 0)
            return rc;
        if (rc)
            ret[n_mm++] = identity;
    }
    return n_mm;
}

/* Read a block's info: a map or an array around the list of objects. */
static int take_info(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    struct kv_msgpack *m = &walk->m;
    bool map = kv_msgpack_peek(m) == KV_MSGPACK_MAP;
    int n_mm = 0;

    if (!map && kv_msgpack_peek(m) != KV_MSGPACK_ARRAY) {
        bool none = kv_msgpack_nil(m);

        if (!none)
            kv_msgpack_skip(m);
        return none ? 0 : -EPROTO;
    }
    for (uint32_t n = map ? kv_msgpack_map(m) : kv_msgpack_array(m), i = 0; i < n; i++) {
        bool here = !map && i == 0;

        if (map && kv_msgpack_peek(m) == KV_MSGPACK_STR)
            here = kv_str_eq(kv_msgpack_str(m), "mm_objects");
        else if (map)
            kv_msgpack_skip(m);
        if (here && kv_msgpack_peek(m) != KV_MSGPACK_ARRAY)
            n_mm = kv_msgpack_nil(m) ? 0 : -EPROTO;
        else if (here)
            n_mm = take_list(walk, ret);
        else
            kv_msgpack_skip(m);
        if (n_mm < 0 || kv_msgpack_failed(m))
            break;
    }
    return n_mm;
}

bool kve_extra_walk_is_over(struct kve_extra_walk *walk)
{
    while (walk->left && kv_msgpack_nil(&walk->m))
        walk->left--;
    return !walk->left;
}

int kve_extra_walk_next(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM])
{
    enum kv_msgpack_type type;
    int n;

    if (!walk->left)
        return 0;
    walk->left--;
    type = kv_msgpack_peek(&walk->m);
    if (!walk->infos && walk->is_map && type != KV_MSGPACK_ARRAY && type != KV_MSGPACK_NIL)
        return -EINVAL;
    n = walk->infos ? take_info(walk, ret) : take_list(walk, ret);
    walk->is_first = false;
    return n;
}
