# SPDX-License-Identifier: Apache-2.0
"""Streams that users of KV-event consumers reported as answered wrongly. Each case plays batches to a kv-indexer, asks for
prompts, and takes a number with a whole view, or a partial view where the events can't tell.
"""
import struct


from kvtest import *

BLOCK = 16
ZERO = struct.pack(">Q", 0)


def tokens(text):
    """"0-15,100-115": these tokens."""
    runs = [run.split("-") for run in text.split(",")]
    return [token for run in runs for token in range(int(run[0]), int(run[-1]) + 1)]


class Case:
    """One publisher, one indexer, and what it answers."""

    def __init__(self, topic=b"", first=0, **register):
        self.indexer, self.engine = Indexer(), Publisher(topic=topic, first=first)
        self.indexer.register(1, self.engine, **{"block_size": BLOCK, **register})
        self.engine.wait_subscriber()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.indexer.stop()

    def send(self, *events):
        self.send_raw(self.engine.batch(list(events), rank=0))

    def send_raw(self, payload):
        self.wait_seq(self.engine.send_raw(payload))

    def wait_seq(self, seq):
        wait_until(lambda: self.listener().get("last_seq", -1) >= seq, what=f"batch {seq}")

    def listener(self, rank=0):
        return self.indexer.workers()[0]["listeners"][str(rank)]

    def explain(self, text, **fields):
        return self.indexer.query(tokens(text), explain=True, **fields)["explain"]

    def is_partial(self):
        return self.explain("0-15")["partial_ranks"] > 0

    def held(self, text, tier="gpu", **fields):
        answer = self.indexer.query(tokens(text), **fields)["instances"].get("1", {})
        return max(answer.get(name, 0) for name in (("gpu", "cpu") if tier == "any" else (tier,)))

    def whole(self, text, right, tier="gpu", **fields):
        """The number, by a view that calls itself whole."""
        equal(self.held(text, tier, **fields), right, f"{tier} tokens of {text}")
        check(not self.is_partial(), f"a partial view: {self.explain('0-15')}")

    def honest(self, text, right, tier="gpu", **fields):
        """The number, or a partial view."""
        held = self.held(text, tier, **fields)
        check(held == right or self.is_partial(), f"{held} {tier} tokens of {text}, not {right}, by a whole view")

    def partial(self):
        check(self.is_partial(), f"a whole view: {self.explain('0-15')}")


def stored(hashes, text, parent=None, block_size=BLOCK, medium="GPU", **fields):
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens(text),
            "block_size": block_size, "medium": medium, **fields}


def removed(hashes, medium="GPU", **fields):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **fields}


def row(hashes, parent, text, lora_id=None, medium="GPU"):
    """The same as an array."""
    return ["BlockStored", hashes, parent, tokens(text), BLOCK, lora_id, medium]


# -- roots ----------------------------------------------------------------------------------------


def test_root_whose_parent_is_0():
    """llm-d's simulator has an unsigned number for the parent: 0 in place of nil."""
    with Case() as case:
        case.send(row([11, 12, 13], 0, "0-47"))
        case.whole("0-63", 48)
        case.send(row([14], 13, "48-63"))
        case.whole("0-63", 64)
    payload = bytes.fromhex("92cb3ff80000000000009197ab426c6f636b53746f726564920b0c{zero}dc0020"
                            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f10c0a3475055"
                            .replace("{zero}", "00"))
    for form in payload, payload.replace(b"\x0b\x0c\x00", b"\x0b\x0c\xcf" + bytes(8)), payload.replace(b"\x0b\x0c\x00", b"\x0b\x0c\xc4\x20" + bytes(32)):
        with Case(topic=b"kv@10.0.0.7@m", first=1) as case:
            case.send_raw(form)
            equal(case.held("0-63"), 32)


def test_hash_of_0_stays_a_parent():
    with Case() as case:
        case.send(stored([0], "0-15"), stored([1], "16-31", parent=0))
        case.whole("0-31", 32)
        case.send(removed([1, 0]))
        case.send(stored([1], "16-31", parent=0))
        equal(case.held("16-31"), 0, "a block below 0, as a root")


def test_orphans_are_named():
    """An indexer that came late has only blocks below blocks that it never saw."""
    with Case(first=7) as case:
        case.send(stored([14], "48-63", parent=13))
        explain = case.explain("48-63")
        equal(explain["reason"], "orphans")
        check("parent" in explain["text"], explain["text"])
        case.partial()


# -- adapters ---------------------------------------------------------------------------------------


