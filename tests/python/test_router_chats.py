# SPDX-License-Identifier: Apache-2.0
"""kvasir.router goes by the tokens that an engine makes of a request: fields that its template shows, other APIs, images, bursts."""
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvpython import SLOW, check, equal, run, wait_until  # first: it finds the package
from fleet import BLOCK, Engine, Front, fleet
import kvasir._fleet
import kvasir.router
from kvasir._chat import messages_as_chat, responses_as_chat, tokenize_request
from kvasir._fleet import Run, booking
from kvasir._openai import _cut
from kvasir._recent import Recent
from kvasir.router import Router

kvasir._fleet.SOON_S = kvasir.router.SOON_S = 60.0 * SLOW  # so that a burst is one on a busy machine, too
SAY = [{"role": "user", "content": "Tell me of the sea. " * 20}]
DOCUMENTS = [{"title": "a", "text": "b"}]


class Template(Engine):
    """An engine whose chat template shows the effort and the documents first, as vLLM 0.33 passes them."""

    @staticmethod
    def rendered(variables, messages):
        shown = {name: variables[name] for name in ("reasoning_effort", "enable_thinking", "documents", "tone") if name in variables}
        return list(json.dumps([shown, messages], sort_keys=True).encode())

    def tokens(self, path, body):
        if path == "/tokenize":  # knows neither field
            return self.rendered(body.get("chat_template_kwargs") or {}, body["messages"]) if "messages" in body else super().tokens(path, body)
        if path.startswith("/v1/messages"):
            body = messages_as_chat(body)
        if body.get("previous_response_id"):
            return list(range(40))  # it alone knows
        if path.startswith("/v1/responses"):
            body = responses_as_chat(body)
        if "messages" not in body:
            return super().tokens(path, body)
        variables = dict(body.get("chat_template_kwargs") or {})
        if body.get("reasoning_effort"):
            variables.setdefault("enable_thinking", body["reasoning_effort"] != "none")
            variables["reasoning_effort"] = body["reasoning_effort"]
        if body.get("documents"):
            variables["documents"] = body["documents"]
        return _cut(body, self.rendered(variables, body["messages"]))


class Renderer(Template):
    """The same with the questions of vLLM 0.33, and a /tokenize that is of no use."""
    renders = ("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render")

    def tell(self, path, body):
        if path == "/tokenize":
            return {"tokens": [1]}
        told = {"token_ids": list(self.tokens(path.removesuffix("/render"), body)), "features": None}
        return [told, told] if path == "/v1/completions/render" else told


REQUESTS = (("/v1/chat/completions", {"messages": SAY, "reasoning_effort": "low"}),
            ("/v1/chat/completions", {"messages": SAY, "reasoning_effort": "none", "chat_template_kwargs": {"tone": "dry"}}),
            ("/v1/chat/completions", {"messages": SAY, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}),
            ("/v1/chat/completions", {"messages": SAY, "documents": DOCUMENTS}),
            ("/v1/chat/completions", {"messages": SAY, "truncate_prompt_tokens": 200}),
            ("/v1/completions", {"prompt": "Of the hills. " * 30}),
            ("/v1/messages", {"system": [{"type": "text", "text": "Be brief."}], "messages": [
                *SAY, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": "sea"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "blue"}, {"type": "text", "text": "And now?"}]}]}),
            ("/v1/responses", {"instructions": "Be brief.", "input": "Tell me of the sea. " * 20, "reasoning": {"effort": "low"}}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Tell me. " * 30}]},
                                         {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                                         {"type": "function_call_output", "call_id": "1", "output": "blue"}]}))


def holds_its_whole_prompt(make, path, body):
    """A request goes to engine 2, which holds its prompt, though engine 1 would be the first; /router shows its tokens as held."""
    with fleet(count=2, make=make) as (front, engines, settle):
        tokens = engines[1].tokens(path, body)
        engines[1].compute(tokens)
        engines[1].prompt_tokens = 0
        settle()
        reply = json.loads(front.send(path, {"model": "m", **body}).read())
        equal(reply["engine"], 2, f"{path} {body}")
        state = front.router.state()
        whole = len(tokens) // BLOCK * BLOCK
        equal((state["prompt_tokens"], state["held_tokens"]), (len(tokens), whole), f"tokens, and held ones, of {path} {body}")


def test_fields_of_the_template():
    for path, body in REQUESTS:
        holds_its_whole_prompt(Template, path, body)


def test_engines_that_render():
    for path, body in REQUESTS:
        holds_its_whole_prompt(Renderer, path, body)


def test_what_tokenize_is_asked():
    equal(tokenize_request({"messages": SAY, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False}}),
          {"messages": SAY, "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}, "the field counts, as in vLLM")
    equal(tokenize_request({"messages": SAY, "reasoning_effort": None, "documents": None, "temperature": 1}), {"messages": SAY}, "what is nothing")
    equal([_cut({"truncate_prompt_tokens": n, "truncation_side": side}, [1, 2, 3]) for n, side in ((2, None), (2, "right"), (0, "left"), (9, None), (-1, None))],
          [[2, 3], [1, 2], [], [1, 2, 3], [1, 2, 3]], "cuts")
    chat = messages_as_chat({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]}], "tools": [
            {"name": "f", "description": "d", "input_schema": {"type": "object"}}], "thinking": {"type": "disabled"}})
    equal(chat["messages"], [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}], "an image")
    equal((chat["tools"], chat["reasoning_effort"]), ([{"type": "function", "function": {
        "name": "f", "description": "d", "parameters": {"type": "object"}}}], "none"), "tools, and no thinking")
    try:
        check(False, responses_as_chat({"input": "a", "previous_response_id": "r"}))
    except ValueError:
        pass


