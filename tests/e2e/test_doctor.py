#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvasir doctor beside a real kv-indexer, and doubles of engines that are broken in each way it knows.

Each call names the findings that it must give, no more and no fewer. The last test reads src/cli/doctor/findings.def and
fails where a row was produced by no call.
"""
import contextlib
import functools
import http.server
import json
import os
import pty
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

import kvtest
from kvtest import *

KVASIR = BUILD / "bin" / "kvasir"
TABLE = SOURCE / "src" / "cli" / "doctor" / "findings.def"
PROMPT = list(range(1001, 1037))  # two blocks of 16, and a tail
PRODUCED = set()
QUICK = ("--time", "200ms")


def call(*words, env=None):
    done = subprocess.run([KVASIR, "doctor", *map(str, words)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


def doctor(*words, finds=(), quick=True):
    """One call; it must find exactly @finds. Returns the findings by name."""
    status, out, err = call(*words, "--json", *(QUICK if quick else ()), *(() if "--timeout" in words else ("--timeout", "30s")))
    check(out, f"doctor printed nothing: {status} {err}")
    answer = json.loads(out)
    found = {finding["name"]: finding for finding in answer["findings"]}
    equal(set(found), set(finds), f"findings of {words}: {json.dumps(answer, indent=1)}\nnames")
    severities = {finding["severity"] for finding in found.values()}
    wanted = (2, "unasked") if "unasked" in severities else (1, "findings") if found else (0, "well")
    equal((status, answer["status"]), wanted, "exit status")
    for finding in found.values():
        check(finding["measured"] and finding["words"] and finding["remedy"], finding)
    PRODUCED.update(found)
    return found


def live(*words, finds, says):
    """Call until the engine's life shows what it must, whatever else this machine does."""
    def attempt():
        found = doctor(*words, finds=finds)
        check(all(re.search(text, found[name]["measured"]) for name, text in says.items()), found)
        return True

    wait_until(attempt, 30, f"{finds}")


@contextlib.contextmanager
def file_of(content):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(content if isinstance(content, str) else json.dumps(content))
        file.flush()
        yield file.name


@contextlib.contextmanager
def plain_server(serve):
    """A TCP server that hands each connection to @serve. Yields host:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def loop():
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    held.append(connection)
                    serve(connection)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def hangs_up():
    return plain_server(lambda connection: connection.close())


def silent():
    return plain_server(lambda connection: None)


def half_a_greeting():
    return plain_server(lambda connection: connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03"))


@contextlib.contextmanager
def endless_replay():
    """A ROUTER that answers a request with batch 0, without events, again and again. Yields its endpoint."""
    context, stop = zmq.Context(), threading.Event()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 50)
    router.setsockopt(zmq.SNDTIMEO, 50)
    router.bind("tcp://127.0.0.1:*")

    def loop():
        clients = []
        while not stop.is_set():
            with contextlib.suppress(zmq.ZMQError):
                clients = clients or [router.recv_multipart()[0]]
                router.send_multipart([clients[0], b"", bytes(8), b"\x92\xcb" + bytes(8) + b"\x90"])

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


@contextlib.contextmanager
def http_server(answer):
    """An HTTP server: answer(method, path, body, headers) returns (status, headers, body)."""
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, text = answer(self.command, self.path, body, self.headers)
            self.send_response_only(status)
            for name, value in {"Date": self.date_time_string(), "Content-Length": str(len(text)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def changed(indexer, change):
    """A proxy before a real kv-indexer: change(path, headers, document) alters what it answers."""
    def answer(method, path, body, headers):
        kept = {name: headers[name] for name in ("Content-Type",) if name in headers}
        reply = indexer.request(method, path, body or None, headers=kept)
        given = {"Date": reply.headers["Date"]}
        if reply.headers.get("Content-Type") == "application/json":
            document = reply.json()
            change(path, given, document)
            return reply.status, given, json.dumps(document).encode()
        return reply.status, given, reply.body

    return http_server(answer)


class Life(contextlib.AbstractContextManager):
    """An engine at work: @step(i) publishes, every 20 ms, until the end of `with`."""

    def __init__(self, step):
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(step,), daemon=True)

    def run(self, step):
        i = 0
        while not self.ended.wait(0.02):
            step(i)
            i += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def stores(engine, **extra):
    """Blocks of prompts that nobody asks for."""
    return lambda i: engine.store([10**6 + i], tokens=[10**6 + 16 * i + k for k in range(16)], **extra)


def wait_ready(indexer):
    wait_until(lambda: indexer.get("/ready").status == 200, what="/ready")


@contextlib.contextmanager
def system(*args, encoding="map", register=None, store=None, **engine):
    """A kv-indexer, an engine registered with it as worker 1, and the prompt's first two blocks in its cache."""
    with Indexer(*args) as indexer, Publisher(encoding=encoding, **engine) as publisher:
        indexer.register(1, publisher, **(register or {}))
        if store is not False:
            publisher.store([101, 102], tokens=PROMPT[:32], **(store or {}))
            wait_until(lambda: indexer.workers()[0]["listeners"]["0"]["batches"] == 1, what="the batch")
        wait_ready(indexer)
        yield indexer, publisher, ("--url", indexer.url, "--engine", publisher.endpoint)


