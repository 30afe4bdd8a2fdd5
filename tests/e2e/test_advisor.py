# SPDX-License-Identifier: Apache-2.0
"""kv-advisor over folders and a real nats-server: blobs go where their use says, and nothing else happens to them."""
import contextlib
import json
import os
import subprocess
import time

from advisortest import *
from natstest import NatsServer, needs_nats

N = 60
KEYS = {}


@contextlib.contextmanager
def followed(volumes, *args):
    """A server, a publisher, and an advisor that has heard of it."""
    with NatsServer() as server, Manager(server) as manager, Advisor(volumes, "--nats", server.url, *args) as advisor:
        settle(manager, advisor)  # a snapshot of nothing: what is told from here on is news
        yield manager, advisor


def settle(manager, advisor):
    """Until the advisor knows of all blobs that the manager has, and has moved what follows from them."""
    def told(key):
        reply = advisor.get(f"/explain?hash={key}")
        return reply.status == 200 and reply.json()["publishers"] == 1

    def whole():
        manager.alive()
        return advisor.metric("kv_advisor_whole_publishers") == 1

    wait_until(whole, 30, "a whole view")
    for number in sorted(number for number, tier in manager.blocks if tier == "external"):
        wait_until(lambda number=number: told(KEYS[number]), 30, f"that blob {number} is told")
    advisor.wait_idle()


def test_moves_by_use():
    """Blobs that are used lie in the fast member, and there alone; others in the cold one."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, N)
        with followed(volumes, "--policy", "lru") as (manager, advisor):
            manager.stored(range(N))
            settle(manager, advisor)
            equal(volumes.where(0, N), ["01"] * (N - 20) + ["10"] * 20, "the last ones that were told")
            manager.used([3, 5, 7])
            wait_until(lambda: advisor.metric("kv_advisor_onboarded_total") == 3, 30, "uses")
            settle(manager, advisor)
            wanted = ["10" if i in (3, 5, 7) or i >= N - 17 else "01" for i in range(N)]
            equal(volumes.where(0, N), wanted, "after three uses")
            said = advisor.explain(KEYS[3])
            equal((said["in"], said["wanted_in"], said["uses"], said["publishers"]), (["fast"], "fast", 2, 1), said)
            said = advisor.explain(KEYS[0])
            equal((said["in"], said["wanted_in"]), (["cold"], "cold"), said)
            check("a use moves it to fast" in said["what_would_move_it"], said)
            copied, removed = (advisor.metric(f'kv_advisor_{what}_blobs_total{{member="fast"}}') for what in ("copied", "removed"))
            check(copied >= 23, f"{copied} promoted")
            equal(copied - removed, 20, "copied into the fast member and not removed again")
            equal(advisor.metric("kv_advisor_failed_total"), 0, "failures")
            plan = advisor.get("/plan").json()
            equal((plan["copies"], plan["removals"], plan["dry_run"]), ([], [], False), plan)


def test_advises():
    """/advise: hit rates of what publishers tell, and what the fast member's room brings."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, 40)
        with followed(volumes, "--policy", "lru", "--gpu-hour", "2.5") as (manager, advisor):
            equal(advisor.get("/advise").json()["advice"], [])
            manager.stored(range(40))
            for _ in range(10):
                manager.used(range(10))
            wait_until(lambda: advisor.metric("kv_advisor_onboarded_total") == 100, 30, "uses")
            said = advisor.get("/advise").json()
            equal((said["gpu_hour"], [one["of"] for one in said["advice"]]), (2.5, ["all"]), said)
            one = said["advice"][0]
            equal((one["references"], one["bytes_a_blob"], one["blobs"]), (140, BLOB, 40), one)
            equal([round(tier["hit_rate_alone"] * 140) for tier in one["tiers"]], [90], one)  # nine rounds of ten, in room for 20
            equal(round(one["curve"][-1]["hit_rate"] * 140), 100, "in room for all")


def test_nobody_tells():
    """Blobs in the fast member that no event tells of don't keep it from those in use."""
    with Volumes(room=20) as volumes:
        volumes.put("fast", 0, 40)
        volumes.put("cold", 100, 10)
        with followed(volumes) as (manager, advisor):
            advisor.wait_idle()
            equal(volumes.where(0, 40).count("10"), 20, "in the fast member, as many as have room")
            equal(volumes.where(0, 40).count("01"), 20, "in the cold one")
            manager.stored(range(100, 110))
            settle(manager, advisor)
            equal(volumes.where(100, 10), ["10"] * 10, "those that are told")
            equal(volumes.where(0, 40).count("10"), 10, "others that had to go")


