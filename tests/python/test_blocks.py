# SPDX-License-Identifier: Apache-2.0
"""kvasir.blocks: a pool against a naive one, and tiers that give the right bytes back, also after a restart."""
import array
import contextlib
import ctypes
import errno
import mmap
import os
import random
import select
import subprocess
import sys
import threading
import time

from kvpython import BUILD, check, equal, folder, raises, run  # first: it finds the package
import kvasir
from kvasir import _abi, _chains, blocks
from kvasir.blocks import MISS, ON_DISK, READY, Chain, Manager, Pool, Shape
from kvasir.index import hash_tokens, sequence_hashes

SHAPE = Shape(layers=2, page_size=4, inner=16)


def keys_of(tokens, size=4):
    return sequence_hashes(hash_tokens(tokens, size))


def fill(memory, ids, seed):
    """Bytes of a block that its key decides."""
    for block, key in zip(ids, seed):
        memory[block * SHAPE.nbytes:(block + 1) * SHAPE.nbytes] = random.Random(key).randbytes(SHAPE.nbytes)


def bytes_of(key):
    return random.Random(key).randbytes(SHAPE.nbytes)


def test_chain_is_the_struct_of_c():
    equal(_chains._CHAIN.size, ctypes.sizeof(_abi.kvbm_chain), "size")
    chain = _abi.kvbm_chain(group=2, keys=3, parent=4, position=5, tokens=6, scattered=True)
    equal(_chains._CHAIN.unpack(bytes(chain))[1:], (2, 3, 4, 5, 6, True), "fields")
    equal(ctypes.sizeof(_abi.kvbm_handle), 16, "a handle")
    equal((_abi.kvbm_handle.block.offset, _abi.kvbm_handle.block.size), (8, 4), "its block number")


def test_as_much_as_c_reads():
    """A parent has a key's length, and each block its tokens: C would read beyond shorter ones."""
    keys = keys_of(range(16))
    with Pool(n_blocks=8, block_size=4) as pool, Pool(n_blocks=8, block_size=4, key_len=16) as wide:
        for tokens in (range(15), range(17), (), array.array("I", range(4))):
            with pool.allocate(4) as fresh:
                raises(kvasir.Invalid, pool.register, fresh, keys, tokens=tokens)
                equal(len(fresh), 4, "they stay the caller's")
        for parent in (b"", b"1234567", b"123456789", keys):
            with pool.allocate(4) as fresh:
                raises(kvasir.Invalid, pool.register, fresh, keys, parent=parent, position=1)
        with wide.allocate(1) as fresh:
            raises(kvasir.Invalid, wide.register, fresh, b"k" * 16, parent=7, position=1)
        pool.register(pool.allocate(4), keys, tokens=range(16), parent=5, position=1).release()
        wide.register(wide.allocate(1), b"k" * 16, parent=b"p" * 16, position=1).release()
    with Manager(SHAPE, host_bytes=1 << 20, fingerprint="test") as manager, \
            manager.attach(bytearray(4 * SHAPE.nbytes)) as cache:
        for call in (manager.lookup, manager.prepare_load, manager.prepare_store):
            raises(kvasir.Invalid, call, keys, parent=b"short", position=1)
        for call in (cache.store, cache.load):
            raises(kvasir.Invalid, call, keys, range(4), parent=b"short", position=1)


def test_pool_against_a_model():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, known = random.Random(seed), set()
    prompts = [keys_of([rng.randrange(2) for _ in range(32)]) for _ in range(12)]
    with Pool(n_blocks=4096, block_size=4) as pool:  # more than ever used: nothing is evicted
        for _ in range(300):
            prompt = rng.choice(prompts)
            wanted = next((i for i, key in enumerate(prompt) if key not in known), len(prompt))
            with pool.match(prompt) as held:
                equal((len(held), pool.probe(prompt)), (wanted, wanted), "prefix")
                equal(len(set(held.ids)), wanted, "blocks")
                if wanted < len(prompt):
                    fresh = pool.allocate(1)
                    check(fresh.ids[0] not in held.ids, "a fresh block is another one")
                    pool.register(fresh, prompt[wanted:wanted + 1], parent=prompt[wanted - 1:wanted] if wanted else None,
                                  position=wanted).release()
                    known.add(prompt[wanted])
        equal(pool.stats()["inactive_pool_size"], len(known), "registered")
        equal(pool.forget(prompts[0]), len([key for key in prompts[0] if key in known]), "forgotten")
        pool.forget()
        equal(pool.stats()["reset_pool_size"], 4096, "free")


