# SPDX-License-Identifier: Apache-2.0
"""A vLLM 0.33 engine without a model: its own KVCacheManager, request hashing and publisher, driven by random traffic."""
import time
from dataclasses import dataclass, field
from math import lcm

from realtest import *

use("vllm-0.33.0")

import torch  # noqa: E402
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator  # noqa: E402
from vllm.v1.kv_cache_interface import (ChunkedLocalAttentionSpec, FullAttentionSpec, HiSparseHotSpec,  # noqa: E402
                                        HiSparseResidentSpec, KVCacheConfig, KVCacheGroupRole, KVCacheGroupSpec,
                                        MambaSpec, MLAAttentionSpec, SlidingWindowSpec, SparseCacheRole,
                                        get_mamba_prefill_checkpoint_position)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

init_none_hash(sha256)
IMAGE_TOKENS = 6


@dataclass(frozen=True)
class Names:
    """What tells equal prompts apart: adapter, salt, images (identifier, first token)."""
    lora: str = ""
    salt: str = ""
    images: tuple = ()


@dataclass
class Option:
    """One way to run the engine. @windows: windows in tokens, a cache group each, beside full attention."""
    name: str
    block: int = 16
    blocks: int = 64
    windows: tuple = ()  # ... of the blocks' size, or (tokens, block size)
    window_block: int = 0  # block size of the window groups; 0: as the others
    full_attention: bool = True
    states: int = 0  # cache groups of recurrent states
    state_block: int = 0  # their block size; 0: as the others'
    unit: int = 0  # prefix_match_unit: tokens of the finest hash; 0: those of the smallest block
    chunks: tuple = ()  # chunk lengths of groups with chunked local attention
    more_full: tuple = ()  # block sizes of further full-attention groups
    host_blocks: int = 0  # HiSparse: full attention in so many blocks of host memory, its indexer on the device
    context_parallel: int = 1  # ranks that share a prompt's blocks: each block of attention is as many times larger
    retention: int | None = None  # prefix_cache_retention_interval: None keeps all blocks, 0 (vllm serve) the last ones of a prompt
    eagle_drop: bool = False
    eagle_groups: tuple = ()  # groups with draft layers; none: all drop
    lookahead: int = 0  # tokens a block's hash covers beyond the block
    report_full: float = 0  # share of the requests that ask for reports
    skips: float = 0  # share of the requests that don't look into the cache, as with prompt logprobs
    resets: bool = False
    names: tuple = (Names(),)
    register: dict = field(default_factory=dict)
    registered: int = 0  # block size in the registration; 0: that of the first group
    followed: bool = True  # the indexer follows all groups; else its view may be partial, and answers too long then
    retained: bool = True  # ... with retention=0, too
    whole: bool = False  # the view is never partial


def sparse_groups(option, heads):
    """The groups of HiSparse: attention in host memory, its indexer, copies on the device, and what a request reads of them."""
    role = KVCacheGroupRole
    attention, indexer = (MLAAttentionSpec(block_size=option.block, cache_role=of, **heads)
                          for of in (SparseCacheRole.SPARSE, SparseCacheRole.INDEXER))
    page = {"block_size": option.block, "page_size": attention.page_size_bytes}
    return [KVCacheGroupSpec(["attention"], attention, role=role.HISPARSE_SOURCE, host_resident=True),
            KVCacheGroupSpec(["indexer"], indexer, role=role.HISPARSE_INDEXER),
            KVCacheGroupSpec(["resident"], HiSparseResidentSpec(**page), enable_kv_transfer=False),
            KVCacheGroupSpec(["hot"], HiSparseHotSpec(blocks_per_request=2, **page), enable_kv_transfer=False)]


def group_specs(option):
    heads = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    sparse = sparse_groups(option, heads) if option.host_blocks else []
    specs = [FullAttentionSpec(block_size=option.block, **heads)] if option.full_attention and not sparse else []
    windows = [window if isinstance(window, tuple) else (window, option.window_block or option.block) for window in option.windows]
    specs += [SlidingWindowSpec(block_size=block, sliding_window=window, **heads) for window, block in windows]
    specs += [MambaSpec(block_size=option.state_block or option.block * option.context_parallel, shapes=((16,),), dtypes=(torch.float32,),
                        mamba_cache_mode="align")
              for _ in range(option.states)]
    specs += [ChunkedLocalAttentionSpec(block_size=option.block, attention_chunk_size=chunk, **heads) for chunk in option.chunks]
    specs += [FullAttentionSpec(block_size=block, **heads) for block in option.more_full]
    return sparse + [KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in option.eagle_groups) for i, spec in enumerate(specs)]


