# SPDX-License-Identifier: Apache-2.0
"""A replica recovers in the middle of a stream that has several owners, copies, salts and windows, and stays equal."""
import http.server
import os
import pathlib
import random
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from streams import *

WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
SEED = int(os.environ.get("KV_TEST_SEED") or random.randrange(2**32))
MAIN = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def stored(engine, number, blocks, first=0, **extra):
    parent = names(number, 1, first - 1)[0] if first else None
    return engine.stored(names(number, blocks, first), prompt(number, first + blocks)[first * BS:], parent, BS, **extra)


def before(engine):
    """What the origin has when the replica asks for its dump."""
    for number in range(1, 5):
        engine.send(stored(engine, number, 4), stored(engine, number, 4, medium="CPU"))
        engine.send(stored(engine, number, 4, medium="CPU", ownership="mooncake"), stored(engine, number, 3, medium="STORAGE", ownership="nfs"))
        engine.send(stored(engine, number, 2))  # a second copy
    engine.send(stored(engine, 2, 1, medium="EXTERNAL", ownership="nfs"))
    engine.send(stored(engine, 3, 1, first=6, medium="CPU", ownership="mooncake"))  # parked: its parent isn't there
    for number in 10, 11:  # salted chains
        engine.send(stored(engine, number, 2, extra_keys=[["secret"], None]))
    engine.send(stored(engine, 20, 4, **MAIN), stored(engine, 20, 4, **WINDOW), rank=1)
    engine.send(stored(engine, 20, 4, **MAIN), stored(engine, 20, 4, **WINDOW), rank=1)


def after(engine):
    """What means something else to who doesn't know whose blocks those are."""
    engine.remove(names(1, 4), medium="CPU", ownership="mooncake")
    engine.remove(names(1, 2), medium="CPU")
    engine.remove(names(2, 4), medium="CPU")
    engine.remove(names(2, 2), medium="CPU", ownership="mooncake")
    engine.remove(names(3, 2))
    engine.remove(names(4, 1, 1))
    engine.remove(names(4, 1, 1))
    engine.remove(names(2, 1), medium="EXTERNAL")  # not the publisher's own
    engine.send(stored(engine, 3, 2, first=4, medium="CPU", ownership="mooncake"))  # fills the hole
    engine.send(stored(engine, 10, 2, first=2))  # the salt is its parent's
    engine.remove(names(20, 3), group_idx=1, rank=1)
    engine.remove(names(20, 2, 2), group_idx=1, rank=1)
    engine.remove(names(20, 1, 3), group_idx=1, rank=1)
    engine.send({"type": "AllBlocksCleared", "ownership": "nfs"})


QUESTIONS = [(number, {}) for number in (1, 2, 3, 4, 10, 20)] + [(10, {"cache_salt": "secret"}), (11, {"cache_salt": "secret"})]


def answers(indexer):
    # Each indexer has its own streams, whose state of the moment may differ.
    return [{**indexer.query(prompt(number, 7), **fields), "views": None} for number, fields in QUESTIONS]


def sorted_facts(items):
    return sorted({json.dumps({key: sorted(value) if key == "sources" else value for key, value in item.items()}, sort_keys=True)
                   for item in items})


def state(indexer):
    """All that a dump tells, in an order that doesn't depend on how it came about."""
    dump = indexer.streams()
    streams = [{**one, "salts": sorted(one["salts"])} for one in dump[f"{MODEL}:default"]["streams"]]
    extras, ranges = ([fact for one in streams for fact in one.pop(name)] for name in ("extras", "ranges"))
    for one in streams:
        del one["events"]
        del one["reasons"]  # a new connection may have to show first whose it is
        one["facts"] = sorted(set(one["facts"]) - {"adrift"})
    return blocks_of(dump), sorted_facts(extras), sorted_facts(ranges), streams


def equal_replicas(a, b, engine):
    settled = lambda one: last_seq(one, 1) == engine.seq - 1
    for one in a, b:
        wait_until(lambda one=one: settled(one), 30, "all batches")
    equal(answers(b), answers(a), "answers")
    for one, other in zip(state(b), state(a)):
        equal(one, other, "dumps")


def test_a_replica_tells_owners_copies_salts_and_windows_apart():
    with Publisher(replay=None) as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        before(engine)
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        with Indexer("--peers", a.url) as b:
            engine.wait_subscriber(2)
            equal_replicas(a, b, engine)
            after(engine)
            equal_replicas(a, b, engine)
            for one in a, b:
                equal(one.score(prompt(10, 4), 1, cache_salt="secret"), 4 * BS)
                equal(one.score(prompt(20, 4), 1, rank=1), 2 * BS)
            with Indexer("--peers", b.url) as c:  # from the replica's own dump
                equal_replicas(a, c, engine)


