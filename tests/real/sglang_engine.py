# SPDX-License-Identifier: Apache-2.0
"""An SGLang 0.5.23 prefix cache without a model: its own radix trees and publisher, driven by random traffic.

Only the allocator is ours: it hands out row numbers and counts what is in use, for there is no GPU memory behind it.
"""
import time
from array import array
from dataclasses import dataclass
from types import SimpleNamespace

from realtest import *

use("sglang-0.5.23")

import torch  # noqa: E402
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


@dataclass(frozen=True)
class Names:
    """What tells equal prompts apart: adapter and salt."""
    lora: str = ""
    salt: str = ""


@dataclass
class Option:
    """One way to run the engine. @tree: "radix" (RadixCache), "python" or "rust" (cores of UnifiedRadixCache)."""
    name: str
    tree: str = "radix"
    page: int = 16
    rows: int = 1024
    eagle: bool = False
    dynamo_format: bool = False
    resets: bool = False
    host_rows: int = 0  # rows of host memory (HiCache); 0: none
    window: int = 0  # tokens of a sliding window beside full attention, of pages of one token; 0: none
    names: tuple = (Names(),)
    register: tuple = ()


class Rows:
    """The allocator: rows of the KV pool by number. A row that is freed twice, or never taken, is an error."""
    device = torch.device("cpu")

    def __init__(self, count):
        self.count, self.used, self.next = count, set(), 0

    def available(self):
        return self.count - len(self.used)

    def take(self, count):
        rows = range(self.next, self.next + count)
        self.next += count
        self.used.update(rows)
        return torch.tensor(rows, dtype=torch.int64)

    def free(self, rows, *_, **__):
        for row in rows.tolist():
            self.used.remove(row)

    free_segment = free


class WindowMemory(BaseSWAKVPool):
    """The memory of a hybrid model, without any: it knows which row of the window belongs to which row."""
    swa_kv_pool = full_kv_pool = None

    def __init__(self):
        self.full_to_swa_index_mapping = None

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]


WindowMemory.__abstractmethods__ = frozenset()


class WindowRows(SWATokenToKVPoolAllocator):
    """SGLang's own allocator of a hybrid model, half as many rows in the window."""

    def __init__(self, count):
        super().__init__(count, count // 2, 1, torch.float32, "cpu", WindowMemory(), False)

    available, take = SWATokenToKVPoolAllocator.available_size, SWATokenToKVPoolAllocator.alloc


class HostMemory:
    """HiCache's controller without copies: writes to host memory are done at once, as far as there is room."""

    def __init__(self, count):
        self.rows, self.enable_storage, self.write_policy = Rows(count), False, "write_through"
        pool = SimpleNamespace(shared_allocation_domain=None)
        self.mem_pool_host = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=pool, host_evict_fn=None),
                                             available_size=self.rows.available, clear=self.rows.used.clear)

    def write(self, device_rows, **_):
        return self.rows.take(len(device_rows))

    def reset(self):
        self.rows.used.clear()


