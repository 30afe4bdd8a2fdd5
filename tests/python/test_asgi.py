# SPDX-License-Identifier: Apache-2.0
"""kvasir._asgi, byte by byte: what ends an answer, and which requests are refused since two servers may read them in two ways."""
import asyncio

from kvpython import equal, run  # first: it finds the package
from kvasir._asgi import fetch, listen

OK = b"HTTP/1.1 200 "


async def app(scope, receive, send):
    """Answers with the status that the path names, and a body, even where none may be."""
    status = int(scope["path"][1:])
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))] if body else []})
    await send({"type": "http.response.body", "body": body or b"text"})


async def told(request):
    """All that the server says to @request until it closes."""
    server = await listen(app, "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(request)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer
    finally:
        server.close()


def ask(request):
    return asyncio.run(told(request))


def test_answers_without_a_body():
    """The head ends 204 and 304: the next answer on the connection begins behind it."""
    for status in b"204", b"304":
        for length in b"", b"content-length: 3\r\n":
            request = b"GET /%b HTTP/1.1\r\n%b\r\n%b" % (status, length, b"abc" if length else b"")
            answer = ask(request + b"GET /200 HTTP/1.1\r\nconnection: close\r\n\r\n")
            head, _, rest = answer.partition(b"\r\n\r\n")
            equal(head, b"HTTP/1.1 %b " % status)
            equal(rest, OK + b"\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n0\r\n\r\n")


def test_lengths():
    for text in b"1_0", b"+5", b"-5", b"0x5", b"5, 5", b"", b"\xb2", b"9" * 30:
        answer = ask(b"POST /200 HTTP/1.1\r\ncontent-length: %b\r\n\r\nhello world" % text)
        equal(answer.split(b"\r\n")[0], b"HTTP/1.1 400 Bad Request", text)
    for second in b"5", b"6":
        answer = ask(b"POST /200 HTTP/1.1\r\ncontent-length: 5\r\nContent-Length: %b\r\n\r\nhello world" % second)
        equal(answer.split(b"\r\n")[0], b"HTTP/1.1 400 Bad Request", "a second length")
    equal(ask(b"POST /200 HTTP/1.1\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"), OK + b"\r\ncontent-length: 5\r\n\r\nhello")


def test_malformed_headers():
    for line in b"a: b\nc: d", b"a: b\rc", b"a: \0", b"a : b", b" a: b", b": b", b"a b: c", b"no colon":
        answer = ask(b"GET /200 HTTP/1.1\r\n%b\r\n\r\n" % line)
        equal(answer.split(b"\r\n")[0], b"HTTP/1.1 400 Bad Request", line)
    equal(ask(b"GET /200\nx: y HTTP/1.1\r\n\r\n").split(b"\r\n")[0], b"HTTP/1.1 400 Bad Request", "the first line")


def test_an_engines_answers():
    """The same in the other direction: such an answer is an error, not passed on."""
    async def one(answer):
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            got = await fetch("http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], "GET", "/", [], b"", 60)
            return got.status, b"".join([piece async for piece in got.body])
        except ValueError:
            return None
        finally:
            server.close()

    equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab")), (200, b"ab"))
    for head in b"content-length: +2", b"content-length: 2\r\ncontent-length: 2", b"x: a\nb: c", b"x: a\rb":
        equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\n%b\r\n\r\nab" % head)), None, head)


if __name__ == "__main__":
    run(globals())
