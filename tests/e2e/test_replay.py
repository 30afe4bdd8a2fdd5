# SPDX-License-Identifier: Apache-2.0
"""kvasir replay as people run it: a real kv-indexer, real ZMQ, its JSON report and its exit status."""
import http.server
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
LESS = 3 if SANITIZED else 1  # of the same traffic: release compares all of it


def replay(*args, status=0, timeout=240, **kw):
    """Run it; returns (report, stdout, stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        own = [] if "--json" in args else ["--json", str(report)]
        command = [KVASIR, "replay", "--only", "index", "--quiet", *own, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **kw)
        equal(done.returncode, status, f"{command}: status\n{done.stdout}\n{done.stderr}\n")
        return json_of(report), done.stdout, done.stderr


def json_of(path):
    return json.loads(path.read_text()) if path.exists() else None


def check_report(r, requests):
    equal(r["requests"], requests, "requests")
    equal(r["answers_exact"] + r["answers_over"] + r["answers_under"], requests, "answers")
    equal(r["wrong"], 0, "wrong comparisons")
    check(r["verified"] and r["verified_prompts"] > 0, "not verified")
    equal(r["comparisons"], r["verified_prompts"] * r["options"]["workers"], "comparisons")
    equal(r["holder_blocks"], r["blocks_stored"] - r["blocks_removed"], "blocks of the engines")
    check(0 <= r["hit_fraction"] <= r["hit_fraction_unlimited"] + 1e-9, f"hit fraction {r['hit_fraction']}")
    check(0 < r["query_p50_us"] <= r["query_p99_us"] <= r["query_max_us"], "query times")
    check(r["events"] > 0 and r["dropped_events"] == 0, "events")
    check(r["index_bytes"] > 0, "index bytes")


def test_small_run():
    requests = 300 // LESS
    r, out, _ = replay("--requests", requests)
    check_report(r, requests)
    check("all equal" in out, out)
    check(r["answers_exact_fraction"] > 0.5, f"only {r['answers_exact_fraction']} of the answers were exact")


def test_eviction_and_own_hashes():
    """Caches much smaller than the workload: most of what was stored is removed again."""
    requests, blocks = 300 // LESS, 3000 // LESS
    for extra in ([], ["--own-hashes"], ["--msgpack"], ["--clients", 4]):
        r, _, _ = replay("--requests", requests, "--workers", 4, "--blocks", blocks, "--verify", requests, *extra)
        check_report(r, requests)
        check(r["blocks_removed"] > 3 * 4 * blocks, "nothing was evicted")
        check(r["holder_blocks"] <= 4 * blocks, "more blocks than room")


def test_lockstep_is_exact():
    """When the indexer has caught up after each request, every answer must be exact for every worker."""
    requests = 200 // LESS
    r, _, _ = replay("--requests", requests, "--workers", 3, "--blocks", 2000 // LESS, "--block-size", 64, "--lockstep")
    check_report(r, requests)
    equal((r["answers_exact"], r["answers_all_exact"], r["lockstep_wrong"]), (requests, requests, 0), "exact answers")
    equal(r["blocks_believed"], r["blocks_held"], "blocks over all workers")


def test_repeatable():
    """With one client and in lockstep nothing depends on timing."""
    args = ("--requests", 120 // LESS, "--workers", 3, "--blocks", 4000 // LESS, "--lockstep", "--seed", 5)
    a, b = (replay(*args)[0] for _ in range(2))
    for key in ("blocks_asked", "blocks_found", "hit_fraction_random", "blocks_stored", "blocks_removed"):
        equal(a[key], b[key], key)


def test_policies():
    if SANITIZED:
        skip("a matter of figures, not of memory")
    hits = {}
    for policy in ("prefix", "round-robin", "random"):
        r, _, _ = replay("--requests", 1500, "--block-size", 512, "--policy", policy)
        check_report(r, 1500)
        hits[policy] = r["hit_fraction"]
        check(abs(r["hit_fraction_random"] - hits[policy]) < 0.05 or policy == "prefix", f"random shadow: {r}")
    check(hits["prefix"] > hits["random"] + 0.03 and hits["prefix"] > hits["round-robin"] + 0.03, f"{hits}")


def trace_path(name):
    for folder in (os.environ.get("KV_TRACES", "/nonexistent"), SOURCE / "traces", SOURCE / "../shared/traces/mooncake"):
        if (pathlib.Path(folder) / name).exists():
            return str((pathlib.Path(folder) / name).resolve())
    skip(f"no {name}: tools/get-traces.sh downloads it")


def one_unlimited_worker(trace, requests, fraction):
    if SANITIZED:
        skip("a matter of figures, not of memory")
    r, _, _ = replay(trace, "--workers", 1, "--blocks", 0, "--block-size", 512, "--msgpack")
    check_report(r, requests)
    equal(f"{r['hit_fraction']:.4f}", fraction, "hit fraction")
    equal(f"{r['hit_fraction_unlimited']:.4f}", fraction, "hit fraction of the endless cache")


def test_published_hit_fraction_conversation():
    """Live, over HTTP and ZMQ: one unlimited worker finds what is published for the trace."""
    one_unlimited_worker(trace_path("conversation_trace.jsonl"), 12031, "0.3664")


def test_published_hit_fraction_synthetic():
    one_unlimited_worker(trace_path("synthetic_trace.jsonl"), 3993, "0.6396")


def test_one_unlimited_worker_generated():
    requests = 1000 // LESS
    r, _, _ = replay("--workers", 1, "--blocks", 0, "--block-size", 512, "--requests", requests, "--msgpack")
    check_report(r, requests)
    equal(r["hit_fraction"], r["hit_fraction_unlimited"], "hit fraction")


def test_wraps_around():
    """More requests than the trace has: it starts over with new prompts, so the hit fraction stays."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        for i in range(50):
            ids = [0, 1] + [100 + i * 3, 101 + i * 3]
            trace.write('{"timestamp": %d, "input_length": 2000, "output_length": 10, "hash_ids": %s}\n' % (i * 100, ids))
        trace.flush()
        r, _, _ = replay(trace.name, "--requests", 150, "--workers", 1, "--blocks", 0)
        check_report(r, 150)
        equal(r["blocks_found"], 3 * 49 * 2 * 32, "blocks found")
        r, _, _ = replay(trace.name, "--seconds", 1, "--workers", 2)
        check(r["requests"] > 0 and r["verified"] and r["wrong"] == 0, f"{r}")
        started = time.monotonic()  # 4.9 s of traffic
        r, _, _ = replay(trace.name, "--rate", 5)
        check(time.monotonic() - started > 0.95, "--rate was not kept")
        check_report(r, 50)


