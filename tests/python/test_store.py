# SPDX-License-Identifier: Apache-2.0
"""kvasir.store against a dictionary, and its errors, buffers, threads, forks and the end of the interpreter."""
import array
import ctypes
import errno
import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time

from kvpython import BUILD, check, equal, flip_bit, folder, raises, run, stopped  # first: it finds the package
import kvasir
import kvasir.queue
import kvasir.store
from kvasir import _native


def test_a_flood_of_lines_is_bounded():
    """Lines that no call waits for go to stderr: of each kind and store a few, with the number of the others."""
    script = ("import kvasir._native as n\n"
              "line = 'level=error component=store msg=\"can\\'t make a file\" dir=/%s name=%d'\n"
              "for i in range(20000):\n"
              "    n._reason.kvpy_log(None, 0, (line % ('ab'[i % 2], i)).encode())\n")
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                          capture_output=True, text=True, timeout=120)
    equal(done.returncode, 0, done.stderr)
    equal([sum(f"dir=/{store} " in line for line in done.stderr.splitlines()) for store in "ab"], [10, 10])


def test_objects():
    with folder() as path, kvasir.store.open(path) as store:
        state = os.urandom(3 << 20)
        saved = store.save("a", state, fingerprint="m", chunk_bytes=65536)
        equal((saved.bytes, saved.new_bytes, saved.format), (len(state), len(state), "bytes"), "saved")
        check(store.save("b", state + b"x", chunk_bytes=65536).new_bytes < len(state) // 2, "not deduplicated")  # the last chunk
        equal(store.save("a", state, fingerprint="m", chunk_bytes=65536, verify=True).new_bytes, 0, "all is there, and right")
        equal(bytes(store.restore("a", fingerprint="m")), state, "restored")
        equal(sorted(store.names()), ["a", "b"], "names")
        equal(raises(kvasir.Error, store.restore, "a", fingerprint="other").errno, errno.ESTALE, "another model")
        target = bytearray(len(state))
        equal(store.restore_into("a", target, verify_first=True), len(state), "length")
        equal(bytes(target), state, "restored into memory of ours")
        equal(raises(kvasir.Error, store.restore_into, "a", bytearray(100)).errno, errno.ENOSPC, "too small")
        raises(BufferError, store.restore_into, "a", state)  # bytes can't be written
        equal((store.verify().problems, store.verify().manifests), ([], 2), "verify")
        store.delete("a")
        raises(KeyError, store.restore, "a")
        raises(kvasir.NotFound, store.restore, "a")
        check(store.gc(grace_s=0, dry_run=True).live_chunks > 0, "gc")
        equal(bytes(store.restore("b")), state + b"x", "the other one")
        store.save("empty", b"")
        equal(bytes(store.restore("empty")), b"", "an empty object")


def test_blocks_against_a_dictionary():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, model = random.Random(seed), {}
    with folder() as path, kvasir.store.open(path) as store:
        keys = [rng.randbytes(32) for _ in range(40)]
        for _ in range(300):
            some = rng.sample(keys, rng.randrange(1, 6))
            step = rng.randrange(4)
            if step == 0:
                blocks = [rng.randbytes(rng.randrange(5000)) for _ in some]
                equal(store.put_many(some, blocks), [key not in model for key in some], "put")
                for key, block in zip(some, blocks):
                    model.setdefault(key, block)
            elif step == 1:
                equal([None if b is None else bytes(b) for b in store.get_many(some)], [model.get(k) for k in some], "get")
            elif step == 2:
                equal(store.exists(some), [key in model for key in some], "exists")
            else:
                store.discard(some[0])
                model.pop(some[0], None)
        store.flush()
        equal(set(store.keys()), set(model), "keys")
        with kvasir.store.open(path) as another:
            equal([bytes(another.get(key)) for key in model], list(model.values()), "after a flush, in another handle")


def test_buffers_of_every_kind():
    with folder() as path, kvasir.store.open(path) as store:
        values = array.array("f", range(1000))
        sources = {"array": values, "bytes": bytes(values), "bytearray": bytearray(values), "memoryview": memoryview(values)}
        try:
            import numpy
            sources["numpy"] = numpy.arange(1000, dtype=numpy.float32)
            sources["read-only numpy"] = numpy.frombuffer(bytes(values), dtype=numpy.float32)
            raises((BufferError, ValueError), store.put, b"strided", numpy.zeros((10, 10))[:, 1])

            class Frozen(bytes):
                """Read-only as a buffer, which DLPack doesn't tell, as an array of JAX."""

                def __dlpack__(self, **_):
                    return numpy.zeros(1000, dtype=numpy.float32).__dlpack__()

            raises(BufferError, store.get_into, [b"k" * 8], [Frozen(4000)])
        except ImportError:
            print("without numpy")
        for name, source in sources.items():
            check(store.put(name.encode(), source), name)
            equal(bytes(store.get(name.encode())), bytes(values), name)
        raises(TypeError, store.put, b"k", 5)
        view = store.get(b"array")
        store.discard(b"array")
        equal(bytes(view), bytes(values), "a view outlives its block")


def test_keys_are_bytes():
    """A text was taken for the address of its characters: every one named the same block."""
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store) as queue:
        for wrong in ("chunk-1", 7, None, 1.5, [1, 2], ("a",), array.array("i", [1, 2]), memoryview(array.array("H", [1]))):
            for call in (lambda key: store.put(key, b"x"), store.get, store.discard, lambda key: store.put_many([key], [b"x"]),
                         lambda key: store.exists([key]), lambda key: store.get_many([key]), lambda key: store.touch([key]),
                         lambda key: store.prefetch([key]), lambda key: store.put_from([key], [b"x"]), lambda key: queue.exists([key]),
                         lambda key: store.get_into([key], [bytearray(1)]), lambda key: queue.delete([key])):
                raises(TypeError, call, wrong)
        raises(TypeError, store.exists, "chunk-1")
        raises(TypeError, store.exists, b"chunk-1")
        equal(list(store.keys()), [], "stored under a text")
        for i, kind in enumerate((bytes, bytearray, memoryview, lambda key: array.array("B", key), lambda key: memoryview(b"-" + key + b"-")[1:-1],
                                  lambda key: (ctypes.c_uint8 * len(key)).from_buffer_copy(key), lambda key: memoryview(key[::-1])[::-1])):
            key = b"chunk-%d" % i
            check(store.put(kind(key), key), f"put {i}")
            equal((store.get(kind(key)), store.get(key), store.exists([kind(key)]), store.get_many([kind(key)])), (key, key, [True], [key]), f"get {i}")
            store.discard(kind(key))
            equal(store.get(key), None, f"discard {i}")


