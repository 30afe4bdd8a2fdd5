# SPDX-License-Identifier: Apache-2.0
"""Recovery from peers: under load, from old and bad peers, with names that have colons, with tokens."""
import contextlib
import itertools
import pathlib
import socket
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from streams import *


def workers(engines):
    """Arguments that register engines 1, 2, ... at start."""
    listed = ",".join(f"{i + 1}={engine.endpoint}" for i, engine in enumerate(engines))
    return ["--workers", listed, "--block-size", BS, "--model-name", MODEL]


class Load:
    """Publishes from all engines, stores and removes, until stopped."""

    def __init__(self, engines):
        self.engines, self.number, self.cleared, self.stopping = engines, 0, 0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stopping:
            self.number += 1
            for engine in self.engines:
                store(engine, self.number, 4)
                clears = engine is self.engines[0]
                old = self.number - (60 if clears else 300)
                if old > (self.cleared if clears else 0):  # an engine removes only what it has
                    engine.remove(names(old, 2, 2))  # a prompt loses its tail
                if self.number % 97 == 0 and clears:
                    engine.clear()
                    self.cleared = self.number
            time.sleep(0.001)

    def goes_on(self, prompts):
        """Until that many more have been published."""
        number = self.number + prompts
        wait_until(lambda: self.number >= number or not self.thread.is_alive(), 60, "traffic")

    def stop(self):
        self.stopping = True
        self.thread.join()


def settled(indexers, engines):
    for indexer in indexers:
        for i, engine in enumerate(engines):
            wait_until(lambda i=i, indexer=indexer, engine=engine: last_seq(indexer, i + 1) == engine.seq - 1, 30, "all batches")


def test_two_replicas_recover_from_one_another_under_load():
    engines = [Publisher(replay=None) for _ in range(3)]
    port = free_port()
    load = a = b = None
    try:
        a = Indexer(*workers(engines), "--port", port)
        for engine in engines:
            engine.wait_subscriber()
        load = Load(engines)
        load.goes_on(100)
        b = Indexer(*workers(engines), "--peers", f"{a.url}/")  # the slash is no harm
        load.goes_on(100)
        a.kill()
        load.goes_on(50)
        a = Indexer(*workers(engines), "--port", port, "--peers", b.url)
        load.goes_on(100)
        load.stop()
        settled([a, b], engines)
        one, other = blocks_of(a.dump()), blocks_of(b.dump())
        check(len(one) > 1000, "too little happened")
        equal(len(one ^ other), 0, "blocks that only one of them has")
        for indexer in a, b:
            wait_until(lambda: any("recovered from a peer" in line for line in indexer.log), what="a line in the log")
            for i in range(len(engines)):
                equal(listener(indexer, i + 1)["partial"], False)
                equal(stream(indexer, "gaps_total", i + 1), 0)
                equal(stream(indexer, "restarts_total", i + 1), 0)
        equal(a.get("/peers").json(), [b.url])
    finally:
        if load:
            load.stop()
        for indexer in a, b:
            if indexer:
                indexer.stop()
        for engine in engines:
            engine.close()


def test_an_engine_that_restarted_meanwhile():
    """The peer's dump is of the old process; the first live batch shows the new one."""
    with Publisher(replay=None) as engine, Indexer(*workers([engine])) as a:
        engine.wait_subscriber()
        store_all(engine, range(1, 50), 2)
        holds(a, 49, 2)
        with Indexer(*workers([engine]), "--peers", a.url) as b:
            holds(b, 49, 2)
            engine.wait_subscriber(2)
            engine.restart()
            store(engine, 100, 2)
            for indexer in a, b:
                holds(indexer, 100, 2)
                indexer.wait_score(prompt(49, 2), 1, 0)
                equal(stream(indexer, "restarts_total"), 1)


@contextlib.contextmanager
def recovered_and_behind():
    """An engine, and an indexer that has a peer's dump of it (prompts 1 to 20), follows nobody and lacks 21 to 25."""
    with Publisher() as engine, Indexer() as a:
        register(a, 1, engine)
        store_all(engine, range(1, 21), 2)
        holds(a, 20, 2)
        with Peer(reply(200, json.dumps(a.streams()).encode())) as peer, Indexer("--peers", peer.url) as b:
            holds(b, 20, 2)
            store_all(engine, range(21, 26), 2)
            yield engine, b


