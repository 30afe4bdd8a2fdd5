# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --discover kubernetes: over a double of the API server (kubernetes.py): lists, watches, and all that ends them."""
import contextlib
import http.server
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

from kvtest import *
from kubernetes import ApiServer, pod

TOKENS = list(range(1, 17))


def port_of(endpoint):
    return int(endpoint.rsplit(":", 1)[1])


def engine_pod(name, engine, **fields):
    ports = {"http": 8000, "kv-events": port_of(engine.endpoint), "kv-replay": port_of(engine.replay_endpoint)}
    return pod(name, ports=ports, **fields)


@contextlib.contextmanager
def cluster(**kw):
    with tempfile.TemporaryDirectory() as folder, ApiServer(folder, **kw) as api:
        yield api


def follow(api, *args, where="/app=vllm", options="", grace="600s", **kw):
    host, port = "127.0.0.1", str(api.port)
    env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    return Indexer("--discover", f"kubernetes:{where}?account={api.folder}{options}", "--discover-grace", grace, "--block-size", 4,
                   "--model-name", MODEL, *args, env=env, **kw)


def followed(indexer):
    return {(worker["instance_id"], int(rank)): row["status"] for worker in indexer.workers() for rank, row in worker["listeners"].items()}


def wait_followed(indexer, *wanted):
    wait_until(lambda: {w for w, status in followed(indexer).items() if status != "withdrawn"} == set(wanted), 30,
               f"workers {wanted}, not {followed(indexer)}")


def wait_status(indexer, worker, status):
    wait_until(lambda: followed(indexer)[worker] == status, 30, f"{worker} to be {status}")


def source(indexer):
    return indexer.get("/discovery").json()[0]


def wait_error(indexer, text):
    wait_until(lambda: text in source(indexer).get("error", ""), 30, f"{text!r}, not {source(indexer)}")


def wait_watch(api, n=1):
    wait_until(lambda: api.watches() >= n, 30, "a watch")


def test_pods_come_and_go():
    with Publisher() as one, Publisher() as two, cluster() as api:
        api.put(engine_pod("vllm-0", one))
        api.put(pod("web-0", labels={"app": "web"}, ports={"kv-events": 1}))
        with follow(api, grace="1s") as indexer:
            wait_status(indexer, ("vllm-0", 0), "active")
            one.store([1, 2], TOKENS[:8], block_size=4)
            indexer.wait_score(TOKENS, "vllm-0", 8)
            equal(indexer.workers()[0]["listeners"]["0"]["replay_endpoint"], one.replay_endpoint)
            api.put(engine_pod("vllm-1", two))
            wait_status(indexer, ("vllm-1", 0), "active")
            two.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, "vllm-1", 4)
            api.delete("vllm-0")
            wait_until(lambda: indexer.query(TOKENS)["scores"] == {"vllm-1": {"0": 4}}, 30, "the pod to be chosen no more")
            wait_until(lambda: set(followed(indexer)) == {("vllm-1", 0)}, 30, "the pod to be forgotten")
            equal(len([path for path in api.requests if "watch" not in path]), 1, "lists")