def test_parts():
    with folder() as path, kvasir.store.open(path) as store:
        keys = [b"key0", b"key1", b"key2"]
        equal(store.put_from(keys[:2], [[b"abc", b"", b"defg"], b"hi"]), [True, True], "put")
        equal([bytes(block) for block in store.get_many(keys[:2])], [b"abcdefg", b"hi"], "joined")
        k, v, whole = bytearray(4), bytearray(4), bytearray(9)
        equal(store.get_into(keys, [[k, v], whole, bytearray(1)]), [7, 2, None], "lengths")
        equal((k, v, whole), (b"abcd", b"efg\0", b"hi" + bytes(7)), "parts")
        equal(raises(kvasir.Error, store.get_into, keys[:1], [bytearray(6)]).errno, errno.EMSGSIZE, "too short")
        memory = _native.Memory(whole, True)
        equal((store.get_into(keys[:1], [(memory.address, 9)]), whole[:7]), ([7], b"abcdefg"), "by address")
        raises(BufferError, store.get_into, keys[:1], [bytes(9)])
        raises(ValueError, store.get_into, keys, [k])
        equal((store.get_into([], []), store.put_from([], [])), ([], []), "nothing")


def test_reasons():
    with folder() as path:
        os.mkdir(path + "/s")
        problem = raises(kvasir.Error, kvasir.store.open, "nowhere://x")
        check("no plugin for this scheme" in str(problem) and not isinstance(problem, KeyError), problem)
        with kvasir.store.open(path + "/s") as store:
            raises(kvasir.Error, store.save, "", b"x")
            raises(ValueError, store.save, "a\0b", b"x")
            check("auto, bytes, llama" in str(raises(ValueError, store.save, "a", b"x", format="foo")), "the formats")
            for restore in (store.restore, lambda name: store.restore_into(name, bytearray(1))):
                check("no object 'nope'" in str(raises(kvasir.NotFound, restore, "nope")), "the object's name")
            raises(ZeroDivisionError, store.save, "a", b"x" * 9999999, progress=lambda done, total: 1 // 0)
            equal(raises(kvasir.Error, store.save, "a", b"x", progress=lambda done, total: True).errno, errno.ECANCELED, "given up")
        raises(ValueError, store.names)
        store.close()


def test_damage():
    with folder() as path:
        with kvasir.store.open(path) as store:
            store.save("a", os.urandom(100000))
        for root, _, files in os.walk(path):
            for name in files:
                file = os.path.join(root, name)
                if os.path.getsize(file) > 50000:
                    flip_bit(file)
        with kvasir.store.open(path) as store:
            check(isinstance(raises(kvasir.Error, store.restore, "a"), (kvasir.Damaged, kvasir.NotFound)), "a flipped bit")


def test_threads_and_close():
    with folder() as path:
        store, problems = kvasir.store.open(path), []

        def work(number):
            try:
                for i in range(1000000):
                    key = b"%8d%8d" % (number, i)
                    store.put(key, key * 9)
                    equal(bytes(store.get(key)), key * 9, "block")
            except ValueError as closed:
                check("closed" in str(closed), closed)
            except BaseException as problem:  # pylint: disable=broad-except
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        while store.stats()["puts"] < 100:
            pass
        store.close()  # waits for running calls; the others see a closed store
        for thread in threads:
            thread.join()
        equal(problems, [], "problems")


def refused(store):
    """Check that close() refuses in this thread, and closes nothing."""
    equal(raises(kvasir.Error, store.close).errno, errno.EBUSY, "close()")
    check(not store.closed, "it is open")


def test_close_waits_as_long_as_a_call_lasts():
    with folder() as path:
        store, inside, go, results = kvasir.store.open(path), threading.Event(), threading.Event(), []
        state = os.urandom(1 << 20)
        store.save("a", state)
        store.put(b"key1", b"value")

        def slow(done, total):
            inside.set()
            go.wait(60)

        store.restore("a", progress=lambda done, total: refused(store))
        call = threading.Thread(target=lambda: results.append(store.restore("a", progress=slow)))
        call.start()
        check(inside.wait(60), "the call has not begun")
        limit, kvasir._native.EXIT_WAIT_S = kvasir._native.EXIT_WAIT_S, 0.01  # it concerns the end of the program only
        try:
            close = threading.Thread(target=store.close)
            close.start()
            close.join(0.1)
            check(close.is_alive() and store.closed, "close() waits")
        finally:
            kvasir._native.EXIT_WAIT_S = limit
            go.set()
        for thread in (call, close):
            thread.join()
        equal(bytes(results[0]), state, "the call")
        equal(os.listdir(path + "/.kvasir/writers"), [], "handles of the store")
        with kvasir.store.open(path) as store:
            equal(bytes(store.get(b"key1")), b"value", "the block")


def test_close_in_a_signals_handler():
    """The handler of a program that wants to end runs inside the call that it interrupted."""
    with folder() as path, kvasir.store.open(path) as store:
        faulthandler.dump_traceback_later(60, exit=True)  # close() used to wait for the call below it
        before = signal.signal(signal.SIGTERM, lambda *_: refused(store))
        try:
            equal(store._call(lambda _: os.kill(os.getpid(), signal.SIGTERM) or 0), 0, "the call goes on")
            signal.signal(signal.SIGTERM, lambda *_: store.close())
            os.kill(os.getpid(), signal.SIGTERM)
            check(store.closed, "closed between calls")
        finally:
            signal.signal(signal.SIGTERM, before)
            faulthandler.cancel_dump_traceback_later()


def test_close_of_another_store_in_a_callback():
    with folder() as one, folder() as two, kvasir.store.open(one) as a, kvasir.store.open(two) as b:
        for store in (a, b):
            store.save("a", b"x" * 1000)
        inside, results, begun = threading.Event(), [], time.monotonic()

        def slow(done, total):
            inside.set()
            while not b.closed and time.monotonic() - begun < 60:
                time.sleep(0.001)

        call = threading.Thread(target=lambda: results.append(bytes(b.restore("a", progress=slow))))
        call.start()
        check(inside.wait(60), "the call has not begun")
        a.restore("a", progress=lambda done, total: b.close())  # waits for the other thread's call
        call.join()
        equal((b.closed, results), (True, [b"x" * 1000]), "closed behind the call")


def test_exceptions_beside_calls_of_other_threads():
    """A signal's handler that raises anywhere in a call takes away no entry but the call's own."""
    class Calls(list):
        def append(self, _):
            raise KeyboardInterrupt

    with folder() as path:
        store = kvasir.store.open(path)
        state, other = store._state, -1
        state.calls = Calls([other])
        raises(KeyboardInterrupt, store.stats)
        equal(state.calls, [other], "calls")
        state.calls = [threading.get_ident()]  # left over, see Handle
        refused(store)
        faulthandler.dump_traceback_later(20, exit=True)  # EXIT_WAIT_S is longer
        del store
        faulthandler.cancel_dump_traceback_later()
        equal((state.address, os.listdir(path + "/.kvasir/writers")), (None, []), "freed")
    with folder() as path, kvasir.store.open(path) as store:
        store._state.calls.append(other)
        stopped(500, 0.0005, store.exists, [b"key1"])
        check(store._state.calls.count(other) == 1, "calls of another thread")
        if sys.version_info >= (3, 11):
            equal(store._state.calls, [other], "calls")
        store._state.calls.clear()


def python(text, *args):
    return subprocess.run([sys.executable, "-B", "-c", text, *args], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                          capture_output=True, text=True, timeout=120, check=False)


def test_fork_and_spawn():
    with folder() as path:
        store = kvasir.store.open(path)
        store.put(b"key1", b"before")
        store.flush()
        child = os.fork()
        if child == 0:  # has the parent's object, and leaves it alone; opens its own
            code = 1
            try:
                with kvasir.store.open(path) as own:
                    code = 0 if bytes(own.get(b"key1")) == b"before" and own.put(b"key2", b"child") else 2
                    own.flush()
                store.close()
            finally:
                os._exit(code)
        equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "the child")
        equal([bytes(store.get(key)) for key in (b"key1", b"key2")], [b"before", b"child"], "after the child")
        store.close()
        done = python("import sys, kvasir.store; print(bytes(kvasir.store.open(sys.argv[1]).get(b'key2')))", path)
        equal((done.returncode, done.stdout, done.stderr), (0, "b'child'\n", ""), "a process of its own")