def listener(indexer):
    return indexer.workers()[0]["listeners"]["0"]


# -- all well --------------------------------------------------------------------------------------
def check_healthy(encoding):
    with system(encoding=encoding) as (_, engine, words), file_of(PROMPT) as tokens, Life(stores(engine)):
        doctor(*words, "--tokens", tokens, "--time", "1s", quick=False)
        doctor(*words, "--replay", engine.replay_endpoint, "--model", MODEL, "--tenant", "default", "--tokens", tokens)


def test_a_healthy_system_gives_none():
    check_healthy("map")


def test_a_healthy_system_of_arrays_gives_none():
    check_healthy("array")


def test_the_only_worker_is_asked_by_itself():
    with system() as (indexer, engine, _):
        status, out, _ = call("--url", indexer.url, *QUICK)
        equal(status, 0, out)
        check(engine.endpoint in out and "hash agreement" in out and "no findings" in out, out)
        check("\033" not in out, "colours without a terminal")


def test_a_terminal_gets_colours():
    with Indexer() as indexer:
        main, side = pty.openpty()
        done = subprocess.Popen([KVASIR, "doctor", "--url", indexer.url], stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"})
        os.close(side)
        out = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(main, 65536):
                out += chunk
        os.close(main)
        equal(done.wait(patience(20)), 1, out)
        check(b"\033[31mfault" in out and b"no_workers" in out and b"measured  " in out and b"do  " in out, out)


def test_wrong_options():
    for words in (["--engine", "host:5557"], ["--replay", "x"], ["--text", "x"], ["--tokens", "/nowhere"], ["--url", ""], ["--nothing"]):
        status, out, err = call(*words)
        equal((status, out), (2, ""), words)
        check(err.startswith("kvasir doctor: "), err)
    with file_of({"a": 1}) as nothing:
        equal(call("--tokens", nothing)[0], 2)


def test_hostile_names_stay_text():
    with Indexer() as indexer, Publisher() as engine:
        indexer.register("w\u202e1", engine, model_name="m\u202e[2J")
        wait_ready(indexer)
        status, out, _ = call("--url", indexer.url, *QUICK)
        equal(status, 1)
        check("\u202e" not in out and "\\u202e" in out.lower(), out)


# -- kv-indexer ------------------------------------------------------------------------------------
def test_ports_of_the_indexer():
    doctor("--url", f"http://127.0.0.1:{free_port()}", finds={"indexer_refused"})
    doctor("--url", "http://no-such-host.invalid:8090", finds={"indexer_name"})
    with hangs_up() as where:
        doctor("--url", f"http://{where}", finds={"indexer_hangs_up"})
    with silent() as where:
        doctor("--url", f"http://{where}", "--timeout", "2s", finds={"indexer_silent"})
    with http_server(lambda *_: (404, {}, b"nothing")) as url:
        doctor("--url", url, finds={"indexer_other"})
    with http_server(lambda *_: (200, {}, b'{"service": "another"}')) as url:
        doctor("--url", url, finds={"indexer_other"})


def test_tls_and_tokens():
    with tempfile.TemporaryDirectory() as folder:
        cert, key = make_certificate(folder)
        with Indexer("--tls-cert", cert, "--tls-key", key) as indexer:
            doctor("--url", indexer.url, finds={"indexer_tls"})
            doctor("--url", indexer.url, "--cacert", cert, finds={"no_workers"})
    with file_of("secret\n") as tokens, Indexer("--auth-token-file", tokens) as indexer:
        found = doctor("--url", indexer.url, finds={"indexer_token"})
        check("401" in found["indexer_token"]["measured"], found)
        doctor("--url", indexer.url, "--auth-token-file", tokens, finds={"no_workers"})


def set_version(path, _, document):
    if path == "/":
        document["version"] = "0.0.9"


def set_date(_, headers, document):
    del document
    headers["Date"] = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - 3600))


