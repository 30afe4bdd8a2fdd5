# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Tier against the contract of vLLM 0.33's secondary tiers, written down here; tests/real has vLLM itself.

The contract: one tier per engine, made with the configuration, a view of (chunks, bytes) and its type; lookups of 36-byte keys
answer HIT, MISS or RETRY; each submitted job has exactly one result, also when it is drained; a load's failed keys are those
not named as successful; after shutdown nothing holds the view.
"""
import enum
import fcntl
import hashlib
import os
import random
import subprocess
import sys
import time
import types
from array import array
from typing import Any, NamedTuple
from unittest import mock

from kvpython import check, equal, folder, raises, run  # first: it finds the package

CHUNK, N = 8192, 32


class LookupResult(enum.Enum):
    MISS, HIT, HIT_PENDING, RETRY = range(4)


class JobResult(NamedTuple):
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: Any = None
    transfer_bytes: Any = None


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._primary_kv_view, self.tier_type, self.bp_detector = primary_kv_view, tier_type, backpressure_detector


base = types.ModuleType("vllm.v1.kv_offload.base")
base.LookupResult, base.Medium = LookupResult, enum.Enum("Medium", "CPU STORAGE")
base.Locality = enum.Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"})
base.OffloadingEvent = lambda **fields: types.SimpleNamespace(**fields)
for kind in ("Counter", "Gauge", "Histogram"):
    setattr(base, f"Offloading{kind}Metadata", lambda kind=kind, **fields: types.SimpleNamespace(kind=kind, **fields))
tiering = types.ModuleType("vllm.v1.kv_offload.tiering.base")
tiering.JobResult, tiering.SecondaryTierManager = JobResult, SecondaryTierManager
tiering.RequestOffloadingContext = type("RequestOffloadingContext", (), {})
for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[base.__name__], sys.modules[tiering.__name__] = base, tiering

import kvasir  # noqa: E402
import kvasir.vllm  # noqa: E402
from kvasir.vllm import Tier, fingerprint_of  # noqa: E402


def spec(name="model", rank=0, replicas=1):
    group = types.SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer.0",))
    return types.SimpleNamespace(config=types.SimpleNamespace(
        model=types.SimpleNamespace(name=name, dtype="float16"), groups=(group,), replicated_layout=False, canonical_layout=False,
        cache=types.SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1), kv_cache_layout=None,
        parallel=types.SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=rank,
                                       data_parallel_size=replicas)))


def job(number, keys, chunks):
    return types.SimpleNamespace(job_id=number, keys=tuple(keys), chunk_ids=array("i", chunks))


def key_of(i):
    return hashlib.sha256(b"%d" % i).digest() + bytes(4)


def content(key):
    return hashlib.shake_128(key).digest(CHUNK)


def make(path, of_tier=None, **options):
    memory = bytearray(N * CHUNK)
    view = memoryview(memory).cast("B", (N, CHUNK))
    return memory, view, Tier(spec(**options), view, "Tier", None, **{"disk": path, "disk_bytes": "8MiB", **(of_tier or {})})


def open_files(path):
    """Flags of this process's descriptors of files below @path, by the files' paths."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith(f"{path}/"):
                found[name] = fcntl.fcntl(int(fd), fcntl.F_GETFL)
        except OSError:
            pass  # of the listing itself
    return found


def result(tier):
    limit = time.monotonic() + 60
    while True:
        found = list(tier.get_finished_jobs())
        if found:
            equal(len(found), 1, "results")
            return found[0]
        check(time.monotonic() < limit, "the job has no end")
        time.sleep(0.001)


def test_the_contract():
    rng = random.Random(1)
    with folder() as path:
        memory, view, tier = make(path)
        array_view = memoryview(memory)
        keys, stored = [key_of(i) for i in range(100)], set()
        for number in range(60):
            some = rng.sample(keys, rng.randrange(1, 12))
            chunks = rng.sample(range(N), len(some))
            tier.on_new_request(None)
            if number % 2:
                for key, chunk in zip(some, chunks):
                    array_view[chunk * CHUNK:(chunk + 1) * CHUNK] = content(key)
                tier.submit_store(job(number, some, chunks))
                equal(result(tier)[:2], (number, True), "stored")
                stored.update(some)
                tier.chunks.flush()
            else:
                there = [key for key in some if tier.lookup(key, None) is LookupResult.HIT]
                equal(set(there), set(some) & stored, "lookup")
                tier.touch(there, None)
                tier.submit_load(job(number, some, chunks))
                done = result(tier)
                equal((done.success, set(done.successful_keys or some)), (len(there) == len(some), set(there or some)), "loaded")
                for key, chunk in zip(some, chunks):
                    check(key not in stored or array_view[chunk * CHUNK:(chunk + 1) * CHUNK] == content(key), "wrong bytes")
                tier.chunks._lost.clear()
        for number in range(20):
            tier.submit_load(job(number, keys[number:number + 1], [number]))
        tier.chunks.drain()
        equal(sorted(done.job_id for done in tier.get_finished_jobs()), list(range(20)), "each job has one result")
        tier.submit_store(job(99, keys[:1], [0]))
        tier.shutdown()
        array_view.release()
        view.release()  # BufferErrors if the tier still held it
        memory.clear()
        memory, view, tier = make(path)
        equal({key for key in keys if tier.lookup(key, None) is LookupResult.HIT}, stored | {keys[0]}, "after a restart")
        tier.shutdown()


