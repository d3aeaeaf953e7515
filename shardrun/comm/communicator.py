"""A group of ranks that agree before they act, and that is closed for good by its first failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardrun.errors as errors
from shardrun.comm.config import CommunicatorConfig
from shardrun.comm.fingerprint import INTEGERS, all_equal, integers
from shardrun.comm.process_group import close_process_group, device_of, open_process_group
from shardrun.comm.slices import ExchangeSeam, NativeSeam, SliceSeam
from shardrun.errors import CallMismatch, CommunicatorError, ShardrunError, by_all

# Every comparison travels as one int64 vector of this length, whatever the operation, so that ranks that call
# different operations still meet in the same collective and can tell each other.
MAX_COMPARED = 3
MAX_SUMS = 8
_ROUND = MAX_SUMS + (1 + MAX_COMPARED) * INTEGERS

Observer = Callable[[str, int], None]


@dataclass(frozen=True)
class Comparison:
    """What a comparison found: sums over ranks, and the names of the items that were not equal on all ranks."""

    sums: list[int]
    differing: frozenset[str]


class Communicator:
    """Ranks 0..world_size-1 that hold replicas of the same selected parameters.

    Made by `single()`, `from_env()` or `open(config)`. Collective, that is called by every rank in the same order, are
    `compare`, `agree`, `texts`, `vote`, `broadcast_`, `reduce_slice`, `gather_slices` and `sum_integers`. The first
    failed collective poisons the communicator and closes its connections; every later call is refused at once with the
    first cause.
    """

    def __init__(self, rank: int, world_size: int, backend: str, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.timeout_s = timeout_s
        self.observer: Observer | None = None
        """Called as observer(phase, collective) whenever a phase or a collective begins (status file, tests)."""
        self.phase = "start-up"
        self.collective = 0
        self._poison: str | None = None
        self._kept_alive: list[object] = []
        # [Note: control plane] Agreements, texts, norms and votes are CPU tensors over gloo on every machine: it raises
        # what went wrong, in time. Only gradients and parameters take the fast way of the device.
        self._control = ExchangeSeam(rank, world_size)
        self._seam: SliceSeam = NativeSeam(world_size) if backend == "nccl" else self._control

    @staticmethod
    def single() -> Communicator:
        """A world of one: no process group, no socket, nothing sent."""
        return Communicator(0, 1, "gloo", torch.device("cpu"), 1800.0)

    @staticmethod
    def open(config: CommunicatorConfig) -> Communicator:
        """Join the world of `config`. Every rank must call it; a world of one opens nothing."""
        device = device_of(config)
        if config.world_size > 1:
            open_process_group(config)
        return Communicator(config.rank, config.world_size, config.backend, device, config.timeout_s)

    @staticmethod
    def from_env(
        *, backend: str | None = None, timeout_s: float = 1800.0, allow_non_loopback: bool = False
    ) -> Communicator:
        """Join the world that torchrun's environment describes; NCCL where every local rank has a GPU, else gloo."""
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        return Communicator.open(
            CommunicatorConfig.from_env(backend=backend, timeout_s=timeout_s, allow_non_loopback=allow_non_loopback)
        )

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def is_poisoned(self) -> bool:
        """Whether an earlier failure has closed this communicator."""
        return self._poison is not None

    @property
    def seam(self) -> str:
        """Name of the way slices travel; part of a record's numerics."""
        return self._seam.name if self.world_size > 1 else "none"

    def enter(self, phase: str, *, cannot_fail: bool = False) -> None:
        """Mark the beginning of a phase of the step; local. In a phase that cannot fail the observer cannot either."""
        self.phase = phase
        if self.observer is not None:
            with suppress(*([Exception] if cannot_fail else [])):
                self.observer(phase, self.collective)

    def poison(self, cause: str, keep_alive: object = None) -> None:
        """Refuse every later call with `cause` and close the connections, which frees waiting peers; local."""
        if self._poison is None:
            self._poison = cause
            # gloo cannot cancel: a buffer of a failed collective stays in use and must never be freed or reused.
            self._kept_alive.append(keep_alive)
            if self.world_size > 1:
                close_process_group()

    def close(self) -> None:
        """Leave the world; local, idempotent."""
        self.poison("it was closed")

    def require_open(self) -> None:
        """Raise if the communicator is poisoned; local."""
        if self._poison is not None:
            raise CommunicatorError(f"communicator is closed since its first failure: {self._poison}")

    @contextmanager
    def _guard(self, what: str, *buffers: object) -> Iterator[None]:
        self.require_open()
        self.collective += 1
        try:
            if self.observer is not None:
                self.observer(self.phase, self.collective)
            yield
        except BaseException as error:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            cause = (
                f"collective {self.collective} ({what}, phase {self.phase}) failed on rank {self.rank}: {first_line}"
            )
            self.poison(cause, (buffers, error))
            if isinstance(error, Exception):
                raise CommunicatorError(f"communicator closed at {cause}") from error
            raise

    # ---- agreement ---------------------------------------------------------------------------------------------

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
        hashed = [number for text in (call, *items.values()) for number in integers(text)]
        total = self._sum_round([*sums, *[0] * (MAX_SUMS - len(sums)), *hashed])
        places = range(MAX_SUMS, MAX_SUMS + len(hashed), INTEGERS)
        same = [all_equal(total[place : place + INTEGERS], self.world_size) for place in places]
        if not same[0]:
            calls = self._texts(call)
            raise by_all(
                CallMismatch(
                    "the ranks are in different operations and nothing was sent: "
                    + "; ".join(f"rank {rank} in {text}" for rank, text in enumerate(calls))
                )
            )
        differing = (name for name, equal in zip(items, same[1:], strict=True) if not equal)
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
            raise by_all(_joint_error(failed)) from error
        return [answer["value"] for answer in answers]

    def texts(self, tag: str, text: str) -> list[str]:
        """Every rank's `text`, in rank order."""
        self.require_open()
        if self.world_size == 1:
            return [text]
        self.compare("texts", tag)
        return self._texts(text)

    def settle(self) -> None:
        """Wait until this rank's device has done all collectives so far, and raise what went wrong there."""
        if self.device.type == "cuda" and self.world_size > 1:
            with self._guard("settle"):
                torch.cuda.current_stream(self.device).synchronize()

    def vote(self) -> None:
        """Return once every rank has come to this vote: a sum of ones that counts only when it is `world_size`.

        Raises CommunicatorError if the vote itself fails: then another rank may have seen it succeed. (A buffer of a
        failed reduction may still hold the rank's own input, so neither MIN nor MAX could tell.)
        """
        self.require_open()
        if self.world_size == 1:
            return
        ballot = torch.ones(1, dtype=torch.int64)
        with self._guard("vote", ballot):
            dist.all_reduce(ballot)
            yes = int(ballot.item())
            if yes != self.world_size:
                raise CommunicatorError(f"{yes} of {self.world_size} ranks voted for the commit")

    # ---- data --------------------------------------------------------------------------------------------------

    def broadcast_(self, tensor: Tensor, tag: str, root: int = 0, *, agreed: bool = False) -> None:
        """Overwrite `tensor` (any shape, any dtype, contiguous) with the root's.

        `agreed`: the ranks have already compared tag, dtype and size of this and every other broadcast that follows.
        """
        if self.world_size == 1:
            self.require_open()
            return
        if not agreed:
            self.compare("broadcast", f"{tag} {tensor.dtype} {tensor.numel()} from {root}")
        if tensor.numel() == 0:
            return
        raw = tensor.view(-1).view(torch.uint8)
        wire = raw.to(self.device)
        with self._guard(f"broadcast of {tag}", wire):
            dist.broadcast(wire, root)
        if wire is not raw:
            raw.copy_(wire)

    def reduce_slice(self, bucket: Tensor, out: Tensor, *, contributes: bool = True) -> None:
        """Sum `bucket` (world_size * n,) float32 over ranks, this rank's slice to `out` (n,); `bucket` is not written.

        The caller has agreed on size, dtype and order beforehand. A rank that does not contribute counts as zeros.
        """
        if self.world_size == 1:
            self.require_open()
            out.copy_(bucket)
            return
        with self._guard("reduce", bucket, out):
            self._seam.reduce(bucket, out, contributes=contributes)

    def gather_slices(self, bucket: Tensor, own: Tensor) -> None:
        """Write every rank's `own` (n,) into its slice of `bucket` (world_size * n,).

        The caller has agreed on size, dtype and order beforehand.
        """
        if self.world_size == 1:
            self.require_open()
            bucket.copy_(own)
            return
        with self._guard("gather", bucket, own):
            (self._control if bucket.device.type == "cpu" else self._seam).gather(bucket, own)

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sum a handful (at most 32) of int64 over ranks; the caller has agreed on the call beforehand."""
        self.require_open()
        return list(values) if self.world_size == 1 else self._sum_round(values)[: len(values)]

    # ---- raw rounds --------------------------------------------------------------------------------------------

    def _sum_round(self, values: Sequence[int]) -> list[int]:
        vector = torch.zeros(_ROUND, dtype=torch.int64)
        vector[: len(values)] = torch.tensor(list(values), dtype=torch.int64)
        with self._guard("agreement", vector):
            dist.all_reduce(vector)
        result: list[int] = vector.tolist()
        return result

    def _texts(self, text: str) -> list[str]:
        raw = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._guard("text sizes", sizes):
            dist.all_gather(sizes, torch.tensor([len(raw)], dtype=torch.int64))
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else padded[:0]
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._guard("texts", rows, padded):
            dist.all_gather(rows, padded)
        return [bytes(row[: int(size.item())].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _joint_error(failed: Mapping[int, Mapping[str, str]]) -> ShardrunError:
    """One error for all ranks out of the errors that some ranks brought, each with its rank's number."""
    names = {answer["error"] for answer in failed.values()}
    message = "\n".join(f"rank {rank}: {answer['message']}" for rank, answer in sorted(failed.items()))
    kind = getattr(errors, names.pop(), None) if len(names) == 1 else None
    if isinstance(kind, type) and issubclass(kind, ShardrunError) and kind is not errors.StepFailed:
        return kind(message)
    first = min(failed)
    return ShardrunError(message if kind else f"{message} ({failed[first]['error']})")
