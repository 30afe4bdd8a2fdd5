# SPDX-License-Identifier: Apache-2.0
"""Tiered stores over folders, a real redis-server and the S3 double: one store, whatever happens to a member."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from kvtest import *
from redistest import Server
from s3_double import S3, Store, environment

KVASIR = str(BUILD / "bin" / "kvasir")


def key(n):
    return f"{n * 2654435761 % 2**32:08x}".ljust(32, "0")


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory(prefix="kvtiered") as path:
        yield pathlib.Path(path)


def write(path, top="", **members):
    """A configuration of @members, in order; folders are named by their names. Returns the URI."""
    text = "linger = 200ms\n" + top + "".join(f"[{name}]\nuri = {uri}\n" for name, uri in members.items())
    path.joinpath("kv.conf").write_text(text)
    return f"tiered:{path}/kv.conf"


def two_folders(path, top=""):
    return write(path, top, fast=path / "fast", cold=path / "cold")


def member(path, name):
    """A member alone."""
    return Store(str(path / name))


def said_once(store, what):
    wait_until(lambda: what in store.log(), 30, what)
    equal(store.log().count(what), 1, store.log())


def conformance(uri):
    """What the kit says: {check and detail: verdict}, and the process."""
    done = subprocess.run([str(BUILD / "tests" / "store-driver"), "--conformance", uri], env=environment(), capture_output=True,
                          text=True, timeout=550)
    found = {}
    for line in done.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        found[rest.rstrip(": ")] = verdict
    check(len(found) > 40, done.stdout + done.stderr)
    return found, done


def passes(uri):
    found, done = conformance(uri)
    equal([name for name, verdict in found.items() if verdict in ("FAILED", "advised")], [], done.stdout + done.stderr)
    equal(done.returncode, 0, done.stdout + done.stderr)
    equal(done.stdout.count("ok kill: "), 2, done.stdout)


def kvasir(*args, status=0):
    done = subprocess.run([KVASIR, "store", *map(str, args)], env=environment(), capture_output=True, timeout=300)
    equal(done.returncode, status, done.stdout.decode() + done.stderr.decode())
    return done.stdout.decode()


# -- the contract ----------------------------------------------------------------------------------

def test_conformance_of_folders():
    with folder() as path:
        passes(two_folders(path))


def test_conformance_with_deadlines_and_manifests_in_the_slow_member():
    with folder() as path:
        passes(write(path, "manifests = cold\nputs = fast\nputs = cold\n", fast=f"{path}/fast\ndeadline = 60s", cold=f"{path}/cold\ndeadline = 60s"))


def test_conformance_with_redis_and_a_folder():
    with folder() as path, Server() as server:
        passes(write(path, fast=path / "fast", cold=server.uri))
        passes(write(path, "manifests = cold\n", fast=server.uri + "?prefix=f:", cold=path / "cold"))


def test_conformance_with_s3():
    with folder() as path, S3() as s3:
        passes(write(path, fast=path / "fast", cold=s3.uri(timeout=240)))  # a stall of a quarter of it is a fault


# Checks that ask for something that isn't there: it may lie in the member that is down, so -EIO is the answer.
OF_MISSING = ("ext: exists_chunks", "ext: get_chunks", "ext: delete_chunk", "ext: list_chunks", "ext: list_refs", "ext: stats",
              "ext: stream_chunk", "ext: get_parts", "ext: delete_chunk_if")


def test_conformance_with_each_member_killed():
    """All other checks pass, with the same answers; and all of them again when the member is back."""
    with folder() as path, Server() as one, Server() as two:
        uri = write(path, "manifests = last\n", one=one.uri, two=two.uri, last=path / "last")
        for server in (one, two):
            server.kill()
            found, done = conformance(uri)
            bad = [name for name, verdict in found.items() if verdict in ("FAILED", "advised")]
            equal([name for name in bad if not name.startswith(OF_MISSING)], [], done.stdout + done.stderr)
            check(bad, "a miss was certain without the member")
            server.start()
        passes(uri)


def test_conformance_when_a_member_is_killed_meanwhile():
    """The kit may find what it likes, but ends, and passes when the member is back."""
    with folder() as path, Server() as server:
        uri = write(path, "manifests = last\n", first=server.uri, last=path / "last")
        kit = subprocess.Popen([str(BUILD / "tests" / "store-driver"), "--conformance", uri], env=environment(), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        kit.stdout.readline()
        server.kill()
        kit.communicate(timeout=550)
        check(kit.returncode in (0, 1), f"it ended with {kit.returncode}")
        server.start()
        passes(uri)


# -- gets ------------------------------------------------------------------------------------------

def test_a_blob_is_found_wherever_it_is():
    with folder() as path, Store(two_folders(path)) as store:
        equal(store.ask("get", key(1), 100, 1), "-2 -", "missing")
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 5, 1), "0")
        with member(path, "cold") as cold:
            for n in (1, 2):
                equal(cold.ask("put", key(n), 100, n), "0")
            equal(cold.ask("publish", "other", 0, 0), "0")
        for _ in range(2):
            for n in (1, 2):
                equal(store.ask("get", key(n), 100, n), "0 same", n)
        with member(path, "fast") as fast:
            equal(fast.ask("delete", key(1)), "0")
            equal(fast.ask("publish", "x", 0, 0), "0")
        equal(store.ask("get", key(1), 100, 1), "0 same", "in the other member now")
        equal(store.ask("exists", key(1), key(2), key(3)), "0 1 1 0")
        equal(store.ask("getmany", *(w for n in (1, 2, 3) for w in (key(n), 100, n))), "2 same same -")
        equal(sorted(store.ask("chunks").split()), sorted(["0", key(1), key(2)]))
        equal([word.split(":")[0] for word in store.ask("list").split()], ["x", "m", "0"], "of the manifests' member alone")


def test_damage_in_one_member_is_no_end():
    with folder() as path, Store(two_folders(path)) as store:
        equal(store.ask("put", key(1), 5000, 1), "0")
        equal(store.ask("publish", "m", 5, 1), "0")
        with member(path, "cold") as cold:
            equal(cold.ask("put", key(1), 5000, 1), "0")
            equal(cold.ask("publish", "m", 0, 0), "0")
        flip_bit(path / "fast" / "chunks" / key(1)[0] / key(1))
        equal(store.ask("get", key(1), 5000, 1), "0 same")
        flip_bit(path / "cold" / "chunks" / key(1)[0] / key(1))
        equal(store.ask("get", key(1), 5000, 1), "-74 -")
        equal(store.ask("get", key(1), 5000, 1), "-2 -", "set aside")


def test_puts_go_on_where_there_is_room():
    with folder() as path:
        text = (f"[fast]\nuri = {path}/fast?limit=1GiB\ncapacity = 100KiB\n[cold]\nuri = {path}/cold\n")
        path.joinpath("kv.conf").write_text(text)
        with Store(f"tiered:{path}/kv.conf") as store:
            for n in range(4):
                equal(store.ask("put", key(n), 50000, n), "0")
                equal(store.ask("publish", "m", 0, 0), "0")
            wait_until(lambda: store.ask("put", key(100), 50000, 100) in "01" and store.ask("publish", "m", 0, 0) == "0" and
                       (path / "cold" / "chunks" / key(100)[0] / key(100)).exists(), 30, "the second member")
            for n in (*range(4), 100):
                equal(store.ask("get", key(n), 50000, n), "0 same")


# -- members that fail -----------------------------------------------------------------------------

def test_a_killed_member_costs_its_blobs():
    with folder() as path, Server() as server:
        uri = write(path, fast=path / "fast", cold=server.uri)
        with Store(uri) as store, Store(server.uri) as cold:
            equal(store.ask("put", key(1), 100, 1), "0")
            equal(store.ask("publish", "m", 0, 0), "0")
            equal(cold.ask("put", key(2), 100, 2), "0")
            equal(cold.ask("publish", "m", 0, 0), "0")
            equal(store.ask("get", key(2), 100, 2), "0 same")
            server.kill()
            for _ in range(5):
                equal(store.ask("get", key(1), 100, 1), "0 same", "a blob of the other member")
                equal(store.ask("get", key(2), 100, 2), "-5 -", "no false miss")
                equal(store.ask("get", key(3), 100, 3), "-5 -", "it may lie in the member that is down")
            equal(store.ask("exists", key(1)), "0 1")
            equal(store.ask("exists", key(1), key(2)), "0 1 3", "one key alone has no answer")
            equal(store.ask("put", key(4), 100, 4), "0")
            equal(store.ask("publish", "m2", 3, 1), "0", "publications go on")
            said_once(store, "a member fails")
            server.start()
            cold.close()
            wait_until(lambda: store.ask("get", key(3), 100, 3) == "-2 -", 60, "the member again")
            said_once(store, "a member answers again")
            equal(store.ask("get", key(4), 100, 4), "0 same")


def test_a_hung_member_is_left_alone():
    with folder() as path, Server() as server:
        uri = write(path, fast=path / "fast", cold=server.uri + "?timeout_ms=300")
        with Store(uri) as store:
            equal(store.ask("put", key(1), 100, 1), "0")
            with server.frozen():
                for n in range(10):
                    equal(store.ask("get", key(n + 10), 100, n), "-5 -")
                equal(store.ask("get", key(1), 100, 1), "0 same")
                said_once(store, "a member fails")
            wait_until(lambda: store.ask("get", key(3), 100, 3) == "-2 -", 60, "the member again")


def test_a_hung_member_has_a_deadline():
    """Its own limit is far: the store's deadline ends the calls, what lies elsewhere is read, and all is well when it is back."""
    with folder() as path, Server() as server:
        with Store(write(path, "puts = fast\n", slow=server.uri + "?timeout_ms=60000\ndeadline = 300ms", fast=path / "fast")) as store:
            with Store(server.uri) as slow:
                for n in (1, 2):
                    equal(slow.ask("put", key(n), 100, n), "0")
                equal(slow.ask("publish", "m", 0, 0), "0")
            equal(store.ask("put", key(1), 100, 1), "0", "in both")
            equal(store.ask("publish", "m", 5, 1), "0")
            equal(store.ask("get", key(2), 100, 2), "0 same")
            with server.frozen():
                for _ in range(5):
                    equal(store.ask("get", key(1), 100, 1), "0 same", "a blob of the other member, too")
                    equal(store.ask("get", key(2), 100, 2), "-5 -", "no false miss")
                equal(store.ask("put", key(3), 100, 3), "0")
                equal(store.ask("publish", "m2", 5, 1), "0")
                said_once(store, "a member fails")
            wait_until(lambda: store.ask("get", key(2), 100, 2) == "0 same", 60, "the member again")
            equal(store.ask("get", key(9), 100, 9), "-2 -")


