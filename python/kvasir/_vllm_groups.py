# SPDX-License-Identifier: Apache-2.0
"""Cache groups of a model in vLLM, and what a hit at a position needs of each.

A model has one block table for each group of layers. A hit at position n, a multiple of every group's block size, needs of

    full attention              the blocks of tokens [0, n)
    a sliding window of W       those of tokens [n - W + 1, n): the last ceil((W - 1) / block) blocks
    chunked local attention     those of tokens [start of n's chunk, n)
    a recurrent state           the one that ends at n: it holds the state behind token n - 1

All groups hash blocks alike: a block's hash is that of the chain of tokens at its end.

libkvbm has the same formula (kvbm_hit.h), and this process doesn't load it: tests/python/test_hits.py compares both.
"""
import importlib
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

__all__ = ["Group", "Groups", "groups_of"]

NULL_BLOCK = 0  # stands in a block table for a block that is not needed any more, or was never there
FULL, WINDOW, CHUNK, STATE = "full attention", "sliding window", "chunked local attention", "recurrent state"
_KINDS = {"FullAttentionSpec": FULL, "MLAAttentionSpec": FULL, "SinkFullAttentionSpec": FULL, "SlidingWindowSpec": WINDOW,
          "SlidingWindowMLASpec": WINDOW, "ChunkedLocalAttentionSpec": CHUNK, "MambaSpec": STATE}


class Group(NamedTuple):
    """A cache group. @size: tokens of a block. @span: tokens of the window or of a chunk."""
    kind: str
    size: int
    span: int
    layers: Tuple[str, ...]

    def first_token(self, n: int) -> int:
        """Return the first token whose block a hit at @n needs."""
        if self.kind == WINDOW:
            return max(0, n - self.span + 1)
        if self.kind == CHUNK:
            return n // self.span * self.span
        return n - 1 if self.kind == STATE else 0

    def needed(self, n: int, computed: int) -> range:
        """Return the numbers of the blocks that a hit at @n needs, beyond those of a hit at @computed."""
        return range(max(self.first_token(n), computed) // self.size, -(-n // self.size))


class Groups:
    """All cache groups. @unit: hits end at its multiples; @hashed: tokens between two of a request's hashes."""

    def __init__(self, groups: Sequence[Group], unit: int, hashed: int, layout: Any) -> None:
        self.all, self.unit, self.hashed, self.layout = tuple(groups), unit, hashed, layout
        self.has_states = any(group.kind == STATE for group in groups)
        # vLLM computes from the first block on that failed. Only full attention has all that it needs there.
        self.fails_by_block = len(groups) == 1 and groups[0].kind == FULL

    @property
    def announced(self) -> int:
        """Return the first group with full attention where every block of a prompt is one of each group. Else -1."""
        kinds = [group.kind for group in self.all]
        alike = not self.has_states and all(group.size == self.unit == self.hashed for group in self.all)
        return kinds.index(FULL) if alike and FULL in kinds else -1

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of so many tokens uses at a time."""
        return sum(3 if group.kind == STATE else -(-tokens // group.size) + 1 for group in self.all)

    def none(self) -> List[List[bool]]:
        """Return what is there where nothing is."""
        return [[] for _ in self.all]

    def hashes(self, request: Any, group: int, blocks: range) -> List[bytes]:
        """Return vLLM's hashes of some of a request's blocks."""
        step = self.all[group].size // self.hashed
        return [bytes(request.block_hashes[(index + 1) * step - 1]) for index in blocks]

    def tokens(self, request: Any) -> int:
        """Return the number of a request's tokens that have hashes."""
        return len(request.block_hashes) * self.hashed

    def blocks(self, first: int, last: int) -> List[range]:
        """Return for each group the blocks that end in tokens (@first, @last]."""
        return [range(first // group.size, last // group.size) for group in self.all]

    def longest(self, there: Sequence[Sequence[bool]], first: int, computed: int, last: int) -> int:
        """Return the longest hit up to @last, or @computed. @there: for each group, which blocks from token @first on there are."""
        runs = []
        for blocks in there:
            run, length = [], 0
            for is_there in blocks:
                length = length + 1 if is_there else 0
                run.append(length)
            runs.append(run)
        for n in range(last // self.unit * self.unit, computed, -self.unit):
            if all(len(need) <= run[need.stop - 1 - first // group.size] for group, run, need
                   in ((group, run, group.needed(n, computed)) for group, run in zip(self.all, runs))):
                return n
        return computed

    def whole(self, there: Sequence[Sequence[bool]], first: int, last: int) -> int:
        """Return the token up to which every block of every group is there."""
        ends = [next((i for i, is_there in enumerate(blocks) if not is_there), len(blocks)) for blocks in there]
        return min([last] + [(first // group.size + end) * group.size for group, end in zip(self.all, ends)])


def _specs_of(spec: Any) -> List[Any]:
    """Return the descriptions of a group's layers; vLLM gives one for all where they are alike."""
    each: Dict[str, Any] = getattr(spec, "kv_cache_specs", {"": spec})
    return list(each.values())


def _group(number: int, group: Any, config: Any) -> Group:
    """Describe a group. Raises ValueError with the reason why its blocks can't be kept."""
    specs = _specs_of(group.kv_cache_spec)
    name = type(specs[0]).__name__
    kind = _KINDS.get(name, "")

    def refuse(reason: str) -> ValueError:
        return ValueError(f"kvasir.vllm: the connector can't keep this model's cache group {number} ({name}): {reason}")

    if not kind or any(_KINDS.get(type(spec).__name__) != kind for spec in specs):
        raise refuse("the connector doesn't know what a hit needs of such a cache")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise refuse("HiSparse keeps it in a pool of its own")
    if not getattr(group.kv_cache_spec, "prefix_cacheable", True):
        raise refuse("its blocks belong to one request; vLLM computes them anew behind a hit")
    if kind == STATE and any(spec.mamba_cache_mode != "align" for spec in specs):
        raise refuse("vLLM keeps states at the ends of blocks with prefix caching and --mamba-cache-mode align only")
    if kind == STATE and getattr(config, "speculative_config", None) is not None:
        raise refuse("beside speculative decoding its blocks hold states of drafts, too")
    spans = {(spec.block_size, _span(kind, spec)) for spec in specs}
    if len(spans) > 1:
        raise refuse("its layers have blocks or windows of several sizes")
    (size, span), = spans
    return Group(kind, size, span, tuple(group.layer_names))


def _span(kind: str, spec: Any) -> int:
    if kind == WINDOW:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind == CHUNK else 0


def groups_of(config: Any, cache: Any) -> Groups:
    """Return the groups of a model. Raises ValueError for one whose blocks can't be kept. @cache: vLLM's KVCacheConfig."""
    groups = [_group(number, group, config) for number, group in enumerate(cache.kv_cache_groups)]
    if not groups:
        raise ValueError("kvasir.vllm: this model has no KV cache")
    unit, hashed = importlib.import_module("vllm.v1.core.kv_cache_utils").resolve_kv_cache_block_sizes(cache, config)
    if any(group.size % hashed or unit % group.size for group in groups):
        raise ValueError(f"kvasir.vllm: blocks of {[group.size for group in groups]} tokens don't fit hashes of every {hashed} tokens")
    layout = [[group._asdict(), repr(given.kv_cache_spec)] for group, given in zip(groups, cache.kv_cache_groups)]
    return Groups(groups, unit, hashed, [layout, str(getattr(cache, "kv_cache_layout", None))])
