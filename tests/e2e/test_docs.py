# SPDX-License-Identifier: Apache-2.0
"""Run the commands and code blocks of README, CONTRIBUTING and docs/*.md as they are printed.

The rule, which test_every_block_runs_or_says_why holds: each fenced block marked sh, console, conf, json or c is run,
unless the line above it is `<!-- not run: REASON -->`. Blocks without a language are pictures and output.

    sh       all blocks of a page are one script, in order; a line that starts kv-indexer or `kvasir peer share` goes on in the background
    console  `$ command` lines run, and the lines below each are what it prints
    conf     kv-indexer starts with it as its --config file
    json     parses
    c        compiles in a function, as C and as C++; CONTEXT declares what the text around it speaks of

Ports and folders of the pages are replaced by free ones, names of hosts by this machine's address.
"""
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import tempfile

from kvtest import *

PAGES = [SOURCE / "README.md", SOURCE / "CONTRIBUTING.md", *sorted((SOURCE / "docs").glob("*.md"))]
RUN = ("sh", "console", "conf", "json", "c", "python")  # the last by tests/python/test_guide.py
BLOCKS_OF_PAGES = {}  # by name, as read


class Block:
    def __init__(self, page, line, language, text, reason):
        self.page, self.line, self.language, self.text, self.reason = page, line, language, text, reason

    def __str__(self):
        return f"{self.page}:{self.line}"


def read_blocks(path):
    lines, found, i = path.read_text().split("\n"), [], 0
    while i < len(lines):
        fence = re.match(r"( *)```(\w*)$", lines[i])
        if fence:
            end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
            why = re.match(r" *<!-- not run: (.+) -->$", lines[i - 1]) if i else None
            text = "\n".join(line[len(fence.group(1)):] for line in lines[i + 1:end])
            found.append(Block(str(path.relative_to(SOURCE)), i + 1, fence.group(2), text, why.group(1) if why else None))
            i = end
        i += 1
    return found


def blocks(language=None):
    """The blocks of all pages that are to be run, by page."""
    pages = {}
    for path in PAGES:
        for block in read_blocks(path):
            if language is None or block.language == language and not block.reason:
                pages.setdefault(block.page, []).append(block)
    return pages


