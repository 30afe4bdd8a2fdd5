# SPDX-License-Identifier: Apache-2.0
"""kvasir.lmcache.Client against the contract of LMCache's native connectors: numbers, completions, a descriptor; right bytes or a miss.

The driver here waits for the descriptor and drains as LMCache 0.5.6 does. tests/real/test_lmcache.py runs LMCache's own adapter.
"""
import contextlib
import ctypes
import logging
import os
import random
import resource
import select
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

from kvpython import BUILD, SLOW, check, equal, folder, raises, run  # first: it finds the package
import kvasir
import kvasir.lmcache
from kvasir import _connector
from kvasir.lmcache import Client

logging.getLogger("kvasir.lmcache").setLevel(logging.ERROR)


def memory(data):
    """A chunk's memory as LMCache lends it: a view of bytes over an address."""
    return memoryview((ctypes.c_ubyte * len(data)).from_buffer_copy(data))


class Driver:
    """Submits, waits for the descriptor, and sorts completions by their numbers."""

    def __init__(self, *args, **options):
        self.client, self.ended = Client(*args, **options), {}
        self.poller = select.poll()
        self.poller.register(self.client.event_fd(), select.POLLIN)

    def wait(self, *futures):
        """Wait until these have ended; returns (ok, results) of each."""
        while not all(future in self.ended for future in futures):
            check(self.poller.poll(60000 * SLOW), "nothing to drain")
            for future, ok, reason, results in self.client.drain_completions():
                check(future not in self.ended, "a second completion")
                check(not (ok and reason), f"all well, and a reason: {reason}")
                self.ended[future] = (ok, results)
        return [self.ended.pop(future) for future in futures]

    def set(self, keys, blocks):
        return self.wait(self.client.submit_batch_set(keys, [memory(block) for block in blocks]))[0]

    def get(self, keys, sizes):
        """Returns ok, and the bytes of each chunk or None."""
        views = [memory(bytes(size)) for size in sizes]
        ok, there = self.wait(self.client.submit_batch_get(keys, views))[0]
        return ok, [bytes(view) if found else None for view, found in zip(views, there)]

    def exists(self, keys):
        return self.wait(self.client.submit_batch_exists(keys))[0]

    def delete(self, keys):
        return self.wait(self.client.submit_batch_delete(keys))[0]


@contextlib.contextmanager
def driver(*args, **options):
    made = Driver(*args, **options)
    try:
        yield made
    finally:
        made.client.close()


def names(count, salt=""):
    return [f"org/model@{number:08x}@0@{number * 7919:064x}{salt}" for number in range(count)]


def test_against_a_dictionary():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, keys, model = random.Random(seed), names(30) + names(10, "@salt"), {}
    sizes = {key: rng.randrange(1, 9000) for key in keys}
    with folder() as path:
        for _ in range(3):  # each time after a restart
            with driver(path) as ours:
                for _ in range(60):
                    some, step = rng.sample(keys, rng.randrange(1, 8)), rng.randrange(4)
                    if step == 0:
                        blocks = [rng.randbytes(sizes[key]) for key in some]
                        equal(ours.set(some, blocks), (True, None), "set")
                        for key, block in zip(some, blocks):
                            model.setdefault(key, block)
                    elif step == 1:
                        equal(ours.get(some, [sizes[key] for key in some]), (True, [model.get(key) for key in some]), "get")
                    elif step == 2:
                        equal(ours.exists(some), (True, [key in model for key in some]), "exists")
                    else:
                        equal(ours.delete(some), (True, [True] * len(some)), "delete")
                        for key in some:
                            model.pop(key, None)
        with driver(path, fingerprint="other weights") as ours:
            equal(ours.exists(keys), (True, [False] * len(keys)), "another model's")


