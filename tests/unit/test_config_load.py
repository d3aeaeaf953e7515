"""Reading a config: every kind of problem, its place, the key that was meant; and what a good one resolves to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.comm.config import MAX_TIMEOUT_S
from shardrun.config.document import MAX_VALUES, read_document
from shardrun.config.load import differences, from_mapping, load, resolved_yaml
from shardrun.config.optimizers import AdamW
from shardrun.config.schema import ADDED, Config, meaning
from shardrun.errors import ConfigError

GOOD = """\
recipe: recipe.py
optimizer:
  name: adamw
  lr: 1e-3
train:
  steps: 10
  micro_batch_size: 2
  global_batch_size: 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text("")
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text), list(overrides))
    assert caught.value.exit_code == 2
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def only_problem(folder: Path, text: str, *overrides: str) -> str:
    found = problems(folder, text, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_a_good_config_has_its_defaults_and_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(written(folder, GOOD))
    assert config.recipe == str(folder / "recipe.py")
    assert (config.run.name, config.run.dir) == ("c", elsewhere / "runs/c")
    assert config.parts["default"].optimizer.lr == 1e-3
    assert isinstance(config.parts["default"].optimizer, AdamW)
    assert config.parts["default"].optimizer.weight_decay == 0.01
    assert config.select.include == ("*",)
    assert (config.checkpoint.every, config.checkpoint.keep, config.topology.timeout_s) == (None, 2, 1800.0)


def test_paths_in_overrides_start_where_the_command_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.py").write_text("")
    monkeypatch.chdir(elsewhere)
    assert load(written(folder, GOOD), ["recipe=other.py"]).recipe == str(elsewhere / "other.py")
    assert load(written(folder, GOOD), ["run.dir=x/../y"]).run.dir == elsewhere / "y"


def test_a_recipe_may_be_a_module(folder: Path) -> None:
    assert load(written(folder, GOOD), ["recipe=my_models.gpt"]).recipe == "my_models.gpt"


def test_the_run_is_named_after_any_file(folder: Path) -> None:
    path = folder / "my first run!.yaml"
    path.write_text(GOOD)
    assert load(path).run.name == "my-first-run-"


def test_an_unknown_key_beside_an_optimizer_without_a_name_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(written(folder, GOOD + "topolgy: {}\n"), ["optimizer.name=[]"])
    assert any("did you mean topology?" in problem for problem in refusal.value.problems)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learnig_rate: 1", "c.yaml:9:1: learnig_rate: unknown key (found 1); did you mean optimizer.lr?"),
        ("lr: 2", "c.yaml:9:1: lr: unknown key (found 2); did you mean optimizer.lr? (lr has its place there)"),
        ("optimizer.lr: 2", "c.yaml:9:1: optimizer.lr: unknown key (found 2); write lr inside the section optimizer"),
        ("topolgy: {}", "c.yaml:9:1: topolgy: unknown key (found a section); did you mean topology?"),
        ("data: {epochs: 2}", "c.yaml:9:8: data.epochs: unknown key (found 2); did you mean train.epochs? (epochs has"),
        ("data: {select: 2}", "c.yaml:9:8: data.select: unknown key (found 2); select has its place at the top level"),
        ("data: {num-workers: 2}", "c.yaml:9:8: data.num-workers: unknown key (found 2); did you mean data.workers?"),
        ("data: {qqq: 2}", "c.yaml:9:8: data.qqq: unknown key (found 2); known here: shuffle, workers, prefetch, drop"),
        ("log: {name: 1}", "did you mean run.name, schedule.name or optimizer.name?"),
        ("groups: [{select: {}}]", "c.yaml:9:9: groups: needs a section (key: value), found a list"),
        ("data: {workers: 1.0}", "c.yaml:9:17: data.workers: needs a whole number, found 1.0; write 1"),
        ("data: {workers: '10'}", "c.yaml:9:17: data.workers: needs a whole number, found text '10'; write 10"),
        ("data: {workers: 1_000}", "c.yaml:9:17: data.workers: needs a whole number, found text '1_000'; write 1000"),
        ("data: {workers: true}", "c.yaml:9:17: data.workers: needs a whole number, found true"),
        ("data: {workers: -1}", "c.yaml:9:17: data.workers: -1 is out of range; allowed: at least 0"),
        ("data: {shuffle: yes}", "c.yaml:9:17: data.shuffle: needs true or false, found text 'yes'; write true"),
        ("data: {shuffle: 0}", "c.yaml:9:17: data.shuffle: needs true or false, found 0; write false"),
        ("topology: {timeout_s: .inf}", "c.yaml:9:23: topology.timeout_s: needs a finite number, found inf"),
        ("topology: {timeout_s: true}", "c.yaml:9:23: topology.timeout_s: needs a number, found true"),
        ("topology: {timeout_s: 0}", "c.yaml:9:23: topology.timeout_s: 0 is out of range; allowed: above 0"),
        ("topology: {timeout_s: 8e5}", "topology.timeout_s: 800000.0 is out of range; allowed: at most 604800"),
        ("schedule: {min_lr_ratio: 0.1}", "min_lr_ratio: 0.1 has no effect with schedule.name constant; choose linear"),
        ("schedule: {min_lr_ratio: 2}", "c.yaml:9:26: schedule.min_lr_ratio: 2 is out of range; allowed: at most 1"),
        ("schedule: {name: Cosine}", "found text 'Cosine'; allowed: constant, linear, cosine; did you mean cosine?"),
        ("schedule: 5", "c.yaml:9:11: schedule: needs a section (key: value), found 5"),
        ("select: {include: blocks}", "c.yaml:9:19: select.include: needs a list, found text 'blocks'"),
        ("select: {include: [a, 5]}", "c.yaml:9:23: select.include[1]: needs text, found 5"),
        (
            "select: {include: ['re:(']}",
            "c.yaml:9:20: select.include[0]: 're:(' is not a regular expression: missing )",
        ),
        ("select: {exclude: ['']}", "c.yaml:9:20: select.exclude[0]: an empty pattern matches nothing"),
        ("run: {name: ../up}", "c.yaml:9:13: run.name: text '../up' is no name; use letters, digits"),
        ("run: {seed: -1}", "c.yaml:9:13: run.seed: -1 is out of range; allowed: at least 0"),
        ("run: {seed: 9223372036854775808}", "run.seed: 9223372036854775808 is out of range; allowed: below"),
        ("run: {dir: []}", "c.yaml:9:12: run.dir: needs text, found a list"),
        ("run: 5", "c.yaml:9:6: run: needs a section (key: value), found 5"),
        ("recipe_args: [a]", "c.yaml:9:14: recipe_args: needs a section (key: value), found a list"),
        ("init_from: null\neval: {max_samples: null, every: x}", "c.yaml:10:34: eval.every: needs a whole number"),
        ("init_from: w.bin", "w.bin is no .safetensors file; convert it first"),
        ("init_from: w.safetensors", "c.yaml:9:12: init_from: there is no file"),
        ("recipe_args: {a: [1, .nan]}", "recipe_args: nan is not finite"),
        ("data: !!python/object:os.x {}", "c.yaml:9:7: data: the tag tag:yaml.org,2002:python/object:os.x is not"),
        ("data: !!int abc", "c.yaml:9:7: data: invalid literal for int()"),
        ("checkpoint: {every: 3, keep_every: 5}", "checkpoint.keep_every: 5 is no multiple of checkpoint.every, which"),
        ("checkpoint: {keep_every: 5}", "c.yaml:9:26: checkpoint.keep_every: 5 has no effect without checkpoint.every"),
        ("checkpoint: {async: 1}", "c.yaml:9:21: checkpoint.async: needs true or false, found 1; write true"),
        (
            "checkpoint: {background: true}",
            "checkpoint.background: unknown key (found true); known here: every, keep, ",
        ),
        (
            "checkpoint: {asinc: true}",
            "c.yaml:9:14: checkpoint.asinc: unknown key (found true); did you mean checkpoint.async?",
        ),
        ("5: x", "c.yaml:9:1: config: a key has to be text, found '5'; put it in quotes"),
        ("? [a]\n: x", "c.yaml:9:3: config: a key has to be text, found a sequence"),
        ("<<: {a: 1}", "c.yaml:9:1: <<: merge keys are not read; write the keys out"),
    ],
)
def test_each_kind_of_problem_names_place_key_and_value(folder: Path, line: str, expected: str) -> None:
    found = problems(folder, GOOD + line + "\n")
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("recipe: recipe.py\n", "", "c.yaml:1:1: recipe: required key is missing"),
        ("recipe.py", "nowhere.py", "c.yaml:1:9: recipe: there is no file nowhere.py"),
        ("recipe.py", "a-b", "c.yaml:1:9: recipe: text 'a-b' is neither a Python file (.py) nor the name of a module"),
        ("  steps: 10\n", "", "c.yaml:5:1: train.steps: the run has no length; give one of steps, epochs and tokens"),
        ("steps: 10", "steps: null", "c.yaml:6:10: train.steps: the run has no length; give one of steps, epochs and"),
        ("steps: 10", "steps: 10\n  epochs: 3", "c.yaml:7:11: train.epochs: given besides steps; a run has one length"),
        ("global_batch_size: 4", "global_batch_size: 5", "global_batch_size: 5 is no multiple of train.micro_batch"),
        ("  name: adamw\n", "", "c.yaml:2:1: optimizer.name: required key is missing; one of adamw, adam, sgd"),
        (
            "name: adamw",
            "name: AdamW",
            "optimizer.name: found text 'AdamW'; allowed: adamw, adam, sgd, nadam,",
        ),
        ("name: adamw", "name: adafactor", "optimizer.name: adafactor keeps row and column averages"),
        ("name: adamw", "name: lbfgs", "optimizer.name: lbfgs evaluates the loss several times"),
        ("name: adamw", "name: sparseadam", "optimizer.name: sparseadam needs sparse gradients"),
        ("name: adamw", "name: [adamw]", "optimizer.name: found a list; allowed: adamw, adam, sgd"),
        ("recipe.py", "''", "c.yaml:1:9: recipe: "),
        ("lr: 1e-3", "lr: -1", "c.yaml:4:7: optimizer.lr: -1 is out of range; allowed: at least 0"),
        (
            "lr: 1e-3",
            "lr: 1\n  momentum: 1",
            "c.yaml:5:3: optimizer.momentum: unknown key (found 1); momentum is a key",
        ),
        ("lr: 1e-3", "lr: 1\n  betas: [0.9]", "c.yaml:5:3: optimizer.betas[1]: required key is missing"),
        ("lr: 1e-3", "lr: 1\n  betas: [0.9, 1.0]", "c.yaml:5:16: optimizer.betas[1]: 1.0 is out of range; allowed: be"),
        ("lr: 1e-3", "lr: 1\n  betas: [0.9, 0.9, 0.9]", "c.yaml:5:10: optimizer.betas: needs 2 entries, found 3"),
        ("lr: 1e-3", "lr: 1\n  options: [{match: []}]", "optimizer.options[0].match: needs at least 1 entry, found 0"),
        ("lr: 1e-3", "lr: 1\n  options: [{match: [a], lrscale: 1}]", "did you mean optimizer.options.lr_scale?"),
        ("lr: 1e-3", "lr: 1\n  strategy: zero3", "optimizer.strategy: found text 'zero3'; allowed: zero2, zero1; did"),
        ("adamw", "sgd\n  nesterov: true", "optimizer.nesterov: needs a momentum above 0, and momentum is 0"),
        ("adamw", "sgd\n  nesterov: true\n  momentum: .9\n  dampening: .1", "nesterov: needs no dampening, and dampe"),
    ],
)
def test_each_broken_rule_is_the_only_problem(folder: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    found = only_problem(folder, GOOD.replace(old, new))
    assert expected in re.sub(r"there is no file \S*/", "there is no file ", found), found


def test_all_problems_come_at_once_and_in_reading_order(folder: Path) -> None:
    text = (
        GOOD.replace("adamw", "lbfgs").replace("1e-3", "abc").replace("steps: 10", "steps: 0\n  steps: 7\n  epochs: x")
    )
    text += "recipe: recipe.py\nlog: {evry: 1}\n"
    found = problems(folder, text, "data.workers=-1", "nonsense")
    places = [problem.split(": ")[0] for problem in found]
    assert places == [
        "c.yaml:3:9",
        "c.yaml:4:7",
        "c.yaml:6:10",
        "c.yaml:7:3",
        "c.yaml:8:11",
        "c.yaml:8:11",
        "c.yaml:11:1",
        "c.yaml:12:7",
        "override 'data.workers=-1'",
        "override 'nonsense'",
    ], found


def test_what_else_is_wrong_in_an_optimizer_of_no_known_name_is_found(folder: Path) -> None:
    found = problems(folder, GOOD.replace("name: adamw", "name: adan\n  momentum: 1\n  betaz: 1").replace("1e-3", "x"))
    assert [problem.split(": ")[1] for problem in found] == ["optimizer.name", "optimizer.betaz", "optimizer.lr"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2", "c.yaml:1:9: not readable as YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n\tb: 2", "c.yaml:2:1: not readable as YAML"),
        ("a: *nowhere", "c.yaml:1:4: not readable as YAML: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 1", "c.yaml:2:1: not readable as YAML: but found another document"),
        ("a: \x07", "c.yaml: not readable as YAML: unacceptable character #x0007"),
        ("- a\n- b", "c.yaml:1:1: a config is a section (key: value lines), found a list"),
        ("just text", "c.yaml:1:1: a config is a section (key: value lines), found text 'just text'"),
        ("a: " + "[" * 500, "c.yaml: nested more than 50 deep"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("a: &a [*a]", "c.yaml:1:4: nested more than 50 deep, or an alias inside itself"),
        ("a: " + "x" * (1 << 20), "characters are no config"),
    ],
)
def test_what_is_no_config_at_all_is_one_problem(folder: Path, text: str, expected: str) -> None:
    assert expected in only_problem(folder, text)


def test_files_that_cannot_be_read_say_why(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file or directory"):
        load(folder / "gone.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(folder)
    (folder / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text \(byte 12\)"):
        load(folder / "latin.yaml")


def test_an_empty_file_lacks_the_three_required_keys(folder: Path) -> None:
    found = problems(folder, "# nothing yet\n")
    assert [problem.split(": ")[1] for problem in found] == ["recipe", "train", "optimizer"]


def test_a_section_with_nothing_under_it_says_nothing(folder: Path) -> None:
    plain = load(written(folder, GOOD))
    assert load(written(folder, GOOD + "data:\nrun:\nschedule:\n")) == plain


def test_aliases_are_read_up_to_a_bound(folder: Path) -> None:
    text = GOOD + "recipe_args: {a: &x [1, 2], b: *x}\n"
    assert load(written(folder, text)).recipe_args == {"a": [1, 2], "b": [1, 2]}
    layers = "".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))
    bomb = f"{GOOD}recipe_args:\n  l0: &l0 [0, 0]\n{layers}"
    assert f"expand to more than {MAX_VALUES} values" in only_problem(folder, bomb)


def test_a_problem_in_an_alias_is_placed_where_it_is_used(folder: Path) -> None:
    found = only_problem(folder, GOOD + "recipe_args: {x: &x abc}\ndata:\n  workers: *x\n")
    assert found.startswith("c.yaml:11:3: data.workers: needs a whole number")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e+3", -1500.0),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("+7", 7),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("Off", "Off"),
        ("NULL", None),
        ("~", None),
        ("True", True),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("-.inf", float("-inf")),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = read_document(f"a: {text}", "x").data["a"]
    assert (type(read), read) == (type(value), value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def configs(folder: Path) -> st.SearchStrategy[dict[str, Any]]:
    rates = st.floats(0, 1e6)
    betas = st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list)
    option = st.fixed_dictionaries(
        {"match": st.just(["a*", "re:b$"])}, optional={"weight_decay": rates, "lr_scale": rates}
    )
    adam = st.fixed_dictionaries(
        {"name": st.sampled_from(["adam", "adamw"]), "lr": rates},
        optional={"betas": betas, "eps": rates, "amsgrad": st.booleans(), "options": st.lists(option, max_size=2)},
    )
    sgd = st.fixed_dictionaries(
        {"name": st.just("sgd"), "lr": rates}, optional={"momentum": rates, "fused": st.none() | st.booleans()}
    )
    micro = st.integers(1, 64)
    train = st.tuples(
        micro, st.integers(1, 64), st.sampled_from(["steps", "epochs", "tokens"]), st.integers(1, 2**62)
    ).map(lambda t: {"micro_batch_size": t[0], "global_batch_size": t[0] * t[1], t[2]: t[3]})
    args = st.dictionaries(st.text(), json_values, max_size=3)
    schedule = st.fixed_dictionaries({}, optional={"name": st.sampled_from(["linear", "cosine"]), "total_steps": micro})
    return st.fixed_dictionaries(
        {"recipe": st.just(str(folder / "recipe.py")), "optimizer": adam | sgd, "train": train},
        optional={"recipe_args": args, "schedule": schedule, "select": st.just({"exclude": ["*.bias", "re:x\\d+"]})},
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_resolved_config_loads_to_an_equal_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "recipe.py").touch()
    config = from_mapping(data.draw(configs(folder)))
    path = folder / "resolved.yaml"
    path.write_text(resolved_yaml(config), encoding="utf-8")
    again = load(path)
    named = {"name": config.run.name, "dir": Path.cwd() / config.run.dir}
    assert again == config.model_copy(update={"run": config.run.model_copy(update=named)})
    assert from_mapping(again.model_dump(mode="json")) == again
    assert meaning(again) == meaning(config)


KEYS = st.sampled_from(
    [*Config.model_fields]
    + [
        f"{name}.{key}"
        for name, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    ]
    + [
        f"optimizer.{key}"
        for key in (*AdamW.model_fields, "momentum", "nesterov", "dampening", "options.0", "options.0.match")
    ]
)


@given(st.dictionaries(KEYS, json_values, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_value_under_any_key_is_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "recipe.py").touch()
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    try:
        config = load(written(folder, GOOD), words)
    except ConfigError as error:
        refused = error.problems
    else:
        refused = []
        assert from_mapping(config.model_dump(mode="json")) == config
    assert all(": " in problem for problem in refused)


def test_a_key_that_python_keeps_for_itself_is_written_as_it_is_read(folder: Path) -> None:
    config = load(written(folder, GOOD), ["checkpoint.async=true", "checkpoint.every=5", "checkpoint.keep_every=10"])
    assert config.checkpoint.background
    assert "  keep_every: 10\n  async: true\n" in resolved_yaml(config)
    assert load(written(folder, resolved_yaml(config))).checkpoint == config.checkpoint
    assert "async" in Config.model_json_schema()["$defs"]["Checkpoint"]["properties"]


def test_from_mapping_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"recipe": "a", "train": {"steps": 1}, "x": 1})
    assert [problem.split(": ")[1] for problem in caught.value.problems] == [
        "train.micro_batch_size",
        "train.global_batch_size",
        "x",
        "optimizer",
    ]


@pytest.mark.parametrize("key", ["timeout_s", "init_timeout_s", "save_timeout_s"])
def test_a_timeout_of_the_config_is_one_that_a_communicator_takes(folder: Path, key: str) -> None:
    config_with(folder, f"topology.{key}={MAX_TIMEOUT_S}")
    with pytest.raises(ConfigError, match=f"topology.{key}: .* is out of range"):
        config_with(folder, f"topology.{key}={MAX_TIMEOUT_S + 1}")


def config_with(folder: Path, *overrides: str) -> Config:
    return load(written(folder, GOOD), list(overrides))


@pytest.mark.parametrize(
    "override",
    ["run.name=other", "run.dir=/x", "log.every=7", "checkpoint.every=3", "eval.every=2", "topology.timeout_s=5",
     "data.workers=3", "data.prefetch=9", "topology.allow_non_loopback=true", "topology.max_restarts=3",
     "topology.init_timeout_s=9", "topology.save_timeout_s=9", "train.steps=99"],
)  # fmt: skip
def test_what_does_not_change_results_is_not_in_the_meaning(folder: Path, override: str) -> None:
    assert differences(meaning(config_with(folder)), meaning(config_with(folder, override))) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.max_grad_norm=0.5", "train.max_grad_norm: saved null, now 0.5"),
        ("optimizer.lr=2e-3", "optimizer.lr: saved 0.001, now 0.002"),
        ("run.seed=3", "run.seed: saved 0, now 3"),
        ("train.compile=true", "train.compile: saved false, now true"),
        ("precision.matmul=high", 'precision.matmul: saved "highest", now "high"'),
        ("topology.world_size=2", "topology.world_size: saved 1, now 2"),
        ("select.include=[a.*]", 'select.include: saved ["*"], now ["a.*"]'),
        ("recipe_args={depth: {n: 3}}", "recipe_args.depth.n: saved not set, now 3"),
    ],
)
def test_what_changes_results_is_named_with_both_values(folder: Path, override: str, line: str) -> None:
    assert differences(meaning(config_with(folder)), meaning(config_with(folder, override))) == [line]


