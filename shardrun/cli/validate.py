"""`shardrun validate`: check a config without starting anything."""

from __future__ import annotations

from pathlib import Path

from shardrun import report
from shardrun.config.load import load, resolved_yaml


def run(config: Path, overrides: list[str], json: bool) -> int:
    """Print the resolved config and return 0. Raises ConfigError with every problem."""
    resolved = load(config, overrides)
    if json:
        report.json_document({"valid": True, "config": resolved.model_dump(mode="json")})
        return 0
    report.line(f"# {config} is good, but for what only the recipe knows: recipe_args, and patterns over parameters.")
    report.line("# This is what it means; it runs again as it stands here.")
    report.line(resolved_yaml(resolved).rstrip())
    return 0
