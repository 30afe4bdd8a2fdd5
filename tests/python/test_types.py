# SPDX-License-Identifier: Apache-2.0
"""The package under mypy --strict, for the oldest Python that it supports; each public name has a docstring."""
import importlib
import inspect
import pathlib
import pkgutil
import shutil
import subprocess
import tempfile

from kvpython import BUILD, SANITIZED, check, equal, run, skip  # first: it finds the package
import kvasir


def modules():
    names = [item.name for item in pkgutil.iter_modules(kvasir.__path__) if not item.name.startswith("_")]
    check({"store", "index", "events", "client"} <= set(names), names)
    return [kvasir] + [importlib.import_module(f"kvasir.{name}") for name in names if name != "vllm"]  # needs vLLM


def test_mypy_strict():
    if SANITIZED:
        skip("the release build does it")
    if not shutil.which("mypy"):
        skip("mypy is not installed")
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(["mypy", "--strict", "--python-version", "3.9", "--cache-dir", cache, "-p", "kvasir"],
                              cwd=BUILD / "python", capture_output=True, text=True, check=False)
    equal(done.returncode, 0, done.stdout + done.stderr)
    check((BUILD / "python/kvasir/py.typed").exists(), "py.typed")


def test_every_public_name_is_documented():
    for module in modules():
        check(module.__doc__, module.__name__)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                check(thing.__doc__, f"{module.__name__}.{name}")
            if inspect.isclass(thing):
                for method, function in vars(thing).items():
                    if not method.startswith("_") and inspect.isfunction(function):
                        check(function.__doc__, f"{name}.{method}")


def test_module_files_are_short():
    for path in pathlib.Path(kvasir.__file__).parent.glob("*.py"):
        if path.name != "_abi.py":
            check(len(path.read_text(encoding="utf-8").splitlines()) <= 600, path.name)


if __name__ == "__main__":
    run(globals())