def test_urls_with_passwords():
    for path in ("", "/x@y"):
        url = f"127.0.0.1:{free_port()}{path}"
        for words in (("--json",), ()):
            status, out, err = call("--url", f"http://user:s3cret@{url}", *words, *QUICK)
            equal((status, "s3cret" in out + err, url in out), (2, False, True), out + err)


def test_version_and_clock():
    with system() as (indexer, engine, _):
        with changed(indexer, set_version) as url:
            found = doctor("--url", url, "--engine", engine.endpoint, finds={"indexer_version"})
            check("0.0.9" in found["indexer_version"]["measured"], found)
        with changed(indexer, set_date) as url:
            found = doctor("--url", url, "--engine", engine.endpoint, finds={"indexer_clock"})
            check(re.search("36[0-9]{2} s behind|35[0-9]{2} s behind", found["indexer_clock"]["measured"]), found)


def test_not_ready():
    with Indexer("--min-initial-workers", 2) as indexer:
        doctor("--url", indexer.url, finds={"indexer_not_ready", "no_workers"})


@contextlib.contextmanager
def few_descriptors(n):
    """Children that are started within `with` have so few."""
    popen = kvtest.subprocess.Popen
    kvtest.subprocess.Popen = functools.partial(popen, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)))
    try:
        yield
    finally:
        kvtest.subprocess.Popen = popen


def test_limits():
    with contextlib.ExitStack() as stack:
        with few_descriptors(600):
            indexer = stack.enter_context(Indexer())
        found = doctor("--url", indexer.url, finds={"descriptors", "no_workers"})
        check("600 descriptors" in found["descriptors"]["measured"], found)
    with system("--max-registrations", 1) as (_, _, words):
        doctor(*words, finds={"registrations_full"})
    with system("--max-connections", 16) as (indexer, _, words), contextlib.ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(indexer.raw(b"GET /health HTTP/1.1\r\n"))
        wait_until(lambda: indexer.metrics()["kv_indexer_http_connections"] >= 14, what="open connections")
        doctor(*words, finds={"connections_full"})
    with system("--max-blocks", 4, store=False) as (indexer, engine, words):
        engine.store(range(1, 11), tokens=range(160))
        wait_until(lambda: listener(indexer)["partial"], what="blocks left out")
        doctor(*words, finds={"blocks_left_out", "partial"})


# -- the engine's ports ----------------------------------------------------------------------------
def test_ports_of_events():
    with system() as (indexer, engine, _):
        def events(endpoint, finds, *more):
            return doctor("--url", indexer.url, "--engine", endpoint, *more, finds={finds, "not_registered", "replay_missing"})

        events(f"tcp://127.0.0.1:{free_port()}", "events_refused")
        events("tcp://no-such-host.invalid:5557", "events_name")
        with hangs_up() as where:
            events(f"tcp://{where}", "events_hangs_up")
        with silent() as where:
            events(f"tcp://{where}", "events_other", "--timeout", "2s")
        with http_server(lambda *_: (404, {}, b"")) as url:
            events(url.replace("http", "tcp"), "events_other", "--timeout", "2s")
        found = events(engine.replay_endpoint, "events_swapped")
        check("ROUTER" in found["events_swapped"]["measured"], found)


