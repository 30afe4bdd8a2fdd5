# SPDX-License-Identifier: Apache-2.0
"""A worker of Dynamo as its event plane shows it: a ZMQ publisher of envelopes, and its records in a folder or in etcd."""
import base64
import ctypes
import pathlib
import shutil
import ssl
import struct
import subprocess
import tempfile
import threading
import time

import msgpack

from natstest import NatsClient
from kvtest import BUILD, Publisher, check, free_port, http_request, skip_all, wait_until

NAMESPACE, COMPONENT, ENDPOINT = "ns1", "backend", "generate"
MASK = 2**64 - 1


def local_hash(tokens):
    """tokens_hash of a block."""
    function = ctypes.CDLL("libxxhash.so.0").XXH3_64bits_withSeed
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    return function(data, len(data), 1337)


class Etcd:
    """An etcd of the test's own: kill() and start() keep its data, forget() removes them. @tls: (certificate, key), of an authority too."""

    def __init__(self, tls=None):
        if not shutil.which("etcd"):
            skip_all("etcd is needed")
        self.token, self.tls, self.context = None, [], None
        if tls:
            self.tls = ["--cert-file", tls[0], "--key-file", tls[1], "--client-cert-auth", "--trusted-ca-file", tls[0]]
            self.context = ssl.create_default_context(cafile=tls[0])
            self.context.load_cert_chain(*tls)
        self.folder = tempfile.mkdtemp(prefix="kv-etcd-")
        self.port, self.peer, self.process = free_port(), free_port(), None
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        peer = f"http://127.0.0.1:{self.peer}"
        self.process = subprocess.Popen(
            ["etcd", "--data-dir", f"{self.folder}/data", "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             "--log-level", "panic", *self.tls], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.answers, 60, "etcd")

    def answers(self):
        try:
            said = self.call("kv/range", {"key": self.text("a")})
            return "header" in said or said.get("code") == 16  # a token of before, which it has forgotten
        except (OSError, ValueError):
            return False

    @staticmethod
    def text(value):
        return base64.b64encode(value.encode()).decode()

    def call(self, path, body):
        headers = {"Authorization": self.token} if self.token else None
        return http_request(self.url, "POST", f"/v3/{path}", body, headers, context=self.context).json()

    def protect(self, password):
        """From now on every request needs the token of a user: root's, and this object has one."""
        self.call("auth/user/add", {"name": "root", "password": password})
        self.call("auth/role/add", {"name": "root"})
        self.call("auth/user/grant", {"user": "root", "role": "root"})
        self.call("auth/enable", {})
        self.token = self.call("auth/authenticate", {"name": "root", "password": password})["token"]

    def grant(self, ttl=10):
        return int(self.call("lease/grant", {"TTL": str(ttl)})["ID"])

    def put(self, bucket, name, value, lease):
        self.call("kv/put", {"key": self.text(f"v1/{bucket}/{name}"), "value": self.text(value), "lease": str(lease)})

    def remove(self, bucket, name):
        self.call("kv/deleterange", {"key": self.text(f"v1/{bucket}/{name}")})

    def revoke(self, lease):
        self.call("lease/revoke", {"ID": str(lease)})

    def keys(self, prefix):
        body = {"key": self.text(prefix), "range_end": self.text(prefix[:-1] + chr(ord(prefix[-1]) + 1)), "keys_only": True}
        return [base64.b64decode(kv["key"]).decode() for kv in self.call("kv/range", body).get("kvs", [])]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def forget(self):
        shutil.rmtree(f"{self.folder}/data")

    @property
    def where(self):
        return f"etcd{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Folder:
    """Discovery in a folder. A thread keeps the files of live leases young, as their owner does."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kv-discovery-"))
        self.files, self.leases, self.lock, self.stop = {}, 0, threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    @staticmethod
    def quote(name):
        return "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in name)

    def _keep(self):
        while not self.stop.wait(2):
            with self.lock:
                for path in self.files.values():
                    path.touch()

    def grant(self, _ttl=10):
        self.leases += 1
        return 1000 + self.leases

    def put(self, bucket, name, value, lease):
        path = self.folder / "v1" / bucket / self.quote(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".tmp_{path.name}"
        temporary.write_text(value)
        with self.lock:
            temporary.rename(path)
            self.files[bucket, name, lease] = path

    def revoke(self, lease):
        with self.lock:
            for key in [key for key in self.files if key[2] == lease]:
                self.files.pop(key).unlink()

    def remove(self, bucket, name):
        with self.lock:
            for key in [key for key in self.files if key[:2] == (bucket, name)]:
                self.files.pop(key).unlink()

    def abandon(self):
        """The owners die: their files stay, and nobody keeps them young."""
        with self.lock:
            self.files.clear()

    @property
    def where(self):
        return f"file://{self.folder}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class Engine:
    """A block manager (kvbm_engine.c) with a sink for the plane. @plane: "zmq", or the URL of a NATS server."""

    def __init__(self, discovery, worker, rank=0, plane="zmq", policy="lru", scope="per_tier", queue=0):
        self.worker, self.dp_rank = worker, rank
        self.process = subprocess.Popen(
            [str(BUILD / "tests" / "kvbm_engine"), policy, scope, "replay", str(queue), discovery.where, str(worker), str(rank), plane],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        check(self.process.stdout.readline(), "kvbm_engine has ended")

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline().rstrip("\n")) != ".":
            check(line, "kvbm_engine has ended")
            lines.append(line)
        return lines

    def prompts(self):
        """(blocks in the device's pool, tokens) of each prompt."""
        rows = [list(map(int, line.split())) for line in self.ask("prompts")]
        return [(row[0], row[3:]) for row in rows]

    def sink(self):
        return dict(zip(("publisher", "events", "messages", "losses", "announced"), map(int, self.ask("dynamo")[0].split())))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(60)


class Worker(Publisher):
    """A worker that publishes on the ZMQ plane. @number: its publisher id; @claims: the one in its records."""

    has_channel = True

    def __init__(self, discovery, worker=None, number=None, rank=0, namespace=NAMESPACE, announce=True):
        super().__init__(replay=None, topic=b"kv-events")
        self.discovery, self.lease = discovery, discovery.grant()
        self.worker, self.dp_rank, self.namespace = self.lease if worker is None else worker, rank, namespace
        self.number = number or time.monotonic_ns() & (2**53 - 1)
        self.events = 0
        if announce:
            self.announce()

    @property
    def name(self):
        return (f"namespace/{self.namespace}/component/{COMPONENT}/endpoint/{ENDPOINT}/topic/kv-events/{self.number:x}")

    def announce(self):
        of = f'{{"namespace":"{self.namespace}","component":"{COMPONENT}","name":"{ENDPOINT}"}}'
        scope = f'"scope":{{"kind":"endpoint","endpoint":{of}}},"topic":"kv-events"'
        if self.has_channel:
            self.discovery.put("event_channels", self.name, (
                f'{{"type":"EventChannel",{scope},"instance_id":{self.number},'
                f'"transport":{{"kind":"Zmq","config":{{"endpoint":"{self.endpoint}"}}}}}}'), self.lease)
        self.discovery.put("event_sources", self.name, (
            f'{{"type":"EventSource",{scope},"publisher_id":{self.number},"metadata":{{"kv_state_endpoint":{of},'
            f'"worker":{{"worker_id":{self.worker},"dp_rank":{self.dp_rank}}},"publisher_id":{self.number}}}}}'), self.lease)

    def leave(self):
        self.discovery.revoke(self.lease)

    # -- events ------------------------------------------------------------------------------------
    def event(self, data, tier="device", worker=None, rank=None, event_id=None):
        self.events = self.events + 1 if event_id is None else event_id
        return {"worker_id": self.worker if worker is None else worker, "storage_tier": tier, "residency_domain": "worker",
                "event": {"event_id": self.events, "data": data, "dp_rank": self.dp_rank if rank is None else rank}}

    def stored_data(self, hashes, tokens, parent=None, size=4):
        blocks = [{"block_hash": name & MASK, "tokens_hash": local_hash(tokens[at * size:(at + 1) * size]), "mm_extra_info": None}
                  for at, name in enumerate(hashes)]
        return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}

    def send_events(self, *events, lose=False, number=None):
        """Publish one envelope. @lose: spend its number. @number: the publisher id that it tells."""
        sequence, self.seq = self.seq, self.seq + 1
        number = number or self.number
        envelope = msgpack.packb({"publisher_id": number, "sequence": sequence, "published_at": int(time.time() * 1000),
                                  "topic": "kv-events", "payload": msgpack.packb(list(events))})
        if not lose:
            self.send_envelope(number, sequence, envelope)

    def send_envelope(self, number, sequence, envelope):
        self.send_frames(b"kv-events", struct.pack(">Q", number), struct.pack(">Q", sequence), b"\x01" + struct.pack(">I", len(envelope)) + envelope)

    def store(self, hashes, tokens, parent=None, lose=False, **fields):
        check(len(tokens) == 4 * len(hashes), "four tokens a block")
        self.send_events(self.event(self.stored_data(hashes, tokens, parent), **fields), lose=lose)

    def remove(self, hashes, **fields):
        self.send_events(self.event({"removed": {"block_hashes": list(hashes)}}, **fields))

    def clear(self):
        self.send_events(self.event("cleared"))

    def __exit__(self, *_):
        try:
            self.leave()
        except (OSError, ValueError, KeyError):
            pass  # the server may be gone
        self.close()


class NatsWorker(Worker):
    """A worker that publishes on NATS, over @client of natstest.py: no channel in its records."""

    has_channel = False

    def __init__(self, discovery, server, **fields):
        self.client = NatsClient(server)
        super().__init__(discovery, **fields)

    def reconnect(self, server):
        self.client.socket.close()
        self.client = NatsClient(server)

    def send_envelope(self, number, sequence, envelope):
        self.client.publish(f"namespace.{self.namespace}.component.{COMPONENT}.endpoint.{ENDPOINT}.kv-events", envelope)

    def close(self):
        self.client.socket.close()
        super().close()
