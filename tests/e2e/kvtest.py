# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: a real kv-indexer, an HTTP client, an engine that publishes over ZMQ.

    from kvtest import *

    def test_something():
        with Indexer() as indexer, Publisher() as engine:
            indexer.register(1, engine, block_size=4)
            engine.store([101, 102], tokens=range(8), block_size=4)
            indexer.wait_score(range(8), 1, 8)

    if __name__ == "__main__":
        run(globals())

Everything listens on 127.0.0.1, on free ports, and is stopped when its `with` ends.
"""
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse

SOURCE = pathlib.Path(os.environ.get("KV_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("KV_BUILD_DIR", SOURCE / "build"))
SANITIZED = bool(os.environ.get("KV_SANITIZE"))
SLOW = 5 if SANITIZED else 1  # what a sanitized build may take longer
MODEL = "m"


def skip_all(why):
    """End a program whose tests can't run here. Call it before the tests begin; skip() is for one of them."""
    print(f"skipped: {why}", flush=True)
    sys.exit(77)


try:
    import msgpack
    import zmq
except ImportError:
    skip_all("python3-zmq and python3-msgpack are needed")

__all__ = ["BUILD", "SOURCE", "SANITIZED", "SLOW", "MODEL", "Indexer", "Publisher", "Reply", "check", "equal", "flip_bit", "free_port", "patience",
           "http_request", "is_closed", "make_certificate", "preload_sanitizer", "run", "skip", "skip_all", "wait_until",
           "msgpack", "zmq"]


class Skip(Exception):
    pass


def skip(why):
    raise Skip(why)


def check(condition, message="check failed"):
    if not condition:
        raise AssertionError(message)


def equal(got, wanted, what="value"):
    if got != wanted:
        raise AssertionError(f"{what}: got {got!r}, wanted {wanted!r}")


def patience(timeout):
    """Seconds to wait for an event that must come. A machine with more to do than cores stops a process for many."""
    return max(timeout * SLOW, 60)


def flip_bit(path, at=None):
    """Damage a file: one bit, of the middle byte or of the byte @at."""
    with open(path, "r+b") as file:
        at = os.path.getsize(path) // 2 if at is None else at
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


CLAIMS = []


