"""`shardrun` and `python -m shardrun`."""

from __future__ import annotations


def main() -> None:
    """Read the command line, run the command, leave with its exit code."""
    from shardrun.cli.app import app

    app(prog_name="shardrun")


if __name__ == "__main__":
    main()
