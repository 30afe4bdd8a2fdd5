# SPDX-License-Identifier: Apache-2.0
"""kvasir.router in front of a real kv-indexer and engines that compute nothing: HTTP servers with a prefix cache of limited size.

The stand-ins' caches are real: blocks by hash, the least recently used leave, and each change is published with kvasir.events.
Measured is the share of prompt tokens that the engines find in them, with this router and with one that takes turns.
"""
import asyncio
import contextlib
import http.client
import json
import pathlib
import random
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvpython import BUILD, SLOW, check, equal, run, wait_until  # first: it finds the package
from kvtest import MODEL, Indexer, free_port
from kvasir._asgi import listen
import kvasir.router
from kvasir.client import Client, held_tokens
from kvasir.events import Publisher
from kvasir.index import hash_tokens, sequence_hashes
from kvasir.router import Router

BLOCK, ENGINES, BLOCKS = 16, 4, 256  # tokens a block, engines, blocks in each engine's cache
GROUPS, TALKS, TURNS, SYSTEM, GROWTH = 4, 24, 6, 20, 5  # SYSTEM blocks are the same in a group, each turn adds GROWTH


class Engine:
    """A server of completions: says which engine it is, and how much of the prompt its cache had."""

    def __init__(self, number, port=0, replay=None):
        self.number, self.cache, self.lock = number, OrderedDict(), threading.Lock()
        self.prompt_tokens = self.cached_tokens = 0
        self.may_end, self.gone = threading.Event(), threading.Event()  # of an answer without an end
        self.events = Publisher("tcp://127.0.0.1:*", block_size=BLOCK, replay_endpoint="tcp://127.0.0.1:*")
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                engine.answer(self, {"object": "list", "engine": engine.number, "path": self.path})

            def do_POST(self):
                engine.serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    @staticmethod
    def answer(handler, body, status=200):
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def serve(self, handler, body):
        if not isinstance(body, dict):
            return self.answer(handler, {"error": "no request"}, 400)
        prompt = body.get("messages", body.get("prompt"))
        if handler.path == "/tokenize":
            return self.answer(handler, {"tokens": list(json.dumps(prompt).encode())})
        if prompt and isinstance(prompt[0], list):
            prompt = prompt[0]
        tokens = prompt if isinstance(prompt[0], int) else list(json.dumps(prompt).encode())
        found = self.compute(tokens)
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": found}}
        if not body.get("stream"):
            return self.answer(handler, {"engine": self.number, "usage": usage, "told": handler.headers.get("X-Told")})
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            for number in range(10 ** 9 if body.get("endless") else 5):
                line = b"data: %d\n\n" % number
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                if number == 0 and body.get("wait"):
                    check(self.may_end.wait(60 * SLOW), "nobody read the first piece")
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.gone.set()  # the client's end reached us
            handler.close_connection = True

    def compute(self, tokens):
        """Find the prompt's longest prefix in the cache, add the rest, and return the tokens found."""
        local = hash_tokens(tokens, BLOCK)
        hashes = list(sequence_hashes(local))
        with self.lock:
            found = 0
            while found < len(hashes) and hashes[found] in self.cache:
                found += 1
            new = hashes[found:]
            for key in reversed(hashes):  # the first block is the last to leave
                self.cache[key] = True
                self.cache.move_to_end(key)
            gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - BLOCKS)]
            if gone:
                self.events.removed(gone)
            if new:
                self.events.stored(new, tokens[found * BLOCK:len(hashes) * BLOCK], parent=hashes[found - 1] if found else None)
            self.prompt_tokens += len(tokens)
            self.cached_tokens += found * BLOCK
        return found * BLOCK

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.events.close()


class InTurn(Router):
    """What it is measured against: each engine in its turn."""
    turn = 0

    def order(self, held, tokens):
        engines = list(self.engines.values())
        self.turn += 1
        return engines[self.turn % len(engines):] + engines[:self.turn % len(engines)]


