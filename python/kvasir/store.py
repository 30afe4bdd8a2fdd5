# SPDX-License-Identifier: Apache-2.0
"""Keep objects and blocks of bytes in any kv_store backend.

    with kvasir.store.open("/var/lib/kv") as store:
        store.save("session-1", state)            # any buffer; deduplicated, verified on the way back
        state = store.restore("session-1")        # a memoryview, not a copy
        store.put(key, block)                     # one block under a key of your own
        block = store.get(key)                    # None: it isn't there

A store may be used by any number of threads.
"""
import ctypes
import errno
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _native
from ._native import Error, Handle, Invalid, Memory, NotFound, address_of, adopt, call, certain, error, load, text, unsaid

__all__ = ["Collected", "Progress", "Saved", "Store", "Verified", "open"]

Progress = Callable[[int, int], Optional[bool]]  # (bytes done, bytes in all); True gives up
Key = Union[bytes, bytearray, memoryview, Any]  # or an array of bytes; text raises TypeError
_FORMATS = {"auto": _abi.KVS_FORMAT_AUTO, "bytes": _abi.KVS_FORMAT_BYTES, "llama": _abi.KVS_FORMAT_LLAMA}
_NAMES = {value: name for name, value in _FORMATS.items()}


class Saved(NamedTuple):
    """Result of a save: sizes in bytes, chunks by number. `new_*` is what the store did not have.

    `parsed_bytes` were cut as a state of llama.cpp, the others by content."""
    bytes: int
    chunks: int
    new_chunks: int
    new_bytes: int
    manifest_bytes: int
    format: str
    parsed_bytes: int = 0


class Verified(NamedTuple):
    """Result of a check: what was read, what was bad, and a line for each problem."""
    manifests: int
    opaque_manifests: int
    bad_manifests: int
    chunks: int
    missing_chunks: int
    bad_chunks: int
    bytes: int
    problems: List[str]
    prefix_chunks: int = 0  # of prefix caches (kvasir.llama), beside those of objects
    bad_prefix_chunks: int = 0


class Collected(NamedTuple):
    """Result of a collection."""
    live_chunks: int
    deleted_chunks: int
    deleted_bytes: int
    opaque_manifests: int
    errors: int


class _Calls:
    """A callback from C into Python; the first exception ends the call and is raised behind it."""

    def __init__(self) -> None:
        self.problem: Optional[BaseException] = None

    def guard(self, function: Callable[..., Optional[int]], *args: Any) -> int:
        try:
            return int(function(*args) or 0)
        except BaseException as problem:  # pylint: disable=broad-except
            self.problem = self.problem or problem
            return -errno.ECANCELED

    def progress(self, function: Optional[Progress]) -> Any:
        if function is None:
            return ctypes.cast(0, _abi.kvs_progress_fn)
        wanted = function
        return _abi.kvs_progress_fn(lambda _, done, total: self.guard(wanted, done, total))

    def check(self, run: Callable[[], int], name: Optional[str] = None) -> int:
        """Run a call; an exception of a callback is raised instead of the call's own. @name: the object that may be missing."""
        try:
            rc = run()
        except Error as problem:
            if self.problem is not None:
                raise self.problem from None
            if isinstance(problem, NotFound) and name is not None and not problem.told:
                raise error(-errno.ENOENT, f"no object {name!r}") from None
            raise
        if self.problem is not None:
            raise self.problem
        return rc


def _sizes(result: Any) -> Saved:
    return Saved(result.bytes, result.n_chunks, result.new_chunks, result.new_bytes, result.manifest_bytes,
                 _NAMES.get(result.format, "bytes"), result.parsed_bytes)


def _bytes_of(key: Any) -> bytes:
    """Return the bytes of a key: of bytes, a bytearray, a memoryview or an array of bytes. Raises TypeError for all else."""
    if type(key) is bytes:
        return key
    try:
        view = memoryview(key)
    except TypeError:
        raise TypeError(f"a key is bytes, not {type(key).__name__}") from None
    if view.itemsize != 1 or view.format not in ("B", "b", "c", "<B", "<b", "<c", "?"):
        raise TypeError(f"a key is bytes, not items of {view.itemsize} bytes")
    return view.tobytes()


def _join(keys: Sequence[Any]) -> Tuple[bytes, int]:
    whole = [_bytes_of(key) for key in keys]
    length = len(whole[0]) if whole else 1
    if any(len(key) != length for key in whole):
        raise Invalid("keys of different length in one call")
    return b"".join(whole), length


