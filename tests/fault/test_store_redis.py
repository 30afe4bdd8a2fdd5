#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Redis plugin while servers die, freeze and fill up and the network breaks.

After every fault: no wrong bytes, no manifest without its chunks, and the next save succeeds.
"""
import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from redistest import *


def sample(n, size, seed):
    source = random.Random(seed)
    return {source.randbytes(8): source.randbytes(size) for _ in range(n)}


def expect_whole(uri, saves):
    """Each manifest that is there is one of those saved, and all of its chunks are as they were put."""
    with Store(uri) as store:
        for name in store.manifests():
            chunks = saves[store.manifest(name)]
            keys = list(chunks)
            equal(store.get_many(keys), list(chunks.values()), f"chunks of {name}")


def save_until_done(store, name, chunks, data):
    def attempt():
        try:
            save(store, name, chunks, data)
        except StoreError:
            return False
        return True

    wait_until(attempt, 30, "a save that succeeds")


def test_killed_in_mid_save():
    """SIGKILL at odd moments while two handles save; a restart from the AOF; the same handles go on."""
    source = random.Random(7)
    saves, done = {}, threading.Event()
    with Server("--appendonly", "yes", "--appendfsync", "always") as server:
        def saver(number):
            with Store(server.uri + "?timeout_ms=3000&buffer=256KiB") as store:
                turn = 0
                while not done.is_set():
                    turn += 1
                    data = b"%d %d" % (number, turn)
                    saves[data] = sample(20, 30_000, seed=number * 1000 + turn % 50)
                    try:
                        save(store, f"n{number}", saves[data], data)
                    except StoreError:
                        time.sleep(0.01)  # not to spin while the server is away
                save_until_done(store, f"n{number}", saves[data], data)
                equal(store.manifest(f"n{number}"), data)

        problems = []

        def guarded(number):
            try:
                saver(number)
            except Exception as problem:  # told by the main thread
                problems.append(problem)

        threads = [threading.Thread(target=guarded, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                time.sleep(source.uniform(0.05, 0.4))
                server.kill()
                server.start()
                expect_whole(server.uri, saves)  # the dict itself: saves go on meanwhile
        finally:
            done.set()
            for thread in threads:
                thread.join()
        equal(problems, [])
        expect_whole(server.uri, saves)


def test_restarted_empty():
    """The server comes back without its data within the call's time: the save still has all of it."""
    chunks = sample(50, 10_000, seed=1)
    with Server() as server, Store(server.uri + "?timeout_ms=60000") as store:
        save(store, "before", chunks)
        for key, value in chunks.items():
            store.put(key, value)
        server.kill()
        starter = threading.Thread(target=server.start)
        starter.start()
        store.publish("after", b"m")  # waits for the server
        starter.join()
        equal(store.manifests(), ["after"])
        equal(store.get_many(list(chunks)), list(chunks.values()))


def test_away():
    """No server: one clear line, errors at once, nothing lost from the save in progress."""
    with Server() as server, Store(server.uri + "?timeout_ms=2000") as store:
        save(store, "n", {b"old": b"1"})
        store.put(b"new", b"2")
        server.kill()
        with said() as text:
            fails(store.publish, "m", b"2")
            fails(store.get, b"old")
        check("can't be used" in text[0] and str(server.port) in text[0], text[0])
        started = time.monotonic()
        for _ in range(1000):
            fails(store.get, b"old")
        check(time.monotonic() - started < patience(100), "a dead server must not cost its timeout each time")
        server.start()
        wait_until(lambda: not publish_fails(store, "m", b"2"), 30, "the save to go through")
        with Store(server.uri + PATIENT) as other:
            equal((other.manifest("m"), other.get(b"new")), (b"2", b"2"))
        check("refuse" in refused(f"redis://127.0.0.1:{free_port()}/"), "what is wrong must be said")


PATIENT = "?timeout_ms=60000"


def patiently(function, *args):
    """What it returns once the server was fast enough for a handle with little time."""
    found = []

    def answered():
        try:
            found.append(function(*args))
        except StoreError as problem:
            equal(problem.code, 110, "errno")
        return found

    return wait_until(answered, 30, "an answer in time")[0]


def publish_fails(store, name, data):
    try:
        store.publish(name, data)
    except StoreError:
        return True
    return False


