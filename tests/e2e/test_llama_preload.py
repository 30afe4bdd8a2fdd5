# SPDX-License-Identifier: Apache-2.0
"""libkvasir_llama_preload.so before a program that saves slots as llama-server does (tests/llama/toy_server.c)."""
import os
import pathlib
import subprocess
import tempfile

from kvtest import BUILD, SANITIZED, check, equal, run, skip_all

if SANITIZED:
    skip_all("a sanitizer's runtime must come first among preloaded libraries")
SERVER, PRELOAD, KVASIR = BUILD / "tests/toy-server", BUILD / "lib/libkvasir_llama_preload.so", BUILD / "bin/kvasir"


class World:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-preload-")
        self.path = pathlib.Path(self.folder.name)
        self.store, self.slot = self.path / "store", self.path / "slots" / "chat"
        self.slot.parent.mkdir()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.cleanup()

    def server(self, *args, preload=True, **env):
        env = {**os.environ, **({"LD_PRELOAD": str(PRELOAD), "KV_LLAMA_STORE": str(self.store)} if preload else {}), **env}
        done = subprocess.run([SERVER, *map(str, args)], capture_output=True, text=True, env=env, check=True, timeout=120)
        return done.stdout.split(), done.stderr


def test_slots_go_to_the_store():
    with World() as w:
        equal(w.server("save", w.slot, 5, 100004)[0], ["100004"], "bytes saved")
        check(not w.slot.exists(), "a file was written")
        (size, n, last, state), _ = w.server("load", w.slot)
        equal((size, n, last), ("100004", "4", "10"), "what was loaded")
        restored = w.path / "plain"
        subprocess.run([KVASIR, "store", "restore", w.store, "chat", restored], check=True, capture_output=True)
        equal(w.server("load", restored, preload=False)[0], [size, n, last, state], "the same as from a file")
        equal(w.server("load", w.path / "slots/none")[0][0], "0", "a slot that nobody saved")
        equal(w.server("load", w.path / "chat", preload=False)[0][0], "0", "without the store")


def test_a_question_reads_the_head_only():
    """How many tokens there are, before the load: bytes of the state that are damaged or missing don't matter to it."""
    with World() as w:
        w.server("save", w.slot, 5, 8 << 20, KV_LLAMA_FINGERPRINT="A")
        equal(w.server("ask", w.slot, KV_LLAMA_FINGERPRINT="A")[0], ["0", "4"], "tokens")
        chunks = sorted((p for p in (w.store / "chunks").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        for chunk in chunks[len(chunks) // 2:]:
            chunk.unlink()
        (out, problem), (loaded, said) = (w.server(what, w.slot, KV_LLAMA_FINGERPRINT="A") for what in ("ask", "load"))
        check(out == ["0", "4"] and not problem, f"the question: {out} {problem}")
        check(loaded[0] == "0" and "wasn't restored" in said, f"the load: {loaded} {said}")
        out, problem = w.server("ask", w.path / "slots/none")
        check(out == ["0", "0"] and "wasn't restored" in problem, f"a slot that nobody saved: {out} {problem}")
        out, _ = w.server("ask", w.slot, KV_LLAMA_FINGERPRINT="B")
        equal(out, ["0", "0"], "another model")


def test_without_a_store_nothing_changes():
    with World() as w:
        equal(w.server("save", w.slot, 5, 1004, KV_LLAMA_STORE="")[0], ["1004"], "bytes saved")
        equal(w.slot.stat().st_size, 1004, "a file of the server's own")
        equal(w.server("load", w.slot, KV_LLAMA_STORE="")[0][0], "1004", "loaded from it")
        out, problem = w.server("save", w.slot, 5, 1004, KV_LLAMA_STORE="nobody://knows")
        check(out == ["0"] and "can't be opened" in problem, f"a store that can't be opened: {out} {problem}")


def test_another_model_and_damage_are_refused():
    with World() as w:
        w.server("save", w.slot, 5, 100004, KV_LLAMA_FINGERPRINT="A")
        equal(w.server("load", w.slot, KV_LLAMA_FINGERPRINT="A")[0][0], "100004", "the same model")
        equal(w.server("load", w.slot, KV_LLAMA_FINGERPRINT="B")[0], ["0", "0", "0", "0"], "another model")
        chunk = max((p for p in (w.store / "chunks").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        with chunk.open("r+b") as file:
            file.seek(100)
            file.write(bytes(4096))
        out, problem = w.server("load", w.slot, KV_LLAMA_FINGERPRINT="A")
        check(out == ["0", "0", "0", "0"] and "wasn't restored" in problem, f"damage: {out} {problem}")


if __name__ == "__main__":
    run(globals())
