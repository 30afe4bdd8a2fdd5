# SPDX-License-Identifier: Apache-2.0
"""Publish an engine's KV events, and read those of others.

    with kvasir.events.Publisher("tcp://127.0.0.1:*", block_size=16) as events:
        events.stored(hashes, tokens, parent=None)      # kv-indexer and every router follow this
        events.removed(hashes)

    reader = kvasir.events.Reader(block_size=16)
    for op in reader.decode(payload):                    # the last frame of a ZMQ message
        op.apply(index, worker=1)
"""
import ctypes
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _abi
from ._native import Handle, Invalid, call, load, numbers, text
from ._options import named
from .index import DEVICE, Numbers, PrefixIndex, Stored

__all__ = ["Batch", "Clear", "Publisher", "Reader", "Remove", "Source", "Store", "StoreKnown"]

_c = load("kvevent")
_ENCODINGS = {"map": _abi.KVE_ENCODING_MAP, "array": _abi.KVE_ENCODING_ARRAY}
_FRAMINGS = {"topic": _abi.KVE_REPLAY_WITH_TOPIC, "plain": _abi.KVE_REPLAY_WITHOUT_TOPIC}
_KINDS = {_abi.KVE_SOURCE_MAIN: "main", _abi.KVE_SOURCE_OWNER: "owner", _abi.KVE_SOURCE_WINDOW: "window"}


class Publisher(Handle):
    """A ZMQ publisher in the engines' format, with sequence numbers and a socket that replays recent batches."""

    def __init__(self, endpoint: str, *, block_size: int, replay_endpoint: Optional[str] = None, topic: str = "", rank: int = 0,
                 connect: bool = False, encoding: str = "map", replay_framing: str = "topic", batch_events: int = 0,
                 linger_us: int = 0, buffer_batches: int = 0, queue_events: int = 0, first_sequence: int = 0) -> None:
        opts = _abi.kve_publisher_opts(
            endpoint=text(endpoint), replay_endpoint=text(replay_endpoint), topic=text(topic), rank=rank, connect=connect,
            encoding=named("encoding", encoding, _ENCODINGS), replay_framing=named("replay_framing", replay_framing, _FRAMINGS), batch_events=batch_events,
            linger_us=linger_us, buffer_batches=buffer_batches, queue_events=queue_events, first_sequence=first_sequence)
        address = ctypes.c_void_p()
        call(_c.kve_publisher_create, ctypes.byref(opts), ctypes.byref(address))
        self.block_size = block_size
        self._own(address.value or 0, _c.kve_publisher_destroy)

    def _about(self) -> str:
        return f"{self.endpoint!r} block_size={self.block_size}"

    def _publish(self, kind: int, tier: int, hashes: Numbers, tokens: Optional[Numbers], parent: Optional[int],
                 lora: Optional[str], salt: Optional[str], group: int) -> None:
        keep, address, n = numbers(hashes, "Q")
        keep_too, words, n_tokens = numbers(tokens, "I") if tokens is not None else (None, None, 0)
        if tokens is not None and n_tokens != n * self.block_size:
            raise Invalid(f"{n_tokens} tokens, {n} blocks of {self.block_size}")
        above = ctypes.c_uint64(parent or 0)
        event = _abi.kve_event(type=kind, tier=tier, hashes=address, n_hashes=n, tokens=words, n_tokens=n_tokens,
                               parent=None if parent is None else ctypes.addressof(above), block_size=self.block_size,
                               lora_name=text(lora), cache_salt=text(salt), group=group)
        self._call(_c.kve_publisher_publish, ctypes.byref(event), 1)
        del keep, keep_too

    def stored(self, hashes: Numbers, tokens: Optional[Numbers], *, parent: Optional[int] = None, tier: int = DEVICE,
               lora: Optional[str] = None, salt: Optional[str] = None, group: int = -1) -> None:
        """Publish that a chain of blocks is now in @tier. @tokens None: blocks published before, now in that tier as well.

        Never blocks. Raises Error(EAGAIN) when the queue is full: followers then see a gap, and ask for a replay.
        """
        self._publish(_abi.KVE_STORED, tier, hashes, tokens, parent, lora, salt, group)

    def removed(self, hashes: Numbers, *, tier: int = DEVICE, group: int = -1) -> None:
        """Publish that blocks left @tier."""
        self._publish(_abi.KVE_REMOVED, tier, hashes, None, None, None, None, group)

    def cleared(self) -> None:
        """Publish that all blocks left."""
        self._publish(_abi.KVE_CLEARED, DEVICE, (), None, None, None, None, -1)

    def lost(self, n: int) -> None:
        """Announce that @n events were lost before they could be published."""
        self._call(_c.kve_publisher_lost, n)

    def flush(self, timeout: float = 1.0) -> None:
        """Wait until ZMQ has all events queued before. Raises Error(ETIMEDOUT)."""
        self._call(_c.kve_publisher_flush, int(timeout * 1000))

    def _text(self, function: Any) -> Optional[str]:
        address = self._enter()
        try:
            value = function(address)
        finally:
            self._leave()
        return None if value is None else value.decode()

    @property
    def endpoint(self) -> str:
        """The PUB endpoint as bound, with its port."""
        return self._text(_c.kve_publisher_endpoint) or ""

    @property
    def replay_endpoint(self) -> Optional[str]:
        """The replay endpoint as bound, None without one."""
        return self._text(_c.kve_publisher_replay_endpoint)

    def stats(self) -> Dict[str, int]:
        """Return counters by the names of kve_publisher_stats."""
        result = _abi.kve_publisher_stats()
        self._call(_c.kve_publisher_get_stats, ctypes.byref(result))
        return {name: getattr(result, name) for name, *_ in result._fields_[1:]}


