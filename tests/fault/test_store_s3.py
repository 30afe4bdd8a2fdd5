# SPDX-License-Identifier: Apache-2.0
"""The s3 plugin while its server fails: errors, resets, cut and wrong bodies, stalls, death."""
import email.utils
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from s3_double import *


def key(n):
    return f"{n:032x}"


def path(n):
    return f"/b/p/c/{key(n)[:2]}/{key(n)}"


PASSING = ("500", "503", "429", "409", "reset")


def test_what_passes_is_tried_again():
    with S3() as s3, Store(s3.uri()) as store:
        for n, kind in enumerate(PASSING):
            s3.fault(f"HEAD {path(n)}", kind)
            s3.fault(f"PUT {path(n)}", kind, times=2)
            s3.fault(f"PUT /b/p/m/m{n}", kind)
            equal(store.ask("put", key(n), 1000, n), "0", kind)
            equal(store.ask("publish", f"m{n}", 100, n), "0", kind)
            s3.fault(f"GET {path(n)}", kind, times=2)
            s3.fault(f"GET /b/p/m/m{n}", kind)
            equal(store.ask("get", key(n), 1000, n), "0 same", kind)
            equal(store.ask("manifest", f"m{n}", 100, n), "0 same", kind)
            s3.fault("GET /b/?", kind)
            equal(store.ask("list").split()[-1], "0", kind)
            s3.fault(f"DELETE {path(n)}", kind)
            equal(store.ask("delete", key(n)), "0", kind)
        equal(s3.faults, [])
        check(" errors=0 " in store.ask("stats"))


def test_what_does_not_pass_is_told_at_once():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 10, 1), "0")
        equal(store.ask("flush"), "0")
        for kind, wanted in (("403", "-13 -"), ("301", "-5 -")):
            s3.fault(f"GET {path(1)}", kind)
            before = len(s3.requests())
            equal(store.ask("get", key(1), 10, 1), wanted, kind)
            equal(len(s3.requests()) - before, 1, kind)


def test_cut_and_wrong_bodies():
    with S3() as s3, Store(s3.uri()) as store:
        for size in (1, 1000, 3 << 20):
            equal(store.ask("put", key(size), size, 1), "0")
            equal(store.ask("publish", "m", size, 1), "0")
            for kind in ("cut", "cut-told", "wrong"):
                s3.fault(f"GET {path(size)}", kind)
                s3.fault("GET /b/p/m/m", kind)
                equal(store.ask("get", key(size), size, 1), "0 same", f"{kind} once")
                equal(store.ask("manifest", "m", size, 1), "0 same", f"{kind} once")
                s3.fault(f"GET {path(size)}", kind)
                equal(store.ask("prefetch", key(size)), "0")
                equal(store.ask("get", key(size), size, 1), "0 same", f"{kind} while prefetched")
            for kind in ("cut-told", "wrong"):
                s3.fault(f"GET {path(size)}", kind, times=2)
                equal(store.ask("get", key(size), size, 1), "-74 -", f"{kind} twice")


def test_a_lost_answer_is_no_lost_chunk():
    with S3() as s3, Store(s3.uri()) as store:
        s3.fault(f"PUT {path(1)}", "lost")
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 1, 1), "0", "the second try finds what the first one stored")
        equal(store.ask("get", key(1), 100, 1), "0 same")


def test_no_manifest_without_its_chunks():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("publish", "m", 10, 1), "0")
        s3.fault(f"PUT {path(1)}", "403", times=9)
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 2), "-13", "the chunk is refused")
        equal(store.ask("manifest", "m", 10, 1), "0 same", "the old one stays")
        s3.faults.clear()
        equal(store.ask("publish", "m", 10, 2), "0", "tried once more, and stored")
        equal(store.ask("get", key(1), 100, 1), "0 same")
        check(f"p/c/{key(1)[:2]}/{key(1)}" in s3.keys(), s3.keys())


