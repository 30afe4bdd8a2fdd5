# SPDX-License-Identifier: Apache-2.0
"""States of llama.cpp in a store: saved, restored and continued with the same logits; what a second save of a grown state
writes; damage refused. Five shapes of state, made by llama.cpp itself (xllamacpp) with small random models."""
import importlib.util
import os
import pathlib
import random
import struct
import sys
import tempfile

from realtest import *

if not importlib.util.find_spec("xllamacpp") or not importlib.util.find_spec("gguf"):
    skip_all("xllamacpp and gguf are needed (tests/real/make_env.sh installs them)")
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

import numpy as np  # noqa: E402

import llama_models  # noqa: E402
from kvasir.store import open as open_store  # noqa: E402
from llama_engine import F16, Model, Q8_0  # noqa: E402
from llama_models import HEAD, KV_HEADS, SHAPES, VOCAB, WINDOW  # noqa: E402

FOLDER = tempfile.TemporaryDirectory(prefix="kvllama")
RANGE = 128  # tokens of a chunk of K or V
TOKENS, OTHERS = (random.Random(seed).choices(range(VOCAB), k=16384) for seed in (1, 2))
MODELS = {}
# Name: shape of the model, type of K and V, layers of the first cache, bytes of a cell
CASES = {"llama": ("llama", F16, 2, 12), "window": ("window", F16, 1, 12), "mrope": ("mrope", F16, 2, 24),
         "hybrid": ("hybrid", F16, 2, 12), "q8_0": ("llama", Q8_0, 2, 12)}


def model_of(shape):
    if shape not in MODELS:
        path = pathlib.Path(FOLDER.name) / f"{shape}.gguf"
        llama_models.make(shape, path)
        MODELS[shape] = Model(path, VOCAB)
    return MODELS[shape]


def row_bytes(kind):
    return KV_HEADS * HEAD * (2 if kind == F16 else 34 / 32)


def as_version_3(state):
    """The file @state of version 4 as llama.cpp wrote it before: without rotation sizes. One cache, one stream."""
    magic, version, n = struct.unpack_from("<III", state)
    equal((magic, version), (0x67677371, 4), "a sequence file of version 4")
    at = 12 + 4 * n
    streams, cells = struct.unpack_from("<II", state, at)
    equal((streams, cells), (1, n), "one stream of all tokens")
    at += 8 + 12 * n + 8
    return state[:4] + struct.pack("<I", 3) + state[8:at] + state[at + 8:]


def saved_state(context, tokens):
    """The bytes of llama.cpp's own file of the sequence."""
    path = pathlib.Path(FOLDER.name) / "state"
    context.save(path, tokens)
    return path.read_bytes()


def loaded(context, state):
    path = pathlib.Path(FOLDER.name) / "restored"
    path.write_bytes(state)
    return context.load(path)


def round_trip(name):
    """Save, restore and continue the states of one shape, and save the grown one."""
    shape, kind, layers, cell = CASES[name]
    n, more = 700, 7
    options = {"n_ctx": 2048, "type_kv": kind, "n_batch": 128}
    model = model_of(shape)
    with tempfile.TemporaryDirectory() as folder, open_store(folder) as store:
        with model.context(**options) as context:
            context.decode(TOKENS[:n])
            state, raw, whole = saved_state(context, TOKENS[:n]), context.state(), context.whole_state()
            first = {kind: store.save(kind, data) for kind, data in (("file", state), ("raw", raw), ("whole", whole))}
            context.decode(TOKENS[n:n + more])
            grown = saved_state(context, TOKENS[:n + more])
            here = context.decode(OTHERS[:20])
        for kind, data in (("file", state), ("raw", raw), ("whole", whole)):
            equal((first[kind].format, first[kind].parsed_bytes, first[kind].bytes), ("llama", len(data), len(data)), f"{name} {kind}")
            check(bytes(store.restore(kind)) == data, f"{name} {kind}: other bytes")
        check_counts(name, first, n)
        again = store.save("file", state)
        equal((again.new_bytes, again.new_chunks), (0, 0), f"{name}: the same again")
        second = store.save("grown", grown)
        check_growth(name, second, n, more)
        restored = bytes(store.restore("grown"))
        logits = {}
        for which, data in (("never stored", grown), ("restored", restored)):
            with model.context(**options) as context:
                equal(loaded(context, data), TOKENS[:n + more], f"{name}: tokens of the file")
                logits[which] = context.decode(OTHERS[:20])
        check(np.array_equal(logits["never stored"], logits["restored"]), f"{name}: other logits after the store")
        check(np.abs(logits["restored"] - here).max() <= 1e-2 * np.abs(here).max(), f"{name}: other logits after a load")
        with model.context(**options) as one, model.context(**options) as two:
            check(one.set_state(bytes(store.restore("raw")), n) == len(raw) and two.set_state(raw, n) == len(raw), f"{name}: raw refused")
            check(np.array_equal(one.decode(OTHERS[:5]), two.decode(OTHERS[:5])), f"{name}: other logits of the raw state")
        with model.context(**options) as one:
            check(one.set_whole_state(bytes(store.restore("whole")), {0: n}) == len(whole), f"{name}: whole context refused")
            check(not np.array_equal(one.decode(OTHERS[:1]), one.decode(OTHERS[1:2])), "logits depend on nothing")
        refuse_damage(folder, store)


