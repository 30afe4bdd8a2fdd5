# SPDX-License-Identifier: Apache-2.0
"""For the tests of event streams: prompts, what the indexer says about a stream, engines as processes, peers."""
import http.server
import itertools
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

from kvtest import *

BS = 4  # tokens a block


def prompt(number, blocks):
    """Tokens of a prompt; no two prompts share a first block."""
    return [(number * 100003 + i) % 4000000000 for i in range(blocks * BS)]


def names(number, blocks, first=0):
    """The engine's hashes of its blocks."""
    return [((number << 24) | (i + 1)) for i in range(first, first + blocks)]


def store(engine, number, blocks, first=0, **kw):
    parent = names(number, 1, first - 1)[0] if first else None
    tokens = prompt(number, first + blocks)[first * BS:]
    return engine.store(names(number, blocks, first), tokens, parent=parent, block_size=BS, **kw)


def store_all(engine, numbers, blocks):
    for number in numbers:
        store(engine, number, blocks)


def stream(indexer, name, instance=1, rank=0):
    """A counter or gauge of one stream, e.g. stream(indexer, "gaps_total")."""
    for key, value in indexer.metrics().items():
        found = re.match(r"kv_indexer_stream_(\w+)\{(.*)\}$", key)
        if found and found.group(1) == name and f'instance="{instance}"' in key and f'dp_rank="{rank}"' in key:
            return value
    raise KeyError(f"no kv_indexer_stream_{name} of {instance}:{rank}")


def listener(indexer, instance=1, rank=0):
    for worker in indexer.workers():
        if worker["instance_id"] == instance:
            return worker["listeners"][str(rank)]
    raise KeyError(instance)


def holds(indexer, number, blocks, instance=1, rank=0, timeout=15):
    """Wait until a worker holds that many blocks of a prompt, and not the next."""
    indexer.wait_score(prompt(number, blocks + 1), instance, blocks * BS, rank, timeout)


def holds_all(indexer, numbers, blocks, instance=1):
    for number in numbers:
        holds(indexer, number, blocks, instance)


def blocks_of(dump, model=f"{MODEL}:default"):
    """A dump as a set: (worker, rank, tier, hash, tokens hash, parent); the same for the same contents."""
    found = set()
    told = dump.get(model, {})
    for event in itertools.chain(told.get("events", []), *(stream["events"] for stream in told.get("streams", []))):
        stored = event["event"]["data"]["stored"]
        parent = stored["parent_hash"]
        for block in stored["blocks"]:
            found.add((event["worker_id"], event["event"]["dp_rank"], event.get("storage_tier", "device"),
                       block["block_hash"], block["tokens_hash"], parent))
            parent = block["block_hash"]
    return found


class Engine:
    """An engine in a process of its own, so that it can be killed or frozen: publishes a batch every @interval
    seconds, prompt 1, 2, 3... of two blocks each, and answers replay requests."""

    def __init__(self, endpoint=None, replay=None, interval=0.01, count=0, prompt_base=0):
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = replay or f"tcp://127.0.0.1:{free_port()}"
        self.interval, self.count, self.prompt_base = interval, count, prompt_base
        self.process = None
        self.start()

    def start(self):
        code = "import streams; streams.engine_main()"
        arguments = [self.endpoint, self.replay_endpoint, str(self.interval), str(self.count), str(self.prompt_base)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE / "tests" / "e2e")}
        self.process = subprocess.Popen([sys.executable, "-B", "-c", code, *arguments], env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        check(self.process.stdout.readline().strip() == "ready", "the engine did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def engine_main():
    endpoint, replay, interval, count, base = sys.argv[1:]
    with Publisher(endpoint=endpoint, replay_endpoint=replay) as engine:
        print("ready", flush=True)
        number = int(base)
        while not int(count) or number < int(base) + int(count):
            number += 1
            store(engine, number, 2)
            time.sleep(float(interval))
        time.sleep(3600)


def register(indexer, instance, engine, **kw):
    """@engine: an Engine (or a Publisher of kvtest)."""
    if isinstance(engine, Engine):
        return indexer.register(instance, engine.endpoint, block_size=BS, replay_endpoint=engine.replay_endpoint, **kw)
    return indexer.register(instance, engine, block_size=BS, **kw)


def last_seq(indexer, instance=1, rank=0):
    return listener(indexer, instance, rank).get("last_seq", -1)


def dump_text(indexer):
    return json.dumps(sorted(blocks_of(indexer.dump())))


class Proxy:
    """A TCP relay in front of a server that can be cut: then it closes what is open and refuses what comes.

    While flow is cleared, it holds what it gets.
    """

    def __init__(self, endpoint):
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.target = (host, int(port))
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._lock = threading.Lock()
        self._listener, self._open = None, []
        self.flow = threading.Event()
        self.flow.set()
        self.mend()

    def mend(self):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener):
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(self.target)
            except OSError:
                here.close()
                continue
            with self._lock:
                self._open += [here, there]
            threading.Thread(target=self._relay, args=(here, there), daemon=True).start()

    def _relay(self, a, b):
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(a, selectors.EVENT_READ, b)
                selector.register(b, selectors.EVENT_READ, a)
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(65536)
                        if not data:
                            return
                        self.flow.wait()
                        key.data.sendall(data)
            except (OSError, ValueError):
                pass
            finally:
                for s in (a, b):
                    self._end(s)

    @staticmethod
    def _end(s):
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        s.close()

    def cut(self):
        """Close everything, and refuse connections until mend()."""
        self._end(self._listener)
        with self._lock:
            ends, self._open = self._open, []
        for s in ends:
            self._end(s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cut()


class Peer(http.server.ThreadingHTTPServer):
    """An HTTP server in place of a kv-indexer's peer: each GET is @answer(handler)'s."""

    daemon_threads = True

    def __init__(self, answer):
        self.asked = []
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                peer.asked.append(self.path)
                try:
                    answer(self)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def reply(status, body, length=None, **headers):
    """Answer of a Peer: always the same. @length: what its header says, where that isn't true."""
    def answer(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()
        if length is not None:
            handler.close_connection = True
    return answer


def pages(by_path):
    """Answer of a Peer: the body of each path, else 404."""
    def answer(handler):
        body = by_path.get(handler.path.split("?")[0])
        reply(404 if body is None else 200, body or b"")(handler)
    return answer
