"""What ZeRO-1 and ZeRO-2 sessions share: set-up of layout and slices, what they tell of themselves, and records."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shardrun.errors import ContractError, UsageError, by_all
from shardrun.optim.kinds import OptionGroup
from shardrun.optim.stepper import Stepper
from shardrun.records.record import RECORD_VERSION, ShardRecord, record_of
from shardrun.shard.flat_buffer import FlatBuffers
from shardrun.shard.flat_gradients import FlatGradients, Pending
from shardrun.shard.layout import FlatLayout
from shardrun.shard.streamed_gradients import StreamedGradients
from shardrun.step.agreement import Request, Window, is_real
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.draft import Draft
from shardrun.step.joint_step import Part, StepResult, require_whole, run_step
from shardrun.step.masters import Masters
from shardrun.step.record_fit import Expected, joint_misfits, judge
from shardrun.step.slices import make_slices
from shardrun.step.transaction import signals_deferred

_Draft = TypeVar("_Draft", bound=Draft)


class ShardedOptimizer(ABC):
    """An optimizer over a session's selected trainable parameters, its state spread over the ranks of the group.

    SelectedZero1 and SelectedZero2 say what happens in each phase of a step; when, says joint_step.run_step.
    """

    strategy: ClassVar[str]
    stages_on_gradients = True
    stepper: Stepper

    def __init__(
        self, session: SelectedDataParallel, name: str, masters: bool, layout: FlatLayout, *, streams: bool = False
    ) -> None:
        self.session = session
        self.comm = session.comm
        self.name = name
        self.masters = masters
        self.layout = layout
        # A group of one inside a larger world proposes too: what fails here must fail before the others have voted.
        proposes = (self.comm.parent or self.comm).world_size > 1
        # Such a group stages on its gradients, which therefore cannot be the reduced ones as well: it keeps them.
        self.streams = streams = streams and (self.comm.world_size > 1 or not proposes)
        self.identity = f"session {session.number}, layout {layout.digest[:16]}{', streamed' if streams else ''}"
        self.step_count = 0
        self.torn = False
        session.taken_by = f"{type(self).__name__} {name}"
        place = (self.comm.rank, self.comm.world_size)
        zeros = self.comm.flat_zeros
        gradients: FlatGradients
        if streams:
            gradients = StreamedGradients(layout, session.parameters, *place, defined=session.defined, zeros=zeros)
        else:
            gradients = FlatGradients(layout, session.parameters, *place, zeros=zeros)
        self.flat = FlatBuffers(layout, session.parameters, gradients, *place)
        self.slices = make_slices(self.flat.buckets, masters, proposes, streams)
        self._masters = Masters(self.slices)

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Path -> selected Parameter, frozen ones and aliases included."""
        return self.session.parameters

    @property
    def trainable_parameters(self) -> list[str]:
        """Paths of the distinct selected trainable parameters, in the root's order."""
        return list(self.session.order)

    @property
    def paths(self) -> list[str]:
        """The same paths in the order of the flat buffers."""
        return self.flat.paths

    @property
    def rank(self) -> int:
        """This rank's number in the session's group."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group, and of slices of each bucket."""
        return self.comm.world_size

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch.optim object over what this rank steps; its leaves are views into the flat storage."""
        return self.stepper.optimizer

    @property
    def state_parameter_count(self) -> int:
        """Number of parameters of which this rank holds optimizer state."""
        return len({fragment.path for s in self.slices for fragment in s.bucket.fragments})

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank: state and FP32 masters, padding included."""
        return self._masters.nbytes + self.stepper.state_nbytes

    @property
    def gradient_nbytes(self) -> dict[str, int]:
        """Bytes of gradient memory on this rank: pending FP32 gradients (whole), and reduced slices with their casts.

        New slices are staged on the memory of the pending ones. Where gradients are streamed, `pending` are the slots
        they go through, and the new slices of the other ranks have memory of their own from gather to commit,
        `arriving`.
        """
        arriving = sum(s.bucket.param.nbytes - s.bucket.own.nbytes for s in self.slices) if self.streams else 0
        return {
            "pending": self.flat.gradients.nbytes,
            "reduced": sum(s.nbytes for s in self.slices),
            **({"arriving": arriving} if self.streams else {}),
        }

    # ---- the step ----------------------------------------------------------------------------------------------

    def request(
        self, mode: str, weight: object, lr: float | None, missing: object, max_grad_norm: float | None
    ) -> Request:
        """What is asked of this session in one step."""
        try:
            rates: Sequence[object] = self.stepper.rates(lr) if lr is None or is_real(lr) else [lr]
            terms = self.stepper.terms()
        except Exception:  # whatever a user has put there: `problems` tells, so that all ranks hear of it
            rates, terms = [], "unreadable"
        return Request(mode, weight, missing, rates, terms, max_grad_norm)

    def result(self, window: Window, norm: float | None) -> StepResult:
        """What the caller of a step gets."""
        absent = tuple(path for path, here in window.present.items() if not here)
        return StepResult(window.global_weight, norm, self.session.remaining_gradients(), absent)

    def _step(
        self, mode: str, weight: object, lr: float | None, missing: object, max_grad_norm: float | None
    ) -> StepResult:
        part = Part(self, self.request(mode, weight, lr, missing, max_grad_norm))
        norm = run_step(self.comm, f"step {self.step_count + 1} of {self.name}", [part], max_grad_norm)
        return self.result(part.window, norm)

    @abstractmethod
    def collect(self, request: Request, contributes: bool | None) -> Pending: ...
    @abstractmethod
    def reduce(self, window: Window, pending: Pending) -> None: ...
    @abstractmethod
    def normalise(self, divisor: int | None) -> None: ...
    @abstractmethod
    def gradients(self) -> Sequence[Tensor]: ...
    @abstractmethod
    def propose(self, window: Window, rates: Sequence[float]) -> None: ...
    @abstractmethod
    def gather(self, window: Window) -> None: ...
    @abstractmethod
    def commit(self, window: Window, rates: Sequence[float]) -> None: ...
    @abstractmethod
    def _described(self) -> dict[str, Any]:
        """The optimizer as a record tells of it."""

    def stage(self, window: Window) -> None:
        """Write this rank's new slices where they are gathered from: the window's gradients end here."""
        if any(s.proposed is not None for s in self.slices):
            for s in self.slices:
                s.clear_gaps()
                s.await_others()
            self.stepper.stage(window.present)

    def _problems(self, pending: Pending) -> Pending:
        """`pending`, with what is wrong with this session's parameters on this rank."""
        found = (*self._masters.overwritten(), *self.session.replaced(), *self.stepper.problems())
        return replace(pending, problems=(*pending.problems, *found))

    def non_finite(self, pending: Pending) -> str | None:
        """Path of the first pending gradient that holds a NaN or an infinity; for the message, after one was found."""
        return self.flat.gradients.non_finite(pending.present)

    def clear(self) -> None:
        """Drop the window's pending gradients, and what was gathered; local."""
        self.flat.clear()
        for s in self.slices:
            s.forget()

    def discard_gradients(self) -> None:
        """Drop the window's pending gradients without a step; local, every rank decides alike."""
        self.clear()

    def refresh_masters(self) -> None:
        """Take the parameters' present values into the FP32 masters, after they were changed; local, every rank."""
        self._masters.refresh()

    # ---- records -----------------------------------------------------------------------------------------------

    def live_record(self) -> ShardRecord:
        """As `to_record`, without the copies that can be spared: its tensors may be live state. For whoever only reads
        them, and is done before the next update; local."""
        return record_of(self.record_meta(), self._record_tensors(copy=False))

    def _record_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        require_whole(self)
        masters = {name: view.clone() if copy else view.detach() for name, view in self._masters.views.items()}
        return self.stepper.state_tensors(copy=copy) | masters

    def load_record(self, record: ShardRecord) -> None:
        """Replace optimizer state and masters; collective. Any misfit on any rank is raised by all before a change.

        A rank that fails after that (of memory, say) closes the communicator, and its session can go on no more.
        """
        self.require_fit(record)
        with signals_deferred():
            torn, self.torn = self.torn, True  # should the machine fail underway
            try:
                self.stepper.load_state_tensors(record.tensors)
                self._masters.load(record.tensors)
                self.step_count = int(record.meta["step_count"])
            except Exception as failure:
                told = f"{type(failure).__name__}: {failure}"
                self.comm.poison(f"{self.comm.named(self.comm.rank)} failed in load_record of {self.name}: {told}")
                raise
            self.torn = torn

    def require_fit(self, record: ShardRecord) -> None:
        """Refuse what `load_record` would refuse, and change nothing; collective."""
        masters = self._masters.views
        mastered: Expected = {name: ((view.numel(),), view.dtype) for name, view in masters.items()}
        found, shared = judge(
            record, self.record_meta(), lambda held: {**self.stepper.expected_tensors(held), **mastered}
        )
        told = f"record of {self.name} does not fit: "
        error = ContractError(told + "; ".join(found)) if found else None
        held = self.comm.agree(f"load_record of {self.name}", shared, error)
        if joint := joint_misfits(held, self.comm.named):
            raise by_all(ContractError(told + "; ".join(joint)))

    def record_meta(self) -> dict[str, Any]:
        """What a record says of itself, as plain JSON: contract, layout, optimizer, topology, fragments."""
        fragments = self.layout.fragments(self.rank, self.world_size)
        listed = self.stepper.listed_state()
        return {
            "version": RECORD_VERSION,
            "group": self.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "step_count": self.step_count,
            "contract": self.session.contract.to_json(),
            "layout": self.layout.to_json(),
            "optimizer": self._described(),
            "numerics": {"seam": self.comm.seam},
            "fragments": {path: list(extent) for path, extent in fragments.items()},
            **({} if listed is None else {"state": listed}),
        }


