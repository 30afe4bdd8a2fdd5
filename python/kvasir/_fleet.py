# SPDX-License-Identifier: Apache-2.0
"""For kvasir.router: what it knows of the engines and of kv-indexer, and what it says when one is down."""
import contextlib
import itertools
import logging
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ._http import LOST, TIMEOUT, Headers, Refused, within
from ._openai import Prompt, Tokenizer
from .client import AsyncClient, HTTPError, InstanceId, held_tokens
from .select import Request, Selector

SOON_S = 2.0  # a prompt counts as held for that long by the engine that got it, and a request without an answer as light
IN_TOKENS = ("adaptive", "dynamo")  # policies whose costs are tokens
ASKED_MAX = 1 << 17  # tokens of a prompt that kv-indexer is asked for
_log = logging.getLogger("kvasir.router")


class Run:
    """A request that an engine works on, as booked in @books."""
    numbers = itertools.count()

    def __init__(self, books: Selector, request: Request) -> None:
        self.books, self.request, self.name, self.begun = books, request, str(next(self.numbers)), False

    def begin(self) -> None:
        """Note that its answer begins: the prompt is computed."""
        if not self.begun:
            self.begun = True
            self.books.first_token(self.name)


class Engine:
    """An engine as the router sees it. `worker`: its number in @books. `shared`: tokens of the prompt to be placed that it computes
    for others already."""

    def __init__(self, number: InstanceId, url: str, books: Selector, worker: int, connect_s: float, tokenize_s: float) -> None:
        self.number, self.url, self.books, self.worker, self.tokenize_s = number, url.rstrip("/"), books, worker, tokenize_s
        self.tokenizer = Tokenizer(self.url, connect_s)
        books.set_worker(worker)
        self.requests = self.asking = self.asked = self.failures = self.shared = 0
        self.down_until = 0.0  # of time.monotonic(): until then it takes no request while another engine is up
        self.heard = -SOON_S  # of time.monotonic(): when it last answered anything
        self.problem: Optional[str] = None

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Book @run at this engine while it runs."""
        self.requests += 1
        self.books.book(run.name, run.request, self.books.reckon(run.request, self.worker))
        try:
            yield
        finally:
            self.books.free(run.name, lost=not run.begun)

    async def tell(self, path: str, request: Dict[str, Any], body: bytes, client: Headers) -> Prompt:
        """Ask this engine for a request's prompt, for at most tokenize_s."""
        self.asking, self.asked = self.asking + 1, self.asked + 1
        try:
            prompt = await within(self.tokenize_s, self.tokenizer.prompt(path, request, body, client))
            self.heard = time.monotonic()
            return prompt
        finally:
            self.asking -= 1

    async def probe(self, engines: Iterable["Engine"]) -> None:
        """Raise Refused when it takes connections and is silent. It isn't asked when it answered just now, or no other is up."""
        now = time.monotonic()
        if now - self.heard < SOON_S or not any(each.down_until <= now for each in engines if each is not self):
            return
        try:
            await within(self.tokenize_s, self.tokenizer.probe())
        except Refused:
            raise
        except TIMEOUT:
            raise Refused("it takes connections and is silent") from None
        except LOST:
            pass  # it lives
        self.heard = now

    def fail(self, problem: BaseException, retry_s: float) -> None:
        """Note that it is down: no request for @retry_s while another engine is up."""
        if self.down_until <= time.monotonic():
            self.problem = str(problem) or "no answer in time"
            _log.warning("engine %s at %s is down: %s; next try in %g s", self.number, self.url, self.problem, retry_s)
        self.failures += 1
        self.down_until = time.monotonic() + retry_s
        self.tokenizer.forget()

    def state(self) -> Dict[str, Any]:
        """Return what `GET /router` shows of it."""
        up = self.down_until <= time.monotonic()
        load = self.books.load(self.worker)
        return {"url": self.url, "up": up, "running": load.requests, "waiting_tokens": load.waiting, "requests": self.requests,
                "failures": self.failures, "problem": None if up else self.problem}


def booking(engines: Dict[InstanceId, Engine], held: Dict[InstanceId, int], tokens: int) -> Request:
    """Return what the books need of a prompt, of which each engine has @held tokens."""
    return Request(tokens, matches={engines[number].worker: n for number, n in held.items() if number in engines}, block_size=1)


