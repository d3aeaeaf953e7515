"""A session: the selected parameters of the real model, replicated and agreed on in a group that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.errors import ContractError, by_all
from shardrun.shard.contract import Contract, first_difference
from shardrun.shard.selection import Selection, clean_path


class SelectedDataParallel:
    """Selected parameters, the same on all ranks of `comm`.

    Collective: every rank of the group makes it, with a selection of the same contract (paths, shapes, dtypes,
    trainable flags, ties; definition order may differ). A difference is raised on every rank as ContractError naming
    the first differing path and all sides. Then the selected parameters are broadcast from rank 0. Unselected ones are
    not touched. `order` (the root's counts) is the order of the trainable paths in the flat buffers, if it is not to be
    the root's definition order; it is ignored unless it names exactly these.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, selection: Selection, order: Sequence[str] | None = None
    ) -> None:
        self.comm = comm
        self.model = model
        self.selection = selection
        self.contract = selection.contract()
        self._compare_contracts()
        self._places = _places(model, selection)
        self.order = self._root_order(order)
        self._broadcast()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Path -> selected Parameter, aliases and frozen ones included, in the model's definition order."""
        return self.selection.parameters

    def remaining_gradients(self) -> dict[str, Tensor]:
        """Gradients of unselected parameters: the very same tensor objects."""
        unselected = self.selection.unselected.items()
        return {path: parameter.grad for path, parameter in unselected if parameter.grad is not None}

    def replaced(self) -> list[str]:
        """Selected parameters in whose place the model holds something else by now; local."""
        return [
            f"{path}: the model holds another object there than at set-up; change values in place or make a new session"
            for path, held, name, parameter in self._places
            if held.get(name) is not parameter
        ]

    def _compare_contracts(self) -> None:
        found = self.comm.compare("session", "set-up", {"contract": self.contract.digest})
        if found.differing:
            contracts = [Contract.from_json(items) for items in self.comm.agree("contract", self.contract.to_json())]
            raise by_all(ContractError(f"the ranks select different parameters: {first_difference(contracts)}"))

    def _root_order(self, wanted: Sequence[str] | None) -> list[str]:
        """First paths of the distinct trainable parameters, in the root's order; nobody else's counts."""
        first = {spec.path: self.contract.specs[spec.alias].path for spec in self.contract.specs}
        trainable = {spec.path for spec in self.contract.distinct() if spec.trainable}
        order = list(dict.fromkeys(first[path] for path in self.parameters if first[path] in trainable))
        if wanted is not None and sorted(wanted) == sorted(order):
            order = list(wanted)
        return list(self.comm.agree("definition order", order if self.comm.rank == 0 else None)[0])

    def _broadcast(self) -> None:
        if self.comm.world_size == 1:
            return
        for spec in self.contract.distinct():
            data = self.parameters[spec.path].data
            wire = data.contiguous()
            self.comm.broadcast_(wire, spec.path, agreed=True)  # by the contract
            if wire.data_ptr() != data.data_ptr():
                data.copy_(wire)


_Place = tuple[str, dict[str, Any], str, nn.Parameter]


def _places(model: nn.Module, selection: Selection) -> list[_Place]:
    """Where the model keeps each selected parameter: path, the module's own table, the name in it, the parameter."""
    found: list[_Place] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            path = clean_path(f"{prefix}.{name}" if prefix else name)
            chosen = selection.parameters.get(path)
            if chosen is not None and chosen is parameter:
                found.append((path, module._parameters, name, chosen))
    return found
