# SPDX-License-Identifier: Apache-2.0
"""kvasir.layout against numpy's own indexing: write and gather in every layout, strided memory, errors."""
import errno
import os
import random

from kvpython import check, equal, raises, run, skip_all  # first: it finds the package
import kvasir
from kvasir import layout

try:
    import numpy
except ImportError:
    skip_all("python3-numpy is needed")

BLOCKS, SIZE, HEADS, DIM = 7, 4, 2, 8


def as_nhd(tensor, name):
    """The tensor of a layout as [blocks, block_size, heads, dim]."""
    if name == "nhd":
        return tensor
    if name == "hnd":
        return tensor.transpose(0, 2, 1, 3)
    return tensor.transpose(0, 3, 1, 2, 4).reshape(BLOCKS, SIZE, HEADS, DIM)


def empty(name, dtype):
    shape = {"nhd": (BLOCKS, SIZE, HEADS, DIM), "hnd": (BLOCKS, HEADS, SIZE, DIM), "packed": (BLOCKS, HEADS, DIM // 4, SIZE, 4)}[name]
    return numpy.zeros(shape, dtype)


def test_write_and_gather_against_indexing():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng = numpy.random.default_rng(seed)
    for name in ("nhd", "hnd", "packed"):
        for dtype in (numpy.float32, numpy.float16):
            k, v = empty(name, dtype), empty(name, dtype)
            cache = layout.Cache(k, v, layout=name)
            equal((cache.blocks, cache.block_size, cache.heads, cache.dim), (BLOCKS, SIZE, HEADS, DIM), "geometry")
            slots = rng.permutation(BLOCKS * SIZE)[:20].astype(numpy.int64)
            slots[3] = -1
            keys, values = (rng.random((20, HEADS, DIM)).astype(dtype) for _ in range(2))
            layout.write(cache, slots, keys, values)
            for tensor, rows in ((k, keys), (v, values)):
                model = numpy.zeros((BLOCKS * SIZE, HEADS, DIM), dtype)
                for slot, row in zip(slots, rows):
                    if slot >= 0:
                        model[slot] = row
                check((as_nhd(tensor, name).reshape(-1, HEADS, DIM) == model).all(), f"written in {name}")
            table = numpy.array([[2, 0], [5, 6]], dtype=numpy.int32)
            lengths = numpy.array([7, 3], dtype=numpy.int32)
            got_k, got_v = (numpy.full((2, 8, HEADS, DIM), 9, dtype) for _ in range(2))
            layout.gather(cache, table, lengths, got_k, got_v, zero_padding=True)
            for tensor, got in ((k, got_k), (v, got_v)):
                for i, length in enumerate(lengths):
                    rows = as_nhd(tensor, name)[table[i]].reshape(-1, HEADS, DIM)
                    check((got[i, :length] == rows[:length]).all() and not got[i, length:].any(), f"gathered in {name}")


def test_memory_of_an_engine_is_used_in_place():
    both = numpy.zeros((BLOCKS, 2, SIZE, HEADS, DIM), numpy.float32)  # K and V of a block side by side: strided views
    cache = layout.Cache(both[:, 0], both[:, 1])
    rows = numpy.ones((1, HEADS, DIM), numpy.float32)
    layout.write(cache, numpy.array([5]), rows, rows * 2)
    check((both[1, 0, 1] == 1).all() and (both[1, 1, 1] == 2).all(), "in place")
    equal(both.sum(), 3.0 * HEADS * DIM, "nothing else")


def test_fp8_in_tensors_of_bytes():
    k, v = (numpy.zeros((BLOCKS, SIZE, HEADS, DIM), numpy.uint8) for _ in range(2))
    cache = layout.Cache(k, v, dtype="f8_e4m3")
    rows = numpy.full((1, HEADS, DIM), 3.0, numpy.float32)
    layout.write(cache, numpy.array([0]), rows, rows, k_scale=2.0, v_scale=1.0)
    equal((int(k[0, 0, 0, 0]), int(v[0, 0, 0, 0])), (0x3c, 0x44), "1.5 and 3 as E4M3")


def test_scales_of_all_granularities():
    rng = numpy.random.default_rng(5)
    rows = rng.integers(-4, 5, (8, HEADS, DIM)).astype(numpy.float32)
    slots = numpy.arange(8, dtype=numpy.int64)
    for shape in ((), (1,), (HEADS,), (BLOCKS,), (BLOCKS, HEADS)):
        k, v = (numpy.zeros((BLOCKS, SIZE, HEADS, DIM), numpy.uint8) for _ in range(2))
        cache = layout.Cache(k, v, dtype="f8_e4m3")
        scale = numpy.asarray(2.0 ** rng.integers(-2, 3, shape), numpy.float32)
        layout.write(cache, slots, rows, rows, k_scale=scale, v_scale=1.0)
        got_k, got_v = (numpy.full((1, 8, HEADS, DIM), 9, numpy.float32) for _ in range(2))
        layout.gather(cache, numpy.array([[0, 1]], dtype=numpy.int32), numpy.array([8], dtype=numpy.int32), got_k, got_v, k_scale=scale)
        check((got_k[0] == rows).all() and (got_v[0] == rows).all(), f"scales {shape} of powers of two change nothing")
        layout.gather(cache, numpy.array([[0, 1]], dtype=numpy.int32), numpy.array([8], dtype=numpy.int32), got_k, got_v)
        block_head = numpy.broadcast_to(scale[:, None] if shape == (BLOCKS,) else scale, (BLOCKS, HEADS))
        model = rows / block_head[slots // SIZE][:, :, None]
        check((got_k[0] == model).all(), f"scales {shape} are applied")
    raises(ValueError, layout.write, cache, slots, rows, rows, k_scale=numpy.ones(3, numpy.float32))
    raises(TypeError, layout.write, cache, slots, rows, rows, k_scale=numpy.ones(1, numpy.float64))
    square = layout.Cache(*(numpy.zeros((HEADS, SIZE, HEADS, DIM), numpy.uint8) for _ in range(2)), dtype="f8_e4m3")
    raises(ValueError, layout.write, square, slots, rows, rows, k_scale=numpy.ones(HEADS, numpy.float32))


def test_streams():
    class Torch:
        cuda_stream = 0

    class Protocol:
        def __cuda_stream__(self):
            return (0, 0)

    cache = layout.Cache(empty("nhd", numpy.float32), empty("nhd", numpy.float32))
    rows = numpy.ones((1, HEADS, DIM), numpy.float32)
    for stream in (None, 0, Torch(), Protocol()):  # in host memory a stream has no effect
        layout.write(cache, numpy.array([0]), rows, rows, stream=stream)
    raises(TypeError, layout.write, cache, numpy.array([0]), rows, rows, stream="default")


def test_torch_tensors():
    try:
        import torch
    except ImportError:
        print("without torch")
        return
    k, v = (torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    rows = torch.ones(1, HEADS, DIM, dtype=torch.bfloat16)
    layout.write(layout.Cache(k, v), torch.tensor([4]), rows, rows)
    equal(float(k[1, 0].sum()), float(HEADS * DIM), "bfloat16")


def test_errors():
    cache = layout.Cache(empty("nhd", numpy.float32), empty("nhd", numpy.float32))
    rows = numpy.ones((1, HEADS, DIM), numpy.float32)
    equal(raises(kvasir.Error, layout.write, cache, numpy.array([BLOCKS * SIZE]), rows, rows).errno, errno.ERANGE, "a slot too far")
    equal(raises(kvasir.Error, layout.write, cache, numpy.array([0]), rows[:, :1], rows).errno, errno.EINVAL, "another shape")
    raises(TypeError, layout.write, cache, [0], rows, rows)
    raises(TypeError, layout.write, cache, numpy.array([0.5]), rows, rows)
    raises(ValueError, layout.Cache, rows[0], rows[0])
    raises(kvasir.Error, layout.Cache, numpy.zeros((2, 2, 2, 2), complex), numpy.zeros((2, 2, 2, 2), complex))
    check(layout.isa() in ("avx512", "avx2", "neon", "scalar"), layout.isa())
    layout.set_threads(1)
    raises(kvasir.Error, layout.set_threads, 0)


if __name__ == "__main__":
    run(globals())