def test_ports_of_replays():
    with system() as (_, engine, words):
        def replay(endpoint, finds, *more):
            return doctor(*words, "--replay", endpoint, *more, finds={finds, "registered_replay"})

        replay(f"tcp://127.0.0.1:{free_port()}", "replay_refused")
        replay("tcp://no-such-host.invalid:5557", "replay_name")
        with hangs_up() as where:
            replay(f"tcp://{where}", "replay_hangs_up")
        with silent() as where:
            replay(f"tcp://{where}", "replay_other", "--timeout", "2s")
        found = replay(engine.endpoint, "replay_swapped")
        check("PUB" in found["replay_swapped"]["measured"], found)
        router = engine.context.socket(zmq.ROUTER)
        router.bind("tcp://127.0.0.1:*")
        try:
            replay(router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), "replay_silent", "--timeout", "2s")
        finally:
            router.close(0)
        with endless_replay() as endpoint:
            replay(endpoint, "replay_long", "--timeout", "2s")
        with half_a_greeting() as where:
            found = replay(f"tcp://{where}", "replay_other", "--timeout", "2s")
            check("begins as ZMTP" in found["replay_other"]["measured"], found)


def test_no_replay():
    with system(replay=None) as (_, engine, words), Life(stores(engine)):
        doctor(*words, finds={"replay_missing"})


# -- what the engine publishes ---------------------------------------------------------------------
def test_no_events():
    with system(store=False) as (_, _, words):
        found = doctor(*words, finds={"no_events"})
        check("its replay is empty, too" in found["no_events"]["measured"], found)


def test_malformed():
    with system() as (_, engine, words), Life(lambda i: engine.send_frames(b"some", b"thing", b"else", b"entirely")):
        live(*words, finds={"malformed"}, says={"malformed": "4 frames"})


def test_unnumbered():
    with system(store=False, replay=None) as (_, engine, words), \
            Life(lambda i: engine.send_frames(b"topic", engine.batch([engine.stored([i + 1], range(16 * i, 16 * i + 16))]))):
        live(*words, finds={"unnumbered", "replay_missing", "partial"}, says={"unnumbered": "batches came without a number"})


def test_lost():
    with system() as (_, engine, words), Life(lambda i: stores(engine, lose=i % 3 == 1)(i)):
        live(*words, finds={"events_lost"}, says={"events_lost": r"^\d+ of \d+ batch numbers"})


def test_left_out():
    with system(store={"medium": "PUNCHED_CARDS"}, register={}) as (_, _, words):
        doctor(*words, finds={"events_left_out", "partial"})


def test_clock_of_the_engine():
    with system() as (_, engine, words):
        engine.batch = lambda events, rank=None: msgpack.packb([time.time() - 100, events])
        with Life(stores(engine)):
            live(*words, finds={"engine_clock"}, says={"engine_clock": "1[0-9]{2} s in the past"})


# -- registrations ---------------------------------------------------------------------------------
def test_names():
    with system() as (indexer, engine, words):
        doctor(*words, "--model", "other", finds={"unknown_model"})
        doctor(*words, "--tenant", "other", finds={"unknown_tenant"})
        doctor(*words, "--replay", engine.endpoint, finds={"registered_replay", "replay_swapped"})
        indexer.register(2, engine)
        wait_ready(indexer)
        doctor(*words, finds={"registered_twice"})
    with Indexer() as indexer, Publisher() as engine:
        engine.store([1], tokens=range(16))
        doctor("--url", indexer.url, "--engine", engine.endpoint, "--replay", engine.replay_endpoint, finds={"no_workers"})
        with Publisher() as other:
            indexer.register(7, other)
            wait_ready(indexer)
            doctor("--url", indexer.url, "--engine", engine.endpoint, "--replay", engine.replay_endpoint, finds={"not_registered"})


def test_block_size():
    with system(register={"block_size": 32}) as (_, _, words):
        found = doctor(*words, finds={"block_size", "partial"})
        check("32" in found["block_size"]["measured"] and "16" in found["block_size"]["measured"], found)


