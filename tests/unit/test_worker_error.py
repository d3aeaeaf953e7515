"""An error of a loader's worker reads as if it had happened in the rank itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch._utils import ExceptionWrapper

from shardrun.run.failure import Failure, describe
from shardrun.run.status import Status
from shardrun.run.worker_error import worker_error


def plain() -> None:
    raise ValueError("bad label 7\nTraceback (most recent call last): not one")


def bare() -> None:
    raise ValueError


def noted() -> None:
    error = ValueError()
    error.add_note("while fetching sample 3 of epoch 1 (Items)")
    raise error


def chained() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        raise LookupError("sample: 7") from error


def by_key() -> None:
    raise KeyError("label")


def undecodable() -> None:
    b"\xff".decode()


def caught(act: Callable[[], None]) -> Failure:
    """What a rank tells of `act` in its worker: torch wraps it up there and raises it again here."""
    try:
        act()
    except Exception:
        wrapped: Any = cast(Any, ExceptionWrapper)(where="in DataLoader worker process 0")
    with pytest.raises(Exception, match="Caught") as raised:
        wrapped.reraise()
    return describe(raised.value, 1, Status(1, "data", 3))


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (plain, "ValueError", "bad label 7\nTraceback (most recent call last): not one"),
        (bare, "ValueError", ""),
        (noted, "ValueError", "while fetching sample 3 of epoch 1 (Items)"),
        (chained, "LookupError", "sample: 7"),
        (by_key, "KeyError", "'label'"),
        (undecodable, "UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_it_is_told_with_its_place_in_the_file_of_the_user(act: Callable[[], None], kind: str, message: str) -> None:
    found = caught(act)
    assert (found.type, found.message) == (kind, message)
    assert (found.file, found.line) == (__file__, int(found.frames[-1].split(":")[1].split()[0]))
    assert found.frames[-1].endswith(f" in {act.__name__}")
    assert "Original Traceback" in found.traceback


def test_notes_of_the_rank_itself_are_for_the_log() -> None:
    error = ValueError("bad label 7")
    error.add_note("the last collectives of rank 1: ...")
    found = describe(error, 1, Status(1, "data", 3))
    assert found.message == "bad label 7"
    assert "the last collectives" in found.traceback


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bad label 7",
        "Caught a cold.\nNo traceback",
        "x\nOriginal Traceback (most recent call last):\n",
    ],
)
def test_other_texts_are_left_alone(text: str) -> None:
    assert worker_error(text) is None
