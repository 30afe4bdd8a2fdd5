// SPDX-License-Identifier: Apache-2.0
#include "file_unit.h"
#include "support.h"

char unit_dir[128];

static void unit_quiet(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    (void)level;
    (void)line;
    (void)len;
}

int unit_make_dir(void **state)
{
    (void)state;
    kv_log_set_sink(unit_quiet, NULL);
    return disk_dir(unit_dir, sizeof(unit_dir));
}

int unit_rm_dir(void **state)
{
    (void)state;
    return remove_dir(unit_dir);
}

kv_store_v1 *unit_open(const char *options)
{
    char uri[256];
    kv_store_v1 *h;

    snprintf(uri, sizeof(uri), "%s%s", unit_dir, options);
    h = kvs_file_vtable()->open(uri);
    assert_non_null(h);
    return h;
}

void unit_key(uint8_t key[8], uint64_t n)
{
    for (int i = 0; i < 8; i++) /* spread over the fan-out */
        key[i] = (uint8_t)((n + 1) * UINT64_C(0x9e3779b97f4a7c15) >> (56 - 8 * i));
}

int unit_put(kv_store_v1 *h, uint64_t n, const void *data, size_t len)
{
    uint8_t key[8];

    unit_key(key, n);
    return kvs_file_vtable()->put_chunk(h, key, 8, data, len);
}

int unit_get(kv_store_v1 *h, uint64_t n, const void *want, size_t want_len)
{
    uint8_t key[8], *data = NULL;
    size_t len = 0;
    int rc;

    unit_key(key, n);
    rc = kvs_file_vtable()->get_chunk(h, key, 8, &data, &len);
    if (rc == 0) {
        assert_non_null(data);
        assert_int_equal(len, want_len);
        assert_memory_equal(data, want, want_len);
        free(data);
    } else {
        assert_null(data);
    }
    return rc;
}

int unit_publish(kv_store_v1 *h, const char *name, const char *text)
{
    return kvs_file_vtable()->put_manifest(h, name, (const uint8_t *)text, strlen(text));
}

int unit_publish_own(kv_store_v1 *h, const char *name)
{
    return kvs_file_vtable()->put_manifest(h, name, (const uint8_t *)"KVS-OBJ\n\1\0", 10);
}

void unit_path(char path[512], uint64_t n)
{
    char hex[KVS_FILE_HEX];
    uint8_t key[8];

    unit_key(key, n);
    kvs_file_hex(hex, key, 8);
    snprintf(path, 512, "%s/chunks/%c/%s", unit_dir, hex[0], hex);
}

int unit_count(const char *folder)
{
    char path[512];
    DIR *dir;
    int n = 0;

    snprintf(path, sizeof(path), "%s/%s", unit_dir, folder);
    dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));)
        n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

void unit_write(const char *path, const void *data, size_t len)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, len), len);
    close(fd);
}
