"""A recipe with a typing mistake: the name is found out when the file is loaded."""

from __future__ import annotations

from tests.support.recipes.launch_linear import Args, build_data, build_model, loss

__all__ = ["Args", "build_data", "build_model", "loss"]

LAYERS = width * 2  # type: ignore[name-defined]  # noqa: F821 - the mistake
