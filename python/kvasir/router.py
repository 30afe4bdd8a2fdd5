# SPDX-License-Identifier: Apache-2.0
"""Route OpenAI requests over several engines: to the one that holds most of the prompt and has least to do.

    python -m kvasir.router --indexer http://127.0.0.1:8090 --model llama --port 8000 1=http://worker1:8000 2=http://worker2:8000

The IDs are the engines' instance_id in kv-indexer: numbers or names. Router is an ASGI application (uvicorn serves it too) and an example
to change: order() decides, and takes no more than a few lines.
"""
import time
from typing import Any, Awaitable, Callable, Collection, Dict, List, Optional, Sequence

from ._asgi import LOST, TIMEOUT, Message, Receive, Refused, Send, forward, lifespan, read_body, refuse, relay, reply, reply_text, while_connected
from ._fleet import SOON_S, Engine, Indexer, Plan, Run, booking, costs, metrics
from ._json import loads
from ._openai import GENERATES, Prompt, given_tokens
from ._recent import Recent
from .client import InstanceId, as_instance_id
from .select import Selector

__all__ = ["Engine", "Router", "main"]

Tokenize = Callable[[Dict[str, Any]], Awaitable[Sequence[int]]]


class Router:
    """ASGI application that passes requests on to @engines (instance_id: URL).

    @tokenize(request) returns a prompt's tokens; by default an engine tells them. @adapters: names of LoRA adapters among `model`
    of requests. @policy: kvasir.select's, with @params. @retry_s: an engine that is down, and
    kv-indexer likewise, is left alone that long. The longest waits: @query_s for an answer of kv-indexer's, @connect_s for an
    engine to take a connection, @tokenize_s for it to tell tokens, @answer_s for each piece of its answer.
    """

    def __init__(self, indexer: str, engines: Dict[InstanceId, str], *, model_name: str, tenant_id: str = "default",
                 tokenize: Optional[Tokenize] = None, adapters: Collection[str] = (), policy: str = "adaptive",
                 params: Optional[Dict[str, Any]] = None, retry_s: float = 5.0,
                 query_s: float = 1.0, connect_s: float = 2.0, tokenize_s: float = 2.0, answer_s: float = 600.0) -> None:
        ids = {name: as_instance_id(str(name)) for name in engines}  # as kv-indexer's answers have them: "1" is 1
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"two engines have one instance_id: {', '.join(map(repr, engines))}")
        self.books = Selector(policy, params=params, block_size=1, predict_s=None, expiry_s=1e9)  # predicted here: recent
        self.engines = {ids[name]: Engine(ids[name], url, self.books, place, connect_s, tokenize_s)
                        for place, (name, url) in enumerate(engines.items())}
        self.asked = Indexer(indexer, query_s, retry_s, model_name=model_name, tenant_id=tenant_id)
        self.indexer = self.asked.client
        self.tokenize, self.adapters, self.recent = tokenize, adapters, Recent(SOON_S)
        self.retry_s, self.connect_s, self.answer_s = retry_s, connect_s, answer_s
        self.prompt_tokens = self.held_tokens = 0  # of all requests; held by the engine that got them, as kv-indexer said

    def order(self, held: Dict[InstanceId, int], tokens: int) -> List[Engine]:
        """Sort the engines: those that are up, least cost first; then those that failed, the earliest first."""
        now, cost = time.monotonic(), costs(self.books, self.engines, held, tokens)
        return sorted(self.engines.values(), key=lambda each: (max(0.0, each.down_until - now), cost[each.number], each.requests))

    async def prompt(self, scope: Message, request: Dict[str, Any], body: bytes) -> Prompt:
        """Return a request's prompt: the request has the tokens, or @tokenize or an engine tells them.

        At most two engines are asked, another one each time. One that dies of the question raises: the request is for no other.
        """
        tokens = given_tokens(request) if self.tokenize is None else await self.tokenize(request)
        if tokens is not None:
            return Prompt(tokens)
        silent = 0
        for engine in sorted(self.engines.values(), key=lambda each: (each.down_until > time.monotonic(), each.asking, each.asked)):
            try:
                return await engine.tell(scope["path"], request, body, scope["headers"])
            except (Refused, *TIMEOUT) as problem:
                engine.fail(problem, self.retry_s)
                silent += not isinstance(problem, Refused)
                if silent == 2:
                    break
        return Prompt()

    async def plan(self, scope: Message, body: bytes) -> Plan:
        """Return where a request for text goes. Raises one of LOST when an engine dies of the question for its tokens."""
        prompt, held, named = Prompt(), {}, {}  # type: Prompt, Dict[InstanceId, int], Dict[str, Any]
        try:
            request = await loads(body, "prompt")
            prompt = await self.prompt(scope, request, body)
            salt, model = request.get("cache_salt") or "", request.get("model")
            named = {"lora": model if model in self.adapters else "", "salt": salt}
            held = await self.asked.held(prompt, **named)
        except (ValueError, LookupError, AttributeError, TypeError):
            pass  # the engine says what is wrong with the request
        blocks = self.recent.blocks(prompt.tokens, repr(prompt.objects), **named)
        soon = self.recent.find(blocks) if self.asked.problem is None else {}
        for number, engine in self.engines.items():  # what it computes for another request is computed for this one, too
            engine.shared = max(0, soon.get(number, 0) - held.get(number, 0))
        best = {number: max(held.get(number, 0), soon.get(number, 0)) for number in self.engines}
        return Plan(len(prompt.tokens), held, booking(self.engines, best, len(prompt.tokens)), blocks, self.order(best, len(prompt.tokens)))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, until it is answered or the client is gone: the engine sees its connection close then, and stops."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.indexer.close)
        elif scope["type"] == "http":
            await while_connected(self._serve(scope, await read_body(receive), send), receive)

    async def _serve(self, scope: Message, body: bytes, send: Send) -> None:
        if scope["path"] == "/router":
            return await reply(send, 200, self.state())
        if scope["path"] == "/metrics":
            return await reply_text(send, 200, b"text/plain; version=0.0.4", metrics(self.state()).encode())
        try:
            generates = scope["path"] in GENERATES and scope["method"] == "POST"
            plan = await self.plan(scope, body) if generates else Plan(0, {}, booking(self.engines, {}, 0), (), self.order({}, 0))
        except LOST as problem:
            return await refuse(send, 502, f"the engine that was asked for the tokens broke off: {problem}")
        for engine in plan.engines:
            if await self._pass_on(engine, plan, scope, body, send):
                return None
        return await refuse(send, 503, "no engine answers")

    async def _pass_on(self, engine: Engine, plan: Plan, scope: Message, body: bytes, send: Send) -> bool:
        """Give a request to an engine and stream its answer back. False: it is down, and has not seen the request."""
        run = Run(self.books, plan.request)
        self.recent.add(engine.number, plan.blocks)
        with engine.running(run):
            try:
                await engine.probe(self.engines.values())
                answer = await forward(engine.url, scope, body, self.connect_s, self.answer_s)
            except Refused as problem:
                self.recent.forget(engine.number, plan.blocks)
                engine.fail(problem, self.retry_s)
                return False
            except LOST as problem:  # it has seen the request, and may have died of it: that is for no other engine
                self.recent.forget(engine.number, plan.blocks)
                late = isinstance(problem, TIMEOUT)
                await refuse(send, 504 if late else 502, f"the engine {'is silent' if late else 'broke off: ' + str(problem)}")
                return True
            engine.heard, self.prompt_tokens = time.monotonic(), self.prompt_tokens + plan.tokens
            self.held_tokens += min(plan.held.get(engine.number, 0), plan.tokens)
            async for _ in relay(answer, send):
                run.begin()  # a piece has come: the prompt is computed
            return True

    def state(self) -> Dict[str, Any]:
        """Return what `GET /router` shows: kv-indexer, the engines, and how many prompt tokens were held where requests went."""
        return {"prompt_tokens": self.prompt_tokens, "held_tokens": self.held_tokens, "indexer": self.asked.state(),
                "engines": {str(number): engine.state() for number, engine in self.engines.items()}}


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the router as a server."""
    from ._router_main import run  # pylint: disable=import-outside-toplevel
    run(Router, arguments)


if __name__ == "__main__":
    main()
