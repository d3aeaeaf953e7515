"""Saved against expected: every misfit in one go, each with both sides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardrun.records.fit import (
    checkpoint_violations,
    cover_violations,
    differences,
    holds_whole,
    piece_violations,
    violations,
)
from shardrun.shard.contract import Contract, ParameterSpec

SPECS = (
    ParameterSpec("a.weight", (2, 3), "float32", True, 0),
    ParameterSpec("b.weight", (4,), "bfloat16", True, 1),
    ParameterSpec("emb.weight", (5,), "float32", True, 2),
    ParameterSpec("head.weight", (5,), "float32", True, 2),
)


def meta(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "group": "default",
        "rank": 0,
        "world_size": 2,
        "step_count": 7,
        "contract": Contract.of(SPECS).to_json(),
        "layout": [{"dtype": "float32", "buckets": [{"start": 0, "stop": 512}]}],
        "optimizer": {"name": "adamw", "groups": [{"betas": [0.9, 0.95], "weight_decay": 0.1}]},
        "numerics": {"seam": "exchange", "threads": 1},
        "fragments": {"a.weight": [0, 6]},
        **changes,
    }


def contract_with(index: int, **changes: Any) -> list[dict[str, Any]]:
    items = Contract.of(SPECS).to_json()
    items[index] |= changes
    return items


def test_what_fits_has_no_violation() -> None:
    assert violations(meta(), meta()) == []
    assert violations(meta(step_count=1), meta(step_count=2)) == []  # progress, not identity
    assert violations(meta(layout=[{"dtype": "float32", "buckets": ({"start": 0, "stop": 512},)}]), meta()) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": 2}, "record version saved 2, this run 1"),
        ({"group": "experts"}, "record group saved 'experts', this run 'default'"),
        ({"rank": 1}, "record of rank 1, this is rank 0"),
        (
            {"world_size": 4},
            "world size saved 4, this run 2 (resume with --reshard, or use `shardrun reshard`; or go on with "
            "topology.world_size=4)",
        ),
        ({"contract": contract_with(0, shape=[3, 2])}, "a.weight: shape saved [3, 2], this run [2, 3]"),
        ({"contract": contract_with(0, dtype="bfloat16")}, "a.weight: dtype saved bfloat16, this run float32"),
        ({"contract": contract_with(0, trainable=False)}, "a.weight: saved frozen, this run trainable"),
        (
            {"contract": contract_with(3, alias=3)},
            "head.weight: saved as a tensor of its own, this run tied to emb.weight",
        ),
        (
            {"contract": Contract.of(SPECS[1:2]).to_json()[:0]},
            "a.weight: this run selects it (float32 [2, 3], trainable), the checkpoint does not",
        ),
        ({"optimizer": {"name": "sgd", "groups": []}}, "optimizer.name: saved 'sgd', this run 'adamw'"),
        (
            {"optimizer": {"name": "adamw", "groups": [{"betas": [0.9, 0.999], "weight_decay": 0.1}]}},
            "optimizer.groups.0.betas.1: saved 0.999, this run 0.95",
        ),
        ({"numerics": {"seam": "native", "threads": 1}}, "numerics.seam: saved 'native', this run 'exchange'"),
        (
            {"layout": [{"dtype": "float32", "buckets": [{"start": 0, "stop": 256}]}]},
            "layout.0.buckets.0.stop: saved 256, this run 512",
        ),
        ({"fragments": {"a.weight": [0, 5]}}, "fragments.a.weight.1: saved 5, this run 6"),
    ],
)
def test_each_misfit_is_told_with_both_sides(change: dict[str, Any], line: str) -> None:
    assert line in violations(meta(**change), meta())


def test_all_misfits_come_at_once() -> None:
    saved = meta(
        world_size=3,
        contract=[*contract_with(0, shape=[9]), {**Contract.of(SPECS).to_json()[0], "path": "z.gone", "alias": 4}],
        optimizer={"name": "sgd"},
    )
    found = "\n".join(violations(saved, meta()))
    for part in ("world size saved 3, this run 2", "a.weight: shape", "z.gone: saved", "optimizer.name"):
        assert part in found
    assert "layout" not in found  # it follows from the rest


def test_a_parameter_that_moves_the_index_of_a_tie_is_one_difference() -> None:
    more = Contract.of(
        (
            ParameterSpec("0.first", (1,), "float32", True, 0),
            *[ParameterSpec(s.path, s.shape, s.dtype, s.trainable, s.alias + 1) for s in SPECS],
        )
    ).to_json()
    assert violations(meta(contract=more), meta()) == [
        "0.first: saved (float32 [1], trainable), this run does not select it"
    ]


def test_a_long_list_is_cut_and_counted() -> None:
    many = Contract.of(ParameterSpec(f"p{i:03}", (1,), "float32", True, i) for i in range(500)).to_json()
    found = violations(meta(contract=many), meta(contract=[]))
    assert len(found) == 40
    assert found[-1] == "... and 461 more like these"


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (True, 1), ([1], [1, 2]), ({"a": 1}, {}), (None, 0), ("1", 1), ({}, None), ([], {})]
)
def test_unlike_json_is_a_difference(one: Any, other: Any) -> None:
    assert len(list(differences(one, other, "x"))) == 1


# ---- whole checkpoints -----------------------------------------------------------------------------------------------


def manifest() -> dict[str, Any]:
    return {
        "topology": {"world_size": 2},
        "groups": {"default": {"contract": Contract.of(SPECS).to_json(), "optimizer": {"name": "adamw"}}},
        "model": {"a.weight": ["float32", [2, 3]], "emb.weight": ["float32", [5]]},
        "aliases": {"head.weight": "emb.weight"},
        "numerics": {"threads": 1},
    }


def test_a_checkpoint_that_fits() -> None:
    assert checkpoint_violations(manifest(), manifest()) == []
    assert checkpoint_violations(manifest(), {"topology": {"world_size": 2}}) == []


def test_which_tied_name_is_stored_makes_no_difference() -> None:
    turned = manifest()
    turned["model"]["head.weight"] = turned["model"].pop("emb.weight")
    turned["aliases"] = {"emb.weight": "head.weight"}
    assert checkpoint_violations(manifest(), turned) == []


def change_model(side: dict[str, Any], how: str) -> None:
    match how:
        case "more":
            side["model"]["new.weight"] = ["float32", [1]]
        case "less":
            del side["model"]["a.weight"]
        case "shape":
            side["model"]["a.weight"] = ["float32", [3, 2]]
        case "dtype":
            side["model"]["a.weight"] = ["bfloat16", [2, 3]]
        case "untied":
            side["aliases"] = {}
            side["model"]["head.weight"] = ["float32", [5]]
        case "tied":
            side["aliases"]["a.weight"] = "emb.weight"
            del side["model"]["a.weight"]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("more", "model: new.weight: expected (float32 [1]), not in the checkpoint"),
        ("less", "model: a.weight: saved (float32 [2, 3]), this run has no such tensor"),
        ("shape", "model: a.weight: shape saved [2, 3], this run [3, 2]"),
        ("dtype", "model: a.weight: dtype saved float32, this run bfloat16"),
        ("untied", "model: head.weight: saved tied to emb.weight, this run as a tensor of its own"),
        ("tied", "model: emb.weight: saved as a tensor of its own, this run tied to a.weight"),
    ],
)
def test_a_model_of_another_form_is_refused_by_name(how: str, line: str) -> None:
    expected = copy.deepcopy(manifest())
    change_model(expected, how)
    assert line in checkpoint_violations(manifest(), expected)


def test_groups_numerics_and_any_other_section_are_compared() -> None:
    expected = manifest()
    expected["groups"] = {"default": expected["groups"]["default"], "experts": {}}
    expected["numerics"] = {"threads": 2}
    expected["data"] = {"identity": "x"}
    expected["topology"]["world_size"] = 1
    found = checkpoint_violations(manifest(), expected)
    told = "world size saved 2, this run 1 (resume with --reshard, or use `shardrun reshard`; or go on with "
    assert f"{told}topology.world_size=2)" in found
    assert "group experts: not in the checkpoint" in found
    assert any(line.startswith("numerics.threads: saved 1, this run 2 (") for line in found)
    assert "data: saved nothing, this run {'identity': 'x'}" in found
    saved = manifest()
    saved["groups"]["extra"] = {}
    assert checkpoint_violations(saved, manifest()) == ["group extra: saved, not in this run"]


# ---- pieces --------------------------------------------------------------------------------------------------------


def test_pieces_have_the_shape_of_their_fragment() -> None:
    fragments = {"a.weight": [2, 6], "t": [0, 1]}
    good = {"a.weight/exp_avg": torch.zeros(4), "a.weight/step": torch.tensor(1.0), "t/exp_avg": torch.zeros(1)}
    assert piece_violations(fragments, good) == []
    padded = {"a.weight/exp_avg": torch.zeros(256), "b/exp_avg": torch.zeros(1), "odd": torch.zeros(1)}
    found = piece_violations(fragments, padded)
    assert found[0] == "a.weight/exp_avg: shape [256]; the fragment [2, 6] has 4 elements"
    assert found[1] == "b/exp_avg: this rank holds no fragment of b"
    assert len(found) == 3


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (
            {0: {"a.weight": [0, 6]}, 1: {"b.weight": [0, 4]}},
            "emb.weight: its 5 elements are not held exactly once: no rank",
        ),
        ({0: {"a.weight": [0, 3]}, 1: {"a.weight": [4, 6]}}, "rank 0 [0, 3), rank 1 [4, 6)"),
        ({0: {"a.weight": [0, 4]}, 1: {"a.weight": [3, 6]}}, "rank 0 [0, 4), rank 1 [3, 6)"),
        ({0: {"a.weight": [0, 256]}}, "rank 0 [0, 256)"),
        ({0: {"a.weight": [0, 5]}}, "rank 0 [0, 5)"),
        ({0: {"x": [0, 5]}}, "x: rank 0 holds [0, 5) of it; it is not a trainable parameter"),
        ({0: {"head.weight": [0, 5]}}, "head.weight: rank 0 holds"),
    ],
)
def test_elements_left_out_or_held_twice_are_found(held: dict[int, dict[str, list[int]]], words: str) -> None:
    assert words in "\n".join(cover_violations(Contract.of(SPECS).to_json(), held))


def test_a_whole_cover_has_no_violation() -> None:
    held = {0: {"a.weight": [0, 2], "b.weight": [0, 4]}, 1: {"a.weight": [2, 6]}, 2: {"emb.weight": [0, 5]}}
    assert cover_violations(Contract.of(SPECS).to_json(), held) == []


# ---- whole parameters ------------------------------------------------------------------------------------------------


def test_whole_parameters_are_those_of_zero1() -> None:
    assert holds_whole({"optimizer": {"strategy": "zero1"}})
    for other in ({"optimizer": {"strategy": "zero2"}}, {"optimizer": {"name": "adamw"}}, {"optimizer": 5}, {}):
        assert not holds_whole(other)


def test_state_of_a_whole_parameter_has_shapes_of_its_own() -> None:
    fragments = {"a.weight": [0, 6]}
    own = {"a.weight/rows": torch.zeros(2, 1), "a.weight/momentum_buffer": torch.zeros(2, 3)}
    assert len(piece_violations(fragments, own)) == 2
    assert piece_violations(fragments, own, whole=True) == []
    astray = {"b.weight/rows": torch.zeros(2, 1)}
    assert piece_violations(fragments, astray, whole=True) == ["b.weight/rows: this rank holds no fragment of b.weight"]


def test_a_parameter_in_two_pieces_has_no_owner() -> None:
    contract = Contract.of(SPECS).to_json()
    owned = {0: {"a.weight": [0, 6], "b.weight": [0, 4]}, 1: {"emb.weight": [0, 5]}}
    assert cover_violations(contract, owned, whole=True) == []
    cut = {0: {"a.weight": [0, 2], "b.weight": [0, 4]}, 1: {"a.weight": [2, 6], "emb.weight": [0, 5]}}
    assert cover_violations(contract, cut) == []
    assert cover_violations(contract, cut, whole=True) == [
        "a.weight: its 6 elements are not held by one owner: rank 0 [0, 2), rank 1 [2, 6)"
    ]
