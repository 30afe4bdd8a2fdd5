# SPDX-License-Identifier: Apache-2.0
"""The s3 plugin against a strict double that checks every signature (s3_double.py)."""
import contextlib
import pathlib
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time

from kvtest import *
from s3_double import *


def key(n, size=16):
    return f"{n * 2654435761 % 2**32:08x}".ljust(2 * size, "0")


def chunk_path(n):
    return f"p/c/{key(n)[:2]}/{key(n)}"


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
            equal([k for k in s3.keys() if not k.startswith("p/r/name/")], sorted(["p/m/name"] + [f"p/c/{k[:2]}/{k}" for k in (key(1), key(2), key(3, 8), key(3, 32))]))
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


NAMES = ["a+b", "a%2Bb", "100%", "a&b", "a&amp;b", "<a>", "é+ü", "日本", "a/b+c", "~", '"quoted"', "a=b?c#d", "*"]


def test_listed_keys_are_decoded_exactly():
    for encoding in ("plus", "percent", "none", "numbers"):
        for prefix in ("p", "pre fix+%2B%/<&é>"):
            with S3(encoding=encoding, page=3) as s3, Store(s3.uri(prefix)) as store:
                for i, name in enumerate(NAMES):
                    equal(store.ask("put", key(i), 10, i), "0")
                    equal(store.ask("publish", name, 10 + i, i), "0", name)
                s3.objects[f"{prefix}/m/a+b c"] = Item(b"somebody's", {}, "", 0)  # not a name as we write them
                listed = store.ask("list").split()
                equal(sorted(listed[:-1]), sorted(f"{n}:{10 + i}" for i, n in enumerate(NAMES)), f"{encoding} {prefix}")
                equal(listed[-1], "0")
                equal(sorted(store.ask("chunks").split()[:-1]), sorted(key(i) for i in range(len(NAMES))))


def test_listings_that_are_not_whole():
    with S3(page=4) as s3, Store(s3.uri()) as store:
        for n in range(10):
            equal(store.ask("publish", f"m{n}", 10, n), "0")
        for fault in ("no token", "no truth"):
            s3.listing_fault = fault
            equal(store.ask("list").split()[-1], "-71", fault)
        s3.listing_fault = "token at the end"
        before = len(s3.requests())
        equal(len(store.ask("list").split()), 11, "IsTruncated says when it ends")
        equal(len(s3.requests()) - before, 3)
        s3.listing_fault = "long"
        equal(store.ask("list").split()[-1], "-27")
        s3.listing_fault, before = "circle", len(s3.requests())
        equal(store.ask("list").split()[-1], "-71", "it would never end")
        check(len(s3.requests()) - before < 12, "it was soon noticed")


def test_batches_take_few_waits():
    many = range(300)
    with S3() as s3:
        with Store(s3.uri()) as store:
            words = [w for n in many for w in (key(n), 1000 + n, n)]
            equal(store.ask("putmany", *words), "0" + " 0" * 300)
            equal(store.ask("publish", "m", 1, 1), "0")
            equal(store.ask("putmany", *words), "0" + " 1" * 300, "all there, and known to be")
            equal(len(s3.requests("PUT /b/p/c/")), 300)
            check(len(s3.requests("HEAD ")) <= 615, "a look before and after each put; none for what was just stored (but for collisions)")
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


def test_a_chunk_twice_in_a_batch():
    """The second one is known, also when the first one's upload is over by then."""
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("putmany", key(1), 100, 1, key(2), 20 << 20, 2, key(1), 100, 1), "0 0 0 1")
        equal(store.ask("putmany", key(3), 20 << 20, 3, key(3), 20 << 20, 3), "0 0 1", "a large one")
        equal(len(s3.requests("PUT /b/p/c/")), 3, "uploads")


def test_a_put_sends_what_its_own_look_missed():
    """Another thread's older answer arrives between this put's look and its upload."""
    with S3() as s3, Store(s3.uri()) as store:
        for size in (100, 20 << 20):
            path = chunk_path(size)
            s3.objects[path] = Item(b"", {"x-amz-meta-kvasir": "1-0-0"}, "x", s3.now())
            (looked, answer), (sent, go_on) = s3.hold(f"HEAD /b/{path}"), s3.hold("PUT /b/p/c/")
            store.tell("background", "exists", key(size))
            check(looked.wait(20), "the other thread looked")
            del s3.objects[path]  # by another process
            store.tell("putmany", key(size + 1), 20 << 20, 1, key(size), size, 2)
            check(sent.wait(20), "the put has looked, and sends its first chunk")
            answer.set()
            equal(store.answer("exists"), "0 1", "true when it was asked")
            go_on.set()
            equal(store.answer("putmany"), "0 0 0")
            equal(store.ask("publish", "m", 10, 1), "0")
            check(path in s3.keys(), "stored before the manifest")


