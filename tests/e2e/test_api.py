# SPDX-License-Identifier: Apache-2.0
"""Every endpoint of kv-indexer: what it takes, what it answers, how it fails."""
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.parse

from kvtest import *

JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}
NOWHERE = "tcp://127.0.0.1:1"  # nobody publishes there
U64 = 1 << 64
DEEP = "[" * 100000


def fails(indexer, path, body, status, *words, headers=JSON):
    """POST @body (text, bytes or an object) and expect @status with all @words in the error."""
    if isinstance(body, str):
        body = body.encode()
    reply = indexer.post(path, body, headers=headers)
    equal(reply.status, status, f"{path} {body[:100] if isinstance(body, bytes) else body}: {reply.body[:200]!r}: status")
    equal(reply.headers["Content-Type"], "application/json")
    error = reply.json()["error"]
    for word in words:
        check(word in error, f"{path} {body!r}: '{word}' isn't in: {error}")
    return error


def test_health():
    with Indexer() as indexer:
        reply = indexer.get("/health")
        equal((reply.status, reply.body), (200, b""))


def test_register_and_workers():
    with Indexer() as indexer:
        equal(indexer.workers(), [])
        reply = indexer.register(7, NOWHERE, block_size=16)
        equal(reply.json(), {"status": "ok"})
        indexer.register(7, "tcp://127.0.0.1:2", block_size=16, dp_rank=3, replay_endpoint="tcp://127.0.0.1:3")
        indexer.register(2, NOWHERE, block_size=8, model_name="other", tenant_id="customer a&b", dp_rank=None)
        indexer.register(11, "ipc:///tmp/kv-indexer-test-nowhere", block_size=16, unknown={"x": [1, 2]})
        workers = indexer.workers()
        equal([worker["instance_id"] for worker in workers], [2, 7, 11])
        equal(workers[1]["endpoints"], {"0": NOWHERE, "3": "tcp://127.0.0.1:2"})
        equal((workers[1]["source"], workers[1]["model_name"], workers[1]["routing_group"], workers[1]["block_size"]), ("zmq", MODEL, "default", 16))
        check(workers[1]["status"] in ("pending", "active", "failed"), workers[1]["status"])
        equal(sorted(workers[1]["listeners"]), ["0", "3"])
        equal(workers[1]["listeners"]["3"]["endpoint"], "tcp://127.0.0.1:2")
        for query, wanted in (("model_name=other", [2]), ("model_name=m", [7, 11]), ("tenant_id=customer%20a%26b", [2]), ("routing_group=customer+a%26b", [2]),
                              ("model_name=m&tenant_id=default", [7, 11]), ("model_name=m&tenant_id=x", []), ("model_name=", []), ("nonsense=1", [2, 7, 11])):
            equal([worker["instance_id"] for worker in indexer.get("/workers?" + query).json()], wanted, query)
        # largest ids, and Unicode
        indexer.register(U64 - 1, NOWHERE, block_size=1, model_name="模型\n\"", dp_rank=(1 << 32) - 1)
        equal(indexer.workers()[-1]["endpoints"], {str((1 << 32) - 1): NOWHERE})
        equal([w["instance_id"] for w in indexer.get("/workers?model_name=" + urllib.parse.quote("模型\n\"")).json()], [U64 - 1])


def test_register_refusals():
    with Indexer() as indexer:
        good = {"instance_id": 1, "endpoint": NOWHERE, "model_name": MODEL, "block_size": 16}
        for field in good:
            fails(indexer, "/register", {k: v for k, v in good.items() if k != field}, 422, f"missing field '{field}'")
            fails(indexer, "/register", {**good, field: None}, 422, f"'{field}'")
        for field, values in {"instance_id": ["01", "", -1, 1.5, True, [], {}, U64], "endpoint": [1, [], {}, False], "model_name": [1, ["m"], "x" * 5000, "a\0b"],
                              "block_size": ["16", -1, 1.0, 1 << 32], "dp_rank": ["0", -1, 1 << 32], "tenant_id": [1, {}],
                              "replay_endpoint": [1, []]}.items():
            for value in values:
                fails(indexer, "/register", {**good, field: value}, 422, f"'{field}'")
        for endpoint, word in (("127.0.0.1:5557", "missing scheme"), ("tcp://", "missing"), ("tcp://host", "missing TCP port"),
                               ("tcp://host:x", "invalid TCP port"), ("tcp://host:65536", "invalid TCP port"), ("udp://h:1", "unsupported scheme"),
                               ("tcp://:5557", "missing TCP host"), ("tcp://[::1:5557", "missing closing"), ("", "missing")):
            fails(indexer, "/register", {**good, "endpoint": endpoint}, 400, "invalid ZMQ endpoint", word)
            fails(indexer, "/register", {**good, "replay_endpoint": endpoint or "x"}, 400, "invalid replay endpoint")
        fails(indexer, "/register", {**good, "block_size": 0}, 400, "block_size")
        for block_size in (1 << 20) + 1, (1 << 32) - 1:
            fails(indexer, "/register", {**good, "block_size": block_size}, 400, "block_size must be at most 1048576")
        equal(indexer.workers(), [], "nothing is left behind by a refusal")
        equal(indexer.metrics()["dynamo_kvindexer_models"], 0)
        indexer.register(1, NOWHERE, block_size=16)
        fails(indexer, "/register", good, 409, "instance 1 dp_rank 0 already registered")
        fails(indexer, "/register", {**good, "instance_id": 2, "block_size": 32}, 409,
              "block_size mismatch for model=m tenant=default: existing=16, requested=32")
        fails(indexer, "/register", {**good, "dp_rank": 1, "model_name": "other"}, 409, "already registered for model=m")
        indexer.register(2, NOWHERE, block_size=32, tenant_id="another")
        indexer.register(3, NOWHERE, block_size=1 << 20, tenant_id="the largest blocks")
    with Indexer("--allow-endpoint", "tcp://10.0.*", "--allow-endpoint", "ipc://*") as indexer:
        fails(indexer, "/register", {**good}, 403, NOWHERE)
        fails(indexer, "/register", {**good, "endpoint": "ipc:///tmp/x", "replay_endpoint": NOWHERE}, 403)
        indexer.register(1, "ipc:///tmp/kv-indexer-test-nowhere")


def test_allowed_endpoints():
    """--allow-endpoint compares addresses, not text: whatever looks admitted and is another host gets 403 (or 400)."""
    rules = ("tcp://10.0.0.0/16:5557-5558", "tcp://[fd00::/8]:5557", "tcp://engine.example.com", "ipc:///run/engines/*")
    good = {"instance_id": 1, "model_name": "m", "block_size": 16}
    with Indexer(*(word for rule in rules for word in ("--allow-endpoint", rule))) as indexer:
        for number, endpoint in enumerate(("tcp://10.0.3.4:5557", "tcp://[::ffff:10.0.3.4]:5558", "tcp://[fd12::1]:5557",
                                           "tcp://Engine.Example.COM.:1", "ipc:///run/engines/1")):
            indexer.register(number, endpoint)
        for endpoint in ("tcp://10.0.evil.example.com:5557", "tcp://10.0.0.1.evil.example.com:5557", "tcp://10.1.0.1:5557",
                         "tcp://10.0.0.1:5559", "tcp://[::10.0.3.4]:5557", "tcp://[fe80::1]:5557", "tcp://localhost:5557",
                         "tcp://engine.example.com.evil.org:5557", "tcp://xengine.example.com:1",
                         "ipc:///run/engines/../other", "ipc:///run/other"):
            fails(indexer, "/register", {**good, "instance_id": 99, "endpoint": endpoint}, 403, "--allow-endpoint")
            fails(indexer, "/register", {**good, "instance_id": 99, "endpoint": "tcp://10.0.3.4:5557", "replay_endpoint": endpoint}, 403)
        for endpoint in ("tcp://10.0.0.1@evil.example.com:5557", "tcp://010.0.0.1:5557", "tcp://0x0a000001:5557", "tcp://167772161:5557",
                         "tcp://10.1:5557", "tcp://10.0.0.1.:5557", "TCP://10.0.0.1:5557", "tcp://10.0.0.1:05557x", "tcp://eth0;10.0.0.1:5557"):
            fails(indexer, "/register", {**good, "instance_id": 99, "endpoint": endpoint}, 400, "invalid ZMQ endpoint")
        equal(len(indexer.workers()), 5)
    for rule, word in (("10.0.0.0/16", "missing scheme"), ("tcp://10.0.0.1/16", "bits"), ("tcp://ex*.com", "asterisk"), ("inproc://*", "scheme")):
        refused = subprocess.run([BUILD / "bin" / "kv-indexer", "--allow-endpoint", rule], capture_output=True, text=True, timeout=60)
        equal(refused.returncode, 2)
        check(rule in refused.stderr and word in refused.stderr, refused.stderr)


