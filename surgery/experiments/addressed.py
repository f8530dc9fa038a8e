"""A small model whose memory is written and read at given addresses, which bypass every learned projection.

Two layers of width 64; in each, the memory of a rule writes values, decays and write strengths that are projected from
the hidden states, at keys and queries that are the addresses themselves. A place in a sequence is a write, a query,
which reads and does not write, or padding.

Source: "Memory by Design: Probabilistic Sequence Layers", Appendix E.5: two layers, width 64, addresses that bypass
learned projections. The layer around the memory is this project's choice: Gated DeltaNet's without convolutions.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.adaptation.losses import IGNORED
from surgery.adaptation.parameters import optimizer, select
from surgery.adaptation.schedules import learning_rate_factor
from surgery.experiments.device_loop import DeviceLoop, Task
from surgery.experiments.jobs import Steps
from surgery.experiments.recall_training import LAYERS, READ_AT_ONCE, WARMUP, made_with
from surgery.experiments.trained import Job
from surgery.graft.base import RMSNorm
from surgery.memory import draw_memory
from surgery.memory.base import MemoryGeometry, MemoryInputs
from surgery.models.gated_deltanet import GatedMLP

# rule -> its name among the memories, and its options; dose 1 from the start
MEMORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bayesian": ("bayesian", {"noise": "constant", "noise_from": "token"}),
    "reset": ("bayesian", {"noise": "constant", "noise_from": "token", "retention": 0.0}),
    "delta": ("host", {}),
}
LABELS = {"bayesian": "Bayesian Layer", "reset": "covariance reset", "delta": "Gated DeltaNet"}
EPS = 1e-6
HORIZON = 1000.0  # tokens, N_t at the start


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length.

    Attributes:
        addresses: [B, T, D], 0 on padding. tokens: [B, T], values, or their number on queries and padding.
        written: [B, T] bool, whether a place is a write. targets: [B, T], a query's value, ``IGNORED`` elsewhere.
    """

    addresses: Tensor
    tokens: Tensor
    written: Tensor
    targets: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the fields in order."""
        return self.addresses, self.tokens, self.written, self.targets


class AddressedLayer(nn.Module):
    """h + o_proj(norm(memory)), then h + MLP(norm(h)); one head whose keys and queries are the addresses."""

    def __init__(self, rule: str, width: int, dim: int, seed: int, layer: int) -> None:
        super().__init__()
        name, options = MEMORIES[rule]
        geometry = MemoryGeometry(
            style="delta", hidden_size=width, num_heads=1, num_key_heads=1, key_dim=dim, value_dim=width
        )
        self.norm = RMSNorm(width, EPS)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.a_proj = nn.Linear(width, 1, bias=False)
        self.b_proj = nn.Linear(width, 1, bias=False)
        self.decay = nn.Parameter(torch.tensor([math.log(math.expm1(1 / HORIZON))]))  # softplus of it is 1 / N
        self.memory = draw_memory(name, geometry, options, "paper", seed, layer)
        self.o_norm = RMSNorm(width, EPS)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = RMSNorm(width, EPS)
        self.mlp = GatedMLP(width, 2 * width)

    def forward(self, hidden: Tensor, addresses: Tensor, written: Tensor) -> Tensor:
        h, at = self.norm(hidden), addresses[:, :, None]
        inputs = MemoryInputs(
            hidden=h,
            q=at,
            k=at,
            v=self.v_proj(h).float()[:, :, None],
            log_decay=-F.softplus(self.a_proj(h).float() + self.decay),
            write=self.b_proj(h).float().sigmoid(),
            mask=written,  # what is no write leaves the memory as it is, and still reads
        )
        o, _ = self.memory(inputs)
        hidden = hidden + self.o_proj(self.o_norm(o[:, :, 0]))
        return hidden + self.mlp(self.mlp_norm(hidden))


class AddressedModel(nn.Module):
    """Tokens at addresses -> logits of the values, [B, T, values]; and, called with targets, their loss."""

    def __init__(self, rule: str, *, width: int, dim: int, values: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = nn.Embedding(values + 1, width)
        self.layers = nn.ModuleList(AddressedLayer(rule, width, dim, seed, layer) for layer in range(LAYERS))
        self.norm = RMSNorm(width, EPS)
        self.head = nn.Linear(width, values, bias=False)

    def logits(self, addresses: Tensor, tokens: Tensor, written: Tensor) -> Tensor:
        """Return [B, T, values] in float32."""
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, addresses, written)
        return self.head(self.norm(hidden)).float()

    def forward(
        self, addresses: Tensor, tokens: Tensor, written: Tensor, targets: Tensor, *, count: Tensor
    ) -> dict[str, Tensor]:
        """Return the cross-entropy of the queries under ``loss``, over their ``count``."""
        logits = self.logits(addresses, tokens, written)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total / count}


def train(
    job: Job, task: Task, *, width: int, dim: int, values: int, steps: int, batch: int, device: str
) -> Steps:
    """Train one model; returns it beside what a result says of the training, under ``model``. ``not_finite`` is the
    step at which its numbers were not finite."""
    start = time.monotonic()
    model = AddressedModel(job.rule, width=width, dim=dim, values=values, seed=job.seed).to(device)
    mixers = {layer: f"layers.{layer}" for layer in range(LAYERS)}
    selection = select(model, mixers, "all", phase=job.name)
    warmup = round(WARMUP * steps)
    loop = DeviceLoop(
        model,
        optimizer(selection, job.rate, job.rate),
        list(selection.trained.values()),
        device,
        factors=[learning_rate_factor(step, steps, warmup, "cosine") for step in range(steps)],
        doses=[1.0] * steps,
        targets=[layer.memory.dose for layer in model.layers],
    )
    model.train()
    yield from loop.run(task, batch, torch.Generator(device).manual_seed(job.seed), steps)
    loop.release()
    model.eval()
    failed = {} if loop.failed is None else {"not_finite": loop.failed}
    return {"model": model, "losses": loop.losses, **failed, **made_with(start, device)}


@torch.no_grad()
def probabilities(model: AddressedModel, sequences: Sequences) -> Tensor:
    """Return the log probabilities [B, queries, values] that the model gives at the queries of ``sequences``, each of
    which has as many."""
    found = []
    for addresses, tokens, written, targets in zip(
        *(x.split(READ_AT_ONCE) for x in sequences.tensors()), strict=True
    ):
        logits = model.logits(addresses, tokens, written)[targets != IGNORED]
        found.append(logits.unflatten(0, (len(targets), -1)).log_softmax(-1))
    return torch.cat(found)