def test_an_answer_from_before_a_deletion_is_not_noted():
    with S3() as s3, Store(s3.uri()) as store:
        for n, words in enumerate((("exists",), ("touch",))):
            path = chunk_path(n)
            s3.objects[path] = Item(b"", {"x-amz-meta-kvasir": "1-0-0"}, "x", s3.now())
            looked, answer = s3.hold(f"HEAD /b/{path}")
            store.tell("background", *words, key(n))
            check(looked.wait(20), "the other thread looked")
            equal(store.ask("delete", key(n)), "0")
            answer.set()
            check(store.answer(words[0]) in ("0 1", "1"), "true when it was asked")
            equal(store.ask("put", key(n), 100, n), "0", "sent")
            equal(store.ask("publish", "m", 10, 1), "0")
            check(path in s3.keys(), "stored before the manifest")


def test_an_upload_from_before_a_deletion_is_not_noted():
    with S3() as s3, Store(s3.uri()) as store:
        path = chunk_path(1)
        (deleting, delete), (sent, answer) = s3.hold("DELETE /b/p/c/", "before"), s3.hold("PUT /b/p/c/")
        store.tell("background", "delete", key(1))
        check(deleting.wait(20), "the deletion is under way")
        equal(store.ask("put", key(1), 100, 1), "0")
        check(sent.wait(20), "stored, which the plugin does not know yet")
        threading.Timer(0.5, answer.set).start()
        delete.set()
        equal(store.answer("delete"), "0")
        check(path not in s3.keys(), "deleted after the upload")
        check(store.ask("put", key(1), 100, 1) in ("0", "1"), "sent again: the first put's own look has missed it, too")
        equal(store.ask("publish", "m", 10, 1), "0")
        check(path in s3.keys(), "stored before the manifest")
    with S3() as s3, Store(s3.uri()) as store:
        sent, answer = s3.hold("PUT /b/p/c/")
        store.tell("background", "put", key(1), 20 << 20, 1)
        check(sent.wait(20), "a large one, which its own thread sends")
        equal(store.ask("delete", key(1)), "0")
        answer.set()
        equal(store.answer("put"), "0", "its own look found nothing, so that it sent the chunk again")
        equal(store.ask("put", key(1), 20 << 20, 1), "1")
        check(path in s3.keys(), "stored")


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


def test_stores_below_each_other():
    """A store whose prefix looks like the notes of another store's manifest."""
    with S3() as s3, Store(s3.uri(prefix="")) as above, Store(s3.uri(prefix="r/x")) as below:
        for store in above, below:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "x", 10, 1), "0")
        theirs = [k for k in s3.keys("r/x/") if k.count("/") > 2]
        equal(len(theirs), 3)
        equal(above.ask("refs", "x").split(), [key(1), "0"])
        equal(above.ask("unpublish", "x"), "0")
        equal(s3.keys("r/x/"), theirs)
        equal(below.ask("get", key(1), 10, 1), "0 same")
        equal(below.ask("manifest", "x", 10, 1), "0 same")


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


def test_a_sweep_spares_a_put_that_failed():
    """The handle's next publication may need it, and must not succeed without it."""
    with S3() as s3, Store(s3.uri(timeout=1)) as store:
        s3.fault("PUT /b/p/c/", "503", 1000)
        equal(store.ask("put", key(1), 10, 1), "0")
        check(int(store.ask("flush")) < 0, "stored")
        s3.faults.clear()
        with Store(s3.uri()) as other:
            equal(other.ask("put", key(1), 10, 1), "0")
            equal(other.ask("flush"), "0")
        s3.age(100000)
        equal(store.ask("sweep", 86400), "0 kept=1 deleted=0 errors=0")
        equal(store.ask("publish", "m", 10, 1), "0")
        equal(there(s3), [1], "the chunk")


