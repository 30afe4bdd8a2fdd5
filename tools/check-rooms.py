#!/usr/bin/env python3
"""Rooms depend downward only: each folder under src/ may include its own headers and those before it."""
import pathlib
import re
import sys

ORDER = ["base", "kvx", "event", "store", "index", "bm", "tier", "indexer", "advisor", "cli"]
ALONE = {"kvx": {"kvx"}}  # depends on nothing, not even base
PUBLIC = {"kv_types.h": "base", "kv_event.h": "event", "kv_index.h": "index", "kv_store.h": "store",
          "kv_store_abi.h": "store", "kv_store_ext.h": "store", "kvbm.h": "bm",
          "kvbm_tokens.h": "bm", "kvbm_layout.h": "bm", "kvbm_pool.h": "bm", "kvbm_events.h": "bm",
          "kvbm_transfer.h": "tier", "kvbm_manager.h": "tier", "kvx_abi.h": "kvx", "kvx_ext.h": "kvx"}

root = pathlib.Path(__file__).resolve().parent.parent
bad = 0
for path in sorted((root / "src").rglob("*.[ch]*")):
    room = path.relative_to(root / "src").parts[0]
    allowed = ALONE.get(room, set(ORDER[: ORDER.index(room) + 1]))
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+[<"]([^">]+)[">]', line)
        if not found:
            continue
        name = found.group(1)
        other = PUBLIC.get(name) or (name.split("/")[0] if "/" in name and name.split("/")[0] in ORDER else None)
        if other and other not in allowed:
            print(f"{path.relative_to(root)}:{number}: {room} may not include {name} ({other})")
            bad = 1
sys.exit(bad)
