#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Redis plugin against real servers: one, over TLS, over a unix socket, with a password, and a cluster."""
import ctypes as c
import errno
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

from redistest import *


def sample(n, size=1000, seed=1, key_len=8):
    source = random.Random(seed)
    return {source.randbytes(key_len): source.randbytes(size) for _ in range(n)}


def exercise(uri):
    """What must hold on every kind of server."""
    chunks, wide = sample(40), sample(3, key_len=32, seed=2)
    with Store(uri) as store:
        equal(set(save(store, "slot 1.bin", chunks)), {0}, "returns of new chunks")
        equal(set(save(store, "wide", wide, b"")), {0}, "returns of wide keys")
        equal(store.manifest("slot 1.bin"), b"manifest")
        equal(store.manifest("wide"), b"")
        equal(store.put(next(iter(chunks)), next(iter(chunks.values()))), 1, "a second put")
    with Store(uri) as store:
        for key, value in {**chunks, **wide}.items():
            equal(store.get(key), value)
        keys = list(chunks)
        equal(store.put(keys[5], chunks[keys[5]]), 1, "a put of what was read")
        equal(store.get_many([*keys, b"notthere"]), [*chunks.values(), None])
        equal(store.exists([*keys, b"notthere"]), [True] * 40 + [False])
        equal(sorted(store.manifests()), ["slot 1.bin", "wide"])
        equal(sorted(store.chunks()), sorted([*chunks, *wide]))
        equal(sorted(store.refs("wide")), sorted(wide))
        equal(store.touch([*keys, b"notthere"]), 40)
        fails(store.get, b"notthere", code=2)
        fails(store.manifest, "other", code=2)
        store.delete("wide")
        store.delete("wide")
        fails(store.manifest, "wide", code=2)
        store.delete_chunk(keys[0])
        fails(store.get, keys[0], code=2)
        equal(store.exists(keys[:2]), [False, True])
        swept = store.sweep(0, live=set(keys))
        equal((swept.deleted, swept.deleted_bytes, swept.kept, swept.errors), (3, 3000, 39, 0))
        equal(sorted(store.chunks()), sorted(keys[1:]))


def test_single():
    with Server() as server:
        exercise(server.uri + "?prefix=a*[b]:")
        exercise(server.uri + "3?prefix=a?:")  # another database


def test_valkey():
    if not VALKEY:
        skip("valkey-server is needed (Debian 13: valkey-server)")
    with Server(program=VALKEY) as server:
        check(b"valkey_version" in server.command("INFO", "server"))
        exercise(server.uri.replace("redis:", "valkey:"))
        chunks = sample(100)
        with Store(server.uri.replace("redis:", "valkey:")) as store:
            save(store, "n", chunks)
            before = store.stats().round_trips
            save(store, "m", chunks)
            equal(store.stats().round_trips - before, 1, "round trips of a warm save")


def test_prefixes_are_apart():
    with Server() as server:
        with Store(server.uri + "?prefix=a:") as one, Store(server.uri + "?prefix=*:") as two:
            save(one, "n", {b"key": b"value"})
            fails(two.get, b"key", code=2)
            equal((two.chunks(), two.manifests(), one.manifests()), ([], [], ["n"]))


def test_unix_socket():
    with Server() as server:
        exercise(f"redis+unix://{server.path}?db=1")


def test_without_scripts():
    with Server("--rename-command", "EVAL", "") as server:
        chunks = sample(10)
        with Store(server.uri) as store:
            save(store, "n", chunks)
            save(store, "m", chunks)
            equal(store.stats().puts, 10)
        with Store(server.uri) as store:
            equal(store.get_many(list(chunks)), list(chunks.values()))
            equal(store.manifest("m"), b"manifest")


def test_use_without_scripts():
    """A hit sends a chunk again, which notes its use, when the use noted last is more than an hour ago; not before."""
    with Server("--rename-command", "EVAL", "") as server:
        with Store(server.uri) as store:
            save(store, "n", {b"key": b"value"})
        written = server.command("GET", "c:" + b"key".hex())
        now = int(server.command("TIME")[0])
        for age, sent in ((3000, 0), (4200, 1)):
            stamp = b"%08x" % (now - age)
            server.command("SETRANGE", "c:" + b"key".hex(), len(b"value"), stamp)
            with Store(server.uri) as store:
                save(store, "m", {b"key": b"value"})
                equal(store.stats().puts, sent, f"last used {age} s ago")
            value = server.command("GET", "c:" + b"key".hex())
            equal((len(value), value[:5], value[13:]), (len(written), b"value", written[13:]))
            equal(value[5:13] == stamp, not sent)