def test_dead_publisher():
    """What a dead publisher told of, and no member has, is forgotten; it isn't waited for."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, 5)
        with followed(volumes, "--nats-silence", "2s") as (manager, advisor):
            manager.stored(range(1000, 1030))
            settle(manager, advisor)
            manager.close()
            wait_until(lambda: advisor.metric("kv_advisor_publishers") == 0, 30, "silence")
            wait_until(lambda: advisor.metric("kv_advisor_blobs") == 5, 30, "what is left")
            equal(advisor.get(f"/explain?hash={KEYS[1000]}").status, 404)
            equal(volumes.where(0, 5), ["01"] * 5, "blobs that nobody used")


def test_lost_and_repeated_events():
    """A gap is filled by a snapshot, which is no use; a record that comes twice is one use."""
    with Volumes(room=10) as volumes:
        volumes.put("cold", 0, 30)
        with followed(volumes, "--policy", "lru") as (manager, advisor):
            manager.stored(range(10))
            settle(manager, advisor)
            for i in range(10, 15):
                manager.store([(i, None)], tier="external", lose=True)
            manager.stored(range(15, 20))
            settle(manager, advisor)
            for i in range(20):
                check(advisor.explain(KEYS[i])["publishers"] == 1, f"blob {i} isn't told")
            manager.send([manager._record("store", 0, "external")] * 3)  # told before
            settle(manager, advisor)
            equal(advisor.explain(KEYS[0])["uses"], 1, "uses of a blob that is told again")
            equal(sum(where == "10" for where in volumes.where(0, 20)), 10, "in the fast member")


def test_joins_later():
    """A member that is down at the start joins when it can be opened; until then its blobs wait where they are."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, 30)
        (volumes.path / "fast").write_text("no folder")
        with followed(volumes, "--policy", "lru") as (manager, advisor):
            manager.stored(range(30))
            settle(manager, advisor)
            equal(advisor.metric("kv_advisor_unlisted_members"), 1)
            equal([member["open"] for member in advisor.get("/plan").json()["members"]], [False, True])
            (volumes.path / "fast").unlink()
            advisor.scan()
            check("a member has joined" in "".join(advisor.log), advisor.log)
            settle(manager, advisor)
            equal(volumes.where(0, 30), ["01"] * 10 + ["10"] * 20)
            with Volumes(room=20) as others:  # of which one has a member in common
                (others.path / "cold").write_text("no folder")
                others.config.write_text(others.config.read_text().replace(f"{others.path}/fast", f"{volumes.path}/fast"))
                refused(others)


def test_reclaims():
    """A blob that its publishers have removed is deleted after the time that was asked for; others never."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, 10)
        with followed(volumes, "--reclaim-after", "1s") as (manager, advisor):
            manager.stored(range(5))
            settle(manager, advisor)
            manager.remove([0, 1], tier="external")
            wait_until(lambda: volumes.where(0, 2) == ["00", "00"], 30, "the deletion")
            settle(manager, advisor)
            equal(volumes.where(2, 8), ["10"] * 3 + ["01"] * 5, "all others")
            equal(advisor.metric("kv_advisor_deleted_blobs_total"), 2)


def test_reclaims_by_its_own_clock():
    """A publisher's clock that is a day behind deletes nothing a day early."""
    with Volumes(room=20) as volumes:
        volumes.put("cold", 0, 5)
        for path in (volumes.path / "cold").rglob("*"):
            os.utime(path, times=(time.time() - 200000,) * 2)
        with followed(volumes, "--reclaim-after", "1h") as (manager, advisor):
            manager.ahead_ns = -86400 * 10**9
            manager.stored(range(5))
            settle(manager, advisor)
            manager.remove([0, 1], tier="external")
            wait_until(lambda: advisor.explain(KEYS[1])["removed_by_publishers"], 30, "the removal")
            advisor.wait_idle()
            equal(volumes.where(0, 5), ["10"] * 5)
            check(advisor.explain(KEYS[1])["seconds_since_use"] < 3600, advisor.explain(KEYS[1]))


def test_dry_run():
    with Volumes(room=20) as volumes:
        volumes.put("fast", 0, 30)
        before = volumes.where(0, 30)
        with Advisor(volumes, "--dry-run") as advisor:
            plan = advisor.get("/plan").json()
            equal(plan["dry_run"], True)
            equal(plan["copies"], [{"from": "fast", "to": "cold", "blobs": 10, "bytes": 10 * BLOB}], plan)
            with Advisor(volumes) as other:  # a dry run keeps no other away
                other.wait_idle()
        equal(before, ["10"] * 30)
        equal(volumes.where(0, 30).count("10"), 20)