def check_counts(name, first, n):
    """Chunks of a file: tokens, cells, ranges of K and of V per layer, the second cache's."""
    _, _, layers, cell = CASES[name]
    ranges, cells = -(-n // RANGE), -(-(16 + 8 + cell * n) // 16384)
    chunks = 1 + cells + 2 * layers * ranges
    if name == "window":  # five layers of the last WINDOW tokens: cells, then a header and ranges at multiples
        start = n - WINDOW
        chunks += 1 + 10 * (1 + -(-n // RANGE) - start // RANGE)
    if name == "hybrid":
        chunks += 1  # the recurrent layers' state
    equal(first["file"].chunks, chunks, f"{name}: chunks")
    equal(first["raw"].chunks, chunks - 1, f"{name}: chunks without a file's tokens")


def check_growth(name, second, n, more):
    shape, kind, layers, cell = CASES[name]
    row, partial = row_bytes(kind), n % RANGE + more
    new = 12 + 4 * (n + more) + 2 * layers * partial * row + 24 + cell * (n + more)
    if name == "hybrid":
        check(new < second.new_bytes <= new + 16384, f"{name}: {second.new_bytes} bytes are new")
    elif name == "window":  # both ends of the window
        check(new < second.new_bytes <= new + 10 * row * (2 * RANGE + more) + 16384, f"{name}: {second.new_bytes} bytes are new")
    else:
        check(new - 16384 <= second.new_bytes <= new + 2 * layers * 12, f"{name}: {second.new_bytes} bytes are new, not {new}")


def refuse_damage(folder, store):
    """A flipped bit in the largest chunk: the restore fails, and llama.cpp never sees the state."""
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    os.chmod(largest, 0o600)
    largest.write_bytes(content)
    failed = 0
    for name in ("file", "raw", "whole", "grown"):
        try:
            store.restore(name)
        except OSError:
            failed += 1
    check(failed > 0, "a damaged chunk was restored")
    with open_store(folder) as fresh:
        check(fresh.verify().bad_chunks + fresh.verify().missing_chunks > 0, "a damaged chunk was verified")


def growth(name, steps):
    """Yield (version, tokens, percent written) for a state of each of @steps tokens: grown by 1 %, 10 %, and forked at half."""
    shape, kind, _, _ = CASES[name]
    model = model_of(shape)
    wanted = sorted({n for step in steps for n in (step // 2, step, step + step // 100, step + step // 10)})
    states, options = {}, {"n_ctx": 12288, "type_kv": kind}
    with model.context(**options) as context:
        done = 0
        for n in wanted:
            context.decode(TOKENS[done:n])
            done = n
            states[n] = saved_state(context, TOKENS[:n])
    for step in steps:
        with model.context(**options) as context:
            loaded(context, states[step // 2])
            context.decode(OTHERS[:step - step // 2])
            fork = saved_state(context, TOKENS[:step // 2] + OTHERS[:step - step // 2])
        for version in ((3, 4) if shape == "llama" else (4,)):
            change = as_version_3 if version == 3 else bytes
            percents = []
            for second in (states[step + step // 100], states[step + step // 10], fork):
                with tempfile.TemporaryDirectory() as folder, open_store(folder) as store:
                    store.save("state", change(states[step]))
                    saved = store.save("state", change(second))
                    equal(saved.parsed_bytes, saved.bytes, f"{name} version {version}: parsed")
                    percents.append(100 * (saved.new_bytes + saved.manifest_bytes) / saved.bytes)
            yield version, step, percents


def test_growth():
    """The share of a second save that is written. Target: 1 % more tokens at 8192 write at most 2.5 %."""
    for name in ("llama", "q8_0", "mrope", "window"):
        for version, step, percents in growth(name, (1024, 4096, 8192)):
            print(f"  {name} version {version}, {step} tokens: +1 % {percents[0]:.2f} %, +10 % {percents[1]:.2f} %, "
                  f"fork at half {percents[2]:.2f} % written", flush=True)
            if step == 8192 and name != "window":
                check(percents[0] <= 2.5, f"{name} version {version}: {percents[0]:.2f} % of the state written")
                check(percents[1] <= 12 and percents[2] <= 53, f"{name} version {version}: {percents}")


def test_version_3():
    """A file of version 3: llama.cpp of that time wrote the same without rotation sizes; all of it is parsed."""
    with model_of("llama").context(n_ctx=2048) as context, tempfile.TemporaryDirectory() as folder, open_store(folder) as store:
        context.decode(TOKENS[:700])
        four = store.save("four", saved_state(context, TOKENS[:700]))
        state = as_version_3(saved_state(context, TOKENS[:700]))
        three = store.save("three", state)
        equal((three.format, three.parsed_bytes, three.chunks), ("llama", len(state), four.chunks), "version 3")
        check(three.new_bytes < 30000, f"{three.new_bytes} bytes are new: K and V are those of version 4")
        check(bytes(store.restore("three")) == state, "other bytes")


run_all({name: (lambda name=name: round_trip(name)) for name in CASES}, globals(), "test_round_trip_")
