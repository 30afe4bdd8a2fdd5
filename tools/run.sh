#!/bin/sh
# ./dev run: replay a workload through a live kv-indexer. TRACE=file picks one; otherwise a real
# trace that lies nearby, otherwise the built-in generator.
set -eu
cd "$(dirname "$0")/.."
for trace in "${TRACE:-}" traces/conversation_trace.jsonl ../shared/traces/mooncake/conversation_trace.jsonl; do
    if [ -n "$trace" ] && [ -r "$trace" ]; then
        set -- "$trace"
        break
    fi
done
build/bin/kvasir replay "$@"
cat <<'TEXT'

Try next:
  build/bin/kv-indexer --help                  the service, its options and examples
  build/bin/kvasir replay --help               other workloads, more engines, losses, restarts
  docs/engines.md                              put it in front of vLLM, SGLang or TensorRT-LLM
Memory per block is higher here than in the README: prompts of this trace share fewer blocks, and small
indexes have their fixed parts spread over fewer blocks (docs/benchmarks.md has both).
TEXT