class Copies:
    """What HiSparse's connector does: pages are copied to host memory behind a step, and announced when they are there."""

    def __init__(self, manager, rng):
        self.coordinator, self.rng, self.waiting = get_hisparse_coordinator(manager), rng, []

    def scheduled(self, request):
        self.coordinator.advance_scheduled([(request.request_id, request.num_computed_tokens)])
        self.waiting += [transfer.transfer_id for transfer in self.coordinator.build_offload_command().page_transfers]
        copies = self.coordinator.take_host_block_copies()
        self.coordinator.release_completed_host_copies([copy.dst_block_id for copy in copies])

    def complete(self, share):
        """Some of the copies are done, in any order."""
        done = {transfer: 1 for transfer in self.waiting if self.rng.random() < share}
        self.waiting = [transfer for transfer in self.waiting if transfer not in done]
        self.coordinator.update_spills(done, done)


class Engine:
    """The cache manager and what the scheduler does with it: admit, prefill in chunks, decode, preempt, finish."""

    def __init__(self, option, rng):
        self.option, self.rng = option, rng
        groups = group_specs(option)
        sizes = [group.kv_cache_spec.block_size * (1 if isinstance(group.kv_cache_spec, MambaSpec) else option.context_parallel)
                 for group in groups]
        self.hash_block = option.unit or min(sizes)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=option.blocks, kv_cache_tensors=[], kv_cache_groups=groups,
                          prefix_cache_retention_interval=option.retention,
                          hisparse_host_num_blocks=option.host_blocks or None),
            max_model_len=4096, scheduler_block_size=lcm(*sizes), hash_block_size=self.hash_block,
            use_eagle=option.eagle_drop, num_hash_lookahead_tokens=option.lookahead, enable_kv_cache_events=True,
            dcp_world_size=option.context_parallel)
        self.copies = Copies(self.manager, rng) if option.host_blocks else None
        self.hasher = get_request_block_hasher(self.hash_block, sha256, option.lookahead)
        self.running, self.talks, self.count, self.story = [], [], 0, []

    # -- requests ----------------------------------------------------------------------------------
    def request(self, tokens, names):
        self.count += 1
        images = [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier,
                                        mm_position=PlaceholderRange(offset=first, length=IMAGE_TOKENS))
                  for identifier, first in names.images if first + IMAGE_TOKENS <= len(tokens)]
        adapter = LoRARequest(names.lora, 1 + sum(names.lora.encode()), "/adapters/" + names.lora) if names.lora else None
        arguments = {"kv_cache_report_mode": "full"} if self.rng.random() < self.option.report_full else None
        skips = self.rng.random() < self.option.skips or None
        return Request(request_id=str(self.count), prompt_token_ids=list(tokens), pooling_params=None, mm_features=images,
                       sampling_params=SamplingParams(max_tokens=4096, extra_args=arguments, skip_reading_prefix_cache=skips),
                       lora_request=adapter, cache_salt=names.salt or None, block_hasher=self.hasher)

    def prompt(self):
        """A conversation that goes on, the same prompt again, or a new one; often an exact multiple of the block size."""
        rng, block = self.rng, self.option.block
        names = rng.choice(self.option.names)
        if self.talks and rng.random() < 0.7:
            tokens, names = rng.choice(self.talks)
            tokens = list(tokens[:rng.randint(1, len(tokens))]) if rng.random() < 0.3 else list(tokens)
        else:
            tokens = [1 + rng.randrange(3)] * (block * rng.randint(0, 3))
        tokens += [rng.randrange(5, 1000) for _ in range(rng.choice((0, 1, block // 2, block, 2 * block)))]
        if rng.random() < 0.5:
            tokens = tokens[:len(tokens) // block * block]
        return tokens or [7] * block, names

    # -- what the scheduler does -------------------------------------------------------------------
    def admit(self, request, chunk):
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        new = min(request.num_tokens - hit, chunk)
        if self.option.states:  # vLLM's scheduler ends a chunk where a state is kept for later requests
            at = get_mamba_prefill_checkpoint_position(request.num_prompt_tokens, self.hash_block, self.option.eagle_drop,
                                                       num_hash_lookahead_tokens=self.option.lookahead)
            new = min(new, at - hit) if at > hit else new
        if self.manager.allocate_slots(request, new, hit, blocks, num_lookahead_tokens=self.option.lookahead) is None:
            return False
        request.num_computed_tokens, request.status = hit + new, RequestStatus.RUNNING
        self.running.append(request)
        if self.copies:
            self.copies.scheduled(request)
        return True

    def advance(self, request, sampled):
        """Schedule what isn't computed (at most a chunk), after sampling @sampled tokens once the prompt is."""
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([self.rng.randrange(5, 1000) for _ in range(sampled)])
        new = min(request.num_tokens - request.num_computed_tokens, 48)
        if self.manager.allocate_slots(request, new, num_lookahead_tokens=self.option.lookahead) is None:
            return False
        request.num_computed_tokens += new
        if self.copies:
            self.copies.scheduled(request)
        return True

    def preempt(self, request):
        self.running.remove(request)
        self.manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1

    def finish(self, request, names):
        self.running.remove(request)
        self.manager.free(request)
        self.talks = self.talks[-30:] + [(list(request.all_token_ids), names)]

    def step(self):
        """One random thing that a scheduler does."""
        rng, dice = self.rng, self.rng.random()
        if self.copies:
            self.copies.complete(rng.choice((0, 0.5, 1)))
        if dice < 0.35 or not self.running:
            tokens, names = self.prompt()
            for _ in range(1 if rng.random() < 0.8 else 2):  # the same prompt twice at once: blocks aren't shared
                request = self.request(tokens, names)
                request.names = names
                if len(self.running) < 6 and self.admit(request, rng.choice((32, 48, 4096))):
                    self.story.append(f"admit {request.request_id} {len(tokens)} tokens {names}")
        elif dice < 0.8:
            request = rng.choice(self.running)
            if not self.advance(request, rng.randint(1, 3) if self.option.lookahead else 1):
                self.preempt(rng.choice(self.running))
                self.story.append("preempt")
        elif dice < 0.97:
            request = rng.choice(self.running)
            for _ in range(rng.choice((0, 0, self.option.block, 3 * self.option.block))):
                if not self.advance(request, 1):
                    break
            self.finish(request, request.names)
            self.story.append(f"finish {request.request_id} at {request.num_tokens}")
        elif self.option.resets:
            self.reset()

    def reset(self):
        for request in list(self.running):
            self.finish(request, request.names)
        if self.copies:
            self.copies.complete(1)
        check(self.manager.reset_prefix_cache())
        self.story.append("reset")

    def take_events(self):
        return self.manager.take_events()

    def probes(self, count):
        """Prompts worth asking: conversations, their prefixes, prefixes that go on otherwise, and other names."""
        rng, block = self.rng, self.option.block
        pool = self.talks + [(list(request.all_token_ids), request.names) for request in self.running]
        for _ in range(count if pool else 0):
            tokens, names = rng.choice(pool)
            if rng.random() < 0.2:
                names = rng.choice(self.option.names)
            cut = rng.choice((len(tokens), rng.randint(1, len(tokens)), len(tokens) // block * block))
            tail = [rng.randrange(5, 1000) for _ in range(rng.choice((0, 1, block)))]
            yield (tokens[:cut] + tail) or [7], names

    # -- the truth ---------------------------------------------------------------------------------
    def cached_tokens(self, tokens, names):
        hashes = self.request(tokens, names).block_hashes
        reach = min(len(tokens), len(hashes) * self.hash_block)
        found = self.manager.coordinator.find_longest_cache_hit(hashes, reach)[1]
        return found // self.option.block * self.option.block if self.option.unit else found  # kv-indexer answers in whole blocks


def make_batch(events):
    return KVEventBatch(ts=time.time(), events=events)


def make_publisher(endpoint, replay):
    return ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, topic="kv-events")


def question(names, tokens):
    """The fields of /query that tell equal prompts apart."""
    fields = {}
    if names.lora:
        fields["lora_name"] = names.lora
    if names.salt:
        fields["cache_salt"] = names.salt
    if names.images:
        fields["mm_objects"] = [{"id": identifier, "offset": first, "length": IMAGE_TOKENS}
                            for identifier, first in names.images if first + IMAGE_TOKENS <= len(tokens)]
    return fields
