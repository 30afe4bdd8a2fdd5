# SPDX-License-Identifier: Apache-2.0
"""A new user with the interface document and curl: each of its examples in its order, on a live worker.

Nothing here knows more than that document says; only ports and addresses differ from its examples.
"""
import json
import subprocess

from kvtest import *

LLAMA, MISTRAL = "llama-3-8b", "mistral-7b"


def curl(url, body=None, method=None):
    """curl as the document writes it. Returns (status, body text)."""
    command = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", url]
    if method:
        command += ["-X", method]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", body if isinstance(body, str) else json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    equal(done.returncode, 0, f"curl {url}: {done.stderr}")
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


class User:
    """What the user knows: a URL."""

    def __init__(self, indexer):
        self.url = indexer.url

    def get(self, path):
        return curl(self.url + path)

    def json(self, path):
        status, text = self.get(path)
        equal(status, 200, f"GET {path}")
        return json.loads(text)

    def post(self, path, body):
        return curl(self.url + path, body, "POST")

    def ok(self, path, body):
        status, text = self.post(path, body)
        check(200 <= status < 300, f"POST {path} {body}: {status} {text}")
        return json.loads(text)

    def fails(self, path, body):
        status, text = self.post(path, body)
        check(400 <= status < 500, f"POST {path} {body}: {status} {text}, wanted a failure")
        check(json.loads(text)["error"], text)

    def scores(self, tokens, model=LLAMA, **fields):
        return self.ok("/query", {"token_ids": list(tokens), "model_name": model, **fields})["scores"]

    def wait_scores(self, tokens, wanted, **fields):
        try:
            wait_until(lambda: self.scores(tokens, **fields) == wanted, interval=0.05)
        except AssertionError:
            equal(self.scores(tokens, **fields), wanted, f"scores of {fields}")


def endpoint_of(worker):
    worker_endpoint = worker.endpoint
    check(worker_endpoint.startswith("tcp://127.0.0.1:"))
    return worker_endpoint


