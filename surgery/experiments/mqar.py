"""Multi-query associative recall from scratch: two-layer models that differ in their memory rule alone.

    additive  a Mamba2 model
    plain     Palimpsa-D without metaplasticity: the additive rule in a Gated DeltaNet's layer, which normalises queries
              and keys, and has an MLP and separate gates for writing and forgetting
    palimpsa  Palimpsa-D
    delta     Gated DeltaNet
    bayesian  the Bayesian Layer in the same layer, constant noise from the token

Length grows over the training, L = 128 to 1024, with L/4 pairs; every model is tested at every length. ``update``
writes half of its keys a second time, so that its sequences are 5L/4 tokens long. ``block`` asks for values that come
later than their keys; its delta hosts have no convolution, as the paper's.

Sources: the Palimpsa paper, Sec. 3 and Fig. 2 (two layers, width 128, 8 heads, vocabulary 8192, curriculum, AdamW with
weight decay 0.1, cosine schedule, rates from 1e-3 to 1e-2); "Memory by Design", Sec. 4.2 and Fig. 4 (Update, Block).
Steps, tokens a step, key and value widths are this project's choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from surgery.adaptation.schedules import DoseSchedule
from surgery.adaptation.teaching import Body, body_of
from surgery.errors import UsageError
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments.associative_recall import TASKS, AssociativeRecall
from surgery.experiments.jobs import Result, Steps
from surgery.experiments.recall_training import (
    LAYERS,
    TEST,
    VALIDATION,
    WARMUP,
    accuracy,
    device_loop,
    host_model,
    made_with,
    sequences,
)
from surgery.experiments.trained import Experiment, Job, at_least, draw_curve, row
from surgery.hosts import adapter_for
from surgery.memory import draw_memory
from surgery.recipe import Phase

# the rule that takes the delta host's place, its options and its dose
MEMORIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "plain": ("palimpsa", {}, 0.0),
    "palimpsa": ("palimpsa", {}, 1.0),
    "bayesian": ("bayesian", {"noise": "constant", "noise_from": "token"}, 1.0),
}
# approximate readings of the figures: (task, rule, length of 0 for the longest)
PRINTED = {
    ("base", "palimpsa", 1024): 0.69, ("base", "plain", 1024): 0.58,
    ("update", "bayesian", 0): 0.88, ("update", "delta", 0): 0.60, ("update", "additive", 0): 0.60,
}  # fmt: skip
LAST_STAGE = 2  # steps at the longest length, times those at any other


@dataclass(frozen=True)
class Mqar(Experiment):
    """The settings.

    Attributes:
        task, vocabulary: see :class:`AssociativeRecall`. lengths: L, growing.
        width, heads, key_dim, value_dim: of the models.
        steps: of each training. tokens: of a step, of which lengths share in sequences of their own number.
        tested: sequences of a test at each length.
    """

    kind: ClassVar[str] = "mqar"
    labels: ClassVar[Mapping[str, str]] = {
        "additive": "Mamba2", "plain": "Palimpsa-D without metaplasticity", "palimpsa": "Palimpsa-D",
        "delta": "Gated DeltaNet", "bayesian": "Bayesian Layer",
    }  # fmt: skip

    rules: tuple[str, ...] = tuple(labels)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    task: str = "base"
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    vocabulary: int = 8192
    width: int = 128
    heads: int = 8
    key_dim: int = 16
    value_dim: int = 32
    steps: int = 6000
    tokens: int = 32768
    tested: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS:
            raise UsageError(f"--task {self.task}: choose one of {', '.join(TASKS)}")
        if not self.lengths or min(self.lengths) < 8 or sorted(set(self.lengths)) != list(self.lengths):
            raise UsageError(f"--lengths {','.join(map(str, self.lengths))}: growing lengths, from 8 tokens on")
        at_least(len(self.lengths) * 2, steps=self.steps)
        at_least(1, width=self.width, heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim)
        at_least(2, tested=self.tested)
        at_least(2 * max(self.lengths), tokens=self.tokens)
        for length in self.lengths:
            self.recall(length)
        if "additive" in self.rules and self.heads * self.value_dim % self.width:
            raise UsageError(
                f"--width {self.width}: {self.heads} heads of {self.value_dim} values are no multiple of it, as "
                "additive needs; leave that out of --rules, or choose another"
            )

    def recall(self, length: int) -> AssociativeRecall:
        """Return the task at L."""
        return AssociativeRecall(self.task, length // 4, self.vocabulary)

    def stages(self) -> list[tuple[int, int]]:
        """Return the curriculum: each length, and the step before which it ends."""
        last = len(self.lengths) - 1
        shares = [LAST_STAGE if place == last else 1 for place in range(last + 1)]
        return [
            (length, round(self.steps * sum(shares[: place + 1]) / sum(shares)))
            for place, length in enumerate(self.lengths)
        ]

    def sizes(self) -> str:
        pairs = ", ".join(str(length // 4) for length in self.lengths)
        return (
            f"{self.task}, {pairs} pairs, vocabulary {self.vocabulary}; {LAYERS} layers, width {self.width}, "
            f"{self.heads} heads of {self.key_dim} x {self.value_dim}; {self.steps} steps of {self.tokens} tokens"
        )

    def config(self, rule: str) -> dict[str, Any]:
        """Return config.json of the model that holds ``rule``."""
        shared = {
            "vocab_size": self.vocabulary, "num_hidden_layers": LAYERS, "hidden_size": self.width,
            "num_heads": self.heads, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 0,
            "eos_token_id": 0,
        }  # fmt: skip
        if rule == "additive":
            return {
                "model_type": "mamba2", "expand": self.heads * self.value_dim // self.width,
                "head_dim": self.value_dim, "state_size": self.key_dim, "n_groups": 1, "conv_kernel": 4,
                "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, **shared,
            }  # fmt: skip
        return {
            "model_type": "gated_deltanet", "head_dim": self.key_dim, "expand_v": self.value_dim / self.key_dim,
            "num_v_heads": self.heads, "conv_size": 4, "use_gate": True, "use_short_conv": self.task != "block",
            "intermediate_size": 2 * self.width, "norm_eps": 1e-6, **shared,
        }  # fmt: skip

    def training(self, job: Job, device: str) -> Steps:
        return train(self, job, device)

    def rows(self, best: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
        rows = []
        for rule, results in best.items():
            for length in self.lengths:
                longest = 0 if length == max(self.lengths) else None
                paper = PRINTED.get((self.task, rule, length), PRINTED.get((self.task, rule, longest)))
                values = [result["test"][str(length)] for result in results]
                rows.append(row(rule, f"L = {length}", values, paper))
        return rows

    def notes(self) -> list[str]:
        notes = ["Share of queries that are answered right, after all of the training. Paper: approximate readings of"]
        notes[0] += " its figures, those of Update at no length in particular."
        if self.task == "update":
            notes.append("Half of the keys are written twice, so that sequences are 5L/4 tokens long.")
        if self.task == "block":
            notes.append("Models of the delta layer have no convolution here; Mamba2 keeps its own.")
        return notes

    def plot(self, result: Result, path: Path) -> None:
        figure = new_figure(6, 4)
        axes = figure.add_subplot()
        for number, rule in enumerate(self.rules):
            line = [one["each"] for one in result["rows"] if one["rule"] == rule]
            draw_curve(axes, self.lengths, line, f"C{number}", self.labels[rule])
        axes.set_xscale("log", base=2)
        axes.set_xticks(self.lengths, [str(length) for length in self.lengths])
        axes.set(xlabel="L (L/4 pairs)", ylabel="answers that are right", ylim=(-0.03, 1.03))
        axes.set_title(f"{self.task}; bars: one standard deviation of {len(self.seeds)} seeds", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
        save_figure(figure, path)


def build(settings: Mqar, job: Job, device: str) -> Body:
    """Return the model of a job, untrained, with the rule in all of its layers."""
    config = settings.config(job.rule)
    model = host_model(config, job.seed, device)
    if job.rule in MEMORIES:
        rule, options, dose = MEMORIES[job.rule]
        for layer, mixer in adapter_for(config).mixers(model).items():
            mixer.memory = draw_memory(rule, mixer.geometry, options, "paper", job.seed, layer).to(device)
            mixer.memory.dose.fill_(dose)
    model.config.use_cache = False
    return body_of(model, config, list(range(LAYERS)))


def memories(body: Body) -> list[nn.Module]:
    """Return the memory of every layer."""
    return [body.model.get_submodule(name).memory for name in body.mixers.values()]


def train(
    settings: Mqar, job: Job, device: str, record: Callable[[Body, int], Any] | None = None, records: int = 1
) -> Steps:
    """Train one model, and test it at every length.

    Args:
        record: called with the model and the steps done, about ``records`` times over the training and before it.

    Returns:
        ``validation`` at the longest length; ``test``, the share of right answers by length; the losses of blocks of
        steps. A model whose numbers were not finite has answered nothing, and tells the step under ``not_finite``.
    """
    start = time.monotonic()
    body = build(settings, job, device)
    dose = MEMORIES[job.rule][2] if job.rule in MEMORIES else 0.0
    longest = settings.recall(max(settings.lengths)).tokens
    phase = Phase(
        kind="next-token", steps=settings.steps, context=longest, batch=settings.tokens, learning_rate=job.rate,
        schedule="cosine", warmup=WARMUP, trainable="all",
    )  # fmt: skip
    loop = device_loop(body, memories(body), phase, DoseSchedule(dose, dose, 1), device, job.name)
    generator = torch.Generator(device).manual_seed(2 * job.seed)
    recorded = 0
    body.model.train()
    if record is not None:
        record(body, 0)
    for length, until in settings.stages():
        task = settings.recall(length)
        for _ in loop.run(task, max(1, settings.tokens // task.tokens), generator, until):
            yield
            if record is not None and loop.done * records >= (recorded + 1) * settings.steps:
                recorded = loop.done * records // settings.steps
                record(body, loop.done)
        if loop.failed is not None:
            nothing = {str(length): 0.0 for length in settings.lengths}
            return {"validation": 0.0, "test": nothing, "not_finite": loop.failed, "losses": loop.losses}
    loop.release()

    def right(length: int, seed: int, count: int) -> float:
        return accuracy(body, sequences(settings.recall(length), seed, count, device), device)

    seconds = made_with(start, device)
    return {
        "validation": right(max(settings.lengths), VALIDATION, max(1, settings.tested // 2)),
        "test": {str(length): right(length, TEST, settings.tested) for length in settings.lengths},
        "losses": loop.losses,
        **seconds,
    }


QUICK: dict[str, Any] = {
    "lengths": (16, 32), "vocabulary": 32, "width": 64, "heads": 2, "value_dim": 32, "steps": 320, "tokens": 1024,
    "rates": (1e-2,), "tested": 256,
}  # fmt: skip
