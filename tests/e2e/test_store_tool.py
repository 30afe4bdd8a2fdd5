# SPDX-License-Identifier: Apache-2.0
"""kvasir store where people meet it: links and pipes as targets, ^C, terminals, odd names, plugins that tell nothing,
and the guides read to the letter."""
import json
import os
import pathlib
import pty
import random
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
OK, PROBLEMS, USAGE, UNREACHABLE, NOT_FOUND, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
PLUGINS = {**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "tests" / "plugins")}
EVIL = "\x1b[31mred\x9b2J\x7f\rdone\n"


class World:
    """A folder with a store in it."""

    def __init__(self, scheme=""):
        self.scheme = scheme

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.uri = f"{self.scheme}{self.path / 'store'}"
        self.env = PLUGINS
        return self

    def __exit__(self, *exc):
        self.folder.cleanup()

    def file(self, name, size, seed=1):
        path = self.path / name
        path.write_bytes(random.Random(seed).randbytes(size))
        return path

    def command(self, command, *args):
        return [KVASIR, "store", command, self.uri, *map(str, args)]

    def run(self, command, *args, status=OK, **kw):
        kw.setdefault("stdin", subprocess.DEVNULL)
        done = subprocess.run(self.command(command, *args), capture_output=True, timeout=120, env=self.env, **kw)
        equal(done.returncode, status, f"store {command} {args}: status\n{done.stdout!r}\n{done.stderr!r}\n")
        return done

    def json(self, command, *args, **kw):
        return json.loads(self.run(command, *args, "--json", **kw).stdout)

    def save(self, name, size, seed=1, *args):
        data = self.file("in", size, seed)
        self.run("save", name, data, *args)
        return data.read_bytes()


# -- where restored bytes go ---------------------------------------------------------------------------------------


def test_symbolic_links_are_written_through():
    with World() as w:
        data = w.save("chat", 300_000)
        (w.path / "a" / "b").mkdir(parents=True)
        target = w.path / "a" / "real"
        target.write_bytes(b"old")
        target.chmod(0o640)
        (w.path / "a" / "b" / "inner").symlink_to("../real")  # relative to its own folder
        outer = w.path / "outer"
        outer.symlink_to(w.path / "a" / "b" / "inner")
        inode = target.stat().st_ino
        w.run("restore", "chat", outer)
        check(outer.is_symlink() and (w.path / "a" / "b" / "inner").is_symlink(), "a link was replaced")
        check(target.read_bytes() == data, "not what was saved")
        equal(target.stat().st_mode & 0o777, 0o640, "mode")
        check(target.stat().st_ino != inode, "written in place: half of it would be seen")
        missing = w.path / "missing"
        missing.symlink_to("a/new")  # dangling: the file is made, as curl and sh make it
        w.run("restore", "chat", missing)
        check(missing.is_symlink() and (w.path / "a" / "new").read_bytes() == data, "a dangling link")
        loop = w.path / "loop"
        loop.symlink_to("loop")
        check(b"symbolic links" in w.run("restore", "chat", loop, status=FAILED).stderr, "a loop")
        equal([p.name for p in w.path.rglob("*.kvasir-*")], [], "left behind")


def test_a_failed_restore_leaves_what_a_link_points_to():
    with World() as w:
        w.save("chat", 3_000_000)
        victim = max((w.path / "store" / "chunks").glob("?/*"), key=lambda p: p.stat().st_size)
        victim.unlink()
        target, link = w.path / "target", w.path / "link"
        target.write_bytes(b"precious")
        link.symlink_to(target)
        w.run("restore", "chat", link, status=PROBLEMS)
        equal(target.read_bytes(), b"precious", "target")


def test_descriptors_and_pipes():
    with World() as w:
        data = w.save("chat", 1_500_000)
        for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
            done = w.run("restore", "chat", name, "--json")
            check(done.stdout == data, f"{name}: other bytes, or the report between them")
            equal(json.loads(done.stderr)["bytes"], len(data), f"{name}: report")
        log = w.path / "log"
        log.write_bytes(b"kept ")
        with log.open("ab") as f:  # >> log: what is there stays, and so does the file
            subprocess.run(w.command("restore", "chat", "/dev/stdout"), stdout=f, check=True, timeout=60)
        check(log.read_bytes() == b"kept " + data, "appended")
        fifo = w.path / "fifo"
        os.mkfifo(fifo)
        got = []
        reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
        reader.start()
        w.run("restore", "chat", fifo)
        reader.join(60)
        check(got == [data], "other bytes from the pipe")
        check(stat.S_ISFIFO(fifo.stat().st_mode), "the pipe was replaced")
        through = w.path / "through"
        through.symlink_to(fifo)
        reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
        reader.start()
        w.run("restore", "chat", through)
        reader.join(60)
        check(got == [data, data], "through a link to the pipe")


