# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks as kvasir.blocks takes them, packed for C."""
import array
import struct
from typing import Any, Optional, Union

from ._native import Invalid, as_word, numbers

__all__ = ["Chain", "Keys"]

Keys = Union["Chain", bytes, bytearray, memoryview, "array.array[int]", Any]
_CHAIN = struct.Struct("QI4xQQI4xQ?7x")  # struct kvbm_chain; tests/python/test_blocks.py holds it against C's


class Chain:
    """Keys of one prompt's blocks, packed once: every call that takes keys takes a Chain, faster. The bytes must not change.

    @scattered: keys of no sequence, for engines that name neither parent nor position; a missing one leaves out no other. A
    Manager's calls take such a chain; a key is either always stored so, or always within its sequence.
    """

    __slots__ = ("owner", "address", "n", "key_len", "scattered", "_more", "_first", "_argument")

    def __init__(self, keys: Any, key_len: int = 8, *, scattered: bool = False) -> None:
        self.key_len, self.scattered = key_len, scattered
        self._first: Optional[bytes] = None  # the struct of a chain at the start of group 0
        self._argument: Any = None  # as_word() of the keys
        kind = type(keys)
        if kind is bytes and len(keys) < 65536:
            keys, kind = array.array("B", keys), array.array  # cheaper than asking for the address
        if kind is array.array:
            self.owner: Any = keys
            self.address: int
            self.address, n = keys.buffer_info()
            n *= keys.itemsize
        else:
            flat: Any = b"".join(keys) if isinstance(keys, (list, tuple)) else keys
            if not isinstance(flat, (bytes, bytearray)):
                flat = memoryview(flat).cast("B")
            self.owner, self.address, n = numbers(flat, "B")
        self.n = n // key_len
        if self.n * key_len != n:
            raise Invalid(f"{n} bytes of keys, which have {key_len} each")

    def _at(self) -> Any:
        """Return the keys' address as an argument for untyped functions."""
        if self._argument is None:
            self._argument = as_word(self.address)
        return self._argument

    def _struct(self, group: int = 0, parent: Optional[Keys] = None, position: int = 0, tokens: Any = None, block_size: int = 0) -> bytes:
        """Return struct kvbm_chain; valid as long as this object. @tokens: @block_size for each key."""
        if not group and parent is None and tokens is None and not position:
            if self._first is None:
                self._first = _CHAIN.pack(_CHAIN.size, 0, self.address, 0, 0, 0, self.scattered)
            return self._first
        above = words = 0
        if parent is not None:
            self._more: Any = Chain(parent.to_bytes(8, "little") if isinstance(parent, int) else parent, 1)
            if self._more.n != self.key_len:  # C reads as much
                raise Invalid(f"a parent of {self._more.n} bytes where keys have {self.key_len}")
            above = self._more.address
        if tokens is not None:
            kept, words, n_tokens = numbers(tokens, "I")
            if n_tokens != self.n * block_size:
                raise Invalid(f"{n_tokens} tokens, {self.n} blocks of {block_size}")
            self._more = (getattr(self, "_more", None), kept)
        return _CHAIN.pack(_CHAIN.size, group, self.address, above, position, words, self.scattered)


def _chain(keys: Keys, key_len: int) -> Chain:
    if type(keys) is not Chain:
        return Chain(keys, key_len)
    if keys.key_len != key_len:
        raise Invalid(f"keys of {keys.key_len} bytes where {key_len} are needed")
    return keys
