"""A save whose files are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardrun.checkpoint.protocol import Saved, Stages, Work

if TYPE_CHECKING:
    from shardrun.comm.communicator import Communicator


class PendingSave:
    """A save under way; every rank makes one of the same save, and all ranks call `advance` together.

    [Note: saving in the background] The work of a stage (copying live tensors, writing files, publishing) runs in a
    thread that never communicates. All ranks meet where the training loop calls `advance`, in the very collectives of a
    save in the foreground: no rank goes on to publish before every rank has shown that its files are durable. Where
    training fails in between, nobody meets any more, and what was being written stays behind as a left-over.
    """

    def __init__(self, comm: Communicator, stages: Stages) -> None:
        """The first work of `stages` copies what the later ones need of live tensors."""
        self._comm = comm
        self._stages = stages
        self._task = self._copying = _Task(next(stages))

    def hold(self) -> None:
        """Return once the live tensors have been copied and may change; local."""
        self._copying.thread.join()

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has done its work and waits for the others; local."""
        return not self._task.thread.is_alive()

    def advance(self) -> Saved | None:
        """Meet the other ranks, waiting for those still at work; the checkpoint if it is published now; collective.

        CheckpointError as from `save`: on all ranks, once one of them has failed.
        """
        task = self._task
        task.thread.join()
        try:
            answers = self._comm.agree(task.work.tag, task.value, task.error)
        except BaseException as error:
            self._stages.throw(error)
            raise
        try:
            self._task = _Task(self._stages.send(answers))
        except StopIteration as done:
            saved: Saved = done.value
            return saved
        return None


class _Task:
    """A work in a thread of its own. The process may leave without it: it is safe to kill at any moment."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.value: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._do, args=(work.do,), name=work.tag, daemon=True)
        self.thread.start()

    def _do(self, do: Callable[[], Any]) -> None:
        try:
            self.value = do()
        except Exception as error:
            self.error = error
