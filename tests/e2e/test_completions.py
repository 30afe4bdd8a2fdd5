#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completions for bash and zsh: the words that a user is offered, computed by the shells themselves."""
import shutil
import subprocess

from kvtest import *

FILES = SOURCE / "deploy" / "completions"
# Bash's part on Tab: COMP_WORDS and COMP_CWORD are set, the function fills COMPREPLY.
BASH = r"""
compopt() { :; } # which only a real Tab allows
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
complete -p "${1##*/}" >/dev/null || exit 1
_kvasir
printf '%s\n' "${COMPREPLY[@]}"
"""
# Zsh's part: words and CURRENT are set, the file runs as a function's body, compadd takes the words.
ZSH = r"""
compadd() { while [[ $1 != -- ]]; do shift; done; shift; (( $# )) && print -l -- "$@"; (( $# )) }
_files() { print FILES; }
file=$1; shift
words=("$@"); CURRENT=$#
source $file
"""
COMMANDS = {"bench", "doctor", "replay", "store", "top", "help"}
CASES = [
    (["kvasir", ""], COMMANDS),
    (["kvasir", "help", ""], COMMANDS - {"help"}),
    (["kvasir", "store", ""], {"save", "restore", "ls", "show", "verify", "gc", "rm", "stats", "bench", "conformance"}),
    (["kvasir", "help", "store", ""], {"save", "gc"}),
    (["kvasir", "bench", ""], {"tiers"}),
    (["kvasir", "bench", "tiers", "--"], {"--host=", "--disk=", "--json"}),
    (["kvasir", "store", "gc", "--"], {"--grace=", "--dry-run", "--quiet"}),
    (["kvasir", "replay", "--"], {"--requests=", "--policy=", "--html="}),
    (["kvasir", "doctor", "--"], {"--engine=", "--tokens=", "--json"}),
    (["kvasir", "top", "--"], {"--url=", "--once", "--json"}),
    (["kvasir", "select", "replay", "--"], {"--policy=", "--json"}),
    (["kv-selector", "--"], {"--port=", "--policy=", "--decision-log=", "--insecure"}),
    (["kv-indexer", "--"], {"--port=", "--workers=", "--config=", "--insecure"}),
]


def offered(shell, script, file, words):
    path = [str(BUILD / "bin" / words[0]), *words[1:]]
    done = subprocess.run([*shell, script, "complete", str(file), *path], capture_output=True, text=True, timeout=60, check=False)
    check(done.returncode in (0, 1) and not done.stderr, f"{' '.join(words)}: {done.stderr}")
    return set(done.stdout.split())


def compare(shell, script, file):
    for words, wanted in CASES:
        got = offered(shell, script, file, words)
        check(wanted <= got, f"{' '.join(words)}: {sorted(wanted - got)} are missing in {sorted(got)}")


def test_bash():
    compare(["bash", "-c"], BASH, FILES / "kvasir.bash")
    equal(offered(["bash", "-c"], BASH, FILES / "kvasir.bash", ["kvasir", "store", "sh"]), {"show"})
    equal(offered(["bash", "-c"], BASH, FILES / "kvasir.bash", ["kv-indexer", "--por"]), {"--port="})


def test_zsh():
    if not shutil.which("zsh"):
        skip("zsh is not installed")
    compare(["zsh", "-f", "-c"], ZSH, FILES / "_kvasir")


def test_man_pages_say_what_the_program_does():
    briefs = set()
    for words in (["kv-indexer"], ["kvasir", "replay"], ["kvasir", "top"], ["kvasir", "bench", "tiers"], ["kvasir", "store", "gc"]):
        text = subprocess.run([str(BUILD / "bin" / words[0]), *words[1:], "--help-man"], capture_output=True, text=True,
                              timeout=60, check=True).stdout
        name, _, brief = text.split(".SH NAME\n")[1].split("\n")[0].partition(" \\- ")
        equal(name.replace("\\-", "-"), "-".join(words))
        check(10 < len(brief) < 90 and brief not in briefs, f"{name}: {brief!r}")
        briefs.add(brief)


if __name__ == "__main__":
    run(globals())
