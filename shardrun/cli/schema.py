"""`shardrun schema`: the JSON schema of the config."""

from __future__ import annotations

import json

from shardrun import report
from shardrun.config.schema import Config


def run() -> int:
    """Print the schema; save it beside a config and name it in a `# yaml-language-server: $schema=...` line."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    report.line(json.dumps(schema, indent=2))
    return 0
