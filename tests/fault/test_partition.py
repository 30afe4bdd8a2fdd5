# SPDX-License-Identifier: Apache-2.0
"""A network that swallows packets without a word: two network namespaces and a blackhole route.

Needs root and ip(8). The engine's side of the cable is emptied for longer than the heartbeat's patience, then
healed: events must flow again within 15 s, and what was missed must be replayed. A NATS server with a block
manager and a worker of Dynamo is on that side, too: views are stale until the server is back. The block manager's
is whole by a snapshot then; the worker's says that messages are missing, as nobody can bring them.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from natstest import needs_nats

SPACE = f"kv{os.getpid()}"
NUMBER = os.getpid() % 8192 * 4  # of the first of the four addresses that are its own
HERE, THERE = (f"169.254.{64 + (NUMBER + i) // 256}.{(NUMBER + i) % 256}" for i in (1, 2))


def ip(*words, quiet=False):
    return subprocess.run(["ip", *words], check=not quiet, capture_output=True, text=True)


class Cable:
    """A veth pair into a namespace of its own."""

    def __enter__(self):
        if os.geteuid() != 0 or not shutil.which("ip"):
            skip("needs root and ip(8)")
        try:
            ip("netns", "add", SPACE)
            ip("link", "add", f"{SPACE}a", "type", "veth", "peer", "name", f"{SPACE}b", "netns", SPACE)
            ip("addr", "add", f"{HERE}/30", "dev", f"{SPACE}a")
            ip("link", "set", f"{SPACE}a", "up")
            ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", f"{SPACE}b")
            ip("-n", SPACE, "link", "set", f"{SPACE}b", "up")
            ip("-n", SPACE, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as problem:
            self.__exit__()
            skip(f"no network namespaces here: {problem.stderr.strip()}")
        return self

    def __exit__(self, *_):
        ip("link", "del", f"{SPACE}a", quiet=True)
        ip("netns", "del", SPACE, quiet=True)

    def cut(self):
        ip("route", "add", "blackhole", f"{THERE}/32")
        ip("-n", SPACE, "route", "add", "blackhole", f"{HERE}/32")

    def heal(self):
        ip("route", "del", "blackhole", f"{THERE}/32")
        ip("-n", SPACE, "route", "del", "blackhole", f"{HERE}/32")


ENGINE = f"""
import time
from kvtest import *
import streams
with Publisher(endpoint="tcp://{THERE}:5557", replay_endpoint="tcp://{THERE}:5558") as engine:
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        streams.store(engine, number, 2)
        time.sleep(0.1)
"""


# When somebody follows them, both publish until a line comes on stdin: block n + 1 behind block n. Then they say how many there are.
# The end of stdin ends them.
NATS = f"""
import pathlib
import sys
import threading
from kvtest import *
from natstest import BlockManager, NatsServer
from dynamo import Folder, NatsWorker
with NatsServer(host="{THERE}") as server, BlockManager(server) as manager, Folder() as folder, NatsWorker(folder, server, worker=7) as worker:
    print(server.url, folder.where, flush=True)
    end, gone = threading.Event(), threading.Event()

    def listen():
        sys.stdin.readline()
        end.set()
        sys.stdin.read()
        gone.set()

    threading.Thread(target=listen, daemon=True).start()
    server.wait_subscribed("kvasir.*")
    server.wait_subscribed("namespace.")
    number = 0
    while not end.wait(0.1):
        number += 1
        manager.store([(number, number)], parent=number - 1 or None)
        worker.store([number], [number] * 4, parent=number - 1 or None)
    print(number, flush=True)
    while not gone.wait(0.2):
        manager.alive()
"""


def there(script):
    """Run a script on the other side."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE / "tests" / "e2e")}
    return subprocess.Popen(["ip", "netns", "exec", SPACE, sys.executable, "-B", "-c", script], env=environment, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


class Followed:
    """A block manager and a worker of Dynamo on NATS, and an indexer on this side that follows both."""

    def __init__(self):
        needs_nats()
        self.process = there(NATS)
        url, where = self.process.stdout.readline().split()
        self.indexer = Indexer("--nats", url, "--dynamo", where, "--dynamo-nats", url, "--block-size", 4, "--stale-after", "1s")

    def listener(self, name):
        return next((w["listeners"]["0"] for w in self.indexer.workers() if w["instance_id"] == name), {})

    def reasons(self, name):
        return self.listener(name).get("partial_reasons", [])

    def score(self, name, model, tenant, hashes):
        reply = self.indexer.post("/query_by_hash", {"block_hashes": hashes, "model_name": model, "tenant_id": tenant})
        return reply.json()["scores"].get(str(name), {}).get("0", 0) // 4 if reply.status == 200 else 0

    def count(self):
        """Blocks of the block manager, as far as it is whole."""
        return 0 if self.reasons("w") else self.score("w", "m", "t", list(range(1, 2000)))

    def wait_begun(self):
        wait_until(lambda: self.count() > 10 and self.listener(7).get("status") == "active", 30, "events over NATS")

    def wait_stale(self):
        wait_until(lambda: "stale" in self.reasons("w") and "stale" in self.reasons(7), 60, "stale views")

    def wait_whole(self):
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        number = int(self.process.stdout.readline())
        wait_until(lambda: self.count() == number, 60, f"a whole view of {number} blocks")
        wait_until(lambda: "missed_batches" in self.reasons(7) and "stale" not in self.reasons(7), 30, "the worker's loss to be told")
        metrics = self.indexer.metrics()
        equal([metrics[f"kv_indexer_nats_{name}_total"] for name in ("gaps", "restarts", "snapshots", "connections")], [1, 0, 2, 2])

    def __enter__(self):
        self.indexer.__enter__()
        return self

    def __exit__(self, *error):
        self.indexer.__exit__(*error)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(patience(60))  # it stops its server


def test_listener_recovers_after_a_blackhole():
    import streams
    with Cable() as cable, Indexer() as indexer, Followed() as followed:
        engine = there(ENGINE)
        try:
            equal(engine.stdout.readline().strip(), "ready")
            indexer.register(1, f"tcp://{THERE}:5557", block_size=streams.BS, replay_endpoint=f"tcp://{THERE}:5558")
            wait_until(lambda: streams.last_seq(indexer) > 10, 20, "events before the cut")
            followed.wait_begun()
            cable.cut()
            time.sleep(20)
            before = streams.last_seq(indexer)
            followed.wait_stale()
            cable.heal()
            wait_until(lambda: streams.last_seq(indexer) > before + 5, 15, "events after healing")
            last = streams.last_seq(indexer)
            for number in range(1, last + 1):
                streams.holds(indexer, number, 2)
            equal(streams.stream(indexer, "missed_batches_total"), 0)
            equal(streams.stream(indexer, "restarts_total"), 0)
            followed.wait_whole()
        finally:
            end(engine)


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE / "tests" / "e2e"))
    run(globals())
