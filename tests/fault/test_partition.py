# SPDX-License-Identifier: Apache-2.0
"""A network that swallows packets without a word: two network namespaces and a blackhole route.

Needs root and ip(8). The engine's side of the cable is emptied for longer than the heartbeat's patience, then
healed: events must flow again within 15 s, and what was missed must be replayed.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *

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


def test_listener_recovers_after_a_blackhole():
    import streams
    with Cable() as cable, Indexer() as indexer:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE / "tests" / "e2e")}
        engine = subprocess.Popen(["ip", "netns", "exec", SPACE, sys.executable, "-B", "-c", ENGINE], env=environment,
                                  stdout=subprocess.PIPE, text=True)
        try:
            equal(engine.stdout.readline().strip(), "ready")
            indexer.register(1, f"tcp://{THERE}:5557", block_size=streams.BS, replay_endpoint=f"tcp://{THERE}:5558")
            wait_until(lambda: streams.last_seq(indexer) > 10, 20, "events before the cut")
            cable.cut()
            time.sleep(20)
            before = streams.last_seq(indexer)
            cable.heal()
            wait_until(lambda: streams.last_seq(indexer) > before + 5, 15, "events after healing")
            last = streams.last_seq(indexer)
            for number in range(1, last + 1):
                streams.holds(indexer, number, 2)
            equal(streams.stream(indexer, "missed_batches_total"), 0)
            equal(streams.stream(indexer, "restarts_total"), 0)
        finally:
            engine.kill()
            engine.wait()
            engine.stdout.close()


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE / "tests" / "e2e"))
    run(globals())
