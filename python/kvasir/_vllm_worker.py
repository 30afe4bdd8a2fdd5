# SPDX-License-Identifier: Apache-2.0
"""The workers' half of the connector for vLLM: moves blocks between a rank's cache and the store."""
import contextlib
import errno
import importlib
import logging
import os
import select
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

from . import store as _store
from ._connector import Flusher, Warner
from ._native import Error
from ._tensors import runs, view
from ._vllm_moves import ASK_WAIT_S, Figures, Move, Plan, close, keys_of
from .queue import Queue, Result
from .store import _Table

logger = logging.getLogger("kvasir.vllm")
STORE_WAIT_S = 1.0  # that a step waits for stores of blocks that it overwrites; what hasn't begun is left out then
_DAMAGED = (-errno.EBADMSG, -errno.EMSGSIZE)  # the latter: it is longer than a block


class _Parts:
    """Where a block's parts lie: those of each layer, at equal distances from block to block."""

    def __init__(self, caches: Dict[str, Any], n_blocks: int) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self._caches = caches
        base, step, length, seen = [], [], [], set()
        for name in sorted(caches):
            cache = caches[name]
            if isinstance(cache, (list, tuple)):
                raise ValueError(f"kvasir.vllm: layer {name} has states, which the connector doesn't know")
            if getattr(getattr(cache, "device", None), "type", "cpu") != "cpu":
                raise ValueError("kvasir.vllm: the KV cache is not in host memory; use OffloadingConnector with kvasir.vllm.Tier")
            address, shape, strides, item = view(cache)
            if address in seen:
                continue  # layers that share a cache
            seen.add(address)
            if not n_blocks or shape[0] % n_blocks:
                raise ValueError(f"kvasir.vllm: layer {name} has the shape {shape}, which doesn't begin with {n_blocks} blocks")
            each = shape[0] // n_blocks  # blocks of the attention's own size
            offsets, run = runs([each] + shape[1:], strides, item)
            base += [address + offset for offset in offsets]
            step += [each * strides[0]] * len(offsets)
            length += [run] * len(offsets)
        self.n, self.nbytes = len(base), sum(length)
        self._base, self._step, self._length = (self._numpy.array(values, dtype=self._numpy.int64) for values in (base, step, length))

    def of(self, blocks: Sequence[int]) -> _Table:
        """Return the scatter lists of blocks, which keep the tensors."""
        numpy = self._numpy
        table = numpy.empty((len(blocks), self.n, 2), dtype=numpy.int64)
        table[:, :, 0] = numpy.array(blocks, dtype=numpy.int64)[:, None] * self._step + self._base
        table[:, :, 1] = self._length
        return _Table(table, numpy.full(len(blocks), self.n, dtype=numpy.uint32), self._caches)


class _Job(NamedTuple):
    """A request of the queue: a load of @request, or a store (@request empty). Without keys: a deletion of what couldn't be loaded."""
    request: str
    blocks: List[int]
    keys: List[bytes]
    resets: int  # of the cache before it began
    begun: float


class Worker:
    """Moves blocks between this rank's cache and the store. vLLM's thread calls, a thread of its own takes results."""

    def __init__(self, uri: str, rank: int, flush_s: float, warn: Warner) -> None:
        self.rank, self.warn, self.resets = rank, warn, 0
        self.store = _store.open(uri)
        self.queue = Queue(self.store)
        self.flusher = Flusher(self.store, flush_s, warn)
        self.parts: Optional[_Parts] = None
        self.caches: Any = None
        self.changed = threading.Condition()
        self.jobs: Dict[int, _Job] = {}
        self.reading: Dict[int, int] = {}  # stores under way by block
        self.loaded: Set[str] = set()
        self.failed: Set[int] = set()
        self.told: Set[int] = set()
        self.counters = {name: 0 for name in ("loaded", "stored", "present", "failed")}  # blocks
        self.figures = Figures()
        self.ending = False
        self.thread = threading.Thread(target=self._collect, name="kvasir-vllm", daemon=True)
        self.thread.start()

    def register(self, caches: Dict[str, Any], n_blocks: int) -> None:
        """Take the engine's tensors."""
        self.parts, self.caches = _Parts(caches, n_blocks), caches
        logger.info("kvasir.vllm: %d blocks of %d bytes in %d parts each", n_blocks, self.parts.nbytes, self.parts.n)

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
        keys = keys_of(move.root, self.rank, move.hashes)
        with self.changed:  # held until the job is noted: its result may come at once
            try:
                if self.parts is None or self.ending:
                    raise Error(errno.ESHUTDOWN, "no cache")
                table: Any = self.parts.of(move.blocks)
                ident = self.queue.get(keys, table, priority=1) if load else self.queue.put(keys, table)
            except (Error, ValueError) as problem:
                self.warn("reading blocks" if load else "storing blocks", problem)
                self.counters["failed"] += len(keys)
                self.figures.add(**{"load_failed" if load else "store_failed": len(keys)})
                if load:
                    self.failed.update(move.blocks)
                    self.loaded.add(request)
                return
            self.jobs[ident] = _Job(request, move.blocks, keys, self.resets, time.monotonic())
            for block in () if load else move.blocks:
                self.reading[block] = self.reading.get(block, 0) + 1

    def load(self, plan: Plan) -> None:
        """Begin to load."""
        for move in plan.loads:
            self._submit(True, move.request, move)

    def save(self, plan: Plan) -> None:
        """Begin to store."""
        for move in plan.stores:
            self._submit(False, "", move)

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
                    self.failed.update(job.blocks)
                    self.loaded.add(job.request)
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
            wanted = 0 if self.parts is None else self.parts.nbytes
            late = not job.keys or job.resets != self.resets  # the cache was reset meanwhile: what was loaded is of before
            bad = range(len(job.blocks)) if late else [i for i, rc in enumerate(result.each) if rc != wanted]
            failed = [job.blocks[i] for i in bad]
            if job.keys:
                self.counters["loaded"] += len(job.keys) - len(bad)
                self.counters["failed"] += len(bad)
                self.figures.add(loaded=len(job.keys) - len(bad), load_failed=len(bad), bytes_loaded=(len(job.keys) - len(bad)) * wanted)
                self.figures.time("load_seconds", job.begun)
                damaged = [] if late else [job.keys[i] for i in bad if result.each[i] >= 0 or result.each[i] in _DAMAGED]
                if self._delete(job.request, failed, damaged):
                    return False
            self.failed.update(failed)
            self.loaded.add(job.request)
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
                         bytes_stored=result.each.count(0) * (0 if self.parts is None else self.parts.nbytes))
        self.figures.time("store_seconds", job.begun)
        return 0 in result.each

    def _delete(self, request: str, failed: List[int], damaged: List[bytes]) -> bool:
        """Delete damaged blocks. True: @request has ended once they are gone, as it stores them anew then."""
        if not damaged:
            return False
        try:
            self.jobs[self.queue.delete(damaged)] = _Job(request, failed, [], self.resets, time.monotonic())
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
