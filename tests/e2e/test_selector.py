# SPDX-License-Identifier: Apache-2.0
"""kv-selector: Dynamo's selection API on a kv-indexer's port, and what is better than the original's."""
import json
import os
import subprocess
import tempfile

from kvtest import *

BLOCK = 16


class Selector(Indexer):
    PROGRAM = "kv-selector"

    def add(self, worker, engine, expect=201, **fields):
        """POST /workers. @engine: a Publisher, or None for a worker without events."""
        body = {"worker_id": worker, "model_name": MODEL, "block_size": BLOCK, "endpoint": f"http://w{worker}:8000", **fields}
        if engine:
            body.setdefault("kv_events_endpoint", engine.endpoint)
            if engine.replay_endpoint:
                body.setdefault("replay_endpoint", engine.replay_endpoint)
        reply = self.post("/workers", body)
        equal(reply.status, expect, f"/workers {reply.body!r}: status")
        if engine:
            engine.wait_subscriber()
        return reply.json()

    def ask(self, path, tokens, expect=200, **fields):
        reply = self.post(path, {"model_name": MODEL, "token_ids": list(tokens), **fields})
        equal(reply.status, expect, f"{path} {reply.body!r}: status")
        return reply.json()

    def select(self, tokens, **fields):
        return self.ask("/select", tokens, **fields)

    def reserve(self, tokens, **fields):
        return self.ask("/select_and_reserve", tokens, **fields)

    def first_token(self, name):
        return self.post(f"/reservations/{name}/prefill_complete", b"").status

    def free(self, name, query=""):
        return self.request("DELETE", f"/reservations/{name}{query}").status

    def loads(self):
        """{worker: (tokens that wait, running requests)}"""
        return {load["worker_id"]: (load["potential_prefill_tokens"], load["active_requests"])
                for group in self.get("/loads").json() for load in group["loads"]}


def error(reply, status, text):
    equal(reply.status, status, f"{reply!r}: status")
    check(text in reply.json()["error"], f"{text!r} in {reply.body!r}")


def test_choose_book_free():
    """The longest match wins while the loads are equal; a booking is load until its first token and its end."""
    tokens = list(range(64))
    with Selector() as s, Publisher() as one, Publisher() as two:
        equal(s.get("/ready").status, 503)
        equal(s.get("/health").json(), {"status": "ok"})
        record = s.add(1, one)
        equal((record["lifecycle"], record["not_schedulable_reasons"]), ("schedulable", []))
        s.add(2, two)
        ready = s.get("/ready")
        equal((ready.status, ready.json()["ready"], ready.json()["schedulable_workers"]), (200, True, 2))
        two.store([11, 12, 13, 14], tokens)
        s.wait_score(tokens, 2, 64)
        chosen = s.select(tokens + [7] * 16)
        equal((chosen["worker_id"], chosen["dp_rank"], chosen["endpoint"], chosen["block_size"]), (2, 0, "http://w2:8000", BLOCK))
        equal(chosen["overlap"], {"longest_matched": 64, "gpu": 64, "dp": {"0": 64}, "cpu": 64, "disk": 64})
        equal((chosen["effective_prefill_tokens"], chosen["potential_decode_blocks"]), (16, 5))
        equal(s.loads(), {1: (0, 0), 2: (0, 0)}, "/select books nothing")
        booked = s.reserve(tokens + [7] * 16, selection_id="a/b")
        equal((booked["selection_id"], booked["worker_id"], booked["isl_tokens"], len(booked["sequence_hashes"])), ("a/b", 2, 80, 5))
        equal(s.loads()[2], (16, 1))
        error(s.post("/select_and_reserve", {"model_name": MODEL, "token_ids": tokens, "selection_id": "a/b"}), 409, "in use")
        equal(s.get("/reservations").json()[0]["prefill_complete"], False)
        equal(s.free("a%2Fb%00"), 400, "a NUL would cut an id")
        equal([s.first_token("a%2Fb"), s.first_token("a%2Fb")], [200, 200])
        equal(s.loads()[2], (0, 1))
        equal(s.post("/reservations/a%2Fb/output_block", {"decay_fraction": 0.5}).status, 200)
        equal(s.get("/reservations").json()[0]["output_tokens"], BLOCK)
        error(s.post("/reservations/a%2Fb/output_block", {"decay_fraction": 2}), 400, "decay_fraction")
        equal(s.post("/reservations/a%2Fb/output_block", b"").status, 415)
        equal([s.free("a%2Fb"), s.free("a%2Fb"), s.first_token("a%2Fb"), s.free("never")], [200, 404, 404, 404])
        equal(s.loads(), {1: (0, 0), 2: (0, 0)}, "double frees and unknown ids are harmless")
        named = s.reserve([5] * 16)
        equal((len(named["selection_id"]), named["selection_id"][14]), (36, "4"), "a made-up id is a UUID")
        equal(s.free(named["selection_id"]), 200)
        metrics = s.metrics()
        equal(metrics[f'kv_selector_booked_total{{model="{MODEL}",tenant="default"}}'], 2)
        equal(metrics[f'kv_selector_bookings{{model="{MODEL}",tenant="default"}}'], 0)


