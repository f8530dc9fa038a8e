"""One job of the study in :mod:`surgery.experiments.operation`: a small host trained to recall, or one adaptation.

An adaptation is a recipe's: ``apply`` writes the swapped checkpoint, and a ``next-token`` phase's loss, optimiser,
learning rates, schedule and dose train it. The data are sequences whose answers alone are scored, and the steps are
those of :mod:`surgery.experiments.device_loop`, which a GPU repeats without Python. A host is trained by the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from surgery.adaptation.distiller import Distiller
from surgery.adaptation.parameters import optimizer, select
from surgery.adaptation.phases import dose_schedule
from surgery.adaptation.schedules import DoseSchedule, learning_rate_factor
from surgery.adaptation.teaching import Body, body_of
from surgery.checkpoint.staging import staged_directory
from surgery.experiments.associative_recall import AssociativeRecall
from surgery.experiments.device_loop import DeviceLoop, autocast
from surgery.hosts import adapter_for, load_model, open_model
from surgery.operation import apply
from surgery.pretraining.bases import initialise
from surgery.recipe import Phase, load_recipe
from surgery.recipe.kinds import objective
from surgery.results import json_text

if TYPE_CHECKING:
    from surgery.experiments.operation import Arm, Job, Study

LAYERS = 2
HORIZONS = (100.0, 1000.0)  # tokens: where the layers' forgetting horizons start
EMBEDDING = 0.5  # deviation of the host's embeddings at the start
WARMUP = 0.05  # of a phase
# shares of the pairs, and until which share of the host's steps each is trained
CURRICULUM = ((1 / 8, 0.1), (1 / 4, 0.2), (1 / 2, 0.35), (1, 1))
READ_AT_ONCE = 256  # sequences a forward of a measurement
# seeds of the sequences that are measured; a host trains on those of twice its seed, an adaptation on the next one's
VALIDATION, TEST, HARDER = 10_001, 10_002, 10_003


def host_config(study: Study) -> dict[str, Any]:
    """Return config.json of the host: two layers of two heads, keys of 16, values of 64."""
    shared = {
        "vocab_size": study.vocabulary,
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if study.host == "mamba2":
        return {
            "model_type": "mamba2", "hidden_size": 64, "expand": 2, "num_heads": 2, "head_dim": 64, "state_size": 16,
            "n_groups": 1, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
            **shared,
        }  # fmt: skip
    return {
        "model_type": "gated_deltanet", "hidden_size": 128, "head_dim": 16, "expand_v": 4.0, "num_heads": 2,
        "num_v_heads": 2, "conv_size": 4, "use_gate": True, "use_short_conv": True, "intermediate_size": 256,
        "norm_eps": 1e-6, **shared,
    }  # fmt: skip


def recipe_text(study: Study, arm: Arm, steps: int, model: str, seed: int) -> str:
    """Return the recipe of an adaptation: the swap of all layers, and one ``next-token`` phase that trains all."""
    tokens = study.recall().tokens
    memory = dict(arm.memory)
    phase: dict[str, Any] = {
        "kind": "next-token",
        "steps": steps,
        "context": tokens,
        "batch": tokens * study.batch,
        "learning_rate": {"memory": arm.rate if arm.memory_rate is None else arm.memory_rate, "host": arm.rate},
        "schedule": "cosine",
        "warmup": WARMUP,
        "trainable": "all",
        "data": "associative-recall",  # drawn by this module, not read
    }
    if memory.get("rule") != "host":
        phase["dose"] = {"to": 1.0, "over": arm.over}
    recipe = {"model": model, "layers": list(range(LAYERS)), "memory": memory, "seed": seed, "phases": [phase]}
    return yaml.safe_dump(recipe, sort_keys=False)


def training(study: Study, job: Job, place: Path, device: str) -> Generator[None, None, dict[str, Any]]:
    """Train and measure one job; a host's checkpoint is left in ``place``. Yields whenever another training may queue
    its work on the device.

    Returns:
        ``validation``, ``test`` and ``harder``, the shares of queries that are answered right; ``three_quarters``, the
        validation's after that share of the steps; how fast it trained. A job whose numbers were not finite has
        answered nothing, and tells the step under ``not_finite``.
    """
    start = time.monotonic()
    if job.arm is None:
        figures = yield from _host(study, job, place, device)
    else:
        figures = yield from _adaptation(study, job, place, device)
    return {"job": job.name, **figures, **made_with(start, device)}


def made_with(start: float, device: str) -> dict[str, Any]:
    """Return what a result says of its making, which began at ``start`` of the monotonic clock."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"seconds": time.monotonic() - start, "torch": str(torch.__version__), "device": name}


def host_model(config: Mapping[str, Any], seed: int, device: str) -> nn.Module:
    """Return an untrained host of ``LAYERS`` layers."""
    torch.manual_seed(seed)
    model = adapter_for(config).build(config).float()
    initialise(model, HORIZONS, seed)
    with torch.no_grad():  # a token must be seen through what the first layer adds: 0.02 learns far more slowly
        model.get_input_embeddings().weight.mul_(EMBEDDING / 0.02)
    return model.to(device)


