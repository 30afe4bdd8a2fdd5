# SPDX-License-Identifier: Apache-2.0
"""llama-cpp-python's prompt cache in any store, shared by processes and kept over restarts.

    llm = llama_cpp.Llama("model.gguf", n_ctx=8192)
    llm.set_cache(kvasir.llama.Cache(llm, "/var/lib/kv?limit=100GiB"))

A completion then begins from the longest stored prefix of its prompt: blocks of 64 tokens, which all conversations share.
What the store gives back is verified; a damaged or missing block ends the prefix before it. A store that fails costs the
cache's help and never a completion.
"""
import collections
import ctypes
import glob
import logging
import re
import sys
import weakref
from typing import Any, Callable, Deque, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi
from . import store as _store
from ._connector import Warner
from ._llama_watch import Watch, tokens_of, watch
from ._native import Error, Handle, Memory, adopt, call, load, text

__all__ = ["Cache", "Prefixes", "Result", "State", "fingerprint_file"]

logger = logging.getLogger(__name__)
# Settings of a context that decide K and V beside the model. Layout and types of the memory are in the keys anyway.
_SETTINGS = ("flash_attn_type", "type_k", "type_v", "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
             "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "attention_type", "swa_full", "kv_unified",
             "n_seq_max", "offload_kqv")
KEPT = 3  # snapshots of a conversation that stay
LOOKS = 64  # positions at which a conversation is searched for snapshots to delete
ANSWERS = 64  # snapshots of answers that are remembered, to delete those that the next prompt doesn't begin with
_FORMS = {"sequence": _abi.KVL_FORM_SEQUENCE, "context": _abi.KVL_FORM_CONTEXT}


def fingerprint_file(path: str) -> str:
    """Return 32 hex digits of all bytes of a model file. Reads the whole file."""
    result = ctypes.create_string_buffer(_abi.KVL_FILE_FINGERPRINT)
    call(load("kvasir_llama").kvl_fingerprint_file, text(path), ctypes.addressof(result))
    return result.value.decode()


class Result(NamedTuple):
    """Result of a load or a save. `tokens`: restored, or that a load would restore now."""
    tokens: int
    blocks: int
    new_blocks: int
    new_bytes: int
    state_bytes: int
    snapshot: bool


def _result(r: Any) -> Result:
    return Result(r.n_tokens, r.blocks, r.new_blocks, r.new_bytes, r.state_bytes, bool(r.snapshot))


def _ints(tokens: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(tokens))(*tokens)


