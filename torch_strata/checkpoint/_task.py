"""Saves of a process, by one thread in the order of the calls. Ctrl-C in the middle of a call leaves no thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch_strata.checkpoint.save_stats import SaveStats

__all__ = ["Task", "TaskQueue"]


class Task:
    """Work that is begun once or withdrawn."""

    def __init__(self, work: Callable[[], SaveStats]) -> None:
        self._work: Callable[[], SaveStats] | None = work
        # Whoever has it decides: the thread that begins the work, or who withdraws it.
        self._decision = threading.Lock()
        self.is_over = threading.Event()
        self.before: Task | None = None

    def withdraw(self) -> bool:
        """Whether the work was not begun, and will not be."""
        is_withdrawn = self._decision.acquire(blocking=False)
        if is_withdrawn:
            self._work = None
            self.is_over.set()
        return is_withdrawn

    def __call__(self) -> SaveStats:
        """Do the work, after the task before."""
        if self.before is not None:
            self.before.is_over.wait()
            self.before = None
        if not self._decision.acquire(blocking=False):
            return SaveStats(save_id="")  # nobody has its future
        work, self._work = self._work, None  # the last task is kept, and may keep no state
        assert work is not None
        try:
            return work()
        finally:
            self.is_over.set()


class TaskQueue:
    """Of one process."""

    def __init__(self) -> None:
        self._executor = _new_executor()
        self._last: Task | None = None

    def put(self, task: Task) -> "Future[SaveStats]":
        """Do `task` when all before it are over. If this is interrupted, `Task.withdraw` tells whether it is done."""
        task.before, self._last = self._last, task
        try:
            return self._executor.submit(task)
        except BaseException:
            # A thread that was started in the middle of this is not known to the executor, whose others are told at
            # the interpreter's end to stop: it would wait for work for ever, and the interpreter for it. One that is
            # shut down does what it was given, and ends.
            self._executor.shutdown(wait=False)
            self._executor = _new_executor()
            raise


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="strata-save")
