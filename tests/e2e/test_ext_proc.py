# SPDX-License-Identifier: Apache-2.0
"""Envoy's external processing against grpcio with Envoy's own messages: choices, bookings, limits, health."""
import asyncio
import json
import random
import socket
import struct
import subprocess

from kvtest import check, equal, is_closed, run, wait_until
from grpctest import CHUNK, PROCESS, Engine, Node, choice_of, first_message, grpc, header_map, pack, pb, unpack

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
IDS = json.dumps({"model": "m", "prompt": list(range(64))}).encode()
EVENT = b'data: {"choices":[]}\n\n'


def count(node, name, **labels):
    words = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return node.metrics().get(f"kv_selector_ext_proc_{name}{{{words}}}", 0)


def test_walk():
    """A request from its headers to its end: choice, body, booking, first token, output, end."""
    with Node(f"{A},{B}") as node, node.stream() as stream:
        equal(stream.route(IDS), f"{A},{B}", "endpoint and fallback")
        load = node.loads()
        equal((load["bookings"], load["tokens"], load["source"]), (1, 64, "given"))
        equal(load["workers"][0]["waiting"], 64)
        stream.response(kind="text/event-stream; charset=utf-8")
        equal(stream.next().WhichOneof("response"), "response_headers")
        stream.response_body(EVENT + EVENT[:5])
        stream.response_body(EVENT[5:] + EVENT)
        stream.response_body(b"data: [DONE]\n\n", last=True)
        equal(stream.echo("response_body"), 3 * EVENT + b"data: [DONE]\n\n")
        equal(stream.close(), grpc.StatusCode.OK)
        load = node.loads()
        equal((load["bookings"], load["freed"], load["unknown"]), (0, 1, 0))
        equal(count(node, "ends_total", end="done"), 1)


def test_first_token():
    """Waiting tokens end with the first chunk of an event stream; output is counted; the booking stays until the end."""
    with Node(A) as node, node.stream() as stream:
        stream.route(IDS)
        stream.response(kind="text/event-stream")
        stream.next()
        equal(node.loads()["workers"][0]["queued"], 1)
        stream.response_body(EVENT)
        stream.next()
        load = node.loads()["workers"][0]
        equal((load["queued"], load["waiting"], load["requests"], load["context"]), (0, 0, 1, 64))
        stream.response_body(EVENT * 3)
        stream.next()
        equal(node.loads()["workers"][0]["context"], 67, "prompt and output")
        stream.send(response_trailers=pb.HttpTrailers(trailers=header_map({"x": "y"})))
        equal(stream.next().WhichOneof("response"), "response_trailers")
        equal(node.loads()["bookings"], 0)


def test_prefix():
    """A prompt goes to where its twin went, another one to the other worker."""
    other = json.dumps({"model": "m", "prompt": list(range(1000, 1064))}).encode()
    with Node(A, B) as node, node.stream() as one, node.stream() as two, node.stream() as three:
        chosen = one.route(IDS)
        one.response(kind="text/event-stream")
        one.response_body(EVENT)
        one.next(), one.next()
        equal(two.route(IDS), chosen)
        check(three.route(other) != chosen, "the idle worker is the cheaper one")


def test_subset():
    with Node(A, B) as node:
        for wanted in (A, B):
            with node.stream() as stream:
                equal(stream.route(IDS, subset=["1.2.3.4:1", wanted]), wanted)
        for subset in ([], ["1.2.3.4:1"]):
            with node.stream() as stream:
                stream.headers(subset=subset)
                stream.body(IDS, last=True)
                status, body = stream.refusal()
                equal((status, body["error"]["code"]), (503, 503))
        equal(count(node, "requests_total", result="none_fits"), 2)
        wait_until(lambda: node.loads()["bookings"] == 0, what="no bookings")


