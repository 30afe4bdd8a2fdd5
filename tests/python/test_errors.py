# SPDX-License-Identifier: Apache-2.0
"""Each failure is a kvasir.Error with its reason, and an instance of the class that it always was; objects say what they are."""
import array
import asyncio
import contextlib
import ctypes
import errno
import http.server
import os
import threading

from kvpython import check, equal, folder, raises, run  # first: it finds the package
from kvtest import free_port
import kvasir
from kvasir import _native
import kvasir.events
import kvasir.peers
import kvasir.queue
import kvasir.store
from kvasir.blocks import Manager, Pool, Shape
from kvasir.client import AsyncClient, Client, HTTPError
from kvasir.index import PrefixIndex, Window, hash_tokens

SHAPE = Shape(layers=2, page_size=16, inner=64)


def told(kind, function, *args, **kw):
    """Check that a call fails with @kind, and says more than the errno's text. Returns what it says."""
    problem = raises(kind, function, *args, **kw)
    check(isinstance(problem, kvasir.Error) and isinstance(problem, OSError), f"{type(problem).__mro__}")
    text = str(problem)
    bare = os.strerror(problem.errno)
    check(text not in ("", bare, f"[Errno {problem.errno}] {bare}"), f"no reason: {text}")
    reason = text.split(bare + ": ")[-1]
    check(len(reason) > 8 and reason != "the backend refused it", f"no reason: {text}")
    return text


def number(*values):
    return array.array("Q", values)


def test_stores():
    with folder() as path, kvasir.store.open(path + "/s") as store:
        check("libkv_store_nix" in told(kvasir.Error, kvasir.store.open, "nix://a"), "the missing plugin")
        for uri in path + "/s?limt=5", "", path + "/s?limit=5Q", "/proc/none/x":
            told(kvasir.Error, kvasir.store.open, uri)
        for key in b"", b"x" * 1000:
            for call in (store.put, key, b"x"), (store.get, key), (store.put_many, [key], [b"x"]), (store.get_many, [key]), (store.exists, [key]), \
                    (store.discard, key), (store.touch, [key]):
                check("keys" in told(kvasir.Error, *call), f"keys, of {call[0].__name__}")
        store.put(b"k" * 8, b"12345")
        equal(raises(kvasir.Error, store.get_into, [b"k" * 8], [bytearray(2)]).errno, errno.EMSGSIZE, "errno")
        told(kvasir.Error, store.get_into, [b"k" * 8], [bytearray(2)])
        told(kvasir.Error, store.put_manifest, "", b"")
        told(kvasir.Error, store.save, "", b"x")
        told(kvasir.NotFound, store.restore, "nobody")
        told(ValueError, store.save, "a\0b", b"x")
        told(ValueError, store.save, "a", b"x", format="none")
        told(ValueError, store.put_many, [b"a", b"bc"], [b"", b""])
        told(ValueError, store.put_many, [b"a"], [])
        with contextlib.closing(kvasir.queue.Queue(store)) as queue:
            told(kvasir.Error, queue.get, [b""], [bytearray(1)])
        store.close()
        check("closed" in told(ValueError, store.names), "closed")


def test_a_plugin_that_refuses():
    """It prints why; "the backend refused it" alone is no reason."""
    check("stderr" in told(kvasir.Error, kvasir.store.open, "s3://b?connections=none"), "where the reason is")


def test_several_lines_of_one_call():
    """Causes come before effects; the latest that fit are kept."""
    note = _native._reason.kvpy_log
    note.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    for lines in ([b"one"], [b"one", b"two"], [b"%d" % i * 30 for i in range(100)], [b"x" * 5000], [b"one", b"x" * 1000, b"two"]):
        _native._begin()
        for line in lines:
            note(None, 0, line)
        told_lines = _native._end(1).split(b"\n")
        equal(told_lines, [line[:1022] for line in lines[-len(told_lines):]], "the latest lines")
        check(len(told_lines) == len(lines) or sum(map(len, lines)) > 1000, f"{len(told_lines)} of {len(lines)}")
    _native._begin()
    equal(_native._end(1), b"", "none of an earlier call")
    text = str(_native.error(-errno.EIO, 'time=1 level=error component=a msg="x"\ntime=1 level=error component=b msg="y"'))
    equal(text, '[Errno 5] Input/output error: msg="x"; msg="y"', "as an exception")


def test_the_index():
    with PrefixIndex() as index:
        check("no such worker" in told(kvasir.NotFound, index.remove_worker, 5), "worker")
        told(KeyError, index.remove_worker, 5)
        told(kvasir.Error, index.store, 1, [1], [2], tier=9)
        told(kvasir.Error, index.store, 1, [1], [2], source=70000)
        told(kvasir.Error, index.window_add, 1, 7, [1])
        told(kvasir.Error, index.set_window, 1, Window(1, 0, 0))
        told(ValueError, index.store, 1, [1], [2, 3])
        told(ValueError, hash_tokens, [1], 0)


