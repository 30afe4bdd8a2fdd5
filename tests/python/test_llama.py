# SPDX-License-Identifier: Apache-2.0
"""kvasir.llama.Cache against the contract of llama-cpp-python's caches, with states as libllama writes them.

The driver here does with a cache what Llama.create_completion does. tests/real/test_llama_cpp_python.py runs the real one.
"""
import logging
import pathlib
import struct
import tempfile

from kvpython import check, equal, folder, raises, run, skip  # first: it finds the package
try:
    import numpy
except ImportError:
    skip("python3-numpy is missing")
import kvasir
from kvasir.llama import Cache, Prefixes, fingerprint_file

logging.getLogger("kvasir.llama").setLevel(logging.ERROR)
LAYERS, ROW, N_CTX, VOCAB = 2, 6, 400, 10


def row(tokens, place, kind):
    """K or V of the last of @tokens in one layer: follows from all of them."""
    return struct.pack("<HHH", hash((tuple(tokens), place, kind)) & 0xffff, len(tokens), place)


def state_of(tokens):
    """The whole-context state after @tokens, of a memory with one sequence."""
    out = struct.pack("<I5sII", 5, b"llama", 1, len(tokens))
    out += b"".join(struct.pack("<iIi", i, 1, 0) for i in range(len(tokens))) + struct.pack("<IIII", 0, LAYERS, 0, 0)
    for kind in "kv":
        for layer in range(LAYERS):
            out += struct.pack("<iQ", 1, ROW) + b"".join(row(tokens[:i + 1], layer, kind) for i in range(len(tokens)))
    return out


class State:
    """The fields of llama_cpp.LlamaState."""

    def __init__(self, tokens):
        self.input_ids = numpy.zeros(N_CTX, numpy.intc)
        self.input_ids[:len(tokens)] = tokens
        self.n_tokens, self.seed, self.scores = len(tokens), 7, numpy.ones((len(tokens), VOCAB), numpy.single)
        self.llama_state = state_of(tokens)
        self.llama_state_size = len(self.llama_state)