def agree_draft(session: SelectedDataParallel, name: str, draw: Callable[[], _Draft]) -> _Draft:
    """What `draw` makes of this rank's optimizers; its UsageError on any rank is raised by all. Collective."""
    draft: _Draft | None = None
    problem: UsageError | None = None
    try:
        draft = draw()
    except UsageError as error:
        problem = error
    session.comm.agree(f"optimizer of {name}", error=problem)
    assert draft is not None
    return draft


def agree_layout(session: SelectedDataParallel, name: str, asked: str, draft: Draft) -> FlatLayout:
    """The layout of the root's draft; collective. `asked` has all options: a difference is refused by all.

    What is wrong with the draft on any rank is a UsageError on all.
    """
    layout: FlatLayout | None = None
    problem: UsageError | None = None
    try:
        layout = draft.layout(session.comm.world_size)
    except UsageError as error:
        problem = error
    answers = session.comm.agree(
        f"layout of {name}",
        {
            "asked": hashlib.sha256(asked.encode()).hexdigest(),
            "layout": layout.to_json() if layout is not None and session.comm.rank == 0 else None,
        },
        problem,
    )
    if len({answer["asked"] for answer in answers}) > 1:
        texts = session.comm.texts(f"options of {name}", asked)
        told = "; ".join(f"{session.comm.named(rank)}: {text}" for rank, text in enumerate(texts))
        raise by_all(UsageError(f"the ranks give {name} different optimizers or options: {told}"))
    return FlatLayout.from_json(answers[0]["layout"])


def options_text(options: Mapping[str, Any], groups: Sequence[OptionGroup]) -> str:
    """All options of an optimizer as text that is the same on all ranks that give the same."""
    return repr((sorted(options.items()), [(sorted(g.paths), sorted(g.options.items()), g.lr_scale) for g in groups]))
