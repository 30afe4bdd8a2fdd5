# SPDX-License-Identifier: Apache-2.0
"""Route OpenAI requests over several engines: to the one that holds most of the prompt and has least to do.

    python -m kvasir.router --indexer http://127.0.0.1:8090 --model llama --port 8000 1=http://worker1:8000 2=http://worker2:8000

The numbers are the engines' instance_id in kv-indexer. Router is an ASGI application (uvicorn serves it too) and an example
to change: order() decides, and takes no more than a few lines.
"""
import argparse
import json
import time
from typing import Any, Awaitable, Callable, Collection, Dict, List, Optional, Sequence

from ._asgi import LOST, Message, Receive, Send, forward, lifespan, read_body, relay, reply, serve, while_connected
from ._native import Error
from ._openai import GENERATES, fetch_tokens, given_tokens
from .client import AsyncClient, held_tokens

__all__ = ["Engine", "Router", "main"]

Tokenize = Callable[[Dict[str, Any]], Awaitable[Sequence[int]]]


class Engine:
    """An engine as the router sees it. `waiting`: prompt tokens that it computes for requests without an answer yet."""

    def __init__(self, number: int, url: str) -> None:
        self.number, self.url = number, url.rstrip("/")
        self.running = self.waiting = self.requests = 0
        self.down_until = 0.0  # of time.monotonic(): until then it takes no request while another engine is up


