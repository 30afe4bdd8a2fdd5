# SPDX-License-Identifier: Apache-2.0
"""A store's folder holds what isn't the store's: links, pipes, folders in place of files, another user's traps. No
command touches anything outside, deletes what doesn't carry the store's form, or waits for a pipe."""
import os
import pathlib
import random
import subprocess
import tempfile

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
OK, PROBLEMS, UNREACHABLE, NOT_FOUND, FAILED = 0, 1, 3, 4, 5
COMMANDS = [("ls",), ("stats",), ("verify",), ("show", "chat"), ("gc", "--dry-run"), ("gc", "--no-grace", "--opaque-too"),
            ("rm", "none")]
WRITER = "0123456789abcdef"  # in the form of one, but nobody's


class World:
    """A folder with a store `s` that holds object "chat", and a victim's folder beside it."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.store = self.path / "s"
        self.data = self.path / "data"
        self.data.write_bytes(random.Random(1).randbytes(300_000))
        self.run("save", "chat", self.data, "--chunk", "16KiB")
        self.victim = self.path / "victim"
        self.victim.mkdir()
        for name in ("db.sqlite", WRITER, f"{WRITER}.1", f"{WRITER}.2.s", "a" * 32, "0011"):
            (self.victim / name).write_bytes(b"precious" * 5)
            os.utime(self.victim / name, (1, 1))
        self.before = self.snapshot()
        return self

    def __exit__(self, *exc):
        self.folder.cleanup()

    def snapshot(self):
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino) for p in self.victim.iterdir()}

    def run(self, command, *args, status=(OK,), options=""):
        status = (*status, NOT_FOUND) if status and args == ("none",) else status
        done = subprocess.run([KVASIR, "store", command, f"{self.store}{options}", *map(str, args)], capture_output=True,
                              timeout=60, stdin=subprocess.DEVNULL, check=False)
        if status is not None and done.returncode not in status:
            raise AssertionError(f"store {command} {args}: status {done.returncode}\n{done.stdout!r}\n{done.stderr!r}")
        return done

    def unharmed(self, what):
        equal(self.snapshot(), self.before, f"the victim's files after {what}")

    def save(self, name="again", **kw):
        return self.run("save", name, self.data, "--chunk", "16KiB", **kw)

    def restores(self, name="again", options=""):
        self.run("restore", name, self.path / "out", options=options)
        equal((self.path / "out").read_bytes(), self.data.read_bytes(), "what was restored")

    def chunks(self):
        return sorted(p for p in (self.store / "chunks").rglob("*") if p.is_file())


def replace_by_link(path, target):
    if path.is_dir():
        path.rename(path.with_name(path.name + ".was"))
    elif path.exists():
        path.unlink()
    path.symlink_to(target)


# -- folders that are links ----------------------------------------------------------------------------------------


def linked_folder(name):
    with World() as w:
        replace_by_link(w.store / name, w.victim)
        for command in COMMANDS:
            done = w.run(*command, status=(UNREACHABLE,))
            check(b"link" in done.stderr, f"{command} doesn't say why: {done.stderr!r}")
            w.unharmed(f"{command} with a linked {name}")
        w.run("save", "new", w.data, status=(UNREACHABLE,))
        w.run("save", "new", w.data, status=(UNREACHABLE,), options="?limit=1K&sums=files")
        w.unharmed(f"a save with a linked {name}")


def test_a_linked_folder_is_refused():
    for name in (".kvasir", ".kvasir/writers", ".kvasir/tmp", ".kvasir/bad", ".kvasir/refs", ".kvasir/sums", "chunks"):
        linked_folder(name)


def test_a_linked_fan_out_is_refused():
    for digit in ("0", "a"):
        linked_folder(f"chunks/{digit}")


def test_the_store_itself_may_be_linked():
    with World() as w:
        real = w.path / "elsewhere" / "deep"
        real.parent.mkdir()
        w.store.rename(real)
        w.store.symlink_to(real)
        w.save()
        w.restores()
        w.run("gc", "--no-grace")


# -- files that are links, or other programs' ----------------------------------------------------------------------


def test_the_count_of_bytes_is_no_others_file():
    for plant in (os.symlink, os.link):
        with World() as w:
            used = w.store / ".kvasir" / "used"
            used.unlink(missing_ok=True)
            plant(w.victim / "db.sqlite", used)
            for options in ("?limit=1M", "?limit=100K", ""):
                w.save(options=options)
                w.run("gc", "--no-grace", options=options)
                w.unharmed(f"used, {plant.__name__}, {options}")


def test_notes_of_chunks_are_no_others_file():
    """An opaque manifest's notes are appended to .kvasir/refs/NAME."""
    for plant in (os.symlink, os.link):
        with World() as w:
            plant(w.victim / "db.sqlite", w.store / ".kvasir" / "refs" / "sentinel")
            driver = [str(BUILD / "tests" / "store-driver"), str(w.store)]
            script = "put aa01 2000 1\npublish sentinel 20 2\n"
            subprocess.run(driver, input=script.encode(), timeout=60, check=False, capture_output=True)
            w.unharmed(f"notes, {plant.__name__}")
            w.run("gc", "--no-grace")
            w.unharmed(f"notes, {plant.__name__}, gc")


