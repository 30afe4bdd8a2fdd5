# SPDX-License-Identifier: Apache-2.0
"""A block manager with its ZMQ sink, followed by kv-indexer: at every quiet point both know the same.

tests/e2e/kvbm_engine.c is the block manager; it prints what its pools find, and this compares the indexer's answers.
"""
import os
import random
import subprocess
import time

from kvtest import *

BLOCK = 4
SEED = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 30)))
STEPS = 150


class Engine:
    def __init__(self, policy="lru", scope="tiers", replay=True, queue_bytes=0, nats=None):
        self.process = subprocess.Popen([BUILD / "tests" / "kvbm_engine", policy, scope, "replay" if replay else "-", str(queue_bytes),
                                         *([nats] if nats else [])],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.scope, self.marks = scope, 0
        self.endpoint, replay_endpoint = self.process.stdout.readline().split()
        self.replay_endpoint = None if replay_endpoint == "-" else replay_endpoint

    def send(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def read(self):
        lines = []
        while True:
            line = self.process.stdout.readline()
            check(line, "the engine has ended")
            if line == ".\n":
                return lines
            lines.append(line)

    def ask(self, command):
        self.send(command)
        return self.read()

    def run(self, seed, steps=STEPS):
        self.ask(f"run {seed} {steps}")

    def run_threads(self, seed, steps=STEPS):
        self.ask(f"threads {seed} {steps}")

    def flush(self):
        """events written, dropped, batches sent"""
        return list(map(int, self.ask("flush")[0].split()))

    def prompts(self):
        """[(blocks on the device, with those of the host behind, blocks anywhere, tokens)]"""
        rows = [list(map(int, line.split())) for line in self.ask("prompts")]
        return [(*row[:3], row[3:]) for row in rows]

    def keys(self):
        """{(key, tier)}; consolidated, all is said to be on the device."""
        found = set()
        for line in self.ask("keys"):
            key, tiers = map(int, line.split())
            if self.scope == "consolidated":
                found.add((key, "device"))
            else:
                found |= {(key, name) for bit, name in enumerate(("device", "host_pinned")) if tiers >> bit & 1}
        return found

    def mark(self):
        """Tokens of a prompt that was never there before: who knows it has seen all that was written before it."""
        self.marks += 1
        return list(map(int, self.ask(f"mark {self.marks}")[0].split()))

    def end(self):
        self.process.stdin.close()
        equal(self.process.wait(60 * SLOW), 0, "exit status of the engine")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None and self.process.poll() is None:
                self.end()
        finally:
            self.process.kill()
            self.process.wait()


def follow(indexer, engine):
    fields = {"replay_endpoint": engine.replay_endpoint} if engine.replay_endpoint else {}
    indexer.register(1, engine.endpoint, block_size=BLOCK, **fields)
    wait_until(lambda: listener(indexer)["status"] == "active", what="an active stream")


def listener(indexer):
    (worker,) = indexer.workers()
    listeners = worker["listeners"]
    return listeners["0"] if isinstance(listeners, dict) else listeners[0]


def answers(indexer, prompts):
    """[(blocks on the device, blocks found)] as the indexer has them"""
    found = []
    for *_, tokens in prompts:
        reply = indexer.query(tokens)
        device = reply["scores"].get("1", {}).get("0", 0)
        found.append((device // BLOCK, reply["instances"].get("1", {}).get("longest_matched", 0) // BLOCK))
    return found


def dumped(indexer):
    found = set()
    (model,) = [m for m in indexer.dump().values() if m["model_name"] == MODEL]
    for event in model["events"]:
        tier = event.get("storage_tier") or event["event"].get("storage_tier") or "device"
        for block in event["event"]["data"]["stored"]["blocks"]:
            found.add((block["block_hash"] % (1 << 64), tier))
    return found


def wait_seen(indexer, engine):
    """Until the indexer has seen all that the engine wrote (in vain where the mark itself is lost: then once more)."""
    deadline = time.monotonic() + patience(100)
    while True:
        tokens = engine.mark()
        engine.flush()
        try:
            wait_until(lambda: indexer.query(tokens)["scores"].get("1"), what="the mark", give_up=5 * SLOW)
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise


def compare(indexer, engine, exact=True):
    """At a quiet point. @exact: the same, the dump too; else the dump may lack blocks below a missing one."""
    wait_seen(indexer, engine)
    prompts = engine.prompts()
    wanted = [(row[2], row[2]) if engine.scope == "consolidated" else row[:2] for row in prompts]
    got = answers(indexer, prompts)
    if exact:
        equal(got, wanted, "prefixes (device, found)")
        equal(sorted(dumped(indexer)), sorted(engine.keys()), "blocks in the dump")
    equal(sorted(dumped(indexer) - engine.keys()), [], "blocks in the dump that aren't there")
    for g, w in zip(got, wanted):
        check(g[0] <= w[0] and g[1] <= w[1], f"more than there is: {g} of {w}")
    return got, wanted


def follow_policy(policy, scope="tiers", replay=True, exact=True, rounds=8, threads=False):
    less = 0
    with Engine(policy, scope, replay) as engine, Indexer() as indexer:
        follow(indexer, engine)
        wait_seen(indexer, engine)
        if not replay:  # a mark before the subscription is lost, and the view partial: until a clear
            engine.ask("reset")
            wait_seen(indexer, engine)
        for i in range(rounds):
            (engine.run_threads if threads else engine.run)(SEED + i)
            got, wanted = compare(indexer, engine, exact)
            less += sum(g != w for g, w in zip(got, wanted))
        check(any(w != (0, 0) for w in wanted), "nothing was there to be found")
        equal(engine.flush()[1], 0, "dropped")
        equal(listener(indexer)["partial"], False, "partial")
        engine.ask("reset")
        got, _ = compare(indexer, engine)
        equal(set(got), {(0, 0)}, "after a reset")
    return less


def test_lru():
    follow_policy("lru")


def test_lineage():
    follow_policy("lineage")


def test_without_replay():
    follow_policy("lineage", replay=False, rounds=3)


def test_consolidated():
    follow_policy("lru", "consolidated")


def test_threads():
    """Several threads that register, find and drop the same prompts: what happened first is told first."""
    follow_policy("lru", threads=True)
    follow_policy("lineage", threads=True)
    follow_policy("reject", threads=True)
    follow_policy("lru", "consolidated", threads=True)


def test_parents_before_children():
    """Where a parent is evicted before its child, the child is parked, and found again with its parent."""
    for policy in ("priority", "lfu"):
        equal(follow_policy(policy, exact=False), 0, f"prompts of {policy} found shorter than they are")


def test_restart_of_the_indexer():
    """A new indexer gets everything from the replay endpoint."""
    with Engine("lineage") as engine:
        for i in range(3):
            engine.run(SEED + i)
        with Indexer() as indexer:
            follow(indexer, engine)
            compare(indexer, engine)
            engine.run(SEED + 10)
            compare(indexer, engine)
            engine.run(SEED + 11)
            indexer.kill()
            indexer.process.returncode = 0
        engine.run(SEED + 12)
        with Indexer() as indexer:
            follow(indexer, engine)
            compare(indexer, engine)
            equal(listener(indexer)["partial"], False, "partial")


def fall_behind(replay):
    with Engine("lru", "tiers", replay, queue_bytes=4000) as engine, Indexer("--replay-timeout", "1s") as indexer:
        follow(indexer, engine)
        wait_seen(indexer, engine)
        for i in range(6):
            engine.run(SEED + i, 400)  # faster than 4000 bytes are taken
            engine.flush()
            compare(indexer, engine, exact=False)
        check(engine.flush()[1] > 0, "nothing was lost")
        equal(listener(indexer)["partial"], True, "partial")
        engine.ask("reset")
        got, _ = compare(indexer, engine, exact=False)
        equal(set(got), {(0, 0)}, "after a reset")


def test_lost_events_with_replay():
    fall_behind(True)


def test_lost_events_without_replay():
    fall_behind(False)


def test_shutdown_in_flight():
    """An engine that ends at once has told that everything is gone; an indexer that stops listening has nothing left."""
    with Engine("lineage") as engine, Indexer() as indexer:
        follow(indexer, engine)
        wait_seen(indexer, engine)
        prompts = engine.prompts()
        engine.run(SEED, 2000)
        engine.end()  # no flush
        wait_until(lambda: set(answers(indexer, prompts)) == {(0, 0)} and not dumped(indexer), 20, "an empty index")
    with Engine("lineage") as engine, Indexer() as indexer:
        follow(indexer, engine)
        engine.send(f"run {SEED} 5000")
        indexer.unregister(1)
        engine.read()
        engine.flush()
        follow(indexer, engine)
        compare(indexer, engine)


if __name__ == "__main__":
    print("KV_TEST_SEED", SEED)
    run(globals())