def test_descriptors_that_nobody_passed():
    """What the tool has open itself (the store's files) is not written to."""
    with World() as w:
        data = w.save("chat", 300_000)
        for number in range(3, 24):
            done = w.run("restore", "chat", f"/dev/fd/{number}", status=FAILED)
            check(b"descriptor" in done.stderr, done.stderr)
        with (w.path / "log").open("wb") as f:
            w.run("restore", "chat", f"/dev/fd/{f.fileno()}", pass_fds=[f.fileno()])
        check((w.path / "log").read_bytes() == data, "one that was passed")
        w.run("verify")


# -- names ---------------------------------------------------------------------------------------------------------


def raw_controls(text):
    return [c for c in text.decode("utf-8", "surrogateescape") if ord(c) < 32 and c != "\n" or 0x7F <= ord(c) < 0xA0]


def test_no_command_prints_a_control_character():
    with World() as w:
        data = w.file("in", 5000)
        outputs = [w.run("save", EVIL, data), w.run("ls"), w.run("ls", "--names"), w.run("show", EVIL),
                   w.run("verify", EVIL), w.run("restore", EVIL, w.path / EVIL.replace("/", "")),
                   w.run("save", "x", w.path / EVIL / "none", status=FAILED),
                   w.run("restore", EVIL, w.path / EVIL / "none", status=FAILED)]
        for chunk in (w.path / "store" / "chunks").glob("?/*"):
            chunk.unlink()
        outputs += [w.run("verify", status=PROBLEMS), w.run("verify", EVIL, status=PROBLEMS),
                    w.run("restore", EVIL, "-", status=PROBLEMS), w.run("rm", EVIL),
                    w.run("rm", EVIL, status=NOT_FOUND), w.run("show", EVIL, status=NOT_FOUND)]
        for done in outputs:
            equal(raw_controls(done.stdout + done.stderr), [], f"{done.args[2:]}: {done.stdout!r} {done.stderr!r}")
        check(b"\\x1b[31mred" in outputs[1].stdout, outputs[1])
        for command in ("ls", "verify"):
            json.loads(w.run(command, "--json").stdout)


def test_a_refused_name_costs_nothing():
    with World() as w:
        for name in ("", "n" * 300):
            reader, writer = os.pipe()
            os.write(writer, bytes(60_000))
            done = w.run("save", name, "-", "--chunk", "4KiB", status=FAILED, stdin=reader)
            os.close(writer)
            equal(len(os.read(reader, 100_000)), 60_000, f"{len(name)}: bytes left in the pipe")
            os.close(reader)
            check(b"name" in done.stderr.lower(), done.stderr)
        equal(list((w.path / "store" / "chunks").glob("?/*")), [], "chunks")


# -- plugins without extensions ------------------------------------------------------------------------------------


def test_conformance_of_a_store_in_memory():
    """No process can be killed so that another one looks: the summary says what that leaves open."""
    with World("memory://") as w:
        out = w.run("conformance").stdout.decode()
        equal(re.findall(r"^(\w+)  kill: ", out, re.M), ["skip", "skip"], out)
        last = out.splitlines()[-2:]
        check(re.match(r"\d+ passed, 0 failed, ", last[0]), out)
        check(last[1].startswith("what a kill costs is not known: ") and "may be lost" in last[1], out)


