# SPDX-License-Identifier: Apache-2.0
"""Packs of a tiered store: requests of a prompt, faults of the server, a packer that dies, the command, the contract."""
import os
import subprocess

from kvtest import *
from s3_double import S3, Store, environment
from test_store_tiered import folder, key, kvasir, member, passes, write

import json


def keys_file(path, numbers):
    file = path / "keys"
    file.write_text("".join(key(n) + "\n" for n in numbers))
    return file


def fill(uri, numbers, size=1000, name="m"):
    with Store(uri) as store:
        for n in numbers:
            equal(store.ask("put", key(n), size, n), "0")
        equal(store.ask("publish", name, 0, 0), "0")


def pack(path, uri, numbers, *more, status=0):
    text = kvasir("pack", uri, "--to", "cold", "--keys", keys_file(path, numbers), "--least", "1KiB", "--json", *more, status=status)
    return json.loads(text.splitlines()[-1])


def get_many(store, numbers, size=1000):
    return store.ask("getmany", *(word for n in numbers for word in (key(n), size, n)))


def bucket_alone(path, s3):
    return write(path, cold=s3.uri())


# -- what packs are for ----------------------------------------------------------------------------

def test_a_prompt_from_a_bucket_is_few_requests():
    with folder() as path, S3() as s3:
        uri, prompt = bucket_alone(path, s3), range(256)
        fill(uri, prompt)
        with Store(uri) as store:
            before = len(s3.log)
            equal(get_many(store, prompt), "256 " + " ".join(["same"] * 256))
            check(len(s3.log) - before >= 256, "singly it is a request each")
        found = pack(path, uri, prompt)
        equal([found[name] for name in ("packs", "packed", "removed", "errors")], [1, 256, 256, 0])
        equal(len(s3.keys("p/c/")), 1, "one object")
        with Store(uri) as store:
            before = len(s3.log)
            equal(get_many(store, prompt), "256 " + " ".join(["same"] * 256))
            check(len(s3.log) - before <= 5, s3.log[before:])
            before = len(s3.log)
            equal(get_many(store, prompt), "256 " + " ".join(["same"] * 256))
            equal(len(s3.log) - before, 1, "packs are known")
            before = len(s3.log)
            equal(get_many(store, [3, 4, 5, 100, 101]), "5 same same same same same")
            check(len(s3.log) - before <= 2, "what is between is read, or two parts")


def test_restore_reads_packs_in_batches():
    with folder() as path, S3() as s3:
        uri = write(path, "puts = cold\n", fast=path / "fast", cold=s3.uri())
        data = os.urandom(3 << 20)
        path.joinpath("in").write_bytes(data)
        kvasir("save", uri, "object", path / "in", "--chunk", "16KiB", "--format", "bytes")
        chunks = len(s3.keys("p/c/"))
        check(chunks > 100, chunks)
        kvasir("pack", uri, "--to", "cold", "--least", "1MiB")
        before = len(s3.log)
        kvasir("restore", uri, "object", path / "out")
        check(len(s3.log) - before <= 12, s3.log[before:])
        equal(path.joinpath("out").read_bytes(), data)
        kvasir("verify", uri)
        kvasir("gc", uri)
        kvasir("restore", uri, "object", path / "out")
        kvasir("rm", uri, "object")
        kvasir("gc", uri, "--no-grace")
        equal([name for name in s3.keys("p/") if name != "p/m/kv-tiered-packs"], [], "all of it is gone")


# -- faults ----------------------------------------------------------------------------------------

def test_a_server_without_ranges_gets_no_packs():
    with folder() as path, S3() as s3:
        uri = bucket_alone(path, s3)
        fill(uri, range(10))
        for how in ("ignored", "shifted"):
            s3.ranges = how
            kvasir("pack", uri, "--to", "cold", "--keys", keys_file(path, range(10)), "--least", "1KiB", status=5)
            equal(len(s3.keys("p/c/")), 10, "single ones stay, and the pack is gone")
            equal([name for name in s3.keys("p/m/") if "-pack-" in name], [], "nothing was published")
            with Store(uri) as store:
                equal(get_many(store, range(10)), "10 " + " ".join(["same"] * 10))


def test_wrong_answers_are_no_blobs():
    with folder() as path, S3() as s3:
        uri = bucket_alone(path, s3)
        fill(uri, range(10))
        pack(path, uri, range(10))
        (name,) = s3.keys("p/c/")
        good = s3.objects[name]
        with Store(uri) as store:
            equal(store.ask("get", key(1), 1000, 1), "0 same")
            s3.fault(f"GET /b/{name}", "503")
            equal(store.ask("get", key(1), 1000, 1), "0 same", "tried again")
            s3.fault(f"GET /b/{name}", "wrong")
            equal(store.ask("get", key(1), 1000, 1), "0 same", "one bad read is no proof")
            s3.ranges = "shifted"
            equal(store.ask("get", key(1), 1000, 1), "-5 -")
            s3.ranges = "told"
            # another object of the same length under the key: its bytes are never mixed with those of before
            s3.objects[name] = good._replace(body=bytes(len(good.body)), etag='"other"')
            equal(store.ask("get", key(1), 1000, 1), "-74 -")
            equal(get_many(store, range(3)).split()[0], "0")
            s3.objects[name] = good._replace(etag='"renewed"')
            equal(get_many(store, range(10)), "10 " + " ".join(["same"] * 10), "a renewed object has the same bytes")
            del s3.objects[name]
            equal(store.ask("get", key(1), 1000, 1), "-2 -")
            s3.objects[name] = good


