#!/usr/bin/env bash
# A long replay at full speed that watches the memory of kv-indexer: a line every INTERVAL seconds, then
# the slope over the second half. SECONDS_TOTAL=1800 INTERVAL=10 TRACE=file ARGS="more replay options"
# choose otherwise. Fails when the replay fails, or when memory grows by more than LIMIT (5) % an hour
# and more than 16 MiB an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
total=${SECONDS_TOTAL:-1800} interval=${INTERVAL:-10} limit=${LIMIT:-5}
out=$(mktemp -d)
replay=
trap '[ -z "$replay" ] || kill "$replay" 2>/dev/null || true; rm -rf "$out"' EXIT

arguments=(--seconds "$total" --clients 2 --quiet --json "$out/report.json")
[ -z "${TRACE:-}" ] || arguments+=("$TRACE")
# shellcheck disable=SC2086 # ARGS is meant to split
build/bin/kvasir replay --only index "${arguments[@]}" ${ARGS:-} >"$out/table" 2>"$out/errors" &
replay=$!

indexer=
for _ in $(seq 100); do
    indexer=$(pgrep -x -P "$replay" kv-indexer || true)
    [ -z "$indexer" ] || break
    sleep 0.1
done
[ -n "$indexer" ] || { cat "$out/errors" >&2; echo 'soak: no kv-indexer was started' >&2; exit 1; }

echo '  seconds   kv-indexer MiB   kvasir MiB   threads   open files'
started=$(date +%s)
rss() { awk '/^VmRSS:/ { printf "%.1f", $2 / 1024 }' "/proc/$1/status"; }
while sleep "$interval" && [ -d "/proc/$indexer" ] && kill -0 "$replay" 2>/dev/null; do
    now=$(($(date +%s) - started))
    memory=$(rss "$indexer") || break
    printf '%9d %16s %12s %9s %12s\n' "$now" "$memory" "$(rss "$replay" || true)" \
        "$(awk '/^Threads:/ { print $2 }' "/proc/$indexer/status" || true)" \
        "$(find "/proc/$indexer/fd" -mindepth 1 2>/dev/null | wc -l)"
    echo "$now $memory" >>"$out/samples"
done

status=0
wait "$replay" || status=$?
replay=
cat "$out/table" "$out/errors"
[ "$status" = 0 ] || { echo "soak: the replay ended with $status" >&2; exit 1; }

# Least squares over the second half: in the first half the caches fill up.
awk -v limit="$limit" '
    { t[NR] = $1; m[NR] = $2; top = $2 > top ? $2 : top }
    END {
        from = int(NR / 2) + 1
        for (i = from; i <= NR; i++) { n++; st += t[i]; sm += m[i] }
        if (n < 3) { print "soak: too short for a slope"; exit 0 }
        for (i = from; i <= NR; i++) { a += (t[i] - st / n) * (m[i] - sm / n); b += (t[i] - st / n) ^ 2 }
        slope = b ? a / b * 3600 : 0
        percent = 100 * slope / (sm / n)
        printf "soak: %d samples, mean of the second half %.1f MiB, peak %.1f MiB, slope %+.2f MiB/h (%+.2f %%/h)\n", NR, sm / n, top, slope, percent
        if (t[NR] - t[from] < 300) { print "soak: shorter than ten minutes: no judgement"; exit 0 }
        exit (percent > limit && slope > 16)
    }' "$out/samples" || { echo 'soak: memory grows' >&2; exit 1; }
