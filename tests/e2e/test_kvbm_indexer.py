# SPDX-License-Identifier: Apache-2.0
"""Managers that ask a real kv-indexer which peers have a prompt.

Two nodes (tests/e2e/kvbm_node.c) store prompts and publish their events; a third loads them, with every byte compared by
the node itself. The indexer is killed, frozen, replaced by something else, and told wrong names.
"""
import http.server
import os
import signal
import subprocess
import tempfile
import threading
import time

from kvtest import *

BLOCK, N = 8, 48


class Node:
    def __init__(self, folder, worker, peers="-", indexer="-"):
        self.worker, self.at = worker, f"unix:{folder}/{worker}"
        self.process = subprocess.Popen([BUILD / "tests" / "kvbm_node", str(worker), self.at, peers, indexer],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint, self.replay = self.read()

    def read(self):
        line = self.process.stdout.readline()
        check(line, f"node {self.worker} has ended")
        return line.split()

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return list(map(int, self.read()))

    def store(self, first, n=N):
        equal(self.ask(f"store {first} {n}"), [n], "stored")

    def load(self, first, n=N):
        prefix, ms = self.ask(f"load {first} {n}")
        equal(prefix, n, f"node {self.worker} loads {first}")
        return ms

    def stats(self):
        return dict(zip(("peers", "hits", "asked", "failed", "named", "down"), self.ask("stats")))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.process.stdin.close()
                equal(self.process.wait(60 * SLOW), 0, f"exit status of node {self.worker}")
        finally:
            self.process.kill()
            self.process.wait()


def follow(indexer, node, instance=None):
    indexer.register(instance or node.worker, node.endpoint, block_size=BLOCK, replay_endpoint=node.replay)
    wait_until(lambda: all(listener["status"] == "active" for worker in indexer.workers() for listener in listeners(worker)),
               what="active streams")


def listeners(worker):
    found = worker["listeners"]
    return list(found.values()) if isinstance(found, dict) else found


def stored(indexer, node, first, instance=None):
    """Store a prompt, and wait until the indexer knows it."""
    node.store(first)
    tokens = [first * 1000 + i for i in range(N * BLOCK)]
    wait_until(lambda: indexer.query(tokens)["instances"].get(str(instance or node.worker), {}).get("longest_matched") == N * BLOCK,
               what=f"prompt {first} in the index")


class World:
    """Owners 1 and 2, followed by the indexer at @url (default: as it is), and node 3, which asks it."""

    def __init__(self, indexer, url=None, instances=(1, 2)):
        self.indexer, self.url, self.instances = indexer, url or indexer.url, instances

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.owners = [Node(self.folder.name, worker) for worker in (1, 2)]
        for node, instance in zip(self.owners, self.instances):
            follow(self.indexer, node, instance)
        self.reader = Node(self.folder.name, 3, ",".join(node.at for node in self.owners), self.url)
        wait_until(lambda: self.reader.stats()["peers"] == 2, what="sessions with both owners")
        return self

    def stored(self, owner, first):
        stored(self.indexer, self.owners[owner], first, self.instances[owner])

    def __exit__(self, *error):
        for node in (self.reader, *self.owners):
            node.__exit__(*error)
        self.folder.cleanup()


def test_named():
    with Indexer() as indexer, World(indexer) as world:
        for i in range(3):
            world.stored(0, 1000 + 100 * i)
            world.stored(1, 5000 + 100 * i)
        for i in range(3):
            world.reader.load(1000 + 100 * i)
            world.reader.load(5000 + 100 * i)
        stats = world.reader.stats()
        equal(stats["named"], 6 * N, "keys found at a peer that the indexer named")
        equal((stats["hits"], stats["failed"], stats["down"]), (6 * N, 0, 0))


def test_wrong_names():
    """The indexer has the owners' streams under each other's numbers: the peers' word decides."""
    with Indexer() as indexer, World(indexer, instances=(2, 1)) as world:
        world.stored(0, 1000)
        world.stored(1, 5000)
        world.reader.load(1000)
        world.reader.load(5000)
        stats = world.reader.stats()
        equal((stats["named"], stats["hits"]), (0, 2 * N))
        check(stats["asked"] >= 2, stats)


def test_killed():
    indexer = Indexer()
    try:
        with World(indexer) as world:
            for i in range(4):
                world.stored(i % 2, 1000 + 100 * i)
            world.reader.load(1000)
            indexer.kill()
            for i in range(1, 4):
                world.reader.load(1000 + 100 * i)
            stats = world.reader.stats()
            equal((stats["named"], stats["hits"], stats["down"]), (N, 4 * N, 1))
    finally:
        indexer.kill()


def test_frozen_and_thawed():
    with Indexer() as indexer, World(indexer) as world:
        for i in range(40):
            world.stored(i % 2, 10000 + 100 * i)
        world.reader.load(10000)
        indexer.process.send_signal(signal.SIGSTOP)
        os.waitpid(indexer.process.pid, os.WUNTRACED)  # until all its threads have stopped
        try:
            first = world.reader.load(10100)
            asked = world.reader.stats()["asked"]
            later = [world.reader.load(10200 + 100 * i) for i in range(3)]
        finally:
            indexer.process.send_signal(signal.SIGCONT)
        stats = world.reader.stats()
        print(f"        with a frozen indexer {first} ms, then {later} ms")
        check(stats["failed"] >= 1 and stats["down"] == 1, stats)
        check(stats["asked"] - asked <= 1, "the breaker is open: one probe at most")
        named, i = stats["named"], 5
        while world.reader.stats()["down"]:
            check(i < 40, "the breaker stays open")
            world.reader.load(10000 + 100 * i)
            i += 1
            time.sleep(0.2)
        world.reader.load(10000 + 100 * i)
        check(world.reader.stats()["named"] > named, "it is asked again")


class Rubbish(http.server.BaseHTTPRequestHandler):
    bodies = [b"", b"{", b"null", b'{"instances":{"1":7}}', b'{"instances":{"-1":{"longest_matched":8}}}', b"\0" * 5000]
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.n += 1
        body = self.bodies[self.server.n % len(self.bodies)]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_rubbish():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rubbish)
    server.n, server.daemon_threads = 0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Indexer() as indexer, World(indexer, url=f"http://127.0.0.1:{server.server_address[1]}") as world:
            for i in range(4):
                world.stored(i % 2, 1000 + 100 * i)
            for i in range(4):
                world.reader.load(1000 + 100 * i)
            stats = world.reader.stats()
            equal((stats["named"], stats["hits"], stats["down"]), (0, 4 * N, 1))
            check(server.n >= 3, f"{server.n} requests")
    finally:
        server.shutdown()
        server.server_close()


def test_owner_dies():
    """The indexer still names an owner that is gone; another has the prompt as well."""
    with Indexer() as indexer, World(indexer) as world:
        world.stored(0, 1000)
        world.stored(1, 1000)
        os.kill(world.owners[0].process.pid, signal.SIGKILL)
        world.owners[0].process.wait()
        world.reader.load(1000)
        equal(world.reader.stats()["hits"], N)
        world.owners[0] = Node(world.folder.name, 4)  # for the end


if __name__ == "__main__":
    run(globals())
