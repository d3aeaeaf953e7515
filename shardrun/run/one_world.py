"""The workers of one world on this host: started together, watched, ended together. No torch here.

[Note: how a run ends]
A worker is done when it left its mark of being done; everything else is a failure. The first failure gives the others
two seconds to come out of their collective and say what they saw, then they are killed with all that they started.
A request to stop (Ctrl-C, SIGTERM, SIGUSR1, a closed terminal) is passed on once, and the save that it causes is waited
for however long it takes; a second Ctrl-C kills. Each worker leads a session of its own: a Ctrl-C in the terminal
reaches the launcher alone, and a whole session can be killed. All this holds for the ranks of all hosts, see
[Note: hosts].
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from shardrun.checkpoint.store import newest
from shardrun.run.council import Council, Verdict
from shardrun.run.exit_file import forget_exit, write_exit
from shardrun.run.feeds import Feeds, Screen
from shardrun.run.outcome import Outcome, RankEnd, judge
from shardrun.run.restarts import may_pass
from shardrun.run.tether import SAME_WISH_S
from shardrun.run.worker_process import Job, Place, WorkerProcess, start_worker

GRACE_S = 2.0
TEARDOWN_S = 10.0
_POLL_S = 0.05


class Wishes:
    """Requests to stop, kept from the moment when they come until a world acts on them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, bool]] = []
        """Name (SIGINT, or SIGTERM on node 1) and time of each, and whether it came to this host."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note a signal."""
        self.asked.append((signal.Signals(number).name, time.monotonic(), True))

    def of_another_host(self, name: str) -> None:
        """Note what was asked of another host, which has told all."""
        self.asked.append((name, time.monotonic(), False))


class OneWorld:
    """One world, from the start of this host's workers to the verdict about the ranks of all hosts."""

    def __init__(
        self,
        job: Job,
        place: Place,
        screen: Screen,
        control: Path,
        wishes: Wishes,
        *,
        council: Council | None = None,
        restarts_left: int = 0,
        first_words: Sequence[str] = (),
    ) -> None:
        """`council`: with the launchers of other hosts. `first_words` begin the logs."""
        self._job = job
        self._place = place
        self._screen = screen
        self._control = control
        self._wishes = wishes
        self._council = council
        self._restarts_left = restarts_left
        self._workers: list[WorkerProcess] = []
        self._feeds = Feeds(screen, first_words)
        self._verdict: Verdict | None = None
        self._stopping_since: float | None = None
        self._interrupted = False
        self._kill_at: float | None = None
        self._put_exit_back: Callable[[], None] | None = None
        self._life_fd = -1

    def start(self) -> None:
        """Start all workers; none waits for another. OSError if one cannot be started."""
        if self._owns_folder:
            self._put_exit_back = forget_exit(self._job.run_dir)
        life_read, self._life_fd = os.pipe()
        try:
            for rank in self._place.ranks:
                worker = start_worker(self._job, rank, self._control, life_read, self._place)
                self._workers.append(worker)
                self._feeds.add(worker)
        finally:
            os.close(life_read)

    @property
    def _owns_folder(self) -> bool:
        return self._council is None or self._council.leads

    # ---- watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> Verdict:
        """Until every worker is over: show what they say, pass requests on, end all when one fails."""
        while self._verdict is None:
            self._feeds.wait(_POLL_S)
            for worker in self._workers:
                if worker.end is None and worker.has_left():
                    worker.reap()
                    self._feeds.drain(worker)
            self._listen_to_others()
            self._act_on_wishes()
            self._end_the_rest()
            self._conclude()
        return self._verdict

    def _listen_to_others(self) -> None:
        for message in self._council.hear() if self._council is not None else ():
            if message["say"] == "interrupted":
                self._interrupt()
            else:
                self._wishes.of_another_host(message["signal"])

    def _act_on_wishes(self) -> None:
        while self._wishes.asked:
            name, when, here = self._wishes.asked.pop(0)
            if self._stopping_since is None:
                self._stopping_since = when
                self._screen.event(0, {"event": "stopping", "signal": name})
                for worker in self._workers:
                    if worker.end is None:
                        os.kill(worker.process.pid, signal.SIGTERM)
                if here:
                    self._tell("stopping", signal=f"{name} on {self._place.host}")
            elif name == "SIGINT" and when - self._stopping_since > SAME_WISH_S:
                self._interrupt()
                self._tell("interrupted")

    def _tell(self, say: str, **fields: str) -> None:
        if self._council is not None:
            self._council.tell(say, **fields)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._kill_at = 0.0

    def _end_the_rest(self) -> None:
        left = [worker for worker in self._workers if worker.end is None]
        failing = any(worker.is_failing for worker in self._workers)
        if self._council is not None:
            if failing:
                self._council.tell_failing()
            failing |= self._council.failing
        if self._kill_at is None:
            if failing:
                self._kill_at = time.monotonic() + GRACE_S
            elif all(worker.is_done for worker in left):
                self._kill_at = time.monotonic() + TEARDOWN_S
        elif time.monotonic() >= self._kill_at:
            for worker in left:
                worker.ended_by_us = True
                worker.kill()

    # ---- end -------------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        own = [worker.end for worker in self._workers if worker.end is not None]
        if len(own) < len(self._workers):
            return
        if self._council is None:
            self._verdict = self._judged(tuple(own))
        else:
            self._council.conclude(own, self._judged)
            self._verdict = self._council.verdict

    def _judged(self, ends: tuple[RankEnd, ...]) -> Verdict:
        feeds, stopping = self._feeds, self._stopping_since is not None
        verdict = Verdict(ends, feeds.total_steps, stopping, self._interrupted, feeds.nothing_to_do, again=False)
        again = self._restarts_left > 0 and not stopping and self._has_a_way_to_go() and may_pass(_outcome(verdict))
        return Verdict(ends, feeds.total_steps, stopping, self._interrupted, feeds.nothing_to_do, again)

    def _has_a_way_to_go(self) -> bool:
        """Whether the update is ahead after which this start is to stop: the save of it may be all that was done."""
        stop_at, found = self._job.document.get("options", {}).get("stop_at"), newest(self._job.run_dir)
        return stop_at is None or found is None or found.step < stop_at

    def outcome(self, verdict: Verdict) -> Outcome:
        """What the verdict means; writes the last words of failed ranks to their logs, and exit.json."""
        outcome = _outcome(verdict)
        writes_exit = self._owns_folder or (self._council is not None and self._council.has_lost_node_0)
        if outcome.exit_code == 0 and verdict.nothing_to_do:
            for worker in self._workers:
                worker.log.take_back()
            if self._put_exit_back is not None:
                self._put_exit_back()
            elif writes_exit:
                write_exit(self._job.run_dir, outcome)
            return outcome
        self._feeds.release_logs()
        for worker in self._workers:
            if worker.end is not None and worker.end.failure is not None:
                self._feeds.write_log(worker, worker.end.failure.traceback.splitlines())
        if writes_exit:
            write_exit(self._job.run_dir, outcome)
        return outcome

    def end(self) -> None:
        """Leave nothing behind, however the run came here."""
        for worker in self._workers:
            worker.close()
        self._feeds.close()
        if self._life_fd >= 0:
            os.close(self._life_fd)


def _outcome(verdict: Verdict) -> Outcome:
    return judge(verdict.ends, verdict.total_steps, stopping=verdict.stopping, interrupted=verdict.interrupted)
