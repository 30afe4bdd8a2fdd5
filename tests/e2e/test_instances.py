# SPDX-License-Identifier: Apache-2.0
"""Instance ids that are names, such as those of pods: every answer gives back what the client gave."""
import json
import os
import signal
import tempfile

from kvtest import *
from streams import BS, Peer, holds, pages, prompt, store

POD = "vllm-7b-0.vllm.svc.cluster.local"
ODD = 'naïve "pod" \\ 1'  # every byte that JSON or Prometheus escapes
NAMED = 1 << 63


def shown(indexer):
    """What the indexer says about instances, in each of its answers: the set of ids."""
    metrics = [line for line in indexer.get("/metrics").body.decode().splitlines() if line.startswith("kv_indexer_worker_up{")]
    labels = {line.split('instance="', 1)[1].split('",dp_rank', 1)[0].replace('\\"', '"').replace("\\\\", "\\") for line in metrics}
    return {"workers": {str(worker["instance_id"]) for worker in indexer.workers()}, "metrics": labels}


def numbers(indexer):
    """Name and number of each registration, as peers are told."""
    return {entry.get("instance_name", entry["instance_id"]): entry["instance_id"]
            for entry in indexer.get("/registrations").json()["registrations"]}


def test_every_answer_says_the_name():
    with Publisher() as engine, Publisher() as other, Publisher() as third, Indexer() as indexer:
        for instance, publisher in ((POD, engine), (ODD, other), (7, third)):
            indexer.register(instance, publisher, block_size=BS)
            store(publisher, 1, 2)
            holds(indexer, 1, 2, instance)
        answer = indexer.query(prompt(1, 2))
        names = {POD, ODD, "7"}
        for part in ("scores", "tree_sizes", "instances"):
            equal(set(answer[part]), names, part)
        equal(answer["scores"][POD], {"0": 2 * BS})
        equal(answer["instances"][ODD]["dp"], {"0": 2 * BS})
        equal(list(answer["scores"])[0], "7", "numbers come first")
        equal(indexer.query(prompt(1, 2)), answer, "the same question")
        equal(shown(indexer), {"workers": names, "metrics": names})
        equal({type(worker["instance_id"]) for worker in indexer.workers()}, {int, str})
        told = numbers(indexer)
        equal(set(told), {POD, ODD, 7})
        check(told[POD] >= NAMED and told[ODD] >= NAMED and told[7] == 7, told)
        equal({(item["worker_id"], item["name"]) for item in indexer.dump()[f"{MODEL}:default"]["names"]},
              {(told[POD], POD), (told[ODD], ODD)})
        wait_until(lambda: any(f"worker={POD} rank=0" in line for line in indexer.log), 15, "the name in the log")
        check(all(str(told[POD]) not in line for line in indexer.log), "the log has no number of it")


def test_numbers_alone_change_nothing():
    """The original's clients see the original's formats."""
    with Publisher() as engine, Indexer() as indexer:
        indexer.register(9223372036854775809, engine, block_size=BS)  # as large as the number of a name
        store(engine, 1, 1)
        holds(indexer, 1, 1, 9223372036854775809)
        equal(indexer.post("/query", {"token_ids": prompt(1, 1), "model_name": MODEL}).body,
              b'{"scores":{"9223372036854775809":{"0":4}},"frequencies":[],"tree_sizes":{"9223372036854775809":{"0":1}},'
              b'"instances":{"9223372036854775809":{"longest_matched":4,"gpu":4,"dp":{"0":4},"cpu":4,"disk":4}},"views":{}}')
        equal(indexer.workers()[0]["instance_id"], 9223372036854775809)
        equal(set(indexer.get("/registrations").json()["registrations"][0]) & {"instance_name"}, set())
        check("names" not in indexer.dump()[f"{MODEL}:default"])


def test_digits_are_numbers():
    with Publisher() as engine, Indexer() as indexer:
        indexer.register("12", engine, block_size=BS)
        equal(indexer.workers()[0]["instance_id"], 12)
        indexer.register(12, engine, block_size=BS, expect=409)
        indexer.unregister(12)


