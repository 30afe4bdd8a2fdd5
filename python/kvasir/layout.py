# SPDX-License-Identifier: Apache-2.0
"""Write and gather paged K/V on numpy arrays and on tensors of any framework with DLPack, in host or GPU memory.

    cache = kvasir.layout.Cache(k, v)                    # [blocks, block_size, heads, dim], any strides
    kvasir.layout.write(cache, slots, keys, values)      # rows [tokens, heads, dim] to slot = block * block_size + offset
    kvasir.layout.gather(cache, table, lengths, keys, values)

K and V are used where they lie. Equal dtypes are copied bit by bit, others converted; FP8 is value / scale.

On a GPU all tensors of a call lie there. The call queues the work on a stream and returns; slots out of range are left out.
@stream is a framework's stream (torch.cuda.current_stream()) or its handle; None is CUDA's default stream. The tensors, those of
scales and indices included, must keep their memory until the stream has done the work.
"""
import ctypes
import numbers
from typing import Any, Optional

from . import _abi
from ._native import Error, Invalid, dltensor, load

__all__ = ["Cache", "gather", "isa", "set_threads", "write"]

_c = load("kvx")
_LAYOUTS = {"nhd": _abi.KVX_LAYOUT_BLOCK_NHD, "hnd": _abi.KVX_LAYOUT_BLOCK_HND, "packed": _abi.KVX_LAYOUT_BLOCK_HND_PACKED}
_DTYPES = {"f16": _abi.KVX_DTYPE_F16, "bf16": _abi.KVX_DTYPE_BF16, "f32": _abi.KVX_DTYPE_F32, "f8_e4m3": _abi.KVX_DTYPE_F8_E4M3,
           "f8_e5m2": _abi.KVX_DTYPE_F8_E5M2}
_GPU = (2, 13)  # device types of DLPack: CUDA, CUDA managed
_INDEX = {4: _abi.KVX_DTYPE_S32, 8: _abi.KVX_DTYPE_S64}
_ERRNO = {_abi.KVX_STATUS_INVALID_ARGUMENT: 22, _abi.KVX_STATUS_UNSUPPORTED: 95, _abi.KVX_STATUS_OUT_OF_RANGE: 34,
          _abi.KVX_STATUS_INCOMPATIBLE: 71, _abi.KVX_STATUS_INTERNAL_ERROR: 5}


def _check(status: int, what: str) -> None:
    if status:
        raise Error(_ERRNO.get(status, 5), f"{what}: {(_c.kvx_status_name(status) or b'').decode()}")


def _gpu_of(tensor: Any) -> Optional[int]:
    """The GPU in whose memory a tensor lies. None: the host's memory, or managed memory, which all GPUs reach."""
    return tensor.device_id if tensor.device_type == _GPU[0] else None


def _same_gpu(*tensors: Any) -> None:
    """A kernel on one GPU that reads another's memory ends the process's use of CUDA; the library doesn't ask whose it is."""
    if len({tensor.gpu for tensor in tensors if tensor is not None and tensor.gpu is not None}) > 1:
        raise TypeError("tensors of several GPUs")


class _Tensor:
    """A tensor as KVX describes it, and what keeps its memory."""

    def __init__(self, source: Any, layout: int, dtype: Optional[str] = None) -> None:
        tensor, self.keep = dltensor(source)
        self.gpu = _gpu_of(tensor)
        self.desc = _abi.kvx_tensor_desc()
        _check(_c.kvx_tensor_from_dlpack(ctypes.byref(tensor), layout, ctypes.byref(self.desc)), "tensor")
        if dtype is not None:  # engines keep FP8 as bytes
            if self.desc.dtype != _DTYPES[dtype] and _c.kvx_dtype_size(_DTYPES[dtype]) != _c.kvx_dtype_size(self.desc.dtype):
                raise Invalid(f"elements of another width than {dtype}")
            self.desc.dtype = _DTYPES[dtype]

    @property
    def shape(self) -> Any:
        return list(self.desc.shape[:self.desc.ndim])


