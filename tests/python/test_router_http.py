# SPDX-License-Identifier: Apache-2.0
"""The router's heads and chunks beside a strict reader of HTTP/1.1, on random messages and on damaged ones.

What the router takes, the strict reader takes with the same body and the same rest behind it; what that refuses, the router refuses.
"""
import asyncio
import os
import random
import re
import time

import h11

from kvpython import check, equal, run  # first: it finds the package
import kvasir._http
from kvasir._http import HEAD_MAX, Wire

CASES = max(1, 6000 * int(os.environ.get("KV_TEST_SCALE", "100")) // 100)
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
FIELD = re.compile(rb"(%b):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*" % TOKEN)
FIRST = {h11.SERVER: re.compile(rb"%b [!-~]+ HTTP/1\.[01]" % TOKEN),
         h11.CLIENT: re.compile(rb"HTTP/1\.[01] [0-9]{3}( [^\x00-\x08\x0a-\x1f\x7f]*)?")}
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,20})(;[^\n]*)?[ \t]*")


class Odd(Exception):
    """What the strict reader refuses."""


class Short(Exception):
    """A message that isn't there to its end."""


def strict(data, role):
    """(fields, body, rest): the model, written from RFC 9112 without a thought for speed."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        raise Short
    first, *lines = head.split(b"\r\n")
    fields = [FIELD.fullmatch(line) for line in lines]
    if not FIRST[role].fullmatch(first) or None in fields:
        raise Odd
    named = [(field[1].lower(), field[2]) for field in fields]
    lengths, coded, hosts = ([value for name, value in named if name == wanted] for wanted in (b"content-length", b"transfer-encoding", b"host"))
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,18}", lengths[0])):
        raise Odd
    if coded and (lengths or len(coded) > 1 or coded[0].lower() != b"chunked" or b"HTTP/1.1" not in first):
        raise Odd
    if role is h11.SERVER and (len(hosts) > 1 or (not hosts and first.endswith(b"1.1"))):
        raise Odd
    if role is h11.CLIENT:
        status = int(first.split(b" ")[1])
        if status < 200:
            raise Odd  # none is sent here
        if status in (204, 304):
            return named, b"", rest
        if not coded and not lengths:
            return named, rest, b""
    if not coded:
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            raise Short
        return named, rest[:length], rest[length:]
    return named, *chunks(rest)


def chunks(data):
    body = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        found = CHUNK.fullmatch(line)
        if not end:
            raise Short
        if not found:
            raise Odd
        size = int(found[1], 16)
        if size == 0:
            break
        if len(data) < size + 2:
            raise Odd if data[size:] not in (b"", b"\r") else Short
        if data[size:size + 2] != b"\r\n":
            raise Odd
        body, data = body + data[:size], data[size + 2:]
    while True:  # trailers; h11 takes a bare LF at their ends, as RFC 9112 2.2 lets it
        line, end, data = data.partition(b"\n")
        if not end:
            raise Short
        line = line[:-1] if line.endswith(b"\r") else line
        if not line:
            return body, data
        if not re.match(rb"%b:" % TOKEN, line) and line[:1] not in b" \t":
            raise Odd


async def read(data, role, cuts):
    """What the router makes of @data that comes in pieces of these lengths."""
    reader = asyncio.StreamReader()
    state = h11.Connection(role, max_incomplete_event_size=HEAD_MAX)
    if role is h11.CLIENT:
        state.send(h11.Request(method="GET", target="/", headers=[(b"host", b"a")]))
        state.send(h11.EndOfMessage())

    async def feed():
        at = 0
        for cut in cuts:
            reader.feed_data(data[at:at + cut]) if data[at:at + cut] else None
            at += cut
            await asyncio.sleep(0)
        reader.feed_data(data[at:]) if data[at:] else None
        reader.feed_eof()

    feeder = asyncio.ensure_future(feed())
    wire = Wire(reader, None)
    try:
        head = await wire.head(state)
        body = b"".join([piece async for piece in wire.body(state)])
        await feeder
        while await wire.more():
            pass
        return list(head.headers), body, bytes(wire.left)
    finally:
        await feeder


def message(rng, role):
    """A sound message, and one more behind it."""
    body = rng.randbytes(rng.choice((0, 0, 1, 5, 17, 300, 40000 if rng.random() < 0.02 else 9)))
    head = [b"POST /v1/x?y=%d HTTP/1.1" % rng.randrange(9), b"Host: a:1"] if role is h11.SERVER else [b"HTTP/1.1 %d OK" % rng.choice((200, 200, 404, 204))]
    for _ in range(rng.randrange(4)):
        head.append(b"x-%d:%b%b" % (rng.randrange(9), rng.choice((b"", b" ", b" \t")), rng.choice((b"", b"a", b"b, c;d=\"e\"", b"\xe4\xf6", b"a\tb"))))
    if rng.random() < 0.5:
        head.append(rng.choice((b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED")))
        data, coded = body, b""
        while data:
            n = rng.randrange(1, len(data) + 1)
            coded += b"%b%b\r\n%b\r\n" % (rng.choice((b"%x", b"%X", b"0%x")) % n, rng.choice((b"", b"", b";a=b")), data[:n])
            data = data[n:]
        body = coded + b"0\r\n" + rng.choice((b"", b"", b"t: u\r\n")) + b"\r\n"
    elif body or rng.random() < 0.5:
        head.append(b"%b: %d" % (rng.choice((b"Content-Length", b"content-length")), len(body)))
    head[1:] = rng.sample(head[1:], len(head) - 1)
    return b"\r\n".join(head) + b"\r\n\r\n" + body + rng.choice((b"", b"", b"GET / HTTP/1.1\r\nHost: b\r\n\r\n", b"\r\n"))


HOSTILE = (b"\t", b"\n", b"\r", b"\0", b" ", b"\x0b", b"\x7f", b"-", b"+", b"_", b"0x", b",", b";", b":", b"\r\n", b"\r\n\r\n", b"\n\n", b"\r\n ",
           b"\r\nContent-Length: 5", b"\r\nContent-Length: 0", b"\r\nTransfer-Encoding: chunked", b"\r\ntransfer-encoding: identity",
           b"\r\nTransfer-Encoding : chunked", b"\r\nHost: c", b"-5\r\n", b"ffffffffffffffffffff\r\n", b"\r\nContent-Length: 5, 5", b"1.0", b"chunked, ")


def damage(rng, data):
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(min(len(data), 400) + 1)
        kind = rng.randrange(6)
        if kind <= 1:
            data = data[:at] + rng.choice(HOSTILE) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + rng.choice((1, 1, 2, 7)):]
        elif kind == 3:
            data = data[:at] + rng.randbytes(1) + data[at + 1:]
        elif kind == 4:  # before the end of a line: where lengths and sizes are
            ends = [found.start() for found in re.finditer(b"\r\n", data)]
            at = rng.choice(ends) if ends else at
            data = data[:at] + rng.choice(HOSTILE) + data[at:]
        else:
            data = data[:at]
    return data


def expected(data, role):
    try:
        return strict(data, role)
    except (Odd, Short) as why:
        return type(why)


async def one(data, role, cuts):
    wanted = expected(data, role)
    try:
        got = await asyncio.wait_for(read(data, role, cuts), 600)
    except (h11.RemoteProtocolError, EOFError):
        got = None
    if isinstance(wanted, type):
        equal(got, None, f"the strict reader's word is {wanted.__name__}: {data[:300]!r}")
        return 0
    if got is None:
        return 1  # stricter than the model: sound to refuse; test_sound_messages asks for the sound ones
    equal(got[1:], wanted[1:], f"body and rest of {data[:300]!r}")
    names = [name for name, _ in wanted[0]]
    equal([name for name, _ in got[0]], names, f"fields of {data[:300]!r}")
    return 2


def cases(kind, seed):
    async def all_of_them():
        counts, begun = [0, 0, 0], time.monotonic()
        for number in range(CASES):
            rng = random.Random(f"{kind} {seed} {number}")
            role = rng.choice((h11.SERVER, h11.CLIENT))
            data = message(rng, role)
            if kind == "damaged":
                data = damage(rng, data)
            elif kind == "noise":
                data = rng.randbytes(rng.randrange(200)) + rng.choice(HOSTILE) * rng.randrange(3)
            cuts = [rng.choice((1, 2, 30, 500)) for _ in range(rng.choice((0, 0, 1, 8)))]
            counts[await one(data, role, cuts)] += 1
        spent = time.monotonic() - begun
        print(f"{kind}, seed {seed}: {counts[2]} read, {counts[0]} refused by both, {counts[1]} by the router alone; {CASES / spent:.0f} a second")
        return counts

    return asyncio.run(all_of_them())


SEED = int(os.environ.get("KV_TEST_SEED", "32"))


def test_sound_messages():
    """Each one is read, however it is cut into pieces."""
    refused, alone, _ = cases("sound", SEED)
    equal((refused, alone), (0, 0), "sound messages that are refused")


def test_damaged_messages():
    refused, alone, taken = cases("damaged", SEED)
    check(refused > CASES // 10 and taken > CASES // 10, "the damage reaches both sides of the line")
    check(alone < CASES // 20, f"{alone} are refused that the strict reader takes")


def test_noise():
    cases("noise", SEED)


def test_a_long_head_is_refused():
    for data, status in ((b"GET /" + b"x" * (2 * HEAD_MAX), 431), (b"\x16\x03\x01" + bytes(60), 400)):
        try:
            asyncio.run(read(data, h11.SERVER, [1000] * 20))
        except h11.RemoteProtocolError as problem:
            equal(problem.error_status_hint, status, "status")
        else:
            check(False, "taken")


def test_others_run_while_tiny_chunks_are_read():
    """A body in chunks of one byte: the reader lets others run after each PIECE of it."""
    async def both():
        turns, done = 0, False

        async def other():
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        data = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50000 + b"0\r\n\r\n"
        _, body, _ = await read(data, h11.SERVER, [])
        done = True
        await task
        return turns, len(body), len(data)

    turns, body, sent = asyncio.run(both())
    equal(body, 50000, "bytes of the body")
    check(turns >= sent // kvasir._http.PIECE, f"{turns} turns of others")


if __name__ == "__main__":
    run(globals())