def test_refusals():
    with Node("--max-requests", 1, A) as node, node.stream() as one, node.stream() as two:
        one.route(IDS)
        two.headers()
        two.body(IDS, last=True)
        equal(two.refusal()[0], 503, "every worker is full")
        equal(two.close(), grpc.StatusCode.OK)
    with Node("--queue", 10, A) as node, node.stream() as one, node.stream() as two, node.stream() as three:
        one.route(IDS)
        two.headers()
        two.body(IDS, last=True)
        status, body = two.refusal()
        equal((status, body["error"]["type"]), (429, "rate_limit_error"))
        three.headers()
        three.body(b'{"model":"other","prompt":"x"}', last=True)
        equal(three.refusal()[0], 500, "the picker fails")
        equal(node.loads()["booked"], 1)


def test_bodies():
    """Bodies of all lengths come back as they went; one of 1 MB in chunks of at most 62 KiB."""
    rest = json.dumps({"model": "m", "prompt": [1, 2], "pad": "x" * 1_000_000}).encode()
    with Node(A) as node:
        for body in (b"", b"{}", b"not JSON", IDS + b" " * (CHUNK - len(IDS)), IDS + b" " * (CHUNK + 1 - len(IDS)), rest):
            with node.stream() as stream:
                stream.headers()
                for i in range(0, len(body), 65536):
                    stream.body(body[i:i + 65536])
                stream.body(b"", last=True)
                stream.choice()
                equal(stream.echo(), body)
        with node.stream() as stream:
            stream.headers({":method": "GET"}, last=True)
            stream.choice()
        equal(count(node, "prompts_total", source="headers"), 1)
        equal(count(node, "prompts_total", source="unread"), 3)


def test_last_chunk_twice():
    """Envoy 1.35 to 1.37 may send the last chunk of either side twice: the second one is no message of the body."""
    with Node(A) as node, node.stream() as stream:
        stream.route(IDS)
        stream.body(IDS, last=True)
        stream.response()
        equal(stream.next().WhichOneof("response"), "response_headers")
        stream.response_body(b"{}", last=True)
        stream.response_body(b"{}", last=True)
        equal(stream.echo("response_body"), b"{}")
        stream.sent.put(None)
        equal(list(stream.call), [], "messages behind the end")
        load = node.loads()
        equal((load["booked"], load["freed"], load["unknown"]), (1, 1, 0))


def test_trailers():
    with Node(A) as node, node.stream() as stream:
        stream.headers()
        stream.body(IDS[:10])
        stream.body(IDS[10:])
        stream.send(request_trailers=pb.HttpTrailers(trailers=header_map({"x": "y"})))
        stream.choice()
        chunk = stream.next().request_body.response.body_mutation.streamed_response
        equal((chunk.body, chunk.end_of_stream), (IDS, False))
        equal(stream.next().WhichOneof("response"), "request_trailers")
        equal(node.loads()["source"], "given")


def test_other_modes():
    """Envoy that waits for the headers' answer before it sends the body, or sends none: the load decides at once."""
    for mode in (0, 1, 2):
        with Node(A) as node, node.stream() as stream:
            stream.headers(modes=(mode, mode))
            equal(stream.choice(), A)
            stream.body(IDS, last=True)
            check(not stream.next().request_body.HasField("response"), "the body stays as it is")
            stream.response(kind="text/event-stream")
            stream.response_body(EVENT, last=True)
            equal(stream.next().WhichOneof("response"), "response_headers")
            check(not stream.next().response_body.HasField("response"), "the body stays as it is")
            wait_until(lambda: node.loads()["freed"] == 1, what="the end")


def test_early():
    """A body beyond the limit is routed by the load before its end, and goes by as it comes."""
    with Node("--max-body", 1000, A) as node, node.stream() as stream:
        body = random.Random(1).randbytes(3000)
        stream.headers()
        for i in range(0, 3000, 500):
            stream.body(body[i:i + 500], last=i == 2500)
        stream.choice()
        equal(stream.echo(), body)
        equal((count(node, "prompts_total", source="early"), count(node, "body_bytes")), (1, 0))


