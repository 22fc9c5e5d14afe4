"""Ends a process right after one of its writes to a folder, by following its system calls. Linux only.

`strace --inject=...:when=N` counts each call of each thread apart, so it cannot end a program of several threads after
its N-th write; ptrace itself can, and needs nothing installed. https://man7.org/linux/man-pages/man2/ptrace.2.html
"""

import contextlib
import ctypes
import os
import pickle
import platform
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# linux/ptrace.h
_CONT_SYSCALL, _SEIZE, _INTERRUPT, _SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_SYSGOOD, _TRACE_CLONE, _EXIT_KILL = 0x1, 0x8, 1 << 20
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY, _EXIT = 1, 2
_WALL = 0x40000000  # linux/wait.h: threads too

# Calls that change a file or a name, and which argument says where: a file descriptor, or a path. fsync is not among
# them: a process that is killed leaves what it wrote, synced or not.
_DESCRIPTOR, _PATH = "descriptor", "path"
_CALLS: dict[str, dict[int, tuple[str, str, int]]] = {
    "x86_64": {
        1: ("write", _DESCRIPTOR, 0),
        2: ("open", _PATH, 0),
        18: ("pwrite64", _DESCRIPTOR, 0),
        20: ("writev", _DESCRIPTOR, 0),
        77: ("ftruncate", _DESCRIPTOR, 0),
        82: ("rename", _PATH, 1),
        83: ("mkdir", _PATH, 0),
        84: ("rmdir", _PATH, 0),
        86: ("link", _PATH, 1),
        87: ("unlink", _PATH, 0),
        257: ("openat", _PATH, 1),
        258: ("mkdirat", _PATH, 1),
        263: ("unlinkat", _PATH, 1),
        264: ("renameat", _PATH, 3),
        265: ("linkat", _PATH, 3),
        285: ("fallocate", _DESCRIPTOR, 0),
        296: ("pwritev", _DESCRIPTOR, 0),
        316: ("renameat2", _PATH, 3),
        328: ("pwritev2", _DESCRIPTOR, 0),
    },
    "aarch64": {
        34: ("mkdirat", _PATH, 1),
        35: ("unlinkat", _PATH, 1),
        37: ("linkat", _PATH, 3),
        38: ("renameat", _PATH, 3),
        46: ("ftruncate", _DESCRIPTOR, 0),
        47: ("fallocate", _DESCRIPTOR, 0),
        56: ("openat", _PATH, 1),
        64: ("write", _DESCRIPTOR, 0),
        66: ("writev", _DESCRIPTOR, 0),
        68: ("pwrite64", _DESCRIPTOR, 0),
        70: ("pwritev", _DESCRIPTOR, 0),
        276: ("renameat2", _PATH, 3),
        287: ("pwritev2", _DESCRIPTOR, 0),
    },
}
# Seconds for one child; its parent may wait for it without a limit of its own.
_CHILD_SECONDS = 60


@dataclass(frozen=True)
class Watched:
    """How a child ended.

    Attributes:
        writes: Its writes below the folder that succeeded, in order, such as ``"rename .metadata"``.
        exit_code: As os.waitstatus_to_exitcode gives it; -9 if it was killed.
    """

    writes: list[str]
    exit_code: int


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a forked child.

    Raises:
        AssertionError: If it raises or dies; the message holds its traceback.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run(lambda: os.write(writer, pickle.dumps(function(*args))), report=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"a child ended with {code}\n{answer.decode(errors='replace')}"
    return pickle.loads(answer)


def watch(function: Callable[[], Any], folder: str, *, kill_after: int | None = None) -> Watched:
    """Run `function` in a forked child and kill it right after its write number `kill_after` below `folder`.

    The caller must have no other children, and no thread that the child would miss.

    Args:
        function: Runs in the child.
        folder: Absolute.
        kill_after: From 0, which is before the first write; None lets the child end.
    """
    gate, opener = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(opener)
        os.read(gate, 1)
        _run(function, report=2)
    os.close(gate)
    try:
        return _Tracer(child, folder, kill_after).follow(lambda: os.write(opener, b"\0"))
    finally:
        os.close(opener)


def _run(function: Callable[[], Any], *, report: int) -> None:
    """The whole life of a child: nothing of the parent's is torn down."""
    signal.alarm(_CHILD_SECONDS)
    try:
        function()
    except BaseException:
        os.write(report, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


class _Tracer:
    def __init__(self, child: int, folder: str, kill_after: int | None) -> None:
        self._calls = _CALLS[platform.machine()]
        self._child = child
        self._folder = folder
        self._kill_after = kill_after
        self._began: dict[int, str] = {}
        self._writes: list[str] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.restype = ctypes.c_long
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def follow(self, let_go: Callable[[], Any]) -> Watched:
        self._ptrace(_SEIZE, self._child, None, _SYSGOOD | _TRACE_CLONE | _EXIT_KILL)
        self._ptrace(_INTERRUPT, self._child)
        os.waitpid(self._child, _WALL)
        self._ptrace(_CONT_SYSCALL, self._child)
        if self._kill_after == 0:
            os.kill(self._child, signal.SIGKILL)
        let_go()
        while True:
            thread, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                self._answer(thread, status)
            elif thread == self._child:  # told last, after its other threads have ended
                return Watched(self._writes, os.waitstatus_to_exitcode(status))

    def _answer(self, thread: int, status: int) -> None:
        sent = os.WSTOPSIG(status)
        if sent == _SYSCALL_STOP:
            self._look(thread)
        # An event (a thread began) is ptrace's own; anything else is a signal that the child shall get.
        passed_on = 0 if sent == _SYSCALL_STOP or status >> 16 else sent
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            self._ptrace(_CONT_SYSCALL, thread, None, passed_on)

    def _look(self, thread: int) -> None:
        buffer = ctypes.create_string_buffer(88)  # struct ptrace_syscall_info
        try:
            self._ptrace(_SYSCALL_INFO, thread, len(buffer), ctypes.addressof(buffer))
        except ProcessLookupError:
            return
        if buffer.raw[0] == _ENTRY:
            number, *arguments = struct.unpack_from("7Q", buffer.raw, 24)
            if write := self._write(thread, number, arguments):
                self._began[thread] = write
        elif buffer.raw[0] == _EXIT and (began := self._began.pop(thread, None)):
            failed = buffer.raw[32]
            if not failed and len(self._writes) != self._kill_after:
                self._writes.append(began)
                if len(self._writes) == self._kill_after:
                    os.kill(self._child, signal.SIGKILL)

    def _write(self, thread: int, number: int, arguments: list[int]) -> str | None:
        """What the call will do, if it changes something below the folder."""
        if number not in self._calls:
            return None
        name, kind, position = self._calls[number]
        if name in ("open", "openat") and not arguments[position + 1] & os.O_CREAT:
            return None
        try:
            if kind == _DESCRIPTOR:
                path = os.readlink(f"/proc/{thread}/fd/{arguments[position]}")
            else:
                path = self._text(thread, arguments[position])
        except OSError:
            return None  # not a descriptor, or killed meanwhile: the call fails
        below = os.path.relpath(path, self._folder) if path.startswith(self._folder) else ""
        return f"{name} {below}" if below else None

    def _text(self, thread: int, address: int) -> str:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            text = memory.read(4096)  # PATH_MAX; less at the end of a mapping
        return text.split(b"\0", 1)[0].decode(errors="replace")

    def _ptrace(self, request: int, thread: int, address: int | None = None, data: int | None = None) -> None:
        if self._libc.ptrace(request, thread, address, data) == -1:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace request {request:#x}: {os.strerror(number)}")
