# SPDX-License-Identifier: Apache-2.0
"""kvasir.layout on tensors that say they lie on a GPU. libkvx_cuda's work is emulated, on memory of the host."""
import os

from kvpython import BUILD, check, equal, raises, run, skip_all  # first: it finds the package

os.environ["KVX_CUDA_LIBRARY"] = str(BUILD / "tests" / "libkvx_emulated.so")
import kvasir  # noqa: E402
from kvasir import _native, layout  # noqa: E402

try:
    import numpy
except ImportError:
    skip_all("python3-numpy is needed")

BLOCKS, SIZE, HEADS, DIM = 7, 4, 2, 16
CUDA, PINNED, MANAGED = 2, 3, 13  # of DLPack


class Tensor:
    """A numpy array as a tensor of a GPU's."""

    def __init__(self, array, gpu=0, kind=CUDA):
        self.array, self.gpu, self.kind, self.streams = array, gpu, kind, []

    def __dlpack_device__(self):
        return self.kind, self.gpu

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        tensor = _native.DLTensor.from_address(_native._capsule(capsule, b"dltensor"))
        tensor.device_type, tensor.device_id = self.kind, self.gpu
        return capsule


def zeros(dtype=numpy.float16):
    return numpy.zeros((BLOCKS, SIZE, HEADS, DIM), dtype)


ROWS = numpy.arange(3 * HEADS * DIM).reshape(3, HEADS, DIM).astype(numpy.float16)
SLOTS = numpy.array([5, -1, 27], numpy.int64)


def test_write_and_gather():
    k, v, keys = zeros(), zeros(), Tensor(ROWS)
    cache = layout.Cache(Tensor(k), Tensor(v))
    layout.write(cache, Tensor(SLOTS), keys, Tensor(-ROWS), stream=0)
    equal(keys.streams, [-1], "the stream that a framework is to wait for: none")
    for tensor, rows in ((k, ROWS), (v, -ROWS)):
        got = tensor.reshape(-1, HEADS, DIM)
        check((got[5] == rows[0]).all() and (got[27] == rows[2]).all() and not got[6:27].any(), "written")
    out = [numpy.full((1, 4, HEADS, DIM), 9, numpy.float16) for _ in "kv"]
    layout.gather(cache, Tensor(numpy.array([[1]], numpy.int32)), Tensor(numpy.array([2], numpy.int32)), Tensor(out[0]), Tensor(out[1]))
    check((out[0][0, 1] == ROWS[0]).all() and (out[1][0, 1] == -ROWS[0]).all() and (out[0][0, 2:] == 9).all(), "gathered")


def test_scales():
    k, v = zeros(numpy.uint8), zeros(numpy.uint8)
    cache = layout.Cache(Tensor(k), Tensor(v), dtype="f8_e4m3")
    rows = Tensor(numpy.full((3, HEADS, DIM), 8, numpy.float32))
    scales = numpy.array([[9, 2], [9, 4]], numpy.float32)[:, 1]  # strided
    layout.write(cache, Tensor(SLOTS), rows, rows, k_scale=Tensor(scales), v_scale=Tensor(numpy.array(8, numpy.float32)))
    equal((int(k[1, 1, 0, 0]), int(k[1, 1, 1, 0]), int(v[1, 1, 0, 0])), (0x48, 0x40, 0x38), "4, 2 and 1 as E4M3")
    for scale in (2.0, numpy.ones(1, numpy.float32), Tensor(numpy.ones(1))):
        raises(TypeError, layout.write, cache, Tensor(SLOTS), rows, rows, k_scale=scale)


def test_all_lie_on_one_gpu():
    k, v, rows, slots = zeros(), zeros(), Tensor(ROWS), Tensor(SLOTS)
    cache = layout.Cache(Tensor(k), Tensor(v))
    raises(TypeError, layout.write, cache, SLOTS, rows, rows)
    raises(kvasir.Error, layout.write, cache, slots, ROWS, rows)
    raises(kvasir.Error, layout.write, layout.Cache(k, v), SLOTS, rows, rows)
    raises(kvasir.Error, layout.Cache, Tensor(k), v)
    raises(TypeError, layout.Cache, Tensor(k), Tensor(v, 1))
    for at in range(3):
        raises(TypeError, layout.write, cache, *(Tensor(each, int(at == i)) for i, each in enumerate((SLOTS, ROWS, ROWS))))
    ids, n = numpy.array([[1]], numpy.int32), numpy.array([2], numpy.int32)
    out = numpy.zeros((1, 4, HEADS, DIM), numpy.float16)
    for at in range(4):
        raises(TypeError, layout.gather, cache, *(Tensor(each, int(at == i)) for i, each in enumerate((ids, n, out, out.copy()))))
    fp8 = layout.Cache(Tensor(zeros(numpy.uint8), 1), Tensor(zeros(numpy.uint8), 1), dtype="f8_e4m3")
    there = [Tensor(SLOTS, 1), Tensor(ROWS, 1), Tensor(ROWS, 1)]
    one = numpy.ones(1, numpy.float32)
    raises(TypeError, layout.write, fp8, *there, v_scale=Tensor(one))
    layout.write(fp8, *there, k_scale=Tensor(one, 1), v_scale=Tensor(one, 0, MANAGED))  # which all GPUs reach
    check(not k.any() and not v.any(), "refused calls write nothing")
    pinned = layout.Cache(Tensor(k, 0, PINNED), Tensor(v, 0, PINNED))  # the host's
    layout.write(pinned, SLOTS, ROWS, ROWS)
    check((k.reshape(-1, HEADS, DIM)[5] == ROWS[0]).all(), "written")


if __name__ == "__main__":
    run(globals())
