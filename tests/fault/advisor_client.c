// SPDX-License-Identifier: Apache-2.0
/*
 * Client of the advisor's tests: blobs as a block manager's object tier stores them, whose bytes follow
 * from their number. Block N has the key N (8 bytes, this machine's order) and BYTES bytes, under the
 * fingerprint "f".
 *
 *   advisor_client fingerprint              print its XXH3-128
 *   advisor_client keys BYTES FIRST N       print the keys of the blobs in the store
 *   advisor_client put URI BYTES FIRST N    put them, and publish
 *   advisor_client where BYTES FIRST N URI...
 *       print a line for each blob: a digit for each store, 1 has it, 0 lacks it, ! has other bytes
 *   advisor_client read URI BYTES FIRST N
 *       read random ones until standard input ends; print the number of reads, or BAD and the reason. Exit 1
 *       after a bad one
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kv_store.h"
#include "tier/object/impl.h"

static struct kvbm_object_format format;

static void key_of(uint64_t number, uint8_t ret[KVBM_OBJECT_CHUNK_KEY])
{
    kvbm_object_chunk_key(&format, 0, &number, ret);
}

/* Make the value of a blob. */
static uint8_t *value_of(uint64_t number)
{
    uint8_t *block = malloc(format.block_bytes), *value = malloc(kvbm_object_value_bytes(&format));

    if (!block || !value)
        exit(4);
    for (uint64_t i = 0; i < format.block_bytes; i++)
        block[i] = (uint8_t)(number * 31 + i * 7 + i / 251);
    kvbm_object_seal(&format, 0, &number, block, value);
    free(block);
    return value;
}

static void must(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(-rc));
    exit(3);
}

/* Compare what a store has with what it should: 1, 0, or an error. */
static int look(struct kvs_store *store, uint64_t number)
{
    uint8_t key[KVBM_OBJECT_CHUNK_KEY], *value;
    void *data = NULL;
    size_t len = 0;
    int rc;

    key_of(number, key);
    rc = kvs_get_chunk(store, key, sizeof(key), &data, &len);
    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    value = value_of(number);
    rc = len == kvbm_object_value_bytes(&format) && memcmp(data, value, len) == 0 ? 1 : -EBADMSG;
    free(value);
    free(data);
    return rc;
}

static int put(const char *uri, uint64_t first, uint64_t n)
{
    struct kvs_store *store;

    must(kvs_open(uri, &store), uri);
    for (uint64_t i = first; i < first + n; i++) {
        uint8_t key[KVBM_OBJECT_CHUNK_KEY], *value = value_of(i);

        key_of(i, key);
        must(kvs_put_chunk(store, key, sizeof(key), value, kvbm_object_value_bytes(&format)),
             "put");
        free(value);
    }
    must(kvs_put_manifest(store, "kvbm-object-test", "", 0), "publish");
    kvs_close(store);
    return 0;
}

static int where(uint64_t first, uint64_t n, int n_stores, char **uris)
{
    struct kvs_store *stores[16];

    for (int s = 0; s < n_stores && s < 16; s++)
        must(kvs_open(uris[s], &stores[s]), uris[s]);
    for (uint64_t i = first; i < first + n; i++) {
        for (int s = 0; s < n_stores; s++) {
            int rc = look(stores[s], i);

            putchar(rc == 1 ? '1' : rc == 0 ? '0' : '!');
        }
        putchar('\n');
    }
    for (int s = 0; s < n_stores; s++)
        kvs_close(stores[s]);
    return 0;
}

static int read_all(const char *uri, uint64_t first, uint64_t n)
{
    struct pollfd input = {.fd = 0, .events = POLLIN};
    uint64_t reads = 0, random = (uint64_t)time(NULL) * 2 + 1;
    struct kvs_store *store;
    int bad = 0;

    must(kvs_open(uri, &store), uri);
    puts("reading");
    fflush(stdout);
    while (poll(&input, 1, 0) == 0) {
        int rc;

        random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
        rc = look(store, first + (random >> 33) % n);
        reads++;
        if (rc != 1) {
            printf("BAD blob %" PRIu64 ": %s\n", first + (random >> 33) % n,
                   rc ? strerror(-rc) : "missing");
            bad = 1;
            break;
        }
    }
    printf("%" PRIu64 " reads\n", reads);
    kvs_close(store);
    return bad;
}

static uint64_t number(const char *text)
{
    return strtoull(text, NULL, 0);
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    bool at_end = strcmp(command, "put") == 0 || strcmp(command, "read") == 0;

    kvbm_object_format_init(&format, "f", sizeof(uint64_t), 0);
    if (strcmp(command, "fingerprint") == 0) {
        for (size_t i = 0; i < sizeof(format.fingerprint); i++)
            printf("%02x", format.fingerprint[i]);
        puts("");
        return 0;
    }
    if (argc < 5 + at_end)
        return 2;
    format.block_bytes = number(argv[2 + at_end]);
    if (strcmp(command, "put") == 0)
        return put(argv[2], number(argv[4]), number(argv[5]));
    if (strcmp(command, "read") == 0)
        return read_all(argv[2], number(argv[4]), number(argv[5]));
    if (strcmp(command, "where") == 0)
        return where(number(argv[3]), number(argv[4]), argc - 5, argv + 5);
    for (uint64_t i = number(argv[3]); i < number(argv[3]) + number(argv[4]); i++) {
        uint8_t key[KVBM_OBJECT_CHUNK_KEY];

        key_of(i, key);
        for (size_t k = 0; k < sizeof(key); k++)
            printf("%02x", key[k]);
        puts("");
    }
    return strcmp(command, "keys") ? 2 : 0;
}