# -- reading -----------------------------------------------------------------------------------------------------------

class Store(NamedTuple):
    """A chain of blocks is now in a tier: engine's hashes, and local hashes of their tokens."""
    rank: int
    tier: int
    source: int
    parent: Optional[int]
    hashes: Tuple[int, ...]
    tokens_hashes: Tuple[int, ...]
    lookahead: int

    def apply(self, index: PrefixIndex, worker: int) -> Union[Stored, int, None]:
        """Store the blocks in an index."""
        return index.store(worker, self.hashes, self.tokens_hashes, parent=self.parent, rank=self.rank, tier=self.tier, source=self.source)


class StoreKnown(NamedTuple):
    """Blocks known from an earlier store are now in a tier, too."""
    rank: int
    tier: int
    source: int
    hashes: Tuple[int, ...]
    parent: Optional[int] = None  # of a source with parts
    covered: int = 0

    def apply(self, index: PrefixIndex, worker: int) -> Union[Stored, int, None]:
        """Put the blocks into that tier of an index. ValueError for smaller blocks, which an index alone can't follow."""
        if self.covered:
            raise Invalid("blocks of a source with parts above 1: the index follows registered blocks only")
        return index.store_known(worker, self.hashes, rank=self.rank, tier=self.tier, source=self.source)


class Remove(NamedTuple):
    """Blocks left a tier. @remaining: copies that are left of each, where the event says it."""
    rank: int
    tier: int
    source: int
    hashes: Tuple[int, ...]
    remaining: Optional[Tuple[int, ...]]

    def apply(self, index: PrefixIndex, worker: int) -> Union[Stored, int, None]:
        """Take the blocks out of that tier of an index."""
        return index.remove(worker, self.hashes, rank=self.rank, tier=self.tier, source=self.source, left=self.remaining)


class Clear(NamedTuple):
    """All blocks of a rank and source left the tiers of @tiers (bit 1 << tier)."""
    rank: int
    source: int
    tiers: int

    def apply(self, index: PrefixIndex, worker: int) -> Union[Stored, int, None]:
        """Forget them in an index."""
        index.clear(worker, rank=self.rank, tiers=self.tiers, source=self.source)
        return None