def test_http_api():
    """The HTTP API section from top to bottom."""
    with Indexer("--threads", 4) as indexer, Publisher() as one, Publisher() as one_b, Publisher() as two:
        user = User(indexer)
        # GET /health: 200 unconditionally
        equal(user.get("/health")[0], 200, "/health")
        # GET /metrics
        status, text = user.get("/metrics")
        equal(status, 200, "/metrics")
        for name, kind in (("dynamo_kvindexer_models", "gauge"), ("dynamo_kvindexer_workers", "gauge")):
            check(f"# TYPE {name} {kind}\n" in text, f"{name} {kind} in {text}")
        # POST /register, the two examples
        user.ok("/register", '{"instance_id": 1, "endpoint": "%s", "model_name": "llama-3-8b", "block_size": 16}' % endpoint_of(one))
        one.wait_subscriber()
        user.ok("/register", '{"instance_id": 2, "endpoint": "%s", "model_name": "llama-3-8b", "tenant_id": "customer-a", '
                             '"block_size": 16, "dp_rank": 0}' % endpoint_of(two))
        two.wait_subscriber()
        # every required field is required, and the block size belongs to the pair
        whole = {"instance_id": 3, "endpoint": "tcp://127.0.0.1:9", "model_name": LLAMA, "block_size": 16}
        for field in whole:
            user.fails("/register", {key: value for key, value in whole.items() if key != field})
        user.fails("/register", {**whole, "block_size": 32})
        # another rank of instance 1, with a replay endpoint
        user.ok("/register", {"instance_id": 1, "endpoint": endpoint_of(one_b), "model_name": LLAMA, "block_size": 16, "dp_rank": 1,
                              "replay_endpoint": one_b.replay_endpoint})
        one_b.wait_subscriber()
        # GET /workers
        workers = user.json("/workers")
        shown = {w["instance_id"]: w["endpoints"] for w in workers}
        equal(shown, {1: {"0": endpoint_of(one), "1": endpoint_of(one_b)}, 2: {"0": endpoint_of(two)}}, "/workers")
        # POST /query, before anything is cached ...
        prompt = list(range(1, 17))
        equal(user.scores(prompt), {}, "scores of an empty index")
        # ... and after: five blocks on rank 0, the first two of them on rank 1 (and a third of its own)
        five = list(range(1, 81))
        one.store([101, 102, 103, 104, 105], five)
        one_b.store([201, 202, 203], five[:32] + [7] * 16)
        two.store([301, 302, 303], five[:48])
        user.wait_scores(five, {"1": {"0": 80, "1": 32}})
        answer = user.ok("/query", '{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], "model_name": "llama-3-8b"}')
        equal(answer["scores"], {"1": {"0": 16, "1": 16}}, "scores are tokens: blocks times block size")
        equal(answer["tree_sizes"], {"1": {"0": 5, "1": 3}}, "tree_sizes")
        check(isinstance(answer["frequencies"], list), "frequencies")
        # tenants and models never see one another
        user.wait_scores(five, {"2": {"0": 48}}, tenant_id="customer-a")
        equal(user.post("/query", {"token_ids": prompt, "model_name": MISTRAL})[0], 404, "an unknown model")
        user.fails("/query", {"model_name": LLAMA})
        user.fails("/query", {"token_ids": prompt})
        # a LoRA adapter has blocks of its own
        one.send(one.stored([151], list(range(1, 17)), lora_name="my-adapter"))
        user.wait_scores(prompt, {"1": {"0": 16}}, lora_name="my-adapter")
        equal(user.scores(prompt, lora_name="other-adapter"), {}, "scores of another adapter")
        # POST /query_by_hash, the example; then with hashes that are there, taken from GET /dump
        answer = user.ok("/query_by_hash", '{"block_hashes": [123456, 789012], "model_name": "llama-3-8b"}')
        equal(answer["scores"], {}, "scores of unknown hashes")
        dump = user.json("/dump")
        equal(set(dump), {"llama-3-8b:default", "llama-3-8b:customer-a"}, "keys of the dump")
        equal({entry["block_size"] for entry in dump.values()}, {16}, "block sizes in the dump")
        chain = stored_chain(dump["llama-3-8b:customer-a"]["events"], 2)
        equal(len(chain), 3, "blocks of instance 2 in the dump")
        for n in (1, 2, 3):
            answer = user.ok("/query_by_hash", {"block_hashes": chain[:n], "model_name": LLAMA, "tenant_id": "customer-a"})
            equal(answer["scores"], {"2": {"0": 16 * n}}, "scores by hash")
            equal(answer["tree_sizes"], {"2": {"0": 3}}, "tree_sizes by hash")
        # POST /register_peer, GET /peers, POST /deregister_peer
        equal(user.json("/peers"), [], "peers")
        user.ok("/register_peer", '{"url": "http://peer:8091"}')
        equal(user.json("/peers"), ["http://peer:8091"], "peers")
        user.ok("/deregister_peer", '{"url": "http://peer:8091"}')
        equal(user.json("/peers"), [], "peers")
        # the metrics of the table, once there was something to count
        check_metrics(user)
        # POST /unregister, the three examples from the last to the first
        user.ok("/unregister", '{"instance_id": 1, "model_name": "llama-3-8b", "tenant_id": "default", "dp_rank": 0}')
        equal(user.scores(five), {"1": {"1": 32}}, "scores without rank 0")
        equal(user.json("/workers")[0]["endpoints"], {"1": endpoint_of(one_b)}, "ranks left")
        user.ok("/unregister", '{"instance_id": 2, "model_name": "llama-3-8b", "tenant_id": "customer-a"}')
        equal([w["instance_id"] for w in user.json("/workers")], [1], "instances left")
        user.ok("/unregister", '{"instance_id": 1, "model_name": "llama-3-8b"}')
        equal(user.json("/workers"), [], "workers left")
        user.fails("/unregister", '{"instance_id": 1, "model_name": "llama-3-8b"}')


def stored_chain(events, worker):
    """The local hashes of one worker's blocks, in order, from RouterEvents."""
    after = {}
    for event in events:
        if event["worker_id"] != worker or "stored" not in event["event"]["data"]:
            continue
        parent = event["event"]["data"]["stored"]["parent_hash"]
        for block in event["event"]["data"]["stored"]["blocks"]:
            after[parent] = (block["block_hash"], block["tokens_hash"])
            parent = block["block_hash"]
    chain, parent = [], None
    while parent in after:
        parent, tokens_hash = after[parent]
        chain.append(tokens_hash)
    return chain


def check_metrics(user):
    text = user.get("/metrics")[1]
    for wanted in ('# TYPE dynamo_kvindexer_request_duration_seconds histogram\n',
                   'dynamo_kvindexer_request_duration_seconds_count{endpoint="/query"}',
                   '# TYPE dynamo_kvindexer_requests_total counter\n',
                   'dynamo_kvindexer_requests_total{endpoint="/register",method="POST"}',
                   '# TYPE dynamo_kvindexer_errors_total counter\n',
                   'dynamo_kvindexer_errors_total{endpoint="/register",status_class="4xx"}',
                   '\ndynamo_kvindexer_models 2\n', '\ndynamo_kvindexer_workers 2\n'):
        check(wanted in text, f"{wanted!r} is not in\n{text}")


