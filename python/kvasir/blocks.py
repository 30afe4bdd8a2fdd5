# SPDX-License-Identifier: Apache-2.0
"""Block manager: pools of KV blocks, an engine's caches, and the tiers below them.

    pool = kvasir.blocks.Pool(n_blocks=4096, block_size=16)
    fresh = pool.allocate(4)                           # fresh.ids: the blocks to write to
    held = pool.register(fresh, keys)                  # found by their keys from now on
    held.release()                                     # kept until evicted
    again = pool.match(keys)                           # the longest registered prefix, held

    manager = kvasir.blocks.Manager(shape, host_bytes=1 << 30, disk="/nvme/kv", disk_bytes=1 << 36, fingerprint="model")
    cache = manager.attach(k_and_v_of_all_blocks)      # a numpy array or a tensor in host memory
    cache.store(keys, ids)                             # to the tiers
    n = cache.load(keys, ids)                          # and back: the length of the usable prefix

Keys are packed: n * key_len bytes (8 unless said), or array("Q"), such as kvasir.index.sequence_hashes() returns.
"""
import array
import contextlib
import ctypes
import errno
import weakref
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from . import _abi
from ._chains import Chain, Keys, _chain
from ._hits import NEEDS_ALL, NEEDS_CHUNK, NEEDS_RUN, NEEDS_STATE, CacheGroup, Hit, Question
from ._native import Handle, Invalid, Memory, as_word, call, certain, error, give_back, lend, load, numbers, text, unsaid, untyped
from ._options import EVICTION, Policy, Size, given, named, set_manager_options, size_of
from ._pins import Pin, unpin_all
from ._results import Done, Removed, Shape, as_done, deadline
from .index import DEVICE, DISK, EXTERNAL, HOST

if TYPE_CHECKING:
    from .peers import Agent

__all__ = ["BUSY", "Blocks", "Cache", "CacheGroup", "Chain", "DEVICE", "DISK", "Done", "EXTERNAL", "HOST", "Held", "Hit", "MISS", "Manager",
           "NEEDS_ALL", "NEEDS_CHUNK", "NEEDS_RUN", "NEEDS_STATE", "NOT_LOOKED", "NO_BLOCK", "ON_DISK", "ON_PEER", "PENDING", "Pin",
           "Pool", "READY", "REMOTE", "Removed", "Shape"]

MISS, READY, ON_DISK, REMOTE, PENDING, BUSY, ON_PEER = (_abi.KVBM_MISS, _abi.KVBM_READY, _abi.KVBM_ON_DISK, _abi.KVBM_REMOTE,
                                                        _abi.KVBM_PENDING, _abi.KVBM_BUSY, _abi.KVBM_ON_PEER)
_PAGE = 4096  # host blocks begin at multiples of it
NOT_LOOKED = _abi.KVBM_NOT_LOOKED  # in Hit.where: no hit depended on the block
NO_BLOCK = 0xffffffff  # in lists of block numbers: leave this key out
_c = load("kvbm")
_HANDLE = array.array("I", (0, 0, 0, 0))  # struct kvbm_handle: pool, block, generation
_allocate, _register = untyped(_c, "kvbm_pool_allocate", ctypes.c_int), untyped(_c, "kvbm_pool_register_chain", ctypes.c_int)
_release, _release_mutable = untyped(_c, "kvbm_pool_release", ctypes.c_int), untyped(_c, "kvbm_pool_release_mutable", ctypes.c_int)
_match = untyped(_c, "kvbm_pool_match", ctypes.c_long)


_Blocks = TypeVar("_Blocks", bound="Blocks")
_UNREGISTERED = {errno.EEXIST: "another block has one of the keys (reject_duplicates), or a key comes twice",
                 errno.EINVAL: "a position that isn't 0 exactly without a parent, blocks that aren't fresh ones of this pool, or tokens for other blocks"}


# -- pools -------------------------------------------------------------------------------------------------------------

