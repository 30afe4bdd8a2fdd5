# SPDX-License-Identifier: Apache-2.0
"""kvasir replay, the whole system: engine workers with real bytes in real tiers, a real kv-indexer, faults, and its report.

All sizes are small: K/V of the shape "tiny" (512 bytes a token), tiers of some dozens of blocks, so that blocks move all the time.
"""
import html.parser
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
REQUESTS = 20 if SANITIZED else 60
TIMES = int(os.environ.get("KV_TEST_TIMES", "1"))  # of each fault; the test with label long has 20
SMALL = {"model": "tiny", "g1": "512KiB", "g2": "1MiB", "g3": "2MiB", "requests": REQUESTS, "freeze-time": "300ms",
         "settle": f"{patience(60)}s", "duration": f"{patience(120)}s"}


def words(options):
    """Options as words of a command line; those named here are in place of the small ones."""
    options = SMALL | {name.replace("_", "-"): value for name, value in options.items()}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def whole(*args, status=0, **options):
    """Run it; returns (report, standard output and error)."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [KVASIR, "replay", "--quiet", "--json", str(report), *words(options), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(240), check=False)
        equal(done.returncode, status, f"{' '.join(command)}: status\n{done.stdout}\n{done.stderr}\n")
        return (json.loads(report.read_text()) if report.exists() else None), done.stdout + done.stderr


def good(r, requests=2 * REQUESTS, workers=4):
    """What holds of every run that passed."""
    check(r["passed"] and r["books"]["done"] and r["books"]["equal"], f"{r['books']}")
    equal((r["requests_failed"], r["rows_wrong"]), (0, 0), "failed requests, rows wrong")
    check(r["requests"] == requests or (r["requests"] > requests and sum(r["faults"].values())), f"requests: {r['requests']}")
    equal(r["options"]["workers"], workers, "workers")
    equal(sum(r["blocks_from"].values()), r["blocks"], "blocks by source")
    check(0 <= r["ttft_saved_ms"] <= r["hit_ms"] <= r["ttft_without_ms"] and r["slow_loads"] <= r["requests"], f"TTFT: {r['ttft_saved_ms']}")
    check(0 < r["bytes_verified"] <= r["bytes"]["kvx_gather"], "bytes")
    equal(r["books"]["indexer_lacks"] + r["books"]["indexer_extra"] + r["books"]["store_lacks"], 0, "differences")
    return r


def test_one_worker_one_prompt():
    r, out = whole(workers=1, requests=1, rounds=1, steps=2)
    good(r, 1, 1)
    block = r["options"]["block_bytes"]
    equal(r["blocks_from"]["computed"], r["blocks"], "computed blocks")
    equal(r["bytes"]["kvx_write"], r["blocks"] * block + 2 * block // 16, "bytes written: the prompt and two tokens")
    equal(r["bytes_verified"], 2 * r["blocks"] * block + 3 * block // 16, "bytes compared: two steps")
    check("every byte right" in out, out)


def test_blocks_come_from_everywhere():
    """Two rounds through tiers that are smaller than one: the second finds blocks in each place."""
    for peers in ("shm", "tcp"):
        r = good(whole(peers=peers, requests=2 * REQUESTS)[0], 4 * REQUESTS)
        found = r["blocks_from"]
        check(all(found[place] > 0 for place in ("g1", "g3", "peers")), f"{peers}: {found}")
        check(r["books"]["stored"] > 0 and r["bytes"]["to_g3"] > 0 and r["bytes"]["from_peers"] > 0, f"{r['bytes']}")
    r = good(whole(peers="off")[0])
    equal(r["blocks_from"]["peers"], 0, "blocks of peers without peers")


def test_cold_prefixes_come_from_the_store():
    """Workers without a disk, which are new in a second run: what is found first is in the store alone."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"g3": 0, "dir": f"{folder}/run", "rounds": 1, "peers": "off"}
        good(whole(**options)[0], REQUESTS)
        r = good(whole(**options)[0], REQUESTS)
        check(r["blocks_from"]["g4"] > 0 and r["bytes"]["from_g4"] > 0, f"{r['blocks_from']}")


def test_shapes_and_policies():
    big = {"g1": "96MiB", "g2": "96MiB", "g3": "64MiB", "requests": 4, "workers": 2, "steps": 1, "max_tokens": 64}
    for model in ("llama-3-8b", "llama-3-70b", "deepseek-v3", "qwen3-8b"):
        good(whole(model=model, **big)[0], 8, 2)
    r = good(whole(model="gpt-oss-20b", **big)[0], 8, 2)
    check(r["books"]["window_copies"] > 0, f"{r['books']}")
    for policy in ("round-robin", "least"):
        good(whole(policy=policy)[0])


def test_windows():
    """Every other layer sees 128 tokens alone: its blocks are a second group, whose copies the store must have, too."""
    options = {"model": "tiny-window", "max_tokens": 512}
    r = good(whole("--kill", "worker", times=2, **options)[0])
    check(all(r["blocks_from"][place] > 0 for place in ("g1", "g3", "peers")), f"{r['blocks_from']}")
    equal((r["books"]["window_copies"] > 0, r["faults"]["kill worker"]), (True, 2), "copies of windows, faults")


