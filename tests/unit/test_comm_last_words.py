"""What ranks leave for each other when they fail, who is named by it, and a store that is no help."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardrun.comm import last_words
from shardrun.comm.last_words import Findings, Kind, LastWords, Word, find


def _word(kind: Kind, text: str = "", *, collective: int = 41, at: float = 0.0, seconds: float = 10.0) -> Word:
    return Word(kind, collective, "reduce", "reduce", seconds, text, at)


_TIMEOUT = _word("timeout", "timed out after 10.0 s")
_CLOSED = _word("closed", "Connection closed by peer")


# ---- who is named ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [_TIMEOUT, _CLOSED])
def test_a_rank_that_failed_by_itself_is_named_and_nobody_else(own: Word) -> None:
    heard = {
        0: _word("failed", "KeyError: 'b'", at=6.0),
        2: _word("failed", "ValueError: bad label 7", at=5.0),
        3: _CLOSED,
    }
    assert find(own, heard, [4]) == Findings("rank 2 failed first, in phase reduce: ValueError: bad label 7", (), 2)


def test_a_fault_that_names_its_rank_is_said_once() -> None:
    told = "rank 2 failed in phase collect of step 3: OSError: no space"
    assert find(_CLOSED, {2: _word("failed", told)}, [0]).text == told


def test_whoever_says_nothing_is_missing_after_a_timeout() -> None:
    assert find(_TIMEOUT, {2: _CLOSED}, [1]) == Findings("rank 1 is missing: no word from it", (1,))
    assert find(_TIMEOUT, {}, [1, 3]) == Findings("ranks 1,3 are missing: no word from them", (1, 3))


def test_a_timeout_of_all_ranks_tells_where_each_was() -> None:
    found = find(_TIMEOUT, {1: _word("timeout", collective=40), 0: _CLOSED}, [])
    assert found.missing == ()
    assert (
        found.text
        == "rank 0 was in collective 41 (reduce, phase reduce); rank 1 was in collective 40 (reduce, phase reduce)"
    )


def test_a_late_rank_learns_that_the_others_gave_up() -> None:
    found = find(_CLOSED, {0: _TIMEOUT, 2: _TIMEOUT}, [])
    assert found == Findings("rank 0 had given up after 10.0 s in collective 41 (reduce, phase reduce)")


def test_a_rank_that_comes_when_another_has_given_up_is_missing_all_the_same() -> None:
    late = _word("closed", at=1.5, seconds=0.25)
    assert find(_TIMEOUT, {1: late}, []) == Findings("rank 1 is missing: it came 1.2 s later", (1,))
    third = find(_CLOSED, {0: _TIMEOUT, 1: late}, [])
    assert third.missing == (1,)
    assert third.text.startswith("rank 0 had given up after 10.0 s")
    assert find(late, {0: _TIMEOUT, 2: _CLOSED}, []).missing == (), "the late one itself names nobody"


def test_after_a_closed_connection_the_silent_are_missing() -> None:
    assert find(_CLOSED, {2: _CLOSED}, [1]).missing == (1,)
    both = find(_CLOSED, {0: _TIMEOUT}, [1])
    assert "rank 0 had given up" in both.text
    assert "rank 1 is missing" in both.text


@pytest.mark.parametrize(
    ("rank", "port", "loss"),
    [
        (1, 1, Findings("rank 0, which keeps the store of the rendezvous, is gone", (0,))),
        (0, 1, Findings("the store of the rendezvous is gone")),
        (1, None, Findings("the store of the rendezvous is gone")),
    ],
)
def test_a_store_that_is_gone_means_its_keeper_if_that_is_another_rank(
    rank: int, port: int | None, loss: Findings
) -> None:
    """None: a file, or torch's agent."""
    keeper = None if port is None else ("127.0.0.1", port)
    words = LastWords(_Store(hangs=False), rank, 3, keeper)  # type: ignore[arg-type]
    assert words.lost == ""
    words.leave(_CLOSED)
    assert words.loss == loss
    assert find(_CLOSED, {}, [0, 2], words.loss) == loss