class Front:
    """A router served by a thread's event loop."""

    def __init__(self, kind, indexer, engines, **options):
        self.loop, self.started = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(kind, indexer, engines, options))
        self.thread.start()
        check(self.started.wait(60 * SLOW), "the router doesn't start")

    def _run(self, kind, indexer, engines, options):
        asyncio.set_event_loop(self.loop)

        async def begin():
            self.router = kind(indexer, engines, model_name=MODEL, query_s=60 * SLOW, connect_s=60 * SLOW, **options)
            self.server = await listen(self.router, "127.0.0.1", 0)
            self.port = self.server.sockets[0].getsockname()[1]

        self.loop.run_until_complete(begin())
        self.started.set()
        self.loop.run_forever()
        self.server.close()
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self.loop.run_until_complete(self.router.indexer.close())
        self.loop.close()

    def send(self, path, body=None, method="POST", headers=None, connection=None):
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60 * SLOW)
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def complete(self, prompt, **fields):
        reply = self.send("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})
        equal(reply.status, 200, "status")
        return json.loads(reply.read())

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@contextlib.contextmanager
def fleet(kind=Router, count=ENGINES, **options):
    """Engines, followed by a kv-indexer, behind a router: (router, engines, settle)."""
    with contextlib.ExitStack() as stack:
        indexer = stack.enter_context(Indexer())
        client = stack.enter_context(Client(indexer.url))
        engines = [stack.enter_context(contextlib.closing(Engine(number))) for number in range(1, count + 1)]
        for engine in engines:
            client.register(engine.number, engine.events.endpoint, model_name=MODEL, block_size=BLOCK,
                            replay_endpoint=engine.events.replay_endpoint)
        front = stack.enter_context(contextlib.closing(Front(kind, indexer.url, {each.number: each.url for each in engines}, **options)))

        def settle():
            """Wait until kv-indexer has applied all that the engines published."""
            for engine in engines:
                engine.events.flush(60 * SLOW)
            sent = {str(engine.number): engine.events.stats()["batches"] - 1 for engine in engines}

            def applied():
                last = {str(worker["instance_id"]): worker["listeners"]["0"].get("last_seq", -1) for worker in client.workers()}
                return last == sent

            wait_until(applied, timeout=60, what="the last batch")

        yield front, engines, settle


def measure(kind):
    """Share of prompt tokens found in the engines' caches, over TALKS conversations of TURNS turns."""
    rng = random.Random(7)
    systems = [[rng.randrange(1 << 16) for _ in range(SYSTEM * BLOCK)] for _ in range(GROUPS)]
    talks = [list(systems[number % GROUPS]) for number in range(TALKS)]
    with fleet(kind) as (front, engines, settle):
        for _ in range(TURNS):
            rng.shuffle(talks)
            for talk in talks:
                talk += [rng.randrange(1 << 16) for _ in range(GROWTH * BLOCK)]
                front.complete(talk)
                settle()
        state = front.router.state()
        prompt, cached = (sum(getattr(engine, name) for engine in engines) for name in ("prompt_tokens", "cached_tokens"))
        equal(state["prompt_tokens"], prompt, "the router's count of prompt tokens")
        check(all(engine.prompt_tokens for engine in engines), "an engine got nothing")
        if kind is Router:
            equal(state["held_tokens"], cached, "kv-indexer's answers, and what the engines found")
        return cached / prompt, max(engine.prompt_tokens - engine.cached_tokens for engine in engines)


def test_hit_rate_beside_round_robin():
    routed, most = measure(Router)
    turns, most_in_turn = measure(InTurn)
    # No prompt's last GROWTH blocks can be cached, and no first prompt of a group.
    tokens = TALKS * sum(SYSTEM + GROWTH * turn for turn in range(1, TURNS + 1))
    best = 1 - (TALKS * TURNS * GROWTH + GROUPS * SYSTEM) / tokens
    print(f"prompt tokens found in caches: {routed:.3f} routed by kv-indexer and load, {turns:.3f} in turn, {best:.3f} at most; "
          f"tokens that the busiest engine computed: {most} and {most_in_turn}")
    check(routed > 1.5 * turns, f"routed {routed:.3f}, in turn {turns:.3f}")
    check(most < most_in_turn, f"the busiest engine computed {most}, in turn {most_in_turn}")


def test_streams_pass_through():
    with fleet(count=1) as (front, (engine,), _):
        reply = front.send("/v1/completions", {"prompt": [1] * 40, "stream": True, "wait": True})
        equal((reply.status, reply.headers["Content-Type"]), (200, "text/event-stream"), "head")
        equal(reply.readline(), b"data: 0\n", "the first piece comes before the last is there")
        engine.may_end.set()
        equal(reply.read(), b"\n" + b"".join(b"data: %d\n\n" % number for number in range(1, 5)), "the rest")
        reply = front.send("/v1/completions", {"prompt": [1] * 40, "stream": True, "endless": True})
        equal(reply.read(9), b"data: 0\n\n", "an answer without an end")
        equal(front.router.state()["engines"]["1"]["running"], 1, "running")
        reply.close()
        check(engine.gone.wait(60 * SLOW), "the engine goes on for a client that is gone")
        wait_until(lambda: front.router.state()["engines"]["1"]["running"] == 0, timeout=60, what="nothing runs")
        equal(front.router.state()["engines"]["1"]["waiting_tokens"], 0, "nothing waits")


def test_text_and_chats_go_where_their_prefix_is():
    with fleet(count=3, request_tokens=0) as (front, _, settle):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of the sea. " * 20}]}
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"model": MODEL, "prompt": "Of the hills. " * 30}),
                           ("/v1/completions", {"model": MODEL, "prompt": [list(range(160)), [5]]})):
            first = json.loads(front.send(path, body, headers={"X-Told": "yes"}).read())
            settle()
            equal(first["told"], "yes", "a header of the client's")
            for _ in range(3):
                equal(json.loads(front.send(path, body).read())["engine"], first["engine"], "the engine of a repeated prompt")
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60 * SLOW)
        paths = [json.loads(front.send(f"/v1/models?n={n}", method="GET", connection=connection).read())["path"] for n in range(3)]
        equal(paths, [f"/v1/models?n={n}" for n in range(3)], "other requests, on one connection")
        equal(front.send("/v1/completions", [1, 2]).status, 400, "an odd request is the engine's to refuse")