def bad_bytes(flip, **options):
    """A run, bytes flipped in its folder, a run that finds them: misses, and not one wrong byte."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "run"
        options |= {"dir": place, "rounds": 1, "peers": "off"}
        good(whole(**options)[0], REQUESTS)
        flip(place)
        return good(whole(**options)[0], REQUESTS)


def flip_all(paths, step):
    paths = [path for path in paths if path.is_file()]
    check(paths, "no files to flip a bit in")
    for path in paths:
        with open(path, "r+b") as file:
            for at in range(step // 2, os.path.getsize(path), step):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def test_a_flipped_byte_on_disk_is_a_miss():
    r = bad_bytes(lambda place: flip_all(place.glob("disk-*/*.slots*"), 8192), store="none")
    check(r["bad"]["disk"] > 0, f"nothing bad was found: {r['bad']}")


def test_a_flipped_byte_in_the_store_is_a_miss():
    r = bad_bytes(lambda place: flip_all((place / "store").glob("chunks/*/*"), 4096), g3=0)
    check(r["bad"]["store"] > 0, f"nothing bad was found: {r['bad']}")


def test_the_comparison_sees_one_flipped_byte():
    """In gathered memory, and in the host tier, whose blocks have no checksum: the run fails and says where."""
    for flip in ("gathered", "host"):
        r, out = whole("--flip", flip, status=1)
        check(not r["passed"] and r["rows_wrong"] > 0 and r["books"]["equal"], f"{flip}: {r['rows_wrong']}")
        check("rows WRONG" in out and "layer 0, K, token 0" in out, out)


def fault(name, *args, **options):
    requests = REQUESTS * min(TIMES, 5)
    r = good(whole(*args, times=TIMES, requests=requests, **options)[0], 2 * requests)
    equal(r["faults"][name], TIMES, f"{name}: injected")
    return r


def test_killed_worker():
    fault("kill worker", "--kill", "worker")


def test_killed_workers_and_indexers():
    """What lies behind blocks that a worker found on its disk is hidden by an indexer that was started again."""
    r = good(whole("--kill", "worker,indexer", times=3)[0])
    equal((r["faults"]["kill worker"], r["faults"]["kill indexer"]), (3, 3), "faults")


def test_frozen_worker():
    fault("freeze worker", "--freeze", "worker")


def test_killed_indexer():
    fault("kill indexer", "--kill", "indexer")


def test_frozen_indexer():
    fault("freeze indexer", "--freeze", "indexer")


def test_full_disk():
    r = fault("full disk", "--full-disk")
    equal(r["full_disk"], "EFBIG" if r["no_small_disk"] else "ENOSPC", "error of a full disk")
    if not SANITIZED and subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode == 0:
        equal(r["full_disk"], "ENOSPC", r["no_small_disk"])
    with tempfile.TemporaryDirectory() as folder:
        r = good(whole("--full-disk", dir=f"{folder}/run", times=TIMES)[0])
        equal((r["full_disk"], r["no_small_disk"]), ("EFBIG", "--dir is kept"), "with --dir")


def test_killed_store():
    if not any(map(shutil.which, ("redis-server", "valkey-server", "redis-check-rdb"))):
        skip("redis-server is missing (package redis-tools)")
    r = fault("kill store", "--kill", "store", store="redis")
    check(r["books"]["stored"] > 0, "nothing in the store")


def test_nats():
    if not shutil.which("nats-server"):
        skip("nats-server is missing (package nats-server)")
    r = fault("kill nats", "--nats", "--kill", "nats")
    check(r["books"]["nats"] and r["books"]["nats_lacks"] + r["books"]["nats_extra"] == 0, f"{r['books']}")


def test_all_faults_together():
    r = good(whole("--kill", "worker,indexer", "--freeze", "worker,indexer", "--full-disk")[0])
    equal(sum(r["faults"].values()), 5, "faults")


class Figures(html.parser.HTMLParser):
    """The <data> elements of a page, its JSON, and the addresses that it names."""

    def __init__(self, text):
        super().__init__()
        self.data, self.addresses, self.json, self.plots, self.points = [], [], "", 0, []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "data":
            self.data.append((attrs["data-of"], float(attrs["value"])))
        self.addresses += [attrs[name] for name in ("src", "href") if name in attrs]
        self.plots += tag == "svg"
        if tag == "polyline":
            self.points.append(attrs["points"].split())
        self.inside = tag == "script"

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.json += data


def member(r, path):
    for word in path.split("."):
        r = r[word]
    return float(r)


def test_page():
    """It has the figures of --json, loads nothing, and a trace's name stays text."""
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "<img src=x onerror=alert(1)>.jsonl"
        trace.write_text("".join('{"timestamp": %d, "input_length": 1024, "output_length": 1, "hash_ids": [%d, %d]}\n' % (i, i % 3, i)
                                 for i in range(30)))
        page = pathlib.Path(folder) / "page.html"
        r, _ = whole("--html", page, trace)
        text = page.read_text()
    good(r)
    figures = Figures(text)
    check(len(figures.data) >= 20, f"only {len(figures.data)} figures")
    for path, value in figures.data:
        equal(value, member(r, path), path)
    equal(json.loads(figures.json), r, "JSON in the page")
    equal(figures.plots, 6, "plots")
    check(max(map(len, figures.points)) == len(r["samples"]) > 0, "points of a plot")
    check(not figures.addresses and "<img" not in text and "url(" not in text and "@import" not in text, "the page loads something")
    check("prefers-color-scheme:dark" in text, "no dark form")
    last = r["samples"][-1]
    equal((last["requests"], last["blocks_from"], last["bytes_verified"]), (r["requests"], r["blocks_from"], r["bytes_verified"]), "last sample")


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def begun(folder, *args, **options):
    """A long run that has begun to serve: (process, its children)."""
    process = subprocess.Popen([KVASIR, "replay", "--quiet", *words({"requests": 100000, "duration": "10m"} | options), *args],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, TMPDIR=folder))
    try:
        wait_until(lambda: list(pathlib.Path(folder).glob("kvasir-replay-*/store/chunks/*/*")), 60, "the run's first blocks")
    except BaseException:
        process.kill()
        raise
    return process, children(process.pid)


