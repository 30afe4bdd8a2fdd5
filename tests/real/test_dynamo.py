# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo 1.6.1's own indexer beside ours, on the same event sockets: equal answers where it is right.

Where its answer is known to be wrong (vLLM's duplicate blocks, salts and images in extra keys) the engine's own cache is
the truth, ours must be exact, and the differences of the other one are only counted.
"""
import hashlib
import signal
import subprocess
import tempfile
from collections import Counter

from vllm_engine import *
from kvtest import Publisher

BLOCK = 4


class Dynamo:
    """`python -m dynamo.indexer` on a free port."""

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([PYTHON, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"],
                                        stdout=self.log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: http_request(self.url, "GET", "/health").status == 200, 60, "Dynamo's indexer")
        except BaseException:
            self.stop()
            raise

    def register(self, instance, publisher, block_size, **fields):
        reply = http_request(self.url, "POST", "/register", {
            "instance_id": instance, "model_name": MODEL, "block_size": block_size, **fields, **publisher})
        equal(reply.status, 201, f"Dynamo's /register {reply.body!r}")
        wait_until(lambda: all(worker["status"] == "active" for worker in self.get("/workers")), what="its listeners")

    def get(self, path):
        return http_request(self.url, "GET", path).json()

    def query(self, tokens, **fields):
        return http_request(self.url, "POST", "/query", {"token_ids": list(tokens), "model_name": MODEL, **fields}).json()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def held_blocks(dump):
    """Counter of (instance, rank, parent, block, tokens hash, tier) of all stored events of a dump."""
    rows = Counter()
    for model in dump.values():
        for event in model.get("events", []):
            data = event["event"]["data"]
            stored = data.get("stored") if isinstance(data, dict) else None
            parent = stored["parent_hash"] if stored else None
            for block in stored["blocks"] if stored else []:
                rows[(event["worker_id"], event["event"].get("dp_rank", 0), parent, block["block_hash"], block["tokens_hash"],
                      event.get("storage_tier", "device"))] += 1
                parent = block["block_hash"]
    return rows


def reach(answer):
    """What both say alike: the tokens in device memory by instance and rank, and by tier."""
    tiers = {instance: {tier: value for tier, value in row.items() if tier != "dp"}
             for instance, row in answer["instances"].items()}
    return answer["scores"], tiers


class Worker:
    """A made-up engine: a tree of blocks that grows at any block and loses any leaf.

    @own_names: its block hashes aren't those of the other engines (as with vLLM's random seed for hashes).
    """

    def __init__(self, number, rng, media, own_names):
        self.number, self.rng, self.media, self.publisher = number, rng, media, Publisher(rank=0)
        self.seed = number if own_names else 0
        self.chains, self.held, self.sentinels = [((), None)], {}, 0

    def name(self, chain):
        return int.from_bytes(hashlib.blake2b(repr((self.seed, chain)).encode(), digest_size=8).digest(), "little")

    def events(self):
        rng, events = self.rng, []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.65 or not self.held:
                prefix, parent = rng.choice(self.chains)
                blocks = [tuple([rng.randrange(3)] * BLOCK) for _ in range(rng.randint(1, 4))]
                events += self.store(prefix, parent, blocks)
            elif rng.random() < 0.97:
                leaves = [chain for chain in self.held if not any(other[:len(chain)] == chain and other != chain for other in self.held)]
                chain = rng.choice(leaves)
                name, tiers = self.held.pop(chain)
                events += [self.publisher.removed([name], medium=medium) for medium in tiers]
                self.chains = [entry for entry in self.chains if entry[0] != chain]
            elif len(self.media) == 1:  # vLLM clears its device memory only, and so does ours; Dynamo clears all tiers
                events.append(self.publisher.cleared())
                self.chains, self.held = [((), None)], {}
        return events

    def store(self, prefix, parent, blocks):
        """Events for the blocks of the chain that aren't held; blocks that are continue the walk."""
        events, names, tokens, first = [], [], [], parent
        for block in blocks:
            prefix += (block,)
            if prefix in self.held:
                if names:
                    break
                parent = first = self.held[prefix][0]
                continue
            parent = self.name(prefix)
            names.append(parent)
            tokens += block
            self.held[prefix] = (parent, [self.media[0]])
            self.chains.append((prefix, parent))
        if names:
            events.append(self.publisher.stored(names, tokens, first, BLOCK, medium=self.media[0]))
            for medium in self.media[1:]:
                if self.rng.random() < 0.5:
                    events.append(self.publisher.stored(names, tokens, first, BLOCK, medium=medium))
                    for chain, (name, tiers) in self.held.items():
                        if name in names:
                            tiers.append(medium)
        return events

    def reach(self, tokens):
        """The truth: how many tokens of the prompt the worker holds in device memory."""
        chain = ()
        for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            if chain + (tuple(tokens[start:start + BLOCK]),) not in self.held:
                break
            chain += (tuple(tokens[start:start + BLOCK]),)
        return len(chain) * BLOCK

    def sentinel(self, medium="GPU"):
        """A block that only this batch brings: whoever knows it has applied the batch, in that tier."""
        self.sentinels += 1
        tokens = [2000 + self.number] * 3 + [self.sentinels]
        return tokens, self.publisher.stored([self.name((tuple(tokens),))], tokens, None, BLOCK, medium=medium)