def test_sweep_goes_by_the_servers_clock():
    day = 86400
    for skew in (-5 * day, 5 * day):  # seen from here: all long unused; all from the future
        with S3(skew=skew, strict_clock=False) as s3, Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("flush"), "0")
            s3.age(2 * day)
            for n in (2, 3):
                equal(store.ask("put", key(n), 10, n), "0")
            equal(store.ask("flush"), "0")
            equal(store.ask("sweep", day), "0 kept=2 deleted=1 errors=0", f"skew {skew}")
            equal(store.ask("exists", *map(key, (1, 2, 3))), "0 0 1 1")
            equal(store.ask("touch", key(2)), "1")
            equal(len(s3.requests("PUT /b/p/c/")), 3, f"skew {skew}: young chunks are not copied")
            s3.age(day / 2)
            equal(store.ask("touch", key(2)), "1")
            equal(len(s3.requests("PUT /b/p/c/")), 4, f"skew {skew}: old chunks are")
            equal(store.ask("sweep", day // 4), "0 kept=1 deleted=1 errors=0")
            gc = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "gc", s3.uri(), "--dry-run", "--grace", "1h", "--json"],
                                env=environment(), capture_output=True, text=True, timeout=60)
            equal(gc.returncode, 0, gc.stderr)
            check('"deleted_chunks":0' in gc.stdout.replace(" ", ""), gc.stdout)


def test_sweep_begins_at_one_moment():
    with S3(page=5, strict_clock=False) as s3, Store(s3.uri()) as store:
        for n in range(30):
            equal(store.ask("put", key(n), 10, n), "0")
        equal(store.ask("flush"), "0")
        s3.tick_from_now(7200)  # the last pages are listed two days after the first
        equal(store.ask("sweep", 86400), "0 kept=30 deleted=0 errors=0")


def test_a_server_that_hides_its_clock():
    with S3() as s3, Store(s3.uri()) as store:
        s3.dated = False
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("flush"), "0")
        s3.age(864000)
        equal(store.ask("sweep", 86400), "-95 kept=0 deleted=0 errors=0", "nobody knows what is old")
        equal(store.ask("sweep", 0), "0 kept=0 deleted=1 errors=0", "everything is")


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


def kept_again(s3, size, n=1):
    with Store(s3.uri(timeout=60)) as store:
        equal(store.ask("get", key(n), size, n), "0 same", f"{size}")
        equal(store.ask("manifest", "m", 10, 1), "0 same")


def test_412_without_an_object():
    """A delete marker is the newest version: the server says 412 to If-None-Match and 404 to HEAD."""
    for size in (100, 20 << 20, 70 << 20):  # buffered, sent at once, sent in parts
        with S3(conditional="marked") as s3:
            with Store(s3.uri(timeout=60)) as store:
                for _ in range(2):
                    equal(store.ask("put", key(1), size, 1), "0")
                    equal(store.ask("publish", "m", 10, 1), "0")
                    equal(store.ask("delete", key(1)), "0")
                    equal(store.ask("unpublish", "m"), "0")
                equal(store.ask("put", key(1), size, 1), "0")
                equal(store.ask("publish", "m", 10, 1), "0")
                equal(store.log(), "")
            kept_again(s3, size)


def test_412_beside_a_damaged_object():
    """It came between the put's look and its upload, and isn't whole."""
    for size in (100, 20 << 20):
        with S3() as s3:
            with Store(s3.uri()) as store:
                sent, go_on = s3.hold("PUT /b/p/c/", "before")
                store.tell("background", "put", key(1), size, 1)
                if size == 100:
                    equal(store.answer("put"), "0")
                check(sent.wait(20), "the put has looked")
                s3.objects[chunk_path(1)] = Item(b"short", {"x-amz-meta-kvasir": f"1-{size}-0"}, "x", s3.now())
                go_on.set()
                if size != 100:
                    equal(store.answer("put"), "0")
                equal(store.ask("publish", "m", 10, 1), "0")
            kept_again(s3, size)


def test_412_beside_another_writers_object():
    with S3() as s3, Store(s3.uri()) as one, Store(s3.uri()) as other:
        sent, go_on = s3.hold("PUT /b/p/c/", "before")
        equal(one.ask("put", key(1), 100, 1), "0")
        check(sent.wait(20), "it has looked")
        equal(other.ask("put", key(1), 100, 1), "0")
        equal(other.ask("publish", "m", 10, 1), "0")
        go_on.set()
        equal(one.ask("publish", "m", 10, 1), "0")
        equal(len(s3.requests("PUT /b/p/c/")), 2, "not sent a second time")


