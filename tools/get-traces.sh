#!/usr/bin/env bash
# Downloads the request traces of the Mooncake FAST'25 release into traces/: anonymised timing,
# lengths and prefix hashes of real requests, published by the Mooncake project
# (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces) under the Apache License 2.0.
# The traces stay out of this repository; `kvasir replay` also works without them.
set -euo pipefail
cd "$(dirname "$0")/.."

base=https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces
declare -A requests=([conversation_trace.jsonl]=12031 [synthetic_trace.jsonl]=3993 [toolagent_trace.jsonl]=23608)

mkdir -p traces
for name in conversation_trace.jsonl synthetic_trace.jsonl toolagent_trace.jsonl; do
    if [ -s "traces/$name" ] && [ "$(wc -l <"traces/$name")" -ge "${requests[$name]}" ]; then
        echo "there already: traces/$name"
        continue
    fi
    echo "downloading $name"
    curl --fail --location --show-error --silent --retry 2 -o "traces/$name.part" "$base/$name" || {
        rm -f "traces/$name.part"
        echo "get-traces: can't download $base/$name; other sources: the release page named above" >&2
        exit 1
    }
    lines=$(grep -c . "traces/$name.part")
    if [ "$lines" -ne "${requests[$name]}" ]; then
        echo "get-traces: $name has $lines requests, ${requests[$name]} were expected; kept as traces/$name.part" >&2
        exit 1
    fi
    mv "traces/$name.part" "traces/$name"
done
echo "now: build/bin/kvasir replay traces/conversation_trace.jsonl"