def test_running_indexer():
    """--url: workers are registered, and gone afterwards; others' models are left alone."""
    with Indexer() as indexer, Publisher() as other:
        indexer.register(900, other, block_size=4)
        other.store([11, 12], tokens=range(8), block_size=4)
        indexer.wait_score(range(8), 900, 8)
        for _ in range(2):
            r, _, _ = replay("--requests", 60, "--url", indexer.url, "--workers", 3)
            check_report(r, 60)
            check("indexer_rss" not in r, "the memory of somebody else's process")
            equal([w["instance_id"] for w in indexer.workers()], [900], "workers left")
        equal(indexer.score(range(8), 900), 8, "the other model's score")


def serving(indexer, engine, instances):
    """Register workers of the model "m" that hold two blocks each; returns what is compared afterwards."""
    for instance in instances:
        indexer.register(instance, engine, block_size=4)
    engine.store([11, 12], tokens=range(8), block_size=4)
    for instance in instances:
        indexer.wait_score(range(8), instance, 8)
    return lambda: ([(w["instance_id"], w["model_name"], w["tenant_id"]) for w in indexer.workers()],
                    [indexer.score(range(8), instance) for instance in instances])


def test_workers_that_serve_stay():
    """--url and --model of a service: its workers are numbered from 1, and its blocks have another size."""
    with Indexer() as indexer, Publisher() as engine:
        state = serving(indexer, engine, (1, 2, 3))
        before = state()
        for extra in ([], ["--msgpack"]):
            r, _, _ = replay("--requests", 60, "--url", indexer.url, "--workers", 3, "--model", MODEL, *extra)
            check_report(r, 60)
            equal(state(), before, "workers of the service")
        _, _, err = replay("--requests", 5, "--url", indexer.url, "--workers", 3, "--model", MODEL, "--json", "/nonexistent/x",
                           status=1)
        equal(state(), before, f"workers of the service after a replay that failed: {err}")


