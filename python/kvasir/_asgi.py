# SPDX-License-Identifier: Apache-2.0
"""A server for ASGI applications over HTTP/1.1 for kvasir.router, and what such an application needs of a proxy."""
import asyncio
import json
import signal
import urllib.parse
from typing import Any, AsyncIterator, Awaitable, Callable, Coroutine, Dict, List, Optional

import h11

from ._http import HEAD_MAX, LOST, TIMEOUT, Answer, Headers, Refused, Wire, end_to_end, fetch, within

__all__ = ["LOST", "TIMEOUT", "Answer", "Json", "Message", "Receive", "Refused", "Send", "fetch", "forward", "lifespan", "listen",
           "read_body", "refuse", "relay", "reply", "reply_text", "serve", "while_connected"]

Message = Dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Json = Dict[str, Any]

BODY_MAX = 64 << 20  # bytes of a request
BODIES_MAX = 256 << 20  # bytes of all requests that have not come whole yet
BODY_S, BODY_RATE = 30.0, 1 << 16  # a body may take that long, and a second more for each so many bytes
READ_S = 30.0  # longest wait for a head's rest, or a piece of a body
KEEP_S = 90.0  # how long a connection waits for its next request
WRITE_S = 300.0  # longest wait for a client that doesn't read its answer
CONNECTIONS = 1000  # beyond them the one that has waited longest for a request is closed