def test_412_that_never_ends():
    with S3() as s3, Store(s3.uri()) as store:
        for size in (100, 20 << 20):
            s3.fault("PUT /b/p/c/", "412", 100)
            put = int(store.ask("put", key(size), size, 1))
            check(put < 0 or int(store.ask("publish", "m", 10, 1)) < 0, "published without a chunk")
            check(len(s3.faults) > 90, "soon given up")
            s3.faults.clear()
            equal(store.ask("put", key(size), size, 1), "1" if put == 0 else "0")
            equal(store.ask("publish", "m", 10, 1), "0")
        s3.fault("PUT /b/p/m/", "412", 100)
        equal(store.ask("publish", "n", 10, 1), "-5", "a manifest has no condition")
        s3.faults.clear()


def test_what_the_server_drops_is_not_published():
    for start in ("PUT /b/p/c/", "PUT /b/p/r/", "PUT /b/p/m/"):
        for size in (100, 20 << 20):
            with S3() as s3:
                with Store(s3.uri(timeout=60)) as store:
                    s3.fault(start, "dropped", 100)
                    put = int(store.ask("put", key(1), size, 1))
                    equal(put, -5 if size > 100 and start.endswith("c/") else 0)
                    if put == 0:
                        equal(store.ask("publish", "m", 10, 1), "-5", start)
                        wait_until(lambda: "doesn't have it" in store.log(), 20, "a line")
                    equal(s3.keys("p/m/"), [])
                    s3.faults.clear()
                    check(store.ask("put", key(1), size, 1) in ("0", "1"))
                    equal(store.ask("publish", "m", 10, 1), "0", "the server is well again")
                kept_again(s3, size)


def test_a_dropped_replacement_of_a_manifest():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("publish", "m", 10, 1), "0")
        s3.age(100, "p/m/")
        s3.fault("PUT /b/p/m/", "dropped", 2)
        equal(store.ask("publish", "m", 10, 2), "-5", "the old one is still there")
        equal(store.ask("publish", "m", 10, 2), "0")
        equal(store.ask("manifest", "m", 10, 2), "0 same")


def test_a_server_that_shows_new_objects_late():
    with S3() as s3, Store(s3.uri()) as store:
        s3.fault("PUT /b/p/c/", "late:2")
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        equal(len(s3.requests("PUT /b/p/c/")), 1)
        equal(store.log(), "")


def test_servers_without_conditions():
    for kind in (False, "refused"):
        with S3(conditional=kind) as s3:
            for wanted in ("0", "1"):
                with Store(s3.uri()) as store:
                    equal(store.ask("put", key(1), 10, 1), wanted)
                    equal(store.ask("put", key(2), 70 << 20, 2), wanted)
                    equal(store.ask("publish", "m", 1, 1), "0")
                    equal(store.ask("get", key(1), 10, 1), "0 same")
            with Store(s3.uri()) as store:
                before = len(s3.requests("PUT /b/p/c/"))
                for n in range(3, 8):
                    equal(store.ask("put", key(n), 10, n), "0")
                    equal(store.ask("flush"), "0")
                equal(len(s3.requests("PUT /b/p/c/")) - before, 5 + bool(kind), "refused once, then left out")


def test_conditional_deletion():
    """A chunk goes when it still is what the caller saw, as the server compares it at the moment of the deletion."""
    for kind in (True, "refused"):
        with S3(conditional=kind) as s3, Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "m", 1, 1), "0")
            equal(store.ask("deleteif", key(1), 10, 2), "0", "other bytes")
            equal(store.ask("deleteif", key(2), 10, 2), "0", "no such chunk")
            if kind == "refused":
                equal(store.ask("deleteif", key(1), 10, 1), "-95")
                continue
            path = s3.keys("p/c/")[0]
            s3.before_delete.append(lambda: s3.objects.update({path: s3.objects[path]._replace(etag='"another"')}))
            equal(store.ask("deleteif", key(1), 10, 1), "0", "replaced meanwhile")
            equal(store.ask("get", key(1), 10, 1), "0 same")
            equal(store.ask("deleteif", key(1), 10, 1), "1")
            equal(store.ask("get", key(1), 10, 1), "-2 -")
            equal(store.ask("put", key(1), 10, 1), "0", "it isn't taken for present")
            equal(store.ask("publish", "m", 1, 1), "0")
            s3.before_delete.append(lambda: s3.objects.pop(path))
            equal(store.ask("deleteif", key(1), 10, 1), "0", "another writer deleted it meanwhile")
            equal(store.ask("put", key(1), 10, 1), "0", "it isn't taken for present")
            equal(store.ask("publish", "m", 1, 1), "0")
            s3.objects.pop(path)
            equal(store.ask("deleteif", key(1), 10, 1), "0", "another writer deleted it before")
            equal(store.ask("put", key(1), 10, 1), "0", "it isn't taken for present")


