# SPDX-License-Identifier: Apache-2.0
"""The package under mypy --strict, for the oldest Python that it supports; each public name has a docstring."""
import importlib
import inspect
import os
import pathlib
import pkgutil
import shutil
import subprocess
import tempfile

from kvpython import BUILD, SANITIZED, check, equal, run, skip  # first: it finds the package
import kvasir
from kvasir import _options
from kvasir.blocks import Manager
from kvasir.peers import Agent


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


USE = """
import kvasir.store
from kvasir.blocks import Manager, Pool, Shape
from kvasir.client import AsyncClient, Client
from kvasir.events import Publisher
from kvasir.index import PrefixIndex
from kvasir.peers import Agent

# Unused comments are errors: each of these lines is one.
with kvasir.store.open("a") as store:
    store.nothing  # type: ignore[attr-defined]
with PrefixIndex() as index:
    index.nothing  # type: ignore[attr-defined]
with Pool(n_blocks=4, block_size=16) as pool, pool.allocate(2) as fresh, pool.register(fresh, [1, 2]) as held:
    pool.nothing  # type: ignore[attr-defined]
    held.nothing  # type: ignore[attr-defined]
with Manager(Shape(1, 16, 64), host_bytes="1GiB", disk="/d", host_policy={"policy": "frequency"}) as manager, Agent(max_bytes=5) as agent:
    manager.nothing  # type: ignore[attr-defined]
    agent.nothing  # type: ignore[attr-defined]
Manager(Shape(1, 16, 64), staging_blocks="x")  # type: ignore[arg-type]
Manager(Shape(1, 16, 64), disk=5)  # type: ignore[arg-type]
Agent(token_file=5)  # type: ignore[arg-type]
with Publisher("tcp://127.0.0.1:*", block_size=16) as events, Client("http://a") as client:
    events.nothing  # type: ignore[attr-defined]
    client.nothing  # type: ignore[attr-defined]
client.query([1], model_name="m", lora_name=5)  # type: ignore[arg-type]
client.register(1, "tcp://a:1", model_name="m", block_size=16, replay_endpoint=5)  # type: ignore[arg-type]


async def ask() -> None:
    async with AsyncClient("http://a") as indexer:
        indexer.nothing  # type: ignore[attr-defined]
"""


def test_users_programs_are_typed():
    """What a `with` gives keeps its type, options have one."""
    if SANITIZED or not shutil.which("mypy"):
        skip("the release build does it, with mypy")
    with tempfile.TemporaryDirectory() as cache:
        program = pathlib.Path(cache) / "program.py"
        program.write_text(USE, encoding="utf-8")
        done = subprocess.run(["mypy", "--strict", "--python-version", "3.9", "--cache-dir", cache, program], capture_output=True, text=True,
                              check=False, env={**os.environ, "MYPYPATH": str(BUILD / "python")})
    equal(done.returncode, 0, done.stdout + done.stderr)


def test_options_are_those_of_c():
    for kind, known in ((Manager, _options._MANAGER), (Agent, _options._AGENT)):
        named = set(inspect.signature(kind.__init__).parameters) - {"self", "others"}
        equal(known - named, set(), f"options that {kind.__name__} doesn't name")


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
