# SPDX-License-Identifier: Apache-2.0
"""llama.cpp itself, as the package xllamacpp ships it, called through libllama's C functions.

    model = Model(path)
    with model.context(n_ctx=2048) as context:
        context.decode(tokens)                 # at the end of sequence 0
        state = context.state()                # llama_state_seq_get_data

The structures are those of llama.h in the version that tests/real/constraints.txt pins; Model checks known defaults.
"""
import ctypes
import pathlib
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p

import numpy as np
import xllamacpp

F16, Q8_0 = 1, 8


class ModelParams(ctypes.Structure):
    _fields_ = [("devices", c_void_p), ("overrides", c_void_p), ("n_gpu_layers", c_int32), ("split_mode", c_int32),
                ("load_mode", c_int32), ("lazy_mode", c_int32), ("main_gpu", c_int32), ("tensor_split", c_void_p),
                ("progress", c_void_p), ("progress_arg", c_void_p), ("kv_overrides", c_void_p), ("flags", c_uint8 * 8)]


class ContextParams(ctypes.Structure):
    _fields_ = [(name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max",
                                              "n_outputs_max_per_seq")] + \
               [(name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type",
                                             "attention_type", "flash_attn_type")] + \
               [(name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
                                             "yarn_beta_fast", "yarn_beta_slow")] + \
               [("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_arg", c_void_p),
                ("type_k", c_int32), ("type_v", c_int32), ("abort", c_void_p), ("abort_arg", c_void_p), ("unnamed", c_void_p)] + \
               [(name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")] + \
               [("samplers", c_void_p), ("n_samplers", c_size_t), ("ctx_other", c_void_p)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32)),
                ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8))]


def _load():
    lib = ctypes.CDLL(str(next(pathlib.Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    for name, result, arguments in (
            ("llama_model_default_params", ModelParams, []), ("llama_context_default_params", ContextParams, []),
            ("llama_model_load_from_file", c_void_p, [c_char_p, ModelParams]), ("llama_model_free", None, [c_void_p]),
            ("llama_init_from_model", c_void_p, [c_void_p, ContextParams]), ("llama_free", None, [c_void_p]),
            ("llama_decode", c_int32, [c_void_p, Batch]), ("llama_batch_init", Batch, [c_int32] * 3), ("llama_batch_free", None, [Batch]),
            ("llama_get_logits_ith", POINTER(c_float), [c_void_p, c_int32]), ("llama_get_memory", c_void_p, [c_void_p]),
            ("llama_memory_seq_rm", c_bool, [c_void_p, c_int32, c_int32, c_int32]),
            ("llama_state_seq_get_size", c_size_t, [c_void_p, c_int32]),
            ("llama_state_seq_get_data", c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
            ("llama_state_seq_set_data", c_size_t, [c_void_p, c_char_p, c_size_t, c_int32]),
            ("llama_state_get_size", c_size_t, [c_void_p]), ("llama_state_get_data", c_size_t, [c_void_p, c_void_p, c_size_t]),
            ("llama_state_set_data", c_size_t, [c_void_p, c_char_p, c_size_t]),
            ("llama_state_seq_save_file", c_size_t, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_size_t]),
            ("llama_state_seq_load_file", c_size_t, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_size_t, POINTER(c_size_t)]),
            ("llama_state_save_file", c_bool, [c_void_p, c_char_p, POINTER(c_int32), c_size_t]),
            ("llama_log_set", None, [c_void_p, c_void_p])):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


LIB = _load()
_LINES = []


@ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
def _log(_level, text, _arg):
    _LINES.append(text)
    del _LINES[:-20]


LIB.llama_log_set(_log, None)


def _ints(values):
    return (c_int32 * len(values))(*values)


class Context:
    """One context of a model. decode() appends to a sequence; position() counts its tokens."""

    def __init__(self, model, n_ctx=2048, type_kv=F16, flash=True, n_seq=1, unified=False, n_batch=512):
        params = LIB.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_batch, n_seq
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = type_kv
        params.flash_attn_type = int(flash)
        params.swa_full, params.kv_unified = False, unified
        self.n_batch, self.vocab, self.at = n_batch, model.vocab, {}
        self.handle = LIB.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise RuntimeError(b"".join(_LINES).decode(errors="replace"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        LIB.llama_free(self.handle)

    def decode(self, tokens, seq=0):
        """Append @tokens to sequence @seq. Returns the logits behind the last."""
        batch = LIB.llama_batch_init(self.n_batch, 0, 1)
        try:
            for begin in range(0, len(tokens), self.n_batch):
                part = tokens[begin:begin + self.n_batch]
                batch.n_tokens = len(part)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, self.at.get(seq, 0) + i, 1, seq
                    batch.logits[i] = i == len(part) - 1
                rc = LIB.llama_decode(self.handle, batch)
                if rc:
                    raise RuntimeError(f"llama_decode: {rc}")
                self.at[seq] = self.at.get(seq, 0) + len(part)
            logits = LIB.llama_get_logits_ith(self.handle, -1)
            return np.ctypeslib.as_array(logits, (self.vocab,)).copy()
        finally:
            LIB.llama_batch_free(batch)

    def state(self, seq=0):
        buffer = ctypes.create_string_buffer(LIB.llama_state_seq_get_size(self.handle, seq))
        n = LIB.llama_state_seq_get_data(self.handle, buffer, len(buffer), seq)
        return buffer.raw[:n]

    def set_state(self, state, n_tokens, seq=0):
        """Returns the number of bytes that llama.cpp took; 0 when it refused."""
        self.at[seq] = n_tokens
        return LIB.llama_state_seq_set_data(self.handle, state, len(state), seq)

    def whole_state(self):
        buffer = ctypes.create_string_buffer(LIB.llama_state_get_size(self.handle))
        n = LIB.llama_state_get_data(self.handle, buffer, len(buffer))
        return buffer.raw[:n]

    def set_whole_state(self, state, at):
        self.at = dict(at)
        return LIB.llama_state_set_data(self.handle, state, len(state))

    def save(self, path, tokens, seq=0):
        return LIB.llama_state_seq_save_file(self.handle, str(path).encode(), seq, _ints(tokens), len(tokens))

    def save_session(self, path, tokens):
        return LIB.llama_state_save_file(self.handle, str(path).encode(), _ints(tokens), len(tokens))

    def load(self, path, seq=0, room=1 << 16):
        """Returns the tokens of the file, or None when llama.cpp refused it."""
        tokens, n = (c_int32 * room)(), c_size_t()
        if not LIB.llama_state_seq_load_file(self.handle, str(path).encode(), seq, tokens, room, ctypes.byref(n)):
            return None
        self.at[seq] = n.value
        return list(tokens[:n.value])


class Model:
    def __init__(self, path, vocab):
        params = LIB.llama_model_default_params()
        defaults = LIB.llama_context_default_params()
        if (defaults.n_ctx, defaults.n_batch, defaults.type_k, defaults.type_v, defaults.n_threads, defaults.offload_kqv,
                defaults.swa_full, defaults.kv_unified) != (512, 2048, F16, F16, 4, True, True, False):
            raise RuntimeError("llama.h of this version of xllamacpp has another layout")
        params.n_gpu_layers = 0
        self.vocab, self.handle = vocab, LIB.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise RuntimeError(b"".join(_LINES).decode(errors="replace"))

    def context(self, **options):
        return Context(self, **options)
