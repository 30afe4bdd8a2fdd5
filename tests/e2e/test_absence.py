# SPDX-License-Identifier: Apache-2.0
"""Workers without a connection: their views are partial after --stale-after, and their blocks are forgotten after
--forget-after. What is back is exact again, and whole only once that is proved."""
import sys
import time

from kvtest import *
import streams
from streams import Proxy

FAST = ("--stale-after", "500ms", "--forget-after", "2s")
STALE = ("--stale-after", "500ms", "--forget-after", "0")


def partial_ranks(indexer, tokens=(1,)):
    return indexer.query(tokens, explain=True)["explain"]["partial_ranks"]


def is_whole(indexer, tokens):
    return partial_ranks(indexer, tokens) == 0


def register_through(indexer, instance, engine, proxy, replay):
    indexer.register(instance, proxy.endpoint, block_size=16, replay_endpoint=replay.endpoint)
    engine.wait_subscriber()


def cut_while_the_engine_evicts(*options):
    """H17. The numbers never count as whole after --stale-after; they are exact when the connection is back."""
    tokens = list(range(64))
    with Indexer(*options) as indexer, Publisher() as engine, Proxy(engine.endpoint) as proxy, Proxy(engine.replay_endpoint) as replay:
        register_through(indexer, 1, engine, proxy, replay)
        engine.store([11, 12, 13, 14], tokens)
        indexer.wait_score(tokens, 1, 64)
        wait_until(lambda: is_whole(indexer, tokens), 10, "a whole view")
        proxy.cut()
        replay.cut()
        wait_until(lambda: not is_whole(indexer, tokens), 20, "a partial view")
        equal(streams.listener(indexer)["connected"], False)
        check(streams.listener(indexer)["disconnected_ms"] > 0, "it says for how long")
        engine.wait_no_subscriber()
        engine.remove([12, 13, 14])
        if "2s" in options:
            indexer.wait_score(tokens, 1, 0)
            equal(streams.stream(indexer, "absences_total"), 1)
        else:
            equal(indexer.score(tokens, 1), 64)
            equal(streams.stream(indexer, "absences_total"), 0)
        equal(is_whole(indexer, tokens), False)
        equal(indexer.query([7] * 16, explain=True)["explain"]["reason"], "disconnected")
        equal(indexer.query([7] * 16, explain=True)["explain"]["disconnected_ranks"], 1)
        proxy.mend()
        replay.mend()
        # From here on: never a whole view with other numbers than 16.
        def back():
            answer = indexer.query(tokens, explain=True)
            whole = answer["explain"]["partial_ranks"] == 0
            got = answer["scores"].get("1", {}).get("0", 0)
            after = is_whole(indexer, tokens)
            check(not (whole and after) or got == 16, f"a whole view that says {got}")
            return whole and after

        wait_until(back, 30, "a whole view after the connection is back")
        equal(indexer.score(tokens, 1), 16)
        engine.store([22], range(16, 32), parent=11)
        indexer.wait_score(range(32), 1, 32)
        equal(is_whole(indexer, tokens), True)


def test_cut_while_the_engine_evicts():
    cut_while_the_engine_evicts(*STALE)


def test_cut_until_forgotten():
    cut_while_the_engine_evicts(*FAST)


def test_the_defaults():
    """5 s and 60 s, and that a quiet connection is not stale."""
    tokens = list(range(64))
    with Indexer() as indexer, Publisher() as engine, Publisher() as quiet, Proxy(engine.endpoint) as proxy, Proxy(engine.replay_endpoint) as replay:
        register_through(indexer, 1, engine, proxy, replay)
        indexer.register(2, quiet)
        for one in (engine, quiet):
            one.store([11, 12, 13, 14], tokens)
        for instance in (1, 2):
            indexer.wait_score(tokens, instance, 64)
        wait_until(lambda: is_whole(indexer, tokens), 10, "whole views")
        proxy.cut()
        wait_until(lambda: partial_ranks(indexer, tokens) == 1, 20, "a partial view")
        check(streams.listener(indexer, 1)["disconnected_ms"] >= 5000, "not before 5 s")
        equal(streams.listener(indexer, 1)["partial"], True)
        equal(streams.listener(indexer, 1)["partial_reasons"], ["stale"])
        equal(indexer.query(tokens, explain=True)["explain"]["partial_reasons"], {"stale": 1})
        check(any('reason="stale"' in name for name in indexer.metrics()), "a metric of the reason")
        equal(streams.listener(indexer, 2)["partial"], False)
        equal(indexer.score(tokens, 1), 64)


