# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --discover etcd: beside a real etcd: keys that come, change and go, leases that end, a server that is killed."""
import json
import subprocess
import sys
import tempfile

from kvtest import *
from dynamo import Etcd

TOKENS = list(range(1, 17))


def put(etcd, name, value, lease=0):
    text = value if isinstance(value, str) else json.dumps(value)
    etcd.call("kv/put", {"key": etcd.text(f"kvasir/{name}"), "value": etcd.text(text), "lease": str(lease)})


def remove(etcd, name):
    etcd.call("kv/deleterange", {"key": etcd.text(f"kvasir/{name}")})


def follow(etcd, *args, grace="600s", prefix="kvasir/", **kw):
    return Indexer("--discover", f"{etcd.where}/{prefix}", "--discover-grace", grace, "--block-size", 4, "--model-name", MODEL, *args, **kw)


def present(indexer):
    return {(w["instance_id"], int(rank)): row["endpoint"] for w in indexer.workers() for rank, row in w["listeners"].items()
            if row["status"] != "withdrawn"}


def wait_present(indexer, *wanted):
    wait_until(lambda: set(present(indexer)) == set(wanted), 60, f"workers {wanted}")


def source(indexer):
    return indexer.get("/discovery").json()[0]


def value_of(engine):
    return f"{engine.endpoint}+{engine.replay_endpoint}"


def test_keys_come_change_and_go():
    with Publisher() as one, Publisher() as two, Etcd() as etcd:
        put(etcd, "a", value_of(one))
        etcd.call("kv/put", {"key": etcd.text("kvasirx"), "value": etcd.text("tcp://127.0.0.1:1")})
        with follow(etcd, grace="1s") as indexer:
            wait_present(indexer, ("a", 0))
            one.store([1, 2], TOKENS[:8], block_size=4)
            indexer.wait_score(TOKENS, "a", 8)
            put(etcd, "b:3", {"endpoint": two.endpoint, "replay_endpoint": two.replay_endpoint, "tenant_id": "t"})
            wait_present(indexer, ("a", 0), ("b", 3))
            equal([w["tenant_id"] for w in indexer.workers() if w["instance_id"] == "b"], ["t"])
            for name, value in (("c", "nonsense"), ("d", "{}"), ("e:x", value_of(one)), ("f", '{"endpoint":"tcp://x:1","dp_rank":-1}'),
                                ("g", "tcp://x:1,h=tcp://x:2")):
                put(etcd, name, value)
            wait_until(lambda: source(indexer)["left_out"] == 5, 60, "five that are left out")
            wait_present(indexer, ("a", 0), ("b", 3))
            put(etcd, "a", value_of(two))
            wait_until(lambda: present(indexer)["a", 0] == two.endpoint, 60, "another endpoint")
            remove(etcd, "a")
            wait_until(lambda: [w["instance_id"] for w in indexer.workers()] == ["b"], 60, "a key to go")


def test_a_lease_that_ends():
    with Publisher() as engine, Etcd() as etcd, follow(etcd) as indexer:
        lease = etcd.grant(60)
        put(etcd, "a", value_of(engine), lease)
        wait_present(indexer, ("a", 0))
        engine.store([1], TOKENS[:4], block_size=4)
        indexer.wait_score(TOKENS, "a", 4)
        etcd.revoke(lease)
        wait_until(lambda: indexer.query(TOKENS)["scores"] == {}, 60, "the worker to be chosen no more")
        put(etcd, "a", value_of(engine))
        indexer.wait_score(TOKENS, "a", 4)
        check(engine.replays <= 1, "the replay of the start, unless the first batch came before it was asked for")


def test_a_server_that_is_killed_changes_nothing():
    with Publisher() as engine, Etcd() as etcd:
        put(etcd, "a", value_of(engine))
        put(etcd, "b", value_of(engine))
        with follow(etcd, grace="100ms") as indexer:
            wait_present(indexer, ("a", 0), ("b", 0))
            engine.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, "a", 4)
            etcd.kill()
            wait_until(lambda: not source(indexer)["current"] and source(indexer)["error"], 60, "the loss")
            equal(set(present(indexer)), {("a", 0), ("b", 0)})
            etcd.start()
            remove(etcd, "b")
            put(etcd, "c", value_of(engine))
            wait_present(indexer, ("a", 0), ("c", 0))
            indexer.wait_score(TOKENS, "a", 4)
            wait_until(lambda: source(indexer)["current"], 60, "the source")
            check(not any("worker=a" in line and ("withdrawn" in line or "has left" in line) for line in indexer.log))


def test_options():
    def refused(wanted, text):
        done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", "--discover", text], capture_output=True, text=True, timeout=60)
        equal(done.returncode != 0 and wanted in done.stderr, True, f"{text}: {done.stderr!r}")

    refused("a prefix of 1 to", "etcd://127.0.0.1:2379")
    refused("a prefix of 1 to", "etcd://127.0.0.1:2379/")
    refused("expected user=NAME", "etcd://127.0.0.1:2379/a?usr=x")
    refused("go together", "etcd://127.0.0.1:2379/a?user=x")
    with tempfile.TemporaryDirectory() as folder:
        refused("No such file", f"etcds://127.0.0.1:2379/a?user=x&password-file={folder}/none")


if __name__ == "__main__":
    sys.exit(run(globals()))