def test_two_replays_on_one_indexer():
    """At once, and with blocks of different sizes: neither takes the other's workers."""
    with Indexer() as indexer:
        command = [KVASIR, "replay", "--only", "index", "--quiet", "--json", "-", "--requests", "100", "--rate", "400", "--url", indexer.url,
                   "--workers", "3"]
        both = [subprocess.Popen([*command, "--block-size", size], stdout=subprocess.PIPE, text=True) for size in ("16", "64")]
        try:
            outputs = [process.communicate(timeout=60 * SLOW)[0] for process in both]
        finally:
            for process in both:
                process.kill()
                process.wait()
        for process, out in zip(both, outputs):
            equal(process.returncode, 0, f"status\n{out}")
            check_report(json.loads(out), 100)
        equal(indexer.workers(), [], "workers left")


class TakenIndexer(http.server.BaseHTTPRequestHandler):
    """An indexer that has all instance_ids registered for somebody else."""
    protocol_version = "HTTP/1.1"
    unregistered = []

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/unregister":
            self.unregistered.append(body)
        self.answer(409 if self.path == "/register" else 404, b'{"error": "registered for model=m tenant=default"}')

    def log_message(self, *_):
        pass


def test_taken_instances_are_refused():
    """It asks to unregister none but its own tenant's workers, and says whose the others are not."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), TakenIndexer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            done = subprocess.run([KVASIR, "replay", "--only", "index", "--quiet", "--url", url, "--workers", "2"], capture_output=True, text=True,
                                  timeout=60)
        finally:
            server.shutdown()
            thread.join()
    equal(done.returncode, 1, f"status\n{done.stderr}")
    check("is taken by a worker that this run didn't register" in done.stderr, done.stderr)
    check(TakenIndexer.unregistered, "nothing was unregistered")
    for body in TakenIndexer.unregistered:
        check(body.get("tenant_id", "default").startswith("kvasir-replay-") and 2**52 <= body["instance_id"] < 2**53, f"{body}")


def test_tokens():
    """An indexer that asks for a token: replay and top send the file's first one."""
    with tempfile.NamedTemporaryFile("w") as tokens, tempfile.NamedTemporaryFile("w") as wrong:
        tokens.write("# ours\n\n  a-token \nanother\n")
        tokens.flush()
        wrong.write("x-token\n")
        wrong.flush()
        with Indexer("--auth-token-file", tokens.name, headers={"Authorization": "Bearer a-token"}) as indexer:
            for extra in ["--msgpack"], []:
                r, _, _ = replay("--requests", 60, "--url", indexer.url, "--workers", 3, "--auth-token-file", tokens.name, *extra)
                check_report(r, 60)
            for command in ["replay", "--only", "index", "--requests", "5", "--quiet"], ["top", "--once"]:
                for file, status, text in ((tokens.name, 0, ""), (wrong.name, 1, "; it doesn't know the token of --auth-token-file\n"),
                                           (None, 1, "; give the token with --auth-token-file\n"),
                                           ("/nonexistent/token", 2, "/nonexistent/token"), ("/dev/null", 2, "no token")):
                    arguments = [*command, "--url", indexer.url, *(["--auth-token-file", file] if file else [])]
                    done = subprocess.run([KVASIR, *arguments], capture_output=True, text=True, timeout=60)
                    equal(done.returncode, status, f"{arguments}: status\n{done.stderr}")
                    check(text in done.stderr, f"{arguments}: {done.stderr!r} does not say {text!r}")
                    check("-token\n" not in done.stderr and "a-token" not in done.stderr, "a token in an error message")