class Blocks:
    """Blocks that were allocated, to be written and registered. Released when the last reference goes."""

    __slots__ = ("_pool", "_handles", "_at", "n")
    _release: Any = _release_mutable

    def __init__(self, pool: "Pool", handles: "array.array[int]", at: Any, n: int) -> None:
        self._pool = pool
        self._handles = handles
        self._at = at  # as_word() of them
        self.n = n

    @property
    def ids(self) -> List[int]:
        """Numbers of the blocks: where their bytes are."""
        return self._handles[2:4 * self.n:4].tolist()

    def __len__(self) -> int:
        return self.n

    def release(self) -> None:
        """Give the blocks back; doing it twice is fine."""
        if self.n:
            rc = self._release(self._pool._at, self._at, as_word(self.n))
            if rc < 0:
                raise error(rc, "the blocks are no longer this object's, or their pool is closed")
            self.n = 0

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} n={self.n} of {self._pool!r}>"

    def __enter__(self: _Blocks) -> _Blocks:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()

    def __del__(self) -> None:
        if self.n and not self._pool.closed:
            self._release(self._pool._at, self._at, as_word(self.n))


class Held(Blocks):
    """Registered blocks that are held: they can't be evicted until release()."""

    __slots__ = ()
    _release = _release


class Pool(Handle):
    """Blocks of one tier: free ones, held ones, and inactive ones that keep their bytes until they are evicted.

    Any number of threads. With @manager the pool belongs to its registry, for an engine's own cache (attach()).
    """

    def __init__(self, *, n_blocks: int, block_size: int, tier: int = DEVICE, groups: int = 0, eviction: str = "default",
                 key_len: int = 8, name: Optional[str] = None, reject_duplicates: bool = False, reset_on_release: bool = False,
                 manager: Optional["Manager"] = None) -> None:
        self._registry: Any = _Registry(key_len) if manager is None else manager
        self.key_len, self.block_size = self._registry.key_len, block_size
        opts = _abi.kvbm_pool_opts(name=text(name), tier=tier, groups=groups, n_blocks=n_blocks, block_size=block_size,
                                   eviction=named("eviction", eviction, EVICTION), reject_duplicates=reject_duplicates,
                                   reset_on_release=reset_on_release)
        address = ctypes.c_void_p()
        call(_c.kvbm_pool_create, self._registry._registry_address(), ctypes.byref(opts), ctypes.byref(address))
        self._address = address.value or 0  # hot calls use it directly: nothing may run while the pool is closed
        self._at = as_word(self._address)
        self._own(self._address, _c.kvbm_pool_destroy)

    def close(self) -> None:
        """Free the pool. Raises Error(EBUSY) while blocks are held; no other call may run."""
        super().close()
        self._address, self._at = 0, None  # C refuses it

    def _about(self) -> str:
        stats = self.stats()
        return f"blocks={stats['total_blocks']} block_size={self.block_size} held={stats['inflight_mutable'] + stats['inflight_immutable']}"

    def allocate(self, n: int) -> Blocks:
        """Take @n blocks, all or none: free ones, then evicted ones. Raises Error(ENOSPC)."""
        handles = _HANDLE * n
        at = as_word(handles.buffer_info()[0])
        rc = _allocate(self._at, as_word(n), at, None)
        if rc < 0:
            raise error(rc, f"{n} blocks are neither free nor evictable" if rc == -errno.ENOSPC else f"can't allocate {n} blocks")
        return Blocks(self, handles, at, n)

    def register(self, fresh: Blocks, keys: Keys, *, parent: Optional[Keys] = None, position: int = 0, tokens: Any = None,
                 group: int = 0) -> Held:
        """Register written blocks under their keys; consumes @fresh.

        @parent is the key before the first, @position the first block's place in the sequence (0 exactly without a parent).
        """
        packed, n, at = _chain(keys, self.key_len), fresh.n, fresh._at
        if packed.n != n:
            raise Invalid(f"{n} blocks, {packed.n} keys")
        if n:  # in place of the handles of @fresh
            rc = _register(self._at, at, as_word(n), packed._struct(group, parent, position, tokens, self.block_size), at)
            if rc < 0:
                raise error(rc, _UNREGISTERED.get(-rc, "can't register the blocks"))
            fresh.n = 0
        return Held(self, fresh._handles, at, n)

    def match(self, keys: Keys, *, group: int = 0, touch: bool = True) -> Held:
        """Hold the longest registered prefix of @keys; its length is len() of the result."""
        packed = _chain(keys, self.key_len)
        handles = _HANDLE * packed.n
        at = as_word(handles.buffer_info()[0])
        n = _match(self._at, group, packed._at(), as_word(packed.n), 0 if touch else 1, at)
        if n < 0:
            raise error(n, f"no group {group} of the pool, or it is closed")
        return Held(self, handles, at, n)

    def _count(self, function: Any, keys: Keys, group: int, *args: Any) -> int:
        packed = _chain(keys, self.key_len)
        n = function(self._address, group, packed.address, packed.n, *args)
        if n < 0:
            raise error(n, f"no group {group} of the pool, a priority that isn't 0 to 100, or a closed pool")
        return int(n)

    def probe(self, keys: Keys, *, group: int = 0) -> int:
        """Return the length of the registered prefix, without holding it or counting a use."""
        return self._count(_c.kvbm_pool_probe, keys, group)

    def touch(self, keys: Keys, *, group: int = 0) -> int:
        """Count one use of the registered prefix; returns its length."""
        return self._count(_c.kvbm_pool_touch, keys, group)

    def retain(self, keys: Keys, priority: int, *, ttl_ms: int = 0, group: int = 0) -> int:
        """Keep registered keys at a priority of 0 to 100 for a time (0: for ever); returns their number."""
        return self._count(_c.kvbm_pool_retain, keys, group, priority, ttl_ms)

    def forget(self, keys: Optional[Keys] = None, *, group: int = 0) -> int:
        """Forget the inactive blocks of @keys (None: all inactive blocks); returns how many."""
        if keys is None:
            return self._call(_c.kvbm_pool_reset_inactive)
        result = _abi.kvbm_reset_result()
        self._count(_c.kvbm_pool_reset_keys, keys, group, ctypes.byref(result))
        return int(result.reset)

    def stats(self) -> Dict[str, int]:
        """Return counters and sizes by the names of kvbm_pool_stats."""
        result = _abi.kvbm_pool_stats()
        self._call(_c.kvbm_pool_get_stats, ctypes.byref(result))
        return {name: getattr(result, name) for name, *_ in result._fields_[1:]}


