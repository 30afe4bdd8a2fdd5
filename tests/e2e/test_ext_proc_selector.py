# SPDX-License-Identifier: Apache-2.0
"""kv-selector --ext-proc: choices for Envoy from the index, the bookings of the HTTP API, and real event streams."""
import json
import re
import subprocess

from kvtest import BUILD, MODEL, Indexer, Publisher, check, equal, run, wait_until
from grpctest import Engine, Stream, grpc

BLOCK = 16
EVENT = b'data: {"choices":[]}\n\n'


class Selector(Indexer):
    """A kv-selector with --ext-proc on a free port."""
    PROGRAM = "kv-selector"

    def __init__(self, *args):
        super().__init__("--ext-proc", "127.0.0.1:0", *args)
        line = wait_until(lambda: next((line for line in self.log if "external processing" in line), None), what="the port")
        self.ext_proc = "127.0.0.1:" + re.search(r"port=(\d+)", line)[1]
        self.channel = grpc.insecure_channel(self.ext_proc, options=[("grpc.use_local_subchannel_pool", 1)])

    def __exit__(self, *args):
        self.channel.close()
        return super().__exit__(*args)

    def add(self, worker, engine, endpoint, model=MODEL):
        body = {"worker_id": worker, "model_name": model, "block_size": BLOCK, "kv_events_endpoint": engine.endpoint, "endpoint": endpoint}
        equal(self.post("/workers", body).status, 201)
        engine.wait_subscriber()

    def stream(self):
        return Stream(self.channel)

    def bookings(self):
        return self.get("/reservations").json()

    def health(self):
        call = self.channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        return call(b"\x0a\x09readiness")[1]


def completion(tokens, model=MODEL):
    return json.dumps({"model": model, "prompt": list(tokens), "stream": True}).encode()


def test_routes_to_the_holder():
    """The worker that holds the prompt is chosen, others are fallbacks; the booking is the HTTP API's and follows the response."""
    tokens = list(range(64))
    with Selector("--ext-proc-fallbacks", "1") as s, Publisher() as one, Publisher() as two:
        equal(s.health(), 2, "not serving")
        s.add(1, one, "http://10.0.0.1:8000/")
        s.add(2, two, "10.0.0.2:8000")
        equal(s.health(), 1, "serving")
        two.store([11, 12, 13, 14], tokens)
        s.wait_score(tokens, 2, 64)
        with s.stream() as stream:
            equal(stream.route(completion(tokens + [7] * 16)), "10.0.0.2:8000,10.0.0.1:8000")
            booking = s.bookings()[0]
            equal((booking["worker_id"], booking["isl_tokens"], booking["effective_prefill_tokens"], booking["prefill_complete"]),
                  (2, 80, 16, False))
            stream.response(kind="text/event-stream")
            stream.response_body(EVENT)
            stream.next(), stream.next()
            equal(s.bookings()[0]["prefill_complete"], True)
            stream.response_body(3 * EVENT)
            stream.next()
            equal(s.bookings()[0]["output_tokens"], 3)
            stream.response_body(b"", last=True)
            equal(stream.echo("response_body"), b"")
            equal(s.bookings(), [])
        with s.stream() as stream:
            equal(stream.route(completion(tokens), subset=["10.0.0.1:8000"]), "10.0.0.1:8000")
            equal(len(s.bookings()), 1)
        wait_until(lambda: s.bookings() == [], what="the end of the cancelled one")
        with s.stream() as stream:
            stream.headers(subset=["10.0.0.9:8000"])
            stream.body(completion(tokens), last=True)
            equal(stream.refusal()[0], 503)
        metrics = s.metrics()
        equal(metrics['kv_selector_ext_proc_requests_total{result="routed"}'], 2)
        equal(metrics['kv_selector_ext_proc_requests_total{result="none_fits"}'], 1)
        equal(metrics[f'kv_selector_lost_total{{model="{MODEL}",tenant="default"}}'], 1)


def test_busy_and_replicas():
    """While all workers are busy clients get 429; a replica's bookings of Envoy are its peers', too, until it stops."""
    with Selector("--max-waiting", "100") as s, Publisher() as one:
        s.add(1, one, "10.0.0.1:8000")
        with Selector("--peers", s.url) as peer:
            with s.stream() as first, s.stream() as second, s.stream() as third:
                equal([first.route(completion([1] * 64)), second.route(completion([2] * 64))], ["10.0.0.1:8000"] * 2)
                wait_until(lambda: len(peer.bookings()) == 2, what="the peer knows them", timeout=30)
                third.headers()
                third.body(completion([3] * 64), last=True)
                equal(third.refusal()[0], 429)
                equal(s.metrics()["kv_selector_shed_total"], 1)
                s.stop(timeout=60)
                wait_until(lambda: peer.bookings() == [], what="streams that the stop ended are freed at the peer", timeout=30)


