#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkvx on a GPU beside what engines call: PyTorch's index_copy_ and index assignment, and vLLM's own kernel.

    PYTHONPATH=build/python KVASIR_LIBRARY_PATH=build/lib python3 bench/kvx_torch_bench.py [--vllm-cubin FILE]

Needs PyTorch with CUDA. FILE is the sm_90 machine code of vLLM's cache kernels, taken from its wheel: cuobjdump -xelf sm_90
vllm/_C_stable_libtorch.abi3.so writes one file for each source, and grep -l reshape_and_cache_flash_kernel names this one.
It is launched as vLLM launches it, by CuPy.

Tokens of 8 heads of 128 bf16 go to random slots of a cache of blocks of 16 (NHD). Every call works on other memory than
the calls before it, and all are captured into one CUDA graph, so that no Python is measured. Caches are compared bit by
bit. One JSON line for each figure; exit 77 without a GPU.
"""
import argparse
import json
import sys

try:
    import torch
except ImportError:
    torch = None

HEADS, DIM, BLOCK, SLOTS, ROUNDS = 8, 128, 16, 262144, 9
SCALE = 0.5  # a power of two: dividing by it and multiplying by its inverse give the same bits
VLLM = "_ZN4vllm30reshape_and_cache_flash_kernelI13__nv_bfloat16{cache}LNS_18Fp8KVCacheDataTypeE{kind}EEEvPKT_S5_PT0_S7_PKlllllliiiPKfSB_i"


class Setup:
    """Inputs for several calls, and caches to write them to."""

    def __init__(self, tokens, dtype):
        generator = torch.Generator(device="cuda").manual_seed(7)
        self.tokens, self.calls = tokens, max(2, 65536 // tokens) if tokens > 1024 else 64
        shape = (self.calls, tokens, HEADS, DIM)
        self.keys, self.values = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        order = torch.randperm(SLOTS, generator=generator, device="cuda")
        self.slots = order[:self.calls * tokens].reshape(self.calls, tokens).contiguous()
        self.dtype = dtype
        self.scale = torch.full((1,), SCALE, device="cuda")

    def caches(self):
        return [torch.full((SLOTS // BLOCK, BLOCK, HEADS, DIM), 7, device="cuda", dtype=self.dtype) for _ in range(2)]

    def bytes(self):
        return self.tokens * HEADS * DIM * 2 * (2 + (2 if self.dtype == torch.bfloat16 else 1))


def time_graph(setup, call):
    """Median microseconds of a call, of ROUNDS replays of a graph with all calls."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(setup.calls):
            call(i)
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / setup.calls)
    return sorted(times[2:])[ROUNDS // 2]


def kvx(setup, caches):
    from kvasir import layout
    cache = layout.Cache(*caches, dtype=None if setup.dtype == torch.bfloat16 else "f8_e4m3")
    scale = None if setup.dtype == torch.bfloat16 else setup.scale

    def call(i):
        layout.write(cache, setup.slots[i], setup.keys[i], setup.values[i], k_scale=scale, v_scale=scale, stream=torch.cuda.current_stream())
    return call


def to_cache(setup, rows):
    if setup.dtype == torch.bfloat16:
        return rows
    return (rows.float() / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def index_copy(setup, caches):
    flat = [cache.view(SLOTS, HEADS, DIM) for cache in caches]

    def call(i):
        for cache, rows in zip(flat, (setup.keys[i], setup.values[i])):
            cache.index_copy_(0, setup.slots[i], to_cache(setup, rows))
    return call


def assignment(setup, caches):
    flat = [cache.view(SLOTS, HEADS, DIM) for cache in caches]

    def call(i):
        for cache, rows in zip(flat, (setup.keys[i], setup.values[i])):
            cache[setup.slots[i]] = to_cache(setup, rows)
    return call


def vllm(path):
    """vLLM's reshape_and_cache_flash: a block of threads for each token."""
    import cupy
    import numpy
    module = cupy.RawModule(path=path)

    def make(setup, caches):
        bf16 = setup.dtype == torch.bfloat16
        kernel = module.get_function(VLLM.format(cache="S1_" if bf16 else "h", kind=0 if bf16 else 1))
        row, threads = HEADS * DIM, min(HEADS * DIM, 512)

        def call(i):
            wide = [numpy.int64(n) for n in (BLOCK * row, row, DIM, row, row)]
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel((setup.tokens,), (threads,), (
                    *(numpy.uint64(t.data_ptr()) for t in (setup.keys[i], setup.values[i], *caches, setup.slots[i])), *wide,
                    numpy.int32(HEADS), numpy.int32(DIM), numpy.int32(BLOCK), numpy.uint64(setup.scale.data_ptr()),
                    numpy.uint64(setup.scale.data_ptr()), numpy.int32(0)))
        return call
    return make


def measure(tokens, dtype, ways):
    setup, ours = Setup(tokens, dtype), None
    for name, make in ways:
        caches = setup.caches()
        us = time_graph(setup, make(setup, caches))
        first = ours is None
        if first:
            ours = (us, caches)
        same = all(torch.equal(a, b) for a, b in zip(caches, ours[1]))
        print(json.dumps({"bench": "kvx_torch", "figure": name, "cache": "bf16" if dtype == torch.bfloat16 else "e4m3",
                          "tokens": tokens, "us": round(us, 2), "gb_per_s": round(setup.bytes() / us / 1e3, 1),
                          "times_ours": round(us / ours[0], 3), "same_bytes": same, "median_of": ROUNDS}), flush=True)
        if not same:
            measure.failed = True


measure.failed = False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-cubin", metavar="FILE", help="machine code of vLLM's cache kernels")
    options = parser.parse_args()
    if torch is None or not torch.cuda.is_available():
        print("skipped: no PyTorch with a CUDA device")
        return 77
    print(json.dumps({"bench": "kvx_torch", "figure": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__}))
    ways = [("kvx", kvx), ("index_copy_", index_copy), ("index assignment", assignment)]
    if options.vllm_cubin:
        ways.append(("vllm reshape_and_cache_flash", vllm(options.vllm_cubin)))
    for tokens in (64, 1024, 8192, 65536):
        for dtype in (torch.bfloat16, torch.uint8):
            measure(tokens, dtype, ways)
    return int(measure.failed)


if __name__ == "__main__":
    sys.exit(main())
