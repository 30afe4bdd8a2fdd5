# SPDX-License-Identifier: Apache-2.0
"""Several kv-advisors with one lock in a real etcd, over a real redis-server: one moves blobs at a time, and whoever was frozen moves
and deletes nothing when it wakes."""
import base64
import random
import struct
import time

from advisortest import *
from dynamo import Etcd
from redistest import Server

N = 60
KEYS = {}
PREFIX = "/kvasir/advisor/t"


class Remote(Volumes):
    """Two members in one Redis server: file locks keep nobody away."""

    def __init__(self, server, room=20):
        super().__init__(room)
        self.uris = [f"{server.uri}?prefix={name}:" for name in self.names]
        text = self.config.read_text()
        for name, uri in zip(self.names, self.uris):
            text = text.replace(str(self.path / name), uri)
        text = text.replace(str(room * BLOB), str(room * 65536))  # listings of Redis don't tell sizes
        self.config.write_text(text)

    def put(self, member, first, n):
        client("put", self.uris[self.names.index(member)], BYTES, first, n)

    def where(self, first, n):
        return client("where", BYTES, first, n, *self.uris)


def locked(etcd, volumes, *args, **more):
    return Advisor(volumes, "--lock", etcd.url.replace("http:", "etcd:") + "/t", "--lock-ttl", "2s", *args, **more)


def leads(advisor):
    return advisor.metric("kv_advisor_leader") == 1


def placed(volumes):
    """As many as have room are in the fast member, and each blob in one member."""
    where = volumes.where(0, N)
    return where.count("10") == 20 and where.count("01") == N - 20


def test_one_moves():
    """The second moves nothing while the first has the lock, and goes on when that is killed."""
    with Server() as server, Remote(server) as volumes, locked(ETCD, volumes) as first:
        wait_until(lambda: leads(first), 30, "the lock")
        with locked(ETCD, volumes) as second:
            volumes.put("fast", 0, N)
            second.scan()
            equal(second.metric("kv_advisor_leader"), 0)
            equal(second.get("/plan").json()["leader"], False)
            equal(volumes.where(0, N).count("10"), N, "moved by one without the lock")
            first.kill()
            wait_until(lambda: leads(second), 30, "the lock")
            wait_until(lambda: placed(volumes), 60, "the places")
            ETCD.call("kv/deleterange", {"key": Etcd.text(PREFIX + "/lock")})
            wait_until(lambda: "the lock is lost" in "".join(second.log), 30, "the loss")
            wait_until(lambda: leads(second), 30, "the lock again")
        equal(ETCD.keys(PREFIX + "/"), [], "keys that are left behind")


def test_frozen_holder():
    """It is frozen at random moments while it removes blobs; the next holder goes on; woken, it does no harm."""
    random.seed(int(os.environ.get("KV_TEST_SEED", "0")) or None)
    with Server() as server, Remote(server) as volumes, locked(ETCD, volumes, "--policy", "lru") as first, \
            locked(ETCD, volumes, "--policy", "lru") as second:
        for _ in range(1 if SANITIZED else 2):
            wait_until(lambda: leads(first) or leads(second), 30, "the lock")
            holder, other = (first, second) if leads(first) else (second, first)
            volumes.put("fast", 0, N)
            http_request(holder.url, "POST", "/scan", b"")
            time.sleep(random.random() * 0.6)
            holder.process.send_signal(signal.SIGSTOP)
            try:
                wait_until(lambda: leads(other), 30, "the lock")
                volumes.put("cold", 0, N)
                other.scan()
                other.wait_idle()
            finally:
                holder.process.send_signal(signal.SIGCONT)
            wait_until(lambda: "the lock is lost" in "".join(holder.log), 30, "the loss")
            check(all("1" in where for where in volumes.where(0, N)), f"a blob is lost: {volumes.where(0, N)}")
            equal(leads(holder), False, "it has the lock")
            other.scan()
            wait_until(lambda: placed(volumes), 60, f"the places: {volumes.where(0, N)}")
            check(leads(other), "it lost the lock")
            holder.log.clear()


def test_notes_of_a_dead_holder():
    """Blobs whose removal may be under way are left alone until the note is gone; an old note is none."""
    note, old = f"{PREFIX}/notes/{1:020}", f"{PREFIX}/notes/{2:020}"

    def write(name, when, numbers):
        value = struct.pack("<Q", int(when)) + b"".join(bytes.fromhex(KEYS[i]) for i in numbers)
        ETCD.call("kv/put", {"key": Etcd.text(name), "value": base64.b64encode(value).decode()})

    with Server() as server, Remote(server) as volumes:
        volumes.put("fast", 0, N)
        volumes.put("cold", 0, N)  # all are to be removed from one of them
        write(note, time.time(), range(10))
        write(old, time.time() - 100000, range(10, 20))
        with locked(ETCD, volumes) as advisor:
            wait_until(lambda: volumes.where(0, 10) == ["11"] * 10 and "11" not in volumes.where(10, N - 10), 60, "the others")
            advisor.wait_idle()
            equal(volumes.where(0, 10), ["11"] * 10, "blobs of the note")
            equal(ETCD.keys(PREFIX + "/notes/"), [note], "notes")
            ETCD.call("kv/deleterange", {"key": Etcd.text(note)})
            wait_until(lambda: placed(volumes), 60, "all")


def test_without_a_server():
    """No etcd: nothing moves. It comes, and blobs move."""
    with Etcd() as etcd, Server() as server, Remote(server) as volumes:
        volumes.put("fast", 0, N)
        etcd.kill()
        with locked(etcd, volumes) as advisor:
            advisor.scan()
            equal(leads(advisor), False)
            equal(volumes.where(0, N).count("10"), N)
            etcd.start()
            wait_until(lambda: placed(volumes), 60, "the places")


def test_folders_of_one_machine():
    """The lock in etcd comes first, then those of the folders: an advisor without the former keeps the latter."""
    with Volumes(room=20) as volumes, Advisor(volumes) as first:
        volumes.put("fast", 0, N)
        with locked(ETCD, volumes) as second:
            wait_until(lambda: "a member is left alone" in "".join(second.log), 30, "the folders' locks")
            first.wait_idle()
            first.scan()
            wait_until(lambda: placed(volumes), 60, "the places")
            first.close()
            volumes.put("fast", 0, N)
            second.scan()
            wait_until(lambda: placed(volumes), 60, "the places")


if __name__ == "__main__":
    KEYS.update(enumerate(client("keys", BYTES, 0, N)))
    with Etcd() as ETCD:
        run(globals())
