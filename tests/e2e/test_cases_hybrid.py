# SPDX-License-Identifier: Apache-2.0
"""Hybrid models as users of KV-event consumers met them: groups that keep few blocks, that have other block sizes, or that
are in different tiers. Each case is a list of steps: batches to publish, and prompts to ask for. An answer is right, or the
view says that it's partial.
"""
import json
import pathlib
import signal
import subprocess
import tempfile
from dataclasses import dataclass

from dynamo import local_hash
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


LOCAL = group(1, "chunked_local_attention")
CHUNKS_OF_64 = [{"group": 1, "kind": "chunked_local_attention", "chunk": 64}]


def test_chunked_local_attention():
    """Within a chunk a match needs the blocks from its start, and none where it ends with a chunk. The registration tells
    the chunk's length."""
    hashes = [1016, 1032, 1048, 1064, 1080, 1096, 1112, 1128]
    for first in (0, 1):
        events = [stored(hashes, "0-127", FULL), stored(hashes, "0-127", LOCAL)]
        play("chunks", [
            [events[first], events[1 - first]],
            ask("0-127", 128, whole=True),
            [removed([1112], 1)],
            ask("0-111", 96, whole=True),
            ask("0-127", 128, whole=True),  # the last chunk is complete: what it lacks matters to no later token
            [removed([1016, 1080], 1)],
            ask("0-127", 128, whole=True),
            ask("0-111", 64, whole=True),
            ask("0-63", 64, whole=True),
            ask("0-47", 0, whole=True),
            [removed([1128], 0)],
            ask("0-127", 64, whole=True),
            [stored([1080], "64-79", LOCAL, parent=1064)],
            ask("0-127", 96, whole=True),
        ], groups=CHUNKS_OF_64)


def test_chunks_of_every_group():
    """A registration without a number tells the chunk of all groups of the kind; one with a number goes before."""
    other = group(2, "chunked_local_attention")
    hashes = [1016, 1032, 1048, 1064, 1080, 1096]
    steps = [
        [stored(hashes, "0-95", of) for of in (FULL, LOCAL, other)],
        ask("0-95", 96, whole=True),
        [removed([1080], 1), removed([1016], 2)],
        ask("0-95", 64, whole=True),
        ask("0-47", 0, whole=True),
    ]
    every = {"kind": "chunked_local_attention", "chunk": 64}
    play("every group", steps, groups=[every])
    play("every group, and one by number", steps[:3] + [ask("0-47", 48, whole=True), ask("0-31", 32, whole=True)],
         groups=[every, {**every, "group": 2, "chunk": 32}])


def test_chunks_beside_a_window():
    """All three groups have to agree: the window needs two blocks before the end."""
    window, local = group(1, "sliding_window", 32), group(2, "chunked_local_attention")
    hashes = [1016, 1032, 1048, 1064, 1080, 1096]
    play("chunks and a window", [
        [stored(hashes, "0-95", of) for of in (FULL, window, local)],
        ask("0-95", 96, whole=True),
        [removed([1080], 2)],
        ask("0-95", 64, whole=True),
        [removed([1064], 1)],
        ask("0-95", 48, whole=True),
        [removed([1016], 2)],
        ask("0-95", 0, whole=True),
    ], groups=[{"group": 2, "kind": "chunked_local_attention", "chunk": 64}])


def test_larger_chunked_blocks():
    """The chunked group's blocks are twice as large: a match has whole ones."""
    play("larger chunked blocks", [
        [stored([1016, 1032, 1048, 1064, 1080, 1096, 1112], "0-111", FULL), stored([1032, 1064, 1096], "0-95", LOCAL, block_size=32)],
        ask("0-111", 96),
        [removed([1096], 1)],
        ask("0-111", 64),
        [removed([1032], 1)],
        ask("0-111", 64),
        ask("0-63", 64),
        ask("0-47", 0),
    ], groups=[{"group": 1, "kind": "chunked_local_attention", "block_size": 32, "chunk": 64}])