def test_a_rank_at_fault_looks_for_no_other() -> None:
    assert find(_word("failed", "ValueError"), {}, [0, 1], Findings("it is gone", (0,))) == Findings("")


# ---- leaving and hearing ---------------------------------------------------------------------------------------------


def _never(heard: object) -> bool:
    return False


def test_words_are_heard_and_who_reads_all_does_not_wait() -> None:
    store = HashStore()
    places = [LastWords(store, rank, 3, None) for rank in range(3)]
    words = [_word("failed", "a"), _TIMEOUT, _CLOSED]
    for place, word in zip(places, words, strict=True):
        place.leave(word)
    began = time.monotonic()
    assert places[0].listen(30.0, _never) == {1: words[1], 2: words[2]}
    assert places[2].listen(30.0, _never) == {0: words[0], 1: words[1]}
    assert time.monotonic() - began < 5.0


def test_a_rank_without_a_word_is_waited_for_so_long_and_not_if_enough_is_known() -> None:
    store = HashStore()
    LastWords(store, 1, 3, None).leave(_CLOSED)
    listener = LastWords(store, 0, 3, None)
    began = time.monotonic()
    assert listener.listen(0.2, _never) == {1: _CLOSED}
    assert 0.2 <= time.monotonic() - began < 2.0
    began = time.monotonic()
    assert listener.listen(30.0, lambda heard: 1 in heard) == {1: _CLOSED}
    assert time.monotonic() - began < 5.0
    assert listener.lost == ""


class _Store:
    """A store whose server is stopped: a call never returns. Or dead: it raises."""

    def __init__(self, *, hangs: bool) -> None:
        self.calls = 0
        self._hangs = hangs

    def _call(self, *_: Any) -> Any:
        self.calls += 1
        if self._hangs:
            threading.Event().wait()
        raise RuntimeError("Broken pipe")

    set = get = check = _call


@pytest.mark.parametrize(("hangs", "told"), [(True, "does not answer"), (False, "is gone")])
def test_a_store_that_is_no_help_is_asked_once_and_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, hangs: bool, told: str
) -> None:
    monkeypatch.setattr(last_words, "_ANSWER_S", 0.1)
    store = _Store(hangs=hangs)
    words = LastWords(store, 0, 3, ("127.0.0.1", 1))  # type: ignore[arg-type]
    began = time.monotonic()
    words.leave(_CLOSED)
    assert words.listen(30.0, _never) == {}
    words.linger()
    assert time.monotonic() - began < 2.0
    assert store.calls == 1
    assert words.lost == told


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_keeper_that_is_gone_is_found_by_a_knock_and_torch_is_not_asked(listening: socket.socket) -> None:
    store = HashStore()
    words = LastWords(store, 1, 2, listening.getsockname())
    words.leave(_CLOSED)
    assert LastWords(store, 0, 2, None).listen(1.0, _never) == {1: _CLOSED}
    address = listening.getsockname()
    listening.close()
    dead = _Store(hangs=False)
    words = LastWords(dead, 1, 2, address)  # type: ignore[arg-type]
    words.leave(_CLOSED)
    assert dead.calls == 0
    assert words.lost == "is gone"


def test_the_keeper_waits_for_no_reader_that_left_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "_LINGER_S", 30.0)
    keeper = LastWords(HashStore(), 0, 2, ("127.0.0.1", 1))
    keeper.listen(0.0, _never)
    began = time.monotonic()
    keeper.linger()
    assert time.monotonic() - began < 5.0


def test_the_keeper_stays_until_the_others_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    keeper, other = (LastWords(store, rank, 2, ("127.0.0.1", 1) if rank == 0 else None) for rank in range(2))
    monkeypatch.setattr(last_words, "_LINGER_S", 0.2)
    began = time.monotonic()
    keeper.linger()
    assert time.monotonic() - began >= 0.2, "nobody has read"
    other.listen(0.0, _never)
    monkeypatch.setattr(last_words, "_LINGER_S", 30.0)
    began = time.monotonic()
    keeper.linger()
    assert time.monotonic() - began < 5.0