def test_endpoints_that_only_bind():
    """An engine's own setting, tcp://*:5557, names no place to connect to: 400 rather than a worker that never connects."""
    good = {"instance_id": 1, "model_name": "m", "block_size": 16}
    with Indexer() as indexer:
        for endpoint, word in (("tcp://*:5557", "host"), ("tcp://127.0.0.1:0", "port"), ("tcp://127.0.0.1:*", "port"), ("tcp://[::1]:0", "port")):
            fails(indexer, "/register", {**good, "endpoint": endpoint}, 400, word)
            fails(indexer, "/register", {**good, "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": endpoint}, 400, word)
        equal(indexer.workers(), [])
    for workers in ("1=tcp://*:5557", "1=tcp://127.0.0.1:5557+tcp://*:5558"):
        refused = subprocess.run([BUILD / "bin" / "kv-indexer", "--model-name", "m", "--block-size", "16", "--workers", workers],
                                 capture_output=True, text=True, timeout=60, check=False)
        equal(refused.returncode, 1)
        check("invalid" in refused.stderr and "host" in refused.stderr, refused.stderr)


def test_inproc_is_refused():
    """inproc:// names sockets of the indexer itself, such as the monitors of its connections."""
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        for endpoint in ("inproc://monitor-0", "inproc://monitor-1", "inproc://x"):
            fails(indexer, "/register", {"instance_id": 9, "model_name": "m", "block_size": 4, "endpoint": endpoint}, 400, "inproc://")
            fails(indexer, "/register", {"instance_id": 9, "model_name": "m", "block_size": 4, "endpoint": "tcp://127.0.0.1:1",
                                         "replay_endpoint": endpoint}, 400, "inproc://")
        engine.store([1], range(4), block_size=4)
        indexer.wait_score(range(4), 1, 4)


def test_unregister():
    with Indexer() as indexer:
        for rank in (0, 1, 2):
            indexer.register(1, NOWHERE, dp_rank=rank)
        equal(indexer.unregister(1, tenant_id="default", dp_rank=1).json(), {"status": "ok"})
        equal(sorted(indexer.workers()[0]["endpoints"]), ["0", "2"])
        check("not found" in indexer.unregister(1, tenant_id="default", dp_rank=1, expect=404).json()["error"])
        check("instance 5 not found" in indexer.unregister(5, expect=404).json()["error"])
        indexer.unregister(1, expect=404, tenant_id="other")
        indexer.unregister(1, expect=404, model_name="other")
        indexer.unregister(1, dp_rank=0)  # without a tenant the whole instance goes, as in the original
        equal(indexer.workers(), [])
        indexer.unregister(1, expect=404)
        for body, word in (({}, "instance_id"), ({"instance_id": 1}, "model_name"), ({"instance_id": "01", "model_name": MODEL}, "instance_id")):
            fails(indexer, "/unregister", body, 422, word)
        indexer.register(1, NOWHERE)  # and may come back


def chain(first, n, block_size=4):
    """Hashes and tokens of a chain of @n blocks."""
    return [first * 1000 + i for i in range(n)], [first * 100 + i for i in range(n * block_size)]


def test_a_large_worker_leaves_in_the_background():
    """Of a million blocks, with one HTTP thread: others are answered meanwhile, the reply comes when the blocks have left,
    and a registration of the same instance right behind it starts with nothing."""
    with Indexer("--http-threads", "1") as indexer, Publisher() as engine, Publisher() as other:
        indexer.register(1, engine, block_size=1)
        indexer.register(2, other, block_size=1)
        other.store([5], [5], block_size=1)
        indexer.wait_score([5], 2, 1)
        # The blocks may have left before a busy machine lets this program ask anything else: then once more.
        for number in range(10):
            if leave(indexer, engine, 1000 * (number + 1)) > 1:
                break
        else:
            check(False, "nobody else was ever answered meanwhile")


def leave(indexer, engine, free):
    """Fill worker 1, unregister it and register it again; how many other requests were answered meanwhile. Instances
    from @free on are for those requests."""
    last = fill(indexer, engine, 1_000_000 // (4 if SANITIZED else 1))
    body = json.dumps({"instance_id": 1, "model_name": MODEL}).encode()
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    again = json.dumps({"instance_id": 1, "model_name": MODEL, "endpoint": engine.endpoint, "block_size": 1}).encode()
    others = {w["instance_id"] for w in indexer.workers()} - {1}
    leaving = indexer.raw(head.format("/unregister", len(body)).encode() + body)
    wait_until(lambda: {w["instance_id"] for w in indexer.workers()} == others, what="the registration to go")
    engine.wait_no_subscriber()
    coming = indexer.raw(head.format("/register", len(again)).encode() + again)
    answered = 0
    leaving.setblocking(False)
    while True:  # until the reply is there
        equal(indexer.score([5], 2), 1)
        indexer.register(free + answered, NOWHERE, block_size=1)
        answered += 1
        try:
            reply = leaving.recv(1000)
            break
        except BlockingIOError:
            pass
    check(b" 200 OK" in reply, reply)
    coming.settimeout(patience(30))
    check(b" 201 " in coming.recv(1000))
    equal(indexer.score(last, 1), 0)
    engine.wait_subscriber()
    engine.store([9], [9], block_size=1)
    indexer.wait_score([9], 1, 1)
    equal(indexer.metrics()['kv_indexer_index_holder_blocks{model="m",tenant="default"}'], 2)
    leaving.close()
    coming.close()
    return answered


def test_query():
    with Indexer() as indexer, Publisher() as one, Publisher() as two:
        indexer.register(9, one, block_size=4)
        indexer.register(10, two, block_size=4)
        hashes, tokens = chain(1, 8)
        one.store(hashes[:5], tokens[:20], block_size=4)
        two.store(hashes[:3], tokens[:12], block_size=4, rank=2)
        two.store([77], tokens[:4], block_size=4, rank=0)
        indexer.wait_score(tokens, 9, 20)
        indexer.wait_score(tokens, 10, 12, rank=2)
        indexer.wait_score(tokens, 10, 4, rank=0)
        raw = indexer.post("/query", {"token_ids": tokens, "model_name": MODEL}).body
        reply = json.loads(raw)
        equal(reply["scores"], {"9": {"0": 20}, "10": {"0": 4, "2": 12}})
        equal(reply["frequencies"], [])
        equal(reply["tree_sizes"], {"9": {"0": 5}, "10": {"0": 1, "2": 3}})
        equal(reply["instances"], {"9": {"longest_matched": 20, "gpu": 20, "dp": {"0": 20}, "cpu": 20, "disk": 20},
                                   "10": {"longest_matched": 12, "gpu": 12, "dp": {"0": 4, "2": 12}, "cpu": 12, "disk": 12}})
        check(raw.startswith(b'{"scores":{"9":{"0":20},"10":{"0":4,"2":12}},"frequencies":[],"tree_sizes":'), f"order isn't numerical: {raw}")
        equal(indexer.post("/query", {"model_name": MODEL, "token_ids": tokens}).body, raw, "the same question")
        # partial blocks don't count; nothing is answered for what nobody has
        equal(indexer.query(tokens[:7])["scores"], {"9": {"0": 4}, "10": {"0": 4, "2": 4}})
        empty = {"scores": {}, "frequencies": [], "tree_sizes": {}, "instances": {}, "views": {}}
        for prompt in ([], tokens[:3], tokens[1:], [5] * 100, [(1 << 32) - 1] * 8):
            equal(indexer.query(prompt), empty, f"{prompt[:5]}...")
        equal(indexer.query(tokens, lora_name="adapter"), empty)
        equal(indexer.query(tokens, cache_salt="salt"), empty)
        equal(indexer.query(tokens, lora_name="", cache_salt="", tenant_id="default")["scores"]["9"], {"0": 20})
        equal(indexer.query(tokens, lora_name=None, routing_group="default")["scores"]["9"], {"0": 20})
        equal(indexer.query(tokens, expect=404, tenant_id="x")["error"], "no indexer for model=m tenant=x")
        equal(indexer.query(tokens, expect=404, model_name="x")["error"], "no indexer for model=x tenant=default")
        one.remove(hashes[2:3])
        indexer.wait_score(tokens, 9, 8)
        one.clear()
        indexer.wait_score(tokens, 9, 0)
        indexer.unregister(10)
        indexer.wait_score(tokens, 10, 0, rank=2)


def test_routing_group_beats_tenant_id():
    """Dynamo 1.3 and later: both names may be given; routing_group counts, on every endpoint that takes them."""
    both = {"tenant_id": "ignored", "routing_group": "g"}
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4, **both)
        engine.store([1, 2], range(8), block_size=4)
        indexer.wait_score(range(8), 1, 8, **both)
        indexer.wait_score(range(8), 1, 8, routing_group="g")
        equal(indexer.query(range(8), expect=404, tenant_id="ignored")["error"], "no indexer for model=m tenant=ignored")
        equal(indexer.post("/query_by_hash", {"model_name": MODEL, "block_hashes": [1], **both}).status, 200)
        equal([w["routing_group"] for w in indexer.get("/workers?tenant_id=ignored&routing_group=g").json()], ["g"])
        equal(indexer.get("/workers?tenant_id=g&routing_group=ignored").json(), [])
        packed = msgpack.packb({"model_name": MODEL, "token_ids": list(range(8)), "routing_group": "g", "tenant_id": "ignored"})
        equal(indexer.request("POST", "/query", packed, {"Content-Type": "application/msgpack"}).json()["scores"], {"1": {"0": 8}})
        indexer.unregister(1, expect=404, tenant_id="g", routing_group="ignored")
        indexer.unregister(1, **both)
        equal(indexer.get("/workers").json(), [])


