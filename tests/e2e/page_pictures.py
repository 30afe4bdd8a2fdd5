# SPDX-License-Identifier: Apache-2.0
"""Pictures of the web page for docs/page.md: test_page.py --pictures. A minute of real events and queries, light and dark."""
import contextlib
import json
import math
import random
import struct
import time
import zlib

import numpy

from browser import Browser
from kvtest import MODEL, Indexer, Publisher

SECONDS, BLOCK = 90, 16
NAMES = ["vllm-0", "vllm-1", "vllm-2", "vllm-3", "vllm-4"]
MOST_BYTES = 150000  # of all pictures together


class Engine:
    """Prompts that share their starts, stored as they are asked for; the oldest leave for host memory, then for good."""

    def __init__(self, publisher, number):
        self.publisher, self.number, self.held = publisher, number, []

    def store(self, prompt):
        names = [hash((self.number, tuple(prompt[: BLOCK * (i + 1)]))) & (1 << 62) - 1 for i in range(len(prompt) // BLOCK)]
        self.publisher.store(names, prompt[: BLOCK * len(names)])
        self.held.append(names)
        if len(self.held) > 30:
            names = self.held[-30]
            self.publisher.send(self.publisher.stored(names, prompt_of(names), medium="CPU"), self.publisher.removed(names))
        if len(self.held) > 60:
            self.publisher.remove(self.held.pop(0), medium="CPU")


def prompt_of(names):
    return TOKENS[tuple(names)]


TOKENS = {}


def prompts(dice):
    """An endless line of prompts: one of some system prompts, then a conversation that goes on or begins."""
    starts = [[dice.randrange(50000) for _ in range(BLOCK * 12)] for _ in range(4)]
    talks = []
    while True:
        if talks and dice.random() < 0.6:
            talk = dice.choice(talks[-20:])
        else:
            talk = list(dice.choice(starts))
            talks.append(talk)
        talk += [dice.randrange(50000) for _ in range(BLOCK * dice.randint(1, 4))]
        yield list(talk)


def live(indexer, engines, seconds):
    dice = random.Random(29)
    line, end, start = prompts(dice), time.monotonic() + seconds, time.monotonic()
    last = next(line)
    while time.monotonic() < end:
        last = next(line)
        scores = indexer.query(last)["scores"]
        best = max(range(len(engines)), key=lambda i: scores.get(NAMES[i], {}).get("0", 0) + dice.random())
        engine = engines[best if dice.random() < 0.6 else dice.randrange(len(engines))]
        names = [hash((engine.number, tuple(last[: BLOCK * (i + 1)]))) & (1 << 62) - 1 for i in range(len(last) // BLOCK)]
        TOKENS[tuple(names)] = last[: BLOCK * len(names)]
        engine.store(last)
        time.sleep(0.02 + 0.018 * math.sin((time.monotonic() - start) / 9))
    return last


def rows_of(data, width, height, deep):
    """The pixels of a PNG's decompressed data, its filters undone: height × width × deep."""
    raw, stride = numpy.frombuffer(data, numpy.uint8).reshape(height, 1 + width * deep), width * deep
    pixels = numpy.zeros((height + 1, stride + deep), numpy.int32)  # with a row above and a pixel to the left
    for y in range(height):
        kind, line = raw[y, 0], raw[y, 1:].astype(numpy.int32)
        if kind in (0, 2):
            pixels[y + 1, deep:] = (line + (pixels[y, deep:] if kind == 2 else 0)) & 255
            continue
        for x in range(deep, stride + deep):
            left, up, corner = pixels[y + 1, x - deep], pixels[y, x], pixels[y, x - deep]
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
            pixels[y + 1, x] = (line[x - deep] + {1: left, 3: (left + up) // 2, 4: near}[int(kind)]) & 255
    return pixels[1:, deep:].reshape(height, width, deep).astype(numpy.uint8)


def shrink(path):
    """Write the picture with a palette of its 120 most telling colours: a third of the bytes."""
    data, chunks, at = path.read_bytes(), {}, 8
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        chunks[name] = chunks.get(name, b"") + data[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, _, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    pixels = rows_of(zlib.decompress(chunks[b"IDAT"]), width, height, {2: 3, 6: 4}[kind])[:, :, :3]
    colours, number, counts = numpy.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    vivid = 1 + (colours.max(axis=1).astype(int) - colours.min(axis=1)) // 4  # a red word has few pixels, and matters
    palette = colours[numpy.argsort(-counts * vivid)[:120]].astype(numpy.int32)
    nearest = numpy.array([numpy.argmin(((palette - colour) ** 2).sum(axis=1)) for colour in colours.astype(numpy.int32)], numpy.uint8)
    lines = nearest[number.reshape(-1)].reshape(height, width)
    body = zlib.compress(b"".join(b"\0" + line.tobytes() for line in lines), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", head), (b"PLTE", palette.astype(numpy.uint8).tobytes()), (b"IDAT", body), (b"IEND", b"")]
    path.write_bytes(data[:8] + b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts))


def make(folder):
    with contextlib.ExitStack() as stack:
        indexer = stack.enter_context(Indexer("--history-interval", "1s"))
        publishers = [stack.enter_context(Publisher()) for _ in NAMES]
        browser = stack.enter_context(Browser(1180, 860))
        for name, publisher in zip(NAMES, publishers):
            indexer.register(name, publisher)
        indexer.register("vllm-5", "tcp://127.0.0.1:1")
        engines = [Engine(publisher, number) for number, publisher in enumerate(publishers)]
        prompt = live(indexer, engines, SECONDS)
        browser.open(indexer.url + "/")
        browser.wait("document.querySelectorAll('#charts canvas').length === 8")
        browser.run("document.querySelector('#pause').click()")
        browser.command("Emulation.setScrollbarsHidden", hidden=True)
        browser.resize(1280, 900, 0.8)
        for name, scheme, selector, height in (("page-light.png", "light", "body", 760), ("page-dark.png", "dark", "#hour", None)):
            browser.scheme(scheme)
            time.sleep(1)
            browser.picture(folder / name, selector, height)
        browser.scheme("light")
        browser.type("#explain-text", json.dumps({"model": MODEL, "prompt": prompt}))
        browser.click("#explain-form button")
        browser.wait("document.querySelector('#explain-rows').rows.length === 6")
        browser.run("document.querySelector('#explain-text').scrollTop = 0")
        browser.picture(folder / "page-explain.png", "#explain", 720)
    for path in sorted(folder.glob("page-*.png")):
        shrink(path)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("page-*.png"))}
    print(sizes, sum(sizes.values()))
    assert sum(sizes.values()) < MOST_BYTES, "the pictures are too large"
