# SPDX-License-Identifier: Apache-2.0
"""What the shared libraries export and need: a router that hashes prompts and asks the index needs no ZMQ."""
import os
import subprocess
import tempfile

from kvtest import BUILD, check, equal, run

SOURCE = os.environ.get("KV_SOURCE_DIR", ".")
HASHING = ("kve_seed", "kve_hash_block", "kve_hash_tokens", "kve_mm_identity", "kve_mm_placed", "kve_sequence_hashes")


def needed(path):
    out = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return [line.split("[")[1].rstrip("]") for line in out.splitlines() if "(NEEDED)" in line]


def exported(path):
    out = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in out.splitlines()}


def test_index_hashes_without_zmq():
    library = f"{BUILD}/lib/libkvindex.so"
    check(not [name for name in needed(library) if "zmq" in name], "libkvindex needs ZMQ")
    for name in HASHING:
        check(name in exported(library), f"libkvindex doesn't export {name}")
        check(name in exported(f"{BUILD}/lib/libkvevent.so"), f"libkvevent doesn't export {name}")


def test_each_library_has_its_log_hook():
    for library, name in (("kvevent", "kve"), ("kvindex", "kvi"), ("kvstore", "kvs"), ("kvbm", "kvbm"), ("kvx", "kvx"),
                          ("kvasir_llama", "kvl")):
        check(f"{name}_set_log" in exported(f"{BUILD}/lib/lib{library}.so"), f"lib{library} has no {name}_set_log")


def test_router_example():
    """The example compiled by its own line, with libkvindex alone; what it loads has no ZMQ in it."""
    if os.environ.get("KV_SANITIZE"):
        return  # the libraries want the sanitizer's own, which a plain compiler line doesn't name
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/find_prefix"
        subprocess.run(["cc", "-std=c11", f"{SOURCE}/examples/find_prefix.c", f"-I{SOURCE}/include", f"-L{BUILD}/lib",
                        f"-Wl,-rpath,{BUILD}/lib", "-lkvindex", "-o", program], check=True)
        out = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        equal(out.splitlines(), ["worker 1: 1 of 2 blocks", "worker 2: 2 of 2 blocks"], "its answer")
        loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        check("libkvindex" in loaded and "zmq" not in loaded, f"it loads {loaded}")


if __name__ == "__main__":
    run(globals())