def test_two_writers():
    with S3() as s3, Store(s3.uri()) as one, Store(s3.uri()) as two:
        equal(one.ask("exists", key(1)), "0 0")
        equal(two.ask("put", key(1), 10, 1), "0")
        equal(two.ask("publish", "m", 1, 1), "0")
        equal(one.ask("put", key(1), 10, 1), "1")
        equal(one.ask("publish", "m", 1, 2), "0")
        equal(two.ask("manifest", "m", 1, 2), "0 same")


def test_tokens_and_regions():
    with S3(token="a+b/c==", region="eu-x-1") as s3:
        with Store(s3.uri(region="eu-x-1"), AWS_SESSION_TOKEN="a+b/c==") as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("flush"), "0")
        with Store(s3.uri(), AWS_REGION="eu-x-1", AWS_SESSION_TOKEN="a+b/c==") as store:
            equal(store.ask("get", key(1), 10, 1), "0 same")
        with Store(s3.uri(region="eu-x-1"), expect=1) as store:
            store.close()
            check("InvalidToken" in store.log(), store.log())


def test_another_region_is_named():
    for how in ("400 body", "400 head", "301 head", "301 body"):
        with S3() as s3:
            s3.fault("GET /b/?", f"elsewhere:{how}")
            with Store(s3.uri(), expect=1) as store:
                store.close()
                check("another region" in store.log() and "region_of_bucket=eu-west-1" in store.log() and "region=us-east-1" in store.log(),
                      f"{how}: {store.log()}")
    with S3() as s3:  # nothing is told
        s3.fault("GET /b/?", "301")
        with Store(s3.uri(), expect=1) as store:
            store.close()
            check("redirected" in store.log() and "region_of" not in store.log(), store.log())


def test_keys_that_expire():
    with S3() as s3:
        s3.fault("GET /b/?", "expired")
        with Store(s3.uri(), expect=1) as store:
            equal(store.opened, -13)
            store.close()
            check("the keys have expired" in store.log(), store.log())
        with Store(s3.uri()) as store:
            s3.fault("GET /b/p/c/", "expired")
            equal(store.ask("get", key(1), 10, 1), "-13 -")
            s3.fault("PUT /b/p/c/", "expired", 2)
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "m", 10, 1), "-13")
            wait_until(lambda: "the keys have expired" in store.log(), 20, "a line")


def test_virtual_hosts():
    with S3() as s3, Store(s3.uri(host="localhost", style="virtual")) as store:
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("publish", "a+b", 10, 1), "0")
        s3.age(864000)
        equal(store.ask("touch", key(1)), "1", "copied: the source has the bucket, the path hasn't")
        equal(store.ask("get", key(1), 10, 1), "0 same")
        equal(store.ask("put", key(2), 70 << 20, 2), "0", "in parts")
        equal(store.ask("list").split(), ["a+b:10", "0"])
        equal(store.ask("refs", "a+b").split(), [key(1), "0"])
        check(s3.requests("PUT /p/c/") and not s3.requests("PUT /b/"), "the bucket is in the host's name")
        check(all(k.startswith("p/") for k in s3.keys()), s3.keys())


def openssl(*words):
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=60)
    check(done.returncode == 0, done.stderr)


class Authority:
    """A CA of the test's own, and a certificate of it for @names."""

    def __init__(self, folder, name, names):
        self.ca, key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
        request, cert, cert_key, ext = (folder / f"{name}.{kind}" for kind in ("csr", "pem", "key", "ext"))
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *curve, "-keyout", key, "-out", self.ca, "-subj", f"/CN={name} CA", "-days", 2)
        openssl("req", *curve, "-keyout", cert_key, "-out", request, "-subj", f"/CN={name}")
        ext.write_text("subjectAltName=" + ",".join(f"DNS:{n}" for n in names))
        openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", key, "-CAcreateserial", "-extfile", ext,
                "-out", cert, "-days", 2)
        self.tls = (cert, cert_key)


