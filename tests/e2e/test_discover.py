# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --discover file:PATH, and what all sources share: grace, several sources, clients' own workers, replicas, refusals."""
import contextlib
import json
import os
import subprocess
import sys
import tempfile

from kvtest import *

TOKENS = list(range(1, 17))


def write(path, content):
    """Replace the file by one of another inode, as careful writers do."""
    text = content if isinstance(content, str) else json.dumps(content)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


def entry(name, engine, **fields):
    return {"instance_id": name, "endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, **fields}


@contextlib.contextmanager
def place(content=None):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "workers")
        if content is not None:
            write(path, content)
        yield path


def follow(path, *args, grace="600s", **kw):
    return Indexer("--discover", f"file:{path}", "--discover-grace", grace, "--block-size", 4, "--model-name", MODEL, *args, **kw)


def followed(indexer):
    """{(instance, rank): status}"""
    return {(worker["instance_id"], int(rank)): row["status"] for worker in indexer.workers() for rank, row in worker["listeners"].items()}


def wait_followed(indexer, *wanted):
    wait_until(lambda: set(followed(indexer)) == set(wanted), 30, f"workers {wanted}, not {followed(indexer)}")


def wait_status(indexer, worker, status):
    wait_until(lambda: followed(indexer)[worker] == status, 30, f"{worker} to be {status}")


def source(indexer, number=0):
    return indexer.get("/discovery").json()[number]


def wait_log(indexer, text):
    wait_until(lambda: any(text in line for line in indexer.log), 30, f"the log to say {text!r}")


def test_workers_come_and_go():
    with Publisher() as one, Publisher() as two, place([entry("pod-a", one)]) as path:
        with follow(path, grace="1s") as indexer:
            wait_status(indexer, ("pod-a", 0), "active")
            one.store([1, 2], TOKENS[:8], block_size=4)
            indexer.wait_score(TOKENS, "pod-a", 8)
            write(path, {"workers": [entry("pod-a", one), entry("pod-b", two, dp_rank=3)]})
            wait_status(indexer, ("pod-b", 3), "active")
            two.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, "pod-b", 4, rank=3)
            write(path, [entry("pod-b", two, dp_rank=3)])
            wait_followed(indexer, ("pod-b", 3))
            wait_until(lambda: list(indexer.query(TOKENS)["scores"]) == ["pod-b"], 30, "blocks to leave")
            write(path, "[]")
            wait_followed(indexer)
            equal(source(indexer)["workers"], 0)


def test_a_worker_that_leaves_is_chosen_no_more_and_comes_back_whole():
    with Publisher() as one, Publisher() as two, place([entry("a", one), entry("b", two)]) as path, follow(path) as indexer:
        for name, engine in (("a", one), ("b", two)):
            wait_status(indexer, (name, 0), "active")
            engine.store([1, 2], TOKENS[:8], block_size=4)
            indexer.wait_score(TOKENS, name, 8)
        write(path, [entry("b", two)])
        wait_status(indexer, ("a", 0), "withdrawn")
        answer = indexer.query(TOKENS)
        equal(answer["scores"], {"b": {"0": 8}})
        equal(list(answer["instances"]), ["b"])
        equal(answer["views"], {"a": {"0": {"status": "withdrawn", "partial": False}}})
        equal(list(indexer.query_by_hash([1])["scores"]), [])
        equal(source(indexer)["withdrawn"], 1)
        equal(indexer.metrics()[f'kv_indexer_discovery_withdrawn{{source="file:{path}"}}'], 1)
        equal(indexer.metrics()['kv_indexer_listeners{status="withdrawn"}'], 1)
        one.store([3], TOKENS[8:12], parent=2, block_size=4)  # its stream goes on
        two.store([3], TOKENS[8:12], parent=2, block_size=4)
        indexer.wait_score(TOKENS, "b", 12)
        write(path, [entry("a", one), entry("b", two)])
        indexer.wait_score(TOKENS, "a", 12)
        equal(followed(indexer), {("a", 0): "active", ("b", 0): "active"})
        equal(one.replays, 1)  # the one of its start: nothing was learned anew