def test_what_makes_equal_keys_equal():
    names = {fingerprint_of(spec(), CHUNK), fingerprint_of(spec("other"), CHUNK), fingerprint_of(spec(), 2 * CHUNK),
             fingerprint_of(spec(), CHUNK, "revision 2")}
    equal(len(names), 4, "fingerprints")
    equal(fingerprint_of(spec(), CHUNK), fingerprint_of(spec(rank=1, replicas=2), CHUNK), "replicas hold the same bytes")
    with folder() as path:
        tiers = [make(path, rank=rank, replicas=2)[2] for rank in range(2)]  # each in a folder of its own
        other = make(path, name="other")[2]
        for tier in (*tiers, other):
            equal(tier.lookup(key_of(1), None), LookupResult.MISS, "empty")
            tier.shutdown()
        raises(TypeError, Tier, spec(), memoryview(bytearray(CHUNK)).cast("B", (1, CHUNK)), "Tier", None, no_such_option=1)


def test_a_reset_forgets():
    """vLLM drains the tiers when its caches are reset, and only then: nothing of before is found, also after a restart."""
    for place in ("disk", "object"):
        with folder() as path:
            options = {"disk": f"{path}/disk"} if place == "disk" else {"disk": None, "disk_bytes": 0, "object": f"{path}/store"}
            keys, lives = [key_of(i) for i in range(6)], []

            def found(tier, wanted):
                limit = time.monotonic() + 60
                while time.monotonic() < limit:
                    answers = [tier.lookup(key, None) for key in keys]
                    if LookupResult.RETRY not in answers:
                        return equal([answer is LookupResult.HIT for answer in answers], [wanted] * len(keys), f"{place}, life {lives}")
                    time.sleep(0.002)
                raise AssertionError("no answer")

            for life in range(3):
                memory, view, tier = make(None, options)
                lives.append(life)
                if life:
                    found(tier, True)
                tier.submit_load(job(1, keys[:1], [0]))
                tier.drain_jobs()
                equal([done.job_id for done in tier.get_finished_jobs()], [1], "results of drained jobs")
                found(tier, False)
                tier.submit_store(job(2, keys, range(len(keys))))
                check(result(tier).success, "stored")
                tier.chunks.flush()
                found(tier, True)
                tier.shutdown()
                view.release()


class Stats:
    """OffloadingConnectorStats: what vLLM's /metrics gets."""

    def __init__(self):
        self.values = {}

    def increase_counter(self, name, n, labels):
        self.values[(name, *labels)] = n

    def observe_histogram(self, name, value, labels):
        self.values.setdefault((name, *labels), []).append(value)

    def set_gauge(self, name, value):
        self.values[name] = value


def events_of(tier):
    """The tier's events as (removed, keys)."""
    found = list(tier.take_events())
    check(all((event.medium, event.ownership, event.removal_expected) == (base.Medium.STORAGE, "kvasir", not event.removed) for event in found), "fields")
    return [(event.removed, event.keys) for event in found]


def test_what_it_holds_is_announced():
    keys = [key_of(i) for i in range(6)]
    with folder() as path:
        memory, view, tier = make(path)
        equal(list(tier.take_events()), [], "vLLM wants no events")
        tier.shutdown()
        enabled = spec()
        enabled.kv_events_config = types.SimpleNamespace(enable_kv_cache_events=True)
        tier = Tier(enabled, view, "Tier", None, disk=path, disk_bytes="8MiB")
        tier.submit_store(job(1, keys[:4], range(4)))
        check(result(tier).success, "stored")
        equal((events_of(tier), events_of(tier)), ([(False, keys[:4])], []), "stored")
        tier.chunks.flush()
        tier.submit_store(job(2, keys[:2], range(2)))
        check(result(tier).success, "again")
        equal(events_of(tier), [], "announced already")
        tier.chunks._manager.remove(b"".join(keys[1:2]))  # as evicted: found out by the next lookup
        equal([tier.lookup(key, None) for key in keys[:3]], [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT], "lookup")
        equal(events_of(tier), [(True, keys[1:2])], "gone")
        tier.submit_load(job(3, keys[4:], range(2)))
        result(tier)
        equal(events_of(tier), [], "never announced")
        with mock.patch.object(kvasir.vllm, "MOST_HELD", 3):
            tier.submit_store(job(4, keys[4:], range(2)))
            result(tier)
        equal(events_of(tier), [(False, keys[4:5]), (True, keys[:1]), (False, keys[5:]), (True, keys[2:3])], "no more than three at a time")
        tier.drain_jobs()
        equal(all(removed for removed, _ in events_of(tier)), True, "a reset")
        tier.shutdown()
        tier = Tier(enabled, view, "Tier", None, disk=path, disk_bytes="8MiB")
        tier.lookup(keys[0], None)
        equal(events_of(tier), [], "reset, so not found")
        tier.shutdown()


