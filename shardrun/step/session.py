"""A session: the selected parameters of the real model, replicated and agreed on in a group that the caller owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.errors import ContractError, by_all
from shardrun.shard.contract import Contract, first_difference
from shardrun.shard.flat_gradients import accumulate_in_fp32
from shardrun.shard.selection import Selection, clean_path, path_in


class Session:
    """Selected parameters, the same on all ranks of `comm`; see SelectedDataParallel."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        selection: Selection,
        order: Sequence[str] | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        self.comm = comm
        self.model = model
        self.selection = selection
        self.contract = selection.contract()
        buffers = _buffers(model) if broadcast_buffers else {}
        self._compare(buffers)
        self.number = comm.number_session()
        self._places = places(model, selection.parameters)
        self.order, self.defined = self._root_orders(order)
        """First paths of the distinct trainable parameters, in the order of the flat buffers, and as the root's model
        defines them."""
        self._broadcast({spec.path: self.parameters[spec.path].data for spec in self.contract.distinct()} | buffers)
        for path in self.order:  # whoever reduces them, and whenever the buffers for it are made
            accumulate_in_fp32(self.parameters[path])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Path -> selected Parameter, aliases and frozen ones included, in the model's definition order."""
        return self.selection.parameters

    def remaining_gradients(self) -> dict[str, Tensor]:
        """Gradients of unselected parameters: the very same tensor objects."""
        unselected = self.selection.unselected.items()
        return {path: parameter.grad for path, parameter in unselected if parameter.grad is not None}

    def replaced(self) -> list[str]:
        """Selected parameters, or modules that hold them, in whose place the model holds something else by now."""
        return replaced(self._places)

    def _compare(self, buffers: dict[str, Tensor]) -> None:
        forms = {path: f"{buffer.dtype} {tuple(buffer.shape)}" for path, buffer in sorted(buffers.items())}
        found = self.comm.compare("session", "set-up", {"contract": self.contract.digest, "buffers": repr(forms)})
        if "contract" in found.differing:
            contracts = [Contract.from_json(items) for items in self.comm.agree("contract", self.contract.to_json())]
            told = first_difference(contracts, self.comm.named)
            raise by_all(ContractError(f"the ranks select different parameters: {told}"))
        if "buffers" in found.differing:
            raise by_all(ContractError(_first_buffer(self.comm.agree("buffers", forms), self.comm.named)))

    def _root_orders(self, wanted: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """The root's order, the one `wanted` if that is of the same paths, and its definitions; nobody else's count."""
        defined = trainable_order(self.parameters, self.contract)
        order = list(wanted) if wanted is not None and sorted(wanted) == sorted(defined) else defined
        answers = self.comm.agree("definition order", (order, defined) if self.comm.rank == 0 else None)
        return list(answers[0][0]), list(answers[0][1])

    def _broadcast(self, tensors: dict[str, Tensor]) -> None:
        if self.comm.world_size == 1:
            return
        for path, tensor in tensors.items():
            wire = tensor.contiguous()
            self.comm.broadcast_(wire, path, agreed=True)  # by the contract
            if wire.data_ptr() != tensor.data_ptr():
                tensor.copy_(wire)


def trainable_order(paths: Iterable[str], contract: Contract) -> list[str]:
    """First paths of the distinct trainable parameters, in the order of `paths`, as a model defines them."""
    first = {spec.path: contract.specs[spec.alias].path for spec in contract.specs}
    trainable = {spec.path for spec in contract.distinct() if spec.trainable}
    return list(dict.fromkeys(first[path] for path in paths if first[path] in trainable))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Path -> buffer of any dtype, sorted by path; two names of one tensor count once."""
    named = sorted((path_in(model, path), buffer) for path, buffer in model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {path: buffer for path, buffer in named if first.setdefault(id(buffer), path) == path}


def _first_buffer(forms: Sequence[dict[str, str]], named: Callable[[int], str]) -> str:
    for path in sorted(set().union(*forms)):
        sides = [held.get(path, "no such buffer") for held in forms]
        if len(set(sides)) > 1:
            told = "; ".join(f"{named(rank)} has {side}" for rank, side in enumerate(sides))
            return f"the ranks hold different buffers and they are to be broadcast: {path}: {told}"
    raise AssertionError("no difference between buffers")


Place = tuple[str, dict[str, Any], str, object]
"""A path, the table of a module that holds what stands there, the name in that table, and what it held at set-up."""


def places(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Place]:
    """Where a model keeps the given parameters, and every module on the way to them."""
    return _places(model, partial(path_in, model), parameters, "")


def _places(
    module: nn.Module, known_as: Callable[[str], str], parameters: Mapping[str, nn.Parameter], prefix: str
) -> list[Place]:
    found: list[Place] = []
    for name, parameter in module._parameters.items():
        path = known_as(prefix + name)
        if parameter is not None and parameters.get(path) is parameter:
            found.append((path, module._parameters, name, parameter))
    for name, child in module._modules.items():
        inside = _places(child, known_as, parameters, f"{prefix}{name}.") if child is not None else []
        found += [(clean_path(prefix + name), module._modules, name, child), *inside] if inside else []
    return found


def replaced(held: Sequence[Place]) -> list[str]:
    """What the model holds something else in the place of by now; local."""
    return [
        f"{path}: the model holds another object there than at set-up; change values in place or make a new session"
        for path, table, name, kept in held
        if table.get(name) is not kept
    ]
