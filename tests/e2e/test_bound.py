# SPDX-License-Identifier: Apache-2.0
"""Engines that connect: the indexer listens (bind:tcp://...), and tells publishers at one address apart by topic."""
import resource
import socket
import struct
import threading
import time

from kvtest import *
import streams

TOKENS = list(range(64))
HASHES = [11, 12, 13, 14]


class Connecting(Publisher):
    """An engine whose endpoint has no `*`: its PUB socket connects."""

    def __init__(self, port, topic=b"", replay=None, **kw):
        super().__init__(topic=topic, replay=replay, **kw)
        self._socket.unbind(self.endpoint)
        self.endpoint = f"bind:tcp://127.0.0.1:{port}"
        self._socket.connect(f"tcp://127.0.0.1:{port}")


def endpoint(port, topic=""):
    return f"bind:tcp://127.0.0.1:{port}" + (f"#{topic}" if topic else "")


def test_one_publisher():
    """H13, with a replay service, through a restart of the engine."""
    port = free_port()
    with Indexer("--stale-after", "300ms") as indexer:
        with Connecting(port, replay="topic") as engine:
            indexer.register(1, engine)
            engine.store(HASHES, TOKENS)
            indexer.wait_score(TOKENS, 1, 64)
            engine.store([15], range(64, 80), parent=14, lose=True)
            engine.remove([14])
            indexer.wait_score(list(range(80)), 1, 48)
            wait_until(lambda: indexer.query(TOKENS)["views"] == {}, 10, "a whole view")
            replay = engine.replay_endpoint
        wait_until(lambda: "1" in indexer.query(TOKENS)["views"], 10, "the view of a dead engine")
        equal(streams.listener(indexer)["connected"], False)
        with Connecting(port, replay="topic", replay_endpoint=replay) as engine:
            engine.wait_subscriber()
            engine.store([21], range(16))
            indexer.wait_score(TOKENS, 1, 16)
            wait_until(lambda: indexer.query(TOKENS)["views"] == {}, 10, "a whole view")


def test_every_address():
    port = free_port()
    with Indexer("--block-size", 16, "--model-name", MODEL, "--workers", f"1=bind:tcp://*:{port}") as indexer, Connecting(port) as engine:
        engine.wait_subscriber()
        engine.store(HASHES, TOKENS)
        indexer.wait_score(TOKENS, 1, 64)
        equal(indexer.workers()[0]["endpoints"], {"0": f"bind:tcp://*:{port}"})


def test_told_apart_by_topic():
    port = free_port()
    names = [f"kv@10.0.0.{i}@{MODEL}" for i in range(1, 6)]
    with Indexer() as indexer:
        engines = [Connecting(port, topic=name.encode()) for name in names]
        try:
            for i, name in enumerate(names[:4], 1):
                indexer.register(i, endpoint(port, name))
            for i, engine in enumerate(engines, 1):
                engine.wait_subscriber()
                engine.store(HASHES[:min(i, 4)], TOKENS[:16 * min(i, 4)])
            for i in range(1, 5):
                indexer.wait_score(TOKENS, i, 16 * i)
            equal(set(indexer.query(TOKENS)["scores"]), {"1", "2", "3", "4"})  # nobody asked for the fifth
            indexer.register(5, endpoint(port, names[4]))  # whose connection waits, with its first batch
            indexer.wait_score(TOKENS, 5, 64)
            # Each stream has its own numbers and connection.
            engines[1].close()
            engines[1] = Connecting(port, topic=names[1].encode())
            engines[1].wait_subscriber()
            engines[1].store(HASHES[:1], TOKENS[:16])
            indexer.wait_score(TOKENS, 2, 16)
            engines[0].store(HASHES[1:2], TOKENS[16:32], parent=HASHES[0])
            indexer.wait_score(TOKENS, 1, 32)
            wait_until(lambda: indexer.query(TOKENS)["views"] == {}, 10, "whole views")
            indexer.unregister(3)
            equal(indexer.score(TOKENS, 3), 0)
            equal(indexer.score(TOKENS, 4), 64)
        finally:
            for engine in engines:
                engine.close()


def test_one_at_a_time():
    """A second publisher of the same topic waits until the first has gone, with what it has published."""
    port = free_port()
    prompts = [range(1000, 1016), range(2000, 2016)]
    with Indexer() as indexer:
        indexer.register(1, endpoint(port))
        engines = [Connecting(port), Connecting(port)]
        try:
            for engine, tokens in zip(engines, prompts):
                engine.wait_subscriber()
                engine.store([tokens[0]], tokens)
            wait_until(lambda: any(indexer.score(tokens, 1) for tokens in prompts), 10, "the batch of one publisher")
            first = 0 if indexer.score(prompts[0], 1) else 1
            engines[first].store([11], range(16))
            indexer.wait_score(range(16), 1, 16)
            equal(indexer.score(prompts[1 - first], 1), 0)
            equal((streams.stream(indexer, "restarts_total"), streams.stream(indexer, "batches_total")), (0, 2))
            engines.pop(first).close()
            indexer.wait_score(prompts[1 - first], 1, 16)
            equal(indexer.score(range(16), 1), 0)
        finally:
            for engine in engines:
                engine.close()