def test_wishes():
    """Pins, lists, taints, sessions and policies; prompts by hashes; what no worker fits."""
    with Selector("--session-affinity", "60s") as s, Publisher() as one, Publisher() as two:
        s.add(1, one, taints=["old"], topology_domains={"zone": "a"})
        s.add("pod-2", two, topology_domains={"zone": "b"})
        tokens = list(range(32))
        equal(s.select(tokens, pinned_worker={"worker_id": 1, "dp_rank": 0})["why"], "pin")
        equal(s.select(tokens, pinned_worker={"worker_id": "pod-2"})["worker_id"], "pod-2")
        equal(s.select(tokens, allowed_worker_ids=["pod-2", 77])["worker_id"], "pod-2")
        equal(s.select(tokens, routing_constraints={"required_taints": ["old"]})["worker_id"], 1)
        equal({s.select(tokens, routing_constraints={"preferred_taints": {"zone=b": 2}})["worker_id"] for _ in range(8)}, {"pod-2"})
        equal(s.select(tokens, avoided_worker_ids=[1])["worker_id"], "pod-2")
        for wish in ({"pinned_worker": {"worker_id": 9, "dp_rank": 0}}, {"allowed_worker_ids": []},
                     {"routing_constraints": {"required_taints": ["new"]}}):
            error(s.post("/select", {"model_name": MODEL, "token_ids": tokens, **wish}), 503, "no endpoints available to route work")
        error(s.post("/select", {"model_name": "other", "token_ids": tokens}), 503,
              "no schedulable workers for model=other routing_group=default")
        error(s.post("/select", {"model_name": MODEL, "token_ids": tokens, "policy": "best"}), 400, "no policy")
        error(s.post("/select", {"model_name": MODEL, "token_ids": tokens, "session_id": "x" * 257}), 400, "session_id")
        error(s.post("/select", {"model_name": MODEL}), 422, "token_ids")
        error(s.post("/select", {"model_name": MODEL, "token_ids": "x"}), 422, "token_ids")
        error(s.post("/select_and_reserve", {"model_name": MODEL, "token_ids": tokens, "selection_id": ""}), 422, "empty")
        equal(s.select(tokens, avoided_worker_ids=[5, 1, 9, 1, 3])["worker_id"], "pod-2", "in any order")
        for kind in ("required_taints", "preferred_taints"):
            wish = {"model_name": MODEL, "token_ids": tokens, "routing_constraints": {kind: ["old"] * 257}}
            error(s.post("/select", wish), 422, "too many labels")
            equal(s.select(tokens, routing_constraints={kind: ["old"] * 256})["worker_id"], 1)
        error(s.request("POST", "/select", b"{", {"Content-Type": "application/json"}), 400, "malformed")
        equal(s.request("POST", "/select", b"{}").status, 415)
        error(s.request("PUT", "/select", {}), 405, "use POST")
        equal(s.request("PUT", "/workers", {}).headers["Allow"], "POST, GET, HEAD")
        home = s.reserve(tokens, session_id="chat", selection_id="s1")["worker_id"]
        again = [s.select([9] * 64, session_id="chat") for _ in range(3)]
        equal({(a["worker_id"], a["why"]) for a in again}, {(home, "session")})
        hashes = {"block_hashes": [1, 2], "sequence_hashes": [-1, 2**64 - 2], "isl_tokens": 40}
        equal(s.post("/select", {"model_name": MODEL, **hashes}).status, 200)
        error(s.post("/select", {"model_name": MODEL, **hashes, "block_hashes": [1]}), 400, "length")
        error(s.post("/select", {"model_name": MODEL, **hashes, "isl_tokens": None}), 422, "together")
        policies = {p: s.select(tokens, policy=p)["policy"] for p in ("dynamo", "least", "round-robin", "scored")}
        equal(set(policies), set(policies.values()))
        equal({s.select(tokens, policy="round-robin")["worker_id"] for _ in range(2)}, {1, "pod-2"})
        explained = s.select(tokens, explain=True, allowed_worker_ids=[1])["decision"]["candidates"]
        equal({c["worker_id"]: c["reason"] for c in explained}, {1: "fits", "pod-2": "denied"})
        chosen = s.metrics()
        equal({w["worker_id"] for w in s.ask("/potential_loads", tokens)}, {1, "pod-2"})
        equal([(name, value) for name, value in s.metrics().items() if "choices_total" in name],
              [(name, value) for name, value in chosen.items() if "choices_total" in name])  # to look is no choice
        one.store([1, 2], tokens)
        s.wait_score(tokens, 1, 32)
        scores = s.ask("/overlap_scores", tokens)
        equal((scores["num_blocks"], scores["workers"][0]["worker_id"], scores["workers"][0]["device_blocks"]), (2, 1, 2))


