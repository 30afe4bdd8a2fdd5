# SPDX-License-Identifier: Apache-2.0
"""For connectors of engines: publish blocks that no engine asks to publish, and warn now and then of what failed."""
import logging
import re
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple

from ._native import Error
from .store import Store

MANIFEST = "kvasir-flush"  # empty: publishing it ends the "save" that puts belong to, so limits and evictions concern them


WARN_S = 10  # seconds between two lines of a kind
MOST_KINDS = 64  # of a connector's lines


class Warner:
    """Logs what failed, @logger's name before and @outcome behind it: each kind of line at most once every WARN_S seconds. Any thread.

    A line says how many of its kind were left out. Numbers don't make a kind: "a get of 3 chunks" is one of "a get of 4 chunks".
    """

    def __init__(self, logger: logging.Logger, outcome: str) -> None:
        self._logger, self._outcome, self._lock = logger, outcome, threading.Lock()
        self._kinds: Dict[Tuple[str, Optional[int]], List[float]] = {}  # when a kind was said last, and how many were left out since

    def __call__(self, what: str, problem: BaseException) -> None:
        now, kind = time.monotonic(), (re.sub(r"\d+", "", what), getattr(problem, "errno", None))
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = ("", None)
            said = self._kinds.setdefault(kind, [-1e9, 0])
            if now - said[0] < WARN_S:
                said[1] += 1
                return
            more = f" (left out since the last such line: {said[1]:.0f})" if said[1] else ""
            said[:] = [now, 0]
        self._logger.warning("%s: %s: %s; %s%s", self._logger.name, what, problem, self._outcome, more)


class Flusher:
    """Publishes the blocks of @store @seconds after a put at the latest, in a thread of its own; 0: in note_put().

    What fails is tried again after as many seconds; @warn gets it.
    """

    def __init__(self, store: Store, seconds: float, warn: Callable[[str, BaseException], None]) -> None:
        self._store, self._seconds, self._warn = store, seconds, warn
        self._dirty, self._closing, self._lock = False, threading.Event(), threading.Lock()
        self._thread: Optional[threading.Thread] = None

    def note_put(self) -> None:
        """Take note that blocks were put."""
        self._dirty = True
        if not self._seconds:
            self.flush()
        elif self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="kvasir-flush", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # no more threads, or the interpreter ends
            self._warn("starting a thread", problem)
            self.flush()
        else:
            self._thread = thread

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self.flush()

    def flush(self) -> None:
        """Publish now, if anything was put."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            self._store.put_manifest(MANIFEST, b"")
        except (Error, ValueError) as problem:
            if not self._store.closed:
                self._dirty = True
                self._warn("making blocks durable", problem)

    def close(self) -> None:
        """Publish a last time and end the thread."""
        with self._lock:
            self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()
