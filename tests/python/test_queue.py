# SPDX-License-Identifier: Apache-2.0
"""kvasir.queue: requests against a dictionary, from threads and asyncio; cancellations, closing, and the end of the program."""
import array
import asyncio
import errno
import gc
import os
import random
import select
import subprocess
import sys
import threading
import time

from kvpython import BUILD, SANITIZED, check, equal, folder, raises, run, stopped  # first: it finds the package
import kvasir
import kvasir.queue
import kvasir.store


def results(queue, n):
    """Wait for the results of @n requests."""
    watch, found = select.poll(), {}
    watch.register(queue.fileno(), select.POLLIN)
    limit = time.monotonic() + 60
    while len(found) < n:
        check(time.monotonic() < limit, f"{len(found)} of {n} results")
        watch.poll(1000)
        for result in queue.poll():
            check(result.id not in found, "a result twice")
            found[result.id] = result
    return found


def one(queue, request):
    return results(queue, 1)[request]


def test_against_a_dictionary():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, model = random.Random(seed), {}
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store, threads=3) as queue:
        keys = [rng.randbytes(32) for _ in range(40)]
        for step in range(120):
            some = rng.sample(keys, rng.randrange(1, 9))
            kind = rng.randrange(4)
            if kind == 0:
                blocks = [model.get(key, rng.randbytes(rng.randrange(1, 5000))) for key in some]
                got = one(queue, queue.put(some, blocks, flush=rng.random() < 0.1, tag=step))
                equal(got.each, [int(key in model) for key in some], "put")
                model.update(zip(some, blocks))
            elif kind == 1:
                parts = [[bytearray(1000), bytearray(4000)] for _ in some]
                got = one(queue, queue.get(some, parts, tag=step))
                equal(got.each, [len(model[key]) if key in model else -errno.ENOENT for key in some], "get")
                for key, (head, tail), length in zip(some, parts, got.each):
                    check(length < 0 or bytes(head + tail)[:length] == model[key], "bytes")
                equal(got.bytes, sum(max(length, 0) for length in got.each), "bytes read")
            elif kind == 2:
                got = one(queue, queue.exists(some, tag=step))
                equal((got.each, got.n_ok), ([int(key in model) for key in some], sum(key in model for key in some)), "exists")
            else:
                got = one(queue, queue.delete(some[:1], tag=step))
                model.pop(some[0], None)
            equal((got.status, got.tag), (0, step), "result")
        equal(one(queue, queue.flush()).status, 0, "flush")
        equal(store.exists(keys), [key in model for key in keys], "the store itself")


def test_many_requests_of_threads():
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store, max_requests=1000) as queue:
        submitted, lock = [], threading.Lock()

        def submit(number):
            for i in range(40):
                key = array.array("Q", [number, i]).tobytes()
                request = queue.put([key], [key * 8], priority=i % 3, tag=number)
                with lock:
                    submitted.append(request)

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        found = results(queue, 240)
        for thread in threads:
            thread.join()
        equal(sorted(found), sorted(submitted), "ids")
        check(all(result.status == 0 and result.each == [0] for result in found.values()), "stored")
        equal(queue.poll(), [], "nothing left")
        equal(queue._requests, {}, "no memory is kept")


def test_errors_and_arguments():
    with folder() as path, kvasir.store.open(path) as store:
        queue = kvasir.queue.Queue(store, threads=1, max_requests=2)
        key = bytes(16)
        raises(ValueError, queue.get, [key], [])
        raises(ValueError, queue.get, [key, b"short"], [bytearray(1), bytearray(1)])
        raises(BufferError, queue.get, [key], [b"read only"])
        equal(one(queue, queue.get([], [])).each, [], "no keys")
        equal(one(queue, queue.put([key], [b"0123456789"])).each, [0], "put")
        got = one(queue, queue.get([key, key], [bytearray(3), bytearray(10)]))
        equal((got.each, got.status), ([-errno.EMSGSIZE, 10], -errno.EMSGSIZE), "too long for its part")
        queue.flush()
        queue.flush()
        equal(raises(kvasir.Error, queue.flush).errno, errno.EAGAIN, "too many requests")
        equal(len(results(queue, 2)), 2, "both ended")
        equal(queue.cancel(12345), False, "no such request")
        equal(raises(kvasir.Error, store.close).errno, errno.EBUSY, "a queue is open")
        queue.drain()
        queue.close()
        queue.close()
        raises(ValueError, queue.poll)
        raises(ValueError, queue.flush)
        equal(bytes(store.get(key)), b"0123456789", "the store goes on")


def test_memory_is_kept_until_the_end():
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store) as queue:
        keys = [array.array("Q", [i, 7]).tobytes() for i in range(300)]
        store.put_many(keys, [key * 500 for key in keys])

        def submit():
            memory = bytearray(300 * 8000)
            view = memoryview(memory)
            queue.get(keys, [view[i * 8000:(i + 1) * 8000] for i in range(300)])
            return memory  # still exported: nobody can resize it

        memory = submit()
        gc.collect()
        result = results(queue, 1).popitem()[1]
        equal((result.status, result.n_ok), (0, 300), "got")
        equal(bytes(memory), b"".join(key * 500 for key in keys), "bytes")
        memory.clear()  # a BufferError if something still held it


