# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Connector inside live vLLM engines on the CPU: prompts outlive the engine, and failures cost nothing but time.

Every answer is compared with that of an engine without the connector, token by token. `KV_MEASURE=1` measures the time to the
first token of a repeated prompt of 4096 tokens after a restart, with and without.
"""
import json
import os
import pathlib
import random
import re
import statistics
import tempfile
import threading
import time

from realtest import *
from redistest import Server
from test_store_full import mounted
from test_vllm_live import BLOCK, MODEL_CONFIG, Follower, LiveEngine

SEEDS = range(1, 6)
LENGTH = 40 * BLOCK
WORK = tempfile.TemporaryDirectory()
FOLDER = pathlib.Path(WORK.name)


def model(name, **changes):
    """Folder for an engine with a model of its own configuration."""
    folder = FOLDER / name
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps({**MODEL_CONFIG, **changes}), encoding="ascii")
    return folder


def engine(folder, number=1, uri=None, **options):
    """Start an engine; @uri: of the connector's store."""
    arguments = ["--max-num-batched-tokens", 512, *options.pop("arguments", [])]
    if uri is not None:
        arguments += ["--kv-transfer-config", json.dumps({
            "kv_connector": "Connector", "kv_connector_module_path": "kvasir.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"uri": uri, "flush_s": 0.2, **options.pop("extra", {})}})]
    live = LiveEngine(folder, number, arguments, length=options.pop("length", LENGTH + 64), blocks=options.pop("blocks", 120),
                      environment={"PYTHONPATH": str(BUILD / "python"), "KVASIR_LIBRARY_PATH": str(BUILD / "lib"),
                                   **options.pop("environment", {})})
    live.start().wait()
    return live


def ask(live, tokens, n=6):
    """(tokens of the answer, how many of the prompt's were cached, seconds)"""
    begun = time.monotonic()
    reply = http_request(live.url, "POST", "/v1/completions", {
        "model": MODEL, "prompt": tokens, "max_tokens": n, "temperature": 0, "ignore_eos": True, "detokenize": False,
        "return_token_ids": True}, timeout=600)
    equal(reply.status, 200, f"completion {reply.body[:500]!r}: status")
    answer = reply.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], time.monotonic() - begun


def prompts(seed, n=6):
    rng = random.Random(seed)
    shared = [rng.randrange(3, 1000) for _ in range(4 * BLOCK)]
    return [shared[:rng.choice((0, 2, 4)) * BLOCK] + [rng.randrange(3, 1000) for _ in range(rng.randrange(BLOCK, 16 * BLOCK))]
            for _ in range(n)]


def whole(tokens):
    """Return how many tokens of a prompt the store can have for vLLM, which always computes one."""
    return (len(tokens) - 1) // BLOCK * BLOCK


_truth = {}


def truth(asked):
    """Answers of an engine without the connector, which starts once for the prompts of all tests."""
    if not _truth:
        live = engine(model("plain"))
        try:
            for tokens in [tokens for seed in SEEDS for tokens in prompts(seed)]:
                _truth[tuple(tokens)] = ask(live, tokens)[0]
        finally:
            live.kill()
    return [_truth[tuple(tokens)] for tokens in asked]


def text(live):
    return pathlib.Path(live.log.name).read_text(encoding="utf-8", errors="replace")


def stored(folder, asked):
    """Wait until another process would find every full block of these prompts."""
    from kvasir import store
    distinct = {tuple(tokens[:end]) for tokens in asked for end in range(BLOCK, len(tokens) + 1, BLOCK)}
    with store.open(str(folder / "store")) as opened:
        wait_until(lambda: len(list(opened.keys())) >= len(distinct), 120, f"{len(distinct)} blocks in the store")
    print(f"  {len(distinct)} blocks are stored", flush=True)


def damage(folder, nth):
    """Damage every @nth of the blocks in the store, at least one."""
    chunks = sorted(path for path in (folder / "store").rglob("*") if path.is_file() and path.stat().st_size > 1024)
    check(chunks, "nothing was stored")
    for path in random.Random(2).sample(chunks, max(1, len(chunks) // nth)):
        flip_bit(path)


def test_a_prompt_is_served_after_a_restart():
    folder, asked = model("restart"), prompts(1)
    expected = truth(asked)
    follower = None
    live = engine(folder, uri=str(folder / "store"))
    try:
        equal([ask(live, tokens)[0] for tokens in asked], expected, "answers of the first engine")
        stored(folder, asked)
        live.kill()
        live = engine(folder, uri=str(folder / "store"))
        follower = Follower("indexer", [live])
        for tokens, answer in zip(asked, expected):
            got, cached, _ = ask(live, tokens)
            equal(got, answer, "answer after the restart")
            equal(cached, whole(tokens), "cached tokens after the restart")
        follower.settle(live)
        for tokens in asked:
            equal(follower.scores(tokens).get(1), len(tokens) // BLOCK * BLOCK, "what the engine announced of loaded blocks")

        def counted():
            ask(live, [1] * 8)  # a step, with which events travel
            follower.settle(live)
            return all(follower.indexer.query(tokens)["instances"]["1"].get("disk", 0) >= whole(tokens) for tokens in asked)

        wait_until(counted, 120, "what the store holds, announced and counted")
    finally:
        live.kill()
        if follower:
            follower.indexer.kill()


def test_a_reset_forgets():
    """POST /reset_prefix_cache?reset_external=true, as after new weights: no block of before is loaded, also after a restart."""
    folder, rng = model("reset"), random.Random(7)
    first, second = ([rng.randrange(3, 1000) for _ in range(8 * BLOCK)] for _ in range(2))
    live = engine(folder, uri=str(folder / "store"), environment={"VLLM_SERVER_DEV_MODE": "1"})
    try:
        for tokens in first, second:
            ask(live, tokens)
        stored(folder, [first, second])
        ask(live, first)  # a step, with which figures travel
        figures = http_request(live.url, "GET", "/metrics").body.decode()
        found = re.search(r'^vllm:kvasir_connector_blocks_total\{.*operation="store",outcome="done".*\} ([0-9.e+]+)$', figures, re.M)
        equal(found and float(found[1]), 16.0, "blocks stored, in vLLM's own metrics")
        equal(http_request(live.url, "POST", "/reset_prefix_cache?reset_external=true", {}, timeout=60).status, 200, "reset")
        equal(ask(live, first)[1], 0, "cached tokens behind the reset")
        live.kill()
        live = engine(folder, uri=str(folder / "store"))
        equal(ask(live, second)[1], 0, "cached tokens after a restart, of a prompt of before")
    finally:
        live.kill()


def test_killed_in_mid_store_and_damaged():
    folder, asked = model("killed"), prompts(2) + prompts(3)
    expected = truth(asked)
    live = engine(folder, uri=str(folder / "store"))
    try:
        answers = []

        def run_all():
            for tokens in asked:
                try:
                    answers.append(ask(live, tokens)[0])
                except (OSError, EOFError, AssertionError):
                    return

        thread = threading.Thread(target=run_all)
        thread.start()
        wait_until(lambda: len(answers) >= 7, 300, "answers")
        live.kill()  # -9, while the blocks of the last prompts are being stored
        thread.join()
        equal(answers, expected[:len(answers)], "answers of the killed engine")
        damage(folder, 10)
        live = engine(folder, uri=str(folder / "store"))
        results = [ask(live, tokens) for tokens in asked]
        equal([answer for answer, *_ in results], expected, "answers after kill -9, with damaged blocks")
        check(sum(cached for _, cached, _ in results) > BLOCK, f"nothing is served: {[cached for _, cached, _ in results]}")
        check(live.process.poll() is None, "the engine lives")
    finally:
        live.kill()


def test_redis_goes_down_and_comes_back():
    server, folder, asked = Server(), model("redis"), prompts(4)
    expected, live = truth(asked), None
    try:
        live = engine(folder, uri=server.uri)
        equal(ask(live, asked[0])[0], expected[0], "with redis")
        wait_until(lambda: server.command("DBSIZE") >= whole(asked[0]) // BLOCK, 60, "blocks in redis")
        server.kill()
        equal([ask(live, tokens)[0] for tokens in asked[:4]], expected[:4], "without redis")
        server.start()  # empty
        deadline, turn = time.monotonic() + 120, 0
        while not server.command("DBSIZE"):  # the connector stores again
            check(time.monotonic() < deadline, "nothing is stored after redis came back")
            turn += 1
            ask(live, [turn] * (4 * BLOCK))
        equal([ask(live, tokens)[0] for tokens in asked], expected, "with redis again")
    finally:
        if live:
            live.kill()
        server.stop()


def test_a_full_disk():
    folder, asked = model("full"), prompts(5)
    expected = truth(asked)
    with mounted("tmpfs", "size=1M") as at:
        live = engine(folder, uri=str(at / "store"))
        try:
            for turn in range(2):
                equal([ask(live, tokens)[0] for tokens in asked], expected, f"turn {turn}, a full disk")
                for n in range(4):  # evict the prompts from the engine's own cache
                    ask(live, [10 * turn + n + 3] * (30 * BLOCK))
            check("kvasir.vllm: storing blocks" in text(live), "no line tells of the full disk")
        finally:
            live.kill()


def measure():
    """Seconds until the first token of 4096 that a process before this one has seen: computed, and loaded."""
    folder = model("measure", hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                   max_position_embeddings=8192)
    rng = random.Random(7)
    asked = [[rng.randrange(3, 1000) for _ in range(4096)] for _ in range(5)]
    options = {"length": 4400, "blocks": 800, "arguments": ["--max-num-batched-tokens", 2048]}
    live = engine(folder, uri=str(folder / "store"), **options)
    try:
        ask(live, [5] * 64, 1)
        begun = [ask(live, tokens, 1) for tokens in asked]
        stored(folder, asked)
        live.kill()
        live = engine(folder, uri=str(folder / "store"), **options)
        ask(live, [5] * 64, 1)
        ended = [ask(live, tokens, 1) for tokens in asked]
    finally:
        live.kill()
    from kvasir import store
    with store.open(str(folder / "store")) as opened:  # the connector's own part: the same number of blocks
        keys, seconds = list(opened.keys())[:127], []
        room = [bytearray(len(opened.get(keys[0]))) for _ in keys]
        for _ in range(5):
            start = time.monotonic()
            check(all(opened.exists(keys)) and None not in opened.get_into(keys, room), "blocks")
            seconds.append(time.monotonic() - start)
    live = engine(folder, 2, **options)
    try:
        ask(live, [5] * 64, 1)
        plain = [ask(live, tokens, 1) for tokens in asked]
    finally:
        live.kill()
    equal([answer for answer, *_ in ended], [answer for answer, *_ in plain], "answers")
    for name, results in (("without the connector", plain), ("with it, nothing stored", begun), ("after a restart, stored", ended)):
        print(f"{name}: {1e3 * statistics.median(seconds for *_, seconds in results):.1f} ms to the first token, "
              f"{statistics.median(cached for _, cached, _ in results)} of 4096 tokens cached")
    print(f"the store's part of it: {1e3 * statistics.median(seconds):.1f} ms for {len(keys)} blocks of {len(room[0])} bytes")


if __name__ == "__main__":
    import sys
    sys.path.insert(0, str(BUILD / "python"))
    os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")
    with WORK:
        if os.environ.get("KV_MEASURE"):
            measure()
        else:
            run(globals())
