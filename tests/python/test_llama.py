# SPDX-License-Identifier: Apache-2.0
"""kvasir.llama.Cache against the contract of llama-cpp-python's caches, with states as libllama writes them.

The driver here does with a cache what Llama.create_completion does. tests/real/test_llama_prefix.py runs the real one.
"""
import hashlib
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


def snapshot_of(tokens):
    """The state of a memory that can't be cut: noise that follows from the tokens."""
    return hashlib.shake_256(repr(list(tokens)).encode()).digest(3000)


class State:
    """The fields of llama_cpp.LlamaState."""

    def __init__(self, ids, n, state):
        self.input_ids, self.n_tokens, self.seed, self.scores = ids.copy(), n, 7, numpy.ones((1, 1), numpy.single)
        self.llama_state, self.llama_state_size = state, len(state)


class Context:
    """libllama's context with its memory: what each position was computed from."""

    def __init__(self):
        self.ctx, self.memory, self.cells = id(self), id(self) + 1, []
        CONTEXTS[self.ctx] = CONTEXTS[self.memory] = self


CONTEXTS = {}


def llama_decode(ctx, entries):  # the functions of the module, which here is this program
    CONTEXTS[ctx].cells.extend(entries)


def llama_memory_seq_rm(memory, _seq, first, last):
    del CONTEXTS[memory].cells[first:None if last < 0 else last]


def llama_memory_clear(memory, _data):
    CONTEXTS[memory].cells.clear()


def llama_memory_seq_add(memory, _seq, _first, _last, _by):
    CONTEXTS[memory].cells = [("moved", cell) for cell in CONTEXTS[memory].cells]


def llama_set_adapters_lora(_ctx, *_adapters):
    return 0