class DumpServer(http.server.ThreadingHTTPServer):
    """Serves @body on /dump, and nothing else: a peer that is gone by the time its workers register."""

    daemon_threads = True

    def __init__(self, body):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                found = self.path == "/dump"
                self.send_response(200 if found else 404)
                self.send_header("Content-Length", str(len(body) if found else 0))
                self.end_headers()
                if found:
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def test_a_worker_that_registers_after_recovery():
    """What its stream knows waits beside its position, and is passed on in dumps."""
    with Publisher() as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        before(engine)
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        dump = json.dumps(a.streams()).encode()
        with DumpServer(dump) as peer, Indexer("--peers", peer.url) as b, Indexer("--peers", b.url) as c:
            for one in b, c:
                one.register(1, engine, block_size=BS)
            engine.wait_subscriber(3)
            after(engine)
            for one in b, c:
                equal_replicas(a, one, engine)


class Copies:
    """An engine that takes and gives up copies of blocks for as long as it runs."""

    def __init__(self, engine):
        self.engine, self.held, self.stopped = engine, {}, threading.Event()
        self.random = random.Random(SEED)
        self.thread = threading.Thread(target=self.run)

    def change(self):
        number = self.random.randrange(1, 200)
        copies = self.held.get(number, 0)
        if copies and self.random.randrange(4) >= 4 - copies:
            self.engine.remove(names(number, 4)[::-1])
            self.held[number] = copies - 1
        else:
            self.engine.send(stored(self.engine, number, 4))
            self.held[number] = copies + 1

    def run(self):
        while not self.stopped.is_set():
            self.change()
            time.sleep(0.0005)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()


def test_copies_that_change_while_the_dump_is_written():
    """The replica has what the origin has: each stream is written at one batch."""
    with Publisher() as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        for number in range(1000, 4000):
            engine.send(stored(engine, number, 4))
        for _ in range(3):
            with Copies(engine) as copies:
                wait_until(lambda: len(copies.held) > 150, 60, "enough prompts")
                with Indexer("--peers", a.url) as b:
                    copies.__exit__()
                    equal_replicas(a, b, engine)
                    wait_until(lambda: listener(b)["partial"] == listener(a)["partial"], 30, "equal doubts")


def test_events_that_may_have_been_reports_are_handed_over():
    """A replica that the first report reaches doubts the copies in the dump, as the origin does."""
    with Publisher(replay=None) as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        engine.send(stored(engine, 1, 3))
        engine.send(stored(engine, 1, 3))  # a report that nothing shows
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        with Indexer("--peers", a.url) as b:
            engine.wait_subscriber(2)
            equal_replicas(a, b, engine)
            engine.send(stored(engine, 1, 3), stored(engine, 1, 1, first=3))  # one that the batch shows
            engine.remove(names(1, 4)[::-1])
            for one in a, b:
                wait_until(lambda one=one: last_seq(one, 1) == engine.seq - 1, 30, "all batches")
                assert listener(one)["partial"], "its copies are in doubt"


def test_ranges_are_handed_over():
    """A replica, and its replica, doubt the block of which the engine may have removed the only copy, and just as long."""
    with Publisher(replay=None) as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        for _ in range(2):  # the second may be a report
            engine.send(stored(engine, 1, 1))
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        with Indexer("--peers", a.url) as b:
            engine.wait_subscriber(2)
            engine.send(stored(engine, 2, 1))
            for one in a, b:
                wait_until(lambda one=one: not listener(one)["partial"] and last_seq(one) == engine.seq - 1, 30, "a whole view")
            engine.remove(names(1, 1))
            equal_replicas(a, b, engine)
            with Indexer("--peers", b.url) as c:  # from a view that is partial for that reason alone
                engine.wait_subscriber(3)
                engine.send(stored(engine, 3, 1))
                for one in a, b, c:
                    wait_until(lambda one=one: last_seq(one) == engine.seq - 1, 30, "all batches")
                    check(listener(one)["partial"], "one copy may be left, or none")
                engine.remove(names(1, 1))
                for one in a, b, c:
                    wait_until(lambda one=one: last_seq(one) == engine.seq - 1, 30, "all batches")
                    check(not listener(one)["partial"], "it was a copy: now both are gone")
                    equal(one.score(prompt(1, 1), 1), 0)


def test_a_stream_tells_that_it_is_partial():
    """What is missing at its last batch is missing at the replica, too."""
    with Publisher(replay=None) as engine, Indexer() as a:
        a.register(1, engine, block_size=BS)
        engine.wait_subscriber()
        engine.send(stored(engine, 1, 4))
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        told = lambda: [bool(one["reasons"]) for one in a.streams()[f"{MODEL}:default"]["streams"]]
        equal(told(), [False])
        engine.send(engine.removed(names(1, 4)[::-1]), lose=True)
        engine.send(stored(engine, 5, 2))
        wait_until(lambda: last_seq(a, 1) == engine.seq - 1, 30, "all batches")
        equal(told(), [True])


if __name__ == "__main__":
    run(globals())
