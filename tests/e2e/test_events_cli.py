# SPDX-License-Identifier: Apache-2.0
"""kvasir events: tail, stat and replay beside publishers of engines' events, ours and plain ZMQ sockets."""
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading

from kvtest import *
from natstest import BlockManager, NatsClient, NatsServer, needs_nats

KVASIR = BUILD / "bin" / "kvasir"
HOSTILE = b"kv\x1b[2J\\\xe2\x80\xae\xff\n"  # moves the cursor, turns the line round, is no UTF-8


class Tool(contextlib.AbstractContextManager):
    """A running `kvasir events`. end() waits for it."""

    def __init__(self, *words):
        self.process = subprocess.Popen([KVASIR, "events", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, status=0, number=None):
        if number:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=patience(60))
        equal(self.process.returncode, status, f"{self.process.args}: {out}{err}\nstatus")
        return out.decode(), err.decode()

    def lines(self, status=0):
        return [json.loads(line) for line in self.end(status)[0].splitlines()]

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def call(*words, status=0):
    with Tool(*words) as tool:
        return tool.end(status)


def events_of(lines):
    return [(line["batch"], line["rank"], line["type"], line["tier"], line["block_hashes"], line["tokens"]) for line in lines
            if line["what"] == "event"]


def check_encoding(encoding):
    with Publisher(encoding=encoding, topic=b"kv-events", rank=3) as engine, \
            Tool("tail", engine.endpoint, "--json", "--batches", 4) as tail, \
            Tool("stat", engine.endpoint, "--json", "--batches", 4) as stat:
        engine.wait_subscriber(2)
        engine.store([2**64 - 1, 102], tokens=range(32))
        engine.store([103], tokens=range(16), parent=102, medium="CPU", lora_name="l")
        engine.send(engine.removed([102]), engine.removed([2**64 - 1]))
        engine.clear()
        lines = tail.lines()
        equal(events_of(lines), [(0, 3, "stored", "device", [2**64 - 1, 102], 32), (1, 3, "stored", "host_pinned", [103], 16),
                                 (2, 3, "removed", "device", [102], 0), (2, 3, "removed", "device", [2**64 - 1], 0),
                                 (3, 3, "cleared", "device", [], 0)], "events")
        check(all(line["publisher"] == engine.endpoint and line["topic"] == "kv-events" for line in lines), lines)
        equal((lines[1]["parent_hash"], lines[1]["lora_name"], lines[1]["block_size"]), (102, "l", 16))
        (publisher,) = stat.lines()[-1]["publishers"]
        wanted = {"batches": 4, "events": 5, "blocks": 5, "stored": 2, "removed": 2, "cleared": 1, "gaps": 0, "unreadable": 0, "block_size": 16,
                  "stored_blocks": {"device": 2, "host_pinned": 1}, "forms": [encoding + "s"], "skipped": {}, "last_batch": 3}
        equal({name: publisher[name] for name in wanted}, wanted, "counts")


def test_maps():
    check_encoding("map")


def test_arrays():
    check_encoding("array")


