# SPDX-License-Identifier: Apache-2.0
"""kvasir.lmcache.Client in LMCache 0.5.6's own adapter and keys, and in its `bench l2` beside its fs_native adapter."""
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

from realtest import *

use("lmcache-0.5.6")
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

from lmcache.cli.commands.bench.l2_adapter_bench.data import (  # noqa: E402
    make_aligned_tensor, make_memory_objects, make_object_keys, verify_round_trip, wait_eventfd)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig  # noqa: E402

COUNT, SIZE = 16, 100_000


def spec(uri):
    return {"type": "native_plugin", "module_path": "kvasir.lmcache", "class_name": "Client", "adapter_params": {"uri": str(uri)}}


class Adapter:
    """LMCache's adapter over ours, and its tasks one at a time."""

    def __init__(self, uri):
        self.adapter = create_l2_adapter(NativePluginL2AdapterConfig.from_dict(spec(uri)))
        equal(type(self.adapter).__name__, "NativeConnectorL2Adapter", "LMCache's adapter")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.adapter.close()

    def store(self, keys, objects):
        task = self.adapter.submit_store_task(keys, objects)
        check(wait_eventfd(self.adapter.get_store_event_fd()), "no end of a store")
        return self.adapter.pop_completed_store_tasks()[task]

    def lookup(self, keys):
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        check(wait_eventfd(self.adapter.get_lookup_and_lock_event_fd()), "no end of a lookup")
        found = self.adapter.query_lookup_and_lock_result(task)
        self.adapter.submit_unlock(keys)
        return [found.test(i) for i in range(len(keys))]

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        check(wait_eventfd(self.adapter.get_load_event_fd()), "no end of a load")
        loaded = self.adapter.query_load_result(task)
        return [loaded.test(i) for i in range(len(keys))]


def objects(fill):
    return make_memory_objects(make_aligned_tensor(COUNT * SIZE), COUNT, SIZE, 0, fill)


def test_chunks_come_back():
    keys, others = make_object_keys(COUNT), make_object_keys(COUNT, "other-model")
    with tempfile.TemporaryDirectory() as folder:
        stored = objects(0)
        with Adapter(folder) as ours:
            check(ours.store(keys, stored).is_successful(), "stored")
            equal(ours.adapter.get_usage().total_bytes_used, COUNT * SIZE, "LMCache's count of bytes")
            equal(ours.lookup(keys + others), [True] * COUNT + [False] * COUNT, "lookup")
        with Adapter(folder) as ours:  # a restart
            loaded = objects(7)
            equal(ours.load(keys, loaded), [True] * COUNT, "load")
            check(verify_round_trip(keys, stored, loaded, print), "bytes")
            equal(ours.load(others, objects(9)), [False] * COUNT, "others")
            ours.adapter.delete(keys[:4])
            equal(ours.lookup(keys), [False] * 4 + [True] * (COUNT - 4), "deleted")


def test_damage_is_a_miss():
    keys, damaged = make_object_keys(COUNT), 0
    with tempfile.TemporaryDirectory() as folder:
        stored = objects(0)
        with Adapter(folder) as ours:
            ours.store(keys, stored)
        for root, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(root, name)
                if os.path.getsize(path) > SIZE // 2 and not damaged:
                    flip_bit(path)
                    damaged += 1
        check(damaged, "nothing was damaged")
        loaded = objects(7)
        with Adapter(folder) as ours:
            there = ours.load(keys, loaded)
        equal(there.count(False), 1, "chunks that didn't verify")
        good = [i for i in range(COUNT) if there[i]]
        check(verify_round_trip([keys[i] for i in good], [stored[i] for i in good], [loaded[i] for i in good], print), "bytes")


def lmcache(*args):
    """What a program of LMCache's says."""
    path = os.pathsep.join([str(ENGINES / "lmcache-0.5.6"), str(BUILD / "python")])
    done = subprocess.run([PYTHON, "-B", *args], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
                          check=False)
    equal(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
    return done.stdout


def test_basic_check():
    """LMCache's own check of an adapter, small and large objects; then the same again, over what is stored already."""
    if not list((ENGINES / "lmcache-0.5.6/lmcache/v1").glob("basic_check*")):
        skip("this LMCache has no basic_check: 0.5.7 came without")
    for size, count in ((1000, 5), (1_000_000, 64)):
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                said = lmcache("-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", str(count), "--obj-size", str(size),
                               "--l2-adapter", json.dumps(spec(folder)))
                equal(re.findall(r"Validation.*: (\d+)/(\d+)", said), [(str(count), str(count))] * 4, said)
                check("(NativeConnectorL2Adapter)" in said and "Batch store OK" in said, said)
                check("FAIL" not in said and "Failed" not in said and "mismatch" not in said, said)


def bench(adapter):
    """LMCache's `bench l2`: MB/s of store and load, 64 chunks of 4 MiB, read back and compared."""
    said = lmcache("-c", "import sys; sys.argv[0] = 'lmcache'; from lmcache.cli.main import main; main()", "bench", "l2", "--num-keys", "64",
                   "--data-size-kb", "4096", "--rounds", "5", "--no-skip-verify", "--l2-adapter", json.dumps(adapter))
    check("MISMATCH" not in said, "wrong bytes")
    found = {}
    for name in ("Store", "Load"):
        part = said.split(f" {name} -", 1)[1]
        equal(int(re.search(r"Total success: +(\d+)", part).group(1)), 320, f"{name}: chunks")
        found[name] = 64 * 4.194304 / (float(re.search(r"Duration p50 \(ms\): +([\d.]+)", part).group(1)) / 1000)
    return found


def test_bench_l2_beside_fs_native():
    """Told, not demanded: on tmpfs, ours verified and theirs not; each first in every second turn, medians of three."""
    rates = {"fs_native": [], "ours": []}
    for turn in range(3):
        for name in sorted(rates, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                rates[name].append(bench(spec(folder) if name == "ours" else {"type": "fs_native", "base_path": folder}))
    for name in ("Store", "Load"):
        theirs, ours = (statistics.median(rate[name] for rate in rates[of]) for of in ("fs_native", "ours"))
        print(f"  {name}: {ours:.0f} MB/s, fs_native {theirs:.0f} ({ours / theirs:.2f} x)", flush=True)


if __name__ == "__main__":
    run_all({}, globals())
