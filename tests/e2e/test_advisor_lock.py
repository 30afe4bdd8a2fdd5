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


def locked(etcd, volumes, *args, ttl=10):
    """@ttl: seconds that the lock outlives its holder. A machine with too much to do takes a lock of 2 s from one that lives."""
    return Advisor(volumes, "--lock", etcd.url.replace("http:", "etcd:") + "/t", "--lock-ttl", f"{ttl}s", *args)


def leads(advisor):
    return advisor.metric("kv_advisor_leader") == 1


def taken(advisor):
    """How often it has got the lock."""
    return "".join(advisor.log).count("this advisor has the lock")


def lost(advisor):
    return "".join(advisor.log).count("the lock is lost")


def wait_leader(*advisors):
    """Until one of them has the lock and its mover knows it: returns that one, and the others."""
    one = wait_until(lambda: next((one for one in advisors if leads(one) and taken(one) > lost(one)), None), 60, "the lock")
    return [one, *(other for other in advisors if other is not one)]


def wait_placed(volumes, what="the places"):
    wait_until(lambda: placed(volumes), 60, lambda: f"{what}: {volumes.where(0, N)}")


def placed(volumes):
    """As many as have room are in the fast member, and each blob in one member."""
    where = volumes.where(0, N)
    return where.count("10") == 20 and where.count("01") == N - 20


def test_one_moves():
    """The second moves nothing while the first has the lock, and goes on when that is killed."""
    with Server() as server, Remote(server) as volumes, locked(ETCD, volumes) as first:
        wait_leader(first)
        with locked(ETCD, volumes) as second:
            volumes.put("fast", 0, N)
            second.scan()
            equal(second.metric("kv_advisor_leader"), 0)
            equal(second.get("/plan").json()["leader"], False)
            equal(volumes.where(0, N).count("10"), N, "moved by one without the lock")
            first.kill()
            wait_leader(second)
            wait_placed(volumes)
            times = taken(second)
            ETCD.call("kv/deleterange", {"key": Etcd.text(PREFIX + "/lock")})
            wait_until(lambda: lost(second) >= times, 30, "the loss")
            wait_leader(second)
        wait_until(lambda: ETCD.keys(PREFIX + "/") == [], 30, lambda: f"keys that are left behind: {ETCD.keys(PREFIX + '/')}")


def test_frozen_holder():
    """It is frozen at random moments while it removes blobs; the next holder goes on; woken, it does no harm."""
    random.seed(int(os.environ.get("KV_TEST_SEED", "0")) or None)
    with Server() as server, Remote(server) as volumes, locked(ETCD, volumes, "--policy", "lru", ttl=2) as first, \
            locked(ETCD, volumes, "--policy", "lru", ttl=2) as second:
        for _ in range(1 if SANITIZED else 2):
            holder, other = wait_leader(first, second)
            times = taken(holder)
            volumes.put("fast", 0, N)
            http_request(holder.url, "POST", "/scan", b"")
            time.sleep(random.random() * 0.6)
            holder.process.send_signal(signal.SIGSTOP)
            try:
                wait_leader(other)
                volumes.put("cold", 0, N)
                other.scan()
                other.wait_idle()
            finally:
                holder.process.send_signal(signal.SIGCONT)
            wait_until(lambda: lost(holder) >= times, 30, "the loss")
            where = volumes.where(0, N)
            check(all("1" in each for each in where), f"a blob is lost: {where}")
            # Where the machine has too much to do, the lock may have changed hands once more: both list what there is.
            for advisor in holder, other:
                advisor.scan()
            wait_placed(volumes)


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
            wait_until(lambda: ETCD.keys(PREFIX + "/notes/") == [note], 30, lambda: f"the old note's end: {ETCD.keys(PREFIX + '/notes/')}")
            ETCD.call("kv/deleterange", {"key": Etcd.text(note)})
            wait_placed(volumes, "all")


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
            wait_placed(volumes)


def test_credentials():
    """An etcd with users: by user and password; tokens that it forgets are asked for again; a wrong password gets no lock."""
    with Etcd() as etcd, Server() as server, Remote(server) as volumes:
        etcd.protect("secret")
        right, wrong = volumes.path / "right", volumes.path / "wrong"
        right.write_text("secret\n")
        wrong.write_text("other\n")
        volumes.put("fast", 0, N)
        url = etcd.url.replace("http:", "etcd:") + "/t?user=root&password-file="
        with Advisor(volumes, "--lock", f"{url}{wrong}", "--lock-ttl", "2s") as advisor:
            wait_until(lambda: "the lock's server doesn't answer" in "".join(advisor.log), 30, "the refusal")
            equal(leads(advisor), False)
        with Advisor(volumes, "--lock", f"{url}{right}", "--lock-ttl", "2s") as advisor:
            wait_until(lambda: leads(advisor), 30, "the lock")
            wait_until(lambda: placed(volumes), 60, "the places")
            etcd.kill()
            etcd.start()  # its tokens were in memory
            volumes.put("fast", 0, N)
            advisor.scan()
            wait_until(lambda: leads(advisor), 30, "the lock again")
            wait_until(lambda: placed(volumes), 60, "the places again")
    with Volumes() as volumes, Advisor(volumes, "--lock", "etcd://127.0.0.1:1/t?user=root&password-file=/nosuch", start=False) as advisor:
        equal(advisor.process.wait(patience(30)), 1, "its status")
        advisor._reader.join(10)
        check("/nosuch" in "".join(advisor.log), advisor.log)
        advisor.close = lambda: 0


def test_certificates():
    """An etcd that wants the client's certificate."""
    with Volumes() as volumes:
        cert, key = make_certificate(str(volumes.path))
        with Etcd((cert, key)) as etcd:
            url = etcd.url.replace("https:", "etcds:") + f"/t?ca={cert}"
            with Advisor(volumes, "--lock", url, "--lock-ttl", "2s") as advisor:
                wait_until(lambda: "the lock's server doesn't answer" in "".join(advisor.log), 30, "the refusal")
                equal(leads(advisor), False)
            with Advisor(volumes, "--lock", f"{url}&cert={cert}&key={key}", "--lock-ttl", "2s") as advisor:
                wait_until(lambda: leads(advisor), 30, "the lock")


def test_folders_of_one_machine():
    """The lock in etcd comes first, then those of the folders: an advisor without the former keeps the latter."""
    with Volumes(room=20) as volumes, Advisor(volumes) as first:
        volumes.put("fast", 0, N)
        with locked(ETCD, volumes) as second:
            wait_until(lambda: "a member is left alone" in "".join(second.log), 30, "the folders' locks")
            first.wait_idle()
            first.scan()
            wait_placed(volumes)
            first.close()
            volumes.put("fast", 0, N)
            second.scan()
            wait_placed(volumes)


if __name__ == "__main__":
    KEYS.update(enumerate(client("keys", BYTES, 0, N)))
    with Etcd() as ETCD:
        run(globals())
