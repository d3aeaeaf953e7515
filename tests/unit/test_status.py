"""The status file, the tether's errors and the judgement over the ends of ranks: no processes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardrun.errors import (
    CallMismatch,
    CheckpointError,
    CommunicatorError,
    ShardrunError,
    StepFailed,
    StepRefused,
    StoppedAfterSave,
    by_all,
)
from shardrun.run import failure, kernel, status
from shardrun.run.failure import Failure, Seen, describe
from shardrun.run.outcome import RankEnd, judge, tells
from shardrun.run.status import Status, StatusFile
from shardrun.run.streams import LineSplitter, RankLog
from shardrun.run.tether import Tether


def test_a_status_is_read_as_it_was_set(tmp_path: Path) -> None:
    path = tmp_path / "status"
    assert status.read(path) == Status()
    file = StatusFile(path)
    assert (status.read(path).step, status.read(path).phase, status.read(path).done) == (0, "start-up", False)
    before = time.time()
    file.set(2**40, "reduce", 123456)
    read = status.read(path)
    assert (read.step, read.phase, read.collective, read.done) == (2**40, "reduce", 123456, False)
    assert before <= read.since <= time.time()
    file.mark_done(75)
    assert (status.read(path).done, status.read(path).code, status.read(path).step) == (True, 75, 2**40)


def test_a_status_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from shardrun.run.status import StatusFile\n"
        "StatusFile(Path(sys.argv[1])).set(3, 'gather', 9); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    code = subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], cwd=root, check=False).returncode
    assert code == -signal.SIGKILL
    read = status.read(tmp_path / "s")
    assert (read.step, read.phase, read.collective, read.done) == (3, "gather", 9, False)


@pytest.mark.parametrize("raw", [b"", b"shrdrun1", b"x" * 64, b"x" * 10])
def test_a_strange_file_is_a_worker_that_has_not_begun(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "s").write_bytes(raw)
    assert status.read(tmp_path / "s") == Status()


def test_a_half_written_phase_is_still_text(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "s")
    file.set(1, "ä" * 30, 0)
    assert status.read(tmp_path / "s").phase.startswith("ä" * 12)


def test_setting_a_status_is_cheap() -> None:
    file = StatusFile(None)
    begun = time.process_time()
    for step in range(10_000):
        file.set(step, "forward", step)
    assert (time.process_time() - begun) / 10_000 < 50e-6
    assert file.status.step == 9_999


# ---- lines and logs ------------------------------------------------------------------------------------------------


def test_lines_come_out_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\r\n 10%\r 20%\r") == ["two"]
    assert splitter.feed(b" 30%\n\xc3") == [" 30%"]
    assert splitter.feed(b"\xa4") == []
    assert splitter.close() == ["ä"]
    assert splitter.close() == []


def test_an_endless_line_comes_out_in_pieces() -> None:
    splitter = LineSplitter(longest=4)
    assert splitter.feed(b"abcdefghij") == ["abcd", "efgh"]
    assert splitter.close() == ["ij"]


def test_a_log_writes_nothing_before_it_is_released(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "logs" / "rank-0.log")
    log.write(["one"])
    log.close()
    assert not (tmp_path / "logs").exists()
    log.release()
    log.write(["two"])
    log.close()
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "one\ntwo\n"
    assert log.take_problem() is None


def test_the_kernel_counts_what_it_killed_for_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(kernel, "_COUNTS", counts)
    assert kernel.out_of_memory_kills() is None
    counts.write_text("pgfault 12\noom_kill 3\nunevictable_pgs_culled 0\n")
    assert kernel.out_of_memory_kills() == 3


def test_what_the_kernel_killed_long_ago_explains_no_death_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, now = tmp_path / "vmstat", 0.0
    monkeypatch.setattr(kernel, "_COUNTS", counts)
    counts.write_text("oom_kill 3\n")
    kills = kernel.RecentKills(lambda: now)
    assert not kills.any()
    counts.write_text("oom_kill 4\n")
    said = []
    for now in range(60):  # noqa: B007  the clock
        said.append(kills.any())
        kills.look()
    assert said == [second < 23 for second in range(60)]
    counts.write_text("oom_kill 5\n")
    assert kills.any()


# ---- what an error means -------------------------------------------------------------------------------------------


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


def described(error: BaseException, rank: int = 1) -> Failure:
    return describe(error, rank, Status(2, "forward", 7))


def test_an_error_is_described_with_place_and_cause(tmp_path: Path) -> None:
    found = described(caught(ValueError("bad label 7")))
    assert (found.rank, found.step, found.phase, found.collective) == (1, 2, "forward", 7)
    assert (found.type, found.message, found.exit_code) == ("ValueError", "bad label 7", 1)
    assert (found.file, found.follow_up, found.expected) == (__file__, False, False)
    assert found.frames[-1] == f"{__file__}:{found.line} in caught"
    failure.write(found, tmp_path / "e.json")
    assert failure.read(tmp_path / "e.json") == found
    lost = describe(CommunicatorError("closed"), 1, Status(2, "reduce", 7), Seen("timeout", 7, 3.5, (0, 2), 0))
    failure.write(lost, tmp_path / "e.json")
    assert failure.read(tmp_path / "e.json") == lost
    assert os.listdir(tmp_path) == ["e.json"]
    assert failure.read(tmp_path / "none.json") is None


def test_where_little_fits_into_a_file_the_cause_is_still_told(tmp_path: Path) -> None:
    found = described(caught(ValueError("bad label 7" + "!" * 3000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        failure.write(found, tmp_path / "e.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    read = failure.read(tmp_path / "e.json")
    assert read is not None
    assert (read.type, read.file, read.line, read.phase) == ("ValueError", found.file, found.line, "forward")
    assert found.message.startswith(read.message)
    assert len(read.message) == 1000


def test_the_innermost_frame_in_the_users_file_is_named() -> None:
    import json

    try:
        json.loads("{")
    except ValueError as error:
        found = described(error)
    assert found.file == __file__
    assert found.type == "JSONDecodeError"


def test_a_syntax_error_is_named_by_the_file_that_has_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("x = 1\ny = (\n")
    try:
        compile(recipe.read_text(), str(recipe), "exec")
    except SyntaxError as error:
        found = described(error)
    assert (found.file, found.line) == (str(recipe), 2)


@pytest.mark.parametrize(
    ("error", "cause", "follows"),
    [
        (CommunicatorError("closed by peer"), None, True),
        (StepFailed("no", step=1, phase="reduce", gradients_kept=True), CommunicatorError("closed"), True),
        (RuntimeError("mine"), CommunicatorError("closed"), True),
        (CallMismatch("rank 0 in a; rank 1 in b"), None, False),
        (ValueError("rank 0: is my own text"), None, False),
        (StepRefused("rank 0: no gradient"), None, True),
        (StepRefused("rank 0: no gradient\nrank 1: no gradient"), ValueError("no gradient"), False),
        (type("DistStoreError", (type("DistError", (RuntimeError,), {}),), {})("timed out"), None, True),
    ],
)
def test_an_error_that_a_peer_caused_is_told_apart(error: Exception, cause: Exception | None, follows: bool) -> None:
    assert described(caught(error, cause)).follow_up is follows


def test_the_error_brought_into_an_agreement_is_the_cause() -> None:
    found = described(caught(ShardrunError("rank 1: bad label 7 (ValueError)"), caught(ValueError("bad label 7"))))
    assert (found.type, found.message, found.follow_up) == ("ValueError", "bad label 7", False)


@pytest.mark.parametrize(("argument", "code"), [(3, 3), (None, 0), ("text", 1)])
def test_sys_exit_never_chooses_the_exit_code(argument: Any, code: int) -> None:
    found = described(caught(SystemExit(argument)))
    assert (found.code, found.exit_code) == (code, 1)


def test_a_body_that_ends_by_itself_is_done_and_no_other() -> None:
    def run(body: Any) -> tuple[int, bool]:
        tether = Tether(
            rank=0, world_size=1, status=StatusFile(None), sink=lambda r, e: None, error_path=None, is_child=False
        )
        return tether.run(body), tether.status.status.done

    def raising(error: BaseException) -> Any:
        def body(tether: Tether) -> int:
            raise error

        return body

    assert run(lambda tether: 0) == (0, True)
    assert run(lambda tether: 75) == (75, True)
    assert run(lambda tether: 3) == (3, False)
    assert run(raising(StoppedAfterSave("stopped"))) == (75, True)
    assert run(raising(SystemExit(0))) == (1, False)
    assert run(raising(CheckpointError("damaged"))) == (3, False)
    assert run(raising(MemoryError())) == (1, False)


# ---- judgement -----------------------------------------------------------------------------------------------------


def end(rank: int, code: int, *, done: bool = False, error: Exception | None = None, at: float = 1.0,
        by_us: bool = False, place: Status | None = None) -> RankEnd:  # fmt: skip
    place = place or Status(2, "forward", 5, since=0.0)
    seen = Status(place.step, place.phase, place.collective, place.since, done, code if code >= 0 else 0)
    found = None
    if error is not None:
        found = describe(error, rank, seen)
        found = Failure(**{**found.__dict__, "time": at})
    return RankEnd(rank, code, seen, found, by_us, at)


def seen_end(rank: int, error: Exception, seen: Seen, **others: Any) -> RankEnd:
    """The end of a rank whose communicator knows something of the failure."""
    one = end(rank, 1, error=error, **others)
    assert one.failure is not None
    return replace(one, failure=replace(describe(error, rank, one.status, seen), time=one.failure.time))


def judged(*ends: RankEnd, stopping: bool = False, interrupted: bool = False) -> tuple[int, str]:
    outcome = judge(ends, 10, stopping=stopping, interrupted=interrupted)
    return outcome.exit_code, outcome.reason


def test_a_run_is_done_when_every_rank_is() -> None:
    assert judged(end(0, 0, done=True), end(1, 0, done=True)) == (0, "done")
    assert judged(end(0, 75, done=True), end(1, 75, done=True), stopping=True) == (75, "stopped after saving")
    assert judged(end(0, 0, done=True), end(1, -11, done=True)) == (0, "done")
    assert judged(end(0, 0, done=True), end(1, 0)) == (1, "rank 1 left at step 2 of 10 with code 0")
    assert judged(end(0, 0, done=True), end(1, 1, done=False)) == (1, "rank 1 left at step 2 of 10 with code 1")
    code, reason = judged(end(0, 0, done=True), end(1, 75, done=True))
    assert (code, reason) == (1, "the ranks left with different codes: rank 0 with 0, rank 1 with 75")


def test_the_first_error_that_no_peer_caused_is_the_cause() -> None:
    follower = end(0, 1, error=CommunicatorError("closed"), at=1.0)
    assert judged(follower, end(1, -9, at=1.2))[1].startswith("rank 1 killed by signal 9 (possibly out of memory)")
    later, earlier = end(1, 3, error=CheckpointError("a"), at=3.0), end(2, 2, error=ShardrunError("b"), at=2.0)
    assert judged(follower, later, earlier) == (1, "rank 2 failed at step 2, phase forward")
    assert judged(follower, later) == (3, "rank 1 failed at step 2, phase forward")
    assert judged(follower, end(1, -10))[1] == "rank 1 killed by signal 10 (SIGUSR1) at step 2, phase forward"


@pytest.mark.parametrize(
    ("code", "by_kernel", "said"),
    [
        (-6, False, "signal 6 (SIGABRT: it aborted itself, often after a failed collective; its log has what it said)"),
        (-7, False, "signal 7 (SIGBUS: often a full /dev/shm, which loader workers use)"),
        (-11, False, "signal 11 (SIGSEGV: a crash in compiled code; its log has what it said)"),
        (-9, True, "signal 9 (out of memory: the kernel has killed for want of it)"),
    ],
)
def test_a_signal_is_explained_in_the_same_line(code: int, by_kernel: bool, said: str) -> None:
    killed = replace(end(1, code), by_kernel=by_kernel)
    assert judged(end(0, 0, done=True), killed) == (1, f"rank 1 killed by {said} at step 2, phase forward")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB."),
        caught(StepFailed("step 2 failed", step=2, phase="propose", gradients_kept=True), MemoryError()),
    ],
)
def test_what_takes_less_memory_is_said_when_there_was_too_little(error: Exception) -> None:
    assert judged(end(0, 0, done=True), end(1, 1, error=error))[1] == (
        "rank 1 ran out of memory at step 2, phase forward; a smaller train.micro_batch_size or "
        "train.activation_checkpointing needs less"
    )


def test_a_rank_that_is_missing_from_a_collective_is_the_cause() -> None:
    gave_up = Status(2, "reduce", 6, since=1.0)
    follower = end(0, 1, error=CommunicatorError("timed out"), at=11.0, place=gave_up)
    sleeper = end(1, -9, by_us=True, at=13.0, place=Status(2, "forward", 5, since=0.5))
    behind = end(2, -9, by_us=True, at=13.0, place=Status(2, "agree", 6, since=1.5))
    assert judged(follower, sleeper, behind) == (
        1,
        "rank 1 is missing from collective 6 (reduce of step 2): it was at step 2, phase forward, for 10 s when rank 0 "
        "gave up",
    )


def test_a_collective_that_failed_by_a_fault_of_the_rank_itself_makes_it_the_cause() -> None:
    """Whoever told of it first: rank 0 stays a moment, so that the others can read why it left."""
    error, place = CommunicatorError("communicator closed at collective 6"), Status(2, "reduce", 6)
    follower = seen_end(1, error, Seen("closed", 6, 0.1, culprit=0), at=1.0, place=place)
    own = seen_end(0, error, Seen("failed", 6, 0.0), at=1.5, place=place)
    assert judged(own, follower) == (1, "rank 0 failed at step 2, phase reduce")


def test_a_rank_that_came_too_late_is_the_cause_though_it_has_an_error_to_tell() -> None:
    error, place = CommunicatorError("communicator closed at collective 6"), Status(2, "reduce", 6)
    waited = seen_end(0, error, Seen("timeout", 6, 5.0, missing=(1,)), at=1.0, place=place)
    late = seen_end(1, error, Seen("closed", 6, 0.1), at=2.0, place=place)
    outcome = judge([waited, late], 10, stopping=False, interrupted=False)
    assert outcome.culprit is late
    assert outcome.reason == (
        "rank 1 is missing from collective 6 (reduce of step 2): it came when rank 0 had given up"
    )


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (
            Seen("timeout", 6, 5.2, missing=(1,)),
            "rank 1 is missing from collective 6 (reduce of step 2): no word from it when rank 0 gave up after 5 s",
        ),
        (
            Seen("closed", 6, 0.1, missing=(1, 2)),
            "ranks 1, 2 are missing from collective 6 (reduce of step 2): no word from them when their connections to "
            "rank 0 ended",
        ),
    ],
)
def test_a_rank_that_ends_alone_tells_who_is_missing(seen: Seen, said: str) -> None:
    """Under torchrun."""
    alone = seen_end(0, CommunicatorError("communicator closed"), seen, place=Status(2, "reduce", 6))
    outcome = judge([alone], 10, stopping=False, interrupted=False)
    assert outcome.reason == said
    assert outcome.culprit is not None
    assert (outcome.culprit.rank, outcome.culprit.failure, outcome.culprit.status.step) == (1, None, 2)


def test_of_ranks_that_end_alone_one_tells() -> None:
    error = CommunicatorError("communicator closed")
    missing = Seen("closed", 6, 0.1, missing=(0, 2))
    assert [tells(seen_end(rank, error, missing)) for rank in (1, 3)] == [True, False]
    at_fault = Seen("closed", 6, 0.1, culprit=2)
    assert not tells(seen_end(0, error, at_fault))
    assert tells(seen_end(2, error, Seen("failed", 6, 0.1)))
    assert tells(end(2, 1, error=ValueError("bad label 7")))
    joint = [replace(end(rank, 1), failure=agreed(rank)) for rank in range(3)]
    assert [tells(one) for one in joint] == [True, False, False]


def agreed(rank: int, world_size: int = 3) -> Failure:
    return describe(by_all(ShardrunError("w differs")), rank, Status(2, "save", 7), None, world_size)


def test_what_all_ranks_raise_alike_is_not_put_down_to_one() -> None:
    ends = [replace(end(rank, 1), failure=agreed(rank)) for rank in range(3)]
    assert judged(*ends) == (1, "all ranks stopped at step 2, phase forward")
    alone = replace(end(0, 1), failure=agreed(0, world_size=1))
    assert judged(alone) == (1, "rank 0 failed at step 2, phase forward")


def test_interruptions_have_their_own_code() -> None:
    assert judged(end(0, -9, by_us=True), interrupted=True) == (130, "interrupted, nothing saved")
    assert judged(end(0, -15), stopping=True) == (130, "interrupted before it could save")
    assert judged(end(0, -15))[0] == 1
    assert judged(end(0, 75, done=True), interrupted=True)[0] == 75
