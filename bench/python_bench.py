#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Price of Python: calls of the package against bare C calls through ctypes, and the block manager beside vLLM's BlockPool.

    python_bench.py [BUILD]          one JSON line per figure; vLLM's is left out where vllm can't be imported

CPU time of this thread, median of seven rounds. The yardstick runs between the rounds.
"""
import ctypes
import json
import os
import pathlib
import statistics
import sys
import time
import types

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[1] / "build").resolve()
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")
sys.path.insert(0, str(BUILD / "python"))
from kvasir import blocks, index  # noqa: E402 pylint: disable=wrong-import-position

ROUNDS, BATCH = 7, 16


def once(function, n):
    start = time.thread_time_ns()
    for _ in range(n):
        function()
    return (time.thread_time_ns() - start) / n / 1000


def pair(ours, other, n):
    """Median microseconds of two functions, round by round in turn."""
    once(ours, n // 10 + 1), once(other, n // 10 + 1)
    rounds = [(once(ours, n), once(other, n)) for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds)]


def say(name, ours, other, **more):
    print(json.dumps({"bench": "python", "figure": name, "us": round(ours, 2), "yardstick_us": round(other, 2),
                      "beyond_us": round(ours - other, 2), "ratio": round(other / ours, 2), **more}), flush=True)


def lookup_of_index():
    tree, hashes = index.PrefixIndex(), index.hash_tokens(range(64 * 16), 16)
    tree.store(1, hashes, hashes)
    matches, find, address = index._Matches(), index._c.kvi_find, tree._state.address
    at, ret = hashes.buffer_info()[0], ctypes.byref(matches)
    say("index_find_64", *pair(lambda: tree.find(hashes), lambda: find(address, at, 64, ret), 20000))


def lookups_of_manager():
    shape = blocks.Shape(layers=1, page_size=16, inner=32)
    manager = blocks.Manager(shape, host_bytes=8 << 20, copy_threads=1)
    keys = index.sequence_hashes(index.hash_tokens(range(64 * 16), 16))
    c, address, ret = blocks._c, manager._state.address, (ctypes.c_uint8 * 64)()
    held = blocks.Chain(keys)
    chain = held._struct()
    say("manager_lookup_64", *pair(lambda: manager.lookup(keys), lambda: c.kvbm_manager_lookup(address, chain, 64, ret), 20000))
    cache = manager.attach(bytearray(128 * shape.nbytes))
    pages = index.sequence_hashes(index.hash_tokens(range(128 * 16), 16))
    numbers = list(range(128))
    cache.store(pages, numbers)
    held = blocks.Chain(pages)
    chain, ids = held._struct(), (ctypes.c_uint32 * 128)(*numbers)
    where = cache._state.address
    say("cache_load_128_pages", *pair(lambda: cache.load(pages, numbers), lambda: c.kvbm_cache_load(where, chain, 128, ids, 10000), 1000))
    cache.close()
    manager.close()


class Ours:
    """Cycles of an engine: allocate, register, release, find again, release; the pool is full, so each evicts."""

    def __init__(self, n_blocks, keys):
        self.pool, self.keys, self.turn = blocks.Pool(n_blocks=n_blocks, block_size=16, key_len=32), [blocks.Chain(key, 32) for key in keys], 0

    def __call__(self):
        keys = self.keys[self.turn % len(self.keys)]
        self.turn += 1
        fresh = self.pool.allocate(BATCH)
        ids = fresh.ids
        self.pool.register(fresh, keys).release()
        again = self.pool.match(keys)
        assert again.ids == ids
        again.release()


class Theirs:
    def __init__(self, n_blocks, keys, pool):
        self.pool, self.turn = pool(n_blocks + 1, True, 16), 0  # one is its null block
        self.requests = [types.SimpleNamespace(block_hashes=[key[i:i + 32] for i in range(0, len(key), 32)]) for key in keys]

    def __call__(self):
        request = self.requests[self.turn % len(self.requests)]
        self.turn += 1
        pool = self.pool
        fresh = pool.get_new_blocks(BATCH)
        ids = [block.block_id for block in fresh]
        pool.cache_full_blocks(request, fresh, 0, BATCH, 16, 0)
        pool.free_blocks(reversed(fresh))
        again = [pool.get_cached_block(key, [0])[0] for key in request.block_hashes]
        pool.touch(again)
        assert [block.block_id for block in again] == ids
        pool.free_blocks(reversed(again))


def block_manager():
    try:
        import vllm
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:
        print("skipped: vllm can't be imported", file=sys.stderr)
        return
    n, prompts = 4096, 1024  # four times as many prompts as fit
    keys = [b"".join(os.urandom(32) for _ in range(BATCH)) for _ in range(prompts)]
    say("block_manager_cycle_16", *pair(Ours(n, keys), Theirs(n, keys, BlockPool), 3000), vllm=vllm.__version__)


lookup_of_index()
lookups_of_manager()
block_manager()