def test_a_connection_that_waits_with_its_first_batch():
    """Another engine takes over at the same number. The first one had said everything before it was heard."""
    port = free_port()
    with Indexer("--replay-timeout", "100ms") as indexer, Connecting(port, replay="topic") as first:
        first.store(HASHES, TOKENS, lose=True)
        indexer.register(1, first)
        indexer.wait_score(TOKENS, 1, 64)
        with Connecting(port, replay=None) as second:
            second.send(second.cleared(), lose=True)
            second.wait_subscriber()
            second.store([21], range(100, 116))
            time.sleep(0.3)  # where it hasn't arrived by then, the connection is told without a batch
            first.close()
            indexer.wait_score(range(100, 116), 1, 16)
            wait_until(lambda: indexer.query(TOKENS)["views"], 10, "a partial view of another engine's blocks")


def test_messages_without_numbers():
    """The topic tells of which worker they are, too."""
    port = free_port()
    with Indexer() as indexer, Connecting(port, topic=b"kv@a@m") as engine:
        indexer.register(1, endpoint(port, "kv@a@m"))
        indexer.register(2, endpoint(port, "kv@b@m"))
        engine.wait_subscriber()
        engine.send_frames(b"kv@a@m", engine.batch([engine.stored(HASHES, TOKENS)]))
        indexer.wait_score(TOKENS, 1, 64, timeout=1)
        check(indexer.query(TOKENS)["views"]["1"]["0"]["partial"], "a whole view")


def test_lost_twice_during_a_replay():
    """What waits for a replay came over a connection that is lost by then: it is no sign that there is one."""
    port = free_port()
    gate = threading.Event()

    class Slow(Publisher):
        def _serve(self, router):
            gate.wait()
            super()._serve(router)

    with Indexer("--stale-after", "500ms", "--forget-after", "2s") as indexer, Slow() as ring:
        indexer.register(1, endpoint(port), replay_endpoint=ring.replay_endpoint)
        for i in range(4):
            ring.store([HASHES[i]], TOKENS[16 * i:16 * i + 16], parent=HASHES[i - 1] if i else None)
        for seq in 0, 2, 3:  # each over a connection of its own; the second begins a replay
            with Connecting(port) as engine:
                engine.wait_subscriber()
                engine.seq = seq
                engine.send_raw(ring.kept[seq])
                time.sleep(0.3)  # what waits for the replay shows nowhere
            wait_until(lambda: not streams.listener(indexer)["connected"], 10, "the loss")
        gate.set()
        wait_until(lambda: streams.stream(indexer, "last_seq") == 3, 10, "the replay")
        wait_until(lambda: indexer.query(TOKENS)["views"]["1"]["0"]["partial"], 10, "a stale view", give_up=15)
        wait_until(lambda: indexer.score(TOKENS, 1) == 0, 10, "blocks that are forgotten", give_up=15)


def test_back_and_quiet():
    """A publisher's topic isn't known before it speaks. What it had isn't forgotten meanwhile."""
    port = free_port()
    with Indexer("--stale-after", "300ms", "--forget-after", "4s") as indexer, streams.Proxy(f"tcp://127.0.0.1:{port}") as between, \
            Connecting(between.port, topic=b"kv@a@m") as a, Connecting(port, topic=b"kv@b@m") as b:
        for instance, engine in (1, a), (2, b):
            indexer.register(instance, endpoint(port, engine.topic.decode()))
            engine.wait_subscriber()
            engine.store(HASHES, TOKENS)
            indexer.wait_score(TOKENS, instance, 64)
        between.cut()
        between.mend()
        wait_until(lambda: "1" in indexer.query(TOKENS)["views"], 10, "the view of a publisher that may be back")
        time.sleep(5)  # more than --forget-after: were it forgotten, it would show by now
        equal(indexer.score(TOKENS, 1), 64)
        equal(set(indexer.query(TOKENS)["views"]), {"1"})
        a.store([15], range(64, 80), parent=14)
        indexer.wait_score(list(range(80)), 1, 80)
        a.close()
        wait_until(lambda: indexer.score(TOKENS, 1) == 0, 20, "blocks of a publisher that is gone")
        equal(indexer.score(TOKENS, 2), 64)


def test_strangers():
    """What connects and says nothing, or nonsense, keeps nobody out."""
    port = free_port()
    with Indexer() as indexer:
        indexer.register(1, endpoint(port))
        wait_until(lambda: streams.listener(indexer)["status"] == "failed", 10, "a listener that waits")
        check("no publisher has connected" in streams.listener(indexer)["last_error"], streams.listener(indexer))
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for one in silent[::2]:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
        with Connecting(port) as engine:
            engine.wait_subscriber()
            engine.store(HASHES, TOKENS)
            indexer.wait_score(TOKENS, 1, 64)
        for one in silent:
            one.close()