def test_check_hits():
    done = subprocess.run([KVASIR, "replay", "--only", "index", "--check-hits"], capture_output=True, text=True, timeout=60)
    equal(done.returncode, 0, "status")
    check(re.search(r"unlimited +0\.3\d{3} +0\.3\d{3}", done.stdout), done.stdout)
    done = subprocess.run([KVASIR, "replay", "--only", "index", "--check-hits", trace_path("conversation_trace.jsonl")], capture_output=True,
                          text=True, timeout=60)
    equal(done.returncode, 0, f"status\n{done.stdout}")
    check("0.3664       0.3664       0.3664" in done.stdout, done.stdout)
    done = subprocess.run([KVASIR, "replay", "--only", "index", "--check-hits", "--json", "-"], capture_output=True, text=True, timeout=60)
    equal((done.returncode, "--json" in done.stderr), (2, True), "an option that would do nothing")


def test_a_wrong_index_is_noticed():
    """The final comparison must be able to fail: the indexer stops listening to worker 1."""
    with Indexer(env={"KV_INDEXER_TEST_ENDPOINTS": "1"}) as indexer:
        process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--quiet", "--json", "-", "--url", indexer.url, "--workers", "2", "--rate",
                                    "50", "--seconds", "6", "--settle", "1s"], stdout=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: len(indexer.workers()) == 2, what="registration")
            # More than the question that shows whether all workers are followed
            wait_until(lambda: any("index_holder_blocks" in name and value > 500 for name, value in indexer.metrics().items()), what="traffic")
            first = min(worker["instance_id"] for worker in indexer.workers())
            equal(indexer.post("/test/pause_listener", {"instance_id": first}).status, 200, "pause")
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        r = json.loads(out)
        equal(process.returncode, 1, "status")
        check(r["wrong"] > 0 and r["first_difference"], f"{r}")


def is_under_way(pid):
    """Whether the replay asks its kv-indexer, process @pid: registrations and the first events are behind it."""
    links = [os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    metrics = ports and http_request(f"http://127.0.0.1:{ports[0]}", "GET", "/metrics").body
    return ports and re.search(rb"^dynamo_kvindexer_requests_total\{endpoint=\"/query.*\} [1-9]", metrics, re.M)


def test_interrupt():
    """^C: a partial table, status 130, and no kv-indexer left behind."""
    process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--rate", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    child = []
    try:
        wait_until(lambda: child.extend(children_of(process.pid)) or child, what="its kv-indexer")
        wait_until(lambda: is_under_way(child[0]), what="queries at its kv-indexer")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        out, err = process.communicate(timeout=30 * SLOW)
    finally:
        process.kill()
        process.wait()
    equal(process.returncode, 130, f"status\n{out}\n{err}")
    check("interrupted" in out and "not compared" in out, out)
    wait_until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in child), what="the end of kv-indexer")


def children_of(pid):
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_child_dies_with_parent():
    process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--quiet", "--rate", "5"], stdout=subprocess.DEVNULL)
    child = []
    wait_until(lambda: child.extend(children_of(process.pid)) or child, what="its kv-indexer")
    time.sleep(0.5)
    process.kill()
    process.wait()
    wait_until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in child), what="the end of kv-indexer")