def test_conditional_deletion():
    """A chunk goes when it still is what the caller saw; the server compares and deletes in one step."""
    with Server() as server, Server("--rename-command", "EVAL", "") as plain, Store(server.uri) as store, Store(server.uri) as other:
        save(store, "n", {b"key": b"value", b"empty": b""})
        equal((store.delete_if(b"key", b"valuf"), store.delete_if(b"none", b"x")), (0, 0))
        store.put(b"new", b"x")
        equal(store.delete_if(b"new", b"x"), 0, "not published yet")
        equal(other.touch([b"key"]), 1)  # another time of use, and still the same chunk
        equal((store.delete_if(b"key", b"value"), store.delete_if(b"key", b"value"), store.delete_if(b"empty", b"")), (1, 0, 1))
        fails(other.get, b"key", code=2)
        equal(save(store, "n", {b"key": b"value"}), [0], "it isn't taken for present")
        save(store, "n", {b"read": b"1", b"unseen": b"2"})
        with Store(server.uri) as fresh:  # it has no entry of either chunk
            equal((fresh.get_many([b"read"]), fresh.delete_if(b"read", b"1"), fresh.delete_if(b"unseen", b"2")), ([b"1"], 1, 1))
            equal(fresh.exists([b"read"]), [False])
        with Store(plain.uri) as store:
            save(store, "n", {b"key": b"value"})
            fails(store.delete_if, b"key", b"value", code=95)
            fails(store.delete_if, b"key", b"value", code=95)
            equal(store.get(b"key"), b"value")


def test_deleted_before_it_is_sent():
    """A deleted chunk doesn't come back with the next flush or manifest, and its handle doesn't say that it is there."""
    for options in (), ("--rename-command", "EVAL", ""):
        with Server(*options) as server, Store(server.uri) as store, Store(server.uri) as other:
            for publish in store.flush, lambda: store.publish("n"):
                for key in b"key", b"two":
                    equal(store.put(key, b"value"), 0)
                store.delete_chunk(b"key")
                equal(store.exists([b"key", b"two"]), [False, True])
                fails(store.get, b"key", code=2)
                store.delete_chunk(b"key")
                publish()
                equal(other.exists([b"key", b"two"]), [False, True])
                other.delete_chunk(b"two")
                store.delete_chunk(b"two")


def test_deleted_and_put_again():
    """A put after a deletion takes the bytes, whatever flushes and manifests were between."""
    for options in (), ("--rename-command", "EVAL", ""):
        with Server(*options) as server, Store(server.uri) as store, Store(server.uri) as other:
            for publish in store.flush, lambda: store.publish("n"):
                for turn in range(3):
                    equal(store.put(b"two", b"1"), int(turn > 0))
                    equal(store.put(b"key", b"old"), 0)
                    store.put(b"thr", b"3")
                    publish()
                    store.delete_chunk(b"key")
                    equal(other.exists([b"key", b"two", b"thr"]), [False, True, True])
                    equal(store.put(b"key", b"new"), 0, "a put after the deletion")
                    publish()
                    equal(other.get(b"key"), b"new")
                    store.delete_chunk(b"key")
                store.delete_chunk(b"two")


def test_deleted_beside_a_model():
    """Random puts, deletions, flushes and manifests of one handle: the server has what a dict says."""
    seed = int(os.environ.get("KV_TEST_SEED", time.time_ns() & 0xffffffff))
    print(f"KV_TEST_SEED={seed}")
    source = random.Random(seed)
    with Server() as server, Store(server.uri + "?buffer=1KiB") as store, Store(server.uri) as other:
        keys, model = [b"%d" % i for i in range(8)], {}
        for _ in range(300):
            key, what = source.choice(keys), source.randrange(8)
            if what < 4:
                if store.put(key, key * 99) == 0:
                    equal(key in model, False, "a put that says the chunk is new")
                model[key] = key * 99
            elif what < 7:
                store.delete_chunk(key)
                model.pop(key, None)
            else:
                source.choice((store.flush, lambda: store.publish("n")))()
                equal(other.get_many(keys), [model.get(key) for key in keys])
            equal(store.exists(keys), [key in model for key in keys])


def test_deleted_from_a_save():
    """A manifest of ours is refused while it lists a chunk that was deleted since its put; others aren't."""
    chunks = sample(5, key_len=16)
    lost = next(iter(chunks))
    with Server() as server, Store(server.uri) as store:
        for key, data in chunks.items():
            store.put(key, data)
        store.delete_chunk(lost)
        store.publish("theirs", b"whatever it needs")
        fails(store.publish, "ours", listing(chunks), code=28)
        save(store, "ours", chunks, listing(chunks))
        equal(store.get_many(list(chunks)), list(chunks.values()))


def test_lost_after_another_publication():
    """Another thread's publication takes chunks of a running save; when the server loses one then, the save fails."""
    for options in (), ("--rename-command", "EVAL", ""):
        with Server(*options) as server, Store(server.uri) as store, Store(server.uri) as other:
            chunks = sample(40, key_len=16)
            lost, *_ = chunks
            for key, value in chunks.items():
                store.put(key, value)
            thread = threading.Thread(target=save, args=(store, "small", {b"s" * 16: b"x"}, listing({b"s" * 16: b"x"})))
            thread.start()
            thread.join()
            store.prefetch([lost])
            before = store.stats()
            store.publish("still there", listing(chunks))
            equal(store.stats().put_hits, before.put_hits)
            other.delete_chunk(lost)
            fails(store.publish, "big", listing(chunks), code=28)
            fails(other.manifest, "big", code=2)
            fails(store.publish, "big", listing(chunks), code=28)
            store.publish("other", listing({b"s" * 16: b"x"}))
            store.flush()
            save(store, "big", chunks, listing(chunks))
            equal(other.get_many(list(chunks)), list(chunks.values()))


