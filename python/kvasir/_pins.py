# SPDX-License-Identifier: Apache-2.0
"""Pins of kvasir.blocks: keys whose host blocks are held."""
import array
import os
from threading import get_ident
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, TypeVar

from ._native import Invalid, load

if TYPE_CHECKING:
    from .blocks import Manager

__all__ = ["Pin", "unpin_all"]

_c = load("kvbm")
_GONE = object()


def unpin_all(pins: Dict[int, None]) -> None:
    """Release the pins of a program that ends, so that blocks still go to the tiers below."""
    for pin in list(pins):
        if pins.pop(pin, _GONE) is not _GONE:
            _c.kvbm_pin_release(pin)


_Pin = TypeVar("_Pin", bound="Pin")


class Pin:
    """Keys whose host blocks are held until release(): found and fetched ones (load), or reserved ones (store)."""

    __slots__ = ("manager", "address", "n", "prefix")

    def __init__(self, manager: "Manager", n: int) -> None:
        self.manager, self.address, self.n = manager, 0, n
        self.prefix = 0  # keys that are READY or PENDING, from the first on; of a store: reserved blocks

    def state(self) -> bytes:
        """Return one byte for each key, as Manager.lookup()."""
        places = array.array("B", bytes(self.n))
        self.manager._hot(lambda _: _c.kvbm_pin_state(self.address, places.buffer_info()[0]))
        return places.tobytes()

    def blocks(self) -> "array.array[int]":
        """Return the number of each key's host block: READY ones of a load, reserved ones of a store; NO_BLOCK for others.

        For engines that copy themselves, into or from Manager's @host_memory: they may read until release(), or write until
        commit().
        """
        numbers_of = array.array("I", bytes(4 * self.n))
        self.manager._hot(lambda _: _c.kvbm_pin_blocks(self.address, numbers_of.buffer_info()[0]))
        return numbers_of

    def commit(self, ok: Optional[Sequence[bool]] = None) -> int:
        """Make reserved blocks findable whose bytes were written (@ok: one of each key; None: all); returns their number."""
        bits = None
        if ok is not None:
            if len(ok) != self.n:
                raise Invalid(f"{len(ok)} results, {self.n} keys")
            bits = sum(1 << i for i, good in enumerate(ok) if good).to_bytes((self.n + 7) // 8, "little")
        return self.manager._hot(lambda _: _c.kvbm_pin_commit(self.address, bits))

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until no key is PENDING. Raises Error(ETIMEDOUT)."""
        self.manager._hot(lambda _: _c.kvbm_pin_wait(self.address, int(timeout * 1000)))

    def release(self) -> None:
        """Release the blocks; fetches that nobody else needs are cancelled. Doing it twice is fine."""
        state, ident = self.manager._state, get_ident()
        if not self.address or os.getpid() != state.pid:
            return
        # Run by the collector of garbage inside a call of this thread: close() waits for that one, so it can't wait for close().
        nested = ident in state.calls
        try:
            state.calls.append(ident)  # close() waits for it
            closing = state.address is None and not nested
            if not closing:
                self._unpin()
        finally:
            if ident in state.calls:  # Python 3.9 runs signals' handlers before the append, too
                state.calls.remove(ident)
        if closing:
            with state.closing:  # either the pin is gone with its manager, or close() has refused
                self._unpin()

    def _unpin(self) -> None:
        """Release the blocks once, whatever a signal's handler raises meanwhile."""
        address = self.address
        gone: List[Any] = []
        pop: Any = self.manager._pins.pop
        take = map(pop, (address,), (_GONE,))
        try:
            self.address = 0
            gone.extend(take)  # no Python code runs between its pop and its append
        finally:
            if gone and gone[0] is not _GONE:
                _c.kvbm_pin_release(address)

    def __repr__(self) -> str:
        return f"<kvasir.blocks.Pin n={self.n} prefix={self.prefix}{'' if self.address else ' released'}>"

    def __enter__(self: _Pin) -> _Pin:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.release()