def test_odd_endpoints():
    """An endpoint that would be more than an address in Envoy's header isn't told; fallbacks are whole, and each another worker."""
    tokens = list(range(64))
    with Selector() as s, Publisher() as one:
        for endpoint in ("http://10.0.0.1:80\r\nx-evil: 1", "10.0.0.1:80,10.0.0.2:80", "10.0.0.1:", "10.0.0.1:80 ", "u@10.0.0.1:80",
                         "10.0.0.1:80?a=b", "[::1]", "10.0.0.1:65536", "http://"):
            s.add(1, one, endpoint)
            with s.stream() as stream:
                stream.headers()
                stream.body(completion(tokens), last=True)
                equal(stream.refusal()[0], 503, endpoint)
        s.add(1, one, "http://[::1]:80/")
        with s.stream() as stream:
            equal(stream.route(completion(tokens)), "[::1]:80")
        with s.stream() as stream:
            stream.headers()
            stream.body(completion(tokens, "a" * 1025), last=True)
            equal(stream.refusal()[0], 503, "no adapter's name is that long")
    with Selector("--ext-proc-fallbacks", "8") as s, Publisher() as one, Publisher() as two:
        names = [".".join(["w" * 60] * 4)[:-1] + f"{i}:8000" for i in range(6)]
        for i, name in enumerate(names):
            equal(s.post("/workers", {"worker_id": i, "model_name": MODEL, "block_size": BLOCK, "endpoint": name, "data_parallel_size": 2,
                                      "kv_events_endpoints": {"0": one.endpoint, "1": two.endpoint}}).status, 201)
        with s.stream() as stream:
            equal(sorted(stream.route(completion(tokens)).split(",")), names)


def test_adapters_and_models():
    """A name that isn't registered is an adapter of the only model; with two models it has to be told which."""
    tokens = list(range(64))
    for args, expected in (((), "10.0.0.1:8000"), (("--ext-proc-model", "other"), "10.0.0.2:8000")):
        with Selector(*args) as s, Publisher() as one, Publisher() as two:
            s.add(1, one, "10.0.0.1:8000")
            if args:
                s.add(2, two, "10.0.0.2:8000", "other")
            for model in ("adapter", ""):
                with s.stream() as stream:
                    equal(stream.route(completion(tokens, model)), expected)
            with s.stream() as stream:
                equal(stream.route(completion(tokens)), "10.0.0.1:8000")
            with s.stream() as stream:
                stream.headers({":method": "GET", ":path": "/v1/models"}, last=True)
                equal(stream.choice(), expected)
    with Selector() as s, Publisher() as one, Publisher() as two:
        s.add(1, one, "10.0.0.1:8000")
        s.add(2, two, "10.0.0.2:8000", "other")
        with s.stream() as stream:
            stream.headers()
            stream.body(completion(tokens, "adapter"), last=True)
            equal(stream.refusal()[0], 503, "which of the two models isn't known")


def test_workers_without_a_record():
    """Workers of /register and --discover are reached at the address of their event stream, at --ext-proc-target-port."""
    with Selector("--ext-proc-target-port", "8001") as s, Publisher() as engine:
        s.register(5, engine, block_size=BLOCK)
        with s.stream() as stream:
            equal(stream.route(completion(range(40))), "127.0.0.1:8001")
    with Selector() as s, Publisher() as engine:
        s.register(5, engine, block_size=BLOCK)
        with s.stream() as stream:
            stream.headers()
            stream.body(completion(range(40)), last=True)
            equal(stream.refusal()[0], 503, "nobody knows where to send it")


def test_tokenizes_at_the_workers():
    """Text goes to a worker's /tokenize; its tokens find the prefix."""
    text = "the quick brown fox jumps over the lazy dog, and again, and again."
    with Engine() as engine, Engine() as other, Selector("--ext-proc-tokenize-timeout", "60s") as s, Publisher() as one, Publisher() as two:
        s.add(1, one, f"http://{engine.address}")
        s.add(2, two, f"http://{other.address}")
        tokens = list(json.dumps(text).encode())
        one.store([1, 2, 3, 4], tokens[:64])
        s.wait_score(tokens, 1, 64)
        for _ in range(2):
            with s.stream() as stream:
                equal(stream.route(json.dumps({"model": MODEL, "prompt": text}).encode()), engine.address)
                equal(s.bookings()[0]["isl_tokens"], len(tokens))
            wait_until(lambda: s.bookings() == [], what="the end")
        equal((len(engine.asked), len(other.asked)), (1, 1), "by turns")
        equal(s.metrics()['kv_selector_ext_proc_prompts_total{source="engine"}'], 2)


def test_options():
    for args, text in ((("--ext-proc", "0.0.0.0:0"), "--ext-proc-insecure"), (("--ext-proc", "nonsense"), "HOST:PORT"),
                       (("--ext-proc", "192.0.2.1:0", "--ext-proc-insecure"), "can't listen on 192.0.2.1:0")):
        done = subprocess.run([BUILD / "bin" / "kv-selector", "--port", "0", "--host", "127.0.0.1", *args], capture_output=True, text=True, timeout=60,
                              check=False)
        check(done.returncode in (1, 2) and text in done.stderr, f"{args}: {done.returncode} {done.stderr!r}")


if __name__ == "__main__":
    run(globals())