def test_https():
    if not shutil.which("openssl"):
        skip("no openssl to make certificates with")
    with tempfile.TemporaryDirectory() as folder:
        ours = Authority(pathlib.Path(folder), "ours", ["localhost", "b.localhost"])
        other = Authority(pathlib.Path(folder), "other", ["localhost"])
        with S3(tls=ours.tls) as s3:
            for style, env, option in (("path", {}, ours.ca), ("virtual", {}, ours.ca),
                                       ("path", {"AWS_CA_BUNDLE": str(ours.ca)}, None),
                                       ("path", {"AWS_CA_BUNDLE": str(other.ca)}, ours.ca)):
                options = {"cacert": option} if option else {}
                with Store(s3.uri(host="localhost", style=style, **options), **env) as store:
                    equal(store.ask("put", key(1), 3 << 20, 1), "0" if style + str(env) == "path{}" else "1", style)
                    equal(store.ask("publish", "m", 10, 1), "0")
                    equal(store.ask("get", key(1), 3 << 20, 1), "0 same")
                    equal(store.ask("delete", key(2)), "0")
            before = len(s3.requests())
            for host, options, said in (("localhost", {}, "certificate"), ("localhost", {"cacert": other.ca}, "certificate"),
                                        ("127.0.0.1", {"cacert": ours.ca}, "certificate"),
                                        ("localhost", {"cacert": folder + "/none"}, "none")):
                began = time.monotonic()
                with Store(s3.uri(host=host, **options), expect=1) as store:
                    store.close()
                    check(said in store.log(), store.log())
                check(time.monotonic() - began < patience(15), "it is not tried again")
            equal(len(s3.requests()), before, "nothing was said to servers that aren't trusted")


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


def test_time_is_up_after_refusals():
    """The port is closed at first; later it takes connections and never answers."""
    for closed_s in (0.3, 1, 2, 4):
        with S3() as s3, socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.settimeout(0)
            uri = s3.uri(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=2)
            timer = threading.Timer(closed_s, silent.listen)
            timer.start()
            with Store(uri, expect=1) as store:
                store.close()
                timer.join()
                if "tries=" in store.log() and taken(silent) < int(re.search(r"tries=(\d+)", store.log()).group(1)):
                    check("connect" in store.log(), store.log())
                    return
    check(False, "the port was never asked while it was closed")


def taken(server):
    """How many connections wait at a socket."""
    n = 0
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()
            n += 1
    return n


def test_the_clock_is_off():
    for skew in (4000, -4000):
        with S3(skew=skew) as s3, Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "m", 1, 1), "0")
            equal(store.ask("get", key(1), 10, 1), "0 same")


def test_the_clock_is_set_while_at_work():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("flush"), "0")
        for skew in (4000, -4000, 0):
            s3.skew = skew
            equal(store.ask("touch", key(1)), "1", "a HEAD's refusal has no code, but a date")
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
        equal(store.ask("exists", key(1)), "0 2")
        equal(store.ask("put", key(1), 100, 1), "0", "stored anew")
        equal(store.ask("flush"), "0")
        equal(store.ask("get", key(1), 100, 1), "0 same")
    with S3() as s3, Store(s3.uri()) as store:
        s3.objects[f"p/c/{key(1)[:2]}/{key(1)}"] = Item(b"not ours", {}, "x", s3.now())
        equal(store.ask("exists", key(1), key(2)), "0 2 0", "neither there nor missing")
        equal(store.ask("get", key(1), 8, 1), "-74 -", "nothing says what it should be")
        equal(store.ask("put", key(1), 8, 1), "0")
        equal(store.ask("flush"), "0")
        equal(store.ask("get", key(1), 8, 1), "0 same")


def test_a_verified_save_repairs_damage():
    """Damage that keeps the length, which no HEAD shows: a save that verifies stores the chunk anew."""
    with S3() as s3, tempfile.TemporaryDirectory() as folder:
        source, out = pathlib.Path(folder, "source"), pathlib.Path(folder, "out")
        source.write_bytes(random.Random(5).randbytes(300_000))
        equal(kvasir(s3, "save", "o", source, "--chunk", "64KiB"), 0)
        path = s3.keys("p/c/")[1]
        body = s3.objects[path].body
        s3.objects[path] = s3.objects[path]._replace(body=body[:100] + bytes([body[100] ^ 1]) + body[101:])
        equal(kvasir(s3, "save", "o", source, "--chunk", "64KiB", "--verify"), 0)
        equal(s3.objects[path].body, body, "noticed, and stored anew")
        equal(kvasir(s3, "restore", "o", out), 0)
        equal(out.read_bytes(), source.read_bytes())
        s3.objects[path] = s3.objects[path]._replace(body=body[:100] + bytes([body[100] ^ 1]) + body[101:])
        equal(kvasir(s3, "save", "o", "-", "--chunk", "64KiB", "--verify", stdin=source.read_bytes()), 0)
        equal(s3.objects[path].body, body, "from a pipe, too")


def kvasir(s3, command, *args, stdin=b""):
    done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", command, s3.uri(), *map(str, args)],
                          env=environment(), input=stdin, capture_output=True, timeout=60)
    return done.returncode


