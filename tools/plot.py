#!/usr/bin/env python3
"""Plot docs/pictures/replay.json, the figures of one `kvasir replay --only index --json`, as docs/pictures/replay.svg.

    build/bin/kvasir replay --only index --quiet --json docs/pictures/replay.json traces/conversation_trace.jsonl
    tools/plot.py           write the plot
    tools/plot.py --check   exit with 1 when the plot isn't the one of these figures
"""
import json
import pathlib
import sys

WIDTH, LEFT, BAR, GAP, TOP = 720, 250, 30, 16, 64
STYLE = "text { font: 14px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 } .note { font-size: 12px; fill: #57606a }"


def plot(run):
    bars = [("routed at random", run["hit_fraction_random"], "#8c959f"),
            ("routed by kv-indexer's answers", run["hit_fraction"], "#1a7f37"),
            ("one cache without a limit", run["hit_fraction_unlimited"], "#d0d7de")]
    room = WIDTH - LEFT - 70
    height = TOP + len(bars) * (BAR + GAP) + 34
    parts = [f'<text x="16" y="26" font-weight="600">Prompt blocks found in the chosen worker\'s cache</text>',
             f'<text x="16" y="46" class="note">{run["requests"]:,} requests of a production trace, '
             f'{run["options"]["workers"]} workers of {run["options"]["blocks"]:,} blocks</text>']
    for i, (name, value, colour) in enumerate(bars):
        y = TOP + i * (BAR + GAP)
        length = room * value / max(v for _, v, _ in bars)
        parts += [f'<text x="{LEFT - 12}" y="{y + 20}" text-anchor="end">{name}</text>',
                  f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{colour}"/>',
                  f'<text x="{LEFT + length + 8:.1f}" y="{y + 20}">{100 * value:.1f} %</text>']
    parts.append(f'<text x="16" y="{height - 12}" class="note">kvasir replay --only index {run["workload"]}: '
                 f'{100 * run["answers_exact_fraction"]:.1f} % of the answers exact when asked, all after '
                 f'{run["settle_ms"]} ms</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">\n'
            f'<style>{STYLE}</style>\n<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def main():
    folder = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures"
    target, svg = folder / "replay.svg", plot(json.loads((folder / "replay.json").read_text()))
    if "--check" not in sys.argv[1:]:
        target.write_text(svg)
    elif target.read_text() != svg:
        print("run tools/plot.py: replay.svg isn't the plot of replay.json")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
