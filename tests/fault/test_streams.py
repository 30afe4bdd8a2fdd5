# SPDX-License-Identifier: Apache-2.0
"""Engines and indexers that die or freeze at random moments; afterwards the view must be right."""
import pathlib
import random
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from streams import *

SEED = int(os.environ.get("KV_TEST_SEED", str(int(time.time()))))
RANDOM = random.Random(SEED)


def follow(indexer, instance, at_least, timeout=30):
    wait_until(lambda: last_seq(indexer, instance) >= at_least, timeout, f"batch {at_least} of {instance}")


def check_contents(indexer, instance, first, last):
    """Prompts first..last, and none before."""
    holds_all(indexer, range(first, last + 1), 2, instance=instance)


def test_kill_9_of_the_engine():
    """Each time it comes back with an empty cache and numbers from 0."""
    with Indexer() as indexer, Engine() as engine:
        register(indexer, 1, engine)
        for life in range(4):
            follow(indexer, 1, 20 + RANDOM.randrange(30))
            seen = last_seq(indexer)
            engine.kill()
            engine.prompt_base = (life + 1) * 100000
            time.sleep(RANDOM.random())
            engine.start()
            wait_until(lambda: stream(indexer, "restarts_total") == life + 1, 30, "the restart to be noticed")
            follow(indexer, 1, 5)
            check_contents(indexer, 1, engine.prompt_base + 1, engine.prompt_base + 5)
            old = life * 100000
            for number in range(old + 1, old + seen):
                equal(indexer.score(prompt(number, 2), 1), 0, f"prompt {number} of the process that is gone")
            equal(listener(indexer)["partial"], False)


def test_engine_back_with_more_batches_than_before():
    """Numbers alone don't show this restart: the new process is ahead when it is heard again."""
    with Indexer() as indexer, Engine(interval=0.05, count=6) as engine:
        register(indexer, 1, engine)
        follow(indexer, 1, 5)
        engine.kill()
        engine.prompt_base, engine.interval, engine.count = 100000, 0.002, 400
        engine.start()
        wait_until(lambda: stream(indexer, "restarts_total") == 1, 30, "the restart to be noticed")
        follow(indexer, 1, 399)
        check_contents(indexer, 1, 100001, 100400)
        for number in range(1, 7):
            equal(indexer.score(prompt(number, 2), 1), 0)


def test_frozen_engine():
    """SIGSTOP: connected, silent; heartbeats cut it, and afterwards nothing is missing."""
    with Indexer() as indexer, Engine() as engine:
        register(indexer, 1, engine)
        follow(indexer, 1, 20)
        engine.freeze()
        time.sleep(17)  # longer than the heartbeat's patience
        equal(indexer.get("/health").status, 200)
        engine.thaw()
        at = last_seq(indexer)
        follow(indexer, 1, at + 50, 40)
        check_contents(indexer, 1, 1, at + 50)
        equal(stream(indexer, "restarts_total"), 0, "the same process")
        equal(stream(indexer, "missed_batches_total"), 0)


def test_frozen_engines_do_not_stop_others():
    with Indexer("--threads", "1") as indexer, Engine() as lively:
        frozen = [Engine() for _ in range(5)]
        try:
            for i, engine in enumerate(frozen):
                register(indexer, 10 + i, engine)
                follow(indexer, 10 + i, 1)
                engine.freeze()
            register(indexer, 1, lively)
            started = time.monotonic()
            follow(indexer, 1, 100)
            check(time.monotonic() - started < patience(10), "slow")
        finally:
            for engine in frozen:
                engine.kill()


def test_kill_9_of_the_indexer():
    """It starts again empty, and from the engine's ring it knows everything again."""
    port = free_port()
    with Engine() as engine:
        for _ in range(3):
            indexer = Indexer("--port", port)
            try:
                register(indexer, 1, engine)
                follow(indexer, 1, 10 + RANDOM.randrange(30))
                time.sleep(RANDOM.random() / 5)
                check_contents(indexer, 1, 1, last_seq(indexer))
                equal(listener(indexer)["partial"], False)
            finally:
                indexer.kill()


def test_register_and_unregister_while_events_flow():
    with Indexer() as indexer, Engine(interval=0.001) as engine, Engine(interval=0.001) as other:
        register(indexer, 1, engine)
        stop = threading.Event()
        failures = []

        def churn():
            while not stop.is_set():
                for expect, path, body in (
                        (201, "/register", {"endpoint": other.endpoint, "block_size": BS}),
                        (200, "/unregister", {})):
                    reply = indexer.post(path, {"instance_id": 2, "model_name": MODEL, **body})
                    if reply.status != expect:
                        failures.append(reply)
                    time.sleep(RANDOM.random() / 50)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            follow(indexer, 1, 500)
        finally:
            stop.set()
            thread.join()
        equal(failures, [])
        check_contents(indexer, 1, 1, 300)
        equal(indexer.dump()[f"{MODEL}:default"]["events"][0]["worker_id"], 1)
        check(not any(event["worker_id"] == 2 for event in indexer.dump()[f"{MODEL}:default"]["events"]),
              "blocks of an instance that left")


if __name__ == "__main__":
    print(f"KV_TEST_SEED={SEED}")
    run(globals())
