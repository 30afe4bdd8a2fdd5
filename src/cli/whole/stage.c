// SPDX-License-Identifier: Apache-2.0
#include "cli/whole/stage.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/whole/plan.h"

#define PAGE_BYTES 4096

static const char *const names[KC_N_STAGES] = {
    [KC_STAGE_NONE] = "starting its process",
    [KC_STAGE_OPEN] = "opening events and agent",
    [KC_STAGE_TIERS] = "opening its tiers",
    [KC_STAGE_WAIT] = "waiting for the director",
    [KC_STAGE_LOAD] = "loading blocks",
    [KC_STAGE_COMPARE] = "comparing loaded blocks",
    [KC_STAGE_COMPUTE] = "writing and registering blocks",
    [KC_STAGE_DECODE] = "decoding",
    [KC_STAGE_RELEASE] = "releasing blocks",
    [KC_STAGE_SETTLE] = "finishing its offloads",
    [KC_STAGE_BOOKS] = "looking keys up for the books",
    [KC_STAGE_END] = "closing its tiers",
};

static int open_page(const char *dir, uint32_t number, int flags)
{
    char path[KC_PLAN_PATH + 32];
    int fd;

    snprintf(path, sizeof(path), "%s/worker-%u.stage", dir, number);
    fd = open(path, flags | O_CLOEXEC, 0600);
    return fd < 0 ? -errno : fd;
}

int kc_stage_open(const char *dir, uint32_t number, struct kc_stage_page **ret)
{
    static const char zeros[PAGE_BYTES];
    int fd = open_page(dir, number, O_RDWR | O_CREAT | O_TRUNC), rc = fd < 0 ? fd : 0;
    void *memory = MAP_FAILED;

    if (rc == 0 && pwrite(fd, zeros, sizeof(zeros), 0) != (ssize_t)sizeof(zeros))
        rc = -EIO;
    if (rc == 0)
        memory = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (rc == 0 && memory == MAP_FAILED)
        rc = -errno;
    if (fd >= 0)
        close(fd);
    if (rc == 0)
        *ret = memory;
    return rc;
}

void kc_stage_close(struct kc_stage_page *page)
{
    if (page)
        munmap(page, PAGE_BYTES);
}

void kc_stage_enter(struct kc_stage_page *page, enum kc_stage stage, uint64_t request)
{
    if (!page)
        return;
    atomic_store_explicit(&page->request, request, memory_order_relaxed);
    atomic_store_explicit(&page->since_ns, kv_now_ns(), memory_order_relaxed);
    /* pairs with the reader's acquire: it sees this stage's request, or a later one's */
    atomic_store_explicit(&page->stage, stage, memory_order_release);
}

static bool is_of_a_request(uint64_t stage)
{
    return stage >= KC_STAGE_LOAD && stage <= KC_STAGE_RELEASE;
}

void kc_stage_tell(const char *dir, uint32_t number, char *to, size_t size)
{
    int fd = open_page(dir, number, O_RDONLY);
    struct kc_stage_page *page =
        fd < 0 ? MAP_FAILED : mmap(NULL, PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    uint64_t stage = KC_STAGE_NONE, request = 0, since_ns = 0;

    if (fd >= 0)
        close(fd);
    if (page != MAP_FAILED) {
        stage = atomic_load_explicit(&page->stage, memory_order_acquire);
        request = atomic_load_explicit(&page->request, memory_order_relaxed);
        since_ns = atomic_load_explicit(&page->since_ns, memory_order_relaxed);
        kc_stage_close(page);
    }
    stage = stage < KC_N_STAGES ? stage : KC_STAGE_NONE;
    if (!since_ns)
        snprintf(to, size, "%s", names[KC_STAGE_NONE]);
    else if (is_of_a_request(stage))
        snprintf(to, size, "%s of request %" PRIu64 " for %.1f s", names[stage], request,
                 (double)(kv_now_ns() - since_ns) / 1e9);
    else
        snprintf(to, size, "%s for %.1f s", names[stage], (double)(kv_now_ns() - since_ns) / 1e9);
}
