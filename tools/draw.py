#!/usr/bin/env python3
"""Draw docs/pictures/*.txt, pictures of box-drawing characters, as SVG files beside them.

    tools/draw.py           write every picture
    tools/draw.py --check   exit with 1 when a picture isn't the one its text makes

Lines of the text become lines, arrow heads become triangles, everything else is set in a fixed-width font.
"""
import html
import pathlib
import re
import sys

CELL_W, CELL_H, MARGIN = 9, 20, 12
UP, DOWN, LEFT, RIGHT = (0, -0.5), (0, 0.5), (-0.5, 0), (0.5, 0)
ARMS = {"─": (LEFT, RIGHT), "│": (UP, DOWN), "┌": (DOWN, RIGHT), "┐": (DOWN, LEFT), "└": (UP, RIGHT), "┘": (UP, LEFT),
        "├": (UP, DOWN, RIGHT), "┤": (UP, DOWN, LEFT), "┬": (LEFT, RIGHT, DOWN), "┴": (LEFT, RIGHT, UP),
        "┼": (UP, DOWN, LEFT, RIGHT)}
HEADS = {"▼": (0, 1), "▲": (0, -1), "►": (1, 0), "◄": (-1, 0)}
STYLE = ("text { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }"
         " path { stroke: #57606a; stroke-width: 1.5; fill: none; stroke-linecap: round } polygon { fill: #57606a }")


def middle(row, column):
    return MARGIN + (column + 0.5) * CELL_W, MARGIN + (row + 0.5) * CELL_H


def draw(text):
    """The SVG of one picture."""
    rows = text.rstrip("\n").split("\n")
    width, height = 2 * MARGIN + CELL_W * max(map(len, rows)), 2 * MARGIN + CELL_H * len(rows)
    lines, heads, words = [], [], []
    for r, row in enumerate(rows):
        for c, char in enumerate(row):
            x, y = middle(r, c)
            for dx, dy in ARMS.get(char, ()):
                lines.append(f"M{x:g} {y:g}L{x + dx * CELL_W:g} {y + dy * CELL_H:g}")
            if char in HEADS:
                dx, dy = HEADS[char]
                tip = (x + dx * 5, y + dy * 6)
                sides = [(x - dx * 4 + s * dy * 5, y - dy * 4 + s * dx * 5) for s in (-1, 1)]
                heads.append(" ".join(f"{px:g},{py:g}" for px, py in (tip, *sides)))
        for match in re.finditer(r"[^\s─│┌┐└┘├┤┬┴┼▼▲►◄]+(?: [^\s─│┌┐└┘├┤┬┴┼▼▲►◄]+)*", row):
            x, y = MARGIN + match.start() * CELL_W, middle(r, 0)[1] + 5
            length = len(match.group()) * CELL_W
            words.append(f'<text x="{x:g}" y="{y:g}" textLength="{length}">{html.escape(match.group())}</text>')
    body = [f'<path d="{"".join(lines)}"/>', *(f'<polygon points="{h}"/>' for h in heads), *words]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
            f'<style>{STYLE}</style>\n<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n'
            + "\n".join(body) + "\n</svg>\n")


def main():
    folder = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures"
    stale = []
    for source in sorted(folder.glob("*.txt")):
        target, svg = source.with_suffix(".svg"), draw(source.read_text())
        if "--check" not in sys.argv[1:]:
            target.write_text(svg)
        elif not target.exists() or target.read_text() != svg:
            stale.append(target.name)
    if stale:
        print(f"run tools/draw.py: {', '.join(stale)} isn't what its text makes")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
