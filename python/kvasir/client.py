# SPDX-License-Identifier: Apache-2.0
"""kv-indexer over HTTP, with the standard library alone.

    with kvasir.client.Client("http://127.0.0.1:8090") as indexer:
        indexer.register(1, "tcp://worker1:5557", model_name="llama", block_size=16)
        scores = indexer.query(token_ids, model_name="llama")["scores"]    # {"1": {"0": 64}}: tokens by worker and rank

AsyncClient has the same calls for asyncio. Both keep their connections, and try once more when an idle one was closed.
"""
import asyncio
import http.client
import json
import ssl
import threading
import urllib.parse
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, TypeVar, Union

from ._native import Error, Invalid, also

__all__ = ["AsyncClient", "Client", "HTTPError", "InstanceId", "as_instance_id", "held_tokens"]

Json = Dict[str, Any]
InstanceId = Union[int, str]  # a number, or a name such as a pod's


_Client = TypeVar("_Client", bound="Client")
_AsyncClient = TypeVar("_AsyncClient", bound="AsyncClient")


class HTTPError(Error):
    """kv-indexer refused a request: `status`, and its reason as text."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(_ERRNO.get(status, 5), f"HTTP {status}: {reason}")
        self.status = status
        self.reason = reason


_ERRNO = {400: 22, 401: 13, 403: 13, 404: 2, 405: 95, 409: 17, 413: 7, 415: 22, 422: 22, 503: 11}  # as a C call would say it


class _Calls:
    """Requests of both clients: each method returns what _do() makes of (method, path, body)."""

    def _do(self, method: str, path: str, body: Optional[Json] = None) -> Any:
        raise NotImplementedError

    def health(self) -> Any:
        """Whether the indexer is ready."""
        return self._do("HEALTH", "/health")

    def metrics(self) -> Any:
        """Prometheus text."""
        return self._do("TEXT", "/metrics")

    def workers(self, *, model_name: Optional[str] = None, tenant_id: Optional[str] = None) -> Any:
        """List the registered workers and their streams."""
        wanted = {name: value for name, value in (("model_name", model_name), ("tenant_id", tenant_id)) if value is not None}
        return self._do("GET", "/workers" + ("?" + urllib.parse.urlencode(wanted) if wanted else ""))

    def query(self, token_ids: Iterable[int], *, model_name: str, tenant_id: Optional[str] = None, lora_name: Optional[str] = None,
              cache_salt: Optional[str] = None, mm_objects: Optional[Sequence[Json]] = None, block_mm_infos: Optional[Sequence[Optional[Json]]] = None,
              explain: Optional[bool] = None, **fields: Any) -> Any:
        """Ask which workers hold a prompt's prefix. None: not said. @fields: others of `POST /query`."""
        return self._do("POST", "/query", _said({"token_ids": _plain(token_ids), "model_name": model_name}, tenant_id=tenant_id, lora_name=lora_name,
                                                cache_salt=cache_salt, mm_objects=mm_objects, block_mm_infos=block_mm_infos, explain=explain, **fields))

    def query_by_hash(self, block_hashes: Iterable[int], *, model_name: str, **fields: Any) -> Any:
        """Ask by the local hashes of the prompt's blocks (kvasir.index.hash_tokens)."""
        return self._do("POST", "/query_by_hash", {"block_hashes": _plain(block_hashes), "model_name": model_name, **fields})

    def query_by_sequence_hashes(self, hashes: Iterable[int], *, model_name: str, **fields: Any) -> Any:
        """Ask by the hashes that the workers' events carry: of consecutive blocks of one prompt, from any block on."""
        return self._do("POST", "/query_by_hash", {"sequence_hashes": _plain(hashes), "model_name": model_name, **fields})

    def register(self, instance_id: InstanceId, endpoint: str, *, model_name: str, block_size: int, tenant_id: Optional[str] = None,
                 dp_rank: Optional[int] = None, replay_endpoint: Optional[str] = None, num_blocks: Optional[int] = None, **fields: Any) -> Any:
        """Follow a worker's events. None: not said. @fields: others of `POST /register`."""
        worker = {"instance_id": instance_id, "endpoint": endpoint, "model_name": model_name, "block_size": block_size}
        return self._do("POST", "/register", _said(worker, tenant_id=tenant_id, dp_rank=dp_rank, replay_endpoint=replay_endpoint,
                                                   num_blocks=num_blocks, **fields))

    def unregister(self, instance_id: InstanceId, *, model_name: str, tenant_id: Optional[str] = None, dp_rank: Optional[int] = None,
                   **fields: Any) -> Any:
        """Stop following a worker, or one rank of it (tenant_id and dp_rank), and forget its blocks."""
        return self._do("POST", "/unregister", _said({"instance_id": instance_id, "model_name": model_name}, tenant_id=tenant_id,
                                                     dp_rank=dp_rank, **fields))


def _said(body: Json, **fields: Any) -> Json:
    """Add the fields that aren't None."""
    body.update((name, value) for name, value in fields.items() if value is not None)
    return body


def as_instance_id(text: str) -> InstanceId:
    """Return an instance_id that was written as text, as keys of answers are: digits alone are a number."""
    return int(text) if text.isascii() and text.isdigit() else text