def settle(indexer, dynamo, worker):
    """Publish a batch, and wait until both have applied it. Dynamo applies each lower tier on a thread of its own."""
    sentinels = [worker.sentinel(medium) for medium in worker.media]
    worker.publisher.send(*worker.events(), *(event for _, event in sentinels))
    for tokens, _ in sentinels:
        for known in indexer.query, dynamo.query:
            wait_until(lambda ask=known, of=tokens: str(worker.number) in ask(of)["instances"], what="the batch's last event", interval=0.002)


def warm_up(dynamo, worker):
    """Publish until Dynamo hears it (its listener is "active" before it is connected), then start from nothing."""
    def heard():
        tokens, event = worker.sentinel()
        worker.publisher.send(event)
        time.sleep(0.05)
        return str(worker.number) in dynamo.query(tokens)["scores"]

    wait_until(heard, what="Dynamo's subscription")
    worker.publisher.send(worker.publisher.cleared())


def compare(media, own_names=False):
    """Random histories of three engines. With @own_names Dynamo's answers are only counted."""
    counts = Counter()
    with Indexer() as indexer, Dynamo() as dynamo:
        for seed, rng in histories(4):
            workers = [Worker(10 * seed + number + 1, rng, media, own_names) for number in range(3)]
            for worker in workers:
                endpoints = {"endpoint": worker.publisher.endpoint, "replay_endpoint": worker.publisher.replay_endpoint}
                indexer.register(worker.number, worker.publisher, block_size=BLOCK)
                dynamo.register(worker.number, endpoints, BLOCK)
                worker.publisher.wait_subscriber(2)
                warm_up(dynamo, worker)
            for step in range(60):
                settle(indexer, dynamo, rng.choice(workers))
                for _ in range(6):
                    blocks = rng.choice(rng.choice(workers).chains)[0] + tuple([rng.randrange(3)] * BLOCK for _ in range(2))
                    tokens = [token for block in blocks for token in block][:rng.randint(1, 40)]
                    truth = {str(worker.number): {"0": worker.reach(tokens)} for worker in workers if worker.reach(tokens)}
                    equal(indexer.query(tokens)["scores"], truth, f"KV_TEST_SEED={seed} step {step} {tokens}")
                    ours, theirs = reach(indexer.query(tokens)), reach(dynamo.query(tokens))
                    counts["queries"] += 1
                    counts["other"] += ours != theirs
                    if not own_names:
                        equal(ours, theirs, f"KV_TEST_SEED={seed} step {step} {tokens}")
                if step % 15 == 14 and not own_names:
                    ours, theirs = held_blocks(indexer.dump()), held_blocks(dynamo.get("/dump"))
                    equal(sorted(map(str, ours - theirs)), [], "only in our dump")
                    equal(sorted(map(str, theirs - ours)), [], "only in Dynamo's dump")
                    counts["dumps"] += 1
            for worker in workers:
                indexer.unregister(worker.number)
                http_request(dynamo.url, "POST", "/unregister", {"instance_id": worker.number, "model_name": MODEL})
                worker.publisher.close()
    print(f"  {counts['queries']} queries ({counts['other']} with another answer by Dynamo), {counts['dumps']} equal dumps", flush=True)


