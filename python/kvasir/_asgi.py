# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over asyncio for kvasir.router: a server for ASGI applications, what these need, and requests whose answers stream."""
import asyncio
import functools
import json
import re
import signal
import ssl
import urllib.parse
from typing import Any, AsyncIterator, Awaitable, Callable, Coroutine, Dict, List, Optional, Tuple

Headers = List[Tuple[bytes, bytes]]
Message = Dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Json = Dict[str, Any]

BODY_MAX = 64 << 20  # bytes of a request
PIECE = 1 << 16  # bytes read from an engine at a time
LOST = (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError)  # all that a broken peer can raise
_NAME, _CONTROL = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(rb"[\0-\x08\n-\x1f\x7f]")
_HOP = {b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


async def _head(reader: asyncio.StreamReader) -> Tuple[List[bytes], Headers, Dict[bytes, bytes]]:
    """Read a head: words of the first line, headers with their names in lower case, the same as a dictionary.

    What two servers may read in two ways is a ValueError: spaces and control characters, a second Content-Length.
    """
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise ValueError("a malformed header")
        headers.append((name.lower(), value.strip(b" \t")))
    if _CONTROL.search(first) or sum(name == b"content-length" for name, _ in headers) > 1:
        raise ValueError("a malformed head")
    return first.split(b" ", 2), headers, dict(headers)


def _length(fields: Dict[bytes, bytes]) -> Optional[int]:
    """Return the Content-Length, None without one. Python's int() takes more than digits."""
    text = fields.get(b"content-length")
    if text is not None and not (text.isdigit() and len(text) < 20):
        raise ValueError("a malformed Content-Length")
    return None if text is None else int(text)


def end_to_end(headers: Headers) -> Headers:
    """Return the headers that a proxy passes on."""
    return [(name, value) for name, value in headers if name not in _HOP and not name.startswith(b"proxy-")]


class Answer:
    """Answer of a server: status, headers, and the body in pieces as they come."""

    def __init__(self, status: int, headers: Headers, body: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        self.status, self.headers, self.body, self._writer = status, headers, body, writer

    def close(self) -> None:
        """Close the connection; the server sees it when the body isn't complete."""
        self._writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = left = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        while left:
            piece = await reader.read(min(left, PIECE))
            if not piece:
                raise EOFError("the answer ends within a chunk")
            left -= len(piece)
            yield piece
        line = await reader.readuntil(b"\r\n")
        while not size and line != b"\r\n":  # trailers
            line = await reader.readuntil(b"\r\n")
        if not size:
            return


async def _body(reader: asyncio.StreamReader, fields: Dict[bytes, bytes], empty: bool) -> AsyncIterator[bytes]:
    if empty:
        return
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        async for piece in _chunks(reader):
            yield piece
        return
    length = _length(fields)
    left = -1 if length is None else length
    while left:
        piece = await reader.read(PIECE if left < 0 else min(left, PIECE))
        if not piece:
            if left > 0:
                raise EOFError("the answer is shorter than its Content-Length")
            return
        left -= len(piece) if left > 0 else 0
        yield piece


async def fetch(url: str, method: str, target: str, headers: Headers, body: bytes, connect_s: float) -> Answer:
    """Send a request to the server @url and read the head of its answer. Raises one of LOST."""
    parts = urllib.parse.urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port, ssl=tls), connect_s)
    try:
        head = [f"{method} {parts.path.rstrip('/')}{target} HTTP/1.1".encode(), f"Host: {parts.hostname}:{port}".encode(),
                b"Connection: close", b"Content-Length: %d" % len(body), *(name + b": " + value for name, value in headers)]
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        await writer.drain()
        status = 100
        while 100 <= status < 200:
            words, fields, by_name = await _head(reader)
            status = int(words[1])
        return Answer(status, fields, _body(reader, by_name, method == "HEAD" or status in (204, 304)), writer)
    except BaseException:
        writer.close()
        raise


