# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of docs/python.md as they are printed, in a folder of their own."""
import os
import re

from kvpython import SOURCE, check, folder, run  # first: it finds the package

BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.M | re.S)


def test_blocks_of_the_guide():
    text = (SOURCE / "docs/python.md").read_text(encoding="utf-8")
    blocks, home = BLOCK.findall(text), os.getcwd()
    check(len(blocks) >= 5, "blocks are missing")
    with folder() as path:
        os.chdir(path)
        try:
            for left_out, code in blocks:
                if not left_out:
                    exec(compile(code, "docs/python.md", "exec"), {})  # pylint: disable=exec-used
        finally:
            os.chdir(home)


if __name__ == "__main__":
    run(globals())
