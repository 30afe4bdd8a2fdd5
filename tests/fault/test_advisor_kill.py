# SPDX-License-Identifier: Apache-2.0
"""kv-advisor, killed at random moments while it moves and packs blobs, beside a reader of the tiered store: nothing is lost, nothing has a
wrong byte, no read misses; then every blob lies in one member, the one that the policy says, by itself or in a pack.

KV_ADVISOR_KILLS: how often it is killed (10)."""
import os
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from advisortest import *
from natstest import NatsServer, needs_nats

KILLS = int(os.environ.get("KV_ADVISOR_KILLS", 10))
SEED = int(os.environ.get("KV_TEST_SEED", time.time()))
N, ROOM = 300, 60


class Reader:
    """Reads random blobs through the tiered store until its end."""

    def __init__(self, uri):
        self.process = subprocess.Popen([CLIENT, "read", uri, str(BYTES), "0", str(N)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment())
        equal(self.process.stdout.readline(), "reading\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        said, _ = self.process.communicate("", patience(60))
        equal(self.process.returncode, 0, said)
        check(int(said.split()[0]) > 0, said)
        print(f"    {said.strip()}", flush=True)


def check_all_there(volumes):
    """Each blob is in some member, and nowhere with other bytes."""
    for number, places in enumerate(volumes.where(0, N)):
        check("1" in places and "!" not in places, f"blob {number}: {places}")


def wait_told(manager, advisor):
    """Until the advisor has a snapshot of the manager."""
    def told():
        manager.alive()
        return advisor.metric("kv_advisor_stores_total") >= N

    wait_until(told, 30, "a snapshot", interval=0.1)


def use_some(manager, choose):
    manager.used(choose.sample(range(N), 20))


def doubled(volumes, advisor):
    """Numbers of blobs that lie in a pack and by themselves."""
    return [number for number, (key, single) in enumerate(zip(client("keys", BYTES, 0, N), volumes.singles(0, N)))
            if single != "00" and advisor.explain(key)["packs"]]


def test_kills():
    print(f"    KV_TEST_SEED={SEED}", flush=True)
    choose = random.Random(SEED)
    with Volumes(room=ROOM, linger="100ms") as volumes, NatsServer() as server, Manager(server) as manager:
        args = ("--nats", server.url, "--state", volumes.path / "state", "--pack-after", "1s", "--pack-least", "16KiB", "--pack-most", "64KiB",
                "--pack-grace", "1s")
        volumes.put("cold", 0, N)
        manager.stored(range(N))
        copied = packed = 0
        with Reader(volumes.uri):
            for _ in range(KILLS):
                with Advisor(volumes, *args) as advisor:
                    wait_told(manager, advisor)
                    use_some(manager, choose)
                    for _ in range(choose.randrange(4)):
                        time.sleep(choose.random() * 0.4)
                        use_some(manager, choose)
                    time.sleep(choose.random() * 0.3)
                    copied += sum(advisor.metric(f'kv_advisor_copied_blobs_total{{member="{name}"}}') for name in volumes.names)
                    packed += advisor.metric("kv_advisor_packed_blobs_total")
                    if choose.randrange(2):
                        http_request(advisor.url, "POST", "/scan", b"")  # and look after old packs
                        time.sleep(choose.random() * 0.3)
                    advisor.kill()
                check_all_there(volumes)
            with Advisor(volumes, *args) as advisor:
                wait_told(manager, advisor)
                manager.used(range(N))
                wait_until(lambda: advisor.metric("kv_advisor_onboarded_total") == N, 30, "uses")
                advisor.scan()
                advisor.wait_idle()
                wanted = [advisor.explain(key)["wanted_in"] for key in client("keys", BYTES, 0, N)]
                equal(volumes.where(0, N), [{"fast": "10", "cold": "01"}[name] for name in wanted], "places at the end")
                equal(wanted.count("fast"), ROOM, "blobs in the fast member")
                wait_until(lambda: advisor.scan() or advisor.get("/plan").json()["members"][1]["packed_blobs"] > 100, 60, "packs")
                # Copies that a kill left beside a pack go once their blob is cold again.
                wait_until(lambda: advisor.scan() or not doubled(volumes, advisor), 60, lambda: f"no doubled blob: {doubled(volumes, advisor)}")
                advisor.wait_idle()
                check_all_there(volumes)
        print(f"    {packed:.0f} blobs packed before kills", flush=True)
        check(copied > 0 and packed > 0, "no kill met a copy, or none a pack")


if __name__ == "__main__":
    needs_nats()
    run(globals())