def test_damage_is_mended_at_once():
    """A page that a handle put, flushed, found damaged and puts again is taken, with or without a deletion between."""
    for delete in True, False:
        with Server() as server, Store(server.uri) as store:
            equal(store.put(b"key", b"value" * 20), 0)
            store.flush()
            server.command("SETRANGE", "c:" + b"key".hex(), 3, "?")
            fails(store.get, b"key", code=74)
            if delete:
                store.delete_chunk(b"key")
            equal(store.put(b"key", b"value" * 20), 0, "a put of what is damaged")
            store.flush()
            equal(store.get(b"key"), b"value" * 20)


def test_a_verified_save():
    """Damage in the middle of a value that a save takes for its chunk: --verify finds and mends it; so does a save after a
    restore in another process."""
    with Server() as server, tempfile.TemporaryDirectory() as folder:
        source, out = os.path.join(folder, "source"), os.path.join(folder, "out")
        with open(source, "wb") as file:
            file.write(random.Random(5).randbytes(300_000))

        def kvasir(command, *args, stdin=b""):
            return subprocess.run([str(BUILD / "bin" / "kvasir"), "store", command, server.uri, "o", *args], input=stdin,
                                  capture_output=True, timeout=60, check=False).returncode

        def damage():
            for key in server.command("KEYS", "c:*"):
                server.command("SETRANGE", key, 100, b"damage")

        equal(kvasir("save", source, "--chunk", "64KiB"), 0)
        damage()
        equal(kvasir("save", source, "--chunk", "64KiB", "--verify"), 0)
        equal(kvasir("restore", out), 0)
        damage()
        with open(source, "rb") as file:
            equal(kvasir("save", "-", "--chunk", "64KiB", "--verify", stdin=file.read()), 0, "from a pipe, read once")
        equal(kvasir("restore", out), 0)
        damage()
        equal(kvasir("save", source, "--chunk", "64KiB"), 0, "not noticed")
        equal(kvasir("verify"), 1)
        equal(kvasir("save", source, "--chunk", "64KiB"), 0)
        equal(kvasir("restore", out), 0)


def test_a_look_finds_damage():
    """A key with a value that ends unlike ours, or of another type, is damaged: neither there nor missing."""
    with Server() as server, Store(server.uri) as store:
        keys = [b"%08d" % n for n in range(5)]
        save(store, "n", {key: b"value" * 20 for key in keys})
        where = ["c:" + key.hex() for key in keys]
        server.command("SET", where[1], server.command("GET", where[1])[:-1])
        server.command("SET", where[2], "x")
        server.command("DEL", where[3], where[4])
        server.command("LPUSH", where[3], "x")
        with Store(server.uri) as other:
            equal(other.exists(keys), [True, "damaged", "damaged", "damaged", False])


def test_values_without_bytes():
    """A chunk of no bytes is a chunk. A value of no bytes isn't one of ours, and Redis answers a look at it as for no value:
    it counts as missing, and a put replaces it."""
    for scripts in (), ("--rename-command", "EVAL", ""):
        with Server(*scripts) as server, Store(server.uri) as store:
            save(store, "n", {b"empty": b""}, b"")
            with Store(server.uri) as other:
                equal((other.get(b"empty"), other.get_many([b"empty"]), other.exists([b"empty"]), other.manifest("n")),
                      (b"", [b""], [True], b""))
                server.command("SET", "c:" + b"empty".hex(), "")
                equal(other.exists([b"empty"]), [False])
                fails(other.get, b"empty", code=74)
                save(other, "m", {b"empty": b""})
                equal(other.get(b"empty"), b"")
                equal(store.get(b"empty"), b"")


def test_damage_without_scripts():
    """What a handle found damaged its next save replaces, though nothing can be deleted by condition."""
    with Server("--rename-command", "EVAL", "") as server, Store(server.uri) as store:
        for read in (lambda: fails(store.get, b"key", code=74), lambda: equal(store.get_many([b"key"]), [None])):
            save(store, "n", {b"key": b"value" * 20})
            server.command("SETRANGE", "c:" + b"key".hex(), 3, "?")
            read()
            equal(save(store, "m", {b"key": b"value" * 20}), [0], "a put of what is damaged")
            equal(store.get(b"key"), b"value" * 20)


def test_password():
    with Server(password="s3cret word") as server:
        check("NOAUTH" in refused(server.uri))
        os.environ["KV_STORE_REDIS_PASSWORD"] = "n0t it"
        text = refused(server.uri)
        check("WRONGPASS" in text and "n0t it" not in text, text)
        os.environ["KV_STORE_REDIS_PASSWORD"] = "s3cret word"
        try:
            exercise(server.uri)
            server.command("ACL", "SETUSER", "kv", "on", ">other", "~*", "+@all", "-@dangerous")
            os.environ["KV_STORE_REDIS_PASSWORD"] = "other"
            exercise(server.uri.replace("//", "//kv@") + "1")
        finally:
            del os.environ["KV_STORE_REDIS_PASSWORD"]