def test_side_cars_are_no_others_files():
    with World() as w:
        for path in w.chunks():
            replace_by_link(w.store / ".kvasir" / "sums" / path.name, w.victim / "db.sqlite")
        w.save(options="?sums=files")
        w.restores(options="?sums=files")
        w.run("verify", options="?sums=files")
        w.run("gc", "--no-grace", options="?sums=files")
        w.unharmed("linked checksums")


def test_a_linked_chunk_is_put_again():
    with World() as w:
        for path in w.chunks()[:5]:
            replace_by_link(path, w.victim / "db.sqlite")
        w.run("restore", "chat", w.path / "out", status=(PROBLEMS, NOT_FOUND))
        w.save()
        w.restores()
        w.run("gc", "--no-grace")
        w.unharmed("linked chunks")


def dead_writer(w):
    """Return the id of a process of this machine that wrote to the store and has ended. Other machines' litter goes after a week."""
    writers = w.store / ".kvasir" / "writers"
    command = [KVASIR, "store", "save", str(w.store), "half", "-", "--chunk", "16KiB"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as saving:
        saving.stdin.write(random.Random(2).randbytes(4 << 20))
        saving.stdin.flush()
        wait_until(lambda: any(writers.iterdir()), 60, "a writer")
        name = next(writers.iterdir()).name
        saving.stdin.close()
        equal(saving.wait(60), 0, "save")
    return name


def test_litter_is_known_by_its_form():
    """What isn't in the form of a writer or of a writer's file stays, whatever its age."""
    with World() as w:
        dead, tmp, writers = dead_writer(w), w.store / ".kvasir" / "tmp", w.store / ".kvasir" / "writers"
        keep = [tmp / "notes-of-a-careful-admin.txt", tmp / f"{WRITER}.1.bak", tmp / f"{WRITER}.x", tmp / f"{WRITER.upper()}.1",
                tmp / f"{WRITER}1", writers / "README", writers / "0123", writers / WRITER.upper(), tmp / f"{WRITER}.",
                writers / "fedcba9876543210"]
        for path in keep:
            path.write_bytes(b"kept")
        go = [tmp / f"{dead}.1", tmp / f"{dead}.22.s", tmp / f"{dead}.3.p"]
        for path in go:
            path.write_bytes(b"litter")
        (writers / dead).touch()
        (tmp / f"{dead}.4").symlink_to(w.victim / "db.sqlite")
        os.mkfifo(tmp / f"{dead}.5")
        (tmp / f"{dead}.6").mkdir()
        for command in COMMANDS:
            w.run(*command)
        equal([p.name for p in keep if not p.exists()], [], "deleted, though in no form of ours")
        equal([p.name for p in go if p.exists()], [], "litter left")
        check(not (writers / dead).exists(), "a dead writer was left")
        for number in (4, 5, 6):
            check(os.path.lexists(tmp / f"{dead}.{number}"), f"{number} is no file of ours and was deleted")
        w.unharmed("litter")


def test_gc_deletes_files_in_their_place_only():
    with World() as w:
        other = "0" if w.chunks()[0].name[0] != "0" else "1"
        misplaced = w.store / "chunks" / other / w.chunks()[0].name
        misplaced.write_bytes(b"not a chunk: another digit's")
        odd = w.store / "chunks" / other / "README"
        odd.write_bytes(b"x")
        os.utime(misplaced, (1, 1))
        w.run("rm", "chat")
        w.run("gc", "--no-grace")
        check(misplaced.exists() and odd.exists(), "gc deleted what is no chunk")
        equal([p for p in w.chunks() if p not in (misplaced, odd)], [], "chunks left")


# -- pipes and folders ---------------------------------------------------------------------------------------------


def damage_by(make):
    """A few chunks become something else: restore says so, save mends it, and nothing waits."""
    with World() as w:
        chunks = w.chunks()[:4]
        for path in chunks:
            path.unlink()
            make(path)
        w.run("ls")
        w.run("stats")
        w.run("restore", "chat", w.path / "out", status=(PROBLEMS, NOT_FOUND))
        w.run("verify", status=(PROBLEMS,))
        for path in chunks[:2]:  # what verify set aside stands there again
            if not os.path.lexists(path):
                make(path)
        w.run("gc", "--dry-run")
        w.save()
        w.restores()
        w.restores("chat")
        w.run("verify")
        w.run("gc", "--no-grace")
        w.restores()


def test_a_pipe_in_place_of_a_chunk():
    damage_by(os.mkfifo)


def test_a_folder_in_place_of_a_chunk():
    damage_by(os.mkdir)

    def full(path):
        os.mkdir(path)
        (path / "inside").write_bytes(b"x")

    damage_by(full)


def test_a_socket_in_place_of_a_chunk():
    import socket

    def make(path):
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path.name)
        finally:
            os.chdir(here)

    damage_by(make)