def test_what_is_refused():
    with Indexer() as indexer:
        for wrong in ("", "007", "18446744073709551616", "a" * 254, "tab\there", "\u0085", "\x7f", None, True, [], 1.5, -1):
            reply = indexer.post("/register", {"instance_id": wrong, "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4})
            equal(reply.status, 422, f"{wrong!r}: {reply.body!r}")
            check("instance_id" in reply.json()["error"], reply.body)
        body = msgpack.packb({"instance_id": b"pod\xff", "endpoint": "tcp://127.0.0.1:1", "model_name": MODEL, "block_size": 4})
        raw = body.replace(b"\xc4\x04pod\xff", b"\xa4pod\xff")  # the same bytes, said to be text
        for data in (body, raw):
            equal(indexer.post("/register", data, headers={"Content-Type": "application/msgpack"}).status, 422)
        equal(indexer.workers(), [])


def test_each_request_takes_a_name():
    """Register (JSON and msgpack), a second rank, conflicts, pause, resume, unregister one rank and all."""
    with Publisher() as engine, Publisher() as second, Indexer(env={"KV_INDEXER_TEST_ENDPOINTS": "1"}) as indexer:
        body = {"instance_id": POD, "endpoint": engine.endpoint, "model_name": MODEL, "block_size": BS}
        equal(indexer.post("/register", msgpack.packb(body), headers={"Content-Type": "application/msgpack"}).status, 201)
        engine.wait_subscriber()
        indexer.register(POD, second, block_size=BS, dp_rank=1)
        reply = indexer.register(POD, second, block_size=BS, dp_rank=1, expect=409)
        check(f"instance {POD} dp_rank 1" in reply.json()["error"], reply)
        for rank, publisher in enumerate((engine, second)):
            store(publisher, 1, 1, rank=rank)
            holds(indexer, 1, 1, POD, rank)
        equal(indexer.query(prompt(1, 1))["scores"], {POD: {"0": BS, "1": BS}})
        equal(indexer.post("/test/pause_listener", {"instance_id": POD, "dp_rank": 1}).status, 200)
        equal(indexer.query(prompt(1, 1))["views"][POD]["1"]["status"], "paused")
        reply = indexer.post("/test/pause_listener", {"instance_id": POD, "dp_rank": 1})
        equal((reply.status, POD in reply.json()["error"]), (409, True))
        equal(indexer.post("/test/resume_listener", {"instance_id": POD, "dp_rank": 1}).status, 200)
        equal(indexer.post("/test/pause_listener", {"instance_id": "nobody"}).json()["error"], "instance nobody not found")
        reply = indexer.unregister("nobody", expect=404)
        equal(reply.json()["error"], "instance nobody not found")
        reply = indexer.unregister(POD, expect=404, tenant_id="default", dp_rank=5)
        check(f"instance {POD} dp_rank 5" in reply.json()["error"], reply)
        reply = indexer.unregister(POD, expect=404, model_name="other")
        check(f"instance {POD} is registered" in reply.json()["error"], reply)
        indexer.unregister(POD, tenant_id="default", dp_rank=1)
        equal(list(indexer.workers()[0]["listeners"]), ["0"])
        indexer.unregister(POD)
        equal(indexer.workers(), [])
        wait_until(lambda: any("worker unregistered" in line and f"worker={POD}" in line for line in indexer.log), 15, "the line with the name")


def test_replicas_agree():
    """Registered at one, followed by the other, recovered from a dump, unregistered at the other, restarted."""
    port = free_port()
    with Publisher() as engine, Publisher() as gone, Indexer("--port", port) as a:
        a.register(POD, engine, block_size=BS)
        a.register("pod-gone", gone, block_size=BS)
        store(engine, 1, 2)
        store(gone, 2, 2)
        holds(a, 1, 2, POD)
        with Indexer("--peers", a.url, "--peer-interval", "100ms") as b:
            holds(b, 1, 2, POD)
            holds(b, 2, 2, "pod-gone")
            equal(numbers(b), numbers(a))
            equal(shown(b), shown(a))
            store(engine, 3, 1)
            holds(b, 3, 1, POD)
            a.post("/register_peer", {"url": b.url})
            b.unregister("pod-gone")
            wait_until(lambda: shown(a)["workers"] == {POD}, 15, "the removal at the first")
            a.unregister(POD)
            wait_until(lambda: not b.workers(), 15, "the removal at the second")
            b.register(POD, engine, block_size=BS)
            wait_until(lambda: shown(a)["workers"] == {POD}, 15, "the worker again")
            store(engine, 4, 1)
            holds(a, 4, 1, POD)
            holds(b, 4, 1, POD)


def test_blocks_of_a_dump_keep_their_name():
    """A replica that follows nobody has the blocks of a peer's dump under the name, gives them on, and forgets them by name."""
    with Publisher() as engine, Indexer() as a:
        a.register(POD, engine, block_size=BS)
        store(engine, 1, 2)
        holds(a, 1, 2, POD)
        dump = json.dumps(a.streams()).encode()
    with Peer(pages({"/dump": dump})) as one, Indexer("--peers", one.url) as b:
        equal(b.query(prompt(1, 2))["scores"], {POD: {"0": 2 * BS}})
        equal(b.query(prompt(1, 2))["views"], {POD: {"0": {"status": "unregistered", "partial": True}}})
        equal(b.workers(), [])
        with Indexer("--peers", b.url) as c:
            equal(c.query(prompt(1, 2))["scores"], {POD: {"0": 2 * BS}})
        equal(b.unregister("nobody", expect=404).json()["error"], "instance nobody not found")
        b.unregister(POD)
        b.query(prompt(1, 2), expect=404)


def test_a_peer_that_knows_no_names():
    """A peer passes the number on without a name. The name is learned when somebody says it, and told to peers."""
    with Publisher() as engine, Indexer() as a:
        a.register(POD, engine, block_size=BS)
        number = numbers(a)[POD]
        old = a.get("/registrations").json()
        for entry in old["registrations"]:
            del entry["instance_name"]
        old["id"] += 1  # another process
        store(engine, 1, 1)
        holds(a, 1, 1, POD)
    with Publisher(endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint) as engine, \
            Peer(pages({"/registrations": json.dumps(old).encode()})) as peer, Indexer("--peers", peer.url) as b, \
            Indexer("--peers", b.url, "--peer-interval", "100ms") as c:
        engine.wait_subscriber(2)
        store(engine, 1, 1)
        for indexer in b, c:
            holds(indexer, 1, 1, number)
            equal(shown(indexer)["workers"], {str(number)})
        b.register(POD, engine, block_size=BS)  # the same worker, which a peer has registered before
        for indexer in b, c:
            wait_until(lambda indexer=indexer: shown(indexer)["workers"] == {POD}, 15, "the name")
            holds(indexer, 1, 1, POD)
        check(all("restart" not in line for line in b.log), "its stream went on")


def test_a_peer_with_false_names():
    """A name that isn't of its number: nothing of that document counts."""
    for documents in ({"/registrations": {"id": 5, "revision": 1, "removed": [], "registrations": [
            {"instance_id": 7, "instance_name": POD, "dp_rank": 0, "model_name": MODEL, "tenant_id": "default", "block_size": 4,
             "endpoint": "tcp://127.0.0.1:1", "version": 1766000000000000}]}},
                  {"/dump": {f"{MODEL}:default": {"block_size": 4, "events": [], "names": [{"worker_id": 7, "name": POD}]}}}):
        with Peer(pages({path: json.dumps(page).encode() for path, page in documents.items()})) as peer, Indexer("--peers", peer.url) as b:
            equal((b.workers(), b.dump()), ([], {}))
            wait_until(lambda b=b: any("name that isn't of its" in line for line in b.log), 15, "the refusal in the log")


def test_configured():
    """Names in --workers, also after SIGHUP."""
    with tempfile.TemporaryDirectory() as folder, Publisher() as one, Publisher() as two:
        path = os.path.join(folder, "conf")

        def write(text):
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"[{MODEL}]\nblock-size = {BS}\n{text}\n")

        write(f"workers = pod-a={one.endpoint},pod-a:1={two.endpoint}")
        with Indexer("--config", path) as indexer:
            one.wait_subscriber()
            store(one, 1, 1)
            holds(indexer, 1, 1, "pod-a")
            write(f"workers = pod-a={one.endpoint}\nworkers = host:80:0={two.endpoint}, 5={two.endpoint}")
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: shown(indexer)["workers"] == {"pod-a", "host:80", "5"}, 15, "the new workers")
            equal(indexer.score(prompt(1, 1), "pod-a"), BS, "its stream went on")
            write(f"workers = pod-a={one.endpoint},pod-a={two.endpoint}")
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any("instance pod-a dp_rank 0 is listed twice" in line for line in indexer.log), 15, "the refusal")
            equal(shown(indexer)["workers"], {"pod-a", "host:80", "5"})


if __name__ == "__main__":
    run(globals())
