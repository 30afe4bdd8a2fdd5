# SPDX-License-Identifier: Apache-2.0
"""Options of C's structs by their names."""
from typing import Any, Dict

from . import _abi
from ._native import text

__all__ = ["EVICTION", "set_agent_options", "set_manager_options"]

EVICTION = {"default": _abi.KVBM_EVICT_DEFAULT, "lru": _abi.KVBM_EVICT_LRU, "lfu": _abi.KVBM_EVICT_LFU,
            "lineage": _abi.KVBM_EVICT_LINEAGE}
_IO = {"auto": _abi.KVBM_IO_AUTO, "uring": _abi.KVBM_IO_URING, "threads": _abi.KVBM_IO_THREADS}
_MANAGER = {name for name, *_ in _abi.kvbm_manager_opts._fields_} - {"size", "block", "key_len", "events", "host_memory", "agent"}
_AGENT = {name for name, *_ in _abi.kvbm_agent_opts._fields_} - {"size", "name", "fingerprint", "key_len", "listen", "n_listen", "layout"}


def _named(option: str, value: str, names: Dict[str, int]) -> int:
    """Return the constant that an option's value names. Raises ValueError."""
    if value not in names:
        raise ValueError(f"{option}: {value!r} is none of {', '.join(names)}")
    return names[value]


def set_manager_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_manager_opts."""
    for name, value in options.items():
        if name not in _MANAGER:
            raise TypeError(f"no option {name!r} of a manager")
        if name.endswith("_eviction"):
            value = _named(name, value, EVICTION)
        elif name == "io" and isinstance(value, str):
            value = _named(name, value, _IO)
        elif isinstance(value, dict):  # host_policy={"policy": KVBM_POLICY_FREQUENCY, "threshold": 3}
            value = _abi.kvbm_tier_policy(**value)
        setattr(opts, name, text(value) if isinstance(value, str) else value)


def set_agent_options(opts: Any, options: Dict[str, Any]) -> None:
    """Fill struct kvbm_agent_opts."""
    for name, value in options.items():
        if name not in _AGENT:
            raise TypeError(f"no option {name!r} of an agent")
        setattr(opts, name, text(value) if isinstance(value, str) else value)