def test_only_what_is_missing_is_replayed():
    """A worker that registers after recovery goes on from the peer's position."""
    with recovered_and_behind() as (engine, b):
        b.register(1, engine, block_size=BS)
        engine.wait_subscriber(2)
        store(engine, 26, 2)
        holds_all(b, range(1, 27), 2)
        check(stream(b, "replayed_batches_total") in (5, 6), "21 to 25, and 26 when the request came after it")
        equal(stream(b, "batches_total"), 6)
        equal(listener(b)["partial"], False)
        # Blocks that came with the dump go with their instance.
        b.unregister(1)
        b.query(prompt(1, 2), expect=404)


def same(a, b, numbers, blocks=2):
    """Both indexers give the same answers. Each has its own streams, whose state of the moment may differ."""
    for number in numbers:
        got, wanted = b.query(prompt(number, blocks)), a.query(prompt(number, blocks))
        equal({**got, "views": None}, {**wanted, "views": None}, f"prompt {number}")


def registered(indexer):
    return sorted(worker["instance_id"] for worker in indexer.workers())


def test_workers_registered_at_a_peer_are_followed():
    """Over HTTP, at one replica only. The other follows their events, and goes on when the first one dies."""
    engines = [Publisher(), Publisher(replay=None)]
    a = Indexer("--peer-interval", "200ms")
    try:
        for i, engine in enumerate(engines):
            register(a, i + 1, engine)
            store_all(engine, range(1, 21), 2)
            holds(a, 20, 2, instance=i + 1)
        with Indexer("--peers", a.url, "--peer-interval", "200ms") as b:
            equal(registered(b), [1, 2])
            equal(listener(b, 1)["replay_endpoint"], engines[0].replay_endpoint)
            same(a, b, range(1, 21))
            for engine in engines:
                engine.wait_subscriber(2)
                store_all(engine, range(21, 31), 2)
                engine.remove(names(5, 1, 1))
            for indexer in a, b:
                holds_all(indexer, range(21, 31), 2, instance=1)
                holds_all(indexer, range(21, 31), 2, instance=2)
                for instance in 1, 2:
                    indexer.wait_score(prompt(5, 2), instance, BS)
            same(a, b, range(1, 31))
            a.kill()
            for i, engine in enumerate(engines):
                store_all(engine, range(31, 41), 2)
                holds(b, 40, 2, instance=i + 1)
                equal(listener(b, i + 1)["partial"], False)
                equal(stream(b, "gaps_total", i + 1), 0)
                equal(stream(b, "restarts_total", i + 1), 0)
            holds_all(b, [n for n in range(1, 41) if n != 5], 2, instance=2)
    finally:
        a.kill()
        for engine in engines:
            engine.close()


def test_later_registrations_reach_peers_and_come_back():
    """Both ways between two replicas: made at either, removed at either, changed; and nothing goes round in circles."""
    with Publisher() as one, Publisher() as other, Publisher() as third, Indexer("--peer-interval", "100ms") as a:
        with Indexer("--peers", a.url, "--peer-interval", "100ms") as b:
            equal(a.post("/register_peer", {"url": b.url}).status, 201)
            register(a, 1, one)
            register(b, 2, other)
            for indexer in a, b:
                wait_until(lambda indexer=indexer: registered(indexer) == [1, 2], what="both everywhere")
            for engine in one, other:
                engine.wait_subscriber(2)
            store(one, 1, 2)
            store(other, 2, 2)
            for indexer in a, b:
                holds(indexer, 1, 2, instance=1)
                holds(indexer, 2, 2, instance=2)
            # A client that tells both replicas is told the same by both.
            b.register(1, one.endpoint, block_size=BS, replay_endpoint=one.replay_endpoint)
            b.register(1, one.endpoint, block_size=BS, replay_endpoint=one.replay_endpoint, expect=409)
            a.unregister(1)
            wait_until(lambda: registered(b) == [2], what="the end of 1 at the other one")
            b.unregister(1)
            b.unregister(1, expect=404)
            equal(b.score(prompt(1, 2), 1), 0, "blocks of a worker that left")
            b.unregister(2)
            wait_until(lambda: registered(a) == [], what="the end of 2 at the first one")
            # The same instance again, elsewhere.
            register(a, 1, third)
            wait_until(lambda: registered(b) == [1], what="1 again")
            equal(listener(b, 1)["endpoint"], third.endpoint)
            revisions = lambda: [indexer.get("/registrations").json()["revision"] for indexer in (a, b)]

            def quiet():
                before = revisions()
                time.sleep(1)  # ten times as long as a replica waits until it asks its peer
                return revisions() == before

            wait_until(quiet, what="the end of changes")
            for indexer in a, b:
                equal(registered(indexer), [1])


