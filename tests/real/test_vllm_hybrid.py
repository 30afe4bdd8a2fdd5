# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Connector inside live vLLM engines on the CPU, with models of several cache groups: windows, states, windows alone.

Every answer is compared with that of an engine without the connector. The weights are random, and large enough that the first
token of an answer depends on the first one of the prompt: with a block of wrong bytes other answers come.
"""
import os
import random
import sys

from realtest import *

sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

import torch  # noqa: E402
import transformers  # noqa: E402
from test_vllm_connector import WORK, ask, damage, engine, model, whole  # noqa: E402
from test_vllm_live import BLOCK, MODEL_CONFIG, Follower  # noqa: E402

SIZES = {name: MODEL_CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                               "max_position_embeddings", "bos_token_id", "eos_token_id", "rms_norm_eps")}
SIZES |= {"head_dim": 64, "tie_word_embeddings": False, "rope_theta": 10000.0}
WINDOW = 3 * BLOCK
LAYERS = ["sliding_attention"] * 2 + ["full_attention"]
# Of each model: its configuration, and its groups with attention, and with states.
MODELS = {
    "windows": ({"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 6, "sliding_window": WINDOW,
                 "layer_types": LAYERS * 2, "hidden_act": "silu", "pad_token_id": 0}, 3, 0),
    "windows alone": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": WINDOW,
                       "hidden_act": "silu"}, 1, 0),
    "states": ({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 4, "conv_L_cache": 3, "conv_bias": False,
                "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False,
                "block_ff_dim": 256, "block_dim": 128, "conv_dim": 128}, 1, 3),
}


def make(name):
    """Write a model with random weights to a folder for an engine."""
    form = {**SIZES, **MODELS[name][0], "torch_dtype": "float32"}
    folder = model(name, **form)
    torch.manual_seed(7)
    architectures = form.pop("architectures")
    config = transformers.AutoConfig.for_model(**form)
    config.architectures = architectures
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    made.save_pretrained(folder / "model")
    return folder


def prompts():
    """Prompts in pairs: each pair ends alike and begins otherwise. Some begin as the prompt before them."""
    rng, found = random.Random(3), []
    for length in (3, 7, 12, 15):
        tail = [rng.randrange(3, 1000) for _ in range(length * BLOCK + rng.randrange(BLOCK))]
        found += [[rng.randrange(3, 1000) for _ in range(5 * BLOCK)] + tail for _ in range(2)]
    return found + [tokens[:9 * BLOCK] + tokens[::-1] for tokens in found[-2:]]


def ends(asked, last):
    """Distinct prefixes of whole blocks; of each prompt the last one only, where a request may resume."""
    return {tuple(tokens[:end]) for tokens in asked
            for end in ([whole(tokens)] if last else range(BLOCK, len(tokens) + 1, BLOCK))}


def stored(folder, name, asked):
    from kvasir import store
    _, attention, states = MODELS[name]
    n = attention * len(ends(asked, False)) + states * len(ends(asked, True))
    with store.open(str(folder / "store")) as opened:
        wait_until(lambda: len(list(opened.keys())) >= n, 120, f"{n} blocks in the store")
        print(f"  {len(list(opened.keys()))} blocks are stored, at least {n} expected", flush=True)


def start(folder, connected=True):
    options = {"uri": str(folder / "store")} if connected else {}
    return engine(folder, blocks=400, length=40 * BLOCK, arguments=["--load-format", "auto", "--enable-prefix-caching"], **options)


def announced(live, follower, asked, expected):
    """Wait until the indexer counts what the store holds, as far as the connector announces it, and never more."""
    def counted():
        ask(live, [1] * 8)  # a step, with which events travel
        follower.settle(live)
        found = [follower.indexer.query(tokens)["instances"].get("1", {}).get("disk", 0) for tokens in asked]
        check(all(n <= len(tokens) for n, tokens in zip(found, asked)), f"{found} tokens on disk")
        return all(n >= least for n, least in zip(found, expected))

    wait_until(counted, 120, "what the store holds, announced and counted")


def survives(name):
    folder, asked, followers = make(name), prompts(), []
    live = start(folder, connected=False)
    try:
        expected = [ask(live, tokens)[0] for tokens in asked]
    finally:
        live.kill()
    for one, other in zip(expected[:8:2], expected[1:8:2]):
        check(name != "windows" or one != other, "answers to prompts that end alike: they must depend on how these begin")
    check(len({tuple(answer) for answer in expected}) > 5, f"answers: {expected}")
    live = start(folder)
    try:
        equal([ask(live, tokens)[0] for tokens in asked], expected, "answers of the first engine")
        stored(folder, name, asked)
        live.kill()
        live = start(folder)
        followers = [Follower("indexer", [live])]
        results = [ask(live, tokens) for tokens in asked]
        equal([answer for answer, *_ in results], expected, "answers after a restart")
        most = [whole(tokens) for tokens in asked]
        equal([cached for _, cached, _ in results], most, "cached tokens after a restart")
        announced(live, followers[0], asked, most if name == "windows" else [0] * len(asked))
        live.kill()
        damage(folder, 20)
        live = start(folder)
        results = [ask(live, tokens) for tokens in asked]
        equal([answer for answer, *_ in results], expected, "answers with damaged blocks")
        print(f"  cached, with damaged blocks: {[cached for _, cached, _ in results]}", flush=True)
        check(live.process.poll() is None, "the engine lives")
    finally:
        live.kill()
        for follower in followers:
            follower.indexer.kill()


if __name__ == "__main__":
    with WORK:
        run_all({name.replace(" ", "_"): lambda name=name: survives(name) for name in MODELS}, globals(), "test_")
