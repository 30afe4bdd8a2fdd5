# SPDX-License-Identifier: Apache-2.0
"""kvasir._asgi over sockets: what ends an answer, which requests are refused, and what a client may hold.

Refused are those that two servers may read in two ways. test_router_http.py tries thousands.
"""
import asyncio
import contextlib

from kvpython import SLOW, check, equal, run  # first: it finds the package
import kvasir._asgi
from kvasir._asgi import LOST, fetch, listen

HOST = b"host: a\r\n"


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
        answer = await asyncio.wait_for(reader.read(), 60 * SLOW)
        writer.close()
        return answer
    finally:
        server.close()


def ask(request):
    return asyncio.run(told(request))


def status(answer):
    return int(answer.split(b" ")[1])


@contextlib.contextmanager
def limits(**values):
    """Other constants of kvasir._asgi for a while."""
    before = {name: getattr(kvasir._asgi, name) for name in values}
    vars(kvasir._asgi).update(values)
    try:
        yield
    finally:
        vars(kvasir._asgi).update(before)


def test_answers_without_a_body():
    """The head ends 204 and 304: the next answer on the connection begins behind it."""
    for number in b"204", b"304":
        for length in b"", b"content-length: 3\r\n":
            request = b"GET /%b HTTP/1.1\r\n%b%b\r\n%b" % (number, HOST, length, b"abc" if length else b"")
            answer = ask(request + b"GET /200 HTTP/1.1\r\n%bconnection: close\r\n\r\n" % HOST)
            head, _, rest = answer.partition(b"\r\n\r\n")
            equal(head, b"HTTP/1.1 %b " % number)
            head, _, body = rest.partition(b"\r\n\r\n")
            equal(sorted(head.lower().split(b"\r\n")), [b"connection: close", b"http/1.1 200 ", b"transfer-encoding: chunked"])
            equal(body, b"4\r\ntext\r\n0\r\n\r\n")


def test_lengths():
    for text in b"1_0", b"+5", b"-5", b"0x5", b"5, 5", b"", b"\xb2", b"9" * 30:
        equal(status(ask(b"POST /200 HTTP/1.1\r\n%bcontent-length: %b\r\n\r\nhello world" % (HOST, text))), 400, text)
    for second in b"5", b"6":
        request = b"POST /200 HTTP/1.1\r\n%bcontent-length: 5\r\nContent-Length: %b\r\n\r\nhello world" % (HOST, second)
        equal(status(ask(request)), 400, "a second length")
    request = b"POST /200 HTTP/1.1\r\n%bcontent-length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % HOST
    equal(status(ask(request)), 400, "a length and chunks")
    equal(status(ask(b"POST /200 HTTP/1.1\r\n%bcontent-length: 99999999999\r\n\r\n" % HOST)), 413, "too long")
    equal(ask(b"POST /200 HTTP/1.1\r\n%bcontent-length: 5\r\n\r\nhello" % HOST).partition(b"\r\n\r\n")[2], b"hello")


def test_chunked_bodies():
    def post(chunks):
        return ask(b"POST /200 HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\n%b" % (HOST, chunks))

    equal(post(b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2], b"hello world")
    for chunks in b"-5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"5_0\r\nhello\r\n", b"5\r\nhelloXX0\r\n\r\n":
        equal(status(post(chunks)), 400, chunks)
    with limits(BODY_MAX=8):
        equal(status(post(b"5\r\nhello\r\n5\r\nhello\r\n0\r\n\r\n")), 413, "too long in chunks")