def test_adapter_told_by_number_alone():
    for event in (row([11, 12, 13, 14], None, "0-63", lora_id=1), stored([11, 12, 13, 14], "0-63", lora_id=7, lora_name=None),
                  stored([11, 12, 13, 14], "0-63", lora_id=0)):
        with Case() as case:
            case.send(event)
            equal(case.held("0-63"), 0, "tokens that the base model doesn't have")
            case.partial()
            equal(case.explain("0-63")["skipped"], {"namespace": 1})
            case.send({"type": "AllBlocksCleared"})
            case.send(stored([11], "0-15", lora_id=None))
            case.whole("0-31", 16)
    with Case() as case:  # no adapter
        case.send(stored([11], "0-15", lora_id=-1), stored([12], "16-31", parent=11, lora_id=None))
        case.whole("0-31", 32)
        case.send(stored([21], "0-15", lora_id=3, lora_name="a"))
        case.whole("0-31", 16, lora_name="a")


# -- streams that contradict themselves ---------------------------------------------------------------


def test_child_of_removed_blocks():
    """Versions of SGLang remove a node's blocks when it is split. The engine still has them."""
    with Case() as case:
        case.send(row([11, 12, 13], None, "0-47"))
        case.send(["BlockRemoved", [11, 12, 13], "GPU"], row([14], 11, "500-515"))
        case.honest("0-47", 48)
        case.partial()
        case.send(["BlockRemoved", [14], "GPU"])
        case.honest("0-47", 48)
        case.send(["AllBlocksCleared"])
        case.whole("0-47", 0)


def test_hash_of_the_content_alone():
    """One hash at several places: the same tokens below two prompts, or twice in one."""
    with Case() as case:
        case.send(stored([1, 9], "0-15,500-515"))
        case.whole("0-15,500-515", 32)
        case.send(stored([2, 9], "100-115,500-515"))
        case.honest("0-15,500-515", 32)
        case.honest("100-115,500-515", 32)
    with Case() as case:
        case.send(stored([1], "0-15"), stored([9], "500-515", parent=1))
        case.send(stored([1], "0-15", parent=9))
        case.honest("0-15,500-515,0-15", 48)
    with Case() as case:  # in one event
        case.send(stored([1, 9, 1], "0-15,500-515,0-15"))
        case.honest("0-15,500-515,0-15", 48)
    with Case() as case:  # of a lower tier
        case.send(stored([1, 9], "0-15,500-515", medium="CPU_PINNED"))
        case.send(stored([2, 9], "100-115,500-515", medium="CPU_PINNED"))
        case.honest("100-115,500-515", 32, tier="cpu")


def test_same_tokens_by_two_names():
    """Two images have the same placeholder tokens. Without a key that tells them apart, their hashes do."""
    with Case() as case:
        case.send(stored([1, 2], "0-15,900-915"))
        case.whole("0-15,900-915", 32)
        case.send(stored([3], "900-915", parent=1))
        case.partial()


def test_images_that_no_block_names():
    image = {"mm_objects": [{"mm_hash": 7, "offsets": [[16, 40]]}]}
    for fields in ({"block_mm_infos": [image]}, {"extra_keys": [["a" * 64, 3]]}, {"block_mm_infos": [None, None, None, None, image]},
                   {"block_mm_infos": [None, {"mm_objects": [{"offsets": [[16, 40]]}]}, None, None]}):
        with Case() as case:
            case.send(stored([1, 2, 3, 4], "0-63", **fields))
            case.honest("0-63", 16 if len(fields.get("block_mm_infos", [])) == 4 else 0)
            case.partial()
    with Case() as case:  # an identity as text is one
        case.send(stored([1], "0-15", block_mm_infos=[{"mm_objects": [{"mm_hash": "00000000000000ff" * 4, "offsets": [[0, 16]]}]}]))
        case.whole("0-15", 0)
        case.whole("0-15", 16, block_mm_infos=[{"mm_objects": [{"mm_hash": 255, "offsets": [[0, 16]]}]}])


# -- offloaded chunks ----------------------------------------------------------------------------------

FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def offload(case, chunk, n, **fields):
    """Blocks 1 to n on the device, then in host memory alone, a chunk an event."""
    text = f"0-{n * BLOCK - 1}"
    case.send(stored(list(range(1, n + 1)), text, **FULL, extra_keys=[None] * n))
    for first in range(0, n, chunk):
        case.send(stored([first + i + 1 for i in range(chunk)], f"{first * BLOCK}-{(first + chunk) * BLOCK - 1}",
                         parent=first or None, medium="CPU", **FULL, **fields))
    case.send(removed(list(range(n, 0, -1)), group_idx=0))


