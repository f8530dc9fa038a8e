"""The operation where memory is what limits: a small host trained to recall, operated on, adapted beside its control.

A two-layer host learns associative recall (:mod:`surgery.experiments.associative_recall`). Then all of its layers take
another memory, by the recipe's keys, and it is adapted by the ``next-token`` phase's own loss, optimiser, schedule and
dose; the control is the same host with its own rule, the same data, steps and trained parameters. Every host and
every adaptation is a job with a result file of its own, so that a study can be shared by processes and carried on.

What keeps the comparison fair: a control is run at several learning rates and the best by validation counts, an arm at
the one rate it names; validation and test sequences are drawn apart; a host counts if it reached ``REACHED`` and gained
less than ``STILL`` in its last quarter, and those that do not are counted; every arm is also read at 1.5 times the
pairs and adapted for twice the steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from torch import Tensor

from surgery.adaptation import teaching
from surgery.adaptation.distiller import Distiller
from surgery.adaptation.parameters import optimizer, select
from surgery.adaptation.schedules import DoseSchedule, learning_rate_factor
from surgery.checkpoint.staging import write_atomic
from surgery.errors import JobError, UsageError
from surgery.evaluation.intervals import mean_interval
from surgery.experiments.associative_recall import AssociativeRecall
from surgery.experiments.device_loop import DeviceLoop, autocast

HOSTS = ("gdn", "mamba2")
REACHED, STILL = 0.7, 0.01  # a host counts from this accuracy on, and below this gain in its last quarter
TESTED = 2048  # sequences of the test, and half as many of the validation
BEYOND = 1.5  # pairs of the harder test, times the trained ones
LONGER = 2  # steps of the longer adaptation, times the others
WARMUP = 0.05
EMBEDDING = 0.5  # deviation of the host's embeddings at the start
# shares of the pairs, and until which share of the host's steps each is trained
CURRICULUM = ((1 / 8, 0.1), (1 / 4, 0.2), (1 / 2, 0.35), (1, 1))
# seeds of the random streams, apart from each other and from every host's
VALIDATION, TEST, HARDER = 10_001, 10_002, 10_003


@dataclass(frozen=True)
class Arm:
    """One operation: a name, the recipe's ``memory`` section, the dose's way to 1 and the learning rates.

    Attributes:
        memory: the recipe's keys; ``{rule: host}`` is the control.
        over: share of the steps over which the dose goes from where ``start`` puts it to 1.
        rate: learning rate of the host's parameters. memory_rate: of what the operation added; None for the same.
    """

    name: str
    memory: Mapping[str, Any] = field(default_factory=lambda: {"rule": "host"})
    over: float = 0.5
    rate: float = 1e-3
    memory_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``NAME:key=value,...``: recipe keys of ``memory``, and over, rate, memory_rate.

        Raises:
            UsageError: another form, or a key or value that the recipe refuses.
        """
        name, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",")]
        if not (colon and name.replace("-", "").replace("_", "").isalnum() and all(equals for _, equals, _ in pairs)):
            raise UsageError(f"--arm {text}: write NAME:rule=bayesian,noise_from=token,over=0.5")
        given = {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
        own = {key: given.pop(key) for key in ("over", "rate", "memory_rate") if key in given}
        for key, value in own.items():
            if isinstance(value, str):  # YAML reads 1e-3 as text
                own[key] = float(value)
        _memory(text, given)
        return cls(name, given, **own)


def _memory(text: str, given: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError

    from surgery.recipe.schema import Memory

    try:
        return Memory.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(f"--arm {text}: {where}: {problem['msg']}") from error


CONTROL = Arm("control")


@dataclass(frozen=True)
class Study:
    """Everything that fixes the figures.

    Attributes:
        task, pairs, vocabulary, length: see :class:`AssociativeRecall`.
        steps: of the host. adapt: of each adaptation. batch: sequences a step.
        host_rate: the host's learning rate. control_rates: those of the control, of which the best counts.
        seeds: one host each.
        arms: the operations.
    """

    host: str = "gdn"
    task: str = "update"
    pairs: int = 48
    vocabulary: int = 1024
    length: int | None = None
    steps: int = 10000
    adapt: int = 1500
    batch: int = 64
    host_rate: float = 1e-3
    control_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[Arm, ...] = ()

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise UsageError(f"--host {self.host}: choose one of {', '.join(HOSTS)}")
        self.recall()
        self.harder()

    def recall(self) -> AssociativeRecall:
        """The task that is trained and tested."""
        return AssociativeRecall(self.task, self.pairs, self.vocabulary, self.length)

    def harder(self) -> AssociativeRecall:
        """The task at ``BEYOND`` times the pairs."""
        length = None if self.length is None else round(BEYOND * self.length)
        return AssociativeRecall(self.task, round(BEYOND * self.pairs), self.vocabulary, length)

    def fixed(self) -> dict[str, Any]:
        """What a directory's results have in common; seeds and arms may be added later."""
        return {key: value for key, value in asdict(self).items() if key not in ("seeds", "arms", "control_rates")}


@dataclass(frozen=True)
class Job:
    """A host (``arm`` None) or an adaptation of it."""

    seed: int
    arm: Arm | None = None
    steps: int = 0

    @property
    def name(self) -> str:
        """Of its result file."""
        if self.arm is None:
            return f"seed{self.seed}-host"
        rate = f"{self.arm.rate:g}" + (f"-{self.arm.memory_rate:g}" if self.arm.memory_rate else "")
        return f"seed{self.seed}-{self.arm.name}-{rate}-{self.steps}"


def host_config(study: Study) -> dict[str, Any]:
    """config.json of the host: two layers, two heads, keys of 16, values of 64."""
    shared = {
        "vocab_size": study.vocabulary,
        "num_hidden_layers": 2,
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
        }
    return {
        "model_type": "gated_deltanet", "hidden_size": 128, "head_dim": 16, "expand_v": 4.0, "num_heads": 2,
        "num_v_heads": 2, "conv_size": 4, "use_gate": True, "use_short_conv": True, "intermediate_size": 256,
        "norm_eps": 1e-6, **shared,
    }


# where the layers' forgetting horizons start, in tokens
HORIZONS = (100.0, 1000.0)


def run(
    study: Study,
    folder: Path,
    *,
    device: str = "cpu",
    jobs: int = 1,
    progress: Callable[[int, int, str], Any] | None = None,
) -> dict[str, Any]:
    """Run what ``folder`` does not hold yet, and summarise.

    Args:
        jobs: how many run at once.
        progress: called with jobs done, all jobs, and the last one's line.

    Raises:
        UsageError: the folder holds results of other settings.
        JobError: a job failed.
    """
    _claim(study, folder)
    waves = [_hosts(study), _first(study)]
    done, total = 0, len(waves[0]) + len(waves[1]) + _count_longer(study)

    def finished(job: Job, result: Mapping[str, Any]) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, f"{job.name}: {result['test']:.4f}")

    for make in (lambda: waves[0], lambda: waves[1], lambda: _longer(study, folder)):
        for job, result in _execute(study, make(), folder, device, jobs):
            finished(job, result)
    return summarise(study, folder)


def _execute(
    study: Study, jobs: Sequence[Job], folder: Path, device: str, workers: int
) -> Iterator[tuple[Job, Mapping[str, Any]]]:
    """Run the jobs that have no result yet, ``workers`` at a time: in processes on a CPU, as streams on a GPU."""
    pending = []
    for job in jobs:
        known = read(folder, job)
        if known is None:
            pending.append(job)
        else:
            yield job, known
    if device.startswith("cuda"):
        yield from _interleaved(study, pending, folder, device, workers)
    elif workers == 1:
        yield from ((job, run_job(study, job, str(folder), device)) for job in pending)
    elif pending:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(run_job, study, job, str(folder), device): job for job in pending}
            for future in as_completed(waiting):
                yield waiting[future], future.result()


