#!/usr/bin/env python3
"""List prose that a stranger can't parse: comments that open with a pronoun, sentences over 25 words, docs lines over
100 columns, rows of a table on one line.

Prints one line per place and a summary; always exits 0 unless --strict is given. --strict fails on findings in cleaned
rooms: openings and columns in CLEAN, also sentences and lower-case openings in PLAIN.
"""
import pathlib
import re
import subprocess
import sys

# Rooms and pages without a finding; a new finding in them fails the check.
CLEAN = ("bench", "docs", "examples", "fuzz", "include", "plugins", "src", "tests", "tools", "cmake", "README.md", "CONTRIBUTING.md",
         "CHANGELOG.md")
# Rooms whose sentences have at most MAX_WORDS words, and whose notes behind code don't open with LOWER either.
PLAIN = ("bench", "examples", "fuzz", "plugins", "src/bm", "src/peer", "src/store", "src/tier")
MAX_WORDS = 25
OPENING = re.compile(
    r"^\s*(?:/\*\*?|//|\*) *(What|Whatever|Who|Whoever|It|Its|That|Those|So|They|Their|This|These) "
    r"|(?:;|,|\{|\}) +/\* *(What|Whatever|Who|Whoever|It|Its|That|Those|So|They|Their|This|These) ")
LOWER = re.compile(r"/\*\*? *(what|whatever|who|whoever|whose|they|so) (?!that )")
SCRIPT = re.compile(r"^\s*#+ *(What|Whatever|Who|Whoever|It|Its|That|Those|So|They|Their|This|These) ")
# The line below a table's head, alone or with rows around it: "| a | b | |---|---| | 1 | 2 |".
RULE = re.compile(r"\|(?: *:?-{3,}:? *\|)+")
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.S)
MAX_COLUMNS = 100
root = pathlib.Path(__file__).resolve().parent.parent


def opens_comment(lines, i):
    """True when line @i begins a comment, or a sentence list of one, rather than continuing a sentence."""
    line = lines[i].strip()
    if not line.startswith("*"):
        return True
    before = lines[i - 1].strip() if i else ""
    return before in ("/**", "/*", "*") or before.endswith((".", ":"))


def sentences(comment):
    """Yield the sentences of a comment. Drawings and tables, which are indented, end a paragraph; so do list items."""
    paragraph = ""
    for line in [*comment.strip("/").split("\n"), ""]:
        text = re.sub(r"^\s*\*+", "", line).rstrip("* ")
        if not text.strip() or re.match(r"\s{2,}\S|\s*(-|\d\.) ", text):
            yield from re.split(r"(?<=[.:;!?])\s+", paragraph.strip())
            paragraph = text if re.match(r"\s*(-|\d\.) ", text) else ""
        else:
            paragraph += " " + text.strip()


def long_sentences(text):
    for match in COMMENT.finditer(text):
        comment = match.group(0)
        for sentence in sentences(comment) if comment.startswith("/") else ():
            if len(sentence.split()) > MAX_WORDS:
                yield text.count("\n", 0, match.start()) + 1, f"{len(sentence.split())} words: {sentence[:60]}..."


def joined_rows(lines):
    """Yield the numbers of lines with several rows of a Markdown table, or with a part of one. Fenced lines are None."""
    cells = 0  # of the table's head, while in a table
    for number, line in enumerate(lines, 1):
        row = (line or "").strip()
        if cells and not row.startswith("|"):
            cells = 0
        if not RULE.search(re.sub(r"`[^`]*`", "", row)):
            if cells and row.count("|") - row.count("\\|") != cells + 1:
                yield number
        elif RULE.fullmatch(row):
            cells = row.count("|") - 1
        else:
            yield number


def plain(name):
    return any(name.startswith(room + "/") for room in PLAIN)


def findings(name, lines):
    if not name.endswith((".md", ".c", ".h", ".cu", ".cuh")):
        for number, line in enumerate(lines, 1):
            if match := SCRIPT.match(line):
                yield number, f"opens with “{match.group(1)}”"
        return
    if plain(name):
        yield from long_sentences("\n".join(lines))
        for number, line in enumerate(lines, 1):
            if match := LOWER.search(line):
                yield number, f"opens with “{match.group(1)}”"
    if name.endswith(".md"):
        fenced, unfenced = False, []
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            unfenced.append(None if fenced else line)
            if len(line) > MAX_COLUMNS and not fenced and not line.lstrip().startswith("|"):
                yield number, f"{len(line)} columns"
        for number in joined_rows(unfenced):
            yield number, "a line of a table isn't one row of it"
        return
    for i, line in enumerate(lines):
        if re.fullmatch(r"\s*\* \*/", line):
            yield i + 1, "` * */`: the end of a comment as a line of its text"
        match = OPENING.match(line) or (OPENING.search(line) if "/*" in line else None)
        if match and opens_comment(lines, i):
            yield i + 1, f"opens with “{match.group(1) or match.group(2)}”"


def main():
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    wanted = [n for n in tracked if n.endswith((".c", ".h", ".cu", ".cuh", ".py", ".sh", ".cmake", "CMakeLists.txt")) or
              (n.endswith(".md") and (n.startswith("docs/") or "/" not in n))]
    strict = "--strict" in sys.argv[1:]
    counts, broken = {}, []
    for name in wanted:
        for number, why in findings(name, (root / name).read_text().splitlines()):
            room = "/".join(name.split("/")[:2])
            counts[room] = counts.get(room, 0) + 1
            if any(name == c or name.startswith(c + "/") for c in CLEAN):
                broken.append(f"{name}:{number}: {why}")
            elif not strict:
                print(f"{name}:{number}: {why}")
    if strict:
        print("\n".join(broken))
        return 1 if broken else 0
    print(f"{sum(counts.values())} findings: " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
