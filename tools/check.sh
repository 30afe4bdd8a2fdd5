#!/usr/bin/env bash
# Static checks. --fix-format formats instead of checking. Other versions of the tools than the project's (clang 14,
# Debian 12) judge differently; then the checks that depend on the version are skipped with a message.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
mapfile -t sources < <(git ls-files 'src/*.[ch]' 'include/*.h' 'tests/*.[ch]' 'bench/*.[ch]' 'fuzz/*.[ch]' 'examples/*.[ch]' 'plugins/*.[ch]' 'python/*.[ch]')
mapfile -t units < <(git ls-files 'src/*.c' 'plugins/*.c')
mapfile -t scripts < <(git ls-files '*.sh' dev .ci/run)

formatter=$(command -v clang-format-14 || command -v clang-format)
if [ "${1:-}" = --fix-format ]; then
    exec "$formatter" -i "${sources[@]}"
fi

bad=0
step() { # step NAME COMMAND...: run it quietly, show its output only when it fails
    local name=$1 log; shift
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then echo "ok      $name"; else echo "FAILED  $name"; grep -v 'warnings\? generated' "$log" | head -n 60; bad=$((bad + 1)); fi
    rm -f "$log"
}

if "$formatter" --version | grep -q 'version 14\.'; then
    step format "$formatter" --dry-run -Werror "${sources[@]}"
else
    echo "skipped format (needs clang-format 14)"
fi
step rooms tools/check-rooms.py
step public-tree tools/check-tree.py
step prose tools/check-prose.py --strict
step callers tools/callers.py
tools/check-prose.py | tail -n 1 # findings in rooms outside CLEAN; warns, never fails
step shellcheck shellcheck "${scripts[@]}"
step cppcheck cppcheck --quiet --error-exitcode=1 --inline-suppr --std=c11 -U__VERSION__ -j "$(nproc)" -Iinclude -Isrc \
    --enable=warning,portability --suppress=missingIncludeSystem --suppress=unknownMacro "${units[@]}"
# Everything compiles without a warning. CI builds with -Werror anyway: there, the tests use the same build.
build=check
case ${CI:-} in true | 1) build=release ;; esac
step warnings make --no-print-directory build PRESET="$build" WERROR=ON
cmake --preset release >/dev/null || exit 1
# Limit for the analyzer's walk over a function's paths, in nodes. Its own limit (225000) takes four times as long, most
# of a CI run; set KV_CHECK_NODES=225000 after large changes.
depth=(--extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang "--extra-arg=max-nodes=${KV_CHECK_NODES:-40000}")
if clang-tidy --version | grep -q 'version 14\.'; then
    step clang-tidy xargs -P "$(nproc)" -n 2 clang-tidy -p build --quiet "${depth[@]}" < <(printf '%s\n' "${units[@]}")
else
    echo "skipped clang-tidy (needs version 14)"
fi
exit $((bad > 0))
