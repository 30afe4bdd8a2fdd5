#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write kvasir/_abi.py from the public headers: structs, enums, constants and prototypes for ctypes.

    gen-ctypes.py INCLUDE_DIR OUTPUT [--layout LAYOUT.c]

The headers go through `cc -E` and pycparser, so nothing is declared twice. --layout also writes a C program that prints
size and offsets of each struct as its compiler sees them; tests/python compares them with ctypes.
"""
import argparse
import os
import pathlib
import re
import subprocess
import tempfile

from pycparser import c_ast, c_parser

# Library that exports the functions of a header. kv_hash.h is in two; the index's needs no ZMQ.
LIBRARIES = {"kv_hash.h": "kvindex", "kv_index.h": "kvindex", "kv_select.h": "kvselect", "kv_event.h": "kvevent", "kv_plane.h": "kvbm", "kv_store.h": "kvstore", "kv_store_async.h": "kvstore",
             "kv_llama.h": "kvasir_llama",
             "kvbm_events.h": "kvbm", "kvbm_layout.h": "kvbm", "kvbm_manager.h": "kvbm", "kvbm_pool.h": "kvbm", "kvbm_remote.h": "kvbm", "kvbm_lease.h": "kvbm",
             "kvbm_plan.h": "kvbm", "kvbm_directory.h": "kvbm", "kvbm_volume.h": "kvbm",
             "kvbm_tokens.h": "kvbm", "kvbm_transfer.h": "kvbm", "kvbm_group.h": "kvbm", "kvbm_hit.h": "kvbm", "kvx_abi.h": "kvx", "kvx_ext.h": "kvx"}
LEFT_OUT = {"kvbm_pool_dump"}  # takes a FILE *
BASIC = {"uint8_t": "c_uint8", "uint16_t": "c_uint16", "uint32_t": "c_uint32", "uint64_t": "c_uint64",
         "int8_t": "c_int8", "int32_t": "c_int32", "int64_t": "c_int64", "size_t": "c_size_t", "bool": "c_bool",
         "int": "c_int", "long": "c_long", "unsigned int": "c_uint", "unsigned": "c_uint", "double": "c_double",
         "char": "c_char", "unsigned long": "c_ulong", "float": "c_float"}
# Headers of the system, reduced to the names that ours use.
SYSTEM = {"stdbool.h": "typedef _Bool bool;\n#define true 1\n#define false 0\n",
          "stddef.h": "typedef unsigned long size_t;\n#define NULL ((void *)0)\n#define offsetof(t, f) 0\n",
          "stdint.h": "".join(f"typedef {c} {t};\n" for t, c in (
              ("uint8_t", "unsigned char"), ("uint16_t", "unsigned short"), ("uint32_t", "unsigned int"),
              ("uint64_t", "unsigned long"), ("int8_t", "signed char"), ("int32_t", "int"), ("int64_t", "long")))
          + "#define UINT32_C(x) x##u\n#define UINT64_C(x) x##ul\n#define UINT32_MAX 4294967295u\n"
            "#define UINT64_MAX 18446744073709551615ul\n#define SIZE_MAX UINT64_MAX\n",
          "stdio.h": "typedef struct FILE FILE;\n", "sys/uio.h": "struct iovec { void *iov_base; size_t iov_len; };\n"}


def preprocess(include, headers):
    """Text of all headers after the preprocessor, and the values of our object-like macros."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SYSTEM.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            pathlib.Path(folder, name).write_text(f"#pragma once\n{text}", encoding="ascii")
        source = "".join(f'#include "{header}"\n' for header in headers)
        command = [os.environ.get("CC", "cc"), "-E", "-nostdinc", f"-I{folder}", f"-I{include}", "-D__attribute__(x)=",
                   "-D_Static_assert(...)=extern int kv_unused", "-x", "c", "-"]
        text = subprocess.run(command, input=source, stdout=subprocess.PIPE, text=True, check=True).stdout
        macros = subprocess.run([*command[:-1], "-dM", "-"], input=source, capture_output=True, text=True, check=True).stdout
        names = [m[1] for m in re.finditer(r"^#define (K(?:V|VSEL|VE|VI|VL|VS|VX|VBM)_\w+) (.+)$", macros, re.M)]
        values = subprocess.run(command, input=source + "".join(f'\n@@"{n}" {n}' for n in names), capture_output=True,
                                text=True, check=True).stdout
    return text, sorted(m.groups() for m in re.finditer(r'^@@"(\w+)" (.+)$', values, re.M))


