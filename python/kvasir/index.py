# SPDX-License-Identifier: Apache-2.0
"""Hash prompts as routers and engines do, and find who holds their prefix.

A router in ten lines:

    index = kvasir.index.PrefixIndex()
    def on_stored(worker, parent, hashes, tokens):      # from the engines' events
        index.store(worker, hashes, hash_tokens(tokens, 16), parent=parent)
    def route(prompt, loads):
        held = {match.worker: match.device for match in index.find(hash_tokens(prompt, 16))}
        return max(loads, key=lambda worker: held.get(worker, 0) - loads[worker])

kvasir.events.Reader decodes events into calls of an index by itself. An index may be used by any number of threads.
"""
import array
import ctypes
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from . import _abi
from ._native import Handle, Invalid, call, error, load, numbers

__all__ = ["DEVICE", "DISK", "EXTERNAL", "GroupMatch", "HOST", "Match", "PrefixIndex", "SEED", "Stored", "Window", "hash_block",
           "hash_tokens", "mm_identity", "mm_placed", "seed", "sequence_hashes"]

DEVICE, HOST, DISK, EXTERNAL = (_abi.KV_TIER_DEVICE, _abi.KV_TIER_HOST, _abi.KV_TIER_DISK, _abi.KV_TIER_EXTERNAL)
SEED = _abi.KVE_SEED
Numbers = Union[Iterable[int], "array.array[int]", bytes, Any]

_c = load("kvindex")
_MATCH = struct.Struct("QI4x4IQ")  # struct kvi_match, which tests/python/test_index.py holds against the C struct
_find, _find_named, _string_at = _c.kvi_find, _c.kvi_find_named, ctypes.string_at


# -- hashing -----------------------------------------------------------------------------------------------------------

def seed(lora: str = "", salt: str = "") -> int:
    """Return the seed of a namespace: a LoRA adapter and a cache salt."""
    a, b = lora.encode(), salt.encode()
    return int(_c.kve_seed(a, len(a), b, len(b)))


