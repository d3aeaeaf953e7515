"""A tiny Llama of transformers, made from a config: nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tied: bool = False


def _config(args: Args) -> Any:
    return import_module("transformers").LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=args.tied,
    )  # fmt: skip


def hf_config(args: Args) -> dict[str, Any]:
    return {**_config(args).to_dict(), "architectures": ["LlamaForCausalLM"]}


def build_model(args: Args) -> nn.Module:
    model: nn.Module = import_module("transformers").LlamaForCausalLM(_config(args)).train()
    return model


def build_data(args: Args, split: str) -> list[Tensor]:
    return [(torch.arange(9) * (index + 3) + index) % 32 for index in range(8)]


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch[:, :-1]).logits
    labels = batch[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"), labels.numel()