def free_port():
    """A port for servers that stop and start again: not one that the kernel gives to anybody, and not another test's.

    A socket with an abstract name claims it until this process ends. Redis's cluster bus is 10000 above its port.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 20000)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvasir-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        CLAIMS.append(claim)
        return port


def wait_until(predicate, timeout=10, what="condition", interval=0.02, give_up=None):
    """Poll until predicate() is true; returns its value. Exceptions of the last try are shown. @what: words for the failure, or
    a function that returns them, which is called when the time is up. @give_up: seconds after which an event that may not
    come is waited for no longer."""
    deadline = time.monotonic() + (give_up or patience(timeout))
    error = None
    while True:
        try:
            value = predicate()
            if value:
                return value
            error = None
        except (OSError, http.client.HTTPException, AssertionError, KeyError) as problem:
            error = problem
        if time.monotonic() > deadline:
            what = what() if callable(what) else what
            raise AssertionError(f"timed out waiting for {what}" + (f" ({error!r})" if error else ""))
        time.sleep(interval)


def is_closed(sock, timeout=10):
    """Whether the server closes the connection (after what it may still send)."""
    sock.settimeout(patience(timeout))
    try:
        while sock.recv(65536):
            pass
        return True
    except ConnectionResetError:
        return True
    except socket.timeout:
        return False


def make_certificate(folder):
    """A certificate of this machine and its key, as PEM files: their paths."""
    cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
    done = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj",
                           "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"], capture_output=True, check=False)
    if done.returncode != 0:
        skip("openssl makes no certificate here")
    return cert, key


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"<{self.status} {self.body[:300]!r}>"


def http_request(url, method, path, body=None, headers=None, timeout=patience(30), connection=None, context=None):
    """One request. @body: bytes as they are; anything else is sent as JSON."""
    parts = urllib.parse.urlsplit(url)
    headers = dict(headers or {})
    if body is not None and not isinstance(body, (bytes, bytearray)):
        body = json.dumps(body).encode()
        headers.setdefault("Content-Type", "application/json")
    mine = connection is None
    if mine:
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        extra = {"context": context} if parts.scheme == "https" else {}
        connection = kind(parts.hostname, parts.port, timeout=timeout, **extra)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, answer.read())
    finally:
        if mine:
            connection.close()


class Indexer:
    """A kv-indexer process. Extra arguments go to its command line; @wait=False returns at once."""
    PROGRAM = "kv-indexer"

    def __init__(self, *args, port=0, host="127.0.0.1", env=None, wait=True, timeout=30, context=None, headers=None):
        self.context, self.headers, self.log = context, dict(headers or {}), []
        self._ready = threading.Event()
        self.url = None
        given = [str(arg) for arg in args]
        mine = [word for name, value in (("--host", host), ("--port", str(port))) if name not in given for word in (name, value)]
        command = [str(BUILD / "bin" / self.PROGRAM), *mine, *given]
        environment = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.wait_ready(timeout)
            except BaseException:
                self.kill()
                raise

    def _read_log(self):
        for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            self.log.append(line)
            if len(self.log) > 20000:
                del self.log[:10000]
            found = re.search(r'msg"?[=:] ?"?listening"?.*?url"?[=:] ?"?(https?://[^\s",}]+)', line)
            if found and self.url is None:
                self.url = found.group(1).replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//127.0.0.1:")
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout=30):
        self._ready.wait(patience(timeout))
        check(self.url, "kv-indexer did not start:\n" + "\n".join(self.log[-30:]))
        self.port = urllib.parse.urlsplit(self.url).port

    # -- HTTP --------------------------------------------------------------------------------------
    def request(self, method, path, body=None, headers=None, **kw):
        return http_request(self.url, method, path, body, {**self.headers, **(headers or {})}, context=self.context, **kw)

    def connect(self, timeout=patience(30)):
        """A keep-alive connection for request(connection=...)."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, data=b"", timeout=60):
        """A bare TCP connection, @data sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        if data:
            sock.sendall(data)
        return sock

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.request("POST", path, body, **kw)

    def register(self, instance, endpoint, block_size=16, expect=201, **fields):
        """@endpoint: a string or a Publisher (its replay endpoint is passed when it has one)."""
        body = {"instance_id": instance, "model_name": MODEL, "block_size": block_size, **fields}
        if isinstance(endpoint, Publisher):
            body["endpoint"] = endpoint.endpoint
            if endpoint.replay_endpoint:
                body.setdefault("replay_endpoint", endpoint.replay_endpoint)
        else:
            body["endpoint"] = endpoint
        reply = self.post("/register", body)
        equal(reply.status, expect, f"/register {reply.body!r}: status")
        if expect == 201 and isinstance(endpoint, Publisher):
            endpoint.wait_subscriber()
        return reply

    def unregister(self, instance, expect=200, **fields):
        reply = self.post("/unregister", {"instance_id": instance, "model_name": MODEL, **fields})
        equal(reply.status, expect, f"/unregister {reply.body!r}: status")
        return reply

    def query(self, tokens, expect=200, **fields):
        reply = self.post("/query", {"token_ids": list(tokens), "model_name": MODEL, **fields})
        equal(reply.status, expect, f"/query {reply.body[:300]!r}: status")
        return reply.json()

    def query_by_hash(self, hashes, expect=200, **fields):
        reply = self.post("/query_by_hash", {"block_hashes": list(hashes), "model_name": MODEL, **fields})
        equal(reply.status, expect, f"/query_by_hash {reply.body[:300]!r}: status")
        return reply.json()

    def score(self, tokens, instance, rank=0, **fields):
        return self.query(tokens, **fields)["scores"].get(str(instance), {}).get(str(rank), 0)

    def wait_score(self, tokens, instance, wanted, rank=0, timeout=10, **fields):
        tokens = list(tokens)
        last = [None]

        def there():
            last[0] = self.score(tokens, instance, rank, **fields)
            return last[0] == wanted

        try:
            wait_until(there, timeout)
        except AssertionError as problem:
            raise AssertionError(f"score of {instance}:{rank} is {last[0]}, wanted {wanted} ({problem})") from None

    def workers(self):
        return self.get("/workers").json()

    def dump(self):
        return self.get("/dump").json()

    def streams(self):
        """The dump by streams, as replicas get it but for packed events."""
        return self.get("/dump", headers={"Accept": "application/vnd.kvasir.dump+json"}).json()

    def metrics(self):
        """{'name{label="value"}': number}"""
        values = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                values[key] = float(value)
        return values

    def rss(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self):
        """Its processor time, which other programs don't lengthen as they do the time of the clock."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # -- end ---------------------------------------------------------------------------------------
    def stop(self, number=signal.SIGTERM, timeout=20):
        """Ask it to stop and check that it ends well. Returns the seconds it took."""
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(patience(timeout))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"kv-indexer ignores signal {number}:\n" + "\n".join(self.log[-20:])) from None
        self._reader.join(5)
        check(code == 0, f"kv-indexer ended with {code}:\n" + "\n".join(self.log[-60:]))
        return time.monotonic() - started

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.stop()
            return
        self.kill()
        print("\n".join(["-- log of kv-indexer"] + self.log[-40:]), file=sys.stderr)