def test_frozen():
    with Server() as server, Store(server.uri + "?timeout_ms=3000") as store:
        save(store, "n", {b"k": b"v"})
        store.put(b"l", b"w" * 10_000_000)
        with server.frozen():
            started = time.monotonic()
            fails(store.publish, "m", b"x", code=110)
            check(time.monotonic() - started < patience(10), "the deadline must hold")
            fails(Store, server.uri + "?timeout_ms=300")
        wait_until(lambda: not publish_fails(store, "m", b"x"), 30, "the save to go through")
        equal((patiently(store.get, b"k"), patiently(store.get, b"l")), (b"v", b"w" * 10_000_000))  # no reply of a time before
        expect_whole(server.uri, {b"manifest": {b"k": b"v"}, b"x": {b"l": b"w" * 10_000_000}})


def test_full():
    """maxmemory without eviction: put_manifest says so, what was there stays, and with room the next save succeeds."""
    old, big = sample(10, 10_000, seed=1), sample(60, 1_000_000, seed=2)
    with Server("--maxmemory", "30mb", "--maxmemory-policy", "noeviction") as server:
        for options in ("", "?buffer=4MiB"):
            with Store(server.uri + options) as store:
                save(store, "old", old, b"old")
                with said() as text:
                    for key, value in big.items():
                        try:
                            store.put(key, value)
                        except StoreError as error:
                            equal(error.code, 28)
                    fails(store.publish, "big", b"big", code=28)
                check("maxmemory" in text[0], text[0])
                fails(store.manifest, "big", code=2)
                expect_whole(server.uri, {b"old": old})
                server.command("CONFIG", "SET", "maxmemory", "200mb")
                save(store, "big", big, b"big")
                expect_whole(server.uri, {b"old": old, b"big": big})
                server.command("FLUSHALL")
                server.command("CONFIG", "SET", "maxmemory", "30mb")


def test_too_large_for_the_server():
    """A chunk that the server refuses for its size fails the publications that may need it, and no other save."""
    for options in (), ("--rename-command", "EVAL", ""):
        for size in 1_500_000, 30_000_000:  # the answer comes when the value was sent, or breaks it off
            with Server("--proto-max-bulk-len", "1mb", *options) as server, Store(server.uri + PATIENT) as store:
                small, other = ({b"%016d" % i: b"v" * 1000 for i in numbers} for numbers in (range(3), range(3, 6)))
                large = {b"L" * 16: bytes(size), b"M" * 16: bytes(2_000_000)}
                for key, value in {**small, **large}.items():
                    store.put(key, value)
                with said() as text:
                    fails(store.publish, "large", listing({**small, **large}), code=5)
                check("bulk length" in text[0] and "can't be used" not in text[0], text[0])
                fails(store.manifest, "large", code=2)
                save(store, "next", other, listing(other))
                with said():
                    fails(store.publish, "opaque", b"after a loss", code=28)
                    fails(store.publish, "large", listing(large), code=28)
                store.publish("opaque", b"told")
                with Store(server.uri) as reader:
                    equal(reader.get_many([*other, *small]), [*other.values(), *small.values()])


def in_thread(function, *args):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def test_full_for_others():
    """A publication refused for want of room drops no chunk that another thread put: that thread's succeeds whole."""
    for cluster in (False, True):  # in one script, and step by step
        with Cluster() if cluster else Server() as server, Store(server.uri) as store:
            nodes = server.servers if cluster else [server]
            def limit(size):
                for node in nodes:
                    node.command("CONFIG", "SET", "maxmemory", size)
            first, other, second = sample(5, 1000, seed=1), sample(5, 1000, seed=2), sample(5, 1000, seed=3)
            for key, value in first.items():
                store.put(key, value)
            for key, value in other.items():
                in_thread(store.put, key, value)
            in_thread(store.put, next(iter(first)), first[next(iter(first))])  # of both
            limit("1")
            with said():
                in_thread(lambda: fails(store.publish, "other", b"other", code=28))
            limit("0")
            for key, value in second.items():
                store.put(key, value)
            store.publish("mine", b"mine")
            expect_whole(server.uri, {b"mine": first | second})


def put_or_full(store, key, value):
    try:
        store.put(key, value)
    except StoreError as error:
        equal(error.code, 28)