class _Numbers:
    """Indices or lengths: a contiguous tensor of 32 or 64-bit integers."""

    def __init__(self, source: Any) -> None:
        tensor, self.keep = dltensor(source)
        self.shape = [tensor.shape[i] for i in range(tensor.ndim)]
        step = 1
        for i in reversed(range(tensor.ndim)):
            if tensor.strides and tensor.shape[i] != 1 and tensor.strides[i] != step:
                raise Invalid("indices that are not contiguous")
            step *= tensor.shape[i]
        if tensor.code != 0 or tensor.bits not in (32, 64):
            raise TypeError("indices must be int32 or int64")
        self.dtype, self.n, self.address = _INDEX[tensor.bits // 8], step, (tensor.data or 0) + tensor.byte_offset
        self.on_gpu, self.gpu = tensor.device_type in _GPU, _gpu_of(tensor)


class Cache:
    """Paged K and V of one layer.

    @layout: "nhd" [blocks, block_size, heads, dim], "hnd" [blocks, heads, block_size, dim], or "packed"
    [blocks, heads, dim/p, block_size, p]. @dtype names the elements of tensors of bytes: "f8_e4m3", "f8_e5m2".
    """

    def __init__(self, k: Any, v: Any, *, layout: str = "nhd", dtype: Optional[str] = None) -> None:
        self._k, self._v = (_Tensor(tensor, _LAYOUTS[layout], dtype) for tensor in (k, v))
        shape = self._k.shape
        if len(shape) != (5 if layout == "packed" else 4):
            raise Invalid(f"{len(shape)} dimensions in layout {layout}")
        block_size, heads, dim = {"nhd": (1, 2, 3), "hnd": (2, 1, 3), "packed": (3, 1, 2)}[layout]
        self.blocks, self.block_size, self.heads = shape[0], shape[block_size], shape[heads]
        self.dim = shape[dim] * (shape[4] if layout == "packed" else 1)
        self.on_gpu = self._k.desc.memory != _abi.KVX_MEMORY_HOST
        _same_gpu(self._k, self._v)
        self.gpu = self._v.gpu if self._k.gpu is None else self._k.gpu
        self.desc = _abi.kvx_cache_desc(num_blocks=self.blocks, block_size=self.block_size, num_kv_heads=self.heads,
                                        head_dim=self.dim, k=self._k.desc, v=self._v.desc)
        _check(_c.kvx_validate_cache_desc(ctypes.byref(self.desc)), "cache")


class _Scale:
    """Scales of an FP8 cache: one number, or a float32 tensor [1], [heads], [blocks] or [blocks, heads]."""

    def __init__(self, cache: Cache, source: Any) -> None:
        self.gpu: Optional[int] = None
        self.desc = _abi.kvx_scale_desc(dtype=_abi.KVX_DTYPE_F32, granularity=_abi.KVX_SCALE_PER_TENSOR)
        if isinstance(source, numbers.Real):
            if cache.on_gpu:
                raise TypeError("the scale of a cache on a GPU is a float32 tensor there")
            self.keep: Any = ctypes.c_float(float(source))
            self.desc.data = ctypes.addressof(self.keep)
            return
        tensor, self.keep = dltensor(source)
        self.gpu = _gpu_of(tensor)
        shape = [tensor.shape[i] for i in range(tensor.ndim)]
        if (tensor.code, tensor.bits) != (2, 32):
            raise TypeError("scales must be float32")
        if (tensor.device_type in _GPU) != cache.on_gpu:
            raise TypeError("scales lie where the cache lies")
        self.desc.data = (tensor.data or 0) + tensor.byte_offset
        if shape in ([], [1]):
            return
        if shape == [cache.blocks] == [cache.heads]:
            raise Invalid("as many blocks as heads: give the scales as [blocks, heads]")
        kinds = {(cache.heads,): _abi.KVX_SCALE_PER_HEAD, (cache.blocks,): _abi.KVX_SCALE_PER_BLOCK,
                 (cache.blocks, cache.heads): _abi.KVX_SCALE_PER_BLOCK_HEAD}
        if tuple(shape) not in kinds:
            raise Invalid(f"scales {shape} are neither one, nor of {cache.heads} heads, {cache.blocks} blocks, or both")
        self.desc.granularity, self.desc.ndim = kinds[tuple(shape)], len(shape)
        step = 1
        for i in reversed(range(len(shape))):
            self.desc.shape[i] = shape[i]
            self.desc.stride[i] = tensor.strides[i] if tensor.strides else step
            step *= shape[i]


def _rows(cache: Cache, key: _Tensor, value: _Tensor, tokens: int) -> Any:
    return _abi.kvx_kv_io_desc(key=key.desc, value=value.desc, num_tokens=tokens, num_kv_heads=cache.heads, head_dim=cache.dim)


def _where(cache: Cache, *indices: _Numbers) -> None:
    """The library takes the place of indices from the cache; a mix would read the wrong memory."""
    if any(n.on_gpu != cache.on_gpu for n in indices):
        raise TypeError("indices lie where the cache lies")


def _handle(stream: Any) -> Optional[int]:
    """CUDA's handle of a stream: of an int, of torch's (cuda_stream), cupy's (ptr), or any with __cuda_stream__."""
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise TypeError(f"{type(stream).__name__} is no stream")


def write(cache: Cache, slots: Any, key: Any, value: Any, *, k_scale: Any = None, v_scale: Any = None, stream: Any = None) -> None:
    """Write rows [tokens, heads, dim] to their slots; a negative slot is left out. In host memory: all rows, or none.

    @k_scale, @v_scale: of an FP8 cache, a number or a float32 tensor [1], [heads], [blocks] or [blocks, heads].
    Raises Error: ERANGE for a slot beyond the cache (host memory), EINVAL for shapes that don't fit.
    """
    k, v, places = _Tensor(key, _abi.KVX_LAYOUT_BLOCK_NHD), _Tensor(value, _abi.KVX_LAYOUT_BLOCK_NHD), _Numbers(slots)
    _where(cache, places)
    desc = _abi.kvx_write_desc(
        io=_rows(cache, k, v, k.shape[0]),
        slots=_abi.kvx_slot_mapping(dtype=places.dtype, token_count=places.n, invalid_slot=-1, slots=places.address))
    scales = [None if scale is None else _Scale(cache, scale) for scale in (k_scale, v_scale)]
    _same_gpu(cache, k, v, places, *scales)
    if scales[0]:
        desc.k_scale_desc = scales[0].desc
    if scales[1]:
        desc.v_scale_desc = scales[1].desc
    _check(_c.kvx_write_kv(ctypes.byref(cache.desc), ctypes.byref(desc), _handle(stream)), "write")


def gather(cache: Cache, table: Any, lengths: Any, key: Any, value: Any, *, zero_padding: bool = False, k_scale: Any = None,
           v_scale: Any = None, stream: Any = None) -> None:
    """Gather the tokens of sequences: table [sequences, blocks] of block ids, lengths [sequences] in tokens.

    @key and @value are [sequences, max_len, heads, dim], or [tokens, heads, dim] for one after the other. Rows beyond a
    sequence's length are left as they were, or zeroed. Scales as in write().
    """
    k, v = _Tensor(key, _abi.KVX_LAYOUT_BLOCK_NHD), _Tensor(value, _abi.KVX_LAYOUT_BLOCK_NHD)
    ids, n = _Numbers(table), _Numbers(lengths)
    _where(cache, ids, n)
    if len(ids.shape) != 2:
        raise Invalid("the table is not [sequences, blocks]")
    shape = k.shape
    rows = shape[0] if len(shape) == 3 else shape[0] * shape[1]
    desc = _abi.kvx_gather_desc(
        io=_rows(cache, k, v, rows),
        block_table=_abi.kvx_block_table(format=_abi.KVX_BLOCK_TABLE_PACKED, index_dtype=ids.dtype, seq_count=ids.shape[0], beam_width=1,
                                         max_blocks_per_seq=ids.shape[1], indices=ids.address, indices_count=ids.n),
        seq_lens=_abi.kvx_seq_lens(dtype=n.dtype, seq_count=n.n, lengths=n.address),
        max_seq_len=shape[1] if len(shape) == 4 else rows)
    options = _abi.kvx_options(flags=_abi.KVX_OPTION_ZERO_PADDING if zero_padding else 0)
    scales = [None if scale is None else _Scale(cache, scale) for scale in (k_scale, v_scale)]
    _same_gpu(cache, k, v, ids, n, *scales)
    lists = [(ctypes.c_void_p * 1)(ctypes.addressof(scale.desc)) if scale else None for scale in scales]
    options.k_scales, options.v_scales = (ctypes.cast(each, ctypes.c_void_p) if each else None for each in lists)
    caches = (ctypes.c_void_p * 1)(ctypes.addressof(cache.desc))
    gathers = (ctypes.c_void_p * 1)(ctypes.addressof(desc))
    _check(_c.kvx_gather_kv_layers(caches, gathers, 1, ctypes.byref(options), _handle(stream)), "gather")


def isa() -> str:
    """Name of the instruction set that moves host memory: "avx512", "avx2", "neon" or "scalar"."""
    return (_c.kvx_host_isa() or b"").decode()


def set_threads(n: int, min_bytes: int = 0) -> None:
    """Let calls that move at least @min_bytes (0: 1 MiB) use up to @n threads; the default is 1."""
    _check(_c.kvx_set_threads(n, min_bytes), "threads")