def test_a_signal_during_a_submission():
    """A handler that raises: requests that the library took keep their memory until their results come, others let it go."""
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store, threads=1, max_requests=10000) as queue:
        keys = [array.array("Q", [i, 3]).tobytes() for i in range(16)]
        store.put_many(keys, [key * 64 for key in keys])
        memory = [bytearray(1024) for _ in keys]
        begun, found = time.monotonic(), 0
        for _ in range(50):
            queue.get(keys, memory)
        longest = (time.monotonic() - begun) / 25
        check(stopped(600, longest, queue.get, keys, memory) > 0, "no signal while it submits")
        queue.drain()
        while ended := queue.poll():
            found += len(ended)
            check(all(result.n_ok == 16 for result in ended), "results")
        check(found <= 650, f"{found} results")
        equal((queue._requests, queue._state.calls), ({}, []), "no memory is kept")
        for part in memory:
            part.clear()  # a BufferError if something still held it


def test_odd_results():
    """A result that no request is known of leaves the others alone."""
    with folder() as path, kvasir.store.open(path) as store, kvasir.queue.Queue(store, threads=1) as queue:
        queue.exists([bytes(16)])
        queue.drain()
        queue._requests.clear()
        request = queue.exists([bytes(16)], tag=5)
        queue.drain()
        equal([(result.id, result.tag) for result in queue.poll()], [(request, 5)], "results")


def test_cancel_and_close_with_requests_under_way():
    with folder() as path, kvasir.store.open(path) as store:
        keys = [array.array("Q", [i, 1]).tobytes() for i in range(2000)]
        queue = kvasir.queue.Queue(store, threads=1)
        requests = [queue.put(keys[i:i + 200], [key * 100 for key in keys[i:i + 200]]) for i in range(0, 2000, 200)]
        told = [queue.cancel(request) for request in requests]
        found = results(queue, 10)
        for request, cancelled in zip(requests, told):
            result = found[request]
            check(cancelled or result.status == 0, "a whole request")
            check(set(result.each) <= {0, -errno.ECANCELED}, "each")
        for i in range(0, 2000, 200):
            queue.delete(keys[i:i + 200])
        queue.close()  # results are lost, memory is let go
        equal(queue._requests and store._queues, {}, "no queue is left")


def test_asyncio():
    async def main(path):
        with kvasir.store.open(path) as store:
            async with kvasir.queue.AsyncStore(store) as blocks:
                keys = [array.array("Q", [i, 2]).tobytes() for i in range(64)]

                async def one_block(i):
                    equal(await blocks.put([keys[i]], [keys[i] * 64], flush=i % 8 == 0), [True], "stored")
                    memory = bytearray(1024)
                    equal(await blocks.get([keys[i], b"m" * 16], [memory, bytearray(8)]), [1024, None], "got")
                    return bytes(memory)

                equal(await asyncio.gather(*[one_block(i) for i in range(64)]), [key * 64 for key in keys], "bytes")
                equal(await blocks.exists(keys + [b"m" * 16]), [True] * 64 + [False], "exists")
                equal(await blocks.put(keys[:2], [b"", b""]), [False, False], "were there")
                await blocks.delete(keys[:2])
                await blocks.flush()
                equal(await blocks.exists(keys[:3]), [False, False, True], "deleted")
                try:
                    await blocks.get([keys[3]], [bytearray(1)])
                    check(False, "no error")
                except kvasir.Error as problem:
                    equal(problem.errno, errno.EMSGSIZE, "too long")
                task = asyncio.ensure_future(blocks.put(keys, [key * 64 for key in keys]))
                await asyncio.sleep(0)
                task.cancel()
                equal((await asyncio.gather(task, return_exceptions=True))[0].__class__, asyncio.CancelledError, "cancelled")
                waiting = asyncio.ensure_future(blocks.exists(keys))
                await asyncio.sleep(0)
            done = (await asyncio.gather(waiting, return_exceptions=True))[0]
            check(isinstance(done, (list, asyncio.CancelledError)), f"closed meanwhile: {done!r}")

    with folder() as path:
        asyncio.run(main(path))


def test_asyncio_closed_behind_its_loop():
    async def make(store):
        blocks = kvasir.queue.AsyncStore(store)
        asyncio.get_running_loop().remove_reader(blocks._fd)  # the result comes too late
        task = asyncio.ensure_future(blocks.exists([bytes(16)]))
        await asyncio.sleep(0)
        return blocks, task

    with folder() as path, kvasir.store.open(path) as store:
        loop = asyncio.new_event_loop()
        blocks, task = loop.run_until_complete(make(store))
        loop.close()
        blocks.close()
        blocks.close()
        task._log_destroy_pending = False


END = """
import os, sys
import kvasir.queue, kvasir.store
store = kvasir.store.open(sys.argv[1])
queue = kvasir.queue.Queue(store)
keys = [i.to_bytes(16, "little") for i in range(400)]
memory = [bytearray(4096) for _ in keys]
queue.put(keys, [key * 256 for key in keys])
queue.get(keys, memory)
if sys.argv[2] == "cycle":
    store.again = queue
    del store, queue
elif sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        try:
            queue.poll()
        except (ValueError, OSError):
            sys.exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
elif sys.argv[2] == "store":
    del queue
    store.close()
"""


def test_end_of_the_program():
    for how in ("nothing", "cycle", "store") + (() if SANITIZED else ("fork",)):  # test_ends.py says why
        with folder() as path:
            done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", END, path, how],  # it forks beside threads
                                  capture_output=True, text=True, check=False, timeout=120,
                                  env={**os.environ, "PYTHONPATH": str(BUILD / "python")})
            equal((done.returncode, done.stderr), (0, ""), how)


if __name__ == "__main__":
    run(globals())
