# SPDX-License-Identifier: Apache-2.0
"""kvasir.router beside engines that die of a request, are silent or answer nonsense, bodies that hold up others, and no kv-indexer."""
import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading

from kvpython import SLOW, check, equal, run, wait_until  # first: it finds the package
from kvtest import free_port
from fleet import Front, fleet
from kvasir._fleet import ASKED_MAX, _begin
from kvasir._json import ITEMS_MAX, STEP, loads
from kvasir._openai import Prompt
from kvasir.router import Router

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of the sea. " * 20}]}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntext"


class Raw:
    """A server that answers each request with the bytes that @answer(first line, its body) gives, and closes. None: it is silent."""

    def __init__(self, answer):
        self.answer, self.seen, self.held = answer, [], []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        while True:
            connection, _ = self.socket.accept()
            with connection.makefile("rb") as file:
                first = file.readline().decode()
                if not first:
                    connection.close()
                    return
                length = 0
                fields = []
                while (line := file.readline()) not in (b"\r\n", b""):
                    fields.append(line.strip().lower())
                    if fields[-1].startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = file.read(length)
            self.seen.append((first.strip(), body, fields))
            told = self.answer(first, body)
            if told is None:
                self.held.append(connection)
                continue
            with contextlib.suppress(OSError):
                connection.sendall(told)
            connection.close()

    def asked(self, word):
        """How many requests had @word in their first line."""
        return sum(word in first for first, _, _ in self.seen)

    def close(self):
        socket.create_connection(self.socket.getsockname()).close()
        self.thread.join()
        for each in (*self.held, self.socket):
            each.close()


def as_json(value):
    data = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


