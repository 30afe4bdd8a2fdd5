# SPDX-License-Identifier: Apache-2.0
"""The s3 plugin against a strict double that checks every signature (s3_double.py)."""
import subprocess

from kvtest import *
from s3_double import *


def key(n, size=16):
    return f"{n * 2654435761 % 2**32:08x}".ljust(2 * size, "0")


def test_chunks_and_manifests():
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("get", key(1), 100, 1), "-2 -", "missing")
            equal(store.ask("put", key(1), 100, 1), "0")
            equal(store.ask("put", key(1), 100, 1), "1", "again")
            equal(store.ask("get", key(1), 100, 1), "0 same", "read your writes")
            equal(store.ask("put", key(2), 0, 2), "0")
            equal(store.ask("put", key(3, 8), 1000, 3), "0")
            equal(store.ask("put", key(3, 32), 1000, 4), "0", "keys of other lengths are other keys")
            equal(store.ask("publish", "name", 10, 5), "0")
            equal(s3.keys(), sorted(["p/m/name"] + [f"p/c/{k[:2]}/{k}" for k in (key(1), key(2), key(3, 8), key(3, 32))]))
        with Store(s3.uri()) as store:
            for k, size, seed in ((key(1), 100, 1), (key(2), 0, 2), (key(3, 8), 1000, 3), (key(3, 32), 1000, 4)):
                equal(store.ask("get", k, size, seed), "0 same", k)
                equal(store.ask("put", k, size, seed), "1", "there since before")
            equal(store.ask("manifest", "name", 10, 5), "0 same")
            equal(store.ask("publish", "name", 20, 6), "0")
            equal(store.ask("manifest", "name", 20, 6), "0 same", "replaced")
            equal(store.ask("publish", "empty", 0, 0), "0")
            equal(store.ask("manifest", "empty", 0, 0), "0 same")
            equal(store.ask("unpublish", "name"), "0")
            equal(store.ask("unpublish", "name"), "0", "again")
            equal(store.ask("manifest", "name", 0, 0), "-2 -")


def test_success_is_quiet():
    with S3() as s3:
        store = Store(s3.uri())
        for n in range(3):
            equal(store.ask("get", key(n), 10, n), "-2 -")
            equal(store.ask("put", key(n), 10, n), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        store.close()
        equal(store.log(), "")


def test_names():
    names = ["a/b", "..", ".", "a b%2F+~é&=?#", "x" * 250, "-._~", "chunks", "c/00/00"]
    with S3() as s3, Store(s3.uri("pre fix+/é")) as store:
        for i, name in enumerate(names):
            if " " not in name:  # the driver's words
                equal(store.ask("publish", name, 10 + i, i), "0", name)
        for i, name in enumerate(names):
            if " " not in name:
                equal(store.ask("manifest", name, 10 + i, i), "0 same", name)
        listed = store.ask("list").split()
        equal(sorted(listed[:-1]), sorted(f"{n}:{10 + i}" for i, n in enumerate(names) if " " not in n))
        equal(store.ask("publish", "x" * 251, 1, 1), "-22")
        check(all(k.startswith("pre fix+/é/m/") for k in s3.keys()), s3.keys())


def test_batches_take_few_waits():
    many = range(300)
    with S3() as s3:
        with Store(s3.uri()) as store:
            words = [w for n in many for w in (key(n), 1000 + n, n)]
            equal(store.ask("putmany", *words), "0" + " 0" * 300)
            equal(store.ask("publish", "m", 1, 1), "0")
            equal(store.ask("putmany", *words), "0" + " 1" * 300, "all there, and known to be")
            equal(len(s3.requests("PUT /b/p/c/")), 300)
            check(len(s3.requests("HEAD ")) <= 315, "what was just stored is not asked for (but for collisions)")
        with Store(s3.uri()) as store:
            equal(store.ask("exists", key(3), key(1000), key(4)), "0 1 0 1")
            equal(store.ask("getmany", *words[:600], key(1000), 5, 5), "200" + " same" * 200 + " -")
            before = len(s3.requests("GET /b/p/c/"))
            equal(store.ask("prefetch", *(key(n) for n in range(200, 250))), "0")
            for n in range(200, 250):
                equal(store.ask("get", key(n), 1000 + n, n), "0 same")
            equal(len(s3.requests("GET /b/p/c/")) - before, 50, "each is fetched once")
            stats = store.ask("stats")
            check(" misses=1 " in stats and " errors=0 " in stats, stats)


def test_listings_have_pages():
    with S3(page=7) as s3, Store(s3.uri()) as store:
        s3.objects["p/other"] = s3.objects["p/c/zz/strange"] = Item(b"", {}, "", 0)
        for n in range(25):
            equal(store.ask("put", key(n), 10, n), "0")
        for n in range(15):
            equal(store.ask("publish", f"name{n}", n, n), "0")
        equal(sorted(store.ask("chunks").split()[:-1]), sorted(key(n) for n in range(25)))
        equal(sorted(store.ask("list").split()[:-1]), sorted(f"name{n}:{n}" for n in range(15)))
        equal(store.ask("list", 3).split()[-1], "7", "ended by the caller")
        equal(store.ask("delete", key(3)), "0")
        equal(store.ask("get", key(3), 10, 3), "-2 -")
        equal(store.ask("delete", key(3)), "0", "again")


def test_sweep_goes_by_age():
    with S3() as s3, Store(s3.uri()) as store:
        for n in range(6):
            equal(store.ask("put", key(n), 10, n), "0")
        equal(store.ask("flush"), "0")
        for k in s3.keys("p/c/"):
            s3.objects[k] = s3.objects[k]._replace(modified=s3.now() - 100000)
        equal(store.ask("touch", key(0), key(1), key(99)), "2", "touched")
        equal(store.ask("sweep", 86400, key(2)), "0 kept=3 deleted=3 errors=0")
        equal(store.ask("exists", *map(key, range(6))), "0 1 1 1 0 0 0")
        equal(store.ask("get", key(0), 10, 0), "0 same", "a copy to itself keeps the bytes")
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("flush"), "0")
        s3.objects[s3.keys()[0]] = s3.objects[s3.keys()[0]]._replace(modified=s3.now() - 100000)
        with Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "1")
            equal(store.ask("sweep", 86400), "0 kept=1 deleted=0 errors=0", "a hit renews")


