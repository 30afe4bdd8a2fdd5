# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache over any store: pages go between SGLang's host pool and a store without a copy in between.

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvasir", "module_path": "kvasir.sglang",
                                                 "class_name": "HiCache", "interface_v1": 1, "uri": "/var/lib/kv?limit=100GiB"}'

A page whose bytes don't verify, a full disk and a server that is down are misses: SGLang computes the page.
"""
import base64
import concurrent.futures
import ctypes
import errno
import hashlib
import importlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from . import _identity
from . import _sglang_events as _events
from . import _sglang_metrics as _metrics
from . import _sglang_weights as _weights
from . import store as _store
from ._connector import Flusher, Warner
from ._native import Error
from ._slices import Slices
from ._tensors import runs, view

__all__ = ["HiCache"]

logger = logging.getLogger(__name__)
PREFIX, HASH = 24, 64  # characters of a key in the store: for the pool and all that decides its bytes; SGLang's hash of the page
KEY = PREFIX + HASH
THREADS, SLICE = 4, 16 << 20  # that move the pages of a call, and the bytes that are worth one
MOST_PARTS = 1 << 20  # of a pool whose scatter lists are kept: 16 MiB
_NO_PAGE = 1  # bytes stored for a page of a pool that has no memory of its own


class _Result(NamedTuple):
    """PoolTransferResult where SGLang isn't installed."""
    kv_hit_pages: int
    extra_pool_hit_pages: Dict[str, int]
    restorable_prefix_pages: Optional[List[int]] = None


try:
    _sglang: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
except ImportError:  # the contract tests run without
    _sglang = None
if TYPE_CHECKING:
    class _Base:
        """SGLang's HiCacheStorage."""
else:
    _Base = object if _sglang is None else _sglang.HiCacheStorage


class _Block(NamedTuple):
    """Memory of some pages for C: address of the iovecs, parts a page, bytes a page, and what keeps the memory.

    @arrived, where there is one, gets the numbers of the pages that were read.
    """
    parts: int
    n_parts: int
    nbytes: int
    keep: Any
    arrived: Optional[Callable[[List[int]], None]] = None


class _Shape(NamedTuple):
    """Pages at equal distances, each of parts of the same length. @offsets: addresses of the first page's parts."""
    stride: int
    offsets: Any
    length: int


def _bytes_of(tensor: Any) -> int:
    _, shape, _, item = view(tensor)
    for n in shape:
        item *= n
    return item


