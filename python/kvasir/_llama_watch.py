# SPDX-License-Identifier: Apache-2.0
"""Watch a llama_cpp.Llama: note which K and V of its memory were computed from token ids, and from which.

`Llama.input_ids` doesn't tell: vision handlers evaluate a picture's embeddings and only raise `n_tokens`, so the ids of those
positions are another prompt's. Embeddings, shifts, removals, states and adapters change the memory behind it, too.

Watched are the methods of the one Llama, its `n_tokens`, and the functions of the module llama_cpp that change a context.
"""
import contextlib
import copyreg
import functools
import sys
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

__all__ = ["Watch", "watch"]

# Functions of llama_cpp by what they change. Their first argument is a context, or the memory of one.
_DECODES = ("llama_decode", "llama_encode")
_MEMORY = ("llama_memory_clear", "llama_memory_seq_keep", "llama_memory_seq_cp", "llama_memory_seq_add",
           "llama_memory_seq_div", "llama_state_set_data", "llama_set_state_data", "llama_state_load_file", "llama_load_session_file",
           "llama_state_seq_set_data", "llama_state_seq_set_data_ext", "llama_state_seq_load_file", "llama_kv_self_clear",
           "llama_kv_self_seq_cp", "llama_kv_self_seq_keep", "llama_kv_self_seq_add", "llama_kv_self_seq_div", "llama_kv_cache_clear",
           "llama_kv_cache_seq_cp", "llama_kv_cache_seq_keep", "llama_kv_cache_seq_add", "llama_kv_cache_seq_div")
_REMOVALS = ("llama_memory_seq_rm", "llama_kv_self_seq_rm", "llama_kv_cache_seq_rm")
_WEIGHTS = ("llama_set_adapters_lora", "llama_set_adapter_lora", "llama_rm_adapter_lora", "llama_clear_adapter_lora",
            "llama_lora_adapter_set", "llama_lora_adapter_remove", "llama_lora_adapter_clear", "llama_set_adapter_cvec",
            "llama_apply_adapter_cvec", "llama_control_vector_apply", "llama_set_causal_attn")
_lock = threading.Lock()
_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()
_classes: Dict[type, type] = {}


class Watch:
    """Knowledge of one Llama's memory. @tokens: ids from which the K and V of positions [0, len) were computed.

    @changes: how often adapters, control vectors or the kind of attention were set. @stops: numbers of tokens at which an
    evaluation pauses and calls @stopped.
    """

    def __init__(self, context: int, memory: int) -> None:
        self.context, self.memory = context, memory
        self.tokens: List[int] = []
        self.changes = 0
        self.stops: Sequence[int] = ()
        self.stopped: Callable[[], None] = lambda: None
        self._inside = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter a method of the Llama that tells itself what it changes."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def is_inside(self) -> bool:
        """Whether a method of the Llama runs that tells itself what it changes."""
        return self._inside > 0

    def keep(self, n: int) -> None:
        """Forget all tokens from position @n on, unless within inside()."""
        if not self._inside:
            del self.tokens[max(n, 0):]


def _address(pointer: Any) -> int:
    """Return the address in a ctypes pointer, an integer or None."""
    return int(getattr(pointer, "value", pointer) or 0)


def _tell(kind: str, args: Tuple[Any, ...]) -> None:
    """Tell the watches what a function of llama_cpp changes."""
    address = _address(args[0]) if args else 0
    for each in list(_watches):
        if not address or address not in (each.context, each.memory):
            continue
        if kind == "weights":
            each.changes += 1
            del each.tokens[:]
        elif each.is_inside:
            continue  # a method that tells itself, and a decode has many positions
        elif kind == "removal" and len(args) > 2:
            each.keep(int(args[2]))
        elif kind == "decode" and len(args) > 1:
            each.keep(_first_position(args[1]))
        else:
            each.keep(0)


def _first_position(batch: Any) -> int:
    """Return the first position that a llama_batch evaluates; 0 where it doesn't tell."""
    try:
        return min((int(batch.pos[i]) for i in range(batch.n_tokens)), default=0)
    except (AttributeError, TypeError, ValueError):  # a null pointer, too
        return 0


def _wrap(module: Any, names: Sequence[str], kind: str) -> None:
    """Put our functions in the place of the module's. A module of another version lacks some."""
    for name in names:
        function = getattr(module, name, None)
        if function is None or getattr(function, "kvasir", False):
            continue

        @functools.wraps(function, assigned=("__name__", "__doc__"), updated=())
        def told(*args: Any, function: Any = function) -> Any:
            _tell(kind, args)
            return function(*args)

        told.kvasir = True  # type: ignore[attr-defined]
        setattr(module, name, told)


