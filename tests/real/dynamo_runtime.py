# SPDX-License-Identifier: Apache-2.0
"""A process of Dynamo's runtime (ai-dynamo-runtime 1.6.1): its router, or a worker's publisher. Commands and answers are lines of JSON.

    dynamo_runtime.py router BACKEND PLANE       ["scores", TOKENS] -> {"WORKER:RANK": [device, host, disk], ...} in blocks
    dynamo_runtime.py worker BACKEND PLANE RANK  first line: the worker's id
                                                 ["stored", TOKENS, HASHES, PARENT], ["removed", HASHES] -> null

BACKEND is "file" or "etcd", PLANE "zmq" or "nats"; where they are is in DYN_FILE_KV, ETCD_ENDPOINTS, NATS_SERVER.
"""
import asyncio
import json
import os
import sys

from dynamo._core import (DistributedRuntime, KvEventPublisher, KvRouter, KvRouterConfig, ModelInput, ModelRuntimeConfig, ModelType, WorkerType,
                          register_model)

BLOCK = 4
ENDPOINT = "ns1.backend.generate"


def say(value):
    print(json.dumps(value), flush=True)


async def commands():
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield json.loads(line)


async def route(runtime):
    router = KvRouter(runtime.endpoint(ENDPOINT), BLOCK, KvRouterConfig())
    say("ready")
    async for _, tokens in commands():
        answer = await router.get_overlap_scores(tokens)
        say({f"{row['worker_id']}:{row['dp_rank']}": [row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"]]
             for row in answer["workers"]})


async def work(runtime, rank):
    endpoint = runtime.endpoint(ENDPOINT)

    async def handle(_request, _context=None):
        yield {}

    serving = asyncio.ensure_future(endpoint.serve_endpoint(handle))
    await register_model(ModelInput.Tokens, ModelType.Completions, endpoint, "m", "m", worker_type=WorkerType.Aggregated,
                         kv_cache_block_size=BLOCK, skip_model_assets=True, runtime_config=ModelRuntimeConfig())
    publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK, dp_rank=rank)
    say(endpoint.connection_id())
    async for what, *rest in commands():
        if what == "stored":
            tokens, hashes, parent = rest
            publisher.publish_stored(tokens, [BLOCK] * len(hashes), hashes, parent)
        else:
            publisher.publish_removed(rest[0])
        say(None)
    serving.cancel()


async def main():
    role, backend, plane = sys.argv[1:4]
    runtime = DistributedRuntime(asyncio.get_running_loop(), backend, "tcp", event_plane=plane)
    await (route(runtime) if role == "router" else work(runtime, int(sys.argv[4])))
    runtime.shutdown()
    sys.stdout.flush()
    os._exit(0)


asyncio.run(main())