def test_full_for_others_who_flush():
    """The same when the refusal meets a put that needs the buffer, and when what was sent before is gone."""
    with Server() as server, Store(server.uri + "?buffer=1MiB") as store:
        mine, other = sample(5, 1000, seed=1), sample(40, 100_000, seed=2)
        for key, value in mine.items():
            store.put(key, value)
        server.command("CONFIG", "SET", "maxmemory", "1")
        with said():
            in_thread(lambda: [put_or_full(store, key, value) for key, value in other.items()])
        server.command("CONFIG", "SET", "maxmemory", "0")
        store.publish("mine", b"mine")
        expect_whole(server.uri, {b"mine": mine})
        for key, value in mine.items():
            store.put(key, value)
        for key, value in other.items():
            in_thread(store.put, key, value)  # sends mine
        server.command("FLUSHALL")
        with said():
            in_thread(lambda: fails(store.publish, "other", b"other", code=28))
            fails(store.publish, "mine", b"mine", code=28)
        for key, value in (mine | other).items():
            store.put(key, value)
        store.publish("mine", b"mine")
        expect_whole(server.uri, {b"mine": mine | other})


def test_full_for_a_third_thread():
    """A thread lost its chunks to a full server: its publication fails, whoever else was told of the loss before."""
    chunks = sample(40, 100_000, seed=1)
    with Server() as server, Store(server.uri + "?buffer=1MiB") as store, \
            concurrent.futures.ThreadPoolExecutor(1) as third, concurrent.futures.ThreadPoolExecutor(1) as fourth:
        def lose(lost):
            server.command("CONFIG", "SET", "maxmemory", "1")
            with said():
                for key, value in lost.items():
                    put_or_full(store, key, value)
            server.command("CONFIG", "SET", "maxmemory", "0")

        for pool in (third, fourth):
            pool.submit(store.publish, "before", b"").result(60)
        lose(chunks)
        third.submit(lambda: fails(store.publish, "third", b"", code=28)).result(60)  # it may have been its own
        third.submit(store.publish, "third", b"").result(60)
        fails(store.publish, "mine", b"mine", code=28)
        fails(store.manifest, "mine", code=2)
        fourth.submit(lambda: fails(store.publish, "fourth", b"", code=28)).result(60)  # others may have put for it
        fourth.submit(store.publish, "fourth", b"").result(60)
        save(store, "mine", chunks, b"mine")
        equal(store.get_many(list(chunks)), list(chunks.values()))
        lose(sample(40, 100_000, seed=2))  # and they never publish: each thread is told once
        for pool in (third, fourth):
            pool.submit(lambda: fails(store.publish, "later", b"", code=28)).result(60)
            pool.submit(store.publish, "later", b"").result(60)
        new = sample(5, 1000, seed=3)
        in_thread(lambda: fails(save, store, "new", new, b"", code=28))  # a thread that was not there yet, with chunks of its own


def test_full_for_threads_in_turn():
    """Threads that put and publish in turn each have one failure for a loss, and no failure makes another loss."""
    with Server() as server, Store(server.uri) as store, \
            concurrent.futures.ThreadPoolExecutor(1) as first, concurrent.futures.ThreadPoolExecutor(1) as second:
        def publish_one(number):
            store.put(b"%08d" % number, b"value")
            try:
                store.publish("n", b"opaque")
            except StoreError as error:
                equal(error.code, 28)
                return 1
            return 0

        for pool in (first, second):
            pool.submit(publish_one, 0).result(60)
        server.command("CONFIG", "SET", "maxmemory", "1")
        for number in range(10, 16):
            pool = (first, second)[number % 2]
            equal(pool.submit(publish_one, number).result(60), 1, "on a full server")
        server.command("CONFIG", "SET", "maxmemory", "0")
        failures = [(first, second)[number % 2].submit(publish_one, number).result(60) for number in range(20, 32)]
        check(sum(failures) <= 2 and failures[2:] == [0] * 10, failures)
        equal(store.exists([b"%08d" % number for number in range(20, 32)]), [True] * 12)


def test_full_for_library_threads():
    """Threads of a library put the chunks, others publish them (kvs_async): each publication fails once, none is without its chunks."""
    chunks = sample(40, 100_000, seed=1)
    with Server() as server, Store(server.uri + "?buffer=1MiB") as store, concurrent.futures.ThreadPoolExecutor(1) as library, \
            concurrent.futures.ThreadPoolExecutor(1) as first, concurrent.futures.ThreadPoolExecutor(1) as second:
        def put_all():
            for key, value in chunks.items():
                put_or_full(store, key, value)

        server.command("CONFIG", "SET", "maxmemory", "1")
        with said():
            library.submit(put_all).result(60)
            library.submit(lambda: fails(store.flush, code=28)).result(60)  # it publishes nothing: others must hear of it, too
        server.command("CONFIG", "SET", "maxmemory", "0")
        for pool, name in ((first, "first"), (second, "second")):
            pool.submit(lambda name=name: fails(store.publish, name, b"", code=28)).result(60)
            fails(store.manifest, name, code=2)
        library.submit(put_all).result(60)
        for pool, name in ((first, "first"), (second, "second")):
            pool.submit(store.publish, name, b"").result(60)
        equal(store.get_many(list(chunks)), list(chunks.values()))


