# SPDX-License-Identifier: Apache-2.0
"""`python -m kvasir`: the command line that the package carries."""
import ctypes
import os
import signal
import sys

from ._native import find


def main() -> int:
    """Run `kvasir` with this process's arguments; its exit status."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # Python's own handlers would only note them
        signal.signal(number, signal.SIG_DFL)
    beside = os.path.dirname(os.path.abspath(sys.executable))  # where pip puts kv-indexer, which `kvasir replay` runs
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    os.environ["KVASIR_PYTHON"] = sys.executable  # `kvasir replay` starts its workers by it
    library = ctypes.CDLL(find("kvasir"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    words = [b"kvasir", *map(os.fsencode, sys.argv[1:])]
    sys.stdout.flush()
    status = library.kvasir_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None))
    ctypes.CDLL(None).fflush(None)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