def test_lora_and_tenants_are_apart():
    with Indexer() as indexer, Publisher() as one, Publisher() as two:
        indexer.register(1, one, block_size=4)
        indexer.register(2, two, block_size=4, tenant_id="b")
        hashes, tokens = chain(1, 4)
        one.store(hashes, tokens, block_size=4, lora_name="adapter")
        two.store(hashes, tokens, block_size=4)
        indexer.wait_score(tokens, 1, 16, lora_name="adapter")
        indexer.wait_score(tokens, 2, 16, tenant_id="b")
        equal(indexer.query(tokens)["scores"], {})
        equal(indexer.query(tokens, lora_name="other")["scores"], {})
        equal(indexer.query(tokens, tenant_id="b")["scores"], {"2": {"0": 16}})
        # a cache salt is told with the first block and holds for the chain below it
        for number, salt in ((20, "x"), (30, "y")):
            one.send(one.stored([number, number + 1], tokens[:8], block_size=4, cache_salt=salt))
            one.store([number + 2], tokens[8:12], parent=number + 1, block_size=4)
        one.remove([32])
        indexer.wait_score(tokens, 1, 12, cache_salt="x")
        indexer.wait_score(tokens, 1, 8, cache_salt="y")
        equal(indexer.query(tokens)["scores"], {})
        equal(indexer.query(tokens, cache_salt="x", lora_name="adapter")["scores"], {})


def test_tiers():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(7, engine, block_size=4)
        hashes, tokens = chain(3, 4)
        engine.store(hashes[:2], tokens[:8], block_size=4)
        engine.store(hashes[2:3], tokens[8:12], parent=hashes[1], block_size=4, medium="CPU")
        wait_until(lambda: indexer.query(tokens)["instances"].get("7", {}).get("cpu") == 12, what="blocks in two tiers")
        local = [block["tokens_hash"] for event in indexer.dump()["m:default"]["events"] for block in event["event"]["data"]["stored"]["blocks"]]
        reply = indexer.query_by_hash(local)
        equal(reply["scores"], {"7": {"0": 8}})
        equal(reply["instances"], {"7": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12}})
        engine.store(hashes[3:], tokens[12:], parent=hashes[2], block_size=4, medium="DISK")
        wait_until(lambda: indexer.query(tokens)["instances"].get("7", {}).get("disk") == 16, what="blocks in all tiers")
        reply = indexer.query(tokens)
        equal(reply["instances"]["7"], {"longest_matched": 16, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 16})
        equal(reply["scores"], {"7": {"0": 8}}, "scores count the device")
        engine.remove(hashes[:2])
        wait_until(lambda: indexer.query(tokens)["scores"] == {}, what="removal")


def test_tiers_by_rank():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(7, engine, block_size=4)
        hashes, tokens = chain(3, 2)
        engine.store(hashes, tokens, block_size=4)
        engine.store(hashes, tokens, block_size=4, rank=1, medium="CPU")
        wait_until(lambda: indexer.query(tokens)["instances"].get("7", {}).get("dp") == {"0": 8, "1": 0}, what="both ranks")


def test_images():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        hashes, tokens = chain(1, 3)
        name = "000000000000feed" + "ab" * 24  # a digest: its first 64 bits count
        engine.store(hashes, tokens, block_size=4, extra_keys=[None, [[name, 1]], [[name, -3]]])
        cat = [{"id": name, "offset": 5, "length": 4}]
        indexer.wait_score(tokens, 1, 12, mm_objects=cat)
        equal(indexer.query(tokens)["scores"], {"1": {"0": 4}}, "without the image")
        equal(indexer.query(tokens, mm_objects=[{"id": "dog", "offset": 5, "length": 4}])["scores"], {"1": {"0": 4}}, "another image")
        infos = [None, {"mm_objects": [{"mm_hash": 0xfeed, "offsets": [[1, 4]]}]},
                 {"mm_objects": [{"mm_hash": 0xfeed, "offsets": [[0, 1]]}]}]
        equal(indexer.query(tokens, block_mm_infos=infos)["scores"], {"1": {"0": 12}}, "per block")
        moved = [{"id": name, "offset": 6, "length": 3}]
        equal(indexer.query(tokens, mm_objects=moved)["scores"], {"1": {"0": 4}}, "the image elsewhere in the block")
        for info in infos[1:]:
            del info["mm_objects"][0]["offsets"]
        equal(indexer.query(tokens, block_mm_infos=infos)["scores"], {"1": {"0": 4}}, "the image at an unknown place")
        equal(indexer.dump()["m:default"]["placed_mm_lookahead"], [0])
        with Indexer("--peers", indexer.url) as replica:
            equal(replica.query(tokens, mm_objects=cat)["scores"], {"1": {"0": 12}}, "a replica")
        with Indexer("--ignore-mm-offsets") as loose:
            loose.register(1, engine, block_size=4)
            wait_until(lambda: loose.query(tokens, mm_objects=moved)["scores"] == {"1": {"0": 12}}, what="by name alone")
            equal(loose.query(tokens, block_mm_infos=infos)["scores"], {"1": {"0": 12}}, "by name alone, per block")
        identity = 7
        engine.store([91], tokens[:4], block_size=4, block_mm_infos=[{"mm_objects": [{"mm_hash": identity, "offsets": [[0, 2]]}]}])
        indexer.wait_score(tokens[:4], 1, 4, block_mm_infos=[{"mm_objects": [{"mm_hash": identity}]}])
        for bad in ([{"id": name}], [{"id": name, "offset": 11, "length": 2}], cat + cat, 7):
            equal(indexer.post("/query", {"model_name": MODEL, "token_ids": tokens, "mm_objects": bad}).status, 422, bad)


def test_lookahead():
    """Workers that hash the tokens behind each block, beside one that doesn't: one question to both."""
    with Indexer() as one, Publisher() as plain, Publisher() as eagle, Publisher() as bigram:
        hashes, tokens = chain(1, 4)
        for worker, engine in ((1, plain), (2, eagle), (3, bigram)):
            one.register(worker, engine, block_size=4)
        plain.store(hashes, tokens, block_size=4)
        eagle.store(hashes[:3], tokens[:12], block_size=4, lookahead_token_ids=[[tokens[4]], [tokens[8]], [tokens[12]]])
        bigram.store(hashes[:3], [list(pair) for pair in zip(tokens, tokens[1:13])], block_size=4)
        for worker, score in ((1, 16), (2, 12), (3, 12)):
            one.wait_score(tokens, worker, score)
        other = tokens[:12] + [77] + tokens[13:]
        equal(one.query(other)["scores"], {"1": {"0": 12}, "2": {"0": 8}, "3": {"0": 8}}, "another token behind block 3")
        equal(one.query(tokens[:12])["scores"], {"1": {"0": 12}, "2": {"0": 8}, "3": {"0": 8}}, "no token behind block 3")
        equal(one.dump()["m:default"]["hash_lookahead"], [0, 1])
        with Indexer("--peers", one.url) as two:
            equal(two.query(tokens)["scores"], one.query(tokens)["scores"], "a replica")
        body = {"instance_id": 9, "endpoint": plain.endpoint, "model_name": MODEL, "block_size": 4, "dp_rank": 0}
        equal(one.post("/register", dict(body, hash_lookahead=32)).status, 400)
        equal(one.post("/register", dict(body, hash_lookahead=3)).status, 201)
        equal(one.dump()["m:default"]["hash_lookahead"], [0, 1, 3])


def window_event(publisher, group, window, hashes, tokens=(), parent=None):
    return publisher.stored(hashes, tokens, parent, 4, group_idx=group, kv_cache_spec_kind="sliding_window",
                            kv_cache_spec_sliding_window=window)