class Llama:
    """The part of llama_cpp.Llama that meets a cache. @whole: its memory can't be cut, and nothing can be taken off."""

    def __init__(self, model_path, overrides=None, whole=False, **settings):
        self.kv_overrides = overrides
        self.model_path, self.cache, self.lora_path, self._seed, self._logits_all = model_path, None, None, 5, False
        self.context_params = type("Params", (), {"type_k": 1, "type_v": 1, **settings})
        self._ctx, self._is_hybrid = Context(), whole
        self.n_tokens, self.input_ids = 0, numpy.zeros(N_CTX, numpy.intc)
        self.scores = numpy.ones((64, VOCAB), numpy.single)

    def n_ctx(self):
        return N_CTX

    @property
    def _input_ids(self):
        return self.input_ids[:self.n_tokens]

    @staticmethod
    def longest_token_prefix(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    def reset(self):
        self.n_tokens = 0
        if self._is_hybrid:
            llama_memory_clear(self._ctx.memory, True)

    def eval(self, tokens):
        llama_memory_seq_rm(self._ctx.memory, 0, self.n_tokens, -1)
        for i in range(0, len(tokens), 32):
            batch = tokens[i:i + 32]
            llama_decode(self._ctx.ctx, batch)
            self.input_ids[self.n_tokens:self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)

    def embed(self, text):
        llama_memory_clear(self._ctx.memory, True)
        llama_decode(self._ctx.ctx, text)

    def save_state(self):
        cells = self._ctx.cells
        return State(self.input_ids, self.n_tokens, snapshot_of(cells) if self._is_hybrid else state_of(cells))

    def load_state(self, state):
        self.scores[:state.n_tokens, :] = state.scores.copy()
        self.input_ids = state.input_ids.copy()
        self.n_tokens = state.n_tokens
        equal((len(self.input_ids), state.llama_state_size), (N_CTX, len(state.llama_state)), "sizes")
        self._ctx.cells = [int(token) for token in self._input_ids]
        equal(bytes(state.llama_state), snapshot_of(self._ctx.cells) if self._is_hybrid else state_of(self._ctx.cells),
              "the state of these tokens")

    def picture(self, name, n):
        """Evaluate a picture's embeddings as vision handlers do."""
        self._ctx.cells += [(name, i) for i in range(n)]
        self.n_tokens += n

    def complete(self, prompt, answer, streams=False):
        """One completion of @answer's length. Returns the number of prompt tokens that needed no evaluation."""
        if self.cache:
            try:
                item = self.cache[prompt]
                if self.longest_token_prefix(item.input_ids.tolist(), prompt) > self.longest_token_prefix(self._input_ids, prompt):
                    self.load_state(item)
            except KeyError:
                pass
        kept = min(self.longest_token_prefix(self._input_ids, prompt), len(prompt) - 1)
        if self.n_tokens == len(prompt) == kept + 1 and self._is_hybrid:  # its logits are there
            kept += 1
        elif kept < self.n_tokens and self._is_hybrid:
            kept = 0
        if kept:
            llama_memory_seq_rm(self._ctx.memory, 0, kept, -1)
            self.n_tokens = kept
        else:
            self.reset()
        self.eval(prompt[kept:])
        if streams:  # the reader has gone
            return kept
        for token in answer[:-1]:  # the last one is sampled and never evaluated
            self.eval([token])
        if self.cache:
            self.cache[prompt + answer] = self.save_state()
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

    def llm(self, cache=(), **settings):
        """A fresh process's Llama with its cache."""
        llm = Llama(self.file.name, **settings)
        llm.cache = Cache(llm, self.path, block_tokens=16, **dict(cache))
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


def test_a_picture_is_no_text():
    """The ids of a picture's positions are an earlier prompt's: nothing from there on is stored under them."""
    text, question = words(1, 300), words(9, 20)
    for whole in (False, True):
        with World() as w:
            llm = w.llm(whole=whole)
            llm.complete(text, [], streams=True)
            llm.reset()
            llm.eval(text[:64])
            llm.picture("cat", 150)
            llm.eval(question)
            llm.complete(llm.input_ids[:llm.n_tokens].tolist(), words(3, 4))
            known = w.llm(whole=whole)
            # load_state() compares bytes, too: a whole snapshot at the text's end is from before the picture
            equal(known.complete(text, words(2, 5)), 299 if whole else 64, "K and V of a picture came back as text")
            check(known.complete(text[:64] + words(8, 30), words(2, 5)) <= 64, "no more than the text before the picture")
            if not whole:
                equal(w.llm().complete(text[:65], words(2, 5)), 64, "the text before the picture")


def test_whatever_else_changes_the_memory():
    text = words(1, 120)

    def embeds(llm):
        llm.embed([("embedded", i) for i in range(120)])

    def decodes_itself(llm):
        llama_memory_seq_rm(llm._ctx.memory, 0, 40, -1)
        llama_decode(llm._ctx.ctx, [("cat", i) for i in range(80)])

    def sets_back_and_on(llm):
        llm.n_tokens = 30
        del llm._ctx.cells[30:]
        llm.picture("cat", 90)

    def shifts(llm):
        llama_memory_seq_add(llm._ctx.memory, 0, 0, -1, 5)

    def loads(llm):
        llm.load_state(State(llm.input_ids, 120, state_of(text)))  # of unknown origin, and so of other adapters maybe

    def decodes_in_c(llm):
        llm._ctx.cells[100:] = [("cat", i) for i in range(20)]
        llm.n_tokens = 100
        llm.n_tokens = 120

    for what in (embeds, decodes_itself, sets_back_and_on, shifts, loads, decodes_in_c):
        with World() as w:
            llm = w.llm()
            llm.complete(text, [], streams=True)
            what(llm)
            llm.eval(words(4, 30))
            llm.cache[text + words(4, 30)] = llm.save_state()
            right = {"sets_back_and_on": 16, "decodes_in_c": 96}.get(what.__name__, 0)
            equal(w.llm().complete(text + words(4, 30), words(2, 5)), right, what.__name__)
            llm.reset()
            llm.complete(words(5, 60), words(2, 5))
            equal(w.llm().complete(words(5, 60), words(2, 5)), 48, f"behind a reset, {what.__name__}")


def test_changed_adapters_end_a_cache():
    text = words(1, 100)
    with World() as w:
        llm = w.llm()
        llm.complete(text, words(2, 5))
        llama_set_adapters_lora(llm._ctx.ctx, 1, 1)
        check(text not in llm.cache, "found under the old fingerprint")
        raises(ValueError, Cache, llm, w.path)
        llm.complete(text + words(6, 30), words(2, 5))
        equal(w.llm().complete(text + words(6, 30), words(2, 5)), 96, "computed with adapters, stored without")
        llm.cache = Cache(llm, w.path, block_tokens=16, fingerprint="with an adapter")
        llm.complete(text + words(6, 60), words(2, 5))
        check(text not in llm.cache, "K and V from before the adapters")
        llm.reset()
        llm.complete(words(7, 60), words(2, 5))
        check(words(7, 60) in llm.cache, "under the new fingerprint")


def test_the_class_stays():
    with World() as w:
        llm = w.llm()
        check(isinstance(llm, Llama) and type(llm).__name__ == "Llama", "the class")
        second = Cache(llm, w.path, block_tokens=16)
        llm.complete(words(1, 60), words(2, 5))
        check(words(1, 60) in second, "two caches of one Llama")
        other = w.llm()
        other.complete(words(3, 60), words(2, 5))
        equal(other.cache.last["save"].tokens, 64, "its own")
        llm.cache.last.clear()
        llm.cache[words(3, 60)] = other.save_state()
        equal(llm.cache.last, {}, "a state of another Llama")


def chat(w, turns, **cache):
    """Turns of a conversation whose template drops the first half of each answer; each in a new process."""
    tokens, restored = words(1, 50), []
    for turn in range(turns):
        answer = words(20 + turn, 12)
        llm = w.llm(whole=True, cache=cache)
        restored.append((len(tokens), llm.complete(tokens, answer)))
        tokens = tokens + answer[6:] + words(40 + turn, 10)
    return tokens, restored


def test_chats_of_models_that_cannot_be_cut():
    with World() as w:
        tokens, restored = chat(w, 5)
        equal([kept for _, kept in restored], [0] + [n - 1 for n, _ in restored[:-1]], "restored up to the prompt before")
        equal(w.llm(whole=True).complete(tokens[:restored[-1][0]], words(3, 3)), restored[-1][0] - 1, "the same prompt again")
    with World() as w:
        llm, tokens = w.llm(whole=True), words(1, 50)
        for turn in range(8):
            answer = words(20 + turn, 12)
            llm.complete(tokens, answer)
            tokens = tokens + answer[6:] + words(40 + turn, 10)
        heads = [key for key in llm.cache.prefixes.store.keys() if key[:4] == b"KVPs"]
        check(len(heads) <= 3, f"{len(heads)} snapshots of one conversation")
    with World() as w:  # positions that the caller names stay
        chat(w, 5, snapshots=lambda tokens: [30])
        equal(w.llm(whole=True).complete(words(1, 30) + words(70, 20), words(2, 5)), 30, "another question behind the named position")


def test_prefixes():
    with folder() as path, kvasir.store.open(path) as store:
        with Prefixes(store, "model", 16) as prefixes:
            tokens = words(1, 50)
            equal(prefixes.save_state(tokens, state_of(tokens), "context")[:3], (48, 3, 3), "tokens, blocks, new")
            n, state = prefixes.load_state(tokens[:40], "context")
            equal((n, bytes(state)), (32, state_of(tokens[:32])), "a shorter prefix")
            equal(prefixes.load_state(words(3, 9), "context"), None, "nothing")
            equal(prefixes.find(tokens), 48, "found")
            equal(prefixes.discard(tokens, "context"), False, "blocks aren't discarded")
            equal(prefixes.save_state(words(4, 9), b"a state of its own", "context").snapshot, True, "a snapshot")
            equal((prefixes.discard(words(4, 8)), prefixes.discard(words(4, 9), "context"), prefixes.find(words(4, 9))), (False, True, 0), "discarded")
            raises(kvasir.Error, prefixes.load, 1, 0, tokens)  # no libllama here
        raises(kvasir.Error, Prefixes, store, "")
    raises(kvasir.NotFound, fingerprint_file, "/nowhere")


if __name__ == "__main__":
    run(globals())
