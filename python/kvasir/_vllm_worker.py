# SPDX-License-Identifier: Apache-2.0
"""The workers' half of the connector for vLLM: moves blocks between a rank's cache and the store."""
import contextlib
import errno
import importlib
import itertools
import logging
import os
import select
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set

from . import store as _store
from ._connector import Flusher, Warner
from ._native import Error
from ._tensors import runs, view
from ._vllm_groups import Groups
from ._vllm_moves import ASK_WAIT_S, Figures, Move, Plan, close, keys_of
from .queue import Queue, Result
from .store import _Table

logger = logging.getLogger("kvasir.vllm")
STORE_WAIT_S = 1.0  # that a step waits for stores of blocks that it overwrites; what hasn't begun is left out then
_DAMAGED = (-errno.EBADMSG, -errno.EMSGSIZE)  # the latter: it is longer than a block


class _Parts:
    """Where the parts of a cache group's blocks lie: those of each layer, at equal distances from block to block."""

    def __init__(self, caches: Dict[str, Any], layers: Iterable[str], n_blocks: int) -> None:
        numpy: Any = importlib.import_module("numpy")
        base, step, length = [], [], []
        self.seen: Set[int] = set()
        for name in sorted(layers):
            cache = caches.get(name)
            if cache is None or isinstance(cache, (list, tuple)):
                raise ValueError(f"kvasir.vllm: layer {name} has no tensor of its own, or several")
            if getattr(getattr(cache, "device", None), "type", "cpu") != "cpu":
                raise ValueError("kvasir.vllm: the KV cache is not in host memory; use OffloadingConnector with kvasir.vllm.Tier")
            address, shape, strides, item = view(cache)
            if address in self.seen:
                continue  # layers that share a cache
            self.seen.add(address)
            if not n_blocks or shape[0] % n_blocks:
                raise ValueError(f"kvasir.vllm: layer {name} has the shape {shape}, which doesn't begin with {n_blocks} blocks")
            each = shape[0] // n_blocks  # blocks of the attention's own size
            offsets, run = runs([each] + shape[1:], strides, item)
            base += [address + offset for offset in offsets]
            step += [each * strides[0]] * len(offsets)
            length += [run] * len(offsets)
        self.n, self.nbytes, self._numpy = len(base), sum(length), numpy
        self._base, self._step, self._length = (numpy.array(values, dtype=numpy.int64) for values in (base, step, length))

    def of(self, blocks: Sequence[int]) -> Any:
        """Return the parts of blocks: an address and a length each."""
        numpy = self._numpy
        table = numpy.empty((len(blocks), self.n, 2), dtype=numpy.int64)
        table[:, :, 0] = numpy.array(blocks, dtype=numpy.int64)[:, None] * self._step + self._base
        table[:, :, 1] = self._length
        return table.reshape(-1, 2)


class _Cache:
    """The engine's tensors, by cache groups. Groups share memory: a block belongs to one of them at a time."""

    def __init__(self, caches: Dict[str, Any], groups: Sequence[Sequence[str]], n_blocks: int) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self.caches, self.groups = caches, [_Parts(caches, layers, n_blocks) for layers in groups]
        known, seen = {name for layers in groups for name in layers}, {address for parts in self.groups for address in parts.seen}
        for name in caches.keys() - known:  # one that uses another layer's cache
            if view(caches[name])[0] not in seen:
                raise ValueError(f"kvasir.vllm: layer {name} is in no cache group")

    def sizes(self, groups: Sequence[int]) -> List[int]:
        """Return the bytes of a block of each of @groups."""
        return [self.groups[group].nbytes for group in groups]

    def of(self, groups: Sequence[int], blocks: Sequence[int]) -> _Table:
        """Return the scatter lists of blocks, which keep the tensors. @groups: of each block."""
        numpy, tables, begin = self._numpy, [], 0
        for group, run in itertools.groupby(groups):
            end = begin + len(list(run))
            tables.append(self.groups[group].of(blocks[begin:end]))
            begin = end
        counts = numpy.array([self.groups[group].n for group in groups], dtype=numpy.uint32)
        return _Table(numpy.ascontiguousarray(numpy.concatenate(tables)), counts, self.caches)