def gc(s3, *options):
    done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "gc", s3.uri(), *options], env=environment(),
                          capture_output=True, text=True, timeout=60)
    equal(done.returncode, 0, done.stdout + done.stderr)
    return done.stderr


def there(s3):
    """Which of the chunks key(0), key(1), ... there are."""
    return [n for n in range(100) if f"p/c/{key(n)[:2]}/{key(n)}" in s3.keys("p/c/")]


def test_gc_keeps_what_opaque_manifests_may_need():
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("refs", "m"), "-2", "nothing noted")
            for n in (0, 1):
                equal(store.ask("put", key(n), 10, n), "0")
            equal(store.ask("publish", "m", 10, 1), "0")
            equal(store.ask("put", key(2), 10, 2), "0")
            equal(store.ask("publish", "m", 10, 2), "0", "again, by the same handle: a union")
            equal(store.ask("put", key(3), 10, 3), "0")
            equal(store.ask("flush"), "0")
            equal(store.ask("publish", "other", 10, 2), "0")
            equal(store.ask("put", key(4), 10, 4), "0", "of no manifest")
        with Store(s3.uri()) as store:
            equal(store.ask("put", key(0), 10, 0), "1")
            equal(store.ask("put", key(5, 32), 10, 5), "0", "of another length")
            equal(store.ask("publish", "m", 10, 3), "0", "by another handle: a union")
            equal(sorted(set(store.ask("refs", "m").split()[:-1])), sorted([key(0), key(1), key(2), key(5, 32)]))
            equal(store.ask("refs", "other").split(), [key(3), "0"], "flushed before its manifest")
        s3.age(864000)
        gc(s3)
        equal(there(s3), [0, 1, 2, 3])
        equal(len(s3.keys("p/c/")), 5)
        with Store(s3.uri()) as store:
            equal(store.ask("unpublish", "m"), "0")
            equal(store.ask("refs", "m"), "-2", "they go with it")
        gc(s3)
        equal(there(s3), [3])
        gc(s3, "--opaque-too")
        equal(there(s3), [])


def test_gc_deletes_nothing_when_it_cannot_know():
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "m", 10, 1), "0")
            equal(store.ask("put", key(2), 10, 2), "0")
        refs = s3.keys("p/r/")
        check(refs, "noted")
        kept = {k: s3.objects.pop(k) for k in refs}
        s3.age(864000)
        check("nothing is deleted" in gc(s3))
        equal(there(s3), [1, 2], "without its notes a manifest may need any chunk")
        s3.objects.update({k: item._replace(body=b"x" + item.body[1:]) for k, item in kept.items()})
        done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "gc", s3.uri()], env=environment(), capture_output=True,
                              text=True, timeout=60)
        check(done.returncode != 0, "damaged notes are no notes")
        equal(there(s3), [1, 2])


def test_nothing_put_before_the_manifest():
    """An empty manifest needs no chunk. What another one needs isn't known: it may be the copy of one with chunks."""
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("publish", "empty", 0, 0), "0")
            equal(store.ask("publish", "empty", 0, 0), "0", "again")
            equal(store.ask("refs", "empty"), "0", "noted: none")
            equal(len(s3.keys("p/r/")), 1)
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("publish", "foreign", 10, 1), "0")
        with Store(s3.uri()) as store:
            equal(store.ask("publish", "copy", 10, 1), "0")
            equal(store.ask("refs", "copy"), "-2")
            equal(store.ask("publish", "empty", 10, 1), "0", "over an empty one")
            equal(store.ask("refs", "empty"), "-2")
            equal(store.ask("unpublish", "copy"), "0")
            equal(store.ask("unpublish", "foreign"), "0")
        s3.age(864000)
        check("nothing is deleted" in gc(s3))
        equal(there(s3), [1])
        with Store(s3.uri()) as store:
            equal(store.ask("unpublish", "empty"), "0")
        gc(s3)
        equal(there(s3), [])


def test_a_snapshot_takes_nothing_from_an_opaque_manifest():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("publish", "first", 10, 1), "0")
        equal(store.ask("put", key(2), 10, 2), "0")
        equal(store.ask("snapshot", "ours"), "0")
        equal(store.ask("put", key(3), 10, 3), "0")
        equal(store.ask("publish", "theirs", 10, 1), "0")
        equal(store.ask("refs", "ours"), "-2")
        equal(sorted(store.ask("refs", "theirs").split()[:-1]), sorted([key(2), key(3)]), "and nothing of the first")


