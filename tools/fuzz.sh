#!/usr/bin/env bash
# tools/fuzz.sh SECONDS [TARGET ...]: run each libFuzzer target on its seed corpus for that long, one a core at a time.
# New inputs stay in build/fuzz/corpus; a crash leaves its input in build/fuzz/crashes and fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
seconds=${1:-60}; shift || true
make --no-print-directory build PRESET=fuzz TARGETS=fuzzers >&2 || { echo 'FAILED build'; exit 1; }
mkdir -p build/fuzz/crashes
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(build/fuzz/bin/fuzz_*)

fuzz() { # SECONDS TARGET
    local name=${2##*/}; name=${name#fuzz_}
    local found=build/fuzz/corpus/$name seeds=fuzz/corpus/$name log=build/fuzz/$name.log
    mkdir -p "$found" "$seeds"
    if "build/fuzz/bin/fuzz_$name" -max_total_time="$1" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
        -artifact_prefix="build/fuzz/crashes/$name-" "$found" "$seeds" >"$log" 2>&1; then
        echo "ok $name ($(grep -c . "$log") lines, $(sed -n 's/^Done \([0-9]*\) runs.*/\1 runs/p' "$log"))"
    else
        echo "FAILED $name"; tail -n 30 "$log" >&2; return 1
    fi
}
export -f fuzz
printf '%s\0' "${targets[@]}" | xargs -0 -P "$(nproc)" -I TARGET bash -c 'fuzz "$@"' bash "$seconds" TARGET