def test_full_for_a_thread_born_later():
    """A thread that came after the loss puts one chunk itself and had the rest put by others: no manifest without the rest."""
    source = random.Random(1)
    chunks, more = ({source.randbytes(16): source.randbytes(100_000) for _ in range(n)} for n in (40, 5))
    for form in (lambda chunks: b"opaque", listing):
        with Server() as server, Store(server.uri + "?buffer=1MiB") as store, concurrent.futures.ThreadPoolExecutor(1) as library, \
                concurrent.futures.ThreadPoolExecutor(1) as new, concurrent.futures.ThreadPoolExecutor(1) as newer:
            refused_keys = []

            def put_all():
                for key, value in chunks.items():
                    try:
                        store.put(key, value)
                    except StoreError as error:
                        equal(error.code, 28)
                        refused_keys.append(key)

            server.command("CONFIG", "SET", "maxmemory", "1")
            with said():
                library.submit(put_all).result(60)
                check(0 < len(refused_keys) < len(chunks), "some puts succeed, and the server has none of their chunks")
                server.command("CONFIG", "SET", "maxmemory", "0")
                put_well = {key: value for key, value in chunks.items() if key not in refused_keys}
                for pool, name in ((new, "new"), (newer, "newer")):
                    own = dict([more.popitem()])
                    pool.submit(store.put, *next(iter(own.items()))).result(60)
                    pool.submit(lambda: fails(store.publish, name, form(put_well | own), code=28)).result(60)
                    fails(store.manifest, name, code=2)
                if form is listing:  # it lists what the server has: no failure for chunks of others
                    new.submit(save, store, "else", more, listing(more)).result(60)
                    in_thread(save, store, "else", more, listing(more))
                    new.submit(lambda: fails(store.publish, "new", listing(put_well), code=28)).result(60)
            refused_keys.clear()
            library.submit(put_all).result(60)
            in_thread(store.publish, "born last", form(chunks))  # everything was put again: it is over
            equal((refused_keys, store.get_many(list(chunks))), ([], list(chunks.values())))


def test_full_for_a_flush():
    """A flush says that chunks whose puts returned 0 were dropped, to each thread once and whatever is put since."""
    chunks = sample(40, 100_000, seed=1)
    with Server() as server, Store(server.uri + "?buffer=1MiB") as store, concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(store.flush).result(60)
        server.command("CONFIG", "SET", "maxmemory", "1")
        keys = list(chunks)
        for key in keys[:10]:
            store.put(key, chunks[key])
        with said():
            fails(store.put, keys[10], chunks[keys[10]], code=28)
            server.command("CONFIG", "SET", "maxmemory", "0")
            other.submit(store.put, keys[11], chunks[keys[11]]).result(60)
            fails(store.flush, code=28)
            other.submit(lambda: fails(store.flush, code=28)).result(60)
        store.flush()
        other.submit(store.flush).result(60)
        equal(store.exists(keys[:12]), [False] * 11 + [True])
        fails(store.publish, "mine", b"", code=28)
        save(store, "mine", chunks, b"")
        store.flush()
        equal(store.get_many(keys), list(chunks.values()))


def test_full_for_an_hour():
    """What had no put for an hour is dropped when there is no room; the publication of the thread that put it fails all the same."""
    if "KVF_AHEAD" not in os.environ:  # once more, with a clock that the test moves
        done = subprocess.run([sys.executable, "-B", __file__, "test_full_for_an_hour"], capture_output=True, text=True,
                              timeout=100, check=False,
                              env={**os.environ, "KVF_AHEAD": "1", "LD_PRELOAD": ":".join([*PRELOADED, str(BUILD / "tests" / "fault_shim.so")])})
        equal(done.returncode, 0, done.stdout + done.stderr)
        return
    ahead = ctypes.c_long.in_dll(ctypes.CDLL(None), "kvf_ahead_s")
    old, young = sample(5, 1000, seed=1), sample(5, 1000, seed=2)
    with Server() as server, Store(server.uri) as store, concurrent.futures.ThreadPoolExecutor(1) as other:
        def refused_publication():
            server.command("CONFIG", "SET", "maxmemory", "1")
            with said():
                other.submit(lambda: fails(store.publish, "other", b"", code=28)).result()
            server.command("CONFIG", "SET", "maxmemory", "0")

        for key, value in old.items():
            store.put(key, value)
        for minutes in (59, 2):
            ahead.value += 60 * minutes
            for key, value in young.items():
                other.submit(store.put, key, value).result()
            refused_publication()
            if minutes == 59:  # not yet an hour
                store.publish("early", b"early")
                equal(store.get_many([*old, *young]), [*old.values(), *young.values()])
                server.command("FLUSHALL")
                for key, value in old.items():
                    store.put(key, value)
                ahead.value += 59 * 60
        fails(store.publish, "mine", b"mine", code=28)
        fails(store.manifest, "mine", code=2)
        save(store, "mine", old, b"mine")
        equal(store.get_many([*old, *young]), [*old.values(), *young.values()])  # the young ones stayed


