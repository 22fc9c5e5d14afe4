"""Trainings and their states: a transformer with AdamW, and many small shards."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_HEADS = 8
_BATCH, _LENGTH = 4, 33
_NUM_SHARDS = 279
_SHARD_BYTES = 46_500


class Transformer(torch.nn.Module):
    """A decoder that predicts the next of `vocabulary` tokens; its output layer is tied to the embedding."""

    def __init__(self, *, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        layer = torch.nn.TransformerEncoderLayer(width, _HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each token from those before it; `tokens` has shape ``(batch, length)``."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.layers(self.embedding(tokens[:, :-1]), mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def adamw_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a trainer gives DCP: the model, and AdamW's two moments and step for each parameter."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


class Training:
    """A transformer from step to step, by AdamW on what of it is to be trained."""

    def __init__(self, model: Transformer, *, lr: float = 1e-3) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)

    def step(self) -> None:
        """Forward, backward, AdamW; of random tokens."""
        self.model(torch.randint(self.model.embedding.num_embeddings, (_BATCH, _LENGTH))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return adamw_state(self.model, self.optimizer)


def transformer_state(size_bytes: int) -> dict[str, Any]:
    """Of a transformer with as many layers of width 768 as `size_bytes` hold with their moments, in fp32."""
    of_layer, embedding = 12 * (12 * 768 * 768 + 13 * 768), 12 * 8192 * 768
    model = Transformer(layers=max((size_bytes - embedding) // of_layer, 1), width=768, vocabulary=8192)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return adamw_state(model, optimizer)


def small_shards() -> dict[str, Any]:
    """279 DTensors of 46 kB, on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    locals_ = (torch.full((_SHARD_BYTES // 4,), float(i)) for i in range(_NUM_SHARDS))
    return {f"shard.{i}": DTensor.from_local(local, mesh, [Shard(0)]) for i, local in enumerate(locals_)}
