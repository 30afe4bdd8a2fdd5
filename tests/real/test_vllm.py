# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's own cache manager and publisher, without a model: kv-indexer answers what the manager itself would.

Random traffic (shared prefixes, duplicates at once, preemption, eviction) with each option; after every few steps the
events go out over ZMQ and random prompts are looked up in both. No answer may be over or under.
"""
import tempfile
from dataclasses import replace

from vllm_engine import *

SALT64 = "0123456789abcdef" * 4
IMAGE = "feedfacefeedfacefeedfacefeedfacefeedfacefeedfacefeedfacefeedface"
FULL = {"kv_cache_report_mode": "full"}
INCREMENTAL = {"kv_cache_report_mode": "incremental"}


def chunked(group, chunk):
    """What a registration tells of a group with chunked local attention: no event has the chunk's length."""
    return {"group": group, "kind": "chunked_local_attention", "chunk": chunk}


OPTIONS = [
    Option("plain"),
    Option("small_pool", blocks=24),
    Option("big_blocks", block=64, blocks=32),
    Option("resets", resets=True),
    Option("report_full", report_full=True, register=FULL),
    Option("report_full_resets", report_full=True, resets=True, blocks=32, register=FULL),
    Option("report_full_seen", report_full=True, resets=True),
    Option("report_full_seen_small_pool", report_full=True, blocks=24),
    Option("report_full_seen_lookahead", report_full=True, lookahead=1),
    Option("report_full_seen_eagle_drop", report_full=True, eagle_drop=True, register={"eagle_drop": True}),
    Option("report_full_seen_window", report_full=True, windows=(40,), blocks=96),
    Option("report_full_seen_two_windows", report_full=True, windows=(40, 100), blocks=128, resets=True),
    Option("report_full_seen_window_only", retained=False, report_full=True, windows=(40,), full_attention=False),
    Option("report_some", report_full=0.3, resets=True),
    Option("report_some_window", report_full=0.3, windows=(40,), blocks=96),
    Option("report_some_two_windows", report_full=0.3, windows=(40, 100), blocks=128, resets=True),
    Option("report_some_window_only", retained=False, report_full=0.3, windows=(40,), full_attention=False),
    Option("report_some_state", report_full=0.3, states=1, blocks=96),
    Option("report_some_registered", report_full=0.3, states=1, windows=(40,), blocks=128, register=FULL),
    Option("report_skips", report_full=0.4, skips=0.3, register=FULL),
    Option("report_skips_window", report_full=0.4, skips=0.3, windows=(40,), blocks=96, register=FULL),
    Option("report_skips_seen", report_full=0.4, skips=0.3),
    Option("skips", skips=0.3),
    Option("skips_window", skips=0.3, windows=(40,), blocks=96),
    Option("report_full_window", report_full=True, windows=(40,), blocks=96, register=FULL),
    Option("report_full_two_windows", report_full=True, windows=(40, 100), blocks=128, register=FULL),
    Option("report_full_window_only", retained=False, report_full=True, windows=(40,), full_attention=False, register=FULL),
    Option("report_full_lookahead", report_full=True, lookahead=1, register=FULL),
    Option("report_full_eagle_drop", report_full=True, eagle_drop=True, register={"eagle_drop": True, **FULL}),
    Option("adapters", names=(Names(), Names(lora="a"), Names(lora="b"))),
    Option("salts", names=(Names(), Names(salt="s"), Names(salt=SALT64), Names(lora="a", salt="a"), Names(lora="a"),
                           Names(lora="a", salt=SALT64))),
    Option("images", names=(Names(), Names(images=((IMAGE, 3),)), Names(images=(("img-1", 20),)), Names(salt="s", images=((IMAGE, 3),)),
                            Names(images=(("img-2", 12), ("img-1", 40))), Names(lora="a", images=((SALT64, 3),)))),
    Option("images_moved", names=(Names(images=((IMAGE, 3),)), Names(images=((IMAGE, 5),)), Names(images=((IMAGE, 20),)))),
    Option("images_in_many_blocks", block=4, blocks=200, names=(Names(), Names(images=((IMAGE, 3),)), Names(images=((IMAGE, 2), ("img-1", 8))),
                                                                Names(images=((IMAGE, 3), (IMAGE, 9))))),
    Option("lookahead", lookahead=1),
    Option("lookahead_3", lookahead=3),
    Option("lookahead_salts", lookahead=1, names=(Names(), Names(salt="s"), Names(lora="a", salt=SALT64))),
    Option("eagle_drop", eagle_drop=True, register={"eagle_drop": True}),
    Option("window", windows=(40,), blocks=96),
    Option("two_windows", windows=(40, 100), blocks=128),
    Option("same_windows", windows=(40, 40), blocks=128),
    Option("window_lookahead", windows=(40,), lookahead=1, blocks=96),
    Option("window_eagle_drop", windows=(40,), eagle_drop=True, blocks=96, register={"eagle_drop": True}),
    Option("windows_eagle_drop", windows=(40, 100), eagle_drop=True, blocks=128, register={"eagle_drop": True}),
    Option("window_only_eagle_drop", retained=False, windows=(40,), full_attention=False, eagle_drop=True, register={"eagle_drop": True}),
    Option("window_eagle_drop_full", windows=(40, 100), eagle_drop=True, eagle_groups=(0,), blocks=128,
           register={"eagle_drop": True, "eagle_groups": "0"}),
    Option("window_eagle_drop_two", windows=(40, 100), eagle_drop=True, eagle_groups=(0, 2), blocks=128,
           register={"eagle_drop": True, "eagle_groups": "0,2"}),
    Option("window_resets_salts", windows=(33,), blocks=96, resets=True, names=(Names(), Names(salt=SALT64))),
    Option("window_small_blocks", windows=(64,), block=32, window_block=16, blocks=96),
    Option("window_quarter_blocks", windows=(40, 193), block=64, window_block=16, blocks=128),
    Option("window_odd_blocks", retained=False, windows=(200,), block=64, window_block=16, blocks=128),
    Option("window_small_blocks_short", windows=(17,), block=32, window_block=16, blocks=96, resets=True),
    Option("window_small_blocks_lookahead", retained=False, windows=(64,), block=32, window_block=16, blocks=96, lookahead=1),
    Option("window_small_blocks_eagle_drop", retained=False, windows=(64,), block=32, window_block=16, blocks=96, eagle_drop=True,
           register={"eagle_drop": True}),
    Option("window_small_blocks_salts", windows=(64,), block=32, window_block=16, blocks=96, resets=True,
           names=(Names(), Names(salt=SALT64), Names(lora="a"))),
    Option("window_small_blocks_reports", windows=(64,), block=32, window_block=16, blocks=96, report_full=True, register=FULL,
           followed=False),
    Option("windows_of_many_sizes", block=256, windows=((128, 64), (128, 64), (8, 4), (128, 8)), blocks=1200),  # DeepSeek-V4's
    Option("window_only", retained=False, windows=(40,), full_attention=False),
    Option("windows_only", retained=False, windows=(40, 100), full_attention=False, blocks=160),
    Option("state", states=1, blocks=96),
    Option("states", states=3, blocks=128),
    Option("state_window", states=1, windows=(40,), blocks=128),
    Option("state_only", followed=False, states=1, full_attention=False),
    Option("states_resets_salts", states=2, blocks=128, resets=True, names=(Names(), Names(salt=SALT64))),
    Option("state_context_parallel", followed=False, states=1, context_parallel=2, blocks=96),
    Option("state_small_context_parallel", followed=False, states=1, state_block=16, context_parallel=2, blocks=96),
    Option("state_small", states=1, block=32, state_block=16, blocks=96),
    Option("state_large", states=1, state_block=64, blocks=96),
    Option("state_large_window", states=1, state_block=32, windows=(40,), blocks=96),
    Option("state_large_small_window", followed=False, states=1, state_block=64, windows=(33,), block=32, window_block=16, blocks=96),
    Option("state_full_of_three_sizes", followed=False, states=1, state_block=32, block=32, more_full=(16, 64), blocks=150),
    Option("larger_full_eagle_drop", followed=False, more_full=(32,), eagle_drop=True, blocks=96, register={"eagle_drop": True}),
    Option("state_unit", followed=False, states=1, unit=4, blocks=96),
    Option("state_eagle_drop", states=1, eagle_drop=True, blocks=96, register={"eagle_drop": True}),
    Option("state_lookahead", states=1, lookahead=1, blocks=96),
    Option("chunk", chunks=(64,), blocks=96, register={"groups": [chunked(1, 64)]}),
    Option("chunk_short", chunks=(32,), blocks=64, resets=True, register={"groups": [chunked(1, 32)]}),
    Option("chunk_window", chunks=(64,), windows=(40,), blocks=128, register={"groups": [chunked(2, 64)]}),
    Option("chunks", chunks=(64, 96, 64), blocks=160, register={"groups": [chunked(1, 64), chunked(2, 96), chunked(3, 64)]}),
    Option("chunk_salts", chunks=(64,), blocks=96, resets=True, names=(Names(), Names(salt=SALT64), Names(lora="a")),
           register={"groups": [chunked(1, 64)]}),
    Option("chunk_skips", chunks=(64,), skips=0.3, blocks=96, register={"groups": [chunked(1, 64)]}),
    Option("chunk_report_full", chunks=(64,), report_full=True, blocks=96, register={"groups": [chunked(1, 64)], **FULL}),
    Option("chunk_report_some", chunks=(64,), report_full=0.3, resets=True, blocks=96, register={"groups": [chunked(1, 64)]}),
    Option("chunk_not_told", followed=False, chunks=(64,), blocks=96),
    Option("two_full", more_full=(16,), blocks=96),
    Option("larger_full", more_full=(32,), blocks=96),
    Option("smaller_full", block=32, more_full=(16,), blocks=96),
    Option("larger_full_window", more_full=(32,), windows=(40,), blocks=96),
    Option("context_parallel", context_parallel=2),
    Option("host", host_blocks=64, blocks=200),
    Option("host_small", host_blocks=24, blocks=200),
    Option("host_small_device", host_blocks=200, blocks=48, resets=True),
    Option("host_resets_salts", host_blocks=64, blocks=96, resets=True, names=(Names(), Names(salt=SALT64), Names(lora="a"))),
    Option("host_images", host_blocks=64, blocks=96, names=(Names(), Names(images=((IMAGE, 3),)), Names(images=(("img-1", 20),)))),
    Option("host_window", host_blocks=64, windows=(40,), blocks=200, resets=True),
    Option("host_lookahead", host_blocks=64, lookahead=1, blocks=96),
    Option("host_eagle_drop", host_blocks=64, eagle_drop=True, blocks=96, register={"eagle_drop": True}),
    Option("report_full_host", report_full=True, host_blocks=64, blocks=96, register=FULL),
    Option("report_full_seen_host", report_full=True, host_blocks=64, blocks=96, resets=True),
    Option("registered_larger_full", followed=False, more_full=(32,), registered=32, blocks=96),
    Option("registered_smaller_full", followed=False, block=32, more_full=(16,), registered=16, blocks=96),
    Option("registered_small_state", followed=False, states=1, block=32, state_block=16, registered=16, blocks=96),
    Option("registered_large_state", followed=False, states=1, state_block=64, registered=64, blocks=96),
    Option("registered_one_rank", followed=False, states=1, state_block=16, context_parallel=2, registered=16, blocks=96),
    Option("registered_small_window", followed=False, windows=(64,), block=32, window_block=16, registered=16, blocks=96),
    Option("registered_small", followed=False, block=32, registered=16),
    Option("registered_large", followed=False, registered=32),
    Option("registered_large_window_only", followed=False, windows=(40,), full_attention=False, registered=32),
    Option("registered_small_window_only", followed=False, windows=(40,), full_attention=False, block=32, registered=16),
]
# With the mode registered, every answer counts: nothing may be partial.
OPTIONS += [replace(option, name=f"incremental_{option.name}", register={**option.register, **INCREMENTAL}, whole=option.followed)
            for option in OPTIONS if not option.report_full]
