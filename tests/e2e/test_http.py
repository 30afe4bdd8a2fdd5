# SPDX-License-Identifier: Apache-2.0
"""kv-indexer as an HTTP server among hostile, slow and unlucky clients."""
import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time

from kvtest import *

JSON = {"Content-Type": "application/json"}


def ready():
    """An indexer with one registered (never connecting) worker, so that queries find a model."""
    indexer = Indexer()
    indexer.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
    return indexer


def answers(sock, n=1):
    """Read @n HTTP answers from a raw socket: [(status, headers, body)], fewer when it is closed."""
    sock.settimeout(patience(30))
    data, found = b"", []
    while len(found) < n:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            head = data[:end].decode()
            length = int(re.search(r"(?i)content-length: *(\d+)", head).group(1))
            if len(data) >= end + 4 + length:
                found.append((int(head.split()[1]), head, data[end + 4:end + 4 + length]))
                data = data[end + 4 + length:]
                continue
        try:
            more = sock.recv(65536)
        except ConnectionResetError:
            more = b""
        if not more:
            break
        data += more
    return found


def post(path, body, *extra):
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *extra]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + body


QUERY = b'{"model_name":"m","token_ids":[1,2,3,4]}'


def test_unknown_paths_and_methods():
    with ready() as indexer:
        for path in ("/nope", "/health/", "/query/x", "//health", "/test/pause_listener"):
            for method in ("GET", "POST"):
                reply = indexer.request(method, path)
                equal(reply.status, 404, f"{method} {path}")
                check("error" in reply.json())
                equal(reply.headers["Content-Type"], "application/json")
        for method, path, allow in (("GET", "/query", "POST"), ("HEAD", "/query", "POST"), ("OPTIONS", "/query", "POST"),
                                    ("PUT", "/register", "POST"), ("POST", "/health", "GET, HEAD"), ("DELETE", "/dump", "GET, HEAD"),
                                    ("BREW", "/workers", "GET, HEAD"), ("PATCH", "/metrics", "GET, HEAD")):
            reply = indexer.request(method, path)
            equal(reply.status, 405, f"{method} {path}")
            equal(reply.headers["Allow"], allow, f"{method} {path}: Allow")
        for path in ("/health", "/workers", "/metrics", "/dump"):
            reply = indexer.request("HEAD", path)
            equal((reply.status, reply.body), (200, b""), f"HEAD {path}")


def test_keep_alive_and_pipelining():
    with ready() as indexer:
        with indexer.raw() as sock:
            request = post("/query", QUERY, f"Content-Length: {len(QUERY)}")
            sock.sendall(request * 50 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            got = answers(sock, 51)
            equal([status for status, _, _ in got], [200] * 51)
            equal(len({re.sub(rb'"status":"\w+"', b"", body) for _, _, body in got[:50]}), 1)  # nobody listens at the worker's address
        with indexer.raw() as sock:  # byte by byte
            for byte in request:
                sock.sendall(bytes([byte]))
            equal(answers(sock)[0][0], 200)
        with indexer.raw() as sock:  # chunked, odd sizes
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (QUERY[:1], QUERY[1:8], QUERY[8:])) + b"0\r\n\r\n"
            sock.sendall(post("/query", chunks, "Transfer-Encoding: chunked"))
            got = answers(sock)
            equal([(status, body) for status, _, body in got], [(200, got[0][2])])
            check("Connection: close" in got[0][1] and is_closed(sock), "a request may follow a chunked one")
        with indexer.raw() as sock:  # errors of short bodies leave the connection usable
            bad = post("/query", b"{", "Content-Length: 1") + post("/nope", b"{", "Content-Length: 1") + post("/health", b"{", "Content-Length: 1")
            sock.sendall(bad + request)
            equal([status for status, _, _ in answers(sock, 4)], [400, 404, 405, 200])
        with indexer.raw() as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            equal(answers(sock)[0][0], 200)
            check(is_closed(sock), "HTTP/1.0 connection stays open")