def test_malformed_headers():
    for line in b"a: b\nc: d", b"a: b\rc", b"a: \0", b"a : b", b" a: b", b": b", b"a b: c", b"no colon", b"a: b\r\n c":
        equal(status(ask(b"GET /200 HTTP/1.1\r\n%b%b\r\n\r\n" % (HOST, line))), 400, line)
    for first in b"GET /200\nx: y HTTP/1.1", b"GET\t/200 HTTP/1.1", b"GET /200\tHTTP/1.1", b"GET /200 HTTP/1.1\t", b"GET  /200 HTTP/1.1", \
            b"GET /200 HTTP/11", b"GET http://elsewhere/200 HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"hello":
        equal(status(ask(b"%b\r\n%b\r\n" % (first, HOST))), 400, first)
    equal(status(ask(b"GET /200 HTTP/1.1\r\n\r\n")), 400, "no Host")


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
            got = await fetch("http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], "GET", "/", [], b"", 60 * SLOW)
            return got.status, b"".join([piece async for piece in got.body])
        except LOST:
            return None
        finally:
            server.close()

    equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab")), (200, b"ab"))
    equal(asyncio.run(one(b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 200 OK\r\n\r\nab")), (200, b"ab"))
    coded = b"transfer-encoding: chunked"
    equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n2\r\nab\r\n0\r\n\r\n" % coded)), (200, b"ab"))
    for head in b"content-length: +2", b"content-length: 2\r\ncontent-length: 2", b"x: a\nb: c", b"x: a\rb", coded + b"\r\ncontent-length: 2":
        equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\n%b\r\n\r\nab" % head)), None, head)
    for chunks in b"-2\r\nab\r\n0\r\n\r\n", b"2\r\nab\r\n", b"2\r\nabcd", b"zz\r\n":
        equal(asyncio.run(one(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (coded, chunks))), None, chunks)
    equal(asyncio.run(one(b"HTTP/1.1 100 \r\n\r\n" * 100)), None, "interim answers without an end")


def serving(test):
    """Await test(connect) beside a server; connect(bytes) opens a connection and sends them."""
    async def begin():
        server, writers = await listen(app, "127.0.0.1", 0), []

        async def connect(sent):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            writers.append(writer)
            writer.write(sent)
            await writer.drain()
            return reader, writer

        try:
            await asyncio.wait_for(test(connect), 60 * SLOW)
        finally:
            for writer in writers:
                writer.close()
            server.close()

    asyncio.run(begin())


def begun(length):
    return b"POST /200 HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (HOST, length)


def test_unfinished_bodies_share_a_budget():
    """Who holds most ends; requests of ordinary size go through all the while."""
    async def test(connect):
        hogs = [await connect(begun(10 ** 6) + bytes(300000)) for _ in range(12)]  # 3.6 MB where 1 MB may be
        reader, _ = await connect(begun(5) + b"hello")
        equal(await reader.readuntil(b"hello"), b"HTTP/1.1 200 \r\ncontent-length: 5\r\n\r\nhello")
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in hogs]
        done = set()
        while len(done) < 9:  # at most three of them fit
            done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            ended = [each for each in ended if each not in done] + list(done)
            done = {each for each in ended if each.done()}
            await asyncio.sleep(0.01)
        for each in done:
            check(each.exception() is not None or each.result()[:12] in (b"", b"HTTP/1.1 503"), "the answer to one that ended")
        for each in ended:
            each.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    with limits(BODIES_MAX=1000000):
        serving(test)


def test_what_stops_coming_is_given_up():
    def ends(sent, wanted):
        async def test(connect):
            reader, _ = await connect(sent)
            equal((await reader.read())[:12], wanted, sent)

        serving(test)

    with limits(KEEP_S=0.05):
        ends(b"", b"")
    with limits(READ_S=0.05):
        ends(b"GET /2", b"")
        ends(begun(5) + b"hel", b"HTTP/1.1 408")

    async def drip(connect):
        reader, writer = await connect(begun(10 ** 6))
        gone = asyncio.ensure_future(reader.read())
        with contextlib.suppress(ConnectionError):
            while not gone.done():
                writer.write(b"x")
                await asyncio.sleep(0.002)
        with contextlib.suppress(ConnectionError):
            equal((await gone)[:12], b"HTTP/1.1 408", "a body of a byte now and then")

    with limits(BODY_S=0.05):
        serving(drip)


def test_connections_are_bounded():
    """The one that has waited longest for a request makes room."""
    async def test(connect):
        idle = [await connect(b"GET /2") for _ in range(5)]
        first = idle[0][0]
        equal(await first.read(), b"", "the first one ends")
        reader, _ = await connect(b"GET /200 HTTP/1.1\r\n%b\r\n" % HOST)
        equal((await reader.readuntil(b"text"))[:12], b"HTTP/1.1 200", "a newcomer")

    with limits(CONNECTIONS=4):
        serving(test)


if __name__ == "__main__":
    run(globals())
