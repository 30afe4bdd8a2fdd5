# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --nats: block managers that publish over a real nats-server. After quiet its answers are those of the publishers."""
import os
import random
import time

from kvtest import *
from natstest import BlockManager, NatsServer, needs_nats

SILENCE = "3s"  # publishers that live say so more often


class Fleet:
    """An indexer that follows a server, and what it should know."""

    def __init__(self, server, *args):
        others = len(server.subscriptions("kvasir.*"))
        self.indexer = Indexer("--nats", server.url, "--block-size", "16", *args)
        server.wait_subscribed("kvasir.*", others + 1)

    def worker(self, name="w"):
        return next((w for w in self.indexer.workers() if w["instance_id"] == name), None)

    def view(self, chain, name="w"):
        """Blocks of a chain of tokens hashes that the worker has on its device, or None while its view isn't whole."""
        reply = self.indexer.post("/query_by_hash", {"block_hashes": list(chain), "model_name": "m", "tenant_id": "t"})
        if reply.status != 200:
            return None
        answer = reply.json()
        if name not in [w["instance_id"] for w in self.indexer.workers()]:
            return None
        listener = self.worker(name)["listeners"]["0"]
        if listener["status"] != "active" or listener.get("partial_reasons"):
            return None
        return answer["scores"].get(str(name), {}).get("0", 0) // 16

    def counters(self, *names):
        metrics = self.indexer.metrics()
        return [metrics[f"kv_indexer_nats_{name}"] for name in names]

    def wait(self, chain, wanted, name="w", alive=None):
        last = []

        def there():
            for manager in alive or ():
                manager.alive()
            last[:] = [self.view(chain, name)]
            return last == [wanted]

        try:
            wait_until(there, 30, interval=0.05)
        except AssertionError as problem:
            raise AssertionError(f"{last} blocks, wanted {wanted}; {self.worker(name)}") from problem

    def __enter__(self):
        self.indexer.__enter__()
        return self

    def __exit__(self, *error):
        self.indexer.__exit__(*error)


def chain_of(n, first=1):
    """n (key, tokens_hash)."""
    return [(first + i, 1000 * first + i) for i in range(n)]


def hashes(chain):
    return [tokens_hash for _, tokens_hash in chain]


def test_events_and_snapshots():
    """A publisher with blocks from before; one that begins with none; stores and removals."""
    chain, other = chain_of(7), chain_of(3, first=50)
    with NatsServer() as server, BlockManager(server) as manager, BlockManager(server, worker="7") as second:
        manager.store(chain[:4])
        with Fleet(server) as fleet:
            fleet.wait(hashes(chain), 4, alive=[manager])
            manager.store(chain[4:], parent=chain[3][0])
            fleet.wait(hashes(chain), 7)
            manager.remove([chain[6][0], chain[5][0]])
            fleet.wait(hashes(chain), 5)
            equal(manager.snapshots, 1, "snapshots")
            second.store(other)
            fleet.wait(hashes(other), 3, name=7, alive=[second])
            worker = fleet.worker(7)
            equal((worker["model_name"], worker["tenant_id"]), ("m", "t"))
            equal(fleet.indexer.get("/registrations").json()["registrations"], [], "what peers are told")


def test_gaps():
    """Lost messages, seen by the next one or by ALIVE: partial until a snapshot has come, and right then."""
    chain = chain_of(6)
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server) as fleet:
        manager.store(chain)
        fleet.wait(hashes(chain), 6, alive=[manager])
        manager.remove([6], lose=True)
        manager.remove([5])
        fleet.wait(hashes(chain), 4)
        equal(manager.snapshots, 2, "snapshots")
        equal(fleet.counters("up", "publishers", "publishers_whole", "records_total", "gaps_total", "snapshots_asked_total", "snapshots_total",
                             "bad_messages_total", "connections_total"), [1, 1, 1, 10, 1, 2, 2, 0, 1])
        manager.answers = False
        manager.remove([4], lose=True)
        manager.alive()
        wait_until(lambda: fleet.worker()["listeners"]["0"]["partial_reasons"] == ["replaying"], 30, "the reason")
        equal(fleet.view(hashes(chain)), None, "a view that may be stale")
        manager.answers = True
        fleet.wait(hashes(chain), 3, alive=[manager])


def test_restarted_publisher():
    chain, new = chain_of(5), chain_of(2, first=70)
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server) as fleet:
        manager.store(chain)
        fleet.wait(hashes(chain), 5, alive=[manager])
        manager.restart()
        manager.store(new)
        fleet.wait(hashes(new), 2, alive=[manager])
        fleet.wait(hashes(chain), 0)


def test_silent_publisher():
    """Its worker is unregistered; it is another one when it comes back."""
    chain = chain_of(5)
    with NatsServer() as server, BlockManager(server) as manager, BlockManager(server, worker="lives") as other, \
            Fleet(server, "--nats-silence", SILENCE) as fleet:
        manager.store(chain)
        other.store(chain)
        fleet.wait(hashes(chain), 5, alive=[manager, other])
        wait_until(lambda: other.alive() or not fleet.worker(), 60, "the worker's end")
        fleet.wait(hashes(chain), 5, name="lives", alive=[other])
        fleet.wait(hashes(chain), 5, alive=[manager, other])