def test_lost():
    """A worker that answers with an error has not computed the prompt."""
    with Node(A) as node, node.stream() as stream:
        stream.route(IDS)
        stream.response("503", last=True)
        stream.next()
        equal((node.loads()["lost"], count(node, "ends_total", end="lost")), (1, 1))


def test_cancelled():
    """A cancelled stream frees its booking: before the response, within it, and while an engine tokenizes."""
    with Engine(paused=True) as engine, Node("--tokenize", f"http://{engine.address}", "--tokenize-ms", 30000, A) as node:
        with node.stream() as one, node.stream() as two, node.stream() as three, node.stream() as four:
            one.route(IDS)
            two.route(IDS)
            two.response(kind="text/event-stream")
            two.response_body(EVENT)
            two.next(), two.next()
            three.headers()
            three.body(b'{"prompt":"hello"}', last=True)
            four.headers()
            four.body(b"{")
            wait_until(lambda: engine.asked, what="the question")
            equal(node.loads()["bookings"], 2)
        wait_until(lambda: node.loads()["bookings"] == 0 and count(node, "streams") == 0, what="the end of all streams")
        equal((count(node, "ends_total", end="cancelled"), count(node, "ends_total", end="done")), (1, 1))
        equal(node.loads()["booked"], 2)


def test_many_cancelled():
    """A proxy whose clients hang up cancels streams by the thousand, and keeps its connection."""
    states = []
    with Node(A) as node, node.stream() as living:
        living.headers(last=True)
        living.choice()
        node.channel.subscribe(states.append)
        for _ in range(1600):
            with node.stream() as stream:
                stream.headers(last=True)
                stream.choice()
        equal(states, [grpc.ChannelConnectivity.READY])


def test_deadline():
    with Node(A) as node, node.stream(timeout=0.2) as stream:
        stream.route(IDS)
        try:
            stream.next()
            raise AssertionError("the deadline passed")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        wait_until(lambda: node.loads()["bookings"] == 0, what="the end of the booking")


def test_tokenizer():
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello \u00e9"}], "tools": [{"type": "function"}], "temperature": 0,
            "add_generation_prompt": False, "chat_template": None}
    with Engine() as engine, Node("--tokenize", f"http://{engine.address}/", "--tokenize-ms", 60000, A) as node:
        with node.stream() as one, node.stream() as two:
            one.route(json.dumps(chat).encode())
            two.route(b'{"stream": true, "prompt": "some text", "model": "m"}')
            del chat["temperature"], chat["chat_template"]
            equal(engine.asked, [chat, {"model": "m", "prompt": "some text"}])
            load = node.loads()
            equal((load["tokens"], load["source"]), (len(json.dumps(chat["messages"])) + len('"some text"'), "engine"))


def test_tokenizer_fails():
    """A prompt that the engine refuses is the client's fault; a slow or broken engine isn't asked for a while."""
    text = b'{"prompt":"' + b"x" * 400 + b'"}'
    with Engine(status=400) as engine, Node("--tokenize", f"http://{engine.address}", "--tokenize-ms", 60000, A) as node:
        for i in range(12):
            with node.stream() as stream:
                stream.route(text)
        equal(len(engine.asked), 12)
        equal(count(node, "prompts_total", source="failed"), 12)
    with Engine(paused=True) as engine, Node("--tokenize", f"http://{engine.address}", "--tokenize-ms", 20, A) as node:
        for i in range(12):
            with node.stream() as stream:
                stream.route(text)
        equal(node.loads()["tokens"], 12 * 100, "a guess by length")
        check(count(node, "prompts_total", source="slow") >= 8, "slow ones")

        def is_left_alone():
            with node.stream() as stream:
                stream.route(text)
            return count(node, "prompts_total", source="failed") >= 1

        wait_until(is_left_alone, what="a prompt for which the engine isn't asked")


