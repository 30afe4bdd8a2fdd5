# SPDX-License-Identifier: Apache-2.0
"""For the tests of the Redis plugin: real servers (single, TLS, cluster), the plugin through its C tables, a bad network.

The plugin is opened as an engine does it, with dlopen; sanitized builds need their runtime loaded first, so this
module starts the program again with it.
"""
import contextlib
import ctypes as c
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from kvtest import *

# The package redis-tools has the server's program under another name, and no service that starts by itself.
SERVER = shutil.which("redis-server") or shutil.which("valkey-server") or shutil.which("redis-check-rdb")
VALKEY = shutil.which("valkey-server") or shutil.which("valkey-check-rdb")  # Debian 13 and later
if not SERVER:
    skip_all("redis-server is needed (Debian: redis-tools)")
os.environ.pop("KV_STORE_REDIS_PASSWORD", None)
os.environ.pop("KV_STORE_REDIS_USER", None)

SANITIZERS = {"address": "libasan.so", "thread": "libtsan.so"}
for word, library in SANITIZERS.items():
    if word in os.environ.get("KV_SANITIZE", "") and "KV_PRELOADED" not in os.environ:
        path = subprocess.run(["gcc", f"-print-file-name={library}"], capture_output=True, text=True, check=True).stdout.strip()
        extra = {"LD_PRELOAD": path, "KV_PRELOADED": "1", "ASAN_OPTIONS": "detect_leaks=0"}
        os.execve(sys.executable, [sys.executable, "-B", *sys.argv], {**os.environ, **extra})
PRELOADED = [path for path in [os.environ.pop("LD_PRELOAD", "")] if path]  # not for the servers

u8p = c.POINTER(c.c_uint8)
EACH = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)
LIVE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_size_t)
INT, SIZE, PTR = c.c_int, c.c_size_t, c.c_void_p


class Vtable(c.Structure):
    _fields_ = [("version", c.c_uint32),
                ("open", c.CFUNCTYPE(PTR, c.c_char_p)), ("close", c.CFUNCTYPE(None, PTR)),
                ("put_chunk", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, c.c_char_p, SIZE)),
                ("get_chunk", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, c.POINTER(PTR), c.POINTER(SIZE))),
                ("put_manifest", c.CFUNCTYPE(INT, PTR, c.c_char_p, c.c_char_p, SIZE)),
                ("get_manifest", c.CFUNCTYPE(INT, PTR, c.c_char_p, c.POINTER(PTR), c.POINTER(SIZE))),
                ("delete_manifest", c.CFUNCTYPE(INT, PTR, c.c_char_p)),
                ("prefetch_chunks", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, SIZE))]


class Entry(c.Structure):
    _fields_ = [("size", SIZE), ("name", c.c_char_p), ("hash", PTR), ("hash_len", SIZE), ("len", c.c_uint64),
                ("used_s", c.c_uint64)]


class Stats(c.Structure):
    _fields_ = [("size", SIZE)] + [(name, c.c_uint64) for name in (
        "n_chunks", "n_manifests", "bytes", "limit_bytes", "puts", "put_hits", "gets", "get_misses", "bad_chunks", "evicted",
        "bytes_written", "bytes_read", "round_trips", "errors")]


class Swept(c.Structure):
    _fields_ = [("size", SIZE)] + [(name, c.c_uint64) for name in ("kept", "deleted", "deleted_bytes", "errors")]


class Ext(c.Structure):
    _fields_ = [("size", SIZE), ("version", c.c_uint32), ("reserved", c.c_uint32),
                ("exists_chunks", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, SIZE, c.c_char_p)),
                ("get_chunks", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, SIZE, c.POINTER(PTR), c.POINTER(SIZE))),
                ("put_chunks", PTR),
                ("delete_chunk", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE)),
                ("list_manifests", c.CFUNCTYPE(INT, PTR, EACH, PTR)), ("list_chunks", c.CFUNCTYPE(INT, PTR, EACH, PTR)),
                ("list_refs", c.CFUNCTYPE(INT, PTR, c.c_char_p, EACH, PTR)),
                ("touch_chunks", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, SIZE)),
                ("flush", c.CFUNCTYPE(INT, PTR)),
                ("sweep_chunks", c.CFUNCTYPE(INT, PTR, c.c_uint64, LIVE, PTR, c.POINTER(Swept))),
                ("stats", c.CFUNCTYPE(INT, PTR, c.POINTER(Stats))),
                ("stream_chunk", PTR), ("get_parts", PTR), ("put_parts", PTR),
                ("delete_chunk_if", c.CFUNCTYPE(INT, PTR, c.c_char_p, SIZE, c.c_char_p, SIZE))]


LIBC = c.CDLL(None)
LIBC.free.argtypes = [PTR]
LIBRARY = c.CDLL(str(BUILD / "lib" / "libkv_store_redis.so"))
LIBRARY.kv_store_get_vtable.restype = c.POINTER(Vtable)
LIBRARY.kv_store_get_ext.restype = c.POINTER(Ext)
VTABLE, EXT = LIBRARY.kv_store_get_vtable().contents, LIBRARY.kv_store_get_ext().contents