def test_chunks_told_block_by_block():
    with Case(kv_cache_report_mode="incremental") as case:
        offload(case, 4, 8)
        case.whole("0-127", 128, tier="cpu")
        case.whole("0-47,900-963", 0, tier="cpu")
        case.whole("0-95,900-963", 64, tier="cpu")
        case.send(stored([1, 2, 3, 4, 5, 6], "0-95", **FULL))  # beside the device's
        case.whole("0-95,900-963", 96, tier="cpu")
        case.whole("0-127", 128, tier="cpu")
        equal(case.held("0-111,900-963", tier="cpu"), 96)
    with Case() as case:
        offload(case, 2, 8, ownership="nfs")
        case.whole("0-47,900-963", 32, tier="cpu")
        case.whole("0-127", 128, tier="cpu")
    with Case() as case:  # single blocks
        offload(case, 1, 8)
        case.whole("0-47,900-963", 48, tier="cpu")
    with Case() as case:  # nothing tells the size
        offload(case, 4, 8)
        case.send(stored([9, 10], "128-159", parent=8, medium="CPU", **FULL))
        case.partial()


def test_chunk_removed_by_its_last_hash():
    with Case(kv_cache_report_mode="incremental") as case:
        offload(case, 4, 8)
        case.send(removed([8], medium="CPU", group_idx=0))
        case.whole("0-127", 64, tier="cpu")
        case.send(stored([5, 6, 7, 8], "64-127", parent=4, medium="CPU", **FULL))
        case.whole("0-127", 128, tier="cpu")
        case.send(removed([8], medium="CPU", group_idx=0), removed([4], medium="CPU", group_idx=0))
        case.whole("0-127", 0, tier="cpu")


# -- components ------------------------------------------------------------------------------------------


def test_stored_again_with_fewer_components():
    with Case() as case:
        case.send(stored([11, 12, 13, 14], "0-63", component_types=["FULL", "SWA"]))
        case.whole("0-63", 64)
        case.send(stored([13, 14], "32-63", parent=12, component_types=["FULL"]))
        check(case.held("0-63") <= 48 or case.is_partial(), "blocks without their windows, by a whole view")
        case.send(removed([13, 14]))
        case.whole("0-63", 32)
        case.send(stored([13, 14], "32-63", parent=12, component_types=["FULL"]))
        case.partial()
        case.send(stored([13, 14], "32-63", parent=12, component_types=["SWA", "FULL"]))
        case.whole("0-63", 64)
        case.send(removed([14]))
        case.whole("0-63", 48)


def test_component_removed_alone():
    with Case() as case:
        case.send(stored([11, 12], "0-31", component_types=["FULL", "SWA"]))
        case.send(removed([12], component_types=["SWA"]))
        case.partial()
        case.send(removed([12], component_types=["FULL"]))
        case.whole("0-31", 16)
        case.send(removed([11], component_types=["FULL", "SWA"]))
        case.whole("0-31", 0)
        case.send(stored([11, 12], "0-31", component_types=["FULL"]))
        case.partial()
        case.send({"type": "AllBlocksCleared"})
        case.whole("0-31", 0)


# -- sizes and shapes --------------------------------------------------------------------------------------


def test_block_size_of_the_events_is_named():
    """With decode context parallelism the events' blocks are as many times larger."""
    for size in 32, 8, 48:
        with Case() as case:
            n = 96 // size
            case.send(stored(list(range(1, n + 1)), "0-95", block_size=size, **FULL, extra_keys=[None] * n))
            explain = case.explain("0-63")
            equal(explain["reason"], "block_size")
            check(f" {size}" in explain["text"], explain["text"])
            equal(explain["event_block_size"], size)
            equal(case.listener()["event_block_size"], size)


