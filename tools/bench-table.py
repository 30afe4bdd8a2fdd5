#!/usr/bin/env python3
"""Tables of the figures that one run of the benchmarks printed.

    tools/bench-table.py FILE             for a terminal
    tools/bench-table.py --page FILE      write them into docs/benchmarks.md, between its two marks
    tools/bench-table.py --check FILE     fail unless the page has them

FILE holds the lines of JSON of `./dev bench`; its first line describes the machine. tools/bench_rows.py says which figures are shown, and
what each has to reach.
"""
import argparse
import html
import json
import math
import operator
import os
import pathlib
import sys

from bench_rows import ROOMS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/pictures/benchmarks.svg"
BEGIN, END = "<!-- tables of tools/bench-table.py -->\n", "<!-- end of the tables -->\n"
COMPARE = {"<=": operator.le, ">=": operator.ge}
HEAD = ("figure", "measured", "yardstick, same run", "ratio", "to reach")


def read(path):
    """(the machine, lines) of a file of figures."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{")]
    machine = lines[0] if lines and lines[0].get("bench") == "machine" else {}
    return machine, [line for line in lines if line is not machine]


def find(lines, wanted):
    """The last line whose members are as wanted: a bench that ran twice counts with its second run."""
    return next((line for line in reversed(lines) if all(line.get(key) == value for key, value in wanted.items())), None)


def number(value):
    """Three digits, as people write them."""
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


class Figure:
    """A row of ROOMS with what a run measured; `verdict` is "met", "short", "" (no target), or "not run"."""

    def __init__(self, row, lines):
        line = find(lines, row.line)
        self.row, self.verdict = row, "not run"
        self.value = self.yardstick = self.ratio = None
        if not line or line.get(row.value) is None:
            return
        self.value = float(line[row.value]) * row.scale
        if row.of:
            other = find(lines, {**row.line, **row.of_line})
            self.yardstick = float(other[row.of]) * row.scale if other else None
        if row.ratio:
            self.ratio = float(line[row.ratio])
        elif self.yardstick:
            self.ratio = self.value / self.yardstick
        self.verdict = self.judge()

    def judge(self):
        if not self.row.target:
            return ""
        which, sign, bound = self.row.target
        measured = self.ratio if which == "ratio" else self.value
        return "not run" if measured is None else "met" if COMPARE[sign](measured, bound) else "short"

    def margin(self):
        """How many times better than its target the figure is; below 1: worse."""
        which, sign, bound = self.row.target
        measured = self.ratio if which == "ratio" else self.value
        return measured / bound if sign == ">=" else bound / max(measured, bound / 64)

    def cells(self, page):
        row = self.row
        if self.value is None:
            return row.figure, "not run", row.words, "", self.target()
        measured = f"{number(self.value)} {row.unit}".strip()
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        if row.target and page:
            aim = row.target[0] == "ratio"
            marked = f"**{ratio if aim else measured}**" if self.verdict == "met" else f"{ratio if aim else measured}, short"
            ratio, measured = (marked, measured) if aim else (ratio, marked)
        yardstick = row.words if self.yardstick is None else f"{row.words}: {number(self.yardstick)}"
        return row.figure, measured, yardstick, ratio, self.target()

    def target(self):
        if not self.row.target:
            return ""
        which, sign, bound = self.row.target
        sign = {"<=": "≤", ">=": "≥"}[sign]
        return f"{sign} {number(bound)}" + (" ×" if which == "ratio" else f" {self.row.unit}".rstrip())


def figures(lines):
    return [(room, command, [Figure(row, lines) for row in rows]) for room, command, rows in ROOMS]


def describe(machine):
    """A sentence about where and when a file was measured."""
    if not machine:
        return "The file doesn't say which machine it is of."
    return (f"One run of {machine['date']} at commit {machine['commit']}: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, "
            f"{machine['system']}, {machine['compiler']}, load {machine['load']}.")


def wrap(text, columns=100):
    """Lines of at most so many columns."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > columns:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def markdown(machine, tables):
    parts = [wrap(describe(machine)) + "\n"]
    for room, command, rows in tables:
        parts.append(f"### {room}\n\n" + wrap(", ".join(f"`{program}`" for program in command.split("; "))) + "\n")
        table = [HEAD, ("---",) * len(HEAD), *(figure.cells(True) for figure in rows)]
        parts.append("".join("| " + " | ".join(cell or "–" if i > 1 else cell for cell in cells) + " |\n" for i, cells in enumerate(table))
                     .replace("| --- ", "|---").replace("--- |\n", "---|\n"))
    return "\n".join(parts) + "\n"


