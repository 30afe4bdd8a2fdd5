// SPDX-License-Identifier: Apache-2.0
/*
 * A kv_store plugin to start from: copy it, rename it, replace the file system by your storage.
 *
 *     cc -O2 -shared -fPIC -fvisibility=hidden -I include -o libkv_store_template.so \
 *         kv_store_template.c
 *     KV_STORE_LIBRARY_PATH=. kvasir store conformance template:///tmp/kv
 *
 * Two rules keep the whole contract. An object is a file whose name is made of the key: "c-" and
 * hex digits for chunks, "m-" and an escaped name for manifests. A file gets its name only when its
 * bytes are on the disk. So names can't collide or escape, readers see whole objects, and threads
 * and processes need no lock. The template is slow where a real backend isn't: each put waits for
 * the disk. docs/kv-store.md describes what a good backend does besides.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kv_store_abi.h"

#define SCHEME "template://"
#define NAME_ROOM 256 /* bytes of a file name, with its NUL */
#define PLAIN "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"

/* State of a handle. It doesn't change after open, so threads share it freely. */
struct kv_store_v1 {
    int folder;
};

/* Part of temporary names, which must differ between threads and processes. */
static _Atomic unsigned long counter;

/* Print a line on stderr, without secrets, for each failure. Returns the error for the call to
 * return. */
static int complain(const char *what)
{
    int rc = -errno;

    fprintf(stderr, "kv_store_template: %s: %s\n", what, strerror(-rc));
    return rc ? rc : -EIO;
}

/* -- files ------------------------------------------------------------------------------------- */

/* Make a file name without '/' that is different for each key. Returns 0, or -1 when it is too
 * long. */
static int file_name(char kind, const void *key, size_t len, char *ret)
{
    const unsigned char *bytes = key;
    char *end = ret + NAME_ROOM - 4;

    ret += sprintf(ret, "%c-", kind);
    for (size_t i = 0; i < len; i++) {
        if (ret >= end)
            return -1;
        if (kind == 'm' && strchr(PLAIN, bytes[i]))
            *ret++ = (char)bytes[i];
        else
            ret += sprintf(ret, kind == 'm' ? "%%%02x" : "%02x", bytes[i]);
    }
    *ret = '\0';
    return len > 0 ? 0 : -1;
}

static int write_all(int fd, const uint8_t *data, size_t len)
{
    while (len > 0) {
        ssize_t n = write(fd, data, len);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        data += n;
        len -= (size_t)n;
    }
    return 0;
}

/* Write a file with these bytes to the disk, under a temporary name. */
static int write_temporary(kv_store_v1 *self, const uint8_t *data, size_t len, char *name)
{
    int fd, failed;

    sprintf(name, "t-%ld-%lu", (long)getpid(), atomic_fetch_add(&counter, 1));
    fd = openat(self->folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    failed = write_all(fd, data, len) || fsync(fd);
    if (close(fd) || failed) {
        unlinkat(self->folder, name, 0);
        return -1;
    }
    return 0;
}

/* Read a file into memory from malloc, as the contract requires. */
static int read_file(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *ret_len)
{
    int fd = openat(self->folder, name, O_RDONLY | O_CLOEXEC);
    struct stat info;
    size_t len = 0;
    uint8_t *data;
    ssize_t n = 1;

    if (fd < 0)
        return errno == ENOENT ? -ENOENT : complain("can't open an object");
    data = fstat(fd, &info) ? NULL : malloc((size_t)info.st_size + 1); /* never malloc(0) */
    while (data && n > 0 && len < (size_t)info.st_size) {
        n = read(fd, data + len, (size_t)info.st_size - len);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            len += (size_t)n;
    }
    close(fd);
    if (!data || len != (size_t)info.st_size) {
        free(data);
        return complain("can't read an object");
    }
    *ret = data;
    *ret_len = len;
    return 0;
}

/* -- the contract ------------------------------------------------------------------------------ */

static kv_store_v1 *template_open(const char *uri)
{
    const char *path = uri + strlen(SCHEME);
    kv_store_v1 *self;

    if (strncmp(uri, SCHEME, strlen(SCHEME)) != 0 || !*path) {
        fprintf(stderr, "kv_store_template: expected " SCHEME "/PATH\n");
        return NULL;
    }
    self = malloc(sizeof(*self));
    if (!self)
        return NULL;
    if (mkdir(path, 0700) && errno != EEXIST)
        complain("can't make the folder");
    self->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (self->folder < 0) {
        complain("can't open the folder");
        free(self);
        return NULL;
    }
    return self;
}

static void template_close(kv_store_v1 *self)
{
    if (!self)
        return;
    close(self->folder);
    free(self);
}

/* link() fails for all but the first of several writers, so exactly one reports a new chunk. */
static int template_put_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                              const uint8_t *data, size_t data_len)
{
    char name[NAME_ROOM], temporary[64];
    int rc = 0;

    if (file_name('c', hash, hash_len, name))
        return -EINVAL;
    if (faccessat(self->folder, name, F_OK, 0) == 0)
        return 1;
    if (write_temporary(self, data, data_len, temporary))
        return complain("can't write a chunk");
    if (linkat(self->folder, temporary, self->folder, name, 0))
        rc = errno == EEXIST ? 1 : complain("can't name a chunk");
    unlinkat(self->folder, temporary, 0);
    return rc;
}

static int template_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                              uint8_t **out_data, size_t *out_len)
{
    char name[NAME_ROOM];

    if (file_name('c', hash, hash_len, name))
        return -EINVAL;
    return read_file(self, name, out_data, out_len);
}

/* The fsync of the folder makes the names of the manifest and of all earlier chunks durable. */
static int template_put_manifest(kv_store_v1 *self, const char *manifest, const uint8_t *data,
                                 size_t data_len)
{
    char name[NAME_ROOM], temporary[64];

    if (file_name('m', manifest, strlen(manifest), name))
        return -EINVAL;
    if (fsync(self->folder) || write_temporary(self, data, data_len, temporary))
        return complain("can't write a manifest");
    if (renameat(self->folder, temporary, self->folder, name)) {
        int rc = complain("can't name a manifest");

        unlinkat(self->folder, temporary, 0);
        return rc;
    }
    return fsync(self->folder) ? complain("can't sync the folder") : 0;
}

static int template_get_manifest(kv_store_v1 *self, const char *manifest, uint8_t **out_data,
                                 size_t *out_len)
{
    char name[NAME_ROOM];

    if (file_name('m', manifest, strlen(manifest), name))
        return -EINVAL;
    return read_file(self, name, out_data, out_len);
}

static int template_delete_manifest(kv_store_v1 *self, const char *manifest)
{
    char name[NAME_ROOM];

    if (file_name('m', manifest, strlen(manifest), name))
        return -EINVAL;
    if (unlinkat(self->folder, name, 0) && errno != ENOENT)
        return complain("can't delete a manifest");
    return 0;
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static const kv_store_vtable table = {
        .version = KV_STORE_VERSION_1, /* 2 when you add prefetch_chunks */
        .open = template_open,
        .close = template_close,
        .put_chunk = template_put_chunk,
        .get_chunk = template_get_chunk,
        .put_manifest = template_put_manifest,
        .get_manifest = template_get_manifest,
        .delete_manifest = template_delete_manifest,
    };

    return &table;
}
