// SPDX-License-Identifier: Apache-2.0
/* Speed of moving blocks between tiers, each figure beside a yardstick of the same run. Works below
 * $KV_BENCH_DIR, else $TMPDIR, else the current directory. Arguments choose among "copy",
 * "manager", "disk", "onboard", "object"; none: all. */
#include <fcntl.h>
#include <limits.h>

#include "support.h"
#include "tier_copy.h"
#include "tier_disk.h"
#include "tier_manager.h"
#include "tier_object.h"

int main(int argc, char **argv)
{
    const char *base = getenv("KV_BENCH_DIR");
    char dir[PATH_MAX];

    bench_usage(argc, argv, "[copy|manager|disk|onboard|object]...");
    if (!base)
        base = getenv("TMPDIR") ? getenv("TMPDIR") : ".";
    snprintf(dir, sizeof(dir), "%s/tier_bench-XXXXXX", base);
    if (!mkdtemp(dir))
        bench_die(dir, -errno);
    if (bench_chosen(argc, argv, "copy"))
        tier_copy_bench();
    if (bench_chosen(argc, argv, "manager"))
        tier_bench_manager();
    if (bench_chosen(argc, argv, "disk"))
        tier_bench_disk(dir);
    if (bench_chosen(argc, argv, "onboard"))
        tier_bench_onboard(dir);
    if (bench_chosen(argc, argv, "object"))
        tier_bench_object(dir);
    nftw(dir, object_remove, 16, FTW_DEPTH | FTW_PHYS); /* files of a manager's disk tier, too */
    return 0;
}