def test_secrets_are_copied():
    """The environment may change while a handle lives: a reconnect uses the password that opening did."""
    variable = c.create_string_buffer(b"KV_STORE_REDIS_PASSWORD=s3cret")
    with Server(password="s3cret") as server:
        LIBC.putenv(variable)
        try:
            with Store(server.uri) as store:
                c.memset(c.addressof(variable) + len(variable) - 7, ord("x"), 6)
                save(store, "n", {b"k": b"v"})
                server.command("CLIENT", "KILL", "TYPE", "normal")
                equal(store.get(b"k"), b"v")
        finally:
            LIBC.unsetenv(b"KV_STORE_REDIS_PASSWORD")


def certificate(folder, name, alt):
    key, cert = os.path.join(folder, name + ".key"), os.path.join(folder, name + ".crt")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                    "-addext", f"subjectAltName={alt}", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls():
    with tempfile.TemporaryDirectory() as folder:
        cert, key = certificate(folder, "server", "IP:127.0.0.1")
        with Server("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, tls=True) as server:
            uri = server.uri.replace("redis:", "rediss:")
            options = f"?cacert={cert}&cert={cert}&key={key}"
            exercise(uri + options)
            chunks = sample(5, 3_000_000)
            with Store(uri + options) as store:
                save(store, "large", chunks)
                store.prefetch(list(chunks))
                for k, v in chunks.items():
                    equal(store.get(k), v)
            check("TLS" in refused(uri), "an unknown certificate must be refused")
            check("TLS" in refused(uri.replace("127.0.0.1", "localhost") + options), "another name must be refused")


def test_round_trips():
    chunks = sample(300, 2000)
    with Server() as server:
        with Store(server.uri) as store:
            before = store.stats().round_trips
            save(store, "n", chunks)
            equal(store.stats().round_trips - before, 2, "round trips of a cold save")
        with Store(server.uri) as store:
            before = store.stats()
            save(store, "m", chunks)
            after = store.stats()
            equal(after.round_trips - before.round_trips, 1, "round trips of a warm save")
            equal((after.puts, after.put_hits, after.bytes_written), (0, 300, 0))
            keys = list(chunks)[:200]
            before = store.stats().round_trips
            store.prefetch(keys)
            for key in keys:
                equal(store.get(key), chunks[key])
            equal(store.stats().round_trips - before, 1, "round trips of a prefetched restore")


def test_nothing_before_the_manifest():
    with Server() as server, Store(server.uri) as writer, Store(server.uri) as reader:
        writer.put(b"key", b"value")
        equal(writer.get(b"key"), b"value")
        fails(reader.get, b"key", code=2)
        writer.flush()
        equal(reader.get(b"key"), b"value")


def test_small_buffer():
    chunks = sample(50, 10_000)
    with Server() as server, Store(server.uri + "?buffer=64KiB&cache=64KiB") as store:
        save(store, "n", chunks)
        store.prefetch(list(chunks))
        for key, value in chunks.items():
            equal(store.get(key), value)
        equal(sorted(store.refs("n")), sorted(chunks))


def peak_above_now():
    """Forgets the peak of this process's memory; returns what tells by how many bytes it rose since."""
    def read(name):
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = read("VmRSS")
    return lambda: read("VmHWM") - before


def test_prefetch_is_bounded():
    """However much is asked for, a handle holds no more than the option `cache` says; the rest comes one by one."""
    if SANITIZED:
        skip("sanitizers hold freed memory")
    chunks = sample(160, 1 << 20)
    with Server() as server:
        with Store(server.uri + "?buffer=4MiB") as store:
            save(store, "n", chunks)
        for sizes_known in (False, True):
            with Store(server.uri + "?cache=8MiB") as store:
                if sizes_known:
                    store.prefetch(list(chunks)[:1])
                before, peak = store.stats().bytes_read, peak_above_now()
                store.prefetch(list(chunks))
                check(peak() < 24 << 20, f"{peak() >> 20} MiB for a cache of 8")
                if sizes_known:
                    check(store.stats().bytes_read - before < 9 << 20, "more was fetched than can be kept")
                before = store.stats().round_trips
                equal(all(store.get(k) == v for k, v in chunks.items()), True, "values")
                check(store.stats().round_trips - before <= 154, "of 8 MiB nothing was kept")


def test_evicted_in_mid_save():
    """A chunk that went early, or that was known, is looked for again: no manifest without its chunks."""
    with Server() as server, Store(server.uri + "?buffer=64KiB") as store:
        save(store, "n", {b"known": b"a"})
        server.command("FLUSHALL")
        equal(store.put(b"known", b"a"), 1)
        store.publish("n", b"x")
        equal(store.get(b"known"), b"a")
        store.put(b"early", b"e")
        store.flush()
        server.command("FLUSHALL")
        fails(store.publish, "n", b"y", code=28)
        fails(store.manifest, "n", code=2)
        save(store, "n", {b"early": b"e"})
        equal(store.get(b"early"), b"e")


def test_damage():
    """Truncated, changed, swapped or foreign values are misses, and mended by the next save."""
    one, two = b"\x01" * 8, b"\x02" * 8
    with Server() as server, Store(server.uri) as store:
        save(store, "n", {one: b"first" * 100, two: b"second" * 100})
        good, other = (server.command("GET", "c:" + k.hex()) for k in (one, two))
        for bad in (good[:-1], good[1:], b"", b"x", other, bytes(len(good)), good[:10] + b"?" + good[11:]):
            server.command("SET", "c:" + one.hex(), bad)
            fails(store.get, one, code=(2, 74))
            equal(store.get_many([one, two]), [None, b"second" * 100])
            store.put(one, b"first" * 100)
            store.publish("n")
            equal(store.get(one), b"first" * 100)
        server.command("DEL", "c:" + one.hex())
        server.command("LPUSH", "c:" + one.hex(), "a list")
        fails(store.get, one)
        store.put(one, b"again")
        store.publish("n")
        equal(store.get(one), b"again")
        foreign = server.command("GET", "c:" + one.hex())
        server.command("SET", "m:n", foreign)
        fails(store.manifest, "n", code=74)
        equal(server.command("GET", "m:n"), foreign, "what somebody else wrote")


def test_later_manifests_are_opaque():
    """A snapshot of a later version may name its chunks in another way: what it may need is noted, as for other programs'."""
    with Server() as server, Store(server.uri) as store:
        save(store, "own", {b"key": b"value"}, b"KVS-OBJ\n\1\0")
        fails(store.refs, "own", code=2)
        for name, data in (("later", b"KVS-OBJ\n\2\0"), ("other", b"other")):
            save(store, name, {b"key": b"value"}, data)
            equal(store.refs(name), [b"key"], name)


def gc(server, *args):
    """`kvasir store gc`: what it says."""
    environment = {**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "lib"), "KV_LOG": "error"}
    done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "gc", server.uri, "--json", *args], env=environment,
                          capture_output=True, text=True, timeout=60 * SLOW)
    equal(done.returncode, 0, done.stderr)
    return json.loads(done.stdout)