def test_our_publisher():
    """libkvevent's, as another process."""
    engine = subprocess.Popen([BUILD / "tests" / "test-event-publisher", "serve", "map", "topic"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)
    try:
        endpoint, replay_endpoint = engine.stdout.readline().split()
        with Tool("tail", endpoint, "--json", "--batches", 3) as tail:
            while tail.process.poll() is None:  # it has subscribed once the first batch comes
                engine.stdin.write("\n")
                engine.stdin.flush()
                engine.stdout.readline()
            lines = tail.lines()
        equal({line["what"] for line in lines}, {"event"}, "gaps")
        first = lines[0]["batch"]
        equal([line["batch"] for line in lines], [first + i // 3 for i in range(9)], "numbers")
        replayed = [json.loads(line) for line in call("replay", replay_endpoint, "--from", first, "--json")[0].splitlines()]
        equal(events_of(replayed)[:9], events_of(lines), "replayed")
    finally:
        engine.stdin.close()
        engine.wait(timeout=patience(20))


def test_gaps_and_restarts():
    with Publisher() as engine, Tool("tail", engine.endpoint, "--json", "--batches", 5) as tail, \
            Tool("tail", engine.endpoint, "--batches", 5) as text, Tool("stat", engine.endpoint, "--batches", 5) as stat:
        engine.wait_subscriber(3)
        engine.store([1], tokens=range(16))
        for _ in range(3):
            engine.store([9], tokens=range(16), lose=True)
        engine.store([2], tokens=range(16))
        engine.store([9], tokens=range(16), lose=True)
        engine.store([3], tokens=range(16))
        engine.restart()
        engine.store([4], tokens=range(16))
        engine.store([5], tokens=range(16))
        lines = tail.lines()
        equal([(line["first"], line["last"]) for line in lines if line["what"] == "gap"], [(1, 3), (5, 5)], "gaps")
        equal([(line["batch"], line["last"]) for line in lines if line["what"] == "restart"], [(0, 6)], "restarts")
        equal([line["block_hashes"] for line in lines if line["what"] == "event"], [[1], [2], [3], [4], [5]])
        out = text.end()[0]
        for phrase in ("batches 1 to 3 are missing", "batch 5 is missing", "batch 0 after 6: the publisher has restarted"):
            check(phrase in out, out)
        row = next(line for line in stat.end()[0].splitlines() if line.endswith(engine.endpoint)).split()
        equal((row[0], row[-6:-3]), ("5", ["2", "4", "1"]), f"batches, gaps, missed, restarts of {row}")


def test_unreadable_messages():
    """Each with its reason; what they seem to hold isn't shown, and the next batch is."""
    good = msgpack.packb([1.5, [{"type": "AllBlocksCleared"}]])
    cut = msgpack.packb([1.5, [{"type": "AllBlocksCleared"}, {"type": "AllBlocksCleared"}]])[:-3]
    number = [struct.pack(">Q", i) for i in range(9)]
    bad = [((b"t", number[0], b'{"events": []}'), "JSON"), ((b"t", number[1], cut), "cut short"), ((b"t", number[2], b""), "empty"),
           ((b"t", b"123", good), "3 frames"), ((b"t", number[3], msgpack.packb({"a": 1})), "no batch of events"), ((b"t",) * 9, "9 frames")]
    with Publisher() as engine, Tool("tail", engine.endpoint, "--json", "--batches", len(bad) + 1) as tail, \
            Tool("stat", engine.endpoint, "--batches", len(bad) + 1) as stat:
        engine.wait_subscriber(2)
        for frames, _ in bad:
            engine.send_frames(*frames)
        engine.send_frames(b"t", number[4], good)
        lines = tail.lines(status=1)
        reasons = [line["why"] for line in lines if line["what"] == "unreadable"]
        equal(len(reasons), len(bad), f"{reasons}: their number")
        for (_, phrase), reason in zip(bad, reasons):
            check(phrase in reason, f"{phrase!r} in {reason!r}")
        equal([line["type"] for line in lines if line["what"] == "event"], ["cleared"], "events")
        out = stat.end(1)[0]
        check(f"unreadable: {len(bad)} messages, the last one: 9 frames" in out, out)


def test_forms_without_numbers():
    good = msgpack.packb([1.5, [{"type": "AllBlocksCleared"}]])
    with Publisher() as engine, Tool("tail", engine.endpoint, "--json", "--batches", 3) as tail, \
            Tool("stat", engine.endpoint, "--batches", 3) as stat:
        engine.wait_subscriber(2)
        engine.send_frames(good)
        engine.send_frames(b"topic", good)
        engine.send_frames(struct.pack(">Q", 7), good)
        equal([(line["topic"], line["batch"]) for line in tail.lines()], [("", None), ("topic", None), ("", 7)])
        check("losses can't be seen" in stat.end()[0], "no hint")


def test_what_kv_indexer_leaves_out():
    with Publisher() as engine, Tool("stat", engine.endpoint, "--batches", 3) as text, \
            Tool("stat", engine.endpoint, "--batches", 3, "--json") as stat:
        engine.wait_subscriber(2)
        engine.store([1], tokens=range(16), medium="PUNCHCARD")
        engine.send({"type": "BlockPainted"}, {"type": "BlockRemoved"}, engine.cleared())
        engine.store([2], tokens=range(8), block_size=8)
        (publisher,) = stat.lines()[-1]["publishers"]
        equal(publisher["skipped"], {"malformed": 1, "unknown_type": 1, "medium": 1})
        equal(publisher["stored_blocks"], {"unknown": 1, "device": 1})
        check("medium 1 (PUNCHCARD)" in text.end()[0], "the medium's name")


def test_hostile_names():
    with Publisher(topic=HOSTILE) as engine, Tool("tail", engine.endpoint, "--batches", 1) as text, \
            Tool("tail", engine.endpoint, "--batches", 1, "--json") as tail, Tool("stat", engine.endpoint, "--batches", 1) as stat, \
            Tool("stat", engine.endpoint, "--batches", 1, "--json") as numbers:
        engine.wait_subscriber(4)
        engine.store([1], tokens=range(16), lora_name="\x1b]0;x\x07\u202eabc", medium="\x9b31m", cache_salt="s\n12:00")
        for tool in (text, stat):
            out = tool.end()[0]
            check(not set(out) & set("\x1b\x07\x9b\u202e\r"), repr(out))
            check("kv\\u001b[2J\\\\\\u202e\\xff\\u000a" in out, out)
        (line,) = tail.lines()
        equal((line["lora_name"], line["tier"], line["medium"]), ("\x1b]0;x\x07\u202eabc", None, "\x9b31m"))
        check(line["topic"].startswith("kv\x1b[2J\\\u202e"), line)
        equal(len(numbers.lines()[-1]["publishers"]), 1)


@contextlib.contextmanager
def hangs_up(says):
    """A service that greets each connection with @says, and hangs up; yields its port."""
    def serve():
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as sock:
                    sock.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_nothing_comes():
    with Publisher() as engine:
        out, _ = call("stat", engine.endpoint, "--time", "1500ms", status=1)
        check("connected\nno message in" in out and "enable_kv_cache_events" in out, out)
    port = free_port()
    out, _ = call("stat", f"tcp://127.0.0.1:{port}", "--time", "500ms", status=3)
    check("not connected" in out and "nobody listens there" in out, out)
    out, _ = call("stat", f"bind:tcp://127.0.0.1:{port}", "--time", "500ms", status=3)
    check("no publisher has connected" in out, out)
    _, err = call("tail", f"tcp://127.0.0.1:{port}", "--time", "500ms", status=3)
    check("nobody listens there" in err, err)
    with Indexer() as other:  # which waits for the head of a request, and then breaks off
        out, _ = call("stat", other.url.replace("http", "tcp"), "--time", "1s", status=3)
        check("ZMQ publisher's port?" in out, out)
    for says in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\"server_id\":\"N\"}\r\n"):  # services that answer or hang up at once
        with hangs_up(says) as port:
            out, _ = call("stat", f"tcp://127.0.0.1:{port}", "--time", "1s", status=3)
            check("ZMQ publisher's port?" in out, out)
    with Publisher() as engine:  # a ROUTER
        out, _ = call("stat", engine.replay_endpoint, "--time", "1s", status=3)
        check("not connected\nno message in" in out and "publisher" in out, out)


def test_urls():
    for url in ("tcp://127.0.0.1", "http://127.0.0.1:5557", "inproc://x", "bind:ipc:///tmp/x", "tcp://*:5557", "x" * 600):
        for command in ("tail", "stat"):
            _, err = call(command, url, status=2)
            check("not a usable URL" in err, err)
    call("replay", "tcp://*:1", status=2)
    call("tail", status=2)
    out, _ = call("stat", "tcp://no-such-host.invalid:5557", "--time", "1s", status=3)
    check("not connected" in out, out)


def test_many_publishers_connect():
    """bind:, and ipc, and topics."""
    url = f"tcp://127.0.0.1:{free_port()}"
    context = zmq.Context()
    try:
        with Tool("tail", "bind:" + url, "--json", "--batches", 3) as tail:
            sockets = []
            for i in range(3):
                sockets.append(context.socket(zmq.XPUB))
                sockets[-1].setsockopt(zmq.LINGER, 0)
                sockets[-1].connect(url)
            for i, socket in enumerate(sockets):
                check(socket.poll(patience(20) * 1000), "nobody subscribed")
                socket.send_multipart([b"same", struct.pack(">Q", 7), msgpack.packb([0.5, [{"type": "AllBlocksCleared", "dp_rank": i}]])])
            lines = tail.lines()
            equal(sorted(line["rank"] for line in lines), [0, 1, 2], "ranks")
            equal({line["what"] for line in lines}, {"event"}, "equal numbers of three publishers aren't a restart")
            equal(len({line["publisher"] for line in lines}), 3, "publishers")
    finally:
        context.destroy()
    with tempfile.TemporaryDirectory() as folder, Publisher(topic=b"b", endpoint=f"ipc://{folder}/pub") as engine, \
            Tool("tail", engine.endpoint, "--json", "--batches", 1) as tail:
        engine.wait_subscriber()
        engine.clear()
        equal([line["type"] for line in tail.lines()], ["cleared"])
    with Publisher(topic=b"b") as engine, Tool("tail", engine.endpoint + "#b", "--json", "--batches", 1) as tail:
        engine.wait_subscriber()
        engine.send_frames(b"a", b"\0" * 8, msgpack.packb([1, []]))
        engine.store([5], tokens=range(16))
        equal([line["topic"] for line in tail.lines()], ["b"])


def test_record_and_publish():
    """A recording goes to a kv-indexer as the engine's own messages did; it is damaged, cut off, or no recording."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "r.kve")
        with Publisher(topic=b"kv") as engine, Tool("tail", engine.endpoint, "--json", "--batches", 4, "--record", path) as tail:
            engine.wait_subscriber()
            engine.store([101, 102], tokens=range(32))
            engine.store([103], tokens=range(32, 48), parent=102)
            engine.store([104], tokens=range(48, 64), parent=103)
            engine.remove([104])
            lines = tail.lines()
        printed = [json.loads(line) for line in call("replay", path, "--json")[0].splitlines()]
        equal(printed, lines, "what was recorded")
        check("already" not in call("tail", "tcp://127.0.0.1:1", "--record", path, "--time", "1s", status=5)[0], "overwritten")
        for fast in ([], ["--fast"]):
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            with Indexer() as indexer, Tool("replay", path, "--to", endpoint, *fast) as replay:
                indexer.register(1, endpoint=endpoint, block_size=16)
                indexer.wait_score(range(64), 1, 48)
                check("4 messages published" in replay.end()[0], "its end")
        with Tool("replay", path, "--to", f"tcp://127.0.0.1:{free_port()}") as alone:
            check(b"waiting for a subscriber" in alone.process.stderr.readline(), "the wait")
            alone.end(status=130, number=signal.SIGINT)
        call("replay", path, "--to", "tcp://no such host", status=3)
        whole = open(path, "rb").read()
        for damage, phrase in ((whole[:-1], "cut off"), (whole[:-9] + b"x" + whole[-8:], "damaged"), (whole[:20], "cut off"), (b"", "no recording"),
                               (whole[:8] + b"\2" + whole[9:], "later version"), (whole[:16] + b"\xff" * 8, "impossible length")):
            with open(path, "wb") as file:
                file.write(damage)
            out, err = call("replay", path, "--json", status=5)
            check(phrase in err, f"{phrase}: {err}")
            got = [json.loads(line) for line in out.splitlines()]
            equal(got, lines[:len(got)], "the records before the damage")


def test_replay_endpoints():
    for framing in ("topic", "plain"):
        with Publisher(replay=framing, topic=b"kv", ring=3) as engine, tempfile.TemporaryDirectory() as folder:
            for i in range(5):
                engine.store([i], tokens=range(16), lose=True)
            path = os.path.join(folder, "r.kve")
            lines = [json.loads(line) for line in call("replay", engine.replay_endpoint, "--json", "--record", path)[0].splitlines()]
            equal([(line["batch"], line["block_hashes"]) for line in lines], [(2, [2]), (3, [3]), (4, [4])], framing)
            out = call("replay", engine.replay_endpoint, "--from", 4)[0]
            equal(out.count("stored"), 1, out)
            call("replay", engine.replay_endpoint, "--from", 9, status=1)
            equal(call("replay", path, "--json")[0].count("stored"), 3)
            _, err = call("replay", engine.endpoint, "--timeout", "500ms", status=3)  # the publisher's socket
            check("is that an engine's replay endpoint?" in err, err)


def envelope(sequence, *events, publisher=0xABCD, **extra):
    """A message of Dynamo's event plane, as Dynamo 1.6.1 writes it."""
    return msgpack.packb({"publisher_id": publisher, "sequence": sequence, "published_at": 1757500000000, "topic": "kv-events",
                          "payload": msgpack.packb(list(events)), **extra})


def routed(event_id, data, worker=7587, rank=2, tier="device"):
    return {"worker_id": worker, "storage_tier": tier, "residency_domain": "worker",
            "event": {"event_id": event_id, "data": data, "dp_rank": rank}}


def stored(*hashes, parent=None):
    blocks = [{"block_hash": h, "tokens_hash": h // 2, "mm_extra_info": None} for h in hashes]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def check_envelopes(lines, publisher):
    equal([(line["what"], line.get("batch"), line.get("rank"), line.get("worker_id"), line.get("type"), line.get("tier"), line.get("block_hashes"))
           for line in lines],
          [("event", 4, 2, 7587, "stored", "device", [2**64 - 1, 12]), ("event", 4, 2, 7587, "removed", "host_pinned", [9]),
           ("gap", None, None, None, None, None, None), ("event", 7, 2, 7587, "cleared", "device", [])], "lines")
    equal({line["publisher_id"] for line in lines}, {publisher}, "publishers")


MESSAGES = [(4, (routed(1, stored(2**64 - 1, 12, parent=5)), routed(2, {"removed": {"block_hashes": [9]}}, tier="host_pinned"))),
            (7, (routed(9, "cleared"),))]


def test_dynamo_over_zmq():
    with Publisher() as engine, Tool("tail", engine.endpoint, "--json", "--batches", 2) as tail, \
            Tool("stat", engine.endpoint, "--batches", 2) as stat:
        engine.wait_subscriber(2)
        for sequence, events in MESSAGES:
            payload = envelope(sequence, *events, publisher=77)
            engine.send_frames(b"kv-events", struct.pack(">Q", 77), struct.pack(">Q", sequence), b"\1" + struct.pack(">I", len(payload)) + payload)
        check_envelopes(tail.lines(), 77)
        out = stat.end()[0]
        check("envelopes of Dynamo's event plane" in out and "publisher=000000000000004d" in out, out)


def publish_until(tool, publish):
    """Publish for a tool over NATS, whose subscription nobody reports, until it has ended."""
    while tool.process.poll() is None:
        publish()


def lines_until(tool, publish, enough):
    """Publish until the lines that a tool prints are enough; returns them."""
    lines = []
    while not enough(lines):
        publish()
        while select.select([tool.process.stdout], [], [], 0.05)[0]:
            lines.append(json.loads(tool.process.stdout.readline()))
    return lines


def test_block_managers():
    """Records of two of them, one of which loses a message; other subjects aren't heard."""
    needs_nats()
    with NatsServer() as server, NatsClient(server) as client, BlockManager(server, worker="a%2Eb") as first, \
            BlockManager(server, worker="z") as second, Tool("tail", server.url, "--json") as tail, \
            Tool("stat", server.url, "--json", "--batches", 20) as stat:
        def publish():
            client.publish("other.subject", b"x")
            first.store([(1, 77), (2, 78)], tier="host")
            second.store([(5, 70)], lose=True)
            second.alive()
            second.remove([5])

        lines = lines_until(tail, publish, lambda lines: {line["topic"] for line in lines if line["what"] == "gap"} and
                            any(line.get("block_hashes") == [2] for line in lines))
        publish_until(stat, publish)
        equal({line["topic"] for line in lines}, {first.subject, second.subject}, "subjects")
        equal({line["topic"] for line in lines if line["what"] == "gap"}, {second.subject}, "losses")
        one = next(line for line in lines if line["what"] == "event" and line["type"] == "stored" and line["block_hashes"] == [2])
        equal((one["parent_hash"], one["tokens_hash"], one["tier"], one["block_bytes"]), (1, 78, "host_pinned", 4096))
        equal({form for publisher in stat.lines()[-1]["publishers"] for form in publisher["forms"]}, {"records"}, "forms")


def test_dynamo_over_nats():
    """Two publishers on one subject; losses are those of one of them. Other subjects aren't heard."""
    needs_nats()
    subject = "namespace.dynamo.component.backend.endpoint.generate.kv-events"
    with NatsServer() as server, NatsClient(server) as client, \
            Tool("tail", f"{server.url}/{subject}", "--json", "--batches", 4) as tail:
        n = 0

        def publish():
            nonlocal n
            n += 1
            client.publish("namespace.other", b"x")
            for publisher in (1, 2):
                client.publish(subject, envelope(2 * n if publisher == 2 else n, routed(n, stored(n)), publisher=publisher))

        publish_until(tail, publish)
        lines = tail.lines()
        equal({line["topic"] for line in lines}, {subject}, "subjects")
        equal({line["publisher_id"] for line in lines if line["what"] == "gap"}, {2}, "publishers with gaps")
        equal(len([line for line in lines if line["what"] == "event"]), 4, lines)


def test_nats_server_comes_back():
    needs_nats()
    with NatsServer() as server, BlockManager(server) as manager, Tool("tail", server.url, "--json", "--batches", 2) as tail, \
            tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "r.kve")
        with Tool("tail", server.url + "/kvasir.>", "--batches", 1, "--record", path) as first:
            publish_until(first, lambda: manager.store([(1, 7)]))
        equal(call("replay", path)[0].count("stored"), 1)
        with Tool("tail", server.url, "--json", "--batches", 1) as second:
            publish_until(second, lambda: call("replay", path, "--to", server.url))
            equal([line["topic"] for line in second.lines()], [manager.subject])
        server.stop()
        call("replay", path, "--to", server.url, status=3)
        server.start()
        with BlockManager(server) as again:
            publish_until(tail, again.alive)
        check(tail.lines(), "lines")


def test_durable():
    """Each call of one name takes what none before it has taken, in order: also what came while nobody listened."""
    needs_nats()
    with tempfile.TemporaryDirectory() as folder, NatsServer(f'jetstream {{ store_dir: "{folder}" }}') as server, \
            NatsClient(server) as client, BlockManager(server) as manager:
        durable = ("tail", server.url + "/kvasir.>", "--json", "--stream", "EVENTS", "--durable")
        created = wait_until(lambda: client.request("$JS.API.STREAM.CREATE.EVENTS", b'{"name":"EVENTS","subjects":["kvasir.>"]}'),
                             60, "JetStream")
        check(b'"created"' in created, created)
        for key in range(1, 6):
            manager.store([(key, 70 + key)])
        hashes = []
        for n in (2, 1, 2):
            with Tool(*durable, "one", "--batches", n) as tail:
                hashes.append([line["block_hashes"] for line in tail.lines() if line["what"] == "event"])
        equal(hashes, [[[1], [2]], [[3]], [[4], [5]]], "what each call has taken")
        with Tool(*durable, "another", "--batches", 5) as tail:
            equal(len(tail.lines()), 5, "all, to another name")
        call(*durable, "one", "--time", "1s", status=1)
        call(*durable, "not.a.name", status=2)
        call(*durable[:3], "--durable", "one", status=2)
        call("tail", "tcp://127.0.0.1:1", "--stream", "EVENTS", "--durable", "one", status=2)


def test_nats_failures():
    needs_nats()
    with NatsServer() as server:
        out, _ = call("stat", server.url, "--time", "1s", status=1)
        check("connected\nno message in" in out and "nobody publishes on that subject" in out, out)
    out, _ = call("stat", server.url, "--time", "1s", status=3)
    check("not connected" in out, out)
    _, err = call("tail", "nats://user:secret@127.0.0.1:4222", status=2)
    check("secret" not in err and "--nats-" in err, err)
    with tempfile.NamedTemporaryFile() as recorded:
        _, err = call("replay", recorded.name, "--to", "nats://user:secret@127.0.0.1:4222", status=2)
    check("secret" not in err and "--nats-" in err, err)
    with NatsServer('authorization { token: "a b" }') as server, tempfile.NamedTemporaryFile("w") as token:
        out, _ = call("stat", server.url, "--time", "1s", status=3)
        check("not connected" in out, out)
        token.write("a b\n")
        token.flush()
        call("stat", server.url, "--time", "1s", "--nats-token-file", token.name, status=1)
        call("stat", server.url, "--nats-token-file", token.name + "x", status=5)
        call("stat", server.url, "--nats-user", "u", status=2)


def test_interrupted():
    """^C ends tail and stat with what has come."""
    with Publisher() as engine, Tool("tail", engine.endpoint, "--json") as tail, Tool("stat", engine.endpoint, "--time", "1h") as stat:
        engine.wait_subscriber(2)
        engine.store([1], tokens=range(16))
        check(b'"stored"' in tail.process.stdout.readline(), "the event")
        tail.end(number=signal.SIGINT)
        equal(call("tail", "--help")[0].count("usage:"), 1)
        engine.wait_subscriber(2)
        stat.end(number=signal.SIGTERM)


if __name__ == "__main__":
    run(globals())
