# SPDX-License-Identifier: Apache-2.0
"""For kvasir.router: prompts that engines got just now, whose blocks no event has announced yet."""
import time
from collections import deque
from typing import Any, Deque, Dict, List, Sequence, Tuple

from .client import InstanceId
from .index import PrefixIndex, hash_tokens, seed, sequence_hashes

BLOCK = 16  # tokens
TOKENS_MAX = 1 << 17  # of a prompt
_Entry = Tuple[float, InstanceId, Any, Any]


class Recent:
    """Prefixes that count as held by the engine they were sent to, for @seconds: its events tell later."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._index, self._entries = PrefixIndex(), deque()  # type: PrefixIndex, Deque[_Entry]
        self._engines: List[InstanceId] = []  # the index knows them by their places

    @staticmethod
    def blocks(tokens: Sequence[int], objects: str, lora: str = "", salt: str = "") -> Any:
        """Return a prompt's blocks for the other calls; none when its tokens aren't sensible. @objects: the images among them."""
        try:
            return hash_tokens(tokens[:TOKENS_MAX], BLOCK, seed=seed(lora, salt + objects))
        except (AttributeError, OverflowError, TypeError, ValueError):
            return hash_tokens((), BLOCK)

    def _place(self, engine: InstanceId) -> int:
        if engine not in self._engines:
            self._engines.append(engine)
        return self._engines.index(engine)

    def find(self, blocks: Any) -> Dict[InstanceId, int]:
        """Return how many of the prompt's tokens each engine got just now."""
        self._expire()
        return {self._engines[match.worker]: match.device * BLOCK for match in self._index.find(blocks)} if len(blocks) else {}

    def add(self, engine: InstanceId, blocks: Any) -> None:
        """Note that @engine gets a prompt."""
        if len(blocks):
            names = sequence_hashes(blocks)
            self._index.store(self._place(engine), names, blocks, source=0)
            self._entries.append((time.monotonic() + self.seconds, engine, names, blocks))

    def forget(self, engine: InstanceId, blocks: Any) -> None:
        """Note that @engine did not take a prompt after all."""
        for entry in reversed(self._entries):
            if entry[1] == engine and entry[3] is blocks:
                self._entries.remove(entry)
                self._index.remove(self._place(engine), entry[2])
                return

    def _expire(self) -> None:
        now = time.monotonic()
        while self._entries and self._entries[0][0] <= now:
            _, engine, names, _ = self._entries.popleft()
            self._index.remove(self._place(engine), names)
