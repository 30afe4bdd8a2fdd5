# SPDX-License-Identifier: Apache-2.0
"""For connectors of engines: publish blocks that no engine asks to publish, and warn now and then of what failed."""
import logging
import threading
import time
from typing import Callable, Optional

from ._native import Error
from .store import Store

MANIFEST = "kvasir-flush"  # empty: publishing it ends the "save" that puts belong to, so limits and evictions concern them


WARN_S = 10  # seconds between two warnings of a connector


class Warner:
    """Logs what failed, @logger's name before and @outcome behind it, at most once every WARN_S seconds. Any thread."""

    def __init__(self, logger: logging.Logger, outcome: str) -> None:
        self._logger, self._outcome = logger, outcome
        self._lock, self._said = threading.Lock(), -1e9

    def __call__(self, what: str, problem: BaseException) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._said < WARN_S:
                return
            self._said = now
        self._logger.warning("%s: %s: %s; %s", self._logger.name, what, problem, self._outcome)


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
