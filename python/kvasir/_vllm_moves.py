# SPDX-License-Identifier: Apache-2.0
"""What both halves of the connector for vLLM share: a step's plan, keys of blocks, statistics."""
import hashlib
import importlib
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence

from . import store as _store
from ._connector import Warner
from ._native import Error
from ._vllm_groups import NULL_BLOCK
from .queue import Queue

_Metadata: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorMetadata
PREFIX = 16  # bytes of a key in the store: for all that decides a block's bytes, the rank, the cache group; the block's hash follows
ASK_WAIT_S = 0.002  # longest time that a step gives a store to answer before it goes on with other requests
MOST_TIMES = 1024  # loads and stores whose duration is kept until statistics are taken


@dataclass
class Move:
    """Blocks of one request to load or to store: their numbers in the cache, their groups, vLLM's hashes, the root of their keys."""
    request: str
    root: bytes
    blocks: List[int] = field(default_factory=list)
    groups: List[int] = field(default_factory=list)
    hashes: List[bytes] = field(default_factory=list)

    def add(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Add blocks of a group. vLLM's null blocks are left out: nothing is kept in them."""
        for block, digest in zip(blocks, hashes):
            if block != NULL_BLOCK:
                self.blocks.append(block)
                self.groups.append(group)
                self.hashes.append(digest)


@dataclass
class Plan(_Metadata):  # type: ignore[misc]
    """A step's work for the workers. @fresh: blocks that get other bytes in this step. @idle: the step computes nothing.

    @resets: of the cache so far. Loads that a worker began before the last one fail.
    """
    loads: List[Move] = field(default_factory=list)
    stores: List[Move] = field(default_factory=list)
    fresh: List[int] = field(default_factory=list)
    idle: bool = True
    resets: int = 0


def keys_of(root: bytes, rank: int, groups: Sequence[int], hashes: Sequence[bytes]) -> List[bytes]:
    """Return the keys of one rank's blocks. @groups: of each block."""
    prefixes = {group: hashlib.sha256(root + b"rank %d group %d" % (rank, group)).digest()[:PREFIX] for group in set(groups)}
    return [prefixes[group] + (digest if len(digest) <= 32 else hashlib.sha256(digest).digest()) for group, digest in zip(groups, hashes)]


class Figures:
    """Statistics since they were taken: numbers and lists of seconds by the names of _vllm_metrics. One thread, or under a lock."""

    def __init__(self) -> None:
        self._data: Dict[str, Any] = {}

    def add(self, **numbers: int) -> None:
        """Count."""
        for name, n in numbers.items():
            if n:
                self._data[name] = self._data.get(name, 0) + n

    def time(self, name: str, begun: float) -> None:
        """Note how long something took; of very many, the first ones."""
        times = self._data.setdefault(name, [])
        if len(times) < MOST_TIMES:
            times.append(time.monotonic() - begun)

    def take(self, **gauges: int) -> Any:
        """Return what was counted, as vLLM's object; None: nothing."""
        data, self._data = self._data, {}
        if not data:
            return None
        return importlib.import_module("kvasir._vllm_metrics").Stats(data={**data, **gauges})


def close(queue: Queue, store: _store.Store, warn: Warner) -> None:
    """Close both. A store that doesn't answer keeps what it uses, and the engine goes on with its own end."""
    try:
        queue.close()
        store.close()
    except Error as problem:
        warn("closing", problem)
