# SPDX-License-Identifier: Apache-2.0
"""Figures of the llama.cpp prefix cache: not a test. Each step is a process of its own, with one thread.

    KV_REAL_ENGINES=FOLDER KV_BUILD_DIR=build python tests/real/bench_llama.py [tokens]

1. Time to the first logits of a prompt after a restart: computed, restored by us, loaded from llama.cpp's own file.
2. Five conversations on one system prompt of 2,000 tokens, turn 2 of each after a restart: our cache and LlamaDiskCache.
"""
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

from realtest import BUILD  # first: it starts the program again with the environment's Python

sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")
import llama_cpp_python  # noqa: E402


def prompt(seed, n):
    rng = random.Random(seed)
    return [1] + [rng.randrange(3, 259) for _ in range(n - 1)]


def bytes_in(folder):
    return sum(p.stat().st_size for p in pathlib.Path(folder).rglob("*") if p.is_file())


# -- 1: one prompt -------------------------------------------------------------------------------------------------------


def one_prompt(step, folder, n):
    import ctypes
    import kvasir
    from kvasir.llama import Prefixes, fingerprint_file
    import llama_engine
    model = llama_engine.Model(folder / "model.gguf", 512)
    tokens = prompt(1, n)
    warm = [5] * 64
    with model.context(n_ctx=n + 128) as context:
        llama_engine.LIB.llama_memory_seq_pos_max.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        context.decode(warm)  # a process that serves has decoded something
        llama_engine.LIB.llama_memory_seq_rm(llama_engine.LIB.llama_get_memory(context.handle), 0, -1, -1)
        context.at = {}
        fingerprint = fingerprint_file(str(folder / "model.gguf"))
        begin, cpu = time.perf_counter(), time.process_time()
        if step == "compute":
            context.decode(tokens)
            print(time.perf_counter() - begin, time.process_time() - cpu)
            begin = time.perf_counter()
            assert context.save(folder / "state", tokens[:-1])
            own = time.perf_counter() - begin
            with kvasir.store.open(str(folder / "store")) as store, Prefixes(store, fingerprint, library=llama_engine.LIB) as prefixes:
                begin = time.perf_counter()
                saved = prefixes.save(context.handle, 0, tokens)
                print(f"# save: own file {own:.3f} s (not durable), ours {time.perf_counter() - begin:.3f} s, {saved.new_bytes} bytes")
        elif step == "own":
            assert context.load(folder / "state") is not None
            loaded, loaded_cpu = time.perf_counter() - begin, time.process_time() - cpu
            context.at[0] = n - 1  # the file has one cell more than tokens; decode the last again
            llama_engine.LIB.llama_memory_seq_rm(llama_engine.LIB.llama_get_memory(context.handle), 0, n - 1, -1)
            context.decode(tokens[-1:])
            print(time.perf_counter() - begin, loaded, time.process_time() - cpu, loaded_cpu)
        else:
            with kvasir.store.open(str(folder / "store")) as store, Prefixes(store, fingerprint, library=llama_engine.LIB) as prefixes:
                got = prefixes.load(context.handle, 0, tokens[:-1])
                loaded, loaded_cpu = time.perf_counter() - begin, time.process_time() - cpu
                context.at[0] = got.tokens
                context.decode(tokens[got.tokens:])
                print(time.perf_counter() - begin, loaded, time.process_time() - cpu, loaded_cpu)


# -- 2: five conversations -----------------------------------------------------------------------------------------------

SYSTEM, TURN1, TURN2, ANSWER = 2000, 400, 50, 8


def conversations(kind, step, folder):
    llama_cpp = llama_cpp_python.load()
    llm = llama_cpp.Llama(str(folder / "chat.gguf"), n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False, seed=1)
    begin = time.perf_counter()
    if kind == "ours":
        from kvasir.llama import Cache
        llm.set_cache(Cache(llm, str(folder / "ours")))
    elif kind == "disk":
        llm.set_cache(llama_cpp.LlamaDiskCache(str(folder / "disk")))
    opening = time.perf_counter() - begin
    total, cpu, answers = 0.0, 0.0, []
    for i in range(5):
        text = prompt(1, SYSTEM) + prompt(10 + i, TURN1)[1:]
        if step == "turn2":
            text += eval((folder / "answers").read_text())[i] + prompt(20 + i, TURN2)[1:]
        begin, cpu_begin = time.perf_counter(), time.process_time()
        llm.create_completion(text, max_tokens=ANSWER, temperature=0)
        total, cpu = total + time.perf_counter() - begin, cpu + time.process_time() - cpu_begin
        answers.append([int(t) for t in llm.input_ids[len(text):llm.n_tokens]])
    if step == "turn1":
        (folder / "answers").write_text(repr(answers))
    if kind == "ours" and step == "turn2":
        print("# opening with the fingerprint:", round(opening, 3))
    print(total, cpu, len(llm.save_state().llama_state), str(answers).replace(" ", ""))


# -- all -----------------------------------------------------------------------------------------------------------------


def child(*args):
    done = subprocess.run([sys.executable, "-B", __file__, *map(str, args)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("#"):
            print(line, flush=True)
    return [word if "," in word else float(word) for word in [line for line in done.stdout.splitlines() if not line.startswith("#")][-1].split()]


def median(values):
    return sorted(values)[len(values) // 2]


def main(n=8192):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-bench-llama-"))
    try:
        llama_cpp_python.make_model(folder / "model.gguf", layers=2, width=512, heads=8, kv_heads=8, feed=1024)
        computed = child("one", "compute", folder, n)
        runs = [(child("one", "own", folder, n), child("one", "ours", folder, n)) for _ in range(5)]
        print(f"{n} tokens, {(folder / 'state').stat().st_size} bytes of state, {bytes_in(folder / 'store')} in the store")
        for kind, i in (("wall", 0), ("CPU", 1)):
            own, own_load, ours, our_load = (median([r[who][2 * i + at] for r in runs]) for who in (0, 1) for at in (0, 1))
            print(f"{kind}: first logits computed {computed[i]:.2f} s, restored by us {ours:.3f} s ({computed[i] / ours:.1f} x), "
                  f"own file {own:.3f} s; load: own {own_load * 1000:.1f} ms, ours {our_load * 1000:.1f} ms, beyond "
                  f"{(our_load - own_load) * 1000:.1f} ms = {(our_load - own_load) / own_load:.2f} x its time, "
                  f"{(our_load - own_load) / computed[i] * 100:.2f} % of the computed", flush=True)
        llama_cpp_python.make_model(folder / "chat.gguf", layers=2, width=512, heads=8, kv_heads=8, feed=512)
        for kind in ("none", "disk", "ours"):
            child("chat", kind, "turn1", folder)
            room = bytes_in(folder / kind) if kind != "none" else 0
            seconds, cpu, state, answers = child("chat", kind, "turn2", folder)
            print(f"five conversations, turn 2, {kind}: {seconds:.3f} s, {cpu:.3f} s of CPU; room after turn 1 {room} bytes = {room / state:.2f} states; {answers}", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one_prompt(sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["chat"]:
        conversations(sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