def test_messages_without_numbers():
    """One frame, the payload; or topic and payload. The blocks count; lost messages leave no trace."""
    payload = bytes.fromhex("92cb3ff80000000000009197ab426c6f636b53746f726564920b0cc0dc0020"
                            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f10c0a3475055")
    for frames in (payload,), (b"kv", payload), (b"kv@events", payload), (b"kvevents", payload):
        with Case() as case:
            for _ in range(3):
                case.engine.send_frames(*frames)
            case.wait_seq(2)
            equal(case.held("0-63"), 32)
            case.partial()
            equal(case.listener()["unnumbered"], True)
            case.engine.send_frames(*frames[:-1], msgpack.packb([1.0, [["AllBlocksCleared"]]]))
            case.wait_seq(3)
            equal(case.held("0-63"), 0)
            case.partial()
    with Case() as case:  # a number without a topic
        case.engine.send_frames(ZERO, payload)
        case.wait_seq(0)
        case.whole("0-63", 32)


def test_numbers_from_an_engine_that_had_none():
    """An engine is replaced by a version that numbers its messages: the view becomes whole."""
    where = f"tcp://127.0.0.1:{free_port()}"
    with Indexer() as indexer:
        with Publisher(replay=None, endpoint=where) as old:
            indexer.register(1, old)
            old.send_frames(old.batch([old.stored([1], tokens("0-15"))]))
            indexer.wait_score(tokens("0-15"), 1, 16)
            check(indexer.query(tokens("0-15"))["views"], "a whole view")
        with Publisher(replay=None, endpoint=where) as new:
            new.wait_subscriber()
            new.store([2], tokens("100-115"))
            indexer.wait_score(tokens("100-115"), 1, 16)
            equal(indexer.query(tokens("0-15"))["views"], {})
            equal(indexer.score(tokens("0-15"), 1), 0)


def test_messages_of_a_wrong_shape_are_told():
    with Case() as case:
        for frames in (b"hello",), (b"kv", b"hello"), (b"kv", b"\0\0\0\1", b"\x92\x01\x90"), (b"a", b"b", ZERO, b"d"):
            case.engine.send_frames(*frames)
        wait_until(lambda: case.listener().get("malformed") == 4, what="four malformed messages")
        explain = case.explain("0-63")
        equal(explain["reason"], "malformed")
        check("topic" in explain["text"] and "8 bytes" in explain["text"] and " 4 frames" in explain["text"], explain["text"])
        equal(explain["malformed"], 4)


def test_events_packed_as_bin():
    events = [stored([1, 2], "0-31"), row([3], 2, "32-47")]
    pack = msgpack.packb
    for payload in (pack(pack([1.5, events, 0])), pack([1.5, pack(events), 0]), pack([1.5, [pack(event) for event in events], 0]),
                    pack([1.5, pack(events)]), pack({"ts": 1.5, "events": pack([pack(event) for event in events])})):
        with Case() as case:
            case.send_raw(payload)
            case.whole("0-47", 48)
    with Case() as case:
        case.send_raw(pack([1.5, [pack(events[0]), b"\xc1", pack(events[1])], 0]))
        equal(case.held("0-47"), 48)
        equal(case.explain("0-47")["skipped"], {"malformed": 1})


# -- tiers ---------------------------------------------------------------------------------------------------


def test_names_of_tiers():
    names = {"gpu": ("GPU", "gpu", "GPU:0", "cuda:1", "HBM", "NPU", "XPU", "VRAM", "DEVICE"),
             "cpu": ("CPU", "CPU_PINNED", "DRAM", "HOST", "CPU_TIER1"),
             "disk": ("DISK", "SSD", "NVME", "FS", "STORAGE", "OBJ", "SHARED_STORAGE", "EXTERNAL", "REMOTE")}
    for tier, media in names.items():
        for medium in media:
            with Case() as case:
                case.send(stored([1, 2], "0-31", medium=medium))
                case.whole("0-31", 32, tier=tier)
                case.send(removed([2], medium=medium))
                case.whole("0-31", 16, tier=tier)


def test_unknown_tiers_are_told():
    with Case() as case:
        case.send(stored([1], "0-15", medium="TAPE"), stored([2], "16-31", parent=1, medium="tape \x01"))
        case.send(removed([1], medium="TAPE"))
        case.partial()
        explain = case.explain("0-31")
        equal(explain["skipped"], {"medium": 3})
        equal(explain["unknown_media"], {"TAPE": 2, "tape ?": 1})
        equal(case.listener()["unknown_media"], {"TAPE": 2, "tape ?": 1})
        equal(case.listener()["skipped"], {"medium": 3})
        metrics = case.indexer.metrics()
        found = [value for key, value in metrics.items() if key.startswith("kv_indexer_stream_unknown_medium_events_total") and 'medium="TAPE"' in key]
        equal(found, [2.0])
        for i in range(20):
            case.send(stored([1], "0-15", medium=f"TAPE {i}"))
        check(len(case.listener()["unknown_media"]) <= 9, "names without end")
        equal(sum(case.listener()["unknown_media"].values()), 23)


def test_clear_of_one_tier():
    for clear in {"type": "AllBlocksCleared", "medium": "CPU_PINNED"}, ["AllBlocksCleared", "CPU_PINNED"]:
        with Case() as case:
            case.send(stored([1, 2], "0-31"), stored([1], "0-15", medium="CPU_PINNED"))
            case.send(clear)
            case.whole("0-31", 32)
            case.send(removed([2, 1]))
            case.whole("0-31", 0, tier="cpu")
    with Case() as case:
        case.send(stored([1, 2], "0-31"), stored([1], "0-15", medium="CPU_PINNED"))
        case.send({"type": "AllBlocksCleared", "medium": "GPU"})
        case.whole("0-31", 0)
        case.whole("0-31", 16, tier="cpu")
    with Case() as case:  # a loss isn't healed by it
        case.engine.replay_endpoint = None
        case.send(stored([1], "0-15"))
        case.engine.kept.clear()
        case.engine.ring = 0
        case.engine.send(stored([2], "100-115"), lose=True)
        case.send({"type": "AllBlocksCleared", "medium": "CPU_PINNED"}, removed([1]))
        case.honest("100-115", 16)


if __name__ == "__main__":
    run(globals())
