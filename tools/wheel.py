#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the Python wheel of a finished build tree.

    wheel.py [--build BUILD] [--out FOLDER] [--glibc 2.28] [--arch aarch64 --sysroot FOLDER]

Links the rooms' archives anew: against a stub of glibc 2.28 (tools/glibc-stub.py), with libzmq, zstd, liburing, OpenSSL,
libcurl, c-ares, libmicrohttpd and GnuTLS inside each library that uses them. Then checks every library, and refuses to name the wheel manylinux when one
needs a newer symbol, or another library than glibc's. Prints the wheel's path.
"""
import argparse
import base64
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
ZMQ = ["zmq", "sodium", "pgm"]
OPENSSL = ["ssl", "crypto", "z", "zstd"]
CURL = ["curl", *OPENSSL]
GNUTLS = ["gnutls", "hogweed", "nettle", "gmp", "tasn1", "unistring"]
# Left out of these archives: HTTP/2 and 3, LDAP, SSH, RTMP, Brotli, Kerberos, lists of domains for cookies, PKCS #11, names
# beyond ASCII, and systemd's notifications. Each function of theirs returns 0, or -1: nothing is there.
WITHOUT = re.compile(r"(?:nghttp[23]|ngtcp2|ldap|ber|libssh2|gss|psl|p11_kit|sd|(idn2))_\w+|RTMP\w*|Brotli\w*|GSS_\w*")
# Library: rooms it exports, rooms it uses, archives of this machine.
LIBRARIES = {
    "kvx": (["kvx"], [], []),
    "kvstore": (["store"], ["base"], ["zstd", "xxhash"]),
    "kvindex": (["index", "hash"], ["base"], ["xxhash"]),
    "kvselect": (["select"], ["base"], ["xxhash"]),
    "kvevent": (["event", "hash"], ["base"], ["xxhash", *ZMQ]),
    "kvbm": (["plane", "bm", "peer", "transfer", "disk", "object", "peers", "plan", "manager", "volume", "group"],
             ["store", "event", "kvx", "hash", "base"],
             ["zstd", "uring", "xxhash", *ZMQ]),
    "kvasir_llama": (["llama"], ["base"], ["xxhash"]),
    "kv_store_redis": (["plugin_redis"], ["base"], [*OPENSSL, "xxhash"]),
    "kv_store_s3": (["plugin_s3"], ["base"], [*CURL, "expat", "xxhash"]),
    "kv_store_tiered": (["plugin_tiered"], ["store", "base"], ["zstd", "xxhash"]),
    "kvasir": ([], ["cli", "advisor", "plugin_tiered", "indexer", "http", "index", "select", "manager", "peers", "disk", "object", "transfer", "peer", "bm", "plane", "store", "event",
                    "kvx", "hash", "base"],
               ["uring", "xxhash", *ZMQ, *CURL, "cares"]),
}
# A program of its own, not a library: GnuTLS's archive has thread-local data for programs alone.
INDEXER = ["indexer", "http", "index", "plane", "event", "hash", "base"], ["xxhash", *ZMQ, "microhttpd", *GNUTLS, *CURL, "cares"]
CHART = pathlib.Path("/usr/share/doc/libjs-chart.js/copyright")
SCHEMES = ("rediss", "redis+cluster", "rediss+cluster", "redis+unix", "valkey")
DATA = ("stdin", "stdout", "stderr", "__libc_single_threaded", "in6addr_any", "in6addr_loopback")  # see compat.c
SYSTEM = {"libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


class Tools:
    """Compiler and binary tools for an architecture: this machine's, or Debian's cross tools with a folder of libraries."""

    def __init__(self, arch, sysroot):
        prefix = f"{arch}-linux-gnu-" if arch != platform.machine() else ""
        self.arch, self.objcopy, self.objdump, self.nm = arch, prefix + "objcopy", prefix + "objdump", prefix + "nm"
        self.compiler = [os.environ.get("CC", "cc")] if not prefix else [prefix + "gcc", *([f"--sysroot={sysroot}"] if sysroot else [])]


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"wheel: {' '.join(str(c) for c in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


class Linker:
    def __init__(self, build, work, tools, glibc):
        self.build, self.work, self.tools, self.glibc = build, work, tools, glibc
        self.compiler = tools.compiler
        self.include = ["-I", ROOT / "include", "-I", ROOT / "src", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden"]
        run(sys.executable, ROOT / "tools/glibc-stub.py", glibc, work / "stub", tools.objdump, *self.compiler)
        for name in ("compat", "absent", "reason"):
            self.compile(ROOT / f"python/native/{name}.c")

    def compile(self, source, *flags, name=None):
        target = self.work / f"{name or source.stem}.o"
        run(*self.compiler, *self.include, *flags, "-c", source, "-o", target)
        return target

    def archive(self, name):
        """A static library of this machine, its uses of libc's data renamed."""
        target = self.work / f"lib{name}.a"
        if not target.exists():
            path = run(*self.compiler, f"-print-file-name=lib{name}.a").strip()
            if not os.path.isabs(path):
                sys.exit(f"wheel: lib{name}.a is missing; tools/setup.sh wheel installs it")
            run(self.tools.objcopy, *[f"--redefine-sym={symbol}=kv_wheel_{symbol}" for symbol in DATA], path, target)
        return target

    def without(self, name, archives):
        """An object with the functions of WITHOUT that @archives use and none of them has."""
        used, had = set(), set()
        if not archives:
            return []
        for line in run(self.tools.nm, "--quiet", *archives).splitlines():
            match = re.search(r"\b([A-Za-z]) (\w+)$", line)
            if match and WITHOUT.fullmatch(match[2]):
                (used if match[1] == "U" else had).add(match[2])
        if not used - had:
            return []
        source = self.work / f"without-{name}.c"
        source.write_text("".join(f'long without_{symbol}(void) __asm__("{symbol}") __attribute__((visibility("hidden")));\n'
                                  f"long without_{symbol}(void)\n{{\n    return {-1 if WITHOUT.fullmatch(symbol)[1] else 0};\n}}\n"
                                  for symbol in sorted(used - had)), encoding="utf-8")
        return [self.compile(source)]

    def link(self, name, objects, rooms, uses, archives, *flags):
        """Link a library that exports @rooms."""
        return self.finish(self.work / f"lib{name}.so", objects, rooms, uses, archives, "-shared", f"-Wl,-soname,lib{name}.so", "-Wl,-Bsymbolic",
                           "-Wl,-z,nodelete", *flags)

    def program(self, name, source, uses, archives):
        """Link a program."""
        objects = [self.compile(ROOT / "python/native/start.c"), self.compile(ROOT / source, f'-DKV_VERSION="{version()}"')]
        return self.finish(self.work / name, objects, [], uses, archives, "-pie", "-nostartfiles", "-Wl,--allow-shlib-undefined")

    def finish(self, target, objects, rooms, uses, archives, *flags):
        room = lambda r: self.build / f"lib/libkv_{r}.a"
        inside = [self.archive(a) for a in dict.fromkeys(archives)]
        if "zmq" in archives:
            inside += [self.work / "absent.o", self.archive("stdc++")]
        inside += self.without(target.stem, [*map(room, [*rooms, *uses]), *inside])
        hidden = [p.name for p in inside] + [room(r).name for r in uses] + ["libgcc.a", "libc_nonshared.a"]
        loader = run(*self.compiler, "-print-file-name=" + LOADERS[self.tools.arch]).strip()
        # glibc 2.28 has threads and dlopen in libraries of their own, which newer ones keep empty.
        apart = ["-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2", "-l:librt.so.1", "-Wl,--as-needed"]
        run(*self.compiler, "-nodefaultlibs", "-s", "-o", target, *flags, "-Wl,-z,defs", "-Wl,-z,relro,-z,now", "-Wl,--gc-sections",
            "-Wl,--exclude-libs," + ":".join(hidden), *objects,
            "-Wl,--whole-archive", *[room(r) for r in rooms], "-Wl,--no-whole-archive",
            "-Wl,--start-group", *[room(r) for r in uses], *inside, self.work / "compat.o", "-Wl,--end-group",
            "-lgcc", *(["-l:libgcc_s.so.1"] if "zmq" in archives else []), self.work / "stub/libm.so.6", self.work / "stub/libc.so.6",
            "-l:libc_nonshared.a", loader, *apart)
        return target

    def all(self):
        yield self.link("kvreason", [self.work / "reason.o"], [], ["base"], [])
        main = self.compile(ROOT / "src/cli/main.c", "-Dmain=kvasir_main", "-fvisibility=default", f'-DKV_VERSION="{version()}"', name="kvasir")
        for name, (rooms, uses, archives) in LIBRARIES.items():
            flags = [f"-Wl,--version-script={ROOT}/plugins/exports.map"] if name.startswith("kv_store_") else []
            if name == "kvasir_llama":  # works on stores that libkvstore opened
                flags = ["-Wl,--no-as-needed", self.work / "libkvstore.so", "-Wl,--as-needed", "-Wl,-rpath,$ORIGIN"]
            yield self.link(name, [main] if name == "kvasir" else [], rooms, uses, archives, *flags)
        for scheme in SCHEMES:  # wheels have no links: an empty library through which the loader reaches the real one
            target = self.work / f"libkv_store_{scheme}.so"
            run(*self.compiler, "-shared", "-nostdlib", "-s", "-o", target, f"-Wl,-soname,{target.name}", "-Wl,--no-as-needed",
                "-Wl,-rpath,$ORIGIN", self.work / "libkv_store_redis.so")
            yield target


