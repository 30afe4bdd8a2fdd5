# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: the package and the libraries of the build tree, and kvtest's checks."""
import os
import signal
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
import kvtest  # noqa: E402
from kvtest import BUILD, SANITIZED, SLOW, SOURCE, check, equal, flip_bit, preload_sanitizer, run, skip, skip_all, wait_until  # noqa: E402,F401

preload_sanitizer("libkvbm.so")  # starts this program anew where it is needed
if not (BUILD / "python/kvasir/_abi.py").exists():
    skip_all("python3-pycparser was missing when the tree was built")
sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")
sys.dont_write_bytecode = True


def folder():
    """A directory for a test, removed at the end of its `with`."""
    return tempfile.TemporaryDirectory(prefix="kvasir-python-")


class Stop(Exception):
    """What a signal's handler raises in stopped()."""


def stopped(rounds, longest, function, *args):
    """Call @function @rounds times; a signal's handler raises within up to @longest seconds of each call. Returns how often it did."""
    def stop(*_):
        raise Stop

    n, before = 0, signal.signal(signal.SIGALRM, stop)
    try:
        for i in range(rounds):
            try:
                signal.setitimer(signal.ITIMER_REAL, longest * (i + 1) / rounds)
                function(*args)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                n += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return n


def raises(kind, function, *args, **kw):
    """Check that a call raises @kind; returns the exception."""
    try:
        function(*args, **kw)
    except kind as problem:
        return problem
    raise AssertionError(f"{getattr(function, '__name__', function)} raised nothing, wanted {kind.__name__}")