def test_which_group_ends_a_match():
    """explain tells which cache group ends a match, and where; also when nothing is left of it."""
    hashes, window = [2016, 2032, 2048, 2064, 2080, 2096], group(1, "sliding_window", 33)
    reach = lambda gpu: {"gpu": gpu, "cpu": gpu, "disk": gpu}
    with Indexer() as indexer:
        player = Player(indexer, 1, {"block_size": BLOCK, "kv_cache_report_mode": "incremental"})
        player.send([stored(hashes, "0-95", FULL), stored(hashes, "0-95", window)])
        explain = lambda: indexer.query(tokens("0-95"), explain=True)["explain"]
        wait_until(lambda: explain()["reason"] == "matched", what="the blocks")
        check("cut" not in explain() and "cut_ranks" not in explain(), explain())
        player.send([removed([2096], 1)])
        player.check("without the last block of the window", 0, ask("0-95", 80, whole=True))
        equal(explain()["cut"], [{"instance_id": 1, "dp_rank": 0, "ended_by": {"gpu": 1, "cpu": 1, "disk": 1}, "groups": [
            {"group": 0, "kind": "full_attention", **reach(96)}, {"group": 1, "kind": "sliding_window", **reach(80)}]}])
        equal((explain()["cut_ranks"], explain()["reason"]), (1, "matched"))
        player.send([removed(hashes[:5], 1)])
        player.check("without the window", 0, ask("0-95", 0, whole=True))
        equal(explain()["reason"], "cut_by_group")
        equal(explain()["cut"][0]["groups"][1], {"group": 1, "kind": "sliding_window", **reach(0)})
        # Each window allows some blocks, and none the same number.
        early, late = group(1, "sliding_window", 33), group(2, "sliding_window", 33)
        player.send([{"type": "AllBlocksCleared"}])
        player.send([stored(hashes, "0-95", each) for each in (FULL, early, late)])
        player.send([removed([hashes[0], *hashes[3:]], 1), removed([*hashes[:3], hashes[5]], 2)])
        player.check("windows that don't agree", 0, ask("0-95", 0, whole=True))
        equal(explain()["reason"], "cut_by_group")
        equal((explain()["cut"][0]["ended_by"], [each["gpu"] for each in explain()["cut"][0]["groups"]]),
              ({"gpu": "together", "cpu": "together", "disk": "together"}, [96, 48, 80]))
        blocks = [local_hash(range(at, at + BLOCK)) for at in range(0, 96, BLOCK)]
        equal(indexer.query_by_hash(blocks, explain=True)["explain"]["cut"], explain()["cut"])


def test_chunks_of_unknown_length():
    """Where nobody tells the chunk's length the view says that it is partial, and how to tell it."""
    hashes = [1016, 1032, 1048, 1064, 1080, 1096]
    with Indexer() as indexer:
        player = Player(indexer, 1, {"block_size": BLOCK})
        player.send([stored(hashes, "0-95", FULL), stored(hashes, "0-95", LOCAL)])
        player.send([removed([1096], 1)])
        player.check("chunks of unknown length", 0, ask("0-95", 80, partial=True))
        equal(player.listener()["partial_reasons"], ["unknown_group"])
        equal(player.listener()["groups"], [
            {"group": 0, "kind": "full_attention", "block_size": 16, "needs": "all", "from": "events"},
            {"group": 1, "kind": "chunked_local_attention", "block_size": 16, "followed": False, "from": "events"}])
        hint = indexer.query(tokens("0-95"), explain=True)["explain"]["hint"]
        check("chunked_local_attention" in hint and "registration" in hint, hint)
        indexer.unregister(1)
        indexer.register(1, player.engine, block_size=BLOCK, groups=CHUNKS_OF_64)
        wait_until(lambda: player.listener()["connected"], what="the new registration")
        player.send([stored(hashes, "0-95", FULL), stored(hashes, "0-95", LOCAL)])
        player.check("told then", 0, ask("0-95", 96))
        check("unknown_group" not in player.listener().get("partial_reasons", []))
        player.engine.close()