def test_a_bucket_that_stalls_has_a_deadline():
    with folder() as path, S3() as s3, Store(write(path, "puts = fast\n", slow=s3.uri(timeout=4) + "\ndeadline = 300ms", fast=path / "fast")) as store:
        with Store(s3.uri()) as slow:
            for n in (1, 2):
                equal(slow.ask("put", key(n), 100, n), "0")
            equal(slow.ask("publish", "m", 0, 0), "0")
        equal(store.ask("put", key(1), 100, 1), "0", "in both")
        equal(store.ask("publish", "m", 5, 1), "0")
        s3.fault("GET /b/", "stall", times=1)
        equal(store.ask("getmany", key(1), 100, 1, key(2), 100, 2).split()[1], "same", "one is elsewhere, too")
        said_once(store, "a member fails")
        wait_until(lambda: store.ask("get", key(2), 100, 2) == "0 same", 60, "the bucket again")


def test_the_first_of_puts_is_down():
    """Chunks that waited in it stop manifests that may need them, until they are put elsewhere."""
    with folder() as path, Server() as server:
        uri = write(path, "manifests = cold\n", fast=server.uri, cold=path / "cold")
        with Store(uri) as store:
            equal(store.ask("put", key(1), 100, 1), "0")
            server.kill()
            check(store.ask("publish", "m", 5, 1).startswith("-"), "a chunk of it is lost")
            equal(store.ask("manifest", "m", 5, 1), "-2 -", "nothing was published")
            for n in range(10, 20):
                check(store.ask("put", key(n), 100, n) in ("0", "1"), n)
            check(store.ask("publish", "m", 5, 1).startswith("-"), "still")
            equal(store.ask("put", key(1), 100, 1), "0", "to the other member")
            for n in range(10, 20):
                check(store.ask("put", key(n), 100, n) in ("0", "1"), n)
            equal(store.ask("publish", "m", 5, 1), "0")
            with member(path, "cold") as cold:
                equal(cold.ask("get", key(1), 100, 1), "0 same")


