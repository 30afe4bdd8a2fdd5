# SPDX-License-Identifier: Apache-2.0
"""Cache groups of kvasir.vllm.Connector against the rules that vLLM's managers follow, written down here token by token."""
import math
import os
import random
import sys
import types

from kvpython import check, equal, raises, run  # first: it finds the package
from kvasir import _vllm_groups as groups

KINDS = {"FullAttentionSpec": groups.FULL, "SlidingWindowSpec": groups.WINDOW, "ChunkedLocalAttentionSpec": groups.CHUNK,
         "MambaSpec": groups.STATE}


def spec(name="FullAttentionSpec", **fields):
    made = {"block_size": 4, "sliding_window": 10, "attention_chunk_size": 8, "mamba_cache_mode": "align", **fields}
    return type(name, (), {**made, "__repr__": lambda self: name + repr(made)})()


def cache(*specs, **group):
    described = [types.SimpleNamespace(kv_cache_spec=each, layer_names=[f"layer{i}"], **group) for i, each in enumerate(specs)]
    return types.SimpleNamespace(kv_cache_groups=described)


def resolved(given, _config):
    sizes = [group.kv_cache_spec.block_size for group in given.kv_cache_groups]
    return math.lcm(*sizes), math.gcd(*sizes)


sys.modules["vllm.v1.core.kv_cache_utils"] = types.SimpleNamespace(resolve_kv_cache_block_sizes=resolved)
CONFIG = types.SimpleNamespace(speculative_config=None)


def read(group, n):
    """Tokens that the model reads for token @n; of a state the one whose block holds it."""
    if group.kind == groups.STATE:
        return range(n - 1, n)
    if group.kind == groups.WINDOW:
        return range(max(0, n - (group.span - 1)), n)
    return range(n - n % group.span if group.kind == groups.CHUNK else 0, n)


def test_the_longest_hit_has_all_that_each_group_reads():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng, hits = random.Random(seed), 0
    for _ in range(400):
        specs = [spec(rng.choice(list(KINDS)), block_size=rng.choice((2, 4, 8)), sliding_window=rng.randrange(1, 20),
                      attention_chunk_size=8 * rng.randrange(1, 4)) for _ in range(rng.randrange(1, 4))]
        kept = groups.groups_of(CONFIG, cache(*specs))
        first = rng.randrange(3) * kept.unit
        computed, last = first + rng.randrange(2) * kept.unit, first + rng.randrange(2, 12) * kept.unit
        there = [[rng.random() < 0.9 for _ in blocks] for blocks in kept.blocks(first, last)]

        def has(n):
            return all(there[i][token // group.size - first // group.size]
                       for i, group in enumerate(kept.all) for token in read(group, n) if token >= computed)

        right = max([computed] + [n for n in range(computed + kept.unit, last + 1, kept.unit) if has(n)])
        equal(kept.longest(there, first, computed, last), right, f"the longest hit of {kept.all} from {computed} of {there}")
        hits += right > computed
        for index, group in enumerate(kept.all):
            blocks = {token // group.size for token in read(group, right) if token >= computed}
            equal(set(group.needed(right, computed)), blocks if right > computed else set(), f"blocks of {group} to load")
            equal(len(kept.blocks(first, last)[index]), len(there[index]), "blocks asked for")
    check(hits > 50, f"{hits} hits")


def test_blocks_of_all_groups():
    kept = groups.groups_of(CONFIG, cache(spec(), spec("SlidingWindowSpec")))
    check(not kept.has_states and not kept.fails_by_block, "a model with windows")
    for model, number in ((cache(spec()), 0), (cache(spec("SlidingWindowSpec"), spec()), 1), (cache(spec("SlidingWindowSpec")), -1),
                          (cache(spec(), spec("MambaSpec")), -1), (cache(spec(), spec(block_size=8)), -1)):
        equal(groups.groups_of(CONFIG, model).announced, number, "the group that events name")
    equal(kept.whole([[True] * 4, [True, True, False, True]], 8, 24), 16, "tokens whose blocks are all there")
    equal(kept.whole([[True] * 4, [True] * 4], 8, 24), 24, "all")
    check(groups.groups_of(CONFIG, cache(spec("MambaSpec"))).has_states, "states")
    check(groups.groups_of(CONFIG, cache(spec())).fails_by_block, "full attention alone")
    check(not groups.groups_of(CONFIG, cache(spec("SlidingWindowSpec"))).fails_by_block, "a window lacks what is before it")
    request = types.SimpleNamespace(block_hashes=[b"%d" % i for i in range(8)])
    kept = groups.groups_of(CONFIG, cache(spec(), spec(block_size=8)))
    equal(kept.hashes(request, 1, range(1, 3)), [b"3", b"5"], "a block's hash is the one at its end")


def test_layouts_differ():
    models = [cache(spec()), cache(spec(block_size=8)), cache(spec("SlidingWindowSpec")), cache(spec("SlidingWindowSpec", sliding_window=11)),
              cache(spec(), spec()), cache(spec(head_size=3)), cache(spec("MambaSpec", shapes=((3,),)))]
    models.append(cache(spec()))
    models[-1].kv_cache_groups[0].layer_names = ["another"]
    models.append(types.SimpleNamespace(kv_cache_groups=models[0].kv_cache_groups, kv_cache_layout="HND"))
    equal(len({repr(groups.groups_of(CONFIG, model).layout) for model in models}), len(models), "layouts in keys")
    equal(groups.groups_of(CONFIG, cache(spec())).layout, groups.groups_of(CONFIG, cache(spec())).layout, "the same again")


def test_refusals_name_the_group_and_the_reason():
    drafts = types.SimpleNamespace(speculative_config=types.SimpleNamespace())
    for config, model, word in (
            (CONFIG, cache(spec(), spec("RSWASpec")), "doesn't know"), (CONFIG, cache(spec(), spec("CircularBufferSpec")), "doesn't know"),
            (CONFIG, cache(spec(), spec("MambaSpec", mamba_cache_mode="none")), "align"), (drafts, cache(spec(), spec("MambaSpec")), "speculative"),
            (CONFIG, cache(spec(), spec("SlidingWindowMLASpec", prefix_cacheable=False)), "one request")):
        try:
            groups.groups_of(config, model)
        except ValueError as problem:
            check("cache group 1 (" in str(problem) and word in str(problem), f"{problem}")
        else:
            raise AssertionError(f"{word} isn't refused")
    raises(ValueError, groups.groups_of, CONFIG, cache(spec(), host_resident=True))
    raises(ValueError, groups.groups_of, CONFIG, cache(spec(), enable_kv_transfer=False))
    raises(ValueError, groups.groups_of, CONFIG, cache())
    both = type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": {"a": spec(), "b": spec("MambaSpec")}})()
    raises(ValueError, groups.groups_of, CONFIG, cache(both))
    groups.groups_of(drafts, cache(spec(), spec("SlidingWindowSpec", extra_retained_tokens=3)))


if __name__ == "__main__":
    run(globals())
