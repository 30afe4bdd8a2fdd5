# SPDX-License-Identifier: Apache-2.0
"""Hybrid models as users of KV-event consumers met them: groups that keep few blocks, that have other block sizes, or that
are in different tiers. Each case is a list of steps: batches to publish, and prompts to ask for. An answer is right, or the
view says that it's partial.
"""
from dataclasses import dataclass

from kvtest import *

BLOCK = 16


def tokens(text):
    """"0-15,100-115": these tokens."""
    runs = [run.split("-") for run in text.split(",")]
    return [token for run in runs for token in range(int(run[0]), int(run[-1]) + 1)]


def group(number, kind, window=None):
    fields = {"group_idx": number, "kv_cache_spec_kind": kind}
    return {**fields, "kv_cache_spec_sliding_window": window} if window else fields


def stored(hashes, text, of, parent=None, block_size=BLOCK, medium="GPU"):
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens(text),
            "block_size": block_size, "medium": medium, "extra_keys": [None] * len(hashes), **of}


def removed(hashes, number, medium="GPU"):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": number}


@dataclass
class Ask:
    """What the engine has of a prompt. @whole: the view has to say that it's whole; @partial: that it's partial."""
    text: str
    right: tuple
    tier: str = "gpu"
    whole: bool = False
    partial: bool = False


def ask(text, *right, **more):
    return Ask(text, right, **more)


class Player:
    """One engine, and an indexer that follows it."""

    def __init__(self, indexer, instance, register):
        self.indexer, self.instance, self.engine = indexer, instance, Publisher(replay=None)
        indexer.register(instance, self.engine, **register)

    def listener(self):
        for worker in self.indexer.workers():
            if worker["instance_id"] == self.instance:
                return worker["listeners"]["0"]
        raise KeyError(self.instance)

    def send(self, events):
        sent = self.engine.send(*events, rank=0)
        wait_until(lambda: self.listener().get("last_seq", -1) >= sent, what=f"batch {sent}")

    def check(self, name, step, wanted):
        answer = self.indexer.query(tokens(wanted.text))["instances"].get(str(self.instance), {})
        held = max(answer.get(tier, 0) for tier in (("gpu", "cpu") if wanted.tier == "any" else (wanted.tier,)))
        partial, what = self.listener()["partial"], f"{name}, step {step}, {wanted.text}"
        check(partial or held in wanted.right, f"{what}: {held} by a whole view, the engine has {wanted.right}")
        check(not (wanted.whole and partial), f"{what}: a partial view")
        check(not (wanted.partial and not partial), f"{what}: a whole view")


def play(name, steps, **register):
    """Once with the report mode, and once without."""
    with Indexer() as indexer:
        for instance, mode in enumerate(({"kv_cache_report_mode": "incremental"}, {}), 1):
            player = Player(indexer, instance, {"block_size": BLOCK, **mode, **register})
            for number, step in enumerate(steps):
                if isinstance(step, Ask):
                    player.check(name, number, step)
                else:
                    player.send(step)
            indexer.unregister(instance)
            player.engine.close()


FULL, SECOND_FULL = group(0, "full_attention"), group(1, "full_attention")
WINDOW, STATE = group(1, "sliding_window", 40), group(1, "mamba")


def test_windows_alone_that_name_the_last_blocks():
    """vllm serve's default: a window's event has the tokens of the step, and the hashes of the blocks that it kept."""
    alone = group(0, "sliding_window", 40)
    play("windows alone", [
        [stored([1064, 1080, 1096], "0-95", alone)],
        ask("0-95", 96, partial=True),
        [stored([1112, 1128, 1144], "96-143", alone, parent=1096)],  # of each block, but below an unknown place
        ask("0-143", 144, partial=True),
        [removed([1064, 1080, 1096, 1112, 1128, 1144], 0)],
        ask("0-143", 0, whole=True),
        [stored([2016, 2032], "500-531", alone)],
        ask("500-531", 32, whole=True),
    ])


def test_windows_alone_that_name_each_block():
    alone = group(0, "sliding_window", 40)
    play("windows alone, dense", [
        [stored([1016, 1032, 1048], "0-47", alone)],
        ask("0-47", 48, whole=True),
        [stored([1064], "48-63", alone, parent=1048)],
        ask("0-63", 64, whole=True),
        [stored([1096], "64-95", alone, parent=1064)],  # 1080 was left out
        ask("0-95", 64, partial=True),
    ])


def test_two_windows_alone_of_which_one_names_each_block():
    """The one tells the places of both."""
    one, two = group(0, "sliding_window", 1000), group(1, "sliding_window", 20)
    play("two windows", [
        [stored([1048, 1064], "0-63", two), stored([1016, 1032, 1048, 1064], "0-63", one)],
        ask("0-63", 64, whole=True),
        [removed([1048], 1)],
        ask("0-63", 0, whole=True),
    ])


def test_states_alone():
    """A state is kept where a chunk ends. The blocks before it have none, and nothing tells their hashes."""
    alone = group(0, "mamba")
    play("states alone", [
        [stored([1064], "0-63", alone)],
        ask("0-63", 64, partial=True),
        [removed([1064], 0)],
        ask("0-63", 0, whole=True),
    ])


def test_a_smaller_window_that_names_the_last_blocks():
    """Full attention of 32, a window of 16: the last two of eight."""
    full, window = group(0, "full_attention"), group(1, "sliding_window", 32)
    play("smaller window", [
        [stored([1032, 1064, 1096, 1128], "0-127", full, block_size=32), stored([1112, 1128], "0-127", window)],
        ask("0-159", 128),
        [stored([1160], "128-159", full, parent=1128, block_size=32), stored([1144], "128-159", window, parent=1128)],
        ask("0-159", 128),
        [removed([1112], 1)],
        ask("0-159", 0),
    ], block_size=32)