def test_packs():
    """Cold blobs go into packs, those of a chain side by side, and come out again when they are used; a dry run tells it."""
    args = ("--pack-after", "1s", "--pack-least", "16KiB", "--pack-most", "128KiB", "--policy", "lru")
    with Volumes(room=20) as volumes, NatsServer() as server, Manager(server) as manager:
        volumes.put("cold", 0, N)
        manager.stored(range(N))
        with Advisor(volumes, "--nats", server.url, "--dry-run", *args) as advisor:
            wait_until(lambda: manager.alive() or advisor.metric("kv_advisor_whole_publishers") == 1, 30, "a whole view")
            wait_until(lambda: advisor.get("/plan").json()["blobs_to_pack"] == N, 30, "cold blobs")
            equal(advisor.get("/plan").json()["bytes_to_pack"], N * BLOB)
            equal(volumes.singles(0, N), ["01"] * N, "a dry run packs nothing")
        with Advisor(volumes, "--nats", server.url, *args) as advisor:
            settle(manager, advisor)
            packed = lambda: advisor.get("/plan").json()["members"][1]["packed_blobs"]
            wait_until(lambda: advisor.scan() or packed() == N, 60, "packs")
            advisor.wait_idle()
            equal(volumes.where(0, N), ["01"] * N, "places")
            equal(volumes.singles(0, N), ["00"] * N, "single blobs")
            places = [advisor.explain(KEYS[number]) for number in range(16)]
            equal([one["packed_alone"] for one in places], [True] * 16, places)
            at = sorted((pack["member"], pack["pack"], pack["entry"]) for one in places for pack in one["packs"])
            equal([place[2] - at[0][2] for place in at], list(range(16)), "a chain's blobs, side by side")
            manager.used(range(20))
            wait_until(lambda: advisor.metric("kv_advisor_onboarded_total") == 20, 30, "uses")
            settle(manager, advisor)
            equal(volumes.where(0, N), ["10"] * 20 + ["01"] * (N - 20), "after uses")
            equal(advisor.explain(KEYS[3])["packs"], [], "out of its pack")
            equal(advisor.metric("kv_advisor_packing_failed_total"), 0)


def plan(*args, status=0):
    done = subprocess.run([str(BUILD / "bin" / "kvasir"), "advisor", "plan", *map(str, args)], capture_output=True, text=True, timeout=patience(60),
                          env=environment(), check=False)
    equal(done.returncode, status, done.stdout + done.stderr)
    return done.stdout if status == 0 else done.stderr


def test_plan_command():
    """Without a daemon: from listings, from recorded events, from the state; and it moves nothing."""
    with Volumes(room=10) as volumes, NatsServer() as server:
        volumes.put("fast", 0, 15)
        volumes.put("cold", 100, 5)
        copies = json.loads(plan(volumes.uri, "--share", 100, "--json"))["copies"]
        equal(copies, [{"from": "fast", "to": "cold", "blobs": 5, "bytes": 5 * BLOB}])
        check("move               5 blobs" in plan(volumes.config, "--share", 100), plan(volumes.config, "--share", 100))
        record = volumes.path / "events.kve"
        with Manager(server) as manager:
            recorder = subprocess.Popen([str(BUILD / "bin" / "kvasir"), "events", "tail", server.url, "--time", "3s", "--record", str(record)],
                                        stdout=subprocess.DEVNULL, env=environment())
            while recorder.poll() is None:  # whenever it connects: a blob that is told again isn't used again
                manager.stored([100, 101])
                time.sleep(0.1)
        said = json.loads(plan(volumes.uri, "--share", 100, "--json", "--events", record))
        equal([(one["of"], one["references"], one["blobs"]) for one in said["advice"]], [("all", 2, 2)], said)
        copies = said["copies"]
        equal({(c["from"], c["to"]): c["blobs"] for c in copies}, {("cold", "fast"): 2, ("fast", "cold"): 7}, "with events")
        equal(volumes.where(0, 15), ["10"] * 15, "where they were")
        state = volumes.path / "state"
        with Advisor(volumes, "--state", state) as advisor:
            advisor.wait_idle()
        equal(json.loads(plan(volumes.uri, "--share", 100, "--json", "--state", state))["copies"], [], "with the daemon's state")
        check("damaged" in plan(volumes.uri, "--state", record, status=1))
        check("no recording" in plan(volumes.uri, "--events", state, status=1))
        equal(sorted(path.name for path in volumes.path.iterdir()), ["cold", "events.kve", "fast", "kv.conf", "state"], "files")
    check("tiered:/FILE" in plan(status=2))
    plan("tiered:/nosuch.conf", status=1)


def refused(volumes, *args, why="another kv-advisor moves blobs of member"):
    with Advisor(volumes, *args, start=False) as second:
        equal(second.process.wait(patience(30)), 1, "its status")
        second._reader.join(10)
        check(why in "".join(second.log), second.log)
        second.close = lambda: 0


