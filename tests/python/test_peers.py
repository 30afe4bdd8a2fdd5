# SPDX-License-Identifier: Apache-2.0
"""kvasir.peers and what connectors make of it: chunks of one engine's tiers come to another over a socket, or from its memory."""
import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time

from kvpython import check, equal, folder, raises, run  # first: it finds the package
import kvasir
from kvasir.blocks import Manager, Shape
from kvasir.offload import ABSENT, HIT, Offload
from kvasir.peers import Agent
from test_offload import Engine, content, key_of

KEYS = [key_of(i) for i in range(200)]


def until(test, what):
    limit = time.monotonic() + 60
    while not test():
        check(time.monotonic() < limit, what)
        time.sleep(0.002)


def met(engine, n):
    """Wait until an engine has sessions with @n peers."""
    until(lambda: engine.tier.stats()["peers_now"] == n, f"{n} peers: {engine.tier.stats()}")


def in_turn(engine, keys):
    """Load keys one by one; returns how many came."""
    return sum(engine.load([key], [i % engine.n])[0] for i, key in enumerate(keys) if engine.lookup(key) == HIT)


def test_an_agents_worker():
    for worker in (None, 7, "7", "vllm-0.svc", "a b"):
        Agent(worker=worker).close()
    for worker in ("", "0", "007", "a\nb", 1.5):
        raises((kvasir.Error, TypeError), Agent, worker=worker)


def test_chunks_of_a_peer():
    for where, shared, mine in (("unix:{}/a", True, {"host_bytes": "4MiB"}), ("tcp:127.0.0.1:0", False, {}),
                                ("unix:{}/b", False, {"staging_blocks": 8})):
        with folder() as path:
            # A third of the owner's chunks lie on its disk only. It lends a quarter of its 128 host blocks at a time.
            owner = Engine(listen=where.format(path), host_bytes="1MiB", host_shared=shared, disk=path, disk_bytes="16MiB", disk_buffered=True)
            for at in range(0, 200, 10):
                check(all(owner.store(KEYS[at:at + 10], range(10))), "stored")
                owner.tier.flush()  # to its disk, before the host block goes to another chunk
            reader = Engine(peers=owner.tier.agent.endpoints[0], **mine)
            met(reader, 1)
            equal([reader.lookup(key) for key in KEYS[190:] + [key_of(1000)]], [HIT] * 10 + [ABSENT], "lookup")
            for at in range(0, 200, 10):
                equal(reader.load(KEYS[at:at + 10], range(10)), [True] * 10, f"from {at} on")
            equal(reader.load([KEYS[0], key_of(1000), KEYS[199]], range(3)), [True, False, True], "some")
            check(reader.tier.stats()["peer"]["blocks_out"] >= 200, f"from the peer: {reader.tier.stats()}")
            reader.close()
            owner.close()


def test_two_that_lend_to_each_other():
    with folder() as path:
        token = os.path.join(path, "token")
        with open(token, "w", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="ascii") as file:
            file.write("sixteen letters and more\n")
        file_of_peers = os.path.join(path, "peers")
        with open(file_of_peers, "w", encoding="ascii") as file:
            file.write(f"unix:{path}/0\nunix:{path}/1\n")
        both = [Engine(listen=f"unix:{path}/{i}", peers=f"file:{file_of_peers}", host_bytes="4MiB", peer_token_file=token) for i in range(2)]
        for engine in both:
            met(engine, 1)  # not itself
        stranger = Engine(peers=f"unix:{path}/0", host_bytes="1MiB")  # without the token
        for _ in range(20):
            i, some = random.randrange(2), random.sample(KEYS, 10)
            check(all(both[i].store(some, range(10))), "stored")
            equal([both[1 - i].lookup(key) for key in some], [HIT] * 10, "lookup")
            equal(both[1 - i].load(some, range(10)), [True] * 10, "load")
        equal((stranger.tier.stats()["peers_now"], in_turn(stranger, KEYS[:20])), (0, 0), "without the token")
        for engine in (stranger, *both):
            engine.close()