def test_never():
    """0 switches both off."""
    tokens = list(range(64))
    with Indexer("--stale-after", 0, "--forget-after", 0) as indexer, Publisher() as engine, Proxy(engine.endpoint) as proxy, \
            Proxy(engine.replay_endpoint) as replay:
        register_through(indexer, 1, engine, proxy, replay)
        engine.store([11, 12, 13, 14], tokens)
        indexer.wait_score(tokens, 1, 64)
        wait_until(lambda: is_whole(indexer, tokens), 10, "a whole view")
        proxy.cut()
        wait_until(lambda: streams.listener(indexer).get("disconnected_ms", 0) > 3000, 30, "3 s without a connection")
        equal(is_whole(indexer, tokens), True)
        equal(indexer.score(tokens, 1), 64)


def gaps_that_wait(answers, restarts):
    """A gap waits for its replay, and others behind it, when the connection ends. The ring has them all, but not the beginning.
    @answers: the first one's replay ends without a connection; else nobody answers. @restarts: another process is back."""
    timeout = "60s" if answers else "100ms"
    with Indexer("--stale-after", 0, "--forget-after", 0, "--replay-timeout", timeout) as indexer, Publisher(ring=8) as engine, \
            Proxy(engine.endpoint) as proxy, Proxy(engine.replay_endpoint) as replay:
        indexer.register(1, proxy.endpoint, block_size=streams.BS, replay_endpoint=replay.endpoint)
        engine.wait_subscriber()
        wait_until(lambda: is_whole(indexer, [1]), 30, "the answer that there is nothing")
        streams.store_all(engine, range(1, 21), 2)
        streams.holds_all(indexer, range(1, 21), 2)
        wait_until(lambda: is_whole(indexer, [1]), 30, "a whole view")
        replay.cut()
        for number in range(21, 27):
            streams.store(engine, number, 2, lose=number % 2)
        time.sleep(0.2)  # where the rest hasn't arrived by then, it is lost with the connection
        proxy.cut()
        wait_until(lambda: not streams.listener(indexer)["connected"], 30, "a lost connection")
        if answers:
            replay.mend()
            streams.holds(indexer, 22, 2)
        else:
            time.sleep(1)  # all attempts
        equal(is_whole(indexer, [1]), False)
        if restarts:
            engine.restart()
            streams.store_all(engine, range(31, 36), 2)
        proxy.mend()
        if not answers:
            replay.mend()
        wait_until(lambda: is_whole(indexer, [1]), 20, "a whole view")  # nobody asks for everything so soon
        streams.holds_all(indexer, range(31, 36) if restarts else range(1, 27), 2)
        equal([indexer.score(streams.prompt(number, 2), 1) for number in range(1, 27)] if restarts else [], [0] * 26 if restarts else [])
        equal(streams.stream(indexer, "missed_batches_total"), 0)
        equal(streams.stream(indexer, "failed_replays_total"), 0)


def test_gaps_that_wait_while_the_replay_ends():
    gaps_that_wait(True, False)


def test_gaps_that_wait_and_nobody_answers():
    gaps_that_wait(False, False)


def test_gaps_that_wait_and_another_process_is_back():
    gaps_that_wait(True, True)
    gaps_that_wait(False, True)


