# SPDX-License-Identifier: Apache-2.0
"""Loads the C libraries, calls their functions and lends them Python's memory.

Libraries are looked for in $KVASIR_LIBRARY_PATH, then in the package. ctypes releases the interpreter's lock during each
call, so other threads run on.
"""
import array
import ctypes
import errno
import math
import os
import re
import threading
import time
import weakref
from threading import get_ident
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar, Union

from . import _abi

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_lib")


class Error(OSError):
    """A call failed. `errno` is the library's error, the text its reason."""

    told = True  # False: the library logged no reason, and the text is the package's


class NotFound(Error, KeyError):
    """A name or key is not there."""

    __str__ = OSError.__str__


class Invalid(Error, ValueError):
    """A value that can't be: the call was not made."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)

    def __str__(self) -> str:
        return str(self.strerror)


class Unknown(Invalid, KeyError):
    """A word that is none of those that an option knows."""

    __str__ = Invalid.__str__


class Damaged(Error):
    """Stored bytes did not verify. The library never hands them out."""


_ERRORS = {errno.ENOENT: NotFound, errno.EBADMSG: Damaged}
_KINDS: Dict[type, type] = {}
_Self = TypeVar("_Self", bound="Handle")


def error(rc: int, reason: str) -> Error:
    """Make the exception of the negative errno @rc; @reason: log lines, or words."""
    lines = [re.sub(r"^time=\S+ level=\S+ (component=\S+ )?", "", line) for line in reason.splitlines()]
    return _ERRORS.get(-rc, Error)(-rc, f"{os.strerror(-rc)}: {'; '.join(lines)}")


def also(problem: Exception, about: str) -> Error:
    """Make an Error of another library's exception; it is an instance of that one's class, too."""
    kind: Type[Exception] = type(problem)
    if kind not in _KINDS:
        known = {"__module__": __name__, "__str__": OSError.__str__}
        try:
            _KINDS[kind] = type(kind.__name__, (Error, kind), known)
        except TypeError:  # UnicodeDecodeError, whose objects have another form
            _KINDS[kind] = type(kind.__name__, (Error, ValueError), known)
    number = getattr(problem, "errno", None) or (errno.ETIMEDOUT if "Timeout" in kind.__name__ else errno.EPROTO)
    made: Error = _KINDS[kind](number, f"{about}: {getattr(problem, 'strerror', None) or str(problem) or kind.__name__}")
    return made


# Reasons of calls that log nothing: a pattern of their names, the errno, the reason.
REASONS: List[Tuple[str, int, str]] = [
    (r"kvs_(get|put|delete)_chunk|kvs_(exists|touch|prefetch)|kvs_async_submit", errno.EINVAL, "keys have 1 to 64 bytes, the same length in one call"),
    (r"kvs_get_chunks_into|kvs_async_submit", errno.EMSGSIZE, "a block is longer than the memory for it"),
    (r"kvs_.*manifest", errno.EINVAL, "not a name: it is empty, or has a form that the store refuses"),
    (r"kvs_async_submit", errno.EAGAIN, "max_requests of the queue are under way, or not polled yet"),
    (r"kvi_remove_", errno.ENOENT, "no such worker or rank"),
    (r"kvsel_.*(worker|lora|load)", errno.ENOENT, "no such worker or rank"),
    (r"kvsel_(first_token|output|free)", errno.ENOENT, "no such booking: never made, freed or expired"),
    (r"kvsel_book", errno.EEXIST, "the id is in use"),
    (r"kvsel_(select|explain)", errno.EHOSTUNREACH, "no worker fits the request; explain() tells why"),
    (r"kvsel_(select|explain)", errno.EAGAIN, "every worker that fits has enough to do, or others are held already"),
    (r"kvsel_queue_put", errno.ENOBUFS, "queue_max or queue_max_tokens are reached"),
    (r"kvsel_queue_drop", errno.ENOENT, "no such ticket is held"),
    (r"kvi_window_", errno.EINVAL, "no such window of the holder, tier or source"),
    (r"kvi_set_window", errno.EINVAL, "a window of no tokens or blocks, or with parts that don't fit"),
    (r"kvi_(store|add|take|clear)", errno.EINVAL, "a tier is 0 to 3, a source 0 to 65535, a store has blocks"),
    (r"kvi_(store|add)", errno.ENOSPC, "max_blocks or max_holder_blocks of the index are reached"),
    (r"kvbm_registry_create", errno.EINVAL, "key_len is 1 to 64"),
    (r"kvbm_manager_wait", errno.ENOENT, "no such job, or its result was taken"),
    (r"kvbm_(manager_wait|pin_wait|manager_drain)|kve_publisher_flush", errno.ETIMEDOUT, "not done within the timeout"),
    (r"kvbm_manager_cancel", errno.ENOENT, "no such job, or it has ended"),
    (r"kvbm_manager_create", errno.EINVAL, "an option is out of range; host_bytes hold one block at least"),
    (r"kvbm_manager_hit|kvbm_hit_needs", errno.EINVAL, "a group without block size or span, or tokens or a unit that are no multiple of a block size"),
    (r"kve_publisher_create", errno.EINVAL, "not an endpoint that can be bound, or an option out of range"),
    (r"kve_publisher_create", errno.ENODEV, "no such interface or host for the endpoint"),
    (r"kve_publisher_publish", errno.EAGAIN, "the queue is full: followers see a gap, and ask for a replay"),
    (r"kve_publisher_publish", errno.EINVAL, "a store has hashes, and tokens or none"),
]

# -- libraries ---------------------------------------------------------------------------------------------------------

_SET_LOG = {"kvstore": "kvs_set_log", "kvindex": "kvi_set_log", "kvselect": "kvsel_set_log", "kvevent": "kve_set_log",
            "kvbm": "kvbm_set_log", "kvx": "kvx_set_log", "kvasir_llama": "kvl_set_log"}
_libraries: Dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def find(name: str) -> str:
    """Return the path of the library @name ("kvstore")."""
    file = f"lib{name}.so"
    for folder in (*os.environ.get("KVASIR_LIBRARY_PATH", "").split(":"), FOLDER):
        path = os.path.join(folder, file)
        if folder and os.path.exists(path):
            return path
    raise ImportError(f"{file} is neither in $KVASIR_LIBRARY_PATH nor in {FOLDER}")


def load(name: str) -> ctypes.CDLL:
    """Load a library once, declare its functions, and send its log lines to the package's hook."""
    with _lock:
        if name in _libraries:
            return _libraries[name]
        library = ctypes.CDLL(find(name), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        for function, result, arguments in _abi.PROTOTYPES[name]:
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
        getattr(library, _SET_LOG[name])(ctypes.cast(_reason.kvpy_log, ctypes.c_void_p), None)
        _libraries[name] = library
        return library


as_word: Callable[[int], Any] = ctypes.c_void_p.from_param  # an address or a size_t as an argument for untyped()


def untyped(library: ctypes.CDLL, name: str, result: Any) -> Any:
    """Return a function of C that ctypes calls in half the time, as it checks no argument.

    Give it as_word() of addresses and sizes, bytes for their address, None for NULL, and plain numbers for an int of C.
    """
    function = library[name]  # another object than the one with prototype
    function.restype = result
    return function


_reason = ctypes.CDLL(find("kvreason"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
_begin, _end = _reason.kvpy_begin, _reason.kvpy_end
_begin.argtypes, _begin.restype = [], None
_end.argtypes, _end.restype = [ctypes.c_int], ctypes.c_char_p
_reason.kvpy_show.argtypes, _reason.kvpy_show.restype = [ctypes.c_int], None
_LEVELS = {"off": -1, "error": 0, "warning": 1, "info": 2, "debug": 3}


def set_log_level(level: str) -> None:
    """Print the libraries' log lines up to @level to stderr: off, error, warning (the default), info, debug.

    The reason of a call that fails is in its exception and isn't printed.
    """
    if level not in _LEVELS:
        raise Invalid(f"no log level {level!r}; one of {', '.join(_LEVELS)}")
    _reason.kvpy_show(_LEVELS[level])


def call(function: Callable[..., Any], *args: Any) -> int:
    """Call a function that returns a negative errno on failure; raise Error with the reason that it logged."""
    rc = -errno.EINTR
    _begin()
    try:
        rc = function(*args)
    finally:
        reason = _end(rc < 0)
    if rc < 0:
        raise _failed(function, rc, (reason or b"").decode(errors="replace"))
    return rc


def _failed(function: Any, rc: int, told: str) -> Error:
    """Make the exception of a call. A function, so that no frame of the traceback names it: its memory is free at once."""
    problem = error(rc, told or unsaid(getattr(function, "__name__", "the call"), rc))
    problem.told = bool(told)
    return problem


def unsaid(function: str, rc: int) -> str:
    """Return why @function failed where it logs nothing: what REASONS know, else its name."""
    for pattern, number, reason in REASONS:
        if number == -rc and re.match(pattern, function):
            return reason
    return f"{function}() refuses its arguments" if rc == -errno.EINVAL else f"{function}() says so"


def certain(rcs: List[int], function: Callable[..., Any], *args: Any) -> None:
    """Call a function of C and append what it returns to @rcs, whatever a signal's handler raises meanwhile.

    With the exception @rcs tells whether the function ran: no Python code runs between its return and the append.
    """
    rcs.extend(map(function, *zip(args)))


def text(value: Optional[str]) -> Optional[bytes]:
    """Encode a string for C; None stays NULL. A NUL would cut it short and is refused."""
    if value is None:
        return None
    if "\0" in value:
        raise Invalid("a NUL in a string")
    return value.encode()


# -- memory of Python's, lent to C -------------------------------------------------------------------------------------

class _View(ctypes.Structure):
    """CPython's Py_buffer."""
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


class DLTensor(ctypes.Structure):
    """DLPack's DLTensor: memory, device, element type and shape of a framework's tensor."""
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


_api = ctypes.pythonapi
_incref, _decref = _api.Py_IncRef, _api.Py_DecRef
_incref.argtypes = _decref.argtypes = [ctypes.py_object]
_incref.restype = _decref.restype = None
_get_buffer, _release_buffer = _api.PyObject_GetBuffer, _api.PyBuffer_Release
_get_buffer.argtypes, _get_buffer.restype = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int], ctypes.c_int
_release_buffer.argtypes, _release_buffer.restype = [ctypes.c_void_p], None
_capsule = _api.PyCapsule_GetPointer
_capsule.argtypes, _capsule.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_WRITABLE = 1
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType


class Memory:
    """Memory of a Python object, lent as long as this lives: `address`, `nbytes`."""

    __slots__ = ("address", "nbytes", "_owner", "_view", "__weakref__")

    def __init__(self, source: Any, writable: bool = False) -> None:
        view = _View()
        self._view = view  # before it is filled: a signal's handler may raise; releasing an empty one does nothing
        self._owner: Any = source
        self.address: int
        self.nbytes: int
        if isinstance(source, Memory):
            self.address, self.nbytes = source.address, source.nbytes
            return
        try:
            _get_buffer(source, ctypes.byref(view), _WRITABLE if writable else 0)
        except (TypeError, BufferError):
            if not hasattr(source, "__dlpack__") or (writable and _is_buffer(source)):
                raise  # DLPack doesn't say that memory is read-only
            self.address, self.nbytes, self._owner = _of_dlpack(source)
            return
        self.address, self.nbytes = view.buf or 0, view.len

    def __del__(self) -> None:
        view = getattr(self, "_view", None)
        if view is not None and _release_buffer is not None:
            _release_buffer(ctypes.byref(view))


lend: Callable[[Any], None] = _incref  # keep an owner of memory, also beyond the end of the interpreter: threads of C's use it
give_back: Callable[[Any], None] = _decref  # end a lend()


def _is_buffer(source: Any) -> bool:
    try:
        memoryview(source)
    except (TypeError, BufferError, ValueError):
        return False
    return True


def dltensor(source: Any) -> Tuple[DLTensor, Any]:
    """Return the DLTensor of a tensor and the capsule that keeps its memory."""
    if not hasattr(source, "__dlpack__"):
        raise TypeError(f"{type(source).__name__} is no tensor: it has no __dlpack__")
    device = source.__dlpack_device__()[0] if hasattr(source, "__dlpack_device__") else _CPU
    # On a GPU the caller's stream orders the work; without -1 the framework would make the default stream wait for it.
    capsule = source.__dlpack__(stream=-1) if device in (_CUDA, _CUDA_MANAGED) else source.__dlpack__()
    return DLTensor.from_address(_capsule(capsule, b"dltensor")), capsule


def _of_dlpack(source: Any) -> Tuple[int, int, Any]:
    tensor, capsule = dltensor(source)
    if tensor.device_type not in (_CPU, _CUDA_HOST):
        raise TypeError("a tensor that is not in host memory")
    step = 1
    for i in reversed(range(tensor.ndim)):
        if tensor.strides and tensor.shape[i] != 1 and tensor.strides[i] != step:
            raise BufferError("a tensor that is not contiguous")
        step *= tensor.shape[i]
    return (tensor.data or 0) + tensor.byte_offset, step * tensor.bits * tensor.lanes // 8, capsule


def _kind(values: Any) -> str:
    """Return "i" or "u" for integers, and another letter for anything else."""
    described = getattr(values, "__array_interface__", None)
    if described is not None:
        return str(described["typestr"][1])
    letter = getattr(values, "typecode", None) or getattr(values, "format", "B").lstrip("@=<")
    return "i" if letter in tuple("bhilqBHILQnNc") else "f"


def _converted(values: Any, code: str) -> "array.array[int]":
    """Return integers of another size as those of array type @code. Raises OverflowError when one doesn't fit."""
    if values.itemsize == 8 and code == "I":
        words = array.array("I")
        words.frombytes(memoryview(values).tobytes())
        if any(words[1::2]):
            raise OverflowError("a token that isn't from 0 to 2^32 - 1")
        return words[0::2]
    return array.array(code, values.tolist())


Array = Union["array.array[int]", bytes, Any]  # packed numbers: bytes, array.array, a numpy array, a list


def numbers(values: Any, code: str) -> Tuple[Any, int, int]:
    """Return memory of @values as numbers of array type @code: (owner, address, count).

    An array.array of that type and any contiguous buffer of that item size aren't copied; a list is.
    """
    if type(values) is array.array and values.typecode == code:
        address, n = values.buffer_info()
        return values, address, n
    if type(values) is bytes and len(values) < 65536:  # a copy takes a fifth of the time of asking for the address
        values = array.array(code, values)
        address, n = values.buffer_info()
        return values, address, n
    size = array.array(code).itemsize
    if isinstance(values, (bytes, bytearray)) or hasattr(values, "__array_interface__") or isinstance(values, (memoryview, array.array)):
        if _kind(values) not in "iu":
            raise TypeError(f"integers are needed, not {getattr(values, 'dtype', None) or getattr(values, 'format', None) or values.typecode}")
        if getattr(values, "itemsize", 1) not in (1, size):  # such as numpy's and torch's usual integers of 8 bytes
            values = _converted(values, code)
        memory = Memory(values)
        if memory.nbytes % size:
            raise Invalid(f"{memory.nbytes} bytes are not a whole number of {size}-byte items")
        return memory, memory.address, memory.nbytes // size
    copied = array.array(code, values)
    address, n = copied.buffer_info()
    return copied, address, n


# -- memory of C's, handed to Python -----------------------------------------------------------------------------------

_free = ctypes.CDLL(None).free
_free.argtypes, _free.restype = [ctypes.c_void_p], None


def adopt(address: Optional[int], n: int) -> memoryview:
    """Wrap @n bytes that the library allocated; they are freed with the last view on them."""
    if not n:
        _free(address)
        return memoryview(b"")
    block = (ctypes.c_ubyte * n).from_address(address or 0)
    weakref.finalize(block, _free, address).atexit = False
    return memoryview(block).cast("B")


def address_of(function: Any) -> Optional[int]:
    """Return the address of a ctypes callback; None stays NULL."""
    return ctypes.cast(function, ctypes.c_void_p).value if function is not None else None


# -- objects of C's ----------------------------------------------------------------------------------------------------

EXIT_WAIT_S = 30.0  # how long the end of the interpreter waits for calls of other threads


class _State:
    """Address of a C object, and the calls that use it. Outlives the Python object until it is closed."""

    __slots__ = ("address", "calls", "pid", "closing", "at_end", "flush")

    def __init__(self, address: int) -> None:
        self.address: Optional[int] = address
        self.calls: List[int] = []  # the thread of each call under way: append, remove and count are atomic
        self.pid = os.getpid()
        self.closing = threading.RLock()  # held while @address is taken away
        self.at_end: Callable[[], None] = _nothing  # before an object that nobody closed is freed
        self.flush: Callable[[int], Any] = _nothing  # when an object that nobody closed can't be freed


def _nothing(*_: Any) -> None:
    pass


def _wait_calls(state: _State, seconds: float) -> bool:
    begun, mine = time.monotonic(), state.calls.count(get_ident())  # at the end: left over, see Handle
    while len(state.calls) > mine:
        waited = time.monotonic() - begun
        if waited > seconds:
            return False
        time.sleep(0.0005 if waited < 1 else 0.01)
    return True


def _close(state: _State, close: Callable[[int], Any], at_end: bool = False) -> None:
    if os.getpid() != state.pid:  # a child has the object's memory, but neither its threads nor its locks
        state.address = None
        return
    if not at_end and get_ident() in state.calls:  # in a callback, or in a signal's handler
        raise error(-errno.EBUSY, "a call of this thread is still under way; close behind it")
    rcs: List[Any] = []
    tried, reason = False, None
    with state.closing:
        address, state.address = state.address, None  # a call that begins now sees it
        if address is None:
            return
        try:
            if not _wait_calls(state, EXIT_WAIT_S if at_end else math.inf):
                state.flush(address)
                return
            _begin()
            try:
                if at_end:
                    state.at_end()
                tried = True  # an exception leaves open whether it was freed: rather never than twice
                certain(rcs, close, address)
            finally:
                reason = _end(not rcs or (rcs[0] or 0) < 0)
        finally:
            if not tried or (rcs and (rcs[0] or 0) < 0):
                state.address = address
    if (rcs[0] or 0) < 0:
        raise error(rcs[0], (reason or b"").decode(errors="replace") or "it is in use")


def _close_at_end(state: _State, close: Callable[[int], Any]) -> None:
    try:
        _close(state, close, True)
    except Error:
        pass  # others still use it: it stays


class Handle:
    """Owner of a C object: closes it once, never while a call uses it, and not in a forked child.

    Subclasses set it up with _own(). Closing happens on close(), at the end of a `with`, when the last reference goes, or
    when the interpreter ends; then the latest object is closed first, and one that a call still uses after EXIT_WAIT_S stays.

    Before Python 3.11 a signal's handler can run between _enter()'s return and the `try` behind it. If it raises there, the
    call's entry is left over: close() raises EBUSY in that thread and waits for ever in others. The last reference and the
    interpreter's end close the object then, as the thread that runs them is in no call.
    """

    _leave: Callable[[], None]  # end of _enter(): a function of C, before which no signal's handler runs

    def _own(self, address: int, close: Callable[[int], Any]) -> None:
        self._state = _State(address)
        self._leave = map(self._state.calls.remove, iter(get_ident, 0)).__next__  # remove(get_ident()), in C
        self._closer = close
        self._finalizer = weakref.finalize(self, _close_at_end, self._state, close)

    def _enter(self) -> int:
        state, ident = self._state, get_ident()
        try:
            state.calls.append(ident)
            address = state.address
            if address is None:
                raise Invalid(f"{type(self).__name__} is closed")
            return address
        except BaseException:
            if ident in state.calls:  # Python 3.9 runs signals' handlers before the append, too
                state.calls.remove(ident)
            raise

    def _call(self, function: Callable[..., Any], *args: Any) -> int:
        """Call a function with this object as its first argument."""
        address = self._enter()
        try:
            return call(function, address, *args)
        finally:
            self._leave()

    def close(self) -> None:
        """Wait for calls of other threads, then free the object. Later calls raise ValueError; closing twice is fine.

        Raises Error(EBUSY), and closes nothing, inside a call of the object by this thread: in a callback such as progress(),
        or in a signal's handler that interrupted the call.
        """
        _close(self._state, self._closer)
        self._finalizer.detach()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._state.address is None

    def _about(self) -> str:
        """Return what tells this object from others of its class, for repr()."""
        return ""

    def __repr__(self) -> str:
        state = getattr(self, "_state", None)
        kind, about = type(self), "" if state is None else self._about()
        open_ = "" if state is not None and state.address is not None else " closed"
        return f"<{kind.__module__}.{kind.__qualname__}{' ' if about else ''}{about}{open_}>"

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        try:
            self.close()
        except Error:
            if kind is None:  # an exception under way says more
                raise
