// SPDX-License-Identifier: Apache-2.0
/* Common parts of all storages: checks, registrations, small copies. */
#include "bm/storage/storage.h"

#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define MAX_BYTES (UINT64_C(1) << 62)
#define NULL_ADDR UINT64_C(0x100000000) /* address of storages without memory: any value serves */

static const char *const names[] = {
    [KVBM_STORAGE_SYSTEM] = "system",     [KVBM_STORAGE_PINNED] = "pinned",
    [KVBM_STORAGE_DEVICE] = "device",     [KVBM_STORAGE_DISK] = "disk",
    [KVBM_STORAGE_EXTERNAL] = "external", [KVBM_STORAGE_NULL] = "null",
};

static const char *name_of(enum kvbm_storage_kind kind)
{
    return kind > 0 && (size_t)kind < KV_COUNT(names) ? names[kind] : "unknown";
}

/* ---- external and null: no memory to allocate or free ---- */

static int external_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    enum kvbm_storage_kind of = opts->of ? opts->of : KVBM_STORAGE_SYSTEM;

    if (!opts->memory || of > KVBM_STORAGE_DEVICE)
        return -EINVAL;
    if (opts->bytes > UINT64_MAX - (uintptr_t)opts->memory)
        return -EINVAL;
    storage->kind = of;
    storage->addr = (uintptr_t)opts->memory;
    storage->device_id = of == KVBM_STORAGE_DEVICE ? opts->device_id : 0;
    if (of == KVBM_STORAGE_DEVICE)
        storage->ops = &kvbm_storage_external_device; /* it copies, and frees nothing */
    return 0;
}

static int null_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    (void)opts;
    storage->addr = NULL_ADDR;
    return 0;
}

static int null_read(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len)
{
    (void)storage, (void)offset, (void)to, (void)len;
    return -ENXIO;
}

static int null_write(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len)
{
    (void)storage, (void)offset, (void)from, (void)len;
    return -ENXIO;
}

static const struct kvbm_storage_ops external = {.open = external_open};
static const struct kvbm_storage_ops null = {
    .open = null_open, .read = null_read, .write = null_write};

/* ---- creating ---- */

static const struct kvbm_storage_ops *ops_of(enum kvbm_storage_kind kind)
{
    switch (kind) {
    case KVBM_STORAGE_SYSTEM:
        return &kvbm_storage_system;
    case KVBM_STORAGE_PINNED:
        return &kvbm_storage_pinned;
    case KVBM_STORAGE_DEVICE:
        return &kvbm_storage_device;
    case KVBM_STORAGE_DISK:
        return &kvbm_storage_disk;
    case KVBM_STORAGE_EXTERNAL:
        return &external;
    case KVBM_STORAGE_NULL:
        return &null;
    default:
        return NULL;
    }
}

int kvbm_storage_create(const struct kvbm_storage_opts *opts, struct kvbm_storage **ret)
{
    struct kvbm_storage_opts o = {0};
    struct kvbm_storage *storage;
    int err;

    if (!kv_sized(opts, "kvbm_storage_opts") || !ret ||
        opts->size < offsetof(struct kvbm_storage_opts, huge_pages))
        return -EINVAL;
    memcpy(&o, opts, KV_MIN(opts->size, sizeof(o)));
    if (!ops_of(o.kind) || !o.bytes || o.bytes > MAX_BYTES)
        return -EINVAL;
    storage = calloc(1, sizeof(*storage));
    if (!storage)
        return -ENOMEM;
    storage->ops = ops_of(o.kind);
    storage->kind = o.kind;
    storage->bytes = o.bytes;
    storage->fd = -1;
    pthread_mutex_init(&storage->lock, NULL);
    err = storage->ops->open(storage, &o);
    if (err < 0) {
        kv_log_warn("kvbm", "storage not created", "kind=%s bytes=%llu errno=%d", name_of(o.kind),
                    (unsigned long long)o.bytes, -err);
        pthread_mutex_destroy(&storage->lock);
        free(storage);
        return err;
    }
    *ret = storage;
    return 0;
}

void kvbm_storage_destroy(struct kvbm_storage *storage)
{
    if (!storage)
        return;
    for (struct kvbm_registration *one; (one = storage->registrations) != NULL;) {
        storage->registrations = one->next;
        one->release(one->arg);
        free(one);
    }
    if (storage->ops->close)
        storage->ops->close(storage);
    pthread_mutex_destroy(&storage->lock);
    free(storage->path);
    free(storage);
}

/* ---- accessors ---- */

enum kvbm_storage_kind kvbm_storage_get_kind(const struct kvbm_storage *storage)
{
    return storage ? storage->kind : 0;
}

