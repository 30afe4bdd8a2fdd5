# SPDX-License-Identifier: Apache-2.0
"""What decides the bytes of an engine's blocks beside their hashes: its weights, its adapters, and resets of its cache.

The rule of all connectors (docs/python.md, "What keys name"):

    with a fingerprint      the model's name and form, and the fingerprint
    without                 the model's name and form, and the state of its weights: names, sizes and times of the files of a local
                            folder; the commit of a model from a hub, as its local copy has it
"""
import hashlib
import importlib
import json
import logging
import os
import re
import sys
from typing import Any, Callable, Dict, List, Optional

from ._native import Error
from .store import Store

__all__ = ["Epoch", "digest_of", "of_frames", "state_of", "warn_of_seed", "weights_of"]

_MOST_FILES = 100000  # of a folder that are looked at


def _entry(path: str, name: str) -> List[Any]:
    """Return what changes with a file. In a hub's copy a file is a link to one that is named by a hash of its bytes."""
    if os.path.islink(path):
        target = os.readlink(path)
        if os.path.basename(os.path.dirname(target)) == "blobs":
            return [name, os.path.basename(target)]
    status = os.stat(path)
    return [name, status.st_size, status.st_mtime_ns]


def _files(folder: str) -> List[List[Any]]:
    """Return the entries of all files below a folder, without hidden ones."""
    found: List[List[Any]] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = os.path.join(parent, name)
            if not name.startswith(".") and os.path.exists(path):
                found.append(_entry(path, os.path.relpath(path, folder)))
        if len(found) > _MOST_FILES:
            break
    return found


def _commit(name: str, revision: Optional[str], file: str) -> Optional[str]:
    """Return the commit of a model or an adapter that a hub's local copy has; None: it has none."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        path = hub.try_to_load_from_cache(name, file, revision=revision)
    except Exception:  # pylint: disable=broad-except  # not installed, or no such name
        return None
    return os.path.basename(os.path.dirname(path)) if isinstance(path, str) else None


def state_of(path: str, revision: Optional[str] = None, file: str = "config.json") -> Optional[List[Any]]:
    """Return what changes when the bytes of a model or an adapter do; None: nothing is known. @file: one that a hub's copy has."""
    try:
        if os.path.isdir(path):
            return ["files", _files(path)]
        if os.path.isfile(path):
            return ["file", _entry(path, os.path.basename(path))]
    except OSError:
        return None  # it changes right now
    commit = _commit(path, revision, file)
    return None if commit is None else ["commit", commit]


def weights_of(model: str, fingerprint: str = "", path: Optional[str] = None, **known: Any) -> Dict[str, Any]:
    """Name a model's weights by the rule. @path: where they are, unless @model tells. @known: revision, quantisation, overrides ..."""
    form: Dict[str, Any] = {"model": model, "path": path, **{name: None if value is None else str(value) for name, value in known.items()}}
    form["weights"] = ["fingerprint", fingerprint] if fingerprint else state_of(path or model, known.get("revision"))
    return form


def warn_of_seed(cache: Any, logger: logging.Logger) -> None:
    """Tell that another process finds nothing where vLLM draws the seed of its hashes at each start. @cache: its CacheConfig."""
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", ""))
    if "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") is None:
        logger.warning("kvasir.vllm: --prefix-caching-hash-algo %s draws another seed at each start, so nothing is found after a restart or "
                       "by other engines. Set PYTHONHASHSEED alike for all, or take sha256", algorithm)


def of_frames(name: str, attribute: str) -> Any:
    """Return the local variable @name of a calling function that has @attribute; None: there is none.

    For engines that hand a plugin a part of their configuration only: vLLM's tiers aren't given the model's revision.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get(name)
        if hasattr(found, attribute):
            return found
        frame = frame.f_back
    return None


def digest_of(form: Any) -> bytes:
    """Return the SHA-256 of a form."""
    return hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).digest()


class Epoch:
    """Resets of an engine's cache, kept in a store under the name of what the engine runs: `value` is in the key of each block.

    A reset draws another value. An object of no bytes keeps it, so the store's limit and collection leave it alone.
    @warn is told when the store can't be read now; nothing of before is found then. Without it Error is raised.
    """

    def __init__(self, store: Store, identity: bytes, warn: Optional[Callable[[str, BaseException], None]] = None) -> None:
        self._store, self.name = store, f"kvasir-reset-{identity.hex()[:32]}"
        try:
            self.value = self._read()
        except Error as problem:
            if warn is None:
                raise
            warn("asking the store for resets, so nothing of before is found", problem)
            self.value = os.urandom(32)

    def _read(self) -> bytes:
        kept = self._store.get_manifest(self.name)
        if kept is None:
            return b""
        found = re.search(b"kvasir-epoch-([0-9a-f]{64})", kept)
        return bytes.fromhex(found[1].decode()) if found else hashlib.sha256(kept).digest()

    def renew(self, value: bytes = b"") -> None:
        """Let nothing that was stored before be found any more. Raises Error when the store doesn't keep that: a restart may undo it."""
        self.value = value or os.urandom(32)
        self._store.save(self.name, b"", fingerprint=f"kvasir-epoch-{self.value.hex()}")
