# SPDX-License-Identifier: Apache-2.0
"""For kvasir.router: requests of the Messages and Responses APIs as chats, as engines make them before they apply their template."""
import json
from typing import Any, Dict, List, Optional

Json = Dict[str, Any]
_CHAT = ("model", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
         "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")  # fields that decide the tokens


def _parts(content: Any) -> Any:
    """Return a message's content as a chat has it: text, or parts of text and images."""
    if not isinstance(content, list):
        return content
    parts = [part for part in map(_part, content) if part is not None]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Json) -> Optional[Json]:
    kind = block.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": block.get("text", "")}
    if kind == "image":
        source = block.get("source", {})
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source.get("url", data)}}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": block.get("image_url")}}
    return None


def _call(name: Any, number: Any, arguments: str) -> Json:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _of_message(message: Json) -> List[Json]:
    """Return one message of the Messages API: results of tools become messages of their own, before it."""
    content = message.get("content")
    blocks: List[Json] = content if isinstance(content, list) else []
    made: List[Json] = [{"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _parts(block.get("content", ""))}
                        for block in blocks if block.get("type") == "tool_result"]
    own: Json = {"role": message.get("role")}
    thoughts = "".join(block.get("thinking", "") for block in blocks if block.get("type") == "thinking")
    calls = [_call(block.get("name"), block.get("id"), json.dumps(block.get("input", {}))) for block in blocks if block.get("type") == "tool_use"]
    fields: Json = {"reasoning": thoughts, "tool_calls": calls, "content": _parts(content)}
    own.update((name, value) for name, value in fields.items() if value)
    return made + ([own] if len(own) > 1 else [])


def messages_as_chat(request: Json) -> Json:
    """Return a request for /v1/messages as one for /v1/chat/completions."""
    system = request.get("system")
    text = "".join(block.get("text", "") for block in system) if isinstance(system, list) else system
    chat: List[Json] = [{"role": "system", "content": text}] if text else []
    for message in request["messages"]:
        chat += _of_message(message)
    tools = [{"type": "function", "function": {"name": tool.get("name"), "description": tool.get("description"),
                                               "parameters": tool.get("input_schema")}} for tool in request.get("tools") or ()]
    made: Json = {**request, "messages": chat, "tools": tools or None}
    if (request.get("thinking") or {}).get("type") == "disabled":
        made["reasoning_effort"] = "none"
    return made


def responses_as_chat(request: Json) -> Json:
    """Return a request for /v1/responses as one for /v1/chat/completions. Raises ValueError: the engine has the rest of it."""
    if request.get("previous_response_id") or request.get("conversation"):
        raise ValueError("the engine alone knows what came before")
    given, chat = request["input"], []  # type: Any, List[Json]
    if request.get("instructions"):
        chat.append({"role": "system", "content": request["instructions"]})
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not chat or chat[-1]["role"] != "assistant":
                chat.append({"role": "assistant"})
            chat[-1].setdefault("tool_calls", []).append(_call(item.get("name"), item.get("call_id"), item.get("arguments", "")))
        elif kind == "function_call_output":
            chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))})
        elif kind == "message":
            chat.append({"role": item["role"], "content": _parts(item.get("content"))})
    tools = [{"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}}
             for tool in request.get("tools") or () if tool.get("type") == "function"]
    made: Json = {**request, "messages": chat, "tools": tools or None}
    effort = (request.get("reasoning") or {}).get("effort")
    return {**made, "reasoning_effort": effort} if effort else made


def tokenize_request(chat: Json) -> Json:
    """Return what /tokenize takes of a chat: the fields that it lacks go to the template as its variables."""
    wanted = {name: chat[name] for name in _CHAT if chat.get(name) is not None}
    variables = dict(wanted.get("chat_template_kwargs") or {})
    if chat.get("documents") is not None:
        variables["documents"] = chat["documents"]
    if chat.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = chat["reasoning_effort"]
        variables.setdefault("enable_thinking", chat["reasoning_effort"] != "none")
    return {**wanted, "chat_template_kwargs": variables} if variables else wanted