class Router:
    """ASGI application that passes requests on to @engines (instance_id: URL).

    @tokenize(request) returns a prompt's tokens; by default an engine's /tokenize does, as vLLM and SGLang have it. @adapters:
    names of LoRA adapters among `model` of requests. @request_tokens: what one running request weighs, in tokens to compute.
    @retry_s: an engine that failed, and kv-indexer likewise, is left alone that long. @query_s, @connect_s: the longest wait for
    an answer of kv-indexer's, and for an engine to take a connection.
    """

    def __init__(self, indexer: str, engines: Dict[int, str], *, model_name: str, tenant_id: str = "default",
                 tokenize: Optional[Tokenize] = None, adapters: Collection[str] = (), request_tokens: int = 256,
                 retry_s: float = 5.0, query_s: float = 1.0, connect_s: float = 2.0) -> None:
        self.engines = {number: Engine(number, url) for number, url in engines.items()}
        self.indexer = AsyncClient(indexer, timeout=query_s)
        self.asked = {"model_name": model_name, "tenant_id": tenant_id}
        self.tokenize, self.adapters, self.request_tokens, self.retry_s = tokenize or self.ask_engine, adapters, request_tokens, retry_s
        self.prompt_tokens = self.held_tokens = 0  # of all requests; held by the engine that got them, as kv-indexer said
        self.connect_s, self._indexer_down_until = connect_s, 0.0

    def order(self, held: Dict[int, int], tokens: int) -> List[Engine]:
        """Sort the engines: those that are up, least work first; then those that failed, the earliest first."""
        now = time.monotonic()

        def work(engine: Engine) -> float:
            return tokens - held.get(engine.number, 0) + engine.waiting + engine.running * self.request_tokens

        return sorted(self.engines.values(), key=lambda each: (max(0.0, each.down_until - now), work(each), each.requests))

    async def ask_engine(self, request: Dict[str, Any]) -> Sequence[int]:
        """Return a prompt's tokens: the request has them, or an engine's /tokenize tells."""
        tokens = given_tokens(request)
        for engine in self.order({}, 0) if tokens is None else ():
            try:
                return await fetch_tokens(engine.url, request, self.connect_s)
            except LOST:
                engine.down_until = time.monotonic() + self.retry_s
        return tokens or []

    async def held(self, request: Dict[str, Any], tokens: Sequence[int]) -> Dict[int, int]:
        """Ask kv-indexer how many tokens of the prompt each engine holds. Nothing is known while it doesn't answer."""
        if not tokens or time.monotonic() < self._indexer_down_until:
            return {}
        salt, model = request.get("cache_salt") or None, request.get("model")
        try:
            return held_tokens(await self.indexer.query(tokens, cache_salt=salt, lora_name=model if model in self.adapters else None, **self.asked))
        except Error:
            return {}  # it answered: no engine is registered yet, or the request is not a sensible one
        except LOST:
            self._indexer_down_until = time.monotonic() + self.retry_s
            return {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, until it is answered or the client is gone: the engine sees its connection close then, and stops."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.indexer.close)
        elif scope["type"] == "http":
            await while_connected(self._serve(scope, await read_body(receive), send), receive)

    async def _serve(self, scope: Message, body: bytes, send: Send) -> None:
        tokens, held = [], {}  # type: Sequence[int], Dict[int, int]
        if scope["path"] == "/router":
            return await reply(send, 200, self.state())
        if scope["path"] in GENERATES and scope["method"] == "POST":
            try:
                request = json.loads(body)
                tokens = await self.tokenize(request)
                held = await self.held(request, tokens)
            except (*LOST, KeyError, AttributeError, TypeError):
                pass  # the engine says what is wrong with the request
        for engine in self.order(held, len(tokens)):
            if await self._pass_on(engine, len(tokens), held.get(engine.number, 0), scope, body, send):
                return None
        return await reply(send, 503, {"error": {"message": "no engine answers", "type": "unavailable", "code": 503}})

    async def _pass_on(self, engine: Engine, tokens: int, held: int, scope: Message, body: bytes, send: Send) -> bool:
        """Give a request to an engine and stream its answer back. False: it is down, and nothing was sent."""
        compute = max(0, tokens - held)
        engine.running, engine.waiting, engine.requests = engine.running + 1, engine.waiting + compute, engine.requests + 1
        try:
            answer = await forward(engine.url, scope, body, self.connect_s)
            if answer is None:
                engine.down_until = time.monotonic() + self.retry_s
                return False
            self.prompt_tokens, self.held_tokens = self.prompt_tokens + tokens, self.held_tokens + min(held, tokens)
            async for _ in relay(answer, send):
                engine.waiting, compute = engine.waiting - compute, 0  # a piece has come: the prompt is computed
            return True
        finally:
            engine.running, engine.waiting = engine.running - 1, engine.waiting - compute

    def state(self) -> Dict[str, Any]:
        """Return what `GET /router` shows: the engines, and how many prompt tokens were held where requests went."""
        return {"prompt_tokens": self.prompt_tokens, "held_tokens": self.held_tokens, "engines": {
            str(each.number): {"url": each.url, "up": each.down_until <= time.monotonic(), "running": each.running,
                               "waiting_tokens": each.waiting, "requests": each.requests} for each in self.engines.values()}}


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the router as a server."""
    parser = argparse.ArgumentParser(prog="python -m kvasir.router", description="Route OpenAI requests by prefix and load.")
    parser.add_argument("engines", nargs="+", metavar="ID=URL", help="an engine: its instance_id in kv-indexer and its URL")
    parser.add_argument("--indexer", default="http://127.0.0.1:8090", help="URL of kv-indexer (default: %(default)s)")
    parser.add_argument("--model", required=True, help="model_name that the engines are registered with")
    parser.add_argument("--tenant", default="default", help="tenant_id that the engines are registered with (default: %(default)s)")
    parser.add_argument("--adapter", action="append", default=[], help="name of a LoRA adapter that requests name as `model`; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        engines = {int(number): url for number, url in (engine.split("=", 1) for engine in given.engines)}
    except ValueError:
        parser.error("an engine is written ID=URL, such as 1=http://worker1:8000")

    serve(Router(given.indexer, engines, model_name=given.model, tenant_id=given.tenant, adapters=given.adapter), given.host, given.port)


if __name__ == "__main__":
    main()