def test_evicting():
    """A server that evicts: a manifest appears only when all its chunks were there with it."""
    with Server("--maxmemory", "30mb", "--maxmemory-policy", "allkeys-lru") as server, Store(server.uri) as store:
        small, big = sample(10, 100_000, seed=1), sample(60, 1_000_000, seed=2)
        save(store, "small", small, b"small")
        with said():
            for key, value in big.items():
                store.put(key, value)
            fails(store.publish, "big", b"big", code=28)
        fails(store.manifest, "big", code=2)
        server.command("CONFIG", "SET", "maxmemory", "60mb")  # a full server may evict what is being read
        save(store, "small", small, b"small")
        equal(store.get_many(list(small)), list(small.values()))


def test_read_only():
    """A replica refuses writes; reads go on."""
    with Server() as primary, Store(primary.uri) as store:
        save(store, "n", {b"k": b"v"})
        with Server() as replica, Store(replica.uri) as reader:
            replica.command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), 60, "the replica")
            equal(reader.get(b"k"), b"v")
            with said() as text:
                reader.put(b"l", b"w")
                fails(reader.publish, "m", code=30)
            check("replica" in text[0], text[0])
            equal(reader.get(b"k"), b"v", "reads go on")
            before = reader.stats().round_trips
            fails(reader.publish, "m", code=30)
            check(reader.stats().round_trips - before <= 4, "it is believed for a while, after one new connection")
            equal(reader.get(b"k"), b"v", "reads go on")


class OneAddress(Proxy):
    """New connections go to .target; those that are open stay where they are."""

    def __init__(self, port):
        super().__init__(port, lambda data, link: data)


def replicate(server, of):
    equal(server.command("REPLICAOF", "127.0.0.1", of.port), b"OK")
    wait_until(lambda: b"master_link_status:up" in server.command("INFO", "replication"), 60, "the replica")


def offset(server, name):
    return int(re.search(name + rb":(\d+)", server.command("INFO", "replication")).group(1))


def caught_up(replica, of):
    """Not by WAIT, which waits for the writes of the connection that asks, and the store has its own."""
    written = offset(of, rb"master_repl_offset")
    wait_until(lambda: offset(replica, rb"slave_repl_offset") >= written, 60, "the replica's offset")


def test_failover_behind_one_address():
    """A handle whose connection stays open to the server that has become a replica."""
    for script in (True, False):
        with Server() as one, Server() as two, OneAddress(one.port) as address:
            if not script:
                for server in (one, two):
                    server.command("ACL", "SETUSER", "default", "-eval")
            with Store(address.uri) as store:
                chunks = sample(20, 3000, seed=1)
                save(store, "n", chunks)
                replicate(two, one)
                store.put(b"buffered", b"value")  # before the fail-over, published after it
                caught_up(two, one)
                two.command("REPLICAOF", "NO", "ONE")
                replicate(one, two)
                address.target = two.port
                store.publish("m")
                save(store, "o", more := sample(20, 3000, seed=2))
                store.delete("n")
                equal(store.get_many(list(chunks) + list(more)), [*chunks.values(), *more.values()])
            with Store(two.uri) as store:
                equal(sorted(store.manifests()), ["m", "o"])
                equal(store.get(b"buffered"), b"value")