def test_a_plugin_that_tells_nothing():
    with World("template://") as w:
        w.env = {**PLUGINS, "KV_STORE_LIBRARY_PATH": str(BUILD / "examples")}
        data = w.save("chat", 3_000_000)
        out = w.path / "out"
        w.run("restore", "chat", out)
        check(out.read_bytes() == data, "other bytes")
        w.run("verify", "chat")
        for command in ("ls", "verify", "gc", "stats"):
            error = w.run(command, status=FAILED).stderr
            check(b"doesn't offer" in error and b"chat" not in error, error)
        done = w.run("restore", "none", out, status=NOT_FOUND)
        check(b"or the backend failed" in done.stderr, done.stderr)
        w.run("rm", "none", status=NOT_FOUND)
        w.run("rm", "chat")
        w.run("rm", "chat", status=NOT_FOUND)
        w.run("restore", "chat", out, status=NOT_FOUND)
        check(out.read_bytes() == data, "a failed restore touched the file")
        w.run("save", "chat", w.path / "in")
        chunk = max((p for p in (w.path / "store").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        chunk.unlink()
        w.run("restore", "chat", out, status=PROBLEMS)  # the object is there, a chunk isn't
        w.run("verify", "chat", status=PROBLEMS)
        manifest = [p for p in (w.path / "store").rglob("*chat*") if p.is_file()]
        equal(len(manifest), 1, "manifests")
        os.remove(manifest[0])
        manifest[0].mkdir()  # the backend can't read this one, nor remove it
        w.run("rm", "chat", status=FAILED)


def test_no_plugin_is_no_missing_object():
    with World("nosuch://") as w:
        for args in (["ls"], ["save", "a", w.file("in", 10)], ["restore", "a", w.path / "out"], ["rm", "a"],
                     ["conformance"]):
            done = w.run(*args, status=UNREACHABLE)
            check(b"libkv_store_nosuch.so" in done.stderr and b"no such object" not in done.stderr, done.stderr)
        w.uri = "redis://user:gehe/im@host"
        done = w.run("ls", status=UNREACHABLE)
        check(b"gehe" not in done.stderr and b"password" in done.stderr, done.stderr)


# -- long work -----------------------------------------------------------------------------------------------------


class OnTerminal:
    """The command with standard error on a terminal, and what it shows there."""

    def __init__(self, w, *command):
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen(w.command(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave,
                                      env=w.env)
        os.close(slave)
        os.set_blocking(self.master, False)
        self.shown = b""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.child.poll() is None:
            self.child.kill()
        self.child.communicate()
        os.close(self.master)

    def look(self):
        try:
            self.shown += os.read(self.master, 10_000)
        except OSError:
            pass
        return self.shown

    def wait_for(self, *texts):
        wait_until(lambda: all(t in self.look() for t in texts), 60, f"{texts} on the terminal")

    def interrupt(self, status=INTERRUPTED):
        began = time.monotonic()
        self.child.send_signal(signal.SIGINT)
        out, _ = self.child.communicate(timeout=60)
        equal(self.child.returncode, status, f"status\n{out!r}\n{self.look()!r}\n")
        check(time.monotonic() - began < patience(15), "it went on after ^C")
        return out


def slow(w, **env):
    w.uri = "slow://" + w.uri
    w.env = {**PLUGINS, **env}


def test_interrupted_verification():
    for args in ([], ["chat"]):
        with World() as w:
            w.save("chat", 4_000_000, 1, "--chunk", "8KiB")
            slow(w, SLOW_MS="50")
            with OnTerminal(w, "verify", *args, "--json") as t:
                t.wait_for(b"verify", b"/s", *([b"%"] if args else []))
                r = json.loads(t.interrupt())
            check(r["interrupted"] and 0 < r["chunks"] < 400 and r["problems"] == [], r)
            with OnTerminal(w, "verify", *args) as t:
                t.wait_for(b"verify")
                check(b"chunks" in t.interrupt() and b"interrupted" in t.look(), t.shown)


def test_interrupted_collection():
    with World() as w:
        data = w.save("stays", 1_000_000, 1, "--chunk", "8KiB")
        w.run("save", "goes", w.file("other", 2_000_000, 2), "--chunk", "8KiB")
        w.run("rm", "goes")
        path = w.path / "store"
        all_chunks = len(list((path / "chunks").glob("?/*")))
        slow(w, SLOW_MS="60")
        with OnTerminal(w, "gc", "--no-grace", "--json") as t:
            t.wait_for(b"gc [", b"chunks/s")
            r = json.loads(t.interrupt())
        check(r["interrupted"] and r["deleted_chunks"] < all_chunks // 2, r)
        equal(len(list((path / "chunks").glob("?/*"))), all_chunks - r["deleted_chunks"], "chunks")
        w.uri = str(path)
        w.run("restore", "stays", w.path / "out")
        check((w.path / "out").read_bytes() == data, "what is needed")
        w.run("gc", "--no-grace")  # and the rest
        equal(w.json("stats")["bytes"] >= 1_000_000, True, "bytes")
        equal(w.json("gc", "--no-grace", "--dry-run")["deleted_chunks"], 0, "left")
        w.run("verify")


def test_interrupted_conformance_and_bench():
    with World() as w:
        with OnTerminal(w, "conformance", "--json") as t:
            wait_until(lambda: (w.path / "store" / "chunks").exists(), 60, "the first check")
            r = json.loads(t.interrupt())
        check(r["interrupted"] and 0 < len(r["checks"]) < 40, r)
        equal(w.json("ls"), {"objects": []}, "left behind")
        with OnTerminal(w, "bench", "--size", "256MiB", "--rounds", "50") as t:
            t.wait_for(b"bench [")
            t.interrupt()
        equal(w.json("ls"), {"objects": []}, "left behind by bench")


# -- JSON ----------------------------------------------------------------------------------------------------------


def test_json_whatever_happens():
    """One object on standard output, of a command that works and of one that fails."""
    with World() as w:
        data = w.file("in", 50_000)
        for args in (["save", "chat", data], ["restore", "chat", w.path / "out"], ["ls"], ["ls", "--names"], ["show", "chat"],
                     ["show", "chat", "--chunks"], ["verify"], ["verify", "chat"], ["gc"], ["gc", "--dry-run"], ["stats"],
                     ["rm", "chat"]):
            check(isinstance(w.json(*args), dict), args)
        for args, status in ((["save", "chat", w.path / "none"], FAILED), (["restore", "none", w.path / "out"], NOT_FOUND),
                             (["show", "none"], NOT_FOUND), (["rm", "none"], NOT_FOUND), (["verify", "none"], NOT_FOUND),
                             (["restore", "none", "/none/out"], FAILED), (["save", "", data], FAILED)):
            done = w.run(*args, "--json", status=status)
            check(json.loads(done.stdout)["error"] and done.stderr, f"{args}: {done}")
        w.uri = "nosuch://x"
        for command in ("ls", "stats", "gc", "verify", "conformance", "bench"):
            check("libkv_store_nosuch.so" in json.loads(w.run(command, "--json", status=UNREACHABLE).stdout)["error"], command)


# -- the documents -------------------------------------------------------------------------------------------------


def shell_block(page, after):
    text = (SOURCE / "docs" / page).read_text()
    return re.search(r"```sh\n(.*?)```", text[text.index(after):], re.S).group(1)


def test_the_plugin_guide_to_the_letter():
    """Its five minutes, in a copy of the tree as somebody has it who has just fetched it."""
    if SANITIZED:
        skip("the plugin would be built without the sanitizer")
    script = shell_block("kv-store-plugin.md", "In five minutes")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "include"):
            shutil.copytree(SOURCE / name, pathlib.Path(folder) / name)
        script = script.replace("/tmp/kv", f"{folder}/kv")
        env = {**os.environ, "PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-euc", script], cwd=folder, env=env, capture_output=True, text=True, timeout=200)
        equal(done.returncode, 0, f"status\n{done.stdout}\n{done.stderr}")
        check(" 0 failed" in done.stdout and "FAIL" not in done.stdout, done.stdout)
        check(not re.search(r"^note", done.stdout, re.M), f"advice for the template:\n{done.stdout}")


def test_the_llama_guide_to_the_letter():
    """Its commands, with a file in place of the server's."""
    lines = [line for line in shell_block("kv-store-llama.md", "From the command line").splitlines()
             if line.startswith("kvasir")]
    equal(len(lines), 2, "lines of the guide")
    with tempfile.TemporaryDirectory() as folder:
        slots = pathlib.Path(folder) / "slots"
        slots.mkdir()
        state = b"qsgg" + (3).to_bytes(4, "little") + bytes(random.Random(1).randbytes(200_000))
        (slots / "s1").write_bytes(state)
        env = {**os.environ, "PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}"}
        for i, line in enumerate(lines):
            line = line.replace("/dev/shm/slots", str(slots)).replace("/var/kv", f"{folder}/kv")
            subprocess.run(["bash", "-euc", line], env=env, capture_output=True, check=True, timeout=60)
            if i == 0:
                (slots / "s1").unlink()
        check((slots / "s1").read_bytes() == state, "another file came back")


def llama_state(version, tokens, layers=2, row=256):
    """A sequence file of llama.cpp, as docs/kv-store-llama.md draws it; rotation sizes from version 4 on."""

    def u32(*values):
        return b"".join(value.to_bytes(4, "little") for value in values)

    cells = b"".join(u32(i, 1, 0) for i in range(tokens))
    head = u32(0x67677371, version, tokens, *range(tokens), 1, tokens) + cells + u32(0, layers, *([64, 64] if version >= 4 else []))
    return head + b"".join(u32(1, row, 0) + random.Random(i).randbytes(100_000)[:tokens * row] for i in range(2 * layers))


def test_parsed_states_and_others():
    """Both versions of a state are cut as one; an object that only looks like a state is named as bytes, with a warning."""
    with World() as world:
        for version in (3, 4):
            for tokens, most in ((300, 1), (303, 0.3)):
                file = world.path / "state"
                file.write_bytes(llama_state(version, tokens))
                size = file.stat().st_size
                done = world.run("save", f"v{version}", file, "--json", "--chunk-tokens", 64)
                saved = json.loads(done.stdout)
                equal((saved["format"], saved["parsed_bytes"], saved["bytes"]), ("llama", size, size), f"version {version}")
                equal(done.stderr, b"", "standard error")
                check(saved["new_bytes"] <= most * size, f"{saved['new_bytes']} of {size} bytes are new")
        state = llama_state(4, 300)
        for name, content, parsed in (("broken", state[:20] + bytes(2000) + state[2020:], 0), ("longer", state + bytes(999), len(state))):
            file.write_bytes(content)
            done = world.run("save", name, file, "--json")
            saved = json.loads(done.stdout)
            equal((saved["format"], saved["parsed_bytes"]), ("llama" if parsed else "bytes", parsed), name)
            warnings = [line for line in done.stderr.decode().splitlines() if "llama.cpp state" in line]
            check(len(warnings) == 1 and f"object={name}" in warnings[0] and f"parsed_bytes={parsed}" in warnings[0], done.stderr)
            world.run("restore", name, world.path / "back")
            equal((world.path / "back").read_bytes(), content, name)
        equal(world.json("show", "broken")["format"], "bytes", "show")


def test_ranges_and_prefixes():
    """restore --offset and --length write that part of the object; ls --prefix lists the names that begin so."""
    with World() as world:
        file = world.file("in", 3_000_000)
        data, out = file.read_bytes(), world.path / "out"
        for name in ("user-1", "user-2", "other"):
            world.run("save", name, file, "--chunk", "64KiB")
        for options, want in ((("--offset", 1_500_000, "--length", 1000), data[1_500_000:1_501_000]),
                              (("--offset", 2_999_999), data[-1:]), (("--length", 70_000), data[:70_000])):
            told = world.json("restore", "user-1", out, *options)
            check(out.read_bytes() == want, f"{options}: other bytes")
            equal(told["bytes"], len(want), f"{options}: bytes")
            check(told["chunks"] < 10, f"{options}: {told['chunks']} chunks were read")
        done = world.run("restore", "user-1", out, "--offset", 3_000_001, status=FAILED)
        check(b"doesn't have these bytes" in done.stderr, done.stderr)
        done = world.run("restore", "user-1", world.path / "none", "--length", 0, status=USAGE)
        check(b"--length" in done.stderr, done.stderr)
        equal([entry["name"] for entry in world.json("ls", "--prefix", "user-")["objects"]], ["user-1", "user-2"], "names")
        equal(world.run("ls", "--names", "--prefix", "x").stdout, b"", "no such names")


def test_every_command_has_a_version():
    commands = [[], ["replay"], ["top"], ["bench"], ["bench", "tiers"], ["store"], ["store", "save"], ["store", "gc"]]
    for command in commands:
        for word in "-V", "--version":
            done = subprocess.run([KVASIR, *command, word], capture_output=True, text=True, timeout=60)
            equal((done.returncode, done.stderr), (0, ""), f"{command} {word}")
            check(re.fullmatch(r" ".join(["kvasir", *command]) + r" \d+\.\d+\.\d+\S*\n", done.stdout), f"{command} {word}: {done.stdout}")


def test_the_manual_names_every_option():
    page = (SOURCE / "docs" / "man" / "kvasir-store.1").read_text().replace("\\-", "-")
    for command in ("save", "restore", "ls", "show", "verify", "gc", "rm", "stats", "bench", "conformance"):
        text = subprocess.run([KVASIR, "store", command, "--help"], capture_output=True, text=True, timeout=60).stdout
        options = set(re.findall(r"^ +(--[a-z-]+)", text, re.M))
        check(options, f"{command}: no options in\n{text}")
        for option in options:
            check(re.search(rf"{option}(?![a-z-])", page), f"{command} {option} is not in the manual")


if __name__ == "__main__":
    run(globals())