class Place:
    """A folder in which the commands of a page run, and what their ports, hosts and paths become."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.ports = {}
        for name in ("include", "examples", "deploy", "docs"):
            shutil.copytree(SOURCE / name, self.folder / name)
        (self.folder / "conversation_trace.jsonl").write_text(trace())
        self.env = {**os.environ, "PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}", "HOME": folder, "TMPDIR": folder}

    def port(self, number):
        return str(self.ports.setdefault(number, free_port()))

    def adapt(self, text):
        text = re.sub(r"\b(host-?[a-z0-9]|worker\d)\b(?=:)", "127.0.0.1", text)
        text = re.sub(r"(?<=[:=/ ])(80\d\d|55\d\d|73\d\d)\b", lambda m: self.port(m.group(1)), text)
        return re.sub(r"/(var|tmp)/kv\b", f"{self.folder}/kv", text)

    def bash(self, script, **kw):
        return subprocess.run(["bash", "-c", script], cwd=self.folder, env=self.env, capture_output=True, text=True,
                              timeout=120 * SLOW, **kw)


def trace():
    """A small trace in the format of the large one: conversations that grow, 512 tokens an id."""
    pick, lines, chats = random.Random(1), [], {}
    for i in range(60):
        chat = chats.setdefault(pick.randrange(8), [1])
        chat += [len(lines) * 1000 + j for j in range(2, 2 + pick.randrange(1, 4))]
        lines.append(json.dumps({"timestamp": i * 1000, "input_length": 512 * len(chat), "output_length": 10,
                                 "hash_ids": list(chat)}))
    return "\n".join(lines) + "\n"


def commands(text):
    """The commands of a script, continuation lines and quotes over several lines together."""
    parts = []
    for line in text.split("\n"):
        if parts and (parts[-1].endswith("\\") or parts[-1].count("'") % 2):
            parts[-1] += "\n" + line
        else:
            parts.append(line)
    return parts


# -- the rule --------------------------------------------------------------------------------------------------------


def test_every_block_runs_or_says_why():
    seen = 0
    for block in sum(blocks().values(), []):
        if block.language:
            check(block.language in RUN, f"{block}: no test runs blocks marked {block.language}")
            check(block.reason is None or len(block.reason.split()) >= 3, f"{block}: a reason of a few words")
            seen += 1
        else:
            check(block.reason is None, f"{block}: a picture needs no reason")
    check(seen > 30, f"{seen} blocks: the pages weren't found")


def test_commands_that_are_not_run_name_what_exists():
    """Programs and files of this tree in blocks that are left out."""
    targets = set(re.findall(r"^([a-z-]+):", (SOURCE / "Makefile").read_text(), re.M))
    for block in sum(blocks().values(), []):
        if block.language != "sh" or not block.reason:
            continue
        for target in re.findall(r"\./dev ([a-z-]+)", block.text):
            check(target in targets, f"{block}: ./dev {target}")
        for name in re.findall(r"(?<![\w/.~-])((?:tools|tests|deploy|examples)/[\w./-]+)", block.text):
            check((SOURCE / name).exists(), f"{block}: no {name}")


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.M):
            name, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", name):
                continue
            page = (path.parent / name) if name else path
            check(page.exists(), f"{path.name}: no {target}")
            if anchor and page.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                check(anchor in anchors, f"{path.name}: {target}: the page has no such heading")


def test_pictures_are_what_their_sources_make():
    for tool in ("draw.py", "plot.py"):
        done = subprocess.run(["python3", SOURCE / "tools" / tool, "--check"], capture_output=True, text=True, timeout=60)
        equal(done.returncode, 0, f"{tool}: {done.stdout}{done.stderr}\nstatus")


def test_rows_of_a_table_on_one_line_are_found():
    """By tools/check-prose.py, which `./dev check` runs over all pages."""
    spec = importlib.util.spec_from_file_location("check_prose", SOURCE / "tools" / "check-prose.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    table = ["- Fields:", "", "  | a | b |", "  |---|---|", "  | `1` | 2 \\| 3 |", "  | 4 | 5 |", "", "`|---|---|` isn't one"]
    for place, lines in ((None, table), (3, [*table[:2], " ".join(table[2:6])]), (3, [*table[:2], " ".join(table[2:5]), *table[5:]]),
                         (5, [*table[:4], table[4] + table[5]]), (6, [*table[:5], "  | 4", "  5 |"])):
        equal([n for n, why in tool.findings("docs/page.md", lines) if "table" in why], [place] if place else [], lines)


# -- scripts ---------------------------------------------------------------------------------------------------------

HEAD = """set -euo pipefail
pids=()
stop() { # a server that is gone before, or ends with an error, fails the page
    local status=$? pid
    for pid in "${pids[@]}"; do kill "$pid" && wait "$pid" || status=1; done
    exit "$status"
}
trap stop EXIT
curl() { command curl -sS --fail --max-time 60 "$@"; echo; }
shares() { for _ in $(seq 2000); do grep -q "are shared" share && return; sleep 0.05; done; false; }
ready() { for _ in $(seq 2000); do command curl -sf "localhost:$1/health" >/dev/null && return; sleep 0.05; done; false; }
"""


def background(command, place):
    """A server goes on while the next commands of the page run."""
    if command.startswith("kvasir peer share "):
        return f": >share\n{command} >>share 2>>{place.folder}/log &\npids+=($!)\nshares"
    if not command.startswith("kv-indexer "):
        return command
    port = re.search(r"--port (\d+)", command).group(1)
    return f"{command} 2>>{place.folder}/log &\npids+=($!)\nready {port}"


def test_scripts_leave_the_machine_alone():
    for block in sum(blocks("sh").values(), []):
        found = re.search(r"^\s*(sudo|apt|apt-get|systemctl|dpkg|rm|mkfs|mount|docker|pip)\b", block.text, re.M)
        check(not found, f"{block}: {found and found.group(1)} changes the machine: mark it as not run")


def test_scripts():
    test_scripts_leave_the_machine_alone()
    for page, found in blocks("sh").items():
        if SANITIZED and page.endswith("kv-store-plugin.md"):
            continue  # test_store_tool.py says why
        with tempfile.TemporaryDirectory() as folder:
            place = Place(folder)
            script = "\n".join(background(command, place) for block in found for command in commands(place.adapt(block.text)))
            done = place.bash(HEAD + script)
            log = (place.folder / "log").read_text() if (place.folder / "log").exists() else ""
            equal(done.returncode, 0, f"{page}:\n{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{log[-2000:]}\nstatus")


# -- consoles --------------------------------------------------------------------------------------------------------


def shape(line):
    """A line of a report without its numbers and their units."""
    return re.sub(r" +", " ", re.sub(r"\d[\d,.]*(?: ?(?:min|ms|us|s|h|k|M|KiB|MiB|GiB)\b)?", "N", line)).strip()


def session(text):
    """(command, what it prints) of a console block."""
    steps = []
    for line in text.split("\n"):
        if line.startswith("$ "):
            steps.append([line[2:], []])
        elif steps and steps[-1][0].endswith("\\"):
            steps[-1][0] += "\n" + line
        elif line:
            steps[-1][1].append(line)
    return steps


def compare(where, wanted, got):
    if wanted[0].startswith("{"):
        equal(json.loads(got), json.loads(" ".join(wanted)), f"{where}: answer")
        return
    shapes = [shape(line) for line in got.split("\n")]
    for line in wanted:
        if line.strip() != "...":
            check(shape(line) in shapes, f"{where}: no line like {line!r} in\n{got}")


def test_consoles():
    tokens = list(range(1, 17))
    for page, found in blocks("console").items():
        for block in found:
            with tempfile.TemporaryDirectory() as folder, Publisher() as engine:
                place, servers = Place(folder), []
                place.ports["5557"] = engine.endpoint.rsplit(":", 1)[1]
                try:
                    for command, wanted in session(block.text):
                        command = place.adapt(command)
                        if command.endswith(" &"):
                            servers.append(subprocess.Popen(command[:-2].split(), env=place.env, stderr=subprocess.DEVNULL))
                            port = command.split("--port ")[1].split()[0]
                            wait_until(lambda: place.bash(f"curl -sf localhost:{port}/health").returncode == 0, timeout=30)
                            continue
                        if "/query" in command:  # the engine of the page, which has five blocks
                            engine.wait_subscriber()
                            engine.store([101, 102, 103, 104, 105], tokens=tokens + list(range(100, 164)))
                            wait_until(lambda: '"tree_sizes":{"1":{"0":5}}' in place.bash(command).stdout, timeout=30)
                        done = place.bash(command)
                        equal(done.returncode, 0, f"{block}: {command}: {done.stderr}\nstatus")
                        compare(f"{block}: {command}", wanted, done.stdout)
                finally:
                    for server in servers:
                        server.terminate()
                        server.wait(timeout=patience(20))


def test_config_files():
    for page, found in blocks("conf").items():
        for block in found:
            with tempfile.TemporaryDirectory() as folder:
                place = Place(folder)
                file = place.folder / "kv-indexer.conf"
                file.write_text(place.adapt(block.text) + "\n")
                with Indexer("--config", str(file)) as indexer:
                    check(indexer.workers(), f"{block}: no workers")


# -- data and code ---------------------------------------------------------------------------------------------------


def test_json():
    for page, found in blocks("json").items():
        for block in found:
            try:
                json.loads(block.text if block.text.startswith("{") else "{" + block.text + "}")
            except ValueError as error:
                check(False, f"{block}: {error}")


ENGINE = """
enum { MOST = 64 };
static uint32_t tokens[1024]; static size_t n_tokens; static uint64_t salt;
static struct kvbm_pool *pool; static struct kvbm_shortage shortage; static int err;
static const void *keys_of; static uint32_t block, layer, outer; static struct kvbm_view view;
static struct kvbm_layout *layout; static struct kvbm_events *events;
static kvx_cache_desc_t layer0, layer1;
"""
WINDOW = ENGINE + "static struct kvbm_pool *full, *window; static uint64_t *keys; static size_t n; static long w;\n"
TIERS = """
static struct kvbm_layout_config config; static char *strings; static struct kvbm_manager *manager;
static struct kvbm_cache *cache; static struct kvbm_layout *mine; static struct kvbm_chain chain; static size_t n;
static struct kvbm_job job; static int64_t id; static struct kvbm_done done[64];
"""
CALLS = """
static struct kvbm_cache *cache; static struct kvbm_chain chain; static size_t n; static const uint32_t *blocks;
"""
HIT = """
static struct kvbm_manager *manager; static struct kvbm_chain attention, window, states; static size_t n, key_len;
static uint8_t at[3][64]; static struct kvbm_pin *pins[3];
"""
COPIER = """
static struct kvbm_layout *g1, *g2; static uint32_t *from, *to, n; static int written; static uint64_t now, budget;
static uint8_t bitmap[8]; static uint64_t request; static struct kvbm_done ended[64];
"""
STATE = """
static struct kvs_store *store; static struct kvs_result result; static int state;
int64_t read_buffer(void *arg, void *buf, size_t cap);
"""
BASE = """
#include "base/json/json.h"
static struct kv_json j; static const char *body; static size_t len; static struct kv_str key; static struct kv_buf tokens;
static long n; int refuse(const struct kv_error *error);
"""
# By page: includes, and the declarations of each block.
QUEUE = """
extern struct kvs_async *queue;
extern const uint8_t *keys;
extern size_t n;
extern struct iovec *slots;
extern int64_t *lengths;
void finished(uint64_t tag, int status);
"""

SELECT = """
extern const uint64_t *names;
extern size_t n;
extern struct kvi_matches found;
extern uint64_t now_ns, later_ns;
"""

CONTEXT = {
    "docs/select.md": ("kv_select.h", [SELECT]),
    "docs/kvbm.md": ("kvbm.h", [ENGINE, ENGINE, WINDOW, ENGINE, ENGINE]),
    "docs/kvbm-tiers.md": ("kvbm.h", [CALLS, TIERS, TIERS, HIT, COPIER]),
    "docs/kv-store-llama.md": ("kv_store.h", [STATE]),
    "docs/kv-store.md": ("kv_store.h", [QUEUE]),
    "docs/base.md": ("errno.h", [BASE]),
    "docs/event-plane.md": ("kvbm.h", [""]),
}


def test_c():
    languages = [["cc", "-std=gnu17"], ["c++", "-std=c++20", "-x", "c++"]]
    for page, found in blocks("c").items():
        check(page in CONTEXT, f"{page}: say in CONTEXT what its code speaks of")
        header, contexts = CONTEXT[page]
        equal(len(found), len(contexts), f"{page}: C blocks and their contexts")
        for block, context in zip(found, contexts):
            code = re.sub(r"^\.\.\..*$", ";", block.text, flags=re.M)  # ... stands for the caller's own
            returns = "int" if "return " in code else "void"
            end = "return 0;" if returns == "int" else ""
            source = f"#include <errno.h>\n#include <{header}>\n{context}\n{returns} page(void);\n{returns} page(void)\n{{\n{code}\n{end}}}\n"
            for language in languages[:1] if page == "docs/base.md" else languages:
                with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
                    file.write(source)
                    file.flush()
                    done = subprocess.run([*language, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-missing-field-initializers",
                                           "-I", SOURCE / "include", "-I", SOURCE / "src", file.name],
                                          capture_output=True, text=True, timeout=120)
                    equal(done.returncode, 0, f"{block} with {language[0]}:\n{done.stderr}\nstatus")


if __name__ == "__main__":
    run(globals())
