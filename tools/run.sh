#!/bin/sh
# ./dev run: run the whole system on a workload. TRACE=file picks one; otherwise a real trace that lies
# nearby, otherwise the built-in generator. The page with plots is build/replay.html.
set -eu
cd "$(dirname "$0")/.."
for trace in "${TRACE:-}" traces/conversation_trace.jsonl ../shared/traces/mooncake/conversation_trace.jsonl; do
    if [ -n "$trace" ] && [ -r "$trace" ]; then
        set -- "$trace"
        break
    fi
done
build/bin/kvasir replay --html build/replay.html "$@"
cat <<'TEXT'

What happened: engine workers kept the K/V of their prompts in four tiers, told kv-indexer which blocks
they have, and read blocks from each other; every gathered byte was compared with what it must be.
docs/replay.md explains each line; build/replay.html has the same figures with plots.

Try next:
  build/bin/kvasir replay --kill worker        the same, with a worker killed in the middle
  build/bin/kvasir replay --only index         an hour of traffic through the indexer alone, in seconds
  build/bin/kv-indexer --help                  the service, its options and examples
  docs/engines.md                              put it in front of vLLM, SGLang or TensorRT-LLM
TEXT