def test_host_and_origin():
    """Without tokens only this machine is served, and a page of another site that a browser here has open isn't it: not
    when the page's own name resolves to 127.0.0.1 (DNS rebinding), not when it asks for 127.0.0.1 itself."""
    body = b'{"instance_id":9,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4}'

    def ask(indexer, host, origin=None):
        lines = [f"POST /register HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"]
        lines += [f"Origin: {origin}\r\n"] if origin else []
        with indexer.raw("".join(lines).encode() + b"\r\n" + body) as sock:
            status, _, text = answers(sock)[0]
            return status, text.decode()

    with ready() as indexer:
        port = indexer.port
        for host in (f"evil.example.com:{port}", "evil.example.com", f"localhost.evil.example.com:{port}", f"127.0.0.1.evil.example.com:{port}",
                     "evil.localhost", f"user@127.0.0.1:{port}", "127.1", "[::ffff:10.0.0.1]", f"10.0.0.1:{port}", "0"):
            status, text = ask(indexer, host)
            equal(status, 403, host)
            check("Host header" in text and "--auth-token-file" in text and "--insecure" in text, text)
        for origin in ("http://evil.example.com", "null", f"http://localhost.evil.example.com:{port}", "file://", f"http://evil.example.com:{port}"):
            status, text = ask(indexer, f"127.0.0.1:{port}", origin)
            equal(status, 403, origin)
            check("Origin" in text, text)
        equal([w["instance_id"] for w in indexer.workers()], [1])
        equal(indexer.request("GET", "/health", headers={"Host": "evil.example.com"}).status, 200)
        for number, (host, origin) in enumerate(((f"LOCALHOST:{port}", None), ("localhost.", None), ("127.9.9.9", "http://127.0.0.1:3000"),
                                                 ("[::1]", "https://localhost"))):
            status, text = ask(indexer, host, origin)
            equal(status, 201 if number == 0 else 409, text)
    with Indexer("--insecure") as indexer:
        equal(ask(indexer, "evil.example.com", "http://evil.example.com")[0], 201)


def test_absolute_targets():
    """As proxies send them (RFC 9112, 3.2.2). The target's host counts then, and not the header's."""

    def ask(indexer, method, target, host="localhost", body=b""):
        request = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with indexer.raw(request.encode() + body) as sock:
            status, _, text = answers(sock)[0]
            return status, text.decode()

    with ready() as indexer:
        port = indexer.port
        for origin in (f"http://localhost:{port}", f"HTTP://127.0.0.1:{port}", f"https://[::1]:{port}"):
            equal(ask(indexer, "GET", f"{origin}/health")[0], 200, origin)
            equal(ask(indexer, "GET", f"{origin}/workers?model_name=nobody")[1].strip(), "[]", origin)
            equal(ask(indexer, "POST", f"{origin}/query", body=QUERY)[0], 200, origin)
            for target in ("", "/", "?x=/health"):
                equal(ask(indexer, "GET", f"{origin}{target}")[0], 200, f"{origin}{target}")
            for target in ("/nope", "//health"):
                equal(ask(indexer, "GET", f"{origin}{target}")[0], 404, f"{origin}{target}")
        equal(ask(indexer, "GET", "ftp://localhost/workers")[0], 404)
        equal(ask(indexer, "GET", "http:/workers")[0], 404)
        equal(ask(indexer, "GET", "http:///workers")[0], 403)
        equal(ask(indexer, "GET", f"http://localhost:{port}/workers", host="evil.example.com")[0], 200)
        for name in ("evil.example.com", "user@localhost", "localhost.evil.example.com", "x" * 3000):
            status, text = ask(indexer, "GET", f"http://{name}:{port}/workers")
            equal(status, 403, name)
            check("Host" in text, text)


