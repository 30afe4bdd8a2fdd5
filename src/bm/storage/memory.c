// SPDX-License-Identifier: Apache-2.0
/* Estimate of the memory that is left. The kernel grants any amount, and kills a process that
 * touches too much. */
#include "bm/storage/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define LITTLE ((uint64_t)16 << 20)
#define PATH 4096

/* ---- files of numbers ---- */

/* Parse the number that a text begins with. False: none, or too large. */
static bool number_in(const char *text, uint64_t *ret)
{
    char *end;

    errno = 0;
    *ret = strtoull(text, &end, 10);
    return end != text && !errno && !strchr(text, '-');
}

/* Read the number in a file. UINT64_MAX for "max" and for files that can't be read. */
static uint64_t read_number(const char *path)
{
    uint64_t number = UINT64_MAX;
    FILE *file = fopen(path, "re");
    char line[64];

    if (!file)
        return UINT64_MAX;
    if (!fgets(line, sizeof(line), file) || !number_in(line, &number))
        number = UINT64_MAX;
    fclose(file);
    return number;
}

/* Skip the "Node 0 " at the start of a line, which the files of NUMA nodes have. */
static const char *after_node(const char *line)
{
    const char *at = line;

    if (!strncmp(line, "Node ", 5))
        at = line + 5 + strspn(line + 5, "0123456789");
    return *at == ' ' ? at + 1 : line;
}

/* Sum the numbers that follow these words at the beginning of lines. -1: none was found. */
static int64_t read_words(const char *path, const char *const *words, size_t n)
{
    char line[256];
    int64_t sum = -1;
    uint64_t number;
    FILE *file = fopen(path, "re");

    if (!file)
        return -1;
    while (fgets(line, sizeof(line), file)) {
        const char *word = after_node(line);
        size_t len = strcspn(word, ": ");

        if (!number_in(word + len + strspn(word + len, ": "), &number))
            continue;
        for (size_t i = 0; i < n; i++) {
            if (strlen(words[i]) == len && !memcmp(word, words[i], len))
                sum = KV_MAX(sum, 0) + (int64_t)KV_MIN(number, (uint64_t)INT64_MAX / 8);
        }
    }
    fclose(file);
    return sum;
}

static uint64_t machine(const char *root)
{
    static const char *const words[] = {"MemAvailable", "SwapFree"};
    char path[PATH];
    int64_t kib;

    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (read_words(path, words, 1) < 0) /* a figure for swap alone is useless */
        return UINT64_MAX;
    kib = read_words(path, words, KV_COUNT(words));
    return kib > INT64_MAX / 1024 ? UINT64_MAX : (uint64_t)kib * 1024;
}

/* ---- cgroups ---- */

/* File names of a cgroup version: versions 1 and 2 name the same values differently. */
struct version {
    const char *mounted, *limit, *usage;
    /* keys of memory.stat: reclaimable file pages, including those of child groups */
    const char *caches[2];
};
static const struct version v1 = {"/sys/fs/cgroup/memory",
                                  "memory.limit_in_bytes",
                                  "memory.usage_in_bytes",
                                  {"total_inactive_file", "total_active_file"}};
static const struct version v2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}};

static uint64_t group_left(const char *root, const struct version *v, const char *group)
{
    char path[PATH];
    uint64_t limit, usage;
    int64_t cache;

    snprintf(path, sizeof(path), "%s%s%s/%s", root, v->mounted, group, v->limit);
    limit = read_number(path);
    if (limit == UINT64_MAX)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s%s%s/%s", root, v->mounted, group, v->usage);
    usage = read_number(path);
    if (usage == UINT64_MAX)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s%s%s/memory.stat", root, v->mounted, group);
    cache = read_words(path, v->caches, KV_COUNT(v->caches));
    usage -= cache > 0 ? KV_MIN((uint64_t)cache, usage) : 0;
    return limit > usage ? limit - usage : 0;
}

/* Return the least room of a group and all groups above it; shortens @group on the way. In a
 * container the process's own path may not exist below @root; then the root of the mount limits. */
static uint64_t groups_left(const char *root, const struct version *v, char *group)
{
    uint64_t least = group_left(root, v, ""), left;
    char *slash;

    while ((slash = strrchr(group, '/')) != NULL) {
        left = group_left(root, v, group);
        least = KV_MIN(least, left);
        *slash = 0;
    }
    return least;
}

/* Return the group in a line of /proc/self/cgroup if that group limits memory: "0::/a/b",
 * "4:cpu,memory:/a". */
static char *group_of(char *line, const struct version **v)
{
    char *controllers = strchr(line, ':'),
         *group = controllers ? strchr(controllers + 1, ':') : NULL;

    if (!group)
        return NULL;
    *group++ = 0;
    group[strcspn(group, "\n")] = 0;
    controllers++;
    if (!*controllers) {
        *v = &v2;
        return group;
    }
    for (char *save, *one = strtok_r(controllers, ",", &save); one;
         one = strtok_r(NULL, ",", &save)) {
        if (!strcmp(one, "memory")) {
            *v = &v1;
            return group;
        }
    }
    return NULL;
}

static uint64_t cgroups(const char *root)
{
    char line[PATH], path[PATH];
    uint64_t least = UINT64_MAX;
    FILE *file;

    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), file)) {
        const struct version *v = NULL;
        char *group = group_of(line, &v);

        uint64_t left = group ? groups_left(root, v, group) : UINT64_MAX;

        least = KV_MIN(least, left);
    }
    fclose(file);
    return least;
}

uint64_t kvbm_memory_available(const char *root)
{
    uint64_t here = machine(root), group = cgroups(root);

    return KV_MIN(here, group);
}

uint64_t kvbm_node_available(const char *root, uint32_t node)
{
    static const char *const words[] = {"MemFree", "Active(file)", "Inactive(file)",
                                        "SReclaimable"};
    static const char *const swap[] = {"SwapFree"};
    int64_t kib, more;
    char path[PATH];

    snprintf(path, sizeof(path), "%s/sys/devices/system/node/node%" PRIu32 "/meminfo", root, node);
    kib = read_words(path, words, KV_COUNT(words));
    if (kib < 0)
        return UINT64_MAX;
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    more = read_words(path, swap, KV_COUNT(swap));
    kib += KV_MAX(more, (int64_t)0);
    return kib > INT64_MAX / 1024 ? UINT64_MAX : (uint64_t)kib * 1024;
}

static bool is_enough(uint64_t bytes, uint64_t available, const char *what)
{
    char quoted[128];

    if (bytes <= available)
        return true;
    kv_log_warn("kvbm", "not enough memory available",
                "for=%s bytes=%" PRIu64 " available=%" PRIu64,
                kv_log_quote(quoted, sizeof(quoted), what), bytes, available);
    return false;
}

bool kvbm_memory_is_there(uint64_t bytes, const char *what)
{
    return bytes <= LITTLE || is_enough(bytes, kvbm_memory_available(""), what);
}

bool kvbm_node_has(uint64_t bytes, uint32_t node, const char *what)
{
    return bytes <= LITTLE || is_enough(bytes, kvbm_node_available("", node), what);
}
