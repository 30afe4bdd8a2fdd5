# SPDX-License-Identifier: Apache-2.0
"""kvasir.sglang.HiCache in SGLang 0.5.23's own factory, host pools and controller functions, beside its `file` backend.

Only the scheduler is missing: operations are made as it makes them, and run in this thread. All on the CPU.
"""
import os
import random
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

from realtest import *

use("sglang-0.5.23")
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

PAGE = 16
LAYOUTS = ("page_first", "layer_first", "page_first_direct")


def mha(layout, pages=320, layers=3, heads=2, dim=16, page=PAGE, dtype=torch.float16):
    """SGLang's host pool of @pages pages."""
    device = MHATokenToKVPool(page, page, dtype, heads, dim, layers, "cpu", False, enable_alt_stream=False)
    return MHATokenToKVPoolHost(device._mha_buffer_info(), 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=page,
                                start_layer=0, end_layer=layers, host_token_capacity=pages * page)


def mla(layout, pages=320, layers=3, page=PAGE):
    device = MLATokenToKVPool(page, page, torch.bfloat16, 32, 16, layers, "cpu", False)
    return MLATokenToKVPoolHost(device._mla_buffer_info(), 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=page,
                                start_layer=0, end_layer=layers, target_layer_num=layers, host_token_capacity=pages * page)


def random_bytes(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    flat = tensor.view(torch.uint8).flatten() if tensor.is_contiguous() else None
    check(flat is not None, "a buffer in one piece")
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def page_of(pool, number):
    return pool.get_data_page(number * pool.page_size).view(torch.uint8).numpy().tobytes()


class Controller(HiCacheController):
    """SGLang's controller without threads, process groups and a device."""

    def __init__(self, backend, pool, folder, is_mla=False, metrics=False, **extra):  # pylint: disable=super-init-not-called
        config = {"backend_name": "kvasir", "module_path": "kvasir.sglang", "class_name": "HiCache", "interface_v1": 1,
                  "uri": str(folder), "file_storage_path": str(folder), **extra}
        self.storage_config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla, enable_storage_metrics=metrics,
            is_page_first_layout=pool.layout == "page_first", model_name="org/model", extra_config=config)
        self.mem_pool_host = self.storage_host_pool = pool
        self.page_size, self.prefetch_sync_queue = pool.page_size, SimpleNamespace(put=lambda ack: None)
        self.storage_backend = StorageBackendFactory.create_backend(backend, self.storage_config, pool)
        self.storage_backend.register_mem_pool_host(pool)
        self.storage_backend.on_host_pools_registered()
        fast = backend == "dynamic" and config["interface_v1"]
        self.page_get_func = self._page_get_zero_copy if fast else self._generic_page_get
        self.page_set_func = self._page_set_zero_copy if fast else self._generic_page_set

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if hasattr(self.storage_backend, "close"):
            self.storage_backend.close()

    def rows(self, numbers):
        return torch.cat([torch.arange(number * self.page_size, (number + 1) * self.page_size) for number in numbers])

    def backup(self, tokens, numbers):
        """Write the pages of @tokens, which lie in the pool's pages @numbers; returns the tokens that were written."""
        operation = StorageOperation(self.rows(numbers), tokens, hash_value=get_storage_hash_str(tokens, None, page_size=self.page_size))
        self._page_backup_or_log(operation)
        return operation.completed_tokens

    def prefetch(self, tokens, numbers):
        """Ask for @tokens and read them into the pool's pages @numbers; returns the tokens found, and those read."""
        operation = PrefetchOperation("request", tokens)
        operation.hash_value, found = self._storage_hit_query(operation)
        operation.host_indices = self.rows(numbers)[:found]
        return found, self._page_transfer(operation) * self.page_size


def prompt(rng, pages, page=PAGE):
    return [rng.randrange(1 << 15) for _ in range(pages * page)]


def same_bytes(make, **extra):
    """Pages that one process wrote come back in another, in any place; @extra goes to the backend's config."""
    for seed, rng in histories(1):
        tokens, other = prompt(rng, 150), prompt(rng, 3)
        there, back = rng.sample(range(320), 150), rng.sample(range(320), 150)
        with tempfile.TemporaryDirectory() as folder:
            source, target = make(), make()
            random_bytes(source.kv_buffer, seed)
            with Controller("dynamic", source, folder, **extra) as writer:
                equal(type(writer.storage_backend).__module__, "kvasir.sglang", "the factory's choice")
                equal(writer.backup(tokens, there), len(tokens), "written")
            with Controller("dynamic", target, folder, **extra) as reader:
                equal(reader.prefetch(tokens + other, back), (len(tokens), len(tokens)), "found and read")
                for i in range(150):
                    equal(page_of(target, back[i]), page_of(source, there[i]), f"page {i}")
                equal(reader.prefetch(other, range(3)), (0, 0), "another prompt")