def test_windows():
    """A hybrid model, and one of windows alone: matches need the windows' last blocks. Replicas know them, too."""
    with Indexer() as one, Publisher() as hybrid, Publisher() as alone:
        hashes, tokens = chain(1, 6)
        for worker, engine in ((1, hybrid), (2, alone)):
            one.register(worker, engine, block_size=4)
        full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        hybrid.send(hybrid.stored(hashes, tokens, None, 4, **full), window_event(hybrid, 1, 9, hashes, tokens))
        alone.send(window_event(alone, 0, 5, hashes, tokens))
        for worker in 1, 2:
            one.wait_score(tokens, worker, 24)
        hybrid.send(hybrid.removed(hashes[4:5], group_idx=1))  # two blocks are needed: 4 of 6 have them
        one.wait_score(tokens, 1, 16)
        equal(one.score(tokens[:20], 1), 16)
        hybrid.send(hybrid.removed(hashes[3:4], group_idx=1), window_event(hybrid, 1, 9, hashes[:1]))
        one.wait_score(tokens, 1, 12)
        alone.send(alone.removed(hashes[:3], group_idx=0), alone.removed(hashes[5:], group_idx=0))
        one.wait_score(tokens, 2, 20)
        with Indexer("--peers", one.url) as two:
            for size in range(4, 25, 4):
                equal(two.query(tokens[:size])["scores"], one.query(tokens[:size])["scores"], f"a replica, {size} tokens")
            told, copied = (sorted(str(extra) for stream in indexer.streams()["m:default"]["streams"] for extra in stream["extras"])
                            for indexer in (one, two))
            equal(copied, told, "windows in a replica's dump")
        hybrid.send(hybrid.removed(hashes[:1], group_idx=1))  # one of two copies
        hybrid.send(hybrid.removed(hashes[2:3], group_idx=1))
        one.wait_score(tokens, 1, 8)
        hybrid.send(hybrid.removed(hashes[:1], group_idx=1), hybrid.removed(hashes[1:2], group_idx=1))
        one.wait_score(tokens, 1, 0)
        equal(one.query(tokens)["scores"], {"2": {"0": 20}})


def test_eagle_drop():
    """An engine that gives up the last block that it finds, as its registration says; replicas hear of it."""
    with Indexer() as one, Publisher() as engine, Publisher() as hybrid:
        hashes, tokens = chain(1, 6)
        one.register(1, engine, block_size=4, eagle_drop=True)
        one.register(2, hybrid, block_size=4, eagle_drop=True)
        engine.store(hashes, tokens, block_size=4)
        one.wait_score(tokens, 1, 20)
        equal([one.score(tokens[:size], 1) for size in (4, 8, 12)], [0, 4, 8])
        hybrid.send(hybrid.stored(hashes, tokens, None, 4, group_idx=0, kv_cache_spec_kind="full_attention"),
                    window_event(hybrid, 1, 9, hashes[:5]))
        one.wait_score(tokens, 2, 16)
        equal(one.score(tokens[:20], 2), 16)
        equal({entry["eagle_drop"] for entry in one.get("/registrations").json()["registrations"]}, {True})
        with Indexer("--peers", one.url) as two:
            equal(two.query(tokens)["scores"], one.query(tokens)["scores"], "a replica")
        equal(one.post("/register", {"instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4,
                                     "eagle_drop": 1}).status, 422)


def test_eagle_groups():
    """Only some cache groups give a block up, as the registration says; replicas hear of it, and of its end."""
    hashes, tokens = chain(1, 6)
    with Indexer() as one, Publisher() as engine:
        one.register(1, engine, block_size=4, eagle_drop=True, eagle_groups="1,3")
        equal([entry["eagle_groups"] for entry in one.get("/registrations").json()["registrations"]], ["1,3"])
        engine.send(engine.stored(hashes, tokens, None, 4, group_idx=0, kv_cache_spec_kind="full_attention"),
                    window_event(engine, 2, 9, hashes))
        one.wait_score(tokens, 1, 24)
        with Indexer("--peers", one.url) as two:
            equal(two.query(tokens)["scores"], one.query(tokens)["scores"], "a replica")
            equal([entry["eagle_groups"] for entry in two.get("/registrations").json()["registrations"]], ["1,3"])
        for wrong in ("", ",", "0,", "64", "x", "0 1"):
            equal(one.post("/register", {"instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4,
                                         "eagle_drop": True, "eagle_groups": wrong}).status, 400, wrong)
        equal(one.post("/register", {"instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4,
                                     "eagle_groups": "0"}).status, 400, "without eagle_drop")
        equal(one.post("/register", {"instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4,
                                     "eagle_drop": True, "eagle_groups": 0}).status, 422)


def listener(indexer, instance):
    return next(worker["listeners"]["0"] for worker in indexer.workers() if worker["instance_id"] == instance)


def test_report_mode():
    """Where requests ask for reports, an event about held blocks may be one, or a copy; else it is a copy."""
    with Indexer() as one, Publisher() as full, Publisher() as incremental:
        hashes, tokens = chain(1, 3)
        first, rest = hashes[:1], hashes[1:]
        for instance, engine, mode in ((1, full, "full"), (2, incremental, "incremental")):
            one.register(instance, engine, block_size=4, kv_cache_report_mode=mode)
            engine.store(hashes, tokens, block_size=4)
            one.wait_score(tokens, instance, 12)
            engine.send(engine.stored(hashes, tokens, None, 4))  # a report, or copies
            engine.send(engine.removed(hashes[::-1]))
        one.wait_score(tokens, 1, 0)
        wait_until(lambda: listener(one, 2)["last_seq"] == 2, what="the removals")
        equal(one.score(tokens, 2), 12)
        equal([listener(one, instance)["partial"] for instance in (1, 2)], [True, False])
        full.send(full.removed(hashes[::-1]))  # it was a copy
        wait_until(lambda: not listener(one, 1)["partial"], what="a whole view")
        equal(one.score(tokens, 1), 0)
        # The answer is short, and the view partial until the block is stored below.
        full.store(hashes, tokens, block_size=4)
        one.wait_score(tokens, 1, 12)
        full.send(full.stored(first, tokens[:4], None, 4))
        full.send(full.removed(hashes[::-1]))
        wait_until(lambda: listener(one, 1)["partial"], what="a partial view")
        equal(one.score(tokens, 1), 0)
        full.send(full.stored(rest, tokens[4:], first[0], 4))
        one.wait_score(tokens, 1, 12)
        equal(listener(one, 1)["partial"], False)
        equal({entry["instance_id"]: entry["kv_cache_report_mode"]
               for entry in one.get("/registrations").json()["registrations"]}, {1: "full", 2: "incremental"})
        with Indexer("--peers", one.url) as two:
            equal({entry["instance_id"]: entry["kv_cache_report_mode"]
                   for entry in two.get("/registrations").json()["registrations"]}, {1: "full", 2: "incremental"})
        for wrong in ("often", "", 1):
            check(one.post("/register", {"instance_id": 9, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4,
                                         "kv_cache_report_mode": wrong}).status in (400, 422), wrong)


def test_silent_windows():
    """The view of an engine that evicts silently is always partial, in replicas and after a clear, too."""
    with Indexer() as one, Publisher() as engine:
        hashes, tokens = chain(1, 3)
        one.register(1, engine, block_size=4, silent_windows=True)
        engine.store(hashes, tokens, block_size=4)
        one.wait_score(tokens, 1, 12)
        equal(one.query(tokens, explain=True)["explain"]["partial_ranks"], 1)
        with Indexer("--peers", one.url) as two:
            equal(two.query(tokens, explain=True)["explain"]["partial_ranks"], 1)
        engine.send({"type": "AllBlocksCleared"})
        one.wait_score(tokens, 1, 0)
        equal(listener(one, 1)["partial"], True)


def test_query_by_sequence_hashes():
    """The hashes that events carry: of the whole prompt or from any block on."""
    with Indexer() as indexer, Publisher() as engine, Publisher() as other:
        indexer.register(1, engine, block_size=4)
        indexer.register(2, other, block_size=4)
        hashes, tokens = chain(1, 40)
        engine.store(hashes, tokens, block_size=4)
        other.store(hashes[:10], tokens[:40], block_size=4)
        indexer.wait_score(tokens, 1, 160)
        indexer.wait_score(tokens, 2, 40)
        wanted = indexer.query(tokens)

        def ask(hashes, expect=200, **fields):
            reply = indexer.post("/query_by_hash", {"sequence_hashes": hashes, "model_name": MODEL, **fields})
            equal(reply.status, expect, reply.body)
            return reply.json()

        equal(ask(hashes), wanted, "the whole prompt")
        equal(ask(hashes + [1, 2, 3]), wanted, "further blocks that nobody has")
        equal(ask(hashes[7:]), wanted, "the end of a prompt")
        equal(ask(hashes[3:5])["scores"], {"1": {"0": 20}, "2": {"0": 20}}, "two blocks within")
        equal(ask([value - U64 if value >= 1 << 63 else value for value in hashes]), wanted, "signed")
        body = {"model_name": MODEL, "sequence_hashes": struct.pack(f"<{len(hashes)}Q", *hashes)}
        equal(indexer.post("/query_by_hash", msgpack.packb(body), headers=MSGPACK).json(), wanted, "msgpack, packed")
        equal(ask([])["scores"], {}, "none")
        equal(ask([1, 2])["scores"], {}, "unknown")
        equal(ask(hashes, explain=True)["explain"]["reason"], "matched")
        equal(ask([1, 2], explain=True)["explain"]["reason"], "unknown_first_block")
        fails(indexer, "/query_by_hash", {"model_name": MODEL, "block_hashes": [1], "sequence_hashes": [1]}, 422, "given both")
        fails(indexer, "/query_by_hash", {"model_name": MODEL, "sequence_hashes": [1.5]}, 422, "'sequence_hashes'")
        fails(indexer, "/query_by_hash", {"sequence_hashes": [1]}, 422, "missing field 'model_name'")