# -- what an application needs ------------------------------------------------------------------------
async def lifespan(receive: Receive, send: Send, close: Callable[[], Awaitable[None]]) -> None:
    """Serve a scope of type "lifespan": nothing to start, and close() at the end."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await close()
    await send({"type": "lifespan.shutdown.complete"})


async def read_body(receive: Receive) -> bytes:
    """Return a request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


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


async def reply(send: Send, status: int, body: Json) -> None:
    """Answer with JSON."""
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def forward(url: str, scope: Message, body: bytes, connect_s: float) -> Optional[Answer]:
    """Pass a client's request on to the server @url. None: that is down, since nothing, 502, 503 or 504 came back."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    target = (path + (b"?" if scope["query_string"] else b"") + scope["query_string"]).decode("ascii")
    try:
        answer = await fetch(url, scope["method"], target, end_to_end(scope["headers"]), body, connect_s)
    except LOST:
        return None
    if answer.status in (502, 503, 504):
        answer.close()
        return None
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
class _Exchange:
    """One request of a client and the application's answer to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        self.reader, self.writer = reader, writer
        self.body: Optional[bytes] = body
        self.started = self.ended = self.chunked = self.silent = False  # silent: an answer without a body

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while not (self.reader.at_eof() or self.writer.is_closing()):
            await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Headers = list(message.get("headers", ()))
            bare = False
            if message["status"] < 200 or message["status"] in (204, 304):  # the end of their head ends them
                self.silent = bare = True
                headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
            self.chunked = not bare and all(name.lower() != b"content-length" for name, _ in headers)
            if self.chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            lines = [b"HTTP/1.1 %d " % message["status"], *(name + b": " + value for name, value in headers)]
            self.writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
            self.started = True
            return
        piece, more = message.get("body", b""), message.get("more_body", False)
        if self.silent:
            piece = b""
        if self.chunked and not self.silent:
            piece = (b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b"") + (b"" if more else b"0\r\n\r\n")
        self.writer.write(piece)
        self.ended = not more
        await self.writer.drain()


async def _refuse(writer: asyncio.StreamWriter, status: bytes) -> bool:
    writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
    await writer.drain()
    return False


async def _request(app: App, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Serve one request; whether the connection stays."""
    try:
        words, headers, fields = await _head(reader)
        length = _length(fields) or 0
    except ValueError:
        return await _refuse(writer, b"400 Bad Request")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return await _refuse(writer, b"400 Bad Request")
    if b"transfer-encoding" in fields:
        return await _refuse(writer, b"411 Length Required")
    if length > BODY_MAX:
        return await _refuse(writer, b"413 Content Too Large")
    if fields.get(b"expect", b"").lower() == b"100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    exchange = _Exchange(reader, writer, await reader.readexactly(length))
    method, target = words[0].decode("ascii"), words[1]
    exchange.silent = method == "HEAD"
    path, _, query = target.partition(b"?")
    await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
               "path": urllib.parse.unquote(path.decode("ascii")), "raw_path": path, "query_string": query, "headers": headers,
               "client": writer.get_extra_info("peername"), "server": writer.get_extra_info("sockname")},
              exchange.receive, exchange.send)
    return exchange.ended and words[2] == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"


async def _connection(app: App, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await _request(app, reader, writer):
            pass
    except LOST:
        pass  # the client is gone, or doesn't speak HTTP
    finally:
        writer.close()


async def listen(app: App, host: str, port: int) -> asyncio.Server:
    """Serve the ASGI application @app over HTTP; port 0 picks a free one."""
    return await asyncio.start_server(functools.partial(_connection, app), host, port)


async def _serve(app: App, host: str, port: int) -> None:
    server = await listen(app, host, port)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print("listening on http://%s:%d" % server.sockets[0].getsockname()[:2], flush=True)
    await stop.wait()
    server.close()  # and no wait_closed(): clients may stay connected for as long as they like


def serve(app: App, host: str, port: int) -> None:
    """Print the address, and serve until SIGINT or SIGTERM."""
    asyncio.run(_serve(app, host, port))