def test_an_earlier_answer_that_the_engine_alone_knows():
    """Load decides; the request isn't refused."""
    with fleet(count=1, make=Template) as (front, _, _settle):
        equal(front.send("/v1/responses", {"input": "a", "previous_response_id": "r"}).status, 200, "status")
        equal(front.router.state()["prompt_tokens"], 0, "tokens")


class Asked:
    """A kv-indexer that keeps the questions, and knows nothing."""

    def __init__(self):
        self.questions = []
        asked = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                Engine.answer(self, {"scores": {}})

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d" % self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Pictures(Renderer):
    def tell(self, path, body):
        return {"token_ids": [1, 2, 9, 9, 9, 3, 8, 8], "features": {
            "mm_hashes": {"image": ["2f6b"], "audio": ["77"]}, "kwargs_data": {"image": ["AAAA"], "audio": [None]},
            "mm_placeholders": {"image": [{"offset": 2, "length": 3}], "audio": [{"offset": 6, "length": 2}]}}}


def test_images_are_in_the_query():
    with contextlib.closing(Asked()) as indexer, contextlib.closing(Pictures(1)) as engine, \
            contextlib.closing(Front(Router, indexer.url, {1: engine.url}, adapters=["tuned"])) as front:
        equal(front.send("/v1/chat/completions", {"model": "tuned", "messages": SAY, "cache_salt": "s"}).status, 200, "status")
        (question,) = indexer.questions
        equal(question["token_ids"], [1, 2, 9, 9, 9, 3, 8, 8], "tokens")
        equal(question["mm_objects"], [{"id": "2f6b", "offset": 2, "length": 3}, {"id": "77", "offset": 6, "length": 2}], "objects")
        equal((question["lora_name"], question["cache_salt"]), ("tuned", "s"), "namespace")


def burst(front, engines, requests):
    """Send @requests at once; how many engines got some, before any of them computed a block."""
    threads = [threading.Thread(target=lambda each=each: front.send(*each).read()) for each in requests]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: sum(len(engine.arrived) for engine in engines) == len(requests), timeout=60, what="all requests at the engines")
        return sorted((len(engine.arrived) for engine in engines), reverse=True)
    finally:
        for engine in engines:
            engine.may_begin.set()
        for thread in threads:
            thread.join()


WORDS = [number % 90 + 7 for number in range(400)]


def test_a_burst_with_one_new_prefix():
    """Eight at once of four engines, all with 400 tokens that nobody holds: one engine or two compute them."""
    for path, prompt in (("/v1/completions", {"prompt": WORDS}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 400}]})):
        with fleet() as (front, engines, _):
            got = burst(front, engines, [(path, {**prompt, "wait_before": True})] * 8)
            check(sum(n > 0 for n in got) <= 2, f"{path}: requests by engine {got}")


def test_a_burst_of_different_prompts_is_spread():
    with fleet() as (front, engines, _):
        got = burst(front, engines, [("/v1/completions", {"prompt": [each] * 400, "wait_before": True}) for each in range(8)])
        equal(got, [2, 2, 2, 2], "requests by engine")


def test_a_burst_by_policies_that_count_requests():
    """A prompt that an engine computes already makes it no cheaper where costs are no tokens."""
    for policy in ("least", "round-robin"):
        with fleet(policy=policy) as (front, engines, _):
            equal(burst(front, engines, [("/v1/completions", {"prompt": WORDS, "wait_before": True})] * 8), [2, 2, 2, 2], policy)


def test_prompts_without_tokens_go_where_least_runs():
    router = Router("http://127.0.0.1:1", {1: "http://a:1", 2: "http://b:1"}, model_name="m")
    request = booking(router.engines, {}, 0)
    router.engines[2].requests = 1000  # it has served for long, and nothing runs there
    with router.engines[1].running(Run(router.books, request)):
        equal([engine.number for engine in router.order({}, 0)], [2, 1], "the idle one first")


def test_a_long_burst_reaches_all():
    """Five of these running cost what the prompt costs to compute."""
    with fleet(params={"context_weight": .2}) as (front, engines, _):
        got = burst(front, engines, [("/v1/completions", {"prompt": WORDS, "wait_before": True})] * 40)
        check(got[-1] >= 5, f"requests by engine {got}")


def test_prompts_count_as_held_for_a_while_only():
    recent, blocks = Recent(600.0), Recent.blocks(WORDS, "")
    recent.add(1, blocks)
    recent.add(2, Recent.blocks(WORDS[:32], ""))
    equal(recent.find(blocks), {1: 400, 2: 32}, "at once")
    equal(recent.find(Recent.blocks(WORDS, "", salt="s")), {}, "another namespace")
    equal(recent.find(Recent.blocks(WORDS, "[a picture]")), {}, "another picture")
    recent.add(1, blocks)
    recent.forget(1, blocks)
    equal(recent.find(blocks), {1: 400, 2: 32}, "one of two is left")
    recent.forget(1, blocks)
    equal(recent.find(blocks), {2: 32}, "none is left")
    recent.seconds = 0.0
    recent.add(3, blocks)
    recent._entries.rotate(1)  # the one that is over first
    equal(recent.find(blocks), {2: 32}, "after its time")
    for odd in ([1.5] * 32, ["a"] * 32, [-1] * 32, [1 << 32] * 32, None):
        equal(list(Recent.blocks(odd, "")), [], odd)


if __name__ == "__main__":
    run(globals())