def test_down_at_open():
    with folder() as path, Server() as server:
        uri = write(path, fast=path / "fast", cold=server.uri)
        server.kill()
        with Store(uri) as store:
            equal(store.ask("put", key(1), 100, 1), "0")
            equal(store.ask("publish", "m", 5, 1), "0")
            equal(store.ask("get", key(2), 100, 2), "-5 -")
            server.start()
            wait_until(lambda: store.ask("get", key(2), 100, 2) == "-2 -", 60, "the member")
        server.kill()
        Store(write(path, cold=server.uri), expect=-1)


def test_a_folder_that_turns_into_a_file():
    with folder() as path, Store(two_folders(path, "puts = fast\n")) as store:
        with member(path, "cold") as cold:
            equal(cold.ask("put", key(2), 100, 2), "0")
            equal(cold.ask("publish", "m", 0, 0), "0")
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 5, 1), "0")
        equal(store.ask("get", key(2), 100, 2), "0 same")
        shutil.move(path / "cold", path / "away")
        (path / "cold").write_text("not a folder")
        check(store.ask("get", key(2), 100, 2) in ("0 same", "-5 -"), "it goes on in the old folder, or fails")
        equal(store.ask("get", key(1), 100, 1), "0 same")
        (path / "cold").unlink()
        shutil.move(path / "away", path / "cold")
        wait_until(lambda: store.ask("get", key(2), 100, 2) == "0 same", 60, "the folder again")


