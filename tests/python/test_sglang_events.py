# SPDX-License-Identifier: Apache-2.0
"""What kvasir._sglang_events announces, by a tree of ours. tests/real/test_sglang_announced.py has SGLang's, and kv-indexer's answers."""
import logging
from types import SimpleNamespace

from kvpython import equal, run  # first: it finds the package
from kvasir import _sglang_events as events
from kvasir._sglang_events import CLEARED, GONE, KEPT, News

logging.getLogger("kvasir.sglang").setLevel(logging.ERROR)


class BlockStored(SimpleNamespace):
    """SGLang's event."""


class BlockRemoved(SimpleNamespace):
    """SGLang's event."""


class AllBlocksCleared(SimpleNamespace):
    """SGLang's event."""


class Tree:
    """Says what it is given."""

    def __init__(self):
        self.said = []

    def take_events(self):
        said, self.said = self.said, []
        return said

    def stores(self, *numbers, medium="GPU"):
        self.said.append(BlockStored(block_hashes=[name(text(n)) for n in numbers], medium=medium))

    def removes(self, *numbers, medium="GPU"):
        self.said.append(BlockRemoved(block_hashes=[name(text(n)) for n in numbers], medium=medium))


name = events._name


def text(number):
    return f"{number:016x}" + "0" * 48


def made():
    tree = Tree()
    return tree, News(tree, events.Kinds(BlockStored, BlockRemoved, AllBlocksCleared))


def ours(tree):
    """Return what is announced for the store: the kind's first letter, and the pages."""
    return [(type(event).__name__[5], *getattr(event, "block_hashes", ())) for event in tree.take_events() if hasattr(event, "ownership")]


def test_a_page_is_announced_once_sglang_has():
    tree, news = made()
    news.note(KEPT, [text(1), text(2)])
    equal(ours(tree), [], "nobody could place them")
    tree.stores(2, 3)
    equal(ours(tree), [("S", 2)], "known now")
    tree.stores(1)
    news.note(KEPT, [text(1), text(3)])
    equal(ours(tree), [("S", 1, 3)], "each once")
    news.note(KEPT, [text(1)])
    equal(ours(tree), [], "announced already")


def test_a_page_that_left_is_not():
    tree, news = made()
    tree.stores(1, 2)
    tree.stores(1, medium="CPU_PINNED")
    tree.take_events()
    tree.removes(1, 2)
    news.note(KEPT, [text(1), text(2)])
    equal(ours(tree), [("S", 1)], "1 is in host memory still")
    tree.said.append(AllBlocksCleared())
    news.note(KEPT, [text(2)])
    equal(ours(tree), [], "cleared")


def test_misses_resets_and_the_end():
    tree, news = made()
    tree.stores(*range(5))
    news.note(KEPT, [text(n) for n in range(5)])
    news.note(GONE, [text(2), text(9)])
    equal(ours(tree), [("S", 0, 1, 2, 3, 4), ("R", 2)], "2 is missed")
    news.note(CLEARED)
    news.note(KEPT, [text(3)])
    equal(ours(tree), [("o",), ("S", 3)], "a reset, and one page again")
    news.close()
    equal(ours(tree), [("o",)], "the end")
    equal("take_events" in tree.__dict__, False, "the tree is as before")


def test_bounds():
    tree, news = made()
    most, events.MOST_HELD = events.MOST_HELD, 3
    try:
        tree.stores(*range(5))
        news.note(KEPT, [text(n) for n in range(4)])
        equal(ours(tree), [("S", 0, 1, 2, 3), ("R", 0)], "the oldest goes")
    finally:
        events.MOST_HELD = most
    for _ in range(events.MOST_NOTES + 1):
        news.note(KEPT, [text(4)])
    equal(ours(tree), [("o",), ("S", 4)], "what was noted in vain is forgotten")


def test_names_are_sglangs():
    equal([name(f"{word:016x}" + "ab" * 24) for word in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)],
          [0, 1, (1 << 63) - 1, -(1 << 63), -1], "hash_str_to_int64()")


def test_what_it_does_not_understand_goes_on():
    tree, news = made()
    tree.said = [object()]
    equal(len(tree.take_events()), 1, "SGLang's own")
    news.note(KEPT, [text(1)])
    tree.stores(1)
    equal(ours(tree), [], "nothing more of ours")
    tree, news = made()
    news.note(KEPT, [text(1)])
    tree.stores(1)
    equal(ours(tree), [("S", 1)], "announced")
    news.note(CLEARED)
    news.note(KEPT, ["not a hash"])
    equal((ours(tree), "take_events" in tree.__dict__), ([("o",)], False), "nobody would withdraw the page later")


if __name__ == "__main__":
    run(globals())
