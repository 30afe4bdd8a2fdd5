# SPDX-License-Identifier: Apache-2.0
"""The router of docs/scale.md, which asks several indexers that follow a share of the workers each."""
import re
import sys

from kvpython import SOURCE, check, run  # first: it finds the package

sys.path.insert(0, str(SOURCE / "tests" / "e2e"))
from kvtest import Indexer, Publisher, free_port, wait_until  # noqa: E402 pylint: disable=wrong-import-position,wrong-import-order

PAGE = (SOURCE / "docs/scale.md").read_text(encoding="utf-8")
TOKENS = list(range(64))


def router():
    code, = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    names = {}
    exec(compile(code, "docs/scale.md", "exec"), names)  # pylint: disable=exec-used
    return names["query"]


def test_two_shares():
    query = router()
    with Indexer() as first, Indexer() as second, Publisher() as one, Publisher() as two, Publisher() as three:
        for indexer, publisher, worker in ((first, one, 1), (second, two, 2), (second, three, 3)):
            indexer.register(worker, publisher.endpoint, model_name="m")
            publisher.wait_subscriber()
        one.store([1, 2], TOKENS[:32])
        two.store([1, 2, 3, 4], TOKENS)
        three.store([9], list(range(100, 116)))
        wanted = {"1": {"0": 32}, "2": {"0": 64}}
        urls = [first.url, second.url]
        wait_until(lambda: query(urls, TOKENS, "m")[0] == wanted, 30, f"{wanted}, not {query(urls, TOKENS, 'm')}")
        scores, parts = query([*urls, f"http://127.0.0.1:{free_port()}"], TOKENS, "m")
        check(scores == wanted and parts[2] is None and parts[0] == {"1": {"0": 32}}, (scores, parts))


if __name__ == "__main__":
    run(globals())