def test_a_file_that_makes_no_sense_changes_nothing():
    with Publisher() as engine, place([entry("a", engine)]) as path, follow(path, grace="100ms") as indexer:
        wait_status(indexer, ("a", 0), "active")
        whole = json.dumps([entry("a", engine), entry("b", engine)])
        for text, why in ((whole[:-20], "no JSON at byte"), ("", "it is empty"), ("b=tcp://x:1", "the last line doesn't end"),
                          ("[{\"instance_id\":\"b\"}]", "worker 1: missing field 'endpoint'"), ("{}", "an object without"),
                          ("b=nonsense\n", "line 1: "), ('[{"instance_id":1,"endpoint":"tcp://x:1","block_size":0}]', "block_size")):
            write(path, text)
            wait_until(lambda: why in source(indexer).get("error", ""), 30, f"{why}, not {source(indexer)}")
            equal(set(followed(indexer)), {("a", 0)})
            equal(source(indexer)["current"], False)
            shown = indexer.workers()[0]["discovery"]
            equal((shown["source"], shown["current"], why in shown["error"]), (f"file:{path}", False, True))
            equal(indexer.metrics()[f'kv_indexer_discovery_up{{source="file:{path}"}}'], 0)
            wait_log(indexer, "a source can't be read")
        os.remove(path)
        wait_until(lambda: "No such file" in source(indexer).get("error", ""), 30, "the file to be missed")
        equal(set(followed(indexer)), {("a", 0)})
        write(path, whole)
        wait_followed(indexer, ("a", 0), ("b", 0))
        equal(source(indexer)["current"], True)
        wait_log(indexer, "a source can be read again")


def test_a_file_that_comes_late_or_is_written_in_place():
    with Publisher() as engine, place() as path, follow(path) as indexer:
        wait_until(lambda: "No such file" in source(indexer).get("error", ""), 30, "the file to be missed")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"# fleet\n a={engine.endpoint}+{engine.replay_endpoint} , b:1={engine.endpoint}#topic # two\n")
        wait_followed(indexer, ("a", 0), ("b", 1))
        equal({w["instance_id"]: w["endpoints"] for w in indexer.workers()},
              {"a": {"0": engine.endpoint}, "b": {"1": engine.endpoint + "#topic"}})


def test_a_config_map():
    """Links to a folder that is replaced, as Kubernetes mounts them."""
    with Publisher() as engine, tempfile.TemporaryDirectory() as folder:
        for number, names in enumerate((["a"], ["a", "b"])):
            os.mkdir(f"{folder}/..{number}")
            write(f"{folder}/..{number}/workers.json", [entry(name, engine) for name in names])
        os.symlink("..0", f"{folder}/..data")
        os.symlink("..data/workers.json", f"{folder}/workers.json")
        with follow(f"{folder}/workers.json") as indexer:
            wait_followed(indexer, ("a", 0))
            os.symlink("..1", f"{folder}/..tmp")
            os.rename(f"{folder}/..tmp", f"{folder}/..data")
            wait_followed(indexer, ("a", 0), ("b", 0))