def test_a_window_beside_full_attention_that_names_the_last_blocks():
    """Blocks of one size: full attention tells the places. A match needs the window's last three blocks."""
    for first in (0, 1):
        events = [stored([1016, 1032, 1048, 1064, 1080, 1096], "0-95", FULL), stored([1064, 1080, 1096], "0-95", WINDOW)]
        play("window beside full attention", [
            [events[first], events[1 - first]],
            ask("0-95", 96, whole=True),
            ask("0-79", 0, whole=True),
            [removed([1096], 1)],
            ask("0-95", 0, whole=True),
        ])


def test_a_state_or_window_that_kept_nothing_yet():
    """The first chunk of a long prompt: the group's event has tokens, and no hash. The engine can't resume."""
    for of in STATE, WINDOW:
        for nothing in [], None:
            event = stored([], "0-47", of)
            event["extra_keys"] = nothing
            play("nothing kept", [
                [stored([1016, 1032, 1048], "0-47", FULL), event],
                ask("0-47", 0, whole=True),
                [stored([1064], "48-63", FULL, parent=1048), stored([1064], "48-63", STATE, parent=1048)] if of is STATE else
                [stored([1064, 1080, 1096], "48-95", FULL, parent=1048), stored([1064, 1080, 1096], "48-95", WINDOW, parent=1048)],
                ask("0-63", 64, whole=True) if of is STATE else ask("0-95", 96, whole=True),
                [removed([1064], 1)],
                ask("0-63", 0, whole=True),
            ])


def test_a_state_that_is_masked():
    """A chunk's state is kept at its end alone."""
    play("masked states", [
        [stored([1016, 1032, 1048, 1064], "0-63", FULL), stored([1064], "0-63", STATE)],
        ask("0-63", 64, whole=True),
        ask("0-47", 0, whole=True),
        [stored([1080, 1096], "64-95", FULL, parent=1064), stored([], "64-95", STATE, parent=1064)],
        ask("0-95", 64, whole=True),
        [removed([1064], 1)],
        ask("0-95", 0, whole=True),
    ])


def test_keys_finer_than_a_block():
    """Of a prompt's tail that fills no block the engine announces a unit of 4 tokens. Answers in whole blocks don't change."""
    state, full = group(0, "mamba"), group(1, "full_attention")
    tail = [stored([1028], "24-27", of, parent=1024, block_size=4) for of in (state, full)]
    play("partial tails", [
        [stored([1016], "0-15", state), stored([1016], "0-15", full), *tail],
        ask("0-27", 16, 28),
        [removed([1028], 1), stored([1032], "16-31", full, parent=1016), stored([1032], "16-31", state, parent=1016)],
        ask("0-31", 32),
        [tail[1]],
        ask("0-31", 32),
        [removed([1032], 1), removed([1028], 1)],
        ask("0-31", 16),
    ])


def test_chunked_local_attention():
    """The event doesn't tell the chunk's length. Within a chunk a match needs the blocks from its start."""
    local = group(1, "chunked_local_attention")
    hashes = [1016, 1032, 1048, 1064, 1080, 1096]
    play("chunks", [
        [stored(hashes, "0-95", FULL), stored(hashes, "0-95", local)],
        ask("0-95", 96),
        [removed([1096], 1)],
        ask("0-95", 80, partial=True),
        [removed([1080], 1)],
        ask("0-95", 64, partial=True),
    ])


def test_groups_in_different_tiers():
    """HiSparse: attention in pinned host memory, its indexer on the device. The engine resumes from what both hold."""
    hashes = [1016, 1032, 1048, 1064]
    host, device = group(0, "mla_attention"), group(2, "mla_attention")
    events = [stored(hashes, "0-63", host, medium="CPU"), stored(hashes, "0-63", device)]
    play("host first", [
        events,
        ask("0-63", 64, tier="any", partial=True),
        [removed([1064], 2)],
        ask("0-63", 48, tier="any", partial=True),
        [removed([1048], 0, medium="CPU")],
        ask("0-63", 32, tier="any", partial=True),
    ])
    play("device first", [
        events[1:],
        events[:1],
        ask("0-63", 64, tier="any", partial=True),
        [removed([1064], 0, medium="CPU")],
        ask("0-63", 48, tier="any", partial=True),
    ])
    play("host alone", [events[:1], ask("0-63", 0, tier="any", partial=True)])


def test_offloading_is_no_group_in_another_tier():
    """Blocks that were on the device, and below it afterwards."""
    hashes = [1016, 1032]
    for of in FULL, group(0, "mla_attention"):
        play("offloading", [
            [stored(hashes, "0-31", of)],
            [stored(hashes, "0-31", of, medium="CPU")],
            ask("0-31", 32, tier="cpu", whole=True),
            [removed(hashes, 0)],
            ask("0-31", 32, tier="cpu", whole=True),
            [removed([1032], 0, medium="CPU")],
            ask("0-31", 16, tier="cpu", whole=True),
        ])


def test_full_attention_of_two_sizes():
    """A match needs whole blocks of both."""
    larger = group(1, "full_attention")
    play("two sizes", [
        [stored([1016, 1032, 1048], "0-47", FULL), stored([1032], "0-31", larger, block_size=32)],
        ask("0-47", 32),
        [removed([1032], 1)],
        ask("0-47", 0),
    ])
    play("two sizes, the smaller one second", [
        [stored([1032], "0-31", FULL, block_size=32), stored([1016, 1032, 1048], "0-47", SECOND_FULL)],
        ask("0-47", 32),
        [removed([1016], 1)],
        ask("0-47", 0),
    ], block_size=32)


if __name__ == "__main__":
    run(globals())
