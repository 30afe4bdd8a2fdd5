# SPDX-License-Identifier: Apache-2.0
"""kvasir.router in front of a real kv-indexer and engines that compute nothing: HTTP servers with a prefix cache of limited size.

Measured is the share of prompt tokens that the engines find in them, with this router and with one that takes turns.
"""
import contextlib
import http.client
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
import urllib.parse

from kvpython import BUILD, SLOW, check, equal, raises, run, wait_until  # first: it finds the package
from kvtest import MODEL, Indexer, free_port
import kvasir.router
from fleet import BLOCK, Engine, Front, fleet
from kvasir.client import held_tokens
from kvasir.router import Router

GROUPS, TALKS, TURNS, SYSTEM, GROWTH = 4, 24, 6, 20, 5  # SYSTEM blocks are the same in a group, each turn adds GROWTH


class InTurn(Router):
    """What it is measured against: each engine in its turn."""
    turn = 0

    def order(self, held, tokens):
        engines = list(self.engines.values())
        self.turn += 1
        return engines[self.turn % len(engines):] + engines[:self.turn % len(engines)]


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


def test_ids_are_those_of_answers():
    """An id of digits is a number in kv-indexer's answers, however the application wrote it."""
    router = Router(f"http://127.0.0.1:{free_port()}", {"7": "http://a:1", "pod-0": "http://b:1", 8: "http://c:1"}, model_name="m")
    held = held_tokens({"scores": {"7": {"0": 32}, "pod-0": {"0": 16}, "8": {"0": 64}}})
    equal([engine.number for engine in router.order(held, 64)], [8, 7, "pod-0"], "most held first")
    problem = raises(ValueError, Router, "http://127.0.0.1:1", {"7": "http://a:1", 7: "http://b:1"}, model_name="m")
    check("instance_id" in str(problem), str(problem))


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
    with fleet(count=3) as (front, _, settle):
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
    """With a weight of 0.6, two requests of 320 running tokens each cost more than 320 tokens to compute."""
    with fleet(count=2, params={"context_weight": .6}) as (front, engines, settle):
        prompt = list(range(320))
        holder = front.complete(prompt)["engine"]
        settle()
        equal(front.complete(prompt)["engine"], holder, "held, and idle")
        streams = []
        try:
            for _ in range(3):
                streams.append(front.send("/v1/completions", {"prompt": prompt, "stream": True, "wait": True}))
                equal(streams[-1].readline(), b"data: 0\n", "the first piece")
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
    equal(held_tokens({"scores": {"pod-a": {"0": 32}, "-1": {"0": 16}}}), {"pod-a": 32, "-1": 16}, "names stay text")


def test_engines_with_names():
    """A prompt's second request goes where the first went, by kv-indexer's answer; the router shows the names."""
    prompt = list(range(8 * BLOCK))
    with fleet(call='pod-"{}"'.format) as (front, engines, settle):
        first = front.complete(prompt)["engine"]
        settle()
        time.sleep(kvasir.router.SOON_S)  # what the router itself remembers is over
        before = front.router.held_tokens
        equal(front.complete(prompt)["engine"], first, "the engine of the same prompt")
        equal(front.router.held_tokens - before, len(prompt), "held tokens, as kv-indexer says")
        equal(set(front.router.state()["engines"]), {f'pod-"{engine.number}"' for engine in engines}, "names in /router")
        text = front.send("/metrics", method="GET").read().decode()
        check('kvasir_router_engine_up{engine="pod-\\"1\\""} 1' in text, text)


def test_it_stays_an_example():
    """Somebody reads it before they write their own."""
    lines = len(pathlib.Path(kvasir.router.__file__).read_text(encoding="utf-8").splitlines())
    check(lines <= 150, f"{lines} lines")


def test_as_a_program():
    with contextlib.closing(Engine(5)) as engine, Indexer() as indexer:
        command = [sys.executable, "-B", "-m", "kvasir.router", "--indexer", indexer.url, "--model", MODEL, "--port", "0", f"pod-5={engine.url}"]
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