def test_blocks_that_no_stream_keeps_true():
    """A peer's worker that may not be followed here: its blocks are partial, and forgotten after some time."""
    with Publisher() as engine, Indexer() as a:
        register(a, 1, engine)
        store_all(engine, range(1, 6), 2)
        holds(a, 5, 2)
        options = ["--peers", a.url, "--peer-interval", "200ms", "--allow-endpoint", "tcp://127.0.0.77:1", "--unfollowed-age"]
        with Indexer(*options, "1h") as b:
            holds(b, 5, 2)
            equal(registered(b), [])
            wait_until(lambda: any("is not followed here" in line for line in b.log), what="a line in the log")
            equal(b.query(prompt(1, 2), explain=True)["explain"]["partial_ranks"], 1)
        with Indexer(*options, "3s") as b:
            wait_until(lambda: b.post("/query", {"model_name": MODEL, "token_ids": prompt(1, 2)}).status == 404, 20, "their end")


def test_names_with_colons_and_empty_models():
    with Publisher() as engine, Publisher() as idle, Indexer() as a:
        a.register(1, engine, block_size=BS, model_name="org/m:7b", tenant_id="team:a")
        a.register(2, idle, block_size=8, model_name="idle")
        store(engine, 1, 2)
        a.wait_score(prompt(1, 2), 1, 8, model_name="org/m:7b", tenant_id="team:a")
        with Indexer("--peers", a.url) as b:
            b.wait_score(prompt(1, 2), 1, 8, model_name="org/m:7b", tenant_id="team:a")
            equal(b.query(range(8), model_name="idle")["scores"], {})
            reply = b.register(3, idle.endpoint, block_size=4, model_name="idle", expect=409)
            check("existing=8" in reply.json()["error"], reply)


def test_partial_views_stay_partial():
    with Publisher(replay=None) as engine, Indexer(*workers([engine])) as a:
        engine.wait_subscriber()
        store(engine, 1, 2)
        store(engine, 2, 2, lose=True)
        store(engine, 3, 2)
        holds(a, 3, 2)
        with Indexer(*workers([engine]), "--peers", a.url) as b:
            engine.wait_subscriber(2)
            store(engine, 4, 2)
            holds(b, 4, 2)
            equal(listener(b)["partial"], True)


def test_a_doubtful_beginning_stays_partial():
    """The first batch had the number 1: nothing tells whether there was a batch 0."""
    with Publisher(replay=None, first=1) as engine, Indexer(*workers([engine])) as a:
        engine.wait_subscriber()
        store(engine, 1, 2)
        holds(a, 1, 2)
        equal(listener(a)["partial"], True)
        with Indexer(*workers([engine]), "--peers", a.url) as b:
            holds(b, 1, 2)
            equal(listener(b)["partial"], True)


def test_peers_that_hear_of_a_connection_by_a_batch():
    """A stream that brings batches is known to be connected, and its replica's view is whole."""
    with Engine(interval=0.001) as engine, Indexer(*workers([engine])) as a:
        wait_until(lambda: last_seq(a) > 50, what="batches")
        with Indexer(*workers([engine]), "--peers", a.url) as b:
            before = last_seq(a)
            wait_until(lambda: last_seq(b) > before + 50, what="more of them")
            for indexer in a, b:
                for one in indexer.streams()[f"{MODEL}:default"]["streams"]:
                    check("adrift" not in one["facts"], f"{one} is of a stream that is connected")


def test_a_peer_that_is_not_connected():
    """The engine started over while the peer was away, and has published as many batches. Without a replay endpoint nothing tells."""
    with Publisher(replay=None) as new:
        with Publisher(replay=None) as old, Indexer(*workers([old])) as a:
            old.wait_subscriber()
            store_all(old, (1, 2), 2)
            holds(a, 2, 2)
            with Indexer(*workers([old]), "--peers", a.url) as b:
                holds(b, 2, 2)
                equal(listener(b)["partial"], False)
            old.close()
            wait_until(lambda: listener(a)["status"] == "failed", what="the loss of the connection")
            store_all(new, (3, 4), 2)
            with Indexer(*workers([new]), "--peers", a.url) as b:
                new.wait_subscriber()
                store(new, 5, 2)
                holds(b, 5, 2)
                equal(listener(b)["partial"], True)
                new.clear()
                wait_until(lambda: not listener(b)["partial"], what="a whole view")


