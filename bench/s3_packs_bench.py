# SPDX-License-Identifier: Apache-2.0
"""A prompt of 256 chunks of 64 KiB from a bucket, packed and chunk by chunk in today's batches: time and requests.

    KV_BUILD_DIR=build python3 -B bench/s3_packs_bench.py [MILLISECONDS ...]

The server is the tests' (tests/e2e/s3_double.py), which answers so much later (5 and 20 ms), as a bucket at that distance does. What is
measured is `kvasir bench tiered --member`; one JSON line for each distance.
"""
import json
import subprocess
import sys

from s3_requests_bench import BUILD, Late, environment, s3_double
from s3_double import S3


def main():
    s3_double.Handler = Late
    for late_ms in [float(word) for word in sys.argv[1:]] or [5, 20]:
        Late.late_s = late_ms / 1000
        with S3() as s3:
            done = subprocess.run([str(BUILD / "bin" / "kvasir"), "bench", "tiered", "--member", s3.uri(), "--json"], check=True, text=True,
                                  env=environment(), stdout=subprocess.PIPE)
            left = s3.keys()
        found = json.loads(done.stdout)
        print(json.dumps({"figure": "s3 prompt from packs", "late_ms": late_ms, "of_time": round(found["packed_ms"] / found["singly_ms"], 3),
                          "of_requests": round(found["packed_requests"] / found["singly_requests"], 4), "left": left, **found}), flush=True)


if __name__ == "__main__":
    main()
