# SPDX-License-Identifier: Apache-2.0
"""Chunks of an engine's host memory on disk and in an object store, by keys: what connectors of engines are made of.

    tier = kvasir.offload.Offload(memory, chunk_bytes, fingerprint="model", disk="/nvme/kv", disk_bytes="200GiB")
    tier.store(job, keys, chunks)            # chunk numbers in memory; returns at once
    if tier.lookup(key) is kvasir.offload.HIT:
        tier.load(job, [key], [chunk])
    for transfer in tier.finished():
        print(transfer.job, transfer.ok)     # one bool for each key

No call waits, besides drain() and close(). One thread at a time.
"""
import array
import contextlib
import errno
import hashlib
import select
import time
from collections import deque
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

from ._native import Error, Invalid, Memory, NotFound, give_back, lend
from ._options import size_of
from .blocks import BUSY, MISS, NO_BLOCK, ON_DISK, ON_PEER, PENDING, READY, REMOTE, Cache, Chain, Manager, Shape
from .peers import Agent

__all__ = ["ABSENT", "AGAIN", "HIT", "Offload", "Transfer", "size_of"]

ABSENT, HIT, AGAIN = range(3)  # answers of Offload.lookup
_ANSWERS = {MISS: ABSENT, READY: HIT, ON_DISK: HIT, REMOTE: HIT, ON_PEER: HIT, BUSY: HIT, PENDING: AGAIN}
_STAGING = 256 << 20  # bytes of staging buffers, unless said
_MOST_LOST = 65536


def _agent_of(fingerprint: str, key_len: int, listen: Union[str, Sequence[str]], named: Dict[str, Any], options: Dict[str, Any]) -> Agent:
    """Make the agent that lends a manager's blocks."""
    if not options.get("host_bytes"):
        raise Invalid("listen needs host_bytes: peers are lent blocks of the host tier")
    if options.get("host_memory") is None and not options.get("host_pinned"):
        options.setdefault("host_shared", True)  # peers of this machine copy from it themselves
    token = options.pop("peer_token_file", None)
    return Agent(fingerprint=fingerprint, key_len=key_len, listen=listen, **{"token_file": token, **named})


class Transfer(NamedTuple):
    """Result of a job: @ok tells for each key whether its bytes are there (a load), or were taken (a store)."""
    job: int
    loads: bool
    keys: List[bytes]
    ok: List[bool]
    seconds: float
    bytes: int


class _Job:
    """A job under way: in rounds where buffers are needed, since not every chunk may have one at once."""

    __slots__ = ("job", "loads", "keys", "chunks", "ok", "left", "begun", "until", "indices", "bits")

    def __init__(self, job: int, loads: bool, keys: Sequence[bytes], chunks: Iterable[int], timeout: float) -> None:
        self.job, self.loads = job, loads
        self.keys, self.chunks = list(keys), [int(chunk) for chunk in chunks]
        if len(self.keys) != len(self.chunks):
            raise Invalid(f"{len(self.keys)} keys, {len(self.chunks)} chunks")
        self.ok = [False] * len(self.keys)
        self.left = list(range(len(self.keys)))  # indices of keys that no round has settled
        self.begun = time.monotonic()
        self.until = self.begun + timeout
        self.indices: Sequence[int] = ()  # of the round under way: keys, and where the library tells which succeeded
        self.bits: Optional[Memory] = None


_Offload = TypeVar("_Offload", bound="Offload")


