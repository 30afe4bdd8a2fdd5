# SPDX-License-Identifier: Apache-2.0
"""kv-indexer against clients that mean harm: handshakes, bombs, floods of names, and too little memory."""
import http.client
import os
import resource
import socket
import ssl
import struct
import tempfile
import threading
import time

from kvtest import *

MSGPACK = {"Content-Type": "application/msgpack"}
NOWHERE = "tcp://127.0.0.1:1"  # nobody publishes there
HELLO = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def client_hello():
    """The first flight of a TLS client."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ssl.create_default_context().wrap_bio(into, out, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def test_handshakes():
    hello = client_hello()
    garbage = {
        "noise": os.urandom(4000),
        "zeros": b"\0" * 4000,
        "record of no length": b"\x16\x03\x01\0\0" * 100,
        "record too long": b"\x16\x03\x01\xff\xff" + b"x" * 70000,
        "alert": b"\x15\x03\x01\0\x02\x02\x28",
        "data before keys": b"\x17\x03\x03\0\x20" + b"x" * 32,
        "hello, cut and wrong": hello[:len(hello) // 2] + b"\xff" * 2000,
        "hello twice": hello + hello,
        "hello, then HTTP": hello + HELLO,
    }
    endless = b"\x16\x03\x01\0\x04\x01\xff\xff\xff" + b"\x16\x03\x01\x40\0" + b"x" * 16384  # of 16 MiB: kept up to the deadline
    with tempfile.TemporaryDirectory() as folder:
        cert, key = make_certificate(folder)
        context = ssl.create_default_context(cafile=cert)
        with Indexer("--tls-cert", cert, "--tls-key", key, "--idle-timeout", "4s", context=context) as indexer:
            def healthy(what):  # a busy machine may need longer than the timeout for a handshake, so ask again
                wait_until(lambda: indexer.get("/health").status == 200, 30, what)

            for _ in range(5):
                for name, data in garbage.items():
                    with indexer.raw() as sock:
                        try:
                            sock.sendall(data)
                        except OSError:
                            pass
                        check(is_closed(sock, 20), f"{name}: kept")
                    with indexer.raw() as sock:  # and without waiting for what comes of it
                        try:
                            sock.sendall(data)
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        except OSError:
                            pass
                healthy("an answer after garbage")
            half = [indexer.raw(hello[:n]) for n in (1, 5, 6, len(hello) // 2, len(hello) - 1, len(hello)) for _ in range(20)]
            half += [indexer.raw(endless) for _ in range(20)]
            healthy("an answer beside half handshakes")
            for sock in half:
                check(is_closed(sock, 30), "half a handshake is kept for ever")
                sock.close()
            with indexer.raw() as sock:  # a byte now and then: the deadline is for the whole
                sock.settimeout(0.3)
                end = time.monotonic() + patience(30)
                closed = False
                for byte in hello:
                    try:
                        sock.sendall(bytes([byte]))
                        closed = sock.recv(1) == b""
                    except socket.timeout:
                        pass
                    except OSError:
                        closed = True
                    if closed or time.monotonic() > end:
                        break
                check(closed, "a slow handshake is kept for ever")
            wait_until(lambda: indexer.metrics()["kv_indexer_http_connections"] <= 2, 20, "connections to be forgotten")

            def session():
                sock = context.wrap_socket(indexer.raw(), server_hostname="127.0.0.1")
                sock.sendall(HELLO[:10])
                return sock

            with wait_until(session, 30, "a session") as sock:  # cut off below it
                raw = socket.socket(fileno=os.dup(sock.fileno()))
                raw.sendall(b"not a record of this session")
                check(is_closed(raw, 20), "garbage within a session: kept")
                raw.close()
            healthy("an answer after a session of garbage")


def test_msgpack_bombs():
    huge = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1",
            b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc5\xff\xff", b"\xda\xff\xff", b"\xc8\xff\xff\1"]
    start = b"\x82\xaamodel_name\xa1m"
    with Indexer() as indexer:
        indexer.register(1, NOWHERE, block_size=4)
        good = {"model_name": MODEL, "token_ids": [1, 2, 3, 4]}
        bodies = []
        for head in huge:
            for tail in (b"", b"\1" * 100, head * 5000):
                bodies += [start + b"\xa9token_ids" + head + tail, start + b"\xacblock_hashes" + head + tail, start + b"\xa1x" + head + tail,
                           b"\x82" + head + tail, b"\x82\xaamodel_name" + head + tail, head + tail]
        for nest in (b"\x91", b"\x81\xa1x", b"\x81\x90", b"\xdd\0\0\0\1", b"\xdd\xff\xff\xff\xff", b"\xdf\0\0\0\1\1", b"\xdc\xff\xff"):
            bodies += [start + b"\xa1x" + nest * (1000000 // len(nest)), start + b"\xa9token_ids" + nest * 100000, nest * 100000]
        before = indexer.rss()
        connection = indexer.connect()
        for path in ("/query", "/query_by_hash"):
            for body in bodies:
                reply = indexer.post(path, body, headers=MSGPACK, connection=connection)
                check(reply.status in (400, 422), f"{path} {body[:40]!r}: {reply}")
                check("error" in reply.json())
        connection.close()
        # what is whole but useless is passed over, however deep: nothing is built of it
        deep = msgpack.packb(good).replace(b"\x82", b"\x83", 1) + b"\xa1x" + b"\x91" * 500000 + b"\xc0"
        check(indexer.post("/query", deep, headers=MSGPACK).status in (200, 400))
        for value in (msgpack.ExtType(5, b"x" * 70000), msgpack.ExtType(127, b"\0" * 4), [msgpack.ExtType(1, b"x" * n) for n in (1, 2, 4, 8, 16, 17)]):
            equal(indexer.post("/query", msgpack.packb({**good, "x": value}), headers=MSGPACK).status, 200, "ext in an unknown field")
            equal(indexer.post("/query", msgpack.packb({**good, "token_ids": value}), headers=MSGPACK).status, 422, "ext for tokens")
            equal(indexer.post("/query", msgpack.packb({**good, "model_name": value}), headers=MSGPACK).status, 422, "ext for a name")
        grown = indexer.rss() - before
        check(SANITIZED or grown < 64 << 20, f"bombs cost {grown >> 20} MiB")
        equal(indexer.post("/query", msgpack.packb(good), headers=MSGPACK).status, 200)


def test_thousands_of_names():
    n = 250 if SANITIZED else 1000  # how memory grows is looked at without sanitizers
    with Indexer("--max-registrations", 3 * n) as indexer:
        connection = indexer.connect()
        statuses = []
        for i in range(3 * n + n // 2):
            body = {"instance_id": i, "endpoint": NOWHERE, "model_name": f"model-{i}" + "x" * 900, "tenant_id": f"tenant-{i}", "block_size": 4}
            statuses.append(indexer.post("/register", body, connection=connection).status)
        registered = statuses.count(201)
        check(registered and set(statuses) <= {201, 503}, f"{set(statuses)}")
        equal(indexer.metrics()["dynamo_kvindexer_models"], registered)
        equal(len(indexer.workers()), registered)
        equal(len(indexer.dump()), registered)
        before = indexer.rss()
        names = indexer.metrics().keys()
        for i in range(5 * n):  # names nobody registered leave nothing behind
            body = {"model_name": f"unknown-{i}" + "y" * 900, "tenant_id": f"t{i}", "token_ids": [1, 2, 3, 4], "explain": i % 10 == 0}
            equal(indexer.post("/query", body, connection=connection).status, 404)
        for i in range(n // 2):
            equal(indexer.request("GET", f"/nope-{i}", connection=connection).status, 404)
            equal(indexer.post("/unregister", {"instance_id": 10000 + i, "model_name": f"z{i}"}, connection=connection).status, 404)
        grown = indexer.rss() - before
        check(SANITIZED or grown < 32 << 20, f"unknown names cost {grown >> 20} MiB")
        grown = [name for name in indexer.metrics().keys() - names if "nknown-" in name or "nope" in name]
        check(len(grown) == 0, f"metrics grow with unknown names: {grown[:3]}")
        for i, status in enumerate(statuses):
            if status == 201:
                body = {"instance_id": i, "model_name": f"model-{i}" + "x" * 900}
                equal(indexer.post("/unregister", body, connection=connection).status, 200)
        connection.close()
        equal(indexer.workers(), [])
        wait_until(lambda: indexer.metrics()["dynamo_kvindexer_models"] == 0, 20, "models to be forgotten")


def test_five_thousand_idle_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 20000:
        skip(f"needs 20000 descriptors, not {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (20000, hard))
    socks = []
    try:
        with Indexer("--max-connections", "6000", "--idle-timeout", "600s") as indexer:
            indexer.register(1, NOWHERE, block_size=4)
            connection = indexer.connect()
            equal(indexer.query([1, 2, 3, 4])["scores"], {})
            before = indexer.rss()
            for i in range(5000):
                socks.append(indexer.raw(HELLO[:i % len(HELLO)] if i % 2 else b""))
            for _ in range(50):
                equal(indexer.post("/query", {"model_name": MODEL, "token_ids": [1, 2, 3, 4]}, connection=connection).status, 200)
                equal(indexer.get("/health").status, 200)
            check(indexer.metrics()["kv_indexer_http_connections"] >= 5000)
            grown = indexer.rss() - before
            check(SANITIZED or grown < 5000 * (100 << 10), f"5000 idle connections cost {grown >> 20} MiB")
            connection.close()
            for sock in socks[::2]:  # half of them properly, the others without a goodbye
                sock.close()
            for sock in socks[1::2]:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            wait_until(lambda: indexer.metrics()["kv_indexer_http_connections"] < 10, 30, "connections to be forgotten")
    finally:
        for sock in socks:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_register_and_unregister_without_end():
    """Churn from several clients, the same names: nothing may pile up."""
    with Indexer() as indexer:
        rounds = 20 if SANITIZED else 100

        def churn(client, times):
            connection = indexer.connect()
            for i in range(times):
                body = {"instance_id": client * 10 + i % 3, "endpoint": NOWHERE, "model_name": f"m{i % 5}", "block_size": 4}
                status = indexer.post("/register", body, connection=connection).status
                check(status in (201, 409), f"register: {status}")
                status = indexer.post("/unregister", {k: body[k] for k in ("instance_id", "model_name")}, connection=connection).status
                check(status in (200, 404), f"unregister: {status}")
            connection.close()

        def flood(times):
            threads = [threading.Thread(target=churn, args=(client, times)) for client in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            equal(indexer.workers(), [])

        def descriptors():
            return len(os.listdir(f"/proc/{indexer.process.pid}/fd"))

        flood(rounds)
        fds, rss = descriptors(), indexer.rss()
        flood(3 * rounds)
        wait_until(lambda: descriptors() <= fds + 10, 20, "descriptors to be closed")
        grown = indexer.rss() - rss
        check(SANITIZED or grown < 32 << 20, f"it grew by {grown >> 20} MiB")


def test_too_little_memory():
    """The address space is limited while it runs: requests may fail, the service may not."""
    if SANITIZED:
        skip("the sanitizers need address space")
    # One arena, so that no address space is set aside; large bodies, so that none fits into what is.
    with Indexer("--max-body", "64MiB", env={"MALLOC_ARENA_MAX": "1"}) as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        tokens = list(range(400))
        engine.store(range(1, 101), tokens, block_size=4)
        indexer.wait_score(tokens, 1, 400)
        pid = indexer.process.pid
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        big = msgpack.packb({"model_name": MODEL, "token_ids": b"\0" * (48 << 20)})
        seen = {}
        # Room for small things: libzmq ends the process when it gets none, which isn't ours to prevent.
        resource.prlimit(pid, resource.RLIMIT_AS, (size + (16 << 20), unlimited[1]))

        def abuse(client):
            for i in range(30):
                kind = (client + i) % 2
                try:
                    if kind == 0:
                        status = indexer.post("/query", big, headers=MSGPACK, timeout=120).status
                    else:
                        reply = indexer.post("/query", {"model_name": MODEL, "token_ids": tokens}, timeout=120)
                        status = reply.status
                        if status == 200 and reply.json()["scores"] != {"1": {"0": 400}}:
                            status = -1  # a wrong answer
                except (OSError, http.client.HTTPException):  # dropped
                    status = 0
                seen[kind, status] = seen.get((kind, status), 0) + 1

        threads = [threading.Thread(target=abuse, args=(client,)) for client in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(indexer.process.poll() is None, f"it died: {indexer.process.returncode}")
        check({status for kind, status in seen if kind == 0} <= {0, 503}, f"{seen}")
        equal({status for kind, status in seen if kind == 1}, {200}, f"small queries: {seen}")
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
        indexer.wait_score(tokens, 1, 400)
        equal(indexer.post("/query", big, headers=MSGPACK).status, 200, "when there is memory again")
        engine.store([1001], [5] * 4, block_size=4)
        indexer.wait_score([5] * 4, 1, 4)
        wait_until(lambda: indexer.metrics()["kv_indexer_http_body_bytes"] == 0, what="memory to be returned")


if __name__ == "__main__":
    run(globals())