def test_a_collection_with_read_errors_deletes_no_pack():
    with folder() as path, S3() as s3:
        uri = bucket_alone(path, s3)
        fill(uri, range(10))
        pack(path, uri, range(10))
        with Store(uri) as store:
            equal(store.ask("unpublish", "m"), "0")
        s3.fault("GET /b/p/c/", "403", 100)
        subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "gc", uri, "--no-grace"], env=environment(), capture_output=True, timeout=300)
        s3.faults.clear()
        equal(len(s3.keys("p/c/")), 1, "a read error is no proof")
        with Store(uri) as store:
            equal(get_many(store, range(10)), "10 " + " ".join(["same"] * 10))


def test_a_packer_that_dies():
    """Killed before and behind the commit point, the pack's manifest: nothing is lost, and the next packer goes on."""
    with folder() as path, S3() as s3:
        uri = bucket_alone(path, s3)
        fill(uri, range(20))
        for request in ("GET /b/p/c/6b/6b762d7061636b01", "HEAD /b/p/m/kv-tiered-pack-"):  # it verifies; it has published
            held, go = s3.hold(request, "before")
            packer = subprocess.Popen([str(BUILD / "bin" / "kvasir"), "store", "pack", uri, "--to", "cold", "--keys", keys_file(path, range(20)),
                                       "--least", "1KiB"], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            check(held.wait(60), "it publishes")
            packer.kill()
            packer.wait()
            go.set()
            with Store(uri) as store:
                equal(get_many(store, range(20)), "20 " + " ".join(["same"] * 20))
            equal(len([name for name in s3.keys("p/c/") if "6b762d7061636b01" not in name]), 20, "single ones stay")
        found = pack(path, uri, range(20))
        equal([found["packs"], found["removed"], found["errors"]], [0, 20, 0], "the published one has them")
        s3.age(7 * 86400, "p/c/")
        kvasir("gc", uri)
        equal(len(s3.keys("p/c/")), 1, "the half-written one is gone")
        with Store(uri) as store:
            equal(get_many(store, range(20)), "20 " + " ".join(["same"] * 20))


# -- the contract ----------------------------------------------------------------------------------

def test_conformance_of_stores_with_packs():
    with folder() as path:
        uri = write(path, "puts = cold\n", fast=path / "fast", cold=path / "cold")
        fill(uri, range(50))
        pack(path, uri, range(50))
        passes(uri)
        passes(str(path / "cold"))
        with Store(uri) as store:
            equal(get_many(store, range(50)), "50 " + " ".join(["same"] * 50), "the kit leaves others' blobs alone")


def test_conformance_of_a_bucket_with_packs():
    with folder() as path, S3() as s3:
        uri = bucket_alone(path, s3)
        fill(uri, range(50))
        pack(path, uri, range(50))
        passes(uri)


# -- the command -----------------------------------------------------------------------------------

def test_from_one_member_to_another():
    with folder() as path:
        uri = write(path, "puts = fast\n", fast=path / "fast", cold=path / "cold")
        fill(uri, range(30))
        found = pack(path, uri, range(40), "--from", "fast")
        equal([found[name] for name in ("packs", "packed", "removed", "missing")], [1, 30, 30, 10])
        equal(list(path.glob("fast/chunks/?/*")), [])
        with Store(uri) as store:
            equal(get_many(store, range(30)), "30 " + " ".join(["same"] * 30))
        found = pack(path, uri, range(30), "--idle", "1h")
        equal([found["packs"], found["in_use"]], [0, 30], "used just now, or not there")


def test_what_the_command_refuses():
    with folder() as path:
        uri = write(path, fast=path / "fast", cold=path / "cold")
        kvasir("pack", uri, status=2)
        kvasir("pack", uri, "--to", "nowhere", status=5)
        kvasir("pack", str(path / "fast"), "--to", "cold", status=5)
        path.joinpath("keys").write_text("00\n0\n")
        kvasir("pack", uri, "--to", "cold", "--keys", path / "keys", status=5)


def test_bench():
    with folder() as path, S3() as s3:
        done = subprocess.run([str(BUILD / "bin" / "kvasir"), "bench", "tiered", "--member", s3.uri(), "--rounds", "1", "--blobs", "100", "--blob",
                               "4KiB", "--folder", str(path), "--json"], env=environment(), capture_output=True, text=True, timeout=300)
        equal(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        equal([found[name] for name in ("packs", "singly_requests", "packed_requests", "first_requests")], [1, 100, 1, 4])
        equal(s3.keys("p/c/"), [], "it removes what it wrote")
        equal(s3.keys("p/m/"), ["p/m/kv-tiered-packs"])
        equal(list(path.iterdir()), [])


if __name__ == "__main__":
    run(globals())
