# SPDX-License-Identifier: Apache-2.0
"""Backends used as the public Python consumer of the ABI uses them: through ctypes, with 32-byte keys that are no
hash of the bytes, one handle shared by a writer and readers, and an empty manifest rewritten as a flush.

    test_store_ctypes.py [URI ...]     plugins are found by $KV_STORE_LIBRARY_PATH; a plain path is the file store

Without arguments: the template plugin, and the file store as libkvstore hands it out.
"""
import ctypes
import hashlib
import os
import shutil
import sys
import tempfile
import threading

from kvtest import *

u8p = ctypes.POINTER(ctypes.c_uint8)
SIZE, INT, PTR, STR = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p


class VTable(ctypes.Structure):
    """The table as the consumer declares it: all fields, also those of version 2."""
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("open", ctypes.CFUNCTYPE(PTR, STR)),
        ("close", ctypes.CFUNCTYPE(None, PTR)),
        ("put_chunk", ctypes.CFUNCTYPE(INT, PTR, STR, SIZE, STR, SIZE)),
        ("get_chunk", ctypes.CFUNCTYPE(INT, PTR, STR, SIZE, ctypes.POINTER(u8p), ctypes.POINTER(SIZE))),
        ("put_manifest", ctypes.CFUNCTYPE(INT, PTR, STR, STR, SIZE)),
        ("get_manifest", ctypes.CFUNCTYPE(INT, PTR, STR, ctypes.POINTER(u8p), ctypes.POINTER(SIZE))),
        ("delete_manifest", ctypes.CFUNCTYPE(INT, PTR, STR)),
        ("prefetch_chunks", ctypes.CFUNCTYPE(INT, PTR, STR, SIZE, SIZE)),
    ]


libc = ctypes.CDLL(None)
libc.free.argtypes = [PTR]
SENTINEL = b"__ctypes_index__"


def plugin_table(scheme):
    """$KV_STORE_LIBRARY_PATH/NAME if the file exists, else what the loader finds."""
    name = f"libkv_store_{scheme}.so"
    path = os.path.join(os.environ.get("KV_STORE_LIBRARY_PATH", ""), name)
    library = ctypes.CDLL(path if os.path.exists(path) else name, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    library.kv_store_get_vtable.restype = ctypes.POINTER(VTable)
    return library.kv_store_get_vtable().contents


def file_table(path):
    """The built-in store has no plugin: libkvstore hands its table out."""
    library = ctypes.CDLL(str(BUILD / "lib" / "libkvstore.so"))
    library.kvs_backend.restype = PTR
    store, table = PTR(), ctypes.POINTER(VTable)()
    library.kvs_close.argtypes = [PTR]
    rc = library.kvs_open(path.encode(), ctypes.byref(store))
    check(rc == 0, f"kvs_open({path}): {rc}")
    library.kvs_backend(store, ctypes.byref(table), None)
    result = table.contents
    library.kvs_close(store)
    return result


class Backend:
    """What an engine's storage layer wraps around the table."""

    def __init__(self, uri):
        scheme = uri.split("://")[0] if "://" in uri else None
        self.table = plugin_table(scheme.split("+")[0]) if scheme else file_table(uri)
        check(self.table.version >= 1, "version")
        self.handle = self.table.open(uri.encode())
        check(self.handle, f"open({uri})")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.table.close(self.handle)

    def put(self, key, data):
        return self.table.put_chunk(self.handle, key, len(key), data, len(data))

    def take(self, rc, out, length):
        if rc < 0:
            return None
        # The consumer reads from the pointer whatever the length: it must be one, also for nothing.
        check(bool(out), "a NULL pointer for a value that is there")
        out[0]
        data = ctypes.string_at(out, length.value)
        libc.free(out)
        return data

    def get(self, key):
        out, length = u8p(), SIZE()
        return self.take(self.table.get_chunk(self.handle, key, len(key), ctypes.byref(out), ctypes.byref(length)), out, length)

    def flush(self):
        """Publish an empty manifest that refers to nothing, again and again under one name."""
        empty = (ctypes.c_char * 0)()
        return self.table.put_manifest(self.handle, SENTINEL, ctypes.cast(empty, STR), 0)

    def manifest(self, name):
        out, length = u8p(), SIZE()
        return self.take(self.table.get_manifest(self.handle, name, ctypes.byref(out), ctypes.byref(length)), out, length)


def block(seed, i):
    """A key as chained token hashes make it, and bytes that have nothing to do with it. Sizes vary; some are empty."""
    key = hashlib.sha256(f"{seed} {i}".encode()).digest()
    size = [0, 1, 4096, 300_000][i % 4]
    return key, hashlib.shake_128(f"bytes {seed} {i}".encode()).digest(size)


def check_round_trip(uri, seed):
    with Backend(uri) as backend:
        for i in range(16):
            equal(backend.put(*block(seed, i)), 0, "first put")
        equal(backend.flush(), 0, "flush")
        for i in range(16):
            equal(backend.put(*block(seed, i)), 1, "put again")
            equal(backend.get(block(seed, i)[0]), block(seed, i)[1], "the bytes")
        equal(backend.get(hashlib.sha256(f"{seed} none".encode()).digest()), None, "a miss")
        equal(backend.get(block(seed, 1)[0][:8]), None, "the first 8 bytes of a 32-byte key")
        equal(backend.manifest(SENTINEL), b"", "the empty manifest")
    with Backend(uri) as another:  # the engine restarts
        equal(another.get(block(seed, 3)[0]), block(seed, 3)[1], "after a restart")


def check_shared_handle(uri, seed, n=120):
    """Puts on a writer thread, gets on others, manifests under the consumer's lock: one handle."""
    errors, flushed, done = [], [0], threading.Event()
    with Backend(uri) as backend:
        def write():
            try:
                for i in range(n):
                    if backend.put(*block(seed, i)) < 0:
                        raise AssertionError(f"put {i}")
                    if i % 10 == 9:
                        equal(backend.flush(), 0, "flush")
                        flushed[0] = i + 1
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        def read(offset):
            i, last = offset, False
            try:
                while not last:
                    last = done.is_set()
                    i = (i + 7) % n
                    known = flushed[0]  # before the get: what was flushed then must be there
                    key, data = block(seed, i)
                    got = backend.get(key)
                    if got is None and i < known:
                        raise AssertionError(f"chunk {i} of {known} is missing")
                    if got is not None and got != data:
                        raise AssertionError(f"wrong bytes for chunk {i}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write)] + [threading.Thread(target=read, args=(t,)) for t in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(n):
            equal(backend.get(block(seed, i)[0]), block(seed, i)[1], f"chunk {i} at the end")
    if errors:
        raise errors[0]


def check_uri(uri):
    seed = os.urandom(8).hex()  # a store that is kept between runs still gets new keys
    check_round_trip(uri, seed)
    check_shared_handle(uri, seed + "t")


def with_folder(form):
    folder = tempfile.mkdtemp(prefix="kvasir-ctypes-")
    try:
        check_uri(form + folder)
    finally:
        shutil.rmtree(folder)


def test_template():
    os.environ["KV_STORE_LIBRARY_PATH"] = str(BUILD / "examples")
    with_folder("template://")


def test_file_store():
    with_folder("")


if __name__ == "__main__":
    preload_sanitizer("libkvstore.so")
    if len(sys.argv) > 1:
        for argument in sys.argv[1:]:
            check_uri(argument)
            print(f"ok      {argument}")
    else:
        run(globals())
