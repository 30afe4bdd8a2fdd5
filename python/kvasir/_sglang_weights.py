# SPDX-License-Identifier: Apache-2.0
"""Weights that SGLang computes with, and those of the pages in its host memory.

SGLang changes weights first and resets its cache afterwards, if at all: while a request runs it refuses the reset. Its backup thread
goes on in between and would store pages of the old weights under the new weights' name. SGLang tells a storage backend of neither.
Weights.changed() asks SGLang; on_clear() wraps the host pool's clear(), which a reset calls once the storage threads have ended.
"""
import importlib
import logging
from typing import Any, Callable, Optional, Tuple

__all__ = ["Weights", "of_server", "on_clear"]

logger = logging.getLogger("kvasir.sglang")


def of_server(function: str, name: str) -> Optional[str]:
    """Return a field of what SGLang's server runs with; None: no server runs in this process, or it has no such field."""
    try:
        value = getattr(getattr(importlib.import_module("sglang.srt.runtime_context"), function)(), name)
    except Exception:  # pylint: disable=broad-except
        return None
    return None if value is None else str(value)


def _now() -> Tuple[Optional[str], ...]:
    """Return what SGLang tells of its weights: path, revision, quantisation, load format, overrides, and the version of an update."""
    fields = [of_server("get_server_args", name) for name in ("model_path", "revision", "quantization", "load_format", "json_model_override_args")]
    updated = of_server("get_model", "model_path")
    return (updated or fields[0], *fields[1:], of_server("get_serving", "weight_version"))


class Weights:
    """Names of the weights that SGLang has now (@now) and of those that made its host pages. The caller's lock guards it."""

    def __init__(self) -> None:
        self.now = _now()
        self._of_pages: Optional[Tuple[Optional[str], ...]] = self.now  # None: of several weights

    def changed(self) -> bool:
        """Ask SGLang for its weights; tells whether they are others than at the call before."""
        now = _now()
        if now == self.now:
            return False
        self.now, self._of_pages = now, None
        logger.warning("kvasir.sglang: SGLang has other weights: no page is stored until its cache is flushed")
        return True

    def made_pages(self) -> bool:
        """Tell whether all pages in host memory are of the weights of now."""
        return self._of_pages == self.now

    def reset(self) -> None:
        """Take note that SGLang has dropped its host pages."""
        self._of_pages = self.now


def on_clear(pool: Any, cleared: Callable[[], None]) -> Callable[[], None]:
    """Call @cleared after each clear() of a host pool. Returns the function that ends this."""
    clear: Any = getattr(pool, "clear", None)

    def wrapped() -> None:
        clear()
        cleared()

    def end() -> None:
        if vars(pool).get("clear") is wrapped:
            del pool.clear

    if clear is None:  # another SGLang
        logger.warning("kvasir.sglang: this host pool tells of no reset: no page is stored once the weights have changed")
    else:
        pool.clear = wrapped
    return end