def test_weights_that_change_under_one_name():
    with folder() as path, mock.patch.object(kvasir.lmcache, "LOOK_S", 0.0):
        os.mkdir(f"{path}/model")
        with open(f"{path}/model/shard", "wb") as file:
            file.write(b"weights")
        keys = [f"{path}/model@00000000@0@{i:x}" for i in range(4)]

        @contextlib.contextmanager
        def driver(**options):
            made = Driver(f"{path}/store", **options)
            try:
                yield made
            finally:
                made.client.close()

        def found(made):
            there = sum(made.exists(keys)[1])
            made.set(keys, [b"block"] * 4)
            return there

        with driver() as first:
            equal(found(first), 0, "empty")
        with driver() as second:
            equal(found(second), 4, "the same files")
            os.utime(f"{path}/model/shard", ns=(1, 1))
            equal((found(second), sum(second.exists(["another@0@0@1"])[1])), (0, 0), "whether the engine has the new ones isn't known")
        with driver() as third:
            equal(found(third), 0, "trained anew")
        with driver() as third:
            equal(found(third), 4, "its own")
        for expected in (0, 4, 4):
            with driver(fingerprint="v1") as named:
                equal(found(named), expected, "a fingerprint in the place of the files")
            os.utime(f"{path}/model/shard", ns=(2, 2 + expected))


def test_lines_are_bounded_by_kind():
    """Each kind of line has a bound of its own, and says what was left out."""
    lines, now = [], [0.0]
    logger = SimpleNamespace(name="x", warning=lambda form, *args: lines.append(form % args))
    with mock.patch.object(_connector.time, "monotonic", lambda: now[0]):
        warn = _connector.Warner(logger, "on")
        for i in range(20000):
            warn(f"a set of {i} chunks", OSError(28, "full"))
            warn("asking", OSError(5, "io"))
        warn("asking", OSError(28, "full"))
        equal(lines, ["x: a set of 0 chunks: [Errno 28] full; on", "x: asking: [Errno 5] io; on", "x: asking: [Errno 28] full; on"], "lines")
        now[0] = 11.0
        warn("a set of 7 chunks", OSError(28, "full"))
        equal(lines[3:], ["x: a set of 7 chunks: [Errno 28] full; on (left out since the last such line: 19999)"], "with what was left out")
        for i in range(1000):
            warn("kind " + "x" * i, ValueError(i))
        check(len(lines) < 80 and len(warn._kinds) <= 65, f"{len(lines)} lines of many kinds")


def test_many_at_once():
    keys = names(200)
    with folder() as path, driver(path, threads=4) as ours:
        blocks = [bytes([number]) * 4096 for number in range(200)]
        views = [memory(block) for block in blocks]
        ours.wait(*[ours.client.submit_batch_set(keys[at:at + 10], views[at:at + 10]) for at in range(0, 200, 10)])
        targets = [memory(bytes(4096)) for _ in keys]
        futures = [ours.client.submit_batch_get(keys[at:at + 10], targets[at:at + 10]) for at in range(0, 200, 10)]
        equal(len(set(futures)), 20, "numbers")
        equal(ours.wait(*futures), [(True, [True] * 10)] * 20, "get")
        check(all(bytes(target) == block for target, block in zip(targets, blocks)), "bytes")
        equal((ours.client.drain_completions(), ours.poller.poll(0)), ([], []), "nothing more")


def test_sizes_and_odd_arguments():
    keys = names(3)
    with folder() as path, driver(path) as ours:
        ours.set(keys[:2], [b"a" * 100, b"b" * 100])
        equal(ours.get(keys, [99, 101, 100])[1], [None] * 3, "chunks of another length, and none")
        equal(ours.exists(keys[:2]), (True, [False, False]), "they are deleted: a set would find them there, and never mend them")
        equal(ours.set(keys[:2], [b"a" * 100, b"b" * 100]), (True, None), "set again")
        equal(ours.get(keys[:2], [100, 100])[1], [b"a" * 100, b"b" * 100], "mended")
        equal(ours.set(keys, [b"x"]), (False, None), "fewer views than keys")
        equal(ours.wait(ours.client.submit_batch_get(keys[:1], [b"read-only"]))[0], (False, [False]), "memory that can't be written")
        equal(ours.wait(ours.client.submit_batch_get(keys[:1], [5]))[0], (False, [False]), "no memory")
        equal((ours.exists([]), ours.set([], [])), ((True, []), (True, None)), "nothing")
        equal(ours.get(keys[:1], [100])[1], [b"a" * 100], "it goes on")
    raises(kvasir.Error, Client, "nowhere://x")