class Prefixes(Handle):
    """A prefix cache of states of llama.cpp over @store (kv_llama.h). Any number of threads.

    @fingerprint names all that decides K and V of given tokens: model file, adapters, RoPE settings; for states, which nothing
    compares with a context, also the context's settings. @library: a ctypes library with libllama's functions, for load() and
    save() of a context's sequence. @window: tokens of the model's sliding window (llama_model_n_swa), for save_state();
    save() asks the library.
    """

    def __init__(self, store: _store.Store, fingerprint: str, block_tokens: int = 0, library: Any = None, window: int = 0) -> None:
        self._c = load("kvasir_llama")
        self.store = store
        address, table = ctypes.c_void_p(), None
        if library is not None:
            fields: List[Any] = _abi.kvl_libllama._fields_[1:]
            may_lack = ("get_model", "model_n_swa")
            table = _abi.kvl_libllama(**{name: ctypes.cast(getattr(library, "llama_" + name), kind) for name, kind in fields
                                         if name not in may_lack or hasattr(library, "llama_" + name)})
        opts = _abi.kvl_opts(fingerprint=text(fingerprint), block_tokens=block_tokens, window=window,
                             libllama=None if table is None else ctypes.addressof(table))
        store_address = store._enter()
        try:
            call(self._c.kvl_open, store_address, ctypes.byref(opts), ctypes.byref(address))
        finally:
            store._leave()
        self._own(address.value or 0, self._c.kvl_close)  # which leaves the store alone

    def _call(self, function: Any, *args: Any) -> int:
        """Call a function with this cache, while the store can't be closed."""
        self.store._enter()
        try:
            return super()._call(function, *args)
        finally:
            self.store._leave()

    def find(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest stored prefix. Reads no block."""
        return int(self._call(self._c.kvl_find, ctypes.byref(_ints(tokens)), len(tokens)))

    def load(self, context: int, seq: int, tokens: Sequence[int]) -> Result:
        """Restore the longest stored prefix into sequence @seq of the llama_context at address @context, in place of its own."""
        result = _abi.kvl_result()
        self._call(self._c.kvl_load, context, seq, ctypes.byref(_ints(tokens)), len(tokens), ctypes.byref(result))
        return _result(result)

    def save(self, context: int, seq: int, tokens: Sequence[int]) -> Result:
        """Save sequence @seq of a llama_context, which holds the first of @tokens. Durable on return."""
        result = _abi.kvl_result()
        self._call(self._c.kvl_save, context, seq, ctypes.byref(_ints(tokens)), len(tokens), ctypes.byref(result))
        return _result(result)

    def save_state(self, tokens: Sequence[int], state: Any, form: str = "sequence") -> Result:
        """Save a state of @tokens that libllama gave: "sequence" (llama_state_seq_get_data) or "context"."""
        memory, result = Memory(state), _abi.kvl_result()
        self._call(self._c.kvl_save_state, ctypes.byref(_ints(tokens)), len(tokens), _FORMS[form], memory.address or None,
                   memory.nbytes, ctypes.byref(result))
        return _result(result)

    def discard(self, tokens: Sequence[int], form: str = "sequence") -> bool:
        """Delete the snapshot of exactly these tokens (kvl_discard). False: there is none."""
        return self._call(self._c.kvl_discard, ctypes.byref(_ints(tokens)), len(tokens), _FORMS[form]) > 0

    def load_state(self, tokens: Sequence[int], form: str = "sequence") -> Optional[Tuple[int, memoryview]]:
        """Return the number of tokens of the longest stored prefix and its state; None when nothing is stored."""
        data, n = ctypes.c_void_p(), ctypes.c_size_t()
        found = self._call(self._c.kvl_load_state, ctypes.byref(_ints(tokens)), len(tokens), _FORMS[form], ctypes.byref(data),
                           ctypes.byref(n), None)
        return (int(found), adopt(data.value, n.value)) if found > 0 else None


class State:
    """A state as Llama.load_state takes it: the attributes of llama_cpp.LlamaState. @kvasir: what save_state() of a watched one notes."""

    def __init__(self, input_ids: Any, scores: Any, n_tokens: int, llama_state: Any, seed: int, kvasir: Any) -> None:
        self.input_ids, self.scores, self.n_tokens, self.seed, self.kvasir = input_ids, scores, n_tokens, seed, kvasir
        self.llama_state, self.llama_state_size = llama_state, len(llama_state)


def _model_files(path: str) -> List[str]:
    """Return the files of a model: all parts of one that is split (NAME-00001-of-00003.gguf)."""
    split = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path)
    return sorted(glob.glob(f"{glob.escape(split[1])}[0-9][0-9][0-9][0-9][0-9]{glob.escape(split[2])}")) if split else [path]


def _fingerprint(llm: Any) -> str:
    """Name the model, the settings of a llama_cpp.Llama, and its version: a state of another version raises in load_state."""
    params = getattr(llm, "context_params", None)
    package = sys.modules.get(type(llm).__module__.split(".")[0])
    parts = ["llama-cpp-python", str(getattr(package, "__version__", 0)), *map(fingerprint_file, _model_files(llm.model_path))]
    parts += [f"{name}={getattr(params, name)}" for name in _SETTINGS if hasattr(params, name)]
    parts += [f"{name}:{value}" for name, value in sorted((getattr(llm, "kv_overrides", None) or {}).items())]
    if getattr(llm, "lora_path", None):
        parts.append(f"lora={fingerprint_file(llm.lora_path)}*{llm.lora_scale}")
    return " ".join(parts)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _window(llm: Any) -> int:
    """Return the tokens of a Llama's sliding window; 0: it has none."""
    window = getattr(sys.modules.get(type(llm).__module__.split(".")[0]), "llama_model_n_swa", None)
    model = getattr(getattr(llm, "_model", None), "model", None)
    return max(0, int(window(model))) if window is not None and model else 0


def _is_whole(llm: Any) -> bool:
    """Tell whether a Llama forgets positions before its last: recurrent and hybrid models, sliding windows."""
    if getattr(llm, "_is_recurrent", False) or getattr(llm, "_is_hybrid", False):
        return True
    return _window(llm) > 0 and not getattr(llm.context_params, "swa_full", False)


class Cache:
    """A cache for Llama.set_cache: the methods of llama_cpp.BaseLlamaCache, over a store.

    @store: a URI, or an open kvasir.store.Store. @fingerprint: name of the model and its settings; by default that of the whole
    model file, of an adapter, and of the context's settings. Use the cache with @llm only. A model with logits_all gets no
    state back: the logits of cached tokens aren't stored.

    The cache watches @llm from here on. K and V are stored under the ids from which they were computed: pictures, embeddings,
    shifts and states of unknown origin end a prefix. After a change of adapters it neither loads nor saves; make a new one then.

    Memory that can't be cut at tokens is stored at the end of each prompt and of each answer, and at the positions that
    @snapshots(tokens of the prompt) returns. Of a conversation the three newest of the former stay, and all of the latter.
    Of memory with sliding windows a snapshot is the window and the tokens behind the last block; the rest is stored in blocks.
    """

    def __init__(self, llm: Any, store: Union[str, _store.Store], *, fingerprint: Optional[str] = None,
                 block_tokens: int = 0, snapshots: Optional[Callable[[Sequence[int]], Iterable[int]]] = None) -> None:
        self._llm, self._snapshots = weakref.ref(llm), snapshots
        self._watch: Watch = watch(llm)
        self._changes, self._told = self._watch.changes, False
        if self._changes and not fingerprint:
            raise ValueError("kvasir.llama: adapters of this Llama were changed; name those of now in a fingerprint")
        self._whole, window = _is_whole(llm), _window(llm)
        self._step = (block_tokens or _abi.KVL_BLOCK_TOKENS) if window else 0  # where prefixes of blocks end that aren't snapshots
        self._named: FrozenSet[int] = frozenset()
        self._warn = Warner(logger, "llama.cpp goes on without")
        self._answers: Deque[Tuple[List[int], int]] = collections.deque(maxlen=ANSWERS)  # tokens of snapshots, and of their prompts
        self._prompt = 0
        self._own = _store.open(store) if isinstance(store, str) else None
        self.prefixes = Prefixes(self._own or store, fingerprint or _fingerprint(llm), block_tokens,  # type: ignore[arg-type]
                                 window=window)
        self.last: Dict[str, Any] = {}  # of the last "load", "save" and "snapshot": Result, tokens, or the Error

    def close(self) -> None:
        """Close the cache, and the store when this opened it."""
        self._watch.stops = ()
        self.prefixes.close()
        if self._own is not None:
            self._own.close()

    @property
    def cache_size(self) -> int:
        """Bytes of all chunks of the store; 0 where it can't tell."""
        try:
            return int(self.prefixes.store.stats()["bytes"])
        except Error:
            return 0

    def _failed(self, what: str, problem: Error) -> None:
        self.last[what] = problem
        self._warn(f"cache {what}", problem)

    def _usable(self) -> bool:
        """Tell whether the fingerprint is still that of the Llama's weights."""
        if self._watch.changes == self._changes:
            return True
        if not self._told:
            self._told = True
            logger.warning("kvasir.llama: adapters of the Llama were changed; its cache neither loads nor saves from now on. "
                           "Make a new Cache whose fingerprint names them")
        return False

    def __contains__(self, key: Sequence[int]) -> bool:
        try:
            return self._usable() and self.prefixes.find(list(key)) > 0
        except Error as problem:
            self._failed("find", problem)
            return False

    def _pause_at(self, llm: Any, tokens: List[int]) -> None:
        """Let the evaluation of a prompt pause where snapshots are wanted."""
        self._prompt, self._named = len(tokens), frozenset()
        if not self._whole:
            self._watch.stops = ()
            return
        if self._snapshots is not None:
            self._named = frozenset(int(n) for n in self._snapshots(tokens))
        last = max(1, len(tokens) - 1)  # a Llama evaluates at least the last token of a prompt that it has restored
        own, wanted = weakref.ref(self), weakref.ref(llm)

        def stopped() -> None:
            cache, of = own(), wanted()
            if cache is not None and of is not None and of.cache is cache:
                cache._save(of.save_state(), "snapshot")

        self._watch.stops = sorted(n for n in self._named | {last} if 0 < n <= last)
        self._watch.stopped = stopped

    def __getitem__(self, key: Sequence[int]) -> State:
        llm = self._llm()
        tokens = list(key)
        if llm is None or getattr(llm, "_logits_all", False) or not self._usable():
            raise KeyError("no state")
        self._pause_at(llm, tokens)
        wanted = tokens[:-1] if self._whole else tokens  # of a snapshot no last token can be taken off
        try:
            if self.prefixes.find(wanted) <= _common(self._watch.tokens, tokens):
                raise KeyError("the Llama holds as much itself")
            found = self.prefixes.load_state(wanted, "context")
        except Error as problem:
            self._failed("load", problem)
            raise KeyError("the store failed") from problem
        self.last["load"] = found[0] if found else 0
        if found is None:
            raise KeyError("nothing is stored of this prompt")
        import numpy  # pylint: disable=import-outside-toplevel
        n, state = found
        ids = numpy.full(max(int(llm.n_ctx()), n), -1, numpy.intc)
        ids[:n] = tokens[:n]
        return State(ids, numpy.zeros((1, 1), numpy.single), n, state, getattr(llm, "_seed", 0),
                     (self._watch, self._watch.changes, tuple(tokens[:n])))

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        known = tokens_of(value, self._watch)
        if known is not None and list(known) == list(key)[:len(known)]:  # else it's the state of another prompt
            self._save(value, "save")

    def _save(self, state: Any, what: str) -> None:
        """Save a state under the tokens from which it was computed. Positions of others have no token."""
        known, n = list(tokens_of(state, self._watch) or ()), int(state.n_tokens)
        if not known or not self._usable():
            return
        tokens = known[:n] + [-1] * (n - len(known))
        try:
            self.last[what] = result = self.prefixes.save_state(tokens, state.llama_state, "context")
            self._whole = self._whole or result.snapshot
            if result.snapshot:
                self._replace(tokens[:result.tokens], what == "save")
        except Error as problem:
            self._failed(what, problem)

    def _replace(self, tokens: List[int], answered: bool) -> None:
        """Delete snapshots that the conversation of @tokens needs no more, now that they have one."""
        for old in list(self._answers):  # the prompt goes on behind its question, so the template changed the answer
            if old[1] - 1 <= _common(old[0], tokens) < min(len(old[0]), len(tokens)):
                self._answers.remove(old)
                self.prefixes.discard(old[0], "context")
        if answered:
            self._answers.append((tokens, self._prompt))
        kept, n = 1, len(tokens)
        for _ in range(LOOKS):
            n = self.prefixes.find(tokens[:n - 1])
            if n <= 0:
                return
            if self._step and n % self._step == 0:
                continue
            kept += n not in self._named
            if kept > KEPT and n not in self._named and not self.prefixes.discard(tokens[:n], "context"):
                return  # blocks, or the backend can't delete
