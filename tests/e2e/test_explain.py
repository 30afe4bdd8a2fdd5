# SPDX-License-Identifier: Apache-2.0
"""POST /explain: where each rank's match of a prompt ends and why. And the other answers for people: /overview, /history, pages of /workers."""
import random

from kvtest import *

TOKENS = list(range(100, 164))  # four blocks of 16
NOWHERE = "tcp://127.0.0.1:1"  # nobody publishes there


def explain(indexer, expect=200, query="", **fields):
    reply = indexer.post("/explain" + query, {"model_name": MODEL, **fields})
    equal(reply.status, expect, f"/explain {reply.body[:300]!r}: status")
    return reply.json()


def rank_of(answer, instance, rank=0):
    return next(r for r in answer["ranks"] if (r["instance_id"], r["dp_rank"]) == (instance, rank))


def why(indexer, instance, **fields):
    """The reason for one rank, and the block at which its match ends."""
    rank = rank_of(explain(indexer, **fields), instance)
    return rank["reason"], rank.get("stops_at")


def test_where_a_match_ends():
    with Indexer() as indexer, Publisher() as one, Publisher() as two, Publisher() as three:
        for number, publisher in enumerate((one, two, three), 1):
            indexer.register(number, publisher)
        one.store([1, 2, 3, 4], TOKENS)
        two.store([1, 2], TOKENS[:32])
        three.store([1, 2], TOKENS[:32])
        three.store([9], range(16), parent=2)
        for number, tokens in ((1, 64), (2, 32), (3, 32)):
            indexer.wait_score(TOKENS, number, tokens)
        wait_until(lambda: rank_of(explain(indexer, token_ids=TOKENS), 3)["blocks"] == 3)
        answer = explain(indexer, token_ids=TOKENS)
        equal([(r["instance_id"], r["reason"], r.get("stops_at"), r.get("others_with_block"), r["matched_tokens"]) for r in answer["ranks"]],
              [(1, "whole", None, None, 64), (2, "not_held", 2, 1, 32), (3, "other_tokens", 2, 1, 32)])
        equal((answer["prompt_blocks"], len(answer["block_hashes"]), answer["total"], answer["explain"]["reason"]), (4, 4, 3, "matched"))
        equal(answer["ranks"][1]["stops_at_hash"], answer["block_hashes"][2])
        equal(answer["ranks"][1]["matched_blocks"], {"gpu": 2, "cpu": 2, "disk": 2, "external": 2})
        # The same prompt by its hashes: local ones, and the engine's, also from a later block on.
        for fields in ({"block_hashes": answer["block_hashes"]}, {"sequence_hashes": [1, 2, 3, 4]}, {"sequence_hashes": [2, 3, 4]}):
            other = explain(indexer, **fields)
            equal([(r["instance_id"], r["reason"], r.get("stops_at")) for r in other["ranks"]],
                  [(1, "whole", None), (2, "not_held", 2), (3, "other_tokens", 2)], fields)
        equal(explain(indexer, sequence_hashes=[2, 3, 4])["first_named_block"], 1)
        equal(rank_of(explain(indexer, sequence_hashes=[2, 3, 77]), 1)["stops_at"], 3)
        # No query is counted.
        before = indexer.metrics()['kv_indexer_queries_total{result="hit"}']
        explain(indexer, token_ids=TOKENS)
        equal(indexer.metrics()['kv_indexer_queries_total{result="hit"}'], before)
        # Block 1 leaves, block 2 stays behind it, and waits.
        one.remove([2])
        indexer.wait_score(TOKENS, 1, 16)
        equal(why(indexer, 1, token_ids=TOKENS), ("missing_block", 1))
        equal(why(indexer, 1, token_ids=TOKENS[:32]), ("not_held", 1))
        one.clear()
        indexer.wait_score(TOKENS, 1, 0)
        equal(why(indexer, 1, token_ids=TOKENS), ("empty", 0))
        equal(why(indexer, 1, token_ids=TOKENS[:15]), ("no_full_block", None))