class Engine:
    """What the scheduler does with the tree: look up, hold, compute, insert, let go, evict."""

    def __init__(self, option, rng):
        self.option, self.rng = option, rng
        self.rows = WindowRows(option.rows) if option.window else Rows(option.rows)
        parameters = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.rows, page_size=option.page,
            is_eagle=option.eagle, enable_kv_cache_events=True, dynamo_kv_event_format=option.dynamo_format)
        if option.tree == "radix":
            self.tree = RadixCache(parameters)
        else:
            parameters.tree_components, parameters.tree_core_backend = (ComponentType.FULL,), option.tree
            if option.window:
                parameters.tree_components += (ComponentType.SWA,)
                parameters.sliding_window_size = option.window
            self.tree = UnifiedRadixCache(parameters)
        if option.host_rows:
            self.tree.cache_controller = HostMemory(option.host_rows)
            self.tree.components[ComponentType.FULL]._full_kv_pool_host = True
            self.tree.host_pool_group = self.tree.cache_controller.rows
            self.tree.tree_core.set_hicache_enabled()
            self.tree.write_through_threshold = 1
        for names in option.names:
            if names.lora:
                parameters.kv_event_lora_names.register(lora_id=self.lora_id(names.lora), lora_name=names.lora)
                parameters.kv_event_lora_names.register(
                    SimpleNamespace(lora_id=self.lora_id(names.lora), extra_key=self.lora_id(names.lora)), names.lora)
        self.held, self.talks, self.story = [], [], []

    @staticmethod
    def lora_id(name):
        return name.encode().hex().rjust(32, "0")

    def key(self, tokens, names):
        return RadixKey(array("q", tokens), extra_key=self.lora_id(names.lora) if names.lora else None,
                        cache_salt=names.salt or None)

    # -- traffic -----------------------------------------------------------------------------------
    def prompt(self):
        rng, page = self.rng, self.option.page
        names = rng.choice(self.option.names)
        if self.talks and rng.random() < 0.7:
            tokens, names = rng.choice(self.talks)
            tokens = list(tokens[:rng.randint(1, len(tokens))]) if rng.random() < 0.3 else list(tokens)
        else:
            tokens = [1 + rng.randrange(3)] * (page * rng.randint(0, 3))
        tokens += [rng.randrange(5, 1000) for _ in range(rng.choice((0, 1, page // 2, page, 2 * page)))]
        if rng.random() < 0.5:
            tokens = tokens[:len(tokens) // page * page]
        return tokens or [7] * page, names

    def insert(self, tokens, names):
        """A finished request's tokens go into the tree; duplicate rows are given back, as the scheduler does."""
        missing = len(tokens) - self.rows.available()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing, swa_num_tokens=missing if self.option.window else 0))
        if len(tokens) > self.rows.available():
            return
        values = self.rows.take(len(tokens))
        result = self.tree.insert(InsertParams(key=self.key(tokens, names), value=values))
        units = len(tokens) - 1 if self.option.eagle else len(tokens)
        if self.option.tree == "radix":  # UnifiedRadixCache frees the duplicates itself
            self.rows.free(values[:result.prefix_len])
        self.rows.free(values[max(units, 0) // self.option.page * self.option.page:])
        self.talks = self.talks[-30:] + [(tokens, names)]
        self.story.append(f"insert {len(tokens)} {names}")

    def step(self):
        rng, dice = self.rng, self.rng.random()
        if dice < 0.6:
            self.insert(*self.prompt())
        elif dice < 0.75 and self.talks:
            node = self.tree.match_prefix(MatchPrefixParams(key=self.key(*rng.choice(self.talks)))).last_device_node
            self.held.append(self.tree.lock(node))
        elif dice < 0.88 and self.held:
            self.tree.unlock(self.held.pop(rng.randrange(len(self.held))))
        elif dice < 0.98:
            pages = rng.randint(1, 12)
            tokens = pages * self.option.page
            self.tree.evict(EvictParams(swa_num_tokens=tokens) if self.option.window and rng.random() < 0.7
                            else EvictParams(num_tokens=tokens))
            self.story.append(f"evict {pages} pages")
        elif self.option.resets:
            while self.held:
                self.tree.unlock(self.held.pop())
            self.tree.reset()
            self.rows.used.clear()
            self.story.append("reset")

        if self.option.host_rows:
            if rng.random() < 0.1:
                self.tree.evict_host(rng.randint(1, 6) * self.option.page)
            for written in list(self.tree.ongoing_write_through):
                self.tree._finish_write_through_ack(written)

    def take_events(self):
        return self.tree.take_events()

    # -- the truth ---------------------------------------------------------------------------------
    def cached_tokens(self, tokens, names):
        return self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, names))).device_prefix_len

    def tiers_tokens(self, tokens, names):
        match = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, names)))
        return {"gpu": match.device_prefix_len, "cpu": match.device_prefix_len + match.host_hit_length}


def make_batch(events):
    return KVEventBatch(ts=time.time(), events=events)


def make_publisher(port, replay_port):
    """Bound on loopback (SGLang's own wildcard would be every address)."""
    return ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}", topic="kv-events", bind=True,
                             replay_endpoint=f"tcp://127.0.0.1:{replay_port}")


def question(names, _tokens):
    return {field: value for field, value in (("lora_name", names.lora), ("cache_salt", names.salt)) if value}
