# SPDX-License-Identifier: Apache-2.0
"""Requests and time of a save into a bucket, by method: what S3's looks before and behind each put cost.

    KV_BUILD_DIR=build python3 -B bench/s3_requests_bench.py [PLUGIN FOLDER ...]

The server is the tests' (tests/e2e/s3_double.py), which answers a stated time late, as a bucket at that distance does. Each folder names
another build of libkv_store_s3.so, measured in turn with the tree's own. One JSON line per figure; medians of 5 saves into empty buckets.
"""
import collections
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from kvtest import BUILD  # noqa: E402
import s3_double  # noqa: E402
from s3_double import S3, environment  # noqa: E402

CHUNKS, CHUNK, ROUNDS = 256, 64 << 10, 5


class Late(s3_double.Handler):
    """Answers late: all requests of a connection wait in turn, those of others don't."""
    late_s = 0.0

    def handle_one(self):
        time.sleep(self.late_s)
        super().handle_one()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one


def save(folder, data, late_s):
    """Save @data into a new bucket; returns seconds and requests by method."""
    Late.late_s = late_s
    with S3() as s3:
        begun = time.monotonic()
        subprocess.run([str(BUILD / "bin" / "kvasir"), "store", "save", s3.uri(), "object", data, "--chunk", str(CHUNK), "--quiet"], check=True,
                       env={**environment(), "KV_STORE_LIBRARY_PATH": folder}, stdout=subprocess.DEVNULL)
        return time.monotonic() - begun, collections.Counter(line.split()[0] for line in s3.requests())


def main():
    s3_double.Handler = Late
    folders = [str(BUILD / "lib"), *sys.argv[1:]]
    with tempfile.NamedTemporaryFile() as file:
        file.write(random.Random(1).randbytes(CHUNKS * CHUNK))
        file.flush()
        for late_ms in (0, 5, 20):
            times = {folder: [] for folder in folders}
            for _ in range(ROUNDS):
                for folder in folders:
                    seconds, requests = save(folder, file.name, late_ms / 1000)
                    times[folder].append((seconds, requests))
            for folder in folders:
                print(json.dumps({"figure": "s3 save", "plugin": folder, "chunk_bytes": CHUNK, "late_ms": late_ms, "connections": 16,
                                  "seconds": round(statistics.median(seconds for seconds, _ in times[folder]), 3),
                                  "chunks": times[folder][-1][1]["PUT"] - 1, "requests": dict(times[folder][-1][1])}), flush=True)


if __name__ == "__main__":
    main()
