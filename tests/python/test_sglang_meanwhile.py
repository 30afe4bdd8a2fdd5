# SPDX-License-Identifier: Apache-2.0
"""kvasir.sglang.HiCache while SGLang's other threads go on: weights that change, deletions, and pages of several ranks.

Announcements are followed as kv-indexer does: the test's tree has SGLang's events, its take_events() what a follower gets.
"""
import contextlib
import sys
import time
from types import SimpleNamespace
from unittest import mock

from kvpython import check, equal, folder, run  # first: it finds the package
from kvasir import _sglang_metrics
from test_sglang import KV, cache, hashes, indices, metrics_of_sglang, server
from test_sglang_events import AllBlocksCleared, BlockRemoved, BlockStored, Tree, name

N = 4


class Pool(KV):
    """SGLang's host pool, which a reset of its cache clears."""

    def clear(self):
        self.cleared = getattr(self, "cleared", 0) + 1


class Follower(Tree):
    """A tree that tells events and makes a backend, and the pages of the store that its follower knows."""

    def __init__(self):
        super().__init__()
        self.kv_events, self.names = SimpleNamespace(enabled=True), set()

    @contextlib.contextmanager
    def attached(self, path, pool, **fields):
        module = SimpleNamespace(BlockStored=BlockStored, BlockRemoved=BlockRemoved, AllBlocksCleared=AllBlocksCleared)
        with mock.patch.dict(sys.modules, {"sglang.srt.disaggregation.kv_events": module}), cache(path, pool, **fields) as made:
            yield made

    def knows(self):
        """Return how many pages of the store a follower knows."""
        for event in self.take_events():
            if hasattr(event, "ownership"):
                kind, names = type(event).__name__, set(getattr(event, "block_hashes", ()))
                self.names = self.names | names if kind == "BlockStored" else self.names - names if kind == "BlockRemoved" else set()
        return len(self.names)


def followed(keys):
    tree = Follower()
    tree.said.append(BlockStored(block_hashes=[name(key) for key in keys], medium="GPU"))
    return tree


def test_pages_of_old_weights_are_not_stored_under_the_new_name():
    keys, where = hashes(N), indices(range(N))
    with folder() as path, server() as args:
        pool = Pool("page_first", seed=1)
        with cache(path, pool) as ours:
            equal(ours.batch_set_v1(keys, where), [True] * N, "weights of the start")
            args.weight_version = "2"
            equal(ours.batch_set_v1(keys, where), [False] * N, "a backup that was queued before the change")
            equal(ours.set(keys[0], pool.get_data_page(0)), False, "the same as a flat copy")
            equal((ours.batch_exists(keys), ours.counters["stale"]), (0, N + 1), "not stored, and counted")
            check(ours.clear(), "the store's pages are deleted, not those of the host")
            equal(ours.batch_set_v1(keys, where), [False] * N, "until SGLang resets its tree")
            pool.clear()
            equal((ours.batch_set_v1(keys, where), ours.batch_exists(keys)), ([True] * N, N), "the reset")
            args.weight_version = "3"
            pool.clear()
            equal((ours.batch_exists(keys), ours.batch_set_v1(keys, where)), (0, [True] * N), "a change and a reset between two calls")
        equal((pool.cleared, "clear" in pool.__dict__), (2, False), "the pool's own function ran; it is as before")


def test_a_flat_page_of_old_weights_is_not_read():
    keys, page = hashes(1), KV("page_first", seed=1).get_data_page(0)
    with folder() as path, server() as args, cache(path, Pool("page_first")) as ours:
        check(ours.set(keys[0], page), "stored")
        check(ours.get(keys[0], page.copy()) is not None, "read")
        args.weight_version = "2"
        check(ours.get(keys[0], page.copy()) is None, "the first call behind the change")


def test_who_announces():
    """A rank that has a part of a page doesn't know whether the others still have theirs."""
    keys, where = hashes(N), indices(range(N))
    for whole, fields in ((True, {}), (True, {"is_mla_model": True, "tp_size": 2}), (False, {"tp_size": 2}), (False, {"pp_size": 2}),
                          (False, {"attn_cp_size": 2}), (False, {"is_mla_model": True, "tp_size": 2, "pp_size": 2}),
                          (False, {"is_mla_model": True, "tp_size": 2, "dcp_size": 2})):
        tree = followed(keys)
        with folder() as path, tree.attached(path, Pool("page_first", seed=1), **fields) as ours:
            ours.batch_set_v1(keys, where)
            ours.batch_get_v1(keys, where)
            equal(tree.knows(), N if whole else 0, fields)


def test_a_put_beside_deletions_is_not_announced():
    keys, where = hashes(N), indices(range(N))
    tree = followed(keys)
    with folder() as path, tree.attached(path, Pool("page_first", seed=1)) as ours:
        ours.batch_set_v1(keys, where)
        equal(tree.knows(), N, "stored")
        discard, beside = ours._store.discard, [True]

        def discard_beside(key):
            if beside:  # the backup thread finds all pages still there
                beside.clear()
                equal(ours.batch_set_v1(keys, where), [True] * N, "present")
            discard(key)

        with mock.patch.object(ours._store, "discard", discard_beside):
            check(ours.clear(), "cleared")
        equal((tree.knows(), ours.batch_exists(keys)), (0, 0), "deleted")


def test_a_read_that_outlasts_a_change_is_not_announced():
    keys, where = hashes(N), indices(range(N))

    def other_weights(ours, args):
        args.weight_version = "2"
        ours.exists(hashes(1, 9)[0])

    for change in (lambda ours, _: ours.clear(), other_weights):
        tree = followed(keys)
        with folder() as path, server() as args, tree.attached(path, Pool("page_first", seed=1)) as ours:
            ours.batch_set_v1(keys, where)
            equal(tree.knows(), N, "stored")
            move = ours._move

            def slow(*arguments):
                move(*arguments)
                change(ours, args)

            with mock.patch.object(ours, "_move", slow):
                equal(ours.batch_get_v1(keys, where), [True] * N, "read before")
            equal((tree.knows(), ours.batch_exists(keys)), (0, 0), "gone since")


def test_no_move_is_lost():
    """SGLang asks for statistics seldom, or never while nothing runs."""
    moves = _sglang_metrics.MOST_MOVED + 10
    with metrics_of_sglang() as said:
        metrics = _sglang_metrics.Metrics(SimpleNamespace(enable_storage_metrics=True, model_name="m"))
        for _ in range(moves):
            metrics.note_moved(True, 2, 100, time.monotonic())
        metrics.note_moved(False, 3, 100, time.monotonic())
        stats = metrics.stats()
    equal((len(stats.prefetch_pgs), sum(stats.prefetch_pgs), stats.backup_pgs), (_sglang_metrics.MOST_MOVED, 2 * moves, [3]), "SGLang's pages")
    equal(said, {("bytes", "read"): 200 * moves, ("seconds", "read"): moves, ("bytes", "write"): 300, ("seconds", "write"): 1}, "ours")


if __name__ == "__main__":
    run(globals())