def test_nothing_is_left():
    """After ^C, and after kill -9 of the replay: no process and no file."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with tempfile.TemporaryDirectory() as folder:
            process, pids = begun(folder)
            try:
                check(len(pids) >= 6, f"children: {pids}")  # four workers, the indexer, the janitor
                process.send_signal(number)
                out = process.communicate(timeout=patience(60))[0]
            finally:
                process.kill()
                process.wait()
            equal(process.returncode, 130 if number == signal.SIGINT else -9, "status")
            check(number == signal.SIGKILL or "interrupted" in out, out)
            wait_until(lambda: all(map(is_gone, pids)), patience(30), "the children's end")
            wait_until(lambda: not os.listdir(folder), patience(30), "an empty folder")


def workers_of(pids):
    return [pid for pid in pids if pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0--worker\0")]


def test_interrupted_while_a_worker_is_frozen():
    with tempfile.TemporaryDirectory() as folder:
        process, pids = begun(folder, "--freeze", "worker", times=1000, freeze_time="10m", duration="30s")
        try:
            state = lambda pid: pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            wait_until(lambda: "T" in map(state, workers_of(pids)), patience(60), "a frozen worker")
            process.send_signal(signal.SIGINT)
            out = process.communicate(timeout=patience(60))[0]
        finally:
            process.kill()
            process.wait()
        check(process.returncode == 130 and "interrupted" in out, f"{process.returncode}: {out}")


def test_a_worker_that_dies_by_itself_fails_the_run():
    with tempfile.TemporaryDirectory() as folder:
        process, pids = begun(folder)
        try:
            os.kill(workers_of(pids)[1], signal.SIGSEGV)
            out = process.communicate(timeout=patience(60))[1]
        finally:
            process.kill()
            process.wait()
        check(process.returncode == 1 and "worker 1 ended by itself" in out, f"{process.returncode}: {out}")


def test_a_worker_that_hangs_fails_the_run():
    """Stopped from outside it looks as one that deadlocks: named, with its last stage, and ended."""
    with tempfile.TemporaryDirectory() as folder:
        process, pids = begun(folder, workers=1, watchdog="15s" if SANITIZED else "4s")
        worker, = workers_of(pids)
        try:
            os.kill(worker, signal.SIGSTOP)
            out = process.communicate(timeout=patience(60))[1]
        finally:
            process.kill()
            process.wait()
        check(process.returncode == 1 and "worker 0 hung" in out and "Its last stage: " in out, f"{process.returncode}: {out}")
        check(is_gone(worker), "the worker still runs")
        wait_until(lambda: not os.listdir(folder), patience(30), "an empty folder")


def test_a_folder_of_another_workload():
    """Named by a relative path; what the store has of an earlier run with other prompts is no difference."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in (1, 2):
            good(whole(dir=os.path.relpath(f"{folder}/run"), rounds=1, seed=seed)[0], REQUESTS)


def test_bad_command_lines():
    for args, word in ((["--kill", "cat"], "cat"), (["--kill", "store"], "--store redis"), (["--kill", "nats"], "--nats"),
                       (["--per-id", "48"], "--per-id"), (["--g1", "1KiB"], "--g1"), (["a", "b"], "one trace"), (["--model", "x"], "x")):
        done = subprocess.run([KVASIR, "replay", *args], capture_output=True, text=True, timeout=patience(30), check=False)
        equal(done.returncode, 2, f"{args}: status\n{done.stderr}")
        check(word in done.stderr, f"{args}: {done.stderr}")
    done = subprocess.run([KVASIR, "replay", "/nonexistent"], capture_output=True, text=True, timeout=patience(30), check=False)
    equal(done.returncode, 1, "status without the trace")


if __name__ == "__main__":
    run(globals())