def test_what_a_worker_is_registered_with():
    """Fields of an entry count before the options; without a block size from either the file is refused."""
    with Publisher() as engine, place([entry("a", engine), entry("b", engine, model_name="other", block_size=8, tenant_id="t",
                                                                   kv_cache_report_mode="full")]) as path:
        with follow(path) as indexer:
            wait_followed(indexer, ("a", 0), ("b", 0))
            rows = {row["instance_name"]: row for row in indexer.get("/registrations").json()["registrations"]}
            equal([(r["model_name"], r["tenant_id"], r["block_size"], r.get("kv_cache_report_mode")) for r in (rows["a"], rows["b"])],
                  [(MODEL, "default", 4, None), ("other", "t", 8, "full")])
            # Another endpoint, or model: registered anew at once.
            write(path, [entry("a", engine, model_name="other", block_size=8), entry("b", engine, endpoint=engine.endpoint + "#x", block_size=8)])
            wait_until(lambda: {(w["instance_id"], w["model_name"], w["endpoints"]["0"]) for w in indexer.workers()} ==
                       {("a", "other", engine.endpoint), ("b", MODEL, engine.endpoint + "#x")}, 30, "new registrations")
        with Indexer("--discover", f"file:{path}", "--config", "/dev/null") as indexer:
            write(path, [entry("a", engine)])
            wait_until(lambda: "block_size" in source(indexer).get("error", ""), 30, "a refusal")


def test_sections_have_sources_of_their_own():
    with Publisher() as engine, place([entry("a", engine)]) as first, place([entry("b", engine)]) as second, place() as config:
        write(config, f"[llama]\nblock-size = 16\ndiscover = file:{first}\n[qwen]\nblock-size = 32\ndiscover = file:{second}\n")
        with Indexer("--config", config) as indexer:
            wait_followed(indexer, ("a", 0), ("b", 0))
            equal(sorted((w["instance_id"], w["model_name"], w["block_size"]) for w in indexer.workers()), [("a", "llama", 16), ("b", "qwen", 32)])


def test_several_sources_add_up_and_the_first_counts():
    with Publisher() as one, Publisher() as two, place([entry("a", one)]) as first, place([entry("a", two), entry("b", two)]) as second:
        with follow(first, "--discover", f"file:{second}", grace="100ms") as indexer:
            wait_followed(indexer, ("a", 0), ("b", 0))
            wait_until(lambda: source(indexer, 1)["conflicts"] == 1, 30, "a conflict")
            where = lambda: {w["instance_id"]: (w["endpoints"]["0"], w["discovery"]["source"]) for w in indexer.workers()}
            wait_until(lambda: where() == {"a": (one.endpoint, f"file:{first}"), "b": (two.endpoint, f"file:{second}")}, 30, "the first source's")
            write(first, "[]")
            wait_until(lambda: where() == {"a": (two.endpoint, f"file:{second}"), "b": (two.endpoint, f"file:{second}")}, 30, "the second source's")
            equal(source(indexer, 1)["conflicts"], 0)


def test_clients_have_the_last_word():
    with Publisher() as one, Publisher() as two, place([entry("a", one), entry("b", one)]) as path:
        with follow(path, "--workers", f"c={one.endpoint}", grace="100ms") as indexer:
            wait_followed(indexer, ("a", 0), ("b", 0), ("c", 0))
            indexer.unregister("a")
            wait_log(indexer, "a worker is left to a client")
            indexer.unregister("b")
            indexer.register("b", two.endpoint, block_size=4)
            write(path, [entry(name, one) for name in "abc"] + [entry("d", one)])
            wait_followed(indexer, ("b", 0), ("c", 0), ("d", 0))
            equal([w["endpoints"]["0"] for w in indexer.workers() if w["instance_id"] == "b"], [two.endpoint])
            write(path, [entry("d", one)])  # b and c stay: no source has registered them
            wait_until(lambda: source(indexer)["workers"] == 1, 30, "the file to be read")
            wait_followed(indexer, ("b", 0), ("c", 0), ("d", 0))
            write(path, [entry("a", one)])
            wait_followed(indexer, ("a", 0), ("b", 0), ("c", 0))


