# SPDX-License-Identifier: Apache-2.0
"""Choose the worker for a prompt, and book it.

    selector = kvasir.select.Selector()
    selector.set_worker(1)
    selector.set_worker(2)
    request = Request(tokens=4096, hashes=sequence_hashes(blocks), matches=index.find(blocks))
    choice = selector.select(request)          # .worker computes choice.uncovered of the tokens
    selector.book("id", request, choice)       # then send it there
    selector.first_token("id")                 # its prompt is computed
    selector.free("id")                        # its answer is over

kv_select.h explains policies, predictions, constraints and the queue. Times are time.monotonic_ns() unless they are given. A
selector may be used by any number of threads: it has a lock.
"""
import ctypes
import errno
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi
from ._native import Error, Handle, Invalid, call, load, numbers
from .index import Match, Numbers

__all__ = ["Candidate", "Choice", "FCFS", "Load", "POLICIES", "Request", "SHORTEST", "Selector"]

_c = load("kvselect")
FCFS, SHORTEST = _abi.KVSEL_FCFS, _abi.KVSEL_SHORTEST
Holder = Tuple[int, int]  # worker, rank
Id = Union[str, bytes]


def _names(function: Any) -> List[str]:
    found: List[str] = []
    while True:
        name = function(len(found))
        if name is None:
            return found
        found.append(name.decode())


POLICIES = _names(_c.kvsel_policy_name)
_WHY, _REASONS = _names(_c.kvsel_why_name), _names(_c.kvsel_reason_name)


class Choice(NamedTuple):
    """A choice; see kvsel_choice in kv_select.h."""
    worker: int
    rank: int
    prefill: Optional[Holder]  # of a pair: the worker that computes the prompt, None where it is the same
    why: str                   # cost, tie, pin, session, chance
    policy: str
    held: Tuple[int, ...]      # tokens, cumulative by tier
    predicted: int             # tokens
    uncovered: int             # tokens
    cost: float
    blocks: int
    candidates: int
    left_out: int


class Candidate(NamedTuple):
    """A worker as a decision saw it; see kvsel_candidate in kv_select.h. `reason`: "fits", or why it was left out."""
    worker: int
    rank: int
    reason: str
    cost: float
    uncovered: float
    waiting: float
    context: float
    requests: int
    queued: int
    blocks: float
    factor: float
    extra: float
    held: int
    predicted: int


class Load(NamedTuple):
    """The load of a worker; see kvsel_load in kv_select.h."""
    worker: int
    rank: int
    waiting: int
    context: int
    blocks: int
    requests: int
    queued: int
    speed: float
    factor: float
    known: bool


def _texts(items: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(items))(*(item.encode() for item in items))


def _address(items: Any) -> Optional[int]:
    return ctypes.addressof(items) if items is not None and len(items) else None


