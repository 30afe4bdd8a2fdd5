# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers, for kvasir.router: bounded, and without holding up the event loop."""
import asyncio
import json
import re
from typing import Any, Dict, List

ITEMS_MAX = 1 << 17  # values beside long lists of numbers; json.loads takes a tenth of a second for as many
STEP = 1 << 15  # bytes of a long list between two turns of the event loop
_LONG = re.compile(rb"\[[0-9, \t\r\n]{%d,}\]" % STEP)


async def _numbers(text: bytes) -> List[int]:
    """Parse a list of numbers without its brackets."""
    found: List[int] = []
    at = 0
    while at <= len(text):
        end = text.find(b",", at + STEP)
        end = len(text) if end < 0 else end
        found += map(int, text[at:end].split(b","))
        at = end + 1
        await asyncio.sleep(0)
    return found


async def loads(data: bytes, name: str) -> Dict[str, Any]:
    """Parse an object; the member @name, or the first element of it, may be a long list of numbers.

    Raises ValueError: no object, or more than ITEMS_MAX other values, or nested too deeply.
    """
    long = _LONG.search(data) if len(data) > STEP else None
    rest = data if long is None else b"%b[-1]%b" % (data[:long.start()], data[long.end():])
    if sum(rest.count(mark) for mark in (b",", b"[", b"{")) > ITEMS_MAX:
        raise ValueError("too many values")
    try:
        value = json.loads(rest)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    if long is not None:
        _place(value, name, await _numbers(data[long.start() + 1:long.end() - 1]))
    return value


def _place(value: Dict[str, Any], name: str, numbers: List[int]) -> None:
    """Put @numbers where loads() left [-1] for them."""
    member = value.get(name)
    if member == [-1]:
        value[name] = numbers
    elif isinstance(member, list) and member and member[0] == [-1]:
        member[0] = numbers
    else:
        raise ValueError(f"a long list of numbers that isn't {name}")
