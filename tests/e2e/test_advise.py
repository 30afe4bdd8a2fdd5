# SPDX-License-Identifier: Apache-2.0
"""kvasir advise as people run it: its report, its figures as JSON, its picture, and what it says of bad input."""
import json
import pathlib
import subprocess
import tempfile
import xml.etree.ElementTree

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")


def advise(*args, status=0, stdin=None):
    done = subprocess.run([KVASIR, "advise", *map(str, args)], capture_output=True, text=True, timeout=120, input=stdin)
    equal(done.returncode, status, f"{args}: status\n{done.stdout}\n{done.stderr}\n")
    return done.stdout if status == 0 else done.stderr


def figures(*args, **kw):
    return json.loads(advise("--json", "-", *args, **kw))


def line(at, ids, tokens=None):
    return json.dumps({"timestamp": at, "input_length": tokens or 512 * len(ids), "output_length": 1, "hash_ids": ids}) + "\n"


def test_a_trace_that_can_be_counted_by_hand():
    # Distances: the second prompt 0 and 1, the last one 1 and 2.
    trace = line(0, [1, 2]) + line(1000, [1, 2]) + line(2000, [3]) + line(3_600_000, [1, 2])
    r = figures("--token-bytes", 1, "--prefill", 512, "--gpu-hour", 3600, "--tier", "a=512", "--tier", "b=1KiB:0.5", "-", stdin=trace)
    equal((r["requests"], r["blocks"], r["distinct"], r["hours"], r["block_bytes"]), (4, 7, 3, 1, 512))
    close = lambda a, b: abs(a - b) < 1e-9
    rates = {p["bytes"]: p["hit_rate"] for p in r["curve"]}
    check(close(rates[512], 1 / 7) and close(rates[1024], 3 / 7) and close(rates[1536], 4 / 7), rates)
    last = r["curve"][-1]
    check(close(last["tokens_saved"], 4 * 512) and close(last["gpu_seconds_saved"], 4) and close(last["saved_month"], 4 * 730), last)
    a, b = r["tiers"]
    check(close(a["hit_rate"], 1 / 7) and close(b["hit_rate"], 3 / 7) and close(b["with_faster"]["hit_rate"], 4 / 7), (a, b))
    check(close(b["cost_month"], 0.5 * 1024 / 2**30) and close(b["saved_month"], 3 * 730) and b["best_bytes"] == 1024, b)


def test_requests_without_times():
    """What a month would save can't be told of them."""
    trace = line(0, [1, 2]) * 4
    args = ("--gpu-hour", 3600, "--tier", "a=1MiB:0.5", "-")
    r = figures(*args, stdin=trace)
    equal([r["rates"], r["tiers"][0]["saved_month"], r["tiers"][0]["best_gain_month"], r["curve"][-1]["saved_month"]], ["all", 0, 0, 0])
    text = advise(*args, stdin=trace)
    check("nothing is told in money" in text and "a month" not in text, text)


def test_a_generated_workload():
    r = figures("--samples", 0, "--gpu-hour", 2, "--tier", "hbm=40GiB", "--tier", "dram=1TiB:0.3", "--tier", "nvme=9TiB:0.01")
    rates = [p["hit_rate"] for p in r["curve"]]
    equal(rates, sorted(rates), "hit rates grow with the room")
    check(abs(rates[-1] - (r["blocks"] - r["distinct"]) / r["blocks"]) < 1e-9, "with room for all, each block but the first of its name is found")
    total = r["tiers"][-1]["with_faster"]["hit_rate"]
    check(abs(sum(tier["hit_rate"] for tier in r["tiers"]) - total) < 1e-9 and abs(total - rates[-1]) < 1e-9, r["tiers"])
    dram = r["tiers"][1]
    for size in (dram["best_bytes"], dram["best_bytes"] // 2, dram["best_bytes"] * 2, 2**40):
        other = figures("--samples", 0, "--gpu-hour", 2, "--tier", "hbm=40GiB", "--tier", f"dram={size}:0.3")["tiers"][1]
        gain = other["saved_month"] - other["cost_month"]
        check(gain <= dram["best_gain_month"] + 1e-6, (size, gain, dram))
        check(size != dram["best_bytes"] or abs(gain - dram["best_gain_month"]) < 0.01, (size, gain, dram))
    sampled = figures("--samples", 8192)
    check(sampled["sampled_share"] < 0.5, sampled["sampled_share"])
    near = {p["bytes"]: p["hit_rate"] for p in sampled["curve"]}
    worst = max(abs(near[p["bytes"]] - p["hit_rate"]) for p in r["curve"] if p["bytes"] in near)
    check(worst < 0.03, worst)


def test_report_and_picture():
    with tempfile.TemporaryDirectory() as folder:
        svg = pathlib.Path(folder) / "curve.svg"
        out = advise("--gpu-hour", 2.5, "--tier", "h<b>m=40GiB", "--tier", "dram=1TiB:0.5", "--svg", svg)
        for text in ("knee:", "hit rate", "next GiB", "best size", "dram", "an hour"):
            check(text in out, text)
        check(all(len(row) <= 120 for row in out.splitlines()), out)
        texts = [node.text for node in xml.etree.ElementTree.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}text")]
        check(any(text.startswith("h<b>m ") for text in texts) and any(text.startswith("knee ") for text in texts), texts)
        # A trace without times has no rates; one block has a curve, too.
        out = advise("--svg", svg, "-", stdin=line(0, [5]) + line(0, [5]))
        check("in all" in out and "an hour" not in out, out)
        xml.etree.ElementTree.fromstring(svg.read_text())


def test_bad_input():
    for tier in ("dram", "=1GiB", "dram=", "dram=x", "dram=1GiB:x", "dram=1GiB:", "n" * 40 + "=1GiB", "d=2000000TiB"):
        check(tier[:20] in advise("--tier", tier, status=2), tier)
    check("two tiers" in advise("--tier", "a=1", "--tier", "a=2", status=2), "two of a name")
    check("16 tiers" in advise(*[f"--tier=t{i}=1" for i in range(17)], status=2), "too many")
    check("one trace" in advise("a", "b", status=2), "two traces")
    check("No such file" in advise("/nowhere/trace", status=1), "no trace")
    check("-:2:" in advise("-", stdin=line(0, [1]) + "nonsense\n", status=1), "not a trace")
    check("can't write" in advise("--svg", "/nowhere/x.svg", "-", stdin=line(0, [1]), status=1), "a folder that isn't there")
    equal(figures("-", stdin=line(0, [1]))["curve"], [], "nothing is ever found again")
    advise("-", stdin=line(0, [1]))


if __name__ == "__main__":
    run(globals())