def costs(books: Selector, engines: Dict[InstanceId, Engine], held: Dict[InstanceId, int], tokens: int) -> Dict[InstanceId, Tuple[float, int]]:
    """Return the policy's cost of each engine, and how many requests run there: that decides between equal costs.

    Where costs are tokens, those that it computes for others already, and for this prompt, too, cost nothing.
    """
    choice, candidates = books.explain(booking(engines, held, tokens))
    seen = {each.worker: each for each in candidates}
    shares = choice is not None and choice.policy in IN_TOKENS
    return {number: (seen[engine.worker].cost - shares * seen[engine.worker].factor * min(engine.shared, seen[engine.worker].waiting),
                     seen[engine.worker].requests) for number, engine in engines.items()}


class Plan(NamedTuple):
    """Where a request goes. `held`: tokens of the prompt by engine, as kv-indexer says; `request`: for the books."""
    tokens: int
    held: Dict[InstanceId, int]
    request: Request
    blocks: Any
    engines: List[Engine]


class Indexer:
    """kv-indexer as the router sees it."""

    def __init__(self, url: str, query_s: float, retry_s: float, model_name: str, tenant_id: str) -> None:
        self.url, self.retry_s, self.model_name, self.tenant_id = url, retry_s, model_name, tenant_id
        self.client = AsyncClient(url, timeout=query_s)
        self.failures, self.problem = 0, None  # type: int, Optional[str]
        self._down_until = 0.0

    async def held(self, prompt: Prompt, lora: str, salt: str) -> Dict[InstanceId, int]:
        """Return how many tokens of a prompt each engine holds. Nothing is known while kv-indexer doesn't answer."""
        if not prompt.tokens or time.monotonic() < self._down_until:
            return {}
        tokens, objects = _begin(prompt)
        try:
            found = held_tokens(await self.client.query(tokens, model_name=self.model_name, tenant_id=self.tenant_id, lora_name=lora or None,
                                                        cache_salt=salt or None, mm_objects=objects or None))
        except HTTPError as problem:  # it answered: no engine is registered yet, or the request is not a sensible one
            self._note(None if problem.status in (400, 422) else str(problem))
            return {}
        except (*LOST, LookupError, AttributeError, TypeError) as problem:
            self._down_until = time.monotonic() + self.retry_s
            self._note(str(problem))
            return {}
        self._note(None)
        return found

    def _note(self, problem: Optional[str]) -> None:
        """Remember why it tells nothing, None: it does. One log line says so each time."""
        self.failures += problem is not None
        if problem is not None and self.problem is None:
            _log.warning("kv-indexer at %s tells nothing, load alone decides: %s", self.url, problem)
        if problem is None and self.problem is not None:
            _log.warning("kv-indexer at %s answers again", self.url)
        self.problem = problem

    def state(self) -> Dict[str, Any]:
        """Return what `GET /router` shows of it."""
        return {"url": self.url, "up": self.problem is None, "failures": self.failures, "problem": self.problem}


def _begin(prompt: Prompt) -> Tuple[Sequence[int], Sequence[Dict[str, Any]]]:
    """Return the part of a prompt that kv-indexer is asked for, and the objects that lie in it."""
    tokens, objects = prompt
    if len(tokens) <= ASKED_MAX:
        return tokens, objects
    end = min((each["offset"] for each in objects if each["offset"] + each["length"] > ASKED_MAX), default=ASKED_MAX)
    end = min(end, ASKED_MAX)
    return tokens[:end], [each for each in objects if each["offset"] + each["length"] <= end]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"')


def metrics(state: Dict[str, Any]) -> str:
    """Return a router's state() as Prometheus text."""
    lines = []
    for name, kind, value in (("prompt_tokens_total", "counter", state["prompt_tokens"]), ("held_tokens_total", "counter", state["held_tokens"]),
                              ("indexer_up", "gauge", int(state["indexer"]["up"])),
                              ("indexer_failures_total", "counter", state["indexer"]["failures"])):
        lines += [f"# TYPE kvasir_router_{name} {kind}", f"kvasir_router_{name} {value}"]
    for name, kind, field in (("engine_up", "gauge", "up"), ("engine_running", "gauge", "running"), ("engine_waiting_tokens", "gauge", "waiting_tokens"),
                              ("engine_requests_total", "counter", "requests"), ("engine_failures_total", "counter", "failures")):
        lines.append(f"# TYPE kvasir_router_{name} {kind}")
        lines += [f'kvasir_router_{name}{{engine="{_escaped(number)}"}} {int(engine[field])}' for number, engine in state["engines"].items()]
    return "\n".join(lines) + "\n"
