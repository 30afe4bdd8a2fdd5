# SPDX-License-Identifier: Apache-2.0
"""What SGLang's /metrics has of kvasir.sglang.HiCache.

SGLang's own statistics of a storage backend are four lists: pages and GB/s of reads and of writes. The rest are metrics of ours, made
with the prometheus_client of SGLang's process, whose metrics SGLang serves from that process's files.
"""
import importlib
import logging
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

__all__ = ["Metrics"]

logger = logging.getLogger("kvasir.sglang")
MOST_MOVED = 4096  # reads, and writes, that wait for stats() one by one: later ones count as one, with their sums
START = "sglang:kvasir_"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
RANKS = ("tp_rank", "pp_rank", "dp_rank")
# Counters of a HiCache: a metric's name and the values of its labels.
COUNTERS = {"got": ("pages", "read", "done"), "missed": ("pages", "read", "missed"), "damaged": ("pages", "read", "damaged"),
            "put": ("pages", "write", "done"), "present": ("pages", "write", "present"), "failed": ("pages", "write", "failed"),
            "stale": ("pages", "write", "stale"),
            "asked": ("asked", "asked"), "found": ("asked", "found")}
_NAMES: Dict[str, Tuple[str, List[str]]] = {
    "pages": ("Pages that the store was to give or take, by what came of them.", ["operation", "outcome"]),
    "asked": ("Pages that SGLang asked for, and those of them that the store has.", ["answer"]),
    "bytes": ("Bytes read from the store and written to it.", ["operation"]),
    "seconds": ("Seconds of each read or write of pages.", ["operation"])}
_made: Dict[str, Any] = {}  # metrics of this process: they stay when a backend is detached


class _Moved(NamedTuple):
    """A read or a write of pages that has ended."""
    pages: int
    nbytes: int
    seconds: float


def _make(labels: List[str]) -> Dict[str, Any]:
    """Make the metrics, once in a process. Raises ImportError without prometheus_client."""
    client = importlib.import_module("prometheus_client")
    for name, (text, more) in _NAMES.items():
        if name not in _made:
            kind, buckets = (client.Histogram, {"buckets": SECONDS}) if name == "seconds" else (client.Counter, {})
            _made[name] = kind(START + name, text, labels + more, **buckets)
    return _made


class Metrics:
    """Counters and moves of one HiCache. Any thread. @config: SGLang's HiCacheStorageConfig."""

    def __init__(self, config: Any) -> None:
        self.counters = {name: 0 for name in COUNTERS}  # pages
        self.on = bool(getattr(config, "enable_storage_metrics", False))
        self._labels = [str(config.model_name), *(str(getattr(config, name, 0)) for name in RANKS)]
        self._lock = threading.Lock()
        self._reads: List[_Moved] = []
        self._writes: List[_Moved] = []
        self._of: Dict[str, Any] = {}
        if self.on:
            try:
                self._of = _make(["model_name", *RANKS])
            except Exception as problem:  # pylint: disable=broad-except  # not installed, or others have these names
                logger.warning("kvasir.sglang: no metrics of its own: %s", problem)

    def count(self, **pages: int) -> None:
        """Count pages by the names of COUNTERS."""
        with self._lock:
            for name, n in pages.items():
                self.counters[name] += n
        if self._of:
            for name, n in pages.items():
                if n:
                    self._metric(*COUNTERS[name]).inc(n)

    def note_moved(self, reads: bool, pages: int, nbytes: int, begun: float) -> None:
        """Take note of a read or a write of @pages of @nbytes each that began at @begun."""
        if not pages or not self.on:
            return
        move, waiting = _Moved(pages, pages * nbytes, time.monotonic() - begun), self._reads if reads else self._writes
        with self._lock:
            if len(waiting) == MOST_MOVED:
                last = waiting[-1]
                waiting[-1] = _Moved(last.pages + move.pages, last.nbytes + move.nbytes, last.seconds + move.seconds)
            else:
                waiting.append(move)
        if self._of:
            operation = "read" if reads else "write"
            self._metric("bytes", operation).inc(move.nbytes)
            self._metric("seconds", operation).observe(move.seconds)

    def stats(self) -> Optional[Any]:
        """Return what SGLang's own metrics want since the last call. None where SGLang keeps none."""
        if not self.on:
            return None
        stats = getattr(importlib.import_module("sglang.srt.observability.metrics_collector"), "StorageMetrics")()
        with self._lock:
            reads, writes = self._reads[:], self._writes[:]
            self._reads.clear()
            self._writes.clear()
        for moves, pages, bandwidth in ((reads, stats.prefetch_pgs, stats.prefetch_bandwidth), (writes, stats.backup_pgs, stats.backup_bandwidth)):
            pages.extend(move.pages for move in moves)
            bandwidth.extend(move.nbytes / 1e9 / max(move.seconds, 1e-9) for move in moves)
        return stats

    def _metric(self, name: str, *labels: str) -> Any:
        return self._of[name].labels(*self._labels, *labels)