def test_pool_errors_and_lifetimes():
    pool = Pool(n_blocks=4, block_size=4, key_len=8)
    keys = keys_of(range(16))
    held = pool.register(pool.allocate(4), keys, tokens=array.array("I", range(16)))
    equal(raises(kvasir.Error, pool.allocate, 1).errno, errno.ENOSPC, "no room")
    equal(raises(kvasir.Error, pool.close).errno, errno.EBUSY, "blocks are held")
    held.release()
    held.release()
    fresh = pool.allocate(2)  # evicts
    equal(pool.probe(keys), 2, "leaves go first")
    raises(ValueError, pool.register, fresh, keys)
    equal(len(fresh), 2, "still held after a refusal")
    del fresh
    equal(pool.stats()["reset_pool_size"], 2, "released with its last reference")
    raises(ValueError, pool.match, b"123")
    raises(ValueError, pool.match, blocks.Chain(bytes(32), 16))
    for form in (keys.tobytes(), bytearray(keys.tobytes()), memoryview(keys), [keys[i:i + 1].tobytes() for i in range(4)], blocks.Chain(keys)):
        equal(pool.probe(form), 2, f"keys as {type(form).__name__}")
    equal(pool.retain(keys, 80), 2, "retained")
    pool.close()
    raises(ValueError, pool.stats)
    equal(raises(kvasir.Error, pool.match, keys).errno, errno.EINVAL, "a closed pool")
    raises(KeyError, Pool, n_blocks=1, block_size=4, eviction="none")
    raises(kvasir.Error, Pool, n_blocks=1, block_size=3)


def test_tiers_give_the_bytes_back():
    with folder() as path:
        keys, ids = keys_of(range(64)), list(range(16))
        memory = bytearray(16 * SHAPE.nbytes)
        fill(memory, ids, keys)
        options = {"host_bytes": 1 << 20, "disk": path, "disk_bytes": "16MiB", "disk_buffered": True, "fingerprint": "test"}
        with Manager(SHAPE, **options) as manager, manager.attach(memory) as cache:
            equal(raises(kvasir.Error, manager.close).errno, errno.EBUSY, "a cache is attached")
            equal(manager.lookup(keys), bytes(16), "nothing yet")
            equal(cache.store(keys, ids), 16, "stored")
            equal(manager.lookup(keys), bytes([blocks.READY]) * 16, "in host memory")
            memory[:] = bytes(len(memory))
            equal(cache.load(keys, ids), 16, "loaded")
            equal(bytes(memory), b"".join(map(bytes_of, keys)), "bytes")
            equal(cache.load(keys_of(range(1, 65)), ids), 0, "another prompt")
            equal(manager.touch(keys), 16, "touched")
            manager.drain(60)
            check(manager.stats()["host"]["used"] == 16 and "kvbm" in manager.metrics(), "statistics")
        with Manager(SHAPE, **options) as manager:  # a restart: the disk has them
            target = bytearray(16 * SHAPE.nbytes)
            with manager.attach(target) as cache:
                equal(set(manager.lookup(keys)), {blocks.ON_DISK}, "on disk")
                backwards = ids[::-1]
                equal(cache.load(keys, backwards, timeout=60), 16, "loaded")
                equal(bytes(target), b"".join(map(bytes_of, reversed(keys))), "bytes")
        with Manager(SHAPE, **options, io="threads") as manager, manager.attach(target) as cache:
            equal(cache.load(keys, ids, timeout=60), 16, "loaded by threads")
        check("'ring'" in str(raises(ValueError, Manager, SHAPE, **options, io="ring")), "executors have names")
        check("'fifo'" in str(raises(ValueError, Manager, SHAPE, **options, disk_eviction="fifo")), "so have evictions")
        raises(TypeError, Manager, SHAPE, no_such_option=1)


ELSEWHERE = """
import mmap, os, sys
fd, stride, size = map(int, sys.argv[1:4])
memory = mmap.mmap(fd, os.fstat(fd).st_size)
for line in sys.stdin:
    what, block, key = line.split()
    at, wanted = int(block) * stride, bytes([int(key) % 251]) * size
    if what == "write":
        memory[at:at + size] = wanted
    print("ok" if memory[at:at + size] == wanted else "wrong", flush=True)
"""