def case(make, **extra):
    return lambda: same_bytes(make, **extra)


CASES = {}
for layout in LAYOUTS:
    CASES[f"mha_{layout}"] = case(lambda layout=layout: mha(layout))
    CASES[f"mla_{layout}"] = case(lambda layout=layout: mla(layout), is_mla=True)
    CASES[f"generic_{layout}"] = case(lambda layout=layout: mha(layout), interface_v1=0)
CASES["mha_page_head"] = case(lambda: mha("page_head"))
CASES["mha_bfloat16"] = case(lambda: mha("page_first", dtype=torch.bfloat16))


def test_layouts_are_read_in_place():
    for make in (mha, mla):
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as folder, Controller("dynamic", make(layout), folder) as ours:
                equal(ours.storage_backend._pools["kv"].kind, "view", f"{make.__name__} {layout}")


def test_metrics():
    """SGLang's collector takes what get_stats() returns; the rest is in the registry that SGLang serves."""
    import prometheus_client
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

    for _, rng in histories(1):
        tokens = prompt(rng, 20)
        with tempfile.TemporaryDirectory() as folder, Controller("dynamic", mha("page_first"), folder, metrics=True) as ours:
            ours.backup(tokens, range(20))
            ours.prefetch(tokens + prompt(rng, 2), range(22))
            collector = StorageMetricsCollector({"storage_backend": "dynamic", "tp_rank": 0})
            collector.log_storage_metrics(ours.storage_backend.get_stats())
        text = prometheus_client.generate_latest().decode()
        labels = 'dp_rank="0",model_name="org/model",{}pp_rank="0",tp_rank="0"'
        for line in ('sglang:backup_pgs_sum{storage_backend="dynamic",tp_rank="0"} 20.0', 'sglang:prefetch_pgs_sum{storage_backend="dynamic",tp_rank="0"} 20.0',
                     'sglang:kvasir_asked_total{answer="asked",' + labels.format("") + "} 22.0",
                     'sglang:kvasir_asked_total{answer="found",' + labels.format("") + "} 20.0",
                     "sglang:kvasir_pages_total{" + labels.format('operation="write",outcome="done",') + "} 20.0",
                     "sglang:kvasir_pages_total{" + labels.format('operation="read",outcome="done",') + "} 20.0",
                     "sglang:kvasir_seconds_count{" + labels.format('operation="read",') + "} 1.0"):
            check(line in text.splitlines(), f"{line}\n" + "\n".join(line for line in text.splitlines() if "kvasir" in line))


