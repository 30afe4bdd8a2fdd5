#!/usr/bin/env python3
"""Rooms depend downward only: each folder under src/ may include its own headers and those before it."""
import ast
import pathlib
import re
import sys

ORDER = ["base", "kvx", "hash", "event", "plane", "store", "llama", "index", "select", "bm", "peer", "tier", "http", "grpc", "extproc", "indexer", "selector", "advisor", "cli"]
ALONE = {"kvx": {"kvx"}, "http": {"base"}, "grpc": {"base"}, "extproc": {"base", "grpc"}}  # kvx depends on nothing, not even base
TOP = ""  # the files of a room that lie in none of its folders
# Arrows between the folders of one room, or of one folder in it: what each may include of the others. Disk and object don't know each
# other.
PARTS = {"base": {"core": set(), "json": {"core"}, "hash": {"core"}, "args": {"core"}, "thread": {"core"}, "net": {"core", "thread"},
                  "file": {"core"}, "metrics": {"core"}, "module": {"core", "file"}},
         "tier": {"transfer": set(), "disk": {"transfer"}, "object": {"transfer"}, "peer": set(), "plan": {"transfer"},
                  "manager": {"transfer", "disk", "object", "peer"}, "volume": {"manager"}, "group": {"transfer"}},
         "plane": {"nats": {TOP}, "discovery": {TOP}, TOP: set()},
         "event": {"wire": set(), "reader": {"wire", "router"}, "publisher": {"wire"}, "router": {"wire"}, TOP: {"wire"}},
         "store": {"backend": set(), "object": {"backend"}, "file": {"backend", "object"}, "conformance": {"backend"},
                   TOP: {"backend", "object"}},
         "store/file": {"commit": {TOP}, TOP: set()},
         "advisor": {"index": set(), "worth": set(), TOP: {"index", "worth"}},
         "selector": {"api": {TOP}, TOP: set()},
         "indexer/view": {"small": {TOP}, TOP: {"small"}},
         "cli": {"show": set(), "client": set(), "advisor": {TOP, "events"}, "advise": {TOP, "show", "replay"}, "replay": {TOP, "show", "client"}, "store": {TOP, "show"}, "peer": {TOP, "show"},
                 "bench": {TOP, "show", "peer"}, "whole": {TOP, "show", "client", "replay"}, "top": {TOP, "show", "client"}, "events": {TOP, "show"}, "doctor": {TOP, "show", "client", "events"}, "select": {TOP}, TOP: set()},
         "tier/manager": {"state": set(), "pins": {"state"}, "offload": {"state", "pins"}, "jobs": {"state", "pins", "offload"},
                          TOP: {"state", "pins", "offload", "jobs"}},
         "index": {"memory": set(), "tree": {"memory"}, "write": {"memory", "tree"}, "read": {"memory", "tree"}, "dump": {"memory", "tree"},
                   TOP: {"memory", "tree", "write", "read", "dump"}},
         "select": {"policy": set(), TOP: {"policy"}},
         "bm": {"storage": set(), "events": set(), "registry": {"storage", "events"}, "pool": {"storage", "events", "registry"},
                TOP: {"storage", "events", "registry", "pool"}},
         "peer": {"module": set(), "set": set(), "session": {"module", "set"}, "lease": {"set", "session"},
                  "plan": {"set", "lease"}, "directory": {"module", "set", "session", "lease"}, "tls": {"module"}, "http": set(),
                  "ucx": {"module"}, "nixl": {"module", "session"}, TOP: {"module", "set", "session", "lease", "plan", "directory"}},
         "indexer": {"zmq": set(), "model": set(), "view": {"model"}, "stream": {"zmq", "model", "view"},
                     "registry": {"zmq", "model", "view", "stream"},
                     "api": {TOP, "model", "view", "stream", "registry"},
                     "page": set(),
                     "replica": {TOP, "api", "model", "view", "stream", "registry"},
                     "discover": {TOP, "api", "model", "stream", "registry"},
                     TOP: {"zmq", "model", "view", "stream", "registry", "api", "replica", "discover"}}}
