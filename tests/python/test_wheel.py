# SPDX-License-Identifier: Apache-2.0
"""The wheel as its users have it: built, checked, installed into an empty environment of every Python here, and used."""
import fnmatch
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from kvpython import BUILD, SANITIZED, SOURCE, check, equal, run, skip, skip_all

if SANITIZED:
    skip_all("a wheel is of a release build")
WORK = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-wheel-test-"))
USE = """
import os, sys, kvasir, kvasir.store
from kvasir import _abi, _native
with kvasir.store.open(sys.argv[1]) as store:
    state = os.urandom(100000)
    store.save("state", state)
    assert bytes(store.restore("state")) == state
for name in _abi.PROTOTYPES:
    path = _native.load(name)._name
    assert "site-packages" in path, path
try:
    kvasir.store.open("rediss://127.0.0.1:1")
except kvasir.Error as problem:
    assert "refused" in str(problem), problem
print(kvasir.__version__, sys.version_info[:2])
"""


def built():
    """Path of the wheel, which the first test that asks builds."""
    found = list(WORK.glob("*.whl"))
    if not found:
        done = subprocess.run([sys.executable, SOURCE / "tools/wheel.py", "--build", BUILD, "--out", WORK], capture_output=True,
                              text=True, check=False)
        if "is missing; tools/setup.sh" in done.stderr:
            skip(done.stderr.strip())
        equal(done.returncode, 0, f"wheel.py: {done.stderr}")
        found = [pathlib.Path(done.stdout.strip())]
    return found[0]


def pythons():
    """One interpreter of each version from 3.9 on: the system's, and those of $KV_TEST_PYTHONS (paths and blanks)."""
    found = {}
    for path in (*glob.glob("/usr/bin/python3.*"), *os.environ.get("KV_TEST_PYTHONS", "").split()):
        if re.fullmatch(r".*/python3(\.\d+)?", path):
            out = subprocess.run([path, "-c", "import sys, venv; print(*sys.version_info[:2])"], capture_output=True, text=True,
                                 check=False).stdout.split()
            if out and (3, 9) <= tuple(map(int, out)):
                found.setdefault(tuple(map(int, out)), path)
    return sorted(found.items())


