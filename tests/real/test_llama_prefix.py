# SPDX-License-Identifier: Apache-2.0
"""libkvasir_llama, its preload library and kvasir.llama.Cache with llama.cpp itself.

A restored prefix is continued, and its logits equal those of a context that computed the same prefix in the same batches
and was never stored. A real server saves a slot, is killed, restores it and goes on.
"""
import ctypes
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from realtest import BUILD, PYTHON, check, equal, free_port, run  # first: starts the program again with the environment's Python

import numpy as np  # noqa: E402
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")
import kvasir  # noqa: E402
from kvasir.llama import Cache, Prefixes  # noqa: E402
import llama_cpp_python  # noqa: E402
import llama_engine  # noqa: E402
import llama_models  # noqa: E402

BATCH, N = 64, 300
FOLDER = tempfile.TemporaryDirectory(prefix="kvasir-real-llama-")
MODELS = {}
llama_engine.LIB.llama_memory_seq_pos_max.argtypes = [ctypes.c_void_p, ctypes.c_int32]


def model(shape):
    if shape not in MODELS:
        path = pathlib.Path(FOLDER.name) / shape
        llama_models.make(shape, path)
        MODELS[shape] = llama_engine.Model(path, llama_models.VOCAB)
    return MODELS[shape]


def words(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(llama_models.VOCAB) for _ in range(n)]


class World:
    """A store, and a prefix cache for one model over it."""

    def __init__(self, shape="llama"):
        self.model, self.folder = model(shape), tempfile.TemporaryDirectory(prefix="kvasir-real-")

    def __enter__(self):
        self.store = kvasir.store.open(self.folder.name)
        self.prefixes = Prefixes(self.store, "model", library=llama_engine.LIB)
        return self

    def __exit__(self, *_):
        self.prefixes.close()
        self.store.close()
        self.folder.cleanup()

    def context(self, **options):
        return self.model.context(n_ctx=2048, n_batch=BATCH, **options)

    def save(self, tokens, seq=0, **options):
        with self.context(**options) as context:
            context.decode(tokens, seq)
            return self.prefixes.save(context.handle, seq, tokens)

    def computed(self, tokens, n, seq=0, **options):
        """Logits behind @tokens, of a context that was never stored; the first @n in batches of their own."""
        with self.context(**options) as context:
            if n:
                context.decode(tokens[:n], seq)
            return context.decode(tokens[n:], seq)

    def restored(self, tokens, seq=0, **options):
        """Restore what is stored of @tokens into a new context and decode the rest. Returns the logits and the Result."""
        with self.context(**options) as context:
            got = self.prefixes.load(context.handle, seq, tokens[:-1])
            context.at[seq] = got.tokens
            return context.decode(tokens[got.tokens:], seq), got


SETTINGS = {"flash": {}, "transposed": {"flash": False}, "q8_0": {"type_kv": llama_engine.Q8_0}, "slots": {"n_seq": 4},
            "unified": {"n_seq": 4, "unified": True}}


