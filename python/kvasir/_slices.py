# SPDX-License-Identifier: Apache-2.0
"""Slices of one call, which threads share."""
import collections
import threading
from typing import Callable, Iterable, Optional


class Slices:
    """Slices of one call. Threads that help take what is left; once the call is over there is nothing to take, for late ones too."""

    def __init__(self, run: Callable[[int], None], slices: Iterable[int]) -> None:
        self._run, self._left, self._running = run, collections.deque(slices), 0
        self._changed = threading.Condition()
        self._problem: Optional[BaseException] = None

    def work(self) -> None:
        """Run slices until none is left."""
        while True:
            with self._changed:
                if not self._left:
                    return
                part = self._left.popleft()
                self._running += 1
            try:
                self._run(part)
            except BaseException as problem:  # pylint: disable=broad-except
                with self._changed:
                    self._problem = self._problem or problem
                    self._left.clear()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def end(self) -> None:
        """Wait for the slices that others run, as the memory is in use until then; raise the first problem."""
        while True:
            try:
                with self._changed:
                    self._left.clear()
                    self._changed.wait_for(lambda: not self._running)
                break
            except BaseException as problem:  # pylint: disable=broad-except  # ^C
                self._problem = problem
        if self._problem is not None:
            raise self._problem