def killed(start_again):
    with Indexer(*FAST) as indexer, streams.Engine(count=20) as engine:
        streams.register(indexer, 1, engine)
        streams.holds_all(indexer, range(1, 21), 2)
        engine.kill()
        for number in (1, 20):
            indexer.wait_score(streams.prompt(number, 2), 1, 0)
        worker = indexer.workers()[0]
        equal((worker["status"], worker["listeners"]["0"]["partial"]), ("failed", True))
        wait_until(lambda: any("forget-after" in line for line in indexer.log), 30, "the log to say why")
        if start_again:  # another process: other prompts, an own numbering
            engine.prompt_base = 100
            engine.start()
            streams.holds_all(indexer, range(101, 121), 2)
            equal(indexer.score(streams.prompt(1, 2), 1), 0)
            wait_until(lambda: is_whole(indexer, [1]), 30, "a whole view")
        else:
            engine.start()


def test_a_killed_engine():
    killed(False)


def test_a_killed_engine_that_starts_again():
    killed(True)


def test_a_frozen_engine():
    """Its kernel still takes what we send: only the missing answers to heartbeats tell."""
    with Indexer(*FAST) as indexer, streams.Engine(count=5) as engine:
        streams.register(indexer, 1, engine)
        streams.holds_all(indexer, range(1, 6), 2)
        wait_until(lambda: is_whole(indexer, [1]), 30, "a whole view")
        engine.freeze()
        wait_until(lambda: not is_whole(indexer, [1]), 60, "a partial view")
        for number in (1, 5):
            indexer.wait_score(streams.prompt(number, 2), 1, 0)
        equal(streams.listener(indexer)["connected"], False)
        engine.thaw()
        streams.holds_all(indexer, range(1, 6), 2)
        wait_until(lambda: is_whole(indexer, [1]), 30, "a whole view")


def test_instances_that_share_an_endpoint():
    """Each has a connection of its own, and is judged by it; so are two ranks of one instance."""
    tokens = list(range(64))
    with Indexer(*FAST) as indexer, Publisher(rank=0) as engine, Proxy(engine.endpoint) as proxy, Proxy(engine.replay_endpoint) as replay:
        indexer.register(1, engine)
        indexer.register(2, engine)
        indexer.register(3, engine)
        indexer.register(3, proxy.endpoint, dp_rank=1, replay_endpoint=replay.endpoint)
        engine.wait_subscriber(4)
        engine.store([11, 12, 13, 14], tokens)
        for instance in (1, 2, 3):
            indexer.wait_score(tokens, instance, 64)
        wait_until(lambda: is_whole(indexer, tokens), 30, "whole views")
        proxy.cut()
        replay.cut()
        wait_until(lambda: streams.stream(indexer, "absences_total", 3, 1) == 1, 30, "the lost listener's end")
        # The other listener of instance 3 has what both brought, after a replay.
        wait_until(lambda: not streams.listener(indexer, 3, 0)["partial"], 30, "a whole view of the other listener")
        for instance in (1, 2, 3):
            equal(indexer.score(tokens, instance), 64)


def test_replicas():
    """A replica of an indexer that has forgotten a worker doesn't bring it back, and a dead worker in a dump is forgotten."""
    with Indexer(*FAST) as first, Indexer("--forget-after", 0) as second, streams.Engine(count=5) as engine:
        for indexer in (first, second):
            streams.register(indexer, 1, engine)
            streams.holds_all(indexer, range(1, 6), 2)
        engine.kill()
        first.wait_score(streams.prompt(1, 2), 1, 0)
        with Indexer(*FAST, "--peers", first.url) as replica:
            equal(replica.score(streams.prompt(1, 2), 1) if replica.workers() else 0, 0)
        with Indexer(*FAST, "--peers", second.url) as replica:
            wait_until(replica.workers, 30, "the peer's registration")
            equal(is_whole(replica, [1]), False)  # its position is proved by nobody
            replica.wait_score(streams.prompt(1, 2), 1, 0)
            equal(is_whole(replica, [1]), False)
        equal(second.score(streams.prompt(1, 2), 1), 2 * streams.BS)
        engine.start()


if __name__ == "__main__":
    run(globals())
