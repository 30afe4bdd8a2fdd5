#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The block manager's object tier over real servers that are killed, frozen and away.

Whatever happens to the server: calls end at their deadlines, the breaker opens and closes, and no block has wrong bytes.
"""
import pathlib
import re
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from redistest import *
from s3_double import S3, environment

CLIENT = BUILD / "tests" / "object_client"
OVER_MS = 10_000  # what a busy machine may add to a deadline


class Client:
    """A program with an object tier; @timeout_ms is that of batches without a deadline, and of its close."""

    def __init__(self, uri, block=20_000, timeout_ms=2000):
        self.timeout_ms = timeout_ms
        self.process = subprocess.Popen([str(CLIENT), uri, str(block), str(timeout_ms)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(), text=True)
        try:
            equal(self.process.stdout.readline(), "0\n", "opening")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        check(line, "the client is gone")
        found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        equal(found.get("wrong", 0), 0, f"wrong blocks: {line}")
        check(found.get("over_ms", 0) < OVER_MS, f"a deadline was not kept: {line}")
        return found

    def all_ok(self, op, first, n, ms=20_000):
        """So that every block of it is there: soon, if not at once."""
        wait_until(lambda: self.ask(op, first, n, ms)["ok"] == n, 30, f"{op} of {n} blocks")

    def close(self):
        """It ends by itself, in time."""
        started = time.monotonic()
        self.process.stdin.close()
        equal(self.process.wait(timeout=self.timeout_ms / 1000 + patience(10)), 0, "exit status")
        return time.monotonic() - started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def storm_while(client, what, ms=4000, deadline_ms=300):
    """@what happens while six threads of the client put and get; returns how that went."""
    client.process.stdin.write(f"storm 6 {ms} {deadline_ms}\n")
    client.process.stdin.flush()
    what()
    return client.answer()


def test_works():
    with Server() as server, Client(server.uri) as client, Client(server.uri) as other:
        equal(client.ask("get", 0, 50, 20_000)["miss"], 50)
        client.all_ok("put", 0, 50)
        equal(other.ask("get", 0, 60, 20_000), {"ok": 50, "miss": 10, "bad": 0, "late": 0, "down": 0, "failed": 0, "wrong": 0, "over_ms": 0})
        equal(other.ask("exists", 40, 20, 20_000)["ok"], 10)
        other.all_ok("put", 0, 60)
        equal(client.ask("get", 0, 60, 20_000)["ok"], 60)
        client.close()
        other.close()


def expect_bad(client, again):
    """Of blocks 0 to 20 the even ones were damaged: bad at first, alone and in a batch; @again says what they are then."""
    for first, n, expected in ((0, 1, [0, 1, 0]), (1, 19, [10, 9, 0])):
        counts = client.ask("get", first, n, 20_000)
        equal([counts[name] for name in ("ok", "bad", "miss")], expected, f"{n} blocks")
    equal(client.ask("stats")["bad"], 10)
    equal(client.ask("get", 0, 20, 20_000)[again], 10, "once more")


def test_damage_in_redis():
    """Damaged values count as bad, which operators alert on, and not as misses. The plugin removes them."""
    with Server() as server, Client(server.uri) as client, Client(server.uri) as other:
        keys = set()
        for block in range(20):  # one by one: their keys are hashes
            client.all_ok("put", block, 1)
            now = set(server.command("KEYS", "c:*"))
            if block % 2 == 0:
                for key in now - keys:
                    server.command("SETRANGE", key, 5000, "?????")
            keys = now
        expect_bad(other, "miss")
        other.all_ok("put", 0, 20)
        other.all_ok("get", 0, 20)


def test_damage_in_s3():
    """Likewise; the object stays until the next put of it replaces it."""
    with S3() as s3, Client(s3.uri()) as client, Client(s3.uri()) as other:
        keys = set()
        for block in range(20):
            client.all_ok("put", block, 1)
            now = {key for key in s3.keys() if "/c/" in key}
            for key in now - keys if block % 2 == 0 else ():
                body = s3.objects[key].body
                s3.objects[key] = s3.objects[key]._replace(body=body[:5000] + b"?????" + body[5005:])
            keys = now
        expect_bad(other, "bad")
        other.all_ok("put", 0, 20)
        other.all_ok("get", 0, 20)


def test_killed():
    """SIGKILL under load, and back from its log: what was put before is there, and the breaker has opened and closed."""
    with Server("--appendonly", "yes", "--appendfsync", "always") as server, Client(server.uri + "?timeout_ms=5000") as client:
        client.all_ok("put", 1000, 100)

        def kill_and_start():
            time.sleep(1)
            server.kill()
            time.sleep(2)
            server.start()

        told = storm_while(client, kill_and_start, ms=8000, deadline_ms=1000)
        check(told["ok"] > 0 and told["down"] > 0, told)
        client.all_ok("get", 1000, 100)
        client.all_ok("put", 0, 200)
        client.all_ok("get", 0, 200)
        stats = client.ask("stats")
        check(stats["opened"] > 0 and not stats["open"] and stats["bad"] == 0, stats)
        client.close()


def test_frozen():
    """SIGSTOP: the plugin's own time is longer than the batches', whose deadlines hold all the same."""
    with Server() as server, Client(server.uri + "?timeout_ms=20000", timeout_ms=500) as client:
        client.all_ok("put", 0, 100)

        def freeze():
            time.sleep(0.5)
            with server.frozen():
                time.sleep(12)

        told = storm_while(client, freeze, ms=15_000)
        check(told["ok"] > 0 and told["late"] > 0 and told["down"] > 0, told)
        client.all_ok("get", 0, 100)
        wait_until(lambda: client.ask("stats")["left_behind"] == 0, 30, "the threads to come back")
        stats = client.ask("stats")
        check(stats["opened"] > 0 and not stats["open"] and stats["bad"] == 0, stats)
        client.close()


def test_refused_while_frozen():
    """Once the breaker is open a call costs nothing; closing does not wait for the server."""
    with Server() as server, Client(server.uri + "?timeout_ms=60000", timeout_ms=500) as client:
        client.all_ok("put", 0, 10)
        with server.frozen():
            wait_until(lambda: client.ask("get", 0, 10, 100)["down"] == 10, 30, "the breaker")
            started, down = time.monotonic(), 0
            for _ in range(200):
                down += client.ask("get", 0, 1, 100)["down"]
            check(down >= 100, f"only {down} of 200 were refused")
            check(time.monotonic() - started < patience(5), "refusals must be at once")
            check(client.close() < 50, "close must not wait for a frozen server")


def test_away():
    """The server comes later than its user."""
    port = free_port()
    with Client(f"redis://127.0.0.1:{port}/?timeout_ms=300") as client:
        equal(client.ask("get", 0, 5, 1000)["down"], 5)
        check(client.ask("stats")["open"])
        with Server(port=port):
            client.all_ok("put", 0, 5)
            client.all_ok("get", 0, 5)
        client.close()


def test_evicting():
    """A server that throws out what is old: misses, and puts that may say that it is full. Never an outage."""
    with Server("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as server, Client(server.uri, block=100_000) as client:
        for first in range(0, 600, 20):
            client.ask("put", first, 20, 20_000)
        told = client.ask("get", 0, 200, 20_000)
        check(told["miss"] > 0 and told["failed"] == 0, told)

        def kept():
            client.ask("put", 580, 20, 20_000)
            return client.ask("get", 580, 20, 20_000)["ok"] > 0

        wait_until(kept, 60, "blocks that were put just now")  # some puts find the server full
        equal(client.ask("stats")["opened"], 0)
        client.close()


def test_s3():
    with S3() as s3:
        with Client(s3.uri(), timeout_ms=20_000) as client, Client(s3.uri()) as other:
            equal(client.ask("get", 0, 20, 20_000)["miss"], 20)
            client.all_ok("put", 0, 20)
            equal(other.ask("exists", 0, 30, 20_000)["ok"], 20)
            other.all_ok("get", 0, 20)
            s3.fault("GET /b/p/c/", "cut", times=5)  # the plugin asks again
            other.all_ok("get", 0, 20)
            check(any("kvbm-object-" in key for key in s3.keys()), s3.keys())
            client.close()
            other.close()


if __name__ == "__main__":
    run(globals())
