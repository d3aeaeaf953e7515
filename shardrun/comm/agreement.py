"""How the ranks of a group come to one mind: comparisons by sums, texts, errors that all raise, and the vote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardrun.errors as errors
from shardrun.comm.fingerprint import INTEGERS, all_equal, integers
from shardrun.comm.group import Group
from shardrun.comm.history import Call
from shardrun.comm.world_state import WorldState
from shardrun.errors import CallMismatch, CommunicatorError, ShardrunError, by_all

# Every round of integers is one int64 vector of this length that begins with the fingerprint of the call, whatever the
# operation, so that ranks that call different operations still meet in the same collective and can tell each other.
MAX_COMPARED = 3
MAX_SUMS = 8
MAX_INTEGERS = 32
_ROUND = INTEGERS + MAX_INTEGERS
ROUND_BYTES = 8 * _ROUND
"""What a rank brings to each round."""
_CPU = torch.device("cpu")
"""Where agreements travel, whatever torch.set_default_device says."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found: sums over ranks, and the names of the items that were not equal on all ranks."""

    sums: list[int]
    differing: frozenset[str]


class Agreement:
    """The control plane of a communicator: a few bytes, on pages of the host or over gloo; all ranks of the group."""

    def __init__(self, group: Group, state: WorldState) -> None:
        self._group = group
        self._state = state
        self.rank = group.rank
        self.world_size = group.size

    def require_open(self) -> None:
        """Raise if the communicator is poisoned; local."""
        self._state.require_open()

    def compare(
        self, operation: str, detail: str, items: Mapping[str, str] | None = None, sums: Sequence[int] = ()
    ) -> Comparison:
        """Add up `sums` over ranks and tell which `items` differ, see [Note: comparing by sums].

        At most 3 items and 8 sums; sums are int64. Ranks that are in different operations all raise CallMismatch.
        """
        items = items or {}
        assert len(items) <= MAX_COMPARED
        assert len(sums) <= MAX_SUMS
        self.require_open()
        if self.world_size == 1:
            return Comparison(list(sums), frozenset())
        call = f"{operation}: {detail}" if detail else operation
        hashed = [number for text in items.values() for number in integers(text)]
        total = self._sum_round(call, [*sums, *hashed])
        places = range(len(sums), len(total), INTEGERS)
        same = [all_equal(total[place : place + INTEGERS], self.world_size) for place in places]
        differing = (name for name, equal in zip(items, same, strict=True) if not equal)
        return Comparison(total[: len(sums)], frozenset(differing))

    def agree(self, tag: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order.

        If any rank brings an `error`, every rank raises: the same class where it is one of shardrun's, with the rank's
        number and its own message.
        """
        if self.world_size == 1:
            self.require_open()
            if error is not None:
                raise error
            return [value]
        message: dict[str, Any] = {"value": value}
        if error is not None:
            message = {"error": type(error).__name__, "message": str(error)}
        text = json.dumps(message)  # what JSON cannot hold is found before a peer waits for it
        self.compare("agree", tag)
        answers = [json.loads(answer) for answer in self._texts(text)]
        failed = {rank: answer for rank, answer in enumerate(answers) if "error" in answer}
        if failed:
            raise by_all(self._joint_error(failed)) from error
        return [answer["value"] for answer in answers]

    def texts(self, tag: str, text: str) -> list[str]:
        """Every rank's `text`, in rank order."""
        self.require_open()
        if self.world_size == 1:
            return [text]
        self.compare("texts", tag)
        return self._texts(text)

    def vote(self) -> None:
        """Return once every rank has come to this vote: a sum of ones that counts only when it is `world_size`.

        Raises CommunicatorError if the vote itself fails: then another rank may have seen it succeed. (A buffer of a
        failed reduction may still hold the rank's own input, so neither MIN nor MAX could tell.)
        """
        self.require_open()
        if self.world_size == 1:
            return
        try:
            self._sum_round("vote", [1], total=self.world_size)
        except CallMismatch as error:
            error.agreed = False  # whoever was elsewhere did not vote: no refusal, but the failure of a vote
            raise

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sum a handful (at most 32) of int64 over ranks; CallMismatch on all if a rank is in another operation."""
        self.require_open()
        return list(values) if self.world_size == 1 else self._sum_round("sum of integers", values)

    # ---- raw rounds --------------------------------------------------------------------------------------------

    def _guard(
        self,
        what: str,
        *buffers: object,
        fingerprint: str = "",
        ranks: Sequence[int] | None = None,
        ends: bool = True,
    ) -> AbstractContextManager[Call]:
        return self._state.guard(what, self._group, *buffers, fingerprint=fingerprint, ranks=ranks, ends=ends)

    def _sum_round(self, call: str, values: Sequence[int], total: int | None = None) -> list[int]:
        """`values` summed over ranks that are all in `call`; CallMismatch on all ranks otherwise.

        `total`: what the first sum has to be, or else the round has failed.
        """
        assert len(values) <= MAX_INTEGERS
        vector = torch.zeros(_ROUND, dtype=torch.int64, device=_CPU)
        counted = f"{call}, {len(values)} values"
        vector[: INTEGERS + len(values)] = torch.tensor([*integers(counted), *values], dtype=torch.int64, device=_CPU)
        with self._guard("agreement" if total is None else call, vector, fingerprint=call):
            found = self.add_up(vector)
            same = all_equal(found[:INTEGERS], self.world_size)
            if same and total not in (None, found[INTEGERS]):
                raise CommunicatorError(
                    f"{found[INTEGERS]} of {total} ranks{self._group.suffix} said yes in the {call}"
                )
        if same:
            return found[INTEGERS : INTEGERS + len(values)]
        calls = self._texts(call)
        told = "; ".join(f"{self._group.named(rank)} in {text}" for rank, text in enumerate(calls))
        raise by_all(CallMismatch(f"the ranks are in different operations and nothing was sent: {told}"))

    def add_up(self, vector: Tensor) -> list[int]:
        """(n,) int64 summed over ranks, without any look at what it means: the one place where a round travels."""
        if self._group.board is not None:
            return self._group.board.sum(vector.tolist(), self._state.timeout_s)
        dist.all_reduce(vector, group=self._group.handle)
        found: list[int] = vector.tolist()
        return found

    def _texts(self, text: str) -> list[str]:
        raw = text.encode()
        if (board := self._group.board) is not None:
            with self._guard("texts"):
                return [told.decode() for told in board.gather(raw, self._state.timeout_s)]
        own = torch.tensor([len(raw)], dtype=torch.int64, device=_CPU)
        sizes = [torch.zeros(1, dtype=torch.int64, device=_CPU) for _ in range(self.world_size)]
        with self._guard("text sizes", sizes, own):
            dist.all_gather(sizes, own, group=self._group.handle)
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device=_CPU)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else padded[:0]
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._guard("texts", rows, padded):
            dist.all_gather(rows, padded, group=self._group.handle)
        return [bytes(row[: int(size.item())].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def _joint_error(self, failed: Mapping[int, Mapping[str, str]]) -> ShardrunError:
        """One error for all ranks out of the errors that some ranks brought, each with its rank's number."""
        names = {answer["error"] for answer in failed.values()}
        message = "\n".join(
            f"{self._group.named(rank)}: {answer['message']}" for rank, answer in sorted(failed.items())
        )
        kind = getattr(errors, names.pop(), None) if len(names) == 1 else None
        if isinstance(kind, type) and issubclass(kind, ShardrunError) and kind is not errors.StepFailed:
            return kind(message)
        first = min(failed)
        return ShardrunError(message if kind else f"{message} ({failed[first]['error']})")