def test_chunks_at_a_replica():
    """A dump tells what a match needs of each group: a replica answers alike, and goes on alike."""
    hashes = [1016, 1032, 1048, 1064, 1080, 1096]
    with Indexer() as one:
        player = Player(one, 1, {"block_size": BLOCK, "groups": CHUNKS_OF_64, "kv_cache_report_mode": "incremental"})
        player.send([stored(hashes, "0-95", of) for of in (FULL, LOCAL, group(2, "full_attention"), group(3, "mamba"))])
        player.send([removed([1080], 1)])
        player.check("the origin", 0, ask("0-95", 64, whole=True))
        needs = {window["group"]: (window["need"], window["state"])
                 for model in one.streams().values() for stream in model["streams"] for window in stream["extras"] if "need" in window}
        equal(needs, {1: (4, 2), 2: (2 ** 32 - 1, 0), 3: (1, 1)})
        with Indexer("--peers", one.url) as two:
            two.wait_score(tokens("0-95"), 1, 64)
            equal([entry["needs"] for entry in two.workers()[0]["listeners"]["0"]["groups"]], ["all", "chunk", "all", "state"])
            player.engine.wait_subscriber(2)
            player.send([stored([1080], "64-79", LOCAL, parent=1064), removed([1064], 2)])
            player.check("the origin", 1, ask("0-95", 48, whole=True))
            two.wait_score(tokens("0-95"), 1, 48)
        player.engine.close()


def test_chunks_alone():
    """Without full attention an engine resumes at the start of any chunk, of prompts that it has never seen, too."""
    play("chunks alone", [
        [stored([1016, 1032], "0-31", group(1, "chunked_local_attention"))],
        ask("0-31", 32, partial=True),
    ], groups=CHUNKS_OF_64)


def test_groups_that_a_registration_tells():
    """Events go before the registration; /workers shows both, and replicas are told."""
    groups = [{"group": 0, "kind": "full_attention"}, {"group": 1, "kind": "chunked_local_attention", "block_size": 16, "chunk": 64},
              {"group": 2, "kind": "sliding_window", "window": 40}, {"group": 3, "kind": "mamba", "block_size": 32}]
    with Indexer() as one, Publisher(replay=None) as engine:
        one.register(1, engine, block_size=BLOCK, groups=groups[::-1])

        def listener():
            return one.workers()[0]["listeners"]["0"]

        told = {"from": "registration", "block_size": 16}
        wanted = [{"group": 0, "kind": "full_attention", "needs": "all", **told},
                  {"group": 1, "kind": "chunked_local_attention", "needs": "chunk", "blocks": 4, "chunk": 64, **told},
                  {"group": 2, "kind": "sliding_window", "needs": "run", "blocks": 3, "window": 40, **told},
                  {"group": 3, "kind": "mamba", "needs": "state", **told, "block_size": 32}]
        equal(listener()["groups"], wanted)
        with Indexer("--peers", one.url, "--peer-interval", "100ms") as two:
            wait_until(lambda: two.workers(), what="the worker at the replica")
            equal(two.get("/registrations").json()["registrations"][0]["groups"],
                  one.get("/registrations").json()["registrations"][0]["groups"])
            equal(two.workers()[0]["listeners"]["0"]["groups"], wanted)
        wait_until(lambda: listener()["connected"], what="a connection")
        hashes = [1016, 1032, 1048]
        sent = engine.send(stored(hashes, "0-47", FULL), stored(hashes, "0-47", LOCAL), stored(hashes, "0-47", group(2, "sliding_window", 20)),
                           rank=0)
        wait_until(lambda: listener().get("last_seq", -1) >= sent, what="the batch")
        seen = [{**entry, "from": "events"} for entry in wanted[:3]] + wanted[3:]
        seen[2] = {**seen[2], "blocks": 2, "window": 20}
        equal(listener()["groups"], seen)
        lines = [line for line in one.log if "otherwise than the registration" in line]
        check(len(lines) == 1 and "group=2" in lines[0], lines)
        for wrong, why in (([{"group": 1}], "kind"), ([{"kind": "mamba"}] * 2, "twice"), ([{"group": 1, "kind": "chunked"}], "kind"),
                           ([{"group": 1, "kind": "chunked_local_attention"}], "chunk"),
                           ([{"group": 1, "kind": "mamba", "chunk": 64}], "chunk"),
                           ([{"group": 1, "kind": "chunked_local_attention", "chunk": 40}], "whole number of blocks"),
                           ([{"group": 1, "kind": "sliding_window"}], "window"), ([{"group": 1, "kind": "mamba"}] * 2, "twice"),
                           ([{"group": i, "kind": "mamba"} for i in range(33)], "32")):
            reply = one.post("/register", {"instance_id": 2, "endpoint": engine.endpoint, "model_name": "m", "block_size": 16, "groups": wrong})
            check(reply.status in (400, 422) and why in reply.body.decode(), (wrong, reply))