def test_every_prefix_of_every_layout():
    tokens = words(1, N)
    for shape in ("llama", "mrope"):
        for name, options in SETTINGS.items():
            with World(shape) as w:
                seq = 2 if "n_seq" in options else 0
                saved = w.save(tokens, seq, **options)
                equal((saved.tokens, saved.new_blocks, saved.snapshot), (256, 4, False), f"{shape} {name}: saved")
                equal(w.save(tokens, seq, **options).new_blocks, 0, "new blocks of the same again")
                for n in (N, 200, 130):
                    logits, got = w.restored(tokens[:n], seq, **options)
                    equal(got.tokens, (n - 1) // 64 * 64, f"{shape} {name}: restored of {n}")
                    check(np.array_equal(logits, w.computed(tokens[:n], got.tokens, seq, **options)), f"{shape} {name}: logits after {n} tokens")
                other = words(1, 128) + words(2, 100)
                equal(w.restored(other, seq, **options)[1].tokens, 128, "a prompt that branches off")


def test_other_layouts_are_left_alone():
    tokens = words(1, 200)
    with World() as w:
        w.save(tokens)
        for name in ("transposed", "q8_0", "slots"):
            logits, got = w.restored(tokens, **SETTINGS[name])
            equal(got.tokens, 0, f"{name}: blocks of another layout")
            check(np.array_equal(logits, w.computed(tokens, 0, **SETTINGS[name])), f"{name}: an empty sequence")


def test_slots_share_blocks():
    tokens = words(1, 260)
    with World() as w, w.context(n_seq=4, unified=True) as context:
        for seq in (0, 1, 3):  # each lies elsewhere in the one buffer, and has other last bits
            context.decode(words(50 + seq, 90 + seq), 2)
            context.decode(tokens, seq)
            equal(w.prefixes.save(context.handle, seq, tokens).new_blocks, 4 if seq == 0 else 0, f"slot {seq}")
        got = w.prefixes.load(context.handle, 3, tokens)
        equal(got.tokens, 256, "restored into a slot in use")


def test_snapshots_of_what_cannot_be_cut():
    tokens = words(1, N)
    with World("hybrid") as w:
        saved = w.save(tokens[:250])
        equal((saved.tokens, saved.snapshot), (250, True), "saved")
        equal(w.prefixes.find(tokens[:249]), 0, "a shorter prefix")
        logits, got = w.restored(tokens)
        equal((got.tokens, got.snapshot), (250, True), "restored")
        check(np.array_equal(logits, w.computed(tokens, 250)), "logits")
        equal(w.store.verify().problems, [], "verify")


def test_windows_in_blocks():
    """A window of 512 tokens. Within it any prefix of a save loads; longer saves load as a whole, from blocks and a tail."""
    tokens = words(1, 1100)
    for name in ("flash", "transposed", "unified"):  # slots of their own have room for 512 tokens each
        options = SETTINGS[name]
        with World("window") as w:
            seq = 2 if "n_seq" in options else 0
            short, long = w.save(tokens[:500], seq, **options), w.save(tokens, seq, **options)
            equal((short.tokens, short.snapshot), (448, False), f"{name}: saved")
            equal((long.tokens, long.snapshot), (1100, True), f"{name}: saved")
            equal(w.save(tokens, seq, **options).new_blocks, 0, f"{name}: new blocks of the same again")
            turn = w.save(tokens + words(3, 60), seq, **options)  # five layers of six have windows
            check(turn.new_bytes < 0.8 * turn.state_bytes, f"{name}: a turn writes {turn.new_bytes} of {turn.state_bytes} bytes")
            for n, want in ((1100, 1100), (1099, 448), (200, 192)):
                fork = tokens[:n] + words(2, 40)
                logits, got = w.restored(fork, seq, **options)
                equal(got.tokens, want, f"{name}: restored of {n}")
                truth = w.computed(fork, want, seq, **options)
                off = np.abs(logits - truth).max() / np.abs(truth).max()  # cells of a full window lie elsewhere: other last bits
                print(f"  {name}: {want} of {n} tokens restored, logits off by {100 * off:.2g} %", flush=True)
                check(off <= (0 if want < 512 else 1e-3), f"{name}: logits after {n} tokens off by {off}")
            equal(w.store.verify().problems, [], "verify")


def test_other_layouts_of_one_store():
    tokens = words(1, N)
    for shape, unit in (("window", 64), ("hybrid", 1)):
        with World(shape) as w:
            for n, name in ((250, "flash"), (150, "q8_0"), (120, "slots"), (90, "transposed")):
                equal(w.save(tokens[:n], **SETTINGS[name]).tokens, n // unit * unit, f"{shape} {name}: saved")
            for n, name in ((250, "flash"), (150, "q8_0"), (120, "slots"), (90, "transposed")):
                equal(w.restored(tokens, **SETTINGS[name])[1].tokens, n // unit * unit, f"{shape} {name}: restored beside the others")


def test_states_that_are_not_of_their_tokens():
    tokens = words(1, N)
    for shape in ("llama", "mrope", "window"):
        with World(shape) as w, w.context() as context:
            context.decode(tokens)
            memory = llama_engine.LIB.llama_get_memory(context.handle)
            check(llama_engine.LIB.llama_memory_seq_rm(memory, 0, 100, 130), "removed from the middle")
            equal(w.prefixes.save(context.handle, 0, tokens).tokens, 0, f"{shape}: saved with a hole")
            equal(w.prefixes.save_state(tokens[:N - 30], context.state(), "sequence").tokens, 0, f"{shape}: the same as bytes")
            equal(w.store.stats()["n_chunks"], 0, f"{shape}: chunks")
        with World(shape) as w:
            image = tokens[:150] + [-1] * 50 + tokens[200:]
            with w.context() as context:
                context.decode(tokens)
                equal(w.prefixes.save(context.handle, 0, image).tokens, 128, f"{shape}: saved up to an image")


def test_damage_never_becomes_kv():
    tokens = words(1, N)
    with World() as w:
        w.save(tokens)
        files = [p for p in pathlib.Path(w.folder.name, "chunks").rglob("4b565062*") if p.is_file()]
        equal(len(files), 4, "blocks")
        with files[1].open("r+b") as file:
            file.seek(1000)
            file.write(bytes(4096))
        w.prefixes.close(), w.store.close()
        w.__enter__()
        logits, got = w.restored(tokens)
        check(got.tokens < 256, "a damaged block was restored")
        check(np.array_equal(logits, w.computed(tokens, got.tokens)), "logits after damage")


def test_a_damaged_file_without_us():
    """The reason: llama.cpp takes a state file with 4 KiB of zeros among its K and V, and computes on."""
    tokens = words(1, N)
    with World() as w, w.context() as context:
        path = pathlib.Path(w.folder.name, "slot")
        right = context.decode(tokens)
        context.decode(words(9, 1))
        with w.context() as writer:
            writer.decode(tokens[:-1])
            writer.save(path, tokens[:-1])
        data = bytearray(path.read_bytes())
        data[len(data) // 3:len(data) // 3 + 4096] = bytes(4096)
        path.write_bytes(data)
        with w.context() as reader:
            check(reader.load(path) is not None, "llama.cpp refused the damaged file")
            reader.at[0] = N - 1
            wrong = reader.decode(tokens[-1:])
        print(f"  4 KiB of zeros in a file of {len(data)} bytes: loaded, logits off by {np.abs(wrong - right).max():.2f} of {np.abs(right).max():.2f}")
        check(np.abs(wrong - right).max() > 0.01, "no difference, so the test shows nothing")


SERVER = """
import sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.slot_save_path, p.port = sys.argv[1], sys.argv[2], int(sys.argv[3])
p.hostnames, p.n_ctx, p.n_parallel, p.endpoint_slots, p.warmup, p.fit_params = ["127.0.0.1"], 2048, 1, True, False, False
p.cpuparams.n_threads, p.verbosity = 1, 0
server = xllamacpp.Server(p)
print("ready", server.listening_address, flush=True)
sys.stdin.read()
"""


class Server:
    def __init__(self, path, folder):
        self.port = free_port()
        env = {**os.environ, "LD_PRELOAD": str(BUILD / "lib/libkvasir_llama_preload.so"), "KV_LLAMA_STORE": str(folder / "store"),
               "KV_LLAMA_FINGERPRINT": "random model"}
        self.process = subprocess.Popen([PYTHON, "-c", SERVER, path, f"{folder / 'slots'}/", str(self.port)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        line = self.process.stdout.readline()
        check("ready" in line, f"the server said {line!r}")

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as problem:
            return problem.code

    def complete(self, prompt):
        return self.post("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0, "id_slot": 0, "cache_prompt": True, "return_tokens": True})

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_a_server_saved_killed_restored():
    with tempfile.TemporaryDirectory(prefix="kvasir-real-") as name:
        folder = pathlib.Path(name)
        (folder / "slots").mkdir()
        llama_cpp_python.make_model(folder / "model.gguf")
        prompt = "The quick brown fox jumps over the lazy dog. " * 10
        first = Server(folder / "model.gguf", folder)
        try:
            answer = first.complete(prompt)
            saved = first.post("/slots/0?action=save", {"filename": "chat"})
            check(saved["n_saved"] > 400, f"saved: {saved}")
            equal(list((folder / "slots").iterdir()), [], "files beside the store")
        finally:
            first.kill()
        second = Server(folder / "model.gguf", folder)
        try:
            equal(second.post("/slots/0?action=restore", {"filename": "nobody's"}), 400, "a slot that nobody saved")
            equal(second.post("/slots/0?action=restore", {"filename": "chat"})["n_restored"], saved["n_saved"], "tokens restored")
            again = second.complete(prompt)
            equal(again["tokens"], answer["tokens"], "the answer")
            check(again["timings"]["prompt_n"] <= 1, f"prompt tokens computed again: {again['timings']['prompt_n']}")
        finally:
            second.kill()
        with kvasir.store.open(str(folder / "store")) as store:
            equal((store.names(), store.verify().problems), (["chat"], []), "the store")


def test_llama_cpp_python():
    if not llama_cpp_python.package():
        print("  skipped: make_env.sh has not unpacked llama-cpp-python")
        return
    llama_cpp = llama_cpp_python.load()
    with tempfile.TemporaryDirectory(prefix="kvasir-real-") as name:
        path = f"{name}/model.gguf"
        llama_cpp_python.make_model(path)
        system = [1] + [3 + (i * i) % 250 for i in range(400)]

        def turn(prompt, cache=True):
            """A completion in a new Llama, as after a restart. Returns its tokens and how many were restored."""
            llm = llama_cpp.Llama(path, n_ctx=1024, n_batch=64, n_threads=1, verbose=False)
            if cache:
                llm.set_cache(Cache(llm, f"{name}/store"))
            llm.create_completion(prompt, max_tokens=6, temperature=0)
            answer = [int(t) for t in llm.input_ids[len(prompt):llm.n_tokens]]
            return answer, llm.cache.last.get("load", 0) if cache else 0, llm.cache.last.get("save") if cache else None

        first = system + [7, 8, 9]
        answer, loaded, saved = turn(first)
        equal((loaded, saved.tokens), (0, 384), "an empty cache")
        equal(turn(first), (answer, 384, saved._replace(new_blocks=0, new_bytes=0)), "the same again")
        second = system + [30] * 90
        equal(turn(second)[:2], (turn(second, cache=False)[0], 384), "another conversation")
        equal(turn(second + [5])[1], 448, "its own blocks")


def picture(llama_cpp, llm, n, seed=3):
    """Evaluate the embeddings of a picture as vision handlers do: only n_tokens rises."""
    embeddings = (np.random.default_rng(seed).standard_normal((n, llm.n_embd())) * 0.5).astype(np.float32)
    batch = llama_cpp.llama_batch_init(n, llm.n_embd(), 1)
    batch.n_tokens = n
    ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
    for i in range(n):
        batch.pos[i], batch.n_seq_id[i], batch.logits[i] = llm.n_tokens + i, 1, i == n - 1
        batch.seq_id[i][0] = 0
    check(llama_cpp.llama_decode(llm.ctx, batch) == 0, "embeddings")
    llama_cpp.llama_batch_free(batch)
    llm.n_tokens += n


def test_a_picture_is_no_text():
    if not llama_cpp_python.package():
        print("  skipped: make_env.sh has not unpacked llama-cpp-python")
        return
    llama_cpp = llama_cpp_python.load()
    unwatched = llama_cpp.llama_decode
    with tempfile.TemporaryDirectory(prefix="kvasir-real-") as name:
        path, text = f"{name}/model.gguf", words(11, 640)
        llama_cpp_python.make_model(path)

        def llama(store=True):
            llm = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=1, verbose=False)
            if store:
                llm.set_cache(Cache(llm, f"{name}/store"))
            return llm

        def answer(llm):
            llm.create_completion(text, max_tokens=8, temperature=0)
            return llm.input_ids[:llm.n_tokens].tolist()

        for seen in (True, False):  # also by code that took libllama's function before
            if not seen:
                llama_cpp.llama_decode = unwatched
            llm = llama()
            next(llm.create_completion(text, max_tokens=8, temperature=0, stream=True))
            llm.reset()
            llm.eval(text[:128])
            picture(llama_cpp, llm, 400)
            llm.eval(words(12, 20))
            llm.create_completion(llm.input_ids[:llm.n_tokens].tolist(), max_tokens=4)
            fresh = llama()
            equal(answer(fresh), answer(llama(False)), "the answer to the text")
            equal(fresh.cache.last["load"], 128, "restored: the text before the picture")
            subprocess.run(["rm", "-r", f"{name}/store"], check=True)


def test_chats_of_a_sliding_window():
    """Turns whose template drops a part of each answer, each in a new process: each begins with the last block of the prompt before,
    or where that ended, in chats that are shorter and longer than the window of 512 tokens.
    """
    if not llama_cpp_python.package():
        print("  skipped: make_env.sh has not unpacked llama-cpp-python")
        return
    llama_cpp = llama_cpp_python.load()
    for first, turns in ((90, 4), (700, 3)):
        chat_of_a_window(llama_cpp, first, turns)


def chat_of_a_window(llama_cpp, first, turns):
    with tempfile.TemporaryDirectory(prefix="kvasir-real-") as name:
        path, prompt, before = f"{name}/model.gguf", words(21, first), 0
        llama_models.make("window", pathlib.Path(path))
        for turn in range(turns):
            answers = []
            for store in (True, False):
                llm = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=1, swa_full=False, verbose=False)
                if store:
                    llm.set_cache(Cache(llm, f"{name}/store"))
                answers.append([token for token, _ in zip(complete(llm, prompt), range(8))])
                if store:
                    llm.cache[prompt + answers[0]] = llm.save_state()
                    check(before <= llm.cache.last.get("load", 0) < len(prompt), f"chat of {first}, turn {turn}: {llm.cache.last} of {before}")
            equal(answers[0], answers[1], f"chat of {first}, turn {turn}: the answer")
            before = (len(prompt) - 1) // 64 * 64
            prompt += answers[0][4:] + words(30 + turn, 20)


def complete(llm, prompt):
    """Ask the cache as create_completion does (random models have no texts), and generate."""
    if llm.cache:
        try:
            item = llm.cache[prompt]
            if llm.longest_token_prefix(item.input_ids.tolist(), prompt) > llm.longest_token_prefix(llm._input_ids.tolist(), prompt):
                llm.load_state(item)
        except KeyError:
            pass
    yield from llm.generate(list(prompt), temp=0)


if __name__ == "__main__":
    run(globals())
