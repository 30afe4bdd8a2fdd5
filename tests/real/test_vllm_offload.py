# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's offload tiers without a model: what /query says of host memory and storage is what the connector would load.

The engine's own CPUOffloadingManager decides what host memory keeps and its own OffloadingEventsTracker words the events.
The secondary tiers (storage, a Mooncake store) are lists here: their real ones need devices or services; what they
announce goes through the same tracker, or is worded as Mooncake's worker words it.
"""
import tempfile

from vllm_engine import *

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventGroupSpec, OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import (LookupResult, Medium, OffloadingEvent, OffloadingKVEventsConfig, ReqContext,
                                     make_offload_key)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

SALT64 = "0123456789abcdef" * 4
SALTED = (Names(), Names(salt="s"), Names(salt=SALT64), Names(lora="a"), Names(lora="a", salt="s"))
IMAGES = (Names(), Names(images=(("img-1", 20),)), Names(images=((SALT64, 3),)))


@dataclass
class Tiers:
    """@chunk: blocks per offloaded chunk. @owners: secondary tiers, by the name their events carry ("" for none)."""
    host_chunks: int = 40
    chunk: int = 1
    self_describing: bool = True
    owners: tuple = ()
    mooncake: bool = False
    mooncake_owner: str = "mooncake"  # vLLM 0.33's worker names none, later ones this


OPTIONS = [
    (Option("host", blocks=32), Tiers()),
    (Option("host_small", blocks=24), Tiers(host_chunks=10)),
    (Option("host_salts", blocks=32, names=SALTED), Tiers()),
    (Option("host_resets", blocks=32, resets=True), Tiers()),
    (Option("host_hashes_only", blocks=32, names=SALTED), Tiers(self_describing=False)),
    (Option("host_chunks_of_2", blocks=32), Tiers(chunk=2)),
    (Option("host_chunks_of_3", blocks=48), Tiers(chunk=3)),
    (Option("storage", blocks=24), Tiers(host_chunks=16, owners=("",))),
    (Option("storage_owners", blocks=24, names=SALTED), Tiers(host_chunks=16, owners=("", "kvcr", "p2p"))),
    (Option("mooncake_salts", blocks=32, names=SALTED), Tiers(mooncake=True)),
    (Option("mooncake_images", blocks=32, names=IMAGES), Tiers(mooncake=True, mooncake_owner="")),
    (Option("mooncake_resets", blocks=32, resets=True), Tiers(mooncake=True, mooncake_owner="")),
    (Option("host_images", blocks=32, names=IMAGES), Tiers()),
]


class OffloadingEngine(Engine):
    def __init__(self, option, tiers, rng):
        super().__init__(option, rng)
        self.tiers = tiers
        self.host = CPUOffloadingManager(tiers.host_chunks, enable_events=True)
        self.tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, tiers.self_describing))
        spec = self.manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.group = GroupOffloadConfig(
            group_idx=0, tokens_per_block=option.block, tokens_per_chunk=tiers.chunk * option.block, hashes_per_chunk=tiers.chunk,
            kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None), sliding_window_size_in_chunks=None,
            kv_cache_spec=spec, manager_cls=type(self.manager.coordinator.single_type_managers[0]))
        self.storage = {owner: [] for owner in tiers.owners}  # keys, oldest first
        self.shared, self.raw, self.others = set(), [], []

    def keys(self, hashes):
        chunk = self.tiers.chunk
        return [make_offload_key(hashes[i + chunk - 1], 0) for i in range(0, len(hashes) // chunk * chunk, chunk)]

    def offload(self, request):
        """What the connector does after a step: store chunks that are computed and not in host memory."""
        computed = min(request.num_computed_tokens, len(request.block_hashes) * self.option.block) // self.option.block
        keys = self.keys(request.block_hashes[:computed])
        if self.tiers.mooncake:
            self.store_shared(request, computed)
            return
        context = ReqContext(request.request_id)
        output = self.host.prepare_store(keys, context)
        if output is None or not output.keys_to_store:
            return
        for key in output.keys_to_store:
            self.tracker.record_store(request, self.group, keys.index(key), key)
        self.host.complete_store(output.keys_to_store, context)
        self.raw += self.host.take_events()
        for owner, stored in self.storage.items():
            fresh = [key for key in output.keys_to_store if key not in stored and self.rng.random() < 0.7]
            if fresh:
                self.raw.append(OffloadingEvent(fresh, Medium.STORAGE, False, ownership=owner or None, removal_expected=True))
                stored += fresh

    def store_shared(self, request, computed):
        """As Mooncake's store worker words it: medium in small letters, neither adapter nor extra keys, no kind."""
        block = self.option.block
        for i in range(computed):
            name = request.block_hashes[i]
            if name not in self.shared:
                self.shared.add(name)
                self.others.append(BlockStored(
                    block_hashes=[maybe_convert_block_hash(name)],
                    parent_block_hash=maybe_convert_block_hash(request.block_hashes[i - 1]) if i else None,
                    token_ids=list(request.all_token_ids[i * block:(i + 1) * block]), block_size=block, lora_id=None,
                    medium="cpu", lora_name=None, group_idx=0, ownership=self.tiers.mooncake_owner or None))

    def evict_storage(self):
        for owner, stored in self.storage.items():
            if stored and self.rng.random() < 0.3:
                gone = [stored.pop(self.rng.randrange(len(stored))) for _ in range(min(len(stored), self.rng.randint(1, 4)))]
                self.raw.append(OffloadingEvent(gone, Medium.STORAGE, True, ownership=owner or None))

    def step(self):
        super().step()
        if self.running and self.rng.random() < 0.6:
            self.offload(self.rng.choice(self.running))
        self.evict_storage()

    def take_events(self):
        raw, self.raw, others, self.others = self.raw, [], self.others, []
        return super().take_events() + list(self.tracker.take_events(raw)) + others

    def tiers_tokens(self, tokens, names):
        """The truth: tokens that the engine finds in its own cache, then in host memory, then in host memory or storage.

        TieringOffloadingManager looks for each chunk in all its tiers.
        """
        hashes = self.request(tokens, names).block_hashes
        block, chunk = self.option.block, self.tiers.chunk
        gpu = self.cached_tokens(tokens, names) // block
        host = gpu // chunk
        on_host = [self.host.lookup(key, ReqContext("probe")) is LookupResult.HIT for key in self.keys(hashes)]
        if self.tiers.mooncake:
            on_host = [name in self.shared for name in hashes]
        while host < len(on_host) and on_host[host]:
            host += 1
        reach = max(gpu, host * chunk)
        stored = set().union(*self.storage.values())
        disk, keys = reach // chunk, self.keys(hashes)
        while disk < len(keys) and (keys[disk] in stored or on_host[disk]):
            disk += 1
        return {"gpu": gpu * block, "cpu": reach * block, "disk": max(reach, disk * chunk) * block}


