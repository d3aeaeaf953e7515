"""From a recipe's model to the one that is trained: formats, ties, names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardrun.errors import ConfigError
from shardrun.run.model import (
    checkpoint_activations,
    named_buffers,
    named_tensors,
    option_groups,
    place_model,
    tied_names,
)
from shardrun.shard.selection import select_parameters

CPU = torch.device("cpu")


class Counting(nn.Module):
    """A linear layer under two names, and buffers whose values bf16 cannot hold."""

    frequencies: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("frequencies", torch.tensor([0.001, 1.0]))
        self.register_buffer("seen", torch.tensor(16777217.0, dtype=torch.float64))


def test_bf16_is_the_format_of_parameters_and_of_nothing_else() -> None:
    model = Counting()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    parameters = dict(model.named_parameters())
    place_model(model, torch.bfloat16, CPU)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name]), name
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert model.head.weight is model.embed.weight
    assert {name: p.dtype for name, p in after.items()} == {
        "phase": torch.complex64,
        **dict.fromkeys(("embed.weight", "embed.bias", "head.bias"), torch.bfloat16),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)])
def test_a_norm_with_running_statistics_goes_on_working_in_a_bf16_model(norm: nn.Module, training: bool) -> None:
    model = place_model(nn.Sequential(nn.Linear(3, 6), norm, nn.LayerNorm(6)), torch.bfloat16, CPU).train(training)
    model(torch.randn(2, 4, 3, dtype=torch.bfloat16)).float().sum().backward()
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {"1.weight", "1.bias"}


def test_a_tensor_with_several_names_is_stored_under_the_first_in_sorted_order() -> None:
    shared, norm = torch.zeros(2), nn.BatchNorm1d(2)
    model = nn.Module()
    model.b, model.a = norm, norm
    model.register_buffer("shown", shared)
    model.register_buffer("hidden", shared, persistent=False)
    aliases = tied_names(model)
    assert aliases == {f"b.{name}": f"a.{name}" for name in ("weight", "bias", *dict(norm.named_buffers()))}
    assert list(named_buffers(model)) == ["a.num_batches_tracked", "a.running_mean", "a.running_var", "hidden"]
    assert named_buffers(model)["hidden"] is shared
    assert "shown" in named_tensors(model)
    assert "hidden" not in named_tensors(model)  # a state_dict leaves it out


def test_empty_tensors_and_views_of_one_memory_are_tensors_of_their_own() -> None:
    model = nn.Module()
    table = torch.arange(4.0)
    for name, tensor in {"e": torch.zeros(0), "f": torch.zeros(0), "t": table, "v": table.view(4)}.items():
        model.register_buffer(name, tensor)
    assert tied_names(model) == {}
    assert list(named_buffers(model)) == ["e", "f", "t", "v"]


class Named(nn.Module):
    """A child whose own name has the wrapper's in it, and one that is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod = nn.BatchNorm1d(2)
        self.net = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), backend="eager")


def test_only_whole_components_of_a_path_are_left_out() -> None:
    paths = {"a_orig_mod.running_mean", "net.1.running_mean", "a_orig_mod.weight", "net.0.weight"}
    model = Named()
    assert paths <= named_tensors(model).keys()
    assert {path for path in paths if "running" in path} <= named_buffers(model).keys()
    assert not any("_orig_mod." in path.replace("a_orig_mod.", "") for path in named_tensors(model))


def test_activations_of_a_compiled_module_are_found_by_its_clean_path() -> None:
    model = Named()
    assert checkpoint_activations(model, ["net.0"]) == 1
    x = torch.randn(3, 2, requires_grad=True)
    model.net(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(ConfigError, match=r"'net\._orig_mod\.0' matches none of 4 modules"):
        checkpoint_activations(Named(), ["net._orig_mod.0"])


def test_a_shared_module_is_checkpointed_once_under_any_of_its_names() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict({"first": block, "again": block})
    assert checkpoint_activations(model, ["again", "*.1"]) == 1
    assert "forward" in vars(block)
    assert "forward" not in vars(block[1])
    assert checkpoint_activations(nn.ModuleDict({"first": nn.Sequential(block), "again": block}), ["*"]) == 1


def test_an_option_pattern_may_name_any_alias_of_a_tied_parameter() -> None:
    model = nn.Module()
    model.embed, model.head, model.still = nn.Embedding(4, 2), nn.Linear(2, 4), nn.Linear(1, 1)
    model.head.weight = model.embed.weight
    model.still.requires_grad_(False)
    contract = select_parameters(model).contract()
    groups = option_groups([(["head.weight"], {"weight_decay": 0.0}, 1.0), (["*"], {}, 0.5)], contract)
    assert [group.paths for group in groups] == [{"embed.weight"}, {"embed.weight", "head.bias"}]
    with pytest.raises(ConfigError, match=r"optimizer.options.0.match: \['still.\*'\] matches none of 3 selected"):
        option_groups([(["still.*"], {}, 1.0)], contract)