def recovery_error(indexer):
    """The reason of the one recovery that failed before the port was open."""
    return next(line for line in indexer.log if "recovery from a peer failed" in line).partition(" error=")[2].strip()


def test_tokens():
    with tempfile.NamedTemporaryFile("w") as tokens, Publisher() as engine:
        tokens.write("a-token\nanother\n")
        tokens.flush()
        headers = {"Authorization": "Bearer a-token"}
        with Indexer("--auth-token-file", tokens.name, headers=headers) as a:
            register(a, 1, engine)
            store(engine, 1, 2)
            holds(a, 1, 2)
            with Indexer("--auth-token-file", tokens.name, "--peers", a.url, headers=headers) as b:
                holds(b, 1, 2)
            with Indexer("--peers", a.url) as b:
                b.query(prompt(1, 2), expect=404)
                check(recovery_error(b) == '"HTTP status 401: give the peer\'s token with --auth-token-file"', b.log)
            with tempfile.NamedTemporaryFile("w") as others:
                others.write("of-others\na-token\n")
                others.flush()
                with Indexer("--auth-token-file", others.name, "--peers", a.url, headers=headers) as b:
                    check(recovery_error(b) == '"HTTP status 401: the peer doesn\'t know the first token of --auth-token-file"', b.log)
            check(not any("a-token" in line for line in a.log + b.log), "a token in the log")


# -- peers that aren't what they should be -----------------------------------------------------------------