def test_pipes_and_folders_everywhere_else():
    """The store's own files are pipes or folders: every command ends, and the object can be saved and restored."""
    for make in (os.mkfifo, os.mkdir):
        for options in ("?limit=10M", "?sums=files"):
            with World() as w:
                house = w.store / ".kvasir"
                w.run("save", "more", w.data, options=options)
                for name in ("used", "verified", f"tmp/{WRITER}.1", f"writers/{WRITER}", "refs/chat", "refs/x", "sums/m-chat"):
                    (house / name).unlink(missing_ok=True)
                    make(house / name)
                for path in w.chunks()[:3]:
                    (house / "sums" / path.name).unlink(missing_ok=True)
                    make(house / "sums" / path.name)
                make(w.store / "odd")
                for command in COMMANDS:
                    w.run(*command, options=options, status=(OK, PROBLEMS))
                w.save(options=options)
                w.restores(options=options)


def test_a_manifest_that_is_a_folder_is_reported():
    with World() as w:
        (w.store / "chat").unlink()
        (w.store / "chat").mkdir()
        done = w.run("save", "chat", w.data, status=(FAILED,))
        check(b"directory" in done.stderr, done.stderr)
        w.run("restore", "chat", w.path / "out", status=(NOT_FOUND,))
        check(w.run("ls", "--names").stdout.split() == [], "a folder was listed")


# -- vandals -------------------------------------------------------------------------------------------------------


def vandalise(w, rng):
    """One change to the store's directory, as somebody with write permission may make it; returns what it was."""
    entries = sorted(p for p in w.store.rglob("*") if p != w.store)
    at = rng.choice(entries)
    kind = rng.choice(["link", "hard", "pipe", "folder", "cut", "noise", "remove", "swap", "new link", "new hard", "rename"])
    target = rng.choice([w.victim, *sorted(w.victim.iterdir())])
    if kind.startswith("new"):  # beside, under a name in a form of the store's
        folder = at if at.is_dir() and not at.is_symlink() else at.parent
        at = folder / rng.choice([WRITER, f"{WRITER}.{rng.randrange(9)}", f"{WRITER}.1.s", "a" * 32, "chat", "used", "verified", "b0" * 16])
        if os.path.lexists(at):
            return "nothing"
    elif kind in ("link", "hard", "pipe", "folder", "remove"):
        if at.is_dir() and not at.is_symlink():
            at.rename(w.path / f"gone{rng.randrange(10 ** 9)}")
        else:
            at.unlink()
    if kind.endswith("link"):
        at.symlink_to(target)
    elif kind.endswith("hard"):
        os.link(w.victim / "db.sqlite", at)
    elif kind == "pipe":
        os.mkfifo(at)
    elif kind == "folder":
        at.mkdir()
    elif kind in ("cut", "noise") and at.is_file() and not at.is_symlink() and at.stat().st_nlink == 1:
        at.write_bytes(rng.randbytes(rng.randrange(5000)) if kind == "noise" else at.read_bytes()[:rng.randrange(100)])
    elif kind == "swap":
        other = rng.choice(entries)
        if at.parent == other.parent and os.path.lexists(other):
            aside = w.path / "aside"
            at.rename(aside)
            other.rename(at) if os.path.lexists(other) else None
            aside.rename(other)
    elif kind == "rename":
        at.rename(at.with_name(rng.choice([f"{WRITER}.{rng.randrange(9)}", "x", "c" * 32])) if at.is_file() else at)
    return f"{kind} {at.relative_to(w.store) if w.store in at.parents else at}"


