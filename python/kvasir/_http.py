# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for kvasir.router: messages of a connection, read strictly by h11, and requests whose answers stream."""
import asyncio
import re
import ssl
import urllib.parse
from typing import Any, AsyncIterator, Awaitable, List, Optional, Tuple, TypeVar, Union

try:
    import h11
except ImportError as problem:
    raise ImportError("kvasir.router needs h11: pip install h11, or the extra 'router' of the wheel") from problem

Headers = List[Tuple[bytes, bytes]]
Head = Union[h11.Request, h11.Response, h11.InformationalResponse]
_T = TypeVar("_T")

HEAD_MAX = 1 << 16  # bytes of a head
PIECE = 1 << 14  # bytes read at a time: what h11 parses between two turns of the event loop
INTERIM_MAX = 16  # answers 1xx before an engine's answer
TIMEOUT = (asyncio.TimeoutError, TimeoutError)
LOST = (OSError, EOFError, ValueError, asyncio.TimeoutError, h11.ProtocolError)  # all that a broken peer can raise
# Two servers may read these in two ways: bare CR and LF, folded lines, control characters.
_ODD = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LENGTH = re.compile(rb"(?i)\ncontent-length[ \t]*:([^\r]*)")
_CODED = re.compile(rb"(?i)\ntransfer-encoding[ \t]*:")
_DIGITS = re.compile(rb"[ \t]*[0-9]{1,18}[ \t]*")
_HOP = {b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


class Refused(OSError):
    """A server takes no connection: it has seen nothing of the request."""


async def within(seconds: Optional[float], work: Awaitable[_T]) -> _T:
    """Await @work for at most @seconds (None: for ever), or raise one of TIMEOUT."""
    return await asyncio.wait_for(work, seconds)


def _check(head: bytes) -> None:
    """Refuse a head that says twice, or in two ways, where its body ends; h11 would choose one."""
    lengths = _LENGTH.findall(head)
    if _ODD.search(head):
        raise h11.RemoteProtocolError("a control character in the head")
    if len(lengths) > 1 or (lengths and not _DIGITS.fullmatch(lengths[0])):
        raise h11.RemoteProtocolError("a malformed Content-Length")
    if _CODED.search(head) and (lengths or b"HTTP/1.1" not in head.split(b"\r\n", 1)[0]):
        raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or before HTTP/1.1")


class Wire:
    """One connection: the messages that come, one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.left = bytearray()  # came, and not read yet

    async def more(self) -> bool:
        """Wait for bytes and keep them in `left`; False at the end of the stream."""
        data = await self.reader.read(PIECE)
        self.left += data
        return bool(data)

    async def head(self, state: h11.Connection) -> Head:
        """Read the next head. Raises h11.RemoteProtocolError for one that isn't sound, EOFError at the stream's end."""
        seen = 0
        while True:
            if self.left and self.left[0] <= 32:
                raise h11.RemoteProtocolError("no HTTP")
            end = self.left.find(b"\r\n\r\n", max(0, seen - 3))
            if end >= 0:
                break
            seen = len(self.left)
            if seen > HEAD_MAX:
                raise h11.RemoteProtocolError("a head of more than 64 KiB", error_status_hint=431)
            if not await self.more():
                raise EOFError("the stream ends before a head does")
        head = bytes(self.left[:end + 4])
        del self.left[:end + 4]
        _check(head)
        state.receive_data(head)
        event = state.next_event()
        if not isinstance(event, (h11.Request, h11.Response, h11.InformationalResponse)):
            raise h11.RemoteProtocolError("a malformed head")
        return event

    async def body(self, state: h11.Connection, seconds: Optional[float] = None) -> AsyncIterator[bytes]:
        """Yield the body behind the head that @state has read, each piece within @seconds."""
        while True:
            event = state.next_event()
            if event is h11.NEED_DATA:
                if not self.left:
                    await within(seconds, self.more())
                state.receive_data(bytes(self.left[:PIECE]))  # none: the stream's end
                del self.left[:PIECE]
                await asyncio.sleep(0)  # others' turn: reading what has come already suspends nobody
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                self.left[:0] = state.trailing_data[0]
                return


def end_to_end(headers: Any) -> Headers:
    """Return the headers that a proxy passes on."""
    named = {each.strip().lower() for name, value in headers if name.lower() == b"connection" for each in value.split(b",")}
    return [(name, value) for name, value in headers
            if name.lower() not in _HOP and name.lower() not in named and not name.lower().startswith(b"proxy-")]


class Answer:
    """Answer of a server: status, headers, and the body in pieces as they come."""

    def __init__(self, head: Head, body: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        self.status = getattr(head, "status_code", 0)
        self.headers: Headers = list(head.headers)
        self.body, self._writer = body, writer

    async def read(self, most: int) -> bytes:
        """Return the whole body. Raises ValueError beyond @most bytes, and one of LOST."""
        data = bytearray()
        async for piece in self.body:
            data += piece
            if len(data) > most:
                raise ValueError(f"an answer of more than {most} bytes")
        return bytes(data)

    def close(self) -> None:
        """Close the connection; the server sees it when the body isn't complete."""
        self._writer.close()


async def _connect(parts: urllib.parse.SplitResult, seconds: float) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    try:
        port = parts.port or (443 if tls else 80)
        return await within(seconds, asyncio.open_connection(parts.hostname, port, ssl=tls, limit=4 * PIECE))
    except (OSError, asyncio.TimeoutError, UnicodeError) as problem:
        raise Refused(str(problem) or f"no connection within {seconds:g} s") from problem


async def fetch(url: str, method: str, target: str, headers: Headers, body: bytes, connect_s: float,
                answer_s: Optional[float] = None) -> Answer:
    """Send a request to the server @url and read the head of its answer. Raises Refused, or another of LOST.

    @answer_s: the longest wait for each piece of the answer, and for the server to take the request. None: no limit.
    """
    parts = urllib.parse.urlsplit(url)
    state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX)
    length = [(b"content-length", b"%d" % len(body))] if body or method in ("POST", "PUT", "PATCH") else []
    sent = state.send(h11.Request(method=method, target=parts.path.rstrip("/") + target, headers=[
        (b"host", parts.netloc.rpartition("@")[2].encode()), (b"connection", b"close"), *length, *headers])) or b""
    for event in ([h11.Data(data=body)] if body else []) + [h11.EndOfMessage()]:
        sent += state.send(event) or b""
    reader, writer = await _connect(parts, connect_s)
    try:
        writer.write(sent)
        del sent
        try:
            await within(answer_s, writer.drain())
        except ConnectionError:
            pass  # it may have answered before it closed
        wire = Wire(reader, writer)
        for _ in range(INTERIM_MAX):
            head = await within(answer_s, wire.head(state))
            if isinstance(head, h11.Response):
                return Answer(head, wire.body(state, answer_s), writer)
        raise h11.RemoteProtocolError("no end of interim answers")
    except BaseException:
        writer.close()
        raise