def event(worker, hashes, tokens_hashes, parent=None, **extra):
    blocks = [{"block_hash": h, "tokens_hash": t, "mm_extra_info": None} for h, t in zip(hashes, tokens_hashes)]
    return {"worker_id": worker, "event": {"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0},
            **extra}


GOOD = {f"{MODEL}:default": {"block_size": BS, "events": [event(7, [1], [11]), event(7, [2], [12], 1), event(7, [2 ** 64 - 1], [13], 2)]}}
BAD = json.dumps({f"{MODEL}:default": {"block_size": BS, "events": [event(99, [1], [11]), event(99, [2], [12], 1)]}}).encode()


def chunks(pieces, end=True, pause=0):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            handler.wfile.flush()
            time.sleep(pause)
        if end:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True
    return answer


def hang(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(BAD)
    handler.wfile.flush()
    time.sleep(60)


def test_peers_that_admit_their_own_machine_alone():
    with Peer(reply(403, b'{"error":"requests from other machines are refused"}')) as peer, Indexer("--peers", peer.url) as indexer:
        equal(recovery_error(indexer), '"HTTP status 403: the peer admits only its own machine; start it with --auth-token-file or --insecure"')


def test_bad_peers_are_passed_over():
    bad = {
        "garbage": reply(200, b"\x00\xff" * 1000),
        "a web page": reply(200, b"<html>hello</html>"),
        "nothing": reply(200, b""),
        "an array": reply(200, b"[" + BAD + b"]"),
        "cut short": reply(200, BAD[:-1]),
        "cut short in transfer": reply(200, BAD[:-20], length=len(BAD)),
        "broken off": chunks([BAD[:100]], end=False),
        "two documents": reply(200, BAD + BAD),
        "status 500": reply(500, BAD),
        "status 404": reply(404, b'{"error":"no"}'),
        "a redirect": reply(302, BAD, Location="/elsewhere"),
        "an event of another shape": reply(200, BAD.replace(b'"worker_id": 99', b'"worker_id": "99"')),
        "an unknown tier": reply(200, json.dumps({"m:default": {"block_size": BS, "events": [
            event(99, [1], [11]), event(99, [2], [12], 1, storage_tier="tape")]}}).encode()),
        "no block size": reply(200, BAD.replace(b'"block_size": 4, ', b"")),
        "deep": reply(200, BAD[:-1] + b', "x": ' + b"[" * 100000),
    }
    with Peer(reply(200, json.dumps(GOOD).encode())) as good:
        peers = {what: Peer(answer) for what, answer in bad.items()}
        try:
            urls = ",".join([f"http://127.0.0.1:{free_port()}", *(peer.url for peer in peers.values()), good.url])
            with Indexer("--peers", urls) as indexer:
                for what, peer in peers.items():
                    equal([path for path in peer.asked if "/registrations" not in path], ["/dump"], what)
                equal(indexer.query_by_hash([11, 12, 13])["scores"], {"7": {"0": 12}})
                equal(len(indexer.get("/peers").json()), len(bad) + 2)
        finally:
            for peer in peers.values():
                peer.__exit__()


def test_no_peer_at_all_starts_empty():
    with Peer(reply(200, BAD[:-5])) as bad:
        started = time.monotonic()
        with Indexer("--peers", f"http://127.0.0.1:{free_port()},{bad.url}") as indexer, Publisher() as engine:
            check(time.monotonic() - started < patience(8), "it took long")
            equal(indexer.dump(), {})
            register(indexer, 1, engine)
            store(engine, 1, 2)
            holds(indexer, 1, 2)


def test_a_hanging_peer_is_given_up():
    with Peer(hang) as bad, Peer(reply(200, json.dumps(GOOD).encode())) as good:
        with Indexer("--peers", f"{bad.url},{good.url}", timeout=60) as indexer:
            equal(indexer.query_by_hash([11, 12, 13])["scores"], {"7": {"0": 12}})


def test_a_peer_that_never_accepts():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        with Peer(reply(200, json.dumps(GOOD).encode())) as good:
            with Indexer("--peers", f"http://127.0.0.1:{deaf.getsockname()[1]},{good.url}", timeout=40) as indexer:
                equal(indexer.query_by_hash([11])["scores"], {"7": {"0": 4}})


def test_small_pieces_and_both_generations():
    """The original: single blocks, no names, no streams. Ours: chains, tiers, more fields."""
    events = [event(7, [1, 2, 3], [11, 12, 13], storage_tier="device", residency_domain="worker"),
              event(7, [4], [14], 3, storage_tier="host_pinned")]
    new = {"a:b:c": {"block_size": BS, "model_name": "a:b", "tenant_id": "c", "later": [1],
                     "streams": [{"worker_id": 7, "seq": 1, "ranks": [0], "later": {}, "events": events}]}}
    text = json.dumps({**GOOD, **new}).encode()
    with Peer(chunks([text[i:i + 7] for i in range(0, len(text), 7)])) as peer, Indexer("--peers", peer.url) as indexer:
        equal(indexer.query_by_hash([11, 12, 13])["scores"], {"7": {"0": 12}})
        found = indexer.query_by_hash([11, 12, 13, 14], model_name="a:b", tenant_id="c")
        equal(found["scores"], {"7": {"0": 12}})
        equal(found["instances"]["7"]["cpu"], 16)


def test_a_model_the_peer_could_not_dump():
    text = json.dumps({"broken:default": {"error": "gone"}, **GOOD}).encode()
    with Peer(reply(200, text)) as peer, Indexer("--peers", peer.url) as indexer:
        equal(indexer.query_by_hash([11, 12, 13])["scores"], {"7": {"0": 12}})
        indexer.query_by_hash([11], model_name="broken", expect=404)


def test_another_block_size_than_ours():
    """The peer's model is left out; ours goes on."""
    with Peer(reply(200, json.dumps(GOOD).encode())) as peer, Publisher(replay=None) as engine:
        with Indexer("--workers", f"1={engine.endpoint}", "--block-size", 8, "--model-name", MODEL,
                     "--peers", peer.url) as indexer:
            engine.wait_subscriber()
            engine.store([1], range(8), block_size=8)
            indexer.wait_score(range(8), 1, 8)
            equal(indexer.query_by_hash([11])["scores"], {})


def drips(text):
    """The beginning of a good answer, then a byte now and then, for ever."""
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for byte in itertools.chain(text, itertools.repeat(0x20)):
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.2)
    return answer


def test_peers_that_drip_beside_a_good_one():
    """Seven that send a byte now and then, on each path: the good one behind them is asked meanwhile."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(Peer(drips(b"{"))) for _ in range(7)]
        good = stack.enter_context(Peer(reply(200, json.dumps(GOOD).encode())))
        urls = ",".join(peer.url for peer in [*slow, good])
        indexer = stack.enter_context(Indexer("--peers", urls))
        wait_until(lambda: indexer.query_by_hash([11, 12, 13])["scores"] == {"7": {"0": 12}}, 60, "the good peer's dump")
        check(all(any(path.startswith("/registrations") for path in peer.asked) for peer in slow), "all were asked")
        check(not any("recovery from a peer failed" in line for line in indexer.log), "none was waited for")


def test_a_peer_that_drips_is_given_up():
    with Peer(drips(b"{")) as peer, Indexer("--peers", peer.url) as indexer:
        wait_until(lambda: indexer.get("/health").status == 200, 60, "a start without the peer")
        wait_until(lambda: any("it sends too slowly" in line for line in indexer.log), 60, "the reason")


if __name__ == "__main__":
    run(globals())