class Llama:
    """The part of llama_cpp.Llama that meets a cache."""

    def __init__(self, model_path, overrides=None, **settings):
        self.kv_overrides = overrides
        self.model_path, self.cache, self.lora_path, self._seed, self._logits_all = model_path, None, None, 5, False
        self.context_params = type("Params", (), {"type_k": 1, "type_v": 1, **settings})
        self.tokens, self.evaluated = [], 0
        self.scores = numpy.ones((64, VOCAB), numpy.single)

    def n_ctx(self):
        return N_CTX

    @property
    def n_tokens(self):
        return len(self.tokens)

    @property
    def _input_ids(self):
        return numpy.array(self.tokens, numpy.intc)

    @staticmethod
    def longest_token_prefix(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    def load_state(self, state):
        self.scores[:state.n_tokens, :] = state.scores.copy()
        ids = state.input_ids.copy()
        equal((len(ids), state.llama_state_size), (N_CTX, len(state.llama_state)), "sizes")
        self.tokens = [int(t) for t in ids[:state.n_tokens]]
        equal(bytes(state.llama_state), state_of(self.tokens), "the state of these tokens")

    def complete(self, prompt, answer):
        """One completion of @answer's length. Returns the number of prompt tokens that needed no evaluation."""
        if self.cache:
            try:
                item = self.cache[prompt]
                if self.longest_token_prefix(item.input_ids.tolist(), prompt) > self.longest_token_prefix(self.tokens, prompt):
                    self.load_state(item)
            except KeyError:
                pass
        kept = self.longest_token_prefix(self.tokens, prompt[:-1])
        self.tokens = prompt + answer[:-1]  # the last one is sampled and never evaluated
        if self.cache:
            self.cache[prompt + answer] = State(self.tokens)
        return kept


class World:
    def __init__(self):
        self.file = tempfile.NamedTemporaryFile()
        self.file.write(b"a model")
        self.file.flush()
        self.folder = folder()

    def __enter__(self):
        self.path = self.folder.__enter__()
        return self

    def __exit__(self, *exc):
        self.folder.__exit__(*exc)
        self.file.close()

    def llm(self, **settings):
        """A fresh process's Llama with its cache."""
        llm = Llama(self.file.name, **settings)
        llm.cache = Cache(llm, self.path, block_tokens=16)
        return llm


def words(seed, n):
    return [(seed * 1009 + i * i * 31) % 997 for i in range(n)]


def test_conversations_share_a_prompt():
    system = words(1, 100)
    with World() as w:
        llm = w.llm()
        equal(llm.complete(system + words(2, 30), words(3, 20)), 0, "nothing is there yet")
        equal(llm.cache.last["save"].new_blocks, 9, "new blocks")
        for turn in range(3):
            fresh = w.llm()
            equal(fresh.complete(system + words(10 + turn, 30), words(3, 5)), 96, "blocks of the system prompt")
            equal(fresh.cache.last["save"].new_blocks, 2, "its own blocks")
            check(system in fresh.cache and words(99, 50) not in fresh.cache, "membership")
            fresh.cache.close()
        again = w.llm()
        equal(again.complete(system + words(2, 30) + words(3, 20) + words(4, 9), words(5, 5)), 144, "turn 2 after a restart")
        check(bool(again.cache) and again.cache.cache_size > 0, "truth and size")


def test_other_settings_and_models_are_apart():
    with World() as w:
        w.llm().complete(words(1, 60), words(2, 5))
        equal(w.llm(type_k=8).complete(words(1, 60), words(2, 5)), 0, "other types")
        equal(w.llm(overrides={"llama.rope.freq_base": 500000.0}).complete(words(1, 60), words(2, 5)), 0, "other values in the model")
        w.file.seek(0)
        w.file.write(b"other weights")
        w.file.flush()
        equal(w.llm().complete(words(1, 60), words(2, 5)), 0, "other weights")


def test_parts_of_a_split_model():
    with World() as w, folder() as path:
        for part in "12":
            pathlib.Path(f"{path}/m-0000{part}-of-00002.gguf").write_bytes(part.encode())
        w.file.name = f"{path}/m-00001-of-00002.gguf"
        w.llm().complete(words(1, 60), words(2, 5))
        equal(w.llm().complete(words(1, 60), words(2, 5)), 48, "the same parts")
        pathlib.Path(f"{path}/m-00002-of-00002.gguf").write_bytes(b"other weights")
        equal(w.llm().complete(words(1, 60), words(2, 5)), 0, "another second part")


def test_nothing_is_read_that_the_llama_holds():
    with World() as w:
        llm = w.llm()
        llm.complete(words(1, 100), words(2, 5))
        equal(llm.complete(words(1, 100) + words(2, 4) + words(5, 9), words(6, 5)), 104, "its own tokens")
        check("load" not in llm.cache.last, "a state was read")
        equal(llm.complete(words(7, 50), words(6, 5)), 0, "another conversation")
        equal(llm.complete(words(1, 100), words(2, 5)), 96, "back to the first one")
        equal(llm.cache.last["load"], 96, "read for it")


def test_damage_and_failures_cost_nothing():
    with World() as w:
        llm = w.llm()
        llm.complete(words(1, 100), words(2, 5))
        store = kvasir.store.open(w.path)
        blocks = [key for key in store.keys() if key[:4] == b"KVPb"]
        equal(len(blocks), 6, "blocks")
        held = store.get(blocks[3])
        store.discard(blocks[3])
        store.put(blocks[3], bytes(held)[:-1] + b"!")
        store.flush()
        kept = w.llm().complete(words(1, 100), words(2, 5))
        check(kept < 96 and kept % 16 == 0, f"{kept} tokens before a damaged block")
        equal(w.llm().complete(words(1, 100), words(2, 5)), 96, "repaired by the save")
        llm.cache.prefixes.store.close()
        raises(ValueError, llm.cache.prefixes.find, [1])
        store.close()
        with kvasir.store.open(w.path) as store:
            equal(store.verify().problems, [], "damage that is left")


def test_prefixes():
    with folder() as path, kvasir.store.open(path) as store:
        with Prefixes(store, "model", 16) as prefixes:
            tokens = words(1, 50)
            equal(prefixes.save_state(tokens, state_of(tokens), "context")[:3], (48, 3, 3), "tokens, blocks, new")
            n, state = prefixes.load_state(tokens[:40], "context")
            equal((n, bytes(state)), (32, state_of(tokens[:32])), "a shorter prefix")
            equal(prefixes.load_state(words(3, 9), "context"), None, "nothing")
            equal(prefixes.find(tokens), 48, "found")
            raises(kvasir.Error, prefixes.load, 1, 0, tokens)  # no libllama here
        raises(kvasir.Error, Prefixes, store, "")
    raises(kvasir.NotFound, fingerprint_file, "/nowhere")


if __name__ == "__main__":
    run(globals())
