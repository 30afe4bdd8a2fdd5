# SPDX-License-Identifier: Apache-2.0
"""Form of blocks, and what calls of kvasir.blocks return."""
import time
from typing import Any, NamedTuple

from . import _abi

__all__ = ["Done", "Removed", "Shape", "as_done", "deadline"]


class Shape(NamedTuple):
    """Form of a block: @layers, each of @outer (2: K and V; 1: both in one) times @page_size tokens of @inner elements."""
    layers: int
    page_size: int
    inner: int
    outer: int = 2
    dtype_bytes: int = 2

    def config(self, n_blocks: int) -> Any:
        """Return struct kvbm_layout_config of memory in the order [block][layer][outer][page][inner]."""
        return _abi.kvbm_layout_config(kind=_abi.KVBM_FULLY_CONTIGUOUS, num_blocks=n_blocks, num_layers=self.layers,
                                       outer_dim=self.outer, page_size=self.page_size, inner_dim=self.inner,
                                       dtype_width_bytes=self.dtype_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.layers * self.outer * self.page_size * self.inner * self.dtype_bytes


class Done(NamedTuple):
    """Result of a job: @status is 0 or a negative errno, @ok of @n blocks were copied."""
    id: int
    tag: int
    status: int
    n: int
    ok: int
    bytes: int


class Removed(NamedTuple):
    """Result of Manager.remove(): copies removed from each tier, and those that were held and stay."""
    host: int
    disk: int
    object: int
    held: int


def deadline(timeout: float) -> int:
    """Return the time of CLOCK_MONOTONIC after @timeout seconds, 0 for no limit."""
    return time.monotonic_ns() + int(timeout * 1e9) if timeout > 0 else 0


def as_done(result: Any) -> Done:
    """Make a Done of a struct kvbm_done."""
    return Done(result.id, result.tag, result.status, result.n, result.n_ok, result.bytes)
