#!/usr/bin/env bash
# Run every test in each build; close with the skips and their reasons, the failures, their counts, and
# `N passed, N failed`. A program that skipped all its tests is in neither number.
# KV_TEST_BUILDS="release asan/short tsan" chooses builds: of asan/short all but the tests with the label `long`, of
# asan/long those alone (tests/CMakeLists.txt says which). KV_FUZZ_SECONDS=3 also fuzzes each target so long,
# KV_TEST_PACKAGES=1 builds the Debian packages and uses them in a bare root; KV_TEST_CONTAINER=1 builds the container
# image and asks its kv-indexer for /health.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
builds=${KV_TEST_BUILDS:-release asan}
fuzz_seconds=${KV_FUZZ_SECONDS:-0}
passed=0 failed=0
broken=()
failures=$(mktemp) skips=$(mktemp)
trap 'rm -f "$failures" "$skips"' EXIT

# Logs of long runs are often cut to their end: repeat there the last 40 lines of each failed test.
keep_failures() { # PRESET LOG
    awk -v preset="$1" '
        function close_test(i) { for (i = n > 40 ? n - 40 : 0; i < n; i++) print kept[i]; n = 0; inside = 0 }
        /^ *[0-9]+\/[0-9]+ Test +#/ { close_test(); if (/\*\*\*/ && !/Skipped/) { inside = 1; print "-- " preset ": " $0; next } }
        /^ +Start +[0-9]+: |^[0-9]+% tests passed/ { close_test() }
        inside { kept[n++] = $0 }
        END { close_test() }' "$2" >>"$failures"
}

# Tests of whole processes (labels e2e and fault) wait for other programs, which a busy machine can delay
# beyond any limit: up to 3 of them that failed beside the others run once more alone. One that passes
# then counts as passed and is named as unsteady; unit tests get no second run.
run_again() { # PRESET DIR; prints how many passed
    local failed unsteady
    failed=$(sed -nE '/^The following tests FAILED:/,$ s/^\t *[0-9]+ - ([^ ]+) \(.*/\1/p' "$2/test.log") # its list; LastTestsFailed.log is anybody's
    if [ "$(wc -l <<<"$failed")" -gt 3 ] || grep -qvE '^(e2e|fault)\.' <<<"$failed"; then echo 0; return; fi
    ctest --test-dir "$2" -R "^($(paste -sd'|' <<<"${failed//./\\.}"))\$" --output-on-failure -j 1 --timeout 300 --output-log "$2/again.log" >&2
    unsteady=$(sed -n 's/.* Test *#[0-9]*: \([^ ]*\) .* Passed .*/\1/p' "$2/again.log")
    for name in $unsteady; do echo "$1: $name: UNSTEADY, passed only when run alone" >>"$skips"; done
    wc -w <<<"$unsteady"
}

for build in $builds; do
    preset=${build%/*} part=()
    case $build in */short) part=(-LE long) ;; */long) part=(-L long) ;; esac
    echo "== ${build/\// }"
    if ! make --no-print-directory build PRESET="$preset"; then
        broken+=("$preset does not build"); failed=$((failed + 1)); break # the next build would fail in the same place
    fi
    dir=build; [ "$preset" = release ] || dir=build/$preset
    # Eighths of a core: tests that mostly wait share one (KV_CORE of cmake/KvTargets.cmake).
    ctest --test-dir "$dir" "${part[@]}" --output-on-failure -j "$((8 * $(nproc)))" --timeout 300 --output-log "$dir/test.log" \
        --output-junit "$PWD/$dir/test.xml" --test-output-size-passed 1000000
    summary=$(grep -E '^[0-9]+% tests passed' "$dir/test.log" | tail -n 1)
    bad=$(sed -n 's/.*, \([0-9]*\) tests failed out of .*/\1/p' <<<"$summary")
    all=$(sed -n 's/.* tests failed out of \([0-9]*\).*/\1/p' <<<"$summary")
    [ -n "$all" ] || { broken+=("$preset ran no test"); failed=$((failed + 1)); continue; }
    tools/list-skips.py "$preset" "$dir/test.xml" >>"$skips"
    [ "$bad" = 0 ] || bad=$((bad - $(run_again "$preset" "$dir")))
    failed=$((failed + bad)); passed=$((passed + all - bad - $(grep -c '^ *[0-9]*/[0-9]* Test .*\*\*\*Skipped' "$dir/test.log")))
    [ "$bad" = 0 ] && continue
    broken+=("$preset: $bad of $all tests")
    keep_failures "$preset" "$dir/test.log"
done

if [ "$fuzz_seconds" -gt 0 ] && [[ "${broken[*]}" != *"does not build"* ]]; then
    echo "== fuzz, $fuzz_seconds s a target"
    while read -r verdict name; do
        case $verdict in
            ok) passed=$((passed + 1)) ;;
            *) failed=$((failed + 1)); broken+=("fuzz target $name") ;;
        esac
    done < <(tools/fuzz.sh "$fuzz_seconds" | tee >(cat >&2) | sed -n 's/^\(ok\|FAILED\) \(.*\)/\1 \2/p')
fi

bare_root() { # NAME: run tests/install/NAME.sh, which builds the tree once more
    local said code
    [[ "${broken[*]}" != *"does not build"* ]] || return 0
    echo "== $1"
    said=$("tests/install/$1.sh" 2>&1); code=$?
    case $code in
        0) passed=$((passed + 1)); tail -n 1 <<<"$said" ;;
        77) echo "$1: $(tail -n 1 <<<"$said")" >>"$skips" ;;
        *) failed=$((failed + 1)); broken+=("$1"); tail -n 60 <<<"$said" >>"$failures" ;;
    esac
}
[ "${KV_TEST_PACKAGES:-0}" != 1 ] || bare_root packages
[ "${KV_TEST_CONTAINER:-0}" != 1 ] || bare_root container

if [[ $builds == *release/short* ]]; then
    left_out=$(ctest --test-dir build -N -L long | sed -n 's/^ *Test *#[0-9]*: //p' | paste -sd' ')
    [ -z "$left_out" ] || echo "left to ./dev test-all: $left_out; the thread sanitizer, fuzzing, packages"
fi
cat "$skips" "$failures"
skipped=$(grep -vc ': UNSTEADY, ' "$skips")
[ "$skipped" = 0 ] || echo "$skipped skipped, each with its reason above"
[ ${#broken[@]} -eq 0 ] || printf 'failed: %s\n' "${broken[@]}"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
