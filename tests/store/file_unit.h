// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of the file store: a directory per test, and short forms of put and get. */
#ifndef KV_TESTS_STORE_FILE_UNIT_H
#define KV_TESTS_STORE_FILE_UNIT_H

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/log.h"
#include "store/backend/file.h"
#include "store/file/file_impl.h"
#include "support.h"

extern char unit_dir[128];

int unit_make_dir(void **state);

int unit_rm_dir(void **state);

kv_store_v1 *unit_open(const char *options);

void unit_key(uint8_t key[8], uint64_t n);

int unit_put(kv_store_v1 *h, uint64_t n, const void *data, size_t len);

/** 0 and the expected bytes, or a negative value. */
int unit_get(kv_store_v1 *h, uint64_t n, const void *want, size_t want_len);

int unit_publish(kv_store_v1 *h, const char *name, const char *text);

/** As kvs_save does it: the head of a manifest that names its chunks itself (here none). */
int unit_publish_own(kv_store_v1 *h, const char *name);

void unit_path(char path[512], uint64_t n);

/** Files in a folder of the store. */
int unit_count(const char *folder);

void unit_write(const char *path, const void *data, size_t len);

#endif