class StoreError(Exception):
    """A negative return; .code is positive."""

    def __init__(self, code):
        super().__init__(os.strerror(-code))
        self.code = -code


def checked(rc):
    if rc < 0:
        raise StoreError(rc)
    return rc


def taken(data, length):
    """The bytes of an output, freed."""
    check(data.value, "an output without a pointer")
    value = c.string_at(data.value, length.value)
    LIBC.free(data.value)
    return value


class Store:
    def __init__(self, uri):
        self.handle = VTABLE.open(uri.encode())
        if not self.handle:
            raise StoreError(-5)

    def put(self, key, data):
        return checked(VTABLE.put_chunk(self.handle, key, len(key), data, len(data)))

    def _get(self, function, *args):
        data, length = PTR(), SIZE()
        checked(function(self.handle, *args, c.byref(data), c.byref(length)))
        return taken(data, length)

    def get(self, key):
        return self._get(VTABLE.get_chunk, key, len(key))

    def publish(self, name, data=b""):
        return checked(VTABLE.put_manifest(self.handle, name.encode(), data, len(data)))

    def manifest(self, name):
        return self._get(VTABLE.get_manifest, name.encode())

    def delete(self, name):
        return checked(VTABLE.delete_manifest(self.handle, name.encode()))

    def prefetch(self, keys):
        return checked(VTABLE.prefetch_chunks(self.handle, b"".join(keys), len(keys[0]), len(keys)))

    # -- extensions --------------------------------------------------------------------------------
    def exists(self, keys):
        out = c.create_string_buffer(len(keys))
        checked(EXT.exists_chunks(self.handle, b"".join(keys), len(keys[0]), len(keys), out))
        return [{0: False, 1: True}.get(b, "damaged") for b in out.raw]

    def get_many(self, keys):
        data, length = (PTR * len(keys))(), (SIZE * len(keys))()
        found = checked(EXT.get_chunks(self.handle, b"".join(keys), len(keys[0]), len(keys), data, length))
        values = [taken(PTR(d), SIZE(n)) if d else None for d, n in zip(data, length)]
        equal(found, sum(v is not None for v in values), "count of chunks found")
        return values

    def delete_chunk(self, key):
        return checked(EXT.delete_chunk(self.handle, key, len(key)))

    def delete_if(self, key, data):
        return checked(EXT.delete_chunk_if(self.handle, key, len(key), data, len(data)))

    def touch(self, keys):
        return checked(EXT.touch_chunks(self.handle, b"".join(keys), len(keys[0]), len(keys)))

    def flush(self):
        return checked(EXT.flush(self.handle))

    def _list(self, function, *args):
        found = []

        def each(_, at):
            entry = c.cast(at, c.POINTER(Entry)).contents
            found.append(entry.name.decode() if entry.name else c.string_at(entry.hash, entry.hash_len))
            return 0

        checked(function(self.handle, *args, EACH(each), None))
        return found

    def manifests(self):
        return self._list(EXT.list_manifests)

    def chunks(self):
        return self._list(EXT.list_chunks)

    def refs(self, name):
        return self._list(EXT.list_refs, name.encode())

    def sweep(self, min_age_s, live=()):
        swept = Swept(size=c.sizeof(Swept))
        checked(EXT.sweep_chunks(self.handle, min_age_s, LIVE(lambda _, at, n: c.string_at(at, n) in live), None, c.byref(swept)))
        return swept

    def stats(self):
        stats = Stats(size=c.sizeof(Stats))
        checked(EXT.stats(self.handle, c.byref(stats)))
        return stats

    def close(self):
        VTABLE.close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def fails(function, *args, code=None):
    """The call must fail (with @code, one or several); returns the errno."""
    try:
        function(*args)
    except StoreError as error:
        wanted = (code,) if isinstance(code, int) else code
        check(wanted is None or error.code in wanted, f"got errno {error.code}, wanted {wanted}")
        return error.code
    raise AssertionError(f"{function.__name__} must fail")


def refused(uri):
    """Opening fails; returns what was said."""
    with said() as text:
        fails(Store, uri)
    return text[0]


@contextlib.contextmanager
def said():
    """What is written to stderr meanwhile, in [0] afterwards."""
    text = [""]
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text[0] = file.read().decode(errors="replace")


def listing(chunks):
    """A manifest of ours that lists @chunks; their keys have 16 bytes."""
    return (b"KVS-OBJ\n" + struct.pack("<HHIQQQII", 1, 1, 48, sum(map(len, chunks.values())), 0, len(chunks), 0, 0) +
            b"".join(key + struct.pack("<I", len(value)) for key, value in chunks.items()) + bytes(16))


def save(store, name, chunks, data=b"manifest"):
    results = [store.put(key, value) for key, value in chunks.items()]
    store.publish(name, data)
    return results


