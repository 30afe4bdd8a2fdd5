# SPDX-License-Identifier: Apache-2.0
"""Options of C's structs by their names."""
from typing import Any, Dict, Union

from . import _abi
from ._native import text

__all__ = ["EVICTION", "set_agent_options", "set_manager_options", "size_of"]

EVICTION = {"default": _abi.KVBM_EVICT_DEFAULT, "lru": _abi.KVBM_EVICT_LRU, "lfu": _abi.KVBM_EVICT_LFU,
            "lineage": _abi.KVBM_EVICT_LINEAGE}
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_WORDS = {"io": {"auto": _abi.KVBM_IO_AUTO, "uring": _abi.KVBM_IO_URING, "threads": _abi.KVBM_IO_THREADS},
          "gpu_copy": {"auto": _abi.KVBM_GPU_AUTO, "engines": _abi.KVBM_GPU_ENGINES, "single": _abi.KVBM_GPU_SINGLE}}
_POLICY = {"default": _abi.KVBM_POLICY_DEFAULT, "presence": _abi.KVBM_POLICY_PRESENCE, "frequency": _abi.KVBM_POLICY_FREQUENCY,
           "never": _abi.KVBM_POLICY_NEVER}
_MANAGER = {name for name, *_ in _abi.kvbm_manager_opts._fields_} - {"size", "block", "key_len", "events", "host_memory", "agent"}
_AGENT = {name for name, *_ in _abi.kvbm_agent_opts._fields_} - {"size", "name", "fingerprint", "key_len", "listen", "n_listen", "layout"}


def size_of(value: Union[int, float, str]) -> int:
    """Return the bytes that @value names: a number (JSON's 2e11, too), or "200GiB"."""
    text = str(value).strip()
    number = text.rstrip("BKMGTIbkmgti")
    unit = text[len(number):].upper()
    size = float(number) * _UNITS[unit] if unit in _UNITS and not isinstance(value, bool) else -1.0
    if not 0 <= size < 1 << 64:  # infinities and not-a-number, too
        raise ValueError(f"no size: {value!r}")
    return value if isinstance(value, int) else int(size)


def _named(option: str, value: str, names: Dict[str, int]) -> int:
    """Return the constant that an option's value names. Raises ValueError."""
    if value not in names:
        raise ValueError(f"{option}: {value!r} is none of {', '.join(names)}")
    return names[value]


def _policy(option: str, value: Union[str, Dict[str, Any]]) -> Any:
    """Return struct kvbm_tier_policy for "frequency", or for {"policy": "frequency", "threshold": 3}."""
    fields: Dict[str, Any] = {"policy": value} if isinstance(value, str) else dict(value)
    if isinstance(fields.get("policy"), str):
        fields["policy"] = _named(option, fields["policy"], _POLICY)
    return _abi.kvbm_tier_policy(**fields)


def set_manager_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_manager_opts. Sizes may be texts: disk_bytes="200GiB"."""
    for name, value in options.items():
        if name not in _MANAGER:
            raise TypeError(f"no option {name!r} of a manager")
        if name.endswith("_bytes"):
            value = size_of(value)
        elif name.endswith("_eviction"):
            value = _named(name, value, EVICTION)
        elif name in _WORDS and isinstance(value, str):
            value = _named(name, value, _WORDS[name])
        elif name.endswith("_policy") and isinstance(value, (str, dict)):
            value = _policy(name, value)
        setattr(opts, name, text(value) if isinstance(value, str) else value)


def set_agent_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_agent_opts."""
    for name, value in options.items():
        if name not in _AGENT:
            raise TypeError(f"no option {name!r} of an agent")
        setattr(opts, name, text(value) if isinstance(value, str) else value)