def test_one_sentinel():
    """A consumer with one empty manifest, put again after every few chunks, by whatever process: all of its chunks stay."""
    first, second, third = (sample(5, seed=i, key_len=32) for i in (1, 2, 3))
    with Server() as server:
        for chunks in (first, second, {}, third):
            with Store(server.uri) as store:
                save(store, "sentinel", chunks, b"")
        with Store(server.uri) as store:
            save(store, "gone", sample(3, seed=9))
            store.delete("gone")
            equal(sorted(store.refs("sentinel")), sorted([*first, *second, *third]))
        equal(gc(server, "--no-grace")["deleted_chunks"], 3)
        with Store(server.uri) as store:
            for chunks in (first, second, third):
                equal(store.get_many(list(chunks)), list(chunks.values()))
            store.delete("sentinel")
            fails(store.refs, "sentinel", code=2)
        equal(gc(server, "--no-grace")["deleted_chunks"], 15)


def test_one_sentinel_by_steps():
    """The same in a cluster and without scripts; more chunks than one command names."""
    with Cluster() as cluster, Server("--rename-command", "EVAL", "") as server:
        for uri in (cluster.uri, server.uri):
            kept = []
            for seed in (1, 2):
                chunks = sample(1200, 10, seed=seed, key_len=32)
                kept += chunks
                with Store(uri) as store:
                    save(store, "sentinel", chunks, b"")
            with Store(uri) as store:
                equal(sorted(store.refs("sentinel")), sorted(kept))
                store.delete("sentinel")
                fails(store.refs, "sentinel", code=2)
                save(store, "none", {}, b"")
                equal(store.refs("none"), [])


def test_nothing_put_before_the_manifest():
    """An empty manifest needs no chunk. What another one needs isn't known: it may be the copy of one with chunks."""
    for options in (), ("--rename-command", "EVAL", ""):
        with Server(*options) as server:
            with Store(server.uri) as store:
                store.publish("empty", b"")
                equal(store.refs("empty"), [])
                save(store, "foreign", {b"key": b"value"})
            with Store(server.uri) as store:
                store.publish("copy", store.manifest("foreign"))
                fails(store.refs, "copy", code=2)
                store.publish("empty", store.manifest("foreign"))
                fails(store.refs, "empty", code=2)
                store.delete("copy")
                store.delete("foreign")
            if not options:
                equal(gc(server, "--no-grace")["deleted_chunks"], 0)
            with Store(server.uri) as store:
                equal(store.get(b"key"), b"value")
                store.delete("empty")
            if not options:
                equal(gc(server, "--no-grace")["deleted_chunks"], 1)


