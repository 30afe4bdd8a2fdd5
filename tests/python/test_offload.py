# SPDX-License-Identifier: Apache-2.0
"""kvasir.offload: jobs against a dictionary, few buffers, lost bytes, a store that is down, and a process killed in mid-store."""
import hashlib
import json
import mmap
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import time

from kvpython import BUILD, check, equal, folder, raises, run, stopped  # first: it finds the package
import kvasir
from kvasir.offload import ABSENT, AGAIN, HIT, Offload, size_of

CHUNK = 12288


def content(key):
    """The bytes that belong to @key."""
    return hashlib.shake_128(key).digest(CHUNK)


def key_of(i):
    return hashlib.sha256(b"%d" % i).digest() + b"\0\0\0\1"


class Engine:
    """Host memory of an engine: chunks, written before they are stored. @pages: whole pages, which the library uses itself."""

    def __init__(self, n=64, pages=True, **options):
        self.memory, self.n = mmap.mmap(-1, n * CHUNK) if pages else memoryview(bytearray(n * CHUNK + 8))[8:], n
        self.tier = Offload(self.memory, CHUNK, fingerprint="m", **options)
        self.jobs = 0

    def put(self, chunk, data):
        self.memory[chunk * CHUNK:(chunk + 1) * CHUNK] = data

    def read(self, chunk):
        return bytes(self.memory[chunk * CHUNK:(chunk + 1) * CHUNK])

    def end(self, job):
        """Go on, as steps of the engine do, until @job has ended."""
        watch, limit = select.poll(), time.monotonic() + 60
        watch.register(self.tier._manager.fileno(), select.POLLIN)
        while True:
            for transfer in self.tier.finished():
                equal(transfer.job, job, "job")
                return transfer
            check(time.monotonic() < limit, "the job has no end")
            watch.poll(20)

    def store(self, keys, chunks):
        for key, chunk in zip(keys, chunks):
            self.put(chunk, content(key))
        self.jobs += 1
        self.tier.store(self.jobs, keys, chunks)
        return self.end(self.jobs).ok

    def load(self, keys, chunks):
        for chunk in chunks:
            self.put(chunk, bytes(CHUNK))
        self.jobs += 1
        self.tier.load(self.jobs, keys, chunks)
        ok = self.end(self.jobs).ok
        for key, chunk, there in zip(keys, chunks, ok):
            check(not there or self.read(chunk) == content(key), "wrong bytes")
        return ok

    def lookup(self, key):
        """The answer once it isn't AGAIN."""
        limit = time.monotonic() + 60
        while self.tier.lookup(key) == AGAIN:
            check(time.monotonic() < limit, "AGAIN for ever")
            time.sleep(0.002)
        return self.tier.lookup(key)

    def close(self):
        self.tier.close()
        equal(self.tier.busy, False, "busy")
        free(self.memory)


def free(memory):
    """Free an engine's memory: a BufferError if the tier still holds it."""
    if isinstance(memory, mmap.mmap):
        memory.close()
    else:
        owner = memory.obj
        memory.release()
        owner.clear()


def test_sizes():
    """Texts as kv-indexer takes them, and numbers."""
    for text, wanted in (("5", 5), ("5B", 5), ("2K", 2048), ("2KiB", 2048), ("2KB", 2000), ("2kB", 2000), ("3M", 3 << 20), ("3MB", 3000000),
                         ("200GiB", 200 << 30), ("200GB", 200 * 10 ** 9), ("1T", 1 << 40), ("1TB", 10 ** 12), ("16777215TiB", 16777215 << 40)):
        equal(size_of(text), wanted, text)
        equal(taken_by_the_indexer(text), True, f"kv-indexer and {text}")
    equal([size_of(x) for x in (5, 2e11, 0.0, 2 ** 63 + 1)], [5, 200_000_000_000, 0, 2 ** 63 + 1], "numbers, as JSON has them")
    for wrong in ("x", "5XB", "", "-5GiB", "nan", "1.5MiB", "5 MiB", " 5", "2e11", "5mib", "5k", "5Gib", "16777216TiB", "+5", "5_0"):
        raises(ValueError, size_of, wrong)
        equal(taken_by_the_indexer(wrong), False, f"kv-indexer and {wrong!r}")
    for wrong in (-1, -0.5, float("nan"), float("inf"), 1e30, 1 << 64, True, None):
        check("no size" in str(raises(kvasir.Error, size_of, wrong)), wrong)


def taken_by_the_indexer(text):
    """Whether kv-indexer takes @text for a size; what is refused behind it ends it."""
    done = subprocess.run([BUILD / "bin/kv-indexer", f"--max-body={text}", "--no-such-option"], capture_output=True, text=True, check=False)
    check("--max-body" in done.stderr or "no-such-option" in done.stderr, done.stderr)
    return "is not a size" not in done.stderr