def test_a_queue_without_room():
    """What the queue doesn't take ends as a failure, and the descriptor tells."""
    keys = names(1)
    with folder() as path, driver(path, max_requests=1) as ours:
        first = ours.client.submit_batch_set(keys, [memory(b"1")])
        others = [ours.client.submit_batch_exists(keys) for _ in range(5)]  # none is polled before
        results = ours.wait(first, *others)
        equal((results[0], results[1:]), ((True, None), [(False, [False])] * 5), "one, and no more")
        equal(ours.exists(keys), (True, [True]), "it goes on")


def test_damage_is_a_miss_and_is_mended():
    keys, blocks, damaged = names(2), [os.urandom(50000), os.urandom(50000)], 0
    with folder() as path:
        with driver(path) as ours:
            ours.set(keys, blocks)
        for root, _, found in os.walk(path):
            for file in (os.path.join(root, name) for name in found):
                with open(file, "r+b") as chunk:
                    at = chunk.read().find(blocks[0][:100])
                    if at >= 0:
                        chunk.seek(at + 30000)
                        chunk.write(bytes([blocks[0][30000] ^ 8]))
                        damaged += 1
        equal(damaged, 1, "files with the first chunk")
        with driver(path) as ours:
            ours.client._store.discard = lambda key: time.sleep(3600)  # a store that doesn't answer must not hold up drain_completions()
            equal(ours.get(keys, [50000] * 2)[1], [None, blocks[1]], "get")
            equal(ours.exists(keys), (True, [False, True]), "a chunk that didn't verify is gone")
            equal(ours.set(keys, blocks), (True, None), "set again")
            equal(ours.get(keys, [50000] * 2), (True, blocks), "mended")


def test_a_full_disk():
    keys, limits = names(2), resource.getrlimit(resource.RLIMIT_FSIZE)
    with folder() as path, driver(path, flush_s=3600) as ours:
        equal(ours.set(keys[:1], [b"1" * 5000]), (True, None), "with room")
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        try:
            equal(ours.set(keys[1:], [b"2" * 5000]), (False, None), "without room")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        equal(ours.get(keys, [5000] * 2)[1], [b"1" * 5000, None], "get")
        equal(ours.set(keys, [b"1" * 5000, b"2" * 5000]), (True, None), "with room again")
        equal(ours.get(keys, [5000] * 2)[1], [b"1" * 5000, b"2" * 5000], "all")


def test_threads_and_the_end():
    keys = names(64)
    with folder() as path:
        ours = Driver(path)
        numbers, lock = [], threading.Lock()

        def submit(part):
            for key in part:
                future = ours.client.submit_batch_set([key], [memory(key.encode())])
                with lock:
                    numbers.append(future)

        threads = [threading.Thread(target=submit, args=(keys[at::4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        equal(ours.wait(*numbers), [(True, None)] * 64, "set")
        late = ours.client.submit_batch_set(["late"], [memory(b"late")])
        ours.client.close()  # waits for it
        ours.client.close()
        equal(ours.client.drain_completions(), [], "closed")
        after = ours.client.submit_batch_exists(keys)
        equal(ours.client.drain_completions(), [(after, False, "Queue is closed", [False] * 64)], "submitted after the end")
        with driver(path) as again:
            equal(again.exists(keys + ["late"]), (True, [True] * 65), f"after the end ({late})")
        text = "import sys; from kvasir.lmcache import Client; c = Client(sys.argv[1]); " \
               "c.submit_batch_set(['k'], [bytearray(9000)]); print('end')"
        done = subprocess.run([sys.executable, "-B", "-c", text, path], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              capture_output=True, text=True, timeout=120 * SLOW, check=False)
        equal((done.returncode, done.stdout), (0, "end\n"), f"the interpreter's end ({done.stderr})")


if __name__ == "__main__":
    run(globals())
