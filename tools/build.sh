#!/usr/bin/env bash
# tools/build.sh DIR JOBS [TARGET ...]: build a configured tree; one line of progress instead of one per file.
# Warnings and errors are printed as they come. KV_VERBOSE=1 prints everything.
set -uo pipefail
dir=$1 jobs=$2; shift 2
build=(cmake --build "$dir" -j "$jobs")
[ $# -eq 0 ] || build+=(--target "$@")
build+=(-- --no-print-directory)
[ -z "${KV_VERBOSE:-}" ] || exec "${build[@]}"
terminal=0; [ ! -t 1 ] || terminal=1
"${build[@]}" 2>&1 | awk -v terminal="$terminal" -v dir="$dir" '
    function wipe() { if (shown) printf "\r%40s\r", ""; shown = 0 }
    /^\[ *[0-9]+%\]/ {
        if (terminal && match($0, /[0-9]+%/)) { printf "\rbuilding %s %4s", dir, substr($0, RSTART, RLENGTH); fflush(); shown = 1 }
        next
    }
    { wipe(); print; fflush() }
    END { wipe() }'
status=${PIPESTATUS[0]}
[ "$status" -eq 0 ] && echo "built $dir"
exit "$status"
