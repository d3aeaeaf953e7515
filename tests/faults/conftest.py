"""Samples or everything, and the tables that are told at the end.

`make test` runs a seeded sample; `make long` (`pytest tests/faults --long`) runs all of it. A test that is marked
`sampled` is parametrised over `world_size` and `strategy` (and the marker's arguments, if it has any); of these
combinations the sample has one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import pytest

from tests.faults.verdict import table

Tell = Callable[[str, Sequence[str], Sequence[str]], None]
"""tell(title, header, row): one more row of the table of that title and header."""

Outcomes = Callable[[str, str, str, float], None]
"""ended(fault, strategy and world size, outcome, seconds)."""

_TABLES = pytest.StashKey[dict[tuple[str, tuple[str, ...]], list[list[str]]]]()
_LEFT_OUT = pytest.StashKey[int]()
_OUTCOMES = pytest.StashKey[dict[tuple[str, str], list[tuple[str, float]]]]()
_OUTCOME_HEADER = [
    "fault",
    "what all ranks that live hold",
    "runs",
    "ended after ms (median / most)",
    "strategy and world size",
]
_SEED = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long`."""
    parser.addoption("--long", action="store_true", help="tests/faults: everything, not a seeded sample (minutes)")


def is_long(config: pytest.Config) -> bool:
    """Whether everything is to run."""
    return bool(config.getoption("--long", default=False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the sample leaves out."""
    if is_long(config):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and isinstance(item, pytest.Function):
            over = {"world_size", "strategy", *marker.args}
            own = {name: value for name, value in item.callspec.params.items() if name not in over}
            cases[f"{item.originalname} {own}"].append(item)
    left_out = set()
    for case, combinations in sorted(cases.items()):
        kept = random.Random(f"{_SEED} {case}").sample(combinations, 1)
        left_out |= {id(item) for item in combinations if item not in kept}
    config.stash[_LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Tells a row of a table that is printed when all tests have run."""
    tables = request.config.stash.setdefault(_TABLES, {})

    def add(title: str, header: Sequence[str], row: Sequence[str]) -> None:
        tables.setdefault((title, tuple(header)), []).append(list(row))

    return add


@pytest.fixture
def ended(request: pytest.FixtureRequest) -> Outcomes:
    """Tells how one run of a fault ended; the table at the end has a line for each fault and outcome."""
    outcomes = request.config.stash.setdefault(_OUTCOMES, {})

    def add(fault: str, world: str, outcome: str, seconds: float) -> None:
        outcomes.setdefault((fault, outcome), []).append((world, seconds))

    return add


def _outcome_rows(outcomes: Mapping[tuple[str, str], Sequence[tuple[str, float]]]) -> Iterator[list[str]]:
    for (fault, outcome), runs in sorted(outcomes.items(), key=lambda held: (int(held[0][0].split()[0]), held[0])):
        times = [seconds for _, seconds in runs]
        yield [
            fault,
            outcome,
            str(len(runs)),
            f"{_milliseconds(median(times))} / {_milliseconds(max(times))}",
            _worlds({world for world, _ in runs}),
        ]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.2f}"


def _worlds(names: set[str]) -> str:
    """ "zero1 2", "zero1 3", "zero2 3" as "zero1 2,3; zero2 3"."""
    sizes: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        strategy, _, size = name.rpartition(" ")
        sizes[strategy].append(size)
    return "; ".join(f"{strategy} {','.join(held)}" for strategy, held in sizes.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables, and how much of everything they are."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    if outcomes := config.stash.get(_OUTCOMES, {}):
        terminalreporter.section("faults of a step", sep="-")
        terminalreporter.write_line(table(_OUTCOME_HEADER, list(_outcome_rows(outcomes))))
    for (title, header), rows in config.stash.get(_TABLES, {}).items():
        terminalreporter.section(title, sep="-")
        terminalreporter.write_line(table(header, rows))
    if left_out:
        terminalreporter.write_line(
            f"a sample of seed {_SEED}; {left_out} more cases, and longer series, in `make long`"
        )
