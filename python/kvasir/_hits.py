# SPDX-License-Identifier: Apache-2.0
"""Cache groups of a model, and the longest hit of all of them, as kvasir.blocks gives them (kvbm_hit.h)."""
import array
import ctypes
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from . import _abi
from ._chains import Keys, _chain
from ._native import error, load, unsaid

__all__ = ["NEEDS_ALL", "NEEDS_CHUNK", "NEEDS_RUN", "NEEDS_STATE", "CacheGroup", "Hit", "Question"]

NEEDS_RUN, NEEDS_STATE, NEEDS_CHUNK, NEEDS_ALL = _abi.KV_NEEDS_RUN, _abi.KV_NEEDS_STATE, _abi.KV_NEEDS_CHUNK, _abi.KV_NEEDS_ALL
_c = load("kvbm")


class CacheGroup(NamedTuple):
    """A cache group: @needs is NEEDS_ALL (full attention), NEEDS_RUN (a window), NEEDS_CHUNK or NEEDS_STATE.

    @block_size: tokens of a block. @span: tokens of the window or of a chunk.
    """
    needs: int
    block_size: int
    span: int = 0

    def _struct(self) -> Any:
        return _abi.kv_cache_group(needs=self.needs, block_size=self.block_size, span=self.span)

    def needed(self, tokens: int, computed: int = 0) -> range:
        """Return the numbers of the blocks that a hit of @tokens needs, beyond those of the first @computed tokens."""
        blocks = _abi.kvbm_hit_blocks()
        rc = _c.kvbm_hit_needs(ctypes.byref(self._struct()), tokens, computed, ctypes.byref(blocks))
        if rc < 0:
            raise error(rc, unsaid("kvbm_hit_needs", rc))
        return _range(blocks)


class Hit(NamedTuple):
    """The longest hit of a prompt.

    @tokens: no block that it needs is MISS; @pending of them are PENDING. @sure: the longest hit that needs none of these.
    @needed: by the group's number, the blocks that a load of @tokens brings. @where: by the group's number, a byte for each key
    as Manager.lookup() gives it, NOT_LOOKED where no hit depended on the block.
    """
    tokens: int
    sure: int
    pending: int
    needed: Dict[int, range]
    where: Dict[int, bytes]


def _range(blocks: Any) -> range:
    return range(blocks.first, blocks.first + blocks.n)


class Question:
    """What kvbm_manager_hit is given. Keeps all that its arguments point to."""

    def __init__(self, groups: Mapping[int, Tuple[CacheGroup, Keys]], key_len: Mapping[int, int], limit: int, computed: int, unit: int) -> None:
        self._numbers, n = list(groups), len(groups)
        self._packed = [_chain(keys, key_len[number]) for number, (_, keys) in groups.items()]
        self._where = [array.array("B", bytes(packed.n)) for packed in self._packed]
        self._chains = (_abi.kvbm_chain * n)(*(_abi.kvbm_chain(group=number, keys=packed.address, scattered=packed.scattered)
                                               for number, packed in zip(groups, self._packed)))
        self._groups, self._needed, self._hit = (_abi.kvbm_hit_group * n)(), (_abi.kvbm_hit_blocks * n)(), _abi.kvbm_hit()
        for i, (group, _) in enumerate(groups.values()):
            self._groups[i] = _abi.kvbm_hit_group(group=group._struct(), chain=ctypes.addressof(self._chains[i]), n=self._packed[i].n,
                                                  where=self._where[i].buffer_info()[0])
        self._opts = _abi.kvbm_hit_opts(limit=limit, computed=computed, unit=unit)

    def name_manager(self, number: int, address: int) -> None:
        """Note the address of the manager that has the blocks of a group."""
        if number not in self._numbers:
            raise ValueError(f"kvasir.blocks: there is no group {number} to look for in a manager")
        self._groups[self._numbers.index(number)].manager = address

    def arguments(self) -> Tuple[Any, ...]:
        """Return the arguments behind the manager."""
        return self._groups, len(self._numbers), ctypes.byref(self._opts), ctypes.byref(self._hit), self._needed

    def answer(self) -> Hit:
        """Return what the call has written."""
        return Hit(self._hit.tokens, self._hit.sure, self._hit.pending, dict(zip(self._numbers, map(_range, self._needed))),
                   {number: where.tobytes() for number, where in zip(self._numbers, self._where)})