def test_restarted_server():
    """Nothing is heard meanwhile: the view is stale, not forgotten. What was lost comes with a snapshot."""
    chain = chain_of(5)
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server, "--stale-after", "300ms", "--nats-silence", SILENCE) as fleet:
        manager.store(chain)
        fleet.wait(hashes(chain), 5, alive=[manager])
        server.stop()
        wait_until(lambda: "stale" in fleet.worker()["listeners"]["0"].get("partial_reasons", []), 30, "a stale view")
        with manager.lock:
            del manager.blocks[5, "device"]
            manager.sequence += 1
        manager.close()
        server.start()
        manager.connect(server)
        fleet.wait(hashes(chain), 4, alive=[manager])


def test_what_cannot_be_placed():
    """Blocks whose tokens nobody tells: the view lacks some until they are told, or gone."""
    chain = chain_of(4)
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server) as fleet:
        manager.store(chain[:3])
        fleet.wait(hashes(chain), 3, alive=[manager])
        manager.store([(99, None)])
        wait_until(lambda: fleet.worker()["listeners"]["0"].get("partial_reasons"), 30, "a partial view")
        equal(fleet.indexer.post("/query_by_hash", {"block_hashes": hashes(chain), "model_name": "m", "tenant_id": "t"}).json()["scores"],
              {"w": {"0": 48}}, "the others")
        manager.remove([99])
        fleet.wait(hashes(chain), 3)
        manager.store([(4, None)], parent=3, tier="host")  # and the same block on the device, with its tokens
        manager.store(chain[3:], parent=3)
        fleet.wait(hashes(chain), 4)


def test_strangers():
    """Messages that are none, of a stolen subject, and subjects that name nobody."""
    with NatsServer() as server, BlockManager(server) as manager, BlockManager(server, worker="x") as thief, Fleet(server) as fleet:
        with thief.lock:
            message = thief._message("events", 0, [thief._record("store", 1, "device", None, 9)])
            thief._send(manager.subject, message)
            thief._send("kvasir.c.m.t.%ZZ", message)
            thief._send(manager.subject, b"\xff" * 100)
        manager.store(chain_of(2))
        fleet.wait(hashes(chain_of(2)), 2, alive=[manager])
        equal([w["instance_id"] for w in fleet.indexer.workers()], ["w"])


def test_strangers_take_no_place():
    """More subjects that name no worker than an indexer follows publishers (4096): workers that come later are followed."""
    with NatsServer() as server, BlockManager(server) as manager, BlockManager(server, worker="x") as stranger, Fleet(server) as fleet:
        manager.store(chain_of(2))
        fleet.wait(hashes(chain_of(2)), 2, alive=[manager])
        for i in range(4200):
            stranger.subject = f"kvasir.c.m.t.%ZZ{i}"
            stranger.alive()
        with BlockManager(server, worker="late") as late:
            late.store(chain_of(3))
            fleet.wait(hashes(chain_of(3)), 3, name="late", alive=[late])
        equal(sorted(w["instance_id"] for w in fleet.indexer.workers()), ["late", "w"])


def test_replicas():
    """A replica reads the dump, follows the server itself, and answers the same."""
    chain = chain_of(6)
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server) as fleet:
        manager.store(chain)
        fleet.wait(hashes(chain), 6, alive=[manager])
        with Fleet(server, "--peers", fleet.indexer.url) as replica:
            replica.wait(hashes(chain), 6, alive=[manager])
            manager.remove([6])
            for one in (fleet, replica):
                one.wait(hashes(chain), 5)


def test_random_losses():
    """Stores, removals, losses, restarts of publisher and server: what the indexer knows at quiet points is what the publisher has."""
    pick = random.Random(int(os.environ.get("KV_TEST_SEED", time.time_ns())))
    chains = [chain_of(8, first=100 * (i + 1)) for i in range(4)]
    with NatsServer() as server, BlockManager(server) as manager, Fleet(server) as fleet:
        have = [0] * len(chains)
        for _ in range(12):
            for _ in range(pick.randrange(1, 12)):
                i, lose = pick.randrange(len(chains)), pick.random() < 0.3
                n = pick.randrange(9)
                if n > have[i]:
                    manager.store(chains[i][have[i]:n], parent=chains[i][have[i] - 1][0] if have[i] else None, lose=lose)
                elif n < have[i]:
                    manager.remove([key for key, _ in reversed(chains[i][n:have[i]])], lose=lose)
                have[i] = n
            if pick.random() < 0.2:
                manager.restart()
                have = [0] * len(chains)
            for i, chain in enumerate(chains):
                fleet.wait(hashes(chain), have[i], alive=[manager])


if __name__ == "__main__":
    needs_nats()
    run(globals())