def test_what_has_another_fingerprint_is_not_found():
    with folder() as path, Engine(listen=f"unix:{path}/a", host_bytes="1MiB").tier as owner:
        owner.store(1, KEYS[:4], range(4))
        until(lambda: owner.finished(), "stored")
        with Offload(bytearray(4 * 8192), 8192, fingerprint="another", peers=f"unix:{path}/a") as other:
            time.sleep(0.3)
            equal(([other.lookup(key) for key in KEYS[:4]], other.stats()["peers_now"]), ([ABSENT] * 4, 0), "another model")


OWNER = """
import sys
sys.path[:0] = sys.argv[3:]
from test_peers import KEYS, Engine
engine = Engine(listen=sys.argv[1], host_bytes="4MiB")
for at in range(0, 200, 20):
    assert all(engine.store(KEYS[at:at + 20], range(20)))
print("stored", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


@contextlib.contextmanager
def owner_of(path, how):
    """A process that lends."""
    with subprocess.Popen([sys.executable, "-B", "-c", OWNER, f"unix:{path}/a", how, os.path.dirname(os.path.abspath(__file__))],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        try:
            until(lambda: child.stdout.readline() == "stored\n", "the owner has stored")
            yield child
        finally:
            child.kill()


def test_an_owner_that_is_killed():
    """Right bytes or a miss, and an end for each job; the next owner at that place is met, and read."""
    with folder() as path:
        reader = Engine(peers=f"unix:{path}/a", host_bytes="1MiB", timeout=10, forget=0.01)
        for turn in range(3):
            with owner_of(path, "wait") as owner:
                met(reader, 1)
                came = in_turn(reader, random.sample(KEYS, 20))
                equal(came, 20, f"turn {turn}: before the kill")
                some = random.sample(KEYS, 60)
                reader.tier.load(reader.jobs + 1, some, range(60))
                reader.jobs += 1
                time.sleep(random.random() * 0.01)
                owner.send_signal(signal.SIGKILL)
                owner.wait(60)
                done = reader.end(reader.jobs)
                for chunk, (key, there) in enumerate(zip(some, done.ok)):
                    check(not there or reader.read(chunk) == content(key), "wrong bytes")
            met(reader, 0)
        reader.close()


def test_the_end_of_an_owner_that_closes_nothing():
    with folder() as path:
        for _ in range(3):
            with owner_of(path, "end") as owner:
                equal(owner.wait(60), 0, "exit status")


def test_order_of_ends_and_arguments():
    shape = Shape(layers=1, page_size=4, inner=16)
    with folder() as path:
        agent = Agent("one", fingerprint="x", listen=[f"unix:{path}/a", "tcp:127.0.0.1:0"])
        equal((agent.name, agent.endpoints[0], agent.endpoints[1][:14]), ("one", f"unix:{path}/a", "tcp:127.0.0.1:"), "endpoints")
        manager = Manager(shape, host_bytes=1 << 20, fingerprint="x", agent=agent)
        equal(raises(kvasir.Error, agent.close).errno, errno.EBUSY, "a manager uses it")
        lent = agent.lend(manager, share=50)
        equal(raises(kvasir.Error, agent.lend, manager).errno, errno.EEXIST, "lent twice")
        equal(raises(kvasir.Error, manager.close).errno, errno.EBUSY, "lent")
        lent.close()
        again = agent.lend(manager, set_id=2)
        equal(raises(kvasir.Error, agent.close).errno, errno.EBUSY, "it lends")
        again.close()
        manager.close()
        agent.close()
        raises(ValueError, lambda: agent.endpoints)
        raises(ValueError, Manager, shape, host_bytes=1 << 20, fingerprint="x", agent=agent)
    check(Agent().name != Agent().name, "drawn names")
    equal(raises(kvasir.Error, Agent, listen="tcp:0.0.0.0:0").errno, errno.EPERM, "beyond loopback")
    equal(raises(kvasir.Error, Agent, "no name/").errno, errno.EINVAL, "name")
    raises(TypeError, Agent, listens="unix:/nowhere")
    raises(TypeError, Manager, shape, host_bytes=1 << 20, agents=1)
    raises(ValueError, Offload, bytearray(8192), 8192, fingerprint="x", listen="tcp:127.0.0.1:0")  # without a host tier
    with Manager(shape, host_bytes=1 << 20, fingerprint="x") as manager, Agent(fingerprint="x", key_len=16) as other:
        equal(raises(kvasir.Error, other.lend, manager).errno, errno.EINVAL, "keys of another length")


if __name__ == "__main__":
    run(globals())