def test_load_is_spread():
    with fleet(count=2) as (front, engines, settle):
        prompt = list(range(320))
        holder = front.complete(prompt)["engine"]
        settle()
        equal(front.complete(prompt)["engine"], holder, "held, and idle")
        streams = [front.send("/v1/completions", {"prompt": prompt, "stream": True, "wait": True}) for _ in range(3)]
        try:
            numbers = [front.router.state()["engines"][str(number)]["running"] for number in (holder, 3 - holder)]
            equal(numbers, [2, 1], "of three that run at once one goes elsewhere")
        finally:
            for engine in engines:
                engine.may_end.set()
            for stream in streams:
                stream.read()


def test_engines_that_are_down_are_left_out():
    with fleet(count=2, retry_s=600) as (front, engines, settle):
        prompt = list(range(160))
        holder = front.complete(prompt)["engine"]
        settle()
        engines[holder - 1].close()
        engines[holder - 1].close = lambda: None
        equal(front.complete(prompt)["engine"], 3 - holder, "the other one")
        state = json.loads(front.send("/router", method="GET").read())["engines"]
        equal([state[str(number)]["up"] for number in (holder, 3 - holder)], [False, True], "state")
        equal([front.complete(prompt)["engine"] for _ in range(3)], [3 - holder] * 3, "and no more is tried")
        equal(state[str(holder)]["requests"], front.router.engines[holder].requests, "requests that the dead one was tried with")
        engines[2 - holder].close()
        engines[2 - holder].close = lambda: None
        reply = front.send("/v1/completions", {"prompt": prompt})
        equal((reply.status, json.loads(reply.read())["error"]["code"]), (503, 503), "none is left")


def test_without_an_indexer_load_decides():
    with contextlib.closing(Engine(1)) as one, contextlib.closing(Engine(2)) as two:
        nobody = f"http://127.0.0.1:{free_port()}"
        with contextlib.closing(Front(Router, nobody, {1: one.url, 2: two.url}, retry_s=600)) as front:
            answers = [front.complete(list(range(64)))["engine"] for _ in range(4)]
            equal(sorted(answers), [1, 1, 2, 2], "in turn")


def test_held_tokens():
    equal(held_tokens({"scores": {"1": {"0": 32, "1": 64}, "7": {}}}), {1: 64, 7: 0}, "the best rank counts")


def test_it_stays_an_example():
    """Somebody reads it before they write their own."""
    lines = len(pathlib.Path(kvasir.router.__file__).read_text(encoding="utf-8").splitlines())
    check(lines <= 150, f"{lines} lines")


def test_bad_http():
    with fleet(count=1) as (front, _, _settle):
        import socket
        for sent, wanted in ((b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 411"), (b"hello\r\n\r\n", b"HTTP/1.1 400"),
                             (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"HTTP/1.1 413"),
                             (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"HTTP/1.1 400"),
                             (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"HTTP/1.1 400"),
                             (b"GET /" + b"x" * 100000, b"")):
            with socket.create_connection(("127.0.0.1", front.port), timeout=60 * SLOW) as client:
                client.sendall(sent)
                try:
                    answer = client.recv(12)
                except ConnectionResetError:
                    answer = b""
                equal(answer, wanted, sent[:40])
        equal(front.send("/v1/models", method="GET").status, 200, "it goes on")


def test_as_a_program():
    with contextlib.closing(Engine(5)) as engine, Indexer() as indexer:
        command = [sys.executable, "-B", "-m", "kvasir.router", "--indexer", indexer.url, "--model", MODEL, "--port", "0", f"5={engine.url}"]
        with subprocess.Popen(command, cwd=BUILD / "python", stdout=subprocess.PIPE, text=True) as program:
            try:
                url = program.stdout.readline().split()[-1]
                connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60 * SLOW)
                connection.request("POST", "/v1/completions", json.dumps({"prompt": [1, 2, 3]}))
                equal(json.loads(connection.getresponse().read())["engine"], 5, "the engine")
                program.send_signal(signal.SIGINT)  # while the client stays connected
                equal(program.wait(60 * SLOW), 0, "it ends")
            finally:
                program.kill()
                program.wait()


if __name__ == "__main__":
    run(globals())