def test_a_run_of_an_earlier_release_means_the_same_without_the_keys_that_came_later(folder: Path) -> None:
    now = meaning(config_with(folder))
    earlier = {key: value for key, value in now.items() if key not in ADDED}
    assert len(earlier) == len(now) - len(ADDED)
    assert differences(earlier, now) == []
    assert differences(earlier, meaning(config_with(folder, "train.compile=true"))) == [
        "train.compile: saved false, now true"
    ]


def test_the_length_of_a_run_counts_where_the_schedule_is_stretched_over_it(folder: Path) -> None:
    cosine = config_with(folder, "schedule.name=cosine")
    longer = config_with(folder, "schedule.name=cosine", "train.steps=99")
    assert differences(meaning(cosine), meaning(longer)) == ["train.steps: saved 10, now 99"]
    fixed = [config_with(folder, "schedule={name: cosine, total_steps: 50}", f"train.steps={n}") for n in (10, 99)]
    assert differences(meaning(fixed[0]), meaning(fixed[1])) == []


def test_a_moved_recipe_means_the_same(folder: Path) -> None:
    moved = folder / "moved"
    moved.mkdir()
    (moved / "recipe.py").write_text("")
    assert meaning(config_with(folder)) == meaning(config_with(folder, f"recipe={moved}/recipe.py"))


def test_the_order_of_keys_is_no_difference() -> None:
    """A manifest has its keys sorted; the config that is compared with it has them as they were written."""
    saved = {"optimizer.options": [{"lr_scale": 1.0, "match": ["*"]}]}
    assert differences(saved, {"optimizer.options": [{"match": ["*"], "lr_scale": 1.0}]}) == []
    assert len(differences(saved, {"optimizer.options": [{"match": ["*"], "lr_scale": 2.0}]})) == 1