Op = Union[Store, StoreKnown, Remove, Clear]


class Batch(NamedTuple):
    """A decoded batch. @skipped: events left out, by reason."""
    timestamp: float
    rank: Optional[int]
    ops: List[Op]
    events: int
    skipped: Dict[str, int]


class Source(NamedTuple):
    """Cache whose copies an operation changes: "main", another "owner", or a "window" (see kve_source in kv_event.h)."""
    kind: str
    group: int
    window: int
    need: int
    stride: int
    owner: str
    parts: int = 1
    needs: int = 0  # KV_NEEDS_RUN, KV_NEEDS_STATE, KV_NEEDS_CHUNK or KV_NEEDS_ALL


def _words(address: Optional[int], n: int) -> Tuple[int, ...]:
    return tuple((ctypes.c_uint64 * n).from_address(address)) if address and n else ()


def _op(op: Any) -> Op:
    if op.type == _abi.KVE_OP_STORE:
        words = _words(op.blocks, 2 * op.n)
        return Store(op.rank, op.tier, op.source, op.parent if op.has_parent else None, words[0::2], words[1::2], op.lookahead)
    if op.type == _abi.KVE_OP_CLEAR:
        return Clear(op.rank, op.source, op.tiers)
    hashes = _words(op.hashes, op.n)
    if op.type == _abi.KVE_OP_STORE_KNOWN:
        return StoreKnown(op.rank, op.tier, op.source, hashes, op.parent if op.has_parent else None, op.n_covered)
    left = tuple((ctypes.c_uint32 * op.n).from_address(op.remaining)) if op.remaining and op.n else None
    return Remove(op.rank, op.tier, op.source, hashes, left)


class Reader(Handle):
    """Decoder of one publisher's batches: every generation of vLLM's, SGLang's and TensorRT-LLM's events.

    One thread at a time. Operations with a source other than 0 are about other owners or windows: see source().
    """

    def __init__(self, *, block_size: int, rank: int = 0, max_events: int = 0, max_tokens: int = 0, max_salted: int = 0,
                 ignore_mm_keys: bool = False, ignore_mm_offsets: bool = False) -> None:
        opts = _abi.kve_reader_opts(block_size=block_size, rank=rank, max_events=max_events, max_tokens=max_tokens,
                                    max_salted=max_salted, ignore_mm_keys=ignore_mm_keys, ignore_mm_offsets=ignore_mm_offsets)
        address = ctypes.c_void_p()
        call(_c.kve_reader_create, ctypes.byref(opts), ctypes.byref(address))
        self._own(address.value or 0, _c.kve_reader_destroy)

    def decode(self, payload: Any) -> Batch:
        """Decode one payload. Raises Error(EPROTO) when it isn't a batch: apply nothing of it then."""
        keep, address, n = numbers(payload, "B")
        batch = _abi.kve_batch()
        reader = self._enter()
        try:
            call(_c.kve_reader_decode, reader, address, n, ctypes.byref(batch))
            ops = (_abi.kve_op * batch.n_ops).from_address(batch.ops) if batch.n_ops else ()
            found = [_op(op) for op in ops]
        finally:
            self._leave()
        del keep
        skipped = {(_c.kve_skip_name(i) or b"").decode(): count for i, count in enumerate(batch.skipped) if count}
        return Batch(batch.timestamp, batch.rank if batch.has_rank else None, found, batch.n_events, skipped)

    def reset(self) -> None:
        """Forget groups and salts: the publisher restarted."""
        address = self._enter()
        try:
            _c.kve_reader_reset(address)
        finally:
            self._leave()

    def source(self, number: int) -> Source:
        """Describe a source of this reader's operations. Raises NotFound."""
        result = _abi.kve_source()
        self._call(_c.kve_reader_source, number, ctypes.byref(result))
        return Source(_KINDS[result.kind], result.group, result.window, result.need, result.stride, result.owner.decode(), result.parts,
                      result.needs)
