// SPDX-License-Identifier: Apache-2.0
/* A plugin that breaks the contract on request: $BROKEN_TABLE chooses the tables that its symbols
 * return, the URI (broken://HOW) the behaviour of its functions. test_plugin.c loads it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kv_store_abi.h"
#include "kv_store_ext.h"

struct kv_store_v1 {
    char uri[200];
};

static int told(const kv_store_v1 *self, const char *how)
{
    return strstr(self->uri, how) != NULL;
}

static kv_store_v1 *open_broken(const char *uri)
{
    kv_store_v1 *self = strstr(uri, "refuse") ? NULL : calloc(1, sizeof(*self));

    if (self)
        strncpy(self->uri, uri, sizeof(self->uri) - 1);
    return self;
}

static void close_broken(kv_store_v1 *self)
{
    free(self);
}

/* -1: many backends know no other. */
static int rc(const kv_store_v1 *self)
{
    return told(self, "rc7")    ? 7
           : told(self, "fail") ? -1
           : told(self, "gone") ? -ENOENT
           : told(self, "wild") ? -2000000000
                                : 0;
}

static int put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
               size_t len)
{
    (void)hash, (void)hash_len, (void)len;
    return data ? rc(self) : -1; /* some would crash */
}

static int hand_out(kv_store_v1 *self, uint8_t **ret, size_t *ret_len)
{
    if (rc(self))
        return rc(self);
    if (told(self, "nothing")) /* success, and both outputs as they were */
        return 0;
    *ret_len = told(self, "huge") ? SIZE_MAX / 2 : told(self, "long") ? 100000 : 16;
    *ret = told(self, "null") ? NULL : calloc(1, 16);
    return 0;
}

static int get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
               size_t *ret_len)
{
    (void)hash, (void)hash_len;
    return hand_out(self, ret, ret_len);
}

static int put_name(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    (void)name, (void)len;
    return data ? rc(self) : -1;
}

static int get_name(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *ret_len)
{
    if (strcmp(name, "uri") == 0) {
        *ret = (uint8_t *)strdup(self->uri);
        *ret_len = strlen(self->uri);
        return 0;
    }
    return hand_out(self, ret, ret_len);
}

static int delete_name(kv_store_v1 *self, const char *name)
{
    (void)name;
    return rc(self);
}

static int prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    (void)hashes, (void)hash_len, (void)n;
    return told(self, "rc7") ? 7 : -1;
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static kv_store_vtable table;
    const char *how = getenv("BROKEN_TABLE");

    table = (kv_store_vtable){2,        open_broken, close_broken, put,     get,
                              put_name, get_name,    delete_name,  prefetch};
    if (!how)
        return &table;
    if (strcmp(how, "null") == 0)
        return NULL;
    if (strcmp(how, "v0") == 0)
        table.version = 0;
    if (strcmp(how, "v1") == 0)
        table.version = 1; /* what lies in prefetch_chunks then means nothing */
    if (strcmp(how, "v99") == 0)
        table.version = 99;
    if (strncmp(how, "hole", 4) == 0) /* hole0: open, hole1: close, ... */
        memset((char *)&table + offsetof(kv_store_vtable, open) +
                   (size_t)(how[4] - '0') * sizeof(table.open),
               0, sizeof(table.open));
    return &table;
}

const kv_store_ext *kv_store_get_ext(void)
{
    static kv_store_ext table;
    const char *how = getenv("BROKEN_EXT");

    table = (kv_store_ext){.size = sizeof(table), .version = KV_STORE_EXT_VERSION};
    if (!how)
        return NULL;
    if (strcmp(how, "short") == 0)
        table.size = 4;
    if (strcmp(how, "v9") == 0)
        table.version = 9;
    return &table;
}