def test_no_tokens():
    """An engine that says a prompt has no tokens isn't believed: the load would be nothing."""
    class Empty(Engine):
        def answer(self, request, body):
            self.reply(request, 200, "application/json", b'{"count":0,"tokens":[]}')

    with Empty() as engine, Node("--tokenize", f"http://{engine.address}", "--tokenize-ms", 60000, A) as node:
        with node.stream() as stream:
            stream.route(b'{"prompt":"' + b"x" * 398 + b'"}')
            load = node.loads()
            equal((load["tokens"], load["source"]), (100, "failed"))


def test_health():
    with Node(A) as node, Node() as empty:
        def check_of(node, service):
            call = node.channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
            return call(bytes([10, len(service)]) + service.encode() if service else b"")

        equal(check_of(node, ""), b"\x08\x01")
        for service in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            equal((check_of(node, service), check_of(empty, service)), (b"\x08\x01", b"\x08\x02"), service)
        equal(check_of(empty, "liveness"), b"\x08\x01")
        for method, service, code in (("Check", "other", grpc.StatusCode.NOT_FOUND), ("Watch", "", grpc.StatusCode.UNIMPLEMENTED)):
            try:
                node.channel.unary_unary("/grpc.health.v1.Health/" + method, bytes, bytes)(bytes([10, len(service)]) + service.encode())
                raise AssertionError(method)
            except grpc.RpcError as error:
                equal(error.code(), code)


