#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The web page of kv-indexer: time until it is shown in a headless Chromium, and the CPU of kv-indexer while it is open.

    page_bench.py [N]...      workers; 64 and 10000 by default, as many of them as descriptors have room for
                              KV_BUILD_DIR: a build elsewhere

shown      milliseconds from the navigation until all figures and the first page of workers are on the page; the charts follow.
           Median and best of several loads; first_paint_ms: until anything is
answers    milliseconds of each request that the page makes, and of /explain with a prompt of 1,000 blocks; the best of 20
open       CPU of kv-indexer in percent of a core while the page is open, and without it

One JSON line per figure. Up to 64 workers have an event stream that publishes once a second; more are registered with an
endpoint where nobody answers, which costs kv-indexer its retries.
"""
import json
import os
import pathlib
import statistics
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from browser import Browser  # noqa: E402 pylint: disable=wrong-import-position
from kvtest import MODEL, Indexer, Publisher  # noqa: E402 pylint: disable=wrong-import-position

LOADS, SECONDS, BLOCK = 11, 60, 16
SHOWN = "performance.getEntriesByName('shown')[0]?.startTime ?? 0"


def line(figure, **members):
    print(json.dumps({"bench": "page", "figure": figure, **members, "load": round(os.getloadavg()[0], 1)}), flush=True)


def register(indexer, n, publishers):
    connection = indexer.connect()
    for i in range(n):
        endpoint = publishers[i].endpoint if i < len(publishers) else "tcp://127.0.0.1:1"
        body = {"instance_id": i, "model_name": MODEL, "block_size": BLOCK, "endpoint": endpoint}
        if indexer.post("/register", body, connection=connection).status != 201:
            return i
    return n


def publish(publishers, stop):
    """A batch a second of each worker, until @stop."""
    number = 0
    while not stop.wait(1):
        number += 1
        for publisher in publishers:
            publisher.store([number], range(number, number + BLOCK))


def shown(browser, indexer, n):
    times, first = [], []
    for _ in range(LOADS):
        browser.open("about:blank")
        browser.open(indexer.url + "/")
        browser.wait(SHOWN)
        times.append(browser.run(SHOWN))
        first.append(browser.run("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"))
    line("shown", workers=n, median_ms=round(statistics.median(times)), best_ms=round(min(times)), first_paint_ms=round(statistics.median(first)))


def answers(indexer, n):
    connection, prompt = indexer.connect(), {"model_name": MODEL, "token_ids": list(range(BLOCK * 1000))}
    for path, body in (("/overview", None), ("/workers?limit=50", None), ("/history", None), ("/workers", None), ("/explain", prompt)):
        times, size = [], 0
        for _ in range(20):
            begin = time.perf_counter()
            reply = indexer.request("POST" if body else "GET", path, body, connection=connection)
            times.append(1000 * (time.perf_counter() - begin))
            size = len(reply.body)
        line("answers", workers=n, path=path, best_ms=round(min(times), 2), bytes=size)


def share(indexer):
    before, begin = indexer.cpu_seconds(), time.monotonic()
    time.sleep(SECONDS)
    return 100 * (indexer.cpu_seconds() - before) / (time.monotonic() - begin)


def measure(wanted):
    publishers = [Publisher(replay=None) for _ in range(wanted if wanted <= 64 else 0)]
    stop = threading.Event()
    feeder = threading.Thread(target=publish, args=(publishers, stop), daemon=True)
    try:
        with Indexer("--max-registrations", str(max(wanted, 64)), "--max-connections", "64") as indexer, Browser() as browser:
            n = register(indexer, wanted, publishers)
            feeder.start()
            time.sleep(6)  # all have been tried, and their first answers have come
            shown(browser, indexer, n)
            answers(indexer, n)
            opened = share(indexer)
            browser.open("about:blank")
            alone = share(indexer)
            line("open", workers=n, page_percent=round(opened - alone, 2), with_page_percent=round(opened, 2), without_percent=round(alone, 2))
    finally:
        stop.set()
        if feeder.is_alive():
            feeder.join()
        for publisher in publishers:
            publisher.close()


for count in [int(word) for word in sys.argv[1:]] or [64, 10000]:
    measure(count)
