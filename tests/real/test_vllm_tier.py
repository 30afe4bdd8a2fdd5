# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Tier inside vLLM 0.33's own tiering: its factory, its host memory in /dev/shm, its manager and its job rules.

vLLM's TieringOffloadingSpec makes the manager from a configuration, as its connector does. This program plays the connector's
scheduler: requests look up their chunks, "compute" the missing ones into the host memory, and read the others from there. The
bytes of a chunk follow from its key, so that a wrong one is seen at once. `KV_MEASURE=FOLDER` measures it there, beside vLLM's
own `fs` tier; KV_OPTIONS has more options of ours, as JSON, KV_FOLDERS how many folders ours has, KV_SET how many MiB are stored.
"""
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

from realtest import *

use("vllm-0.33.0")
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker, OffloadingKVEventsConfig  # noqa: E402
from vllm.v1.kv_offload import config as c  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402
import numpy  # noqa: E402
from redistest import Server  # noqa: E402
from test_store_full import mounted  # noqa: E402

OPTIONS = json.loads(os.environ.get("KV_OPTIONS", "{}"))  # of our tier, when it is measured
JOBS, ROUNDS, FOLDERS, SET = (int(os.environ.get(name, most))
                              for name, most in (("KV_JOBS", 4), ("KV_ROUNDS", 5), ("KV_FOLDERS", 1), ("KV_SET", 256)))
PAGE = 8192  # bytes of a chunk: two ranks of 4096


def config(tiers, host_chunks, name="model", events=False, **extra):
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": host_chunks * PAGE, "secondary_tiers": tiers, **extra}
    return c.OffloadingConfig(
        groups=(c.OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),), worker_kv_bytes_per_block=PAGE // 2,
        enable_kv_cache_events=events, extra_config=extra, engine_id=f"kvasir-{uuid.uuid4().hex}",
        model=c.OffloadingModelConfig(name, "float16", 4096), cache=c.OffloadingCacheConfig(16, 1),
        parallel=c.OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False))


def content(key):
    return hashlib.shake_128(key).digest(PAGE)


def tier(**options):
    return {"type": "Tier", "module_path": "kvasir.vllm", **options}


class Scheduler:
    """The connector's part in a step."""

    def __init__(self, tiers, host_chunks=24, **options):
        self.spec = TieringOffloadingSpec(config(tiers, host_chunks, **options))
        self.manager = self.spec.get_manager()
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.requests = 0
        self.hits = self.computed = 0
        self.worst_ms = 0.0

    def call(self, function, *args):
        """Call the manager, and note how long the scheduler had to wait."""
        begun = time.monotonic()
        with self.manager.lock:
            result = function(*args)
        self.worst_ms = max(self.worst_ms, 1e3 * (time.monotonic() - begun))
        return result

    def step(self, new=()):
        self.call(self.manager.on_schedule_end, ScheduleEndContext(new, ()))

    def prefix(self, keys, context):
        """Look up chunks until none has to be asked for again; the number of chunks that host memory has then."""
        limit = time.monotonic() + 120
        while True:
            check(time.monotonic() < limit, "lookups have no end")
            answers = []
            for key in keys:
                answers.append(self.call(self.manager.lookup, key, context))
                if answers[-1] is LookupResult.MISS:
                    break
            self.step()
            if all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in answers):
                return sum(answer is LookupResult.HIT for answer in answers)
            time.sleep(0.002)

    def run(self, keys):
        """One request: load its prefix, compute the rest; True when its last chunk was found."""
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        self.call(self.manager.on_new_request, context)
        found = self.prefix(keys, context)
        if found:
            spec = self.call(self.manager.prepare_load, keys[:found], context)
            for key, chunk in zip(keys, spec.chunk_ids):
                check(bytes(self.view[int(chunk):int(chunk) + 1].tobytes()) == content(key), "wrong bytes in host memory")
            self.call(self.manager.touch, keys[:found], context)
            self.call(self.manager.complete_load, keys[:found], context)
        self.hits += found
        rest = keys[found:]
        if rest:
            output = self.call(self.manager.prepare_store, rest, context)
            if output is None:  # all chunks are being stored
                self.wait()
                output = self.call(self.manager.prepare_store, rest, context)
            if output is not None and output.keys_to_store:
                for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids):
                    at = int(chunk)
                    memoryview(self.view).cast("B")[at * PAGE:(at + 1) * PAGE] = content(key)
                self.call(self.manager.complete_store, output.keys_to_store, context)
        self.computed += len(rest)
        self.call(self.manager.on_request_finished, context)
        self.step((context.req_id,))
        return found == len(keys)

    def wait(self):
        """Step until no job is under way."""
        limit = time.monotonic() + 120
        while self.manager.has_pending_work():
            check(time.monotonic() < limit, "jobs have no end")
            self.step()
            time.sleep(0.002)

    def settle(self):
        """Step until all that was stored has reached the tiers below."""
        self.wait()
        for secondary in self.manager.secondary_tiers:
            secondary.chunks.flush()

    def shutdown(self):
        self.manager.shutdown()


