# SPDX-License-Identifier: Apache-2.0
"""For kvasir.router: which requests generate text, and the tokens of their prompts as an engine tells them."""
import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from ._chat import messages_as_chat, responses_as_chat, tokenize_request
from ._http import Headers, Refused, fetch
from ._json import loads

Json = Dict[str, Any]
GENERATES: Dict[str, Optional[Callable[[Json], Json]]] = {  # path: how its requests become chats, None for prompts
    "/v1/completions": None, "/v1/chat/completions": lambda chat: chat, "/v1/messages": messages_as_chat, "/v1/responses": responses_as_chat}
ANSWER_MAX = 64 << 20  # bytes of an engine's answer about tokens; of pictures it holds the pixels
_SHOWN = (b"authorization", b"x-api-key", b"api-key")


class Prompt(NamedTuple):
    """Prompt of a request: its tokens, and kv-indexer's mm_objects for images and the like among them."""
    tokens: Sequence[int] = ()
    objects: Sequence[Json] = ()


def _first(request: Json) -> Any:
    """Return the prompt that decides: the first of several."""
    prompt = request.get("prompt")
    return prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt


def _cut(request: Json, tokens: Sequence[int]) -> Sequence[int]:
    """Return what truncate_prompt_tokens leaves of a prompt."""
    most = request.get("truncate_prompt_tokens")
    if not isinstance(most, int) or most < 0:
        return tokens
    return tokens[:most] if request.get("truncation_side") == "right" else tokens[max(0, len(tokens) - most):]


def given_tokens(request: Json) -> Optional[Sequence[int]]:
    """Return the prompt's tokens where the request has them, else None."""
    prompt = _first(request)
    return _cut(request, prompt) if isinstance(prompt, list) else None


def _objects(features: Any) -> List[Json]:
    """Return kv-indexer's mm_objects for the features of a rendered prompt."""
    if not features:
        return []
    hashes, places = features["mm_hashes"], features["mm_placeholders"]
    return [{"id": name, "offset": place["offset"], "length": place["length"]}
            for kind in hashes for name, place in zip(hashes[kind], places[kind])]


class Tokenizer:
    """What the engine at @url tells of prompts. Calls raise Refused while it is down, and others of LOST."""

    def __init__(self, url: str, connect_s: float) -> None:
        self.url, self.connect_s = url, connect_s
        self._renders: Dict[str, bool] = {}  # by path: whether it has PATH/render

    async def _ask(self, method: str, path: str, headers: Headers, body: bytes = b"") -> Any:
        """Return (status, body)."""
        answer = await fetch(self.url, method, path, headers, body, self.connect_s)
        try:
            if answer.status in (502, 503, 504):
                raise Refused(f"it answers {answer.status}")
            return answer.status, await answer.read(ANSWER_MAX)
        finally:
            answer.close()

    async def _has_render(self, path: str, headers: Headers) -> bool:
        """Whether the engine has PATH/render, for which nothing but POST is allowed."""
        if path not in self._renders:
            status, _ = await self._ask("GET", path + "/render", headers)
            if status in (401, 403):
                return False  # it says so to others
            self._renders[path] = status == 405
        return self._renders[path]

    async def _render(self, path: str, headers: Headers, body: bytes) -> Optional[Prompt]:
        status, told = await self._ask("POST", path + "/render", headers, body)
        if status != 200:
            return None
        if told[:1] == b"[":  # of several prompts
            told = b'{"all":%b}' % told
        value = await loads(told, "token_ids")
        value = value["all"][0] if "all" in value else value
        return Prompt(value["token_ids"], _objects(value.get("features")))

    async def prompt(self, path: str, request: Json, body: bytes, client: Headers) -> Prompt:
        """Return a request's prompt as this engine would compute it, none when it can't tell. @client: the request's headers."""
        headers = [(b"content-type", b"application/json"), *(field for field in client if field[0] in _SHOWN)]
        as_chat = GENERATES[path]
        if await self._has_render(path, headers):
            rendered = await self._render(path, headers, body)
            if rendered is not None:
                return rendered
        if as_chat is not None:
            wanted = tokenize_request(as_chat(request))
        else:
            wanted = {name: request[name] for name in ("model", "add_special_tokens") if name in request}
            wanted["prompt"] = _first(request)
        status, told = await self._ask("POST", "/tokenize", headers, json.dumps(wanted).encode())
        tokens = (await loads(told, "tokens"))["tokens"] if status == 200 else []
        return Prompt(_cut(request, tokens) if isinstance(tokens, list) else ())

    async def probe(self) -> None:
        """Wait for an answer of any kind."""
        await self._ask("GET", "/v1/models", [])

    def forget(self) -> None:
        """Ask anew what the engine has: another may answer now."""
        self._renders.clear()