class _Parts:
    """Scatter lists of n blocks for C: one array of all parts, and the number of each block's."""

    def __init__(self, parts: Sequence[Any], n: int, writable: bool) -> None:
        if len(parts) != n:
            raise Invalid(f"{n} keys, parts for {len(parts)}")
        split = [part if isinstance(part, list) else [part] for part in parts]
        flat = [part for each in split for part in each]
        self.keep = [None if isinstance(part, tuple) else Memory(part, writable) for part in flat]
        pairs: List[Any] = [part if memory is None else (memory.address, memory.nbytes) for part, memory in zip(flat, self.keep)]
        self.parts = (_abi.iovec * len(pairs))(*pairs)
        self.counts = (ctypes.c_uint32 * n)(*map(len, split))
        self.address, self.counts_address = ctypes.addressof(self.parts), ctypes.addressof(self.counts)


class _Table:
    """Scatter lists that a connector packed itself: addresses of the iovecs and of the numbers of parts, and their memory.

    @owner: of the parts' memory, which lives as long as a request uses the lists.
    """

    __slots__ = ("address", "counts_address", "keep", "owner")

    def __init__(self, iovecs: Any, counts: Any, owner: Any = None) -> None:
        self.keep, self.owner = [Memory(iovecs), Memory(counts)], owner
        self.address, self.counts_address = self.keep[0].address, self.keep[1].address


def end_queue(address: int, timeout_ms: int, queues: Dict[int, Dict[int, Any]], close: Callable[[int, int], int]) -> int:
    """Close a queue of requests, then let go of what they used. Returns a negative errno while the store works on some."""
    requests = queues.get(address)
    rcs: List[int] = []
    if requests is None:
        return 0
    try:
        certain(rcs, close, address, timeout_ms)
    finally:
        if rcs and rcs[0] >= 0:  # also when a signal's handler raised
            del queues[address]
            for request in list(requests.values()):
                request.give_back()
    return rcs[0]


def _end_queues(queues: Dict[int, Dict[int, Any]], close: Callable[[int, int], int]) -> None:
    """Close the queues of a store that nobody closed."""
    for address in list(queues):
        end_queue(address, int(1000 * _native.EXIT_WAIT_S), queues, close)


