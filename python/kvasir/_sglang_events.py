# SPDX-License-Identifier: Apache-2.0
"""What kvasir.sglang.HiCache announces in SGLang's KV events: pages that its store holds, medium STORAGE, owner kvasir.

SGLang names a block in its events by the first 64 bits of the page's hash, which is HiCache's key of the page. The events go out with
SGLang's own, on the same stream: HiCache's interface has none, so the tree's take_events() is wrapped. A follower places a page by
the event that had its tokens, so a page is announced once SGLang has announced it itself, and never before. Pages of prompts with an
adapter or a salt have other hashes in events than in HiCache: they are not announced. Neither are pages that several ranks store parts of.

Nobody tells what the store evicts: a page is announced as removed when SGLang asks for it in vain, when the store is cleared or the weights
change, and, beyond MOST_HELD, when it is the one announced longest ago.
"""
import collections
import importlib
import logging
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _identity

__all__ = ["CLEARED", "GONE", "KEPT", "Kinds", "News", "kinds_of", "news_of_caller"]

logger = logging.getLogger("kvasir.sglang")
OWNER, MEDIUM = "kvasir", "STORAGE"
MOST_HELD = 1 << 18  # pages that are announced at a time
MOST_WAITING = 1 << 16  # stored pages that SGLang has not announced
MOST_NOTES = 1 << 12  # calls of HiCache between two steps of the scheduler
KEPT, GONE, CLEARED = "kept", "gone", "cleared"


class Kinds(NamedTuple):
    """SGLang's events, with an owner."""
    stored: Any
    removed: Any
    cleared: Any


def kinds_of(module: Any) -> Kinds:
    """Make the classes from sglang.srt.disaggregation.kv_events: SGLang's own have no owner."""
    class BlockStored(module.BlockStored):  # type: ignore[misc]
        """A stored event of another owner."""
        ownership: Optional[str] = None

    class BlockRemoved(module.BlockRemoved):  # type: ignore[misc]
        """A removed event of another owner."""
        ownership: Optional[str] = None

    class AllBlocksCleared(module.AllBlocksCleared):  # type: ignore[misc]
        """A clear of another owner's pages."""
        ownership: Optional[str] = None

    return Kinds(BlockStored, BlockRemoved, AllBlocksCleared)


def news_of_caller() -> "Optional[News]":
    """Make the news of the prefix cache for which SGLang makes this backend; None: it tells none of its own."""
    tree = _identity.of_frames("self", "take_events")
    recorder = getattr(getattr(tree, "tree_core", tree), "kv_events", None)
    try:
        return None if recorder is None or not recorder.enabled else News(tree, kinds_of(importlib.import_module("sglang.srt.disaggregation.kv_events")))
    except Exception as problem:  # pylint: disable=broad-except  # another SGLang
        logger.warning("kvasir.sglang: pages are not announced: %s", problem)
        return None


def _name(text: str) -> int:
    """Return the name of a page in SGLang's events: hash_str_to_int64()."""
    word = int(text[:16], 16)
    return word - (1 << 64) if word >> 63 else word


class News:
    """Pages that are announced and those that wait. take() is the scheduler thread's; any thread may call note()."""

    def __init__(self, tree: Any, kinds: Kinds) -> None:
        self._tree, self._kinds, self._engine_events = tree, kinds, tree.take_events
        self._notes: Deque[Tuple[str, Sequence[str]]] = collections.deque()
        self._known: Dict[int, int] = {}  # pages that SGLang has announced: a bit for each medium
        self._media: Dict[str, int] = {}
        self._waiting: Dict[int, None] = {}
        self._held: Dict[int, None] = {}
        self._said: List[Tuple[str, List[int]]] = []
        self._cleared = kinds.cleared(ownership=OWNER)
        tree.take_events = self.take

    def note(self, what: str, hashes: Sequence[str] = ()) -> None:
        """Take note that the store has pages (KEPT), lacks them (GONE), or has none of all before (CLEARED)."""
        if len(self._notes) >= MOST_NOTES:  # the scheduler stands still: announce less rather than keep more
            self._notes.clear()
            self._notes.append((CLEARED, ()))
        if hashes or what == CLEARED:
            self._notes.append((what, hashes))

    def close(self) -> None:
        """Announce nothing from now on."""
        self._notes.append((CLEARED, ()))
        if self._tree.__dict__.get("take_events") == self.take:
            self._tree.take_events = self._last

    def _last(self) -> List[Any]:
        self._tree.__dict__.pop("take_events", None)
        return self.take()

    def take(self) -> List[Any]:
        """Return SGLang's events, and ours behind them."""
        events: List[Any] = self._engine_events()
        announced = bool(self._held)
        try:
            return [*events, *self._ours(events)]
        except Exception as problem:  # pylint: disable=broad-except  # another SGLang: its own events go on
            logger.warning("kvasir.sglang: announcing pages: %s", problem)
            self._tree.__dict__.pop("take_events", None)
            self._held.clear()
            return [*events, self._cleared] if announced else events

    def _ours(self, events: List[Any]) -> List[Any]:
        for event in events:
            self._follow(event)
        while self._notes:
            what, hashes = self._notes.popleft()
            if what == CLEARED:
                self._clear()
            for text in hashes:
                (self._keep if what == KEPT else self._drop)(_name(text))
        said, self._said = self._said, []
        return [self._event(what, names) for what, names in said]

    def _follow(self, event: Any) -> None:
        """Take note of what a follower of SGLang's own event knows."""
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self._known.clear()
            return
        medium = str(getattr(event.medium, "value", event.medium))
        bit = self._media.setdefault(medium, 1 << len(self._media))
        for name in event.block_hashes:
            if kind == "BlockStored":
                self._known[name] = self._known.get(name, 0) | bit
                if name in self._waiting:
                    self._keep(name)
            elif self._known.get(name, 0) & ~bit:
                self._known[name] &= ~bit
            else:
                self._known.pop(name, None)

    def _keep(self, name: int) -> None:
        if name in self._held:
            return
        if name not in self._known:
            self._waiting[name] = None
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            return
        self._waiting.pop(name, None)
        self._held[name] = None
        self._say(KEPT, name)
        if len(self._held) > MOST_HELD:
            self._drop(next(iter(self._held)))

    def _drop(self, name: int) -> None:
        self._waiting.pop(name, None)
        if name in self._held:
            del self._held[name]
            self._say(GONE, name)

    def _clear(self) -> None:
        self._waiting.clear()
        if self._held:
            self._held.clear()
            self._said.append((CLEARED, []))

    def _say(self, what: str, name: int) -> None:
        if self._said and self._said[-1][0] == what:
            self._said[-1][1].append(name)
        else:
            self._said.append((what, [name]))

    def _event(self, what: str, names: List[int]) -> Any:
        if what == CLEARED:
            return self._cleared
        if what == GONE:
            return self._kinds.removed(block_hashes=names, medium=MEDIUM, ownership=OWNER)
        return self._kinds.stored(block_hashes=names, parent_block_hash=None, token_ids=[], block_size=0, lora_id=None, medium=MEDIUM,
                                  ownership=OWNER)