class Request:
    """What a decision needs of a request; see kvsel_request in kv_select.h.

    @matches: kvasir.index matches, or held tokens by worker or by (worker, rank). @hashes: sequence hashes of the full blocks.
    @block_size is the selector's.
    """

    def __init__(self, tokens: int, hashes: Numbers = (), matches: Union[Iterable[Match], Dict[Any, int]] = (), *, block_size: int = 16,
                 lora: Optional[str] = None, session: Optional[str] = None, pinned: Optional[Holder] = None,
                 allowed: Optional[Iterable[int]] = None, avoided: Sequence[Holder] = (), required: Sequence[str] = (),
                 preferred: Optional[Dict[str, float]] = None, pair: bool = False, domain: Optional[str] = None, domain_weight: float = 0,
                 whole_tokens: int = 0, priority: int = 0, jump_s: float = 0, released: bool = False, policy: Optional[str] = None,
                 params: Optional[Dict[str, Any]] = None) -> None:
        if not 0 <= tokens < 1 << 32:
            raise Invalid(f"no number of tokens: {tokens}")
        if policy is not None and policy not in POLICIES:
            raise Invalid(f"no such policy: {policy}; there are {', '.join(POLICIES)}")
        names, address, n = numbers(hashes, "Q")
        found = self._matches(matches, block_size)
        among = None if allowed is None else tuple(allowed)
        list_of = None if among is None else (ctypes.c_uint64 * max(1, len(among)))(*among)
        pin = None if pinned is None else _abi.kv_holder(*pinned)
        failed = (_abi.kv_holder * len(avoided))(*(_abi.kv_holder(*holder) for holder in avoided))
        must, wish = _texts(required), preferred or {}
        labels = _texts(list(wish))
        wishes = (_abi.kvsel_preference * len(wish))(*(_abi.kvsel_preference(label, weight) for label, weight in zip(labels, wish.values())))
        numbers_of = None if params is None else _params(params)
        self._keep = (names, found, list_of, pin, failed, must, labels, wishes, numbers_of)
        self.struct = _abi.kvsel_request(
            tokens=tokens, hashes=address if n else None, n_hashes=n, matches=_address(found), n_matches=len(found),
            policy=policy.encode() if policy else None, params=ctypes.addressof(numbers_of) if numbers_of is not None else None,
            lora=lora.encode() if lora else None, session=session.encode() if session else None,
            pinned=ctypes.addressof(pin) if pin is not None else None, allowed=_address(list_of),
            n_allowed=len(among or ()), avoided=_address(failed), n_avoided=len(failed),
            required=_address(must), n_required=len(must), preferred=_address(wishes), n_preferred=len(wishes),
            stage=_abi.KVSEL_PAIR if pair else _abi.KVSEL_WHOLE, priority=priority, domain=domain.encode() if domain else None,
            domain_weight=domain_weight, whole_tokens=whole_tokens, jump_s=jump_s, released=released)

    @staticmethod
    def _matches(matches: Union[Iterable[Match], Dict[Any, int]], block_size: int) -> Any:
        given: List[Tuple[Any, Any]]
        if not isinstance(matches, dict):
            given = [((each.worker, each.rank), (each.device, each.host, each.disk, each.external)) for each in matches]
        else:
            given = [(name if isinstance(name, tuple) else (name, 0), (held // block_size,) * 4) for name, held in matches.items()]
        if any(min(reach) < 0 for _, reach in given):
            raise Invalid("held tokens are less than none")  # ctypes would make many of them
        found = (_abi.kvi_match * len(given))()
        for match, ((worker, rank), reach) in zip(found, given):
            match.holder.worker, match.holder.rank = worker, rank
            match.reach[:] = reach
        return found


def _params(given: Dict[str, Any]) -> Any:
    """Make a kvsel_params of numbers by their names. 0 means 0 here, not the default."""
    made, known = _abi.kvsel_params(), {name for name, *_ in _abi.kvsel_params._fields_[1:]}
    for name, value in given.items():
        if name not in known:
            raise Invalid(f"no such number of a policy: {name}")
        if name == "tier_cost":
            made.tier_cost[:len(value)] = [each or -1 for each in value]
        else:
            setattr(made, name, value or -1)
    return made


def _choice(made: Any) -> Choice:
    prefill = (made.prefill.worker, made.prefill.rank) if made.paired else None
    return Choice(made.worker.worker, made.worker.rank, prefill, _WHY[made.why], made.policy.decode(), tuple(made.held), made.predicted,
                  made.uncovered, made.cost, made.blocks, made.candidates, made.left_out)


def _load(made: Any) -> Load:
    return Load(made.holder.worker, made.holder.rank, made.waiting, made.context, made.blocks, made.requests, made.queued, made.speed,
                made.factor, bool(made.known))


def _id(name: Id) -> bytes:
    return name.encode() if isinstance(name, str) else name


class Selector(Handle):
    """Knows the workers of one model and the requests that run on them, and chooses by a policy."""

    def __init__(self, policy: str = "adaptive", *, params: Optional[Dict[str, Any]] = None, seed: int = 0, block_size: int = 16,
                 stride: int = 0, predict_s: Optional[float] = 2.0, expiry_s: float = 300.0, session_s: float = 0.0,
                 session_waiting: int = 0, queue_waiting: int = 0, queue_order: int = FCFS, queue_max: int = 0, queue_max_tokens: int = 0,
                 queue_age_s: float = 0.0, queue_max_wait_s: float = 0.0, equal_speed: bool = False) -> None:
        if policy not in POLICIES:
            raise Invalid(f"no such policy: {policy}; there are {', '.join(POLICIES)}")
        numbers_of = None if params is None else _params(params)
        opts = _abi.kvsel_opts(
            policy=policy.encode(), params=None if numbers_of is None else ctypes.addressof(numbers_of), seed=seed, block_size=block_size,
            stride=stride, predict_ns=2**64 - 1 if predict_s is None else int(predict_s * 1e9), expiry_ns=int(expiry_s * 1e9),
            session_ns=int(session_s * 1e9), session_waiting=session_waiting, queue_waiting=queue_waiting, queue_order=queue_order,
            queue_max=queue_max, queue_max_tokens=queue_max_tokens, queue_age_ns=int(queue_age_s * 1e9),
            queue_max_wait_ns=int(queue_max_wait_s * 1e9), equal_speed=equal_speed)
        address = ctypes.c_void_p()
        call(_c.kvsel_create, ctypes.byref(opts), ctypes.byref(address))
        self._own(address.value or 0, _c.kvsel_destroy)
        self._lock = threading.Lock()

    def _about(self) -> str:
        stats = self.stats()
        return f"workers={stats['workers']} bookings={stats['bookings']}"

    def _locked(self, function: Any, *args: Any) -> int:
        with self._lock:
            return self._call(function, *args)

    # -- workers -----------------------------------------------------------------------------------
    def set_worker(self, worker: int, rank: int = 0, *, prefill: bool = True, decode: bool = True, max_requests: int = 0, max_loras: int = 0,
                   draining: bool = False, speed: float = 0, trust: float = 1, capacity: int = 0, labels: Sequence[str] = (),
                   loras: Sequence[str] = ()) -> None:
        """Add a worker, or replace what is known of it. Its bookings stay."""
        if not prefill and not decode:
            raise Invalid("a worker without a role")
        roles = (_abi.KVSEL_PREFILL if prefill else 0) | (_abi.KVSEL_DECODE if decode else 0)
        named, loaded = _texts(labels), _texts(loras)
        made = _abi.kvsel_worker(holder=_abi.kv_holder(worker, rank), roles=roles, max_requests=max_requests, max_loras=max_loras,
                                 draining=draining, speed=speed, trust=trust or -1, capacity=capacity, labels=_address(named),
                                 n_labels=len(named), loras=_address(loaded), n_loras=len(loaded))
        self._locked(_c.kvsel_set_worker, ctypes.byref(made))

    def remove_worker(self, worker: int, rank: int = 0) -> None:
        """Choose a worker no more. Its bookings stay until they end. Raises NotFound."""
        self._locked(_c.kvsel_remove_worker, _abi.kv_holder(worker, rank))

    def fail_worker(self, worker: int, rank: int = 0, *, seconds: float, now_ns: Optional[int] = None) -> None:
        """Leave a worker out for @seconds; 0: it is well again. Raises NotFound."""
        until = self._now(now_ns) + int(seconds * 1e9) if seconds else 0
        self._locked(_c.kvsel_fail_worker, _abi.kv_holder(worker, rank), until)

    def trust_worker(self, worker: int, rank: int = 0, *, trust: float) -> None:
        """Set the share of a worker's matches that counts: less without a live event stream. Raises NotFound."""
        self._locked(_c.kvsel_trust_worker, _abi.kv_holder(worker, rank), trust)

    def set_lora(self, worker: int, lora: str, loaded: bool = True, rank: int = 0) -> None:
        """Note whether a worker has an adapter loaded. Raises NotFound."""
        self._locked(_c.kvsel_set_lora, _abi.kv_holder(worker, rank), lora.encode(), loaded)

    def load(self, worker: int, rank: int = 0) -> Load:
        """Return the load of a worker. Raises NotFound."""
        made = _abi.kvsel_load()
        self._locked(_c.kvsel_get_load, _abi.kv_holder(worker, rank), ctypes.byref(made))
        return _load(made)

    def loads(self) -> List[Load]:
        """Return the loads of all workers."""
        with self._lock:
            made = (_abi.kvsel_load * self._call(_c.kvsel_get_loads, None, 0))()
            self._call(_c.kvsel_get_loads, made, len(made))
        return [_load(each) for each in made]

    # -- choices -----------------------------------------------------------------------------------
    @staticmethod
    def _now(now_ns: Optional[int]) -> int:
        return time.monotonic_ns() if now_ns is None else now_ns

    def select(self, request: Request, *, now_ns: Optional[int] = None) -> Choice:
        """Choose a worker; books nothing. Raises Error: EHOSTUNREACH, no worker fits; EAGAIN, hold the request."""
        made = _abi.kvsel_choice()
        self._locked(_c.kvsel_select, ctypes.byref(request.struct), self._now(now_ns), ctypes.byref(made))
        return _choice(made)

    def explain(self, request: Request, *, now_ns: Optional[int] = None) -> Tuple[Optional[Choice], List[Candidate]]:
        """Choose as select(), and return all workers with the terms of their costs. The choice is None where no worker fits."""
        made, now = _abi.kvsel_choice(), self._now(now_ns)
        with self._lock:
            found = (_abi.kvsel_candidate * self._call(_c.kvsel_get_loads, None, 0))()
            self._call(_c.kvsel_explain, ctypes.byref(request.struct), now, ctypes.byref(made), found, len(found))
        return _choice(made) if made.candidates else None, [
            Candidate(each.holder.worker, each.holder.rank, _REASONS[each.reason], each.cost, each.uncovered, each.waiting, each.context,
                      int(each.requests), each.queued, each.blocks, each.factor, each.extra, each.held, each.predicted) for each in found]

    def reckon(self, request: Request, worker: int, rank: int = 0, *, now_ns: Optional[int] = None) -> Choice:
        """Return the choice of a worker that somebody else has chosen, for book()."""
        made = _abi.kvsel_choice()
        self._locked(_c.kvsel_reckon, ctypes.byref(request.struct), _abi.kv_holder(worker, rank), self._now(now_ns), ctypes.byref(made))
        return _choice(made)

    # -- books -------------------------------------------------------------------------------------
    def book(self, name: Id, request: Request, choice: Choice, *, now_ns: Optional[int] = None) -> None:
        """Book a request under @name. Raises Error(EEXIST) when the name is in use."""
        made = _abi.kvsel_choice(worker=_abi.kv_holder(choice.worker, choice.rank), uncovered=choice.uncovered, paired=choice.prefill is not None,
                                 prefill=_abi.kv_holder(*(choice.prefill or (choice.worker, choice.rank))))
        self._locked(_c.kvsel_book, _id(name), len(_id(name)), ctypes.byref(request.struct), ctypes.byref(made), self._now(now_ns))

    def first_token(self, name: Id, *, now_ns: Optional[int] = None) -> None:
        """Note a request's first token. A second time changes nothing. Raises NotFound."""
        self._locked(_c.kvsel_first_token, _id(name), len(_id(name)), self._now(now_ns))

    def output(self, name: Id, tokens: int = 0, *, now_ns: Optional[int] = None) -> None:
        """Note further tokens of output, and progress. Raises NotFound."""
        if tokens < 0:
            raise Invalid(f"no number of tokens: {tokens}")
        self._locked(_c.kvsel_output, _id(name), len(_id(name)), tokens, self._now(now_ns))

    def free(self, name: Id, *, lost: bool = False, now_ns: Optional[int] = None) -> None:
        """Free a booking; @lost: the worker didn't compute it. Raises NotFound, also the second time."""
        end = _abi.KVSEL_LOST if lost else _abi.KVSEL_DONE
        self._locked(_c.kvsel_free, _id(name), len(_id(name)), end, self._now(now_ns))

    def expire(self, *, now_ns: Optional[int] = None) -> int:
        """Free the bookings without progress for expiry_s; returns how many."""
        return self._locked(_c.kvsel_expire, self._now(now_ns), None, None)

    def announced(self, worker: int, block: int, rank: int = 0) -> int:
        """Note that a worker's event named a block, by its sequence hash; returns how many predictions ended."""
        return self._locked(_c.kvsel_announced, _abi.kv_holder(worker, rank), block)

    def stats(self) -> Dict[str, Any]:
        """Return counts by the names of kvsel_stats."""
        made = _abi.kvsel_stats()
        self._locked(_c.kvsel_get_stats, ctypes.byref(made))
        return {name: getattr(made, name) for name, *_ in made._fields_[1:]}

    # -- the queue ---------------------------------------------------------------------------------
    def hold(self, ticket: int, request: Request, *, now_ns: Optional[int] = None) -> None:
        """Hold a request for which select() raised EAGAIN. Raises Error(ENOBUFS) when the queue is full: answer 429."""
        self._locked(_c.kvsel_queue_put, ticket, ctypes.byref(request.struct), self._now(now_ns))

    def next(self, *, now_ns: Optional[int] = None) -> Optional[int]:
        """Take the next request from the queue, if a worker has room: select it with `released`, and book it."""
        return self._ticket(_c.kvsel_queue_next, now_ns)

    def late(self, *, now_ns: Optional[int] = None) -> Optional[int]:
        """Take a request that has waited for queue_max_wait_s from the queue."""
        return self._ticket(_c.kvsel_queue_late, now_ns)

    def _ticket(self, function: Any, now_ns: Optional[int]) -> Optional[int]:
        ticket = ctypes.c_uint64()
        try:
            self._locked(function, self._now(now_ns), ctypes.byref(ticket))
        except Error as problem:
            if problem.errno == errno.EAGAIN:
                return None
            raise
        return ticket.value

    def drop(self, ticket: int) -> None:
        """Take a request from the queue: its client is gone. Raises NotFound."""
        self._locked(_c.kvsel_queue_drop, ticket)
