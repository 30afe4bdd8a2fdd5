# SPDX-License-Identifier: Apache-2.0
"""What an answer's numbers are worth: `views` in /query and /query_by_hash, /ready, kv_indexer_worker_up, GET /."""
import os
import subprocess
import tempfile

from kvtest import *
import streams

HASHES = [11, 12, 13, 14]
TOKENS = list(range(64))


def views(indexer, tokens=TOKENS):
    answer = indexer.query(tokens)
    by_hash = indexer.query_by_hash([1])
    equal(by_hash["views"], answer["views"], "views of /query_by_hash")
    packed = indexer.request("POST", "/query", msgpack.packb({"model_name": MODEL, "token_ids": tokens}), {"Content-Type": "application/msgpack"})
    equal(packed.json()["views"], answer["views"], "views of a msgpack request")
    return answer["views"]


def up(indexer, instance, rank=0):
    return next(value for key, value in indexer.metrics().items()
                if key.startswith("kv_indexer_worker_up{") and f'instance="{instance}",dp_rank="{rank}"' in key)


def test_views():
    with Indexer("--stale-after", "300ms", "--forget-after", "2s") as indexer, Publisher() as whole, Publisher(replay=None) as lossy, \
            streams.Engine(count=3) as dying:
        indexer.register(1, whole)
        indexer.register(2, lossy)
        indexer.register(2, "tcp://127.0.0.1:1", dp_rank=1)
        indexer.register(3, dying.endpoint, replay_endpoint=dying.replay_endpoint)
        whole.store(HASHES, TOKENS)
        lossy.store(HASHES, TOKENS)
        for instance in (1, 2):
            indexer.wait_score(TOKENS, instance, 64)
        wait_until(lambda: set(views(indexer)) == {"2", "3"}, 10, "the views")
        wait_until(lambda: views(indexer)["2"]["1"] == {"status": "failed", "partial": True}, 10, "the dead rank's view")
        # The blocks have another size. The stream is replaying before.
        wait_until(lambda: views(indexer)["3"]["0"] == {"status": "active", "partial": True}, 10, "the view of other blocks")
        check("0" not in views(indexer)["2"], "a whole and active rank is not listed")
        lossy.store([99], range(900, 916), lose=True)
        lossy.store([98], range(800, 816))
        indexer.wait_score(range(800, 816), 2, 16)
        equal(views(indexer)["2"]["0"], {"status": "active", "partial": True})
        equal((up(indexer, 1), up(indexer, 2, 1), up(indexer, 3)), (1, 0, 1))
        dying.kill()
        wait_until(lambda: views(indexer)["3"]["0"] == {"status": "failed", "partial": True}, 10, "the dead worker's view")
        equal(up(indexer, 3), 0)
        indexer.unregister(3)
        indexer.unregister(2)
        wait_until(lambda: views(indexer) == {}, 10, "no views but whole ones")
        indexer.unregister(1)
        equal(indexer.query(TOKENS, expect=404)["hint"], "no worker has been registered yet (POST /register)")
        dying.start()


def test_blocks_of_a_dump_that_nobody_follows():
    """A peer's worker whose endpoint isn't allowed here: its blocks are known and nothing keeps them true."""
    with Publisher() as engine, Publisher() as other, Indexer() as first:
        first.register(1, engine)
        first.register(2, other)
        for one in (engine, other):
            one.store(HASHES, TOKENS)
        for instance in (1, 2):
            first.wait_score(TOKENS, instance, 64)
        with Indexer("--peers", first.url, "--allow-endpoint", other.endpoint, "--allow-endpoint", other.replay_endpoint) as replica:
            wait_until(lambda: set(views(replica)) == {"1"}, 30, "the view of the other one to be whole")
            equal(views(replica)["1"]["0"], {"status": "unregistered", "partial": True})
            equal(replica.score(TOKENS, 1), 64)


def test_ready():
    """Not before the streams have caught up; a dead worker holds up nobody for long."""
    with Publisher() as engine:
        engine.store(HASHES, TOKENS)
        with Indexer("--stale-after", "1s", "--block-size", 16, "--model-name", MODEL,
                     "--workers", f"1={engine.endpoint}+{engine.replay_endpoint},2=tcp://127.0.0.1:1") as indexer:
            wait_until(lambda: indexer.get("/ready").status == 200, 20, "readiness")
            equal(indexer.score(TOKENS, 1), 64)
            equal(indexer.query(TOKENS)["views"], {"2": {"0": {"status": "failed", "partial": True}}})
        with Indexer("--stale-after", "1h", "--block-size", 16, "--model-name", MODEL, "--workers", "2=tcp://127.0.0.1:1") as indexer:
            reply = indexer.get("/ready")
            equal((reply.status, indexer.get("/health").status), (503, 200))
            check("1 of 1" in reply.json()["error"], reply)
        with Indexer("--min-initial-workers", 1) as indexer:
            equal(indexer.get("/ready").status, 503)
        with Indexer() as indexer:
            equal(indexer.get("/ready").status, 200)
            reply = indexer.request("HEAD", "/ready")
            equal((reply.status, reply.body), (200, b""))