def in_a_thread(function, *args):
    """To its end; nothing runs beside it."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_taken_by_another_publication():
    """A publication takes what was put for another manifest on its handle; the later manifest still counts as needing it."""
    mine, more, of_snapshot = (sample(3, seed=i, key_len=32) for i in (1, 2, 3))
    with Cluster() as cluster, Server() as server:
        for uri in (server.uri, cluster.uri):
            with Store(uri) as store:
                save(store, "sentinel", {}, b"")
                for key, value in mine.items():
                    store.put(key, value)
                save(store, "snapshot", of_snapshot, b"KVS-OBJ\n\1\0 as if it were one")
                fails(store.refs, "snapshot", code=2)
                save(store, "sentinel", {}, b"")
                check(set(mine) <= set(store.refs("sentinel")), "taken by a snapshot")
                for key, value in more.items():
                    store.put(key, value)
                in_a_thread(store.publish, "other", b"")
                store.publish("sentinel", b"")
                check({*mine, *more} <= set(store.refs("sentinel")), "taken by another thread's manifest")
            with Store(uri) as store:
                for turn in range(3):
                    save(store, f"apart{turn}", sample(2, seed=10 + turn), b"")
                    equal(sorted(store.refs(f"apart{turn}")), sorted(sample(2, seed=10 + turn)), "one thread's manifests")


def test_taken_by_a_thread_that_ended():
    """A thread may have the identity that one before it had, and is another one all the same."""
    with Server() as server, Store(server.uri) as store:
        in_a_thread(save, store, "first", {b"key": b"value"})
        in_a_thread(store.publish, "second")
        equal(store.refs("second"), [b"key"])


def saving_to_disk(server):
    """A BGSAVE that goes on for the rest of the test: meanwhile the server doesn't note uses of keys."""
    for i in range(200):
        server.command("SET", f"other{i}", "x")
    server.command("CONFIG", "SET", "rdb-key-save-delay", 1_000_000)
    server.command("BGSAVE")
    wait_until(lambda: b"rdb_bgsave_in_progress:1" in server.command("INFO", "persistence"), 20, "the child")


def age_between(old, fresh):
    """An age in seconds that what was last used at @old has and what was at @fresh hasn't, however long it took since."""
    now = time.monotonic()
    return int(((now - old) + (now - fresh)) / 2)


def test_sweep_while_saving_to_disk():
    old, hit = sample(3, seed=1), sample(3, seed=2)
    with Server() as server, Store(server.uri) as store:
        save(store, "n", {**old, **hit})
        saved = time.monotonic()
        time.sleep(4.1)
        saving_to_disk(server)
        used = time.monotonic()
        with Store(server.uri) as other:
            save(other, "m", {k: hit[k] for k in list(hit)[:2]})
            equal(other.touch(list(hit)[2:]), 1)
        swept = store.sweep(age_between(saved, used))
        equal((swept.deleted, swept.kept, swept.errors), (3, 3, 0))
        equal(sorted(store.chunks()), sorted(hit))


def offset(server, field):
    return int(re.search(field + rb":(\d+)", server.command("INFO", "replication")).group(1))


def test_sweep_after_failover():
    """Neither does a replica know how long keys were idle."""
    old, fresh = sample(3, seed=1), sample(2, seed=2)
    with Server() as primary, Server() as replica:
        with Store(primary.uri) as store:
            save(store, "n", old)
            saved = time.monotonic()
            time.sleep(4.1)
            replica.command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), 60, "the replica")
            used = time.monotonic()
            save(store, "m", fresh)
            written = offset(primary, b"master_repl_offset")  # (WAIT counts its own connection's writes only)
            wait_until(lambda: offset(replica, b"slave_repl_offset") >= written, 60, "what was written, at the replica")
        primary.kill()
        equal(replica.command("REPLICAOF", "NO", "ONE"), b"OK")
        with Store(replica.uri) as store:
            swept = store.sweep(age_between(saved, used))
            equal((swept.deleted, swept.kept), (3, 2))
            equal(sorted(store.chunks()), sorted(fresh))


def test_sweep_has_one_cutoff():
    """What was used within the time before the sweep began stays, however long the sweep takes."""
    chunks = sample(5)
    with Server() as server, Store(server.uri) as store:
        save(store, "n", chunks)

        def slowly(_, at, length):
            time.sleep(1.2)
            return 0

        swept = Swept(size=c.sizeof(Swept))
        checked(EXT.sweep_chunks(store.handle, 5, LIVE(slowly), None, c.byref(swept)))
        equal((swept.deleted, swept.kept), (0, 5))


def test_values_of_unknown_formats():
    """A chunk sealed like a manifest, or under a magic that isn't known: refused, sent again by the next save, and swept without grace only."""
    key, content = b"unknown", b"content " * 1000
    with Server() as server, Store(server.uri) as store:
        save(store, "n", {key: content})
        sealed = server.command("GET", "c:" + key.hex())
        check(sealed[-32:-24] == b"KVASIRc1", sealed[-40:])
        for value in content + b"KVASIRm1" + sealed[-24:], sealed[:-32] + b"KVASIRc2" + sealed[-24:]:
            server.command("SET", "c:" + key.hex(), value)
            with Store(server.uri) as other:
                equal(other.exists([key]), ["damaged"])
                fails(other.get, key, code=errno.EBADMSG)
                equal(other.sweep(1).deleted, 0)
                other.put(key, content)
                other.publish("n")
                equal((server.command("GET", "c:" + key.hex())[-32:-24], other.get(key)), (b"KVASIRc1", content))
            server.command("SET", "c:" + key.hex(), value)
            equal(store.sweep(0).deleted, 1)