def test_a_snapshot_of_a_later_version_is_opaque():
    """gc of this version can't read which chunks it needs: what was put for it stays."""
    with S3() as s3:
        with Store(s3.uri()) as store:
            equal(store.ask("put", key(1), 10, 1), "0")
            equal(store.ask("snapshot", "later", 2), "0")
            equal(store.ask("put", key(2), 10, 2), "0")
            equal(store.ask("snapshot", "ours"), "0")
            equal(store.ask("refs", "later").split()[:-1], [key(1)])
            equal(store.ask("refs", "ours"), "-2")
            equal(store.ask("unpublish", "ours"), "0")
        s3.age(864000)
        gc(s3)
        equal(there(s3), [1], "kept for the later version")


def test_threads_that_share_a_handle():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("thread", "publish", "other", 10, 1), "0", "between another's put and its manifest")
        equal(store.ask("put", key(2), 10, 2), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        check({key(1), key(2)} <= set(store.ask("refs", "m").split()), "taken by the other, needed here")


def test_threads_that_end():
    """A thread may have the identity that one before it had, and is another one all the same."""
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("thread", "put", key(1), 10, 1), "0")
        for name in "first", "second":
            equal(store.ask("thread", "publish", name, 10, 1), "0")
        check(key(1) in store.ask("refs", "second").split(), "taken by the first")


def test_snapshots_need_no_notes():
    with S3() as s3:
        for n in range(2):
            saved = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "save", s3.uri(), "snap", "-"], env=environment(),
                                   input=bytes(range(256)) * 8000, capture_output=True, timeout=60)
            equal(saved.returncode, 0, saved.stderr)
        equal(s3.keys("p/r/"), [])
        s3.age(864000)
        gc(s3)
        check(len(s3.keys("p/c/")) > 0, "a manifest of ours names its chunks")


def test_notes_do_not_grow_with_publications():
    """Sentinels put again and again, by one handle: an object of notes for each, however many names there are."""
    names, rounds = [f"sentinel{i}" for i in range(24)], 6
    with S3() as s3, Store(s3.uri()) as store:
        for turn in range(rounds):
            for i, name in enumerate(names):
                equal(store.ask("put", key(i), 10, i), "1" if turn else "0")
                equal(store.ask("publish", name, 0, 0), "0")
        equal(len(s3.keys("p/r/")), len(names))
        equal(store.ask("refs", names[5]).split(), [key(5), "0"])


def test_notes_of_two_threads_do_not_grow():
    """Two that put one sentinel at the same moments, again and again, need an object each."""
    with S3() as s3, Store(s3.uri()) as store:
        for n in range(1, 6):
            equal(store.ask("publishbytwo", "m", 100, key(n)), "0 0")
        check(len(s3.keys("p/r/m/")) <= 2, f"{len(s3.keys('p/r/m/'))} objects of notes")
        check(key(1) in store.ask("refs", "m"))
        equal(store.ask("unpublish", "m"), "0")
        equal(s3.keys("p/r/"), [])
        equal(store.ask("put", key(9), 10, 1), "0")
        equal(store.ask("publish", "m", 0, 0), "0")
        check(key(9) in store.ask("refs", "m"))


def test_notes_of_many_chunks_do_not_grow():
    """More than half of what an object of notes holds, the same in each publication."""
    keys = [f"{n:04x}".rjust(240, "a") for n in range(4500)]
    with S3() as s3, Store(s3.uri()) as store:
        s3.objects.update({f"p/c/aa/{k}": Item(b"", {"x-amz-meta-kvasir": "1-0-0"}, "x", s3.now()) for k in keys})
        for _ in range(4):
            for at in range(0, len(keys), 250):
                check(" 0" not in store.ask("putmany", *(w for k in keys[at:at + 250] for w in (k, 0, 0)))[1:], "hits")
            equal(store.ask("publish", "m", 0, 0), "0")
        equal(len(s3.keys("p/r/")), 1)
        check(sorted(store.ask("refs", "m").split()[:-1]) == sorted(keys), "other keys")


def test_conformance():
    with S3() as s3:
        done = subprocess.run([str(BUILD / "tests" / "store-driver"), "--conformance", s3.uri()], env=environment(),
                              capture_output=True, text=True, timeout=500)
        check(done.returncode == 0 and "ok ext: list_refs" in done.stdout, done.stdout + done.stderr)
        equal(done.stdout.count("ok kill: "), 2, done.stdout + done.stderr)


if __name__ == "__main__":
    run(globals())