def test_query_by_hash():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        hashes, tokens = chain(1, 40)
        engine.store(hashes, tokens, block_size=4)
        indexer.wait_score(tokens, 1, 160)
        blocks = indexer.dump()["m:default"]["events"][0]["event"]["data"]["stored"]["blocks"]
        local = [block["tokens_hash"] for block in blocks]
        check(any(value >= 1 << 63 for value in local), "no hash is large enough for this test")
        wanted = indexer.query(tokens)
        equal(indexer.query_by_hash(local), wanted, "unsigned")
        signed = [value - U64 if value >= 1 << 63 else value for value in local]
        equal(indexer.query_by_hash(signed), wanted, "signed")
        body = {"model_name": MODEL, "block_hashes": local}
        equal(indexer.post("/query_by_hash", msgpack.packb(body), headers=MSGPACK).json(), wanted, "msgpack")
        body["block_hashes"] = struct.pack(f"<{len(local)}Q", *local)
        equal(indexer.post("/query_by_hash", msgpack.packb(body), headers=MSGPACK).json(), wanted, "msgpack, packed")
        equal(indexer.query_by_hash([])["scores"], {})
        equal(indexer.query_by_hash(local[:3] + [1] + local[4:])["scores"], {"1": {"0": 12}})
        for salt in ("x", ""):
            fails(indexer, "/query_by_hash", {"model_name": MODEL, "block_hashes": [1], "cache_salt": salt}, 400, "cache_salt is not accepted")
        indexer.query_by_hash([1], cache_salt=None)
        fails(indexer, "/query_by_hash", {"model_name": "x", "block_hashes": [1]}, 404, "no indexer for model=x tenant=default")
        for value in (U64, -(1 << 63) - 1, 1.5, "1", None, [1], True):
            fails(indexer, "/query_by_hash", {"model_name": MODEL, "block_hashes": [1, value]}, 422, "'block_hashes'")
        fails(indexer, "/query_by_hash", {"model_name": MODEL}, 422, "missing field 'block_hashes' or 'sequence_hashes'")


def test_a_million_tokens():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=16)
        n = 1 << 20
        tokens = [i * 7919 % 150000 for i in range(n)]
        for start in range(0, n, 1 << 16):
            first = start // 16
            engine.store(range(first + 1, first + (1 << 12) + 1), tokens[start:start + (1 << 16)], parent=first or None)
        indexer.wait_score(tokens, 1, n, timeout=30)
        body = json.dumps({"token_ids": tokens, "model_name": MODEL}, separators=(",", ":")).encode()
        check(len(body) < 8 << 20)
        started = time.monotonic()
        equal(indexer.post("/query", body, headers=JSON).json()["scores"], {"1": {"0": n}})
        check(time.monotonic() - started < patience(10), "a million tokens take long")
        packed = msgpack.packb({"token_ids": struct.pack(f"<{n}I", *tokens), "model_name": MODEL})
        equal(indexer.post("/query", packed, headers=MSGPACK).json()["scores"], {"1": {"0": n}})
        array = msgpack.packb({"token_ids": tokens, "model_name": MODEL})
        equal(indexer.post("/query", array, headers={"Content-Type": "application/x-msgpack"}).json()["scores"], {"1": {"0": n}})
        equal(indexer.query(list(range(n)))["scores"], {})


def test_bad_bodies():
    with Indexer() as indexer:
        indexer.register(1, NOWHERE, block_size=4)
        start = '{"model_name":"m","token_ids":'
        for text, status, *words in (
                ("", 400, "byte 0"), ("{", 400, "byte 1"), ("x", 400), ("{}", 422, "missing field"), ("[]", 422), ("[", 400, "byte 1"), ("[[1],", 400), ("null", 422), ("1", 422), ('"x"', 422),
                (start + "[1,2", 400), (start + "[1,,2]}", 400), (start + "[1,]}", 400), (start + "[1 2]}", 400), (start + "[1]", 400),
                (start + "[1]}}", 400), (start + "[1]} {}", 400), (start + "[1]}x", 400), (start + "[01]}", 400), (start + "[+1]}", 400),
                (start + "[0x1]}", 400), (start + "[NaN]}", 400), (start + "[Infinity]}", 400), (start + "[1.5]}", 422, "token_ids"),
                (start + "[1e2]}", 422, "token_ids"), (start + "[-1]}", 422, "token_ids"), (start + "[4294967296]}", 422, "token_ids"),
                (start + "[" + "9" * 1000 + "]}", 422, "token_ids"), (start + "[1e9999]}", 422, "token_ids"), (start + '["1"]}', 422, "token_ids"),
                (start + "[true]}", 422, "token_ids"), (start + "[[1]]}", 422, "token_ids"), (start + "[{}]}", 422, "token_ids"), (start + "{}}", 422, "token_ids"),
                (start + '"1"}', 422, "token_ids"), (start + "null}", 422, "token_ids"), (start + DEEP, 422), ('{"x":' + DEEP, 400), (DEEP, 422),
                ('{"x":' * 100000, 400), ('{"model_name":"m","model_name":"m","token_ids":[]}', 422, "model_name"),
                ('nul', 400, "byte 3"), ('fals', 400, "byte 4"), ('{"model_name":5,"token_ids":[]}', 422, "model_name"), ('{"model_name":"m","token_ids":[],"tenant_id":5}', 422, "tenant_id"),
                ('{"model_name":"m","token_ids":[],"explain":"yes"}', 422, "explain"), ('{"model_name":"m","token_ids":[],"lora_name":[]}', 422, "lora_name"),
                ('{"model_name":"\\ud800","token_ids":[]}', 400), ('{"model_name":"\\x","token_ids":[]}', 400), ('{"model_name":"a\nb","token_ids":[]}', 400),
                ("\ufeff{}", 400), ('{"model_name":"' + "x" * 100000 + '","token_ids":[]}', 422, "model_name"), ("\0" * 1000, 400), ("{'a':1}", 400)):
            fails(indexer, "/query", text, status, *words)
        fails(indexer, "/query", b'{"model_name":"\xff\xfe","token_ids":[]}', 400)
        for data, status in ((b"", 400), (b"\x80", 422), (b"\x90", 422), (b"\xc0", 422), (b"\xc1", 400), (b"\x82\xaamodel_name\xa1m\xa9token_ids", 400),
                             (b"\x82\xaamodel_name\xa1m\xa9token_ids\xdd\xff\xff\xff\xff", 400), (b"\x82\xaamodel_name\xa1m\xa9token_ids\xc6\xff\xff\xff\xff", 400),
                             (b"\x82\xaamodel_name\xa1m\xa9token_ids\xc4\x03abc", 422), (b"\x82\xaamodel_name\xa1m\xa9token_ids\x91\xff", 422),
                             (b"\xdf\xff\xff\xff\xff", 400), (b"\x81\xa1x" + b"\x91" * 100000, 400), (b"\x81\xa1x" + b"\xdd\xff\xff\xff\xff" * 1000, 400),
                             (msgpack.packb({"model_name": MODEL, "token_ids": [1]}) + b"\0", 400), (msgpack.packb({"model_name": b"m", "token_ids": [1]}), 422),
                             (msgpack.packb({"model_name": MODEL, "token_ids": [1.0]}), 422), (msgpack.packb({"model_name": MODEL, "token_ids": [1 << 32]}), 422)):
            fails(indexer, "/query", data, status, headers=MSGPACK)
        for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "json", "application/jsonp"):
            headers = {} if kind is None else {"Content-Type": kind}
            for path in ("/query", "/query_by_hash", "/register", "/unregister", "/register_peer", "/deregister_peer"):
                fails(indexer, path, b"{}", 415, "Content-Type", headers=headers)
        for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"):
            equal(indexer.post("/query", b'{"model_name":"m","token_ids":[]}', headers={"Content-Type": kind}).status, 200, kind)
        equal(indexer.get("/health").status, 200)