def test_its_indexer_has_default_options():
    """Variables for a service's indexer don't reach the one that a replay starts."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = pathlib.Path(folder) / "tokens", pathlib.Path(folder) / "access.log"
        tokens.write_text("a-token\n")
        env = {**os.environ, "KV_INDEXER_AUTH_TOKEN_FILE": str(tokens), "KV_INDEXER_MAX_BLOCKS": "10",
               "KV_INDEXER_ACCESS_LOG": str(log), "DYN_ROUTER_MIN_INITIAL_WORKERS": "100"}
        r, _, _ = replay("--requests", 30, "--workers", 2, env=env)
        check_report(r, 30)
        check(not log.exists(), "the service's access log has the replay's requests")


def test_its_indexer_dies():
    """A kv-indexer of its own that ends is a failure with a reason, not something to wait for."""
    process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--quiet", "--rate", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    child = []
    wait_until(lambda: child.extend(children_of(process.pid)) or child, what="its kv-indexer")
    wait_until(lambda: is_under_way(child[0]), what="queries at its kv-indexer")
    os.kill(child[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60 * SLOW)
    equal(process.returncode, 1, f"status\n{out}\n{err}")
    check("signal 9" in err, err)


def test_its_indexer_ends_late():
    """One that hangs up and ends only later, as a process does while the kernel tears it down."""
    with tempfile.TemporaryDirectory() as folder:
        late = pathlib.Path(folder) / "kv-indexer"
        late.write_text(f'#!/bin/sh\n"{BUILD}/bin/kv-indexer" "$@"\nsleep 2\nexit 7\n')
        late.chmod(0o755)
        process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--quiet", "--rate", "5", "--indexer", str(late)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        child, indexer = [], []
        try:
            wait_until(lambda: child.extend(children_of(process.pid)) or child, what="its kv-indexer")
            wait_until(lambda: indexer.extend(children_of(child[0])) or indexer, what="the real one")
            wait_until(lambda: is_under_way(indexer[0]), what="queries at the real one")
            os.kill(indexer[0], signal.SIGKILL)
            out, err = process.communicate(timeout=40)
        finally:
            process.kill()
            process.wait()
        equal(process.returncode, 1, f"status\n{out}\n{err}")
        check("status 7" in err, err)


def test_errors_teach():
    cases = [
        (["/nonexistent/trace.jsonl"], 1, "/nonexistent/trace.jsonl"),
        (["--indexer", "/nonexistent/kv-indexer"], 1, "--indexer PATH"),
        (["--indexer", "/bin/true"], 1, "did not start listening"),
        (["--url", f"http://127.0.0.1:{free_port()}"], 1, "is a kv-indexer running at"),
        (["--block-size", "48"], 2, "does not divide"),
        (["--workers", "0"], 2, "workers"),
        (["--policy", "best"], 2, "policy"),
        (["--lockstep", "--clients", "2"], 2, "--clients 1"),
        (["--auth-token-file", "/dev/null"], 2, "needs --url"),
        (["--nonsense"], 2, "nonsense"),
        (["--requests", "5", "--json", "/nonexistent/x.json"], 1, "/nonexistent/x.json"),
    ]
    for args, status, text in cases:
        done = subprocess.run([KVASIR, "replay", "--only", "index", "--quiet", *args], capture_output=True, text=True, timeout=60)
        equal(done.returncode, status, f"{args}: status\n{done.stderr}")
        check(text in done.stderr, f"{args}: {done.stderr!r} does not say {text!r}")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        trace.write('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n{"timestamp": oops}\n')
        trace.flush()
        done = subprocess.run([KVASIR, "replay", "--only", "index", trace.name], capture_output=True, text=True, timeout=60)
        equal(done.returncode, 1, "status")
        check(f"{trace.name}:2: " in done.stderr, done.stderr)


def test_a_silent_indexer():
    """Give up an indexer that never answers: without asking it, for each worker, to forget what it never heard of."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run([KVASIR, "replay", "--only", "index", "--quiet", "--requests", "5", "--workers", "3", "--url", url],
                              capture_output=True, text=True, timeout=240)
        equal(done.returncode, 1, f"status\n{done.stderr}")
        check("timed out" in done.stderr, done.stderr)
        server.settimeout(0)
        asked = []
        try:
            while True:  # connections wait in the queue, with what was sent over them
                with server.accept()[0] as sock:
                    asked.append(sock.recv(100).split(b" HTTP")[0])
        except BlockingIOError:
            pass
        equal(asked, [b"GET /health"], "requests")


def test_help():
    for words, status in ([], 2), (["--help"], 0), (["help"], 0):
        done = subprocess.run([KVASIR, *words], capture_output=True, text=True, timeout=60)
        equal(done.returncode, status, f"kvasir {words}: status")
        shown, other = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
        check("replay" in shown and "top" in shown and not other, done)
    for command in "bench", "peer", "store":
        done = subprocess.run([KVASIR, command], capture_output=True, text=True, timeout=60)
        equal((done.returncode, done.stdout), (2, ""), f"kvasir {command}: status, standard output")
        check(done.stderr.startswith(f"usage: kvasir {command} "), done.stderr)
    equal(subprocess.run([KVASIR, "nonsense"], capture_output=True, timeout=10).returncode, 2, "status")
    for command in (["replay", "--only", "index"], ["top"]):
        done = subprocess.run([KVASIR, *command, "--help"], capture_output=True, text=True, timeout=60)
        equal(done.returncode, 0, "status")
        check("--url" in done.stdout, done.stdout)