def test_disconnected():
    with Indexer() as indexer:
        port = free_port()
        indexer.register(1, f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{port + 1}")
        wait_until(lambda: listener(indexer)["status"] == "failed", what="the failure")
        found = doctor("--url", indexer.url, finds={"disconnected", "events_refused", "replay_refused", "indexer_not_ready", "partial"})
        check(f"127.0.0.1:{port}" in found["disconnected"]["measured"], found)


def test_behind():
    """The newest batches were lost on their way, and no later one has shown it."""
    with system() as (_, engine, words):
        for i in range(3):
            stores(engine, lose=True)(i)
        found = doctor(*words, "--timeout", "3s", finds={"behind"})
        check("number 3, kv-indexer has taken 0" in found["behind"]["measured"], found)


# -- the match -------------------------------------------------------------------------------------
def asks(words, prompt, finds, *more):
    with file_of(list(prompt)) as tokens:
        return doctor(*words, "--tokens", tokens, *more, finds=finds)


def test_prompts():
    with system() as (_, _, words):
        asks(words, PROMPT, ())
        asks(words, PROMPT[:9], {"no_full_block"})
        asks(words, range(5, 40), {"unknown_first_block"})
        asks(words, PROMPT, {"other_namespace"}, "--lora-name", "a")
        asks(words, PROMPT, {"other_namespace"}, "--cache-salt", "s")
        found = asks(words, [128000] + PROMPT, {"template"})["template"]["measured"]
        check("1 token, 128000" in found, found)
        found = asks(words, PROMPT[2:], {"template"})["template"]["measured"]
        check(f"2 tokens, {PROMPT[0]} first" in found, found)
        found = asks(words, PROMPT[:7] + [5] + PROMPT[8:], {"tokenizer"})["tokenizer"]["measured"]
        check(f"7 tokens are alike, then the router sends 5, and the engine's cached block has {PROMPT[7]}" == found, found)


def test_hashes_of_more_than_tokens_are_left_alone():
    """Images, and tokens behind the block: doctor can't tell the hash from the block's tokens, and asks for none."""
    image = [[["0" * 64, 0]], None]
    with system(store={"extra_keys": image}) as (_, _, words):
        doctor(*words)
    with system(store={"lookahead_token_ids": [[PROMPT[16]], [PROMPT[32]]]}) as (_, _, words):
        doctor(*words)


def test_adapters_and_salts():
    with system(store={"lora_name": "sql", "cache_salt": "tenant-1"}) as (_, _, words):
        asks(words, PROMPT, (), "--lora-name", "sql", "--cache-salt", "tenant-1")
        found = asks(words, PROMPT, {"adapter"}, "--lora-name", "math", "--cache-salt", "tenant-1")
        equal(found["adapter"]["measured"], "the engine's: sql; the router's: math")
        found = asks(words, PROMPT, {"salt"}, "--lora-name", "sql", "--cache-salt", "tenant-2")
        check("tenant" not in found["salt"]["measured"], "a salt was shown")
        asks(words, PROMPT, {"adapter", "salt"})


def test_nothing_is_left():
    with system() as (indexer, engine, words):
        engine.clear()
        wait_until(lambda: listener(indexer)["blocks"] == 0, what="the clear")
        asks(words, PROMPT, {"empty_index"})


def test_came_late():
    with system(replay=None, store={"parent": 99}) as (_, engine, words):
        asks(words, PROMPT, {"orphans", "partial", "replay_missing"})
        engine.seq += 1
        with Life(stores(engine)):
            asks(words, range(5, 40), {"unknown_first_block_partial_view", "partial", "replay_missing"})


def test_cut_by_group():
    with system(store=False) as (indexer, engine, words):
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
        full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        engine.send(engine.stored([101, 102], PROMPT[:32], **full), engine.stored([101, 102], PROMPT[:32], **window))
        engine.send(engine.removed([101, 102], group_idx=1))
        wait_until(lambda: listener(indexer)["batches"] == 2, what="both batches")
        asks(words, PROMPT, {"cut_by_group"})


def set_hash(path, _, document):
    if path == "/query":
        document["explain"]["first_block_hash"] ^= 1


def test_hash():
    with system() as (indexer, engine, _), changed(indexer, set_hash) as url:
        doctor("--url", url, "--engine", engine.endpoint, finds={"hash"})


# -- the engine's /tokenize ------------------------------------------------------------------------
def tokenizer(words, bos=None):
    """vLLM's /tokenize of a double: a text's tokens are its characters' numbers; messages stand in a template."""
    def answer(_, path, body, headers):
        request = json.loads(body)
        if path != "/tokenize" or request.get("model") != MODEL or headers.get("Authorization") != "Bearer key":
            return 404, {}, b'{"message": "no such model"}'
        text = request["prompt"] if "prompt" in request else "<" + "".join(m["content"] for m in request["messages"]) + ">"
        tokens = ([bos] if bos else []) + [ord(c) for c in text]
        return 200, {"Content-Type": "application/json"}, json.dumps({"count": len(tokens), "max_model_len": 9, "tokens": tokens}).encode()

    return http_server(answer)


def test_tokenize():
    text = "Plants turn sunlight into sugar, and sugar into leaves."
    plain = [ord(c) for c in text]
    with system(store=False) as (indexer, engine, words), file_of("key\n") as key, file_of(text) as prompt, tokenizer(words) as url, \
            tokenizer(words, 2) as with_bos, file_of([{"role": "user", "content": text}]) as chat:
        engine.store([1], tokens=plain[:16])
        engine.store([2], tokens=[2] + [ord(c) for c in "<" + text][:15])
        wait_until(lambda: listener(indexer)["batches"] == 2, what="the batches")
        http_words = (*words, "--engine-token-file", key)
        doctor(*http_words, "--engine-url", url, "--text", prompt)
        asks(http_words, plain, (), "--engine-url", url, "--text", prompt)
        doctor(*http_words, "--engine-url", with_bos, "--chat", chat)
        found = asks(http_words, plain, {"template"}, "--engine-url", with_bos, "--text", prompt)
        check("the engine's /tokenize has 1 token, 2 first" in found["template"]["measured"], found)
        asks(http_words, plain[:20] + [9] + plain[21:], {"tokenizer"}, "--engine-url", url, "--text", prompt)
        doctor(*http_words, "--engine-url", f"http://127.0.0.1:{free_port()}", "--text", prompt, finds={"engine_http"})
        found = doctor(*words, "--engine-url", url, "--text", prompt, finds={"engine_tokenize"})
        check("404" in found["engine_tokenize"]["measured"], found)
        endless = [7] * 1_000_000  # beginnings are compared, not each place with each other
        with http_server(lambda *_: (200, {}, json.dumps({"tokens": [*endless, 1]}).encode())) as url:
            asks(http_words, [*endless, 2], {"tokenizer", "unknown_first_block"}, "--engine-url", url, "--text", prompt)


# -- the table -------------------------------------------------------------------------------------
def rows():
    return set(re.findall(r"^KC_FINDING\((\w+),", TABLE.read_text(encoding="utf-8"), re.M))


def test_rows_of_the_page_are_findings():
    page = (SOURCE / "docs" / "engines.md").read_text(encoding="utf-8")
    table = page.split("`explain.reason`", 1)[1].split("\n\n", 1)[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    check(len(named) >= 13, named)
    equal(named - rows(), set(), "rows of docs/engines.md that are no findings")


def test_the_page_has_every_row():
    page = (SOURCE / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = re.findall(r'^KC_FINDING\((\w+), (\w+), "((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)"\)', TABLE.read_text(encoding="utf-8"), re.M)
    equal({row[0] for row in table}, rows(), "rows that the expression reads")
    for name, severity, words, remedy in table:
        row = f"| `{name}` | {severity.lower()} | {words} | {remedy} |".replace('\\"', '"').replace("*", "\\*")
        check(row in page, f"docs/doctor.md lacks: {row}")


def test_every_row_was_produced():
    if sys.argv[1:]:
        skip("not all tests ran")
    equal(rows() - PRODUCED, set(), "findings that no test produces")
    equal(PRODUCED - rows(), set(), "findings that are in no table")


if __name__ == "__main__":
    run(globals())
