# SPDX-License-Identifier: Apache-2.0
"""Replicas of kv-selector: each knows the bookings of all, through ends, kills and partitions."""
import json
import os
import signal
import socket
import tempfile

from kvtest import *
from streams import Proxy
from test_selector import Selector, error

TOKENS = list(range(64))
WORKERS = "1=tcp://127.0.0.1:9,2=tcp://127.0.0.1:9"


def replica(port, ports, *args, **kw):
    """A replica at @port whose peers are at @ports. Its workers never publish: loads alone decide."""
    return Selector("--port", port, "--peers", ",".join(f"http://127.0.0.1:{p}" for p in ports), "--model-name", MODEL,
                    "--block-size", 16, "--workers", WORKERS, "--peer-interval", "100ms", *args, **kw)


class Replicas:
    """@n replicas, each a peer of all others."""

    def __init__(self, n, *args, **kw):
        self.ports, self.args, self.kw, self.all = [free_port() for _ in range(n)], args, kw, []

    def start(self, i):
        return replica(self.ports[i], [p for p in self.ports if p != self.ports[i]], *self.args, **self.kw)

    def __enter__(self):
        self.all = [self.start(i) for i in range(len(self.ports))]
        for s in self.all:
            wait_until(lambda s=s: metric(s, "peers_followed") == len(self.ports) - 1, what="each follows all", timeout=30)
        return self.all

    def __exit__(self, *_):
        for s in self.all:
            s.stop()


def metric(s, name):
    return s.metrics()[f"kv_selector_{name}"]


def bookings(s):
    """{id: (worker, first token has come, output)}"""
    return {b["selection_id"]: (b["worker_id"], b["prefill_complete"], b["output_tokens"]) for b in s.get("/reservations").json()}


def wait_same(replicas, expect=None):
    """Wait until all have the same bookings, @expect if given, and the same loads."""
    def same():
        views = [(bookings(s), s.loads()) for s in replicas]
        return all(view == views[0] for view in views) and (expect is None or set(views[0][0]) == set(expect)) and views[0]
    return wait_until(same, what="the same bookings and loads everywhere", timeout=30)


def test_told():
    """A booking, its progress and its end are known to all, whichever replica is told of them."""
    with Replicas(3) as (a, b, c):
        first = a.reserve(TOKENS, selection_id="r 1", session_id="s", lora_name="l")["worker_id"]
        wait_same([a, b, c], ["r 1"])
        equal(b.loads()[first], (64, 1))
        second = b.reserve([9] * 640, selection_id="r2")["worker_id"]
        check(second != first, "b knows a's load")
        wait_same([a, b, c], ["r 1", "r2"])
        equal(c.post("/select_and_reserve", {"model_name": MODEL, "token_ids": TOKENS, "selection_id": "r2"}).status, 409)
        equal(c.first_token("r2"), 200)
        equal(a.post("/reservations/r2/output_block", {"tokens": 40}).status, 200)
        wait_until(lambda: [bookings(s)["r2"] for s in (a, b, c)] == [(second, True, 40)] * 3, timeout=30)
        wait_same([a, b, c])
        equal(c.free("r2", "?outcome=lost"), 200)
        equal(b.free("r%201"), 200)
        view, loads = wait_same([a, b, c], [])
        equal(loads, {1: (0, 0), 2: (0, 0)})
        equal([s.free("r2") for s in (a, b, c)], [404] * 3, "a second end changes nothing")
        equal([s.metrics()[f'kv_selector_booked_total{{model="{MODEL}",tenant="default"}}'] for s in (a, b, c)], [2] * 3)


def test_restart():
    """Killed and started again, a replica has its peers' bookings, and its own from before, when its port opens."""
    group = Replicas(3)
    with group as (a, b, c):
        for i in range(40):
            [a, b, c][i % 3].reserve(TOKENS + [i] * 16, selection_id=f"r{i}")
        a.first_token("r0")
        before, _ = wait_same([a, b, c], [f"r{i}" for i in range(40)])
        c.kill()
        equal(a.free("r2"), 200, "a booking of the dead one")
        equal(a.free("r3"), 200)
        c = group.all[2] = group.start(2)
        equal(bookings(c), {name: b for name, b in before.items() if name not in ("r2", "r3")})
        equal([c.free("r5"), c.free("r0")], [200, 200])
        wait_same([a, b, c], [f"r{i}" for i in range(40) if i not in (0, 2, 3, 5)])
        c.reserve(TOKENS, selection_id="new")
        wait_until(lambda: "new" in bookings(a) and "new" in bookings(b), timeout=30)


