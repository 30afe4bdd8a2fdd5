# SPDX-License-Identifier: Apache-2.0
"""Our msgpack against another implementation: what it writes we read, what we write equals what it writes."""
import os
import random
import struct
import subprocess

from kvtest import BUILD, check, equal, msgpack, run

SEED = int(os.environ.get("KV_TEST_SEED") or random.randrange(2**32))
TOOL = BUILD / "tests" / "test-base-msgpack"


def transcode(data):
    """The values in @data, written anew by our writer; None when our reader refuses them."""
    done = subprocess.run([TOOL, "transcode"], input=data, capture_output=True, timeout=60, check=False)
    check(done.returncode in (0, 1), f"the tool ended with {done.returncode}: {done.stderr[-500:]!r}")
    return done.stdout if done.returncode == 0 else None


def some_int(rng):
    bits = rng.choice([0, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63])
    value = min(max((1 << bits) + rng.randint(-2, 2), 0), 2**63 - 1)
    return rng.choice([value, -value, rng.randrange(2**63, 2**64), -(2**63), rng.randrange(200)])


def some_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 5 else 7)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return some_int(rng)
    if kind == 3:
        return rng.choice([0.0, -1.5, 1e300, float("inf"), rng.random()])
    if kind == 4:
        return "é" * rng.choice([0, 1, 15, 16, 127, 128, 40000]) if rng.random() < 0.2 else str(rng.random())
    if kind in (5, 6):
        return rng.randbytes(rng.choice([0, 1, 8, 32, 255, 256, 70000]) if rng.random() < 0.2 else 16)
    if kind == 7:
        return [some_value(rng, depth + 1) for _ in range(rng.choice([0, 3, 15, 16, 40]))]
    return {str(i): some_value(rng, depth + 1) for i in range(rng.choice([0, 3, 15, 16, 40]))}


def long_forms(value, rng):
    """@value with every length and width chosen at random among those that fit."""
    def head(n, fix, limit, codes):
        forms = [bytes([fix | n])] if n < limit else []
        forms += [bytes([code]) + n.to_bytes(width, "big") for code, width in codes if n < 1 << (8 * width)]
        return rng.choice(forms)

    if value is None or isinstance(value, (bool, float)):
        return msgpack.packb(value)
    if isinstance(value, int):
        forms = [msgpack.packb(value)]
        for code, form in zip(range(0xCC, 0xD4), ">B >H >I >Q >b >h >i >q".split()):
            try:
                forms.append(bytes([code]) + struct.pack(form, value))
            except struct.error:
                pass
        return rng.choice(forms)
    if isinstance(value, str):
        data = value.encode()
        return head(len(data), 0xA0, 32, [(0xD9, 1), (0xDA, 2), (0xDB, 4)]) + data
    if isinstance(value, bytes):
        return head(len(value), 0, 0, [(0xC4, 1), (0xC5, 2), (0xC6, 4)]) + value
    if isinstance(value, list):
        return head(len(value), 0x90, 16, [(0xDC, 2), (0xDD, 4)]) + b"".join(long_forms(v, rng) for v in value)
    items = b"".join(long_forms(k, rng) + long_forms(v, rng) for k, v in value.items())
    return head(len(value), 0x80, 16, [(0xDE, 2), (0xDF, 4)]) + items


def test_same_values_same_bytes():
    rng = random.Random(SEED)
    for _ in range(12):
        values = [some_value(rng) for _ in range(30)]
        wanted = b"".join(msgpack.packb(v) for v in values)
        equal(transcode(wanted), wanted, f"shortest forms, seed {SEED}")
        equal(transcode(b"".join(long_forms(v, rng) for v in values)), wanted, f"any forms, seed {SEED}")


def test_float32():
    equal(transcode(b"\xca" + struct.pack(">f", 0.1)), msgpack.packb(struct.unpack(">f", struct.pack(">f", 0.1))[0]))


def test_cut_short():
    """The other reader wants more bytes; ours refuses."""
    rng = random.Random(SEED + 1)
    for _ in range(30):
        data = msgpack.packb([some_value(rng, 3), "end"])
        cut = rng.randrange(1, len(data))
        equal(transcode(data[:cut]), None, f"cut at {cut} of {len(data)}, seed {SEED}")


if __name__ == "__main__":
    run(globals())
