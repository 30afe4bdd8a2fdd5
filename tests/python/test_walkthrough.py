# SPDX-License-Identifier: Apache-2.0
"""A newcomer without a GPU: the section "No GPU at hand?" of docs/engines.md, as printed and in its order.

Only ports differ. It must end in success: a published block, found by its tokens, and gone when it is evicted.
"""
import os
import re
import shutil
import subprocess

from kvpython import BUILD, SOURCE, check, run, wait_until  # first: it finds the package
from kvtest import free_port, patience

BLOCK = re.compile(r"```(\w*)\n(.*?)^```$", re.M | re.S)


def test_a_block_is_found():
    check(shutil.which("curl"), "curl is needed")
    text = (SOURCE / "docs/engines.md").read_text(encoding="utf-8")
    section = text.split("## No GPU at hand?\n")[1]
    ports = {number: str(free_port()) for number in ("5557", "5558", "8090")}
    blocks = [(kind, re.sub(r"\b(5557|5558|8090)\b", lambda m: ports[m.group(1)], code)) for kind, code in BLOCK.findall(section)]
    check([kind for kind, _ in blocks] == ["python", "sh", "", "python"], f"{[kind for kind, _ in blocks]}")
    publish, shell, promised, evict = (code for _, code in blocks)
    serve, ready, query = re.split(r"\n(?=curl)", shell.strip())
    engine = {}
    exec(compile(publish, "docs/engines.md", "exec"), engine)  # pylint: disable=exec-used
    # Python runs with the sanitizer preloaded; curl with it can wait for a lock of the C library that nobody holds.
    environment = {**os.environ, "PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}", "LD_PRELOAD": ""}

    def shell_says(command):
        return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=patience(60), check=False).stdout

    with subprocess.Popen(["bash", "-c", "exec " + serve.rstrip("& \n")], env=environment, stderr=subprocess.DEVNULL) as indexer:
        try:
            wait_until(lambda: subprocess.run(["bash", "-c", ready.replace("curl -s", "curl -sf")], env=environment, capture_output=True,
                                              timeout=patience(60), check=False).returncode == 0, 30, "readiness")
            check(shell_says(ready) == "", "nothing to complain of")
            answer = shell_says(query)
            check(answer.startswith(promised.strip()), f"{answer} does not begin with {promised}")
            exec(compile(evict, "docs/engines.md", "exec"), engine)  # pylint: disable=exec-used
            wait_until(lambda: shell_says(query).startswith('{"scores":{}'), 30, "the eviction")
        finally:
            engine["engine"].close()
            indexer.terminate()


if __name__ == "__main__":
    run(globals())