def test_failover_while_the_new_one_is_late():
    """The address leads to the old server for a while; each of its ways to say that it can't serve."""
    with Server() as one, Server() as two, OneAddress(one.port) as address:
        replicate(two, one)
        with Store(address.uri + "?timeout_ms=60000") as store:
            save(store, "n", {b"k": b"v"})
            caught_up(two, one)
            two.command("REPLICAOF", "NO", "ONE")
            one.command("REPLICAOF", "127.0.0.1", free_port())  # a master that isn't there
            one.command("CONFIG", "SET", "replica-serve-stale-data", "no")
            turned = threading.Timer(0.5, setattr, (address, "target", two.port))
            turned.start()
            equal(store.exists([b"k"]), [True], "MASTERDOWN")
            turned.join()
            two.command("CONFIG", "SET", "min-replicas-to-write", "1")
            with Server() as three:
                links = len(address.links)
                turned = threading.Timer(0.5, setattr, (address, "target", three.port))
                turned.start()
                save(store, "m", {b"l": b"w"})
                turned.join()
                check(len(address.links) > links, "over a new connection")
                with Store(three.uri) as other:
                    equal(other.manifests(), ["m"], "NOREPLICAS")


def test_a_replica_that_is_promoted_in_place():
    with Server() as one, Server() as two:
        replicate(two, one)
        with Store(two.uri + "?timeout_ms=60000") as store:
            promoted = threading.Timer(0.5, two.command, ("REPLICAOF", "NO", "ONE"))
            promoted.start()
            save(store, "n", {b"k": b"v"})
            promoted.join()
            equal(store.get(b"k"), b"v")


def test_dribble():
    """One byte at a time is still an answer."""
    def slowly(data, link):
        for i in range(len(data)):
            link["near"].sendall(data[i:i + 1])
        return b""

    chunks = sample(5, 3000, seed=3)
    with Server() as server, Proxy(server.port, slowly) as proxy, Store(proxy.uri + "?timeout_ms=60000") as store:
        save(store, "n", chunks)
        store.prefetch(list(chunks))
        equal([store.get(k) for k in chunks], list(chunks.values()))
        equal(store.get_many(list(chunks)), list(chunks.values()))


def test_trickle():
    """A server that sends a byte now and then doesn't hold a call for ever."""
    stop = threading.Event()

    def trickle(data, link):
        if link["passed"] < 100:
            return data
        for i in range(len(data)):
            if stop.wait(0.05):
                return None
            link["near"].sendall(data[i:i + 1])
        return b""

    with Server() as server:
        with Store(server.uri) as store:
            save(store, "n", {b"k": b"v" * 100_000})
        with Proxy(server.port, trickle) as proxy, Store(proxy.uri + "?timeout_ms=1000") as store:
            for _ in range(20):
                store.exists([b"k"])  # beyond the first 100 bytes
                if proxy.links[-1]["passed"] >= 100:
                    break
            started = time.monotonic()
            fails(store.get, b"k", code=110)
            check(time.monotonic() - started < patience(20), "the deadline must hold")
            stop.set()


def test_cut():
    """Replies cut anywhere, by a reset or a farewell: the call goes on over a new connection, or fails; never wrong bytes."""
    source = random.Random(11)
    chunks = sample(8, 20_000, seed=4)

    def cut(data, link):
        if not link["number"] and not link["passed"]:
            return data  # opening has but one try
        limit = source.randrange(1, 60_000) if link["number"] % 3 != 2 else 10**9
        if link["passed"] + len(data) > limit:
            with contextlib.suppress(OSError):
                link["near"].sendall(data[:max(0, limit - link["passed"])])
            return None
        return data

    with Server() as server, Proxy(server.port, cut) as proxy, Store(proxy.uri + "?timeout_ms=5000") as store:
        for turn in range(30):
            if turn % 3 == 2:  # the third line is whole
                proxy.links[-1]["near"].shutdown(socket.SHUT_RDWR)
            save_until_done(store, "n", chunks, b"%d" % turn)
            for key, value in chunks.items():
                wait_until(lambda k=key, v=value: store.get(k) == v if not missing(store, k) else False, 30, "a get")
        expect_whole(server.uri, {b"29": chunks})
        check(len(proxy.links) > 5, "the line was hardly ever cut")


def missing(store, key):
    try:
        store.get(key)
    except StoreError:
        return True
    return False


def test_nonsense():
    """What isn't a Redis server, or has gone mad, is refused without waiting for more."""
    answers = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-5\r\n", b"*99999999999\r\n", b"$99999999999999\r\n", b"+OK\r\n+OK\r\n",
               b"*1\r\n" * 50, b":1\r\n", b"$3\r\nabcdef", b"x" * 100_000]
    for answer in answers:
        sent = []

        def plan(data, link, answer=answer, sent=sent):
            if data.startswith(b"+PONG"):
                return data
            sent.append(1)
            return answer

        with Server() as server:
            with Proxy(server.port, plan) as proxy, Store(proxy.uri + "?timeout_ms=2000") as store, said() as text:
                fails(store.get, b"key")
                store.put(b"key", b"value")
                fails(store.publish, "n")
            check("reply" in text[0] or "reason" in text[0], f"nothing was said about {answer[:20]!r}")
            equal(server.command("GET", "m:other"), None)
            with Store(server.uri) as store:
                save(store, "other", {b"k": b"v"})