def test_against_a_dictionary_with_few_buffers():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng = random.Random(seed)
    for pages, staging in ((True, 8), (False, 8), (False, 64)):
        with folder() as path:
            engine, model = Engine(pages=pages, disk=path, disk_bytes="16MiB", staging_blocks=staging), set()
            keys = [key_of(i) for i in range(200)]
            for _ in range(25):
                some = rng.sample(keys, rng.randrange(1, 40))
                chunks = rng.sample(range(engine.n), len(some))
                if rng.random() < 0.5:
                    equal(engine.store(some, chunks), [True] * len(some), "stored")
                    model.update(some)
                    check(not pages or all(engine.tier.lookup(key) == HIT for key in some), "found when the job has ended")
                else:
                    engine.tier.flush()
                    found = [engine.lookup(key) for key in some]
                    equal(found, [HIT if key in model else ABSENT for key in some], "lookup")
                    equal(engine.load(some, chunks), [key in model for key in some], "loaded")
                    for key in some:
                        engine.tier._lost.pop(key, None)
            equal(engine.tier._direct, pages, "without buffers")
            engine.close()
            again = Engine(pages=not pages, disk=path, disk_bytes="16MiB")
            equal([again.lookup(key) for key in keys], [HIT if key in model else ABSENT for key in keys], "after a restart")
            equal(again.load(keys[:60], range(60)), [key in model for key in keys[:60]], "loaded after a restart")
            again.close()


def test_many_jobs_at_once():
    for pages in (True, False):
        many_jobs(pages)


def many_jobs(pages):
    with folder() as path:
        engine = Engine(n=128, pages=pages, disk=path, disk_bytes="16MiB", staging_blocks=8, max_jobs=4)
        keys = [key_of(i) for i in range(128)]
        for i, key in enumerate(keys):
            engine.put(i, content(key))
        for job in range(32):
            engine.tier.store(job, keys[4 * job:4 * job + 4], range(4 * job, 4 * job + 4))
        done = {}
        limit = time.monotonic() + 60
        while len(done) < 32:
            check(time.monotonic() < limit, "jobs have no end")
            done.update((transfer.job, transfer) for transfer in engine.tier.finished())
        check(all(all(transfer.ok) and transfer.bytes == 4 * CHUNK for transfer in done.values()), "stored")
        engine.tier.flush()
        for job in range(32):
            engine.tier.load(job, keys[4 * job:4 * job + 4], range(4 * job, 4 * job + 4))
        engine.tier.drain()  # all of them end, with their bytes or without
        results = engine.tier.finished()
        equal(sorted(transfer.job for transfer in results), list(range(32)), "drained")
        for transfer in results:
            for key, ok in zip(transfer.keys, transfer.ok):
                check(not ok or engine.read(keys.index(key)) == content(key), "wrong bytes")
        engine.close()


def test_closed_with_jobs_that_have_ended_and_others_under_way():
    for jobs, pages in ((1, False), (1, True), (40, False), (40, True)):
        with folder() as path:
            engine, keys = Engine(pages=pages, disk=path, disk_bytes="4MiB"), [key_of(i) for i in range(40)]
            for job in range(jobs):
                engine.put(job, content(keys[job]))
                engine.tier.store(job, [keys[job]], [job])
            if jobs == 1:
                select.select([engine.tier._manager.fileno()], [], [], 60)  # it has ended; nobody took its result
            engine.tier.close()
            free(engine.memory)
            equal(len(engine.tier.finished()) if not engine.tier._rounds else -1, jobs, "results")


def test_a_signal_while_a_job_is_begun():
    """A handler that raises: jobs that the library took are ended and reported, and the tier can be closed."""
    for pages in (True, False):
        with folder() as path:
            engine, keys = Engine(pages=pages, disk=path, disk_bytes="4MiB"), [key_of(i) for i in range(4)]
            equal(engine.store(keys, range(4)), [True] * 4, "stored")
            engine.tier.flush()
            begun = time.monotonic()
            equal(engine.load(keys, range(4)), [True] * 4, "loaded")
            longest = min(time.monotonic() - begun, 0.001)
            check(stopped(100, longest, engine.tier.load, 7, keys, range(4, 8)) > 0, "no signal")
            engine.tier.drain()
            equal({transfer.job for transfer in engine.tier.finished()}, {7}, "jobs")
            equal(engine.load(keys, range(8, 12)), [True] * 4, "it goes on")
            engine.close()