def test_a_scrape_of_many_workers():
    """At most 100 KB of 200 workers: of each whether it is up, how old its news are, and what is wrong with it."""
    n = 200
    with Indexer() as indexer, Publisher(replay=None) as engine:
        for instance in range(1, n + 1):
            indexer.register(instance, engine.endpoint, model_name="meta-llama/Llama-3.1-8B-Instruct")
        engine.wait_subscriber(n)
        for hashes in HASHES:
            engine.store([hashes], range(hashes, hashes + 16))
        engine.store([99], range(900, 916), lose=True)
        engine.store([98], range(800, 816))
        query = {"model_name": "meta-llama/Llama-3.1-8B-Instruct"}
        wait_until(lambda: len(indexer.query(range(800, 816), **query)["scores"]) == n, 30, "the last block everywhere")
        short = indexer.get("/metrics").body
        check(len(short) <= 100000 + n * 420, f"{len(short)} bytes with a loss in each")  # gaps, missed, partial, its reason
        engine.clear()
        wait_until(lambda: not indexer.query(range(800, 816), **query)["scores"], 30, "the clear everywhere")
        values = indexer.metrics()
        equal(sum(key.startswith("kv_indexer_worker_up{") for key in values), n)
        equal(sum(key.startswith("kv_indexer_stream_missed_batches_total{") for key in values), n)
        check(not any(key.startswith("kv_indexer_stream_bytes_total{") for key in values), "the short form")
        full = indexer.get("/metrics?detail=true").body.decode()
        equal(full.count("\nkv_indexer_stream_bytes_total{"), n)
        equal(full.count("\nkv_indexer_stream_partial{"), n)
    with Indexer() as indexer, Publisher() as engine:
        for instance in range(1, n + 1):
            indexer.register(instance, engine, model_name="meta-llama/Llama-3.1-8B-Instruct")
        engine.wait_subscriber(n)
        engine.store(HASHES, TOKENS)
        query = {"model_name": "meta-llama/Llama-3.1-8B-Instruct"}
        wait_until(lambda: len(indexer.query(TOKENS, **query)["scores"]) == n and not indexer.query(TOKENS, **query)["views"], 30, "it everywhere")
        check(len(indexer.get("/metrics").body) <= 100000, f"{len(indexer.get('/metrics').body)} bytes")


def test_sections():
    """One section per model in the configuration file; lists add up there, and a port given twice names both lines."""
    with Publisher() as a, Publisher() as b, tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "conf")

        def write(text):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)

        write(f"log-level = info\n\n[alpha]\nblock-size = 16\nworkers = 1={a.endpoint}\nworkers = 2={a.endpoint}\n"
              f"[org/beta-8B]\nblock-size = 32\ntenant-id = t\nworkers = 3={b.endpoint}+{b.replay_endpoint}\n")
        with Indexer("--config", path) as indexer:
            found = {worker["instance_id"]: (worker["model_name"], worker["tenant_id"], worker["block_size"]) for worker in indexer.workers()}
            equal(found, {1: ("alpha", "default", 16), 2: ("alpha", "default", 16), 3: ("org/beta-8B", "t", 32)})
        for wrong, why in (("[m]\nworkers = 1=tcp://h:1\n", "section [m]: --block-size is required"),
                           ("port = 1\nport = 2\n", ":2: --port: given on line 1, too"),
                           ("[m]\nport = 1\n", ":2: `port` is of no section"),
                           ("[m]\nblock-size = 1\nblock-size = 2\n", ":3: --block-size: given on line 2, too"),
                           ("[]\n", ":1: a section without a name"), ("[m\n", ":1: expected `[NAME]`")):
            write(wrong)
            done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--config", path], capture_output=True, text=True, timeout=patience(60), check=False)
            equal(done.returncode, 2, wrong)
            check(why in done.stderr, f"{wrong}: {done.stderr}")


def test_lost_on_the_way():
    with Indexer() as indexer, Publisher() as engine:
        root = indexer.get("/").json()
        equal(root["service"], "kv-indexer")
        check("POST /query" in root["endpoints"] and "GET /ready" in root["endpoints"], root)
        check(not any("/test/" in one for one in root["endpoints"]), root)
        equal(indexer.get("/nope").json()["error"], "no such path; GET / lists the endpoints")
        equal(indexer.query([1], expect=404)["known"], [])
        indexer.register(1, engine, tenant_id="a")
        unknown = indexer.query([1], expect=404, model_name="n", tenant_id="a")
        equal(unknown["known"], [{"model_name": MODEL, "tenant_id": "a"}])
        check("GET /workers" in unknown["hint"], unknown)
        check("tenant_id" in indexer.query([1], expect=404)["hint"], "the tenant is the reason")


if __name__ == "__main__":
    run(globals())