def test_ambiguous_framing_is_refused():
    smuggled = b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n"
    n = f"Content-Length: {len(QUERY)}"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUERY), QUERY)
    cases = {
        "two lengths": post("/query", QUERY, n, n),
        "two different lengths": post("/query", QUERY, n, "Content-Length: 0"),
        "length list": post("/query", QUERY, f"{n}, {len(QUERY)}"),
        "length and encoding": post("/query", chunked, n, "Transfer-Encoding: chunked"),
        "encoding and length": post("/query", chunked, "Transfer-Encoding: chunked", n),
        "two encodings": post("/query", chunked, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        "unknown encoding": post("/query", chunked, "Transfer-Encoding: gzip, chunked"),
        "odd encoding": post("/query", chunked, "Transfer-Encoding: xchunked"),
        "signed length": post("/query", QUERY, f"Content-Length: +{len(QUERY)}"),
        "negative length": post("/query", QUERY, "Content-Length: -1"),
        "hex length": post("/query", QUERY, "Content-Length: 0x20"),
        "empty length": post("/query", QUERY, "Content-Length:"),
        "overflowing length": post("/query", QUERY, "Content-Length: 18446744073709551657"),
        "blank before the colon": post("/query", QUERY, f"Content-Length : {len(QUERY)}"),
        "two hosts": post("/query", QUERY, n, "Host: y"),
        "no host": b"GET /health HTTP/1.1\r\n\r\n",
        "encoding in 1.0": post("/query", chunked, "Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0"),
        "bad chunk size": post("/query", b"zz\r\n" + QUERY, "Transfer-Encoding: chunked"),
        "get with two lengths": b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 36\r\n\r\n",
    }
    with ready() as indexer:
        for name, request in cases.items():
            with indexer.raw(request + smuggled) as sock:
                got = answers(sock, 2)
                check(len(got) <= 1, f"{name}: {len(got)} answers, the second request was taken from a doubtful body")
                check(not got or got[0][0] == 400 or name == "overflowing length" and got[0][0] == 413, f"{name}: {got[0][1] if got else ''}")
                check(is_closed(sock), f"{name}: connection stays open")
        equal(indexer.get("/health").status, 200)


def test_one_header_to_an_answer():
    """Requests that the library refuses by itself: one header, and the body that it announces, in JSON."""
    n = f"Content-Length: {len(QUERY)}"
    cases = {
        "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
        "no host, with a body": (400, b"POST /query HTTP/1.1\r\n" + n.encode() + b"\r\n\r\n" + QUERY),
        "23 digits": (413, post("/query", b"", "Content-Length: 12345678901234567890123")),
        "no digits": (400, post("/query", b"", "Content-Length: many")),
        "digits and letters": (400, post("/query", b"", "Content-Length: 12kB")),
        "minus": (400, post("/query", b"", "Content-Length: -1")),
        "blank": (400, post("/query", b"", "Content-Length: ")),
        "large cookie": (431, post("/query", QUERY, n, "Cookie: " + "a" * 20000)),
    }
    with ready() as indexer:
        other = indexer.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")  # a header that is coming in meanwhile
        for name, (status, request) in cases.items():
            for pieces in (1, 2, 5):
                size = -(-len(request) // pieces)
                with indexer.raw() as sock:
                    for at in range(0, len(request), size):
                        sock.sendall(request[at:at + size])
                        time.sleep(0.01 * (pieces > 1))
                    data = b""
                    while True:
                        try:
                            more = sock.recv(65536)
                        except ConnectionResetError:
                            more = b""
                        if not more:
                            break
                        data += more
                head, _, body = data.partition(b"\r\n\r\n")
                equal(head.split(b" ")[1], b"%d" % status, f"{name}: {data!r}")
                length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
                equal(len(body), length, f"{name}: {data!r}")
                check(json.loads(body)["error"], name)
        other.sendall(b"x\r\n\r\n")
        check(other.recv(100).startswith(b"HTTP/1.1 200"), "the other connection was left alone")
        other.close()
        equal(indexer.get("/health").status, 200)


def test_stops_while_the_library_refuses():
    """Headers that the library refuses by itself end at the moment of a stop: it ends well, each time."""
    for _ in range(8):
        with ready() as indexer:
            socks = [indexer.raw(b"GET /health HTTP/1.1\r\nX: y") for _ in range(48)]
            indexer.get("/health")  # its threads have had a turn at what came before
            for i, sock in enumerate(socks):
                if i == 16:
                    indexer.process.send_signal(signal.SIGTERM)
                try:
                    sock.sendall(b"\r\n\r\n")
                except (BrokenPipeError, ConnectionResetError):
                    break  # it has stopped
            indexer.stop()
            for sock in socks:
                sock.close()


def test_line_ends_and_nuls():
    """What the library takes for a line's or a value's end, and other servers don't."""
    n = b"Content-Length: %d" % len(QUERY)
    lines = [b"POST /query HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", n, b""]
    cases = {f"LF after line {i}": b"\r\n".join(lines[:i + 1]) + b"\n" + b"\r\n".join(lines[i + 1:] + [b""]) for i in range(len(lines) - 1)}
    cases["LF after the header"] = b"\r\n".join(lines) + b"\n"
    cases["LF everywhere"] = b"\n".join(lines + [b""])
    for name, value in (("at the end", n + b"\0"), ("two", n + b"\0\0"), ("before digits", n + b"\0009"), ("and blanks", n + b"\0 \t")):
        cases["NUL " + name] = b"\r\n".join([*lines[:3], value, b"", b""])
    cases["folded line"] = b"\r\n".join([*lines[:3], b"X: a", b" b", n, b"", b""])
    cases["folded length"] = b"\r\n".join([*lines[:3], b"Content-Length:", b" %d" % len(QUERY), b"", b""])
    with ready() as indexer:
        ours = unanswered = 0
        for name, head in cases.items():
            with indexer.raw(head + QUERY + b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
                got = answers(sock, 2)
                check(len(got) <= 1 and all(status == 400 for status, _, _ in got), f"{name}: {got}")
                check(is_closed(sock), f"{name}: connection stays open")
                ours += sum("application/json" in fields for _, fields, _ in got)
                unanswered += not got
        refused = indexer.metrics()["kv_indexer_http_bad_framing_total"]
        # what the library refuses by itself (all of it from 1.0 on) isn't ours to count
        check(ours <= refused <= ours + unanswered, f"{refused} counted of {ours} refused by us, {unanswered} without an answer")
        for line in (b"X:", b"X:  \t", b"X: a b ", b"X: \ta\t", b"Cookie: a=b; c=\"d\"", b"Authorization: Bearer x", b"X: " + b"y" * 8000):
            with indexer.raw(b"\r\n".join([*lines[:3], line, n, b"", b""]) + QUERY) as sock:
                equal([status for status, _, _ in answers(sock)], [200], repr(line[:30]))
        with indexer.raw(b"GET /workers?model_name=%6d&x HTTP/1.0\r\n\r\n") as sock:
            equal(answers(sock)[0][0], 200)
        equal(indexer.metrics()["kv_indexer_http_bad_framing_total"], refused)
        # chunks that end in a bare LF are read, but nothing that may have been smuggled behind them is
        with indexer.raw(post("/query", b"%x\n%s\n0\n\n" % (len(QUERY), QUERY), "Transfer-Encoding: chunked")
                         + b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
            check(len(answers(sock, 2)) <= 1, "a request behind doubtful chunks is answered")
            check(is_closed(sock))


def test_control_characters_in_headers():
    with ready() as indexer:
        for value in (b"x\rContent-Length: 3", b"x\x0bz", b"x\x7f"):
            with indexer.raw(b"GET /peers HTTP/1.1\r\nHost: localhost\r\nX: " + value + b"\r\n\r\n") as sock:
                equal([a[0] for a in answers(sock, 2)], [400], repr(value))


def test_head_of_a_dump_leaves_no_stray_bytes():
    with ready() as indexer:
        with indexer.raw(b"HEAD /dump HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
            data = b""
            sock.settimeout(patience(5))
            while more := sock.recv(65536):
                data += more
        head, _, rest = data.partition(b"\r\n\r\n")
        check(head.startswith(b"HTTP/1.1 200") and rest == b"", repr(data))


def test_slow_refused_clients_keep_nobody_out():
    """A body that never comes, of a request that is refused anyway: its connection makes room."""
    with Indexer("--max-connections", 64) as indexer:
        socks = [indexer.raw(b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n") for _ in range(64)]
        equal(indexer.get("/health").status, 200)
        for sock in socks:
            sock.close()


def test_bodies_over_the_limit():
    with ready() as indexer:
        limit = 8 << 20
        with indexer.raw(post("/query", b"", f"Content-Length: {limit + 1}")) as sock:  # answered without reading it
            status, head, body = answers(sock)[0]
            equal(status, 413)
            check(b"limit" in body)
            check(is_closed(sock))
        with indexer.raw(post("/register", b"", f"Content-Length: {(2 << 20) + 1}")) as sock:
            equal(answers(sock)[0][0], 413)
        with indexer.raw(post("/health", b"", "Content-Length: 1000000").replace(b"POST", b"GET")) as sock:
            equal(answers(sock)[0][0], 413)
        fits = b'{"model_name":"m","token_ids":[1,2,3,4],"pad":"' + b"x" * (limit - 60)
        fits += b" " * (limit - len(fits) - 2) + b'"}'
        equal(len(fits), limit)
        equal(indexer.post("/query", fits, headers=JSON).status, 200)
        with indexer.raw(post("/query", b"", "Transfer-Encoding: chunked")) as sock:  # no length to go by
            block = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
            try:
                for _ in range(limit // 65536 + 2):
                    sock.sendall(block)
                sock.sendall(b"0\r\n\r\n")
            except OSError:
                pass
            equal(answers(sock)[0][0], 413)
        with indexer.raw(post("/query", b"", "Transfer-Encoding: chunked")) as sock:  # and no end
            try:
                end = time.monotonic() + 60 * SLOW  # what is refused is still drained for a while, then cut
                while time.monotonic() < end:
                    sock.sendall(block)
                check(False, "an endless body is read for ever")
            except OSError:
                pass
        with indexer.raw(post("/query", b"", f"Content-Length: {len(QUERY)}", "Expect: 100-continue")) as sock:
            check(sock.recv(100).startswith(b"HTTP/1.1 100"), "no 100 Continue")
            sock.sendall(QUERY)
            equal(answers(sock)[0][0], 200)
        with indexer.raw(post("/query", b"", "Content-Length: 999999999", "Expect: 100-continue")) as sock:
            equal(answers(sock)[0][0], 413)
        for size in (limit + 1, 5 * limit):  # a client that looks up only when it has sent everything
            try:
                equal(indexer.post("/query", b" " * size, headers=JSON).status, 413)
            except OSError as problem:
                check(False, f"a reset instead of an answer to {size} bytes: {problem!r}")
        equal(indexer.metrics()["kv_indexer_http_body_bytes"], 0)
    with Indexer("--max-body", "4KiB") as indexer:
        equal(indexer.post("/query", b" " * 4097, headers=JSON).status, 413)
        equal(indexer.post("/query", b" " * 4096, headers=JSON).status, 400)


def test_slow_and_half_open_clients():
    with Indexer("--idle-timeout", "1s") as indexer:  # no request is answered here: a busy machine may take longer
        idle = indexer.raw()
        part = indexer.raw(b"GET /hea")
        body = indexer.raw(post("/query", b"{", "Content-Length: 100"))
        drip = indexer.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        started = time.monotonic()
        dripped = False
        while time.monotonic() - started < patience(15) and not dripped:  # one header line each 0.2 s
            try:
                drip.sendall(b"X-A: b\r\n")
                time.sleep(0.2)
                drip.setblocking(False)
                try:
                    dripped = drip.recv(1) == b""
                except BlockingIOError:
                    pass
                drip.setblocking(True)
            except OSError:
                dripped = True
        check(dripped, "a client that sends a header line now and then is kept for ever")
        for sock, name in ((idle, "idle"), (part, "half a request line"), (body, "half a body")):
            check(is_closed(sock), f"{name}: kept")
            sock.close()
        drip.close()
        # cut short: no answer needed, but no harm either
        for cut in (b"", b"P", post("/query", QUERY[:5], f"Content-Length: {len(QUERY)}"), b"\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\x02\x00\x01"):
            with indexer.raw(cut) as sock:
                try:
                    sock.shutdown(socket.SHUT_WR)
                except OSError:  # closed already
                    pass
                check(is_closed(sock), f"{cut!r}: kept")
    with ready() as indexer:
        # half-closed: the request is whole, so it is answered
        with indexer.raw(post("/query", QUERY, f"Content-Length: {len(QUERY)}")) as sock:
            sock.shutdown(socket.SHUT_WR)
            equal(answers(sock)[0][0], 200)
        # gone without a goodbye
        for _ in range(50):
            sock = indexer.raw(post("/query", QUERY, f"Content-Length: {len(QUERY) + 1}"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        equal(indexer.get("/health").status, 200)


def test_a_thousand_idle_connections():
    with ready() as indexer:
        socks = [indexer.raw() for _ in range(1000)]
        half = [indexer.raw(b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Le") for _ in range(200)]
        connection = indexer.connect()
        started = time.monotonic()
        for _ in range(100):
            equal(indexer.post("/query", QUERY, headers=JSON, connection=connection).status, 200)
            equal(indexer.get("/health").status, 200)
        check(time.monotonic() - started < patience(10), "idle connections make it slow")
        check(indexer.metrics()["kv_indexer_http_connections"] >= 1200)
        connection.close()
        for sock in socks + half:
            sock.close()
        wait_until(lambda: indexer.metrics()["kv_indexer_http_connections"] < 10, what="connections to be forgotten")


def test_idle_connections_make_room():
    with Indexer("--max-connections", "64") as indexer:
        socks = []
        for _ in range(200):
            socks.append(indexer.raw())
            if len(socks) % 10 == 0:
                equal(indexer.get("/health").status, 200)
                time.sleep(0.05)
        wait_until(lambda: indexer.metrics()["kv_indexer_http_evicted_total"] >= 100, what="connections to make room")
        for sock in socks:
            sock.close()


def test_large_bodies_share_a_budget():
    with Indexer("--idle-timeout", "60s") as indexer:  # 256 MiB for all: 8 MiB each, not finished
        indexer.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
        before = indexer.rss()
        head = post("/query", b"", f"Content-Length: {8 << 20}")
        data = b" " * ((8 << 20) - 1)
        socks, alive = [], 0
        for _ in range(60):
            sock = indexer.raw(head)
            try:
                sock.sendall(data)
            except OSError:
                pass
            socks.append(sock)
        wait_until(lambda: indexer.metrics()["kv_indexer_http_overloaded_total"] > 0, what="refusals")
        grown = indexer.rss() - before
        check(SANITIZED or grown < 420 << 20, f"60 unfinished bodies take {grown >> 20} MiB")
        equal(indexer.get("/health").status, 200)
        statuses = []
        for sock in socks:
            try:
                sock.sendall(b" ")
                statuses += [status for status, _, _ in answers(sock)]
            except OSError:
                pass
            sock.close()
        check(503 in statuses and 400 in statuses, f"{statuses}")
        wait_until(lambda: indexer.metrics()["kv_indexer_http_body_bytes"] == 0, what="memory to be returned")
        equal(indexer.post("/query", QUERY, headers=JSON).status, 200)


def test_a_flood_of_unfinished_bodies():
    """2200 connections that declare 8 MiB and send 70 kB: other clients' queries of any size are answered, small ones of
    the same client too, and its large ones once it is given a moment."""
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = 2200 if hard >= 12000 else 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    large = b'{"model_name":"m","token_ids":[' + b"1," * 500_000 + b"1]}"
    with Indexer("--host", "0.0.0.0") as indexer:
        indexer.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
        head = post("/query", b"", f"Content-Length: {8 << 20}")
        socks = []
        for i in range(n):
            sock = socket.socket()
            sock.bind(("127.0.0.2", 0))
            sock.connect(("127.0.0.1", indexer.port))
            sock.setblocking(False)
            socks.append(sock)
            try:
                sock.send(head + b" " * 70_000)
            except OSError:
                pass

        def ask(address, body, path="/query"):
            with socket.socket() as sock:
                sock.bind((address, 0))
                sock.connect(("127.0.0.1", indexer.port))
                try:
                    sock.sendall(post(path, body, f"Content-Length: {len(body)}"))
                except OSError:
                    pass  # refused before all was sent
                got = answers(sock)
                return got[0][0] if got else None

        def limited():  # a busy machine reads so slowly that bodies' time is over before they are too many
            metrics = indexer.metrics()
            return metrics["kv_indexer_http_overloaded_total"] > 0 or metrics["kv_indexer_http_expired_total"] >= 100

        if n == 2200:
            wait_until(limited, 30, "the flooding client's limit")
        check(indexer.metrics()["kv_indexer_http_body_bytes"] <= 128 << 20)
        for _ in range(100):
            equal([ask("127.0.0.1", QUERY), ask("127.0.0.3", QUERY), ask("127.0.0.2", QUERY)], [200] * 3)
        equal([ask("127.0.0.1", large) for _ in range(5)], [200] * 5)
        with indexer.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
            equal(answers(sock)[0][0], 200)
        wait_until(lambda: ask("127.0.0.2", large) == 200, 20, "a large query of the client that floods")
        wait_until(lambda: indexer.metrics()["kv_indexer_http_body_bytes"] == 0, 20, "the end of those who send nothing more")
        check(indexer.metrics()["kv_indexer_http_expired_total"] >= 100)
        for sock in socks:
            sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_client_leaves_connections_to_others():
    """All connections taken by one address that sends bodies without end: others get in."""
    with Indexer("--max-connections", "64", "--http-threads", "1") as indexer:
        def drip(sock):
            try:
                sock.send(b" ")
                return True
            except OSError:
                return False

        socks = []
        for _ in range(200):
            sock = socket.socket()
            sock.bind(("127.0.0.2", 0))
            sock.settimeout(0.2)
            try:
                sock.connect(("127.0.0.1", indexer.port))
                sock.send(post("/query", b"{", "Content-Length: 100000"))
            except OSError:
                pass
            socks.append(sock)
            if len(socks) % 20 == 0:
                for other in socks:
                    drip(other)
        mine = indexer.connect()
        for _ in range(50):
            for sock in socks[-60:]:
                drip(sock)
            mine.request("GET", "/health")
            equal(mine.getresponse().read(), b"")
        for sock in socks:
            sock.close()


def test_tokens():
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "tokens")
        with open(file, "w", encoding="ascii") as out:
            out.write("# people\nalpha-token-1\n\n  beta-token-2  \n" + "x" * 256 + "\n")
        os.chmod(file, 0o600)
        with Indexer("--auth-token-file", file, "--log-level", "trace", headers={"Authorization": "Bearer alpha-token-1"}) as indexer:
            equal(http_request(indexer.url, "GET", "/health").status, 200)
            for header in (None, "", "Bearer", "Bearer ", "Bearer wrong-token", "Bearer alpha-token-", "Bearer alpha-token-12", "bearer", "Basic YTpi",
                           "alpha-token-1", "Bearer # people", "Bearer " + "x" * 255, "Bearer " + "x" * 257, "Bearer " + "x" * 5000):
                for method, path in (("GET", "/workers"), ("GET", "/metrics"), ("GET", "/dump"), ("POST", "/query"), ("GET", "/nope"), ("PUT", "/query")):
                    reply = http_request(indexer.url, method, path, headers={} if header is None else {"Authorization": header})
                    equal(reply.status, 401, f"{method} {path} with {header!r}")
                    check(reply.headers["WWW-Authenticate"].startswith('Bearer realm="kv-indexer"'))
                    check("error" in reply.json())
            for token in ("Bearer alpha-token-1", "bearer alpha-token-1", "Bearer   beta-token-2 ", "Bearer " + "x" * 256):
                equal(http_request(indexer.url, "GET", "/workers", headers={"Authorization": token}).status, 200, token)
            # a refused body isn't read
            with indexer.raw(post("/query", b"", "Content-Length: 5000000")) as sock:
                equal(answers(sock)[0][0], 401)
            # SIGHUP
            with open(file, "w", encoding="ascii") as out:
                out.write("gamma-token-2\n")
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: indexer.get("/workers").status == 401, what="the old token to be refused")
            indexer.headers = {"Authorization": "Bearer gamma-token-2"}
            equal(indexer.get("/workers").status, 200)
            os.unlink(file)  # unreadable: the old ones stay
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any("old tokens stay" in line for line in indexer.log), what="a line in the log")
            equal(indexer.get("/workers").status, 200)
            log = "\n".join(indexer.log)
            for secret in ("alpha-token", "gamma-token", "wrong-token"):
                check(secret not in log, f"{secret} is in the log")
        for text in ("", "# nothing\n", "x" * 257 + "\n", "alpha-token-1 # of a team\n"):
            with open(file, "w", encoding="ascii") as out:
                out.write(text)
            indexer = Indexer("--auth-token-file", file, wait=False)
            equal(indexer.process.wait(patience(20)), 1, f"token file {text[:10]!r}: exit status")
            indexer.kill()


def own_address():
    """An address of this machine that isn't loopback, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address


def test_other_machines_are_refused():
    """A connection to an own address that isn't loopback comes from that address, as from another machine."""
    address = own_address()
    if not address:
        skip("this machine has only loopback addresses")
    with tempfile.NamedTemporaryFile("w", suffix=".tokens") as file:
        file.write("secret-token\n")
        file.flush()
        for args, expected, with_token in (([], 403, 403), (["--insecure"], 200, 200), (["--auth-token-file", file.name], 401, 200)):
            with Indexer(*args, host="0.0.0.0", headers={"Authorization": "Bearer secret-token"}) as indexer:
                admits = {403: "this-machine", 401: "tokens", 200: "everybody"}[expected]
                check(any("url=http://0.0.0.0:" in line and f"admits={admits}" in line for line in indexer.log), repr(indexer.log))
                url = f"http://{address}:{indexer.port}"
                equal(http_request(url, "GET", "/health").status, 200, "/health")
                for method, path in (("GET", "/workers"), ("GET", "/dump"), ("GET", "/metrics"), ("GET", "/nope"), ("POST", "/register")):
                    reply = http_request(url, method, path, b"{}" if method == "POST" else None, JSON)
                    wanted = {"/nope": 404, "/register": 422}.get(path, 200) if expected == 200 else expected
                    equal(reply.status, wanted, f"{args} {method} {path}")
                    if expected == 403:
                        check("--auth-token-file" in reply.json()["error"] and "--insecure" in reply.json()["error"])
                reply = http_request(url, "GET", "/workers", headers={"Authorization": "Bearer secret-token"})
                equal(reply.status, with_token, f"{args} with a token")
                equal(indexer.get("/workers").status, 200, "from this machine")


def test_token_ids_are_never_logged():
    with Indexer("--log-level", "trace") as indexer:
        indexer.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
        tokens = [987654321, 123454321, 555444333, 222111000]
        indexer.query(tokens, explain=True, cache_salt="pepper-and-salt")
        indexer.query(tokens + [-987654321], expect=422)
        indexer.post("/query", b'{"model_name":"m","token_ids":[987654321,123454321,zzz', headers=JSON)
        indexer.post("/query", b'{"token_ids":"987654321"}', headers=JSON)
        indexer.get("/query?token_ids=987654321")
        indexer.stop()
        log = "\n".join(indexer.log)
        check("path=/query" in log, "no access log at this level")
        for secret in ("987654321", "123454321", "pepper"):
            check(secret not in log, f"{secret} is in the log")
    with Indexer() as indexer:
        equal(indexer.get("/health").status, 200)
        indexer.stop()
        check(not any("path=" in line for line in indexer.log), "there is an access log at level info")


def test_graceful_end():
    for number in (signal.SIGTERM, signal.SIGINT):
        indexer = ready()
        idle = [indexer.raw() for _ in range(20)]
        waiting = indexer.connect()
        equal(indexer.get("/health", connection=waiting).status, 200)
        body = indexer.raw(post("/query", QUERY[:10], f"Content-Length: {len(QUERY)}"))
        # 20 idle ones, the one that asks, and the body: accepted, and the body's request begun
        wait_until(lambda: indexer.metrics()["kv_indexer_http_connections"] >= 22, what="all connections")
        wait_until(lambda: indexer.metrics()["kv_indexer_http_in_flight"] >= 2, what="the body's request")
        indexer.process.send_signal(number)
        wait_until(lambda: any("msg=stopping" in line for line in indexer.log), what="the signal to be seen")
        try:
            with socket.create_connection(("127.0.0.1", indexer.port), timeout=60) as late:
                late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                equal(late.recv(1), b"", "a new connection's answer")
        except ConnectionError:
            pass  # as good as an end; but a timeout isn't: it would have been left waiting
        body.sendall(QUERY[10:])  # a request that had begun is answered, and told that this was the last
        status, head, _ = answers(body)[0]
        equal(status, 200)
        check("connection: close" in head.lower(), head)
        indexer.stop(number)
        for sock in idle + [body]:
            sock.close()
        waiting.close()
    indexer = ready()  # a client that never finishes is not waited for without limit
    with indexer.raw(post("/query", QUERY[:10], f"Content-Length: {len(QUERY)}")):
        indexer.stop()
    indexer = ready()
    check(indexer.stop() < 4.5 * SLOW, "an idle indexer takes the whole drain time to stop")


def test_signals_end_up_in_any_thread():
    """Which thread runs the handler is the kernel's choice: what it sets must be seen, and not race (tsan)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with ready() as indexer:
        pid, threads = indexer.process.pid, []
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):
            with open(f"/proc/{pid}/task/{tid}/status", encoding="ascii") as status:
                blocked = int(re.search(r"SigBlk:\s*(\w+)", status.read()).group(1), 16)
            if tid != pid and not blocked & (1 << (signal.SIGTERM - 1)):
                threads.append(tid)
        if not threads:
            skip("no other thread takes signals")
        for number in (signal.SIGHUP, signal.SIGTERM):
            equal(libc.tgkill(pid, threads[0], int(number)), 0, "tgkill")
        equal(indexer.process.wait(patience(20)), 0, "exit status")


def test_hangup_without_files():
    """SIGHUP where there is neither a token file nor a certificate: the log doesn't say that they were read."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "access.log")
        with Indexer("--access-log", file, "--log-level", "trace") as indexer:
            os.rename(file, file + ".1")
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: os.path.exists(file), what="the access log to be opened again")
            indexer.stop()
            check(not any(f"{what} read again" in line for line in indexer.log for what in ("token file", "certificate")), indexer.log)


def test_systemd_notification():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = os.path.join(folder, "notify")
        sock.bind(path)
        sock.settimeout(patience(10))
        with Indexer(env={"NOTIFY_SOCKET": path}) as indexer:
            message = sock.recv(4096)
            check(b"READY=1" in message, message)
            indexer.stop()
            check(b"STOPPING=1" in sock.recv(4096))


def run_once(*args, env=None):
    return subprocess.run([BUILD / "bin" / "kv-indexer", *args], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})},
                          check=False)


def test_command_line():
    done = run_once("--help")
    equal(done.returncode, 0)
    for word in ("--port", "8090", "--workers", "--peers", "Examples", "descriptors", "Memory"):
        check(word in done.stdout, f"--help doesn't speak of {word}")
    check(max(map(len, done.stdout.splitlines())) <= 80, "--help is too wide")
    done = run_once("--version")
    equal(done.returncode, 0)
    check(re.search(r"\d+\.\d+\.\d+", done.stdout), done.stdout)
    for args, word in ((["--prot", "1"], "--port"), (["--port", "x"], "port"), (["--workers", "1=tcp://h:1"], "--block-size is required"),
                       (["--workers", "x", "--block-size", "16"], "'x'"), (["--host", "no.such.host.invalid"], "no.such.host.invalid")):
        done = run_once(*args)
        check(done.returncode in (1, 2), f"{args}: exit status {done.returncode}")
        check(word in done.stderr, f"{args}: {done.stderr}")
    with ready() as indexer:
        done = run_once("--host", "127.0.0.1", "--port", str(indexer.port))
        equal(done.returncode, 1)
        check("in use" in done.stderr, done.stderr)
    with Indexer(env={"KV_INDEXER_LOG_FORMAT": "json"}) as indexer:
        check(indexer.log[0].startswith("{"), indexer.log[0])


def test_many_clients_at_once():
    with ready() as indexer:
        failures = []

        def client():
            connection = indexer.connect()
            try:
                for i in range(100):
                    if i % 10 == 9:
                        status = indexer.request("POST", "/query", b"{", headers=JSON, connection=connection).status
                        equal(status, 400)
                    else:
                        equal(indexer.request("POST", "/query", QUERY, headers=JSON, connection=connection).status, 200)
            except Exception as problem:  # told by the main thread
                failures.append(problem)
            finally:
                connection.close()

        threads = [threading.Thread(target=client) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(not failures, failures)
        equal(indexer.metrics()['dynamo_kvindexer_requests_total{endpoint="/query",method="POST"}'], 1600)


def test_registrations_leave_descriptors_for_http():
    import resource

    def low():
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    command = [str(BUILD / "bin" / "kv-indexer"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=low)
    try:
        lines = iter(process.stderr.readline, b"")
        url = next(m.group(1).decode() for line in lines if (m := re.search(rb"msg=listening url=(\S+)", line)))
        threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
        statuses = []
        for i in range(100):
            body = {"instance_id": i, "model_name": "m", "block_size": 4, "endpoint": f"tcp://127.0.0.1:{20000 + i}"}
            statuses.append(http_request(url, "POST", "/register", body).status)
        check(statuses[0] == 201 and statuses[-1] == 503, repr(statuses))
        time.sleep(1)
        for _ in range(20):
            equal(http_request(url, "GET", "/health").status, 200)
    finally:
        process.terminate()
        process.wait(patience(20))


if __name__ == "__main__":
    run(globals())