class _Pool:
    """A host pool of SGLang's, and where its pages lie."""

    def __init__(self, pool: Any, identity: Dict[str, Any], weights: Dict[str, Any]) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self.pool, self.page = pool, int(getattr(pool, "page_size", 1) or 1)
        self.shape = self._probe()
        self._all: Any = None  # scatter lists of all pages, where they are few
        self._tables = threading.local()
        if self.shape is not None and hasattr(pool, "size") and int(pool.size) // self.page * len(self.shape.offsets) <= MOST_PARTS:
            self._all = self._table(self._numpy.arange(int(pool.size) // self.page))
        self.kind, self.read = self._choose()
        self._form = {**identity, "kind": "list" if self.kind == "list" else "flat", "page_tokens": self.page,
                    "dtype": str(getattr(pool, "dtype", "")), "layout": str(getattr(pool, "layout", "")),
                    "format": str(getattr(pool, "storage_format_tag", None)), "shape": self._dimensions()}
        self.rename(weights)

    def rename(self, weights: Dict[str, Any]) -> None:
        """Name the weights of which the pool's pages are from now on."""
        digest = _identity.digest_of({**self._form, "weights": weights})
        self.prefix = base64.urlsafe_b64encode(digest[:PREFIX * 3 // 4]).decode()

    def _choose(self) -> Tuple[str, Callable[[Any, int, bool], _Block]]:
        """Choose how to find pages: in place, by the pool's list of addresses, or through copies."""
        if self.shape is not None:
            return "view", self._by_shape
        try:
            if not _bytes_of(self.pool.get_data_page(0)):
                return "none", self._nothing
        except Exception:  # pylint: disable=broad-except
            pass  # no flat pages of this layout
        try:
            self._by_list(self._numpy_or_torch([0] * self.page), 1, False)
            return "list", self._by_list
        except Exception:  # pylint: disable=broad-except
            return "copy", self._by_copy

    def _numpy_or_torch(self, values: List[int]) -> Any:
        if _sglang is None:
            return self._numpy.array(values, dtype=self._numpy.int64)
        return importlib.import_module("torch").tensor(values, dtype=importlib.import_module("torch").int64)

    def _dimensions(self) -> List[int]:
        if self.kind == "view":
            return view(self.pool.get_data_page(0, flat=False))[1]
        names = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "item_bytes", "size_per_token", "num_mamba_layers")
        return [int(getattr(self.pool, name, 0) or 0) for name in names]

    def _probe(self) -> Optional[_Shape]:
        """Find the pages in memory, None where they don't lie at equal distances or the pool hands out copies of them."""
        pool, page = self.pool, self.page
        if getattr(pool, "shared_allocation_domain", None) is not None or getattr(pool, "dcp_size", 1) != 1:
            return None  # it moves pages, or counts them in another way
        last = int(pool.size) // page - 1 if hasattr(pool, "size") else 2
        numbers = sorted({0, min(1, last), min(2, last), last})
        try:
            tensors = [(pool.get_data_page(number * page, flat=False), pool.get_data_page(number * page, flat=False)) for number in numbers]
            views = [(view(a), view(b)) for a, b in tensors]
        except Exception:  # pylint: disable=broad-except
            return None  # no such layout
        (base, shape, strides, item), _ = views[0]
        offsets, length = runs(shape, strides, item)
        stride = views[1][0][0] - base if len(views) > 1 else length * len(offsets)
        for number, (one, other) in zip(numbers, views):
            if one != other or one != (base + number * stride, shape, strides, item):
                return None
        if not stride or not length or not offsets or min(strides) < 0:
            return None
        return _Shape(stride, self._numpy.array(offsets, dtype=self._numpy.int64) + base, length)

    def _table(self, numbers: Any) -> Any:
        """Compute the scatter lists of pages at equal distances."""
        numpy, shape = self._numpy, self.shape
        assert shape is not None
        table = numpy.empty((len(numbers), len(shape.offsets), 2), dtype=numpy.int64)
        numpy.add((numbers * shape.stride)[:, None], shape.offsets, out=table[:, :, 0])
        table[:, :, 1] = shape.length
        return table

    def _by_shape(self, indices: Any, n: int, _: bool) -> _Block:
        numpy, shape = self._numpy, self.shape
        assert shape is not None
        numbers, rest = numpy.divmod(numpy.asarray(indices)[::self.page], self.page)
        if len(numbers) != n:
            raise ValueError(f"{len(numbers)} pages of memory for {n} keys")
        if numpy.count_nonzero(rest):
            raise ValueError("a page that doesn't begin at a page's bounds")
        if self._all is None:
            table = self._table(numbers)
            return _Block(table.__array_interface__["data"][0], len(shape.offsets), shape.length * len(shape.offsets), table)
        tables: Dict[int, _Block] = self._tables.__dict__.setdefault("of", {})
        found = tables.get(n)
        if found is None:  # of this thread: its next call of as many pages takes it again
            if len(tables) > 256:
                tables.clear()
            table = self._table(numbers)
            found = tables[n] = _Block(table.__array_interface__["data"][0], len(shape.offsets), shape.length * len(shape.offsets), table)
        self._all.take(numbers, 0, found.keep)
        return found

    def _by_list(self, indices: Any, n: int, _: bool) -> _Block:
        """Ask the pool for addresses: those of a page follow each other."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        if not n or len(addresses) % n or len(addresses) != len(sizes):
            raise ValueError(f"{len(addresses)} parts for {n} keys")
        each = len(addresses) // n
        table = self._numpy.empty((len(addresses), 2), dtype=self._numpy.int64)
        table[:, 0], table[:, 1] = addresses, sizes
        totals = set(table[:, 1].reshape(n, each).sum(axis=1).tolist())
        if len(totals) != 1:
            raise ValueError("pages of different length")
        return _Block(table.__array_interface__["data"][0], each, totals.pop(), table)

    def _by_copy(self, indices: Any, n: int, into: bool) -> _Block:
        """Go through flat pages, where a page's bytes aren't addresses that the pool tells."""
        pool, first = self.pool, [int(index) for index in indices[::self.page]]
        pages = [pool.get_dummy_flat_data_page() if into else pool.get_data_page(index) for index in first]
        sizes = {_bytes_of(page) for page in pages}
        if len(first) != n or len(sizes) != 1:
            raise ValueError("pages of different length")
        table = self._numpy.array([[view(page)[0], _bytes_of(page)] for page in pages], dtype=self._numpy.int64)

        def arrived(numbers: List[int]) -> None:
            for number in numbers:
                pool.set_from_flat_data_page(first[number], pages[number])

        return _Block(table.__array_interface__["data"][0], 1, sizes.pop(), (table, pages), arrived)

    def _nothing(self, _: Any, n: int, _into: bool) -> _Block:
        """Give each page a byte of ours: that it is there is all there is to keep."""
        numpy = self._numpy
        marks, table = numpy.zeros(n, dtype=numpy.uint8), numpy.empty((n, 2), dtype=numpy.int64)
        table[:, 0] = marks.__array_interface__["data"][0] + numpy.arange(n)
        table[:, 1] = _NO_PAGE
        return _Block(table.__array_interface__["data"][0], 1, _NO_PAGE, (table, marks))

    def keys(self, hashes: Sequence[str]) -> bytes:
        """Make the store's keys: this pool's prefix, then each hash."""
        if hashes and set(map(len, hashes)) != {HASH}:
            hashes = [hashlib.sha256(b"key " + text.encode()).hexdigest() for text in hashes]
        return (self.prefix + self.prefix.join(hashes)).encode("ascii")


class HiCache(_Base):
    """A storage backend of SGLang's HiCache over the store that `uri` in the extra config names.

    Other fields there: `fingerprint` (names the weights in place of their files' state, see docs/python.md),
    `flush_s` (pages are durable and seen by other processes after so many seconds at most; default 1, 0: at the end of each call).
    Any thread may call any method. No method raises: a failure is a miss, and one line in SGLang's log every 10 s.
    """

    def __init__(self, storage_config: Any, extra: Any = None) -> None:  # pylint: disable=unused-argument
        config: Dict[str, Any] = storage_config.extra_config or {}
        if not isinstance(config.get("uri"), str):
            raise ValueError("kvasir.sglang: the extra config needs \"uri\", such as \"/var/lib/kv?limit=100GiB\"")
        if not storage_config.model_name and not config.get("fingerprint"):
            raise ValueError("kvasir.sglang: neither a model name nor a \"fingerprint\" tells this model's pages from others'")
        self._config, self._lock = storage_config, threading.Lock()
        self._weights, self._generation = _weights.Weights(), 0  # of names and deletions: what was begun in one tells nothing in the next
        self._identity: Dict[str, Any] = {
            "kv_cache_dtype": _weights.of_server("get_server_args", "kv_cache_dtype"), "pp": [storage_config.pp_rank, storage_config.pp_size],
            "cp": [storage_config.attn_cp_rank, storage_config.attn_cp_size],
            "dcp": [getattr(storage_config, "dcp_rank", 0), getattr(storage_config, "dcp_size", 1)]}  # SGLang splits a page's tokens among these
        self._pools: Dict[str, _Pool] = {}
        self.mem_pool_host: Any = None
        self._forget: Callable[[], None] = lambda: None  # ends the watch of its clear()
        self._metrics = _metrics.Metrics(storage_config)
        self.counters = self._metrics.counters
        self._warn = Warner(logger, "SGLang goes on without these pages")
        self._store = _store.open(config["uri"])
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS - 1, "kvasir-pages")  # they start when they are needed
        self._flusher = Flusher(self._store, float(config.get("flush_s", 1.0)), self._warn)
        self._news = _events.news_of_caller() if self._whole() else None

    def _whole(self) -> bool:
        """Tell whether this rank's pages are all there is of a page. Else no rank knows what the others have lost, and none announces."""
        return all(self._identity[name][1] == 1 for name in ("pp", "cp", "dcp")) and (self._config.is_mla_model or self._config.tp_size == 1)

    def _tell(self, what: str, hashes: Iterable[str], generation: int) -> None:
        """Announce what the store has, or lacks, as a call found it that began in @generation.

        Where there are pools beside the first, one page doesn't tell what SGLang would load.
        """
        pages = list(hashes) if self._news is not None and len(self._pools) == 1 else []
        if self._news is not None and pages:
            with self._lock:
                if generation == self._generation:
                    self._news.note(what, pages)

    def _withdraw(self) -> None:
        """Announce that nothing of before is there, and silence calls under way. Under the lock."""
        self._generation += 1
        if self._news is not None:
            self._news.note(_events.CLEARED)

    # -- pools ------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take SGLang's host pool of keys and values."""
        self.mem_pool_host = mem_pool_host
        self._add(mem_pool_host, "kv")
        self._forget()
        self._forget = _weights.on_clear(mem_pool_host, self._pages_dropped)

    def _pages_dropped(self) -> None:
        """Store pages again: SGLang has reset its cache, after a change of weights or not."""
        with self._lock:
            self._follow_weights()  # nobody may have asked since the change
            self._weights.reset()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool beside it: states, indexers, windows."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != "kv":  # the first pool is that one
            self._add(host_pool, name)

    def on_host_pools_registered(self) -> None:
        """Do nothing: a pool is ready once it is there."""

    def _add(self, pool: Any, name: str) -> None:
        config = self._config
        identity: Dict[str, Any] = {**self._identity, "pool": name}
        if not config.is_mla_model or name == "mamba":  # else all ranks have the same pages, and one writes them
            identity["tp"] = [config.tp_rank, config.tp_size]
        with self._lock:
            added = self._pools[name] = _Pool(pool, identity, self._form_of_weights())
        logger.info("kvasir.sglang: pool %s, %s, pages found by %s", name, getattr(pool, "layout", "no layout"), added.kind)

    def _form_of_weights(self) -> Dict[str, Any]:
        """Name the weights that the server computes with now."""
        path, revision, quantization, load_format, overrides, version = self._weights.now
        return _identity.weights_of(str(self._config.model_name), str(self._config.extra_config.get("fingerprint") or ""), path,
                                    revision=revision, quantization=quantization, format=load_format, overrides=overrides, version=version)

    def _follow_weights(self) -> None:
        """Name the pools' pages anew when the server has got other weights while it runs. Under the lock."""
        if self._weights.changed():
            for pool in self._pools.values():
                pool.rename(self._form_of_weights())
            self._withdraw()

    def _names(self, pool: _Pool, hashes: Sequence[str]) -> Tuple[bytes, int, bool]:
        """Return the pages' keys by the weights of now, their generation, and whether SGLang's host pages are of these weights."""
        with self._lock:
            self._follow_weights()
            return pool.keys(hashes), self._generation, self._weights.made_pages()

    # -- pages ------------------------------------------------------------------------------------------
    def _present(self, pool: Optional[_Pool], hashes: Sequence[str]) -> List[bool]:
        if not hashes or pool is None:
            return [False] * len(hashes)
        there = bytearray(len(hashes))
        try:
            keys, generation, _ = self._names(pool, hashes)
            self._store._call(self._store._c.kvs_exists, keys, KEY, len(hashes),
                              (ctypes.c_uint8 * len(hashes)).from_buffer(there))
            self._metrics.count(asked=len(hashes), found=there.count(1))
            self._tell(_events.GONE, (text for text, byte in zip(hashes, there) if byte != 1), generation)
        except (Error, ValueError) as problem:
            self._warn("asking for pages", problem)
        return [byte == 1 for byte in there]

    def _move(self, function: Any, keys: bytes, n: int, block: _Block, each: Any) -> None:
        """Call @function for @n pages: on several threads where they are many bytes, since one copies slower than disks read."""
        ways = min(THREADS, n * block.nbytes // SLICE)
        if ways < 2:
            self._store._call(function, keys, KEY, n, block.parts, _counts(n, block.n_parts), each)
            return
        step = -(-n // ways)

        def some(first: int) -> None:
            m = min(step, n - first)
            results = (each._type_ * m).from_buffer(each, first * ctypes.sizeof(each._type_))
            self._store._call(function, keys[first * KEY:(first + m) * KEY], KEY, m, block.parts + first * block.n_parts * _IOVEC,
                              _counts(m, block.n_parts), results)

        slices = Slices(some, range(0, n, step))
        try:
            for _ in range(ways - 1):
                self._threads.submit(slices.work)
        except RuntimeError:  # no more threads; what was submitted may still run, now or after this call
            pass
        slices.work()
        slices.end()

    def _get(self, pool: Optional[_Pool], hashes: Sequence[str], indices: Any) -> List[bool]:
        n = len(hashes)
        if not n or pool is None:
            return [False] * n
        each, begun = (ctypes.c_int64 * n)(), time.monotonic()
        try:
            keys, generation, _ = self._names(pool, hashes)
            block = pool.read(indices, n, True)
            self._move(self._store._c.kvs_get_chunks_into, keys, n, block, each)
            if block.arrived is not None:
                block.arrived([i for i, length in enumerate(each) if length == block.nbytes])
        except Exception as problem:  # pylint: disable=broad-except
            self._warn("reading pages", problem)
            self._metrics.count(missed=n)
            return [False] * n
        lengths, wanted = each[:], block.nbytes
        got, damaged = lengths.count(wanted), lengths.count(-errno.EBADMSG)
        self._metrics.count(got=got, missed=n - got - damaged, damaged=damaged)
        self._metrics.note_moved(True, got, wanted, begun)
        self._tell(_events.KEPT, (text for text, length in zip(hashes, lengths) if length == wanted), generation)
        if got == n:
            return [True] * n
        self._tell(_events.GONE, (text for text, length in zip(hashes, lengths) if length in (-errno.ENOENT, -errno.EBADMSG)), generation)
        self._look_at(keys, lengths)
        return [length == wanted for length in lengths]

    def _look_at(self, keys: bytes, lengths: Sequence[int]) -> None:
        """Delete pages that didn't verify, so that they are stored anew, and tell of failures."""
        for i, length in enumerate(lengths):
            if length == -errno.EBADMSG:
                try:
                    self._store.discard(keys[i * KEY:(i + 1) * KEY])
                except (Error, ValueError) as problem:
                    self._warn("deleting a damaged page", problem)
            elif length < 0 and length != -errno.ENOENT:
                self._warn("reading pages", OSError(-length, os.strerror(-length)))

    def _put(self, pool: Optional[_Pool], hashes: Sequence[str], indices: Any) -> List[bool]:
        n = len(hashes)
        if not n or pool is None:
            return [False] * n
        each, begun = (ctypes.c_int * n)(*[-errno.EIO] * n), time.monotonic()
        nbytes, generation = 0, self._generation
        try:
            keys, generation, storable = self._names(pool, hashes)
            if not storable:  # they may be of the weights before
                self._metrics.count(stale=n)
                return [False] * n
            block = pool.read(indices, n, False)
            nbytes = block.nbytes
            self._move(self._store._c.kvs_put_chunks_from, keys, n, block, each)
        except Exception as problem:  # pylint: disable=broad-except
            self._warn("storing pages", problem)
        codes = each[:]
        stored, present = codes.count(0), codes.count(1)
        self._metrics.count(put=stored, present=present, failed=n - stored - present)
        self._metrics.note_moved(False, stored, nbytes, begun)
        if stored or present:  # a page that is there may still wait for the server, too
            self._flusher.note_put()
            self._tell(_events.KEPT, (text for text, rc in zip(hashes, codes) if rc >= 0), generation)
        return [rc >= 0 for rc in codes]

    def close(self) -> None:
        """Make all pages durable and close the store."""
        self._forget()
        if self._news is not None:
            self._news.close()
        self._threads.shutdown()
        self._flusher.close()
        self._store.close()

    # -- SGLang's interface: v1 ----------------------------------------------------------------------------
    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Read pages into the host pool; tells which are there and verified."""
        return self._get(self._pools.get("kv"), keys, host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Store pages of the host pool; tells which are kept."""
        return self._put(self._pools.get("kv"), keys, host_indices)

    def batch_exists(self, keys: List[str], extra_info: Any = None) -> int:
        """Return how many pages from the first on are there."""
        return _leading(self._present(self._pools.get("kv"), keys))

    def exists(self, key: str) -> bool:
        """Tell whether a page is there."""
        return self._present(self._pools.get("kv"), [key]) == [True]

    # -- v2: several pools -----------------------------------------------------------------------------------
    def batch_exists_v2(self, keys: List[str], pool_transfers: Optional[List[Any]] = None, extra_info: Any = None) -> Any:
        """Return the longest prefix that all pools can restore, and each pool's own."""
        pages = _leading(self._present(self._pools.get("kv"), keys))
        found: Dict[Any, int] = {_pool_name("kv"): pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            policy, pool = str(getattr(transfer.hit_policy, "value", transfer.hit_policy)), self._pool_of(transfer)
            if policy == "block_groups" or not restorable:
                continue  # it never decides, and this backend has no verdict on it
            there = self._present(pool, keys[:pages])
            if policy == "all_pages":
                own = set(range(1, _leading(there) + 1))
            elif policy == "trailing_pages":
                own = _ends_of_windows(there, max(1, len(transfer.keys or ())))
            else:
                own = set()
            if own:
                found[transfer.name] = max(own)
            restorable &= own
        return (_Result if _sglang is None else _sglang.PoolTransferResult)(max(restorable, default=0), found, sorted(restorable))

    def _pool_of(self, transfer: Any) -> Optional[_Pool]:
        return self._pools.get(str(getattr(transfer.name, "value", transfer.name)))

    def _all_v2(self, transfers: List[Any], move: Callable[[Optional[_Pool], Sequence[str], Any], List[bool]]) -> Dict[Any, List[bool]]:
        results: Dict[Any, List[bool]] = {}
        for transfer in transfers:
            pool, keys, indices = self._pool_of(transfer), transfer.keys or [], transfer.host_indices
            if pool is None or indices is None or len(indices) != len(keys) * pool.page:
                self._warn(f"pool {transfer.name}", ValueError("is not registered, or its indices don't fit its keys"))
                results[transfer.name] = [False] * len(keys)
            else:
                results[transfer.name] = move(pool, keys, indices)
        return results

    def batch_get_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        """Read pages of several pools."""
        return self._all_v2(transfers, self._get)

    def batch_set_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        """Store pages of several pools."""
        return self._all_v2(transfers, self._put)

    # -- without interface_v1: flat copies of pages --------------------------------------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a flat tensor; None when it isn't there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Any]:
        """Read pages into flat tensors; None for each that isn't there."""
        targets = target_locations or [None] * len(keys)
        pool, results = self._pools.get("kv"), []
        for key, target in zip(keys, targets):
            got = pool is not None and target is not None and self._get(_Flat(pool, target), [key], None) == [True]
            results.append(target if got else None)
        return results

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page from a flat tensor."""
        pool = self._pools.get("kv")
        return pool is not None and value is not None and self._put(_Flat(pool, value), [key], None) == [True]

    def batch_set(self, keys: List[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store pages from flat tensors; whether all are kept."""
        return all([self.set(key, value) for key, value in zip(keys, values or [])]) and len(values or []) == len(keys)

    def clear(self) -> bool:
        """Delete the pages of this model and rank."""
        with self._lock:
            self._follow_weights()
            prefixes = {pool.prefix.encode() for pool in self._pools.values()}
            self._withdraw()
        try:
            self._flusher.flush()
            for key in self._store.keys():
                if len(key) == KEY and key[:PREFIX] in prefixes:
                    self._store.discard(key)
            return True
        except (Error, ValueError) as problem:
            self._warn("clearing", problem)
            return False
        finally:
            with self._lock:  # calls beside the deletions may have announced pages that are deleted by now
                self._withdraw()

    def get_stats(self) -> Any:
        """Return what SGLang's metrics want since the last call: pages of each read and write, and GB/s. None where it keeps none."""
        return self._metrics.stats()


class _Flat(_Pool):
    """A page of @pool in a flat tensor."""

    def __init__(self, pool: _Pool, tensor: Any) -> None:  # pylint: disable=super-init-not-called
        self._numpy, self._tensor, self._none = pool._numpy, tensor, pool.kind == "none"
        self._pool, self.read = pool, self._flat

    def keys(self, hashes: Sequence[str]) -> bytes:
        return self._pool.keys(hashes)

    def _flat(self, _: Any, n: int, into: bool) -> _Block:
        if self._none:
            return self._nothing(None, n, into)
        address, shape, strides, item = view(self._tensor)
        offsets, length = runs(shape, strides, item)
        if offsets != [0]:
            raise ValueError("a page that isn't flat")
        table = self._numpy.array([[address, length]], dtype=self._numpy.int64)
        return _Block(table.__array_interface__["data"][0], 1, length, (table, self._tensor))


_IOVEC = 2 * ctypes.sizeof(ctypes.c_size_t)
_COUNTS: Dict[Tuple[int, int], Any] = {}


def _counts(n: int, parts: int) -> Any:
    """Return an array of n numbers of parts, all the same."""
    found = _COUNTS.get((n, parts))
    if found is None:
        if len(_COUNTS) > 4096:
            _COUNTS.clear()
        found = _COUNTS[n, parts] = (ctypes.c_uint32 * n)(*[parts] * n)
    return found


def _leading(there: List[bool]) -> int:
    return there.index(False) if False in there else len(there)


def _ends_of_windows(there: List[bool], window: int) -> "set[int]":
    """Return the prefix lengths whose last @window pages are all there."""
    ends, run = set(), 0
    for number, present in enumerate(there, 1):
        run = run + 1 if present else 0
        if run >= min(window, number):
            ends.add(number)
    return ends


def _pool_name(name: str) -> Any:
    """Return SGLang's own name of a pool: a string where SGLang isn't installed."""
    return name if _sglang is None else _sglang.PoolName(name)
