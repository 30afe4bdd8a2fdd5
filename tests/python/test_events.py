# SPDX-License-Identifier: Apache-2.0
"""kvasir.events and kvasir.client with a real kv-indexer: what Python publishes is found, over HTTP and in an index of its own."""
import asyncio
import errno
import threading

from kvpython import check, equal, raises, run, wait_until  # first: it finds the package
from kvtest import MODEL, Indexer, msgpack, zmq
import kvasir
from kvasir.client import AsyncClient, Client, HTTPError
from kvasir.events import Clear, Publisher, Reader, Remove, Store, StoreKnown
from kvasir.index import DEVICE, HOST, PrefixIndex, hash_tokens

TOKENS = list(range(64))


def follow(client, publisher):
    client.register(1, publisher.endpoint, model_name=MODEL, block_size=16, replay_endpoint=publisher.replay_endpoint)
    wait_until(lambda: client.workers()[0], what="the worker")


def tokens_of(answer):
    return answer["scores"].get("1", {}).get("0", 0)


def test_published_blocks_are_found():
    with Indexer() as indexer, Client(indexer.url) as client, \
            Publisher("tcp://127.0.0.1:*", block_size=16, replay_endpoint="tcp://127.0.0.1:*") as engine:
        check(client.health(), "health")
        engine.stored([101, 102, 103, 104], TOKENS)  # also before anybody listens: there is a replay
        follow(client, engine)
        wait_until(lambda: tokens_of(client.query(TOKENS, model_name=MODEL)) == 64, what="stored blocks")
        equal(tokens_of(client.query_by_hash(hash_tokens(TOKENS, 16), model_name=MODEL)), 64, "by hash")
        equal(tokens_of(client.query_by_sequence_hashes([102, 103], model_name=MODEL)), 48, "by the events' hashes")
        engine.removed([104, 103])
        wait_until(lambda: tokens_of(client.query(TOKENS, model_name=MODEL)) == 32, what="removed blocks")
        engine.stored([101, 102], None, tier=HOST)
        wait_until(lambda: client.query(TOKENS, model_name=MODEL)["instances"]["1"]["cpu"] == 32, what="offloaded blocks")
        engine.cleared()
        wait_until(lambda: tokens_of(client.query(TOKENS, model_name=MODEL)) == 0, what="cleared blocks")
        engine.flush(10)
        equal((engine.stats()["events"], engine.stats()["dropped_events"]), (4, 0), "counters")
        raises(ValueError, engine.stored, [1], TOKENS)
        equal(raises(HTTPError, client.query, TOKENS, model_name="other").status, 404, "an unknown model")
        equal(raises(kvasir.Error, client.query, TOKENS, model_name="other").errno, errno.ENOENT, "as an errno")
        check("kvindexer" in client.metrics() or "kv_indexer" in client.metrics() or "# HELP" in client.metrics(), "metrics")
        client.unregister(1, model_name=MODEL)
        equal(client.workers(), [], "nobody")


def test_clients_of_many_threads_and_tasks():
    with Indexer() as indexer, Client(indexer.url) as client, Publisher("tcp://127.0.0.1:*", block_size=16, replay_endpoint="tcp://127.0.0.1:*") as engine:
        engine.stored([101, 102, 103, 104], TOKENS)
        follow(client, engine)
        wait_until(lambda: tokens_of(client.query(TOKENS, model_name=MODEL)) == 64, what="stored blocks")
        problems = []

        def ask():
            try:
                for _ in range(20):
                    equal(tokens_of(client.query(TOKENS, model_name=MODEL)), 64, "score")
            except BaseException as problem:  # pylint: disable=broad-except
                problems.append(problem)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        equal(problems, [], "problems")

        async def many():
            async with AsyncClient(indexer.url, connections=4) as fast:
                check(await fast.health(), "health")
                for _ in range(3):  # again, on connections that were kept
                    answers = await asyncio.gather(*[fast.query(TOKENS, model_name=MODEL) for _ in range(20)])
                    equal([tokens_of(answer) for answer in answers], [64] * 20, "scores")
                equal(len(fast._idle), 4, "kept connections")
                try:
                    await fast.query(TOKENS, model_name="other")
                    raise AssertionError("an unknown model")
                except HTTPError as problem:
                    equal(problem.status, 404, "status")
                equal((await fast.workers(model_name=MODEL))[0]["instance_id"], 1, "workers")

        asyncio.run(many())
    raises(OSError, client.health)  # it has stopped
    raises(ValueError, Client, "ftp://x")


def test_reader_decodes_into_an_index():
    stored = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": TOKENS[:32], "block_size": 16,
              "lora_id": None, "medium": "GPU", "lora_name": None}
    known = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [], "block_size": 16, "medium": "CPU"}
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}
    index, local = PrefixIndex(), hash_tokens(TOKENS, 16)
    with Reader(block_size=16) as reader:
        batch = reader.decode(msgpack.packb([1.5, [stored, known, removed], 3]))
        equal((batch.timestamp, batch.rank, batch.events, batch.skipped), (1.5, 3, 3, {}), "batch")
        equal([type(op) for op in batch.ops], [Store, StoreKnown, Remove], "operations")
        equal((batch.ops[0].hashes, batch.ops[0].tokens_hashes, batch.ops[0].parent), ((1, 2), tuple(local[:2]), None), "blocks")
        batch.ops[0].apply(index, 9)
        equal([(m.worker, m.rank, m.device) for m in index.find(local)], [(9, 3, 2)], "stored")
        batch.ops[1].apply(index, 9)
        batch.ops[2].apply(index, 9)
        equal([(m.device, m.host) for m in index.find(local)], [(1, 1)], "removed")
        cleared = reader.decode(msgpack.packb([1.5, [{"type": "AllBlocksCleared"}], 3]))
        check(isinstance(cleared.ops[0], Clear), cleared)
        cleared.ops[0].apply(index, 9)
        equal([m for m in index.find(local) if m.device], [], "cleared")
        equal(reader.decode(msgpack.packb([1, [dict(stored, block_size=8)], 0])).skipped, {"block_size": 1}, "left out")
        equal(reader.source(0).kind, "main", "source")
        raises(kvasir.NotFound, reader.source, 7)
        equal(raises(kvasir.Error, reader.decode, b"\xc1").errno, errno.EPROTO, "no batch")
        reader.reset()


def test_publisher_is_read_by_zmq():
    context = zmq.Context()
    with Publisher("tcp://127.0.0.1:*", block_size=16, topic="kv", replay_endpoint="tcp://127.0.0.1:*") as engine, Reader(block_size=16) as reader:
        engine.stored([7], TOKENS[:16], lora="adapter")
        engine.flush(10)
        asker = context.socket(zmq.DEALER)
        asker.connect(engine.replay_endpoint)
        asker.send_multipart([b"", bytes(8)])
        check(asker.poll(120000), "no replay")
        frames = asker.recv_multipart()
        equal(reader.decode(frames[-1]).ops[0].hashes, (7,), "replayed")
        asker.close(0)
    context.term()
    raises(ValueError, engine.removed, [7])
    raises(kvasir.Error, Publisher, "tcp://nowhere.invalid:1", block_size=16)


if __name__ == "__main__":
    run(globals())
