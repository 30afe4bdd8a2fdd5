#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make link stubs of an older glibc from the one of this machine.

    glibc-stub.py VERSION FOLDER [OBJDUMP CC...]

A library that is linked against FOLDER/libc.so.6 and FOLDER/libm.so.6 binds each symbol to its newest version up to
VERSION (2.28), and a function that VERSION lacks is an error of the link. glibc keeps old versions of a symbol for
ever, so the result runs with VERSION and with anything newer.
"""
import collections
import pathlib
import re
import subprocess
import sys

LINE = re.compile(r"^[0-9a-f]+ (.{7}) (\S+)\s+([0-9a-f]+)\s+\(?(GLIBC_[\d.]+)\)?\s+(?:\.hidden )?(\S+)$")


def number(version):
    return tuple(int(part) for part in version.split("_")[1].split("."))


def symbols(objdump, path, limit):
    """{name: (version, is data, is thread-local, size)}, and all versions up to @limit."""
    table = subprocess.run([objdump, "-T", path], capture_output=True, text=True, check=True).stdout
    found, versions = {}, set()
    for flags, section, size, version, name in (m.groups() for m in map(LINE.match, table.splitlines()) if m):
        if section in ("*UND*", "*ABS*") or number(version) > limit:
            continue
        versions.add(version)
        if name not in found or number(version) > number(found[name][0]):
            found[name] = version, flags[6] == "O", section in (".tbss", ".tdata"), int(size, 16)
    return found, sorted(versions, key=number)


def make(objdump, compiler, path, name, limit, folder):
    found, versions = symbols(objdump, path, limit)
    nodes, code = collections.defaultdict(list), []
    for i, (symbol, (version, data, local, size)) in enumerate(sorted(found.items())):
        nodes[version].append(symbol)
        section = ".section .tbss,\"awT\",%nobits" if local else ".bss" if data else ".text"
        kind = "%tls_object" if local else "%object" if data else "%function"
        code.append(f"{section}\n.globl stub{i}\n.type stub{i},{kind}\nstub{i}: .skip {max(size, 1)}\n"
                    f".size stub{i},{size}\n.symver stub{i},{symbol}@@{version}")
    script = "".join(f"{version} {{}};\n" if i else f"{version} {{ local: stub*; }};\n" for i, version in enumerate(versions))
    source, map_file = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text("\n".join(code) + '\n.section .note.GNU-stack,"",%progbits\n', encoding="ascii")
    map_file.write_text(script, encoding="ascii")
    subprocess.run([*compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={map_file}", str(source), "-o",
                    str(folder / name)], check=True)


def main():
    version, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    objdump, *compiler = sys.argv[3:] if len(sys.argv) > 4 else ("objdump", "cc")
    limit = tuple(int(part) for part in version.split("."))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libc.so.6", "libm.so.6"):
        path = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        make(objdump, compiler, path, name, limit, folder)


if __name__ == "__main__":
    main()
