"""What a row measures. Times are medians in milliseconds by CUDA events, memory is the allocator's peak in MiB."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surgery.adaptation.distiller import Distiller
from surgery.adaptation.parameters import MAX_GRAD_NORM, optimizer, select
from surgery.benchmark import models
from surgery.graft.compiling import compiled_mixers
from surgery.hosts import adapter_for
from surgery.models import step_graph
from surgery.recipe.kinds import objective

WARMUP = 2  # the first call compiles, the second fills the allocator's pool
DOCUMENT = 700  # tokens between two document starts in the batches


def median(run: Callable[[], Any], count: int, calls: int = 1) -> float:
    """Milliseconds of ``run``, the median of ``count`` measurements of ``calls`` calls one after another; the peak of
    memory is counted from the first of them."""
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def peak() -> float:
    """MiB."""
    return torch.cuda.max_memory_allocated() / 2**20


def resets(batch: int, tokens: int) -> Tensor:
    """[batch, tokens] bool, True where a document starts."""
    return (torch.arange(tokens, device=models.DEVICE) % DOCUMENT == 0).expand(batch, -1).contiguous()


def mixer(shape: str, batch: int, tokens: int, count: int, eager: bool = False) -> dict[str, Any]:
    """Forward and backward of an unswapped mixer in bf16 autocast, beside its projections alone; each ten times in a
    row, as in a model's layers, where the GPU does not wait for the first launch of each."""
    config = {**models.CONFIGS[shape], "num_hidden_layers": 1}
    adapter = adapter_for(config)
    graft = adapter.mixers(adapter.build({**config, "vocab_size": 64}))[0].to(models.DEVICE)
    parameters = list(graft.parameters())
    hidden = torch.randn(batch, tokens, graft.geometry.hidden_size, device=models.DEVICE, requires_grad=True)
    reset = resets(batch, tokens)
    grad = torch.randn(hidden.shape, device=models.DEVICE, dtype=torch.bfloat16)

    def whole() -> None:
        with torch.autocast(models.DEVICE, torch.bfloat16):
            out = graft(hidden, None, None, reset)
        torch.autograd.grad(out, [hidden, *parameters], grad)

    out_name = "out_proj" if hasattr(graft, "out_proj") else "o_proj"
    last = getattr(graft, out_name)
    first = [m for name, m in graft.named_children() if name.endswith("_proj") and name != out_name]
    inner = torch.randn(batch, tokens, last.in_features, device=models.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    sizes = [(batch, tokens, linear.out_features) for linear in (*first, last)]
    grads = [torch.randn(size, device=models.DEVICE, dtype=torch.bfloat16) for size in sizes]

    def projections() -> None:
        with torch.autocast(models.DEVICE, torch.bfloat16):
            outs = [*(linear(hidden) for linear in first), last(inner)]
        weights = [linear.weight for linear in (*first, last)]
        torch.autograd.grad(outs, [hidden, inner, *weights], grads)

    alone = median(projections, count, calls=10)
    with compiled_mixers(not eager):
        together = median(whole, count, calls=10)
    return {"ms": together, "projections_ms": alone, "ratio": together / alone, "peak_mib": peak()}


def training(
    shape: str, rule: str, kind: str, batch: int, tokens: int, count: int, trainable: str, recompute: bool = False
) -> dict[str, Any]:
    """One optimizer step, forward, backward, clipping and AdamW, of a phase as ``distill`` runs it."""
    body = models.body(shape, rule, recompute=recompute)
    selection = select(body.model, body.mixers, trainable, phase="benchmark")
    chosen = objective(kind)
    if chosen.teaches:
        models.seat_teachers(body)
    distiller = Distiller(body, chosen())
    adam = optimizer(selection, 1e-5, 1e-5)
    ids = torch.randint(body.model.config.vocab_size, (batch, tokens + 1), device=models.DEVICE)
    inputs = {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "reset": resets(batch, tokens)}
    total = distiller.counted(**inputs)
    losses = []

    def step() -> None:
        with torch.autocast(models.DEVICE, torch.bfloat16):
            loss = distiller(**inputs, count=total)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(selection.trained.values(), MAX_GRAD_NORM)
        adam.step()
        adam.zero_grad()
        losses.append(loss.detach())

    with compiled_mixers():
        milliseconds = median(step, count)
    if not torch.stack(losses).isfinite().all():
        raise ArithmeticError("a loss is not finite")
    return {
        "ms": milliseconds,
        "tokens_per_second": batch * tokens / milliseconds * 1e3,
        "peak_mib": peak(),
        "trained_parameters": sum(parameter.numel() for parameter in selection.trained.values()),
    }


@torch.no_grad()
def decoding(shape: str, rule: str, batch: int, count: int) -> dict[str, Any]:
    """One token at a time for each of ``batch`` sequences, weights in bf16, after a prompt of 64 tokens; ``written_ms``
    without the CUDA graph."""
    model, _ = models.build(shape, rule, dtype=torch.bfloat16)
    model.eval()
    ids = torch.randint(model.config.vocab_size, (batch, 64), device=models.DEVICE)
    cache = model(ids, use_cache=True).cache
    token = ids[:, :1]

    def step() -> None:
        model(token, cache=cache, use_cache=True)

    with step_graph.as_written():
        written = median(step, max(3, count // 4))
    for _ in range(step_graph.AFTER + 1):
        step()
    milliseconds = median(step, count)
    return {
        "ms": milliseconds, "tokens_per_second": batch / milliseconds * 1e3, "peak_mib": peak(), "written_ms": written,
    }
