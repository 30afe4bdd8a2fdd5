#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a kv-indexer costs by its workers, blocks and queries: memory and CPU of the process at growing sizes.

    scale_bench.py [streams [N]...] [split]      KV_BUILD_DIR: a build elsewhere

streams   1 to 4000 workers, each with an event stream of its own over TCP: memory and descriptors a worker, CPU while nothing
          happens, CPU a block when all publish, CPU of a query whose prompt 4 of them hold, time to register all
split     several indexers that follow a share of the workers each: CPU of the same query at each, and the answer's parts merged

One JSON line per figure; CPU is the server's, kernel included.
"""
import json
import pathlib
import resource
import sys
import time

import msgpack
import zmq

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from kvtest import Indexer, wait_until  # noqa: E402 pylint: disable=wrong-import-position

BLOCK, CHAIN, ROUNDS = 16, 64, 30  # tokens of a block; blocks of a prompt; prompts of each worker


def line(figure, **members):
    print(json.dumps({"bench": "scale", "figure": figure, **members}), flush=True)


class Fleet:
    """PUB sockets of @n workers, each with batches ready to be sent."""

    def __init__(self, n):
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, n + 64)
        self.sockets = [self.context.socket(zmq.PUB) for _ in range(n)]
        for socket in self.sockets:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, 0)
            socket.bind("tcp://127.0.0.1:*")

    def endpoint(self, i):
        return self.sockets[i].get_string(zmq.LAST_ENDPOINT)

    def publish(self, sequence, of_worker):
        """Send batch @sequence of each worker; of_worker(i): (hashes, tokens) of a prompt."""
        for i, socket in enumerate(self.sockets):
            hashes, tokens = of_worker(i)
            event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK,
                     "lora_id": None, "medium": "GPU"}
            socket.send_multipart([b"kv", sequence.to_bytes(8, "big"), msgpack.packb([time.time(), [event], 0])])

    def close(self):
        self.context.destroy(linger=0)


def prompt_of(worker, number):
    """(hashes, tokens) of a prompt that this worker alone has."""
    first = (worker * ROUNDS + number) * CHAIN
    start = first * BLOCK % 2**31
    return [2**40 + first + k for k in range(CHAIN)], [(start + k) % 2**31 for k in range(CHAIN * BLOCK)]


def shared_prompt(worker):
    """A prompt that the first four workers hold."""
    hashes, tokens = prompt_of(10**6, 0)
    return (hashes, tokens) if worker < 4 else prompt_of(worker, 0)


def cpu_of(indexer, seconds):
    before = indexer.cpu_seconds()
    time.sleep(seconds)
    return (indexer.cpu_seconds() - before) / seconds


def register_all(indexer, fleet, workers):
    begin = time.monotonic()
    connection = indexer.connect()
    for i in workers:
        body = {"instance_id": i + 1, "endpoint": fleet.endpoint(i), "model_name": "m", "block_size": BLOCK, "kv_cache_report_mode": "incremental"}
        reply = indexer.request("POST", "/register", body, connection=connection)
        assert reply.status in (200, 201), reply
    wait_until(lambda: connected(indexer) == len(workers), 300, f"{len(workers)} connections")
    return time.monotonic() - begin


def connected(indexer):
    return indexer.metrics().get('kv_indexer_listeners{status="active"}', 0)


def blocks_of(indexer):
    return sum(value for name, value in indexer.metrics().items() if name.startswith("kv_indexer_index_holder_blocks"))


def query_cpu(indexer, tokens, n=2000):
    connection = indexer.connect()
    body = {"token_ids": tokens, "model_name": "m"}
    indexer.request("POST", "/query", body, connection=connection)
    before = indexer.cpu_seconds()
    for _ in range(n):
        reply = indexer.request("POST", "/query", body, connection=connection)
    return (indexer.cpu_seconds() - before) / n * 1e6, reply.json()


def streams(n):
    fleet = Fleet(n)
    try:
        with Indexer("--max-registrations", n + 16, "--max-connections", 64) as indexer:
            empty = indexer.rss()
            took = register_all(indexer, fleet, range(n))
            resident = indexer.rss()
            descriptors = len(list(pathlib.Path(f"/proc/{indexer.process.pid}/fd").iterdir()))
            idle = cpu_of(indexer, 10)
            before, begin = indexer.cpu_seconds(), time.monotonic()
            fleet.publish(0, shared_prompt)
            for sequence in range(1, ROUNDS):
                fleet.publish(sequence, lambda i, number=sequence: prompt_of(i, number))
            wanted = n * ROUNDS * CHAIN
            wait_until(lambda: blocks_of(indexer) == wanted, 600, f"{wanted} blocks, not {blocks_of(indexer)}")
            ingest, wall = indexer.cpu_seconds() - before, time.monotonic() - begin
            cpu, answer = query_cpu(indexer, prompt_of(10**6, 0)[1])
            assert len(answer["scores"]) == min(n, 4), answer
            line("streams", streams=n, register_s=round(took, 2), kib_a_worker=round((resident - empty) / n / 1024, 1),
                 descriptors_a_worker=round(descriptors / n, 2), idle_percent_of_core=round(idle * 100, 2), blocks=wanted,
                 ingest_cpu_us_a_block=round(ingest / wanted * 1e6, 3), wall_s=round(wall, 1), query_cpu_us=round(cpu, 1),
                 bytes_a_block=round((indexer.rss() - resident) / wanted, 1))
    finally:
        fleet.close()


def split(n, parts):
    """The first prompt of @n workers, asked at one indexer of all and at @parts indexers of a share each."""
    fleet = Fleet(n)
    tokens = prompt_of(10**6, 0)[1]
    try:
        for share in (1, parts):
            indexers = [Indexer("--max-registrations", n + 16) for _ in range(share)]
            try:
                for k, indexer in enumerate(indexers):
                    register_all(indexer, fleet, range(k, n, share))
                sequence = 0 if share == 1 else 1
                fleet.publish(sequence, lambda i: prompt_of(10**6, 0))
                for k, indexer in enumerate(indexers):
                    wait_until(lambda ix=indexer, want=len(range(k, n, share)) * CHAIN: blocks_of(ix) >= want, 120, "blocks of a share")
                costs, scores = [], {}
                for indexer in indexers:
                    cpu, answer = query_cpu(indexer, tokens, 500)
                    costs.append(cpu)
                    scores.update(answer["scores"])
                assert len(scores) == n, (len(scores), n)
                line("split", workers=n, holders=n, indexers=share, query_cpu_us_each=round(sum(costs) / share, 1), query_cpu_us_all=round(sum(costs), 1),
                     slowest_us=round(max(costs), 1))
            finally:
                for indexer in indexers:
                    indexer.stop()
    finally:
        fleet.close()


def main():
    chosen = [arg for arg in sys.argv[1:] if not arg.isdecimal()] or ["streams", "split"]
    sizes = [int(arg) for arg in sys.argv[1:] if arg.isdecimal()] or [1, 100, 1000, 4000]
    if not set(chosen) <= {"streams", "split"}:
        sys.exit(__doc__)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if "streams" in chosen:
        for n in sizes:
            streams(n)
    if "split" in chosen:
        split(1024, 4)


if __name__ == "__main__":
    main()