def test_a_member_with_old_content():
    """It serves what it has: keys name bytes that don't change."""
    with folder() as path:
        with Store(two_folders(path, "puts = fast\n")) as store:
            equal(store.ask("put", key(1), 100, 1), "0")
            equal(store.ask("publish", "m", 5, 1), "0")
        shutil.copytree(path / "fast", path / "old")
        with Store(two_folders(path, "puts = fast\n")) as store:
            equal(store.ask("put", key(2), 100, 2), "0")
            equal(store.ask("publish", "m", 6, 2), "0")
        shutil.rmtree(path / "fast")
        shutil.move(path / "old", path / "fast")
        with Store(two_folders(path)) as store:
            equal(store.ask("get", key(1), 100, 1), "0 same")
            equal(store.ask("get", key(2), 100, 2), "-2 -")
            equal(store.ask("manifest", "m", 5, 1), "0 same")


# -- snapshots and collection ----------------------------------------------------------------------

def test_save_restore_verify_gc():
    with folder() as path, Server() as server:
        uri = write(path, "manifests = cold\nputs = fast\n", fast=path / "fast", cold=server.uri)
        data = os.urandom(9 << 20)
        (path / "obj").write_bytes(data)
        for name in ("one", "two"):
            kvasir("save", uri, name, path / "obj")
        equal(len(json.loads(kvasir("ls", "--json", uri))["objects"]), 2)
        kvasir("verify", uri)
        kvasir("restore", uri, "one", path / "out")
        check((path / "out").read_bytes() == data, "other bytes")
        n = json.loads(kvasir("gc", "--json", "--no-grace", uri))
        equal(n["deleted_chunks"], 0, n)
        kvasir("rm", uri, "one")
        # a copy of all chunks in the other member counts once
        with Store(str(path / "fast")) as fast, Store(server.uri) as cold:
            for chunk in fast.ask("chunks").split()[:-1]:
                equal(cold.ask("put", chunk, 10, 1), "0")
            equal(cold.ask("publish", "copies", 0, 0), "0")
        # those in Redis are not copies, so a get of them would fail: only their number matters here
        before = json.loads(kvasir("gc", "--json", "--no-grace", uri))
        kvasir("rm", uri, "two")
        with Store(server.uri) as cold:
            equal(cold.ask("unpublish", "copies"), "0")
        after = json.loads(kvasir("gc", "--json", "--no-grace", uri))
        check(before["live_chunks"] > 3 and after["live_chunks"] == 0, (before, after))
        check(not list((path / "fast" / "chunks").rglob("?" * 32)), "chunks are left")
        equal([name.name for name in (path / "fast").iterdir() if name.name.startswith("kv-tiered-")], [], "companions")


