# SPDX-License-Identifier: Apache-2.0
"""The libraries in a host program that has chosen a locale: Turkish and Azeri have other pairs of i and I, German a
comma for the decimal point. Their unit tests must give what they give without one."""
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile

from kvtest import *

SHIM = BUILD / "tests" / "in_locale.so"
# @UTF-8 unless said; in 8 bits tolower("I") is no ASCII at all
LOCALES = [("tr_TR", "UTF-8"), ("tr_TR", "ISO-8859-9"), ("az_AZ", "UTF-8"), ("de_DE", "UTF-8")]
PROGRAMS = ["base-args", "base-buf", "base-endpoint", "base-json", "base-json_writer", "base-log", "base-metrics", "event-namespace",
            "event-reader", "event-wire", "index-semantics", "store-open", "store-plugin", "store-manifest", "store-file",
            "store-save", "bm-check", "bm-stats", "bm-storage", "bm-layout", "tier-sizes", "tier-manager", "peer-directory", "peer-hint",
            "peer-plan", "redis-parts", "redis-resp", "s3-config", "s3-sign", "s3-xml", "llama-cache", "kvx-validate", "kvx-ext"]


def localedef(folder):
    """Make the locales in @folder."""
    if not shutil.which("localedef"):
        skip_all("localedef is needed (Debian: libc-bin)")
    for name, charset in LOCALES:
        done = subprocess.run(["localedef", "--no-archive", "-i", name, "-f", charset, f"{folder}/{name}.{charset}"],
                              capture_output=True, text=True)
        if done.returncode not in (0, 1):  # 1: with warnings
            skip_all(f"locale {name} can't be made (Debian: locales): {done.stderr.strip()[-200:]}")


def environment(folder, name, charset, **extra):
    # Leaks are looked for in the programs' own runs. Here glibc keeps the list that it makes of LOCPATH.
    options = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0"
    return {**os.environ, "LC_ALL": f"{name}.{charset}", "LOCPATH": folder, "LD_PRELOAD": str(SHIM), "KV_TEST_SCALE": "5",
            "ASAN_OPTIONS": options, **extra}


FOLDER = tempfile.TemporaryDirectory(prefix="kvasir-locales-")
localedef(FOLDER.name)


def test_the_locales_are_what_they_say():
    """Else the tests below show nothing."""
    script = ("import ctypes; c = ctypes.CDLL(None); c.printf(b'%c %.1f ', c.toupper(ord('i')), ctypes.c_double(0.5)); c.fflush(None)")
    seen = {}
    for name, charset in LOCALES:
        done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", script], env=environment(FOLDER.name, name, charset), capture_output=True,
                              timeout=60)
        seen[name, charset] = done.stdout
    for name, charset in LOCALES[:3]:
        check(not seen[name, charset].startswith(b"I"), f"{name}: {seen}")
    check(b"0,5" in seen["de_DE", "UTF-8"], seen)


def test_the_libraries_own_tests():
    missing = [name for name in PROGRAMS if not (BUILD / "tests" / f"test-{name}").exists()]
    check(len(missing) < len(PROGRAMS) / 4, f"not built: {missing}")

    def tried(case):
        program, (name, charset) = case
        done = subprocess.run([str(BUILD / "tests" / f"test-{program}")], cwd=SOURCE, capture_output=True, text=True, errors="replace",
                              env=environment(FOLDER.name, name, charset, KV_BUILD_DIR=str(BUILD)), timeout=300)
        said = (done.stdout + done.stderr)[-1500:]
        return "" if done.returncode in (0, 77) else f"{program} in {name}.{charset}: {done.returncode}\n{said}\n"

    # A sanitizer sees each kind of change once: other letters, and another decimal point. The release build has all locales.
    locales = [LOCALES[0], LOCALES[3]] if SANITIZED else LOCALES
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = "".join(pool.map(tried, [(p, locale) for locale in locales for p in PROGRAMS if p not in missing]))
    check(not failed, failed)


if __name__ == "__main__":
    run(globals())
