# SPDX-License-Identifier: Apache-2.0
"""Dynamo 1.6.1's own router and publisher on its event plane, beside a block manager and a kv-indexer of ours.

Its router takes a block manager's events over ZMQ and NATS, with discovery in a folder and in etcd: get_overlap_scores
equals kvbm_pool_probe through stores, evictions, resets, losses and restarts. kv-indexer --dynamo follows its publishers with
the answers of its router.
"""
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from realtest import *
from dynamo import Engine, Etcd, Folder

HERE = pathlib.Path(__file__).resolve().parent
BLOCK = 4
MODEL = "m"


class Nats:
    """A nats-server of the test's own; kill() and start() are a restart."""

    def __init__(self):
        if not shutil.which("nats-server"):
            skip_all("nats-server is needed")
        self.port = free_port()
        self.start()

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def start(self):
        self.process = subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Runtime:
    """A process of dynamo_runtime.py."""

    def __init__(self, role, discovery, plane, nats=None, *args):
        where = {"DYN_FILE_KV": str(discovery.folder)} if isinstance(discovery, Folder) else {"ETCD_ENDPOINTS": discovery.url}
        if nats:
            where["NATS_SERVER"] = nats.url
        backend = "file" if isinstance(discovery, Folder) else "etcd"
        self.process = subprocess.Popen([str(PYTHON), str(HERE / "dynamo_runtime.py"), role, backend, plane, *map(str, args)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "DYN_LOG": "error", **where})
        self.hello = self.read()

    def read(self):
        while line := self.process.stdout.readline():
            if line[0] in '{["n0123456789':
                return json.loads(line)
        raise AssertionError("a process of Dynamo's has ended")

    def ask(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def enter_worker(discovery, worker):
    """What the worker itself has in the discovery: a model card, and an instance. The block manager adds its publisher."""
    lease, name = discovery.grant(3600), f"ns1/backend/generate/{worker:x}"
    card = {"display_name": "m", "slug": "m", "model_info": None, "tokenizer": None, "context_length": 0, "kv_cache_block_size": BLOCK,
            "migration_limit": 0, "model_type": "Completions", "model_input": "Tokens", "worker_type": "aggregated", "needs": [],
            "media_decoder": None, "media_fetcher": None,
            "runtime_config": {"total_kv_blocks": None, "max_num_seqs": None, "max_num_batched_tokens": None, "tool_call_parser": None,
                               "reasoning_parser": None, "exclude_tools_when_tool_choice_none": True, "data_parallel_start_rank": 0,
                               "data_parallel_size": 1, "enable_local_indexer": False, "enable_eagle": False}}
    of = {"namespace": "ns1", "component": "backend", "endpoint": "generate", "instance_id": worker}
    discovery.put("mdc", name, json.dumps({"type": "Model", **of, "card_json": card}), lease)
    discovery.put("instances", name, json.dumps({"type": "Endpoint", **of, "transport": {"tcp": f"127.0.0.1:9/{name}"}, "device_type": "cuda",
                                                 "request_plane_codec": "msgpack"}), lease)


def differences(router, engine, never_more=False):
    """Prompts of which the router says another number of blocks than the device's pool."""
    wrong = []
    for blocks, tokens in engine.prompts():
        got = router.ask("scores", tokens).get(f"{engine.worker}:0", [0])[0]
        if got > blocks or (got < blocks and not never_more):
            wrong.append((got, blocks))
    return wrong


def join(router, engine):
    """Publish until the router hears it: what was published before is not told again."""
    def heard():
        tokens = list(map(int, engine.ask("mark 1")[0].split()))
        engine.ask("flush")
        if router.ask("scores", tokens).get(f"{engine.worker}:0", [0])[0] == 1:
            return True
        engine.ask("reset")
        engine.ask("flush")
        return False

    wait_until(heard, 60, "the router hears the block manager", interval=0.5)
    engine.ask("reset")
    engine.ask("flush")


def router_follows(discovery, plane, nats=None):
    enter_worker(discovery, 77)
    url = nats.url if nats else "zmq"
    with Runtime("router", discovery, plane, nats) as router:
        with Engine(discovery, 77, plane=url) as engine:
            join(router, engine)
            for seed in range(4):
                engine.ask(f"run {seed} 400")
                engine.ask("flush")
                wait_until(lambda: differences(router, engine) == [], 60, "the router's scores are the pool's")
            check(any(blocks for blocks, _ in engine.prompts()), "there are blocks")
            engine.ask("reset")
            engine.ask("flush")
            wait_until(lambda: differences(router, engine) == [], 60, "no blocks")
            engine.ask("run 9 400")
            engine.ask("flush")
            wait_until(lambda: differences(router, engine) == [], 60, "blocks again")
            engine.kill()
        with Engine(discovery, 77, plane=url, queue=4096) as engine:  # a restart, and a queue that loses
            join(router, engine)
            for seed in range(4):
                engine.ask(f"run {seed} 4000")
                engine.ask("flush")
                wait_until(lambda: differences(router, engine, never_more=True) == [], 60, "never more than the pool")
            check(engine.sink()["losses"] > 0, "changes were lost")


def test_router_zmq_folder():
    with Folder() as folder:
        router_follows(folder, "zmq")


def test_router_zmq_etcd():
    with Etcd() as etcd:
        router_follows(etcd, "zmq")


def test_router_nats():
    with Folder() as folder, Nats() as nats:
        router_follows(folder, "nats", nats)


def test_router_nats_restarts():
    """nats-server is killed: what is lost meanwhile never makes a score too high for long, and all is equal again after a reset."""
    with Folder() as folder, Nats() as nats:
        enter_worker(folder, 77)
        with Runtime("router", folder, "nats", nats) as router, Engine(folder, 77, plane=nats.url) as engine:
            join(router, engine)
            engine.ask("run 1 400")
            engine.ask("flush")
            wait_until(lambda: differences(router, engine) == [], 60, "equal scores")
            nats.kill()
            engine.ask("run 2 400")
            nats.start()

            def equal_again():
                engine.ask("reset")
                engine.ask("run 3 100")
                engine.ask("flush")
                time.sleep(1)
                return differences(router, engine) == []

            wait_until(equal_again, 120, "equal scores again", interval=1)


class Cache:
    """A made-up engine's tree of blocks, told to its KvEventPublisher. A block's name follows from its place, as in real engines:
    Dynamo's router loses blocks that come back under another name."""

    def __init__(self, worker, rng):
        self.worker, self.rng, self.held = worker, rng, {}

    def step(self):
        if self.rng.random() < 0.6 or not self.held:
            chain = self.rng.choice([(), *self.held])
            blocks = [tuple([self.rng.randrange(3)] * BLOCK) for _ in range(self.rng.randint(1, 4))]
            self.store(chain, blocks)
        else:
            leaves = [chain for chain in self.held if not any(other[:-1] == chain for other in self.held)]
            self.worker.ask("removed", [self.held.pop(self.rng.choice(leaves))])

    def store(self, chain, blocks):
        while blocks and chain + (blocks[0],) in self.held:
            chain, blocks = chain + (blocks[0],), blocks[1:]
        parent, names = self.held.get(chain), []
        for at, block in enumerate(blocks):
            chain += (block,)
            if chain in self.held:
                blocks = blocks[:at]
                break
            names.append(int.from_bytes(hashlib.blake2b(repr(chain).encode(), digest_size=7).digest(), "little"))
            self.held[chain] = names[-1]
        if names:
            self.worker.ask("stored", [token for block in blocks for token in block], names, parent)

    def reach(self, tokens):
        chain = ()
        for start in range(0, len(tokens), BLOCK):
            if chain + (tuple(tokens[start:start + BLOCK]),) not in self.held:
                break
            chain += (tuple(tokens[start:start + BLOCK]),)
        return len(chain)


def same_answers(discovery, rng):
    """Two publishers of Dynamo's: kv-indexer and its router say what they have."""
    with Indexer("--dynamo", discovery.where, "--block-size", BLOCK, "--model-name", MODEL) as indexer, \
            Runtime("router", discovery, "zmq") as router, Runtime("worker", discovery, "zmq", None, 0) as one, \
            Runtime("worker", discovery, "zmq", None, 0) as two:
        caches = [Cache(one, rng), Cache(two, rng)]
        ids = [one.hello, two.hello]
        wait_until(lambda: sorted(row["instance_id"] for row in indexer.workers()) == sorted(ids), 60, "both workers")
        wait_until(lambda: all(row["listeners"]["0"]["status"] == "active" for row in indexer.workers()), 60, "connections")
        prompts = [[token for _ in range(6) for token in [rng.randrange(3)] * BLOCK] for _ in range(40)]
        for _ in range(5):
            for _ in range(60):
                rng.choice(caches).step()

            def equal_to(says):
                return all(says(prompt, worker) == cache.reach(prompt) for prompt in prompts for worker, cache in zip(ids, caches))

            wait_until(lambda: equal_to(lambda prompt, worker: indexer.score(prompt, worker, model_name=MODEL) // BLOCK), 60, "our answers")
            wait_until(lambda: equal_to(lambda prompt, worker: router.ask("scores", prompt).get(f"{worker}:0", [0])[0]), 60, "its answers")
        equal(indexer.query(prompts[0], model_name=MODEL, explain=True)["explain"]["partial_ranks"], 0)
        one.kill()
        wait_until(lambda: [row["instance_id"] for row in indexer.workers()] == [two.hello], 90, "a killed worker to leave")


def test_same_answers_folder():
    for _, rng in histories(1):
        with Folder() as folder:
            same_answers(folder, rng)


def test_same_answers_etcd():
    for _, rng in histories(1):
        with Etcd() as etcd:
            same_answers(etcd, rng)


if __name__ == "__main__":
    sys.exit(run(globals()))
