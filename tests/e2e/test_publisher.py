# SPDX-License-Identifier: Apache-2.0
"""Our publisher as other programs see it: plain ZMQ sockets and another msgpack."""
import struct
import subprocess
import time

from kvtest import BUILD, SLOW, check, equal, msgpack, patience, run, zmq

LAST = 2**64 - 1
END = b"\xff" * 8


class Engine:
    """test-event-publisher as an engine: step() makes it publish its next batch."""

    def __init__(self, encoding, framing):
        self.process = subprocess.Popen([BUILD / "tests" / "test-event-publisher", "serve", encoding, framing],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint, self.replay_endpoint = self.process.stdout.readline().split()
        self.context = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)
        self.context.setsockopt(zmq.RCVTIMEO, int(patience(20) * 1000))

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def socket(self, kind, endpoint):
        socket = self.context.socket(kind)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv-")
        socket.connect(endpoint)
        return socket

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            equal(self.process.wait(patience(20)), 0, "exit status of the engine")
        finally:
            self.process.kill()
            self.context.destroy()


def events_of(i, encoding):
    """The i-th batch of the engine, written down independently."""
    hashes = [LAST - 2 * i, LAST - 2 * i - 1]
    parent = LAST - 2 * i + 1 if i else None
    tokens = [1000 * i + 40000 * t for t in range(8)]
    lora, salt = ("lora" if i % 2 else None), (None if i % 3 else "salt")
    if encoding == "map":
        stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4,
                  "lora_id": None, "medium": "GPU", "lora_name": lora}
        if salt:
            stored["cache_salt"] = salt
        return [stored, {"type": "BlockRemoved", "block_hashes": hashes[:1], "medium": "CPU_PINNED"}, {"type": "AllBlocksCleared"}]
    stored = ["BlockStored", hashes, parent, tokens, 4, None, "GPU", lora]
    if salt:
        stored.append([["dynamo-cache-salt:salt"], None])
    return [stored, ["BlockRemoved", hashes[:1], "CPU_PINNED"], ["AllBlocksCleared"]]


def check_payload(payload, i, encoding):
    timestamp, events, rank = msgpack.unpackb(payload)
    check(abs(time.time() - timestamp) < 60 * SLOW, f"timestamp {timestamp}")
    equal(rank, 2, "rank")
    equal(events, events_of(i, encoding), f"events of batch {i}")
    if encoding == "map":
        equal([next(iter(e)) for e in events], ["type"] * 3, "the type comes first")


def check_live(encoding, framing):
    with Engine(encoding, framing) as engine:
        sub = engine.socket(zmq.SUB, engine.endpoint)
        while not sub.poll(20):
            last = engine.step()
        topic, first, payload = sub.recv_multipart()
        equal(topic, b"kv-events", "topic")
        equal(len(first), 8, "bytes of the sequence")
        check_payload(payload, struct.unpack(">Q", first)[0], encoding)
        while struct.unpack(">Q", first)[0] < last:  # all that was sent since has to come, too
            first = sub.recv_multipart()[1]
        for _ in range(20):
            i = engine.step()
            topic, sequence, payload = sub.recv_multipart()
            equal(struct.unpack(">Q", sequence)[0], i, "sequence")
            check_payload(payload, i, encoding)


def check_replay(encoding, framing):
    topic = [b"kv-events"] if framing == "topic" else []
    with Engine(encoding, framing) as engine:
        dealer = engine.socket(zmq.DEALER, engine.replay_endpoint)
        for i in range(30):
            equal(engine.step(), i)
        for start in (0, 17, 30, 10**12):
            dealer.send_multipart([b"", struct.pack(">Q", start)])
            for i in range(start, 30):
                reply = dealer.recv_multipart()
                equal(reply[:-1], [b"", *topic, struct.pack(">Q", i)], "frames before the payload")
                check_payload(reply[-1], i, encoding)
            equal(dealer.recv_multipart(), [b"", *([b""] if topic else []), END, b""], "end marker")


def test_maps():
    check_live("map", "topic")
    check_replay("map", "topic")


def test_arrays():
    check_live("array", "plain")
    check_replay("array", "plain")


def test_req_socket():
    """A REQ may ask, too, and reads one reply."""
    with Engine("map", "plain") as engine:
        engine.step()
        req = engine.socket(zmq.REQ, engine.replay_endpoint)
        req.send(struct.pack(">Q", 0))
        sequence, payload = req.recv_multipart()
        equal(sequence, bytes(8))
        check_payload(payload, 0, "map")


if __name__ == "__main__":
    run(globals())