def test_large_values_go_in_parts():
    size = 70 << 20
    with S3() as s3:
        with Store(s3.uri(part=8, timeout=60)) as store:
            equal(store.ask("put", key(1), size, 1), "0")
            equal(len(s3.requests("PUT /b/p/c/")), 9)
            equal(s3.uploads, {})
        with Store(s3.uri(timeout=60)) as store:
            equal(store.ask("put", key(1), size, 1), "1")
            equal(store.ask("get", key(1), size, 1), "0 same")
            equal(store.ask("put", key(2), 20 << 20, 2), "0", "not buffered")
            equal(store.ask("get", key(2), 20 << 20, 2), "0 same")


def test_servers_without_conditions():
    with S3(conditional=False) as s3:
        for wanted in ("0", "1"):
            with Store(s3.uri()) as store:
                equal(store.ask("put", key(1), 10, 1), wanted)
                equal(store.ask("publish", "m", 1, 1), "0")
                equal(store.ask("get", key(1), 10, 1), "0 same")


def test_two_writers():
    with S3() as s3, Store(s3.uri()) as one, Store(s3.uri()) as two:
        equal(one.ask("exists", key(1)), "0 0")
        equal(two.ask("put", key(1), 10, 1), "0")
        equal(two.ask("publish", "m", 1, 1), "0")
        equal(one.ask("put", key(1), 10, 1), "1")
        equal(one.ask("publish", "m", 1, 2), "0")
        equal(two.ask("manifest", "m", 1, 2), "0 same")


def test_virtual_hosts_tokens_and_regions():
    with S3(token="a+b/c==", region="eu-x-1") as s3:
        with Store(s3.uri(region="eu-x-1"), AWS_SESSION_TOKEN="a+b/c==") as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("flush"), "0")
        with Store(s3.uri(), AWS_REGION="eu-x-1", AWS_SESSION_TOKEN="a+b/c==") as store:
            equal(store.ask("get", key(1), 10, 1), "0 same")
        with Store(s3.uri(region="eu-x-1"), expect=1) as store:
            store.close()
            check("InvalidToken" in store.log(), store.log())


def test_what_is_wrong_shows_at_once():
    with S3() as s3:
        for uri, env, said in ((s3.uri(), {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
                               (s3.uri(), {"AWS_ACCESS_KEY_ID": ""}, "AWS_ACCESS_KEY_ID"),
                               (s3.uri().replace("//b/", "//nobody/"), {}, "NoSuchBucket"),
                               (s3.uri(endpoint="nowhere"), {}, "endpoint"),
                               (s3.uri(endpoint=f"http://127.0.0.1:{free_port()}", timeout=1), {}, "connect")):
            with Store(uri, expect=1, **env) as store:
                store.close()
                check(said in store.log() and SECRET not in store.log() and "wrong " not in store.log(), store.log())


def test_the_clock_is_off():
    for skew in (4000, -4000):
        with S3(skew=skew) as s3, Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "m", 1, 1), "0")
            equal(store.ask("get", key(1), 10, 1), "0 same")


def test_damage_is_a_miss_and_is_repaired():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 100, 1), "0")
        for k in s3.keys():
            s3.objects[k] = s3.objects[k]._replace(body=b"?" * 100)
        equal(store.ask("get", key(1), 100, 1), "-74 -")
        equal(store.ask("manifest", "m", 100, 1), "-74 -")
        check(" bad=1 " in store.ask("stats"))
        equal(store.ask("exists", key(1)), "0 0")
        equal(store.ask("put", key(1), 100, 1), "0", "stored anew")
        equal(store.ask("flush"), "0")
        equal(store.ask("get", key(1), 100, 1), "0 same")
    with S3() as s3, Store(s3.uri()) as store:
        s3.objects[f"p/c/{key(1)[:2]}/{key(1)}"] = Item(b"not ours", {}, "x", s3.now())
        equal(store.ask("get", key(1), 8, 1), "-74 -", "nothing says what it should be")
        equal(store.ask("put", key(1), 8, 1), "0")
        equal(store.ask("flush"), "0")
        equal(store.ask("get", key(1), 8, 1), "0 same")


def test_conformance():
    with S3() as s3:
        done = subprocess.run([str(BUILD / "tests" / "store-driver"), "--conformance", s3.uri()], env=environment(),
                              capture_output=True, text=True, timeout=200)
        check(done.returncode == 0 and "ok " in done.stdout, done.stdout + done.stderr)


if __name__ == "__main__":
    run(globals())