def environment():
    """Variables without those that would lead past the installed package."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("KVASIR_", "PYTHON", "KV_"))}


def test_the_guide_names_it():
    """Each command of the guide that installs the wheel finds it."""
    patterns = re.findall(r"^pip install build/(.+?[.]whl)", (SOURCE / "docs/python.md").read_text(encoding="utf-8"), re.M)
    check(len(patterns) >= 3, f"commands in the guide: {patterns}")
    for pattern in patterns:
        check(fnmatch.fnmatchcase(built().name, pattern.replace("$(uname -m)", os.uname().machine)), pattern)


def test_tag_is_true():
    wheel = built()
    equal(wheel.name, "kvasir_kv-" + re.search(r"VERSION ([\d.]+)", (SOURCE / "CMakeLists.txt").read_text(encoding="utf-8").split(
        "project(")[1])[1] + f"-py3-none-manylinux_2_28_{os.uname().machine}.whl", "name")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        check("kvasir/py.typed" in names and "kvasir/_abi.py" in names, names)
        archive.extractall(WORK / "files")
    libraries = list((WORK / "files/kvasir/_lib").iterdir())
    programs = list((WORK / "files").glob("*.data/scripts/*"))
    check(len(libraries) >= 8 and [each.name for each in programs] == ["kv-indexer"], (libraries, programs))
    for library in libraries + programs:
        table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
        for version in set(re.findall(r"GLIBC_(\d+\.\d+)", table)):
            check(tuple(map(int, version.split("."))) <= (2, 28), f"{library.name} needs glibc {version}")
        check("Py" not in re.sub(r"\bkvpy\w+", "", " ".join(re.findall(r"\*UND\*.*\s(\S+)$", table, re.M))), f"{library.name} needs CPython")


def test_a_newer_symbol_is_refused():
    done = subprocess.run([sys.executable, SOURCE / "tools/wheel.py", "--build", BUILD, "--out", WORK, "--glibc", "2.17"],
                          capture_output=True, text=True, check=False)
    check(done.returncode != 0 and "getrandom" in done.stderr, f"{done.returncode}: {done.stderr[-500:]}")


def use(python, name):
    """Store something with the package of @python, then list it with its command line."""
    store = WORK / f"store-{name}"
    done = subprocess.run([python, "-B", "-c", USE, store], env=environment(), capture_output=True, text=True, check=False)
    equal(done.returncode, 0, f"Python {name}: {done.stderr}")
    done = subprocess.run([python, "-B", "-m", "kvasir", "store", "ls", store], env=environment(), capture_output=True, text=True, check=False)
    check(done.returncode == 0 and "state" in done.stdout, f"the command line: {done}")


def test_installed_by_pip_into_every_python():
    wheel, place, used = built(), WORK / "env", []
    done = subprocess.run([sys.executable, "-m", "venv", place], capture_output=True, text=True, check=False)
    equal(done.returncode, 0, f"venv: {done.stdout} {done.stderr}")
    pip = [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-index"]
    subprocess.run([*pip, wheel], check=True, env=environment())
    use(place / "bin/python", "here")
    done = subprocess.run([place / "bin/kvasir", "store", "ls", "/nowhere"], env=environment(), capture_output=True, text=True, check=False)
    equal(done.returncode, 3, f"exit status of a command that fails: {done}")
    for version, path in pythons():  # one pip for all: making one each takes most of a minute
        name = "%d.%d" % version
        subprocess.run([path, "-m", "venv", "--without-pip", WORK / name], check=True)
        packages = next((WORK / name / "lib").glob("python*/site-packages"))
        subprocess.run([*pip, "--target", packages, "--python-version", name, "--only-binary=:all:", "--no-deps", wheel], check=True,
                       env=environment())
        use(WORK / name / "bin/python", name)
        used.append(name)
    print("Python", ", ".join(used))


def certificate():
    """Files of a certificate for 127.0.0.1 and its key."""
    paths = WORK / "cert.pem", WORK / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=a",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", paths[1], "-out", paths[0]], check=True, capture_output=True)
    return paths


def test_programs_in_an_empty_environment():
    """kv-indexer, also over TLS, asked by the package's client; top, replay and the S3 plugin."""
    place = WORK / "programs"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    subprocess.run([place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-index", built()], check=True, env=environment())

    variables = {**environment(), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

    def tell(*command):
        done = subprocess.run([place / "bin" / command[0], *command[1:]], env=variables, cwd=WORK, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    number = built().name.split("-")[1]
    for program in "kv-indexer", "kvasir":
        equal(tell(program, "--version"), (0, f"{program} {number}\n"), "version")
        status, text = tell(program, "--help")
        check(status == 0 and text.startswith(f"usage: {program} "), text)
    status, text = tell("kvasir", "top", "--help")
    check(status == 0 and text.startswith("usage: kvasir top "), text)
    status, text = tell("kvasir", "replay", "--requests", "200", "--workers", "2")
    check(status == 0, f"a replay through the environment's kv-indexer: {text}")
    status, text = tell("kvasir", "store", "ls", "s3://bucket?endpoint=http://127.0.0.1:1&region=r")
    check(status != 0 and "component=s3" in text and "connect" in text, f"S3: {text}")
    cert, key = certificate()
    command = [place / "bin/kv-indexer", "--host", "127.0.0.1", "--port", "0", "--tls-cert", cert, "--tls-key", key]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as indexer:
        try:
            url = next(found[1] for found in (re.search(r"url=(\S+)", line) for line in indexer.stderr) if found)
            ask = "import ssl, sys; from kvasir.client import Client; " \
                  "print(Client(sys.argv[1], context=ssl.create_default_context(cafile=sys.argv[2])).workers())"
            equal(tell("python", "-c", ask, url, cert), (0, "[]\n"), "workers over TLS")
            status, text = tell("kvasir", "top", "--once", "--cacert", cert, "--url", url)
            check(status == 0, f"top over TLS: {text}")
        finally:
            indexer.terminate()
            equal(indexer.wait(), 0, "exit status of kv-indexer")


CROSS_USE = """
import array, platform
from kvasir import blocks, index, layout
assert platform.machine() == "aarch64", platform.machine()
keys = index.sequence_hashes(index.hash_tokens(range(64), 16))
found = index.PrefixIndex()
found.store(7, list(keys), index.hash_tokens(range(64), 16), parent=None)
assert [match.device for match in found.find(index.hash_tokens(range(64), 16))] == [4]
print(array.array("Q", keys).tobytes().hex())
shape = blocks.Shape(layers=2, page_size=16, inner=64)
memory = bytearray(range(256)) * (shape.nbytes * 8 // 256)
expected = bytes(memory[:4 * shape.nbytes])
with blocks.Manager(shape, host_bytes=16 << 20) as manager, manager.attach(memory) as cache:
    assert cache.store(keys, [0, 1, 2, 3]) == 4
    memory[:] = bytes(len(memory))
    assert cache.load(keys, [4, 5, 6, 7]) == 4
    assert bytes(memory[4 * shape.nbytes:]) == expected
"""


def test_aarch64_under_qemu():
    """The wheel that `./dev wheel-arm` built, which also calls this test."""
    if os.environ.get("KV_TEST_CROSS", "0") != "1":
        skip("KV_TEST_CROSS=1 runs it behind ./dev wheel-arm")
    root, place = SOURCE / "build/sysroot-arm64", WORK / "cross/site-packages"
    (wheel,) = (SOURCE / "build").glob("kvasir_kv-*-py3-none-manylinux_2_28_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    for library in (*(place / "kvasir/_lib").iterdir(), *place.glob("*.data/scripts/*")):
        with open(library, "rb") as file:
            header = file.read(20)
        equal((header[:4], header[18]), (b"\x7fELF", 183), f"{library.name}: machine")  # EM_AARCH64
    python = ["qemu-aarch64-static", "-L", root, "-E", f"PYTHONPATH={place}", "-E", "LC_ALL=C.UTF-8", next(root.glob("usr/bin/python3.*[0-9]")), "-B"]
    done = subprocess.run([*python, "-c", USE, "store-aarch64"], cwd=WORK, env=environment(), capture_output=True, text=True,
                          check=False)  # relative: qemu looks for others in its root first
    equal(done.returncode, 0, f"store: {done.stderr}")
    (indexer,) = place.glob("*.data/scripts/kv-indexer")
    indexer.chmod(0o755)
    done = subprocess.run([*python[:3], indexer, "--version"], cwd=WORK, env=environment(), capture_output=True, text=True, check=False)
    check(done.returncode == 0 and done.stdout.startswith("kv-indexer "), f"its own entry: {done}")
    use = subprocess.run([*python, "-c", CROSS_USE], env=environment(), capture_output=True, text=True, check=False)
    equal(use.returncode, 0, f"index, blocks: {use.stderr}")
    with zipfile.ZipFile(built()) as archive:
        archive.extractall(WORK / "here/site-packages")
    here = CROSS_USE.replace('== "aarch64"', f'== "{os.uname().machine}"')
    done = subprocess.run([sys.executable, "-B", "-c", here], env={**environment(), "PYTHONPATH": str(WORK / "here/site-packages")},
                          capture_output=True, text=True, check=False)
    equal(use.stdout, done.stdout, "hashes of both machines")
    done = subprocess.run([sys.executable, "-B", "-m", "kvasir", "store", "verify", WORK / "store-aarch64"],
                          env={**environment(), "PYTHONPATH": str(WORK / "here/site-packages")}, capture_output=True, text=True, check=False)
    equal(done.returncode, 0, f"this machine reads the other's store: {done.stdout} {done.stderr}")


if __name__ == "__main__":
    try:
        run(globals())
    finally:
        shutil.rmtree(WORK)