def test_figures_in_vllms_metrics():
    module = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    module.OffloadingConnectorStats = Stats
    with folder() as path, mock.patch.dict(sys.modules, {module.__name__: module}):
        memory, view, tier = make(path)
        defined = Tier.build_metric_definitions({})
        equal(tier.get_stats(), None, "nothing happened")
        keys = [key_of(i) for i in range(4)]
        tier.submit_store(job(1, keys, range(4)))
        check(result(tier).success, "stored")
        tier.chunks.flush()
        tier.submit_load(job(2, keys + [key_of(9)], range(5)))
        result(tier)
        tier.lookup(keys[0], None), tier.lookup(key_of(8), None)
        values = tier.get_stats().values
        start = "vllm:kvasir_tier_"
        seconds = [values.pop((start + "seconds", what)) for what in ("store", "load")]
        check(all(len(each) == 1 and each[0] > 0 for each in seconds), f"{seconds}")
        equal(values, {(start + "bytes", "store"): 4 * CHUNK, (start + "bytes", "load"): 4 * CHUNK, (start + "chunks", "store", "done"): 4,
                       (start + "chunks", "load", "done"): 4, (start + "chunks", "load", "failed"): 1, (start + "lookups", "hit"): 1,
                       (start + "lookups", "miss"): 1, (start + "read", "disk"): 4, start + "jobs": 0}, "figures")
        check({name if isinstance(name, str) else name[0] for name in values} | {start + "seconds"} <= set(defined), "names that vLLM wasn't told")
        equal({name: len(defined[name].labelnames) for name in defined}, {**{name[0]: len(name) - 1 for name in values if not isinstance(name, str)},
                                                                          start + "seconds": 1, start + "jobs": 0}, "labels")
        equal(tier.get_stats(), None, "taken")
        tier.shutdown()


def test_a_disk_that_is_not_mounted():
    with folder() as path:
        os.mkdir(f"{path}/a")
        _, view, tier = make(None, {"disk": f"{path}/a/kv:{path}/b/kv"})
        equal((os.path.isdir(f"{path}/a/kv"), os.path.exists(f"{path}/b")), (True, False), "folders")
        equal(tier.lookup(key_of(1), None), LookupResult.MISS, "the tier works")
        tier.submit_store(job(1, [key_of(1)], [0]))
        check(result(tier).success, "on the disk that is there")
        tier.shutdown()
        raises(kvasir.Error, make, None, {"disk": f"{path}/b/kv"})
        check(not os.path.exists(f"{path}/b"), "made on the disk of the parent")
        _, _, tier = make(None, {"disk": f"{path}/a/dp"}, replicas=2)
        check(os.path.isdir(f"{path}/a/dp/dp0"), "the folder of a rank")
        tier.shutdown()


def test_weights_that_change_under_one_name():
    with folder() as path:
        os.mkdir(f"{path}/model")
        with open(f"{path}/model/shard", "wb") as file:
            file.write(b"weights")
        names = [fingerprint_of(spec(f"{path}/model"), CHUNK), fingerprint_of(spec(f"{path}/model"), CHUNK, "v1")]
        equal(fingerprint_of(spec(f"{path}/model"), CHUNK), names[0], "the same files")
        os.utime(f"{path}/model/shard", ns=(1, 1))
        check(fingerprint_of(spec(f"{path}/model"), CHUNK) not in names, "other files")
        equal(fingerprint_of(spec(f"{path}/model"), CHUNK, "v1"), names[1], "a fingerprint in the place of the files")
        found = set()
        for revision, quantization in (("a", None), ("b", None), ("a", "fp8")):
            model_config = types.SimpleNamespace(revision=revision, quantization=quantization, hf_overrides=None)
            vllm_config = types.SimpleNamespace(model_config=model_config, load_config=None)  # pylint: disable=unused-variable
            found.add(fingerprint_of(spec(), CHUNK))  # as from the connector, which has it
        equal(len(found), 3, "revisions and quantisations")