def test_progress_bar():
    """On a terminal there is a bar that goes away at the end."""
    master, slave = pty.openpty()
    process = subprocess.Popen([KVASIR, "replay", "--only", "index", "--requests", str(300 // LESS), "--rate", "40"],
                               stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    seen = b""
    while select.select([master], [], [], 60)[0]:
        try:
            data = os.read(master, 4096)
        except OSError:  # the other side was closed
            break
        if not data:
            break
        seen += data
    os.close(master)
    equal(process.wait(60), 0, "status")
    text = seen.decode()
    check(re.search(r"\[#+\.+\] +\d+ %  \d+ requests", text), text[-400:])
    check(text.endswith("\r\x1b[K"), repr(text[-80:]))


def test_a_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([KVASIR, "replay", "--only", "index", "--requests", "5", "--quiet"], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=120)
    equal(done.returncode, 1, f"status {done.stderr}")
    check("can't write standard output" in done.stderr, done.stderr)


def test_top_ends_with_q():
    with Indexer() as indexer:
        master, slave = pty.openpty()
        process = subprocess.Popen([KVASIR, "top", "--interval", "30s", "--url", indexer.url], stdin=slave, stdout=slave,
                                   stderr=slave)
        os.close(slave)
        seen = b""
        while b"no workers are registered" not in seen:
            seen += os.read(master, 4096)
        os.write(master, b"q")
        equal(process.wait(60), 0, "status")
        os.close(master)


def test_top():
    with Indexer() as indexer, Publisher() as engine:
        empty = subprocess.run([KVASIR, "top", "--once", "--url", indexer.url], capture_output=True, text=True, timeout=60)
        equal(empty.returncode, 0, f"status {empty.stderr}")
        check("no workers are registered" in empty.stdout, empty.stdout)
        indexer.register(5, engine, block_size=4)
        engine.store([11, 12], tokens=range(8), block_size=4)
        indexer.wait_score(range(8), 5, 8)
        engine.store([13], tokens=range(8, 12), parent=12, block_size=4)
        indexer.wait_score(range(12), 5, 12)
        engine.send(engine.removed([13]))
        wait_until(lambda: indexer.score(range(12), 5) == 8, 30, "the removal")
        done = subprocess.run([KVASIR, "top", "--once", indexer.url], capture_output=True, text=True, timeout=60)
        row = [line for line in done.stdout.splitlines() if re.match(r" +5 +0  ", line)]
        check(len(row) == 1 and " active " in row[0], done.stdout)
        equal(row[0].split()[:5], ["5", "0", MODEL, "active", "2"], "its row")
        equal(row[0].split()[7], "2", "blocks that it has, not those that came")
        check("2 holder-blocks" in done.stdout, done.stdout)
        done = subprocess.run([KVASIR, "top", "--once", "--json", "--url", indexer.url], capture_output=True, text=True,
                              timeout=60)
        streams = json.loads(done.stdout)["streams"]
        equal([(s["instance_id"], s["status"], s["last_seq"]) for s in streams], [(5, "active", 2)], "streams")
        with open("/dev/full", "w") as full:
            equal(subprocess.run([KVASIR, "top", "--once", "--url", indexer.url], stdout=full, timeout=60).returncode, 1,
                  "status of a full disk")
        done = subprocess.run([KVASIR, "top", "--once", "--url", indexer.url + "/elsewhere"], capture_output=True, text=True,
                              timeout=60)
        check(done.returncode == 1 and "is that server a kv-indexer" in done.stderr, done.stderr)
    done = subprocess.run([KVASIR, "top", "--once", "--url", indexer.url], capture_output=True, text=True, timeout=60)
    equal(done.returncode, 1, "status without an indexer")
    check("is a kv-indexer running there" in done.stderr, done.stderr)


if __name__ == "__main__":
    run(globals())
