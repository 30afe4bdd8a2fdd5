# SPDX-License-Identifier: Apache-2.0
"""For kvasir.router: which requests of OpenAI's API generate text, and the tokens of their prompts."""
import json
from typing import Any, Dict, List, Optional, Sequence

from ._asgi import fetch

GENERATES = ("/v1/completions", "/v1/chat/completions")
_PROMPT = ("model", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
           "chat_template_kwargs")  # fields of a request that decide its tokens


def _first(request: Dict[str, Any]) -> Any:
    """Return the prompt that decides: the first of several."""
    prompt = request.get("prompt")
    return prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt


def given_tokens(request: Dict[str, Any]) -> Optional[Sequence[int]]:
    """Return the prompt's tokens where the request has them, else None."""
    prompt = _first(request)
    return prompt if isinstance(prompt, list) else None


async def fetch_tokens(url: str, request: Dict[str, Any], connect_s: float) -> Sequence[int]:
    """Ask /tokenize of the engine at @url for a prompt's tokens. [] where it has none. Raises one of LOST, when the engine is gone."""
    wanted, prompt = {name: request[name] for name in _PROMPT if name in request}, _first(request)
    data = json.dumps({**wanted, "prompt": prompt} if prompt is not None else wanted).encode()
    answer = await fetch(url, "POST", "/tokenize", [(b"content-type", b"application/json")], data, connect_s)
    try:
        told = b"".join([piece async for piece in answer.body])
    finally:
        answer.close()
    try:
        tokens: List[int] = json.loads(told)["tokens"] if answer.status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []
    return tokens if isinstance(tokens, list) else []
