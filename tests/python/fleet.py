# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for engines, and a router in front of them and of a real kv-indexer.

The stand-ins compute nothing, but their caches are real: blocks by hash, the least recently used leave, and each change is
published with kvasir.events.
"""
import asyncio
import contextlib
import http.client
import json
import threading
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvpython import SLOW, check, equal, wait_until
from kvtest import MODEL, Indexer
from kvasir._asgi import listen
from kvasir.client import Client
from kvasir.events import Publisher
from kvasir.index import hash_tokens, sequence_hashes
from kvasir.router import Router

BLOCK, ENGINES, BLOCKS = 16, 4, 256  # tokens a block, engines, blocks in each engine's cache


class Engine:
    """A server of completions: says which engine it is, and how much of the prompt its cache had."""

    renders = ()  # paths of requests' prompts, for which GET isn't allowed

    def __init__(self, number):
        self.number, self.cache, self.lock = number, OrderedDict(), threading.Lock()
        self.prompt_tokens = self.cached_tokens = 0
        self.may_end, self.gone = threading.Event(), threading.Event()  # of an answer without an end
        self.may_begin, self.asked, self.arrived = threading.Event(), [], []  # of one that waits; paths of questions, and of requests
        self.events = Publisher("tcp://127.0.0.1:*", block_size=BLOCK, replay_endpoint="tcp://127.0.0.1:*")
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                if self.path in engine.renders:
                    return engine.answer(self, {"detail": "Method Not Allowed"}, 405)
                return engine.answer(self, {"object": "list", "engine": engine.number, "path": self.path})

            def do_POST(self):
                engine.serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    @staticmethod
    def answer(handler, body, status=200):
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def serve(self, handler, body):
        if not isinstance(body, dict):
            return self.answer(handler, {"error": "no request"}, 400)
        if handler.path == "/tokenize" or handler.path in self.renders:
            self.asked.append(handler.path)
            return self.answer(handler, self.tell(handler.path, body))
        tokens = self.tokens(handler.path, body)
        self.arrived.append(handler.path)
        if body.get("wait_before"):
            check(self.may_begin.wait(60 * SLOW), "nobody let it begin")
        found = self.compute(tokens)
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": found}}
        if not body.get("stream"):
            return self.answer(handler, {"engine": self.number, "usage": usage, "told": handler.headers.get("X-Told")})
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            for number in range(10 ** 9 if body.get("endless") else 5):
                line = b"data: %d\n\n" % number
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                if number == 0 and body.get("wait"):
                    check(self.may_end.wait(60 * SLOW), "nobody read the first piece")
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.gone.set()  # the client's end reached us
            handler.close_connection = True

    def tokens(self, _path, body):
        """The tokens of a request's prompt."""
        prompt = body.get("messages", body.get("prompt"))
        if prompt and isinstance(prompt[0], list):
            prompt = prompt[0]
        return prompt if isinstance(prompt[0], int) else list(json.dumps(prompt).encode())

    def tell(self, path, body):
        """The answer of /tokenize, and of PATH/render."""
        return {"tokens": self.tokens(path, body)}

    def compute(self, tokens):
        """Find the prompt's longest prefix in the cache, add the rest, and return the tokens found."""
        local = hash_tokens(tokens, BLOCK)
        hashes = list(sequence_hashes(local))
        with self.lock:
            found = 0
            while found < len(hashes) and hashes[found] in self.cache:
                found += 1
            new = hashes[found:]
            for key in reversed(hashes):  # the first block is the last to leave
                self.cache[key] = True
                self.cache.move_to_end(key)
            gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - BLOCKS)]
            if gone:
                self.events.removed(gone)
            if new:
                self.events.stored(new, tokens[found * BLOCK:len(hashes) * BLOCK], parent=hashes[found - 1] if found else None)
            self.prompt_tokens += len(tokens)
            self.cached_tokens += found * BLOCK
        return found * BLOCK

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.events.close()


class Front:
    """A router served by a thread's event loop."""

    def __init__(self, kind, indexer, engines, **options):
        self.loop, self.started = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(kind, indexer, engines, options))
        self.thread.start()
        check(self.started.wait(60 * SLOW), "the router doesn't start")

    def _run(self, kind, indexer, engines, options):
        asyncio.set_event_loop(self.loop)

        async def begin():
            self.router = kind(indexer, engines, model_name=MODEL, query_s=60 * SLOW, connect_s=60 * SLOW, **options)
            self.server = await listen(self.router, "127.0.0.1", 0)
            self.port = self.server.sockets[0].getsockname()[1]

        self.loop.run_until_complete(begin())
        self.started.set()
        self.loop.run_forever()
        self.server.close()
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self.loop.run_until_complete(self.router.indexer.close())
        self.loop.close()

    def send(self, path, body=None, method="POST", headers=None, connection=None):
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60 * SLOW)
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def complete(self, prompt, **fields):
        reply = self.send("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})
        equal(reply.status, 200, "status")
        return json.loads(reply.read())

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@contextlib.contextmanager
def fleet(kind=Router, count=ENGINES, make=Engine, call=int, **options):
    """Engines, followed by a kv-indexer, behind a router: (router, engines, settle). @call(number): an engine's instance_id."""
    with contextlib.ExitStack() as stack:
        indexer = stack.enter_context(Indexer())
        client = stack.enter_context(Client(indexer.url))
        engines = [stack.enter_context(contextlib.closing(make(number))) for number in range(1, count + 1)]
        for engine in engines:
            client.register(call(engine.number), engine.events.endpoint, model_name=MODEL, block_size=BLOCK,
                            replay_endpoint=engine.events.replay_endpoint)
        front = stack.enter_context(contextlib.closing(Front(kind, indexer.url, {call(each.number): each.url for each in engines}, **options)))

        def settle():
            """Wait until kv-indexer has applied all that the engines published."""
            for engine in engines:
                engine.events.flush(60 * SLOW)
            sent = {str(call(engine.number)): engine.events.stats()["batches"] - 1 for engine in engines}

            def applied():
                last = {str(worker["instance_id"]): worker["listeners"]["0"].get("last_seq", -1) for worker in client.workers()}
                return last == sent

            wait_until(applied, timeout=60, what="the last batch")

        yield front, engines, settle