def test_refs_of_all_members_are_kept():
    """A manifest of unknown format needs what was put to any member."""
    with folder() as path:
        with Store(two_folders(path, "manifests = cold\nputs = fast\n")) as store:
            equal(store.ask("put", key(1), 100, 1), "0")
            equal(store.ask("publish", "sentinel", 5, 1), "0")
            equal(store.ask("refs", "sentinel").split()[-1], "0")
            check(key(1) in store.ask("refs", "sentinel"), "its chunk")
        uri = two_folders(path, "manifests = cold\nputs = fast\n")
        kvasir("gc", "--no-grace", uri)
        kvasir("gc", "--no-grace", path / "fast")  # a member alone: its companion speaks for the manifest
        with Store(uri) as store:
            equal(store.ask("get", key(1), 100, 1), "0 same")
            equal(store.ask("unpublish", "sentinel"), "0")
        kvasir("gc", "--no-grace", uri)
        with Store(uri) as store:
            equal(store.ask("get", key(1), 100, 1), "-2 -")


# -- configuration and Python ----------------------------------------------------------------------

def test_refused_configurations():
    with folder() as path:
        path.joinpath("kv.conf").write_text("[a]\nurl = /a\n")
        done = subprocess.run([KVASIR, "store", "ls", f"tiered:{path}/kv.conf"], env=environment(), capture_output=True, text=True)
        equal(done.returncode, 3)
        check("kv.conf:2: unknown key `url`; did you mean `uri`?" in done.stderr, done.stderr)
        done = subprocess.run([KVASIR, "store", "ls", f"tiered:{path}/nosuch.conf"], env=environment(), capture_output=True, text=True)
        equal(done.returncode, 3)
        check("nosuch.conf" in done.stderr and "no plugin" not in done.stderr, done.stderr)
        path.joinpath("kv.conf").write_text("[a]\nuri = nosuch://x\n")
        Store(f"tiered:{path}/kv.conf", expect=-1)


def test_the_man_page_has_all_options():
    rows = re.findall(r"^    \{ROW\(\"([a-z-]+)\"", (SOURCE / "plugins" / "tiered" / "config.c").read_text(), re.MULTILINE)
    page, guide = (SOURCE / "docs" / name for name in ("man/kvasir-tiered.5", "kv-store-tiered.md"))
    equal(sorted(re.findall(r'^\.BI ([a-z-]+) " =', page.read_text(), re.MULTILINE)), sorted(rows), page.name)
    equal(sorted(re.findall(r"^\| `([a-z-]+) = ", guide.read_text(), re.MULTILINE)), sorted(rows), guide.name)


def test_names_of_its_own():
    with folder() as path, Store(two_folders(path)) as store:
        equal(store.ask("publish", "kv-tiered-x", 5, 1), "-22")
        equal(store.ask("manifest", "kv-tiered-x", 5, 1), "-22 -")


def test_python():
    if SANITIZED:
        skip("Python isn't sanitized")
    with folder() as path:
        uri = two_folders(path)
        code = ("import sys, kvasir.store\n"
                "with kvasir.store.open(sys.argv[1]) as store:\n"
                "    store.put(b'k' * 16, b'value')\n"
                "    store.flush()\n"
                "with kvasir.store.open(sys.argv[1]) as store:\n"
                "    assert bytes(store.get(b'k' * 16)) == b'value'\n")
        done = subprocess.run([sys.executable, "-c", code, uri], capture_output=True, text=True,
                              env={**environment(), "PYTHONPATH": str(BUILD / "python"), "KVASIR_LIBRARY_PATH": str(BUILD / "lib")})
        equal(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    run(globals())