class _Registry(Handle):
    """Registry of a pool that belongs to no manager."""

    def __init__(self, key_len: int) -> None:
        address = ctypes.c_void_p()
        call(_c.kvbm_registry_create, ctypes.byref(_abi.kvbm_registry_opts(key_len=key_len)), ctypes.byref(address))
        self.key_len = key_len
        self._own(address.value or 0, _c.kvbm_registry_destroy)

    def _registry_address(self) -> int:
        return self._state.address or 0


# -- tiers -------------------------------------------------------------------------------------------------------------

class Manager(Handle):
    """The tiers of one node: host memory, disk, and an object store (any kv_store URI).

    Options are those of kvbm_manager_opts (kvbm_manager.h) by name. Constants may be words of the configuration file, such as
    io="threads" or host_policy="frequency"; with a threshold, host_policy={"policy": "frequency", "threshold": 3}; a rank's heads are
    shard={"rank": 1, "n_ranks": 2, "axis": 1, "first_head": 4, "total_heads": 8}. Any number of threads. Create it after fork().

    @host_memory: writable memory for the host tier, such as an mmap of a memfd or of a file in /dev/shm. Other processes that map
    it read and write its blocks themselves: block i begins at i * host_stride. @host_bytes: its length, unless said. Memory that
    lacks pages (longer than its file, a full tmpfs) is Error(ENOSPC), memory of another manager of the process Error(EBUSY).
    @agent: its sessions read blocks of peers, and it can lend this manager's (kvasir.peers). Without one @peers has an agent's of its own.
    """

    def __init__(self, shape: Shape, *, key_len: int = 8, close_timeout: float = 30.0, host_memory: Any = None,
                 agent: "Optional[Agent]" = None, fingerprint: Optional[str] = None, host_bytes: Optional[Size] = None,
                 staging_blocks: Optional[int] = None, host_eviction: Optional[str] = None, host_pinned: Optional[bool] = None,
                 huge_pages: Optional[bool] = None, host_policy: Optional[Policy] = None, host_shared: Optional[bool] = None,
                 disk: Optional[str] = None, disk_bytes: Optional[Size] = None, disk_eviction: Optional[str] = None,
                 disk_policy: Optional[Policy] = None, disk_buffered: Optional[bool] = None, disk_volatile: Optional[bool] = None,
                 object: Optional[str] = None, object_blocks: Optional[int] = None, object_write_through: Optional[bool] = None,
                 object_when_evicted: Optional[bool] = None, object_timeout_ms: Optional[int] = None, object_policy: Optional[Policy] = None,
                 copy_threads: Optional[int] = None, io: Union[None, int, str] = None, io_depth: Optional[int] = None,
                 max_offload: Optional[int] = None, max_jobs: Optional[int] = None, io_registered: Optional[bool] = None,
                 gpu_copy: Union[None, int, str] = None, peers: Optional[str] = None, peer_token_file: Optional[str] = None,
                 peer_set: Optional[int] = None, peer_timeout_ms: Optional[int] = None, indexer: Optional[str] = None,
                 indexer_model: Optional[str] = None, indexer_tenant: Optional[str] = None, indexer_token_file: Optional[str] = None,
                 indexer_ca: Optional[str] = None, indexer_timeout_ms: Optional[int] = None, shard: Optional[Dict[str, int]] = None,
                 **others: Any) -> None:
        options = given(
            fingerprint=fingerprint, host_bytes=host_bytes, staging_blocks=staging_blocks, host_eviction=host_eviction, host_pinned=host_pinned,
            huge_pages=huge_pages, host_policy=host_policy, host_shared=host_shared, disk=disk, disk_bytes=disk_bytes, disk_eviction=disk_eviction,
            disk_policy=disk_policy, disk_buffered=disk_buffered, disk_volatile=disk_volatile, object=object, object_blocks=object_blocks,
            object_write_through=object_write_through, object_when_evicted=object_when_evicted, object_timeout_ms=object_timeout_ms,
            object_policy=object_policy, copy_threads=copy_threads, io=io, io_depth=io_depth, max_offload=max_offload, max_jobs=max_jobs,
            io_registered=io_registered, gpu_copy=gpu_copy, peers=peers, peer_token_file=peer_token_file, peer_set=peer_set,
            peer_timeout_ms=peer_timeout_ms, indexer=indexer, indexer_model=indexer_model, indexer_tenant=indexer_tenant,
            indexer_token_file=indexer_token_file, indexer_ca=indexer_ca, indexer_timeout_ms=indexer_timeout_ms,
            shard=shard, **others)
        config = shape.config(1)
        opts = _abi.kvbm_manager_opts(block=ctypes.addressof(config), key_len=key_len)
        host = None if host_memory is None else Memory(host_memory, True)
        if host is not None:
            opts.host_memory = host.address
            options["host_bytes"] = size_of(options.get("host_bytes", host.nbytes))
            if options["host_bytes"] > host.nbytes:
                raise Invalid(f"{host.nbytes} bytes of host_memory, {options['host_bytes']} of host_bytes")
        set_manager_options(opts, options)
        address = ctypes.c_void_p()
        opts.agent = None if agent is None else agent._enter()
        try:
            call(_c.kvbm_manager_create, ctypes.byref(opts), ctypes.byref(address))
        except BaseException:
            if address.value:  # a signal's handler raised; nothing may use @host_memory any more
                _c.kvbm_manager_destroy(address, 0)
            raise
        finally:
            if agent is not None:
                agent._leave()
        self.shape, self.key_len = shape, key_len
        self._caches: "weakref.WeakSet[Handle]" = weakref.WeakSet()  # and blocks that are lent
        timeout = int(close_timeout * 1000)
        pins: Dict[int, None] = {}
        lent: Dict[int, _Lent] = {}
        of_host = [] if host is None else [host]  # emptied by close(), so that its owner can free the memory
        for memory in of_host:
            lend(memory)
        self._own(address.value or 0, lambda manager: _destroy(manager, timeout, pins, lent, of_host, agent))
        if agent is not None:
            agent._users.add(self)
        self._state.at_end = lambda: unpin_all(pins)
        self._pins, self._lent = pins, lent  # addresses of pins that are held; what attached caches use

    def _registry_address(self) -> int:
        return int(_c.kvbm_manager_registry(self._state.address))

    def _about(self) -> str:
        return f"key_len={self.key_len} shape={tuple(self.shape)} caches={len(self._caches)}"

    @property
    def host_stride(self) -> int:
        """Bytes from one block of the host tier to the next."""
        return -(-self.shape.nbytes // _PAGE) * _PAGE

    def close(self) -> None:
        """Finish queued work for up to close_timeout, and free the tiers. Raises Error(EBUSY) while anything is held."""
        if any(not cache.closed for cache in self._caches):
            raise error(-errno.EBUSY, "a cache is attached, or blocks are lent")
        super().close()

    def attach(self, memory: Any, *, n_blocks: Optional[int] = None, pool: Optional[Pool] = None, shape: Optional[Shape] = None) -> "Cache":
        """Attach an engine's cache: writable host memory of blocks in the order of Shape, or of @n_blocks of them."""
        return Cache(self, memory, n_blocks, pool, shape or self.shape)

    def lookup(self, keys: Keys, *, parent: Optional[Keys] = None, position: int = 0, group: int = 0) -> bytes:
        """Tell where each key is: one byte each, MISS, READY, ON_DISK, ON_PEER, REMOTE, PENDING or BUSY. Never waits."""
        packed = _chain(keys, self.key_len)
        places = array.array("B", bytes(packed.n))
        self._hot(_c.kvbm_manager_lookup, packed._struct(group, parent, position), packed.n, places.buffer_info()[0])
        return places.tobytes()

    def hit(self, groups: Mapping[int, Tuple[CacheGroup, Keys]], *, limit: int = 0, computed: int = 0, unit: int = 0,
            managers: Optional[Mapping[int, "Manager"]] = None) -> Hit:
        """Find the longest hit of a prompt for which every cache group has what it needs in the tiers. Never waits, holds nothing.

        @groups: by its number, a group and the keys of its blocks, from the prompt's first token on. Hits end at multiples of each
        group's block size and of @unit, at most at token @limit. @computed: tokens that the engine's own cache has. Ask again while
        Hit.pending isn't 0 and there is time. @managers: by group, the manager of blocks that have another number of bytes.
        """
        question = Question(groups, {number: (managers or {}).get(number, self).key_len for number in groups}, limit, computed, unit)
        with contextlib.ExitStack() as leave:
            for number, manager in (managers or {}).items():
                address = manager._enter()
                leave.callback(manager._leave)
                question.name_manager(number, address)
            self._hot(_c.kvbm_manager_hit, *question.arguments())
        return question.answer()

    def _hot(self, function: Any, *args: Any) -> int:
        """Call a function without collecting its reason."""
        manager = self._enter()
        try:
            rc = function(manager, *args)
        finally:
            self._leave()
        if rc < 0:
            raise error(rc, unsaid(getattr(function, "__name__", "the call"), rc))
        return int(rc)

    def _queue(self, taken: Optional[List[int]], function: Any, *args: Any) -> int:
        """Call a function that queues a job. @taken gets its result, also when a signal's handler raises."""
        if taken is None:
            return self._hot(function, *args)
        into = taken

        def queue(manager: int) -> int:
            certain(into, function, manager, *args)
            return into[0]

        return self._hot(queue)

    def _pin(self, n_keys: int, pin: Any, function: Any, *args: Any) -> "Pin":
        """Call a function that makes a pin; close() sees the pin before it can see the call's end."""
        held, manager = Pin(self, n_keys), self._enter()
        try:
            held.prefix = int(function(manager, *args, ctypes.byref(pin)))
        finally:
            if pin.value:  # also when a signal's handler raised: @held releases it then
                held.address = pin.value
                self._pins[pin.value] = None
            self._leave()
        if held.prefix < 0:
            raise error(held.prefix, unsaid(function.__name__, held.prefix))
        return held

    def touch(self, keys: Keys, *, group: int = 0) -> int:
        """Count one use of each key in every tier; returns the length of the prefix that some tier has."""
        packed = _chain(keys, self.key_len)
        return self._hot(_c.kvbm_manager_touch, group, packed.address, packed.n)

    def remove(self, keys: Keys, *, group: int = 0, timeout: float = 10.0) -> "Removed":
        """Remove keys from every tier, so that a restart finds none of them. Waits; give it many keys at once.

        Copies that a pin, a job or an offload under way holds stay and are counted: drain() before. Raises the first error of
        a tier, in which keys may be left.
        """
        packed, result = _chain(keys, self.key_len), _abi.kvbm_remove_result()
        self._call(_c.kvbm_manager_remove, group, packed.address, packed.n, int(timeout * 1000), ctypes.byref(result))
        return Removed(result.host, result.disk, result.object, result.held)

    def prepare_load(self, keys: Keys, *, parent: Optional[Keys] = None, position: int = 0, group: int = 0, priority: int = 0,
                     fetch: bool = True, timeout: float = 0.0, in_place: bool = False) -> "Pin":
        """Pin the keys' blocks in the host tier, and fetch the others from the tiers below, within @timeout seconds (0: any).

        @in_place: leave blocks of peers of this machine where they are. submit() copies them from there; they have no host block.
        """
        packed, pin = _chain(keys, self.key_len), ctypes.c_void_p()
        opts = _abi.kvbm_pin_opts(priority=priority, no_fetch=not fetch, deadline_ns=deadline(timeout), in_place=in_place)
        return self._pin(packed.n, pin, _c.kvbm_manager_prepare_load, packed._struct(group, parent, position), packed.n, ctypes.byref(opts))

    def prepare_store(self, keys: Keys, *, parent: Optional[Keys] = None, position: int = 0, group: int = 0) -> "Pin":
        """Reserve host blocks for the keys that the host tier lacks."""
        packed, pin = _chain(keys, self.key_len), ctypes.c_void_p()
        return self._pin(packed.n, pin, _c.kvbm_manager_prepare_store, packed._struct(group, parent, position), packed.n)

    def submit(self, pin: "Pin", cache: "Cache", blocks: Iterable[int], *, tag: int = 0, priority: int = 0, first_layer: int = 0,
               n_layers: int = 0, ok: Any = None, timeout: float = 0.0, _taken: Optional[List[int]] = None) -> int:
        """Queue the copy between a pin's host blocks and a cache's; returns the job's id. poll(), fd or wait() tell its end.

        blocks[i] is the cache's block for key i (NO_BLOCK: leave it out). @ok: writable memory of (n + 7) // 8 bytes, bit i says
        whether key i's bytes are there; keep it until the job has ended. What has not begun after @timeout seconds (0: any) is
        left out.
        """
        keep, address, n = numbers(blocks, "I")
        if n != pin.n:
            raise Invalid(f"{n} blocks, {pin.n} keys")
        bits = None if ok is None else Memory(ok, True)
        if bits is not None and bits.nbytes < (n + 7) // 8:
            raise Invalid("@ok is too short")
        job = _abi.kvbm_job(pin=pin.address, blocks=address, first_layer=first_layer, n_layers=n_layers, priority=priority, tag=tag,
                            deadline_ns=deadline(timeout), ok=None if bits is None else bits.address)
        job.cache = cache._enter()  # close() waits
        try:
            ident = self._queue(_taken, _c.kvbm_manager_submit, ctypes.byref(job))
        finally:
            cache._leave()
        del keep
        return ident

    def submit_keys(self, store: bool, keys: Keys, cache: "Cache", blocks: Any, *, tag: int = 0, priority: int = 0, ok: Any = None,
                    timeout: float = 0.0, _taken: Optional[List[int]] = None) -> int:
        """Queue a store or a load of keys as one job: the tiers below use the cache's own memory. Without a host tier only.

        blocks[i] is the cache's block for key i. Returns and takes @ok as submit(). A store ends once a tier below has its blocks.
        Raises Error(ENOTSUP) when the cache's blocks are not whole pages (4096 bytes) of the manager's shape, one after the other.
        """
        packed = _chain(keys, self.key_len)
        keep, address, n = numbers(blocks, "I")
        if n != packed.n:
            raise Invalid(f"{n} blocks, {packed.n} keys")
        bits = None if ok is None else Memory(ok, True)
        if bits is not None and bits.nbytes < (n + 7) // 8:
            raise Invalid("@ok is too short")
        job = _abi.kvbm_job(blocks=address, priority=priority, tag=tag, deadline_ns=deadline(timeout),
                            ok=None if bits is None else bits.address)
        job.cache = cache._enter()  # close() waits
        try:
            ident = self._queue(_taken, _c.kvbm_manager_submit_keys, packed._struct(), n, store, ctypes.byref(job))
        finally:
            cache._leave()
        del keep
        return ident

    def poll(self, most: int = 64) -> List[Done]:
        """Take the results of ended jobs."""
        results = (_abi.kvbm_done * most)()
        return [as_done(results[i]) for i in range(self._hot(_c.kvbm_manager_poll, results, most))]

    def wait(self, job: int, timeout: float = 10.0) -> Done:
        """Wait for a job and take its result. Raises Error(ETIMEDOUT)."""
        result = _abi.kvbm_done()
        self._hot(_c.kvbm_manager_wait, job, int(timeout * 1000), ctypes.byref(result))
        return as_done(result)

    def cancel(self, job: int) -> None:
        """Cancel a job. Raises NotFound when it has ended."""
        self._hot(_c.kvbm_manager_cancel, job)

    def fileno(self) -> int:
        """A descriptor that is readable while poll() has results."""
        return self._hot(_c.kvbm_manager_fd)

    def drain(self, timeout: float = 10.0) -> None:
        """Wait until no block is queued for a lower tier. Raises Error(ETIMEDOUT)."""
        self._hot(_c.kvbm_manager_drain, int(timeout * 1000))

    def stats(self) -> Dict[str, Any]:
        """Return statistics by the names of kvbm_manager_stats; those of a tier are dictionaries, too."""
        result = _abi.kvbm_manager_stats()
        self._call(_c.kvbm_manager_get_stats, ctypes.byref(result))
        return {name: _plain(getattr(result, name)) for name, *_ in result._fields_[1:]}

    def metrics(self) -> str:
        """Statistics of the manager and its pools as Prometheus text."""
        room = 1 << 16
        while True:
            to = ctypes.create_string_buffer(room)
            needed = self._call(_c.kvbm_manager_metrics, to, room)
            if needed < room:
                return to.value.decode()
            room = needed + 4096


def _plain(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_ if name != "reserved"}
    return list(value) if isinstance(value, ctypes.Array) else value


def _destroy(manager: int, timeout: int, pins: Dict[int, None], lent: "Dict[int, _Lent]", host: List[Memory],
             *_keep: Any) -> int:
    """Free a manager, then what caches still used that were given up before, and the host tier's memory; its agent lives until then."""
    rc = -errno.EBUSY if pins else int(_c.kvbm_manager_destroy(manager, timeout))
    if rc >= 0:
        while host:
            give_back(host.pop())
        for cache in list(lent):
            _c.kvbm_cache_detach(cache)
            lent.pop(cache).give_back()
    return rc


class Cache(Handle):
    """An engine's cache in host memory, attached to a manager. Keeps the memory alive. Use Manager.attach()."""

    def __init__(self, manager: Manager, memory: Any, n_blocks: Optional[int], pool: Optional[Pool], shape: Shape) -> None:
        self._memory, self.manager = Memory(memory, True), manager
        self.n_blocks = self._memory.nbytes // shape.nbytes if n_blocks is None else n_blocks
        if not self.n_blocks or self.n_blocks * shape.nbytes > self._memory.nbytes:
            raise Invalid(f"{self._memory.nbytes} bytes for {self.n_blocks} blocks of {shape.nbytes}")
        layout, storage = _layout(shape.config(self.n_blocks), self._memory)
        opts = _abi.kvbm_cache_opts(layout=layout, pool=None if pool is None else pool._address)
        address, lent = ctypes.c_void_p(), _Lent(self._memory, layout, storage)
        try:
            manager._call(_c.kvbm_cache_attach, ctypes.byref(opts), ctypes.byref(address))
        except BaseException:
            if not address.value or _c.kvbm_cache_detach(address) >= 0:  # else a signal's handler raised, and it is attached
                lent.give_back()
            raise
        of_manager = manager._lent
        of_manager[address.value or 0] = lent
        self._own(address.value or 0, lambda cache: _detach(cache, of_manager))
        manager._caches.add(self)

    def _about(self) -> str:
        return f"blocks={self.n_blocks}"

    def _move(self, function: Any, keys: Keys, blocks: Sequence[int], parent: Optional[Keys], position: int, group: int, how: Any) -> int:
        packed = _chain(keys, self.manager.key_len)
        keep, address, n = numbers(blocks, "I")
        if n != packed.n:
            raise Invalid(f"{packed.n} keys, {n} blocks")
        done = self._call(function, packed._struct(group, parent, position), n, address, how)
        del keep
        return done

    def store(self, keys: Keys, blocks: Sequence[int], *, parent: Optional[Keys] = None, position: int = 0, group: int = 0,
              timeout: float = 10.0, durable: bool = False) -> int:
        """Store blocks in the tiers and wait; returns how many keys, from the first on, a tier has now.

        They are found until the policy of their last tier evicts them. With @durable it waits for the disk or the object store,
        and counts the keys that these have: they survive a kill of the process.
        """
        opts = _abi.kvbm_store_opts(timeout_ms=int(timeout * 1000), durable=durable)
        return self._move(_c.kvbm_cache_store_with, keys, blocks, parent, position, group, ctypes.byref(opts))

    def load(self, keys: Keys, blocks: Sequence[int], *, parent: Optional[Keys] = None, position: int = 0, group: int = 0,
             timeout: float = 10.0) -> int:
        """Load blocks from whatever tier has them and wait; returns the length of the prefix that is in the cache now."""
        return self._move(_c.kvbm_cache_load, keys, blocks, parent, position, group, int(timeout * 1000))


class _Lent:
    """Memory and layout that a manager's threads use until give_back(), even when the interpreter ends before."""

    __slots__ = ("memory", "layout", "storage")

    def __init__(self, memory: Memory, layout: int, storage: int) -> None:
        self.memory, self.layout, self.storage = memory, layout, storage
        lend(memory)

    def give_back(self) -> None:
        """Free the layout and let the memory go."""
        _c.kvbm_layout_destroy(self.layout)
        _c.kvbm_storage_destroy(self.storage)
        give_back(self.memory)


def _detach(address: int, lent: Dict[int, _Lent]) -> int:
    """Detach a cache; while jobs use it, its memory stays with the manager."""
    if address not in lent:  # its manager is gone, and the cache with it
        return 0
    rc = int(_c.kvbm_cache_detach(address))
    if rc >= 0:
        lent.pop(address).give_back()
    return rc


def _layout(config: Any, memory: Memory) -> Tuple[int, int]:
    """Make a layout over memory of Python's: its address, and that of its storage."""
    storage, layout = ctypes.c_void_p(), ctypes.c_void_p()
    opts = _abi.kvbm_storage_opts(kind=_abi.KVBM_STORAGE_EXTERNAL, bytes=memory.nbytes, memory=memory.address, of=_abi.KVBM_STORAGE_SYSTEM)
    call(_c.kvbm_storage_create, ctypes.byref(opts), ctypes.byref(storage))
    try:
        call(_c.kvbm_layout_create, ctypes.byref(config), ctypes.byref(storage), 1, ctypes.byref(layout))
    except BaseException:
        _c.kvbm_storage_destroy(storage)
        raise
    return layout.value or 0, storage.value or 0