def test_empty_values():
    with Server() as server, Store(server.uri) as store:
        save(store, "empty", {b"e": b""}, b"")
        equal((store.get(b"e"), store.manifest("empty")), (b"", b""))


def test_conformance():
    """The kit of libkvstore finds nothing wrong."""
    os.environ["KV_STORE_LIBRARY_PATH"] = str(BUILD / "lib")
    kit = c.CDLL(str(BUILD / "lib" / "libkvstore.so")).kvs_conformance
    failed, passed = [], []
    told = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_int, c.c_char_p)

    def each(_, name, verdict, detail):
        (failed if verdict == 1 else passed).append((name, detail))

    with Server() as server, said():
        kit(server.uri.encode(), told(each), None)
    equal(failed, [])
    check(len(passed) > 30, f"{len(passed)} checks")


def test_conformance_kills_processes():
    """The program, which has no threads that children would lack."""
    with Server() as server:
        done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "conformance", server.uri, "--json"], capture_output=True,
                              timeout=500, env={**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "lib")})
    checks = {check["check"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}
    equal([verdict for name, verdict in checks.items() if name.startswith("kill: ")], ["pass", "pass"], done.stdout + done.stderr)


def test_a_forked_child_leaves_the_connection_alone():
    if SANITIZED:
        skip("a sanitizer's allocator may be locked in the child")
    with Server() as server, Store(server.uri) as store:
        save(store, "n", {b"key": b"value"})
        child = os.fork()
        if child == 0:
            try:
                for function, *args in (store.get, b"key"), (store.touch, [b"key"]), (store.chunks,), (store.delete, "n"):
                    fails(function, *args, code=10)
                store.put(b"two", b"value")
                fails(store.publish, "m", code=10)
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        equal(os.waitpid(child, 0)[1], 0, "the child")
        equal((store.get(b"key"), store.manifests()), (b"value", ["n"]), "the parent goes on")


def test_close_flushes():
    """What kvs_put_chunk put and no manifest published is there after kvs_close, without a word."""
    os.environ["KV_STORE_LIBRARY_PATH"] = str(BUILD / "lib")
    lib = c.CDLL(str(BUILD / "lib" / "libkvstore.so"))
    chunks, handle, there = sample(20, 5000, seed=9), c.c_void_p(), (c.c_uint8 * 20)()
    with Server() as server:
        with said() as text:
            equal(lib.kvs_open(server.uri.encode(), c.byref(handle)), 0)
            for key, value in chunks.items():
                equal(lib.kvs_put_chunk(handle, key, c.c_size_t(8), value, c.c_size_t(len(value))), 0)
            lib.kvs_close(handle)
        equal(text[0], "")
        equal(lib.kvs_open(server.uri.encode(), c.byref(handle)), 0)
        equal(lib.kvs_exists(handle, b"".join(chunks), c.c_size_t(8), c.c_size_t(20), there), 0)
        lib.kvs_close(handle)
        equal(bytes(there), b"\1" * 20)


def test_bad_arguments():
    with Server() as server, Store(server.uri) as store:
        fails(store.put, b"", b"x", code=22)
        fails(store.put, b"k" * 256, b"x", code=22)
        fails(store.publish, "", code=22)
        fails(store.publish, "n" * 1025, code=22)
        store.publish("n" * 1024)
    for uri in ("redis://", "redis://host:0", "redis://user:pw@127.0.0.1", "redis://127.0.0.1/x", "redis://127.0.0.1/?password=pw",
                "redis://127.0.0.1/?no=1", "other://127.0.0.1", "redis+unix://relative", "redis+cluster://127.0.0.1/1"):
        text = refused(uri)
        check(text.count("\n") == 1 and "pw" not in text, text)


def test_sweep_spares_the_young():
    """Under any eviction policy."""
    for policy in ("noeviction", "allkeys-lfu"):
        with Server("--maxmemory-policy", policy) as server, Store(server.uri) as store:
            save(store, "n", {b"old": b"1", b"new": b"2"})
            saved = time.monotonic()
            time.sleep(4.1)
            used = time.monotonic()
            save(store, "m", {b"new": b"2"})  # a hit is a use
            equal(store.sweep(age_between(saved, used)).deleted, 1)
            equal(store.chunks(), [b"new"])


def test_many_threads():
    """One handle, eight threads that save and restore at once."""
    problems = []
    with Server() as server, Store(server.uri + "?buffer=1MiB") as store:
        def work(number):
            try:
                for turn in range(10):
                    chunks = sample(20, 5000, seed=number * 100 + turn % 3)
                    save(store, f"t{number}", chunks)
                    store.prefetch(list(chunks))
                    for key, value in chunks.items():
                        equal(store.get(key), value)
            except Exception as problem:  # told by the main thread
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        equal(problems, [])


def test_cluster():
    with Cluster() as cluster:
        exercise(cluster.uri)
        exercise(cluster.uri.split(",")[0] + "/?prefix={one}:")
        chunks = sample(200, 5000, seed=5)
        with Store(cluster.uri) as store:
            save(store, "n", chunks)
            before = store.stats().round_trips
            save(store, "m", chunks)
            check(store.stats().round_trips - before <= 3, "a warm save: look, list, manifest")
            check(all(s.command("DBSIZE") > 20 for s in cluster.servers), "all nodes have their share")
            migrate(cluster, store, chunks)
            keys = list(chunks)
            store.prefetch(keys)
            equal([store.get(k) for k in keys], list(chunks.values()))
        check("redis+cluster" in refused_later(cluster.servers[0].uri, chunks))


def migrate(cluster, store, chunks):
    """Move a key's slot while the handle has the old map: first half-way (ASK), then for good (MOVED)."""
    name = "c:" + next(iter(chunks)).hex()
    slot = cluster.servers[0].command("CLUSTER", "KEYSLOT", name)
    source = next(i for i in range(3) if 16384 * i // 3 <= slot < 16384 * (i + 1) // 3)
    old, new = cluster.servers[source], cluster.servers[(source + 1) % 3]
    new_id = cluster.id((source + 1) % 3)
    equal(new.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id(source)), b"OK")
    equal(old.command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id), b"OK")
    keys = old.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    check(name.encode() in keys)
    equal(old.command("MIGRATE", "127.0.0.1", new.port, "", 0, 10000, "KEYS", *keys), b"OK")
    equal(store.get(next(iter(chunks))), next(iter(chunks.values())))
    save(store, "asked", chunks)
    for server in (new, old):
        equal(server.command("CLUSTER", "SETSLOT", slot, "NODE", new_id), b"OK")
    equal(store.get(next(iter(chunks))), next(iter(chunks.values())))
    save(store, "moved", chunks)