def test_endless_listing():
    """Cursors that come again: a listing, and with it a collection, ends with an error."""
    for cursors in ([b"7"], [b"1", b"2", b"3"]):
        turn = [0]

        def plan(data, link, cursors=cursors, turn=turn):
            if not data.startswith(b"*2\r\n$"):
                return data
            turn[0] += 1
            check(turn[0] < 1000, "it goes on")
            cursor = cursors[turn[0] % len(cursors)]
            return b"*2\r\n$%d\r\n%s\r\n*0\r\n" % (len(cursor), cursor)

        with Server() as server, Proxy(server.port, plan) as proxy, Store(proxy.uri + "?timeout_ms=2000") as store:
            save(store, "n", {b"k": b"v"})
            with said() as text:
                for listing in (store.chunks, store.manifests, lambda: store.refs("n"), lambda: store.sweep(0)):
                    fails(listing, code=71)
            check("doesn't end" in text[0], text[0])
            check(turn[0] < 50, f"{turn[0]} pages")


def test_busy():
    """Somebody else's script that takes long: the server says BUSY to all until it has ended."""
    with Server("--busy-reply-threshold", 50) as server, Store(server.uri) as store:
        endless = threading.Thread(target=server.command, args=("EVAL", "while true do end", 0), daemon=True)
        endless.start()
        wait_until(lambda: server.command("PING").startswith(b"-BUSY"), 20, "a busy server")
        killer = threading.Timer(0.5, server.command, ("SCRIPT", "KILL"))
        killer.daemon = True
        killer.start()
        save(store, "n", {b"key": b"value"})
        equal(store.get(b"key"), b"value")
        killer.join()
        endless.join()


def test_restarted_in_mid_listing():
    """Cursors mean nothing to the process that comes after: a listing that goes on with them would pass over names."""
    names = {f"name{i:05}" for i in range(20_000)}
    keys = sorted(i.to_bytes(8, "big") for i in range(20_000))
    with Server("--appendonly", "yes", "--appendfsync", "no") as server:
        for start in range(0, 20_000, 1000):
            server.command("MSET", *(word for i in range(start, start + 1000) for word in (f"m:name{i:05}", "x")))
            server.command("SADD", "u:n", "", *(k.hex() for k in keys[start:start + 1000]))
        for listing, wanted in ((Store.manifests, sorted(names)), (lambda s: s.refs("n"), keys)):
            restarts = [0]

            def plan(data, link, restarts=restarts):
                if link["passed"] < 150_000 or restarts[0] == 1:
                    return data
                restarts[0] += 1
                server.kill()
                server.start()
                return None

            with Proxy(server.port, plan) as proxy, Store(proxy.uri) as store:
                wait_until(lambda: b"loading:0" in server.command("INFO", "persistence"), 20, "the server")
                found = listing(store)
                equal(restarts[0], 1, "restarts")
                equal(len(set(found)), len(wanted), "names found")
                equal(sorted(found), wanted)


@contextlib.contextmanager
def silent(n):
    """Ports that take connections and never say a word."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(n)]


def opened(uri):
    """A store whose share of its time was too short for a server that a busy machine held up is opened again."""
    def attempt():
        started = time.monotonic()
        try:
            return Store(uri)
        except StoreError:
            return None
        finally:
            check(time.monotonic() - started < patience(30), f"took {time.monotonic() - started:.1f} s, not 5")

    return wait_until(attempt, 60, "a store that opens")


def test_many_dead_nodes():
    """A cluster's dead nodes share the time a call may take; one that lives is found behind them."""
    with silent(100) as ports:
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        started = time.monotonic()
        check("reason" in refused(f"redis+cluster://{addresses}/?timeout_ms=1000"))
        check(time.monotonic() - started < patience(60), f"took {time.monotonic() - started:.1f} s, not 1")
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports[:12])
        with Cluster() as cluster:
            with opened(f"redis+cluster://{addresses},127.0.0.1:{cluster.servers[0].port}/?timeout_ms=5000") as store:
                save(store, "n", sample(20, 100, seed=1))
                for server in cluster.servers[1:]:
                    server.process.send_signal(signal.SIGSTOP)
                for _ in range(2):  # connected, and no longer so
                    started = time.monotonic()
                    fails(store.chunks)
                    check(time.monotonic() - started < patience(30), f"took {time.monotonic() - started:.1f} s, not 5")
                for server in cluster.servers[1:]:
                    server.process.send_signal(signal.SIGCONT)
                wait_until(lambda: not publish_fails(store, "m", b"x"), 60, "a save")
                equal(len(store.chunks()), 20)


