# SPDX-License-Identifier: Apache-2.0
"""kvasir.sglang.HiCache against the contract of SGLang's storage backends, on pools of numpy: right bytes, or a miss.

The pools are ours, as SGLang 0.5.23 documents them: three layouts, and one each of those whose pages are addresses in a list, copies,
or nothing. tests/real/test_sglang_hicache.py runs SGLang's own.
"""
import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import random
import resource
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

from kvpython import SLOW, check, equal, flip_bit, folder, raises, run, skip_all, wait_until  # first: it finds the package
from redistest import Server
import kvasir
import kvasir.sglang
import kvasir.store
from kvasir import _sglang_metrics
from kvasir._connector import Flusher
from kvasir.sglang import HiCache

try:
    import numpy
except ImportError:
    skip_all("python3-numpy is needed")

PAGE, LAYERS, HEADS, DIM, PAGES = 4, 3, 2, 8, 160
LAYOUTS = ("page_first", "layer_first", "page_first_direct")
logging.getLogger("kvasir.sglang").setLevel(logging.ERROR)


class KV:
    """Host pool of K and V. @seed None: zeroes."""
    kv_heads = HEADS

    def __init__(self, layout, seed=None, pages=PAGES):
        self.layout, self.page_size, self.size, self.dtype = layout, PAGE, pages * PAGE, "float16"
        shape = {"page_first": (2, self.size, LAYERS, HEADS, DIM), "layer_first": (2, LAYERS, self.size, HEADS, DIM),
                 "page_first_direct": (2, pages, LAYERS, PAGE, HEADS, DIM)}[layout]
        rng = numpy.random.default_rng(seed)
        data = numpy.zeros(shape, numpy.uint16) if seed is None else rng.integers(0, 1 << 16, shape, numpy.uint16)
        self.kv_buffer = data.view(numpy.float16)

    def get_data_page(self, index, flat=True):
        where = {"page_first": (slice(None), slice(index, index + PAGE)),
                 "layer_first": (slice(None), slice(None), slice(index, index + PAGE)),
                 "page_first_direct": (slice(None), slice(index // PAGE, index // PAGE + 1))}[self.layout]
        page = self.kv_buffer[where]
        return page.flatten() if flat else page

    def page_bytes(self, number):
        return self.get_data_page(number * PAGE).tobytes()

    def clear(self):
        """Free all pages: SGLang's reset."""


class Window(KV):
    """Pool whose pages can't be had as tensors: it lists addresses, K and V apart."""

    def get_data_page(self, index, flat=True):
        raise ValueError("no flat pages")

    def get_page_buffer_meta(self, indices):
        k, v = self.kv_buffer[0], self.kv_buffer[1]
        step = k[0].nbytes
        addresses = [buffer.__array_interface__["data"][0] + int(index) * step for index in indices[::PAGE] for buffer in (k, v)]
        return addresses, [step * PAGE] * len(addresses)

    def page_bytes(self, number):
        return KV.get_data_page(self, number * PAGE).tobytes()


class States:
    """Pool of two tensors a page, as recurrent states lie: pages are copies."""

    def __init__(self, seed=None, pages=PAGES):
        rng = numpy.random.default_rng(seed)
        self.layout, self.page_size, self.size, self.dtype = "layer_first", 1, pages, "float32"
        self.a = numpy.zeros((LAYERS, pages, 5), numpy.float32) if seed is None else rng.random((LAYERS, pages, 5)).astype(numpy.float32)
        self.b = numpy.zeros((LAYERS, pages, 3), numpy.float32) if seed is None else rng.random((LAYERS, pages, 3)).astype(numpy.float32)

    def get_data_page(self, index, flat=True):
        return numpy.concatenate([self.a[:, index].flatten(), self.b[:, index].flatten()])

    def get_dummy_flat_data_page(self):
        return numpy.zeros(LAYERS * 8, numpy.float32)

    def set_from_flat_data_page(self, index, page):
        self.a[:, index] = page[:LAYERS * 5].reshape(LAYERS, 5)
        self.b[:, index] = page[LAYERS * 5:].reshape(LAYERS, 3)

    def page_bytes(self, number):
        return self.get_data_page(number).tobytes()


class Anchor:
    """Pool that only hands out indices: the pools beside it have the bytes."""
    layout, page_size, size, kv_buffer, dtype = "page_first", PAGE, PAGES * PAGE, None, "uint8"

    def get_data_page(self, index, flat=True):
        return numpy.empty(0, numpy.uint8)

    def get_page_buffer_meta(self, indices):
        return None


def config(uri, **fields):
    more = {"uri": uri, "flush_s": 0, **fields.pop("more", {})}
    base = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
            "model_name": "m", "extra_config": more}
    return SimpleNamespace(**{**base, **fields})


@contextlib.contextmanager
def cache(uri, pool, others=(), **fields):
    """A backend as SGLang sets it up."""
    made = HiCache(config(uri, **fields), {})
    try:
        made.register_mem_pool_host(pool)
        for name, other in dict(others).items():
            made.register_mem_host_pool_v2(other, name)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()


def hashes(count, seed=0):
    """Keys as SGLang makes them: SHA-256 of tokens and the page before, as hex."""
    found = [hashlib.sha256(b"seed %d" % seed).hexdigest()]
    while len(found) < count:
        found.append(hashlib.sha256(bytes.fromhex(found[-1])).hexdigest())
    return found[:count]


def indices(numbers, page=PAGE):
    return numpy.array([number * page + i for number in numbers for i in range(page)], dtype=numpy.int64)


def transfer(name, keys=(), numbers=None, policy="all_pages", page=PAGE):
    where = None if numbers is None else indices(numbers, page)
    return SimpleNamespace(name=name, keys=list(keys), host_indices=where, hit_policy=policy)


def test_pages_come_back_in_every_layout():
    keys, rng = hashes(128), random.Random(1)
    for layout in LAYOUTS:
        there, back = rng.sample(range(PAGES), 128), rng.sample(range(PAGES), 128)
        with folder() as path:
            source, target = KV(layout, seed=5), KV(layout)
            with cache(path, source) as ours:
                equal(ours._pools["kv"].kind, "view", f"{layout}: pages in place")
                equal(ours.batch_set_v1(keys, indices(there)), [True] * 128, f"{layout}: set")
                equal(ours.batch_set_v1(keys[:2], indices(there[:2])), [True] * 2, f"{layout}: set again")
                equal((ours.counters["put"], ours.counters["present"]), (128, 2), f"{layout}: counters")
            with cache(path, target) as ours:  # a restart
                equal(ours.batch_exists(keys + hashes(3, 9)), 128, f"{layout}: the prefix that is there")
                equal(ours.batch_get_v1(keys, indices(back)), [True] * 128, f"{layout}: get")
                for i in range(128):
                    equal(target.page_bytes(back[i]), source.page_bytes(there[i]), f"{layout}: page {i}")
                rest = set(range(PAGES)) - set(back)
                check(all(target.page_bytes(number) == bytes(len(target.page_bytes(0))) for number in rest), "pages beside them")
                equal(ours.batch_get_v1(hashes(2, 9), indices([0, 1])), [False] * 2, f"{layout}: missing")
                equal(ours.batch_exists(hashes(1, 9) + keys), 0, f"{layout}: no prefix")
                equal((ours.exists(keys[3]), ours.exists(hashes(1, 9)[0])), (True, False), f"{layout}: exists")


def test_against_a_dictionary():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, keys, model = random.Random(seed), hashes(60), {}
    with folder() as path:
        pool = KV(rng.choice(LAYOUTS), seed=seed)
        with cache(path, pool, more={"flush_s": 0.01}) as ours:
            for _ in range(150):
                some = rng.sample(keys, rng.randrange(1, 9))
                numbers = rng.sample(range(PAGES), len(some))
                if rng.random() < 0.5:
                    pool.kv_buffer.view(numpy.uint16).flat[rng.randrange(pool.kv_buffer.size)] ^= 1
                    equal(ours.batch_set_v1(some, indices(numbers)), [True] * len(some), "set")
                    for key, number in zip(some, numbers):
                        model.setdefault(key, pool.page_bytes(number))
                else:
                    equal(ours.batch_get_v1(some, indices(numbers)), [key in model for key in some], "get")
                    for key, number in zip(some, numbers):
                        check(key not in model or pool.page_bytes(number) == model[key], "bytes")
                leading = next((i for i, key in enumerate(some) if key not in model), len(some))
                equal(ours.batch_exists(some), leading, "exists")


def test_pages_of_others_are_not_found():
    keys = hashes(4)
    same = {"model_name": "m"}
    others = ({"model_name": "n"}, {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2},
              {"dcp_rank": 1, "dcp_size": 2}, {"more": {"fingerprint": "revision 2"}})
    with folder() as path:
        with cache(path, KV("page_first", seed=1)) as ours:
            equal(ours.batch_set_v1(keys, indices(range(4))), [True] * 4, "set")
        for fields in others:
            with cache(path, KV("page_first"), **fields) as ours:
                equal(ours.batch_exists(keys), 0, fields)
        with cache(path, KV("layer_first"), **same) as ours:
            equal(ours.batch_exists(keys), 0, "another layout")
        with cache(path, KV("page_first"), **same) as ours:
            equal(ours.batch_exists(keys), 4, "the same")
            ours.clear()
            equal(ours.batch_exists(keys), 0, "cleared")
        with cache(path, KV("page_first", seed=1), is_mla_model=True, tp_rank=0, tp_size=2) as ours:
            ours.batch_set_v1(keys, indices(range(4)))
        with cache(path, KV("page_first"), is_mla_model=True, tp_rank=1, tp_size=2) as ours:
            equal(ours.batch_exists(keys), 4, "ranks of an MLA model share pages")
        with cache(path, KV("page_first"), is_mla_model=True, tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2) as ours:
            equal(ours.batch_exists(keys), 0, "but not where SGLang splits a page's tokens among them")


@contextlib.contextmanager
def server(**arguments):
    """SGLang's server with its arguments, which a test may change."""
    args = SimpleNamespace(**{"kv_cache_dtype": "auto", "model_path": "m", "revision": None, "quantization": None, "load_format": "auto",
                              "json_model_override_args": "{}", "weight_version": "default", **arguments})
    module = SimpleNamespace(get_server_args=lambda: args, get_model=lambda: args, get_serving=lambda: args)
    with mock.patch.dict(sys.modules, {"sglang.srt.runtime_context": module}):
        yield args


def test_two_models_of_one_name():
    """Weights, revision, quantisation and overrides of a server are in the key, whatever its --served-model-name is."""
    keys = hashes(4)
    with folder() as path:
        os.mkdir(f"{path}/model")
        with open(f"{path}/model/shard", "wb") as file:
            file.write(b"weights")

        def found(more=None, **arguments):
            with server(**{"model_path": f"{path}/model", **arguments}), cache(f"{path}/store", KV("page_first", seed=1), more=more or {}) as ours:
                n = ours.batch_exists(keys)
                ours.batch_set_v1(keys, indices(range(4)))
                return n

        for arguments in ({}, {"model_path": f"{path}/other"}, {"revision": "b"}, {"quantization": "fp8"}, {"load_format": "dummy"},
                          {"json_model_override_args": '{"rope_theta": 1}'}, {"more": {"fingerprint": "v1"}}):
            equal([found(**arguments), found(**arguments)], [0, 4], arguments)
        os.utime(f"{path}/model/shard", ns=(1, 1))
        equal([found(), found(), found(more={"fingerprint": "v1"})], [0, 4, 4], "weights trained anew in place; a fingerprint takes their place")


def test_weights_that_are_updated_in_a_running_server():
    keys = hashes(4)
    pool = KV("page_first", seed=1)
    with folder() as path, server() as args, cache(path, pool) as ours:
        ours.batch_set_v1(keys, indices(range(4)))
        for name, value in (("weight_version", "step 2"), ("model_path", "checkpoint-2")):
            setattr(args, name, value)
            equal(ours.batch_exists(keys), 0, f"pages of before, {name}")
            pool.clear()  # as SGLang's flush does
            ours.batch_set_v1(keys, indices(range(4)))
            equal(ours.batch_get_v1(keys, indices(range(4))), [True] * 4, "its own")
        check(ours.clear(), "cleared")
        equal(ours.batch_exists(keys), 0, "behind a clear")


@contextlib.contextmanager
def metrics_of_sglang():
    """Stand in for SGLang's own statistics and for prometheus_client; tests/real has the real ones.

    Yields the sums of ours: what counters got, and how many values histograms, by name and by the labels behind the ranks.
    """
    said = {}

    class Metric:
        def __init__(self, name, _text, labels, **_):
            self.name, self.names = name, labels

        def labels(self, *values):
            return SimpleNamespace(inc=lambda n: self.add(values, n), observe=lambda _: self.add(values, 1))

        def add(self, values, n):
            equal(len(values), len(self.names), "labels")
            key = (self.name[len(_sglang_metrics.START):], *values[1 + len(_sglang_metrics.RANKS):])
            said[key] = said.get(key, 0) + n

    module = SimpleNamespace(StorageMetrics=lambda: SimpleNamespace(prefetch_pgs=[], backup_pgs=[], prefetch_bandwidth=[], backup_bandwidth=[]))
    modules = {"sglang.srt.observability.metrics_collector": module, "prometheus_client": SimpleNamespace(Counter=Metric, Histogram=Metric)}
    with mock.patch.dict(sys.modules, modules), mock.patch.dict(_sglang_metrics._made, clear=True):
        yield said


def test_what_sglangs_metrics_get():
    keys = hashes(6)
    with folder() as path, metrics_of_sglang():
        with cache(path, KV("page_first", seed=1)) as ours:
            ours.batch_set_v1(keys, indices(range(6)))
            equal((ours.get_stats(), ours._metrics._writes), (None, []), "SGLang keeps no metrics of storage")
        with cache(path, KV("page_first", seed=1), enable_storage_metrics=True, more={"fingerprint": "v2"}) as ours:
            ours.batch_set_v1(keys[:4], indices(range(4)))
            ours.batch_set_v1(keys[:4], indices(range(4)))  # there already: nothing moves
            ours.batch_get_v1(keys, indices(range(6)))
            stats = ours.get_stats()
            equal((stats.backup_pgs, stats.prefetch_pgs), ([4], [4]), "pages")
            check(stats.backup_bandwidth[0] > 0 and stats.prefetch_bandwidth[0] > 0, "GB/s")
            equal(ours.get_stats().prefetch_pgs, [], "taken")
            equal(ours.batch_exists(keys), 4, "asked")
            equal({name: n for name, n in ours.counters.items() if n}, {"got": 4, "missed": 2, "put": 4, "present": 4, "asked": 6, "found": 4},
                  "counters")


def test_what_sglangs_own_metrics_lack():
    keys = hashes(6)
    with folder() as path, metrics_of_sglang() as said:
        for version in ("v1", "v2"):  # detached and attached again
            with cache(path, KV("page_first", seed=1), enable_storage_metrics=True, more={"fingerprint": version}) as ours:
                ours.batch_set_v1(keys[:4], indices(range(4)))
                ours.batch_get_v1(keys, indices(range(6)))
                ours.get_stats()
                ours.get_stats()
        nbytes = 4 * len(KV("page_first").page_bytes(0))
    equal(said, {("pages", "write", "done"): 8, ("pages", "read", "done"): 8, ("pages", "read", "missed"): 4, ("bytes", "read"): 2 * nbytes,
                 ("bytes", "write"): 2 * nbytes, ("seconds", "read"): 2, ("seconds", "write"): 2}, "of two backends")


def test_pools_of_every_kind():
    keys, source = hashes(10), {"window": Window("page_first", seed=2), "mamba": States(seed=3)}
    with folder() as path:
        with cache(path, Anchor(), source) as ours:
            equal({name: pool.kind for name, pool in ours._pools.items()}, {"kv": "none", "window": "list", "mamba": "copy"}, "kinds")
            equal(ours.batch_set_v1(keys, indices(range(10))), [True] * 10, "the anchor's")
            results = ours.batch_set_v2([transfer("window", keys[5:], range(20, 25)), transfer("mamba", keys[9:], [7], page=1),
                                         transfer("nobody", keys[:1], [0]), transfer("window", keys, [1])])
            equal(results, {"window": [False] * 10, "mamba": [True], "nobody": [False]}, "set, and what doesn't fit")
            equal(ours.batch_set_v2([transfer("window", keys[5:], range(20, 25))]), {"window": [True] * 5}, "set")
        target = {"window": Window("page_first"), "mamba": States()}
        with cache(path, Anchor(), target) as ours:
            equal(ours.batch_get_v1(keys, indices(range(10))), [True] * 10, "the anchor's")
            results = ours.batch_get_v2([transfer("window", keys[5:], range(30, 35)), transfer("mamba", keys[8:], [1, 2], page=1)])
            equal(results, {"window": [True] * 5, "mamba": [False, True]}, "get")
            for i in range(5):
                equal(target["window"].page_bytes(30 + i), source["window"].page_bytes(20 + i), "window")
            equal(target["mamba"].page_bytes(2), source["mamba"].page_bytes(7), "state")
            equal(target["mamba"].page_bytes(1), bytes(LAYERS * 32), "a missing state leaves the pool alone")


def test_prefixes_of_several_pools():
    keys = hashes(10)
    with folder() as path, cache(path, KV("page_first", seed=1), {"indexer": KV("layer_first", seed=2), "swa": KV("page_first", seed=3)}) as ours:
        ours.batch_set_v1(keys[:8], indices(range(8)))
        ours.batch_set_v2([transfer("indexer", keys[:7], range(7)), transfer("swa", [keys[i] for i in (0, 2, 3, 5, 6, 7)], range(6))])
        plain = ours.batch_exists_v2(keys)
        equal((plain.kv_hit_pages, list(plain.restorable_prefix_pages)), (8, list(range(1, 9))), "alone")
        full = ours.batch_exists_v2(keys, [transfer("indexer", keys)])
        equal((full.kv_hit_pages, full.extra_pool_hit_pages["indexer"]), (7, 7), "all pages")
        both = ours.batch_exists_v2(keys, [transfer("indexer", keys), transfer("swa", keys[:2], policy="trailing_pages")])
        # swa holds pages 1, 3, 4, 6, 7, 8: windows of two end after 4, 7, 8, and the prefix of one page is a whole window.
        equal((both.kv_hit_pages, both.extra_pool_hit_pages["swa"], list(both.restorable_prefix_pages)), (7, 8, [1, 4, 7]), "window")
        none = ours.batch_exists_v2(keys, [transfer("mamba", keys[:1], policy="trailing_pages")])
        equal((none.kv_hit_pages, dict(none.extra_pool_hit_pages).get("mamba")), (0, None), "a pool without pages")
        equal(ours.batch_exists_v2(keys, [transfer("x", keys, policy="block_groups")]).kv_hit_pages, 8, "never decides")
        equal(ours.batch_exists_v2(hashes(2, 9)).kv_hit_pages, 0, "nothing")


def test_flat_pages():
    keys = hashes(3)
    with folder() as path:
        source = KV("page_first_direct", seed=4)
        with cache(path, source) as ours:
            check(ours.batch_set(keys, [source.get_data_page(i * PAGE) for i in range(3)]), "set")
            check(ours.set(keys[0], source.get_data_page(0)), "again")
            equal((ours.set(keys[0]), ours.batch_set(keys, None)), (False, False), "nothing to set")
        with cache(path, KV("page_first_direct")) as ours:
            targets = [numpy.zeros_like(source.get_data_page(0)) for _ in range(3)]
            got = ours.batch_get(keys + hashes(1, 9), targets + [targets[0].copy()])
            equal([each is not None for each in got], [True] * 3 + [False], "got")
            equal([target.tobytes() for target in targets], [source.page_bytes(i) for i in range(3)], "bytes")
            check(ours.get(keys[0]) is None, "no target")
            check(ours.get(keys[0], numpy.zeros(3, numpy.float16)) is None, "a target that is too short")
            equal(ours.batch_get_v1(keys[:1], indices([9])), [True], "the same page by v1: it was not deleted")
            equal(ours.mem_pool_host.page_bytes(9), source.page_bytes(0), "bytes by v1")


def damage(path):
    """Flip a bit in each large file of a store; returns how many."""
    count = 0
    for root, _, files in os.walk(path):
        for name in files:
            file = os.path.join(root, name)
            if os.path.getsize(file) > 300:
                flip_bit(file)
                count += 1
    return count


def test_damage_is_a_miss_and_is_mended():
    keys = hashes(3)
    with folder() as path:
        source = KV("page_first", seed=6)
        with cache(path, source) as ours:
            ours.batch_set_v1(keys, indices(range(3)))
        check(damage(path) >= 1, "nothing was damaged")
        with cache(path, KV("page_first")) as ours:
            got = ours.batch_get_v1(keys, indices(range(3)))
            check(False in got, "damage wasn't noticed")
            bad = got.index(False)
            equal([ours.counters[name] for name in ("got", "missed", "damaged")], [got.count(True), 0, got.count(False)], "each page counts once")
            for i in range(3):
                check(not got[i] or ours.mem_pool_host.page_bytes(i) == source.page_bytes(i), "wrong bytes")
            equal(ours.exists(keys[bad]), False, "a page that didn't verify is gone")
        with cache(path, source) as ours:
            equal(ours.batch_set_v1(keys, indices(range(3))), [True] * 3, "stored anew")
        with cache(path, KV("page_first")) as ours:
            equal(ours.batch_get_v1(keys, indices(range(3))), [True] * 3, "mended")
            equal([ours.mem_pool_host.page_bytes(i) for i in range(3)], [source.page_bytes(i) for i in range(3)], "bytes")


def test_a_full_disk():
    """Files may grow to 200 bytes: writes fail as on a full disk, with another errno."""
    with folder() as path, cache(path, KV("page_first", seed=1)) as ours:
        keys, limits = hashes(6), resource.getrlimit(resource.RLIMIT_FSIZE)
        equal(ours.batch_set_v1(keys[:2], indices(range(2))), [True] * 2, "with room")
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        try:
            equal(ours.batch_set_v1(keys[2:4], indices(range(2, 4))), [False] * 2, "without room")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        equal(ours.counters["failed"], 2, "counted")
        equal(ours.batch_get_v1(keys[:4], indices(range(10, 14))), [True, True, False, False], "get")
        equal(ours.batch_set_v1(keys[2:], indices(range(2, 6))), [True] * 4, "with room again")
        equal(ours.batch_get_v1(keys, indices(range(10, 16))), [True] * 6, "all")
        equal([ours.mem_pool_host.page_bytes(10 + i) for i in range(6)], [ours.mem_pool_host.page_bytes(i) for i in range(6)], "bytes")


def test_redis_down():
    keys = hashes(4)
    pool, opened = KV("layer_first", seed=8), []

    def opens(server):  # calls give up after a second without the server, also here
        with contextlib.suppress(kvasir.Error):
            opened.append(HiCache(config(f"redis://127.0.0.1:{server.port}?timeout_ms=1000")))
        return opened

    def works():
        ours.batch_set_v1(keys, indices(range(4)))
        return ours.batch_get_v1(keys, indices(range(10, 14))) == [True] * 4

    with Server() as server:
        wait_until(lambda: opens(server), timeout=60, what="a connection")
        with contextlib.closing(opened[0]) as ours:
            ours.register_mem_pool_host(pool)
            wait_until(works, timeout=60, what="pages on the server")
            equal([pool.page_bytes(10 + i) for i in range(4)], [pool.page_bytes(i) for i in range(4)], "bytes")
            server.kill()
            equal(ours.batch_exists(keys), 0, "exists, without a server")
            equal(ours.batch_get_v1(keys, indices(range(20, 24))), [False] * 4, "get, without a server")
            equal(len(ours.batch_set_v1(hashes(4, 1), indices(range(4)))), 4, "set, without a server: they may wait for it")
            pool.kv_buffer.view(numpy.uint16)[:, :, 10 * PAGE:14 * PAGE] = 0
            server.start()  # without data
            wait_until(works, timeout=60, what="pages on the server that is back")
            equal([pool.page_bytes(10 + i) for i in range(4)], [pool.page_bytes(i) for i in range(4)], "bytes again")


def test_limit_is_kept():
    """Pages are published, not only flushed: those of a save under way are never evicted."""
    with folder() as path, kvasir.store.open(f"{path}?limit=8MiB") as store:
        flusher, names = Flusher(store, 0, lambda *problem: check(False, problem)), []
        for _ in range(20):
            for _ in range(16):
                names.append(os.urandom(16))
                store.put(names[-1], os.urandom(128 << 10))
            flusher.note_put()
        kept = store.exists(names)
        check(16 <= sum(kept) <= 64 and all(kept[-16:]), f"{sum(kept)} pages of 128 KiB in 8 MiB")


def test_a_page_that_the_server_evicts():
    with Server() as server, kvasir.store.open(server.uri) as store, kvasir.store.open(server.uri) as other:
        flusher, first, more = Flusher(store, 0, lambda *problem: check(False, problem)), hashes(5), hashes(5, 1)
        for keys in first, more:
            for key in keys:
                store.put(key.encode(), b"page")
            flusher.note_put()
            equal(other.exists([key.encode() for key in keys]), [True] * 5, "on the server")
            other.discard(first[2].encode())


def test_a_flush_that_failed_is_repeated():
    told, problems = [], [kvasir.Error(errno.ECONNREFUSED, "refused")]

    def put_manifest(name, data):
        told.append((name, data))
        if problems:
            raise problems.pop()

    flusher = Flusher(SimpleNamespace(closed=False, put_manifest=put_manifest), 0, lambda *problem: None)
    flusher.note_put()
    for _ in range(3):
        flusher.flush()
    equal(len(told), 2, "once more, and no more")


def test_threads_and_flushes():
    """SGLang asks, reads and writes from threads of its own; what was set is durable without a close soon after."""
    keys, problems = hashes(256), []
    with folder() as path:
        source = KV("page_first", seed=1, pages=256)
        with cache(path, source, more={"flush_s": 0.01}) as ours:
            def write():
                for at in range(0, 256, 8):
                    if ours.batch_set_v1(keys[at:at + 8], indices(range(at, at + 8))) != [True] * 8:
                        problems.append("set")

            def ask():
                while writer.is_alive():
                    there = ours.batch_exists(keys)
                    if ours.batch_get_v1(keys[:there], indices(range(there))) != [True] * there:
                        problems.append("get")

            writer, asker = threading.Thread(target=write), threading.Thread(target=ask)
            writer.start()
            asker.start()
            writer.join()
            asker.join()
            equal(problems, [], "problems")

            def durable():
                with cache(path, KV("page_first", pages=256)) as other:
                    return other.batch_exists(keys) == 256

            wait_until(durable, timeout=60, what="pages that another process sees")
        equal([ours.batch_exists(keys), ours.batch_get_v1(keys[:1], indices([0])), ours.batch_set_v1(keys[:1], indices([0]))],
              [0, [False], [False]], "after the end")


@contextlib.contextmanager
def changed(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def test_no_more_threads():
    """Large batches go on with fewer threads. What was handed to a thread that couldn't start does nothing later, when SGLang has
    given the memory to other prompts."""
    keys, real, refused = hashes(128), threading.Thread.start, []
    source, target = KV("page_first", seed=1), KV("page_first")

    def start(thread):
        if thread.name.startswith("kvasir-pages") and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        real(thread)

    with folder() as path, changed(kvasir.sglang, "SLICE", 4096), changed(threading.Thread, "start", start):
        with cache(path, source) as ours:
            equal(ours.batch_set_v1(keys[:64], indices(range(64))), [True] * 64, "set without a thread")
            before = source.kv_buffer.copy()
            source.kv_buffer[:] = 0  # SGLang's next prompts
            equal(ours.batch_get_v1(keys[:64], indices(range(64, 128))), [True] * 64, "get without a thread")
            source.kv_buffer[:] = 0
            equal(len(refused), 2, "calls that got no thread")
            refused.append(None)
            equal(ours.batch_set_v1(keys[64:], indices(range(64))), [True] * 64, "set with threads, zeroes")
        check(not source.kv_buffer.any(), "nothing was written late")
        with cache(path, target) as ours:
            equal(ours.batch_get_v1(keys, indices(range(128))), [True] * 128, "get")
        source.kv_buffer[:] = before
        for i in range(64):
            equal(target.page_bytes(i), source.page_bytes(i), f"page {i}")
            check(not any(target.page_bytes(64 + i)), f"page {64 + i}")


def test_configurations():
    with folder() as path:
        raises(ValueError, HiCache, config(None))
        raises(ValueError, HiCache, SimpleNamespace(**{**vars(config(path)), "extra_config": None}))
        raises(ValueError, HiCache, config(path, model_name=None))
        raises(kvasir.Error, HiCache, config("nowhere://x"))
        with cache(path, KV("page_first"), model_name=None, more={"fingerprint": "f"}) as ours:
            equal(ours.batch_set_v1(["not a hash", "x" * 64], indices([0, 1])), [True, True], "other keys")
            equal(ours.batch_exists(["not a hash", "x" * 64, "y"]), 2, "other keys")
            equal(ours.batch_get_v1(hashes(2), indices([0])), [False, False], "indices for another number of pages")
            equal(ours.batch_get_v1(hashes(1), indices([0]) + 1), [False], "a page that begins within another")
            equal((ours.batch_get_v1([], indices([])), ours.batch_exists([])), ([], 0), "nothing")
            check(ours.get_stats() is None, "stats")
        made = HiCache(config(path))
        equal((made.batch_exists(hashes(2)), made.batch_get_v1(hashes(2), indices([0, 1]))), (0, [False] * 2), "no pool yet")
        made.close()


def test_cost_beyond_the_call():
    """Told, not demanded: how long Python takes for 128 pages, beside the C call alone."""
    with folder() as path, cache(path, KV("page_first", seed=1)) as ours:
        keys, where, pool = hashes(128), indices(range(128)), ours._pools["kv"]
        ours.batch_set_v1(keys, where)

        def fastest(work):
            times = []
            for _ in range(30):
                started = time.perf_counter()
                work()
                times.append(time.perf_counter() - started)
            return sorted(times)[len(times) // 4] * 1e6

        whole = (ctypes.c_int64 * 128)(*[pool.shape.length * len(pool.shape.offsets)] * 128)  # what the call would answer
        ours._store = SimpleNamespace(_call=lambda function, *args: ctypes.memmove(args[-1], whole, 1024), _c=ours._store._c, closed=False, flush=lambda: None, close=ours._store.close,
                                      discard=lambda key: None)
        alone = fastest(lambda: ours.batch_get_v1(keys, where))
        check(all(ours.batch_get_v1(keys, where)), "all pages are there")
        print(f"batch_get_v1 of 128 pages without the call into C: {alone:.0f} us, {SLOW} times as slow by sanitizers")
        check(pool.kind == "view")


if __name__ == "__main__":
    run(globals())