def test_readiness_and_deletion():
    """A pod that isn't ready, is about to go, or has no address is withdrawn, and back with what it had."""
    with Publisher() as engine, cluster() as api:
        good = engine_pod("a", engine, uid="u1")
        api.put(good)
        with follow(api) as indexer:
            wait_status(indexer, ("a", 0), "active")
            engine.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, "a", 4)
            deleting = json.loads(json.dumps(good))
            deleting["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
            others = [engine_pod("a", engine, uid="u1", ready=False), deleting, engine_pod("a", engine, uid="u1", phase="Failed"),
                      {**good, "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}},
                      engine_pod("a", engine, uid="u1", labels={"app": "other"})]
            for bad in others:
                api.put(bad)
                wait_status(indexer, ("a", 0), "withdrawn")
                equal(indexer.query(TOKENS)["scores"], {})
                api.put(good)
                indexer.wait_score(TOKENS, "a", 4)
            equal(engine.replays, 1, "the replay of the start")


def test_another_pod_of_the_same_name():
    """StatefulSets: the name is the same, the pod another: nothing of the old one stays."""
    with Publisher() as engine, cluster() as api:
        api.put(engine_pod("vllm-0", engine))
        with follow(api) as indexer:
            wait_status(indexer, ("vllm-0", 0), "active")
            engine.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, "vllm-0", 4)
            engine.restart()
            api.put(engine_pod("vllm-0", engine))
            indexer.wait_score(TOKENS, "vllm-0", 0)
            wait_status(indexer, ("vllm-0", 0), "active")


def test_what_annotations_say():
    with cluster() as api:
        api.put(pod("ranks", annotations={"kvasir/dp-size": "3", "kvasir/dp-rank": "2", "kvasir/event-port": "6000", "kvasir/replay-port": "rep"},
                    ports={"rep": 7000}))
        api.put(pod("model", annotations={"kvasir/worker": json.dumps({"model_name": "qwen", "block_size": 32, "tenant_id": "t", "dp_rank": 5})},
                    ports={"kv-events": 6100}))
        api.put(pod("v6", ip="fd00::7", ports={"kv-events": 6200}))
        bad = {"noport": ({}, {"http": 1}), "size": ({"kvasir/dp-size": "0"}, {"kv-events": 1}), "json": ({"kvasir/worker": "{"}, {"kv-events": 1}),
               "replay": ({"kvasir/replay-port": "x"}, {"kv-events": 1}), "beyond": ({"kvasir/dp-size": "9"}, {"kv-events": 65530}),
               "long": ({"kvasir/event-port": "5" * 40}, {"kv-events": 1}), "huge": ({"kvasir/worker": " " * 70000}, {"kv-events": 1})}
        for name, (annotations, ports) in bad.items():
            api.put(pod(name, annotations=annotations, ports=ports))
        with follow(api) as indexer:
            wait_followed(indexer, ("ranks", 2), ("ranks", 3), ("ranks", 4), ("model", 5), ("v6", 0))
            rows = {(r["instance_name"], r["dp_rank"]): r for r in indexer.get("/registrations").json()["registrations"]}
            equal([(rows["ranks", n]["endpoint"], rows["ranks", n]["replay_endpoint"]) for n in (2, 3, 4)],
                  [(f"tcp://127.0.0.1:{6000 + n}", f"tcp://127.0.0.1:{7000 + n}") for n in range(3)])
            equal([rows["model", 5][f] for f in ("model_name", "block_size", "tenant_id", "endpoint")], ["qwen", 32, "t", "tcp://127.0.0.1:6100"])
            equal(rows["v6", 0]["endpoint"], "tcp://[fd00::7]:6200")
            equal(source(indexer)["left_out"], len(bad))
            check(source(indexer)["left_out_first"].startswith("default/"), source(indexer))
            wait_until(lambda: any("workers of a source can't be followed" in line for line in indexer.log), 30, "the log")


def test_namespaces_selectors_and_pages():
    with cluster(namespace="prod") as api:
        for i in range(1203):
            api.put(pod(f"p{i}", ports={"kv-events": 1000 + i}, namespace="prod", labels={"app.kubernetes.io/name": "x", "role": "ab"[i % 2]}))
        api.put(pod("p0", ports={"kv-events": 999}, namespace="dev", labels={"role": "b"}))
        with follow(api, where="/app.kubernetes.io/name=x,role in (a,b)") as indexer:
            wait_until(lambda: source(indexer)["workers"] == 1203, 30, "three pages")
            check(sum("continue=" in path for path in api.requests) == 2, api.requests)
        with follow(api, where="*/role=b,!app.kubernetes.io/name") as indexer:
            wait_followed(indexer, ("dev/p0", 0))
        with follow(api, where="forbidden/") as indexer:
            wait_error(indexer, "list: HTTP status 403: pods is forbidden")


def test_what_ends_watches():
    """Resets, ERROR events, 410 in both forms, ends and a restart lose nothing, and nothing is withdrawn meanwhile."""
    with Publisher() as engine, cluster() as api:
        api.put(engine_pod("a", engine))
        with follow(api) as indexer:
            wait_status(indexer, ("a", 0), "active")
            lists = lambda: len([path for path in api.requests if "watch=1" not in path])
            wait_watch(api)
            # A reset: the next watch begins where this one has ended.
            n = api.watches()
            api.drop()
            api.put(pod("b", ports={"kv-events": 1}))
            wait_followed(indexer, ("a", 0), ("b", 0))
            wait_watch(api, n + 1)
            equal(lists(), 1)
            # An error that says nothing of versions.
            n = api.watches()
            api.error(message="etcdserver: no leader")
            wait_watch(api, n + 1)
            wait_until(lambda: any("etcdserver: no leader" in line for line in indexer.log), 30, "the log")
            api.put(pod("c", ports={"kv-events": 1}))
            wait_followed(indexer, ("a", 0), ("b", 0), ("c", 0))
            equal(lists(), 1)
            # Versions that are forgotten, with a change in between: as an event, and as a status.
            for number, (as_event, gone) in enumerate(((True, "b"), (False, "c"))):
                api.gone_as_event = as_event
                api.set_down(True)
                wait_until(lambda: not source(indexer)["current"], 30, "the loss")
                api.delete(gone)
                api.compact()
                api.set_down(False)
                wait_until(lambda: followed(indexer)[gone, 0] == "withdrawn", 60, f"{gone} to go")
                check(lists() >= 2 + number)
            equal(followed(indexer)["a", 0], "active")
            wait_until(lambda: source(indexer)["current"], 30, "the source")
            check(not any("worker=a" in line and "withdrawn" in line for line in indexer.log))


def test_bookmarks_save_a_list():
    """A quiet watch learns newer versions: once the bookmark is read, the next watch begins there."""
    with cluster() as api:
        api.put(pod("a", ports={"kv-events": 1}))
        with follow(api) as indexer:
            wait_followed(indexer, ("a", 0))
            wait_watch(api)
            for i in range(5):
                api.put(pod(f"web-{i}", labels={"app": "web"}))
            wanted = f"resourceVersion={api.version}"

            def begins_there():
                n = api.watches()
                api.bookmark()
                api.drop()
                wait_watch(api, n + 1)
                return wanted in [path for path in api.requests if "watch=1" in path][-1]

            wait_until(begins_there, 30, "a watch from the bookmark on")
            equal(len([path for path in api.requests if "watch=1" not in path]), 1, "lists")


def test_an_unreachable_server_changes_nothing():
    with Publisher() as engine, cluster() as api:
        api.put(engine_pod("a", engine))
        with follow(api, grace="100ms") as indexer:
            wait_status(indexer, ("a", 0), "active")
            engine.store([1], TOKENS[:4], block_size=4)
            api.set_down(True)
            wait_until(lambda: not source(indexer)["current"], 30, "the loss")
            indexer.wait_score(TOKENS, "a", 4)
            equal(indexer.workers()[0]["discovery"]["current"], False)
            api.put(pod("b", ports={"kv-events": 1}))
            api.set_down(False)
            wait_followed(indexer, ("a", 0), ("b", 0))
            indexer.wait_score(TOKENS, "a", 4)
    with cluster() as api:
        api.set_down(True)
        with follow(api) as indexer:  # it starts without the server
            wait_until(lambda: source(indexer).get("error"), 30, "an error")
            equal("age_ms" in source(indexer), False)
            api.put(pod("a", ports={"kv-events": 1}))
            api.set_down(False)
            wait_followed(indexer, ("a", 0))


def test_tokens_and_certificates():
    with cluster() as api, tempfile.TemporaryDirectory() as other:
        api.put(pod("a", ports={"kv-events": 1}))
        with follow(api) as indexer:
            wait_followed(indexer, ("a", 0))
            wait_watch(api)
            api.tokens = {"token-2"}  # the old one has expired
            api.drop()
            wait_error(indexer, "HTTP status 401: Unauthorized")
            api.write("token", "token-2")
            api.put(pod("b", ports={"kv-events": 1}))
            wait_followed(indexer, ("a", 0), ("b", 0))
        make_certificate(other)
        api.write("ca.crt", open(os.path.join(other, "cert.pem"), encoding="ascii").read())
        asked = len(api.requests)
        with follow(api) as indexer:
            wait_error(indexer, "ertificate")
            equal(len(api.requests), asked, "requests to a server that nobody trusts")
        os.remove(os.path.join(api.folder, "token"))
        with follow(api) as indexer:
            wait_error(indexer, "token: No such file")


@contextlib.contextmanager
def hostile(answer):
    """A server that sends what answer(path) yields, until the client hangs up. Yields its URL."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            try:
                for piece in answer(self.path):
                    self.wfile.write(piece)
            except OSError:
                pass

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def page(items, more):
    body = json.dumps({"metadata": {"resourceVersion": "1", "continue": more}, "items": items}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_answers_without_end():
    """Lists, refusals and headers that never end are given up: the source says so, and SIGTERM ends the process."""
    numbers = itertools.count()
    pods = lambda: [{"metadata": {"name": f"p{next(numbers):09}", "namespace": "a"}, "spec": {"containers": [{"ports": [
        {"name": "kv-events", "containerPort": 9}]}]}, "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [
            {"type": "Ready", "status": "True"}]}} for _ in range(5000)]
    answers = {"too many": lambda _: [page(pods(), "x")],
               "more than 1000 pages": lambda _: [page([], "x")],
               "list: HTTP status 403": lambda _: itertools.chain([b"HTTP/1.1 403 No\r\n\r\n"], itertools.repeat(b"x" * 4096)),
               "list: a page of more than 256 MiB": lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b" " * (1 << 20))),
               "list: ": lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"A: " + b"x" * 4000 + b"\r\n"))}
    for text, answer in answers.items():
        with tempfile.TemporaryDirectory() as folder, hostile(answer) as url, \
                Indexer("--discover", f"kubernetes:a/app=vllm?server={url}&account={folder}", "--block-size", 4) as indexer:
            wait_error(indexer, text)
            equal((source(indexer)["current"], source(indexer)["workers"]), (False, 0), text)


def test_options():
    def refused(wanted, text):
        done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", "--discover", text], capture_output=True, text=True, timeout=60,
                              env={k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")})
        equal(done.returncode != 0 and wanted in done.stderr, True, f"{text}: {done.stderr!r}")

    refused("expected [NAMESPACE]/SELECTOR", "kubernetes:app=x")
    refused("no namespace", "kubernetes:A_b/app=x")
    refused("expected server=URL", "kubernetes:/app=x?sever=https://a")
    refused("no http:// or https:// URL", "kubernetes:/app=x?server=ftp://a")
    refused("may have no user or password", "kubernetes:/app=x?server=https://user:secret@a")
    refused("no API server: KUBERNETES_SERVICE_HOST", "kubernetes:/app=x")


if __name__ == "__main__":
    sys.exit(run(globals()))