def test_many():
    """A thousand streams at a time, one of ten with a large body and one of ten cancelled."""
    big = json.dumps({"model": "m", "prompt": [1] * 40, "pad": "x" * 100_000}).encode()

    async def request(i, stub, together):
        call = stub()
        await call.write(first_message())
        body = big if i % 10 == 0 else IDS
        for at in range(0, len(body), 60000):
            await call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=body[at:at + 60000], end_of_stream=at + 60000 >= len(body))))
        choice_of(await call.read())
        got = b""
        while len(got) < len(body):
            got += (await call.read()).request_body.response.body_mutation.streamed_response.body
        equal(got, body)
        together.append(i)
        while len(together) < 1000:
            await asyncio.sleep(0.05)
        if i % 10 == 1:
            call.cancel()
            return
        await call.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=header_map({":status": "200"}), end_of_stream=True)))
        await call.read()
        await call.done_writing()
        equal(await call.code(), grpc.StatusCode.OK)

    async def all_of_them(node):
        channels = [grpc.aio.insecure_channel(node.target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
        stubs = [channel.stream_stream(PROCESS, pack, unpack) for channel in channels]
        together = []
        await asyncio.gather(*(request(i, stubs[i % 4], together) for i in range(1000)))
        for channel in channels:
            await channel.close()

    with Node(A, B) as node:
        asyncio.run(all_of_them(node))
        wait_until(lambda: node.loads()["bookings"] == 0 and count(node, "streams") == 0, what="the end of all streams")
        load = node.loads()
        equal((load["booked"], load["freed"]), (1000, 1000))
        equal((count(node, "ends_total", end="done"), count(node, "ends_total", end="cancelled")), (900, 100))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(path=PROCESS, kind="application/grpc", method="POST"):
    """A block of literal headers, not indexed."""
    pairs = {":method": method, ":scheme": "http", ":path": path, ":authority": "x", "content-type": kind}
    return b"".join(b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode() for key, value in pairs.items())


def start():
    return PREFACE + frame(4, 0, 0)


def test_junk():
    """Whatever comes, the connection ends or the stream does, and others are served."""
    shuffle = random.Random(7)
    junk = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, PREFACE + b"\xff" * 1000, start() + frame(1, 4, 1, b"\xff\xff\xff\xff"),
            start() + frame(0, 0, 1, b"data without headers"), start() + frame(1, 4, 2, request_headers()),
            start() + frame(9, 4, 1, b"x") + frame(8, 0, 0, b"\0\0\0\0"), start() + frame(6, 0, 0, b"short")]
    with Node(A) as node:
        for data in junk + [start() + shuffle.randbytes(200) for _ in range(50)]:
            with socket.create_connection(("127.0.0.1", node.port)) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                check(is_closed(sock), f"after {data[:80]!r}")
        with node.stream() as stream:
            equal(stream.route(IDS), A)


def ends(node, *frames):
    """Whether the server ends stream 1 by headers after @frames, with the connection still open."""
    got = b""
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        sock.sendall(start() + b"".join(frames))
        sock.settimeout(60)
        while True:
            while len(got) >= 9 and len(got) >= 9 + int.from_bytes(got[:3], "big"):
                kind, flags, stream = struct.unpack(">BBI", got[3:9])
                if (kind, flags & 1, stream) == (1, 1, 1):
                    return True
                got = got[9 + int.from_bytes(got[:3], "big"):]
            data = sock.recv(65536)
            if not data:
                return False
            got += data


def curl_status(node, *args):
    done = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--http2-prior-knowledge", *args, f"http://{node.target}{PROCESS}"],
                          capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def test_bad_messages():
    """Messages that gRPC forbids or the server refuses end their call with a status."""
    opening = frame(1, 4, 1, request_headers())
    with Node(A) as node:
        def code(message):
            call = node.channel.stream_stream(PROCESS, bytes, bytes)(iter([message]))
            try:
                list(call)
            except grpc.RpcError:
                pass
            return call.code()

        equal(code(b"\x0a\xff\xff\xff\xff\x0f"), grpc.StatusCode.INVALID_ARGUMENT, "no ProcessingRequest")
        equal(code(b"\x12" * 100), grpc.StatusCode.INVALID_ARGUMENT, "no ProcessingRequest")
        equal(code(b"x" * (5 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, "5 MiB")
        equal(code(first_message().SerializeToString() + b"\x6a\x00" * 1_000_000), grpc.StatusCode.INVALID_ARGUMENT, "a million unknown fields")
        equal(code(b""), grpc.StatusCode.OK, "an empty message")
        packed = node.channel.stream_stream(PROCESS, pack, unpack)(iter([first_message({"x": "y" * 1000})]), compression=grpc.Compression.Gzip)
        equal(packed.code(), grpc.StatusCode.UNIMPLEMENTED, "a compressed message")
        large = node.channel.stream_stream(PROCESS, pack, unpack)(iter([]), metadata=[(f"x{i}", "y" * 1000) for i in range(40)])
        check(large.code() != grpc.StatusCode.OK, "headers of 40 KB")
        check(ends(node, opening, frame(0, 0, 1, b"\x01\0\0\0\0")), "a compressed message")
        check(ends(node, opening, frame(0, 1, 1, b"\0\0\0\0\x05ab")), "a message cut off")
        check(ends(node, frame(1, 4, 1, request_headers("/a.b/c"))), "an unknown method")
        equal((curl_status(node), curl_status(node, "-X", "POST")), ("405", "415"), "no gRPC")
        with node.stream() as stream:
            equal(stream.route(IDS), A)


def test_stop():
    """At its end the server lets running streams finish, and takes no new connections."""
    with Node("--drain-ms", 60000, A) as node, node.stream() as stream:
        stream.route(IDS)
        node.process.stdin.close()
        stream.response()
        stream.next()
        stream.response_body(b"{}", last=True)
        equal(stream.echo("response_body"), b"{}")
        equal(stream.close(), grpc.StatusCode.OK)
        equal(node.process.wait(60), 0)
    with Node("--drain-ms", 1, A) as node, node.stream() as stream:
        stream.route(IDS)
        node.process.stdin.close()
        equal(node.process.wait(60), 0, "the booking of a stream that was cancelled is freed")


if __name__ == "__main__":
    run(globals())