# vllm serve's default keeps fewer blocks of windows and states.
OPTIONS += [replace(option, name=f"{option.name}_retention", retention=0, followed=option.followed and option.retained,
                    whole=option.whole and option.retained)
            for option in OPTIONS]
STEPS, LOOKUPS = 120, 4


def run_history(option, seed, rng, tally, feed, engine):
    indexer, groups = feed.indexer, set()  # nothing tells of a group with large blocks before its first event
    for step in range(STEPS):
        for _ in range(rng.randint(1, 6)):
            engine.step()
        events = engine.take_events()
        groups |= {event.group_idx for event in events if hasattr(event, "token_ids")}
        feed.publish(events)
        feed.settle()
        if len(groups) < sum(group.kv_cache_spec.prefix_cacheable for group in group_specs(option)):
            continue
        for tokens, names in engine.probes(LOOKUPS):
            answer = indexer.score(tokens, feed.instance, **question(names, tokens))
            tally.add(option.name, engine.cached_tokens(tokens, names), answer,
                      f"KV_TEST_SEED={seed}, step {step}, {len(tokens)} tokens, {names}, last: {engine.story[-8:]}",
                      partial=feed.listener()["partial"])


def option_test(option):
    def test():
        # Nobody says that there are reports: the view is partial where one may count as a copy.
        tally = Tally("vLLM 0.33", loose=not option.followed or (
            option.report_full and (option.retention == 0 or "kv_cache_report_mode" not in option.register)))
        with tempfile.TemporaryDirectory() as folder, Indexer() as indexer:
            for seed, rng in histories(3):
                endpoint, replay = f"ipc://{folder}/{seed}", f"ipc://{folder}/{seed}r"
                feed = Feed(indexer, 100 + seed, make_publisher(endpoint, replay), make_batch, endpoint,
                            option.registered or option.block * option.context_parallel, replay, **option.register)
                run_history(option, seed, rng, tally, feed, Engine(option, rng))
                feed.close()
        tally.exact(option.name)
        if option.whole:
            equal(tally.partial[option.name][0], 0, f"{option.name}: answers while partial")
    return test


if __name__ == "__main__":
    run_all({option.name: option_test(option) for option in OPTIONS}, globals())
