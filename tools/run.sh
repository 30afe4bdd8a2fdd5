#!/bin/sh
# ./dev run: replay a workload through a live kv-indexer. TRACE=file picks one; otherwise a real
# trace that lies nearby, otherwise the built-in generator.
set -eu
cd "$(dirname "$0")/.."
for trace in "${TRACE:-}" traces/conversation_trace.jsonl ../shared/traces/mooncake/conversation_trace.jsonl; do
    if [ -n "$trace" ] && [ -r "$trace" ]; then
        exec build/bin/kvasir replay "$trace"
    fi
done
exec build/bin/kvasir replay
