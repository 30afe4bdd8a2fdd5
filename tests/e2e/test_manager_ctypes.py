# SPDX-License-Identifier: Apache-2.0
"""The tiers as an engine's connector has them, from Python: the engine's cache is memory of its own with block numbers
of its own; lookup, prepare, submit, poll through an eventfd, complete, all on opaque keys through ctypes."""
import ctypes
import os
import random
import select
import tempfile

from kvtest import *

U8, U32, U64, I32, INT, LONG, SIZE = (ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int,
                                      ctypes.c_long, ctypes.c_size_t)
PTR, STR, BOOL = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
MISS, READY, ON_DISK, REMOTE, PENDING = 0, 1, 2, 3, 4
LAYERS, PAGE, INNER, BLOCKS, KEY = 2, 16, 64, 32, 32
BLOCK_BYTES = LAYERS * 2 * PAGE * INNER * 2
STRIDE = (BLOCK_BYTES + 4095) // 4096 * 4096


def structure(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


StorageOpts = structure("StorageOpts", ("size", SIZE), ("kind", INT), ("bytes", U64), ("huge_pages", BOOL),
                        ("use_numa", BOOL), ("numa_node", U32), ("touch_threads", U32), ("device_id", U32),
                        ("memory", PTR))
LayoutConfig = structure("LayoutConfig", ("size", SIZE), ("kind", INT), ("num_blocks", U64), ("num_layers", U32),
                         ("outer_dim", U32), ("page_size", U32), ("inner_dim", U32), ("dtype_width_bytes", U32),
                         ("alignment", U32), ("num_heads", U32), ("dtype", INT), ("order", INT),
                         ("tensor_shape", U64 * 2))
Policy = structure("Policy", ("policy", INT), ("threshold", U32), ("min_priority", U32))
ManagerOpts = structure("ManagerOpts", ("size", SIZE), ("block", PTR), ("fingerprint", STR), ("key_len", U32),
                        ("events", PTR), ("host_bytes", U64), ("staging_blocks", U32), ("host_eviction", INT),
                        ("host_pinned", BOOL), ("huge_pages", BOOL), ("host_policy", Policy), ("disk", STR),
                        ("disk_bytes", U64))  # what follows is left at its default: that's what size is for
CacheOpts = structure("CacheOpts", ("size", SIZE), ("layout", PTR))
Chain = structure("Chain", ("size", SIZE), ("group", U32), ("keys", PTR), ("parent", PTR), ("position", U32),
                  ("tokens", PTR))
Job = structure("Job", ("size", SIZE), ("pin", PTR), ("cache", PTR), ("blocks", PTR), ("first_layer", U32),
                ("n_layers", U32), ("priority", I32), ("deadline_ns", U64), ("ready_fd", INT), ("ready_event", PTR),
                ("ok", PTR), ("tag", U64))
Done = structure("Done", ("id", U64), ("tag", U64), ("status", INT), ("n", U32), ("n_ok", U32), ("bytes", U64),
                 ("wait_ns", U64), ("run_ns", U64))


def load():
    library = ctypes.CDLL(str(BUILD / "lib" / "libkvbm.so"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name, result, *arguments in (
            ("kvbm_storage_create", INT, PTR, PTR), ("kvbm_storage_destroy", None, PTR),
            ("kvbm_layout_create", INT, PTR, PTR, SIZE, PTR), ("kvbm_layout_destroy", None, PTR),
            ("kvbm_manager_create", INT, PTR, PTR), ("kvbm_manager_destroy", INT, PTR, U32),
            ("kvbm_cache_attach", INT, PTR, PTR, PTR), ("kvbm_cache_detach", INT, PTR),
            ("kvbm_manager_lookup", LONG, PTR, PTR, SIZE, PTR),
            ("kvbm_manager_touch", LONG, PTR, U32, PTR, SIZE),
            ("kvbm_manager_prepare_load", LONG, PTR, PTR, SIZE, PTR, PTR),
            ("kvbm_manager_prepare_store", LONG, PTR, PTR, SIZE, PTR),
            ("kvbm_manager_submit", ctypes.c_int64, PTR, PTR), ("kvbm_manager_poll", LONG, PTR, PTR, SIZE),
            ("kvbm_manager_fd", INT, PTR), ("kvbm_manager_drain", INT, PTR, U32),
            ("kvbm_pin_release", None, PTR), ("kvbm_pin_state", LONG, PTR, PTR)):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Engine:
    """Who has a cache: a bytearray of BLOCKS blocks, as [block][layer][K or V][token][element]."""

    def __init__(self, library, directory):
        self.library = library
        self.memory = bytearray(BLOCKS * BLOCK_BYTES)
        self.view = (U8 * len(self.memory)).from_buffer(self.memory)
        self.storage, self.layout, self.manager, self.cache = PTR(), PTR(), PTR(), PTR()
        storage = StorageOpts(ctypes.sizeof(StorageOpts), 5, len(self.memory), memory=ctypes.addressof(self.view))
        config = LayoutConfig(ctypes.sizeof(LayoutConfig), 1, BLOCKS, LAYERS, 2, PAGE, INNER, 2)
        equal(library.kvbm_storage_create(ctypes.byref(storage), ctypes.byref(self.storage)), 0, "storage")
        equal(library.kvbm_layout_create(ctypes.byref(config), ctypes.byref(self.storage), 1, ctypes.byref(self.layout)),
              0, "layout")
        opts = ManagerOpts(ctypes.sizeof(ManagerOpts), ctypes.cast(ctypes.byref(config), PTR), b"test", KEY, None,
                           12 * STRIDE, disk=directory.encode(), disk_bytes=200 * STRIDE)
        equal(library.kvbm_manager_create(ctypes.byref(opts), ctypes.byref(self.manager)), 0, "manager")
        cache = CacheOpts(ctypes.sizeof(CacheOpts), self.layout)
        equal(library.kvbm_cache_attach(self.manager, ctypes.byref(cache), ctypes.byref(self.cache)), 0, "attach")
        self.fd = library.kvbm_manager_fd(self.manager)

    def close(self):
        equal(self.library.kvbm_cache_detach(self.cache), 0, "detach")
        equal(self.library.kvbm_manager_destroy(self.manager, 10000), 0, "destroy")
        self.library.kvbm_layout_destroy(self.layout)
        self.library.kvbm_storage_destroy(self.storage)

    def chain(self, keys):
        self.keys = ctypes.create_string_buffer(b"".join(keys), len(keys) * KEY)
        return Chain(ctypes.sizeof(Chain), 0, ctypes.cast(self.keys, PTR))

    def where(self, keys):
        states = (U8 * len(keys))()
        self.library.kvbm_manager_lookup(self.manager, ctypes.byref(self.chain(keys)), len(keys), states)
        return list(states)

    def run(self, pin, blocks, tag):
        """Submit, wait on the eventfd, take what ended. Which keys are there."""
        numbers, ok = (U32 * len(blocks))(*blocks), (U8 * ((len(blocks) + 7) // 8))()
        job = Job(ctypes.sizeof(Job), pin, self.cache, ctypes.cast(numbers, PTR), ok=ctypes.cast(ok, PTR), tag=tag)
        check(self.library.kvbm_manager_submit(self.manager, ctypes.byref(job)) > 0, "submit")
        self.library.kvbm_pin_release(pin)
        check(select.select([self.fd], [], [], 120)[0], "nothing ended")
        done = (Done * 4)()
        equal(self.library.kvbm_manager_poll(self.manager, done, 4), 1)
        equal((done[0].tag, select.select([self.fd], [], [], 0)[0]), (tag, []))
        return [bool(ok[i // 8] >> i % 8 & 1) for i in range(len(blocks))]

    def store(self, keys, blocks):
        pin = PTR()
        wanted = self.library.kvbm_manager_prepare_store(self.manager, ctypes.byref(self.chain(keys)), len(keys),
                                                         ctypes.byref(pin))
        check(all(self.run(pin, blocks, 7)), "stored")
        equal(self.library.kvbm_manager_drain(self.manager, 120000), 0)
        return wanted

    def load(self, keys, blocks):
        pin = PTR()
        self.library.kvbm_manager_prepare_load(self.manager, ctypes.byref(self.chain(keys)), len(keys), None,
                                               ctypes.byref(pin))
        return self.run(pin, blocks, 8)

    def block(self, number):
        return slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)


def digests(seed, n):
    source = random.Random(seed)
    return [source.randbytes(KEY) for _ in range(n)]


def test_connector():
    library = load()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(library, directory)
        prompts = [digests(seed, 8) for seed in range(5)]
        bytes_of = {key: random.Random(key).randbytes(BLOCK_BYTES) for prompt in prompts for key in prompt}
        equal(engine.where(prompts[0]), [MISS] * 8)
        for prompt in prompts:
            blocks = random.sample(range(BLOCKS), 8)
            for key, number in zip(prompt, blocks):
                engine.memory[engine.block(number)] = bytes_of[key]
            equal(engine.store(prompt, blocks), 8)
        equal(engine.where(prompts[4]), [READY] * 8)
        equal(engine.where(prompts[0])[7], ON_DISK)
        engine.close()

        engine = Engine(library, directory)  # another day
        for prompt in prompts:
            blocks = random.sample(range(BLOCKS), 8)
            equal(library.kvbm_manager_touch(engine.manager, 0, b"".join(prompt), 8), 8)
            equal(engine.load(prompt, blocks), [True] * 8)
            for key, number in zip(prompt, blocks):
                check(engine.memory[engine.block(number)] == bytes_of[key], "wrong bytes")
        equal(engine.load(digests(99, 3), [0, 1, 2]), [False] * 3)
        equal(engine.load(prompts[0][:4] + digests(98, 2), range(6)), [True] * 4 + [False] * 2)
        engine.close()


def test_child():
    """A forked worker gets an error, not a hang."""
    library = load()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(library, directory)
        child = os.fork()
        if child == 0:
            chain = engine.chain(digests(1, 1))
            refused = library.kvbm_manager_lookup(engine.manager, ctypes.byref(chain), 1, None) == -10  # ECHILD
            os._exit(0 if refused else 1)
        equal(os.waitpid(child, 0)[1], 0)
        engine.close()


if __name__ == "__main__":
    preload_sanitizer("libkvbm.so")
    run(globals())
