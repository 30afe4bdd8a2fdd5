# SPDX-License-Identifier: Apache-2.0
"""Blocks for other nodes: a manager whose tiers they read, without a copy of their own on disk or in a store.

    agent = kvasir.peers.Agent("node-7", fingerprint="model", listen="tcp:10.0.0.7:9100", token_file="/etc/kv.token")
    manager = Manager(shape, host_bytes=1 << 34, fingerprint="model", agent=agent, peers="file:/etc/kv.peers")
    lent = agent.lend(manager)                         # until lent.close()

The manager reads blocks that it lacks from those that lend (`peers`: their endpoints, "file:PATH" or "etcd://...").
"""
import ctypes
import errno
import os
import socket
import uuid
import weakref
from typing import Any, List, Optional, Sequence, Union

from . import _abi
from ._native import Handle, call, error, load, text
from ._options import Size, given, set_agent_options
from .blocks import Manager

__all__ = ["Agent", "Lent"]

_c = load("kvbm")
_NAME_MAX = 63


def _drawn() -> str:
    """A name that no other agent has: of this machine, process, and moment."""
    host = "".join(letter for letter in socket.gethostname() if letter.isascii() and (letter.isalnum() or letter in "._-"))
    return f"{host[:24]}-{os.getpid()}-{uuid.uuid4().hex[:16]}"[:_NAME_MAX]


class Agent(Handle):
    """One node's name among its peers, and its sessions with them.

    @name: unique among agents that meet; drawn unless given. @fingerprint: all that makes equal keys mean equal bytes; peers of
    another one are refused, as are those of another @key_len. @listen: endpoints, "unix:/PATH" (the same user's processes only),
    "tcp:HOST:PORT" (port 0: any). Beyond loopback they need token_file, tls_ca or unprotected=True. @worker: the engine's
    instance_id in kv-indexer, a number or a name. Other options are those of kvbm_agent_opts (kvbm_remote.h) by name. Close the
    managers that use it first. Any number of threads.
    """

    def __init__(self, name: Optional[str] = None, *, fingerprint: str = "", key_len: int = 8, listen: Union[str, Sequence[str]] = (),
                 worker: Union[int, str, None] = None, max_sets: Optional[int] = None, max_bytes: Optional[Size] = None,
                 unprotected: Optional[bool] = None, token_file: Optional[str] = None, tls_cert: Optional[str] = None,
                 tls_key: Optional[str] = None, tls_ca: Optional[str] = None, max_sessions: Optional[int] = None,
                 max_requests: Optional[int] = None, max_queued_bytes: Optional[Size] = None, max_received_bytes: Optional[Size] = None,
                 keepalive_ms: Optional[int] = None, handshake_ms: Optional[int] = None, ucx: Optional[int] = None,
                 nixl: Optional[int] = None, **others: Any) -> None:
        number, called = (None, text(worker)) if isinstance(worker, str) else (worker, None)
        options = given(
            worker=number, max_sets=max_sets, max_bytes=max_bytes, unprotected=unprotected, token_file=token_file,
            tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca, max_sessions=max_sessions, max_requests=max_requests,
            max_queued_bytes=max_queued_bytes, max_received_bytes=max_received_bytes, keepalive_ms=keepalive_ms,
            handshake_ms=handshake_ms, ucx=ucx, nixl=nixl, **others)
        places: List[str] = [listen] if isinstance(listen, str) else list(listen)
        listed = (ctypes.c_char_p * max(1, len(places)))(*[text(place) for place in places])
        self.name = _drawn() if name is None else name
        opts = _abi.kvbm_agent_opts(name=text(self.name), worker_name=called, fingerprint=text(fingerprint), key_len=key_len,
                                    listen=ctypes.addressof(listed) if places else None, n_listen=len(places))
        set_agent_options(opts, options)
        address = ctypes.c_void_p()
        call(_c.kvbm_agent_create, ctypes.byref(opts), ctypes.byref(address))
        self._users: "weakref.WeakSet[Handle]" = weakref.WeakSet()  # managers and lent blocks
        self._listens = len(places)
        self._own(address.value or 0, _c.kvbm_agent_destroy)

    def _about(self) -> str:
        return f"{self.name!r} listens={self._listens}"

    @property
    def endpoints(self) -> List[str]:
        """Where it listens, with the ports that were drawn."""
        found = []
        for i in range(self._listens):
            to = ctypes.create_string_buffer(1024)
            self._call(_c.kvbm_agent_endpoint, i, to, len(to), None)
            found.append(to.value.decode())
        return found

    def lend(self, manager: Manager, *, share: int = 0, set_id: int = 1) -> "Lent":
        """Let peers look up, lease and read blocks of all tiers of @manager, until the result is closed.

        @share: percentage of the host blocks that they may hold at a time (0: 25). The manager needs host_bytes; with
        host_shared=True peers of the same machine copy from its memory themselves.
        """
        return Lent(self, manager, share, set_id)

    def close(self) -> None:
        """End the sessions. Raises Error(EBUSY) while a manager uses it, or lends by it."""
        if any(not user.closed for user in self._users):
            raise error(-errno.EBUSY, "a manager uses the agent")
        super().close()


class Lent(Handle):
    """Blocks that a manager lends; see Agent.lend(). close() waits until no peer holds one."""

    def __init__(self, agent: Agent, manager: Manager, share: int, set_id: int) -> None:
        address, of = ctypes.c_void_p(), manager._enter()
        try:
            source = _c.kvbm_manager_source(of)
            opts = _abi.kvbm_blockset_opts(id=set_id, layout=_c.kvbm_manager_host_layout(of), source=ctypes.addressof(source),
                                           shared=_c.kvbm_manager_shared(of), lease_share=share)
            agent._call(_c.kvbm_blockset_export, ctypes.byref(opts), ctypes.byref(address))
        finally:
            manager._leave()
        self._own(address.value or 0, lambda lent: _withdraw(lent, agent, manager))
        manager._caches.add(self)
        agent._users.add(self)


def _withdraw(address: int, *_keep: Any) -> int:
    """End a set; its agent and manager are kept until then."""
    _c.kvbm_blockset_destroy(address)
    return 0
