# SPDX-License-Identifier: Apache-2.0
"""What the tests of external processing share: grpcio and Envoy's messages (PyPI's grpcio and xds-protos, which
tools/setup.sh installs into build/grpc-client), a picker (tests/extproc/picker_node.c), an engine's HTTP side.

    with Node("10.0.0.1:80", "10.0.0.2:80") as node, node.stream() as stream:
        stream.headers()
        stream.body(b"{}", last=True)
        equal(stream.choice(), "10.0.0.1:80")
"""
import glob
import http.server
import json
import os
import queue
import subprocess
import sys
import threading

from kvtest import BUILD, SOURCE, patience, skip_all

sys.path[:0] = glob.glob(os.path.join(os.environ.get("KV_GRPC_CLIENT", str(SOURCE / "build" / "grpc-client")), "lib", "python3*", "site-packages"))
sys.dont_write_bytecode = True
try:
    import grpc
    from envoy.config.core.v3 import base_pb2
    from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
except ImportError as problem:
    skip_all(f"grpcio and xds-protos are needed: ./dev test installs them into build/grpc-client ({problem})")
if not (BUILD / "tests" / "picker_node").exists():
    skip_all("this build has no external processing (libnghttp2-dev, libprotobuf-c-dev, protobuf-c-compiler)")

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
KEY = "x-gateway-destination-endpoint"
FULL = 4  # FULL_DUPLEX_STREAMED
CHUNK = 62 << 10
pack, unpack = pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString


def header_map(pairs):
    return base_pb2.HeaderMap(headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()])


def http_headers(pairs, last=False):
    return pb.HttpHeaders(headers=header_map(pairs), end_of_stream=last)


def first_message(pairs=None, subset=None, last=False, modes=None):
    """Request headers. @modes: of request and response bodies, as Envoy tells them."""
    message = pb.ProcessingRequest(request_headers=http_headers({":method": "POST", ":path": "/v1/completions", **(pairs or {})}, last))
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].get_or_create_list(KEY + "-subset").extend(subset)
    if modes:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def choice_of(response):
    """The endpoints in the header and in the metadata, which have to agree."""
    mutation = response.request_headers.response.header_mutation
    header = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    metadata = response.dynamic_metadata["envoy.lb"][KEY]
    if header.get(KEY) != metadata or mutation.set_headers[0].append_action != 2:
        raise AssertionError(f"header {header}, metadata {metadata}")
    return metadata


class Stream:
    """A stream of Process as Envoy opens it. Each method sends a message; next() waits for one."""

    def __init__(self, channel, timeout=None):
        self.sent = queue.Queue()
        self.call = channel.stream_stream(PROCESS, pack, unpack)(iter(self.sent.get, None), timeout=timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call.cancel()
        self.sent.put(None)

    def send(self, **fields):
        self.sent.put(pb.ProcessingRequest(**fields))

    def headers(self, pairs=None, subset=None, last=False, modes=None):
        self.sent.put(first_message(pairs, subset, last, modes))

    def body(self, data, last=False):
        self.send(request_body=pb.HttpBody(body=data, end_of_stream=last))

    def response(self, status="200", kind="application/json", last=False):
        self.send(response_headers=http_headers({":status": status, "content-type": kind}, last))

    def response_body(self, data, last=False):
        self.send(response_body=pb.HttpBody(body=data, end_of_stream=last))

    def next(self):
        return next(self.call)

    def choice(self):
        return choice_of(self.next())

    def echo(self, side="request_body"):
        """The body that comes back, until its end."""
        parts = []
        while True:
            message = self.next()
            if message.WhichOneof("response") != side:
                raise AssertionError(f"{side} expected, not {message}")
            chunk = getattr(message, side).response.body_mutation.streamed_response
            if len(chunk.body) > CHUNK:
                raise AssertionError(f"a chunk of {len(chunk.body)} bytes")
            parts.append(chunk.body)
            if chunk.end_of_stream:
                return b"".join(parts)

    def refusal(self):
        """The status and the body of an immediate response."""
        response = self.next().immediate_response
        return response.status.code, json.loads(response.body)

    def close(self):
        """Send no more, and wait for the status."""
        self.sent.put(None)
        for _ in self.call:
            pass
        return self.call.code()

    def route(self, body, **headers):
        """All of a request; returns its endpoints."""
        self.headers(**headers)
        self.body(body, last=True)
        chosen = self.choice()
        if self.echo() != body:
            raise AssertionError("the body came back changed")
        return chosen


class Node:
    """A picker_node process. Arguments that begin with -- are its options, each with a value."""

    def __init__(self, *args):
        self.lock = threading.Lock()
        self.process = subprocess.Popen([str(BUILD / "tests" / "picker_node"), *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        line = self.process.stdout.readline()
        if not line.startswith("port "):
            raise AssertionError(f"picker_node said {line!r}")
        self.port = int(line.split()[1])
        self.target = f"127.0.0.1:{self.port}"
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.channel.close()
        status = self.stop()
        if kind is None and status != 0:
            raise AssertionError(f"picker_node: exit status {status}; 1: bookings were left")

    def stop(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(patience(60))
        return self.process.returncode

    def stream(self, timeout=None):
        return Stream(self.channel, timeout)

    def ask(self, command):
        with self.lock:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()

    def loads(self):
        return json.loads(self.ask("loads"))

    def metrics(self):
        """Samples by name with labels."""
        with self.lock:
            self.process.stdin.write("metrics\n")
            self.process.stdin.flush()
            lines = iter(self.process.stdout.readline, "\n")
            return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in list(lines) if not line.startswith("#")}


class Engine:
    """The HTTP side of an engine: POST /tokenize, and answers to completions.

    pause: an event before which no request is answered, clear while @paused.
    """

    def __init__(self, paused=False, status=200):
        self.status, self.asked, self.served = status, [], 0
        self.pause = threading.Event()
        if not paused:
            self.pause.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.reply(self, 200, "application/json", b"{}")

            def do_POST(self):
                outer.answer(self, outer.read_body(self))

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request, client_address):
                if not isinstance(sys.exc_info()[1], OSError):  # clients may hang up
                    super().handle_error(request, client_address)

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request, body):
        if request.path == "/tokenize":
            self.asked.append(json.loads(body))
            self.pause.wait(patience(60))
            text = json.dumps(self.asked[-1].get("messages") or self.asked[-1].get("prompt"))
            content = json.dumps({"count": len(text), "max_model_len": 4096, "tokens": list(text.encode())}).encode()
            self.reply(request, self.status, "application/json", content)
        else:
            self.pause.wait(patience(60))
            self.served += 1
            events = b"".join(b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(5)) + b"data: [DONE]\n\n"
            self.reply(request, 200, "text/event-stream", events)

    @staticmethod
    def read_body(request):
        if request.headers.get("transfer-encoding") != "chunked":
            return request.rfile.read(int(request.headers.get("content-length") or 0))
        parts = []
        while True:
            size = int(request.rfile.readline() or b"0", 16)
            parts.append(request.rfile.read(size))
            request.rfile.readline()
            if size == 0:
                return b"".join(parts)

    @staticmethod
    def reply(request, status, kind, content):
        try:
            request.send_response(status)
            request.send_header("content-type", kind)
            request.send_header("content-length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)
        except OSError:
            pass  # the client waits no longer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pause.set()
        self.server.shutdown()
        self.server.server_close()