class _Job(NamedTuple):
    """A request of the queue: a load of @request, or a store (@request empty). Without keys: a deletion of what couldn't be loaded."""
    request: str
    blocks: List[int]
    sizes: List[int]  # of the blocks, in bytes
    keys: List[bytes]
    resets: int  # of the cache before it began
    begun: float


class Worker:
    """Moves blocks between this rank's cache and the store. vLLM's thread calls, a thread of its own takes results."""

    def __init__(self, uri: str, rank: int, flush_s: float, groups: Groups, warn: Warner) -> None:
        self.rank, self.warn, self.resets, self.kinds = rank, warn, 0, groups
        self.store = _store.open(uri)
        self.queue = Queue(self.store)
        self.flusher = Flusher(self.store, flush_s, warn)
        self.cache: Optional[_Cache] = None
        self.changed = threading.Condition()
        self.jobs: Dict[int, _Job] = {}
        self.reading: Dict[int, int] = {}  # stores under way by block
        self.loaded: Set[str] = set()
        self.failed: Set[int] = set()  # blocks, where vLLM can compute from one on
        self.told: Set[int] = set()
        self.lost: Set[str] = set()  # requests, where it can't
        self.told_lost: Set[str] = set()
        self.counters = {name: 0 for name in ("loaded", "stored", "present", "failed")}  # blocks
        self.figures = Figures()
        self.ending = False
        self.thread = threading.Thread(target=self._collect, name="kvasir-vllm", daemon=True)
        self.thread.start()

    def register(self, caches: Dict[str, Any], n_blocks: int) -> None:
        """Take the engine's tensors."""
        self.cache = _Cache(caches, [group.layers for group in self.kinds.all], n_blocks)
        for kind, parts in zip(self.kinds.all, self.cache.groups):
            logger.info("kvasir.vllm: %s: %d blocks of %d tokens, %d bytes in %d parts each", kind.kind, n_blocks, kind.size, parts.nbytes,
                        parts.n)

    def begin(self, plan: Plan) -> None:
        """Wait until no store reads a block that this step writes."""
        with self.changed:
            self.resets = plan.resets
            begun = time.monotonic()
            while any(block in self.reading for block in plan.fresh):
                self.changed.wait(0.5)
                if time.monotonic() - begun > STORE_WAIT_S:
                    self._leave_out()

    def _leave_out(self) -> None:
        """Cancel stores that have not begun. When nobody takes results any more, try again to end all of them."""
        if not self.thread.is_alive():
            self._give_up()
            return
        with contextlib.suppress(Error, ValueError):  # closed meanwhile
            for ident, job in self.jobs.items():
                if not job.request:
                    self.queue.cancel(ident)

    def _submit(self, load: bool, request: str, move: Move) -> None:
        keys = keys_of(move.root, self.rank, move.groups, move.hashes)
        with self.changed:  # held until the job is noted: its result may come at once
            try:
                if self.cache is None or self.ending:
                    raise Error(errno.ESHUTDOWN, "no cache")
                table: Any = self.cache.of(move.groups, move.blocks)
                ident = self.queue.get(keys, table, priority=1) if load else self.queue.put(keys, table)
            except (Error, ValueError) as problem:
                self.warn("reading blocks" if load else "storing blocks", problem)
                self.counters["failed"] += len(keys)
                self.figures.add(**{"load_failed" if load else "store_failed": len(keys)})
                if load:
                    self._end_load(request, move.blocks)
                return
            self.jobs[ident] = _Job(request, move.blocks, self.cache.sizes(move.groups), keys, self.resets, time.monotonic())
            for block in () if load else move.blocks:
                self.reading[block] = self.reading.get(block, 0) + 1

    def load(self, plan: Plan) -> None:
        """Begin to load."""
        for move in plan.loads:
            if move.blocks:
                self._submit(True, move.request, move)
            else:
                with self.changed:
                    self._end_load(move.request, [])

    def save(self, plan: Plan) -> None:
        """Begin to store."""
        for move in plan.stores:
            self._submit(False, "", move)

    def _end_load(self, request: str, failed: Sequence[int]) -> None:
        """Note that a load has ended, and which of its blocks failed."""
        self.loaded.add(request)
        if self.kinds.fails_by_block:
            self.failed.update(failed)
        elif failed:
            self.lost.add(request)

    def _collect(self) -> None:
        try:
            self._take_results()
        except Exception as problem:  # pylint: disable=broad-except
            self.warn("taking results", problem)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """End the queue: nobody takes its results any more. Loads under way have failed then, and steps wait for no store."""
        with self.changed:
            self.ending = True
        try:
            self.queue.close()
        except Error as problem:  # a device may still use the cache
            self.warn("ending what is under way", problem)
            return
        with self.changed:
            for job in self.jobs.values():
                if job.request:
                    self._end_load(job.request, job.blocks)
            self.jobs.clear()
            self.reading.clear()
            self.changed.notify_all()

    def _take_results(self) -> None:
        watch = select.poll()
        watch.register(self.queue.fileno(), select.POLLIN)
        while not self.ending or self.jobs:
            try:
                watch.poll(500)
                results = self.queue.poll()
            except (Error, ValueError):
                return  # closed
            with self.changed:
                stored = False
                for result in results:
                    if result.id in self.jobs:
                        stored |= self._settle(self.jobs[result.id], result)
                        del self.jobs[result.id]
                self.changed.notify_all()
            if stored:
                self.flusher.note_put()

    def _settle(self, job: _Job, result: Result) -> bool:
        """Note a job's result. Returns whether it stored anything."""
        if result.status not in (0, -errno.ENOENT, -errno.EBADMSG, -errno.ECANCELED):
            self.warn("reading blocks" if job.request else "storing blocks", OSError(-result.status, os.strerror(-result.status)))
        if job.request:
            late = not job.keys or job.resets != self.resets  # the cache was reset meanwhile: what was loaded is of before
            bad = range(len(job.blocks)) if late else [i for i, rc in enumerate(result.each) if rc != job.sizes[i]]
            failed = [job.blocks[i] for i in bad]
            if job.keys:
                self.counters["loaded"] += len(job.keys) - len(bad)
                self.counters["failed"] += len(bad)
                self.figures.add(loaded=len(job.keys) - len(bad), load_failed=len(bad), bytes_loaded=sum(job.sizes) - sum(job.sizes[i] for i in bad))
                self.figures.time("load_seconds", job.begun)
                damaged = [] if late else [job.keys[i] for i in bad if result.each[i] >= 0 or result.each[i] in _DAMAGED]
                if self._delete(job.request, failed, damaged):
                    return False
            self._end_load(job.request, failed)
            return False
        for block in job.blocks:
            self.reading[block] -= 1
            if not self.reading[block]:
                del self.reading[block]
        for name, n in (("stored", result.each.count(0)), ("present", result.each.count(1))):
            self.counters[name] += n
        bad_stores = sum(rc < 0 for rc in result.each)
        self.counters["failed"] += bad_stores
        self.figures.add(stored=result.each.count(0), present=result.each.count(1), store_failed=bad_stores,
                         bytes_stored=sum(size for size, rc in zip(job.sizes, result.each) if rc == 0))
        self.figures.time("store_seconds", job.begun)
        return 0 in result.each

    def _delete(self, request: str, failed: List[int], damaged: List[bytes]) -> bool:
        """Delete damaged blocks. True: @request has ended once they are gone, as it stores them anew then."""
        if not damaged:
            return False
        try:
            self.jobs[self.queue.delete(damaged)] = _Job(request, failed, [], [], self.resets, time.monotonic())
        except (Error, ValueError) as problem:
            self.warn("deleting damaged blocks", problem)
            return False
        return True

    def ended(self, idle: bool) -> Set[str]:
        """Take the requests whose loads have ended; a step that computes nothing gives them a moment."""
        with self.changed:
            if idle and not self.loaded and self.jobs:
                self.changed.wait(ASK_WAIT_S)
            loaded, self.loaded = self.loaded, set()
            self.told, self.failed = self.failed, set()
            self.told_lost, self.lost = self.lost, set()
            return loaded

    def close(self) -> None:
        """Wait for what is under way, make it durable, close the store."""
        try:
            self.queue.drain(30)
        except (Error, ValueError) as problem:
            self.warn("waiting for stores", problem)
        with self.changed:
            self.ending = True
        self.thread.join(30)
        self.flusher.note_put()
        self.flusher.close()
        close(self.queue, self.store, self.warn)