def test_failed_puts_give_their_room_back():
    """Puts without room for their bytes try the failed ones again: once a batch, and with success when the server is well."""
    with S3() as s3, Store(s3.uri()) as store:
        s3.fault("PUT /b/p/c/", "403", times=10000)
        each = store.ask("putmany", *(w for n in range(280) for w in (key(n), 100, n))).split()
        equal(each, ["-13"] + ["0"] * 256 + ["-13"] * 24)
        equal(len(s3.requests("PUT /b/p/c/")), 512, "puts that the server refused")
        s3.faults.clear()
        equal(store.ask("put", key(999), 100, 999), "0", "of another object")
        equal(store.ask("publish", "other", 10, 1), "0")
        equal(len(s3.keys("p/c/")), 257)


def test_deleted_while_its_put_fails():
    with S3() as s3, Store(s3.uri()) as store:
        s3.fault(f"PUT {path(1)}", "403", times=9)
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 1), "-13", "the chunk is refused")
        equal(store.ask("put", key(2), 100, 2), "0")
        equal(store.ask("delete", key(1)), "0")
        s3.faults.clear()
        check(store.ask("get", key(1), 100, 1).startswith("-2"), "the deleted chunk can be read")
        equal(store.ask("publish", "m", 10, 2), "0")
        equal(sorted(name for name in s3.keys() if "/c/" in name), [f"p/c/{key(2)[:2]}/{key(2)}"], "chunks on the server")
        equal(store.ask("put", key(1), 100, 1), "0", "a put after the deletion")
        equal(store.ask("publish", "m", 10, 3), "0")
        equal(store.ask("get", key(1), 100, 1), "0 same")


def test_parts_that_fail():
    size = 65 << 20
    with S3() as s3, Store(s3.uri(timeout=60)) as store:
        for kind in ("500", "reset"):
            s3.fault(f"PUT {path(1)}?partNumber=2", kind)
            s3.fault(f"POST {path(1)}?uploadId", "error-200" if kind == "reset" else "500")
        s3.fault(f"POST {path(1)}?uploadId", "lost")
        s3.fault(f"POST {path(1)}?uploads", "503")
        ret = store.ask("put", key(1), size, 1)
        check(ret in ("0", "1"), ret)
        equal(store.ask("get", key(1), size, 1), "0 same")
        s3.fault(f"PUT {path(2)}?partNumber=3", "403")
        equal(store.ask("put", key(2), size, 2), "-13")
        check(s3.requests(f"DELETE {path(2)}?uploadId"), "aborted")
        equal([u for u in s3.uploads.values() if u[0] == path(2)[3:]], [])


def test_errors_in_200():
    """What answers 200 and isn't the result asked for did nothing: copies and completed uploads are asked for again."""
    with S3() as s3:
        for kind in FAILED_200:
            with Store(s3.uri(timeout=60)) as store:
                equal(store.ask("put", key(1), 100, 1) in ("0", "1"), True)
                equal(store.ask("flush"), "0")
                s3.age(100000)
                before = len(s3.requests(f"PUT {path(1)}"))
            with Store(s3.uri(timeout=60)) as store:
                s3.fault(f"PUT {path(1)}", f"failed-200:{kind}")
                equal(store.ask("touch", key(1)), "1", kind)
                equal(len(s3.requests(f"PUT {path(1)}")) - before, 2, f"copied again after {kind}")
        size = 65 << 20
        with Store(s3.uri(timeout=60)) as store:
            for kind in ("odd-declaration", "html"):
                s3.fault(f"POST {path(2)}?uploadId", f"failed-200:{kind}")
            check(store.ask("put", key(2), size, 2) in ("0", "1"), "put")
            equal(store.ask("publish", "m", 10, 3), "0")
            equal(store.ask("get", key(2), size, 2), "0 same", "the manifest's chunk")


def test_a_stall_ends():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("flush"), "0")
        s3.fault(f"GET {path(1)}", "stall")
        equal(store.ask("get", key(1), 100, 1), "0 same", "given up and tried again")