def test_device_memory():
    compare(("GPU",))


def test_lower_tiers():
    compare(("GPU", "CPU", "DISK"))


def test_ranks_and_holes():
    """A rank that has only lower blocks of the prompt is named with 0, one that has blocks without their parents isn't.

    Where a lower tier fills a hole of the device, both stop behind it.
    """
    tokens = [token for block in range(4) for token in [block + 1] * BLOCK]

    def store(names, parent, first, medium):
        return {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "block_size": BLOCK, "lora_id": None,
                "token_ids": tokens[BLOCK * first:BLOCK * (first + len(names))], "medium": medium, "lora_name": None}

    cases = [({0: [store([11], None, 0, "GPU")], 1: [store([11], None, 0, "CPU")]}, {"0": 4, "1": 0}, 4),
             ({0: [store([11], None, 0, "GPU")], 1: [store([12], 11, 1, "CPU")]}, {"0": 4}, 4),
             ({0: [store([11], None, 0, "GPU")], 1: [store([12], 11, 1, "GPU")]}, {"0": 4}, 4),
             ({0: [store([11, 12, 13], None, 0, "GPU"), store([12], 11, 1, "CPU"),
                   {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"}]}, {"0": 4}, 8)]
    for ranks, dp, longest in cases:
        with Indexer() as indexer, Dynamo() as dynamo:
            for rank, events in ranks.items():
                worker = Worker(1, None, ("GPU",), False)
                worker.publisher.rank = rank
                indexer.register(1, worker.publisher, block_size=BLOCK, dp_rank=rank)
                dynamo.register(1, {"endpoint": worker.publisher.endpoint}, BLOCK, dp_rank=rank)
                worker.publisher.wait_subscriber(2)
                sentinels = [worker.sentinel(medium) for medium in ("GPU", "CPU")]  # Dynamo applies each tier on a thread of its own
                worker.publisher.send(*events, *(event for _, event in sentinels))
                for mark, _ in sentinels:
                    for known in indexer.query, dynamo.query:
                        wait_until(lambda ask=known, of=mark: str(rank) in ask(of)["instances"].get("1", {}).get("dp", {}), what="the events")
            for known in indexer.query, dynamo.query:
                row = known(tokens)["instances"]["1"]
                equal((row["dp"], row["longest_matched"]), (dp, longest))


def test_names_of_its_own_per_engine():
    """Dynamo keeps one name per block of its tree, so it misses removals of engines that name the block otherwise."""
    compare(("GPU",), own_names=True)


def test_vllm_duplicates_windows_and_lookahead():
    """On vLLM's own events ours is exact; how often the other one isn't is shown, not asserted."""
    for option in Option("plain"), Option("lookahead", lookahead=1), Option("window", windows=(40,), blocks=96):
        ours, theirs = Tally("kv-indexer"), Tally("Dynamo 1.6.1")
        with tempfile.TemporaryDirectory() as folder, Indexer() as indexer, Dynamo() as dynamo:
            for seed, rng in histories(1):
                endpoint, replay = f"ipc://{folder}/{seed}", f"ipc://{folder}/{seed}r"
                feed = Feed(indexer, 1, make_publisher(endpoint, replay), make_batch, endpoint, option.block, replay)
                dynamo.register(1, {"endpoint": endpoint, "replay_endpoint": replay}, option.block)
                engine = Engine(option, rng)
                for step in range(120):
                    for _ in range(rng.randint(1, 6)):
                        engine.step()
                    feed.publish(engine.take_events())
                    feed.settle()
                    for tokens, names in engine.probes(4):
                        truth = engine.cached_tokens(tokens, names)
                        ours.add(option.name, truth, indexer.score(tokens, 1), f"KV_TEST_SEED={seed}, step {step}")
                        theirs.add(option.name, truth, dynamo.query(tokens)["scores"].get("1", {}).get("0", 0))
                feed.close()
        theirs.show(option.name)
        ours.exact(option.name)


if __name__ == "__main__":
    run(globals())