def prompt(number, n):
    """Keys of a prompt's first @n chunks; prompts 10 k to 10 k + 9 share their first five."""
    return [make_offload_key(hashlib.sha256(b"%d/%d" % (number // 10 if i < 5 else 1000 + number, i)).digest(), 0) for i in range(n)]


def test_requests_and_restarts():
    for seed, rng in histories(2):
        with tempfile.TemporaryDirectory() as folder:
            seen = set()
            for life in range(3):
                scheduler = Scheduler([tier(disk=folder, disk_bytes="64MiB")])
                if life:
                    number = rng.choice(sorted(seen))
                    check(scheduler.run(prompt(number, 6)), f"seed {seed}: prompt {number} isn't found after a restart")
                for _ in range(60):
                    number = rng.randrange(40)
                    scheduler.run(prompt(number, rng.randrange(6, 13)))
                    seen.add(number)
                    if rng.random() < 0.05:
                        scheduler.call(scheduler.manager.reset_cache)
                        scheduler.manager.on_reset_flushed()
                        hits = scheduler.hits
                        scheduler.run(prompt(number, 6))
                        equal(scheduler.hits, hits, "chunks of before a reset")
                        seen = {number}
                scheduler.settle()
                equal(scheduler.manager._jobs, {}, "jobs")
                figures = scheduler.manager.get_stats().reduce()  # as vLLM's /metrics gets them
                check(figures["vllm:kvasir_tier_bytes:('store',)"] >= PAGE and set(figures) & set(map("vllm:kvasir_tier_{}".format, ("jobs",))), str(figures))
                check(scheduler.hits > scheduler.computed / 4, f"{scheduler.hits} hits, {scheduler.computed} computed")
                scheduler.shutdown()


def test_an_object_store_shared_by_engines():
    with tempfile.TemporaryDirectory() as folder:
        first = Scheduler([tier(object=folder)])
        for number in range(8):
            first.run(prompt(number, 8))
        first.settle()
        second = Scheduler([tier(object=folder)])
        check(all(second.run(prompt(number, 8)) for number in range(8)), "the second engine finds the first one's chunks")
        third = Scheduler([tier(object=folder)], name="another model")
        check(not any(third.run(prompt(number, 8)) for number in range(2)), "another model finds none")
        for scheduler in (first, second, third):
            scheduler.shutdown()


def test_what_it_holds_is_announced():
    """vLLM's tracker words the tier's news as KV events, with their owner."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler = Scheduler([tier(disk=folder, disk_bytes="64MiB")], events=True)
        scheduler.run(prompt(1, 6))
        scheduler.settle()
        raw = [event for event in scheduler.manager.take_events() if event.ownership == "kvasir"]
        equal(sorted(key for event in raw for key in event.keys), sorted(prompt(1, 6)), "chunks")
        tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
        worded = list(tracker.take_events(raw))
        equal({(event.medium, event.ownership) for event in worded}, {("STORAGE", "kvasir")}, "medium and owner")
        scheduler.call(scheduler.manager.reset_cache)
        raw = [event for event in scheduler.manager.take_events() if event.ownership == "kvasir"]
        equal([event.removed for event in raw], [True], "a reset")
        scheduler.shutdown()


def test_chunks_of_another_engine():
    """Two engines that lend to each other, without a store that they share; then one of them is gone."""
    with tempfile.TemporaryDirectory() as folder:
        at = [f"unix:{folder}/{i}.{{dp}}" for i in range(2)]
        both = [Scheduler([tier(host_bytes="16MiB", listen=at[i], peers=at[1 - i].replace("{dp}", "0"), forget=0.1)]) for i in range(2)]
        limit = time.monotonic() + 60
        while not all(one.manager.secondary_tiers[0].stats()["peers_now"] for one in both):
            check(time.monotonic() < limit, "the engines don't meet")
            time.sleep(0.01)
        for number in range(0, 80, 10):
            both[number // 10 % 2].run(prompt(number, 8))
        for one in both:
            one.settle()
        for number in range(0, 80, 10):
            check(both[1 - number // 10 % 2].run(prompt(number, 8)), f"prompt {number} isn't found at the other engine")
        check(all(one.manager.secondary_tiers[0].stats()["peer"]["blocks_out"] >= 32 for one in both), "chunks came from the other engine")
        both[0].shutdown()
        for number in range(0, 160, 10):
            both[1].run(prompt(number, 8))  # right bytes or a miss
        both[1].shutdown()


def test_redis_goes_down_and_comes_back():
    server = Server()
    try:
        scheduler = Scheduler([tier(object=server.uri, object_timeout_ms=500, forget=0.5)], host_chunks=16)
        numbers = range(0, 60, 10)
        for number in numbers:
            scheduler.run(prompt(number, 8))
        scheduler.settle()
        check(scheduler.run(prompt(0, 8)), "found while redis is up")
        server.kill()
        for number in [*numbers, 500]:
            scheduler.run(prompt(number, 8))  # ends, with right bytes: misses are computed
        server.start()  # empty
        limit = time.monotonic() + 120
        while not server.command("DBSIZE"):  # new prompts are stored again
            check(time.monotonic() < limit, "nothing is stored after redis came back")
            scheduler.run(prompt(1000 * scheduler.requests, 8))
            time.sleep(0.05)
        scheduler.shutdown()
    finally:
        server.stop()


def test_a_full_file_system():
    with mounted("tmpfs", "size=1M") as at:
        scheduler = Scheduler([tier(object=str(at / "store"), forget=0.1)], host_chunks=16)
        for turn in range(2):
            for number in range(0, 400, 10):  # 2.5 MiB
                scheduler.run(prompt(number, 8))
        stats = scheduler.manager.secondary_tiers[0].stats()["object"]
        check(stats["failed"] + stats["dropped"] > 0 or stats["used"] < 300, f"it isn't full: {stats}")
        scheduler.shutdown()


def test_a_file_system_that_others_fill():
    """The folder's room is reserved when the engine starts: what fills the rest of the file system takes none of it."""
    with mounted("tmpfs", "size=8M") as at:
        scheduler = Scheduler([tier(disk=str(at / "tier"), disk_bytes="4MiB")], host_chunks=16)
        with contextlib.suppress(OSError), open(at / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(65536))
        equal(os.statvfs(at).f_bavail, 0, "pages left")
        for number in range(0, 400, 10):  # 2.5 MiB
            scheduler.run(prompt(number, 8))
        scheduler.settle()
        check(all(scheduler.run(prompt(number, 8)) for number in range(0, 400, 10)), "all are found")
        scheduler.shutdown()


CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
import test_vllm_tier as t
scheduler = t.Scheduler([t.tier(disk=sys.argv[1], disk_bytes="64MiB")])
print("begun", flush=True)
for number in range(0, 1000):
    scheduler.run(t.prompt(number, 12))
    if number % 5 == 4:
        scheduler.settle()
        print(number + 1, flush=True)
"""


def test_killed_in_mid_store():
    here = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen([sys.executable, "-B", "-c", CHILD, folder, str(here)], stdout=subprocess.PIPE, text=True)
        equal(child.stdout.readline(), "begun\n", "the engine runs")
        for _ in range(3):
            done = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        scheduler = Scheduler([tier(disk=folder, disk_bytes="64MiB")])
        found = sum(scheduler.run(prompt(number, 12)) for number in range(done))
        check(found >= done - 1, f"{found} of {done} prompts are found")  # the last chunk may be in the write that was cut
        for number in range(done, done + 20):
            scheduler.run(prompt(number, 12))  # right bytes or a miss
        scheduler.shutdown()


def rate(of, chunks, nbytes):
    """One tier over vLLM's host memory, jobs of 16 chunks, JOBS under way: GiB/s of stores and loads, then GiB a CPU second of both."""
    scheduler = Scheduler([of], host_chunks=chunks)
    one, view = scheduler.manager.secondary_tiers[0], memoryview(scheduler.view).cast("B")
    total = SET * 2 ** 20 // nbytes  # keys; host memory has fewer chunks, and its bytes are stored under many keys
    keys = [make_offload_key(hashlib.sha256(b"%d" % i).digest(), 0) for i in range(total)]
    context, speeds, work = ReqContext("measure"), [], []
    try:
        for i in range(chunks):
            view[i * nbytes:(i + 1) * nbytes] = (b"%8d" % i) * (nbytes // 8)
        warm(max(4 << 30, 2 * total * nbytes))
        for submit in (one.submit_store, one.submit_load):
            begun, cpu, ended, asked = time.monotonic(), time.process_time(), 0, 0
            while ended < total // 16:
                while asked < total // 16 and asked - ended < JOBS:
                    part = slice(16 * asked, 16 * asked + 16)
                    submit(TransferJob(job_id=asked, keys=keys[part], chunk_ids=numpy.arange(part.start, part.stop) % chunks,
                                       is_promotion=bool(speeds), req_context=context))
                    asked += 1
                done = list(one.get_finished_jobs())
                check(all(result.success for result in done), "a job failed")
                ended += len(done)
                if not done:
                    time.sleep(0.0005)
            speeds.append(total * nbytes / (time.monotonic() - begun) / 2 ** 30)
            work.append(total * nbytes / (time.process_time() - cpu) / 2 ** 30)
            if submit == one.submit_store:
                if hasattr(one, "chunks"):
                    one.chunks.flush()  # so that loads come from the disk, not from its buffers
                view[:] = bytes(len(view))
        for i in range(chunks):
            check(view[i * nbytes:(i + 1) * nbytes] == (b"%8d" % i) * (nbytes // 8), "wrong bytes")
    finally:
        scheduler.shutdown()
    return speeds + work


def measure(folder):
    """Both tiers in turn, the other one first in each second round."""
    global PAGE  # pylint: disable=global-statement
    PAGE, rounds, chunks = 2 << 20, [], 128
    for turn in range(1 + ROUNDS):
        speeds = {}
        for name in ("ours", "fs") if turn % 2 else ("fs", "ours"):
            with tempfile.TemporaryDirectory(dir=folder) as root:
                folders = [os.path.join(root, str(i)) for i in range(FOLDERS)]
                for each in folders:
                    os.mkdir(each)
                own = tier(disk=":".join(folders), disk_bytes=str((SET + 256) << 20), staging_blocks=64, **OPTIONS)
                speeds[name] = rate(own if name == "ours" else {"type": "fs", "root_dir": root}, chunks, PAGE)
        ours, fs = speeds["ours"], speeds["fs"]
        if turn:
            rounds.append((ours, fs))
        print(f"stores {ours[0]:.2f} / {fs[0]:.2f} GiB/s, loads {ours[1]:.2f} / {fs[1]:.2f} GiB/s", flush=True)
    for k, name in enumerate(("store", "load", "store, by processor time", "load, by processor time")):
        ratios = sorted(ours[k] / fs[k] for ours, fs in rounds)
        print(f"{name}: {ratios[len(ratios) // 2]:.2f} x vLLM's fs tier ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    if os.environ.get("KV_MEASURE"):
        measure(os.environ["KV_MEASURE"])
        sys.exit(0)
    run(globals())
