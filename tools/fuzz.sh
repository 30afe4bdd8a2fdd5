#!/usr/bin/env bash
# tools/fuzz.sh SECONDS [TARGET ...]: run each libFuzzer target on its seed corpus for that long.
# New inputs stay in build/fuzz/corpus; a crash leaves its input in build/fuzz/crashes and fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
seconds=${1:-60}; shift || true
make --no-print-directory build PRESET=fuzz >&2 || { echo 'FAILED build'; exit 1; }
mkdir -p build/fuzz/crashes
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(build/fuzz/bin/fuzz_*)
bad=0
for target in "${targets[@]}"; do
    name=$(basename "$target"); name=${name#fuzz_}
    found=build/fuzz/corpus/$name; seeds=fuzz/corpus/$name
    mkdir -p "$found" "$seeds"
    log=build/fuzz/$name.log
    if "build/fuzz/bin/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
        -artifact_prefix="build/fuzz/crashes/$name-" "$found" "$seeds" >"$log" 2>&1; then
        echo "ok $name ($(grep -c . "$log") lines, $(sed -n 's/^Done \([0-9]*\) runs.*/\1 runs/p' "$log"))"
    else
        echo "FAILED $name"; tail -n 30 "$log" >&2; bad=1
    fi
done
exit $bad