class Offload:
    """Chunks of an engine's host memory in the tiers below it.

    @memory: writable, contiguous host memory, of chunks of @chunk_bytes; it stays the caller's. @fingerprint: all that makes
    equal keys mean equal bytes. @timeout: seconds until a chunk that has not moved counts as failed. @forget: seconds for
    which a key whose load failed is ABSENT. @salt: what is in the keys beside the caller's; after a change of the attribute nothing
    of before is found. Other options are those of kvasir.blocks.Manager; without host_bytes a few staging
    buffers carry the chunks.

    @peers: chunks that no tier has are read from other nodes that lend theirs: a list of endpoints, "file:PATH" or "etcd://...".
    @listen: endpoint, or several, at which this one lends its chunks (kvasir.peers.Agent); it needs host_bytes. @peer_options:
    options of that agent, such as tls_cert; peer_token_file is its token_file, too.
    """

    def __init__(self, memory: Any, chunk_bytes: int, *, fingerprint: str, key_len: int = 36, timeout: float = 30.0,
                 forget: float = 30.0, close_timeout: float = 30.0, listen: Union[None, str, Sequence[str]] = None,
                 peer_options: Optional[Dict[str, Any]] = None, salt: bytes = b"", **options: Any) -> None:
        for name in ("disk_bytes", "host_bytes"):
            if name in options:
                options[name] = size_of(options[name])
        if not options.get("host_bytes"):
            options.setdefault("staging_blocks", max(8, min(256, _STAGING // chunk_bytes)))
        self.chunk_bytes, self.key_len = chunk_bytes, key_len
        self.timeout, self.forget, self.salt = timeout, forget, salt
        shape = Shape(layers=1, outer=1, page_size=1, inner=chunk_bytes, dtype_bytes=1)
        with contextlib.ExitStack() as undo:
            agent = None
            if listen:
                agent = undo.enter_context(_agent_of(fingerprint, key_len, listen, peer_options or {}, options))
            self._manager: Manager = undo.enter_context(Manager(shape, key_len=key_len, fingerprint=fingerprint, agent=agent,
                                                                close_timeout=close_timeout, **options))
            lent = None if agent is None else undo.enter_context(agent.lend(self._manager))
            self._cache: Optional[Cache] = self._manager.attach(memory)
            undo.pop_all()
        self.agent, self._lent = agent, lent  # agent: None unless it listens
        # The library uses @memory itself, unless it finds that it can't. What peers have comes through a buffer.
        self._peers = bool(options.get("peers"))
        self._direct = not options.get("host_bytes") and not self._peers
        self._rounds: Dict[int, _Job] = {}  # by the manager's job
        self._waiting: Deque[_Job] = deque()  # without a buffer so far
        self._ended: List[Transfer] = []
        self._lost: Dict[bytes, float] = {}  # keys whose load failed: ABSENT until then

    # -- keys ---------------------------------------------------------------------------------------
    def _name(self, key: bytes) -> bytes:
        """Return @key, or a digest of one that is of another length, and of the salt."""
        if len(key) == self.key_len and not self.salt:
            return bytes(key)
        return hashlib.shake_256(b"kvasir" + self.salt + bytes(key)).digest(self.key_len)

    def _chain(self, keys: Sequence[bytes]) -> Chain:
        return Chain(b"".join([self._name(key) for key in keys]), self.key_len, scattered=True)

    def lookup(self, key: bytes) -> int:
        """Tell whether a chunk is there: HIT, ABSENT, or AGAIN (it is being asked for, or moved). Never waits."""
        until = self._lost.get(key)
        if until is not None:
            if time.monotonic() < until:
                return ABSENT
            del self._lost[key]
        return _ANSWERS[self._manager.lookup(self._chain((key,)))[0]]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count one use of each key."""
        if keys:
            self._manager.touch(self._chain(keys))

    def _lose(self, key: bytes) -> None:
        while len(self._lost) >= _MOST_LOST:
            del self._lost[next(iter(self._lost))]
        self._lost[key] = time.monotonic() + self.forget

    # -- jobs ---------------------------------------------------------------------------------------
    def store(self, job: int, keys: Sequence[bytes], chunks: Iterable[int]) -> None:
        """Store chunks of the memory, which must not change until finished() has the job."""
        self._begin(_Job(job, False, keys, chunks, self.timeout))

    def load(self, job: int, keys: Sequence[bytes], chunks: Iterable[int]) -> None:
        """Load chunks into the memory, which belongs to the library until finished() has the job."""
        self._begin(_Job(job, True, keys, chunks, self.timeout))

    def _begin(self, job: _Job) -> None:
        if not job.loads and job.left and not self._direct:  # what is there already needs no copy
            places = self._manager.lookup(self._chain(job.keys))
            job.left = [i for i in job.left if places[i] not in (READY, ON_DISK, REMOTE)]
            for i, place in enumerate(places):
                job.ok[i] = place in (READY, ON_DISK, REMOTE)
        self._round(job)

    def _round(self, job: _Job) -> None:
        """Begin to copy what has a buffer now; the rest of the job waits for the next round, as long as it may."""
        try:
            if job.left and not self._submit(job):
                if time.monotonic() < job.until:
                    self._waiting.append(job)
                    return
                job.left = []
        except Error as problem:  # told in the transfer's result; the manager has logged why
            if problem.errno == errno.EAGAIN and time.monotonic() < job.until:  # too many jobs
                self._waiting.append(job)
                return
            job.left = []
        if job.bits is None and not job.left:
            self._end(job)

    def _submit(self, job: _Job) -> bool:
        """Queue one round. False: none of the job's chunks has a buffer."""
        if self._direct and self._submit_direct(job):
            return True
        keys, rest = self._chain([job.keys[i] for i in job.left]), max(job.until - time.monotonic(), 0.001)
        pin = self._manager.prepare_load(keys, timeout=rest, in_place=True) if job.loads else self._manager.prepare_store(keys)
        with pin:
            wanted, later = self._sort(job, pin.state())
            if not wanted:
                job.left = [job.left[k] for k in later]
                return not job.left
            blocks = array.array("I", [NO_BLOCK]) * keys.n
            for k in wanted:
                blocks[k] = job.chunks[job.left[k]]
            taken: List[int] = []
            bits = self._bits(keys.n)
            try:
                self._manager.submit(pin, self._attached(), blocks, ok=bits, timeout=rest, _taken=taken)
            finally:
                self._note(job, bits, taken, job.left, [job.left[k] for k in later])
        return True

    def _submit_direct(self, job: _Job) -> bool:
        """Queue all of a job, without buffers. False: this memory's chunks need them."""
        taken: List[int] = []
        bits = self._bits(len(job.keys))
        try:
            self._manager.submit_keys(not job.loads, self._chain(job.keys), self._attached(), array.array("I", job.chunks), ok=bits,
                                      timeout=max(job.until - time.monotonic(), 0.001), _taken=taken)
        except Error as problem:
            if problem.errno != errno.ENOTSUP:
                raise
            self._direct = False
            return False
        finally:
            self._note(job, bits, taken, range(len(job.keys)), [])
        return True

    @staticmethod
    def _bits(n: int) -> Memory:
        """Lend the library one bit for each of @n keys."""
        bits = Memory(bytearray((n + 7) // 8), True)
        lend(bits)
        return bits

    def _note(self, job: _Job, bits: Memory, taken: List[int], indices: Sequence[int], left: List[int]) -> None:
        """Note a round that the library has taken, also when a signal's handler raised meanwhile; else it doesn't use @bits."""
        if not taken or taken[0] < 0:
            give_back(bits)
            return
        job.bits, job.indices, job.left = bits, indices, left
        self._rounds[taken[0]] = job

    def _sort(self, job: _Job, places: bytes) -> Tuple[List[int], List[int]]:
        """Return which keys of a pin this round copies, and which have no buffer. The others are settled."""
        wanted, later = [], []
        for k, place in enumerate(places):
            if place == BUSY:
                later.append(k)
            elif place == PENDING or (place == READY and job.loads):
                wanted.append(k)
            elif place == READY:  # stored meanwhile, for another job
                job.ok[job.left[k]] = True
        return wanted, later

    def _attached(self) -> Cache:
        if self._cache is None:
            raise Invalid("Offload is closed")
        return self._cache

    def _end(self, job: _Job) -> None:
        for key, ok in zip(job.keys, job.ok):
            if job.loads and not ok:
                self._lose(key)
            elif not job.loads and ok:
                self._lost.pop(key, None)
        now = time.monotonic()
        self._ended.append(Transfer(job.job, job.loads, job.keys, job.ok, now - job.begun, sum(job.ok) * self.chunk_bytes))

    def _collect(self) -> None:
        """Settle the rounds that have ended."""
        while True:
            results = self._manager.poll()
            for done in results:
                job = self._rounds.pop(done.id, None)
                if job is None or job.bits is None:
                    continue
                bits, indices = job.bits, job.indices
                told = bytes(bits._owner)
                waiting = set(job.left)
                for k, i in enumerate(indices):
                    if i not in waiting and told[k >> 3] >> (k & 7) & 1:
                        job.ok[i] = True
                job.bits = None
                give_back(bits)
                if job.loads and self._peers:
                    self._again(job, [i for i in indices if i not in waiting])
                self._round(job)
            if not results:
                return

    def _again(self, job: _Job, indices: Sequence[int]) -> None:
        """Leave to the next round what peers have and no buffer was free for, if this round got anything."""
        missing = [i for i in indices if not job.ok[i]]
        if missing and len(missing) < len(indices):
            places = self._manager.lookup(self._chain([job.keys[i] for i in missing]))
            job.left += [i for i, place in zip(missing, places) if place == ON_PEER]

    def finished(self) -> List[Transfer]:
        """Take the results of the jobs that have ended since the last call; go on with the others. Never waits."""
        if self._cache is not None:
            self._collect()
            for _ in range(len(self._waiting)):
                self._round(self._waiting.popleft())
        ended, self._ended = self._ended, []
        return ended

    @property
    def n_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._rounds) + len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a job has not ended, or its result was not taken."""
        return bool(self._rounds or self._waiting or self._ended)

    def drain(self) -> None:
        """Wait until no job uses the memory. Chunks that wait for a buffer fail; finished() has the results."""
        watch = select.poll()
        watch.register(self._manager.fileno(), select.POLLIN)
        for job in self._rounds.values():
            job.until = 0.0
        while self._waiting:
            job = self._waiting.popleft()
            job.left = []
            self._end(job)
        while self._rounds:
            watch.poll(1000)
            self._collect()

    # -- the rest -----------------------------------------------------------------------------------
    def stats(self) -> Dict[str, Any]:
        """Return the statistics of the tiers by the names of kvbm_manager_stats."""
        return self._manager.stats()

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until what was stored has reached the tiers below. Raises Error(ETIMEDOUT)."""
        self._manager.drain(timeout)

    def close(self) -> None:
        """End all jobs, write what was stored, and give the memory back. Raises Error when a device doesn't answer."""
        if self._cache is not None:
            for ident in list(self._rounds):
                with contextlib.suppress(NotFound):  # it has ended
                    self._manager.cancel(ident)
            self.drain()
            self._cache.close()
            self._cache = None
        if self._lent is not None:
            self._lent.close()
        self._manager.close()
        if self.agent is not None:
            self.agent.close()

    def __enter__(self: _Offload) -> _Offload:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