def test_map_with_holes():
    """Slots that nobody has when the map is asked for: the call waits for them, a later one asks again, and
    nothing is listed in part."""
    chunks = sample(60, 100, seed=1)
    with Cluster() as cluster:
        low, high = cluster.range_of(2)
        for server in reversed(cluster.servers):  # its owner first
            equal(server.command("CONFIG", "SET", "cluster-require-full-coverage", "no"), b"OK")
            equal(server.command("CLUSTER", "DELSLOTSRANGE", low, high - 1), b"OK")
        time.sleep(1)
        with Store(cluster.uri + "?timeout_ms=1000") as store:
            for key, value in chunks.items():
                store.put(key, value)
            fails(store.publish, "n", b"n")
            fails(store.chunks)
            fails(lambda: store.sweep(0))
            giver = threading.Timer(1, lambda: cluster.servers[2].command("CLUSTER", "ADDSLOTSRANGE", low, high - 1))
            with Store(cluster.uri + "?timeout_ms=30000") as patient:
                giver.start()
                save(patient, "m", chunks, b"m")
                giver.join()
                wait_until(lambda: not publish_fails(store, "n", b"n"), 30, "the handle that failed before")
            equal(sorted(store.manifests()), ["m", "n"])
            expect_whole(cluster.uri, {b"m": chunks, b"n": chunks})


def promoted(server):
    return b"role:master" in server.command("INFO", "replication")


def never_wrong(uri, saves):
    """Replication isn't waited for: after a fail-over without farewell chunks may be gone. But none is another's."""
    with Store(uri) as store:
        for name in store.manifests():
            chunks = saves[store.manifest(name)]
            for value, wanted in zip(store.get_many(list(chunks)), chunks.values()):
                check(value in (None, wanted), f"wrong bytes in {name}")


def test_failover():
    """Replicas take over in the middle of saves, first at their masters' leave, then since one is killed: the same handles go on,
    and what they save afterwards is whole."""
    saves, done, problems = {}, threading.Event(), []
    with Cluster(replicas=True, node_timeout=5000) as cluster:
        first = ",".join(cluster.uri.split(",")[:2]) + "/?timeout_ms=30000&buffer=256KiB"
        turns = [0, 0]

        def saver(number):
            try:
                with Store(first) as store:
                    while True:
                        last = done.is_set()
                        turns[number] += 1
                        data = b"%d %d" % (number, turns[number])
                        saves[data] = sample(20, 30_000, seed=number * 1000 + turns[number] % 50)
                        save_until_done(store, f"n{number}", saves[data], data)
                        if last:
                            return
            except Exception as problem:  # told by the main thread
                problems.append(problem)

        def some_more():
            wanted = [n + 3 for n in turns]
            wait_until(lambda: problems or all(n >= w for n, w in zip(turns, wanted)), 60, "saves after a fail-over")

        threads = [threading.Thread(target=saver, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            some_more()
            for i in (0, 1):
                replica = cluster.servers[i + 3]
                wait_until(lambda r=replica: r.command("CLUSTER", "FAILOVER") == b"OK", 30, "a fail-over to begin")
                wait_until(lambda r=replica: promoted(r), 30, "a fail-over")
                some_more()
                expect_whole(cluster.servers[3].uri.replace("redis:", "redis+cluster:"), saves)
            cluster.servers[2].kill()
            wait_until(lambda: promoted(cluster.servers[5]), 60, "a fail-over")
            some_more()
        finally:
            done.set()
            for thread in threads:
                thread.join()
        equal(problems, [])
        uri = cluster.servers[5].uri.replace("redis:", "redis+cluster:") + "?timeout_ms=30000"
        never_wrong(uri, saves)
        with Store(uri) as store:
            for number in range(2):
                data = b"%d %d" % (number, turns[number])
                equal(store.manifest(f"n{number}"), data)
                equal(store.get_many(list(saves[data])), list(saves[data].values()), "the last save")


if __name__ == "__main__":
    run(globals())