def hash_tokens(tokens: Numbers, block_size: int, *, seed: int = SEED, lookahead: int = 0) -> "array.array[int]":
    """Return the local hashes of all full blocks of a prompt, as array("Q").

    @tokens: integers from 0 to 2^32 - 1; an array("I") or a numpy array of 32-bit ones is not copied. @lookahead is 1 for EAGLE and MTP.
    """
    if not 0 < block_size < 1 << 32:
        raise Invalid(f"no block size: {block_size}")
    keep, address, n = numbers(tokens, "I")
    hashes = array.array("Q", bytes(8 * (n // block_size)))
    written = _c.kve_hash_tokens(seed, address, n, block_size, lookahead, hashes.buffer_info()[0])
    del keep, hashes[written:]
    return hashes


def hash_block(tokens: Numbers, *, seed: int = SEED, mm: Numbers = ()) -> int:
    """Return the local hash of one block; @mm are the identities of its multimodal objects."""
    keep, address, n = numbers(tokens, "I")
    keep_mm, mm_address, n_mm = numbers(mm, "Q")
    value = int(_c.kve_hash_block(seed, address, n, mm_address, n_mm))
    del keep, keep_mm
    return value


def sequence_hashes(local: Numbers) -> "array.array[int]":
    """Return the sequence hashes of blocks from their local hashes: each names its whole prefix."""
    keep, address, n = numbers(local, "Q")
    hashes = array.array("Q", bytes(8 * n))
    _c.kve_sequence_hashes(address, n, hashes.buffer_info()[0])
    del keep
    return hashes


def mm_identity(name: str) -> int:
    """Return the identity of a multimodal object from the name that engines give it."""
    data = name.encode()
    return int(_c.kve_mm_identity(data, len(data)))


def mm_placed(identity: int, offset: int) -> int:
    """Return the identity of a multimodal object at an offset in its block, as vLLM hashes it."""
    return int(_c.kve_mm_placed(identity, offset))


# -- the index ---------------------------------------------------------------------------------------------------------

class Match(NamedTuple):
    """Matched prefix of a prompt on one holder, in blocks; each tier counts what nearer tiers match as well."""
    worker: int
    rank: int
    device: int
    host: int
    disk: int
    external: int
    blocks: int  # all blocks of the holder


class GroupMatch(NamedTuple):
    """The match of a holder with windows, in blocks, if its own blocks and those of one cache group were all."""
    worker: int
    rank: int
    group: Optional[int]  # None: the holder's own blocks
    device: int
    host: int
    disk: int
    external: int


class Stored(NamedTuple):
    """Result of a store; see kvi_stored in kv_index.h."""
    added: int
    duplicate: int
    renamed: int
    parked: int
    lagging: int


class Window(NamedTuple):
    """A cache group that a match needs beside the holder's own blocks; see kvi_window in kv_index.h."""
    group: int
    window: int
    need: int
    stride: int = 1
    needs: int = 0  # KV_NEEDS_RUN, KV_NEEDS_STATE, KV_NEEDS_CHUNK or KV_NEEDS_ALL
    part: int = 0
    parts: int = 1


class _Matches(ctypes.Structure):
    """struct kvi_matches, freed with its Python object."""
    _fields_ = _abi.kvi_matches._fields_

    def __del__(self) -> None:
        _c.kvi_matches_fini(ctypes.byref(self))


def _pairs(hashes: Numbers, tokens_hashes: Numbers) -> "array.array[int]":
    """Return kv_block[n] of two lists of equal length."""
    keep, one, n = numbers(hashes, "Q")
    keep_too, other, m = numbers(tokens_hashes, "Q")
    if n != m:
        raise Invalid(f"{n} hashes, {m} hashes of tokens")
    words = array.array("Q", bytes(16 * n))
    words[0::2] = array.array("Q", ctypes.string_at(one, 8 * n) if n else b"")
    words[1::2] = array.array("Q", ctypes.string_at(other, 8 * n) if n else b"")
    del keep, keep_too
    return words


def _cache(worker: int, rank: int, tier: int, source: int, number: Optional[int] = None) -> Any:
    """The main cache, or window @number."""
    if number is not None and not 0 <= number < 2**32 - 1:
        raise Invalid(f"no window: {number}")
    return _abi.kvi_cache(_abi.kv_holder(worker, rank), tier, source, 0 if number is None else number + 1)


class PrefixIndex(Handle):
    """Which blocks each holder (worker, rank) keeps in each tier, and how long a prefix of a prompt it could reuse."""

    def __init__(self, *, expected_blocks: int = 0, max_blocks: int = 0, max_holder_blocks: int = 0) -> None:
        opts = _abi.kvi_opts(expected_blocks=expected_blocks, max_blocks=max_blocks, max_holder_blocks=max_holder_blocks)
        address = ctypes.c_void_p()
        call(_c.kvi_create, ctypes.byref(opts), ctypes.byref(address))
        self._own(address.value or 0, _c.kvi_destroy)
        self._spare: List[Tuple[_Matches, Any]] = []  # result buffers; one is taken for each call

    def _about(self) -> str:
        stats = self.stats()
        return " ".join(f"{name}={stats[name]}" for name in ("blocks", "holders") if name in stats)

    # -- changes -----------------------------------------------------------------------------------
    def store(self, worker: int, hashes: Numbers, tokens_hashes: Numbers, *, parent: Optional[int] = None, rank: int = 0,
              tier: int = DEVICE, source: Optional[int] = None) -> Stored:
        """Store a chain of blocks below the block named @parent (None: at the root), as an engine announces it.

        @hashes are the engine's, @tokens_hashes those of hash_tokens(). With @source one more copy of each block is counted.
        """
        words, result = _pairs(hashes, tokens_hashes), _abi.kvi_stored()
        above = None if parent is None else ctypes.byref(ctypes.c_uint64(parent))
        blocks, n = words.buffer_info()[0], len(words) // 2
        if source is None:
            self._call(_c.kvi_store, _abi.kv_holder(worker, rank), tier, above, blocks, n, ctypes.byref(result))
        else:
            self._call(_c.kvi_add, _cache(worker, rank, tier, source), above, blocks, n, ctypes.byref(result))
        return Stored(result.added, result.duplicate, result.renamed, result.parked, result.lagging)

    def store_known(self, worker: int, hashes: Numbers, *, tier: int, rank: int = 0, source: Optional[int] = None) -> int:
        """Put blocks that the holder already has into @tier as well; returns how many were known."""
        keep, address, n = numbers(hashes, "Q")
        function = _c.kvi_store_known if source is None else _c.kvi_add_known
        return self._keep(keep, function, _cache(worker, rank, tier, source or 0), address, n)

    def remove(self, worker: int, hashes: Numbers, *, rank: int = 0, tier: int = DEVICE, source: int = 0,
               left: Optional[Numbers] = None) -> int:
        """Take one copy of each block away, or leave left[i] copies of each; returns how many were there."""
        keep, address, n = numbers(hashes, "Q")
        keep_left, copies, n_left = numbers(left, "I") if left is not None else (None, None, n)
        if n_left != n:
            raise Invalid(f"{n} hashes, {n_left} numbers of copies")
        return self._keep((keep, keep_left), _c.kvi_take, _cache(worker, rank, tier, source), address, copies, n)

    def _keep(self, keep: Any, function: Any, *args: Any) -> int:
        """Call a function while @keep holds the memory of its arguments."""
        n = self._call(function, *args)
        del keep
        return n

    def clear(self, worker: int, *, rank: int = 0, tiers: Optional[int] = None, source: int = 0) -> None:
        """Forget all blocks of one rank, which stays known; or its copies in @source and @tiers (bit 1 << tier)."""
        if tiers is None:
            self._call(_c.kvi_clear, _abi.kv_holder(worker, rank))
        else:
            self._call(_c.kvi_clear_tiers, _abi.kv_holder(worker, rank), tiers, source)

    def remove_worker(self, worker: int, rank: Optional[int] = None) -> None:
        """Forget a rank of a worker (None: all ranks) and its blocks. Raises NotFound."""
        if rank is None:
            self._call(_c.kvi_remove_worker, worker)
        else:
            self._call(_c.kvi_remove_holder, _abi.kv_holder(worker, rank))

    def set_window(self, worker: int, window: Window, *, rank: int = 0) -> int:
        """Give a holder a window; returns its number."""
        return self._call(_c.kvi_set_window, _abi.kv_holder(worker, rank), ctypes.byref(_abi.kvi_window(*window)))

    def window_add(self, worker: int, number: int, hashes: Numbers, *, rank: int = 0, tier: int = DEVICE, source: int = 0,
                   counted: bool = True) -> None:
        """Put blocks into a window."""
        keep, address, n = numbers(hashes, "Q")
        function = _c.kvi_add_known if counted else _c.kvi_store_known
        self._keep(keep, function, _cache(worker, rank, tier, source, number), address, n)

    def window_remove(self, worker: int, number: int, hashes: Numbers, *, rank: int = 0, tier: int = DEVICE, source: int = 0) -> int:
        """Take one copy of each block out of a window; returns how many were there."""
        keep, address, n = numbers(hashes, "Q")
        return self._keep(keep, _c.kvi_take, _cache(worker, rank, tier, source, number), address, None, n)

    # -- questions ---------------------------------------------------------------------------------
    def find(self, tokens_hashes: Numbers) -> List[Match]:
        """Look a prompt up by the local hashes of its leading blocks: one match for each holder of its first block."""
        return self._lookup(_find, tokens_hashes)

    def find_named(self, hashes: Numbers) -> List[Match]:
        """Look a prompt up by an engine's hashes of its leading blocks, each of which names its whole prefix."""
        return self._lookup(_find_named, hashes)

    def find_groups(self, tokens_hashes: Numbers) -> List[GroupMatch]:
        """Look a prompt up, and tell what each cache group of holders with windows allows: why a match is short."""
        matches, groups = _Matches(), _abi.kvi_group_matches()
        keep, address, n = numbers(tokens_hashes, "Q")
        try:
            self._keep(keep, _c.kvi_find_groups, address, n, ctypes.byref(matches), ctypes.byref(groups))
            items = ctypes.cast(groups.items, ctypes.POINTER(_abi.kvi_group_match))
            return [GroupMatch(m.holder.worker, m.holder.rank, None if m.group == _abi.KVI_OWN_BLOCKS else m.group, *m.reach)
                    for m in items[:groups.n]]
        finally:
            _c.kvi_group_matches_fini(ctypes.byref(groups))
            _c.kvi_matches_fini(ctypes.byref(matches))

    def _lookup(self, function: Any, hashes: Numbers) -> List[Match]:
        keep, address, n = numbers(hashes, "Q")
        try:
            spare = self._spare.pop()  # one operation: no other thread gets the same
        except IndexError:
            fresh = _Matches()
            spare = fresh, ctypes.byref(fresh)
        matches, reference = spare
        index = self._enter()
        try:
            rc = function(index, address, n, reference)
            if rc < 0:
                raise error(rc, "can't look the prompt up")
            if not matches.n:
                return []
            return [Match._make(fields) for fields in _MATCH.iter_unpack(_string_at(matches.items, matches.n * _MATCH.size))]
        finally:
            self._leave()
            self._spare.append(spare)
            del keep

    def holder_blocks(self, worker: int, rank: int = 0) -> int:
        """Return the number of blocks of a holder, 0 when it is unknown."""
        index = self._enter()
        try:
            return int(_c.kvi_holder_blocks(index, _abi.kv_holder(worker, rank)))
        finally:
            self._leave()

    def holder(self, worker: int, rank: int = 0) -> Dict[str, Any]:
        """Return the counts of a holder by the names of kvi_holder_info. Raises NotFound."""
        result = _abi.kvi_holder_info()
        self._call(_c.kvi_get_holder, _abi.kv_holder(worker, rank), ctypes.byref(result))
        return self._named(result)

    def stats(self) -> Dict[str, Any]:
        """Return sizes and counters by the names of kvi_stats."""
        result = _abi.kvi_stats()
        self._call(_c.kvi_get_stats, ctypes.byref(result))
        return self._named(result)

    @staticmethod
    def _named(result: Any) -> Dict[str, Any]:
        """Return the fields of a struct with a size, by their names."""
        return {name: list(value) if isinstance(value, ctypes.Array) else value
                for name, value in ((name, getattr(result, name)) for name, *_ in result._fields_[1:])}