def _host(study: Study, job: Job, place: Path, device: str) -> Generator[None, None, dict[str, Any]]:
    config = host_config(study)
    model = host_model(config, job.seed, device)
    tokens = study.recall().tokens
    phase = Phase(
        kind="next-token", steps=study.steps, context=tokens, batch=tokens * study.batch,
        learning_rate=study.host_rate, schedule="cosine", warmup=WARMUP, trainable="all",
    )  # fmt: skip
    figures = yield from _train(study, job, model, config, phase, DoseSchedule(0.0, 0.0, 1), device)
    if not (place / job.name / "config.json").is_file():
        with staged_directory(place / job.name) as staging:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
            save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
            written = {"architectures": [type(model).__name__], **config, "dtype": "float32"}
            (staging / "config.json").write_text(json_text(written) + "\n", encoding="utf-8")
    return figures


def _adaptation(study: Study, job: Job, place: Path, device: str) -> Generator[None, None, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file, swapped = Path(folder) / "recipe.yaml", Path(folder) / "swapped"
        host = (place / job.host.name).resolve()
        file.write_text(recipe_text(study, job.arm, job.steps, str(host), job.seed), encoding="utf-8")
        recipe = load_recipe(file)
        apply(recipe, swapped, drift="skip", device=device, offline=True)
        config = open_model(swapped).config
        model = load_model(swapped, dtype=torch.float32, device=device)
    memory = next(iter(adapter_for(config).mixers(model).values())).memory
    dose = dose_schedule(recipe, 0, float(memory.dose))
    return (yield from _train(study, job, model, config, recipe.phases[0], dose, device))


def _train(
    study: Study, job: Job, model: Any, config: Mapping[str, Any], phase: Phase, dose: DoseSchedule, device: str
) -> Generator[None, None, dict[str, Any]]:
    """Run the phase and measure. A host begins with fewer pairs: it then learns to recall in a tenth of the steps."""
    task, steps = study.recall(), phase.total_steps
    model.config.use_cache = False
    body = body_of(model, config, list(range(LAYERS)))
    memories = [mixer.memory for mixer in adapter_for(config).mixers(model).values()]
    loop = device_loop(body, memories, phase, dose, device, job.name)
    # the same sequences for the control and for every arm of a seed
    generator = torch.Generator(device).manual_seed(2 * job.seed + (job.arm is not None))
    validation = sequences(task, VALIDATION, study.tested // 2, device)
    three_quarters = 0.0
    start = time.monotonic()
    model.train()
    for stage, until in _stages(task, steps) if job.arm is None else [(task, steps)]:
        for stop in sorted({min(until, 3 * steps // 4), until}):
            yield from loop.run(stage, study.batch, generator, stop)
            if loop.failed is not None:
                figures = dict.fromkeys(("validation", "test", "harder", "three_quarters"), 0.0)
                return {**figures, "not_finite": loop.failed, "losses": loop.losses}
            if stop == 3 * steps // 4:
                three_quarters = accuracy(body, validation, device)
                model.train()
    seconds = time.monotonic() - start
    loop.release()
    test = sequences(task, TEST, study.tested, device)
    harder = sequences(study.harder(), HARDER, study.tested, device)
    return {
        "validation": accuracy(body, validation, device),
        "test": accuracy(body, test, device),
        "harder": accuracy(body, harder, device),
        "three_quarters": three_quarters,
        "steps_per_second": steps / seconds,
        "losses": loop.losses,
    }


def device_loop(
    body: Body, memories: list[Any], phase: Phase, dose: DoseSchedule, device: str, name: str
) -> DeviceLoop:
    """Return the loop that does the steps of a ``next-token`` phase: its selection, optimiser, rates and dose."""
    steps = phase.total_steps
    selection = select(body.model, body.mixers, phase.trainable, phase=name, silent=dose.silent)
    schedule, warmup = phase.schedule, phase.warmup_steps
    return DeviceLoop(
        Distiller(body, objective(phase.kind).of(phase)),
        optimizer(selection, phase.rates.memory, phase.rates.host),
        list(selection.trained.values()),
        device,
        factors=[learning_rate_factor(step, steps, warmup, schedule) for step in range(steps)],
        doses=[dose.at(step) for step in range(steps)],
        targets=[memory.dose for memory in memories],
    )


def _stages(task: AssociativeRecall, steps: int) -> list[tuple[AssociativeRecall, int]]:
    """Return the curriculum: the tasks, and the step before which each ends."""
    stages = []
    for share, until in CURRICULUM:
        pairs = max(2, round(share * task.pairs))
        stages.append((replace(task, pairs=pairs, length=None) if share < 1 else task, round(until * steps)))
    return stages


def sequences(task: AssociativeRecall, seed: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Return ids and targets [count, tokens] that depend on the seed alone."""
    return task.draw(count, torch.Generator(device).manual_seed(seed))


@torch.no_grad()
def accuracy(body: Body, asked_of: tuple[Tensor, Tensor], device: str) -> float:
    """Return the share of queries whose most probable token is the value."""
    body.model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for ids, targets in zip(*(x.split(READ_AT_ONCE) for x in asked_of), strict=True):
        asked = targets >= 0
        with autocast(device):
            logits = body.head(body.run(ids)[asked])
        right += (logits.argmax(-1) == targets[asked]).sum()
    return right.item() / int((asked_of[1] >= 0).sum())