def test_vandals():
    """Whatever becomes of its directory, no command of a store touches anything else, or hangs; and when the store
    can be opened at all, a save that succeeds can be restored."""
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    rounds = max(8 * int(os.environ.get("KV_TEST_SCALE", "100")) // 100, 2)
    for n in range(rounds):
        rng = random.Random(seed + n)
        with World() as w:
            done = [vandalise(w, rng) for _ in range(rng.randrange(1, 6))]
            what = f"KV_TEST_SEED={seed + n}: {done}"
            options = rng.choice(["", "?limit=1M", "?sums=files"])
            for command in rng.sample(COMMANDS, 3):
                ended = w.run(*command, status=None, options=options)
                check(0 <= ended.returncode <= 5, f"{what}: {command} {ended}")
                w.unharmed(f"{what}, {command}")
            if w.save("fresh", status=None, options=options).returncode == OK:
                w.restores("fresh", options=options)
            w.unharmed(f"{what}, save")


# -- two users -----------------------------------------------------------------------------------------------------


def test_another_users_traps():
    """root opens a store in a folder that another user may write to as well."""
    if os.geteuid() != 0:
        skip("needs root, to be two users")
    with World() as w:
        os.chmod(w.path, 0o755)
        for path in [w.store, *w.store.rglob("*")]:
            if path.is_dir():
                os.chmod(path, 0o777)
        house = w.store / ".kvasir"

        def trap(*commands):
            script = "\n".join(commands)
            subprocess.run(["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-ec", script], check=True,
                           cwd=house)

        trap("rmdir sums", f"ln -s {w.victim} sums")
        w.run("ls", status=(UNREACHABLE,))
        w.run("gc", "--no-grace", status=(UNREACHABLE,))
        trap("rm sums", "mkdir -m 777 sums", "rm -f used", f"ln -s {w.victim}/db.sqlite used",
             f"ln -s {w.victim}/db.sqlite writers/{WRITER}", f"ln -s {w.victim}/db.sqlite tmp/{WRITER}.7",
             f"ln -s {w.victim}/db.sqlite refs/chat", "mkfifo verified || true")
        for command in COMMANDS:
            w.run(*command, options="?limit=1M")
        w.save(options="?limit=1M")
        w.restores()
        w.unharmed("another user's links")


def test_what_this_user_may_not_read():
    """A refusal is reported as one: it isn't damage, and no other error."""
    if os.geteuid() != 0:
        skip("needs root, to be two users")
    with World() as w:
        os.chmod(w.path, 0o755)
        chunk = next(p for p in (w.store / "chunks").rglob("*") if p.is_file())
        fans = [p for p in (w.store / "chunks").iterdir()]

        def as_nobody(*command):
            done = subprocess.run([KVASIR, "store", command[0], str(w.store), *command[1:]], capture_output=True, cwd="/",
                                  timeout=60, stdin=subprocess.DEVNULL, check=False, user=65534, group=65534, extra_groups=[])
            return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

        def refused():
            for command in ("restore", "chat", "-"), ("verify", "--json"), ("verify",), ("verify", "chat"):
                status, text = as_nobody(*command)
                check(status == FAILED and "Permission denied" in text, (command, status, text[-500:]))
                check("Bad file descriptor" not in text and (" damaged" not in text or " 0 damaged" in text), (command, text[-500:]))

        equal(as_nobody("verify")[0], OK)
        for mode, paths in (0o600, [chunk]), (0o700, fans), (0o700, [w.store / "chunks"]):
            before = [os.stat(path).st_mode for path in paths]
            for path in paths:
                os.chmod(path, mode)
            refused()
            if mode == 0o600:  # damage beside it is damage
                other = next(p for p in (w.store / "chunks").rglob("*") if p.is_file() and p != chunk)
                kept = other.read_bytes()
                other.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
                equal(as_nobody("verify")[0], PROBLEMS)
                other.write_bytes(kept)
            for path, was in zip(paths, before):
                os.chmod(path, was)
        equal(as_nobody("verify")[0], OK)


# -- no store there ------------------------------------------------------------------------------------------------


def test_reading_makes_no_store():
    with tempfile.TemporaryDirectory() as folder:
        typo = pathlib.Path(folder) / "typo"
        empty = pathlib.Path(folder) / "empty"
        empty.mkdir()
        (empty / "letter.txt").write_bytes(b"Dear")
        for options in ("", "?limit=1M"):
            for command in [*COMMANDS, ("restore", "chat", f"{folder}/out"), ("verify", "chat"), ("gc",), ("rm", "chat")]:
                done = subprocess.run([KVASIR, "store", command[0], f"{typo}{options}", *command[1:]], capture_output=True,
                                      timeout=60, check=False)
                equal(done.returncode, UNREACHABLE, f"{command}: {done.stderr!r}")
                check(b"No such file" in done.stderr, done.stderr)
                check(not typo.exists(), f"{command} made a store")
                done = subprocess.run([KVASIR, "store", command[0], f"{empty}{options}", *command[1:]], capture_output=True,
                                      timeout=60, check=False)
                check(done.returncode in (OK, NOT_FOUND, PROBLEMS), f"{command}: {done.returncode} {done.stderr!r}")
                equal(os.listdir(empty), ["letter.txt"], f"after {command}")


if __name__ == "__main__":
    run(globals())
