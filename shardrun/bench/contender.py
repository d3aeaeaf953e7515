"""One rank of one contender, in a process of its own: trains the windows, measures, compares, tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shardrun.bench.contenders import COMPUTE, PLAIN, SHARDRUN
from shardrun.bench.measure import Stopwatch, peak_bytes
from shardrun.bench.peer import Compute, Peer, Plain
from shardrun.bench.sameness import distance, save_parameters
from shardrun.bench.trained import Trained
from shardrun.bench.work import make_work, starting_model
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.config.schema import Config
from shardrun.run.build import open_communicator
from shardrun.run.groups import open_world
from shardrun.run.model import distinct_parameters
from shardrun.run.recipe import load_recipe
from shardrun.run.tether import Tether


class Contender(Protocol):
    """What is run and measured; all of it on every rank."""

    @property
    def configuration(self) -> str: ...
    @property
    def gradient_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def run(self, count: int, stopwatch: Stopwatch) -> list[tuple[float, int]]: ...
    def parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class PeerRun:
    """A peer in the loop that all peers have in common."""

    def __init__(self, peer: Peer, tether: Tether) -> None:
        self._peer, self._tether = peer, tether
        self.parameters = peer.parameters

    @property
    def configuration(self) -> str:
        """How the peer is set up, and with which optimizer."""
        peer = self._peer
        options = ", ".join(f"{key}={value}" for key, value in peer.work.options.items())
        return f"{peer.configuration}; {peer.work.optimizer_class.__name__}({options})"

    @property
    def gradient_bytes(self) -> int:
        """As noted at the end of the last backward."""
        return self._peer.gradient_bytes

    @property
    def state_bytes(self) -> int:
        """Of the optimizer of this rank."""
        return self._peer.state_bytes

    def run(self, count: int, stopwatch: Stopwatch) -> list[tuple[float, int]]:
        """Train `count` windows; mean loss and weight of each. Collective."""
        peer, comm, own = self._peer, self._peer.work.comm, []
        for step, share in zip(range(count), peer.work.windows(), strict=False):
            self._tether.status.set(step + 1, "window", 0)
            tally = peer.accumulate(step, share)
            if step == 0:
                peer.count_gradients()
            peer.update(step, tally)
            own.append((float(tally.loss), int(tally.weight)))
            stopwatch.mark(aside=peer.work.seeding_s)
        every = comm.agree("losses of the windows", own)
        sums = [tuple(map(sum, zip(*one, strict=True))) for one in zip(*every, strict=True)]
        return [(loss / weight, weight) for loss, weight in sums]


def run_contender(job: Mapping[str, Any], tether: Tether) -> dict[str, Any]:
    """Do this rank's part for the contender that the job names; returns what was measured as plain JSON."""
    config = from_mapping(job["config"])
    comm = open_communicator(config)
    try:
        result = _measured(config, comm, job["options"], tether, Path(job["run_dir"]))
        comm.agree("end of the contender")
    finally:
        comm.close()
    return result


def _measured(
    config: Config, comm: Communicator, options: Mapping[str, Any], tether: Tether, folder: Path
) -> dict[str, Any]:
    contender: Contender
    if options["contender"] == SHARDRUN:
        contender = Trained(config, comm, tether, folder)
    else:
        contender = PeerRun(peer_class(options["contender"])(make_work(config, comm)), tether)
    stopwatch = Stopwatch(comm.device)
    comm.agree("start of the windows")  # the ranks begin together, and are held together by nothing but their own work
    stopwatch.mark()
    windows = contender.run(options["windows"], stopwatch)
    found = {
        "windows_s": stopwatch.windows_s(),
        "first_window_s": stopwatch.first_window_s,
        "losses": [loss for loss, _ in windows],
        "weights": [weight for _, weight in windows],
        "peak_bytes": peak_bytes(comm.device),
        "gradient_bytes": contender.gradient_bytes,
        "state_bytes": contender.state_bytes,
        "configuration": contender.configuration,
        "device": str(comm.device),
    }
    return found | _compared(contender, config, comm, options)


def peer_class(name: str) -> type[Peer]:
    """What trains under this name; imports what it needs and nothing of the others."""
    if name == "deepspeed":
        from shardrun.bench.deepspeed_peer import DeepSpeed

        return DeepSpeed
    from shardrun.bench import peers

    known: dict[str, type[Peer]] = {
        COMPUTE: Compute,
        PLAIN: Plain,
        "ddp": peers.DDP,
        "zero1": peers.Zero1,
        "fsdp2": peers.FSDP2,
    }
    return known[name]


def _compared(contender: Contender, config: Config, comm: Communicator, options: Mapping[str, Any]) -> dict[str, Any]:
    """The distance to the reference, or the reference's own parameters in a file, where it is asked for; collective."""
    first = comm.rank == 0
    if (path := options.get("save_parameters")) is not None:
        save_parameters(contender.parameters(), Path(path) if first else None)
    if (path := options.get("compare_parameters")) is None:
        return {}
    start: Mapping[str, Tensor] = {}
    if first:
        model = starting_model(config, load_recipe(config.recipe, config.recipe_args), open_world(comm, config))
        start = {path: parameter.detach() for path, parameter in distinct_parameters(model).items()}
    return {"distance": distance(contender.parameters(), Path(path) if first else None, start)}