def test_a_drip_ends():
    with S3() as s3, Store(s3.uri(timeout=8)) as store:
        for n, size in ((1, 100), (2, 3 << 20)):
            equal(store.ask("put", key(n), size, n), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        for n, size, kind in ((1, 100, "drip:0.9"), (2, 3 << 20, "drip:0.05:8192"), (1, 100, "drip-head:0.02")):
            s3.fault(f"GET {path(n)}", kind, times=20)
            began = time.monotonic()
            equal(store.ask("get", key(n), size, n), "-110 -", kind)
            took = time.monotonic() - began
            check(took < patience(8), f"{kind}: {took} s of 8")
            s3.faults.clear()
        equal(store.ask("get", key(2), 3 << 20, 2), "0 same")


def test_slow_but_steady_is_no_failure():
    size = 12 << 20
    with S3() as s3, Store(s3.uri(timeout=6)) as store:  # 6 s, and one more for each MiB that came
        equal(store.ask("put", key(1), size, 1), "0")
        equal(store.ask("flush"), "0")
        s3.fault(f"GET {path(1)}", f"drip:0.07:{128 << 10}")
        began = time.monotonic()
        equal(store.ask("get", key(1), size, 1), "0 same")
        check(time.monotonic() - began > 6.5, "the test was no test")
        equal(len(s3.requests(f"GET {path(1)}")), 1)


def test_answers_have_limits():
    with S3() as s3, Store(s3.uri(timeout=8)) as store:
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("flush"), "0")
        for command, request, kind, wanted in ((("delete", key(1)), f"DELETE {path(1)}", "long:200", "-27"),
                                               (("list",), "GET /b/?", "long:200", "-27"),
                                               (("get", key(1), 100, 1), f"GET {path(1)}", "long:403", "-13 -"),
                                               (("publish", "m", 10, 1), "PUT /b/p/m/m", "long:200", "-27")):
            s3.fault(request, kind)
            before = len(s3.requests(request))
            equal(store.ask(*command), wanted, request)
            equal(len(s3.requests(request)) - before, 1, f"{request}: not asked again")
            check(s3.flooded < 64 << 20, f"{request}: {s3.flooded} bytes were taken")
        store.close()
        equal(store.log().count("exceeds the limit"), 1, store.log())


def test_pauses_grow_and_differ():
    seen = []
    for _ in range(2):
        with S3() as s3, Store(s3.uri(timeout=100)) as store:
            s3.fault(f"GET {path(1)}", "503", times=6)
            equal(store.ask("get", key(1), 1, 1), "-2 -")
            gaps = s3.gaps(f"GET {path(1)}")
            equal(len(gaps), 6)
            for n, gap in enumerate(gaps):  # between a quarter and all of 50 ms, 100 ms, 200 ms, ...
                check(0.05 * 2**n / 4 <= gap < 0.05 * 2**n + 10, gaps)
            seen.append([round(gap, 2) for gap in gaps[3:]])
    check(seen[0] != seen[1], f"no jitter: {seen}")


def test_retry_after_is_heeded():
    with S3() as s3, Store(s3.uri(timeout=100)) as store:
        s3.fault(f"GET {path(1)}", "503:2")
        equal(store.ask("get", key(1), 1, 1), "-2 -")
        check(2 <= s3.gaps(f"GET {path(1)}")[0] < patience(4), s3.gaps(f"GET {path(1)}"))
        s3.fault(f"GET {path(2)}", "429:" + email.utils.formatdate(s3.now() + 3, usegmt=True))
        equal(store.ask("get", key(2), 1, 1), "-2 -")
        check(1.9 <= s3.gaps(f"GET {path(2)}")[0] < patience(5), s3.gaps(f"GET {path(2)}"))
        s3.fault(f"GET {path(3)}", "503:1000")
        began = time.monotonic()
        equal(store.ask("get", key(3), 1, 1), "-5 -", "longer than we may wait: told at once")
        check(time.monotonic() - began < patience(2))
        s3.fault(f"GET {path(4)}", "503:nonsense")
        equal(store.ask("get", key(4), 1, 1), "-2 -")
        check(s3.gaps(f"GET {path(4)}")[0] < 10 * SLOW)