def test_tiers():
    with Indexer() as indexer, Publisher() as one:
        indexer.register(1, one)
        one.store([1], TOKENS[:16])
        one.store([2], TOKENS[16:32], parent=1, medium="CPU")
        wait_until(lambda: rank_of(explain(indexer, token_ids=TOKENS), 1)["matched_tokens"] == 32)
        equal(rank_of(explain(indexer, token_ids=TOKENS), 1)["matched_blocks"], {"gpu": 1, "cpu": 2, "disk": 2, "external": 2})


def test_why_there_is_nothing():
    with Indexer() as indexer, Publisher() as other, Publisher() as quiet, Publisher() as sizes, Publisher() as orphan, Publisher() as mute:
        indexer.register("absent", NOWHERE)
        for name, publisher in (("other", other), ("quiet", quiet), ("sizes", sizes), ("orphan", orphan), ("mute", mute)):
            indexer.register(name, publisher)
        equal(why(indexer, "absent", token_ids=TOKENS), ("no_connection", 0))
        other.store([1], range(16))
        sizes.store([1], range(32), block_size=32)
        orphan.store([5], TOKENS[:16], parent=4)
        mute.send_raw(b"\xc1 no batch", keep=False)
        for name, reason in (("other", "other_prompts"), ("quiet", "no_events"), ("sizes", "block_size"), ("orphan", "orphans"),
                             ("mute", "malformed")):
            wait_until(lambda name=name, reason=reason: why(indexer, name, token_ids=TOKENS) == (reason, 0), 30, f"{name}: {reason}")
        equal(rank_of(explain(indexer, token_ids=TOKENS), "sizes")["event_block_size"], 32)
        partial = rank_of(explain(indexer, token_ids=TOKENS), "absent")
        equal((partial["partial"], partial["status"] in ("pending", "failed"), "nothing_yet" in partial["partial_reasons"]), (True, True, True))


def test_other_adapter_and_salt():
    with Indexer() as indexer, Publisher() as plain, Publisher() as tuned:
        indexer.register(1, plain)
        indexer.register(2, tuned)
        plain.store([1, 2, 3, 4], TOKENS)
        tuned.store([11, 12, 13, 14], TOKENS, lora_name="tuned")
        indexer.wait_score(TOKENS, 1, 64)
        indexer.wait_score(TOKENS, 2, 64, lora_name="tuned")
        equal(why(indexer, 2, token_ids=TOKENS, lora_name="tuned"), ("whole", None))
        equal(why(indexer, 1, token_ids=TOKENS, lora_name="tuned"), ("other_namespace", 0))
        equal(rank_of(explain(indexer, token_ids=TOKENS, lora_name="tuned"), 1)["namespace"], "without lora_name")
        equal(rank_of(explain(indexer, token_ids=TOKENS, cache_salt="s"), 1)["namespace"], "without cache_salt")
        equal(rank_of(explain(indexer, token_ids=TOKENS, lora_name="x", cache_salt="s"), 1)["namespace"], "without lora_name and cache_salt")
        # An adapter that the request lacks can't be guessed: the index has hashes, no names.
        equal(why(indexer, 2, token_ids=TOKENS), ("other_prompts", 0))


def test_hashes_of_another_engine():
    with Indexer() as indexer, Publisher() as one, Publisher() as two:
        indexer.register(1, one)
        indexer.register(2, two)
        one.store([1, 2, 3, 4], TOKENS)
        two.store([1001, 1002], TOKENS[:32])
        indexer.wait_score(TOKENS, 1, 64)
        indexer.wait_score(TOKENS, 2, 32)
        equal(why(indexer, 2, sequence_hashes=[1, 2, 3, 4]), ("other_hashes", 2))
        equal(why(indexer, 2, sequence_hashes=[1001, 1002, 1003]), ("not_held", 2))
        equal(why(indexer, 2, token_ids=TOKENS), ("not_held", 2))


