#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scattered blocks by Mooncake's transfer engine over tcp: a yardstick for `lend_bench tcp`.

    pip install mooncake-transfer-engine-non-cuda
    mooncake_bench.py                one JSON line per figure; run lend_bench before and behind it

A reader and an owner in a process of its own, 128 MiB of blocks each, scattered on both sides over loopback. Wall time of
batch_transfer_sync_read, median of nine rounds; CPU time of both processes. Mooncake verifies nothing.
"""
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import time

from mooncake.engine import TransferEngine

BYTES, ROUNDS = 128 << 20, 9
CASES = [("2 MiB x 32", 2 << 20, 32), ("64 KiB x 64", 64 << 10, 64)]


def memory_of(engine):
    """Register BYTES of this process's memory. Returns the memory and its address."""
    memory = mmap.mmap(-1, BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, BYTES) != 0:
        sys.exit("mooncake_bench.py: Mooncake registers no memory")
    return memory, address


def engine_of():
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("mooncake_bench.py: Mooncake's engine doesn't begin")
    return engine


def own(told, wait):
    """Be the owner: say where the blocks are, and stay until the reader closes its end."""
    engine = engine_of()
    memory, address = memory_of(engine)
    for at in range(0, BYTES, 4096):
        memory[at:at + 8] = at.to_bytes(8, "little")
    os.write(told, json.dumps([f"127.0.0.1:{engine.get_rpc_port()}", address]).encode())
    os.read(wait, 1)
    os._exit(0)


def cpu(pid):
    """Return the processor seconds of a process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(case, block, batch, engine, peer, theirs, ours, owner, memory):
    chance, count = random.Random(1), BYTES // block
    rounds, moved = [], 0
    begun = cpu(os.getpid()) + cpu(owner)
    for _ in range(ROUNDS):
        at, target = chance.sample(range(count), count), chance.sample(range(count), count)
        start = time.monotonic()
        for first in range(0, count, batch):
            these = range(first, min(first + batch, count))
            rc = engine.batch_transfer_sync_read(peer, [ours + target[i] * block for i in these], [theirs + at[i] * block for i in these],
                                                 [block] * len(these))
            if rc != 0:
                sys.exit(f"mooncake_bench.py: a read failed: {rc}")
        rounds.append(time.monotonic() - start)
        moved += count * block
        for i in chance.sample(range(count), 8):
            got = memory[target[i] * block:target[i] * block + 8]
            if got != (at[i] * block).to_bytes(8, "little"):
                sys.exit("mooncake_bench.py: wrong bytes")
    used = cpu(os.getpid()) + cpu(owner) - begun
    print(json.dumps({"bench": "mooncake", "figure": "tcp", "case": case, "gb_s": round(BYTES / statistics.median(rounds) / 1e9, 2),
                      "cpu_ns_per_kib": round(used * 1e9 / (moved / 1024))}), flush=True)


def main():
    if len(sys.argv) > 1:
        print(__doc__)
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    told, wait = os.pipe(), os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(wait[1])
        own(told[1], wait[0])
    os.close(wait[0])
    os.close(told[1])
    text = b""
    while not text.endswith(b"]"):
        piece = os.read(told[0], 4096)
        if not piece:
            sys.exit("mooncake_bench.py: the owner ended before it said where its blocks are")
        text += piece
    peer, theirs = json.loads(text)
    engine = engine_of()
    memory, ours = memory_of(engine)
    for case, block, batch in CASES:
        run(case, block, batch, engine, peer, theirs, ours, owner, memory)
    os.close(wait[1])
    os.waitpid(owner, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