def option_test(option, tiers):
    def test():
        tally = Tally("vLLM 0.33 offload")
        with tempfile.TemporaryDirectory() as folder, Indexer() as indexer:
            for seed, rng in histories(3):
                endpoint, replay = f"ipc://{folder}/{seed}", f"ipc://{folder}/{seed}r"
                feed = Feed(indexer, 100 + seed, make_publisher(endpoint, replay), make_batch, endpoint, option.block, replay)
                engine = OffloadingEngine(option, tiers, rng)
                for step in range(120):
                    for _ in range(rng.randint(1, 6)):
                        engine.step()
                    feed.publish(engine.take_events())
                    feed.settle()
                    for tokens, names in engine.probes(4):
                        answer = indexer.query(tokens, **question(names, tokens))["instances"].get(str(feed.instance), {})
                        for tier, truth in engine.tiers_tokens(tokens, names).items():
                            got = answer.get(tier, 0)
                            tally.add(f"{option.name} {tier}", truth, got,
                                      f"KV_TEST_SEED={seed}, step {step}, {len(tokens)} tokens, {names}, last: {engine.story[-8:]}",
                                      partial=feed.listener()["partial"])
                feed.close()
        for row in list(tally.rows):
            tally.show(row)
        for row in list(tally.rows):
            check(row not in tally.first, f"{row}: {tally.first.get(row)}")
    return test


if __name__ == "__main__":
    run_all({option.name: option_test(option, tiers) for option, tiers in OPTIONS}, globals())
