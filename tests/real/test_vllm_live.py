# SPDX-License-Identifier: Apache-2.0
"""Two live vLLM engines on the CPU behind a small router: what /query promised is what the engine had cached.

Three kv-indexers follow them: one that was there first, one that comes later, and one without replay endpoints. Each
answer's usage.prompt_tokens_details.cached_tokens is compared with what each of them said before, also after one
engine was killed and started again.
"""
import json
import os
import random
import signal
import struct
import subprocess
import tempfile

from realtest import *
from kvtest import zmq

BLOCK, BLOCKS, VOCABULARY, START_TIMEOUT = 32, 60, 1000, 900
PARTIAL = ", partial view"
MODEL_CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 128,
                "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                "head_dim": 64, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
                "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}


class LiveEngine:
    """An OpenAI server of vLLM. @events, @replay: endpoints it binds (a path, as vLLM binds TCP on all addresses only).

    @options: more of its options; @environment: more variables.
    """

    def __init__(self, folder, number, options=(), environment=None, length=1024, blocks=BLOCKS):
        self.folder, self.number, self.port, self.process = folder, number, free_port(), None
        self.options, self.environment, self.length, self.blocks = options, environment or {}, length, blocks
        self.url = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = f"ipc://{folder}/events{number}", f"ipc://{folder}/replay{number}"

    def start(self):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events,
                  "replay_endpoint": self.replay, "topic": "kv-events"}
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", f"{self.folder}/model",
                   "--served-model-name", MODEL, "--load-format", "dummy", "--skip-tokenizer-init", "--host", "127.0.0.1",
                   "--port", self.port, "--block-size", BLOCK, "--max-model-len", self.length, "--enforce-eager",
                   "--num-gpu-blocks-override", self.blocks, "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
                   *self.options]
        self.log = open(f"{self.folder}/engine{self.number}.log", "ab")
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=subprocess.STDOUT,
                                        env={**os.environ, **ENVIRONMENT, **self.environment}, start_new_session=True)
        return self

    def wait(self):
        def healthy():
            check_alive(self)
            return http_request(self.url, "GET", "/health").status == 200

        wait_until(healthy, START_TIMEOUT, f"engine {self.number}", interval=0.5)

    def kill(self):
        """kill -9 of the server and the engine process it started (they are a process group of their own)."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process:
            self.process.wait()
            self.log.close()
            wait_until(lambda: not alive(self.process.pid), 60, "the end of the engine's processes")

    def complete(self, tokens):
        """(tokens of the answer, how many of the prompt's were cached)"""
        reply = http_request(self.url, "POST", "/v1/completions", {
            "model": MODEL, "prompt": tokens, "max_tokens": 9, "temperature": 1.0, "seed": 1, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True}, timeout=300)
        equal(reply.status, 200, f"completion {reply.body[:500]!r}: status")
        answer = reply.json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def last_batch(self):
        """The number of the last batch published. The publisher may still hold one while it answers, so it is asked twice."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self.replay)
            last = -1
            for _ in range(2):
                dealer.send_multipart([b"", struct.pack(">Q", 0)])
                while True:
                    check(dealer.poll(60000), "the replay endpoint doesn't answer")
                    number = dealer.recv_multipart()[-2]
                    if number == b"\xff" * 8:
                        break
                    last = struct.unpack(">Q", number)[0]
        return last


def alive(group):
    """Whether a process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def check_alive(engine):
    if engine.process.poll() is not None:
        with open(engine.log.name, encoding="utf-8", errors="replace") as log:
            raise SystemExit("the engine ended:\n" + log.read()[-4000:])


class Follower:
    """A kv-indexer that follows the engines, with or without their replay endpoints."""

    def __init__(self, name, engines, replay=True):
        self.name, self.indexer, self.tally, self.replay = name, Indexer(), Tally(name), replay
        for engine in engines:
            fields = {"replay_endpoint": engine.replay} if replay else {}
            self.indexer.register(engine.number, engine.events, block_size=BLOCK, **fields)

    def listener(self, engine):
        return next(worker["listeners"]["0"] for worker in self.indexer.workers() if worker["instance_id"] == engine.number)

    def settle(self, engine, timeout=20):
        last = engine.last_batch()
        if last >= 0:
            wait_until(lambda: self.listener(engine).get("last_seq") == last, timeout, f"{self.name}: batch {last} of {engine.number}")

    def scores(self, tokens):
        return {int(instance): ranks["0"] for instance, ranks in self.indexer.query(tokens)["scores"].items()}


def promised(score, tokens):
    """What the engine may report for a score: it always computes the last token of a prompt again."""
    return min(score, (len(tokens) - 1) // BLOCK * BLOCK)


def talk(title, engines, followers, rng, turns, talks):
    """@turns requests of conversations that go on, each to the engine that the first follower names best."""
    for follower in followers:
        if not follower.replay:  # what it misses before it is connected it can never learn
            wait_until(lambda: all(follower.listener(engine)["connected"] for engine in engines), 30, "connections")
    for turn in range(turns):
        if not talks or rng.random() < 0.3:
            talks.append([rng.randrange(3, VOCABULARY) for _ in range(rng.choice((BLOCK, 2 * BLOCK, 50, 90)))])
        tokens = rng.choice(talks)
        tokens += [rng.randrange(3, VOCABULARY) for _ in range(rng.choice((0, 5, BLOCK)))]
        if len(tokens) > 600:
            talks.remove(tokens)
        scores = [follower.scores(tokens) for follower in followers]
        best = max(engines, key=lambda engine: (scores[0].get(engine.number, 0), rng.random()))
        views = [follower.listener(best) for follower in followers]
        answer, cached = best.complete(tokens)
        for follower, said, view in zip(followers, scores, views):
            follower.tally.add(title + PARTIAL * view["partial"], cached, promised(said.get(best.number, 0), tokens),
                               f"turn {turn}, engine {best.number}, {len(tokens)} tokens, {view}")
        tokens += answer
        for follower in followers:
            follower.settle(best)


def restart_one(engines, followers, talks):
    """kill -9, start again: no follower may promise what the old process had."""
    victim = engines[0]
    victim.kill()
    victim.start().wait()
    for follower in followers:
        def honest():
            over = [tokens for tokens in talks if follower.scores(tokens).get(victim.number, 0)]
            return not over or follower.listener(victim).get("partial")

        wait_until(honest, 20, f"{follower.name} to forget the killed engine")
        print(f"  {follower.name} after kill -9: {follower.listener(victim)}", flush=True)


def test_two_engines_behind_a_router():
    rng, talks, followers = random.Random(11), [], []
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/model")
        with open(f"{folder}/model/config.json", "w", encoding="ascii") as config:
            json.dump(MODEL_CONFIG, config)
        engines = [LiveEngine(folder, number) for number in (1, 2)]
        try:
            followers = [Follower("first", engines), Follower("without replay", engines, replay=False)]
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait()
            talk("fresh engines", engines, followers, rng, 30, talks)
            followers.append(Follower("late", engines))
            for engine in engines:
                followers[-1].settle(engine)
            talk("indexer last", engines, followers, rng, 30, talks)
            restart_one(engines, followers, talks)
            talk("after kill -9", engines, followers, rng, 30, talks)
            for follower in followers:
                equal([follower.listener(engine)["partial"] for engine in engines], [False, False], f"{follower.name}: partial at the end")
        finally:
            for engine in engines:
                engine.kill()
            for follower in followers:
                follower.indexer.kill()
    for follower in followers:
        for title in list(follower.tally.rows):
            if title.endswith(PARTIAL):  # it says itself that it doesn't know all
                follower.tally.show(title)
            else:
                follower.tally.exact(title)


if __name__ == "__main__":
    run(globals())