def test_partition():
    """While replicas don't hear of each other each goes on; afterwards all that was told at either side holds."""
    ports = [free_port(), free_port()]
    a = replica(ports[0], [], wait=True)
    with a:
        to_a = Proxy(f"tcp://127.0.0.1:{ports[0]}")
        with replica(ports[1], [to_a.port]) as b:
            to_b = Proxy(f"tcp://127.0.0.1:{ports[1]}")
            equal(a.post("/replica_sync/register_peer", {"endpoint": f"http://127.0.0.1:{to_b.port}"}).status, 201)
            for i in range(6):
                (a if i % 2 else b).reserve(TOKENS + [i] * 16, selection_id=f"r{i}")
            wait_same([a, b], [f"r{i}" for i in range(6)])
            to_a.cut()
            to_b.cut()
            for s in (a, b):
                wait_until(lambda s=s: metric(s, "peers_lost") == 1, timeout=30)
            equal([a.free("r0"), a.free("r1"), b.free("r3"), b.free("r4")], [200] * 4, "of both owners, at both sides")
            equal([a.first_token("r2"), b.first_token("r5")], [200, 200], "of the other's")
            a.reserve([7] * 16, selection_id="both")
            b.reserve([8] * 512, selection_id="both")
            a.reserve([7] * 16, selection_id="a")
            b.reserve([7] * 16, selection_id="r1", pinned_worker={"worker_id": 2}) if b.free("r1") == 200 else None
            to_a.mend()
            to_b.mend()
            view, _ = wait_same([a, b], ["r1", "r2", "r5", "both", "a"])
            equal([view[name][1] for name in ("r2", "r5")], [True, True])
            equal(view["r1"][0], 2, "the id was used again; the old end didn't end it")
            smaller = min((a, b), key=lambda s: s.get("/registrations").json()["id"])
            kept = 16 if smaller is a else 512
            equal([next(r["isl_tokens"] for r in s.get("/reservations").json() if r["selection_id"] == "both") for s in (a, b)], [kept] * 2)
            check(metric(a, "peer_conflicts_total") + metric(b, "peer_conflicts_total") >= 1)
            equal([a.free("both"), b.free("both")].count(404) <= 1, True, "both clients free it")
            wait_same([a, b], ["r1", "r2", "r5", "a"])


def test_end_overtakes():
    """An end that one replica tells comes before the booking that another one tells: nothing stays of it."""
    a_port, b_port = free_port(), free_port()
    with replica(a_port, [b_port]) as a, replica(b_port, [a_port]) as b:
        to_a = Proxy(f"tcp://127.0.0.1:{a_port}")
        with replica(free_port(), [to_a.port, b_port]) as c:
            for s, n in ((a, 1), (b, 1), (c, 2)):
                wait_until(lambda s=s, n=n: metric(s, "peers_followed") == n, what="all follow", timeout=30)
            to_a.flow.clear()
            try:
                a.reserve(TOKENS, selection_id="short")
                wait_until(lambda: "short" in bookings(b), timeout=30)
                equal(b.free("short"), 200)
                b.reserve(TOKENS, selection_id="of b")
                wait_until(lambda: "of b" in bookings(c), what="c has heard what b told", timeout=30)
            finally:
                to_a.flow.set()
            a.reserve(TOKENS, selection_id="of a")
            wait_same([a, b, c], ["of a", "of b"])


def test_stop():
    """What a client is told while a replica stops is told to its peers, too."""
    with Replicas(2) as (a, b):
        body = json.dumps({"model_name": MODEL, "token_ids": TOKENS, "selection_id": "late"}).encode()
        with socket.create_connection(("127.0.0.1", a.port)) as late:
            late.sendall(b"POST /select_and_reserve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body[:20])
            wait_until(lambda: a.metrics()["kv_indexer_http_in_flight"] >= 3, what="a reads it, beside the stream and this", timeout=30)
            a.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not serves(a), what="a takes no connections", timeout=30)
            late.sendall(body[20:])
            answer = b"".join(iter(lambda: late.recv(65536), b""))
        check(answer.startswith(b"HTTP/1.1 200"), f"{answer[:200]!r}")
        wait_until(lambda: "late" in bookings(b), what="b knows the booking", timeout=30)


def serves(s):
    try:
        return s.get("/health").status == 200
    except OSError:
        return False


def test_access():
    """Peers have a token, as those of kv-indexer have; a peer that tells nothing, and itself, are harmless."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokens"
        with open(path, "w", encoding="ascii") as f:
            f.write("peers-secret-0123456789\n")
        os.chmod(path, 0o600)
        headers = {"Authorization": "Bearer peers-secret-0123456789"}
        with Replicas(2, "--auth-token-file", path, headers=headers) as (a, b):
            a.reserve(TOKENS, selection_id="r")
            wait_same([a, b], ["r"])
            equal(a.get("/bookings", headers={"Authorization": "Bearer x"}).status, 401)
    with Indexer() as plain, Selector() as s:
        for url in (plain.url, s.url):
            equal(s.post("/replica_sync/register_peer", {"endpoint": url}).status, 201)
        equal(s.post("/replica_sync/register_peer", {"endpoint": plain.url}).status, 200)
        equal(s.get("/replica_sync/peers").json(), [plain.url, s.url])
        wait_until(lambda: any("are not followed" in line and "404" in line for line in s.log), timeout=30)
        wait_until(lambda: metric(s, "peers_lost") == 2, timeout=30)
        error(s.post("/replica_sync/register_peer", {"endpoint": "tcp://127.0.0.1:1"}), 400, "endpoint")
        error(s.post("/replica_sync/register_peer", {}), 422, "endpoint")
        equal([s.post("/replica_sync/deregister_peer", {"endpoint": plain.url}).status for _ in range(2)], [200, 404])
        wait_until(lambda: metric(s, "peers_lost") == 1, timeout=30)


if __name__ == "__main__":
    run(globals())
