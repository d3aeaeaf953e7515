"""Public bug reports about what a training run computes, logs and keeps: gradients, windows, data, precision, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.reshard import reshard
from tests.support.training import RECIPES, Trained, document, train, trained


def _toy(run_dir: Path, world: int, samples: list[list[float | None]], train: dict[str, Any], **more: Any) -> Trained:
    config = document(run_dir, world, {"train": train, **more.pop("sections", {})}, samples=samples, **more)
    return trained(config)


def _weights(done: Trained, step: int) -> float:
    return float(done.model(step)["w"])


def test_c001_mean_over_all_tokens_not_mean_of_rank_means(tmp_path: Path) -> None:
    done = _toy(tmp_path, 2, [[6.0], [1.0, 2.0, 3.0]], {"steps": 1, "global_batch_size": 2})
    assert _weights(done, 1) == -3.0
    assert done.steps[0]["grad_norm"] == 3.0


@pytest.mark.parametrize(
    ("world", "samples", "batch"),
    [
        (1, [[6.0, 1.0, 2.0, 3.0]], 1),
        (1, [[6.0], [1.0, 2.0, 3.0]], 2),
        (2, [[6.0], [1.0, 2.0, 3.0]], 2),
        (2, [[6.0], [None], [1.0], [2.0, 3.0]], 4),
    ],
)
def test_c002_the_cut_into_micro_batches_changes_nothing(
    tmp_path: Path, world: int, samples: list[list[float | None]], batch: int
) -> None:
    done = _toy(tmp_path, world, samples, {"steps": 1, "global_batch_size": batch})
    assert _weights(done, 1) == -3.0
    assert done.steps[0]["grad_norm"] == 3.0


def test_c003_every_micro_batch_of_a_window_counts(tmp_path: Path) -> None:
    # Contiguous shares: rank 0 takes the first three micro-batches, rank 1 the others.
    done = _toy(tmp_path, 2, [[1.0], [2.0], [4.0], [1.0], [2.0], [4.0]], {"steps": 1, "global_batch_size": 6})
    assert _weights(done, 1) == pytest.approx(-7 / 3, rel=1e-6)
    alone = _toy(tmp_path / "alone", 1, [[1.0], [2.0], [4.0]], {"steps": 1, "global_batch_size": 3})
    assert _weights(alone, 1) == pytest.approx(-7 / 3, rel=1e-6)


def test_c004_a_rank_whose_labels_are_all_ignored(tmp_path: Path) -> None:
    done = _toy(tmp_path, 2, [[4.0, 2.0], [None]], {"steps": 1, "global_batch_size": 2}, w=1.0)
    assert _weights(done, 1) == 1.0 - 3.0
    assert done.steps[0]["loss"] == 3.0
    assert done.steps[0]["tokens"] == 2


def test_c005_the_short_last_window_is_divided_by_what_it_holds(tmp_path: Path) -> None:
    samples: list[list[float | None]] = [[float(x)] for x in range(1, 8)]
    done = _toy(tmp_path, 2, samples, {"steps": None, "epochs": 1, "global_batch_size": 4})
    assert [row["grad_norm"] for row in done.steps] == [2.5, 6.0]
    assert _weights(done, 2) == -8.5


def test_c107_uneven_data_every_sample_once(tmp_path: Path) -> None:
    samples: list[list[float | None]] = [[float(x)] for x in range(1, 6)]
    done = _toy(tmp_path, 2, samples, {"steps": None, "epochs": 1, "global_batch_size": 2})
    assert [row["grad_norm"] for row in done.steps] == [1.5, 3.5, 5.0]
    assert _weights(done, 3) == -10.0
    dropping = _toy(
        tmp_path / "drop",
        2,
        samples,
        {"steps": None, "epochs": 1, "global_batch_size": 2},
        sections={"data": {"drop_last": True, "shuffle": False}},
    )
    assert _weights(dropping, 2) == -5.0
    assert any("1 samples dropped" in text for text in dropping.texts("note"))


def test_c108_no_micro_batch_leaks_into_the_next_epoch(tmp_path: Path) -> None:
    samples: list[list[float | None]] = [[float(x)] for x in (1, 2, 1, 2, 3, 4, 3, 4, 5, 5)]
    done = _toy(tmp_path, 2, samples, {"steps": None, "epochs": 2, "global_batch_size": 4})
    assert [row["updates"] for row in done.steps] == [1, 2, 3, 4, 5, 6]
    assert _weights(done, 6) == -20.0


def test_c132_the_logged_loss_is_that_of_all_ranks(tmp_path: Path) -> None:
    done = _toy(tmp_path, 2, [[6.0], [1.0, 2.0, 3.0]], {"steps": 1, "global_batch_size": 2}, w=1.0)
    assert done.steps[0]["loss"] == 3.0
    assert done.steps[0]["tokens"] == 4


def test_an_empty_window_is_a_counted_skip(tmp_path: Path) -> None:
    samples: list[list[float | None]] = [[1.0], [1.0], [None], [None], [2.0], [2.0]]
    done = _toy(tmp_path, 2, samples, {"steps": None, "epochs": 1, "global_batch_size": 2})
    assert [(row["skipped"], row["updates"]) for row in done.steps] == [(None, 1), ("empty", 1), (None, 2)]
    assert _weights(done, 3) == -3.0


def test_c061_a_skipped_update_does_not_move_the_schedule(tmp_path: Path) -> None:
    samples: list[list[float | None]] = [[1.0], [math.inf], [1.0], [1.0], [1.0]]
    config = document(
        tmp_path,
        1,
        {
            "train": {"steps": 5, "global_batch_size": 1, "nonfinite": "skip"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "linear", "total_steps": 10},
            "checkpoint": {"every": 1, "keep": 9},
        },
        samples=samples,
    )
    config["recipe_args"]["samples"][1] = [3e38, 3e38]  # a sum that overflows; YAML and JSON have no infinity
    trained(config, stop_at=3)
    done = trained(config)
    assert [row["lr"] for row in done.steps if not row["skipped"]] == pytest.approx([0.10, 0.09, 0.08, 0.07])
    assert [row["skipped"] for row in done.steps] == [None, "nonfinite", None, None, None]
    assert done.steps[-1]["updates"] == 4
    assert torch.equal(done.model(1)["w"], done.model(2)["w"])


@pytest.mark.parametrize("measured", [True, False])
def test_without_the_norm_in_the_log_a_window_is_the_same(tmp_path: Path, measured: bool) -> None:
    samples: list[list[float | None]] = [[6.0], [1.0], [2.0], [2.0]]
    sections = {"log": {"grad_norm": measured}}
    done = _toy(tmp_path, 2, samples, {"steps": 2, "global_batch_size": 2}, sections=sections)
    assert _weights(done, 2) == -5.5
    assert [row["grad_norm"] for row in done.steps] == ([3.5, 2.0] if measured else [None, None])
    samples[2] = [3e38, 3e38]
    train_section = {"steps": 2, "global_batch_size": 2}
    bad = train(document(tmp_path / "bad", 2, {"train": train_section, **sections}, samples=samples))
    assert "non-finite gradient" in bad.errors[0]


def test_c059_c060_a_nan_on_any_rank_stops_all_and_spoils_nothing(tmp_path: Path) -> None:
    for bad_rank in (0, 1):
        samples: list[list[float | None]] = [[1.0], [2.0], [1.0], [2.0]]
        samples[2 + bad_rank] = [3e38, 3e38]
        config = document(
            tmp_path / str(bad_rank),
            2,
            {"train": {"steps": 2, "global_batch_size": 2, "max_grad_norm": 1.0}, "checkpoint": {"every": 1}},
            samples=samples,
        )
        done = train(config)
        assert done.codes == [6, 6]
        for error in done.errors:
            assert "step 2" in error
            assert f"rank {bad_rank} has a non-finite gradient for w" in error
        assert not done.checkpoint(2).exists()
        assert torch.isfinite(done.model(1)["w"]).all()


def _features(run_dir: Path, world: int = 2, **sections: Any) -> dict[str, Any]:
    base = {
        "optimizer": {"name": "adamw", "lr": 0.01, "options": [{"match": ["*norm*"], "weight_decay": 0.0}]},
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8, "max_grad_norm": 1.0},
        "checkpoint": {"every": 1, "keep": 9},
    }
    args = {"layers": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1, "text": str(run_dir / "text.txt")}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    recipe = str(RECIPES.parents[2] / "recipes" / "gpt.py")
    return document(run_dir, world, {**base, **sections}, recipe, **args)


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"precision": {"parameters": "bf16"}},
        {"precision": {"parameters": "bf16", "master_weights": False}},
        {"precision": {"autocast": "bf16"}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
    ],
    ids=["fp32", "bf16", "bf16-no-masters", "autocast", "sgd"],
)
def test_c011_c089_state_of_every_mode_is_saved_and_resumes_to_the_bit(tmp_path: Path, sections: Any) -> None:
    straight = trained(_features(tmp_path / "straight", **sections))
    trained(_features(tmp_path / "broken", **sections), stop_at=2)
    broken = trained(_features(tmp_path / "broken", **sections))
    assert broken.steps == straight.steps
    assert _same(broken.model(4), straight.model(4))
    assert _same(broken.state(4), straight.state(4))
    keys = {name.rpartition("/")[2] for name in straight.state(4)}
    if sections.get("optimizer", {}).get("name") == "sgd":
        assert keys == {"momentum_buffer"}
    else:
        masters = sections.get("precision", {}) == {"parameters": "bf16"}
        assert keys == {"exp_avg", "exp_avg_sq", "step"} | ({"master"} if masters else set())


def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    plain = trained(_features(tmp_path / "plain"))
    again = trained(
        _features(
            tmp_path / "again",
            train={
                "steps": 4,
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "max_grad_norm": 1.0,
                "activation_checkpointing": ["blocks.*"],
            },
        )
    )
    assert again.steps == plain.steps
    assert _same(again.model(4), plain.model(4))
    assert any("activations of 2 modules" in text for text in again.texts("note"))


def test_c104_c034_a_subset_starts_from_a_file_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    first = trained(_features(tmp_path / "first"))
    start = str(first.checkpoint(4) / "model.safetensors")
    chosen = {"include": ["blocks.1.*", "norm.weight"]}
    second = trained(_features(tmp_path / "second", select=chosen, init_from=start))
    before, after = first.model(4), second.model(4)
    for name, tensor in after.items():
        touched = name.startswith("blocks.1.") or name == "norm.weight"
        assert torch.equal(tensor, before[name]) != touched, name
    assert {name.rpartition("/")[0] for name in second.state(4)} == {
        name for name in after if name.startswith("blocks.1.") or name == "norm.weight"
    }


def test_a_start_file_that_does_not_fit_is_refused_with_every_misfit(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"embed.weight": torch.zeros(3, 3), "stranger": torch.zeros(1)}, tmp_path / "wrong.safetensors")
    done = train(_features(tmp_path / "run", 1, init_from=str(tmp_path / "wrong.safetensors")))
    assert done.codes == [3]
    assert "stranger: in the file, not in the model" in done.errors[0]
    assert "embed.weight: file (3, 3), model (256, 16)" in done.errors[0]
    assert "norm.weight: in the model, not in the file" in done.errors[0]


def test_c009_state_follows_the_name_when_the_definition_order_changes(tmp_path: Path) -> None:
    def config(swapped: bool) -> dict[str, Any]:
        sections = {"optimizer": {"name": "adamw", "lr": 0.1}, "train": {"steps": 2, "global_batch_size": 2}}
        recipe = str(RECIPES / "train_two_layers.py")
        return document(tmp_path / "run", 2, sections, recipe, swapped=swapped)

    first = trained(config(False), stop_at=1)
    assert first.state(1)["l1/exp_avg"].tolist() == pytest.approx([0.1] * 3)
    assert first.state(1)["l2/exp_avg"].tolist() == pytest.approx([0.5] * 3)
    second = trained(config(True), accept_changes=True)
    assert second.state(2)["l1/exp_avg"].tolist() == pytest.approx([0.19] * 3)
    assert second.state(2)["l2/exp_avg"].tolist() == pytest.approx([0.95] * 3)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_c066_another_world_size_is_refused_naming_both_or_exact_if_asked_for(
    tmp_path: Path, before: int, now: int
) -> None:
    def config(world: int, name: str = "run") -> dict[str, Any]:
        sections = {
            "optimizer": {"name": "adamw", "lr": 0.1},
            "train": {"steps": 6, "global_batch_size": 2},
            "checkpoint": {"every": 3, "keep": 9},
        }
        return document(tmp_path / name, world, sections, samples=[[float(x)] for x in range(1, 13)])

    straight = trained(config(before, "straight"))
    begun = trained(config(before), stop_at=3)
    refused = train(config(now))
    assert set(refused.codes) == {3}
    assert f"world size saved {before}, this run {now}" in refused.errors[0]
    assert "--reshard" in refused.errors[0]
    done = trained(config(now), reshard=True)
    again = reshard(begun.checkpoint(3), tmp_path / "out", now).path
    assert _by_name(again) == _by_name(begun.checkpoint(3))
    for held, wanted in ((done.model(6), straight.model(6)), (done.state(6), straight.state(6))):
        assert held.keys() == wanted.keys()
        assert all(torch.allclose(held[name], wanted[name], rtol=1e-6, atol=0) for name in held)


def _by_name(checkpoint: Path) -> list[list[Any]]:
    found = inspect(checkpoint, verify=True)
    rows = [*found["model"], *found["groups"]["default"]["state"]]
    return [[row["name"], row["dtype"], row["shape"], row["sha256"]] for row in rows]


def test_c048_an_auxiliary_loss_key_is_rejected(tmp_path: Path) -> None:
    from shardrun.config.load import from_mapping
    from shardrun.errors import ConfigError

    config = document(tmp_path, 1, {}, samples=[[1.0]])
    config["train"]["aux_loss_coefficient"] = 0.1
    with pytest.raises(ConfigError, match="aux_loss_coefficient"):
        from_mapping(config)


def test_other_numerics_are_refused_unless_accepted(tmp_path: Path) -> None:
    """A manifest of another torch and another way of summing: exact state, but other bits from there on."""
    import json

    from shardrun.checkpoint.manifest import seal

    sections = {"train": {"steps": 2, "global_batch_size": 2}}
    config = document(tmp_path, 2, sections, samples=[[1.0], [2.0], [3.0], [4.0]])
    path = trained(config, stop_at=1).checkpoint(1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["digest"]
    manifest["numerics"]["torch"] = "2.11.0"
    manifest["groups"]["default"]["numerics"]["seam"] = "native"
    path.write_bytes(seal(manifest))
    refused = train(config)
    assert set(refused.codes) == {3}
    assert "numerics.torch: saved '2.11.0'" in refused.errors[0]
    assert "--accept-changes" in refused.errors[0]
    done = train(config, accept_changes=True)
    assert done.codes == [0, 0], done.errors
    assert _weights(done, 2) == -1.5 - 3.5


def test_what_a_recipe_writes_on_save_does_not_spoil_the_checkpoint(tmp_path: Path) -> None:
    recipe = tmp_path / "writes.py"
    recipe.write_text(
        Path(RECIPES / "toy.py").read_text() + "\n\ndef on_save(model, folder):\n"
        "    (folder / 'w.txt').write_text(str(model.w.item()))\n"
    )
    config = document(tmp_path / "run", 1, {"train": {"steps": 2}}, str(recipe), samples=[[1.0], [2.0]])
    first = trained(config, stop_at=1)
    done = trained(config)
    assert (first.run_dir / "exports" / "step-0000000001" / "w.txt").read_text() == "-1.0"
    assert _weights(done, 2) == -3.0


NET = str(RECIPES / "run_net.py")
NET_SECTIONS = {
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
}


def test_a_shared_module_with_statistics_of_each_rank_is_saved_and_resumed(tmp_path: Path) -> None:
    sections = {**NET_SECTIONS, "eval": {"every": 1}}
    straight = trained(document(tmp_path / "straight", 2, sections, NET))
    trained(document(tmp_path / "broken", 2, sections, NET), stop_at=2)
    broken = trained(document(tmp_path / "broken", 2, sections, NET))
    assert broken.steps == straight.steps
    assert _same(broken.model(4), straight.model(4))
    states = [_rank_state(done, 4, rank) for done in (straight, broken) for rank in range(2)]
    assert _same(states[0], states[2])
    assert _same(states[1], states[3])
    assert not torch.equal(states[0]["buffer/norm_a.running_mean"], states[1]["buffer/norm_a.running_mean"])


def _rank_state(done: Trained, step: int, rank: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = load_file(sorted((done.checkpoint(step) / "state").iterdir())[rank])
    return tensors


def test_a_frozen_body_keeps_its_statistics_over_training_and_validation(tmp_path: Path) -> None:
    done = trained(document(tmp_path, 2, {**NET_SECTIONS, "eval": {"every": 1}}, NET, frozen=True))
    assert sum("val_loss" in row for row in done.rows) == 4
    model = done.model(4)
    assert torch.equal(model["norm_a.running_mean"], torch.zeros(4))
    assert torch.equal(model["norm_a.running_var"], torch.ones(4))
    assert int(model["norm_a.num_batches_tracked"]) == 0


def test_a_val_split_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    sections = {**NET_SECTIONS, "eval": {"every": 4, "at_end": False}}
    done = train(document(tmp_path, 2, sections, NET, val=False))
    assert done.codes == [1, 1]
    assert all("val.bin" in error for error in done.errors)
    assert done.rows == done.events == []


@pytest.mark.parametrize("every", [1, 3, None])
def test_the_last_validation_comes_before_the_last_save_and_there_is_one_of_each(
    tmp_path: Path, every: int | None
) -> None:
    sections = {"train": {"steps": 3}, "checkpoint": {"every": every}, "eval": {"at_end": True}}
    done = trained(document(tmp_path, 1, sections, samples=[[1.0], [2.0], [3.0]]))
    last = [event["event"] for event in done.events if event.get("step") == 3]
    assert last == ["step", "eval", "checkpoint", "finished"]
    assert (tmp_path / "loss.svg").exists()


def test_a_curve_that_a_kill_after_the_last_save_left_undrawn_is_drawn_by_the_next_start(tmp_path: Path) -> None:
    config = document(tmp_path, 1, {}, samples=[[1.0], [2.0]])
    trained(config)
    (tmp_path / "loss.svg").unlink()
    again = trained(config)
    assert [event["event"] for event in again.events][-1] == "finished"
    assert again.events[-1]["already"]
    assert (tmp_path / "loss.svg").exists()


def test_a_rank_that_counts_nothing_does_not_spoil_the_log(tmp_path: Path) -> None:
    config = document(tmp_path, 2, {**NET_SECTIONS, "eval": {"every": 2}}, NET, nan_rank=1)
    done = trained(config)
    assert [row["tokens"] for row in done.steps] == [2] * 4
    losses = [row.get("loss", row.get("val_loss")) for row in done.rows]
    assert len(losses) == 6
    assert all(loss is not None and math.isfinite(loss) for loss in losses)


def test_a_loss_that_is_not_finite_is_null_in_the_log(tmp_path: Path) -> None:
    sections = {"train": {"steps": 1, "nonfinite": "skip"}, "eval": {"at_end": True}}
    done = trained(document(tmp_path, 1, sections, samples=[[3e38, 3e38]], val=[[3e38, 3e38]], w=1.0))
    assert [(row.get("loss"), row.get("val_loss")) for row in done.rows] == [(None, None)] * 2
    assert [row["skipped"] for row in done.steps] == ["nonfinite"]
    assert not {"NaN", "Infinity"} & set((tmp_path / "metrics.jsonl").read_text().replace(":", ",").split(","))
    assert [event["loss"] for event in done.events if event["event"] in ("step", "eval")] == [None, None]