def test_initial_workers():
    """The CLI example: --block-size, --model-name, --tenant-id and --workers."""
    with Publisher() as one, Publisher() as two:
        with Indexer("--threads", 4, "--block-size", 16, "--model-name", "my-model", "--tenant-id", "default", "--workers",
                     f"1={one.endpoint},2:1={two.endpoint}") as indexer:
            user = User(indexer)
            equal({w["instance_id"]: w["endpoints"] for w in user.json("/workers")}, {1: {"0": one.endpoint}, 2: {"1": two.endpoint}},
                  "/workers")
            one.wait_subscriber()
            two.wait_subscriber()
            one.store([1, 2], range(32))
            two.store([3], range(16))
            user.wait_scores(range(32), {"1": {"0": 32}, "2": {"1": 16}}, model="my-model")
    refused = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", "--workers", "1=tcp://127.0.0.1:5557"],
                             capture_output=True, text=True, timeout=120, check=False)
    check(refused.returncode != 0 and "block-size" in refused.stderr, f"--workers without --block-size: {refused}")


def test_two_replicas():
    """The two-replica example: B starts later and takes over what A knows; then both follow."""
    with Publisher(replay=None) as one, Publisher(replay=None) as two:
        workers = f"1={one.endpoint},2={two.endpoint}"
        with Indexer("--block-size", 16, "--workers", workers) as a:
            one.wait_subscriber()
            two.wait_subscriber()
            one.store([11, 12, 13], range(48))
            two.store([11, 12], range(32))
            two.remove([12])
            User(a).wait_scores(range(48), {"1": {"0": 48}, "2": {"0": 16}}, model="default")
            with Indexer("--block-size", 16, "--workers", workers, "--peers", a.url) as b:
                equal(User(b).scores(range(48), model="default"), {"1": {"0": 48}, "2": {"0": 16}}, "what B took over")
                equal(User(b).json("/peers"), [a.url], "peers of B")
                one.wait_subscriber(2)
                one.remove([13])
                two.store([14], range(16, 32), parent=11)
                for replica in (a, b):
                    User(replica).wait_scores(range(48), {"1": {"0": 32}, "2": {"0": 32}}, model="default")
        # no reachable peer: it starts with empty state
        with Indexer("--block-size", 16, "--workers", workers, "--peers", f"http://127.0.0.1:{free_port()}") as alone:
            equal(User(alone).scores(range(48), model="default"), {}, "scores without a peer")


def test_dp_ranks():
    """A batch may name the rank that it is about; an unregistered rank leaves with its instance."""
    with Indexer() as indexer, Publisher() as engine:
        user = User(indexer)
        user.ok("/register", {"instance_id": 5, "endpoint": engine.endpoint, "model_name": LLAMA, "block_size": 16})
        engine.wait_subscriber()
        engine.store([1, 2], range(32))
        engine.store([1], range(16), rank=3)
        user.wait_scores(range(32), {"5": {"0": 32, "3": 16}})
        user.ok("/unregister", {"instance_id": 5, "model_name": LLAMA})
        status, text = user.post("/query", {"token_ids": list(range(32)), "model_name": LLAMA})
        check(status == 404 or json.loads(text)["scores"] == {}, f"after unregistering: {status} {text}")


def test_gap_and_replay():
    """A gap is filled through the replay endpoint; without one the rest is still followed."""
    with Indexer() as indexer, Publisher() as engine, Publisher(replay=None) as poor:
        user = User(indexer)
        whole = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": LLAMA, "block_size": 16,
                 "replay_endpoint": engine.replay_endpoint}
        user.ok("/register", whole)
        user.ok("/register", {"instance_id": 2, "endpoint": poor.endpoint, "model_name": LLAMA, "block_size": 16})
        engine.wait_subscriber()
        poor.wait_subscriber()
        for worker in (engine, poor):
            worker.store([1], range(16))
        user.wait_scores(range(16), {"1": {"0": 16}, "2": {"0": 16}})
        for worker in (engine, poor):
            worker.store([2], range(16, 32), parent=1, lose=True)
            worker.store([3], range(100, 116))
        user.wait_scores(range(100, 116), {"1": {"0": 16}, "2": {"0": 16}})
        user.wait_scores(range(32), {"1": {"0": 32}, "2": {"0": 16}})
        # last_seq persists: what was lost while unregistered is asked for after registering again
        user.ok("/unregister", {"instance_id": 1, "model_name": LLAMA, "tenant_id": "default"})
        equal(user.scores(range(32)), {"2": {"0": 16}}, "scores while unregistered")
        engine.store([4], range(200, 216), lose=True)
        before = engine.replays
        engine.wait_no_subscriber()
        user.ok("/register", whole)
        engine.wait_subscriber()
        engine.store([5], range(300, 316))
        user.wait_scores(range(300, 316), {"1": {"0": 16}})
        wait_until(lambda: engine.replays > before, what="a replay after registering again")
        user.wait_scores(range(200, 216), {"1": {"0": 16}})


if __name__ == "__main__":
    run(globals())
