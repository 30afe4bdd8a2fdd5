# SPDX-License-Identifier: Apache-2.0
"""LMCache's chunks in any store: a native plugin of LMCache's L2.

    lmcache server ... --l2-adapter '{"type": "native_plugin", "module_path": "kvasir.lmcache", "class_name": "Client",
                                      "adapter_params": {"uri": "/var/lib/kv?limit=100GiB"}}'

Requests run on threads of the library; chunks move between LMCache's memory and the store in place, and verify on the way. A chunk
that doesn't verify, a full disk and a server that is down are failures of single chunks: LMCache goes on without them.
"""
import errno
import hashlib
import logging
import os
import select
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _identity
from . import store as _store
from ._connector import Flusher, Warner
from ._native import Error, Memory
from .queue import Queue, Result

__all__ = ["Client"]

logger = logging.getLogger(__name__)
LOOK_S = 1.0  # seconds between two looks at a model's files
Completion = Tuple[int, bool, str, Optional[List[bool]]]


class _Asked(NamedTuple):
    """A request under way: LMCache's number of it, what it is, its keys, and the sizes that a get wants."""
    future: int
    kind: str
    keys: List[bytes]
    sizes: List[int]


class Client:
    """A connector of LMCache's native_plugin adapter. No method raises after the constructor; any thread may call any.

    @fingerprint: names the weights in place of their files' state, see docs/python.md. @threads: of the library; 0: one per core, 4 to 8.
    @flush_s: chunks are durable and seen by other processes after so many seconds at most.
    """

    def __init__(self, uri: str, fingerprint: str = "", threads: int = 0, max_requests: int = 4096, flush_s: float = 1.0) -> None:
        self._fingerprint = fingerprint
        self._models: Dict[str, Tuple[float, Any, bytes]] = {}  # of each model: when it was looked at, its files then, salt of its keys
        self._store = _store.open(uri)
        self._queue = Queue(self._store, threads=threads, max_requests=max_requests)
        self._warn = Warner(logger, "LMCache goes on without these chunks")
        self._flusher = Flusher(self._store, flush_s, self._warn)
        self._lock, self._next = threading.Lock(), 0
        self._asked: Dict[int, _Asked] = {}
        self._mended: Dict[int, Completion] = {}  # gets of damaged chunks, by the request that deletes those
        self._failed: List[Completion] = []  # requests that the queue didn't take
        self._pipe = os.pipe()  # a byte waits in it while there are any
        self._poll = select.epoll()  # readable when either has completions
        self._poll.register(self._queue.fileno(), select.EPOLLIN)
        self._poll.register(self._pipe[0], select.EPOLLIN)
        self._closed = False

    def _keys(self, keys: Sequence[str]) -> List[bytes]:
        return [hashlib.blake2b(key.encode(), key=self._salt(key.partition("@")[0]), digest_size=32).digest() for key in keys]

    def _salt(self, model: str) -> bytes:
        """Return the salt of a model's keys: of what its weights were when it was first asked for."""
        known, now = self._models.get(model), time.monotonic()
        if known is not None and now < known[0] + LOOK_S:
            return known[2]
        state = None if self._fingerprint else _identity.weights_of(model)
        if known is None:
            salt = hashlib.sha256(b"lmcache 2 " + _identity.digest_of(state or self._fingerprint)).digest()
        elif state == known[1]:
            salt = known[2]
        else:  # whether the engine runs with the old files or the new ones isn't known
            salt = os.urandom(32)
            self._warn(f"the files of {model}", ValueError("changed; restart LMCache with the engine, or give a fingerprint"))
        self._models[model] = (now, state, salt)
        return salt

    def _submit(self, kind: str, keys: Sequence[str], views: Optional[Sequence[Any]]) -> int:
        with self._lock:  # held until the request is noted: its result may come at once
            self._next += 1
            future = self._next
            try:
                packed = self._keys(keys)
                if kind == "get":
                    sizes = [Memory(view).nbytes for view in views or ()]
                    request = self._queue.get(packed, list(views or ()))
                elif kind == "set":
                    sizes, request = [], self._queue.put(packed, list(views or ()))
                elif kind == "exists":
                    sizes, request = [], self._queue.exists(packed)
                else:
                    sizes, request = [], self._queue.delete(packed)
                self._asked[request] = _Asked(future, kind, packed, sizes)
            except Exception as problem:  # pylint: disable=broad-except
                self._warn(f"a {kind} of {len(keys)} chunks", problem)
                self._failed.append((future, False, str(problem), None if kind == "set" else [False] * len(keys)))
                if not self._closed and len(self._failed) == 1:
                    os.write(self._pipe[1], b"x")
            return future

    # -- LMCache's interface -------------------------------------------------------------------------------
    def event_fd(self) -> int:
        """Descriptor that is readable while drain_completions() has something; -1 after close()."""
        return -1 if self._poll.closed else self._poll.fileno()

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Read chunks into memory; a chunk must have the length of its view."""
        return self._submit("get", keys, memoryviews)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Store chunks. Nothing may change their memory until the request has ended."""
        return self._submit("set", keys, memoryviews)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which chunks are there."""
        return self._submit("exists", keys, None)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete chunks."""
        return self._submit("delete", keys, None)

    def drain_completions(self) -> List[Completion]:
        """Take what has ended: (number, whether all went well, reason, result of each key)."""
        with self._lock:
            done, self._failed = self._failed, []
            if done and not self._closed:
                os.read(self._pipe[0], 1)
            try:
                results = self._queue.poll(256)
            except (Error, ValueError):
                results = []  # closed
            for result in results:
                asked, mended = self._asked.pop(result.id, None), self._mended.pop(result.id, None)
                if mended is not None:
                    if result.status:
                        self._warn("deleting damaged chunks", OSError(-result.status, os.strerror(-result.status)))
                    done.append(mended)
                elif asked is not None:
                    completion = self._completion(asked, result)
                    if not self._mend(asked, result, completion):
                        done.append(completion)
        if any(each is None for *_, each in done):
            self._flusher.note_put()
        return done

    def _completion(self, asked: _Asked, result: Result) -> Completion:
        reason = "" if not result.status else os.strerror(-result.status)
        if result.status:
            self._warn(f"a {asked.kind} of {len(asked.keys)} chunks", OSError(-result.status, reason))
        if asked.kind == "set":
            return asked.future, not result.status and all(rc >= 0 for rc in result.each), reason, None
        if asked.kind == "exists":
            return asked.future, not result.status, reason, [rc == 1 for rc in result.each]
        if asked.kind == "delete":
            return asked.future, not result.status, reason, [rc == 0 for rc in result.each]
        return asked.future, not result.status, reason, [rc == size for rc, size in zip(result.each, asked.sizes)]

    def _mend(self, asked: _Asked, result: Result, completion: Completion) -> bool:
        """Delete the chunks of a get that are damaged or of another length, so that they are stored anew. True: drain_completions() has @completion later.

        The engine hears of the get once they are gone: its next set of the same key comes behind the deletion.
        """
        if asked.kind != "get":
            return False
        damaged = [key for key, size, rc in zip(asked.keys, asked.sizes, result.each)
                   if rc in (-errno.EBADMSG, -errno.EMSGSIZE) or 0 <= rc != size]
        if not damaged:
            return False
        try:
            self._mended[self._queue.delete(damaged)] = completion
        except (Error, ValueError) as problem:
            self._warn("deleting damaged chunks", problem)
            return False
        return True

    def close(self) -> None:
        """Wait for requests under way, make chunks durable and close the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._queue.drain(30)
            self._flusher.note_put()
        except (Error, ValueError) as problem:
            self._warn("waiting for requests", problem)
        self._flusher.close()
        try:
            self._queue.close()
            self._store.close()
        except Error as problem:
            self._warn("closing", problem)
        self._poll.close()
        for fd in self._pipe:
            os.close(fd)