def test_groups_of_the_command_line():
    """--groups takes the same list, and a configuration file does, read again with SIGHUP."""
    told = '[{"kind": "chunked_local_attention", "chunk": %d}]'
    with tempfile.TemporaryDirectory() as folder, Publisher(replay=None) as engine:
        path = pathlib.Path(folder, "conf")

        def write(chunk):
            path.write_text(f"[m]\nblock-size = 16\nworkers = 1={engine.endpoint}\ngroups = {told % chunk}\n", encoding="utf-8")

        def registered():
            return [entry.get("groups") for entry in indexer.get("/registrations").json()["registrations"]]

        write(64)
        with Indexer("--config", path) as indexer:
            equal(registered(), [json.loads(told % 64)])
            write(32)
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: registered() == [json.loads(told % 32)], what="the new chunk")
        for wrong, why in (("[", "--groups: "), (told % 40, "whole number of blocks"), ('[{"group": 1}]', "kind")):
            done = subprocess.run([BUILD / "bin" / "kv-indexer", "--port", "0", "--block-size", "16", "--workers", f"1={engine.endpoint}", "--groups", wrong],
                                  capture_output=True, text=True, timeout=patience(30))
            check(done.returncode != 0 and why in done.stderr, (wrong, done))


def test_groups_in_different_tiers():
    """HiSparse: attention in pinned host memory, its indexer on the device. The engine resumes from what both hold."""
    hashes = [1016, 1032, 1048, 1064]
    host, device = group(0, "mla_attention"), group(2, "mla_attention")
    events = [stored(hashes, "0-63", host, medium="CPU"), stored(hashes, "0-63", device)]
    on_host, on_device = [removed([1048], 0, medium="CPU")], [removed([1048], 2)]
    reset = [{"type": "AllBlocksCleared"}] * 2
    for name, steps in (("host first", [events]), ("device first", [events[1:], events[:1]]), ("one batch", [events[::-1]])):
        play(name, [
            *steps,
            ask("0-63", 64, whole=True),
            [removed([1064], 2)],
            ask("0-63", 48, whole=True),
            on_host,
            ask("0-63", 32, tier="any", whole=True),
            [stored([1048], "32-47", host, parent=1032, medium="CPU")],
            ask("0-63", 48, whole=True),
            on_device,
            ask("0-63", 32, whole=True),
            [stored([1048, 1064], "32-63", device, parent=1032)],
            [removed([1064], 0, medium="CPU")],
            ask("0-63", 48, whole=True),
            reset,
            ask("0-63", 0, tier="any", whole=True),
            events[1:],
            ask("0-63", 0, tier="any", whole=True),
            events[:1],
            ask("0-63", 64, whole=True),
            reset[:1],  # of one pool: nothing tells which
            ask("0-63", 0, partial=True),
            reset,
            ask("0-63", 0, whole=True),
        ])
    play("host alone", [events[:1], ask("0-63", 0, tier="any", partial=True), events[1:], ask("0-63", 0, partial=True),
                        reset, events[::-1], ask("0-63", 64, whole=True)])
    play("a copy more", [
        events[::-1],
        events[:1],  # two requests with one prompt at once
        [removed([1064], 0, medium="CPU")],
        ask("0-63", 64),
        [removed([1064], 0, medium="CPU")],
        ask("0-63", 48),
    ])
    play("the indexer is offloaded", [
        events[::-1],
        [stored(hashes, "0-63", device, medium="CPU")],
        ask("0-63", 64, partial=True),
    ])


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