def _wrap_modules(package: str) -> None:
    for module in (sys.modules.get(package), sys.modules.get(f"{package}.llama_cpp")):
        for names, kind in ((_DECODES, "decode"), (_MEMORY, "memory"), (_REMOVALS, "removal"), (_WEIGHTS, "weights")):
            if module is not None:
                _wrap(module, names, kind)


def _watched_class(base: Any) -> Any:
    """Return the subclass of a Llama's class that tells its watch what it does."""

    class Watched(base):  # type: ignore[misc]
        """A llama_cpp.Llama with a kvasir.llama.Cache."""
        kvasir_watch: Watch

        @property
        def n_tokens(self) -> int:
            """Number of positions in use."""
            return int(self.__dict__["n_tokens"])

        @n_tokens.setter
        def n_tokens(self, n: int) -> None:
            self.kvasir_watch.keep(int(n))  # what lies between is gone, or comes from elsewhere when it is raised again
            self.__dict__["n_tokens"] = n

        def _evaluate(self, tokens: Sequence[int]) -> None:
            known, first = self.kvasir_watch.tokens, self.n_tokens
            if first and _lost_window(self, first):
                self.kvasir_watch.keep(0)
            goes_on = len(known) == first
            try:
                with self.kvasir_watch.inside():
                    super().eval(tokens)
            finally:
                if goes_on:
                    known += [int(token) for token in tokens[:self.n_tokens - first]]

        def eval(self, tokens: Sequence[int]) -> None:
            """Evaluate tokens, with a pause wherever the cache wants a snapshot."""
            told, first, done = self.kvasir_watch, self.n_tokens, 0
            stops = [stop for stop in told.stops if first < stop <= first + len(tokens)]
            for stop in stops:
                self._evaluate(tokens[done:stop - first])
                done = stop - first
                if len(told.tokens) == stop:
                    told.stopped()
            if done < len(tokens) or not stops:
                self._evaluate(tokens[done:])

        def reset(self) -> None:
            """Begin anew."""
            super().reset()
            self.kvasir_watch.keep(0)

        def embed(self, *args: Any, **kwargs: Any) -> Any:
            """Compute embeddings, in the memory that a prompt's K and V were in."""
            self.kvasir_watch.keep(0)
            return super().embed(*args, **kwargs)

        def save_state(self) -> Any:
            """Return the state, and with it from which tokens it was computed."""
            state = super().save_state()
            with contextlib.suppress(AttributeError):  # then nothing is known of it
                state.kvasir = (self.kvasir_watch, self.kvasir_watch.changes, tuple(self.kvasir_watch.tokens))
            return state

        def load_state(self, state: Any) -> None:
            """Take a state in place of what the memory holds."""
            told = self.kvasir_watch
            told.keep(0)
            with told.inside():
                super().load_state(state)
            told.tokens[:] = tokens_of(state, told) or ()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return copyreg.__newobj__, (base,), self.__getstate__()  # type: ignore[attr-defined]

    Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Watched


def _lost_window(llm: Any, n: int) -> bool:
    """Tell whether cells that a sliding window needs at position @n are gone: it was further on, and was set back."""
    module = sys.modules.get(type(llm).__module__.split(".")[0])
    least, window = getattr(module, "llama_memory_seq_pos_min", None), getattr(module, "llama_model_n_swa", None)
    memory, model = getattr(getattr(llm, "_ctx", None), "memory", None), getattr(getattr(llm, "_model", None), "model", None)
    if least is None or window is None or not memory or not model:
        return False
    width = int(window(model))
    return width > 0 and int(least(memory, 0)) > max(0, n - width + 1)


def tokens_of(state: Any, told: Watch) -> Optional[Tuple[int, ...]]:
    """Return the tokens from which a state was computed, by the Llama of @told and under its adapters of now; None: unknown."""
    whose, changes, tokens = getattr(state, "kvasir", (None, 0, ()))
    return tokens if whose is told and changes == told.changes else None


def watch(llm: Any) -> Watch:
    """Watch a Llama from now on, unless it is watched. Nothing is known of what its memory holds already."""
    with _lock:
        found = llm.__dict__.get("kvasir_watch")
        if isinstance(found, Watch):
            return found
        base, context = type(llm), getattr(llm, "_ctx", None)
        _wrap_modules(base.__module__.split(".")[0])
        told = llm.kvasir_watch = Watch(_address(getattr(context, "ctx", None)), _address(getattr(context, "memory", None)))
        _watches.add(told)
        if base not in _classes:
            _classes[base] = _watched_class(base)
        llm.__class__ = _classes[base]
        return told