def version():
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    return re.search(r"project\(kvasir VERSION ([\d.]+)", text)[1]


def faults(path, objdump, glibc):
    """What keeps the library @path from running with @glibc."""
    limit, found = tuple(map(int, glibc.split("."))), []
    for line in run(objdump, "-T", path).splitlines():
        match = re.search(r"\*UND\*.*\(?(GLIBC(?:XX)?|GCC|CXXABI)_([\d.]+)\)?\s+(\S+)$", line)
        allowed = {"GLIBC": limit, "GCC": (8,)}  # as manylinux has them
        if match and tuple(map(int, match[2].split("."))) > allowed.get(match[1], ()):
            found.append(f"{path.name} needs {match[3]} of {match[1]} {match[2]}")
    for needed in re.findall(r"NEEDED\s+(\S+)", run(objdump, "-p", path)):
        if needed not in SYSTEM and not (path.parent / needed).exists():
            found.append(f"{path.name} needs {needed}")
    return found


METADATA = """Metadata-Version: 2.1
Name: kvasir-kv
Version: {version}
Summary: KV-cache system for LLM inference: stores, prefix index, block manager, events, layouts
License: Apache-2.0
Requires-Python: >=3.9
Provides-Extra: router
Requires-Dist: h11>=0.16; extra == "router"
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

{readme}"""