def test_what_a_save_says_is_new():
    """new_bytes of a save counts what the server did not have, whichever process stored it; with scripts, without, in a cluster."""
    data = os.urandom(3_000_000)
    with tempfile.TemporaryDirectory() as folder, Server() as server, Server("--rename-command", "EVAL", "") as plain, \
            Cluster() as cluster:
        def saved(uri, name, content):
            environment = {**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "lib"), "KV_LOG": "error"}
            file = os.path.join(folder, "object")
            with open(file, "wb") as out:
                out.write(content)
            done = subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "save", uri, name, file, "--json", "--chunk", "64KiB"],
                                  env=environment, capture_output=True, text=True, timeout=60 * SLOW)
            equal(done.returncode, 0, done.stderr)
            result = json.loads(done.stdout)
            return result["new_bytes"], result["new_chunks"], result["chunks"]

        for uri in (server.uri, plain.uri, cluster.uri, server.uri + "?buffer=200KiB&prefix=small:"):
            new, chunks, all_chunks = saved(uri, "a", data)
            equal((new, chunks), (len(data), all_chunks), f"{uri}: the first save")
            equal(saved(uri, "a", data), (0, 0, all_chunks), f"{uri}: the same again")
            new, chunks, _ = saved(uri, "b", data + bytes(1000) + data[:300_000])
            check(0 < new < 1_000_000 and 0 < chunks < 20, f"{uri}: a longer one: {new} bytes in {chunks} chunks")


def test_listing_while_a_slot_moves():
    """A manifest that goes from a node that is yet to be asked to one that was: still listed."""
    names = [f"n{i}" for i in range(30)]
    with Cluster() as cluster, Store(cluster.uri) as store:
        for name in names:
            store.publish(name, b"KVS-OBJ\n\1\0 as if it were one")
        first, second, third = cluster.servers  # in the order of their slots, and of the listing
        slot = max(first.command("CLUSTER", "KEYSLOT", f"m:{name}") for name in names)
        check(slot >= cluster.range_of(2)[0], "of the third")
        second.command("CLIENT", "PAUSE", 3000)
        found = []
        listing = threading.Thread(target=lambda: found.extend(store.manifests()))
        listing.start()
        time.sleep(1)
        equal(first.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id(2)), b"OK")
        equal(third.command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(0)), b"OK")
        keys = third.command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        equal(third.command("MIGRATE", "127.0.0.1", first.port, "", 0, 10000, "KEYS", *keys), b"OK")
        listing.join()
        equal(sorted(found), sorted(names))


def refused_later(uri, chunks):
    """redis:// at a node of a cluster: the first save says what is wrong."""
    with said() as text, Store(uri) as store:
        for key, value in chunks.items():
            store.put(key, value)
        fails(store.publish, "n")
    return text[0] if "MOVED" in text[0] else text[0].replace("CROSSSLOT", "redis+cluster")


if __name__ == "__main__":
    run(globals())
