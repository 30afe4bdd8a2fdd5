# SPDX-License-Identifier: Apache-2.0
"""kvasir store as people and scripts run it: what it writes, says, and returns."""
import json
import os
import pathlib
import pty
import random
import signal
import subprocess
import tempfile
import time

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
OK, PROBLEMS, USAGE, UNREACHABLE, NOT_FOUND, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class World:
    """A folder with a store in it."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.uri = self.path / "store"
        return self

    def __exit__(self, *exc):
        self.folder.cleanup()

    def file(self, name, size, seed=1):
        path = self.path / name
        path.write_bytes(random.Random(seed).randbytes(size))
        return path

    def run(self, command, *args, status=OK, stdin=b"", **kw):
        done = subprocess.run([KVASIR, "store", command, str(self.uri), *map(str, args)], input=stdin,
                              capture_output=True, timeout=120, **kw)
        equal(done.returncode, status, f"store {command} {args}: status\n{done.stdout!r}\n{done.stderr!r}\n")
        return done

    def json(self, command, *args, **kw):
        return json.loads(self.run(command, *args, "--json", **kw).stdout)

    def chunks(self):
        return sorted((self.uri / "chunks").glob("?/*"))

    def tmp_files(self):
        return [p.name for p in self.path.iterdir() if ".kvasir-" in p.name]


def test_save_and_restore():
    with World() as w:
        data = w.file("in", 3_000_000)
        r = w.json("save", "chat", data)
        equal((r["name"], r["bytes"], r["new_bytes"], r["format"]), ("chat", 3_000_000, 3_000_000, "bytes"), "saved")
        equal(r["new_chunks"], r["chunks"], "chunks")
        equal(w.json("save", "chat", data)["new_bytes"], 0, "saved again: new bytes")
        out = w.path / "out"
        equal(w.json("restore", "chat", out)["bytes"], 3_000_000, "restored")
        check(out.read_bytes() == data.read_bytes(), "other bytes")
        check(b"all verified" in w.run("restore", "chat", out).stdout, "text")
        equal(w.tmp_files(), [], "left behind")


def test_sizes():
    with World() as w:
        for size in (0, 1, 4096, 1_048_577):
            data = w.file("in", size, size)
            w.run("save", f"o{size}", data)
            w.run("restore", f"o{size}", w.path / "out")
            check((w.path / "out").read_bytes() == data.read_bytes(), f"{size} bytes")


def test_pipes():
    with World() as w:
        data = w.file("in", 2_500_000).read_bytes()
        w.run("save", "piped", "-", stdin=data)
        done = w.run("restore", "piped", "-")
        check(done.stdout == data, "other bytes on standard output")
        done = w.run("restore", "piped", "-", "--json", "--verify-first")
        check(done.stdout == data, "JSON between the bytes")
        equal(json.loads(done.stderr)["bytes"], len(data), "report")


def test_a_restored_file_is_whole_or_not_there():
    with World() as w:
        data = w.file("in", 5_000_000)
        w.run("save", "chat", data)
        victim = max(w.chunks(), key=lambda p: p.stat().st_size)
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        out = w.path / "out"
        w.run("restore", "chat", out, status=PROBLEMS)
        check(not out.exists(), "half a file")
        out.write_bytes(b"what was there")
        w.run("restore", "chat", out, status=PROBLEMS)
        equal(out.read_bytes(), b"what was there", "the old file")
        equal(w.tmp_files(), [], "left behind")
        equal(w.run("restore", "chat", "-", "--verify-first", status=PROBLEMS).stdout, b"", "bytes written")
        w.run("save", "chat", data)  # repairs it
        w.run("restore", "chat", out)
        check(out.read_bytes() == data.read_bytes(), "after the repair")


def test_restore_into_strange_places():
    with World() as w:
        data = w.file("in", 100_000)
        w.run("save", "chat", data)
        w.run("restore", "chat", "/dev/null")
        check(pathlib.Path("/dev/null").is_char_device(), "/dev/null was replaced")
        w.run("restore", "chat", w.path / "none" / "out", status=FAILED)
        w.run("restore", "chat", w.path, status=FAILED)
        old = os.umask(0o027)
        try:
            w.run("restore", "chat", w.path / "out")
        finally:
            os.umask(old)
        equal((w.path / "out").stat().st_mode & 0o777, 0o640, "mode")


def test_ls_show_rm():
    with World() as w:
        w.uri.mkdir()
        equal(w.json("ls"), {"objects": []}, "empty store")
        equal(list(w.uri.iterdir()), [], "what ls made")
        data = w.file("in", 2_000_000)
        w.run("save", "b", data, "--fingerprint", "model 7")
        w.run("save", "a", data)
        (w.uri / "opaque").write_bytes(b"somebody else's")
        objects = w.json("ls")["objects"]
        equal([(o["name"], o["format"]) for o in objects], [("a", "bytes"), ("b", "bytes"), ("opaque", "opaque")], "ls")
        equal(objects[0]["bytes"], 2_000_000, "bytes")
        equal(w.run("ls", "--names").stdout, b"a\nb\nopaque\n", "names")
        shown = w.json("show", "b", "--chunks")
        equal((shown["fingerprint"], shown["bytes"]), ("model 7", 2_000_000), "show")
        equal(sum(c["bytes"] for c in shown["chunk_list"]), 2_000_000, "chunks")
        check(b"model 7" in w.run("show", "b").stdout, "text")
        check(b"not an object" in w.run("show", "opaque", status=FAILED).stderr, "opaque")
        w.run("rm", "b")
        w.run("rm", "b", status=NOT_FOUND)
        equal(w.run("ls", "--names").stdout, b"a\nopaque\n", "names after rm")


def test_fingerprints():
    with World() as w:
        w.run("save", "chat", w.file("in", 1000), "--fingerprint", "one")
        w.run("restore", "chat", w.path / "out", "--fingerprint", "two", status=PROBLEMS)
        check(not (w.path / "out").exists(), "written all the same")
        w.run("restore", "chat", w.path / "out", "--fingerprint", "one")


def test_verify():
    with World() as w:
        w.run("save", "good", w.file("a", 2_000_000, 1))
        w.run("save", "bad", w.file("b", 2_000_000, 2))
        w.run("verify")
        equal(w.json("verify")["problems"], [], "problems")
        key = w.json("show", "bad", "--chunks")["chunk_list"][0]["key"]
        (w.uri / "chunks" / key[0] / key).unlink()
        r = w.json("verify", status=PROBLEMS)
        equal((r["manifests"], r["missing_chunks"], r["bad_manifests"]), (2, 1, 0), "verify")
        check(len(r["problems"]) >= 1 and "bad" in r["problems"][0], r["problems"])
        check(b"bad" in w.run("verify", "bad", status=PROBLEMS).stdout, "text")
        w.run("verify", "good")
        w.run("verify", "none", status=NOT_FOUND)
        w.run("restore", "bad", w.path / "out", status=PROBLEMS)  # a chunk is missing, not the object


def test_gc():
    with World() as w:
        w.run("save", "stays", w.file("a", 2_000_000, 1))
        kept = w.chunks()
        w.run("save", "goes", w.file("b", 2_000_000, 2))
        w.run("rm", "goes")
        equal(w.json("gc")["deleted_chunks"], 0, "young")
        would = w.json("gc", "--no-grace", "--dry-run")
        check(would["dry_run"] and would["deleted_bytes"] == 2_000_000, would)
        check(len(w.chunks()) > len(kept), "a dry run deleted")
        equal(w.json("gc", "--no-grace")["deleted_bytes"], 2_000_000, "deleted")
        equal(w.chunks(), kept, "chunks")
        w.run("restore", "stays", w.path / "out")


def test_evicted_is_not_damaged():
    with World() as w:
        limited = f"{w.uri}?limit=1M"
        for i, name in enumerate(("old", "new")):
            w.run("save", name, w.file(name, 800_000), "--chunk", "64KiB")
            for path in w.uri.glob("chunks/*/*"):
                os.utime(path, (1000 + i, 1000 + i))
        for name in ("third", "fourth"):  # over the limit: the oldest go
            done = subprocess.run([KVASIR, "store", "save", limited, name, w.file(name, 900_000, seed=len(name))],
                                  capture_output=True, timeout=60, check=False)
            equal(done.returncode, OK, done.stderr)
        done = subprocess.run([KVASIR, "store", "restore", limited, "old", w.path / "out"], capture_output=True, timeout=60, check=False)
        equal(done.returncode, NOT_FOUND, done.stderr)
        check(b"evicted" in done.stderr and b"damaged" not in done.stderr, done.stderr)
        done = subprocess.run([KVASIR, "store", "verify", limited], capture_output=True, timeout=60, check=False)
        equal(done.returncode, OK, done.stdout)
        done = w.run("restore", "old", w.path / "out", status=PROBLEMS)  # of a store that evicts nothing
        check(b"missing" in done.stderr and b"damaged" not in done.stderr, done.stderr)
        w.run("verify", status=PROBLEMS)


def test_gc_stops_at_a_damaged_manifest():
    with World() as w:
        w.run("save", "chat", w.file("a", 2_000_000, 1))
        w.run("save", "goes", w.file("b", 2_000_000, 2))
        w.run("rm", "goes")
        before = w.chunks()
        manifest = (w.uri / "chat").read_bytes()
        (w.uri / "chat").write_bytes(manifest[:-1] + bytes([manifest[-1] ^ 1]))
        w.run("gc", "--no-grace", status=PROBLEMS)
        equal(w.chunks(), before, "chunks")


def test_stats():
    with World() as w:
        w.run("save", "chat", w.file("a", 2_000_000))
        r = w.json("stats")
        equal((r["manifests"], r["chunks"]), (1, len(w.chunks())), "stats")
        check(b"chunks" in w.run("stats").stdout, "text")


def test_bench():
    with World() as w:
        r = w.json("bench", "--size", "4MiB", "--rounds", 2)
        equal((r["bytes"], r["rounds"]), (4 << 20, 2), "bench")
        for key in ("raw_write_s", "cold_s", "warm_s", "raw_read_s", "restore_s"):
            check(r[key] > 0, key)
        equal(w.chunks(), [], "left behind")
        equal(w.json("ls"), {"objects": []}, "left behind")
        equal(sorted(p.name for p in w.path.iterdir()), ["store"], "left behind")


def test_conformance():
    with World() as w:
        r = w.json("conformance")
        equal((r["failed"], r["passed"] + r["skipped"]), (0, len(r["checks"])), "conformance")
        check(r["passed"] >= 40, r)
        equal([c["verdict"] for c in r["checks"] if c["check"].startswith("kill: ")], ["pass", "pass"], "processes killed")
        done = w.run("conformance")
        check(b" passed, 0 failed" in done.stdout and not done.stderr, done)
        equal(w.chunks(), [], "left behind")
        equal(w.json("ls"), {"objects": []}, "left behind")


def test_usage_and_errors():
    with World() as w:
        done = subprocess.run([KVASIR, "store", "--help"], capture_output=True, timeout=60)
        check(done.returncode == 0 and b"kvasir store save" in done.stdout, "usage")
        for args in ([], ["nonsense"], ["save"], ["save", "a", "b"], ["ls", "a", "b"], ["save", "a", "b", "c", "d"],
                     ["save", "a", "b", "c", "--format", "odd"], ["gc", "a", "--grace", "soon"]):
            done = subprocess.run([KVASIR, "store", *args], capture_output=True, timeout=60)
            equal(done.returncode, USAGE, f"{args}: status")
            check(done.stderr and not done.stdout, f"{args}: {done}")
        for command in ("save", "restore", "ls", "show", "verify", "gc", "rm", "stats", "bench", "conformance"):
            done = subprocess.run([KVASIR, "store", command, "--help"], capture_output=True, timeout=60)
            check(done.returncode == 0 and b"Exit status" in done.stdout, f"{command} --help: {done}")
        failed = w.run("restore", "none", w.path / "out", status=UNREACHABLE).stderr.decode().splitlines()[-1]
        check(str(w.uri) in failed, f"the message doesn't name the store: {failed}")
        check(not w.uri.exists(), "restore made a store")
        w.run("save", "chat", w.file("in", 10))
        w.run("restore", "none", w.path / "out", status=NOT_FOUND)
        w.run("show", "none", status=NOT_FOUND)
        w.run("save", "chat", w.path / "none", status=FAILED)
        w.run("save", "", w.file("in", 10), status=FAILED)
        failed = w.run("save", "chat", w.path, status=FAILED).stderr.decode()
        equal(failed, f"kvasir store save: {w.path}: Is a directory\n", "a folder in place of a file")
        w.uri = "nosuchscheme://host/db"
        for command in (["ls"], ["conformance"]):
            check(b"nosuchscheme" in w.run(*command, status=UNREACHABLE).stderr, "which store")
        w.uri = "broken://host/refuse"  # its plugin alone knows why
        failed = w.run("ls", status=UNREACHABLE, env={**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "tests" / "plugins")})
        check(failed.stderr.endswith(b"its plugin refused it; a log line above may say why\n"), failed)
        w.uri = "file:///tmp/none"
        for command in (["ls"], ["conformance"]):
            failed = w.run(*command, status=UNREACHABLE).stderr.decode().splitlines()[-1]
            equal(failed, f"kvasir store {command[0]}: file:///tmp/none: a directory is named by its path: /tmp/none")
        w.uri = w.file("plain", 10)
        w.run("ls", status=UNREACHABLE)


def test_a_failed_save_leaves_the_old_object():
    with World() as w:
        data = w.file("in", 1_000_000)
        w.run("save", "chat", data)
        w.run("save", "chat", w.path, status=FAILED)  # a folder can't be read
        w.run("restore", "chat", w.path / "out")
        check((w.path / "out").read_bytes() == data.read_bytes(), "the old object")


def test_interrupt():
    """^C in the middle of a save: nothing published, status 130."""
    with World() as w:
        w.run("save", "other", w.file("in", 1000))
        reader, writer = os.pipe()
        child = subprocess.Popen([KVASIR, "store", "save", str(w.uri), "chat", "-", "--chunk", "4KiB"], stdin=reader,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            os.close(reader)
            os.write(writer, bytes(60_000))
            before = time.monotonic()
            noise = random.Random(5)

            def saw_chunks():
                os.write(writer, noise.randbytes(30_000))
                return len(list((w.uri / ".kvasir").rglob("*"))) > 10 or time.monotonic() - before > 2

            wait_until(saw_chunks, 30, "the save to get going")
            child.send_signal(signal.SIGINT)
            while child.poll() is None:  # it notices when it reports progress, or reads
                try:
                    os.write(writer, noise.randbytes(30_000))
                except BrokenPipeError:
                    break
                check(time.monotonic() - before < 60, "not interrupted")
        finally:
            os.close(writer)
            out, err = child.communicate(timeout=60)
        equal(child.returncode, INTERRUPTED, f"status ({out!r} {err!r})")
        equal(w.run("ls", "--names").stdout, b"other\n", "names")


def test_progress_bar_on_a_terminal():
    with World() as w:
        data = w.file("in", 1_000_000).read_bytes()
        master, slave = pty.openpty()
        reader, writer = os.pipe()
        command = [KVASIR, "store", "save", str(w.uri), "chat", "-", "--total", "50MiB", "--chunk", "16KiB"]
        child = subprocess.Popen(command, stdin=reader, stdout=subprocess.PIPE, stderr=slave)
        os.close(reader)
        os.close(slave)
        shown = b""
        os.set_blocking(master, False)

        def saw_bar():
            nonlocal shown
            os.write(writer, data[:50_000])
            try:
                shown += os.read(master, 10_000)
            except BlockingIOError:
                pass
            return b"save [" in shown and b"%" in shown

        try:
            wait_until(saw_bar, 30, "a progress bar")
        finally:
            os.close(writer)
            child.communicate(timeout=60)
            os.close(master)
        equal(child.returncode, OK, "status")


if __name__ == "__main__":
    run(globals())