class Server:
    """A redis-server of its own, in a temporary folder, on a free port of 127.0.0.1."""

    def __init__(self, *args, port=None, tls=False, wait=True, password=None, program=SERVER):
        self.folder = tempfile.TemporaryDirectory(prefix="kvredis")
        self.path = os.path.join(self.folder.name, "socket")
        self.port, self.password, self.program = port or free_port(), password, program
        self.args = ["--bind", "127.0.0.1", "--dir", self.folder.name, "--unixsocket", self.path, "--save", "", *map(str, args)]
        self.args += ["--port", "0" if tls else str(self.port)] + (["--tls-port", str(self.port)] if tls else [])
        self.args += ["--requirepass", password] if password else []
        self.process = None
        self.start(wait)

    def start(self, wait=True):
        log = open(os.path.join(self.folder.name, "log"), "ab")
        with log:
            self.process = subprocess.Popen(["redis-server", *self.args], executable=self.program, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if wait:
            try:
                wait_until(lambda: self.command("PING") == b"PONG", 20, "redis-server")
            except BaseException:
                self.stop()
                raise

    def command(self, *args):
        """Over the unix socket; errors come back as text that begins with a minus."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(patience(10))
            link.connect(self.path)
            stream = link.makefile("rwb")
            if self.password:
                self._ask(stream, "AUTH", self.password)
            return self._ask(stream, *args)

    def _ask(self, stream, *args):
        args = [a if isinstance(a, bytes) else str(a).encode() for a in args]
        stream.write(b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%s\r\n" % (len(a), a) for a in args))
        stream.flush()
        return self._reply(stream)

    def _reply(self, stream):
        line = stream.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._reply(stream) for _ in range(int(rest))]
        return int(rest) if kind == b":" else line if kind == b"-" else rest

    @property
    def uri(self):
        return f"redis://127.0.0.1:{self.port}/"

    def kill(self):
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self):
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Cluster:
    """Three masters that share the slots; maybe a replica of each: server i + 3 is that of server i."""

    def __init__(self, replicas=False, node_timeout=15000):
        self.servers = []
        try:
            while len(self.servers) < (6 if replicas else 3):
                self.servers.append(Server("--cluster-enabled", "yes", "--cluster-node-timeout", node_timeout))
            self._join()
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def range_of(i):
        return 16384 * i // 3, 16384 * (i + 1) // 3

    def _join(self):
        first = self.servers[0]
        for i, server in enumerate(self.servers):
            server.command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if i < 3:
                equal(server.command("CLUSTER", "ADDSLOTS", *range(*self.range_of(i))), b"OK", "ADDSLOTS")
            server.command("CLUSTER", "MEET", "127.0.0.1", first.port)
        for server in self.servers:
            self.settled(server)
        for i, replica in enumerate(self.servers[3:]):
            wait_until(lambda r=replica, i=i: r.command("CLUSTER", "REPLICATE", self.id(i)) == b"OK", 60, "a replica")
        for replica in self.servers[3:]:
            wait_until(lambda r=replica: b"master_link_status:up" in r.command("INFO", "replication"), 60, "a replica's link")

    def settled(self, server):
        known = b"cluster_known_nodes:%d" % len(self.servers)
        wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO") and
                   known in server.command("CLUSTER", "INFO"), 60, "the cluster")

    @property
    def uri(self):
        return "redis+cluster://" + ",".join(f"127.0.0.1:{s.port}" for s in self.servers) + "/"

    def id(self, i):
        return self.servers[i].command("CLUSTER", "MYID")

    def stop(self):
        for server in self.servers:
            server.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Proxy:
    """TCP in front of @port. @plan(data, link) returns what to pass on of a server's bytes, or None to cut the line."""

    def __init__(self, port, plan):
        self.target, self.plan, self.links = port, plan, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.stopping = False
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    @property
    def uri(self):
        return f"redis://127.0.0.1:{self.port}/"

    def _accept(self):
        while not self.stopping:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                continue
            link = {"near": near, "far": far, "passed": 0, "number": len(self.links), "pumps": 2,
                    "lock": threading.Lock()}
            self.links.append(link)
            for source, sink, down in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pump, args=(link, source, sink, down), daemon=True)
                thread.start()
                self.threads.append(thread)

    def _pump(self, link, source, sink, down):
        with contextlib.suppress(OSError):
            while not self.stopping:
                data = source.recv(65536)
                if not data:
                    break
                if down:
                    data = self.plan(data, link)
                    if data is None:  # a reset, not a farewell
                        sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        break
                    link["passed"] += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with link["lock"]:  # who is second closes: the other one may still be reading
            link["pumps"] -= 1
            last = link["pumps"] == 0
        if last:
            source.close()
            sink.close()

    def stop(self):
        """End all threads and join them: the thread sanitizer reports a thread that nobody joined as a leak."""
        self.stopping = True
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        self.threads[0].join()
        self.listener.close()
        for link in self.links:
            for end in (link["near"], link["far"]):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads[1:]:
            thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


__all__ = [name for name in dir() if not name.startswith("_")]