class Generator:
    def __init__(self, include):
        self.headers = sorted(LIBRARIES) + ["kv_types.h", "kv_store_abi.h", "kv_store_ext.h"]
        text, self.macros = preprocess(include, self.headers)
        self.ast = c_parser.CParser().parse(text)
        self.typedefs, self.structs, self.enums, self.functions = {}, {}, {}, []
        self.constants, self.callbacks = {}, {}
        for node in self.ast.ext:
            self.take(node)

    def take(self, node):
        if isinstance(node, c_ast.Typedef):
            self.typedefs[node.name] = node.type
            self.declared(node.type, node.name)
        elif isinstance(node, c_ast.Decl):
            self.declared(node.type, None)
            header = os.path.basename(node.coord.file) if node.coord else ""
            if isinstance(node.type, c_ast.FuncDecl) and header in LIBRARIES and node.name not in LEFT_OUT:
                self.functions.append((LIBRARIES[header], node.name, node.type))

    def declared(self, node, name):
        """Note the struct or enum that a declaration defines; nested ones too."""
        if isinstance(node, c_ast.TypeDecl):
            self.declared(node.type, name)
        elif isinstance(node, c_ast.Struct) and node.decls:
            key = node.name or name
            if key in self.structs or key == "FILE":
                return
            for field in node.decls:
                self.declared(field.type, f"{key}_{field.name}")
            self.structs[key] = node.decls, f"struct {node.name}" if node.name else name
        elif isinstance(node, c_ast.Enum) and node.values:
            members, value = {}, -1
            for item in node.values.enumerators:
                value = self.evaluate(item.value) if item.value else value + 1
                members[item.name] = value
            self.constants.update(members)
            if node.name or name:
                self.enums[node.name or name] = members

    def evaluate(self, node):
        if isinstance(node, c_ast.Constant):
            return int(node.value.rstrip("uUlL"), 0)
        if isinstance(node, c_ast.ID):
            return self.constants[node.name]
        if isinstance(node, c_ast.UnaryOp):
            return {"-": lambda v: -v, "~": lambda v: ~v}[node.op](self.evaluate(node.expr))
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        return {"<<": left << right, "|": left | right, "+": left + right, "-": left - right}[node.op]

    # -- types -------------------------------------------------------------------------------------
    def is_function(self, node):
        while isinstance(node, c_ast.TypeDecl) and isinstance(node.type, c_ast.IdentifierType) and \
                node.type.names[0] in self.typedefs and node.type.names[0] not in BASIC:
            node = self.typedefs[node.type.names[0]]
        return isinstance(node, c_ast.PtrDecl) and isinstance(node.type, c_ast.FuncDecl) and node.type

    def is_text(self, node):
        return isinstance(node, c_ast.PtrDecl) and isinstance(node.type, c_ast.TypeDecl) and \
            isinstance(node.type.type, c_ast.IdentifierType) and node.type.type.names == ["char"]

    def scalar(self, node):
        """Type of anything but a pointer, an array or a function."""
        inner = node.type
        if isinstance(inner, c_ast.Struct):
            return inner.name
        if isinstance(inner, c_ast.Enum):
            return "c_int"
        name = " ".join(inner.names)
        if name == "void":
            return "None"
        if name in BASIC:
            return BASIC[name]
        target = self.typedefs[name]
        if isinstance(target, c_ast.TypeDecl) and isinstance(target.type, c_ast.Struct):
            return target.type.name or name
        return self.scalar(target)

    def type(self, node, field=None):
        """ctypes type of a field (@field names it), an argument or a result (None)."""
        if isinstance(node, c_ast.ArrayDecl):
            if field is None:
                return "c_void_p"
            return f"{self.type(node.type, field)} * {self.evaluate_dim(node.dim)}"
        if self.is_text(node):
            # A char * that isn't const is memory of the caller's or of the library's, not a string.
            return "c_char_p" if "const" in node.type.quals else "c_void_p"
        function = self.is_function(node)
        if function and field:
            return self.signature(function)
        if isinstance(node, c_ast.PtrDecl) or function:
            return "c_void_p"
        if isinstance(node.type, c_ast.Struct) and not node.type.name:
            return field
        return self.scalar(node)

    def evaluate_dim(self, dim):
        if isinstance(dim, c_ast.ID):
            return self.constants[dim.name]
        return self.evaluate(dim)

    def signature(self, function):
        arguments = [self.type(p.type) for p in function.args.params if not self.is_void(p)] if function.args else []
        return f"CFUNCTYPE({', '.join([self.result(function), *arguments])})"

    def result(self, function):
        return self.type(function.type)

    @staticmethod
    def is_void(param):
        return isinstance(param.type, c_ast.TypeDecl) and isinstance(param.type.type, c_ast.IdentifierType) and \
            param.type.type.names == ["void"]

    # -- output ------------------------------------------------------------------------------------
    def write(self, path):
        out = ['"""Declarations of the C libraries, generated by tools/gen-ctypes.py from the public headers."""',
               "from ctypes import *", "from enum import IntEnum", "from typing import Any, Dict, List, Tuple", "", "",
               "class Sized(Structure):",
               '    """A struct that begins with its size, which the constructor sets."""', "",
               "    def __init__(self, *args: Any, **fields: Any) -> None:",
               "        super().__init__(sizeof(type(self)), *args, **fields)", ""]
        out += [f"{name} = {value}" for name, value in sorted(self.values().items())]
        for name, members in sorted(self.enums.items()):
            out += ["", "", f"class {name}(IntEnum):", f'    """enum {name}."""'] + [f"    {m} = {v}" for m, v in members.items()]
        for name, node in sorted(self.typedefs.items()):
            function = self.is_function(node)
            if function and name.endswith("_fn"):
                out += ["", f"{name} = {self.signature(function)}"]
        for name, (fields, _) in self.structs.items():
            sized = fields[0].name == "size"
            out += ["", "", f"class {name}({'Sized' if sized else 'Structure'}):", f'    """struct {name}."""',
                    "    _fields_ = ["]
            out += [f'        ("{f.name}", {self.type(f.type, name + "_" + f.name)}),' for f in fields] + ["    ]"]
        out += ["", "", "STRUCTS: Dict[str, Any] = {" + ", ".join(f'"{n}": {n}' for n in self.structs) + "}",
                "PROTOTYPES: Dict[str, List[Tuple[str, Any, List[Any]]]] = {"]
        for library in sorted(set(LIBRARIES.values())):
            out += [f'    "{library}": [']
            for where, name, function in self.functions:
                if where == library:
                    params = [self.type(p.type) for p in function.args.params if not self.is_void(p)]
                    out += [f'        ("{name}", {self.result(function)}, [{", ".join(params)}]),']
            out += ["    ],"]
        out += ["}", ""]
        pathlib.Path(path).write_text("\n".join(out), encoding="utf-8")

    def values(self):
        """Constants of macros and enums that are numbers or strings."""
        values = {name: repr(value) for name, value in self.constants.items()}
        for name, text in self.macros:
            if re.fullmatch(r'"[^"]*"', text):
                values[name] = text
                continue
            number = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]*\b", r"\1", text)
            if re.fullmatch(r"[\d\s()+*<|xa-fA-F-]+", number):
                values[name] = str(eval(number, {"__builtins__": {}}))  # pylint: disable=eval-used
        return values

    def write_layout(self, path):
        """A C program that prints `struct field offset size` of every field, and the struct's own size."""
        out = ["#include <stddef.h>", "#include <stdio.h>"] + [f'#include "{h}"' for h in self.headers] + ["int main(void)", "{"]
        for name, (fields, c_name) in self.structs.items():
            if name not in self.typedefs and c_name == name:
                continue  # nameless, within another struct: its fields are checked by that struct's size
            out.append(f'    printf("{name} - 0 %zu\\n", sizeof({c_name}));')
            for f in fields:
                at = f"offsetof({c_name}, {f.name})"
                out.append(f'    printf("{name} {f.name} %zu %zu\\n", {at}, sizeof((({c_name} *)0)->{f.name}));')
        pathlib.Path(path).write_text("\n".join([*out, "    return 0;", "}", ""]), encoding="ascii")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("include")
    parser.add_argument("output")
    parser.add_argument("--layout")
    options = parser.parse_args()
    generator = Generator(options.include)
    generator.write(options.output)
    if options.layout:
        generator.write_layout(options.layout)


if __name__ == "__main__":
    main()