def test_host_memory_shared_with_another_process():
    stride, n = -(-SHAPE.nbytes // 4096) * 4096, 8
    fd = os.memfd_create("kvasir-test")
    os.posix_fallocate(fd, 0, n * stride)
    child = subprocess.Popen([sys.executable, "-B", "-c", ELSEWHERE, str(fd), str(stride), str(SHAPE.nbytes)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, pass_fds=[fd])

    def worker(what, pin, keys):
        """Let the other process write or compare a pin's blocks."""
        for block, key in zip(pin.blocks(), keys):
            child.stdin.write(f"{what} {block} {key}\n")
            child.stdin.flush()
            equal(child.stdout.readline(), "ok\n", what)

    prompts = [keys_of(range(1000 * i, 1000 * i + 4 * n)) for i in range(3)]
    with folder() as path, mmap.mmap(fd, n * stride) as memory:
        options = {"disk": path, "disk_bytes": 8 << 20, "disk_buffered": True, "fingerprint": "test", "host_memory": memory}
        with Manager(SHAPE, **options) as manager:
            equal(manager.host_stride, stride, "stride")
            for keys in prompts:  # each fills the host tier
                with manager.prepare_store(keys) as pin:
                    worker("write", pin, keys)
                    equal(pin.commit([True] * (n - 1) + [False] if keys is prompts[0] else None), n - (keys is prompts[0]), "committed")
                manager.drain(60)
            raises(BufferError, memory.close)  # lent
            equal(raises(kvasir.Error, Manager, SHAPE, host_memory=memoryview(memory)[stride:]).errno, errno.EBUSY, "another manager's")
        with Manager(SHAPE, **options) as manager:
            for keys in prompts:
                with manager.prepare_load(keys) as pin:
                    pin.wait(60)
                    good = [block for block in pin.blocks() if block != blocks.NO_BLOCK]
                    equal(len(good), n - (keys is prompts[0]), "loaded")
                    worker("read", pin, keys[:len(good)])
        raises(kvasir.Error, Manager, SHAPE, **{**options, "host_memory": memoryview(memory)[512:]})
        raises(ValueError, Manager, SHAPE, host_bytes=len(memory) + 1, **options)
    child.stdin.close()
    equal(child.wait(60), 0, "the other process")
    child.stdout.close()
    os.close(fd)


def test_options_as_in_a_file():
    with mmap.mmap(-1, 1 << 20) as memory:
        with Manager(SHAPE, host_memory=memory, host_bytes="512KiB") as manager:
            raises(BufferError, memory.close)
        raises(ValueError, Manager, SHAPE, host_memory=memory, host_bytes="2MiB")
    for options in ({"gpu_copy": "engines"}, {"gpu_copy": "single"}, {"host_policy": "frequency"}, {"object_policy": {"min_priority": 3}},
                    {"disk_policy": {"policy": "never"}}, {"shard": {"rank": 1, "n_ranks": 2}}, {"host_policy": {"policy": _abi.KVBM_POLICY_FREQUENCY, "threshold": 3}}):
        with Manager(SHAPE, host_bytes="1MiB", **options):
            pass
    for options in ({"gpu_copy": "cards"}, {"host_policy": "often"}, {"host_policy": {"policy": "often"}}):
        raises(ValueError, Manager, SHAPE, host_bytes="1MiB", **options)
    for options, named in (({"shard": {"rank": 1, "ranks": 2}}, "shard has no 'ranks'"), ({"shard": {"n_ranks": "2"}}, "n_ranks"),
                           ({"disk_policy": {"policy": "never", "thresh": 3, "extra": 1}}, "disk_policy has no 'extra', 'thresh'")):
        problem = raises(TypeError, Manager, SHAPE, host_bytes="1MiB", **options)
        check(named in str(problem), f"{options}: {problem}")
    keys = keys_of(range(4))
    for policy, place in (("never", MISS), ("presence", ON_DISK)):
        with folder() as path:
            options = {"host_bytes": "1MiB", "disk": path, "disk_bytes": "8MiB", "fingerprint": "test", "disk_policy": policy}
            with Manager(SHAPE, **options) as manager, manager.attach(bytearray(SHAPE.nbytes)) as cache:
                equal(cache.store(keys, [0]), 1, "stored")
                manager.drain(60)
            with Manager(SHAPE, **options) as manager:
                equal(list(manager.lookup(keys)), [place], policy)


def test_jobs():
    keys, ids = keys_of(range(64)), list(range(16))
    memory = bytearray(16 * SHAPE.nbytes)
    fill(memory, ids, keys)
    with Manager(SHAPE, host_bytes=1 << 20) as manager, manager.attach(memory) as cache:
        with manager.prepare_store(keys) as pin:
            equal(pin.prefix, 16, "reserved")
            job = manager.submit(pin, cache, ids, tag=5)
        check(select.select([manager], [], [], 60)[0], "the descriptor")
        done = manager.poll()
        equal([(d.id, d.tag, d.status, d.n, d.ok) for d in done], [(job, 5, 0, 16, 16)], "stored")
        memory[:] = bytes(len(memory))
        ok = bytearray(2)
        with manager.prepare_load(keys) as pin:
            equal((pin.prefix, pin.state()), (16, bytes([blocks.READY]) * 16), "found")
            pin.wait()
            raises(ValueError, manager.submit, pin, cache, [1])
            equal(raises(kvasir.Error, manager.close).errno, errno.EBUSY, "a pin is held")
            wanted = [blocks.NO_BLOCK if i == 3 else i for i in ids]
            done = manager.wait(manager.submit(pin, cache, wanted, ok=ok), 60)
        equal((done.status, done.ok, ok), (0, 15, bytes([0xf7, 0xff])), "loaded")
        equal(bytes(memory[:3 * SHAPE.nbytes]), b"".join(map(bytes_of, keys[:3])), "bytes")
        equal(memory[3 * SHAPE.nbytes:4 * SHAPE.nbytes], bytes(SHAPE.nbytes), "left out")
        raises(kvasir.NotFound, manager.cancel, job)


def test_threads():
    problems = []
    with Manager(SHAPE, host_bytes=4 << 20) as manager:
        def work(number):
            try:
                memory = bytearray(4 * SHAPE.nbytes)
                with manager.attach(memory) as cache:
                    for turn in range(30):
                        keys = keys_of([number, turn] * 8)
                        fill(memory, range(4), keys)
                        equal(cache.store(keys, range(4), timeout=60), 4, "stored")
                        memory[:] = bytes(len(memory))
                        equal(cache.load(keys, range(4), timeout=60), 4, "loaded")
                        equal(bytes(memory), b"".join(map(bytes_of, keys)), "bytes")
            except BaseException as problem:  # pylint: disable=broad-except
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    equal(problems, [], "problems")


def test_fork_leaves_the_parents_manager_alone():
    memory = bytearray(4 * SHAPE.nbytes)
    with Manager(SHAPE, host_bytes=1 << 20) as manager, manager.attach(memory) as cache:
        keys = keys_of(range(16))
        equal(cache.store(keys, range(4)), 4, "stored")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if raises(kvasir.Error, manager.prepare_store, keys).errno == errno.ECHILD else 2
                cache.close()
                manager.close()
                with Manager(SHAPE, host_bytes=1 << 20) as own:  # one of its own
                    code = code if set(own.lookup(keys)) == {blocks.MISS} else 3
            finally:
                os._exit(code)
        equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "the child")
        equal(cache.load(keys, range(4)), 4, "the parent")


END = """
import sys, threading
from kvasir.blocks import Manager, Shape
from kvasir.index import hash_tokens, sequence_hashes
shape = Shape(layers=4, page_size=16, inner=1024)
manager = Manager(shape, host_bytes=64 << 20, disk=sys.argv[1], disk_bytes=64 << 20, disk_buffered=True, fingerprint="x")
cache = manager.attach(bytearray(32 * shape.nbytes))
started = threading.Event()
held = []
def work():
    try:
        endless()
    except ValueError:  # closed; a traceback of a daemon thread at the end can abort Python
        pass
def endless():
    for i in range(10**9):
        keys = sequence_hashes(hash_tokens([i] * 32, 1))
        pin = manager.prepare_store(keys)
        held.append(pin)
        manager.submit(pin, cache, range(32))
        pin = None
        if len(held) > int(sys.argv[2]):
            held.pop(0).release()
        manager.poll()
        started.set()
threading.Thread(target=work, daemon=True).start()
started.wait()
print("end", flush=True)
"""


def ended(text, *args):
    done = subprocess.run([sys.executable, "-B", "-c", text, *args], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                          capture_output=True, text=True, timeout=120, check=False)
    equal((done.returncode, done.stdout), (0, "end\n"), f"the end ({done.stderr})")


def test_interpreter_ends_with_jobs_under_way():
    for pins in 0, 1, 4, 4, 4:  # that the thread holds at most
        with folder() as path:
            ended(END, path, str(pins))


HOLDS = """
import sys
from kvasir.blocks import Manager, Shape
shape = Shape(layers=1, page_size=4, inner=16)
manager = Manager(shape, host_bytes=1 << 20, disk=sys.argv[1], disk_bytes=1 << 20, disk_buffered=True, fingerprint="x")
memory = bytearray(b"k" * 4 * shape.nbytes)
cache = manager.attach(memory)
keys = b"".join(i.to_bytes(8, "little") for i in range(1, 5))
stores = manager.prepare_store(keys)
job = manager.submit(stores, cache, range(4))
manager.wait(job, 60)
loads = manager.prepare_load(keys)
print("end", flush=True)
"""


def test_pins_held_at_the_end_lose_no_block():
    with folder() as path:
        ended(HOLDS, path)
        shape = Shape(layers=1, page_size=4, inner=16)
        memory = bytearray(4 * shape.nbytes)
        with Manager(shape, host_bytes=1 << 20, disk=path, disk_bytes=1 << 20, disk_buffered=True, fingerprint="x") as manager:
            with manager.attach(memory) as cache:
                equal(cache.load(b"".join(i.to_bytes(8, "little") for i in range(1, 5)), range(4), timeout=60), 4, "loaded")
        equal(bytes(memory), b"k" * len(memory), "bytes")


def test_pins_released_beside_close():
    """Each close() either refuses, or finds no pin; a pin released meanwhile touches no freed manager."""
    for turn in range(20):
        manager = Manager(SHAPE, host_bytes=1 << 20)
        pins = [manager.prepare_store(keys_of([turn, i] * 4)) for i in range(64)]
        thread = threading.Thread(target=lambda: [pin.release() for pin in pins])
        thread.start()
        refused = 0
        while not manager.closed:
            try:
                manager.close()
            except kvasir.Error as problem:
                equal(problem.errno, errno.EBUSY, "refused")
                refused += 1
        thread.join()


def test_pin_released_in_a_call_that_close_waits_for():
    """As the collector of garbage does, which may run inside any call."""
    manager = Manager(SHAPE, host_bytes=1 << 20)
    pins = [manager.prepare_store(keys_of([i] * 4)) for i in range(2)]
    closed = threading.Event()

    def close():
        with contextlib.suppress(kvasir.Error):
            manager.close()
        closed.set()

    def call_of_other_thread():
        manager._enter()
        threading.Thread(target=close, daemon=True).start()
        while not manager.closed:
            time.sleep(0.001)
        for pin in pins:
            pin.release()
        manager._leave()

    thread = threading.Thread(target=call_of_other_thread, daemon=True)
    thread.start()
    thread.join(30)
    equal(thread.is_alive(), False, "waits for itself")
    equal(closed.wait(30), True, "closed")
    equal(manager.closed, True, "no pin is left")


def test_scattered_keys_and_removal():
    shape = Shape(layers=1, page_size=4, inner=8)
    with folder() as path:
        for life in range(2):
            with Manager(shape, host_bytes=1 << 20, disk=path, disk_bytes=1 << 20, fingerprint="m", key_len=36) as manager:
                cache = bytearray(8 * shape.nbytes)
                keys = [bytes([i]) * 36 for i in range(4)]
                with manager.attach(cache) as blocks:
                    if life == 1:
                        equal(list(manager.lookup(Chain(keys, 36, scattered=True))), [MISS, ON_DISK, MISS, ON_DISK], "after a restart")
                        continue
                    cache[:] = bytes(i // shape.nbytes for i in range(len(cache)))
                    equal(blocks.store(Chain(keys, 36, scattered=True), [0, 1, 2, 3]), 4, "stored")
                    manager.drain(60)
                    mixed = Chain([keys[3], b"x" * 36, keys[0]], 36, scattered=True)
                    equal(list(manager.lookup(mixed)), [READY, MISS, READY], "a miss hides no other key")
                    with manager.prepare_load(mixed, timeout=60, in_place=True) as pin:
                        ok = bytearray(1)
                        done = manager.wait(manager.submit(pin, blocks, [7, 6, 5], ok=ok, timeout=60), 60)
                    equal((done.n, done.ok, ok[0]), (3, 2, 5), "job")
                    equal((cache[7 * shape.nbytes], cache[6 * shape.nbytes], cache[5 * shape.nbytes]), (3, 6, 0), "bytes")
                    raises(kvasir.Error, manager.lookup, mixed, parent=keys[0], position=1)
                    gone = manager.remove(keys[0] + keys[2] + keys[0] + b"y" * 36)
                    equal((gone.host, gone.disk, gone.object, gone.held), (2, 2, 0, 0), "removed")


if __name__ == "__main__":
    run(globals())