def test_msgpack_everywhere():
    with Indexer() as indexer:
        body = {"instance_id": 1, "endpoint": NOWHERE, "model_name": MODEL, "block_size": 4, "dp_rank": 2}
        equal(indexer.post("/register", msgpack.packb(body), headers=MSGPACK).status, 201)
        equal(indexer.workers()[0]["endpoints"], {"2": NOWHERE})
        equal(indexer.post("/query", msgpack.packb({"model_name": MODEL, "token_ids": [1, 300, 70000]}), headers=MSGPACK).status, 200)
        equal(indexer.post("/unregister", msgpack.packb({"instance_id": 1, "model_name": MODEL}), headers=MSGPACK).status, 200)


def test_options_of_workers_that_nobody_named():
    def warned(*options):
        with Indexer(*options) as indexer:
            return [line.partition("option=")[2].strip() for line in indexer.log if "no effect without --workers" in line]

    equal(warned(), [])
    equal(warned("--block-size", 16, "--silent-windows", "--tenant-id", "t"), ["--block-size", "--tenant-id", "--silent-windows"])
    equal(warned("--block-size", 16, "--workers", ""), ["--block-size"])
    equal(warned("--block-size", 16, "--workers", "1=" + NOWHERE), [])


def test_peers():
    with Indexer() as indexer:
        equal(indexer.get("/peers").json(), [])
        for url in ("http://peer:8091", "http://peer:8091", "HTTPS://[::1]/kv"):
            reply = indexer.post("/register_peer", {"url": url})
            equal((reply.status, reply.json()), (201, {"status": "ok"}))
        for url in ("", "hello world", "ftp://x:1", "peer:8091", "http://", "http://:8091", "http://a b", "http://a:port"):
            fails(indexer, "/register_peer", {"url": url}, 400, "url: expected http://HOST:PORT or https://HOST:PORT")
        equal(indexer.get("/peers").json(), ["http://peer:8091", "HTTPS://[::1]/kv"])
        reply = indexer.post("/deregister_peer", {"url": "http://peer:8091"})
        equal((reply.status, reply.json()), (200, {"status": "ok"}))
        fails(indexer, "/deregister_peer", {"url": "http://peer:8091"}, 404, "peer not found")
        fails(indexer, "/register_peer", {}, 422, "url")
        fails(indexer, "/register_peer", {"url": 5}, 422, "url")
        equal(indexer.get("/peers").json(), ["HTTPS://[::1]/kv"])


def test_dump():
    with Indexer() as indexer, Publisher() as one, Publisher() as two:
        equal(indexer.dump(), {})
        indexer.register(1, one, block_size=4, model_name="a:b", tenant_id="c:d")
        indexer.register(2, two, block_size=8)
        hashes, tokens = chain(1, 700)
        one.store(hashes, tokens, block_size=4, rank=3)
        one.store([5_000_001], [9, 9, 9, 9], parent=hashes[1], block_size=4, rank=3, medium="CPU")
        indexer.wait_score(tokens, 1, 2800, rank=3, model_name="a:b", tenant_id="c:d")
        two.store([U64 - 1, -2], range(16), block_size=8)
        indexer.wait_score(range(16), 2, 16)

        def whole():
            return sum(len(e["event"]["data"]["stored"]["blocks"]) for e in indexer.dump()["a:b:c:d"]["events"]) == 701

        wait_until(whole, what="all blocks in the dump")
        reply = indexer.get("/dump")
        equal(reply.headers["Transfer-Encoding"], "chunked")
        dump = reply.json()
        equal(sorted(dump), ["a:b:c:d", "m:default"])
        model = dump["a:b:c:d"]
        equal((model["block_size"], model["model_name"], model["tenant_id"]), (4, "a:b", "c:d"))
        known, n = {None}, 0
        for number, event in enumerate(model["events"]):
            equal((event["worker_id"], event["event"]["dp_rank"], event["event"]["event_id"]), (1, 3, number))
            stored = event["event"]["data"]["stored"]
            check(stored["parent_hash"] in known, "a parent comes after its children")
            check(len(stored["blocks"]) <= 512)
            for block in stored["blocks"]:
                known.add(block["block_hash"])
                check(block["mm_extra_info"] is None)
                n += 1
        equal(n, 701)
        equal([event["storage_tier"] for event in model["events"] if "storage_tier" in event], ["host_pinned"])
        check("streams" not in model, "the original's readers get events alone")
        told = indexer.streams()["a:b:c:d"]
        check("events" not in told, told.keys())
        (stream,) = told["streams"]
        equal((stream["worker_id"], stream["dp_rank"], stream["ranks"], stream["seq"]), (1, 0, [0, 3], 1))
        equal([event["event"]["data"] for event in stream["events"]], [event["event"]["data"] for event in model["events"]])
        stored = dump["m:default"]["events"][0]["event"]["data"]["stored"]
        equal([block["block_hash"] for block in stored["blocks"]], [U64 - 1, U64 - 2])


def fill(indexer, engine, blocks):
    """Many blocks in chains of 1000; returns the tokens of the last chain."""
    tokens = []
    for first in range(0, blocks, 1000):
        tokens = [first + i for i in range(1000)]
        engine.store(range(first + 1, first + 1001), tokens, block_size=1)
    indexer.wait_score(tokens, 1, 1000, timeout=60)
    return tokens


def test_slow_and_vanishing_dump_readers():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=1)
        last = fill(indexer, engine, 300_000)
        before = indexer.rss()
        socks, asked = [], time.monotonic()
        for _ in range(4):  # as many as are served at a time; they read nothing
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", indexer.port))
            sock.sendall(b"GET /dump HTTP/1.1\r\nHost: localhost\r\n\r\n")
            socks.append(sock)
        wait_until(lambda: indexer.metrics()["kv_indexer_http_streams"] == 4, what="four dumps")
        reply = indexer.get("/dump")  # they may lie behind for a second; then the fifth takes the place of one of them
        if time.monotonic() - asked < 0.9:
            equal(reply.status, 503)
        if reply.status == 503:
            check("Retry-After" in reply.headers and "error" in reply.json())
        started = time.monotonic()  # neither queries nor writers wait for them
        for number in range(200):
            equal(indexer.score(last, 1), 1000)
            engine.store([10_000_000 + number], [7_000_000 + number], block_size=1)
        indexer.wait_score([7_000_199], 1, 1)
        check(time.monotonic() - started < patience(10), "slow dump readers stall others")
        check(indexer.rss() - before < (24 << 20) * SLOW, f"waiting dumps take {(indexer.rss() - before) >> 20} MiB")
        for sock in socks[:2]:
            sock.close()  # in the middle
        wait_until(lambda: indexer.metrics()["kv_indexer_http_streams"] <= 2, what="the dumps of vanished readers to end", timeout=20)
        blocks = sum(len(event["event"]["data"]["stored"]["blocks"]) for event in indexer.dump()["m:default"]["events"])
        equal(blocks, 300_200)
        indexer.stop()  # dumps in progress don't keep it
        for sock in socks[2:]:
            sock.close()


def test_slow_dump_readers_make_way():
    """Four readers of 2 kB/s: the next one is served at once, in the place of the slowest."""
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=1)
        fill(indexer, engine, 300_000)
        socks, stop = [], threading.Event()

        def drip():
            while not stop.wait(0.1):
                for sock in socks:
                    try:
                        sock.recv(200)
                    except OSError:
                        pass

        for _ in range(4):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", indexer.port))
            sock.settimeout(0.05)
            sock.sendall(b"GET /dump HTTP/1.1\r\nHost: localhost\r\n\r\n")
            socks.append(sock)
        reader = threading.Thread(target=drip)
        reader.start()
        try:
            wait_until(lambda: indexer.metrics()["kv_indexer_http_streams"] == 4, what="four dumps")
            wait_until(lambda: indexer.get("/dump").status == 200, 20, "a reader that lies behind")
            blocks = sum(len(event["event"]["data"]["stored"]["blocks"]) for event in indexer.dump()["m:default"]["events"])
            equal(blocks, 300_000)
            check(indexer.metrics()["kv_indexer_http_evicted_total"] >= 1)
        finally:
            stop.set()
            reader.join()
        for sock in socks:
            sock.close()


