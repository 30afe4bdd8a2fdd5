# SPDX-License-Identifier: Apache-2.0
"""Requests on a store that run on threads of the library: for schedulers and event loops, which must not wait.

    queue = kvasir.queue.Queue(store)
    request = queue.get(keys, parts)                 # returns at once; parts as in Store.get_into()
    ...                                              # queue.fileno() is readable when results wait
    for result in queue.poll():
        print(result.id, result.status, result.each)

    async with kvasir.queue.AsyncStore(store) as blocks:      # the same for asyncio
        await blocks.put(keys, parts, flush=True)
        lengths = await blocks.get(keys, parts)

Several requests have no order among each other: wait for a put before a get of its keys.
"""
import asyncio
import ctypes
import errno
import itertools
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _abi
from ._native import Error, Handle, call, certain, error, give_back, lend, unsaid
from .store import Store, _join, _Parts, _Table, end_queue

__all__ = ["AsyncStore", "Queue", "Result"]

_MISSING = (-errno.ENOENT, -errno.EBADMSG)


class Result(NamedTuple):
    """Result of a request: @status is 0 or the first error, @each one number for each key.

    Of a get each is the block's length, of a put 0 (stored) or 1 (was there), of exists 1 or 0, of a delete 0; or a negative
    errno, such as -ENOENT. @n_ok counts those of 0 or more (exists: those there), @bytes what was read or written.
    """
    id: int
    tag: int
    status: int
    each: List[int]
    n_ok: int
    bytes: int
    wait_s: float
    run_s: float


class _Request:
    """Memory that the library uses until a request has ended."""

    def __init__(self, keys: Sequence[bytes], parts: Any, writable: bool, tag: int) -> None:
        self.packed, self.length = _join(keys)
        self.n, self.tag = len(keys), tag
        self.lists: Any = parts if parts is None or type(parts) is _Table else _Parts(parts, self.n, writable)
        self.each = (ctypes.c_int64 * max(self.n, 1))()
        self._lent: List[Any] = []  # one while lent: pop is atomic

    def lend(self) -> None:
        certain(self._lent, lend, self)

    def give_back(self) -> None:
        if self._lent:
            self._lent.pop()
            give_back(self)


class Queue(Handle):
    """A queue of requests on a store, with threads of its own. Any number of threads may use it.

    @threads: 0 means one per core, 4 to 8. @max_requests: those not yet polled. close() cancels what has not begun and waits
    for the rest, at most @close_timeout seconds; results that were not polled are lost.
    """

    def __init__(self, store: Store, *, threads: int = 0, max_requests: int = 0, close_timeout: float = 30.0) -> None:
        library, address = store._c, ctypes.c_void_p()
        opts = _abi.kvs_async_opts(threads=threads, max_requests=max_requests)
        requests: Dict[int, _Request] = {}
        queues, timeout = store._queues, int(close_timeout * 1000)
        pointer = store._enter()  # close() of the store waits, and sees the queue then
        try:
            call(library.kvs_async_open, pointer, ctypes.byref(opts), ctypes.byref(address))
            queues[address.value or 0] = requests
        finally:
            store._leave()
        self.store, self._c, self._requests = store, library, requests
        self._tokens = itertools.count(1)
        close = library.kvs_async_close
        self._own(address.value or 0, lambda queue: end_queue(queue, timeout, queues, close))

    def _about(self) -> str:
        return f"of {self.store!r} requests={len(self._requests)}"

    def _submit(self, op: int, keys: Sequence[bytes], parts: Any, priority: int, tag: int, flush: bool = False) -> int:
        request, token = _Request(keys, parts, op == _abi.KVS_OP_GET, tag), next(self._tokens)
        lists = request.lists
        c = _abi.kvs_request(op=op, priority=priority, hashes=ctypes.cast(ctypes.c_char_p(request.packed), ctypes.c_void_p),
                             hash_len=request.length, n=request.n, tag=token, flush=flush,
                             ret_each=ctypes.addressof(request.each))
        if lists is not None:
            c.parts, c.n_parts = lists.address, lists.counts_address
        taken: List[int] = []
        try:
            self._requests[token] = request  # before another thread can poll it
            request.lend()
            return self._call(lambda queue: self._take(taken, queue, c))
        except BaseException:
            if not taken or taken[0] < 0:  # else a signal's handler raised, and the library uses the memory
                self._requests.pop(token, None)
                request.give_back()
            raise

    def _take(self, taken: List[int], queue: int, c: Any) -> int:
        certain(taken, self._c.kvs_async_submit, queue, ctypes.byref(c))
        return taken[0]

    def get(self, keys: Sequence[bytes], parts: Sequence[Any], *, priority: int = 0, tag: int = 0) -> int:
        """Get blocks into the caller's memory; @parts as in Store.get_into(). Returns the request's id.

        The memory must stay in place until the request's result was polled; Python objects are kept.
        """
        return self._submit(_abi.KVS_OP_GET, keys, parts, priority, tag)

    def put(self, keys: Sequence[bytes], parts: Sequence[Any], *, flush: bool = False, priority: int = 0, tag: int = 0) -> int:
        """Store blocks; @parts as in Store.put_from(). With @flush they are durable at the request's end.

        Nothing may change the memory until then.
        """
        return self._submit(_abi.KVS_OP_PUT, keys, parts, priority, tag, flush)

    def exists(self, keys: Sequence[bytes], *, priority: int = 0, tag: int = 0) -> int:
        """Ask which blocks are there."""
        return self._submit(_abi.KVS_OP_EXISTS, keys, None, priority, tag)

    def delete(self, keys: Sequence[bytes], *, priority: int = 0, tag: int = 0) -> int:
        """Delete blocks."""
        return self._submit(_abi.KVS_OP_DELETE, keys, None, priority, tag)

    def flush(self, *, priority: int = 0, tag: int = 0) -> int:
        """Make blocks durable that were put before."""
        return self._submit(_abi.KVS_OP_FLUSH, (), None, priority, tag)

    def cancel(self, request: int) -> bool:
        """Leave out what has not begun of a request; its result comes as ever. False: it has ended."""
        try:
            self._call(self._c.kvs_async_cancel, request)
        except Error as problem:
            if problem.errno != errno.ENOENT:
                raise
            return False
        return True

    def poll(self, most: int = 64) -> List[Result]:
        """Take the results of ended requests, oldest first. Never waits.

        A request whose submission a signal's handler ended with an exception may have a result, too; @tag tells which it is.
        """
        done = (_abi.kvs_done * most)()
        results = [self._result(done[i]) for i in range(self._call(self._c.kvs_async_poll, done, most))]
        return [result for result in results if result is not None]

    def _result(self, done: Any) -> Optional[Result]:
        request = self._requests.pop(done.tag, None)
        if request is None:
            return None
        each = request.each[:request.n]
        request.give_back()
        return Result(done.id, request.tag, done.status, each, done.n_ok, done.bytes, done.wait_ns / 1e9, done.run_ns / 1e9)

    def drain(self, timeout: float = 10.0) -> None:
        """Wait until every request has ended; poll() takes their results. Raises Error(ETIMEDOUT)."""
        self._call(self._c.kvs_async_drain, int(timeout * 1000))

    def fileno(self) -> int:
        """Descriptor that is readable while results wait: for select, poll and event loops. Don't read it."""
        return self._call(self._c.kvs_async_fd)