def test_a_seed_that_is_drawn_is_told():
    with folder() as path, mock.patch.dict(os.environ), mock.patch.object(kvasir.vllm.logger, "warning") as warning:
        os.environ.pop("PYTHONHASHSEED", None)
        for algorithm, lines in (("sha256", 0), ("xxhash_cbor", 1)):
            cache_config = types.SimpleNamespace(prefix_caching_hash_algo=algorithm)
            model_config = types.SimpleNamespace(revision=None, quantization=None, hf_overrides=None)
            vllm_config = types.SimpleNamespace(model_config=model_config, cache_config=cache_config)  # pylint: disable=unused-variable
            make(path)[2].shutdown()
            equal(warning.call_count, lines, algorithm)


def test_peers():
    """Two tiers that lend to each other; each rank of a data-parallel engine has an endpoint of its own."""
    with folder() as path:
        at = [f"unix:{path}/{i}" for i in range(2)]
        made = [make(None, {"disk": None, "disk_bytes": 0, "host_bytes": "1MiB", "listen": f"unix:{path}/{{dp}}", "peers": at[1 - i]},
                     rank=i, replicas=2) for i in range(2)]
        tiers = [tier for _, _, tier in made]
        equal([tier.chunks.agent.endpoints for tier in tiers], [[place] for place in at], "endpoints")
        limit = time.monotonic() + 60
        while not all(tier.stats()["peers_now"] for tier in tiers):
            check(time.monotonic() < limit, "they don't meet")
            time.sleep(0.002)
        keys = [key_of(i) for i in range(16)]
        for i, (memory, _, tier) in enumerate(made):
            for chunk, key in enumerate(keys[8 * i:8 * i + 8]):
                memory[chunk * CHUNK:(chunk + 1) * CHUNK] = content(key)
            tier.submit_store(job(1, keys[8 * i:8 * i + 8], range(8)))
            check(result(tier).success, "stored")
        for i, (memory, _, tier) in enumerate(made):
            wanted = keys[8 - 8 * i:16 - 8 * i]
            while any(tier.lookup(key, None) is LookupResult.RETRY for key in wanted):
                time.sleep(0.002)
            equal([tier.lookup(key, None) for key in wanted], [LookupResult.HIT] * 8, "lookup")
            tier.submit_load(job(2, wanted, range(8, 16)))
            check(result(tier).success, "loaded")
            for chunk, key in enumerate(wanted):
                check(memory[(8 + chunk) * CHUNK:(9 + chunk) * CHUNK] == content(key), "wrong bytes")
        for tier in tiers:
            tier.shutdown()


def test_several_folders():
    """Each folder of the list is made, and each replica has its own in all of them."""
    with folder() as path:
        disk = f"{path}/a:{path}/b"
        tiers = [make(disk, rank=rank, replicas=2)[2] for rank in range(2)]
        equal(sorted(os.listdir(path)), ["a", "b"], "folders")
        for name in "a", "b":
            equal(sorted(os.listdir(f"{path}/{name}")), ["dp0", "dp1"], f"folders of {name}")
        for tier in tiers:
            tier.shutdown()


def test_the_page_cache_unless_told():
    """The default has no O_DIRECT and no barriers, since a chunk that a power cut takes is a miss. Both come back by options."""
    with folder() as path:
        for given, direct, syncs in (({}, False, False), ({"disk_buffered": False}, True, False),
                                     ({"disk_buffered": False, "disk_volatile": False}, True, True)):
            with mock.patch("kvasir.vllm.Offload", wraps=kvasir.vllm.Offload) as chunks:
                tier = make(path, given)[2]
            equal(chunks.call_args[1]["disk_volatile"], not syncs, f"barriers with {given}")
            files = {name: flags for name, flags in open_files(path).items() if name.endswith(".slots")}
            check(files, "no slots are open")
            if not direct or can_be_direct(path):
                equal({bool(flags & os.O_DIRECT) for flags in files.values()}, {direct}, f"O_DIRECT with {given}")
            tier.submit_store(job(1, [key_of(1)], [0]))
            check(result(tier).success, "stored")
            tier.shutdown()


def can_be_direct(path):
    """Tell whether the tier uses O_DIRECT there: it doesn't on tmpfs."""
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as problem:
        print(f"  not seen: O_DIRECT ({problem})")
        return False
    os.close(fd)
    kind = subprocess.run(["stat", "-fc", "%T", path], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return kind != "tmpfs"


if __name__ == "__main__":
    run(globals())