def test_control_of_listeners():
    with Indexer() as indexer:
        indexer.register(1, NOWHERE)
        for path in ("/test/pause_listener", "/test/resume_listener"):
            equal(indexer.post(path, {"instance_id": 1}).status, 404)
    for name, value in (("KV_INDEXER_TEST_ENDPOINTS", "1"), ("DYN_KV_INDEXER_TEST_ENDPOINTS", "true")):
        with Indexer(env={name: value}) as indexer, Publisher() as engine:
            indexer.register(1, engine, block_size=4)
            reply = indexer.post("/test/pause_listener", {"instance_id": 1, "dp_rank": 0})
            equal((reply.status, reply.json()), (200, {"status": "ok"}))
            wait_until(lambda: indexer.workers()[0]["status"] == "paused", what="status paused")
            fails(indexer, "/test/pause_listener", {"instance_id": 1}, 409)
            equal(indexer.post("/test/resume_listener", {"instance_id": 1}).status, 200)
            fails(indexer, "/test/resume_listener", {"instance_id": 1}, 409)
            fails(indexer, "/test/pause_listener", {"instance_id": 2}, 404, "instance 2 not found")
            fails(indexer, "/test/resume_listener", {"instance_id": 1, "dp_rank": 9}, 404)
            fails(indexer, "/test/pause_listener", {}, 422, "instance_id")


def test_explain():
    def reason(tokens, **fields):
        explain = indexer.query(tokens, explain=True, **fields)["explain"]
        check(explain["text"])
        return explain["reason"]

    with Indexer() as indexer, Publisher() as engine:
        unknown = indexer.query([1], expect=404, explain=True)
        equal((unknown["error"], unknown["explain"]["reason"]), ("no indexer for model=m tenant=default", "no_workers"))
        indexer.register(1, engine, block_size=4)
        equal(indexer.query([1], expect=404, explain=True, model_name="x")["explain"]["reason"], "unknown_model")
        equal(indexer.query([1], expect=404, explain=True, tenant_id="x")["explain"]["reason"], "unknown_tenant")
        hashes, tokens = chain(1, 3)
        equal(reason(tokens), "no_events")
        engine.store([1], range(16), block_size=16)  # another block size than registered
        wait_until(lambda: reason(tokens) == "block_size", what="a block size mismatch to be told")
        engine.clear()  # the view is whole again
        engine.store(hashes, tokens, block_size=4)
        wait_until(lambda: reason(tokens) == "matched", what="a match")
        equal(reason(tokens[:3]), "no_full_block")
        equal(reason([]), "no_full_block")
        equal(reason(tokens[1:]), "unknown_first_block")
        equal(reason(tokens, lora_name="adapter"), "other_namespace")
        equal(reason(tokens, cache_salt="salt"), "other_namespace")
        equal(reason(tokens, lora_name="adapter", cache_salt="salt"), "other_namespace")
        # The first block is looked up with its image, or a part of one.
        image = {"mm_objects": [{"id": "cat", "offset": 1, "length": 9}]}
        pictured = chain(7, 3)
        engine.store(*pictured, block_size=4, extra_keys=[[["cat", 1]], [["cat", -3]], [["cat", -7]]])
        wait_until(lambda: reason(pictured[1], **image) == "matched", what="a match of an image")
        equal(reason(pictured[1], lora_name="adapter"), "unknown_first_block")
        equal(reason(pictured[1], lora_name="adapter", **image), "other_namespace")
        equal(reason(pictured[1], cache_salt="salt", **image), "other_namespace")
        equal(reason(tokens, lora_name="adapter", **image), "unknown_first_block")
        equal(indexer.query_by_hash([1], explain=True)["explain"]["reason"], "unknown_first_block")
        explain = indexer.query(tokens + [1], explain=True)["explain"]
        equal((explain["tokens"], explain["full_blocks"], explain["block_size"], explain["holders_matched"]), (13, 3, 4, 1))
        equal(sum(explain["skipped"].values()), 1)
        check("explain" not in indexer.query(tokens))
        check("explain" not in indexer.query(tokens, explain=False))
        engine.clear()
        wait_until(lambda: reason(tokens) in ("empty_index", "block_size"), what="an empty index to be told")


def test_metrics():
    with Indexer() as indexer, Publisher() as engine:
        reply = indexer.get("/metrics")
        equal(reply.headers["Content-Type"], "text/plain; version=0.0.4")
        first = reply.body.decode()
        check("/metrics" not in first and "endpoint=" not in first, "label sets appear before their first use")
        indexer.register(1, engine, block_size=4)
        indexer.register(1, NOWHERE, block_size=4, dp_rank=1)
        indexer.register(2, NOWHERE, block_size=4, tenant_id='a"b\\c\n')
        hashes, tokens = chain(1, 5)
        engine.store(hashes, tokens, block_size=4)
        engine.store([999], [1], parent=12345, block_size=4)
        indexer.wait_score(tokens, 1, 20)
        before = indexer.metrics()
        indexer.query(tokens)
        indexer.query([1, 2, 3, 4])
        indexer.query([1], expect=404, model_name="x")
        indexer.get("/nope")
        indexer.request("BREW", "/query")
        values = indexer.metrics()
        text = indexer.get("/metrics").body.decode()

        def rise(key):
            return values.get(key, 0) - before.get(key, 0)

        equal(values["dynamo_kvindexer_models"], 2)
        equal(values["dynamo_kvindexer_workers"], 2)
        equal(rise('dynamo_kvindexer_requests_total{endpoint="/query",method="POST"}'), 3)
        equal(rise('dynamo_kvindexer_requests_total{endpoint="unknown",method="GET"}'), 1)
        equal(rise('dynamo_kvindexer_requests_total{endpoint="/query",method="OTHER"}'), 1)
        equal(rise('dynamo_kvindexer_errors_total{endpoint="/query",status_class="4xx"}'), 2)
        equal(rise('dynamo_kvindexer_errors_total{endpoint="unknown",status_class="4xx"}'), 1)
        equal(rise('dynamo_kvindexer_request_duration_seconds_count{endpoint="/query"}'), 4)
        for bound in [f"{0.0001 * 2 ** i:.4f}".rstrip("0") for i in range(20)] + ["+Inf"]:
            check(f'dynamo_kvindexer_request_duration_seconds_bucket{{endpoint="/query",le="{bound}"}}' in values, f"no bucket {bound}")
        for name, kind, words in (("request_duration_seconds", "histogram", "HTTP request latency"), ("requests_total", "counter", "Total HTTP requests"),
                                  ("errors_total", "counter", "HTTP error responses (4xx/5xx)"), ("models", "gauge", "Number of active model+tenant indexers"),
                                  ("workers", "gauge", "Number of registered worker instances")):
            check(f"# TYPE dynamo_kvindexer_{name} {kind}\n" in text and f"# HELP dynamo_kvindexer_{name} {words}\n" in text, f"dynamo_kvindexer_{name}")
        check('endpoint="/metrics"' not in text)
        equal(rise('kv_indexer_queries_total{result="hit"}'), 1)
        equal(rise('kv_indexer_queries_total{result="miss"}'), 1)
        equal(rise("kv_indexer_query_blocks_total"), 6)
        equal(rise("kv_indexer_query_matched_blocks_total"), 5)
        stream = '{model="m",tenant="default",instance="1",dp_rank="0"}'
        equal(values["kv_indexer_stream_batches_total" + stream], 2)
        equal(values["kv_indexer_stream_last_seq" + stream], 1)
        equal(values["kv_indexer_stream_gaps_total" + stream], 0)
        check(0 <= values["kv_indexer_stream_last_event_age_seconds" + stream] < 60)
        problems = sum(value for key, value in values.items() if "instance=\"1\"" in key and ("skipped" in key or "orphans" in key))
        check(problems >= 1, "an event without its parent is counted nowhere")
        equal(values['kv_indexer_index_tier_blocks{model="m",tenant="default",tier="device"}'], 5)
        equal(values['kv_indexer_index_holder_blocks{model="m",tenant="default"}'], 5)
        check(values['kv_indexer_index_bytes{model="m",tenant="default"}'] > 0)
        check('tenant="a\\"b\\\\c\\n"' in text, "a label isn't escaped")
        check(values["process_resident_memory_bytes"] > 1 << 20)
        for line in text.splitlines():
            check(line.startswith("# ") or len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0, line)
        indexer.unregister(1)
        indexer.unregister(2)
        equal(indexer.metrics()["dynamo_kvindexer_workers"], 0)
        equal(indexer.metrics()["dynamo_kvindexer_models"], 0)


def test_a_flood_of_registrations():
    with Indexer("--max-registrations", "500") as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        hashes, tokens = chain(1, 5)
        statuses = []

        def flood(start):
            connection = indexer.connect()
            for i in range(200):
                body = {"instance_id": start + i, "endpoint": "tcp://127.0.0.1:1", "model_name": f"m{i % 7}", "block_size": 4}
                statuses.append(indexer.post("/register", body, connection=connection).status)
            connection.close()

        threads = [threading.Thread(target=flood, args=(start,)) for start in (1000, 2000, 3000, 4000)]
        for thread in threads:
            thread.start()
        engine.store(hashes, tokens, block_size=4)
        indexer.wait_score(tokens, 1, 20)
        for thread in threads:
            thread.join()
        equal(statuses.count(201), 499)
        equal(statuses.count(503), 301)
        fails(indexer, "/register", {"instance_id": 9, "endpoint": NOWHERE, "model_name": "m", "block_size": 4}, 503)
        equal(len(indexer.workers()), 500)
        equal(indexer.score(tokens, 1), 20)
        for worker in indexer.workers():
            indexer.unregister(worker["instance_id"], model_name=worker["model_name"])
        equal(indexer.workers(), [])
        indexer.register(9, NOWHERE)


