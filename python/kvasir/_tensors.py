# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of torch and numpy tensors lie, for connectors."""
from typing import Any, List, Tuple

__all__ = ["runs", "view"]


def view(tensor: Any) -> Tuple[int, List[int], List[int], int]:
    """Return address, shape, strides in bytes and item size of a torch or numpy tensor."""
    if hasattr(tensor, "data_ptr"):
        item = tensor.element_size()
        return tensor.data_ptr(), list(tensor.shape), [step * item for step in tensor.stride()], item
    return tensor.__array_interface__["data"][0], list(tensor.shape), list(tensor.strides), tensor.itemsize


def runs(shape: List[int], strides: List[int], item: int) -> Tuple[List[int], int]:
    """Return the offsets of a tensor's contiguous runs, in the order of its elements, and the length of each."""
    dims = [(n, step) for n, step in zip(shape, strides) if n != 1]
    length = item
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    offsets = [0]
    for n, step in dims:
        offsets = [offset + i * step for offset in offsets for i in range(n)]
    return offsets, length