def pack(package, libraries, programs, tag, out):
    """Write the wheel: the package, its libraries and programs, and the metadata with a hash of each file."""
    number = version()
    name = f"kvasir_kv-{number}"
    info = f"{name}.dist-info"
    files = {f"kvasir/{p.name}": p.read_bytes() for p in sorted(package.iterdir()) if p.suffix == ".py" or p.name == "py.typed"}
    files["kvasir/_version.py"] = f'__version__ = "{number}"\n'.encode()
    files.update({f"kvasir/_lib/{p.name}": p.read_bytes() for p in libraries})
    files.update({f"{name}.data/scripts/{p.name}": p.read_bytes() for p in programs})  # pip puts them beside the scripts
    readme = (ROOT / "docs/python.md").read_text(encoding="utf-8") if (ROOT / "docs/python.md").exists() else ""
    files[f"{info}/METADATA"] = METADATA.format(version=number, readme=readme).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: kvasir\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nkvasir = kvasir.__main__:main\n"
    files[f"{info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    if CHART.exists():  # the build carries chart.min.js of the same package
        files[f"{info}/LICENSE.chart.js"] = CHART.read_bytes()
    record = "".join(f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
                     for path, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = out / f"{name}-py3-none-{tag}.whl"
    for old in out.glob(f"kvasir_kv-*-{tag}.whl"):
        old.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            entry = zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0))  # the same bytes make the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (0o100755 if file.endswith(".so") or "/scripts/" in file else 0o100644) << 16
            archive.writestr(entry, data)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--glibc", default="2.28")
    parser.add_argument("--arch", default=platform.machine())
    parser.add_argument("--sysroot", type=pathlib.Path)
    options = parser.parse_args()
    build, tools = options.build.resolve(), Tools(options.arch, options.sysroot)
    work = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-wheel-"))
    try:
        linker = Linker(build, work, tools, options.glibc)
        libraries, programs = list(linker.all()), [linker.program("kv-indexer", "src/indexer/main.c", *INDEXER)]
        found = [fault for path in (*libraries, *programs) for fault in faults(path, tools.objdump, options.glibc)]
        if found:
            sys.exit("wheel: not manylinux:\n  " + "\n  ".join(found))
        tag = f"manylinux_{options.glibc.replace('.', '_')}_{tools.arch}"
        print(pack(build / "python/kvasir", libraries, programs, tag, (options.out or build).resolve()))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
