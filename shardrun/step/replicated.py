"""Data parallel as free functions: gradients of a mean loss averaged over ranks, then the ordinary optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.errors import ContractError, UsageError, by_all
from shardrun.optim.kinds import check_options, elementwise, resolve_fused
from shardrun.shard.contract import Contract, first_difference
from shardrun.shard.flat_gradients import Pending
from shardrun.shard.selection import select_parameters
from shardrun.step.agreement import ALIKE, MEAN, Request, Window
from shardrun.step.data_parallel import WholeGradients
from shardrun.step.joint_step import Part, run_step
from shardrun.step.session import places, replaced

Gradients = Mapping[str, Tensor | None] | Sequence[Tensor | None]


@dataclass(frozen=True)
class SGDConfig:
    """Options of torch.optim.SGD, with its defaults."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class AdamConfig:
    """Options of torch.optim.Adam, with its defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class AdamWConfig(AdamConfig):
    """Options of torch.optim.AdamW, with its defaults."""

    weight_decay: float = 1e-2


class ParamStore:
    """A model's trainable parameters with their ordinary optimizer state, the same on every rank.

    Local to make. `include` and `exclude` as in select_parameters. The first step decides the optimizer (`optimizer`, a
    torch.optim object over the model's own parameters) and the communicator; both stay. Later steps may bring other
    options, a learning rate for example. Nothing is broadcast: begin with equal parameters on all ranks.
    Options are the config's in every step: a scheduler on `optimizer`, or whatever is written to its param groups, has
    no effect; change the config instead.
    Adam's state is made before the ranks commit a step. What torch still allocates in the commit itself is SGD's first
    momentum buffer, which is made from the gradient, and the temporaries of kernels that are not fused.
    """

    def __init__(self, model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> None:
        self.selection = select_parameters(model, include, exclude)
        self.places = places(model, self.selection.parameters)
        self._replica: _Replica | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Path -> trainable Parameter, each tied one once, in definition order; the order of `grads` as a sequence."""
        contract = self.selection.contract()
        first = contract.aliases()
        named = ((first.get(path, path), p) for path, p in self.selection.parameters.items() if p.requires_grad)
        return dict(named)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the first step made; None before."""
        return None if self._replica is None else self._replica.optimizer

    def replica(self, kind: str, options: Mapping[str, Any], comm: Communicator) -> _Replica:
        """The state of this store, made by the first step under `comm`; collective then."""
        if self._replica is None:
            self._replica = _Replica(self, kind, options, comm)
        return self._replica


def step_sgd(store: ParamStore, config: SGDConfig, comm: Communicator, grads: Gradients | None = None) -> None:
    """Average the gradients over ranks, then step torch.optim.SGD on every rank. Every rank of `comm` calls it.

    Call it after backward, while the gradients are there: the pending `.grad`, or `grads` by path or in the order of
    `store.parameters`. They are those of a MEAN loss, and the ranks' batches are taken to be of one size: the sum over
    ranks is divided by their number. Config, order, element counts and the set of gradients have to be the same on all
    ranks; a difference is refused by all of them. If the reduction fails nothing has changed, the gradients are kept
    and the communicator is closed (StepFailed). A world of one sends nothing: `optimizer.step()`, bit for bit.
    """
    _step(store, "sgd", config, comm, grads)


def step_adam(store: ParamStore, config: AdamConfig, comm: Communicator, grads: Gradients | None = None) -> None:
    """As step_sgd, with torch.optim.Adam."""
    _step(store, "adam", config, comm, grads)


def step_adamw(store: ParamStore, config: AdamWConfig, comm: Communicator, grads: Gradients | None = None) -> None:
    """As step_sgd, with torch.optim.AdamW."""
    _step(store, "adamw", config, comm, grads)


def _step(
    store: ParamStore, kind: str, config: SGDConfig | AdamConfig, comm: Communicator, grads: Gradients | None
) -> None:
    comm.require_open()
    options = asdict(config)
    replica = store.replica(kind, options, comm)
    replica.ask(kind, options, comm, grads)
    part = Part(replica, Request(MEAN, 1, ALIKE, (config.lr,), repr(options)), replica.misuse)
    run_step(comm, f"step {replica.step_count + 1} of {kind}", [part], judge=False)


class _Replica(WholeGradients):
    """The phases of a free function's step."""

    def __init__(self, store: ParamStore, kind: str, options: Mapping[str, Any], comm: Communicator) -> None:
        parameters = store.parameters
        problem: UsageError | None = None
        try:
            # Here foreach is the caller's choice: the optimizer is torch's own, over whole parameters.
            check_options(elementwise(kind), {**options, "foreach": None}, (), parameters)
            if options["foreach"] and options["fused"]:
                raise UsageError(f"{kind}: foreach and fused are both set, and torch takes one of them")
            for parameter in parameters.values() if options["fused"] else ():
                resolve_fused(True, options, parameter.device, elementwise(kind), [parameter.dtype])
        except UsageError as error:
            problem = error
        _agree(comm, kind, store.selection.contract(), list(parameters), problem)
        number = comm.number_session()
        super().__init__("the store", number, comm, store.selection.parameters, list(parameters), adopt=False)
        self._places = store.places
        self.kind = kind
        self.optimizer = elementwise(kind).cls([{"params": list(parameters.values())}], **options)
        self.misuse: tuple[str, ...] = ()
        self._order = list(parameters)
        self._options = self._asked = options
        self._given: Mapping[str, Tensor | None] | None = None
        self._first: dict[Tensor, dict[str, Any]] = {}
        """State of parameters that the step in progress updates first; the commit links it."""

    def ask(self, kind: str, options: Mapping[str, Any], comm: Communicator, grads: Gradients | None) -> None:
        """Take note of what the next step is given, and of what is wrong with it: all ranks will hear of that."""
        self._asked, self._given = options, None
        wrong = [*self._changes(kind, options, comm)]
        if isinstance(grads, Mapping):
            if unknown := sorted(set(grads) - set(self._order)):
                wrong.append(f"grads has {unknown[0]} ({len(unknown)} in all), no trainable parameter of this store")
            self._given = grads
        elif grads is not None and len(grads) != len(self._order):
            wrong.append(f"grads has {len(grads)} gradients, this store {len(self._order)} parameters")
        elif grads is not None:
            self._given = dict(zip(self._order, grads, strict=True))
        self.misuse = tuple(wrong)

    def _changes(self, kind: str, options: Mapping[str, Any], comm: Communicator) -> Iterator[str]:
        """What may not be different from the first step, and options that torch would only stumble over."""
        if kind != self.kind:
            yield f"this store is stepped by {self.kind} since its first step; this call is {kind}"
            return
        if comm is not self.comm and not comm.world_size == self.comm.world_size == 1:
            yield "this store is stepped on the communicator of its first step; this call gives another one"
        if {**options, "lr": 0.0} == {**self._options, "lr": 0.0}:
            return
        try:
            check_options(elementwise(kind), {**options, "lr": 0.0}, (), self._order)
        except UsageError as error:
            yield str(error)
        if options["fused"] != self._options["fused"]:
            yield f"fused was {self._options['fused']} in the first step, this call has {options['fused']}; keep it"
        if options.get("amsgrad") and any("max_exp_avg_sq" not in held for held in self.optimizer.state.values()):
            yield "amsgrad is switched on after steps without it, which kept no maximum; make a new store"

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """Which gradients there are; they are copied to where they travel from, and stay as they are."""
        pending = self.flat.collect(self._given)
        return Pending(pending.present, (*pending.problems, *replaced(self._places)))

    def propose(self, window: Window, rates: Sequence[float]) -> None:
        """The slices in the gradients' dtype, and first state where torch would make it in the commit."""
        super().propose(window, rates)
        self._first = {}
        for held in self.flat.held:
            if window.present[held.path] and not self.optimizer.state.get(held.parameter):
                spec = elementwise(self.kind).spec(self._asked, held.parameter)
                with torch.no_grad():
                    elements = {k: torch.empty_like(held.parameter, dtype=d) for k, d in spec.elements.items()}
                    if state := spec.initial(elements):
                        self._first[held.parameter] = state

    def commit(self, window: Window, rates: Sequence[float]) -> None:
        """The ordinary optimizer's step, in place, on the averaged gradients."""
        before = [(held.parameter, held.parameter.grad, held.parameter.grad_dtype) for held in self.flat.held]
        self.hand_out(window)
        self._options = self._asked
        for group in self.optimizer.param_groups:
            group.update(self._options)
        for parameter, state in self._first.items():
            self.optimizer.state[parameter].update(state)
        self._first = {}
        self._update()
        for parameter, grad, dtype in before:
            parameter.grad = None
            parameter.grad_dtype = dtype
            parameter.grad = None if self._given is None else grad
        self.step_count += 1

    def _update(self) -> None:
        """One `optimizer.step()`; two where torch's fused SGD takes no mixture of new and old momentum buffers."""
        stepped = [held.parameter for held in self.flat.held if held.parameter.grad is not None]
        fresh = [p for p in stepped if self.optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if self._options["fused"] and self._options.get("momentum") and 0 < len(fresh) < len(stepped):
            later = [(parameter, parameter.grad) for parameter in fresh]
            for parameter in fresh:
                parameter.grad = None
            self.optimizer.step()
            for parameter in stepped:
                parameter.grad = None
            for parameter, grad in later:
                parameter.grad = grad
        self.optimizer.step()


def _agree(comm: Communicator, kind: str, contract: Contract, order: list[str], problem: UsageError | None) -> None:
    shown = {"order": hashlib.sha256(repr(order).encode()).hexdigest(), "contract": contract.digest}
    sides = comm.agree(f"parameter store under {kind}", shown, problem)
    if any(side != sides[0] for side in sides):
        held = comm.agree("contract", {"order": order, "contract": contract.to_json()})
        told = first_difference([Contract.from_json(one["contract"]) for one in held], comm.named)
        told = told or _first_move([one["order"] for one in held], comm.named)
        raise by_all(ContractError(f"the ranks hold different parameters: {told}"))


def _first_move(orders: Sequence[Sequence[str]], named: Callable[[int], str]) -> str:
    """The first place at which the same paths stand in different orders."""
    place = next(k for k, paths in enumerate(zip(*orders, strict=True)) if len(set(paths)) > 1)
    sides = "; ".join(f"{named(rank)} has {order[place]}" for rank, order in enumerate(orders))
    return f"the same ones, defined in different orders: as number {place + 1} {sides}"