def test_blocks():
    told(kvasir.Error, Pool, n_blocks=0, block_size=16)
    told(kvasir.Error, Pool, n_blocks=4, block_size=16, key_len=100)
    for kind in KeyError, ValueError:
        check("lineage" in told(kind, Pool, n_blocks=4, block_size=16, eviction="none"), "the words that there are")
    with Pool(n_blocks=4, block_size=16) as pool:
        check("5 blocks" in told(kvasir.Error, pool.allocate, 5), "how many")
        equal(raises(kvasir.Error, pool.allocate, 5).errno, errno.ENOSPC, "errno")
        with pool.allocate(1) as fresh:
            told(kvasir.Error, pool.register, fresh, number(7), position=5)
            told(ValueError, pool.register, fresh, number(7, 8))
            told(kvasir.Error, pool.close)
        told(kvasir.Error, pool.retain, number(1), 101)
    told(kvasir.Error, Manager, SHAPE)
    told(kvasir.Error, Manager, SHAPE, host_bytes=10)
    told(KeyError, Manager, SHAPE, host_bytes=1 << 20, io="none")
    check("no size" in told(ValueError, Manager, SHAPE, host_bytes="12 parsec"), "a size")
    check("staging_blocks" in str(raises(TypeError, Manager, SHAPE, host_bytes=1 << 20, staging_blocks="x")), "the option's name")
    with Manager(SHAPE, host_bytes="1MiB") as manager, manager.attach(bytearray(8 * SHAPE.nbytes)) as cache:
        told(ValueError, manager.attach, bytearray(10))
        told(ValueError, cache.store, number(1, 2), [0])
        told(kvasir.NotFound, manager.cancel, 12345)
        told(kvasir.Error, manager.wait, 12345, 0.0)


def test_peers_and_events():
    for options in {"listen": "x:1"}, {"listen": "tcp:0.0.0.0:0"}, {"listen": "tcp:127.0.0.1:0", "token_file": "/none"}, {"name": "a b"}:
        told(kvasir.Error, kvasir.peers.Agent, **options)
    told(ValueError, kvasir.peers.Agent, max_bytes="none")
    told(kvasir.Error, kvasir.events.Publisher, "x", block_size=16)
    told(KeyError, kvasir.events.Publisher, "tcp://127.0.0.1:*", block_size=16, encoding="none")


def test_clients():
    """Of a connection that fails, a name that isn't known, a silent server, and nonsense."""
    nobody = f"http://127.0.0.1:{free_port()}"

    def ask_async(url, timeout=10.0):
        async def ask():
            async with AsyncClient(url, timeout=timeout) as client:
                await client.workers()

        asyncio.run(ask())

    for ask in (lambda url, timeout=10.0: Client(url, timeout=timeout).workers()), ask_async:
        check(nobody in told(ConnectionRefusedError, ask, nobody), "the URL")
        told(ValueError, ask, "nowhere")
        with contextlib.closing(Answers(b"nonsense\r\n\r\n")) as server:
            told(kvasir.Error, ask, server.url)
        with contextlib.closing(Answers(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\xff{x")) as server:
            told(ValueError, ask, server.url)
        with contextlib.closing(Answers(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")) as server:
            told(kvasir.Error, ask, server.url)
        with contextlib.closing(Answers(b"HTTP/1.1 404 \r\nContent-Length: 15\r\n\r\n{\"error\": \"no\"}")) as server:
            equal(raises(HTTPError, ask, server.url).status, 404, "status")
        with contextlib.closing(Answers(None)) as server:
            told((TimeoutError, asyncio.TimeoutError), ask, server.url, 0.1)


class Answers:
    """A server that says the same to everybody; None: nothing."""

    def __init__(self, answer):
        self.leave = threading.Event()
        leave = self.leave

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if answer is None:
                    leave.wait()
                else:
                    self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self):
        self.leave.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def test_objects_say_what_they_are():
    with folder() as path, kvasir.store.open(path + "/s") as store, contextlib.closing(kvasir.queue.Queue(store)) as queue, \
            PrefixIndex() as index, Pool(n_blocks=4, block_size=16) as pool, Manager(SHAPE, host_bytes="1MiB") as manager, \
            manager.attach(bytearray(8 * SHAPE.nbytes)) as cache, kvasir.events.Publisher("tcp://127.0.0.1:*", block_size=16) as events, \
            kvasir.peers.Agent("node-7") as agent, Client("http://127.0.0.1:8090") as client, pool.allocate(2) as blocks, \
            manager.prepare_store(number(1, 2)) as pin:
        index.store(1, [1], [2])
        for thing, words in ((store, [path + "/s"]), (queue, [path, "requests=0"]), (index, ["blocks=1"]), (pool, ["blocks=4", "held=2"]),
                             (manager, ["caches=1"]), (cache, ["blocks=8"]), (events, [events.endpoint]), (agent, ["node-7"]),
                             (client, ["http://127.0.0.1:8090"]), (AsyncClient("http://a:1"), ["http://a:1"]), (blocks, ["n=2"]), (pin, ["n=2"])):
            text = repr(thing)
            check(text.startswith("<kvasir.") and type(thing).__name__ in text and "0x" not in text, text)
            check(all(word in text for word in words), f"{text}: {words}")
        check("closed" not in repr(store), repr(store))
    check(repr(store).endswith(" closed>") and repr(pin).endswith(" released>"), (repr(store), repr(pin)))
    check("closed" in repr(Pool.__new__(Pool)), "one that was never made")


if __name__ == "__main__":
    run(globals())