def test_notes_come_before_the_manifest():
    with S3() as s3, Store(s3.uri()) as store:
        equal(store.ask("publish", "m", 10, 1), "0")
        s3.fault("PUT /b/p/r/", "403")
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 2), "-13", "what it may need could not be noted")
        equal(store.ask("manifest", "m", 10, 1), "0 same", "the old one stays")
        equal(store.ask("publish", "m", 10, 2), "0")
        equal(store.ask("refs", "m").split(), [key(1), "0"])


def test_the_server_dies_and_comes_back():
    port = free_port()
    with S3(port=port) as s3:
        uri = s3.uri(timeout=40)
        objects = s3.objects
        store = Store(uri)
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
    with store:
        began = time.monotonic()
        check(store.ask("get", key(1), 100, 1) != "0 same", "kept-alive connections end too")
        check(store.ask("publish", "m", 10, 2) != "0")
        check(time.monotonic() - began < patience(100), "it took too long to say so")
        with S3(port=port) as s3:
            s3.objects = objects
            equal(store.ask("get", key(1), 100, 1), "0 same")
            equal(store.ask("put", key(2), 100, 2), "0")
            equal(store.ask("publish", "m", 10, 2), "0")
            equal(store.ask("manifest", "m", 10, 2), "0 same")


def test_refused_connections_are_told_soon():
    began = time.monotonic()
    with Store(f"s3://b/p?endpoint=http://127.0.0.1:{free_port()}&timeout=300", expect=1) as store:
        store.close()
        check("connect" in store.log(), store.log())
    check(time.monotonic() - began < patience(15), "open: it took too long to say so")
    with S3() as s3:  # one that was there is waited for, as servers are restarted
        store = Store(s3.uri(timeout=40))
        equal(store.ask("put", key(1), 100, 1), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
    with store:
        began = time.monotonic()
        equal(store.ask("get", key(1), 100, 1), "-111 -")
        check(time.monotonic() - began < patience(30), "it took too long to say so")


def test_a_listing_ends():
    with S3() as s3, Store(s3.uri(timeout=2)) as store:
        s3.listing_fault, began = "new tokens", time.monotonic()
        equal(store.ask("list").split()[-1], "-110")
        check(time.monotonic() - began < patience(20), "it took too long")


def test_closing_with_puts_under_way():
    with S3() as s3:
        with Store(s3.uri(timeout=4)) as store:
            for n in range(20):
                s3.fault(f"PUT {path(n)}", "503", times=3 if n % 2 else 1)
                equal(store.ask("put", key(n), 50000, n), "0")
            equal(store.ask("prefetch", *map(key, range(100, 150))), "0")


def test_a_forked_child_closes():
    """While an upload of the parent is under way, too; each call in the child is refused, and the parent's goes on."""
    if SANITIZED:
        skip("a sanitizer's allocator may be locked in the child")
    with S3() as s3, Store(s3.uri()) as store:
        held, go = s3.hold(f"PUT {path(1)}", "before")
        equal(store.ask("put", key(1), 100, 1), "0")
        check(held.wait(20), "the upload is under way")
        for words, refusal in ((("flush",), "-10"), (("put", key(2), 10, 2), "-10"), (("get", key(1), 100, 1), "-10 -"),
                               (("publish", "m", 10, 1), "-10"), (("manifest", "m", 10, 1), "-10 -"), (("unpublish", "m"), "-10"),
                               (("list",), "-10"), (("refs", "m"), "-10"), (("prefetch", key(3)), "-10"),
                               (("exists", key(3)), "-10 0"), (("touch", key(3)), "-10"), (("delete", key(3)), "-10"),
                               (("deleteif", key(3), 10, 3), "-10"), (("sweep", 0), "-10 kept=0 deleted=0 errors=0")):
            equal(store.ask("child", *words), refusal, words[0])
            equal(store.answer("child"), "child 0", words[0])
        go.set()
        equal(store.ask("publish", "m", 10, 1), "0")
        equal(store.ask("get", key(1), 100, 1), "0 same")


if __name__ == "__main__":
    run(globals())