def test_one_at_a_time():
    """Also through a copy of the configuration, and one put in its place; after a kill another one may begin."""
    with Volumes() as volumes, Advisor(volumes) as first:
        refused(volumes)
        text = volumes.config.read_text()
        copy = volumes.path / "copy.conf"
        copy.write_text(text)
        os.replace(copy, volumes.config)  # another file of the same name
        refused(volumes)
        copy.write_text(text.replace(str(volumes.path), f"{volumes.path}/../{volumes.path.name}"))
        volumes.uri = f"tiered:{copy}"
        refused(volumes)
        first.kill()
        with Advisor(volumes) as second:
            equal(second.get("/health").status, 200)


def test_remembers():
    """A restart knows the uses of before; a damaged state is no reason to stop."""
    with Volumes(room=10) as volumes, NatsServer() as server:
        state = volumes.path / "state"
        args = ("--state", state, "--policy", "lru", "--nats", server.url)
        volumes.put("cold", 0, 30)
        with Manager(server) as manager, Advisor(volumes, *args) as advisor:
            settle(manager, advisor)
            manager.stored(range(30))
            settle(manager, advisor)
            manager.used([2, 4])
            wait_until(lambda: advisor.metric("kv_advisor_onboarded_total") == 2, 30, "uses")
            settle(manager, advisor)
            before = volumes.where(0, 30)
        equal(before[2], "10")
        with Advisor(volumes, *args) as advisor:
            advisor.wait_idle()
            equal(volumes.where(0, 30), before, "places after a restart")
            equal(advisor.explain(KEYS[2])["uses"], 2)
        flip_bit(state)
        with Advisor(volumes, *args) as advisor:
            advisor.wait_idle()
            check("it is damaged" in "".join(advisor.log), advisor.log)
            equal(volumes.where(0, 30), before, "places, found in the members")
        data = state.read_bytes()
        later = data[:8] + (2).to_bytes(4, "little") + data[12:]
        state.write_bytes(later)
        refused(volumes, *args, why="of a later version of kv-advisor")
        check(state.read_bytes() == later, "nothing of it is changed")


def test_limits():
    """No faster than asked, and not at all in quiet hours."""
    with Volumes(room=20) as volumes:
        volumes.put("fast", 0, 40)
        with Advisor(volumes, "--quiet-hours", "00:00-24:00") as advisor:
            wait_until(lambda: advisor.metric("kv_advisor_quiet") == 1, 30, "quiet hours")
            advisor.scan()
            equal(volumes.where(0, 40), ["10"] * 40, "in quiet hours")
        with Advisor(volumes, "--bytes-per-second", BLOB, "--requests-per-second", "1000000") as advisor:
            wait_until(lambda: advisor.metric('kv_advisor_copied_blobs_total{member="cold"}') > 0, 30, "a copy")
        check("11" in volumes.where(0, 40) or "01" in volumes.where(0, 40))


def test_full_member():
    """Where the target has no room the blobs stay, and are read."""
    with Volumes(room=20, names=("fast", "warm", "cold")) as volumes:
        volumes.put("fast", 0, 30)
        volumes.put("warm", 100, 20)
        with Advisor(volumes) as advisor:
            advisor.wait_idle()
            places = volumes.where(0, 30) + volumes.where(100, 20)
            equal(sum(place[0] == "1" for place in places), 20, "in fast")
            check(sum(place[1] == "1" for place in places) <= 20, places)
            check(all(place.count("1") == 1 for place in places), places)


def test_bad_usage():
    def run(*args):
        done = subprocess.run([str(BUILD / "bin" / "kv-advisor"), *args], capture_output=True, text=True, timeout=patience(30), check=False)
        return done.returncode, done.stderr

    equal(run()[0], 2)
    equal(run("--store", "s3://bucket")[0], 2)
    equal(run("--store", "/x", "--quiet-hours", "25:00-26:00")[0], 2)
    equal(run("--store", "/x", "--policy", "fifo")[0], 2)
    code, said = run("--store", "/nosuch.conf", "--port", "0")
    equal(code, 1)
    check("nosuch.conf" in said, said)
    with Volumes() as volumes, Advisor(volumes) as advisor:
        for query in ("", "?hash=", "?hash=xyz", "?hash=" + "g" * 32, "?hash=" + "0" * 33):
            equal(advisor.get("/explain" + query).status, 400, query)
        equal(advisor.get("/explain?hash=" + "0" * 32).status, 404)
        equal(advisor.get("/nothing").status, 404)


if __name__ == "__main__":
    needs_nats()
    KEYS.update(enumerate(client("keys", BYTES, 0, 1100)))
    run(globals())