def test_interpreter_ends_beside_a_call_without_end():
    text = """
import sys, threading, kvasir._native, kvasir.store
kvasir._native.EXIT_WAIT_S = 0.1
store, inside = kvasir.store.open(sys.argv[1]), threading.Event()
def slow(done, total):
    inside.set()
    threading.Event().wait()
threading.Thread(target=store.restore, args=("a",), kwargs={"progress": slow}, daemon=True).start()
inside.wait()
store.put(b"key1", b"value")
"""
    with folder() as path:
        with kvasir.store.open(path) as store:
            store.save("a", b"x" * 1000)
        done = python(text, path)
        equal((done.returncode, done.stderr), (0, ""), "the end")
        with kvasir.store.open(path) as store:
            equal(bytes(store.get(b"key1")), b"value", "a block that nobody flushed")


def test_interpreter_ends_with_work_under_way():
    text = """
import sys, threading, kvasir.store
store = kvasir.store.open(sys.argv[1])
started = threading.Barrier(5)
def work(n):
    started.wait()
    try:
        for i in range(10**9):
            store.put(b"%8d%8d" % (n, i), b"x" * 5000)
    except ValueError:  # closed; a traceback of a daemon thread at the end can abort Python
        pass
for n in range(4):
    threading.Thread(target=work, args=(n,), daemon=True).start()
started.wait()
while store.stats()["puts"] < 20:
    pass
print("end")
"""
    with folder() as path:
        done = python(text, path)
        equal((done.returncode, done.stdout), (0, "end\n"), f"the end ({done.stderr})")
        with kvasir.store.open(path) as store:
            equal(store.verify().bad_chunks, 0, "bad chunks")


if __name__ == "__main__":
    run(globals())