def test_reservations():
    """A choice of /select is booked later by its id, once; a choice that was made elsewhere by its worker."""
    tokens = list(range(64))
    with Selector("--selection-cache-max-entries", 2, "--predict", 0) as s, Publisher() as one:
        s.add(1, one)
        s.select(tokens, selection_id="x")
        book = lambda **body: s.post("/reservations", {"model_name": MODEL, **body})
        reply = book(selection_id="x")
        equal((reply.status, reply.json()), (201, {"selection_id": "x", "worker_id": 1, "dp_rank": 0}))
        equal(s.loads()[1], (64, 1))
        error(book(selection_id="x"), 404, "no pending selection")
        for name in ("old", "new", "newer"):
            s.select(tokens, selection_id=name)
        error(book(selection_id="old"), 404, "no pending selection")
        equal(book(selection_id="newer").status, 201)
        named = {"worker_id": 1, "token_ids": tokens}
        equal(book(selection_id="y", **named, effective_prefill_tokens=7).status, 201)
        equal(s.loads()[1], (64 + 64 + 7, 3))
        error(book(selection_id="z", **named, effective_prefill_tokens=65), 400, "effective_prefill_tokens")
        error(book(selection_id="z", **{**named, "worker_id": 5}), 404, "worker")
        error(book(selection_id="z", **named, dp_rank=3), 404, "worker")
        error(book(selection_id="y", **named), 409, "in use")
        error(book(token_ids=tokens), 422, "selection_id")
        s.reserve(tokens, selection_id="t", track_prefill_tokens=False)
        equal(s.loads()[1], (64 + 64 + 7, 4))
        equal([s.free(name) for name in ("x", "newer", "y", "t")], [200] * 4)
        equal(s.loads()[1], (0, 0))
        s.select(tokens, selection_id="late")
        equal(s.request("DELETE", "/workers/1").status, 200)
        error(book(selection_id="late"), 404, "no pending selection")