uint64_t kvbm_storage_bytes(const struct kvbm_storage *storage)
{
    return storage ? storage->bytes : 0;
}

uint64_t kvbm_storage_addr(const struct kvbm_storage *storage)
{
    return storage ? storage->addr : 0;
}

uint64_t kvbm_storage_device_id(const struct kvbm_storage *storage)
{
    if (!storage)
        return 0;
    return storage->kind == KVBM_STORAGE_DISK ? (uint64_t)storage->fd : storage->device_id;
}

void *kvbm_storage_host_memory(const struct kvbm_storage *storage)
{
    bool host =
        storage && (storage->kind == KVBM_STORAGE_SYSTEM || storage->kind == KVBM_STORAGE_PINNED);

    return host ? (void *)(uintptr_t)storage->addr : NULL;
}

/* ---- copies ---- */

static int check_range(const struct kvbm_storage *storage, uint64_t offset, const void *memory,
                       size_t len)
{
    if (!storage || (len && !memory))
        return -EINVAL;
    return offset > storage->bytes || len > storage->bytes - offset ? -ERANGE : 0;
}

int kvbm_storage_read(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len)
{
    int err = check_range(storage, offset, to, len);

    if (err < 0 || !len)
        return err;
    if (storage->ops->read)
        return storage->ops->read(storage, offset, to, len);
    memcpy(to, (const char *)(uintptr_t)storage->addr + offset, len);
    return 0;
}

int kvbm_storage_write(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len)
{
    int err = check_range(storage, offset, from, len);

    if (err < 0 || !len)
        return err;
    if (storage->ops->write)
        return storage->ops->write(storage, offset, from, len);
    memcpy((char *)(uintptr_t)storage->addr + offset, from, len);
    return 0;
}

/* ---- registrations ---- */

/* Find the link that holds the registration. The lock is held. */
static struct kvbm_registration **find(struct kvbm_storage *storage, const char *name)
{
    struct kvbm_registration **at = &storage->registrations;

    while (*at && strcmp((*at)->name, name) != 0)
        at = &(*at)->next;
    return at;
}

int kvbm_storage_register(struct kvbm_storage *storage, const char *name,
                          void (*release)(void *arg), void *arg)
{
    struct kvbm_registration *one;
    size_t len;
    int err = 0;

    if (!storage || !name || !release)
        return -EINVAL;
    len = strlen(name) + 1;
    one = malloc(sizeof(*one) + len);
    if (!one)
        return -ENOMEM;
    memcpy(one->name, name, len);
    one->release = release;
    one->arg = arg;
    pthread_mutex_lock(&storage->lock);
    if (*find(storage, name)) {
        err = -EEXIST;
    } else {
        one->next = storage->registrations;
        storage->registrations = one;
    }
    pthread_mutex_unlock(&storage->lock);
    if (err < 0)
        free(one);
    return err;
}

void *kvbm_storage_registration(const struct kvbm_storage *storage, const char *name)
{
    struct kvbm_storage *s = (struct kvbm_storage *)(uintptr_t)storage; /* to use its lock */
    struct kvbm_registration *one;
    void *arg;

    if (!storage || !name)
        return NULL;
    pthread_mutex_lock(&s->lock);
    one = *find(s, name);
    arg = one ? one->arg : NULL;
    pthread_mutex_unlock(&s->lock);
    return arg;
}

int kvbm_storage_unregister(struct kvbm_storage *storage, const char *name)
{
    struct kvbm_registration **at, *one;

    if (!storage || !name)
        return -EINVAL;
    pthread_mutex_lock(&storage->lock);
    at = find(storage, name);
    one = *at;
    if (one)
        *at = one->next;
    pthread_mutex_unlock(&storage->lock);
    if (!one)
        return -ENOENT;
    one->release(one->arg);
    free(one);
    return 0;
}

/* ---- allocators ---- */

static int allocate_like(void *arg, uint64_t bytes, struct kvbm_storage **ret)
{
    struct kvbm_storage_opts opts = {0};

    if (!kv_sized(arg, "kvbm_storage_opts"))
        return -EINVAL;
    memcpy(&opts, arg, KV_MIN(((const struct kvbm_storage_opts *)arg)->size, sizeof(opts)));
    opts.size = sizeof(opts);
    opts.bytes = bytes;
    return kvbm_storage_create(&opts, ret);
}

struct kvbm_allocator kvbm_allocator_of(const struct kvbm_storage_opts *opts)
{
    return (struct kvbm_allocator){
        .size = sizeof(struct kvbm_allocator),
        .allocate = allocate_like,
        .arg = (void *)(uintptr_t)opts,
    };
}
