#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the built programs and libraries are hardened, read from their ELF files, and what `make install` makes of them."""
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *

X86 = platform.machine() == "x86_64"
PROGRAMS = ["kv-indexer", "kvasir"]
LIBRARIES = ["kvx", "kvevent", "kvindex", "kvselect", "kvstore", "kvbm"]
PLUGINS = ["kv_store_redis", "kv_store_s3", "kv_store_tiered", "kvbm_tls", "kvbm_http"]
CUDA = BUILD / "lib" / "libkvx_cuda.so"  # where there is nvcc
NATS = BUILD / "lib" / "libkv_nats.so"  # where there is libnats-dev
UCX = BUILD / "lib" / "libkvbm_ucx.so"  # where there is libucx-dev


def say(*command):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def built():
    files = [BUILD / "bin" / name for name in PROGRAMS] + [BUILD / "lib" / f"lib{name}.so" for name in LIBRARIES + PLUGINS]
    return files + [path for path in (CUDA, UCX, NATS) if path.exists()]


def cached(name):
    """A value of the build's CMake cache."""
    found = re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)
    return found.group(1) if found else ""


def only_release():
    if SANITIZED or cached("CMAKE_BUILD_TYPE") != "Release":
        skip("hardening is for release builds")


def test_loading():
    """Position independent, symbols bound before the first call, then read-only; no stack that can be run."""
    only_release()
    for path in built():
        check("DYN" in re.search(r"Type:\s+(.*)", say("readelf", "-hW", path)).group(1), f"{path.name} is not position independent")
        segments, dynamic = say("readelf", "-lW", path), say("readelf", "-dW", path)
        check("GNU_RELRO" in segments, f"{path.name}: no RELRO")
        check(re.search(r"GNU_STACK\s.*\sRW\s", segments), f"{path.name}: its stack can be run")
        check("BIND_NOW" in dynamic or re.search(r"FLAGS.*NOW", dynamic), f"{path.name}: symbols are bound late")
        check("TEXTREL" not in dynamic, f"{path.name}: text relocations")


def test_ucx_is_apart():
    """libkvbm_ucx alone needs UCX: two versions of it in one process get along while neither is in the global scope."""
    only_release()
    for path in built():
        needs = re.findall(r"NEEDED.*\[lib(uc[a-z]+)\.", say("readelf", "-dW", path))
        check(not needs or path == UCX, f"{path.name} needs {needs}")
        check("ucp" in needs or path != UCX, f"{path.name} doesn't need libucp")
    if not UCX.exists():
        skip("this build has no libkvbm_ucx (libucx-dev)")


def test_stack_protector_and_fortify():
    only_release()
    for path in built():
        needs = say("nm", "-D", "--undefined-only", path)
        check("__stack_chk_fail" in needs, f"{path.name}: no stack protector")
        if path.name not in ("libkvx.so", "libkvx_cuda.so"):
            check(re.search(r"__\w+_chk\b", needs.replace("__stack_chk_fail", "")), f"{path.name}: nothing is fortified")


def test_fortify_level():
    """All C files are built at the level that sees the sizes of buffers from malloc."""
    only_release()
    if cached("KV_HAS_FORTIFY_3") != "1":
        skip("this compiler and libc have no _FORTIFY_SOURCE=3")
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if "/src/" in entry["file"] or "/plugins/" in entry["file"]:
            equal(re.findall(r"-D_FORTIFY_SOURCE=(\d)", entry["command"])[-1:], ["3"], entry["file"])


def test_stack_clash():
    """Functions with large frames touch each page of theirs, so that no frame jumps over the guard page."""
    only_release()
    if cached("KV_HAS_stack_clash_protection") != "1":
        skip("this compiler has no -fstack-clash-protection")
    if not X86:
        skip("the test knows the probes of x86-64 only")
    probe = re.compile(r"\t(?:or[ql]|mov[ql]) +\$0x0,\(%rsp\)")
    for name in PROGRAMS:
        check(probe.search(say("objdump", "-d", "--no-show-raw-insn", BUILD / "bin" / name)), f"{name}: no frame is probed")


def test_cet():
    """Each object says that indirect calls land on endbr64 and returns go where calls came from.

    A linked file says so only if libc's own start files do, which Debian's don't: the archives are looked at.
    """
    only_release()
    if not X86:
        skip("x86 only")
    if cached("KV_HAS_cf_protection") != "1":
        skip("this compiler has no -fcf-protection")
    for name in LIBRARIES:
        notes = say("readelf", "-nW", BUILD / "lib" / f"lib{name}.a")
        check("IBT" in notes and "SHSTK" in notes, f"lib{name}.a has objects without CET")
    for path in [CUDA] if CUDA.exists() else []:
        check("endbr64" in say("objdump", "-d", path), f"{path.name}: no endbr64")


def test_installed_files():
    """Stripped, their debug information beside them under the name that they give."""
    only_release()
    if cached("KV_SEPARATE_DEBUG") != "ON":
        skip("this build keeps debug information in its files (KV_SEPARATE_DEBUG)")
    with tempfile.TemporaryDirectory() as root:
        subprocess.run(["cmake", "--install", BUILD, "--prefix", "/opt/kv"], env={**os.environ, "DESTDIR": root},
                       stdout=subprocess.DEVNULL, check=True)
        installed = pathlib.Path(root) / "opt/kv"
        files = [p for p in installed.rglob("*") if p.is_file() and not p.is_symlink()
                 and (p.parent.name == "bin" or re.search(r"\.so(\.[\d.]+)?$", p.name))]
        check(len(files) >= len(built()), f"only {files}")
        for path in files:
            sections = say("readelf", "-SW", path)
            check(".debug_info" not in sections and ".symtab" not in sections, f"{path.name} is not stripped")
            debug = path.parent / ".debug" / f"{path.name}.debug"
            check(debug.name in say("readelf", "-p", ".gnu_debuglink", path), f"{path.name} does not name {debug.name}")
            if not path.name.startswith("libkvx_cuda."):  # nvcc compiles without -g
                check(".debug_info" in say("readelf", "-SW", debug), f"{debug.name} holds nothing")
            build_id = re.compile(r"Build ID: (\w+)")
            equal(build_id.findall(say("readelf", "-n", path)), build_id.findall(say("readelf", "-n", debug)), f"{path.name}: build id")


if __name__ == "__main__":
    run(globals())