def test_workers_of_the_command_line():
    with Publisher() as one, Publisher() as two:
        workers = f"1={one.endpoint}, 2:1={two.endpoint}+{two.replay_endpoint}"
        with Indexer("--workers", workers, "--block-size", "4", "--model-name", "llama", "--tenant-id", "t") as indexer:
            one.wait_subscriber()
            two.wait_subscriber()
            listed = indexer.workers()
            equal([(w["instance_id"], w["model_name"], w["tenant_id"], w["block_size"]) for w in listed], [(1, "llama", "t", 4), (2, "llama", "t", 4)])
            equal([w["endpoints"] for w in listed], [{"0": one.endpoint}, {"1": two.endpoint}])
            equal(listed[1]["listeners"]["1"]["replay_endpoint"], two.replay_endpoint)
            hashes, tokens = chain(1, 5)
            two.store(hashes, tokens, block_size=4)
            indexer.wait_score(tokens, 2, 20, rank=1, model_name="llama", tenant_id="t")
            check("hash_lookahead" not in indexer.dump()["llama:t"], "no other form of hashes")
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(f"workers = 1={one.endpoint}\nblock-size = 4\nhash-lookahead = 1\n")
            file.flush()
            with Indexer("--config", file.name) as indexer:
                equal(indexer.dump()["default:default"]["hash_lookahead"], [1])


def test_access_log():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "access.log"
        with Indexer("--access-log", str(path), "--trace-id-header", "X-Request-Id") as indexer:
            def lines(n, of=path):
                wait_until(lambda: of.exists() and len(of.read_text().splitlines()) >= n, what=f"{n} lines in {of}")
                return [json.loads(line) for line in of.read_text().splitlines()]

            indexer.register(1, NOWHERE, block_size=4, model_name='a "model"')
            lines(1)
            path.write_text("")  # appending goes on at the end
            indexer.post("/query", {"model_name": 'a "model"', "token_ids": [1] * 4}, headers={**JSON, "x-request-id": "abc-1"})
            indexer.get("/workers?model_name=x")
            indexer.get("/nope")
            indexer.post("/query", b"nul", headers={**JSON, "X-Request-Id": "x" * 500 + '"'})
            got = lines(4)
            equal([list(line) for line in got], [["ts", "trace_id", "method", "path", "model", "status", "duration_ms"]] * 4)
            equal([(line["trace_id"], line["method"], line["path"], line["model"], line["status"]) for line in got],
                  [("abc-1", "POST", "/query", 'a "model"', 200), ("-", "GET", "/workers", "-", 200), ("-", "GET", "unknown", "-", 404),
                   ("x" * 128, "POST", "/query", "-", 400)])
            check(all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"]) and 0 < line["duration_ms"] < 60000 for line in got), got)
            rotated = path.with_suffix(".1")
            path.rename(rotated)
            indexer.get("/peers")
            lines(5, rotated)
            equal(indexer.post("/reopen_logs", b"").json(), {"status": "ok"})
            indexer.get("/peers")
            check(lines(1)[-1]["path"] in ("/peers", "/reopen_logs"))
            path.unlink()
            path.mkdir()
            reply = indexer.post("/reopen_logs", b"")
            equal(reply.status, 500)
            check(str(path) in reply.json()["error"], reply.json())
            equal(indexer.metrics()["kv_indexer_access_log_dropped_total"], 0)
    with Indexer() as indexer:
        equal(indexer.post("/reopen_logs", b"").json(), {"status": "ok"})
        equal(indexer.get("/reopen_logs").status, 405)
    refused = subprocess.run([BUILD / "bin" / "kv-indexer", "--port", "0", "--access-log", "/nowhere/x"], capture_output=True, text=True, timeout=60)
    check(refused.returncode == 1 and "/nowhere/x" in refused.stderr, refused.stderr)


def test_a_slow_access_log_holds_up_nobody():
    """The log is a pipe that nobody empties: requests go on, lines are dropped and counted, the end comes in time."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with Indexer("--access-log", str(path)) as indexer:
            connection = indexer.connect()
            slowest, sent = 0, 0
            while indexer.metrics()["kv_indexer_access_log_dropped_total"] == 0:
                for _ in range(1000):
                    started = time.monotonic()
                    connection.request("GET", "/health")
                    connection.getresponse().read()
                    slowest = max(slowest, time.monotonic() - started)
                    sent += 1
                check(sent < 50000, "nothing was dropped")
            check(slowest < patience(2), f"a request took {slowest:.2f} s")
            indexer.stop()  # without waiting for the log
        os.close(reader)


def test_ready_after_enough_workers():
    with Indexer("--min-initial-workers", "2") as indexer:
        def healthy():
            return indexer.get("/health").status

        equal(healthy(), 503)
        check("--min-initial-workers" in indexer.get("/health").json()["error"])
        indexer.register(1, NOWHERE, block_size=4)
        indexer.register(1, NOWHERE, block_size=4, dp_rank=1)
        equal(healthy(), 503)
        indexer.register(2, NOWHERE, block_size=4)
        equal((healthy(), indexer.get("/health").body), (200, b""))
        indexer.unregister(2)
        equal(healthy(), 200)
    with Indexer(env={"DYN_ROUTER_MIN_INITIAL_WORKERS": "1"}) as indexer:
        equal(indexer.get("/health").status, 503)
    with Indexer("--min-initial-workers", "0", env={"DYN_ROUTER_MIN_INITIAL_WORKERS": "1"}) as indexer:
        equal(indexer.get("/health").status, 200)
    with Indexer("--min-initial-workers", "1", "--workers", "1=" + NOWHERE, "--block-size", "4") as indexer:
        equal(indexer.get("/health").status, 200)


def test_metrics_of_the_original():
    """Names and labels of Dynamo's dashboards, for listeners and events."""
    applied = "dynamo_kvrouter_kv_cache_events_applied"
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        indexer.register(2, NOWHERE, block_size=4)
        engine.store([1, 2], range(8), block_size=4)
        engine.store([1, 2], range(8), block_size=4)  # again
        engine.store([9], range(4), parent=77, block_size=4)  # no such parent
        engine.remove([2])
        engine.remove([78, 79])
        engine.clear()
        engine.store([5], range(50, 54), block_size=4)  # tokens that nothing before it has: then all is applied
        indexer.wait_score(range(50, 54), 1, 4)
        values = indexer.metrics()
        equal(values[applied + '{event_type="stored",status="ok"}'], 3)
        equal(values[applied + '{event_type="stored",status="parent_block_not_found"}'], 1)
        equal(values[applied + '{event_type="removed",status="ok"}'], 1)
        equal(values[applied + '{event_type="removed",status="block_not_found"}'], 1)
        equal(values[applied + '{event_type="cleared",status="ok"}'], 1)
        equal(values['dynamo_kvrouter_kv_cache_event_warnings{warning_kind="duplicate_store"}'], 1)
        wait_until(lambda: indexer.metrics()['dynamo_kvindexer_listeners{status="active"}'] == 1, what="an active listener")
        values = indexer.metrics()
        equal(values['dynamo_kvindexer_listeners{status="pending"}'] + values['dynamo_kvindexer_listeners{status="failed"}'], 1)


def test_top_has_a_deadline():
    """kvasir top --once ends when the server takes the connection and says nothing, or a byte at a time."""
    top = [BUILD / "bin" / "kvasir", "top", "--once", "--timeout", "1s", "--url"]

    def drip(server, stop):
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not stop.wait(0.05):
                try:
                    sock.sendall(b" ")
                except OSError:
                    return

    for talks in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as server:
            stop = threading.Event()
            talker = threading.Thread(target=drip, args=(server, stop))
            if talks:
                talker.start()
            started = time.monotonic()
            done = subprocess.run([*top, f"http://127.0.0.1:{server.getsockname()[1]}"], capture_output=True, text=True, timeout=300)
            took = time.monotonic() - started
            stop.set()
            if talks:
                talker.join()
            equal(done.returncode, 1, done.stderr)
            check("timed out" in done.stderr.lower(), done.stderr)
            check(took < patience(5), f"{took:.1f} s")
    with Indexer() as indexer:
        equal(subprocess.run([*top, indexer.url], capture_output=True, timeout=60).returncode, 0)


if __name__ == "__main__":
    run(globals())
