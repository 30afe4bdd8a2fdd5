# SPDX-License-Identifier: Apache-2.0
"""The declarations generated for ctypes against the C compiler: size and offset of every field, and every function."""
import ctypes
import re
import subprocess

from kvpython import BUILD, SOURCE, check, equal, raises, run  # first: it finds the package
from kvasir import _abi, _native


def test_every_field_lies_where_the_compiler_puts_it():
    lines = subprocess.run([BUILD / "tests/python-layout"], capture_output=True, text=True, check=True).stdout.splitlines()
    seen = set()
    for line in lines:
        name, field, offset, size = line.split()
        struct = _abi.STRUCTS[name]
        if field == "-":
            equal(ctypes.sizeof(struct), int(size), f"size of {name}")
        else:
            descriptor = getattr(struct, field)
            equal((descriptor.offset, descriptor.size), (int(offset), int(size)), f"{name}.{field}")
            seen.add((name, field))
    equal(seen, {(name, field) for name, struct in _abi.STRUCTS.items() for field, _ in struct._fields_}, "fields checked")
    check(len(_abi.STRUCTS) > 60, "structs are missing")


def test_every_public_function_is_declared():
    declared = {name for functions in _abi.PROTOTYPES.values() for name, _, _ in functions}
    public = set()
    for header in (SOURCE / "include").glob("*.h"):
        if header.name not in ("kv_store_abi.h", "kv_store_ext.h"):  # tables of plugins
            text = re.sub(r"/\*.*?\*/|^\s*#(?:\\\n|.)*?$", "", header.read_text(encoding="utf-8"), flags=re.S | re.M)
            public |= set(re.findall(r"KV(?:X)?_(?:API)\s[^;({]*?(\w+)\s*\(", text))
    equal(public - declared, {"kvbm_pool_dump"}, "functions without a declaration")  # takes a FILE *
    for name in _abi.PROTOTYPES:
        _native.load(name)  # finds each of them, or fails


def test_sized_structs_know_their_size():
    equal(_abi.kvs_save_opts().size, ctypes.sizeof(_abi.kvs_save_opts), "size")
    equal(_abi.kvbm_manager_opts(host_bytes=7).host_bytes, 7, "a field")


def test_strings_for_c():
    equal((_native.text(None), _native.text("é")), (None, "é".encode()), "strings")
    raises(ValueError, _native.text, "a\0b")


if __name__ == "__main__":
    run(globals())