def test_a_client_takes_over():
    """What a client has registered isn't withdrawn with the source's worker of that name, whichever model, endpoint or time."""
    with Publisher() as one, Publisher() as two, place([entry(name, one) for name in "abc"]) as path, follow(path, grace="2s") as indexer:
        for name in "abc":
            wait_status(indexer, (name, 0), "active")
        indexer.unregister("a")
        indexer.register("a", one.endpoint, model_name="other", block_size=4)
        indexer.unregister("b")
        indexer.register("b", two.endpoint, block_size=4)
        write(path, [entry("d", one)])
        wait_status(indexer, ("c", 0), "withdrawn")
        wait_status(indexer, ("d", 0), "active")
        for name in "ab":
            wait_status(indexer, (name, 0), "active")
        # Within the grace: as it is, so that it stays with what it has, or otherwise, which is refused.
        equal(indexer.post("/register", {"instance_id": "c", "endpoint": two.endpoint, "model_name": MODEL, "block_size": 4}).status, 409)
        equal(indexer.post("/register", {"instance_id": "c", "endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "model_name": MODEL,
                                         "block_size": 4}).status, 201)
        wait_status(indexer, ("c", 0), "active")
        write(path, [])
        wait_until(lambda: ("d", 0) not in followed(indexer), 30, "d to leave")
        equal(followed(indexer), {(name, 0): "active" for name in "abc"})


def test_rules_of_endpoints_and_limits_apply():
    with Publisher() as engine, place([{"instance_id": "x", "endpoint": "tcp://10.1.2.3:5557"}, entry("a", engine), entry("b", engine)]) as path:
        with follow(path, "--allow-endpoint", "tcp://127.0.0.0/8", "--max-registrations", 1, grace="0") as indexer:
            wait_until(lambda: len(followed(indexer)) == 1, 30, "one worker")
            wait_until(lambda: source(indexer)["refused"] == 2, 30, "two refusals")
            wait_log(indexer, "a worker is not followed for now")
            write(path, [entry("c", engine)])
            wait_followed(indexer, ("c", 0))


def test_replicas_share_names_and_removals():
    """Two replicas with the same source, one without: all know a pod by its name, and forget it together."""
    with Publisher() as engine, place([entry("pod-a", engine)]) as path:
        with follow(path, "--peer-interval", "100ms", grace="100ms") as first:
            with follow(path, "--peers", first.url, "--peer-interval", "100ms", grace="100ms") as second, \
                 Indexer("--peers", first.url, "--peer-interval", "100ms") as third:
                for indexer in (first, second, third):
                    wait_status(indexer, ("pod-a", 0), "active")
                numbers = {str(i.get("/registrations").json()["registrations"][0]["instance_id"]) for i in (first, second, third)}
                equal(len(numbers), 1, "numbers of one name")
                engine.store([1], TOKENS[:4], block_size=4)
                for indexer in (first, second, third):
                    indexer.wait_score(TOKENS, "pod-a", 4)
                write(path, "[]")
                for indexer in (first, second, third):
                    wait_followed(indexer)


def test_a_peer_that_sees_less_takes_nothing_away():
    """A replica whose source has lost a worker removes it; one whose source still names it registers it again, for all."""
    with Publisher() as engine, place([entry("a", engine)]) as path, place([entry("a", engine)]) as other:
        with follow(path, "--peer-interval", "100ms", grace="100ms") as first:
            with follow(other, "--peers", first.url, "--peer-interval", "100ms", grace="100ms") as second:
                wait_followed(second, ("a", 0))
                write(path, "[]")
                wait_until(lambda: source(first)["workers"] == 0 and not source(first)["withdrawn"], 30, "the worker to leave the first")
                wait_until(lambda: any("a worker has left" in line for line in first.log), 30, "the removal")
                wait_followed(second, ("a", 0))
                wait_status(second, ("a", 0), "active")


def test_options():
    def refused(wanted, *args):
        done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", *args], capture_output=True, text=True, timeout=60)
        equal(done.returncode != 0 and wanted in done.stderr, True, f"{args}: {done.stderr!r}")

    refused("no source of discovery", "--discover", "consul:a")
    refused("file: needs the path", "--discover", "file:")


if __name__ == "__main__":
    sys.exit(run(globals()))