class Publisher:
    """An engine's publisher: PUB with sequence numbers and, unless replay=None, a ROUTER that replays.

    @encoding: "map" (vLLM >= 0.24) or "array" (before).  @replay: "topic" (4 frames as a DEALER sees
    them), "plain" (3 frames) or None.  @ring: batches kept.  @first: number of the first batch.
    @milliseconds: timestamps as the Mooncake master's, whole milliseconds.
    """

    def __init__(self, encoding="map", replay="topic", topic=b"", ring=10000, first=0, rank=None, endpoint=None, replay_endpoint=None,
                 milliseconds=False):
        self.milliseconds = milliseconds
        self.encoding, self.framing, self.topic, self.rank = encoding, replay, topic, rank
        self.seq, self.ring, self.kept = first, ring, {}
        self.replays = 0
        self.context = zmq.Context()
        self._lock = threading.Lock()
        self._socket = self.context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1000000)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.bind(endpoint or f"tcp://127.0.0.1:{free_port()}")
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.subscribers = self.emptied = self.seen_emptied = 0
        self.replay_endpoint = None
        self._stop = threading.Event()
        self._thread = None
        if replay:
            router = self.context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 1000000)
            router.bind(replay_endpoint or f"tcp://127.0.0.1:{free_port()}")
            self.replay_endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def _serve(self, router):
        while not self._stop.is_set():
            if not router.poll(50):
                continue
            peer, empty, start = router.recv_multipart()
            with self._lock:
                batches = sorted(self.kept.items())
                self.replays += 1
            topic = [self.topic] if self.framing == "topic" else []
            for seq, payload in batches:
                if seq >= struct.unpack(">Q", start)[0]:
                    router.send_multipart([peer, empty, *topic, struct.pack(">Q", seq), payload])
            end = [b""] if self.framing == "topic" else []
            router.send_multipart([peer, empty, *end, b"\xff" * 8, b""])
        router.close()

    def wait_subscriber(self, n=1, timeout=10):
        """Until @n subscriptions have arrived: what is published from now on is not lost to slow joining."""
        deadline = time.monotonic() + patience(timeout)
        while self.subscribers < n:
            left = deadline - time.monotonic()
            check(left > 0 and self._socket.poll(int(left * 1000)), "nobody subscribed")
            self._drain()
        self.seen_emptied = self.emptied

    def wait_no_subscriber(self, timeout=10):
        """Until everybody has unsubscribed (or gone away) since the last wait_subscriber(), even if somebody is back already."""
        def nobody():
            self._drain()
            return self.subscribers == 0 or self.emptied > self.seen_emptied

        wait_until(nobody, timeout, "the end of subscriptions")
        self.seen_emptied = self.emptied

    def _drain(self):
        while self._socket.poll(0):
            message = self._socket.recv()
            self.subscribers += 1 if message[:1] == b"\x01" else -1
            self.emptied += self.subscribers == 0

    # -- events ------------------------------------------------------------------------------------
    def stored(self, hashes, tokens=(), parent=None, block_size=16, medium="GPU", lora_name=None, **extra):
        hashes, tokens = list(hashes), list(tokens)
        if self.encoding == "map":
            return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
                    "block_size": block_size, "lora_id": None, "medium": medium, "lora_name": lora_name, **extra}
        return ["BlockStored", hashes, parent, tokens, block_size, None, medium, lora_name]

    def removed(self, hashes, medium="GPU", **extra):
        if self.encoding == "map":
            return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **extra}
        return ["BlockRemoved", list(hashes), medium]

    def cleared(self):
        return {"type": "AllBlocksCleared"} if self.encoding == "map" else ["AllBlocksCleared"]

    def batch(self, events, rank=None):
        rank = self.rank if rank is None else rank
        now = int(time.time() * 1000) if self.milliseconds else time.time()
        return msgpack.packb([now, events] + ([] if rank is None else [rank]))

    def send(self, *events, rank=None, lose=False, keep=True):
        """Publish one batch. @lose: spend the number but don't publish (a gap). @keep: for replay."""
        return self.send_raw(self.batch(list(events), rank), lose=lose, keep=keep)

    def send_raw(self, payload, lose=False, keep=True):
        seq, self.seq = self.seq, self.seq + 1
        if keep:
            with self._lock:
                self.kept[seq] = payload
                while len(self.kept) > self.ring:
                    del self.kept[min(self.kept)]
        if not lose:
            self._drain()
            self._socket.send_multipart([self.topic, struct.pack(">Q", seq), payload])
        return seq

    def send_frames(self, *frames):
        self._drain()
        self._socket.send_multipart(list(frames))

    def store(self, hashes, tokens, parent=None, block_size=16, rank=None, lose=False, **extra):
        return self.send(self.stored(hashes, tokens, parent, block_size, **extra), rank=rank, lose=lose)

    def remove(self, hashes, rank=None, **extra):
        return self.send(self.removed(hashes, **extra), rank=rank)

    def clear(self, rank=None):
        return self.send(self.cleared(), rank=rank)

    def restart(self, first=0):
        """What a restarted engine looks like on the same sockets: numbers start again, nothing is kept."""
        with self._lock:
            self.kept.clear()
        self.seq = first

    def close(self):
        self._stop.set()
        if self._thread:
            self._thread.join()
        self._socket.close()
        self.context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def preload_sanitizer(library):
    """A sanitized library of ours needs its runtime first in the process, which is Python's here. Call it first."""
    if os.environ.get("KV_SANITIZE", "").startswith("thread"):
        skip_all("Python can't run under the thread sanitizer")
    if not SANITIZED or os.environ.get("LD_PRELOAD"):
        return
    needs = subprocess.run(["ldd", BUILD / "lib" / library], capture_output=True, text=True, check=True).stdout
    runtimes = [line.split("=>")[1].split()[0] for line in needs.splitlines() if "asan" in line or "ubsan" in line]
    if not runtimes:
        skip_all("the sanitizer's runtime is not a library of its own")
    environment = dict(os.environ, LD_PRELOAD=":".join(runtimes),
                       ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0")  # Python's own
    os.execve(sys.executable, [sys.executable, "-B", *sys.argv], environment)


def run(namespace):
    """Run the test_* functions of a module in order (or those whose names contain an argument)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `with` ends children when CTest gives up
    tests = [(name, item) for name, item in namespace.items() if name.startswith("test_") and callable(item)]
    wanted = sys.argv[1:]
    failed = skipped = passed = 0
    for name, test in tests:
        if wanted and not any(text in name for text in wanted):
            continue
        started = time.monotonic()
        try:
            test()
            passed += 1
            print(f"ok      {name} ({time.monotonic() - started:.1f} s)", flush=True)
        except Skip as why:
            skipped += 1
            print(f"skipped {name}: {why}", flush=True)
        except Exception:  # a test may fail in any way
            failed += 1
            print(f"FAILED  {name}", flush=True)
            traceback.print_exc()
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(1 if failed else 0 if passed else 77)