def terminal(machine, tables, coloured):
    colours = {"met": "\033[32m", "short": "\033[33m"} if coloured else {}
    print(describe(machine))
    for room, command, rows in tables:
        print(f"\n{room}   {command}")
        cells = [(*figure.cells(False), figure.verdict) for figure in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        for row in cells:
            text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            verdict = row[5] and f"  {colours.get(row[5], '')}{row[5]}" + ("\033[0m" if row[5] in colours else "")
            print(f"  {text}{verdict}")
    counts = [figure.verdict for _, _, rows in tables for figure in rows]
    print(f"\n{counts.count('met')} of {counts.count('met') + counts.count('short')} targets met"
          + (f", {counts.count('not run')} figures not run" if counts.count("not run") else ""))


STYLE = """text{font:12px sans-serif;fill:#24292f}.r{font-weight:bold}.met{fill:#2a7f62}.short{fill:#c2571a}line{stroke:#8c959f}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.met{fill:#4fb893}.short{fill:#f08c4a}}"""


def picture(tables):
    """A drawing of each figure's margin: a bar from its target, to the right when it is better. Doublings are equally far apart."""
    top, row_height, zero, doubling, most = 34, 16, 520, 60, 4
    shapes, y = [], top
    for room, _, rows in tables:
        judged = [figure for figure in rows if figure.verdict in ("met", "short")]
        if judged:
            shapes.append(f'<text class="r" x="8" y="{y + 12}">{html.escape(room)}</text>')
            y += row_height
        for figure in judged:
            times = figure.margin()
            length = max(-most / 2, min(most, math.log2(times))) * doubling
            shapes.append(f'<text x="20" y="{y + 12}">{html.escape(figure.row.figure.replace("`", ""))}</text>'
                          f'<rect class="{figure.verdict}" x="{zero + min(0, length):.0f}" y="{y + 3}" width="{max(1, abs(length)):.0f}" height="10"/>'
                          f'<text x="{zero + max(0, length) + 6:.0f}" y="{y + 12}">{times:.2f}</text>')
            y += row_height
        y += 6 if judged else 0
    scale = "".join(f'<text x="{zero + i * doubling}" y="16" text-anchor="middle">{2.0 ** i:g} ×</text>' for i in range(-2, most + 1))
    title = "How many times better than its target each figure is"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {y + 6}" width="860" role="img" aria-label="{title}"><title>{title}</title>'
            f'<style>{STYLE}</style>{scale}<line x1="{zero}" y1="22" x2="{zero}" y2="{y}"/>' + "\n".join(shapes) + "</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="lines of JSON of ./dev bench")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="fail unless docs/benchmarks.md has these tables")
    options = parser.parse_args()
    machine, lines = read(options.file)
    tables = figures(lines)
    if not (options.page or options.check):
        terminal(machine, tables, sys.stdout.isatty() and "NO_COLOR" not in os.environ)
        return 0
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = before + BEGIN + "\n" + markdown(machine, tables) + END + after
    drawing = picture(tables)
    if options.page:
        PAGE.write_text(made)
        PICTURE.write_text(drawing)
    elif made != text or not PICTURE.exists() or PICTURE.read_text() != drawing:
        print(f"{PAGE.relative_to(ROOT)} differs from {options.file}: run tools/bench-table.py --page {options.file}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
