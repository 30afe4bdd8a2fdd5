# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's SimpleCPUOffloadConnector without a model: a block pool of the host below that of the device.

Its own scheduler side decides what is stored, loaded and evicted, and words the events; copies are done at once or some
steps later. What /query says of host memory is what the connector would load behind what the device has.
"""
import tempfile
from dataclasses import replace
from types import SimpleNamespace

from vllm_engine import *

from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

SALT64 = "0123456789abcdef" * 4
SALTED = (Names(), Names(salt="s"), Names(salt=SALT64), Names(lora="a"), Names(lora="a", salt="s"))
IMAGES = (Names(), Names(images=(("img-1", 20),)), Names(images=((SALT64, 3),)))
PAGE = 1024  # bytes of a block, which nothing fills


@dataclass
class Pool:
    """@blocks: of host memory. @lazy: stores what the device evicts next, and tells only its hashes."""
    blocks: int = 60
    lazy: bool = False
    disk: bool = False


DROP = {"eagle_drop": True}
WINDOW_DROPS = {"windows": (40,), "eagle_drop": True, "register": DROP}
OPTIONS = [
    (Option("eager"), Pool()),
    (Option("eager_small"), Pool(blocks=24)),
    (Option("eager_salts", names=SALTED), Pool()),
    (Option("eager_images", names=IMAGES), Pool()),
    (Option("eager_resets", resets=True), Pool()),
    (Option("eager_resets_salts", resets=True, names=SALTED), Pool()),
    (Option("eager_drop", eagle_drop=True, register=DROP), Pool()),
    (Option("eager_window", blocks=64, windows=(40,)), Pool(blocks=96)),
    (Option("eager_windows", blocks=96, windows=(40, 100)), Pool(blocks=128)),
    (Option("eager_window_resets_salts", blocks=64, windows=(33,), resets=True, names=SALTED), Pool(blocks=96)),
    (Option("eager_window_drop", blocks=64, **WINDOW_DROPS), Pool(blocks=96)),
    (Option("eager_window_drop_full", blocks=64, eagle_groups=(0,), **{**WINDOW_DROPS, "register": {**DROP, "eagle_groups": "0"}}),
     Pool(blocks=96)),
    (Option("eager_small_window_blocks", blocks=64, block=32, windows=(64,), window_block=16), Pool(blocks=96)),
    (Option("lazy"), Pool(lazy=True)),
    (Option("lazy_small"), Pool(blocks=24, lazy=True)),
    (Option("lazy_salts", names=SALTED), Pool(lazy=True)),
    (Option("lazy_images", names=IMAGES), Pool(lazy=True)),
    (Option("lazy_resets", resets=True), Pool(lazy=True)),
    (Option("lazy_drop", eagle_drop=True, register=DROP), Pool(lazy=True)),
    (Option("lazy_window", blocks=64, windows=(40,)), Pool(blocks=96, lazy=True)),
    (Option("lazy_window_drop", blocks=64, **WINDOW_DROPS), Pool(blocks=96, lazy=True)),
    # The pool serves chunks only where the device's hit ends with one, which no index rule has: the view is partial.
    (Option("eager_chunk", blocks=64, chunks=(64,), followed=False,
            register={"groups": [{"kind": "chunked_local_attention", "chunk": 64}]}), Pool(blocks=96)),
    (Option("disk"), Pool(disk=True)),
    (Option("disk_window", blocks=64, windows=(40,)), Pool(blocks=96, disk=True)),
]
# The mode of reports is registered: the view is partial only after clears, and with parts of blocks.
OPTIONS = [(replace(option, blocks=option.blocks if option.windows or option.chunks else 32,
                    register={**option.register, "kv_cache_report_mode": "incremental"}), pool) for option, pool in OPTIONS]
# vllm serve's default keeps fewer blocks of windows.
OPTIONS += [(replace(option, name=f"{option.name}_retention", retention=0), pool) for option, pool in OPTIONS if option.windows]


class PoolEngine(Engine):
    def __init__(self, option, pool, rng):
        super().__init__(option, rng)
        self.loading, self.scheduled, self.preempted, self.stores = [], [], set(), []
        self.batches, self.was_reset = [], False
        config = self.manager.kv_cache_config
        size = PAGE * option.blocks
        tensor = KVCacheTensor(size=size, layers=["layer0"], layer_stride=size, block_stride=PAGE)
        drops = SimpleNamespace(use_eagle_block_drop=lambda: True) if option.eagle_drop else None
        engine = SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True), speculative_config=drops,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
            model_config=SimpleNamespace(max_model_len=4096), max_in_flight_tokens=4096, num_prefill_lookahead_tokens=0,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4 * option.block))
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self.host = SimpleCPUOffloadScheduler(
            engine, replace(config, kv_cache_tensors=[tensor]), PAGE * pool.blocks, scheduler_block_size=lcm(*sizes),
            hash_block_size=self.hash_block, lazy_offload=pool.lazy, disk_capacity_bytes=PAGE * pool.blocks if pool.disk else 0)
        self.host.bind_gpu_block_pool(self.manager.block_pool)

    # -- what the scheduler does with a connector --------------------------------------------------
    def admit(self, request, chunk):
        """As the engine does: blocks that only the host has are loaded first, and cached once they are there."""
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        loaded, _ = self.host.get_num_new_matched_tokens(request, hit)
        new = 0 if loaded else min(request.num_tokens - hit, chunk)
        if self.manager.allocate_slots(request, new, hit, blocks, num_lookahead_tokens=self.option.lookahead,
                                       num_external_computed_tokens=loaded, delay_cache_blocks=bool(loaded)) is None:
            self.host.request_finished(request, [])
            return False
        self.host.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), loaded)
        request.num_computed_tokens, request.status = hit + loaded + new, RequestStatus.RUNNING
        if loaded:
            self.loading.append(request)
        else:
            self.running.append(request)
            self.scheduled.append(request)
        return True

    def advance(self, request, sampled):
        done = super().advance(request, sampled)
        if done:
            self.scheduled.append(request)
        return done

    def preempt(self, request):
        super().preempt(request)
        self.preempted.add(request.request_id)

    def finish(self, request, names):
        self.host.request_finished_all_groups(request, self.manager.get_block_ids(request.request_id))
        super().finish(request, names)

    def reset(self):
        """Either pool, or both, in the order of the engine."""
        for request in list(self.running):
            self.finish(request, request.names)
        self.finish_step(all_copies=self.rng.random() < 0.9)
        what, self.was_reset = self.rng.randrange(3), True
        if what < 2:
            self.story.append(f"reset of the device: {self.manager.reset_prefix_cache()}")
        if what > 0:
            self.story.append(f"reset of the host: {self.host.reset()}")

    def step(self):
        """A reset comes between two steps of the engine: what it announces goes out with the next one's."""
        self.was_reset = False
        super().step()
        if not self.was_reset:
            self.finish_step()

    def finish_step(self, all_copies=False):
        """Hand the copies of this step to the worker; some that are on their way are done. The step's events are a batch."""
        live = [request for request in self.scheduled if request in self.running]
        tables = [SimpleNamespace(req_id=request.request_id, block_ids=self.manager.get_block_ids(request.request_id)) for request in live]
        meta = self.host.build_connector_meta(SimpleNamespace(
            kv_connector_block_state=None, preempted_req_ids=self.preempted, finished_req_ids=set(), scheduled_new_reqs=tables,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens={request.request_id: 1 for request in live}))
        self.scheduled, self.preempted = [], set()
        if meta.store_event >= 0:
            self.stores.append(meta.store_event)
        done = [event for event in self.stores if all_copies or self.rng.random() < 0.6]
        loaded = [request for request in self.loading if all_copies or self.rng.random() < 0.6]
        self.stores = [event for event in self.stores if event not in done]
        for request in loaded:
            self.loading.remove(request)
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self.running.append(request)
        self.host.update_connector_output(KVConnectorOutput(
            finished_recving={request.request_id for request in loaded},
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata({event: 1 for event in done})))
        self.batches.append(self.manager.take_events() + list(self.host.take_events()))

    def take_batches(self):
        batches, self.batches = self.batches, []
        return batches

    def tiers_tokens(self, tokens, names):
        """The truth: tokens that the engine finds in its own cache, then in the pool below."""
        hashes = self.request(tokens, names).block_hashes
        gpu = self.cached_tokens(tokens, names)
        rest = hashes[gpu // self.hash_block:]
        reach = min(len(tokens), len(hashes) * self.hash_block) - gpu
        if any(gpu % chunk for chunk in self.option.chunks):
            rest = []
        return {"gpu": gpu, "cpu": gpu + (self.host.cpu_coordinator.find_longest_cache_hit(rest, reach)[1] if rest else 0)}


def option_test(option, pool):
    def test():
        # A clear doesn't tell of which pool it is: the view is partial until that is known.
        tally = Tally("vLLM 0.33 pool", loose=option.resets or not option.followed)
        with tempfile.TemporaryDirectory() as folder, Indexer() as indexer:
            for seed, rng in histories(3):
                endpoint, replay = f"ipc://{folder}/{seed}", f"ipc://{folder}/{seed}r"
                feed = Feed(indexer, 100 + seed, make_publisher(endpoint, replay), make_batch, endpoint, option.block, replay,
                            **option.register)
                engine = PoolEngine(option, pool, rng)
                for step in range(120):
                    for _ in range(rng.randint(1, 6)):
                        engine.step()
                    while engine.was_reset:
                        engine.step()
                    for events in engine.take_batches():  # a block of the host is told before the device can evict it
                        feed.publish(events)
                    feed.settle()
                    for tokens, names in engine.probes(4):
                        answer = indexer.query(tokens, **question(names, tokens))["instances"].get(str(feed.instance), {})
                        for tier, truth in engine.tiers_tokens(tokens, names).items():
                            got = answer.get("disk" if pool.disk and tier == "cpu" else tier, 0)
                            tally.add(f"{option.name} {tier}", truth, got,
                                      f"KV_TEST_SEED={seed}, step {step}, {len(tokens)} tokens, {names}, last: {engine.story[-8:]}",
                                      partial=feed.listener()["partial"])
                feed.close()
        for row in list(tally.rows):
            tally.exact(row)
            if not option.resets and not option.window_block and option.followed:
                equal(tally.partial[row][0], 0, f"{row}: answers while partial")
    return test


if __name__ == "__main__":
    run_all({option.name: option_test(option, pool) for option, pool in OPTIONS}, globals())
