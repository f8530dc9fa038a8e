"""Train a base: windows of one contiguous token stream a row, the memory carried from window to window."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surgery.errors import UsageError
from surgery.pretraining.bases import CONTEXT, HORIZONS, base_config, create, initialise
from surgery.pretraining.optimisation import optimisers, rate, set_rate
from surgery.pretraining.stream import Carry, StreamModel


@dataclass(frozen=True)
class Settings:
    """How a base is trained. ``restart`` is the share of rows whose memory starts anew at a window: a model is used
    from an empty memory as well as far into a text."""

    tokens: int = 300_000_000
    context: int = CONTEXT
    batch: int = 64
    muon_lr: float = 0.01
    adam_lr: float = 0.005
    weight_decay: float = 0.1
    restart: float = 0.05
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50


def train(
    name: str,
    stream: np.ndarray,
    settings: Settings,
    device: str,
    *,
    config: dict[str, Any] | None = None,
    horizons: tuple[float, ...] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 500,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Train base ``name`` on ``stream`` (uint16 tokens) and return the float32 model and what happened.

    Args:
        config, horizons: in place of the base's own, for tests.
        checkpoint: a file from which training continues if it exists, and which is renewed as it goes.

    Raises:
        UsageError: the stream is shorter than one step.
        JobError: a loss that is not finite; names the step and the layer.
    """
    rows, context = settings.batch, settings.context
    steps = min(settings.tokens, len(stream) - rows) // (rows * context)
    if steps < 1:
        raise UsageError(f"{len(stream)} tokens are no full step of {rows} x {context}")
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    cuda = device.startswith("cuda")
    model = create(config or base_config(name))
    initialise(model, horizons or HORIZONS[name], settings.seed)
    model.to(device).train()
    runner = StreamModel(model, compiled=cuda, autocast=cuda)
    found = optimisers(model, settings.muon_lr, settings.adam_lr, settings.weight_decay)
    # row r reads its own contiguous part; the last token of a window is the first target of the next
    length = (len(stream) - 1) // rows
    data = torch.from_numpy(stream[: rows * length + 1].astype(np.int16)).to(device)
    offsets = torch.arange(rows, device=device)[:, None] * length + torch.arange(context + 1, device=device)
    dice = torch.Generator(device).manual_seed(settings.seed)
    carries = runner.start(rows)
    first, history = 0, []
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimiser, state in zip(found, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        first, history = saved["step"], saved["history"]
        carries = [Carry(*carry) for carry in saved["carries"]]
        dice.set_state(saved["dice"].cpu())
        say(f"{name}: continues at step {first}")

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    summed, failed = torch.zeros((), device=device), torch.full((), -1, device=device)
    mark, marked = time.monotonic(), first
    for step in range(first, steps):
        window = data[offsets + step * context].long()
        keep = torch.rand(rows, generator=dice, device=device) >= settings.restart
        carries = [carry.detached(keep) for carry in carries]
        loss, carries = runner.loss(window[:, :-1], window[:, 1:], carries)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        # no step is taken where something is not finite; asking the device each time would stall it
        finite = torch.isfinite(loss.detach()) & torch.isfinite(norm)
        failed = torch.where(finite | (failed >= 0), failed, step)
        for parameter in parameters:
            parameter.grad = torch.where(finite, parameter.grad, 0.0)
        set_rate(found, rate(step, steps))
        for optimiser in found:
            optimiser.step()
            optimiser.zero_grad()
        summed += loss.detach()
        last = step + 1 == steps
        if (step + 1) % settings.log_every == 0 or last or step == first:
            mean = summed.item() / (step + 1 - marked)
            bad = int(failed)
            runner.check_finite(bad, data[offsets + max(bad, 0) * context].long()[:, :-1], carries)
            elapsed = time.monotonic() - mark
            speed = (step + 1 - marked) * rows * context / elapsed
            left = (steps - step - 1) * rows * context / speed
            history.append({"step": step + 1, "loss": mean, "tokens_per_second": speed})
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
            say(f"{name}: step {step + 1}/{steps}, loss {mean:.4f}, {speed:,.0f} tokens/s, {left:.0f} s left{memory}")
            mark, marked = time.monotonic(), step + 1
            summed.zero_()
        if checkpoint is not None and ((step + 1) % checkpoint_every == 0) and not last:
            states = [optimiser.state_dict() for optimiser in found]
            state = {
                "model": model.state_dict(),
                "optimisers": states,
                "step": step + 1,
                "history": history,
                "carries": [tuple(x.detach() for x in carry) for carry in carries],
                "dice": dice.get_state(),
            }
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)
    report = {"base": name, "settings": asdict(settings), "steps": steps, "tokens": steps * rows * context}
    return model, {**report, "torch": torch.__version__, "device": device_name(device), "history": history}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_report(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
