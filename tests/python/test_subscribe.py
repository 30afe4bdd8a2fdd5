# SPDX-License-Identifier: Apache-2.0
"""The subscribers of docs/subscribe.md, in Python and in C, beside a publisher of the package."""
import re
import select
import subprocess
import sys

from kvpython import BUILD, SOURCE, check, equal, run  # first: it finds the package
from kvtest import patience
from kvasir.events import Publisher

PAGE = (SOURCE / "docs/subscribe.md").read_text(encoding="utf-8")


def block(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    equal(len(found), 1, f"{language} blocks of the page")
    return found[0]


def lines_of(command, engine):
    """What a subscriber prints of a store, a removal and a clear, once its first line has shown that it subscribes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not select.select([process.stdout], [], [], 0.05)[0]:
                check(process.poll() is None, f"{command} has ended")
                engine.stored([1], range(16))
            engine.stored([1001, 1002], range(32), parent=1)
            engine.removed([1002])
            engine.cleared()
            lines = [process.stdout.readline()]
            while not re.search("1001|stored 2", lines[-1]):
                check(lines[-1], "no more lines")
                lines.append(process.stdout.readline())
            return lines + [process.stdout.readline(), process.stdout.readline()]
        finally:
            process.kill()


def test_python():
    code = block("python")
    check(len([line for line in code.split("\n") if line.strip()]) <= 10, "ten lines")
    with Publisher("tcp://127.0.0.1:*", block_size=16) as engine:
        code = code.replace("tcp://127.0.0.1:5557", engine.endpoint)
        lines = lines_of([sys.executable, "-u", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], engine)
    check("Store(rank=0, tier=0, source=0, parent=1, hashes=(1001, 1002)" in lines[-3], lines)
    check("Remove(rank=0, tier=0, source=0, hashes=(1002,)" in lines[-2], lines)
    check("Clear(" in lines[-1], lines)
    numbers = [int(line.split()[0]) for line in lines]
    check(all(later - before in (0, 1) for before, later in zip(numbers, numbers[1:])), f"a batch has one event or several: {numbers}")


def test_c():
    source = (SOURCE / "examples/subscribe_events.c").read_text(encoding="utf-8")
    body = source[source.index("#include"):].replace("/* clang-format off */\n", "")
    equal(block("c"), body, "the page's program")
    check(len(body.splitlines()) <= 25, "25 lines")
    program = BUILD / "examples" / "subscribe_events"
    equal(subprocess.run([program], timeout=patience(20)).returncode, 0, "without arguments")
    with Publisher("tcp://127.0.0.1:*", block_size=16) as engine:
        lines = lines_of([program, engine.endpoint, "16"], engine)
    equal(lines[-3:], ["rank 0: stored 2 blocks\n", "rank 0: removed 1 blocks\n", "rank 0: cleared 0 blocks\n"], "lines")


if __name__ == "__main__":
    run(globals())