def test_groups_and_given_up_blocks():
    with Indexer() as indexer, Publisher() as one, Publisher() as drops:
        indexer.register(1, one)
        indexer.register(2, drops, eagle_drop=True)
        one.store([1, 2, 3, 4], TOKENS, group_idx=0, kv_cache_spec_kind="full_attention")
        one.store([1, 2, 3], TOKENS[:48], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=16)
        drops.store([1, 2, 3, 4], TOKENS)
        indexer.wait_score(TOKENS, 2, 48)
        indexer.wait_score(TOKENS, 1, 48)
        rank = rank_of(explain(indexer, token_ids=TOKENS), 1)
        equal((rank["reason"], rank["stops_at"], rank["cut"]["ended_by"]["gpu"]), ("cut_by_group", 3, 1))
        equal(why(indexer, 2, token_ids=TOKENS), ("given_up", 3))


def test_lookahead():
    """Blocks that are hashed with the tokens behind them are found in their own form."""
    with Indexer() as indexer, Publisher() as one:
        indexer.register(1, one, hash_lookahead=1)
        one.store([1, 2], TOKENS[:32], lookahead_token_ids=[[TOKENS[16]], [TOKENS[32]]])
        wait_until(lambda: rank_of(explain(indexer, token_ids=TOKENS), 1)["matched_tokens"] == 32)
        equal(why(indexer, 1, token_ids=TOKENS), ("not_held", 2))
        equal(why(indexer, 1, token_ids=TOKENS[:16] + [0] * 48), ("other_prompts", 0))  # the token behind block 0 is another one


def test_refusals_and_pages():
    with Indexer() as indexer:
        for number in range(5):
            indexer.register(number, NOWHERE)
        for fields in ({}, {"token_ids": [1], "block_hashes": [1]}):
            reply = indexer.post("/explain", {"model_name": MODEL, **fields})
            equal((reply.status, "is required" in reply.json()["error"]), (422, True))
        equal(explain(indexer, 404, model_name="x", token_ids=[1])["explain"]["reason"], "unknown_model")
        equal(indexer.post("/explain?limit=x", {"model_name": MODEL, "token_ids": [1]}).status, 400)
        answer = explain(indexer, query="?limit=2&offset=3", token_ids=TOKENS)
        equal(([r["instance_id"] for r in answer["ranks"]], answer["total"], answer["offset"], answer["limit"]), ([3, 4], 5, 3, 2))
        equal(explain(indexer, query="?offset=99", token_ids=TOKENS)["ranks"], [])
        for path, ids, total in (("?limit=2&offset=1", [1, 2], 5), ("?limit=0", [], 5), ("?limit=9&only=attention", [0, 1, 2, 3, 4], 5),
                                 ("?limit=9&only=active", [], 0), ("?limit=9&search=3", [3], 1), ("?limit=9&search=127.0.0.1:1", [0, 1, 2, 3, 4], 5),
                                 ("?limit=9&search=nobody", [], 0), ("?limit=9&model_name=x", [], 0)):
            page = indexer.get("/workers" + path).json()
            equal(([w["instance_id"] for w in page["workers"]], page["total"]), (ids, total), path)
        equal(len(indexer.get("/workers?search=3").json()), 1)  # without a limit: a list, as ever
        for path in ("/workers?limit=-1", "/workers?limit=1&offset=x", "/workers?only=activ", "/history?from=x"):
            equal(indexer.get(path).status, 400, path)


