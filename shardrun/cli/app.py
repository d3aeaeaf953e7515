"""The commands, their options and their exit codes. Each command imports its own module only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from shardrun import __version__, report
from shardrun.errors import ConfigError, LaunchError, ShardrunError

app = typer.Typer(
    name="shardrun",
    help="Train PyTorch models on one or many ranks, and prove that a resumed run is the same run.",
    epilog="Exit codes: 0 done, 1 training failed, 2 usage or config, 3 checkpoint, 4 verification found a difference, "
    "5 environment or launch, 6 non-finite value, 75 stopped after saving, 130 interrupted and nothing saved.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="YAML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the config, such as train.steps=50 or optimizer.betas=[0.9,0.95].",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        report.line(f"shardrun {__version__}")
        raise typer.Exit


@app.callback()
def _desk(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew in another folder.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although the config changed in meaning.")
    ] = False,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Go on from an older checkpoint if the newest is damaged.")
    ] = False,
    reshard: Annotated[
        bool, typer.Option("--reshard", help="Go on from a checkpoint of another world size: exact state.")
    ] = False,
    resume_from: Annotated[
        Path | None, typer.Option(help="Checkpoint or run folder to start from.", show_default=False)
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option(min=1, help="Stop after this update: save, exit 75.", show_default=False)
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(min=1, help="Number of hosts; start the same on each of them.", show_default=False)
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Number of this host, from 0.", show_default=False)
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Address of node 0's host and a free port there, where the hosts meet.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    fault: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train, or go on with the run if it was started before.

    Trusted networks only: the rendezvous of the ranks has neither authentication nor encryption. Everything stays on
    the loopback address of this machine unless the config says topology.allow_non_loopback: true.

    A recipe is Python code and is run: use only your own or trusted files.

    Ctrl-C finishes the step, saves and exits with 75; the same command goes on from there.
    """
    from shardrun.cli import train as command

    _end(
        lambda: command.run(
            config,
            overrides or [],
            fresh,
            accept_changes,
            allow_fallback,
            reshard,
            resume_from,
            stop_at,
            nnodes,
            node_rank,
            rendezvous,
            json=json,
            fault=fault,
        ),
        json,
    )


