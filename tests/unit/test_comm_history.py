"""The ring of the last collectives: what it holds, what it does not keep alive, how it reads."""

from __future__ import annotations

import json
import weakref

import torch

import shardrun as sr
from shardrun.comm.history import SIZE, Call, History


def _done(number: int) -> Call:
    call = Call(number, "reduce", "reduce", (0, 1))
    call.end()
    return call


def test_the_last_64_are_remembered_oldest_first() -> None:
    history = History()
    assert history.text() == ""
    for number in range(1, 101):
        history.add(_done(number))
    assert [call.number for call in history.calls()] == list(range(101 - SIZE, 101))
    assert len(history.text().splitlines()) == SIZE + 1


def test_a_call_is_plain_data_with_sizes_and_times() -> None:
    buffer, pieces = torch.zeros(3, 4), [torch.zeros(2, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)]
    call = Call(7, "gather", "texts", (0, 2), (buffer, pieces, object()), "agree: a tag")
    unfinished = call.plain()
    assert (unfinished["ended"], unfinished["microseconds"]) == ("unfinished", None)
    assert call.seconds > 0
    call.end()
    told = call.plain()
    assert json.loads(json.dumps(told)) == told
    assert told["sizes"] == ["12 float32", "7 uint8"]
    assert (told["collective"], told["phase"], told["what"], told["ranks"]) == (7, "gather", "texts", [0, 2])
    assert told["fingerprint"] == "agree: a tag"
    assert told["ended"] >= told["started"]
    assert told["microseconds"] == call.seconds * 1e6 // 1


def test_nothing_that_was_sent_is_kept_alive() -> None:
    buffer = torch.zeros(9)
    gone = weakref.ref(buffer)
    history = History()
    history.add(Call(1, "reduce", "reduce", (0, 1), (buffer, [buffer])))
    del buffer
    assert gone() is None


def test_the_text_reads_as_a_table() -> None:
    history = History()
    call = Call(11, "agree", "agreement", (0, 1, 2, 3), (torch.zeros(32, dtype=torch.int64),), "step 2 of default")
    call.started_s, call.took_ns = 1e9 + 0.25, 431_900
    history.add(call)
    history.add(Call(12, "reduce", "reduce", (1, 3)))
    head, first, second = history.text().splitlines()
    assert head.split() == ["collective", "started", "microseconds", "phase", "ranks", "what"]
    assert first.split()[0] == "11"
    assert first.split()[1].endswith(".250")
    assert first.split()[2:5] == ["431", "agree", "0-3"]
    assert first.endswith("agreement [32 int64]: step 2 of default")
    assert second.split()[2:] == ["unfinished", "reduce", "1,3", "reduce"]


def test_a_world_of_one_sends_nothing_and_remembers_nothing() -> None:
    comm = sr.Communicator.single()
    comm.vote()
    comm.agree("tag", 1)
    assert comm.history() == []
    assert comm.history_text() == ""
    assert comm.failure is None