def sums(indexer):
    """Of /metrics: what /overview must say, too."""
    metrics = indexer.metrics()

    def total(name, **labels):
        return sum(value for key, value in metrics.items() if key.split("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()))
    return {"workers": total("dynamo_kvindexer_workers"), "active": total("kv_indexer_listeners", status="active"),
            "partial": total("kv_indexer_stream_partial"), "blocks": total("kv_indexer_index_blocks"), "chains": total("kv_indexer_index_chains"),
            "holder_blocks": total("kv_indexer_index_holder_blocks"), "host": total("kv_indexer_index_tier_blocks", tier="host_pinned"),
            "queries": total("kv_indexer_queries_total"), "matched": total("kv_indexer_query_matched_blocks_total"), "metrics": metrics}


def quantile(metrics, q):
    """As Prometheus's histogram_quantile, over both endpoints of queries, in milliseconds."""
    bounds = {}
    for key, value in metrics.items():
        if key.startswith("dynamo_kvindexer_request_duration_seconds_bucket") and ('"/query"' in key or '"/query_by_hash"' in key):
            bound = float(key.split('le="')[1].split('"')[0].replace("+Inf", "inf"))
            bounds[bound] = bounds.get(bound, 0) + value
    below, start = 0, 0.0
    for bound, total in sorted(bounds.items()):
        if total >= q * max(bounds.values()) and total > below:
            return 1000 * (start + (bound - start) * (q * max(bounds.values()) - below) / (total - below))
        below, start = total, bound
    return None


def test_overview_is_what_metrics_say():
    with Indexer("--history-interval", "100ms") as indexer, Publisher() as one, Publisher() as two:
        indexer.register(1, one)
        indexer.register(2, two)
        indexer.register(3, NOWHERE)
        one.store([1, 2, 3, 4], TOKENS)
        two.store([1], TOKENS[:16], medium="CPU")
        indexer.wait_score(TOKENS, 1, 64)
        wait_until(lambda: indexer.get("/overview").json()["models"][0]["holder_blocks"] == 5)
        dice = random.Random(1)
        for _ in range(200):
            indexer.query(TOKENS[:16 * dice.randint(0, 4)] + [1] * 16)
        indexer.query_by_hash([1, 2])
        overview, wanted = indexer.get("/overview").json(), sums(indexer)
        model, since = overview["models"][0], overview["since_start"]
        equal((overview["workers"], overview["streams"]["active"], overview["partial_ranks"]),
              (wanted["workers"], wanted["active"], wanted["partial"]))
        equal((model["blocks"], model["chains"], model["holder_blocks"], model["tier_blocks"]["host_pinned"]),
              (wanted["blocks"], wanted["chains"], wanted["holder_blocks"], wanted["host"]))
        equal((since["queries"], since["matched_blocks"]), (wanted["queries"], wanted["matched"]))
        for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99)):
            check(abs(since[name] - quantile(wanted["metrics"], q)) < 1e-6, f"{name}: {since[name]}, of /metrics {quantile(wanted['metrics'], q)}")
        equal({name: reason["ranks"] for name, reason in overview["partial_reasons"].items()}, {"nothing_yet": 1})
        check(overview["partial_reasons"]["nothing_yet"]["set_by"].startswith("the registration"))
        listener = indexer.workers()[0]["listeners"]["0"]
        check(0 <= listener["lag_ms"] < 60000 and listener["last_event_age_ms"] >= 0, f"lag and age: {listener}")


def test_history_adds_up_and_is_bounded():
    with Indexer("--history-interval", "5ms") as indexer, Publisher() as one:
        indexer.register(1, one)
        one.store([1, 2, 3, 4], TOKENS)
        indexer.wait_score(TOKENS, 1, 64)
        for _ in range(50):
            indexer.query(TOKENS)
        samples, number = [], [0]

        def all_counted():
            answer = indexer.get(f"/history?from={number[0]}").json()
            equal((answer["from"], answer["next"] - answer["from"]), (number[0], len(answer["samples"])))
            samples.extend(answer["samples"])
            number[0] = answer["next"]
            return sum(s["queries"] for s in samples) == sums(indexer)["queries"]
        wait_until(all_counted, 30, "queries of all samples", interval=0.3)
        equal((samples[-1]["blocks"], samples[-1]["ranks"], sum(s["events"] for s in samples)), (4, 1, 1))
        equal(sum(s["matched_blocks"] for s in samples), sums(indexer)["matched"])
        check(all(s["p50_ms"] is None if not s["queries"] else s["p50_ms"] > 0 for s in samples), "latency of samples")
        check(all(a["time_ms"] <= b["time_ms"] for a, b in zip(samples, samples[1:])), "order of samples")
        wait_until(lambda: indexer.get("/history?from=0").json()["from"] > 0, 60, "a ring that is full")
        answer = indexer.get("/history").json()
        equal((len(answer["samples"]), answer["interval_ms"]), (360, 5))
        check(indexer.get(f"/history?from={answer['next'] + 100000}").json()["samples"] == [], "samples of the future")
    with Indexer("--history-interval", "0") as indexer:
        equal(indexer.get("/history").json()["samples"], [])


if __name__ == "__main__":
    run(globals())
