# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, as GGUF files that llama.cpp loads: one for each shape of state that it keeps.

    make(shape, path)       # shape: one of SHAPES

They have no vocabulary of words: a program gives token numbers below VOCAB and gets logits.
"""
import gguf
import numpy as np

VOCAB, CONTEXT = 256, 16384
HEADS, KV_HEADS, HEAD, FEED = 4, 2, 64, 128
WIDTH = HEADS * HEAD
WINDOW = 512  # of "window": tokens that a sliding layer attends to

# Layers; "window" has five sliding ones to each full one, as Gemma 3 has; "hybrid" attends in the layers named here.
SHAPES = {"llama": 2, "window": 6, "mrope": 2, "hybrid": 4}
ATTENDS = {"hybrid": (1, 3)}


def _tensors(shape, layers, rng):
    """Yield (name, array) for the weights of a model; the array's last axis is the one that llama.cpp names first."""

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) * 1.5 / columns ** 0.5).astype(np.float32)

    def ones(n):
        return np.ones(n, np.float32)

    yield "token_embd.weight", rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    yield ("token_embd_norm" if shape == "hybrid" else "output_norm") + ".weight", ones(WIDTH)
    for i in range(layers):
        yield f"blk.{i}.attn_norm.weight", ones(WIDTH)
        yield f"blk.{i}.ffn_norm.weight", ones(WIDTH)
        yield f"blk.{i}.ffn_gate.weight", matrix(FEED, WIDTH)
        yield f"blk.{i}.ffn_up.weight", matrix(FEED, WIDTH)
        yield f"blk.{i}.ffn_down.weight", matrix(WIDTH, FEED)
        if i not in ATTENDS.get(shape, range(layers)):
            yield f"blk.{i}.shortconv.conv.weight", matrix(WIDTH, 3)
            yield f"blk.{i}.shortconv.in_proj.weight", matrix(3 * WIDTH, WIDTH)
            yield f"blk.{i}.shortconv.out_proj.weight", matrix(WIDTH, WIDTH)
            continue
        for name, rows in (("q", WIDTH), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            yield f"blk.{i}.attn_{name}.weight", matrix(rows, WIDTH)
            if shape == "mrope":
                yield f"blk.{i}.attn_{name}.bias", np.zeros(rows, np.float32)
        yield f"blk.{i}.attn_output.weight", matrix(WIDTH, WIDTH)
        if shape in ("window", "hybrid"):
            yield f"blk.{i}.attn_q_norm.weight", ones(HEAD)
            yield f"blk.{i}.attn_k_norm.weight", ones(HEAD)
        if shape == "window":
            yield f"blk.{i}.post_attention_norm.weight", ones(WIDTH)
            yield f"blk.{i}.post_ffw_norm.weight", ones(WIDTH)


def make(shape, path, seed=1):
    """Write a model of @shape to the file @path."""
    layers = SHAPES[shape]
    arch = {"llama": "llama", "window": "gemma3", "mrope": "qwen2vl", "hybrid": "lfm2"}[shape]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"random {shape}")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS if i in ATTENDS[shape] else 0 for i in range(layers)] if shape in ATTENDS else KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    if shape == "window":
        writer.add_sliding_window(WINDOW)
    if shape == "mrope":
        writer.add_rope_dimension_sections([8, 12, 12, 0])
    if shape == "hybrid":
        writer.add_shortconv_l_cache(3)
    for name, array in _tensors(shape, layers, np.random.default_rng(seed)):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
