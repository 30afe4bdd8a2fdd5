# SPDX-License-Identifier: Apache-2.0
"""What kvasir.vllm.Connector announces in vLLM's KV events: blocks that its store holds, medium STORAGE, owner kvasir.

A block counts once the store says that the parts of every rank and cache group are there. Its events name vLLM's first group with
full attention: a group has one kind in all events of an engine. Nobody tells what the store evicts: a block is announced as removed
when the scheduler asks for it in vain, at a reset, and, beyond MOST_HELD, when it is the one announced longest ago.
"""
import collections
import importlib
import time
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple

__all__ = ["News", "Stored"]

_events: Any = importlib.import_module("vllm.distributed.kv_events")
_named: Any = importlib.import_module("vllm.v1.core.kv_cache_utils").maybe_convert_block_hash
OWNER, MEDIUM = "kvasir", "STORAGE"
MOST_HELD = 1 << 18  # blocks that are announced at a time
MOST_UNSURE = 4096  # stores whose blocks wait for an answer
TRIES, AGAIN_S = 3, 1.0  # questions for a block that was stored, and seconds between two


class Stored(NamedTuple):
    """Blocks of a request that follow each other. @parent: hash of the block before. @due: when to ask the store for them."""
    due: float
    root: bytes
    hashes: List[bytes]
    parent: Optional[bytes]
    tokens: List[int]
    adapter: Any
    tries: int


def _tells(request: Any) -> bool:
    """Tell whether tokens and adapter say all about a request's blocks: not so with images, salts and embeddings."""
    return not any(getattr(request, name, None) for name in ("mm_features", "cache_salt", "prompt_embeds"))


def _with(kind: Any, **fields: Any) -> Any:
    """Make an event. An older vLLM lacks some fields."""
    known = getattr(kind, "__struct_fields__", fields)
    return kind(**{name: value for name, value in fields.items() if name in known})


class News:
    """Blocks that are announced, those about which the store is asked, and events since the last step. One thread."""

    def __init__(self, size: int, delay: float, group: int) -> None:
        self._size, self._delay, self._group = size, delay, group
        self._held: Dict[Tuple[bytes, bytes], None] = {}
        self._unsure: Deque[Stored] = collections.deque(maxlen=MOST_UNSURE)
        self._events: List[Any] = []

    def _blocks(self, request: Any, root: bytes, first: int, last: int, due: float) -> Stored:
        hashes = [bytes(digest) for digest in request.block_hashes[max(first - 1, 0):last]]
        parent = hashes.pop(0) if first else None
        tokens = [int(token) for token in request.all_token_ids[first * self._size:last * self._size]]
        return Stored(due, root, hashes, parent, tokens, getattr(request, "lora_request", None), 0)

    def stored(self, request: Any, root: bytes, first: int, last: int) -> None:
        """Take note that blocks [@first, @last) of a request go to the store."""
        if _tells(request):
            self._unsure.append(self._blocks(request, root, first, last, time.monotonic() + self._delay))

    def due(self) -> Optional[Stored]:
        """Take the next blocks for which the store is to be asked."""
        if self._unsure and self._unsure[0].due <= time.monotonic():
            return self._unsure.popleft()
        return None

    def answered(self, blocks: Stored, n: int) -> None:
        """Announce the first @n of blocks. The others are asked for again, some times."""
        self._announce(blocks, n)
        if n < len(blocks.hashes) and blocks.tries + 1 < TRIES:
            rest = blocks._replace(due=time.monotonic() + AGAIN_S, hashes=blocks.hashes[n:], tokens=blocks.tokens[n * self._size:],
                                   parent=blocks.hashes[n - 1] if n else blocks.parent, tries=blocks.tries + 1)
            self._unsure.append(rest)

    def asked(self, request: Any, root: bytes, first: int, found: int, last: int) -> None:
        """Take note that of a request's blocks [@first, @last) the store has the first @found, and not the next one."""
        if not _tells(request):
            return
        if found:
            self._announce(self._blocks(request, root, first, first + found, 0), found)
        if first + found < last:
            self._remove((root, bytes(request.block_hashes[first + found])))

    def _announce(self, blocks: Stored, n: int) -> None:
        begin = 0
        for i in range(n + 1):
            if i < n and (blocks.root, blocks.hashes[i]) not in self._held:
                continue
            if begin < i:
                self._say(blocks, begin, i)
            begin = i + 1
        for digest in blocks.hashes[:n]:
            self._held[blocks.root, digest] = None
        while len(self._held) > MOST_HELD:
            self._remove(next(iter(self._held)))

    def _say(self, blocks: Stored, begin: int, end: int) -> None:
        parent, adapter = blocks.hashes[begin - 1] if begin else blocks.parent, blocks.adapter
        name = getattr(adapter, "lora_name", None)
        self._events.append(_with(
            _events.BlockStored, block_hashes=[_named(digest) for digest in blocks.hashes[begin:end]],
            parent_block_hash=None if parent is None else _named(parent), token_ids=blocks.tokens[begin * self._size:end * self._size],
            block_size=self._size, lora_id=getattr(adapter, "lora_int_id", None), lora_name=name, medium=MEDIUM,
            group_idx=self._group,
            # kv-indexer takes a tier's event without extra keys for a chunk, of which nothing counts unless all is there.
            extra_keys=[(name,) if name else None] * (end - begin), kv_cache_spec_kind="full_attention", ownership=OWNER))

    def _remove(self, key: Tuple[bytes, bytes]) -> None:
        if key in self._held:
            del self._held[key]
            self._events.append(_with(_events.BlockRemoved, block_hashes=[_named(key[1])], medium=MEDIUM, group_idx=self._group, ownership=OWNER))

    def clear(self) -> None:
        """Announce that nothing is there any more."""
        for key in list(self._held):
            self._remove(key)
        self._unsure.clear()

    def take(self) -> List[Any]:
        """Take the events since the last call."""
        events, self._events = self._events, []
        return events