def _interleaved(
    study: Study, jobs: Sequence[Job], folder: Path, device: str, workers: int
) -> Iterator[tuple[Job, Mapping[str, Any]]]:
    """Trainings on streams of one process: small kernels of several then run at once, which processes would not."""
    waiting = list(reversed(jobs))
    running: list[tuple[Job, Any, torch.cuda.Stream]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            running.append((job, _work(study, job, folder, device), torch.cuda.Stream(device)))
        for one in list(running):
            job, work, stream = one
            try:
                with torch.cuda.stream(stream):
                    next(work)
            except StopIteration as end:
                running.remove(one)
                yield job, end.value


def _claim(study: Study, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.json"
    fixed = json.loads(json.dumps(study.fixed()))
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        for key, value in fixed.items():
            if known.get(key) != value:
                raise UsageError(f"{path}: holds results with {key} {known.get(key)}, not {value}; name another folder")
    else:
        write_atomic(path, json.dumps(fixed, indent=1) + "\n")


def _hosts(study: Study) -> list[Job]:
    return [Job(seed) for seed in study.seeds]


def _first(study: Study) -> list[Job]:
    arms = [Arm("control", rate=rate) for rate in study.control_rates] + list(study.arms)
    return [Job(seed, arm, study.adapt) for seed in study.seeds for arm in arms]


def _longer(study: Study, folder: Path) -> list[Job]:
    return [
        Job(seed, arm, LONGER * study.adapt)
        for seed in study.seeds
        for arm in (_best_control(study, folder, seed, study.adapt), *study.arms)
    ]


def _count_longer(study: Study) -> int:
    return len(study.seeds) * (1 + len(study.arms))


def _best_control(study: Study, folder: Path, seed: int, steps: int) -> Arm:
    """The control whose learning rate is best by validation."""
    arms = [Arm("control", rate=rate) for rate in study.control_rates]
    return max(arms, key=lambda arm: (read(folder, Job(seed, arm, steps)) or {"validation": -1.0})["validation"])


def read(folder: Path, job: Job) -> dict[str, Any] | None:
    """A job's result, None if it has none yet."""
    path = folder / f"{job.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def run_job(study: Study, job: Job, folder: str, device: str) -> dict[str, Any]:
    """Run one job and write its result, complete or not at all."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    work = _work(study, job, Path(folder), device)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def _work(study: Study, job: Job, place: Path, device: str) -> Generator[None, None, dict[str, Any]]:
    start = time.monotonic()
    if job.arm is None:
        model = _new_host(study, job.seed, device)
        arm = Arm("host", rate=study.host_rate)
        figures = yield from _train(study, job, model, arm, study.steps, device, curriculum=True)
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        partial = place / f"{job.name}.{os.getpid()}.partial"
        torch.save(weights, partial)
        partial.replace(place / f"{job.name}.pt")
    else:
        model = _operated(study, job, place, device)
        figures = yield from _train(study, job, model, job.arm, job.steps, device)
    result = {"job": job.name, **figures, "seconds": time.monotonic() - start, "torch": torch.__version__}
    if job.arm is not None:
        result["arm"] = asdict(job.arm)
    write_atomic(place / f"{job.name}.json", json.dumps(result, indent=1) + "\n")
    return result


def _new_host(study: Study, seed: int, device: str) -> Any:
    from surgery.hosts import adapter_for
    from surgery.pretraining.bases import initialise

    config = host_config(study)
    torch.manual_seed(seed)
    model = adapter_for(config).build(config).float()
    initialise(model, HORIZONS, seed)
    with torch.no_grad():  # a token must be seen through what the first layer adds: 0.02 learns far more slowly
        model.get_input_embeddings().weight.mul_(EMBEDDING / 0.02)
    return model.to(device)


def _operated(study: Study, job: Job, place: Path, device: str) -> Any:
    """The trained host with the arm's memories in all layers, as ``surgery apply`` makes them."""
    from surgery.hosts import adapter_for
    from surgery.memory import draw_memory

    config = host_config(study)
    adapter = adapter_for(config)
    memory = _memory(job.name, job.arm.memory)
    layers = list(range(config["num_hidden_layers"]))
    options = dict(memory.options)
    if memory.start == "paper":
        from surgery.memory import RULES

        options = {**RULES[memory.rule].paper_defaults, **options}
    swap = {"schema": 1, "rule": memory.rule, "layers": layers, "options": options, "base": "host"}
    model = adapter.build(adapter.surgery_config(config, swap)).float()
    weights = torch.load(place / f"{Job(job.seed).name}.pt", weights_only=True)
    for layer, mixer in adapter.mixers(model).items():
        drawn = draw_memory(memory.rule, mixer.geometry, options, memory.start, job.seed, layer)
        mixer.memory.load_state_dict(drawn.state_dict())
    lacking, unknown = model.load_state_dict(weights, strict=False)
    lacking = [name for name in lacking if ".memory." not in name]
    unknown = [name for name in unknown if ".memory." not in name]
    if lacking or unknown:
        raise JobError(f"{job.name}: the host's weights do not fit: {[*lacking, *unknown][0]}")
    return model.to(device)


def _train(
    study: Study, job: Job, model: Any, arm: Arm, steps: int, device: str, *, curriculum: bool = False
) -> Generator[None, None, dict[str, Any]]:
    """Train with the next-token phase's loss, optimiser, schedule and dose, and measure. Yields whenever another
    training may queue its work.

    Args:
        curriculum: begin with fewer pairs; a host then learns to recall in a tenth of the steps.
    """
    body, memories = _body(model)
    dose = DoseSchedule(float(memories[0].dose), 1.0, max(1, round(arm.over * steps)))
    selection = select(model, body.mixers, "all", phase=job.name)
    adam = optimizer(selection, arm.memory_rate or arm.rate, arm.rate)
    warmup = max(1, round(WARMUP * steps))
    factors = [learning_rate_factor(step, steps, warmup, "cosine") for step in range(steps)]
    loop = DeviceLoop(
        Distiller(body, "next-token"), adam, list(selection.trained.values()), device,
        factors=factors, doses=[dose.at(step) for step in range(steps)], targets=[memory.dose for memory in memories],
    )
    # the same sequences for the control and for every arm of a seed
    generator = torch.Generator(device).manual_seed(2 * job.seed + (job.arm is not None))
    task = study.recall()
    validation = _sequences(task, VALIDATION, TESTED // 2, device)
    three_quarters = None
    start = time.monotonic()
    model.train()
    for stage, until in _stages(task, steps) if curriculum else [(task, steps)]:
        for stop in sorted({min(until, 3 * steps // 4), until}):
            yield from loop.run(stage, study.batch, generator, stop)
            if loop.failed is not None:
                return {"test": math.nan, "validation": -1.0, "harder": math.nan, "not_finite": loop.failed}
            if stop == 3 * steps // 4 and three_quarters is None:
                three_quarters = _accuracy(body, validation, device)
                model.train()
    seconds = time.monotonic() - start
    loop.release()
    test = _sequences(task, TEST, TESTED, device)
    harder = _sequences(study.harder(), HARDER, TESTED, device)
    return {
        "validation": _accuracy(body, validation, device),
        "test": _accuracy(body, test, device),
        "harder": _accuracy(body, harder, device),
        "three_quarters": three_quarters,
        "steps_per_second": steps / seconds,
        "losses": loop.losses,
    }


def _body(model: Any) -> tuple[Any, list[Any]]:
    from surgery.hosts import adapter_for

    config = model.config.to_dict()
    body = teaching.body_of(model, config, list(range(config["num_hidden_layers"])))
    return body, [mixer.memory for mixer in adapter_for(config).mixers(model).values()]


def _stages(task: AssociativeRecall, steps: int) -> list[tuple[AssociativeRecall, int]]:
    """The curriculum: the tasks, and the step before which each ends."""
    stages = []
    for share, until in CURRICULUM:
        pairs = max(2, round(share * task.pairs))
        stages.append((replace(task, pairs=pairs, length=None) if share < 1 else task, round(until * steps)))
    return stages


def _sequences(task: AssociativeRecall, seed: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    return task.draw(count, torch.Generator(device).manual_seed(seed))


@torch.no_grad()
def _accuracy(body: Any, sequences: tuple[Tensor, Tensor], device: str) -> float:
    """Share of queries whose most probable token is the value."""
    body.model.eval()
    right = total = 0
    for ids, targets in zip(*(x.split(256) for x in sequences), strict=True):
        with autocast(device):
            hidden = body.run(ids)
            logits = body.model.get_output_embeddings()(hidden[targets >= 0])
        right += (logits.argmax(-1) == targets[targets >= 0]).sum().item()
        total += int((targets >= 0).sum())
    return right / total


def summarise(study: Study, folder: Path) -> dict[str, Any]:
    """The table: each arm's mean beside the control's best, with the t interval of the paired difference over hosts
    that count; at the trained number of pairs, beyond it, and after twice the steps."""
    hosts = {seed: read(folder, Job(seed)) for seed in study.seeds}
    converged = [seed for seed, host in hosts.items() if host is not None and _counts(host)]
    rows = []
    for arm in study.arms:
        row: dict[str, Any] = {"arm": arm.name, "options": asdict(arm)}
        for title, steps, figure in (
            ("trained pairs", study.adapt, "test"),
            ("1.5 times the pairs", study.adapt, "harder"),
            ("twice the steps", LONGER * study.adapt, "test"),
            ("both", LONGER * study.adapt, "harder"),
        ):
            row[title] = _paired(study, folder, converged, arm, steps, figure)
        rows.append(row)
    return {
        "study": {**study.fixed(), "seeds": list(study.seeds), "control_rates": list(study.control_rates)},
        "hosts": {
            str(seed): {key: host[key] for key in ("test", "validation", "three_quarters", "harder") if key in host}
            for seed, host in hosts.items()
            if host is not None
        },
        "counted": converged,
        "not_counted": [seed for seed in study.seeds if seed not in converged],
        "rows": rows,
    }


def _counts(host: Mapping[str, Any]) -> bool:
    return host["validation"] >= REACHED and host["validation"] - host["three_quarters"] < STILL


def _paired(
    study: Study, folder: Path, seeds: Sequence[int], arm: Arm, steps: int, figure: str
) -> dict[str, Any] | None:
    pairs = []
    for seed in seeds:
        control = read(folder, Job(seed, _control_of(study, folder, seed), steps))
        operated = read(folder, Job(seed, arm, steps))
        if control is not None and operated is not None:
            pairs.append((control[figure], operated[figure]))
    if not pairs:
        return None
    differences = torch.tensor([operated - control for control, operated in pairs], dtype=torch.float64)
    interval = mean_interval(differences, torch.arange(len(pairs)))
    return {
        "control": mean(control for control, _ in pairs),
        "operated": mean(operated for _, operated in pairs),
        "difference": interval.as_dict(),
        "seeds": len(pairs),
        "each": differences.tolist(),
    }


def _control_of(study: Study, folder: Path, seed: int) -> Arm:
    return _best_control(study, folder, seed, study.adapt)