def test_damage_ends_the_prefix():
    for _, rng in histories(1):
        tokens = prompt(rng, 20)
        with tempfile.TemporaryDirectory() as folder:
            source = mha("page_first")
            random_bytes(source.kv_buffer, 1)
            with Controller("dynamic", source, folder) as ours:
                ours.backup(tokens, range(20))
            large = max((os.path.getsize(os.path.join(root, name)), os.path.join(root, name))
                        for root, _, names in os.walk(folder) for name in names)
            flip_bit(large[1])
            target = mha("page_first")
            with Controller("dynamic", target, folder) as ours:
                found, read = ours.prefetch(tokens, range(20))
                check(read < found == len(tokens), f"{read} of {found} tokens")
                for i in range(read // PAGE):
                    equal(page_of(target, i), page_of(source, i), f"page {i}")
                equal(ours.backup(tokens, range(40, 60)), len(tokens), "written again")


def test_pools_beside_the_first():
    """SGLang's v2 calls, with its own descriptors and results."""
    for _, rng in histories(1):
        tokens = prompt(rng, 10)
        keys = get_storage_hash_str(tokens, None, page_size=PAGE)
        with tempfile.TemporaryDirectory() as folder:
            anchor, window = LogicalHostPool(320 * PAGE, PAGE), mha("layer_first")
            random_bytes(window.kv_buffer, 2)
            with Controller("dynamic", anchor, folder) as ours:
                ours.storage_backend.register_mem_host_pool_v2(window, PoolName.SWA)
                equal(ours.backup(tokens, range(10)), len(tokens), "the anchor's")
                rows = ours.rows(range(30, 34))
                results = ours.storage_backend.batch_set_v2([PoolTransfer(PoolName.SWA, host_indices=rows, keys=keys[6:])])
                equal(results, {PoolName.SWA: [True] * 4}, "set")
            target = mha("layer_first")
            with Controller("dynamic", LogicalHostPool(320 * PAGE, PAGE), folder) as ours:
                ours.storage_backend.register_mem_host_pool_v2(target, PoolName.SWA)
                asked = PoolTransfer(PoolName.SWA, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
                result = ours.storage_backend.batch_exists_v2(keys, [asked])
                equal((result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages),
                      (10, {PoolName.KV: 10, PoolName.SWA: 10}, [8, 9, 10]), "prefixes")
                equal(ours.storage_backend.batch_get_v2([PoolTransfer(PoolName.SWA, host_indices=ours.rows(range(4)), keys=keys[6:])]),
                      {PoolName.SWA: [True] * 4}, "get")
                for i in range(4):
                    equal(page_of(target, i), page_of(window, 30 + i), f"page {i}")


def test_a_store_that_fails_ends_nothing():
    with tempfile.TemporaryDirectory() as folder, Controller("dynamic", mha("page_first"), folder) as ours:
        ours.storage_backend._store.close()
        equal(ours.backup(list(range(64)), range(4)), 0, "backup")
        equal(ours.prefetch(list(range(64)), range(4)), (0, 0), "prefetch")


def rates(backend, make, folder, count, rounds):
    """Median GiB/s of set and get of @count pages by SGLang's page functions, and of a copy of them in memory; then the CPU seconds
    that a GiB of set and get took."""
    source, target = make(), make()
    random_bytes(source.kv_buffer, 3)
    target.kv_buffer.fill_(1)  # its memory is there, as that of a pinned pool
    nbytes = len(page_of(source, 0)) * count
    sets, gets, copies, set_cpu, get_cpu = [], [], [], [], []
    for number in range(rounds):
        warm(4 << 30)
        with Controller(backend, source, folder) as ours:
            rng = random.Random(number)
            hashes = get_storage_hash_str(prompt(rng, count), None, page_size=PAGE)
            started, cpu = time.perf_counter(), time.process_time()
            check(ours.page_set_func(hashes, ours.rows(range(count))), "set")
            sets.append(nbytes / (time.perf_counter() - started) / (1 << 30))
            set_cpu.append((time.process_time() - cpu) / nbytes * (1 << 30))
        with Controller(backend, target, folder) as ours:
            operation = PrefetchOperation("request", [])
            started, cpu = time.perf_counter(), time.process_time()
            equal(ours.page_get_func(operation, hashes, ours.rows(range(count))), count, "get")
            gets.append(nbytes / (time.perf_counter() - started) / (1 << 30))
            get_cpu.append((time.process_time() - cpu) / nbytes * (1 << 30))
            equal(page_of(target, count - 1), page_of(source, count - 1), "bytes")
        started = time.perf_counter()
        target.kv_buffer.copy_(source.kv_buffer)
        copies.append(target.kv_buffer.nbytes / (time.perf_counter() - started) / (1 << 30))
    return [statistics.median(values) for values in (sets, gets, copies, set_cpu, get_cpu)]


def test_rates_beside_the_file_backend():
    """Told: 128 pages of 2 MiB (Llama 3 8B, 16 tokens) on tmpfs, and on the disk of $TMPDIR; ours verified and theirs not."""
    count = 128
    rounds = int(os.environ.get("KV_ROUNDS", "3"))
    for where in ("/dev/shm", tempfile.gettempdir()):
        for layout in ("page_first", "layer_first", "page_first_direct"):
            table = {}
            for backend in ("file", "dynamic"):
                with tempfile.TemporaryDirectory(dir=where) as folder:
                    table[backend] = rates(backend, lambda: mha(layout, pages=count, layers=32, heads=8, dim=128), folder, count, rounds)
            theirs, ours = table["file"], table["dynamic"]
            print(f"  {where} {layout}: set {ours[0]:.2f} GiB/s, file {theirs[0]:.2f} ({ours[0] / theirs[0]:.1f} x); "
                  f"get {ours[1]:.2f} GiB/s, file {theirs[1]:.2f} ({ours[1] / theirs[1]:.1f} x); a copy in memory {ours[2]:.2f}; "
                  f"CPU seconds a GiB: set {ours[3]:.2f}, file {theirs[3]:.2f}, get {ours[4]:.2f}, file {theirs[4]:.2f}", flush=True)


if __name__ == "__main__":
    run_all(CASES, globals())
