# SPDX-License-Identifier: Apache-2.0
"""A real nats-server of a test's own, and a client that speaks just enough of NATS to publish.

    with NatsServer() as server, NatsClient(server) as client:
        client.publish("kvasir.c.m.t.w", b"...")
"""
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

from kvtest import BUILD, check, free_port, http_request, patience, skip, wait_until


def needs_nats():
    """Skip a test where it can't run: no server, or no libkv_nats of this build."""
    if not shutil.which("nats-server"):
        skip("nats-server is missing (package nats-server)")
    if not any((BUILD / "lib").glob("libkv_nats.so*")):
        skip("libnats-dev was missing when the tree was built")


class NatsServer:
    """@config: further lines of its configuration. @login: (user, password) that it demands. stop() and start() keep the ports."""

    def __init__(self, config="", login=None, host="127.0.0.1"):
        self.host = host
        self.login = {"user": login[0], "pass": login[1]} if login else {}
        if login:
            config += f"\nauthorization {{ user: {login[0]}, password: {login[1]} }}"
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-nats-")
        self.port, self.monitor = free_port(), free_port()
        self.url = f"nats://{host}:{self.port}"
        self.path = os.path.join(self.folder.name, "nats.conf")
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(f"listen: {host}:{self.port}\nhttp: {host}:{self.monitor}\n{config}\n")
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(["nats-server", "-c", self.path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: socket.create_connection((self.host, self.port)).close() or True, 30, "nats-server")

    def subscriptions(self, prefix):
        """Subjects beginning with @prefix that clients are subscribed to, one for each subscription."""
        reply = http_request(f"http://{self.host}:{self.monitor}", "GET", "/subsz?subs=1")
        return [one["subject"] for one in reply.json().get("subscriptions_list") or () if one["subject"].startswith(prefix)]

    def wait_subscribed(self, prefix, n=1):
        """Until the server has @n subscriptions to subjects that begin with @prefix. It drops messages that come before.

        kv-indexer lists a worker, and a connection as active, before its subscription has reached the server.
        """
        wait_until(lambda: len(self.subscriptions(prefix)) >= n, 30, lambda: f"subscriptions to {prefix}: {self.subscriptions('')}")

    def stop(self):
        self.process.kill()
        self.process.wait(patience(20))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.folder.cleanup()


class NatsClient:
    """publish() returns once the server has the message."""

    def __init__(self, server):
        self.socket = socket.create_connection((server.host, server.port), timeout=patience(20))
        self.file = self.socket.makefile("rb")
        check(self.file.readline().startswith(b"INFO "), "no NATS server")
        self.socket.sendall(f"CONNECT {json.dumps({'verbose': False, 'pedantic': False, **server.login})}\r\n".encode())

    def publish(self, subject, data):
        self.socket.sendall(b"PUB %s %d\r\n%s\r\nPING\r\n" % (subject.encode(), len(data), data))
        while True:
            line = self.file.readline()
            check(line, "the server has closed the connection")
            if line == b"PONG\r\n":
                return
            if line == b"PING\r\n":
                self.socket.sendall(b"PONG\r\n")

    def request(self, subject, data):
        """The answer to a request; None when nobody listens to its subject."""
        self.socket.sendall(b"SUB _INBOX.test 1\r\nPUB %s _INBOX.test %d\r\n%s\r\nPING\r\n" % (subject.encode(), len(data), data))
        self.socket.settimeout(patience(5))
        try:
            while True:
                line = self.file.readline()
                if line.startswith(b"MSG _INBOX.test"):
                    return self.file.read(int(line.split()[-1]))
        except TimeoutError:
            self.file = self.socket.makefile("rb")
            return None
        finally:
            self.socket.sendall(b"UNSUB 1\r\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


class BlockManager:
    """Publishes KVEvent records as JSON, and answers requests for snapshots: what kvbm_events_add_nats does, written down again.

    The blocks that it has are in `blocks`: {(key, tier): (parent, tokens_hash)}. A block's key is a number. Nothing is sent but by
    store(), remove(), alive(); answers come from a thread.
    """

    def __init__(self, server, worker="w", cluster="c", model="m", tenant="t"):
        self.subject = f"kvasir.{cluster}.{model}.{tenant}.{worker}"
        self.lock = threading.Lock()
        self.blocks, self.sequence, self.snapshots, self.answers = {}, 0, 0, True
        self.incarnation = random.SystemRandom().getrandbits(63) + 1
        self.part = 3  # records in a part of a snapshot
        self.ahead_ns = 0  # of its clock
        self.connect(server)

    def connect(self, server):
        self.client = NatsClient(server)
        self.client.socket.sendall(f"SUB {self.subject}.snapshot 1\r\n".encode())
        self.client.publish("_nobody", b"")  # the subscription is there
        self.client.socket.settimeout(None)
        self.thread = threading.Thread(target=self._serve, args=(self.client,), daemon=True)
        self.thread.start()

    def _serve(self, client):
        try:
            while True:
                words = client.file.readline().split()
                if not words:
                    return
                if words[0] == b"PING":
                    with self.lock:
                        client.socket.sendall(b"PONG\r\n")
                if words[0] == b"MSG":
                    data = client.file.read(int(words[-1]) + 2)[:-2]
                    with self.lock:
                        if self.answers and len(words) == 5:
                            self._answer(words[3].decode(), int.from_bytes(data, "little"))
        except (OSError, ValueError):
            pass

    def _send(self, subject, data):
        self.client.socket.sendall(b"PUB %s %d\r\n%s\r\n" % (subject.encode(), len(data), data))

    def _answer(self, reply, request):
        self.snapshots += 1
        records = [self._record("store", key, tier, *value) for (key, tier), value in sorted(self.blocks.items(), key=lambda item: item[0])]
        parts = [records[i:i + self.part] for i in range(0, len(records), self.part)] or [[]]
        for i, part in enumerate(parts):
            more = {"part": i, "last": i + 1 == len(parts), "request": f"{request:016x}"}
            self._send(reply, self._message("snapshot", self.sequence, part, more))

    def _message(self, kind, sequence, records=(), more=None):
        return json.dumps({"kind": kind, "publisher": self.subject, "incarnation": f"{self.incarnation:016x}", "sequence": sequence, **(more or {}),
                           "time_ns": time.time_ns() + self.ahead_ns, "fingerprint": "00" * 16, "events": list(records)}).encode()

    @staticmethod
    def _key(number):
        return number.to_bytes(8, sys.byteorder).hex()

    def _record(self, event, key, tier, parent=None, tokens_hash=None):
        extra = {"tier": tier, "group": 0, "position": 0}
        if parent is not None:
            extra["parent"] = self._key(parent)
        if tokens_hash is not None:
            extra["tokens_hash"] = f"{tokens_hash:016x}"
        return {"event_type": event, "sequence_hash": self._key(key), "block_size": 4096, "storage_location": "00" * 8, "extra_metadata": extra}

    def send(self, records, lose=False):
        """Publish a message of records. @lose: spend its number, and publish nothing."""
        with self.lock:
            if not lose:
                self._send(self.subject, self._message("events", self.sequence, records))
            self.sequence += 1

    def alive(self):
        with self.lock:
            self._send(self.subject, self._message("alive", self.sequence))

    def store(self, chain, parent=None, tier="device", lose=False):
        """Store a chain of (key, tokens_hash)."""
        records = []
        with self.lock:
            for key, tokens_hash in chain:
                self.blocks[key, tier] = (parent, tokens_hash)
                records.append(self._record("store", key, tier, parent, tokens_hash))
                parent = key
        self.send(records, lose)

    def remove(self, keys, tier="device", lose=False):
        with self.lock:
            for key in keys:
                del self.blocks[key, tier]
        self.send([self._record("remove", key, tier) for key in keys], lose)

    def restart(self):
        """Another process, with nothing."""
        with self.lock:
            self.blocks.clear()
            self.sequence, self.incarnation = 0, self.incarnation + 1

    def close(self):
        with contextlib.suppress(OSError):  # ENOTCONN: the server has reset the connection, which ends the thread, too
            self.client.socket.shutdown(socket.SHUT_RDWR)
        self.client.socket.close()
        self.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
