// SPDX-License-Identifier: Apache-2.0
/* A decision log, as `kvasir select replay` reads it: what decisions name lies in the log. */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/select/select.h"
#include "require.h"

static void judge(const struct kc_select_log *log)
{
    const struct kc_select_decision *d = (const void *)log->decisions.data;

    REQUIRE(log->decisions.len == log->n * sizeof(*d));
    REQUIRE(log->n + log->unbooked + log->unread <= log->lines);
    for (size_t i = 0; i < log->n; i++) {
        REQUIRE((d[i].first_candidate + d[i].n_candidates) * sizeof(struct kc_select_candidate) <=
                log->candidates.len);
        REQUIRE((d[i].first_hash + d[i].n_hashes) * sizeof(uint64_t) <= log->hashes.len);
        REQUIRE((d[i].model + 1) * sizeof(uint64_t) <= log->models.len);
        REQUIRE(d[i].block_size > 0 && d[i].time >= (i ? d[i - 1].time : 0));
        REQUIRE(d[i].first < 0 || d[i].first >= d[i].time);
        REQUIRE(d[i].end < 0 || d[i].end >= d[i].time);
    }
    REQUIRE(kc_select_log_speed(log) >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    struct kv_error error;
    struct kc_select_log log;
    char path[64];

    if (fd < 0)
        fd = memfd_create("log", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, 0) == 0);
    REQUIRE(pwrite(fd, data, size, 0) == (ssize_t)size);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (kc_select_log_read(path, &log, &error) == 0)
        judge(&log);
    kc_select_log_fini(&log);
    return 0;
}