def held_tokens(answer: Json) -> Dict[InstanceId, int]:
    """Return how many tokens of the prompt each worker holds, by instance_id, in the best of its ranks. @answer: of a query."""
    return {as_instance_id(key): max(ranks.values(), default=0) for key, ranks in answer["scores"].items()}


def _plain(values: Iterable[int]) -> List[int]:
    """Return a list of Python's integers, also of a numpy array."""
    to_list: Any = getattr(values, "tolist", None)
    plain: List[int] = list(values) if to_list is None else to_list()
    return plain


def _answer(kind: str, status: int, data: bytes) -> Any:
    if kind == "HEALTH" and status in (200, 503):
        return status == 200
    if status >= 400:
        try:
            reason = str(json.loads(data)["error"])
        except (ValueError, KeyError, TypeError):
            reason = data[:200].decode(errors="replace")
        raise HTTPError(status, reason)
    if kind == "TEXT":
        return data.decode()
    return json.loads(data) if data else {}


def _target(url: str) -> Tuple[bool, str, int, str]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(f"not an HTTP URL: {url}")
    return parts.scheme == "https", parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")


def _headers(token: Optional[str]) -> Dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return headers


class Client(_Calls):
    """Client for threads: each thread has a connection of its own."""

    def __init__(self, url: str, *, token: Optional[str] = None, timeout: float = 10.0, context: Optional[ssl.SSLContext] = None) -> None:
        self._url, (self._tls, self._host, self._port, self._prefix) = url, _target(url)
        self._sent = _headers(token)
        self._timeout, self._context = timeout, context
        self._local = threading.local()
        self._open: List[http.client.HTTPConnection] = []

    def _connection(self) -> http.client.HTTPConnection:
        connection: Optional[http.client.HTTPConnection] = getattr(self._local, "connection", None)
        if connection is None:
            if self._tls:
                connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._context)
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
            self._local.connection = connection
            self._open.append(connection)
        return connection

    def _do(self, method: str, path: str, body: Optional[Json] = None) -> Any:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        connection = self._connection()
        fresh = connection.sock is None
        verb = "GET" if method in ("HEALTH", "TEXT") else method
        while True:
            try:
                connection.request(verb, self._prefix + path, data, self._sent)
                reply = connection.getresponse()
                return _answer(method, reply.status, reply.read())
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as problem:
                connection.close()
                if fresh:
                    raise also(problem, self._url) from problem
                fresh = True  # it was idle, and the server closed it: once more, on a new one
            except HTTPError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as problem:
                connection.close()
                raise also(problem, self._url) from problem

    def close(self) -> None:
        """Close the connections of all threads."""
        while self._open:
            self._open.pop().close()

    def __repr__(self) -> str:
        return f"<kvasir.client.Client {self._url!r}>"

    def __enter__(self: _Client) -> _Client:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class AsyncClient(_Calls):
    """Client for asyncio: its methods are awaited. Holds up to @connections idle connections."""

    def __init__(self, url: str, *, token: Optional[str] = None, timeout: float = 10.0, context: Optional[ssl.SSLContext] = None,
                 connections: int = 16) -> None:
        self._url, (tls, self._host, self._port, self._prefix) = url, _target(url)
        self._tls = (context or ssl.create_default_context()) if tls else None
        self._timeout, self._most = timeout, connections
        lines = "".join(f"{name}: {value}\r\n" for name, value in _headers(token).items())
        self._head = f"Host: {self._host}:{self._port}\r\n{lines}"
        self._idle: List[Tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def _do(self, method: str, path: str, body: Optional[Json] = None) -> Any:
        try:
            return await asyncio.wait_for(self._request(method, path, body), self._timeout)
        except HTTPError:
            raise
        except (OSError, EOFError, ValueError, LookupError, asyncio.TimeoutError, asyncio.LimitOverrunError) as problem:
            raise also(problem, self._url) from problem

    async def _request(self, method: str, path: str, body: Optional[Json]) -> Any:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        verb = "GET" if method in ("HEALTH", "TEXT") else method
        sent = f"{verb} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        while True:
            used = bool(self._idle)
            reader, writer = self._idle.pop() if used else await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            try:
                writer.write(sent)
                await writer.drain()
                status, keep, answer = await _read(reader)
            except (ConnectionError, asyncio.IncompleteReadError):
                writer.close()
                if used:
                    continue  # it was idle, and the server closed it
                raise
            except BaseException:
                writer.close()
                raise
            if keep and len(self._idle) < self._most:
                self._idle.append((reader, writer))
            else:
                writer.close()
            return _answer(method, status, answer)

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            await writer.wait_closed()

    def __repr__(self) -> str:
        return f"<kvasir.client.AsyncClient {self._url!r}>"

    async def __aenter__(self: _AsyncClient) -> _AsyncClient:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()


async def _read(reader: asyncio.StreamReader) -> Tuple[int, bool, bytes]:
    """Read one answer: status, whether the connection stays, body."""
    line = await reader.readuntil(b"\r\n")
    status = int(line.split()[1])
    headers: Dict[str, str] = {}
    while True:
        line = await reader.readuntil(b"\r\n")
        if line == b"\r\n":
            break
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    keep = headers.get("connection") != "close"
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            parts.append(await reader.readexactly(size))
            await reader.readuntil(b"\r\n")
            if not size:
                return status, keep, b"".join(parts)
    if "content-length" in headers:
        return status, keep, await reader.readexactly(int(headers["content-length"]))
    return status, False, await reader.read()