def test_a_lost_chunk_is_absent():
    """Bytes on disk are destroyed: the load fails, the lookup says so, and a store brings the chunk back."""
    with folder() as path:
        engine, keys = Engine(disk=path, disk_bytes="4MiB", disk_buffered=True), [key_of(i) for i in range(8)]
        equal(engine.store(keys, range(8)), [True] * 8, "stored")
        engine.close()
        blocks = max(pathlib.Path(path).iterdir(), key=lambda file: file.stat().st_size)
        data = blocks.read_bytes()
        at = data.index(content(keys[3]))
        blocks.write_bytes(data[:at + 100] + b"\0\0\0\0" + data[at + 104:])
        engine = Engine(disk=path, disk_bytes="4MiB", disk_buffered=True, forget=3600)
        equal([engine.lookup(key) for key in keys], [HIT] * 8, "found")
        equal(engine.load(keys, range(8)), [i != 3 for i in range(8)], "one is damaged")
        equal([engine.lookup(key) for key in keys], [ABSENT if i == 3 else HIT for i in range(8)], "and absent now")
        equal(engine.store(keys[3:4], [3]), [True], "stored again")
        engine.tier.flush()
        equal((engine.lookup(keys[3]), engine.load(keys[3:4], [9])), (HIT, [True]), "back")
        engine.close()


def test_an_object_store():
    with folder() as path:
        keys = [key_of(i) for i in range(40)]
        engine = Engine(object=path)
        equal(engine.store(keys, range(40)), [True] * 40, "stored")
        engine.close()
        other = Engine(object=path)
        equal([other.lookup(key) for key in keys + [key_of(99)]], [HIT] * 40 + [ABSENT], "another process finds them")
        equal(other.load(keys, range(40)), [True] * 40, "loaded")
        other.close()
        model = Offload(bytearray(8 * CHUNK), CHUNK, fingerprint="another", object=path)
        while model.lookup(keys[0]) == AGAIN:
            time.sleep(0.002)
        equal(model.lookup(keys[0]), ABSENT, "another model's")
        model.close()


def test_keys_of_another_length_and_arguments():
    with folder() as path:
        engine = Engine(disk=path, disk_bytes="4MiB")
        for key in (b"short", bytes(64), b""):
            equal(engine.store([key], [0]), [True], "stored")
            engine.tier.flush()
            equal((engine.lookup(key), engine.load([key], [1])), (HIT, [True]), "loaded")
        equal(engine.lookup(b"shorter"), ABSENT, "another key")
        equal((engine.store([], []), engine.load([], [])), ([], []), "no keys")
        raises(ValueError, engine.tier.load, 1, [key_of(1)], [])
        equal(engine.store([key_of(1)], [engine.n - 1]), [True], "the last chunk")
        engine.jobs += 1
        engine.tier.store(engine.jobs, [key_of(2)], [engine.n])
        equal(engine.end(engine.jobs).ok, [False], "no such chunk")
        engine.tier.touch([key_of(1)])
        engine.close()
        raises(ValueError, engine.tier.lookup, key_of(1))
        raises(kvasir.Error, Offload, bytearray(CHUNK), CHUNK, fingerprint="m", disk=path + "/a/b/c/d", disk_bytes=1 << 20)
        raises(ValueError, Offload, bytearray(1), CHUNK, fingerprint="m", disk=path, disk_bytes=1 << 22)


KILLED = """
import json, sys, time
sys.path[:0] = sys.argv[3:]
from test_offload import CHUNK, Engine, content, key_of
engine = Engine(disk=sys.argv[1], disk_bytes="64MiB", **json.loads(sys.argv[2]))
print("begun", flush=True)
i = 0
while i < 5000:  # fewer than the disk has slots: nothing is evicted, however late the kill comes
    chunks = range(16)
    engine.store([key_of(i + k) for k in chunks], chunks)
    engine.tier.flush()
    i += 16
    print(i, flush=True)
time.sleep(60)
"""


def test_killed_in_mid_store():
    killed_in_mid_store({})


def test_killed_in_mid_store_in_the_page_cache():
    killed_in_mid_store({"disk_buffered": True, "disk_volatile": True})


def killed_in_mid_store(options):
    here = str(pathlib.Path(__file__).parent)
    with folder() as path:
        done = 0
        for turn in range(3):
            child = subprocess.Popen([sys.executable, "-B", "-c", KILLED, path, json.dumps(options), here, str(BUILD / "python")],
                                     stdout=subprocess.PIPE, text=True)
            equal(child.stdout.readline(), "begun\n", "the child runs")
            for _ in range(2 + turn):
                done = max(done, int(child.stdout.readline()))
            child.send_signal(signal.SIGKILL)
            child.wait(60)
            child.stdout.close()
            engine = Engine(disk=path, disk_bytes="64MiB", **options)
            keys = [key_of(i) for i in range(done)]
            equal([engine.lookup(key) for key in keys], [HIT] * done, "what was written is there")
            for i in range(0, done + 64, 32):  # load() checks the bytes; what was under way is whole or absent
                some = [key_of(i + k) for k in range(32)]
                found = [engine.lookup(key) == HIT for key in some]
                equal(engine.load(some, range(32)), found, "loaded")
            engine.close()


if __name__ == "__main__":
    run(globals())