def test_a_flood_of_strangers():
    """Silent connections of one source push out none of another, however slow its handshake."""
    port = free_port()
    over = threading.Event()

    def flood():
        silent = []
        while not over.is_set():
            silent.append(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
            if len(silent) > 100:
                silent.pop(0).close()
            time.sleep(0.0005)
        for one in silent:
            one.close()

    with Indexer() as indexer, Publisher() as form:
        indexer.register(1, endpoint(port, "kv@a"))
        wait_until(lambda: "no publisher" in streams.listener(indexer).get("last_error", ""), 10, "a listener that waits")
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            with socket.create_connection(("127.0.0.1", port)) as slow:
                ready = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"
                batch = form.batch([form.stored(HASHES, TOKENS)])
                for piece in (b"\xff" + bytes(7) + b"\x01\x7f\x03\0NULL" + bytes(48), bytes([4, len(ready)]) + ready,
                              b"\1\4kv@a\1\x08" + bytes(8) + b"\2" + struct.pack(">Q", len(batch)) + batch):
                    time.sleep(0.3)
                    slow.sendall(piece)
                indexer.wait_score(TOKENS, 1, 64)
        finally:
            over.set()
            thread.join()


def test_no_descriptors():
    """Connections for which there is no descriptor wait, and cost no time."""
    port = free_port()
    with Indexer("--threads", 1, "--http-threads", 1) as indexer:
        indexer.register(1, endpoint(port))
        wait_until(lambda: "no publisher" in streams.listener(indexer).get("last_error", ""), 10, "a listener that waits")
        limits = resource.prlimit(indexer.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(indexer.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        before, began = indexer.cpu_seconds(), time.monotonic()
        time.sleep(2)
        took, passed = indexer.cpu_seconds() - before, time.monotonic() - began
        check(took < passed / 10, f"{took} s of CPU in {passed} s")
        resource.prlimit(indexer.process.pid, resource.RLIMIT_NOFILE, limits)
        for one in silent:
            one.close()
        with Connecting(port) as engine:
            engine.wait_subscriber()
            engine.store(HASHES, TOKENS)
            indexer.wait_score(TOKENS, 1, 64)


def test_refusals():
    port = free_port()
    with Indexer("--allow-endpoint", f"bind:tcp://127.0.0.1:{port}", "--allow-endpoint", "tcp://127.0.0.0/8") as indexer:
        for wrong, why in (("tcp://0.0.0.0:5557", "for sockets that listen"), ("tcp://[::]:5557", "for sockets that listen"),
                           ("bind:tcp://*:*", "no port to listen on"), ("bind:tcp://host:1", "a name is nothing to listen on"),
                           ("bind:ipc:///tmp/x", "only tcp://"), ("bind:", "missing scheme"), (endpoint(port) + "#", "no topic"),
                           ("tcp://*:5557", "no host to connect to")):
            error = indexer.register(1, wrong, expect=400).json()["error"]
            check(why in error, f"{wrong}: {error}")
        error = indexer.register(1, endpoint(port), replay_endpoint=endpoint(port), expect=400).json()["error"]
        check("it is connected to" in error, error)
        indexer.register(1, endpoint(port + 1), expect=403)
        indexer.register(1, f"bind:tcp://*:{port}", expect=403)
        indexer.register(1, endpoint(port))
        indexer.register(2, endpoint(port))  # the same again
        wait_until(lambda: "another worker has this address" in streams.listener(indexer, 2).get("last_error", ""), 10, "the reason")
        indexer.unregister(1)
        wait_until(lambda: "no publisher has connected" in streams.listener(indexer, 2).get("last_error", ""), 20, "its turn")
    with Indexer("--allow-endpoint", "tcp://*") as indexer:
        indexer.register(1, endpoint(port), expect=403)
    with Indexer() as indexer, socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        indexer.register(1, endpoint(port))
        wait_until(lambda: "another program" in streams.listener(indexer).get("last_error", ""), 10, "the reason")


def test_a_topic_of_a_connection_that_we_make():
    """A proxy that merges engines: one endpoint, each worker's topic its own stream."""
    with Indexer() as indexer, Publisher(replay=None) as proxy:
        for instance, name in ((1, "kv@a@m"), (2, "kv@b@m")):
            indexer.register(instance, f"{proxy.endpoint}#{name}")
        proxy.wait_subscriber(2)
        for instance, name in ((1, b"kv@a@m"), (2, b"kv@b@m")):
            for seq, (hashes, tokens) in enumerate(((HASHES[:instance], TOKENS[:16 * instance]), ([99], range(900, 916)))):
                proxy.send_frames(name, struct.pack(">Q", seq), proxy.batch([proxy.stored(hashes, tokens)]))
        for instance in (1, 2):
            indexer.wait_score(TOKENS, instance, 16 * instance)
            indexer.wait_score(range(900, 916), instance, 16)
        wait_until(lambda: indexer.query(TOKENS)["views"] == {}, 10, "whole views")


if __name__ == "__main__":
    run(globals())
