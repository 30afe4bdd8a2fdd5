# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --nats beside a real block manager and a real nats-server: at quiet points both know the same, as test_kvbm.py has it."""
from kvtest import *
from natstest import NatsServer, needs_nats
from test_kvbm import BLOCK, SEED, Engine, compare, wait_seen


def follower(server, *args):
    return Indexer("--nats", server.url, "--block-size", BLOCK, *args)


def settle(indexer, engine):
    """Until the view is whole behind all that the engine has written, and then the comparison."""
    wait_seen(indexer, engine)
    wait_until(lambda: not indexer.workers()[0]["listeners"]["0"]["partial"], 60, "a whole view")
    compare(indexer, engine)


def check_policy(policy, threads=False, rounds=4):
    with NatsServer() as server, Engine(policy, nats=server.url) as engine, follower(server) as indexer:
        for i in range(rounds):
            (engine.run_threads if threads else engine.run)(SEED + i)
            settle(indexer, engine)


def test_lru():
    check_policy("lru")


def test_lineage():
    check_policy("lineage")


def test_threads():
    check_policy("lru", threads=True)


def test_later_indexer():
    """It comes when the blocks are there, and has them by a snapshot."""
    with NatsServer() as server, Engine(nats=server.url) as engine:
        engine.run(SEED)
        engine.flush()
        with follower(server) as indexer:
            settle(indexer, engine)
            engine.run(SEED + 1)
            settle(indexer, engine)


def test_restarted_server():
    """What the manager wrote meanwhile, and what was on its way, comes by number or by snapshot."""
    with NatsServer() as server, Engine(nats=server.url) as engine, follower(server) as indexer:
        for i in range(3):
            engine.run(SEED + i)
            settle(indexer, engine)
            engine.run(SEED + 10 + i)
            server.stop()
            engine.run(SEED + 20 + i)
            server.start()
            settle(indexer, engine)


def test_killed_manager():
    """Another process of the same worker: nothing of the old one stays."""
    with NatsServer() as server, follower(server, "--nats-silence", "2s") as indexer:
        with Engine(nats=server.url) as engine:
            engine.run(SEED)
            settle(indexer, engine)
            engine.process.kill()
            engine.process.wait()
        with Engine(nats=server.url) as engine:
            engine.marks = 1000  # other prompts than the old one's
            engine.run(SEED + 1, 20)
            settle(indexer, engine)
            engine.process.kill()
            engine.process.wait()
        wait_until(lambda: not indexer.workers(), 60, "the worker's end")


if __name__ == "__main__":
    needs_nats()
    run(globals())