@contextlib.contextmanager
def behind(*answers, **options):
    """A router without kv-indexer in front of Raw engines: (front, engines)."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(Raw(answer))) for answer in answers]
        nobody = f"http://127.0.0.1:{free_port()}"
        urls = {number: engine.url for number, engine in enumerate(engines, 1)}
        front = stack.enter_context(contextlib.closing(Front(Router, nobody, urls, **options)))
        yield front, engines


def lives(first, _):
    return b"HTTP/1.1 404 \r\ncontent-length: 0\r\n\r\n" if first.startswith("GET") or "/tokenize" in first else OK


def test_a_request_that_kills_an_engine_goes_to_no_other():
    def dies(first, _):
        return b"" if "/v1/completions " in first and first.startswith("POST") else lives(first, _)

    def dies_late(first, _):
        return b"HTTP/1.1 200 OK\r\nconte" if first.startswith("POST /v1/completions ") else lives(first, _)

    for kind in dies, dies_late:
        with behind(kind, kind, kind) as (front, engines):
            reply = front.send("/v1/completions", {"prompt": [1, 2, 3]})
            equal((reply.status, json.loads(reply.read())["error"]["code"]), (502, 502), "the answer")
            equal(sum(engine.asked("POST /v1/completions ") for engine in engines), 1, "engines that saw it")
            check(all(each["up"] for each in front.router.state()["engines"].values()), "none is down")


def test_a_prompt_that_kills_a_tokenizer_goes_to_no_other():
    def dies(first, _):
        return b"" if first.startswith("POST") else lives(first, _)

    with behind(dies, dies, dies) as (front, engines):
        equal(front.send("/v1/chat/completions", CHAT).status, 502, "status")
        equal(sum(engine.asked("POST") for engine in engines), 1, "engines that saw it")


def test_engines_that_say_that_they_are_down():
    """502, 503 and 504, and no connection: the next one."""
    for status in 502, 503, 504:
        def down(first, _, status=status):
            return lives(first, _) if first.startswith("GET") else b"HTTP/1.1 %d \r\ncontent-length: 0\r\n\r\n" % status

        with behind(down, lives, retry_s=600) as (front, engines):
            for _ in range(3):
                equal(front.send("/v1/completions", {"prompt": [1, 2, 3]}).read(), b"text", f"the other one, after {status}")
            equal([engine.asked("POST") for engine in engines], [1, 3], f"requests with {status}")
    with behind(lambda *_: b"HTTP/1.1 500 \r\ncontent-length: 0\r\n\r\n", lives, retry_s=600) as (front, engines):
        statuses = sorted(front.send("/v1/completions", {"prompt": [1, 2, 3]}).status for _ in range(2))
        equal((statuses, engines[0].asked("POST")), ([200, 500], 1), "500 is an answer")


def test_an_engine_that_never_answers_stops_nobody():
    """Its kernel takes the connections; nobody reads them."""
    for path, body in ("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Of the hills"}), ("/v1/completions", {"prompt": [1, 2, 3]}):
        with behind(lambda *_: None, lives, tokenize_s=2 * SLOW, retry_s=600) as (front, engines):
            replies, threads = [], []
            for _ in range(8):
                threads.append(threading.Thread(target=lambda: replies.append(front.send(path, body).read())))
                threads[-1].start()
            for thread in threads:
                thread.join()
            equal(replies, [b"text"] * 8, path)
            equal(engines[0].asked("POST " + path + " "), 0, "the silent one gets no request")
            equal([each["up"] for each in front.router.state()["engines"].values()], [False, True], "up")
            problem = front.router.state()["engines"]["1"]["problem"]
            check("silent" in problem or "in time" in problem, problem)


def test_an_engine_that_falls_silent_is_told():
    with behind(lambda first, _: None if first.startswith("POST") else lives(first, _), answer_s=0.2) as (front, engines):
        reply = front.send("/v1/completions", {"prompt": [1, 2, 3]})
        equal((reply.status, json.loads(reply.read())["error"]["code"]), (504, 504), "no head")
        equal(engines[0].asked("POST"), 1, "requests")


def test_tokens_are_asked_of_each_engine_in_turn():
    def tokens(first, _):
        return as_json({"tokens": [1, 2, 3]}) if "/tokenize" in first else lives(first, _)

    with behind(tokens, tokens, tokens) as (front, engines):
        for _ in range(6):
            front.send("/v1/chat/completions", CHAT).read()
        equal([engine.asked("/tokenize") for engine in engines], [2, 2, 2], "questions")


def test_the_client_s_key_goes_with_the_question():
    def guarded(first, _):
        return as_json({"tokens": [1, 2, 3]}) if "/tokenize" in first else lives(first, _)

    with behind(guarded) as (front, (engine,)):
        front.send("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer abc", "X-Other": "1"}).read()
        ((_, _, fields),) = [each for each in engine.seen if "/tokenize" in each[0]]
        check(b"authorization: bearer abc" in fields, fields)
        check(not any(field.startswith(b"x-other") for field in fields), "no other header")


def test_broken_answers_are_not_passed_on():
    for answer in (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n0\r\n\r\n",
                   b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\ntext", b"HTTP/1.1 200 OK\r\nx: y\nz: text\r\n\r\n", b"nonsense\r\n\r\n"):
        with behind(lambda *_, answer=answer: answer) as (front, _):
            equal(front.send("/v1/models", method="GET").status, 502, answer)
    with behind(lambda *_: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n-4\r\ntext\r\n0\r\n\r\n") as (front, _):
        reply = front.send("/v1/models", method="GET")
        try:
            check(False, f"a whole answer: {reply.read()}")
        except http.client.IncompleteRead as problem:
            equal(problem.partial, b"text", "what came before")
        equal(front.send("/router", method="GET").status, 200, "it goes on")


def test_requests_that_no_parser_likes():
    """The engine says what is wrong; the router goes on."""
    with behind(lives) as (front, (engine,)):
        for body in b"[" * 1000, b'{"a":' * 100000, b"[" * 10 ** 6, b"\xff", b"", b'{"prompt": ' + b"[" * 5000, b'{"messages": 5}', b"nul", b'{"prompt": [1' + b",,1" * STEP + b"]}":
            connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60 * SLOW)
            connection.request("POST", "/v1/chat/completions", body)
            equal(connection.getresponse().read(), b"text", body[:20])
            connection.close()
        equal(engine.asked("POST /v1/chat/completions "), 9, "requests")


def test_chunked_requests_are_taken():
    with behind(lives) as (front, (engine,)):
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60 * SLOW)
        connection.request("POST", "/v1/completions", iter([b'{"prompt"', b": [1, 2]}"]), encode_chunked=True)
        equal(connection.getresponse().read(), b"text", "answer")
        equal(engine.seen[-1][1], b'{"prompt": [1, 2]}', "what the engine got")
        connection.close()


def test_long_lists_of_tokens_hold_up_nobody():
    async def turns(data):
        n, done = 0, False

        async def others():
            nonlocal n
            while not done:
                n += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        try:
            return await loads(data, "prompt"), n
        finally:
            done = True
            await task

    tokens = list(range(100000, 400000))
    for value in {"model": "m", "prompt": tokens}, {"prompt": [tokens], "n": 1}:
        data = json.dumps(value).encode()
        parsed, n = asyncio.run(turns(data))
        equal(parsed, value, "what json.loads makes of it")
        check(n >= len(data) // STEP - 2, f"{n} turns of others")

    def refused(data):
        try:
            asyncio.run(loads(data, "prompt"))
        except ValueError:
            return True
        return False

    check(refused(json.dumps({"other": tokens}).encode()), "a list in another place")
    check(refused(json.dumps({"prompt": [tokens, tokens]}).encode()), "two of them")
    check(refused(json.dumps({"prompt": ["a"] * (ITEMS_MAX + 1)}).encode()), "too many values")
    check(not refused(json.dumps({"prompt": "[" + "1, " * STEP, "x": 1}).encode()), "a text that begins like one")
    check(refused(json.dumps({"prompt": "[" + "1, " * STEP + "1]"}).encode()), "a text that looks like one")
    long = Prompt(list(range(ASKED_MAX + 100)), [{"id": "a", "offset": 5, "length": 9}, {"id": "b", "offset": ASKED_MAX - 3, "length": 9}])
    equal((len(_begin(long)[0]), _begin(long)[1]), (ASKED_MAX - 3, long.objects[:1]), "what kv-indexer is asked for")
    equal(_begin(Prompt([1, 2], [])), ([1, 2], []), "of a short one all")


class Lines(logging.Handler):
    """Log lines, kept."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("kvasir.router").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_a_dead_indexer_is_told():
    log = Lines()
    with behind(lives, retry_s=0.0) as (front, _):
        for _ in range(3):
            front.send("/v1/completions", {"prompt": [1, 2, 3]}).read()
        state = json.loads(front.send("/router", method="GET").read())["indexer"]
        equal((state["up"], state["failures"]), (False, 3), "state")
        check("refused" in state["problem"] or "Connect call failed" in state["problem"], state["problem"])
        equal(sum("tells nothing" in line for line in log.lines), 1, f"lines: {log.lines}")
        text = front.send("/metrics", method="GET").read().decode()
        check("kvasir_router_indexer_up 0\n" in text and "kvasir_router_indexer_failures_total 3\n" in text, text)
        check('kvasir_router_engine_requests_total{engine="1"} 3\n' in text, text)
    with fleet(count=1) as (front, _, _settle):
        front.complete([1, 2, 3])
        equal(front.router.state()["indexer"]["up"], True, "a living one")
        check("kvasir_router_indexer_up 1\n" in front.send("/metrics", method="GET").read().decode(), "metric")


def test_an_indexer_that_comes_back_is_told():
    log = Lines()
    with fleet(count=1, retry_s=0.0) as (front, _, _settle):
        alive, dead = front.router.asked.client, Router(f"http://127.0.0.1:{free_port()}", {}, model_name="m").indexer
        front.router.asked.client = dead
        front.complete([1, 2, 3])
        front.router.asked.client = alive
        front.complete([1, 2, 3])
        wait_until(lambda: any("answers again" in line for line in log.lines), timeout=60, what="the line")


if __name__ == "__main__":
    run(globals())
