# SPDX-License-Identifier: Apache-2.0
"""Options of C's structs by their names."""
import re
from typing import Any, Dict, Union

from . import _abi
from ._native import Invalid, Unknown, text

__all__ = ["EVICTION", "Policy", "Size", "given", "named", "set_agent_options", "set_manager_options", "size_of"]

Size = Union[int, float, str]  # bytes: a number, or a text such as "200GiB"
Policy = Union[str, Dict[str, Any]]  # "frequency", or {"policy": "frequency", "threshold": 3}
EVICTION = {"default": _abi.KVBM_EVICT_DEFAULT, "lru": _abi.KVBM_EVICT_LRU, "lfu": _abi.KVBM_EVICT_LFU,
            "lineage": _abi.KVBM_EVICT_LINEAGE}
_UNITS = {"": 1, "B": 1, **{letter + form: base ** power for power, letter in enumerate("KMGT", 1)
                            for form, base in (("", 1024), ("iB", 1024), ("B", 1000))}, "kB": 1000}  # as kv_parse_size() has them
_SIZE = re.compile("([0-9]+)([A-Za-z]*)")
_WORDS = {"io": {"auto": _abi.KVBM_IO_AUTO, "uring": _abi.KVBM_IO_URING, "threads": _abi.KVBM_IO_THREADS},
          "gpu_copy": {"auto": _abi.KVBM_GPU_AUTO, "engines": _abi.KVBM_GPU_ENGINES, "single": _abi.KVBM_GPU_SINGLE}}
_POLICY = {"default": _abi.KVBM_POLICY_DEFAULT, "presence": _abi.KVBM_POLICY_PRESENCE, "frequency": _abi.KVBM_POLICY_FREQUENCY,
           "never": _abi.KVBM_POLICY_NEVER}
_MANAGER = {name for name, *_ in _abi.kvbm_manager_opts._fields_} - {"size", "block", "key_len", "events", "host_memory", "agent"}
_AGENT = {name for name, *_ in _abi.kvbm_agent_opts._fields_} - {"size", "name", "fingerprint", "key_len", "listen", "n_listen", "layout",
                                                                 "worker_name"}  # Agent's own


def size_of(value: Size) -> int:
    """Return the bytes that @value names: a number (JSON's 2e11, too), or a text as kv-indexer takes it, such as "200GiB" or "10MB"."""
    size: Union[int, float] = -1
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found and found[2] in _UNITS:
            size = int(found[1]) * _UNITS[found[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    if not 0 <= size < 1 << 64:  # infinities and not-a-number, too
        raise Invalid(f"no size: {value!r}; a number of bytes, or one with K, M, G, T, KB to TB, KiB to TiB")
    return int(size)


def given(**options: Any) -> Dict[str, Any]:
    """Return the options that aren't None: the others stay at the library's defaults."""
    return {name: value for name, value in options.items() if value is not None}


def named(option: str, value: str, names: Dict[str, int]) -> int:
    """Return the constant that an option's value names. Raises Unknown."""
    if value not in names:
        raise Unknown(f"{option}: {value!r} is none of {', '.join(names)}")
    return names[value]


def _struct(option: str, struct: Any, fields: Dict[str, Any]) -> Any:
    """Return a struct with these fields. Raises TypeError with the names of those that it lacks: ctypes would pass over them."""
    unknown = sorted(fields.keys() - {name for name, *_ in struct._fields_})
    if unknown:
        raise TypeError(f"{option} has no {', '.join(map(repr, unknown))}, but {', '.join(name for name, *_ in struct._fields_)}")
    made = struct()
    for name, value in fields.items():
        _set(made, name, value)
    return made


def _policy(option: str, value: Union[str, Dict[str, Any]]) -> Any:
    """Return struct kvbm_tier_policy for "frequency", or for {"policy": "frequency", "threshold": 3}."""
    fields: Dict[str, Any] = {"policy": value} if isinstance(value, str) else dict(value)
    if isinstance(fields.get("policy"), str):
        fields["policy"] = named(option, fields["policy"], _POLICY)
    return _struct(option, _abi.kvbm_tier_policy, fields)


def _set(opts: Any, name: str, value: Any) -> None:
    """Set a field of a struct. Raises TypeError with its name."""
    try:
        setattr(opts, name, text(value) if isinstance(value, str) else value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is of another type than {dict(opts._fields_)[name].__name__[2:]}") from None


def set_manager_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_manager_opts. Sizes may be texts: disk_bytes="200GiB"."""
    for name, value in options.items():
        if name not in _MANAGER:
            raise TypeError(f"no option {name!r} of a manager")
        if name.endswith("_bytes"):
            value = size_of(value)
        elif name.endswith("_eviction"):
            value = named(name, value, EVICTION)
        elif name in _WORDS and isinstance(value, str):
            value = named(name, value, _WORDS[name])
        elif name.endswith("_policy") and isinstance(value, (str, dict)):
            value = _policy(name, value)
        elif name == "shard" and isinstance(value, dict):
            value = _struct(name, _abi.kvbm_shard, value)
        _set(opts, name, value)


def set_agent_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_agent_opts."""
    for name, value in options.items():
        if name not in _AGENT:
            raise TypeError(f"no option {name!r} of an agent")
        _set(opts, name, size_of(value) if name.endswith("_bytes") else value)