# -- what an application needs ------------------------------------------------------------------------
async def lifespan(receive: Receive, send: Send, close: Callable[[], Awaitable[None]]) -> None:
    """Serve a scope of type "lifespan": nothing to start, and close() at the end."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await close()
    await send({"type": "lifespan.shutdown.complete"})


async def read_body(receive: Receive) -> bytes:
    """Return a request's body."""
    message = await receive()
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    body, more = bytearray(message.get("body", b"")), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def while_connected(serve: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Await serve() until it ends, or cancel it when the client, whose request has been read, is gone."""
    served, gone = asyncio.ensure_future(serve), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({served, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (gone, served):
            task.cancel()
        results = await asyncio.gather(served, gone, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


async def reply_text(send: Send, status: int, kind: bytes, data: bytes) -> None:
    """Answer with @data of the content type @kind."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def reply(send: Send, status: int, body: Json) -> None:
    """Answer with JSON."""
    await reply_text(send, status, b"application/json", json.dumps(body).encode())


async def refuse(send: Send, status: int, message: str) -> None:
    """Answer with an error as OpenAI's API has them."""
    await reply(send, status, {"error": {"message": message, "type": "unavailable", "code": status}})


async def forward(url: str, scope: Message, body: bytes, connect_s: float, answer_s: float) -> Answer:
    """Pass a client's request on to the server @url. Raises Refused when that is down: no connection, or 502, 503, 504.

    Raises another of LOST when the connection breaks later: the server has seen the request, and may have died of it.
    """
    path: bytes = scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()
    target = (path + (b"?" if scope["query_string"] else b"") + scope["query_string"]).decode("ascii")
    answer = await fetch(url, scope["method"], target, end_to_end(scope["headers"]), body, connect_s, answer_s)
    if answer.status in (502, 503, 504):
        answer.close()
        raise Refused(f"it answers {answer.status}")
    return answer


async def relay(answer: Answer, send: Send) -> AsyncIterator[None]:
    """Send a server's answer on as it comes, and close it. Yields before each piece of its body."""
    try:
        lengths: Headers = [(name, value) for name, value in answer.headers if name == b"content-length"]
        await send({"type": "http.response.start", "status": answer.status, "headers": end_to_end(answer.headers) + lengths})
        async for piece in answer.body:
            yield
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        answer.close()


# -- the server ---------------------------------------------------------------------------------------
class _Refusal(Exception):
    """A request that the server refuses: with this status, then the connection is closed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Exchange:
    """One request of a client and the application's answer to it."""

    def __init__(self, wire: Wire, state: h11.Connection, body: bytes, silent: bool) -> None:
        self.wire, self.state = wire, state
        self.body: Optional[bytes] = body
        self.silent = silent  # an answer without a body

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while await self.wire.more():  # the next request comes already
            if len(self.wire.left) > HEAD_MAX:
                await asyncio.Event().wait()  # no more is read before this one is answered
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Headers = list(message.get("headers", ()))
            if message["status"] in (204, 304):  # the end of their head ends them
                self.silent = True
                headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
            self._write(h11.Response(status_code=message["status"], headers=headers))
            return
        piece = message.get("body", b"")
        if piece and not self.silent:
            self._write(h11.Data(data=piece))
        if not message.get("more_body", False):
            self._write(h11.EndOfMessage())
        busy = self.wire.writer.transport.get_write_buffer_size()
        await (within(WRITE_S, self.wire.writer.drain()) if busy else self.wire.writer.drain())

    def _write(self, event: Any) -> None:
        self.wire.writer.write(self.state.send(event) or b"")


class _Server:
    """Connections of clients, and what they may hold together."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.idle: Dict[asyncio.StreamWriter, None] = {}  # those without a whole head, the longest waiting first
        self.open = 0
        self.bodies: Dict[asyncio.StreamWriter, int] = {}  # bytes of each body that has not come whole
        self.held = 0  # by all of them

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until its end."""
        self.open += 1
        wire = Wire(reader, writer)
        try:
            if self.open > CONNECTIONS:
                if not self.idle:
                    raise _Refusal(503)
                next(iter(self.idle)).close()
            while await self._request(wire):
                pass
        except _Refusal as problem:
            self._refuse(writer, problem.status)
        except h11.RemoteProtocolError as problem:
            self._refuse(writer, problem.error_status_hint)
        except LOST:
            pass  # the client is gone
        finally:
            self.open -= 1
            writer.close()

    @staticmethod
    def _refuse(writer: asyncio.StreamWriter, status: int) -> None:
        if not writer.is_closing():
            writer.write(b"HTTP/1.1 %d \r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)

    async def _head(self, wire: Wire, state: h11.Connection) -> h11.Request:
        self.idle[wire.writer] = None
        try:
            if not wire.left and not await within(KEEP_S, wire.more()):
                raise EOFError("the client is gone")
            request = await within(READ_S, wire.head(state))
        finally:
            del self.idle[wire.writer]
        assert isinstance(request, h11.Request)
        if request.method == b"CONNECT" or not request.target.startswith(b"/"):
            raise _Refusal(400)
        return request

    async def _body(self, wire: Wire, state: h11.Connection, declared: int) -> bytes:
        if declared > BODY_MAX:
            raise _Refusal(413)
        if state.they_are_waiting_for_100_continue:
            none: Headers = []
            wire.writer.write(state.send(h11.InformationalResponse(status_code=100, headers=none)) or b"")
        clock = asyncio.get_running_loop().time
        body, until = bytearray(), clock() + BODY_S
        pieces = wire.body(state, READ_S)
        try:
            while True:
                piece = await within(max(0.0, until - clock()), pieces.__anext__())
                body += piece
                until += len(piece) / BODY_RATE
                self._account(wire.writer, len(body))
        except StopAsyncIteration:
            return bytes(body)
        except TIMEOUT:
            raise _Refusal(408) from None
        finally:
            self._forget(wire.writer)

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        self.held -= self.bodies.pop(writer, 0)

    def _account(self, writer: asyncio.StreamWriter, held: int) -> None:
        """Note that a body has come so far. Beyond BODIES_MAX the largest of all ends."""
        if held > BODY_MAX:
            raise _Refusal(413)
        self.held += held - self.bodies.get(writer, 0)
        self.bodies[writer] = held
        while self.held > BODIES_MAX:
            largest = max(self.bodies, key=self.bodies.__getitem__)
            if largest is writer:
                raise _Refusal(503)
            self._forget(largest)
            self._refuse(largest, 503)
            largest.close()

    async def _request(self, wire: Wire) -> bool:
        """Serve one request; whether the connection stays."""
        state = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        request = await self._head(wire, state)
        fields = dict(request.headers)
        exchange = _Exchange(wire, state, await self._body(wire, state, int(fields.get(b"content-length", b"0"))),
                             request.method == b"HEAD")
        path, _, query = request.target.partition(b"?")
        peer, own = (wire.writer.get_extra_info(name) for name in ("peername", "sockname"))
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": request.http_version.decode(), "scheme": "http",
                 "method": request.method.decode(), "path": urllib.parse.unquote(path.decode("ascii")), "raw_path": path, "root_path": "",
                 "query_string": query, "headers": list(request.headers), "client": peer, "server": own}
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except LOST:
            return False  # the client is gone, or an engine's answer broke: the client sees that it isn't whole
        return state.our_state is h11.DONE


async def listen(app: App, host: str, port: int) -> asyncio.AbstractServer:
    """Serve the ASGI application @app over HTTP; port 0 picks a free one."""
    return await asyncio.start_server(_Server(app).connection, host, port, limit=HEAD_MAX)


async def _serve(app: App, host: str, port: int) -> None:
    server = await listen(app, host, port)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sockets: List[Any] = list(getattr(server, "sockets", ()))
    print("listening on http://%s:%d" % sockets[0].getsockname()[:2], flush=True)
    await stop.wait()
    server.close()  # and no wait_closed(): clients may stay connected for as long as they like


def serve(app: App, host: str, port: int) -> None:
    """Print the address, and serve until SIGINT or SIGTERM."""
    asyncio.run(_serve(app, host, port))
