# SPDX-License-Identifier: Apache-2.0
"""The Python of llama-cpp-python, unmodified, over the libllama that xllamacpp ships.

llama-cpp-python has no wheel, only sources that take long to build. make_env.sh unpacks its package folder; its shared
library is here a small one that needs xllamacpp's and defines the few functions which that lacks, none of them called.

    llama_cpp = load()                # the module
    make_model(path)                  # a random model with a vocabulary of bytes
"""
import os
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import xllamacpp

ENGINES = pathlib.Path(sys.prefix)
VERSION = "0.3.36"
LACKING = ("llama_max_parallel_sequences", "llama_model_quantize", "llama_model_quantize_default_params",
           *("mtmd_helper_gen_audio_" + name for name in ("free", "get_output", "init", "reset", "set_input", "step_gen", "step_prompt")))


def package():
    """The unpacked package's parent folder; None where make_env.sh didn't make it."""
    folder = pathlib.Path(os.environ.get("KV_LLAMA_CPP_PYTHON") or ENGINES / f"llama-cpp-python-{VERSION}")
    return folder if (folder / "llama_cpp").is_dir() else None


def load():
    """Import llama_cpp."""
    real = next(pathlib.Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-llama-"))
    (folder / "lacking.c").write_text("".join(f"void {name}(void) {{}}\n" for name in LACKING), encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libllama.so", folder / "lacking.c", "-Wl,--no-as-needed", real,
                    f"-Wl,-rpath,{real.parent}", "-Wl,--unresolved-symbols=ignore-all"], check=True)
    place = package() / "llama_cpp" / "lib"  # where it looks for the others
    place.mkdir(exist_ok=True)
    for name in ("ggml", "mtmd"):
        link = place / f"lib{name}.so"
        if link.is_symlink() or link.exists():
            link.unlink()
        link.symlink_to(folder / "libllama.so")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    sys.path.insert(0, str(package()))
    import llama_cpp  # pylint: disable=import-outside-toplevel
    return llama_cpp


def make_model(path, layers=2, width=128, heads=4, kv_heads=2, feed=256, vocab=512, context=16384, seed=1):
    """Write a llama model with random weights, and tokens of one byte each."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    writer.add_token_list(tokens + [f"t{i}".encode() for i in range(len(tokens), vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name, rows, columns):
        writer.add_tensor(name, (rng.standard_normal((rows, columns)) / columns ** 0.5).astype(np.float16))

    matrix("token_embd.weight", vocab, width)
    matrix("output.weight", vocab, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(width, np.float32))
        kv = kv_heads * (width // heads)
        for name, rows, columns in (("attn_q", width, width), ("attn_k", kv, width), ("attn_v", kv, width), ("attn_output", width, width),
                                    ("ffn_gate", feed, width), ("ffn_up", feed, width), ("ffn_down", width, feed)):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