def test_workers():
    """POST is an upsert, PATCH changes fields, DELETE ends; bookings outlive all of them."""
    tokens = list(range(64))
    with Selector() as s, Publisher() as one:
        lacking = s.add(1, None, block_size=None, endpoint=None)
        equal(lacking["lifecycle"], "incomplete")
        equal(lacking["not_schedulable_reasons"], ["missing endpoint", "missing block_size", "missing kv_events_endpoint for dp_rank 0"])
        equal([w["worker_id"] for w in s.workers()], [1])
        equal(s.get("/ready").status, 503)
        fields = {"endpoint": "http://w1", "block_size": BLOCK, "kv_events_endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint}
        patched = s.request("PATCH", "/workers/1", {**fields, "taints": None})
        equal((patched.status, patched.json()["lifecycle"]), (200, "schedulable"))
        one.wait_subscriber()
        listed = s.workers()
        equal((len(listed), listed[0]["lifecycle"], listed[0]["endpoint"], listed[0]["listeners"]["0"]["endpoint"]),
              (1, "schedulable", "http://w1", one.endpoint))
        equal(s.get("/workers?model_name=none").json(), [])
        one.store([11, 12, 13, 14], tokens)
        s.wait_score(tokens, 1, 64)
        s.reserve([5] * 32, selection_id="live")
        equal(s.loads()[1], (32, 1))
        equal(s.request("PATCH", "/workers/1", {"draining": True}).json()["lifecycle"], "draining")
        error(s.post("/select", {"model_name": MODEL, "token_ids": tokens}), 503, "no endpoints")
        s.request("PATCH", "/workers/1", {"draining": False})
        equal(s.select(tokens)["overlap"]["gpu"], 64, "what it holds stays")
        gone = s.request("DELETE", "/workers/1")
        equal((gone.status, gone.json()["lifecycle"]), (200, "unschedulable"))
        error(s.post("/select", {"model_name": MODEL, "token_ids": tokens}), 503, "no schedulable workers")
        error(s.request("DELETE", "/workers/1"), 404, "worker 1 not found")
        error(s.request("PATCH", "/workers/9", {}), 404, "worker 9 not found")
        equal(s.loads(), {1: (32, 1)}, "its bookings stay")
        s.add(1, one)
        equal(s.loads(), {1: (32, 1)}, "and count again when it is registered again")
        equal([s.first_token("live"), s.loads(), s.free("live"), s.loads()], [200, {1: (0, 1)}, 200, {1: (0, 0)}])
        refused = s.post("/workers", {"worker_id": 2, "model_name": MODEL, "block_size": 32, **{**fields, "block_size": 32}}).json()
        equal(refused["lifecycle"], "incomplete")
        check(refused["not_schedulable_reasons"][0].startswith("reconciliation failed: "), refused)
        refused = s.post("/workers", {"worker_id": 3, "model_name": MODEL, **fields, "kv_events_endpoint": "nonsense"}).json()
        check(refused["not_schedulable_reasons"][0].startswith("reconciliation failed: "), refused)
        error(s.post("/workers", {"model_name": MODEL}), 422, "worker_id")
        error(s.post("/workers", {"worker_id": 1, "data_parallel_size": 0}), 422, "data_parallel_size")
        with Publisher() as two:  # a worker of kv-indexer's own API is chosen, too, and may get a record
            s.register(7, two)
            equal(s.select(tokens, pinned_worker={"worker_id": 7})["endpoint"], None)
            s.request("PATCH", "/workers/7", {"endpoint": "http://w7"})
            equal(s.select(tokens, pinned_worker={"worker_id": 7})["endpoint"], "http://w7")


def test_workers_of_register():
    """What PATCH tells of a worker of /register stays its own: where its ranks are is the registry's, now and later."""
    with Selector() as s, Publisher() as one, Publisher() as two, Publisher() as three:
        s.register(5, one, block_size=BLOCK)
        s.register(5, two, block_size=BLOCK, dp_rank=3)
        equal(s.request("PATCH", "/workers/5", {"endpoint": "http://w5:8000"}).json()["lifecycle"], "schedulable", "ranks 0 and 3")
        equal(s.unregister(5, tenant_id="default", dp_rank=3).status, 200)
        s.register(5, three, block_size=BLOCK, dp_rank=7)
        patched = s.request("PATCH", "/workers/5", {"draining": True}).json()
        equal((patched["kv_events_endpoints"], patched["endpoint"], patched["lifecycle"]),
              ({"0": one.endpoint, "7": three.endpoint}, "http://w5:8000", "draining"))
        equal(s.request("PATCH", "/workers/5", {"draining": False}).status, 200)
        equal([(w["worker_id"], w["dp_rank"]) for w in s.get("/ready").json()["workers"]], [(5, 0), (5, 7)])


def test_lost_stream():
    """What a worker without a live stream holds counts as a part; its load stays."""
    tokens = list(range(256))
    with Selector("--stale-after", "300ms", "--forget-after", "0", "--predict", "0") as s, Publisher() as one:
        with Publisher() as two:
            s.add(1, one)
            s.add(2, two)
            two.store(list(range(16)), tokens)
            s.wait_score(tokens, 2, 256)
            chosen = s.select(tokens)
            equal((chosen["worker_id"], chosen["effective_prefill_tokens"]), (2, 0))
            s.reserve([3] * 64, selection_id="held", pinned_worker={"worker_id": 2, "dp_rank": 0})
        pin = {"worker_id": 2, "dp_rank": 0}
        wait_until(lambda: s.select(tokens, pinned_worker=pin)["effective_prefill_tokens"] == 128, 20, "half of the match")
        equal(s.select(tokens, pinned_worker=pin)["partial"], True)
        equal(s.loads()[2], (64, 1))
        one.store(list(range(15)), tokens[:240])
        s.wait_score(tokens, 1, 240)
        equal(s.select(tokens)["worker_id"], 1, "a live stream's shorter match is worth more")


def test_shed():
    """With --max-waiting, a request is refused while all workers that fit it have enough to compute."""
    with Selector("--max-waiting", 100) as s:
        for worker in (1, 2):
            s.register(worker, "tcp://127.0.0.1:9")
        tokens = list(range(96))
        pin = {"pinned_worker": {"worker_id": 1}}
        equal([s.reserve(tokens, selection_id=f"a{i}", **pin)["worker_id"] for i in (0, 1)], [1, 1], "96 are below, 192 aren't")
        error(s.post("/select_and_reserve", {"model_name": MODEL, "token_ids": tokens, **pin}), 429, "100 tokens waiting")
        equal([s.reserve(tokens, selection_id=f"b{i}")["worker_id"] for i in (0, 1)], [2, 2], "the other one has room")
        refused = s.post("/select", {"model_name": MODEL, "token_ids": tokens, "explain": True})
        equal((refused.status, refused.headers["Retry-After"]), (429, "1"))
        equal(s.metrics()["kv_selector_shed_total"], 2)
        check(s.select(tokens, advisory=True)["worker_id"] in (1, 2), "a question is answered")
        error(s.post("/select", {"model_name": MODEL, "token_ids": tokens, "allowed_worker_ids": [7]}), 503, "no endpoints")
        equal(s.first_token("b0"), 200)
        equal(s.reserve(tokens, selection_id="c")["worker_id"], 2, "after a first token")
        equal(s.free("a0"), 200)
        equal(s.reserve(tokens, selection_id="d")["worker_id"], 1, "after an end")
        equal(s.post("/reservations", {"model_name": MODEL, "token_ids": tokens, "selection_id": "e", "worker_id": 2}).status, 201,
              "a choice made elsewhere is booked")


def test_expiry_and_log():
    """A booking without progress ends by --booking-expiry, counted and logged; the decision log tells all."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "decisions")
        with Selector("--booking-expiry", "400ms", "--decision-log", path) as s, Publisher() as one:
            s.add(1, one)
            s.reserve(range(80), selection_id="quick")
            equal([s.first_token("quick"), s.free("quick")], [200, 200])
            s.reserve(range(80), selection_id="silent")
            counter = f'kv_selector_expired_total{{model="{MODEL}",tenant="default"}}'
            wait_until(lambda: s.metrics()[counter] == 1, 20, "the end of a silent booking")
            wait_until(lambda: any("without progress" in line and "id=silent" in line for line in s.log), 20, "its log line")
            equal(s.free("silent"), 404)
            os.rename(path, path + ".1")
            equal(s.post("/reopen_logs", b"{}", headers={"Content-Type": "application/json"}).status, 200)
            s.select(range(80), selection_id="later", allowed_worker_ids=[4], expect=503)
        with open(path + ".1", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        equal([(line["event"], line["id"]) for line in lines],
              [("decision", "quick"), ("first_token", "quick"), ("free", "quick"), ("decision", "silent"), ("expired", "silent")])
        equal((lines[0]["worker_id"], lines[0]["tokens"], lines[0]["booked"], len(lines[0]["hashes"])), (1, 80, True, 1))
        equal((lines[3]["candidates"][0]["predicted"], lines[3]["candidates"][0]["held"]), (64, 0), "the first prompt is predicted")
        with open(path, encoding="utf-8") as file:
            later = json.loads(file.read())
        equal((later["worker_id"], later["candidates"][0]["reason"]), (None, "denied"))


def replay(path, *args):
    """{policy: its figures}"""
    command = [str(BUILD / "bin" / "kvasir"), "select", "replay", path, "--json", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    equal(done.returncode, 0, f"kvasir select replay: {done.stderr}\nstatus")
    return {figures["policy"]: figures for figures in map(json.loads, done.stdout.splitlines())}


def test_replay_by_hand():
    """Worker 1 holds half of each prompt. 1000 tokens a second: the times follow."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log")
        candidate = {"reason": "fits", "dp_rank": 0, "waiting": 0, "uncovered": 800}
        candidates = [{"worker_id": 1, "reach": [50, 50, 50, 50], **candidate}, {"worker_id": "pod-2", **candidate}]
        decision = {"event": "decision", "model_name": "m", "routing_group": "g", "block_size": 16, "tokens": 1600, "booked": True,
                    "hashes": [], "worker_id": 1, "dp_rank": 0, "candidates": candidates}
        with open(path, "w", encoding="utf-8") as file:
            for line in ({**decision, "time": 100.0, "id": "a"}, {**decision, "time": 100.1, "id": "b"},
                         {**decision, "time": 100.2, "id": "c", "booked": False},
                         {"event": "first_token", "time": 100.8, "id": "a"}, {"event": "free", "time": 101.0, "id": "a"}):
                file.write(json.dumps(line) + "\n")
            file.write("half a li")
        figures = replay(path, "--policy", "prefix,round-robin", "--speed", 1000)
        short = {name: (f["decisions"], f["mean_ttft_s"], f["computed_share"], f["imbalance"], f["as_logged_percent"]) for name, f in figures.items()}
        equal(short, {"(logged)": (2, 1.15, 0.5, 2.0, 100.0), "prefix": (2, 1.15, 0.5, 2.0, 100.0), "round-robin": (2, 1.2, 0.75, 1.333, 50.0)})
        equal(replay(path, "--policy", "prefix")["prefix"]["mean_ttft_s"], 1.15, "800 tokens in 0.8 s are the log's own speed")
        with open(path, "w", encoding="utf-8") as file:
            file.write("{}\n")
        done = subprocess.run([BUILD / "bin" / "kvasir", "select", "replay", path], capture_output=True, text=True, check=False)
        equal(done.returncode, 1)
        check("no booked decision" in done.stderr, done.stderr)


def test_replay_of_a_log():
    """What kv-selector writes, the replay reads. With one worker each policy chooses as the log has it."""
    with tempfile.TemporaryDirectory() as folder, Publisher() as one:
        path = os.path.join(folder, "log")
        with Selector("--decision-log", path) as s:
            s.add(1, one)
            for i in range(24):
                s.reserve([i % 4] * (160 + 16 * i), selection_id=f"r{i}")
                if i % 3 == 0:
                    equal(s.first_token(f"r{i}"), 200)
                if i % 6 == 0:
                    equal(s.free(f"r{i}"), 200)
        figures = replay(path, "--policy", "adaptive,least")
        equal({(f["decisions"], f["as_logged_percent"], f["imbalance"]) for f in figures.values()}, {(24, 100.0, 1.0)})
        equal(len({f["computed_share"] for f in figures.values()}), 1)
        text = subprocess.run([BUILD / "bin" / "kvasir", "select", "replay", path], capture_output=True, text=True, check=True).stdout
        check("cache-aware" in text and "24 booked decisions, 0 without a booking, 0 lines that can't be read" in text, text)


if __name__ == "__main__":
    run(globals())
