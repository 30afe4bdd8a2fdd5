# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Connector against the contract of vLLM's KV connectors, written down here; tests/real has live engines.

The contract: the scheduler asks for each request how many tokens a store has beyond its own cache, until the answer is not None;
gives it blocks; sends the workers a step's plan; frees the blocks of a finished request at once and gives them to others. Workers
get the plan before anything of the step is written, load before a request computes, and tell which loads ended and which blocks
failed. The bytes of a block follow from its hash, so that a wrong one is seen at once.
"""
import enum
import hashlib
import os
import pathlib
import random
import sys
import time
import types
from unittest import mock

from kvpython import check, equal, folder, raises, run, skip_all  # first: it finds the package
import kvasir.store

try:
    import numpy
except ImportError:
    skip_all("python3-numpy is needed")

SIZE, LAYERS, DIM = 4, ("a", "b"), 8
ROLES = enum.Enum("KVConnectorRole", "SCHEDULER WORKER")


class Base:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def _get_connector_metadata(self):
        return self._connector_metadata

    def bind_kv_cache_manager(self, manager):
        pass


for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering", "vllm.v1.kv_offload.base",
             "vllm.v1.kv_offload.tiering.base", "vllm.distributed", "vllm.distributed.kv_transfer",
             "vllm.distributed.kv_transfer.kv_connector", "vllm.distributed.kv_transfer.kv_connector.v1",
             "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
             "vllm.distributed.kv_events", "vllm.v1.core", "vllm.v1.core.kv_cache_utils"):
    sys.modules[name] = types.ModuleType(name)
base = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"]
base.KVConnectorBase_V1, base.KVConnectorMetadata, base.KVConnectorRole = Base, type("KVConnectorMetadata", (), {}), ROLES
base.SupportsHMA, base.KVConnectorTransferResults = type("SupportsHMA", (), {}), types.SimpleNamespace
sys.modules["vllm.v1.kv_offload.base"].LookupResult = enum.Enum("LookupResult", "MISS HIT")
sys.modules["vllm.v1.kv_offload.base"].Medium = enum.Enum("Medium", "STORAGE")
sys.modules["vllm.v1.kv_offload.tiering.base"].SecondaryTierManager = object

metrics = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.metrics"]


class Event:
    """An event of vLLM 0.32, which has no owners."""
    __struct_fields__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "medium", "extra_keys")

    def __init__(self, **fields):
        self.__dict__.update(fields)


class BlockStored(Event):
    pass


class BlockRemoved(Event):
    __struct_fields__ = ("block_hashes", "medium", "group_idx", "ownership")


sys.modules["vllm.distributed.kv_events"].BlockStored, sys.modules["vllm.distributed.kv_events"].BlockRemoved = BlockStored, BlockRemoved
sys.modules["vllm.v1.core.kv_cache_utils"].maybe_convert_block_hash = lambda digest: digest[:8]
sys.modules["vllm.v1.core.kv_cache_utils"].resolve_kv_cache_block_sizes = lambda cache, config: (SIZE, SIZE)


class KVConnectorStats:
    def __init__(self, data=None):
        self.data = data


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._counter_cls, self._gauge_cls, self._histogram_cls = metric_types
        self.per_engine_labelvalues = per_engine_labelvalues


metrics.KVConnectorStats, metrics.KVConnectorPromMetrics = KVConnectorStats, KVConnectorPromMetrics

from kvasir import _vllm_connector, _vllm_metrics, _vllm_worker  # noqa: E402
from kvasir._vllm_moves import Move, Plan  # noqa: E402
from kvasir.vllm import Connector  # noqa: E402

_vllm_worker.STORE_WAIT_S = 60  # a busy machine leaves nothing out


class FullAttentionSpec:
    block_size = SIZE

    def __repr__(self):
        return type(self).__name__


def configuration(uri, policy="recompute", world=1, rank=0, model="model", quantization=None, events=False, **extra):
    text = types.SimpleNamespace(hidden_size=16)
    return types.SimpleNamespace(
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=events), model_config=types.SimpleNamespace(model=model, revision=None, dtype="float16", quantization=quantization, hf_text_config=text),
        cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=SIZE, prefix_caching_hash_algo="sha256"),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=world, pipeline_parallel_size=1, world_size=world, rank=rank),
        kv_transfer_config=types.SimpleNamespace(kv_load_failure_policy=policy, kv_connector_extra_config={"uri": uri, "timeout": 60, **extra}))


def cache_configuration(n, spec=FullAttentionSpec):
    return types.SimpleNamespace(num_blocks=n, kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec(), layer_names=["a", "b"])])


class Request:
    def __init__(self, name, tokens, adapter=None):
        self.request_id, self.tokens, self.block_hashes, self.blocks, self.lora_request = name, tokens, [], [], adapter
        above = b""
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            above = hashlib.sha256(above + repr(tokens[at:at + SIZE]).encode()).digest()
            self.block_hashes.append(above)
        self.num_tokens, self.all_token_ids, self.cache_salt = len(tokens), tokens, None


class Engine:
    """vLLM's part: a scheduler and @world workers, with @n blocks, without a cache of its own."""

    def __init__(self, uri, n=24, world=1, seed=0, **options):
        self.rng, self.free, self.requests, self.world, self.weights = random.Random(seed), list(range(1, n)), {}, world, b""
        self.scheduler = Connector(configuration(uri, world=world, **options), ROLES.SCHEDULER, cache_configuration(n))
        self.scheduler.bind_kv_cache_manager(types.SimpleNamespace(get_block_ids=lambda name: (self.requests[name].blocks,)))
        self.workers, self.caches = [], []
        for rank in range(world):
            caches = {"a": numpy.zeros((n, 2, SIZE, DIM), numpy.float16),  # a block's K and V follow each other
                      "b": numpy.zeros((2, n, SIZE, DIM), numpy.float16).transpose(1, 0, 2, 3)}  # or lie apart
            worker = Connector(configuration(uri, world=world, rank=rank, **options), ROLES.WORKER, cache_configuration(n))
            worker.register_kv_caches({**caches, "shared": caches["a"]})
            self.workers.append(worker)
            self.caches.append(caches)

    def content(self, rank, layer, digest):
        data = hashlib.shake_128(b"%d %s " % (rank, layer.encode()) + digest + self.weights).digest(2 * SIZE * DIM * 2)
        return numpy.frombuffer(data, numpy.uint8).reshape(2, SIZE, DIM, 2)

    def holds(self, block, digest):
        return all((self.caches[rank][layer][block].view(numpy.uint8).reshape(2, SIZE, DIM, 2) == self.content(rank, layer, digest)).all()
                   for rank in range(self.world) for layer in LAYERS)

    def compute(self, block, digest):
        for rank in range(self.world):
            for layer in LAYERS:
                self.caches[rank][layer][block] = self.content(rank, layer, digest).reshape(2, SIZE, DIM * 2).view(numpy.float16)

    def step(self, request=None, computed=0, n=0):
        """One step that computes tokens [computed, computed + n) of a request; returns loads that ended and blocks that failed."""
        new = [types.SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed, block_ids=(list(request.blocks),))] if n else []
        plan = self.scheduler.build_connector_meta(types.SimpleNamespace(
            scheduled_new_reqs=new, num_scheduled_tokens={request.request_id: n} if n else {}, total_num_scheduled_tokens=n,
            scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())))
        ended, failed = [], set()
        for worker in self.workers:
            worker.handle_preemptions(plan)
        for index in range(computed // SIZE, (computed + n) // SIZE):
            self.compute(request.blocks[index], request.block_hashes[index])
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
            worker.start_load_kv(None)
            worker.wait_for_save()
            ended.append(worker.get_finished(set())[1] or set())
            failed |= worker.get_block_ids_with_load_errors()
        return ended, failed

    def run(self, request):
        """Serve a request; returns how many of its blocks were loaded."""
        name = request.request_id
        self.requests[name] = request
        limit = time.monotonic() + 60
        while True:
            n, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if n is not None:
                break
            check(time.monotonic() < limit, "the connector never knows")
        check(n % SIZE == 0 and n < request.num_tokens and is_async == (n > 0), f"{n} tokens, {is_async}")
        self.rng.shuffle(self.free)
        request.blocks = [self.free.pop() for _ in range(-(-request.num_tokens // SIZE))]
        blocks = types.SimpleNamespace(get_block_ids=lambda: (request.blocks,))
        self.scheduler.update_state_after_alloc(request, blocks, n)
        good = n // SIZE
        waiting, failed = [n > 0] * self.world, set()
        while any(waiting):
            check(time.monotonic() < limit, "a load never ends")
            ended, bad = self.step()
            failed |= bad
            waiting = [wait and name not in names for wait, names in zip(waiting, ended)]
        for index in range(good):
            if request.blocks[index] in failed:
                good = index
                break
            check(self.holds(request.blocks[index], request.block_hashes[index]), f"block {index} of {name} has other bytes")
        if n:
            self.scheduler.update_state_after_alloc(request, blocks, 0)
        self.step(request, good * SIZE, request.num_tokens - good * SIZE)
        equal(self.scheduler.request_finished(request, request.blocks), (False, None), "finished")
        self.free += request.blocks  # others write to them at once
        return good

    def settle(self):
        """Wait until the scheduler can find what was stored."""
        for part in self.workers:
            limit = time.monotonic() + 60
            while part.worker.jobs:
                check(time.monotonic() < limit, "a store never ends")
                time.sleep(0.001)
            part.worker.flusher.note_put()
            part.worker.flusher.flush()

    def shutdown(self):
        for part in (self.scheduler, *self.workers):
            part.shutdown()


def prompt(number):
    rng = random.Random(number // 5)
    shared = [rng.randrange(100) for _ in range(5 * SIZE)]
    return shared + [1000 + number] * random.Random(number).randrange(1, 6 * SIZE)


def test_random_requests_and_restarts():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng = random.Random(seed)
    for world in (1, 2):
        with folder() as path:
            seen, count = set(), 0
            for life in range(3):
                engine = Engine(path, world=world, seed=seed)
                for number in sorted(seen):  # all that was stored before is found
                    request = Request(f"again {number}", prompt(number))
                    equal(engine.run(request), (request.num_tokens - 1) // SIZE, f"life {life}: blocks of prompt {number}")
                for _ in range(40):
                    number, count = rng.randrange(40), count + 1
                    engine.run(Request(f"request {count}", prompt(number)))
                    seen.add(number)
                engine.shutdown()


def test_another_model_finds_nothing():
    with folder() as path:
        for options in ({}, {"model": "another"}, {"fingerprint": "another revision"}):
            engine = Engine(path, **options)
            equal(engine.run(Request("a", prompt(1))), 0, f"{options}")
            engine.shutdown()


def test_a_reset_forgets():
    """Weights change, the cache is reset: nothing of before is found, by no rank and in no later life."""
    for world in (1, 2):
        with folder() as path:
            engine = Engine(path, world=world)
            whole = (len(prompt(1)) - 1) // SIZE
            engine.run(Request("a", prompt(1)))
            for life, weights in enumerate((b"new", b"newer")):
                equal(engine.scheduler.reset_cache(), True, "reset")
                engine.weights = weights
                equal(engine.run(Request(f"b{life}", prompt(1))), 0, "blocks of the old weights")
                engine.shutdown()
                engine = Engine(path, world=world)
                engine.weights = weights
                equal(engine.run(Request("c", prompt(1))), whole, "blocks of the new weights, after a restart")
            engine.shutdown()
            with kvasir.store.open(path) as store:
                equal([name for name in store.names() if name.startswith("kvasir-reset")].__len__(), 1, "objects of resets")
                equal(store.gc().opaque_manifests, 1, "objects that gc can't read: kvasir-flush alone")


def test_a_reset_beside_requests():
    with folder() as path:
        engine = Engine(path)
        engine.run(Request("a", prompt(1)))
        engine.settle()
        worker = engine.workers[0].worker
        poll, step = worker.queue.poll, engine.step

        def step_and_reset(*args):
            if not worker.resets:  # the load is on its way, or still planned
                if when == "under way":
                    step(*args)
                equal(engine.scheduler.reset_cache(), True, "reset")
                engine.weights = b"new"
            return step(*args)

        for when in ("planned", "under way"):
            worker.queue.poll = lambda: [] if not worker.resets and when == "under way" else poll()
            engine.step = step_and_reset
            equal(engine.run(Request("b" + when, prompt(1))), 0, f"loads that were {when}")
            engine.step = step
            equal(engine.run(Request("c" + when, prompt(1))), 0, "a request that ran meanwhile stores nothing")
            engine.settle()
            equal(engine.run(Request("d" + when, prompt(1))), (len(prompt(1)) - 1) // SIZE, "computed since")
            worker.resets = 0
            engine.scheduler.scheduler.resets = 0
        # A request that runs on with K and V of before stores nothing more, until it is computed anew.
        scheduler, request = engine.scheduler.scheduler, Request("long", [7] * 8 * SIZE)
        request.blocks, engine.requests["long"] = [engine.free.pop() for _ in request.block_hashes], request
        equal(engine.scheduler.get_num_new_matched_tokens(request, 0)[0] in (0, None), True, "nothing is there")
        engine.scheduler.update_state_after_alloc(request, None, 0)
        engine.step(request, 0, SIZE)
        engine.scheduler.reset_cache()
        engine.scheduler.update_state_after_alloc(request, None, 0)
        plan = engine.scheduler.build_connector_meta(types.SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={"long": SIZE}, total_num_scheduled_tokens=SIZE,
            scheduled_cached_reqs=types.SimpleNamespace(req_ids=["long"], new_block_ids=[None], num_computed_tokens=[SIZE], resumed_req_ids=set())))
        equal(plan.stores, [], "blocks that follow from old ones")
        scheduler.matched(request, 0)
        engine.scheduler.update_state_after_alloc(request, None, 0)
        check(scheduler.roots["long"] is not None, "computed anew")
        engine.shutdown()


def test_a_reset_that_the_store_does_not_keep():
    with folder() as path:
        engine = Engine(path)
        engine.run(Request("a", prompt(1)))
        engine.settle()

        def full(*_args, **_options):
            raise kvasir.Error(28, "no space")

        engine.scheduler.scheduler.store.save = full
        equal(engine.scheduler.reset_cache(), False, "reset")
        equal(engine.run(Request("b", prompt(1))), 0, "found all the same")
        engine.shutdown()


def test_a_store_that_cannot_be_asked_at_the_start():
    """Whether the cache was reset isn't known then: the engine starts, and finds nothing of before."""
    def down(*_):
        raise kvasir.Error(5, "down")

    with folder() as path:
        engine = Engine(path)
        engine.run(Request("a", prompt(1)))
        engine.shutdown()
        with mock.patch.object(kvasir.store.Store, "get_manifest", down):
            engine = Engine(path)
        equal(engine.run(Request("b", prompt(1))), 0, "found all the same")
        engine.settle()
        equal(engine.run(Request("c", prompt(1))), (len(prompt(1)) - 1) // SIZE, "stored since")
        engine.shutdown()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path.parent)


def test_weights_that_change_under_one_name():
    with folder() as path:
        file = pathlib.Path(path, "model", "shard.safetensors")
        model, whole = write(file, b"weights"), (len(prompt(1)) - 1) // SIZE

        def loaded(**options):
            engine = Engine(f"{path}/store", model=model, **options)
            n = engine.run(Request("a", prompt(1)))
            engine.shutdown()
            return n

        equal((loaded(), loaded()), (0, whole), "the same files")
        write(file, b"trained")  # of the same length, at another time
        os.utime(file, ns=(1, 1))
        equal((loaded(), loaded()), (0, whole), "other files")
        write(file.with_name("more.safetensors"), b"a second shard")
        equal(loaded(), 0, "one more")
        equal((loaded(fingerprint="v1"), loaded(fingerprint="v1")), (0, whole), "a fingerprint")
        os.utime(file, ns=(2, 2))
        equal((loaded(fingerprint="v1"), loaded(fingerprint="v2")), (whole, 0), "takes the place of the files")
        equal(loaded(fingerprint="v1", quantization="fp8"), 0, "beside it all that vLLM knows counts")


def test_adapters_trained_anew():
    with folder() as path:
        file = pathlib.Path(path, "adapter", "adapter_model.safetensors")
        place, whole = write(file, b"first"), (len(prompt(1)) - 1) // SIZE

        def adapter(ident=1):
            return types.SimpleNamespace(lora_name="poet", lora_int_id=ident, lora_path=place)

        engine = Engine(f"{path}/store")
        equal(engine.run(Request("plain", prompt(1))), 0, "without")
        engine.settle()
        equal(engine.run(Request("a", prompt(1), adapter())), 0, "another model's blocks")
        engine.settle()
        equal(engine.run(Request("b", prompt(1), adapter())), whole, "its own")
        write(file, b"again!")
        equal(engine.run(Request("c", prompt(1), adapter())), 0, "files changed under an adapter that is loaded: it may be either")
        engine.settle()
        equal(engine.run(Request("d", prompt(1), adapter())), 0, "so nothing was stored of it")
        engine.settle()
        equal(engine.run(Request("e", prompt(1), adapter(2))), 0, "loaded anew")
        engine.shutdown()
        engine = Engine(f"{path}/store")
        equal(engine.run(Request("f", prompt(1), adapter())), whole, "after a restart")
        equal(engine.run(Request("plain", prompt(1))), whole, "without")
        place = "nobody/adapter"
        equal(engine.run(Request("g", prompt(1), adapter(7))), 0, "one of which nothing is known")
        engine.settle()
        equal(engine.run(Request("h", prompt(1), adapter(7))), 0, "isn't stored")
        engine.shutdown()


def test_a_seed_that_is_drawn_is_told():
    with folder() as path, mock.patch.dict(os.environ), mock.patch.object(_vllm_connector.logger, "warning") as warning:
        for algorithm, seed, lines in (("sha256", None, 0), ("xxhash", "1", 0), ("xxhash_cbor", None, 1)):
            os.environ.pop("PYTHONHASHSEED", None)
            if seed:
                os.environ["PYTHONHASHSEED"] = seed
            config = configuration(path)
            config.cache_config.prefix_caching_hash_algo = algorithm
            Connector(config, ROLES.SCHEDULER, cache_configuration(9)).shutdown()
            equal(warning.call_count, lines, algorithm)
            warning.reset_mock()


def test_figures_in_vllms_metrics():
    seen = {}

    class Metric:
        def __init__(self, name, documentation, labelnames, buckets=()):
            self.name, self.n, self.buckets = name, len(labelnames), buckets

        def labels(self, *values):
            equal(len(values), self.n, f"labels of {self.name}")
            self.key = (self.name, *values)
            return self

        def inc(self, value):
            seen[self.key] = seen.get(self.key, 0) + value

        set = inc

        def observe(self, value):
            seen.setdefault(self.key, []).append(value)

    with folder() as path:
        whole = (len(prompt(1)) - 1) // SIZE
        for life in range(2):
            engine = Engine(path, world=2)
            loaded = engine.run(Request("a", prompt(1)))
            engine.settle()
            asked = engine.scheduler.get_kv_connector_stats()
            ranks = [worker.get_kv_connector_stats() for worker in engine.workers]
            equal([part.get_kv_connector_stats() for part in (engine.scheduler, *engine.workers)], [None] * 3, "taken")
            total = _vllm_metrics.Stats(data={}).aggregate(ranks[0]).aggregate(ranks[1]).aggregate(asked)
            check(not total.is_empty() and total.reduce()["asked"] == whole, f"{total.reduce()}")
            metrics_of = Connector.build_prom_metrics(None, [Metric] * 3, ["engine"], {0: ["0"]})
            seen.clear()
            metrics_of.observe(Connector.build_kv_connector_stats(total.data).data, 0)
            start, size = "vllm:kvasir_connector_", engine.workers[0].worker.cache.groups[0].nbytes
            n_stored = sum(rank.data.get("stored", 0) for rank in ranks)
            for key, value in {("asked", "0", "asked"): whole, ("blocks", "0", "store", "done"): n_stored,
                               ("bytes", "0", "store"): n_stored * size, ("jobs", "0"): 0}.items():
                equal(seen.get((start + key[0], *key[1:]), 0), value, f"life {life}: {key}")
            equal(n_stored, 0 if life else 2 * (len(prompt(1)) // SIZE), "blocks stored")
            if life:
                equal(loaded, whole, "loaded")
                equal([seen[start + name, "0", *more] for name, *more in (("asked", "found"), ("blocks", "load", "done"), ("bytes", "load"))],
                      [whole, 2 * whole, 2 * whole * size], "loads of two ranks")
                equal(len(seen[start + "seconds", "0", "load"]), 2, "times")
            engine.shutdown()


def events_of(engine, n):
    """Step until the connector has announced @n more blocks, stored or removed. Returns {hash: (kind, its parent, its tokens)}."""
    found, limit = {}, time.monotonic() + 60
    while len(found) < n:
        check(time.monotonic() < limit, f"{len(found)} of {n} events")
        engine.step()
        for event in engine.scheduler.take_events():
            equal(event.medium, "STORAGE", "medium")
            for i, digest in enumerate(event.block_hashes):
                stored = isinstance(event, BlockStored)
                if stored:
                    equal(event.extra_keys, [None] * len(event.block_hashes), "blocks, and not a chunk of blocks")
                above = (event.block_hashes[i - 1] if i else event.parent_block_hash) if stored else None
                found[digest] = (type(event), above, event.token_ids[i * SIZE:(i + 1) * SIZE] if stored else None)
    return found


def told(request, first, last):
    hashes = [digest[:8] for digest in request.block_hashes]
    return {hashes[i]: (BlockStored, hashes[i - 1] if i else None, request.tokens[i * SIZE:(i + 1) * SIZE]) for i in range(first, last)}


def test_what_the_store_holds_is_announced():
    for world in (1, 2):
        with folder() as path:
            engine, request = Engine(path, world=world), Request("a", prompt(1))
            engine.run(request)
            engine.settle()
            equal(list(engine.scheduler.take_events()), [], "vLLM wants no events")
            engine.shutdown()
            engine = Engine(path, world=world, events=True)
            news, n, whole = engine.scheduler.scheduler.news, len(request.block_hashes), (len(prompt(1)) - 1) // SIZE
            news._delay = 0.0
            engine.run(Request("b", prompt(1)))  # found, and the last block stored again
            engine.settle()
            equal(events_of(engine, n), told(request, 0, n), "of the life before")
            longer = Request("c", prompt(1) + [5] * 3 * SIZE)
            engine.run(longer)
            engine.settle()
            more = len(longer.block_hashes)
            same = [a == b for a, b in zip(longer.block_hashes, request.block_hashes)].count(True)
            equal(events_of(engine, more - same), told(longer, same, more), "what is new")
            salted = Request("d", [9] * 4 * SIZE)
            salted.cache_salt = "secret"
            engine.run(salted)
            engine.settle()
            for _ in range(20):
                engine.step()
            equal(list(engine.scheduler.take_events()), [], "of salted requests nothing is told")
            gone = _vllm_connector.keys_of(engine.scheduler.scheduler.names.root(request), world - 1, [0], [request.block_hashes[1]])[0]
            engine.scheduler.scheduler.store.discard(gone)  # as evicted
            check(engine.run(Request("e", prompt(1))) <= 1 and whole > 1, "an evicted block was found")
            found = events_of(engine, 1)
            equal(found[request.block_hashes[1][:8]][0], BlockRemoved, "gone")
            engine.settle()
            engine.scheduler.reset_cache()
            kinds = {kind for kind, *_ in events_of(engine, more - 1).values()}
            check(BlockRemoved in kinds, "a reset")
            equal(len(news._held), 0, "announced behind a reset")
            engine.shutdown()


def watched(worker):
    """Note in which order a worker hears of deletions' ends and tells of loads' ends."""
    queue, ids, seen = worker.queue, [], []
    delete, poll, ended = queue.delete, queue.poll, worker.ended

    def delete_noted(keys):
        ids.append(delete(keys))
        return ids[-1]

    def poll_noted():
        results = poll()
        seen.extend("deleted" for result in results if result.id in ids)
        return results

    def ended_noted(idle):
        told = ended(idle)
        seen.extend("ended" for _ in told)
        return told

    queue.delete, queue.poll, worker.ended = delete_noted, poll_noted, ended_noted
    return seen


def test_requests_keep_the_tensors():
    """A load that hangs beyond shutdown() doesn't write to memory that the engine freed."""
    with folder() as path:
        engine = Engine(path)
        worker = engine.workers[0].worker
        owner = worker.cache.of([0], [1]).owner
        check(all(owner[name] is tensor for name, tensor in engine.caches[0].items()), "the tensors")
        engine.shutdown()


def test_damage_is_computed_again():
    for wrong in (lambda data: data[:-1], lambda data: data + b"x"):  # of another length
        damage_is_computed_again(wrong)


def damage_is_computed_again(wrong):
    with folder() as path:
        engine, request = Engine(path), Request("a", prompt(1))
        engine.run(request)
        engine.shutdown()
        names = Connector(configuration(path), ROLES.SCHEDULER, cache_configuration(9))
        key = _vllm_connector.keys_of(names.scheduler.names.root(request), 0, [0], [request.block_hashes[2]])[0]
        names.shutdown()
        with kvasir.store.open(path) as store:
            right = bytes(store.get(key))
            store.discard(key)
            store.put(key, wrong(right))
            store.flush()
        for loaded in (2, (request.num_tokens - 1) // SIZE):  # deleted, computed and stored again
            engine = Engine(path)
            seen = watched(engine.workers[0].worker)
            equal(engine.run(Request("again", prompt(1))), loaded, "blocks in front of the damage")
            equal(seen, ["deleted", "ended"] if loaded == 2 else ["ended"], "what is stored anew comes behind the deletion")
            engine.shutdown()
        with kvasir.store.open(path) as store:
            equal(bytes(store.get(key)), right, "the block")


def test_a_thread_that_dies_and_a_store_that_cannot_be_closed():
    """Nothing waits for results that nobody takes: loads have failed, steps overwrite blocks, and shutdown() raises nothing."""
    with folder() as path:
        engine = Engine(path)
        engine.run(Request("first", prompt(1)))
        engine.shutdown()
        engine, request = Engine(path), Request("again", prompt(1))
        worker, close = engine.workers[0].worker, engine.scheduler.scheduler.queue.close

        def broken(job, result):
            raise RuntimeError("a thread that dies")

        def stuck():
            raise kvasir.Error(110, "stuck")

        worker._settle = broken
        equal(engine.run(request), 0, "blocks loaded")
        for number in range(20):  # blocks are used again and again
            engine.run(Request(f"later {number}", prompt(number)))
        engine.scheduler.scheduler.queue.close = stuck
        queue = engine.scheduler.scheduler.queue
        engine.shutdown()
        queue.close = close
        queue.close()
        queue.store.close()


class SlidingWindowSpec(FullAttentionSpec):
    sliding_window = 3 * SIZE


def hybrid_configuration(n):
    """Full attention beside a window, both over the same memory."""
    groups = [types.SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a"]),
              types.SimpleNamespace(kv_cache_spec=SlidingWindowSpec(), layer_names=["b"])]
    return types.SimpleNamespace(num_blocks=n, kv_cache_groups=groups)


def test_groups_share_memory_and_fail_by_request():
    with folder() as path:
        part = Connector(configuration(path), ROLES.WORKER, hybrid_configuration(8))
        memory = numpy.zeros((8, 6, DIM), numpy.uint8)
        part.register_kv_caches({"a": memory[:, :4], "b": memory[:, :6], "uses a's": memory[:, :4]})

        def move(name, *blocks):
            made = Move(name, b"root")
            for group, block in blocks:
                made.add(group, [block], [b"%032d" % block])
            return made

        def step(**moves):
            part.bind_connector_metadata(Plan(idle=False, **moves))
            part.handle_preemptions(part._get_connector_metadata())
            part.start_load_kv(None)
            part.wait_for_save()

        def loaded(*blocks):
            step(loads=[move("r", *blocks)])
            limit = time.monotonic() + 60
            while True:
                results = part.get_transfer_results(set())
                equal(part.get_block_ids_with_load_errors(), set(), "blocks: vLLM can't tell which request they belong to")
                if results.finished_recving:
                    return results.finished_recving, results.failed_recving
                check(time.monotonic() < limit, "a load never ends")
                part.bind_connector_metadata(Plan())

        memory[1], memory[2], memory[3] = 1, 2, 3
        stored = move("", (0, 1), (1, 2), (0, 3), (1, 0))
        equal((stored.blocks, stored.groups), ([1, 2, 3], [0, 1, 0]), "without vLLM's null block")
        step(stores=[stored])
        part.worker.queue.drain(60)
        memory[:] = 9
        equal(loaded((0, 1), (1, 2), (0, 3)), ({"r"}, set()), "a load of two groups")
        equal([[int(row[0]) for row in memory[block]] for block in (1, 2, 3)], [[1] * 4 + [9] * 2, [2] * 6, [3] * 4 + [9] * 2], "bytes")
        equal(loaded((0, 1), (1, 1)), ({"r"}, {"r"}), "the other group's block of that hash")
        equal(loaded(), ({"r"}, set()), "a hit that needs nothing")
        part.shutdown()


def test_no_more_requests_load_than_the_cache_could_compute():
    """vLLM computes a failed request before all others that have loaded: these must leave it blocks."""
    with folder() as path:
        engine = Engine(path)  # of 24 blocks
        tokens = [[number] * (9 * SIZE) for number in range(3)]
        for number in range(3):
            engine.run(Request(f"first {number}", tokens[number]))
        engine.settle()
        scheduler, requests = engine.scheduler.scheduler, [Request(f"again {number}", tokens[number]) for number in range(3)]

        def matched(request):
            limit = time.monotonic() + 60
            while request.request_id not in scheduler.questions or scheduler.questions[request.request_id].there is None:
                engine.scheduler.get_num_new_matched_tokens(request, 0)
                check(time.monotonic() < limit, "no answer")
            return engine.scheduler.get_num_new_matched_tokens(request, 0)[0]

        for request in requests[:2]:
            equal(matched(request), 8 * SIZE, f"{request.request_id}: tokens in the store")
            request.blocks = [engine.free.pop() for _ in range(9)]
            blocks = types.SimpleNamespace(get_block_ids=lambda request=request: (request.blocks,))
            engine.scheduler.update_state_after_alloc(request, blocks, 8 * SIZE)
        equal(matched(requests[2]), None, "beside two others")
        engine.scheduler.request_finished(requests[0], [])
        equal(matched(requests[2]), 8 * SIZE, "beside one")
        equal(engine.scheduler.get_num_new_matched_tokens(requests[1], 0), (0, False), "one whose load failed: it is computed")
        engine.shutdown()


def test_refusals():
    with folder() as path:
        raises(ValueError, Connector, configuration(path, policy="fail"), ROLES.WORKER, cache_configuration(8))
        raises(ValueError, Connector, configuration(None), ROLES.WORKER, cache_configuration(8))
        states = type("MambaSpec", (FullAttentionSpec,), {"mamba_cache_mode": "none"})
        raises(ValueError, Connector, configuration(path), ROLES.WORKER, cache_configuration(8, spec=states))
        worker = Connector(configuration(path), ROLES.WORKER, cache_configuration(8))
        right = numpy.zeros((8, 4), numpy.float16)
        for wrong in ({"b": right}, {"a": numpy.zeros((7, 4), numpy.float16), "b": right}, {"a": [right], "b": right},
                      {"a": right, "b": right, "c": right.copy()}):
            raises(ValueError, worker.register_kv_caches, wrong)
        worker.shutdown()


if __name__ == "__main__":
    run(globals())
