// SPDX-License-Identifier: Apache-2.0
/* pack: chunks of a tiered store's member into few long objects. */
#include <stdio.h>

#include "base/core/ascii.h"
#include "cli/show/format.h"
#include "cli/store/store.h"
#include "store/backend/store.h"

enum { KEY = 16, LINE = 2 * KVS_HASH_MAX + 2 };

/* Keys to be packed, in order. All have one length. */
struct keys {
    struct kv_buf bytes;
    size_t len; /* of each; 0: none yet */
};

/* -- of objects -------------------------------------------------------------------------------- */

struct names {
    const char *prefix;
    struct kv_buf text; /* each with its end */
    size_t n;
};

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct names *names = arg;

    if (names->prefix && strncmp(entry->name, names->prefix, strlen(names->prefix)) != 0)
        return 0;
    kv_buf_append(&names->text, entry->name, strlen(entry->name) + 1);
    names->n++;
    return names->text.error;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Add an object's chunks. Objects of other formats, and those removed meanwhile, have none to be packed. */
static int add_object(struct kvs_store *store, const char *name, struct keys *keys)
{
    const struct kvs_chunk_ref *chunks;
    struct kvs_manifest *m;
    size_t n;
    int rc = kvs_manifest_get(store, name, &m);

    if (rc == -ENOENT || rc == -EMEDIUMTYPE)
        return 0;
    if (rc < 0)
        return rc;
    keys->len = KEY;
    chunks = kvs_manifest_chunks(m, &n);
    for (size_t i = 0; i < n; i++)
        kv_buf_append(&keys->bytes, chunks[i].key, KEY);
    kvs_manifest_free(m);
    return keys->bytes.error;
}

/* Objects in order of their names: those that begin alike become neighbours. */
static int keys_of_objects(struct kc_store_call *call, struct keys *keys)
{
    struct names names = {.prefix = call->opts.prefix};
    int rc = kvs_list(call->store, note_name, &names);
    const char **order = calloc(names.n + 1, sizeof(*order));
    size_t at = 0;

    if (rc == 0 && !order)
        rc = -ENOMEM;
    for (size_t i = 0; rc == 0 && i < names.n; i++) {
        order[i] = names.text.data + at;
        at += strlen(order[i]) + 1;
    }
    if (rc == 0)
        qsort(order, names.n, sizeof(*order), by_text);
    for (size_t i = 0; rc == 0 && i < names.n; i++)
        rc = kc_bar_interrupted() ? -ECANCELED : add_object(call->store, order[i], keys);
    free(order);
    kv_buf_fini(&names.text);
    return rc;
}

/* -- of a file --------------------------------------------------------------------------------- */

/* Read a key of hexadecimal digits. False: it is none, or has another length than those before. */
static bool add_line(char *line, struct keys *keys)
{
    size_t n = strcspn(line, "\r\n");

    line[n] = '\0';
    if (n == 0)
        return true;
    if (n % 2 || n > (size_t)2 * KVS_HASH_MAX || (keys->len && keys->len != n / 2) ||
        strspn(line, "0123456789abcdef") != n)
        return false;
    keys->len = n / 2;
    for (size_t i = 0; i < n; i += 2) {
        char pair[3] = {line[i], line[i + 1], '\0'};

        kv_buf_putc(&keys->bytes, (char)strtoul(pair, NULL, 16));
    }
    return true;
}

/* Returns 0, an errno of the file, or -EPROTO with the number of the wrong line. */
static int keys_of_file(const char *path, struct keys *keys, unsigned *ret_line)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    char line[LINE + 2];
    int rc = 0;

    if (!file)
        return -errno;
    for (*ret_line = 1; rc == 0 && fgets(line, sizeof(line), file); ++*ret_line)
        rc = add_line(line, keys) ? keys->bytes.error : -EPROTO;
    if (rc == 0 && ferror(file))
        rc = -EIO;
    if (file != stdin)
        fclose(file);
    return rc;
}

/* -- the command ------------------------------------------------------------------------------- */

static int print_packed(struct kc_store_call *call, const kv_store_packed *r, int status)
{
    if (!call->opts.json) {
        printf("%s packs of %s written; %s chunks are in packs, %s single ones removed",
               kc_count(r->packs).s, kc_bytes((double)r->packed_bytes).s, kc_count(r->packed).s,
               kc_count(r->removed).s);
        if (r->in_use)
            printf("; %s in use", kc_count(r->in_use).s);
        if (r->left)
            printf("; %s left, too few or too long", kc_count(r->left).s);
        if (r->missing)
            printf("; %s not there", kc_count(r->missing).s);
        if (r->errors)
            printf("; %s failed", kc_count(r->errors).s);
        putchar('\n');
        return status;
    }
    kc_store_json_begin(call);
    kc_store_json_u64(call, "packs", r->packs);
    kc_store_json_u64(call, "packed_bytes", r->packed_bytes);
    kc_store_json_u64(call, "packed", r->packed);
    kc_store_json_u64(call, "removed", r->removed);
    kc_store_json_u64(call, "in_use", r->in_use);
    kc_store_json_u64(call, "left", r->left);
    kc_store_json_u64(call, "missing", r->missing);
    kc_store_json_u64(call, "errors", r->errors);
    return kc_store_json_end(call, stdout, status);
}

static int pack(struct kc_store_call *call, const struct keys *keys)
{
    const struct kc_store_opts *o = &call->opts;
    kv_store_pack_opts opts = {.size = sizeof(opts),
                               .to = o->to,
                               .from = o->from,
                               .min_bytes = o->least,
                               .max_bytes = o->most,
                               .idle_s = o->idle_ms / 1000};
    kv_store_packed packed = {.size = sizeof(packed)};
    size_t len = keys->len ? keys->len : KEY;
    int rc = kvs_pack_chunks(call->store, &opts, keys->bytes.data ? keys->bytes.data : "", len,
                             keys->bytes.len / len, &packed);

    if (rc == -ENOTSUP)
        return kc_store_fail_as(call, "only a tiered store with a folder or a bucket has packs",
                                KC_STORE_FAILED);
    if (rc == -ENOENT)
        return kc_store_fail_as(call, "the store has no such member", KC_STORE_FAILED);
    if (rc == -EROFS)
        return kc_store_fail_as(call, "the member is read-only", KC_STORE_FAILED);
    if (rc < 0)
        return kc_store_fail(call, call->label, rc);
    return print_packed(call, &packed, packed.errors ? KC_STORE_FAILED : KC_STORE_OK);
}

int kc_store_pack(struct kc_store_call *call)
{
    const char *file = call->opts.keys;
    struct keys keys = {.len = 0};
    char text[64];
    unsigned line = 0;
    int rc, status;

    if (!call->opts.to)
        return kc_store_fail_as(call, "--to MEMBER says where the packs go", KC_STORE_USAGE);
    rc = file ? keys_of_file(file, &keys, &line) : keys_of_objects(call, &keys);
    snprintf(text, sizeof(text), "line %u is no key like those before", line - 1);
    if (file && rc < 0)
        status = rc == -EPROTO ? kc_store_fail_as(call, text, KC_STORE_FAILED)
                               : kc_store_fail_file(call, file, rc);
    else
        status = rc == -ECANCELED ? KC_STORE_INTERRUPTED
                 : rc < 0         ? kc_store_fail(call, call->label, rc)
                                  : pack(call, &keys);
    kv_buf_fini(&keys.bytes);
    return status;
}
