# SPDX-License-Identifier: Apache-2.0
"""A store on a file system without room, blocks or inodes: what is there can be listed, restored and verified, and
rm and gc make room. The file systems are small images, mounted for the test."""
import contextlib
import ctypes
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

from kvtest import *
from kvtest import run as run_all

KVASIR = str(BUILD / "bin" / "kvasir")
OK, FAILED = 0, 5
SIZE = 400_000

libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def mounted(kind, options="", size="330M", make=()):
    """A fresh file system of that kind."""
    if os.geteuid() != 0:
        skip("needs root, to mount")
    if kind != "tmpfs" and not shutil.which(f"mkfs.{kind}"):
        skip(f"needs mkfs.{kind}")
    with tempfile.TemporaryDirectory() as folder:
        image, at = pathlib.Path(folder) / "image", pathlib.Path(folder) / "at"
        at.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", at]
        else:
            subprocess.run(["truncate", "-s", size, image], check=True)
            subprocess.run([f"mkfs.{kind}", *make, image], check=True, capture_output=True)
            command = ["mount", "-o", f"loop{',' if options else ''}{options}", image, at]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            skip(f"{kind} can't be mounted here")
        try:
            yield at
        finally:
            subprocess.run(["umount", at], check=True)


def fill(at, inodes):
    """Take all the blocks, in pieces that get smaller, and all the inodes."""
    folder = at / "full"
    folder.mkdir(exist_ok=True)
    offset, piece = 0, 1 << 26
    with open(folder / "blocks", "wb", buffering=0) as blocks:
        while piece >= 4096:
            if libc.posix_fallocate(blocks.fileno(), ctypes.c_long(offset), ctypes.c_long(piece)) == 0:
                offset += piece
            else:
                piece //= 2
        blocks.seek(offset)
        with contextlib.suppress(OSError):
            while True:
                blocks.write(b"x" * 4096)
    for i in range(200_000 if inodes else 2000):
        try:
            os.close(os.open(folder / f"i{i}", os.O_WRONLY | os.O_CREAT))
        except OSError:
            break


def run(uri, command, *args, status=OK, **kw):
    done = subprocess.run([KVASIR, "store", command, str(uri), *map(str, args)], capture_output=True, timeout=120, check=False, **kw)
    equal(done.returncode, status, f"store {command} {args}: {done.stdout!r}\n{done.stderr!r}\n")
    return done


def use_full(at, *, inodes=False, again=True, filler=fill, **kw):
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for i, name in enumerate("abc"):
            files[name] = pathlib.Path(folder) / name
            files[name].write_bytes(random.Random(i).randbytes(SIZE if name != "c" else SIZE // 2))
        store = at / "store"
        for name in "ab":
            run(store, "save", name, files[name], "--chunk", "16KiB", **kw)
        filler(at, inodes)
        listed = run(store, "ls", "--names", **kw).stdout.split()
        equal(listed, [b"a", b"b"], "listed")
        done = run(store, "save", "c", files["c"], "--chunk", "16KiB", status=FAILED, **kw)
        check(b"No space left" in done.stderr or b"quota" in done.stderr, f"not the reason: {done.stderr!r}")
        for name in "ab":
            out = pathlib.Path(folder) / "out"
            run(store, "restore", name, out, **kw)
            equal(out.read_bytes(), files[name].read_bytes(), f"restored {name}")
        run(store, "verify", **kw)
        run(store, "stats", **kw)
        run(store, "rm", "a", **kw)
        run(store, "gc", "--no-grace", **kw)
        equal(run(store, "ls", "--names", **kw).stdout.split(), [b"b"], "listed after rm")
        equal(sum(p.stat().st_size for p in (store / "chunks").rglob("*") if p.is_file()), SIZE, "bytes of chunks after gc")
        if again:  # the room that gc made is enough for another
            run(store, "save", "c", files["c"], "--chunk", "16KiB", **kw)
        run(store, "verify", **kw)


def test_tmpfs():
    with mounted("tmpfs", "size=3m") as at:
        use_full(at)


def test_tmpfs_without_inodes():
    with mounted("tmpfs", "size=100m,nr_inodes=400") as at:
        use_full(at, inodes=True)


def test_ext4():
    with mounted("ext4", size="16M", make=("-q",)) as at:
        use_full(at)


def test_ext4_without_inodes():
    with mounted("ext4", size="32M", make=("-q", "-N", "300")) as at:
        use_full(at, inodes=True)


def test_xfs():
    with mounted("xfs", make=("-q",)) as at:
        use_full(at, again=False)  # it keeps more back than gc gave


def test_btrfs():
    with mounted("btrfs", size="128M", make=("-q", "--mixed")) as at:
        use_full(at, again=False)  # what was deleted comes back with a later transaction


def test_quota():
    """Another user than root, whose quota is used up."""
    if not shutil.which("setquota"):
        skip("needs setquota")
    with mounted("ext4", "usrquota", size="32M", make=("-q", "-O", "quota")) as at:
        if subprocess.run(["quotaon", at], capture_output=True, check=False).returncode not in (0, 1):
            skip("quotas can't be turned on here")
        os.chmod(at, 0o777)
        os.chmod(at.parent, 0o755)
        if subprocess.run(["setquota", "-u", "65534", "3000", "3000", "0", "0", at], capture_output=True, check=False).returncode != 0:
            skip("quotas can't be set here")

        def filler(at, inodes):
            subprocess.run(["dd", "if=/dev/zero", f"of={at}/rest", "bs=4k"], capture_output=True, check=False, user=65534)
            for i in range(3000):
                if subprocess.run(["mkdir", f"{at}/d{i}"], capture_output=True, check=False, user=65534).returncode:
                    break

        use_full(at, filler=filler, user=65534, cwd="/")


if __name__ == "__main__":
    run_all(globals())