PUBLIC = {"kv_types.h": "base", "kv_hash.h": "hash", "kv_event.h": "event", "kv_plane.h": "plane", "kv_index.h": "index", "kv_select.h": "select", "kv_store.h": "store",
          "kv_store_abi.h": "store", "kv_store_ext.h": "store", "kv_store_async.h": "store", "kv_llama.h": "llama", "kvbm.h": "bm",
          "kvbm_tokens.h": "bm", "kvbm_layout.h": "bm", "kvbm_pool.h": "bm", "kvbm_events.h": "bm",
          "kvbm_remote.h": "peer", "kvbm_lease.h": "peer", "kvbm_plan.h": "peer", "kvbm_directory.h": "peer", "kvbm_transfer.h": "tier/transfer", "kvbm_manager.h": "tier/manager", "kvbm_hit.h": "tier/manager", "kvbm_volume.h": "tier/volume", "kvbm_group.h": "tier/group", "kvx_abi.h": "kvx", "kvx_ext.h": "kvx"}

root = pathlib.Path(__file__).resolve().parent.parent
bad = 0


def place_of(name):
    """The room, and the folders in it, that a header's name belongs to; None: no header of ours."""
    if name in PUBLIC:
        return PUBLIC[name].split("/")
    folders = name.split("/")[:-1]
    return folders if folders and folders[0] in ORDER else None


def part_of(place, depth):
    """The folder of @place that lies in its first @depth folders; TOP: its files lie beside those."""
    return place[depth] if depth < len(place) else TOP


def may_include(place, other, public):
    """Whether a file of the folder @place may include a header of the folder @other. @public headers lie in no folder of their room."""
    if other[0] != place[0]:
        return other[0] in ALONE.get(place[0], ORDER[: ORDER.index(place[0])])
    for depth in range(1, len(place) + 1):
        parts = PARTS.get("/".join(place[:depth]))
        here, there = part_of(place, depth), part_of(other, depth)
        if parts is None or here == there == TOP or (there == TOP and public):
            return True
        if here != there:
            return there in parts.get(here, set())
    return True


def is_beside(place):
    """The folder above @place whose list of parts lacks it; None: every list has it."""
    above = ["/".join(place[:depth]) for depth in range(1, len(place) + 1)]
    return next((name for depth, name in enumerate(above, 1) if part_of(place, depth) not in PARTS.get(name, {part_of(place, depth)})), None)


for path in sorted((root / "src").rglob("*.[ch]*")):
    place = list(path.relative_to(root / "src").parts[:-1])
    beside = is_beside(place)
    if beside:
        print(f"{path.relative_to(root)}: src/{beside} has the folders {', '.join(filter(None, PARTS[beside]))} and nothing beside")
        bad = 1
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+[<"]([^">]+)[">]', line)
        if not found:
            continue
        name = found.group(1)
        other = place_of(name) or (place if '"' in line and (path.parent / name).exists() else None)
        if '"' in line and place[0] in PARTS and not other and not (root / "plugins" / name).exists():
            print(f"{path.relative_to(root)}:{number}: {name}: name its folder, as in \"{place[0]}/.../x.h\"")
            bad = 1
        if other and not may_include(place, other, name in PUBLIC):
            print(f"{path.relative_to(root)}:{number}: {'/'.join(place)} may not include {name} ({'/'.join(other)})")
            bad = 1


def libraries():
    """(exported archives, used ones) of each library and program that tools/wheel.py links."""
    tree = ast.parse((root / "tools/wheel.py").read_text())
    named = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    strings = lambda node: [e.value for e in node.elts if isinstance(e, ast.Constant)]
    for key, value in zip(named["LIBRARIES"].keys, named["LIBRARIES"].values):
        yield key.value, strings(value.elts[0]) + strings(value.elts[1])
    yield "kv-indexer", strings(named["INDEXER"].elts[0])


def links():
    """For each kv_room() of src, the rooms that it is linked with."""
    found = {}
    for path in (root / "src").rglob("CMakeLists.txt"):
        for name, linked in re.findall(r"kv_room\(NAME (\w+)[^)]*?LINK ([^)]*)\)", path.read_text()):
            found[name] = re.findall(r"\bkv_(\w+)", linked)
    return found


def closure(rooms, linked):
    seen, queue = set(), list(rooms)
    while queue:
        room = queue.pop()
        if room not in seen:
            seen.add(room)
            queue += linked.get(room, [])
    return seen


# The wheel links the rooms' archives by itself: a room that CMake links is in its list, too.
linked = links()
for name, rooms in libraries():
    for lacking in sorted(closure(rooms, linked) - set(rooms)):
        print(f"tools/wheel.py: {name} lacks the room {lacking}")
        bad = 1
sys.exit(bad)