@app.command("inspect-ckpt")
def inspect_ckpt(
    path: Annotated[Path, typer.Argument(help="Checkpoint, run folder or .safetensors file.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and check its hash.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Norm, extremes, zeros and non-finite elements of every tensor.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER", help="Compare with this one, bit for bit; exit 4 if they differ.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint without loading it; of a damaged one, what is left."""
    from shardrun.cli import inspect_ckpt as command

    _end(lambda: command.run(path, verify=verify, stats=stats, other=diff, json=json), json)


@app.command("reshard")
def reshard_command(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint, or run folder.", show_default=False)],
    world: Annotated[int, typer.Option("--world", min=1, help="Number of ranks to go on with.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new checkpoint's folder.", show_default=False)],
    json: Json = False,
) -> None:
    """Write a checkpoint again for another number of ranks: the same state, bit for bit, without torch."""
    from shardrun.cli import reshard as command

    _end(lambda: command.run(path, world, output, json), json)


@app.command("export")
def export_command(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint, or run folder.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder.", show_default=False)],
    form: Annotated[
        Literal["safetensors", "hf", "torch"],
        typer.Option(
            "--format",
            help="safetensors: the model alone. hf: a folder for transformers. torch: model and optimizer state.",
        ),
    ] = "safetensors",
    json: Json = False,
) -> None:
    """Write a checkpoint in a form that other programs read."""
    from shardrun.cli import export as command

    _end(lambda: command.run(path, output, form, json), json)


@app.command("import")
def import_command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .safetensors file, or a folder with one or its parts.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new .safetensors file.", show_default=False)],
    json: Json = False,
) -> None:
    """Turn a plain model into one file that init_from starts from; no pickle is read."""
    from shardrun.cli import import_model as command

    _end(lambda: command.run(source, output, json), json)


@app.command("verify-resume")
def verify_resume(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN_DIR", help="Config file, or folder of a run.", show_default=False)
    ],
    overrides: Overrides = None,
    json: Json = False,
    first: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="Of a run: replay from here.", show_default=False)
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="STEP", help="Of a run: replay up to here.", show_default=False)
    ] = None,
    worlds: Annotated[
        str | None,
        typer.Option(
            "--world", metavar="N,M[,L]", help="Of a config: prove a reshard from N to M ranks.", show_default=False
        ),
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a page of text.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the scratch folders.")] = False,
    tamper: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Prove that stop and resume equals never having stopped, bit for bit; exit 4 and the first difference if not.

    Of a config: it is run straight, and stopped twice. Of a run's own folder: it is replayed in scratch from one of its
    checkpoints to a later one (the last two, unless others are named), and both are compared.
    """
    from shardrun.cli import verify_resume as command

    ask = command.Ask(json, keep, tamper, first, last, worlds, report_file)
    _end(lambda: command.run(target, overrides or [], ask), json)


@app.command("plan")
def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, help="Number of ranks; else that of the config.", show_default=False)
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What `bench --collectives --save` wrote: predict the time of a step.",
            show_default=False,
        ),
    ] = None,
    compute_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of forward and backward of a micro-batch on free cores.", show_default=False),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `bench CONFIG --json` wrote: take compute from it.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what a run would hold, send and save on each rank, without starting it or taking memory for the model.

    With --links also how long a step would take on one host, part by part.

    A recipe is Python code and is run: its build_model, on torch's meta device.
    """
    from shardrun.cli import plan as command

    _end(lambda: command.run(config, overrides or [], command.Ask(world, links, compute_s, bench, json)), json)


@app.command("bench")
def bench_command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML config file; with --collectives there is none.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PEER,...",
            help="ddp, zero1, fsdp2, deepspeed; of one rank plain. Without it all.",
            show_default=False,
        ),
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world",
            metavar="N",
            help="Number of ranks, each with as much work; of collectives several: 2,4,8.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each of them runs, in turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed in each round.")] = 10,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of one rank: so many steps of shardrun and of a plain torch loop, in turn in one process.",
            show_default=False,
        ),
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Measure how fast ranks exchange, copy and agree, and nothing else.")
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            help="Measure saves and loads of the config, beside torch.save and torch DCP, and nothing else.",
        ),
    ] = False,
    mib: Annotated[str, typer.Option(metavar="N,...", help="Of collectives: sizes of the buckets.")] = "1,16,256",
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="Of collectives.")] = "gloo",
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of collectives: keep them there, for `plan --links FILE`.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the config under shardrun and under its peers, side by side; exit 4 if one computes something else.

    With --collectives: what a step is made of, on this machine and without a config.

    With --checkpoint: saves and loads of the config; the files stand beside the folder of the run, and are removed.

    A recipe is Python code and is run: use only your own or files that you trust.
    """

    def run() -> int:
        from shardrun.cli import bench, bench_checkpoint, bench_collectives

        given = {
            "--against": against is not None,
            "--steps": steps != bench.Ask.steps,
            "--pairs": pairs is not None,
            "--collectives": collectives,
            "--checkpoint": checkpoint,
            "--mib": mib != bench_collectives.Ask.mib,
            "--backend": backend != bench_collectives.Ask.backend,
            "--save": save is not None,
        }
        bench.refuse_unread([option for option, here in given.items() if here])
        if collectives:
            return bench_collectives.run(config, bench_collectives.Ask(world, mib, backend, rounds, save, json))
        if checkpoint:
            saves = bench_checkpoint.Ask(bench_collectives.one_world(world), rounds, json)
            return bench_checkpoint.run(config, overrides or [], saves)
        ask = bench.Ask(against, bench_collectives.one_world(world), rounds, steps, pairs, json)
        return bench.run(config, overrides or [], ask)

    _end(run, json)


@app.command()
def validate(config: ConfigFile, overrides: Overrides = None, json: Json = False) -> None:
    """Check a config and show it with every default filled in; all problems at once if there are any."""
    from shardrun.cli import validate as command

    _end(lambda: command.run(config, overrides or [], json), json)


@app.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from shardrun.cli import schema as command

    _end(command.run, json=False)


def _end(run: Callable[[], int], json: bool) -> NoReturn:
    """Leave with the command's exit code; an error of our own family becomes its message and its code, and so does a
    path that the system refuses."""
    try:
        code = run()
    except ShardrunError as error:
        code = error.exit_code
        _show(error, json)
    except OSError as error:
        if error.filename is None:
            raise
        refused = LaunchError(f"{error.filename}: {error.strerror}")
        code = refused.exit_code
        _show(refused, json)
    except KeyboardInterrupt:
        report.error("interrupted")
        code = 130
    raise typer.Exit(code)


def _show(error: ShardrunError, json: bool) -> None:
    if isinstance(error, ConfigError):
        count = len(error.problems)
        report.error(f"{error}\n{count} problem{'s' if count > 1 else ''} in the config; nothing was started")
    else:
        report.error(f"error: {error}")
    if json:
        problems = {"problems": error.problems} if isinstance(error, ConfigError) else {}
        detail = {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code, **problems}
        report.json_document({"error": detail})
