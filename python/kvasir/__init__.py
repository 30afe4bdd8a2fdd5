# SPDX-License-Identifier: Apache-2.0
"""Kvasir: a KV-cache system for LLM inference.

    kvasir.store    keep objects and blocks of bytes in a file store, Redis or any kv_store plugin
    kvasir.index    hash prompts, and find who holds their prefix
    kvasir.select   choose the worker for a prompt, and book it
    kvasir.events   publish an engine's KV events, and read those of others
    kvasir.layout   write and gather paged K/V on numpy arrays and torch tensors
    kvasir.blocks   block manager: pools, caches, and tiers below them
    kvasir.client   kv-indexer over HTTP
    kvasir.router   route OpenAI requests over several engines, by prefix and load
    kvasir.sglang   storage backend of SGLang's HiCache
    kvasir.lmcache  native plugin of LMCache's L2

Failing calls raise kvasir.Error, a subclass of OSError: `errno` tells the kind, the text the reason.
"""
from ._native import Damaged, Error, Invalid, NotFound, set_log_level
from ._version import __version__

__all__ = ["Damaged", "Error", "Invalid", "NotFound", "__version__", "set_log_level"]