class AsyncStore:
    """Blocks of a store for asyncio: each call is a request of a Queue. Use one in each event loop, inside it."""

    def __init__(self, store: Store, *, threads: int = 0, max_requests: int = 0, close_timeout: float = 30.0) -> None:
        self.queue = Queue(store, threads=threads, max_requests=max_requests, close_timeout=close_timeout)
        self._loop = asyncio.get_running_loop()
        self._waiting: Dict[int, "asyncio.Future[Result]"] = {}
        self._fd = self.queue.fileno()
        self._loop.add_reader(self._fd, self._take)

    def _take(self) -> None:
        for result in self.queue.poll():
            future = self._waiting.pop(result.id, None)
            if future is not None and not future.done():
                future.set_result(result)

    async def _end(self, request: int) -> Result:
        future: "asyncio.Future[Result]" = self._loop.create_future()
        self._waiting[request] = future
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not self.queue.closed:
                self.queue.cancel(request)  # its memory stays lent until its result was taken
            raise

    async def _each(self, request: int, fine: Tuple[int, ...] = ()) -> List[int]:
        result = await self._end(request)
        for rc in result.each:
            if rc < 0 and rc not in fine:
                raise error(rc, unsaid("kvs_async_submit", rc))
        if result.status < 0 and result.status not in fine:
            raise error(result.status, unsaid("kvs_async_submit", result.status))
        return result.each

    async def get(self, keys: Sequence[bytes], parts: Sequence[Any], *, priority: int = 0) -> List[Optional[int]]:
        """Get blocks into the caller's memory; returns their lengths as Store.get_into() does.

        A task that is cancelled leaves the memory in use for a moment: don't use it again before close().
        """
        each = await self._each(self.queue.get(keys, parts, priority=priority), _MISSING)
        return [None if rc < 0 else rc for rc in each]

    async def put(self, keys: Sequence[bytes], parts: Sequence[Any], *, flush: bool = False, priority: int = 0) -> List[bool]:
        """Store blocks; returns as Store.put_from() does."""
        return [rc == 0 for rc in await self._each(self.queue.put(keys, parts, flush=flush, priority=priority))]

    async def exists(self, keys: Sequence[bytes], *, priority: int = 0) -> List[bool]:
        """Tell which blocks are there."""
        return [rc == 1 for rc in await self._each(self.queue.exists(keys, priority=priority))]

    async def delete(self, keys: Sequence[bytes], *, priority: int = 0) -> None:
        """Delete blocks."""
        await self._each(self.queue.delete(keys, priority=priority))

    async def flush(self) -> None:
        """Make blocks durable that were put before."""
        result = await self._end(self.queue.flush())
        if result.status < 0:
            raise error(result.status, unsaid("kvs_async_submit", result.status))

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and close the queue; tasks that wait get CancelledError."""
        ended = self._loop.is_closed()  # nobody waits any more, and the loop refuses every call
        if not self.queue.closed and os.getpid() == self.queue._state.pid:
            if not ended:
                self._loop.remove_reader(self._fd)
            self.queue.close()
        for future in () if ended else self._waiting.values():
            future.cancel()
        self._waiting.clear()

    async def __aenter__(self) -> "AsyncStore":
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.close()