class Store(Handle):
    """An open store. Use open()."""

    def __init__(self, uri: str) -> None:
        self._c = load("kvstore")
        address = ctypes.c_void_p()
        try:
            call(self._c.kvs_open, text(uri), ctypes.byref(address))
        except NotFound as problem:  # of a plugin or a folder: no KeyError
            raise Error(*problem.args) from None
        self.uri = uri
        queues: Dict[int, Dict[int, Any]] = {}  # address of each open kvasir.queue.Queue: its requests
        library = self._c
        self._queues = queues
        self._own(address.value or 0, lambda store: -errno.EBUSY if queues else library.kvs_close(store))
        self._state.at_end = lambda: _end_queues(queues, library.kvs_async_close)
        self._state.flush = library.kvs_flush

    def _about(self) -> str:
        return repr(self.uri)

    # -- objects ------------------------------------------------------------------------------------
    def save(self, name: str, data: Any, *, fingerprint: Optional[str] = None, format: str = "auto",
             chunk_bytes: int = 0, chunk_tokens: int = 0, verify: bool = False,
             progress: Optional[Progress] = None) -> Saved:
        """Save a buffer or tensor under @name and replace the object there. Durable on return.

        @fingerprint names the model; restore() refuses another one. @format: "auto", "bytes" or "llama" (a state of
        llama.cpp). @verify reads what the store has already and stores damaged chunks anew, also where other programs changed
        bytes in Redis or a bucket. @progress(done, total) may return True to give up: Error(ECANCELED).
        """
        if format not in _FORMATS:
            raise Invalid(f"no format {format!r}; one of {', '.join(_FORMATS)}")
        calls, memory, result = _Calls(), Memory(data), _abi.kvs_result()
        hook = calls.progress(progress)
        opts = _abi.kvs_save_opts(format=_FORMATS[format], chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens,
                                  fingerprint=text(fingerprint), progress=hook, verify=verify)
        calls.check(lambda: self._call(self._c.kvs_save_buffer, text(name), memory.address or None, memory.nbytes,
                                       ctypes.byref(opts), ctypes.byref(result)))
        return _sizes(result)

    def restore(self, name: str, *, fingerprint: Optional[str] = None, progress: Optional[Progress] = None) -> memoryview:
        """Return the object under @name; each chunk has verified.

        Raises NotFound, Damaged, or Error(ESTALE) when it was saved with another fingerprint.
        """
        calls, data, n = _Calls(), ctypes.c_void_p(), ctypes.c_size_t()
        hook = calls.progress(progress)
        opts = _abi.kvs_restore_opts(fingerprint=text(fingerprint), progress=hook)
        calls.check(lambda: self._call(self._c.kvs_restore_buffer, text(name), ctypes.byref(data), ctypes.byref(n),
                                       ctypes.byref(opts)), name)
        return adopt(data.value, n.value)

    def restore_into(self, name: str, target: Any, *, fingerprint: Optional[str] = None, verify_first: bool = False) -> int:
        """Restore the object under @name into a writable buffer or tensor, and return its length.

        Raises Error(ENOSPC) when it doesn't fit; the buffer then holds the beginning. A damaged chunk ends it likewise, unless
        @verify_first reads everything once before.
        """
        memory, calls = Memory(target, writable=True), _Calls()
        at = 0

        def take(_: Any, data: int, n: int) -> int:
            nonlocal at
            if n > memory.nbytes - at:
                raise error(-errno.ENOSPC, "the object is longer than the buffer")
            ctypes.memmove(memory.address + at, data, n)
            at += n
            return 0

        write = _abi.kvs_write_fn(lambda arg, data, n: calls.guard(take, arg, data, n))
        opts = _abi.kvs_restore_opts(fingerprint=text(fingerprint), verify_first=verify_first)
        calls.check(lambda: self._call(self._c.kvs_restore, text(name), address_of(write), None, ctypes.byref(opts), None), name)
        return at

    def names(self) -> List[str]:
        """List the objects, and manifests of other programs."""
        found: List[str] = []
        calls = _Calls()

        def note(entry: int) -> None:
            found.append(_abi.kv_store_entry.from_address(entry).name.decode(errors="surrogateescape"))

        each = _abi.kv_store_each_fn(lambda _, entry: calls.guard(note, entry))
        calls.check(lambda: self._call(self._c.kvs_list, address_of(each), None))
        return found

    def delete(self, name: str) -> None:
        """Delete the object under @name; fine when there is none. gc() frees its chunks."""
        self._call(self._c.kvs_delete_manifest, text(name))

    def verify(self, name: Optional[str] = None) -> Verified:
        """Read and check the object @name, or the whole store."""
        result, lines = _abi.kvs_verify_result(), []
        report = _abi.kvs_report_fn(lambda _, line: lines.append(line.decode(errors="replace")))
        self._call(self._c.kvs_verify, text(name), address_of(report), None, None, ctypes.byref(result))
        return Verified(result.manifests, result.opaque_manifests, result.bad_manifests, result.chunks, result.missing_chunks,
                        result.bad_chunks, result.bytes, lines, result.prefix_chunks, result.bad_prefix_chunks)

    def gc(self, *, grace_s: Optional[int] = None, opaque_too: bool = False, dry_run: bool = False,
           prefix_age_s: int = 0) -> Collected:
        """Delete chunks that no object needs and that weren't used for @grace_s seconds (default 86,400; 0: any).

        Chunks of prefix caches go when nobody used them for @prefix_age_s seconds (0: 30 days).
        """
        opts = _abi.kvs_gc_opts(grace_s={None: 0, 0: _abi.KVS_GC_NO_GRACE}.get(grace_s, grace_s), opaque_too=opaque_too,
                                dry_run=dry_run, prefix_age_s=prefix_age_s)
        result = _abi.kvs_gc_result()
        self._call(self._c.kvs_gc, ctypes.byref(opts), ctypes.byref(result))
        return Collected(result.live_chunks, result.deleted_chunks, result.deleted_bytes, result.opaque_manifests, result.errors)

    # -- blocks by key ------------------------------------------------------------------------------
    def put(self, key: Key, data: Any) -> bool:
        """Store a block under @key. False: the key was there already, and its bytes stay. flush() makes it durable."""
        memory, packed = Memory(data), _bytes_of(key)
        return self._call(self._c.kvs_put_chunk, packed, len(packed), memory.address, memory.nbytes) == 0

    def get(self, key: Key) -> Optional[memoryview]:
        """Return the block under @key, None when it isn't there. Raises Damaged."""
        data, n, packed = ctypes.c_void_p(), ctypes.c_size_t(), _bytes_of(key)
        try:
            self._call(self._c.kvs_get_chunk, packed, len(packed), ctypes.byref(data), ctypes.byref(n))
        except NotFound:
            return None
        return adopt(data.value, n.value)

    def put_many(self, keys: Sequence[Key], blocks: Sequence[Any]) -> List[bool]:
        """Store blocks in one call. Raises the first failure; see put()."""
        if len(keys) != len(blocks):
            raise Invalid(f"{len(keys)} keys, {len(blocks)} blocks")
        packed, length = _join(keys)
        memory, n = [Memory(block) for block in blocks], len(keys)
        data = (ctypes.c_void_p * n)(*[m.address for m in memory])
        sizes, each = (ctypes.c_size_t * n)(*[m.nbytes for m in memory]), (ctypes.c_int * n)()
        self._call(self._c.kvs_put_chunks, packed, length, n, data, sizes, each)
        return [rc == 0 for rc in each]

    def get_many(self, keys: Sequence[Key]) -> List[Optional[memoryview]]:
        """Get blocks in one call; None for each that is missing or did not verify."""
        packed, length = _join(keys)
        n = len(keys)
        data, sizes = (ctypes.c_void_p * n)(), (ctypes.c_size_t * n)()
        self._call(self._c.kvs_get_chunks, packed, length, n, data, sizes)
        return [None if address is None else adopt(address, sizes[i]) for i, address in enumerate(data)]

    def put_from(self, keys: Sequence[Key], parts: Sequence[Any]) -> List[bool]:
        """Store blocks whose bytes lie in parts: as put_many, but parts[i] may be a list of buffers, such as [K, V].

        A part may also be (address, bytes) of memory that the caller keeps in place during the call.
        """
        packed, length = _join(keys)
        lists = _Parts(parts, len(keys), False)
        each = (ctypes.c_int * len(keys))()
        self._call(self._c.kvs_put_chunks_from, packed, length, len(keys), lists.parts, lists.counts, each)
        return [rc == 0 for rc in each]

    def get_into(self, keys: Sequence[Key], parts: Sequence[Any]) -> List[Optional[int]]:
        """Get blocks into the caller's memory, without a copy in between; see put_from() for @parts.

        Returns the length of each block, None for one that is missing or did not verify: the bytes of its parts mean nothing
        then. Raises Error(EMSGSIZE) when a block is longer than its parts, and errors of the store.
        """
        packed, length = _join(keys)
        lists = _Parts(parts, len(keys), True)
        each = (ctypes.c_int64 * len(keys))()
        self._call(self._c.kvs_get_chunks_into, packed, length, len(keys), lists.parts, lists.counts, each)
        missing = (-errno.ENOENT, -errno.EBADMSG)
        for rc in each:
            if rc < 0 and rc not in missing:
                raise error(rc, unsaid("kvs_get_chunks_into", rc))
        return [None if rc < 0 else rc for rc in each]

    def exists(self, keys: Sequence[Key]) -> List[bool]:
        """Tell which blocks are there."""
        packed, length = _join(keys)
        present = bytearray(len(keys))
        if keys:
            self._call(self._c.kvs_exists, packed, length, len(keys), (ctypes.c_uint8 * len(keys)).from_buffer(present))
        return [value == 1 for value in present]

    def touch(self, keys: Sequence[Key]) -> int:
        """Mark blocks as used now; returns how many are there."""
        packed, length = _join(keys)
        return self._call(self._c.kvs_touch, packed, length, len(keys))

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Announce that these blocks will be read."""
        packed, length = _join(keys)
        self._call(self._c.kvs_prefetch, packed, length, len(keys))

    def discard(self, key: Key) -> None:
        """Delete a block at once, also when objects need it; fine when there is none."""
        packed = _bytes_of(key)
        self._call(self._c.kvs_delete_chunk, packed, len(packed))

    def keys(self) -> Iterator[bytes]:
        """List the keys of all blocks, those of objects among them. Blocks not flushed yet may be missing."""
        found: List[bytes] = []
        calls = _Calls()

        def note(entry: int) -> None:
            item = _abi.kv_store_entry.from_address(entry)
            found.append(ctypes.string_at(item.hash, item.hash_len))

        each = _abi.kv_store_each_fn(lambda _, entry: calls.guard(note, entry))
        calls.check(lambda: self._call(self._c.kvs_list_chunks, address_of(each), None))
        return iter(found)

    # -- manifests, and the store itself ---------------------------------------------------------------
    def put_manifest(self, name: str, data: Any) -> None:
        """Publish bytes of your own under @name, atomically; blocks put before are durable then."""
        memory = Memory(data)
        self._call(self._c.kvs_put_manifest, text(name), memory.address, memory.nbytes)

    def get_manifest(self, name: str) -> Optional[memoryview]:
        """Return the bytes under @name, None when there are none."""
        data, n = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            self._call(self._c.kvs_get_manifest, text(name), ctypes.byref(data), ctypes.byref(n))
        except NotFound:
            return None
        return adopt(data.value, n.value)

    def flush(self) -> None:
        """Make blocks durable that put() stored; close() does it too, but raises nothing when it fails.

        A file store's limit and gc keep the blocks until put_manifest() or close(): publish now and then, b"" will do.
        """
        self._call(self._c.kvs_flush)

    def stats(self) -> Dict[str, int]:
        """Return sizes of the store and counters of this handle, by the names of kv_store_stats."""
        result = _abi.kv_store_stats()
        self._call(self._c.kvs_stats, ctypes.byref(result))
        return {name: getattr(result, name) for name, *_ in result._fields_[1:]}


def open(uri: str) -> Store:  # pylint: disable=redefined-builtin
    """Open the store that @uri names: a folder ("/var/lib/kv?limit=100GiB") or SCHEME://... of a plugin."""
    return Store(uri)
