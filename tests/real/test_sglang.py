# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.23's own prefix trees and publisher, without a model: kv-indexer answers what match_prefix would."""
from sglang_engine import *

SALT64 = "0123456789abcdef" * 4
PLAIN = (
    Option("plain"),
    Option("page_1", page=1, rows=256),
    Option("page_64", page=64, rows=4096),
    Option("resets", resets=True),
    Option("small_pool", rows=256),
    Option("salts", names=(Names(), Names(salt="s"), Names(salt=SALT64))),
    Option("adapters", names=(Names(), Names(lora="a"), Names(lora="b", salt="b"))),
    Option("dynamo_format", dynamo_format=True, names=(Names(), Names(lora="a"), Names(salt=SALT64), Names(lora="a", salt="a"))),
    Option("eagle", eagle=True),
    Option("eagle_page_64", eagle=True, page=64, rows=4096),
    Option("eagle_salts", eagle=True, resets=True, names=(Names(), Names(salt="s"), Names(lora="a"))),
)
OPTIONS = [Option(**{**vars(option), "name": f"{tree}_{option.name}", "tree": tree})
           for tree in ("radix", "python", "rust") for option in PLAIN]
OPTIONS += [Option(f"{tree}_{name}", tree=tree, rows=512, host_rows=rows, eagle=eagle, names=names, resets=True)
            for tree in ("python", "rust")
            for name, rows, eagle, names in (("host", 1024, False, (Names(),)), ("host_small", 256, False, (Names(), Names(salt=SALT64))),
                                             ("host_eagle", 1024, True, (Names(),)))]
STEPS, LOOKUPS = 120, 5


def probes(engine):
    rng, page = engine.rng, engine.option.page
    for _ in range(LOOKUPS if engine.talks else 0):
        tokens, names = rng.choice(engine.talks)
        if rng.random() < 0.2:
            names = rng.choice(engine.option.names)
        cut = rng.choice((len(tokens), rng.randint(1, len(tokens)), len(tokens) // page * page))
        tail = [rng.randrange(5, 1000) for _ in range(rng.choice((0, 1, page)))]
        yield (tokens[:cut] + tail) or [7], names


def option_test(option):
    def test():
        tally = Tally("SGLang 0.5.23")
        with Indexer() as indexer:
            for seed, rng in histories(3):
                port, replay = free_port(), free_port()
                feed = Feed(indexer, 100 + seed, make_publisher(port, replay), make_batch, f"tcp://127.0.0.1:{port}", option.page,
                            f"tcp://127.0.0.1:{replay}", **dict(option.register))
                engine = Engine(option, rng)
                for step in range(STEPS):
                    for _ in range(rng.randint(1, 6)):
                        engine.step()
                    feed.publish(engine.take_events())
                    feed.settle()
                    for tokens, names in probes(engine):
                        answer = indexer.query(tokens, **question(names, tokens))["instances"].get(str(feed.instance), {})
                        for tier, truth in engine.tiers_tokens(tokens, names).items():
                            tally.add(f"{option.name} {tier}", truth, answer.get(tier, 0),
                                      f"KV_TEST_SEED={seed}, step {step}, {len(tokens)} tokens, {names}, last: {engine.story[-8:]}")
                feed.close()
        for row in list(tally.rows):
            tally.exact(row)
    return test


def silent_window_test(option):
    """The engine tells nobody what leaves its window: an answer is the most it can have, and the view is partial."""
    def test():
        longer = lookups = 0
        with Indexer() as indexer:
            for seed, rng in histories(3):
                port, replay = free_port(), free_port()
                feed = Feed(indexer, 100 + seed, make_publisher(port, replay), make_batch, f"tcp://127.0.0.1:{port}", option.page,
                            f"tcp://127.0.0.1:{replay}", silent_windows=True)
                engine = Engine(option, rng)
                for step in range(STEPS):
                    for _ in range(rng.randint(1, 6)):
                        engine.step()
                    feed.publish(engine.take_events())
                    feed.settle()
                    check(feed.listener()["partial"])
                    for tokens, names in probes(engine):
                        truth, answer = engine.cached_tokens(tokens, names), indexer.score(tokens, feed.instance)
                        check(answer >= truth, f"KV_TEST_SEED={seed}, step {step}: {answer} of {truth}, {engine.story[-8:]}")
                        longer, lookups = longer + (answer > truth), lookups + 1
                feed.close()
        print(f"  SGLang 0.5.23 {option.name}: {lookups} lookups, all while partial, {longer} over, 0 under", flush=True)
        check(longer, "no answer differs, so the test shows nothing")
    return test


SILENT = [Option(f"{tree}_window", tree=tree, page=1, rows=600, window=8) for tree in ("python", "rust")]

if __name__ == "__main__":
    run_all({option.name: option_test(option) for option in OPTIONS} | {option.name: silent_window_test(option) for option in SILENT},
            globals())
