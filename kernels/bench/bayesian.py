"""The Bayesian rule on a GPU: forward, forward and backward, peak memory, decode; beside MesaNet and the gated delta
rule where fla is installed; then each kernel, other layouts of the covariance pass, and torch's chunked form and a
recursion token by token. Every figure is printed to stderr once it is known, the slowest to get last: fla's rules tune
themselves for minutes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import timing
from .timing import DTYPES, Shape


class Stored(NamedTuple):
    """Public kernels on one H200 at the same shape, bf16: milliseconds, and MiB; None where not measured."""

    rule: str
    forward: float
    both: float
    memory: float | None


SHAPES = {
    "GDN-128": Shape(4, 4096, 16, 16, 128, 128),
    "340M": Shape(8, 2048, 4, 4, 256, 256),
    "long": Shape(2, 32768, 8, 8, 128, 256),
    "760M": Shape(4, 4096, 16, 16, 96, 192),
}
STORED = {
    "GDN-128": Stored("MesaNet", 3.29, 8.43, None),
    "760M": Stored("gated delta rule", 0.59, 2.71, 1044.0),
}
# what is aimed at beside the stored figure: forward, forward and backward, memory
TARGETS = {"MesaNet": (1.0, 1.5, None), "gated delta rule": (3.0, 4.0, 2.5)}
DECODE = Shape(64, 1, 16, 16, 128, 128)


def inputs(shape: Shape, dtype: torch.dtype, *, seed: int = 0, requires_grad: bool = False) -> dict[str, Tensor]:
    """Random arguments of ``bayesian``: unit keys, decays from 0.55 to nearly 1, restoring noise at full retention."""
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=timing.DEVICE)

    batch, tokens, heads, groups, key_dim, value_dim = shape
    k = torch.nn.functional.normalize(normal(batch, tokens, groups, key_dim), dim=-1).to(dtype)
    decay = torch.exp(-torch.nn.functional.softplus(2 * normal(batch, tokens, heads) - 4))
    p0 = torch.exp(0.1 * normal(heads))
    noise = p0 * (1 - decay.square())
    square = k.float().square().sum(-1).repeat_interleave(heads // groups, dim=-1)
    strength = normal(batch, tokens, heads).sigmoid()
    one = torch.ones_like(decay)
    arguments = {
        "q": torch.nn.functional.normalize(normal(batch, tokens, groups, key_dim), dim=-1).to(dtype),
        "k": k,
        "v": normal(batch, tokens, heads, value_dim).to(dtype),
        "decay": decay,
        "cov_decay_sqrt": decay.clone(),
        "process_noise": noise,
        "precision": torch.ones(heads, device=timing.DEVICE),
        "observation_noise": torch.maximum((1 / strength - square).clamp(min=0), 1e-4 * p0 - noise),
        "erase": one,
        "shrink": one.clone(),
        "write": one.clone(),
        "initial_covariance": p0,
    }
    return {name: x.requires_grad_(requires_grad) for name, x in arguments.items()}


def _public(name: str, dtype: torch.dtype, milliseconds: int) -> dict[str, dict[str, float | str]]:
    """Forward, and forward and backward where fla runs them, of its rules; empty where it is not installed."""
    shape = SHAPES[name]
    if importlib.util.find_spec("fla") is None:
        return {"public": {}}
    arguments = inputs(shape, dtype)
    q, k = (arguments[name].repeat_interleave(shape.heads // shape.groups, 2) for name in "qk")
    v, g = arguments["v"], arguments["decay"].log()
    beta = torch.rand_like(g)
    rules = {"gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (q, k, v, g, beta))}
    if shape.key_dim == shape.value_dim:  # as MesaNet asks for
        regularisation = torch.full((shape.heads, shape.key_dim), 0.5, device=timing.DEVICE)
        rules["mesa_net"] = ("fla.ops.mesa_net", "chunk_mesa_net", (q, k, v, g, beta, regularisation))
    figures, runs = {}, {}
    for title, (module, function, tensors) in rules.items():
        rule = getattr(importlib.import_module(module), function)
        leaves = [x.detach().requires_grad_() for x in tensors]

        def forward(rule=rule, tensors=tensors):
            with torch.no_grad():
                return rule(*tensors)

        def both(rule=rule, leaves=leaves):
            return torch.autograd.grad(rule(*leaves)[0], leaves, v, allow_unused=True)

        runs |= {f"{title}_forward_ms": forward, f"{title}_forward_backward_ms": both}
    for part in sorted(runs, key=lambda part: "backward" in part):
        try:
            # without the time in which Python starts its kernels, which is longer than some of them take
            clock = timing.median if "backward" in part else timing.graphed
            figures[part] = clock(runs[part], milliseconds)
        except Exception as error:  # the library refuses some of its kernels on some compilers
            figures[part] = f"{type(error).__name__}"
        timing.say(name, {part: figures[part]})
    return {"public": figures}


def _once(run: Callable) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _torch_forms(arguments: dict[str, Tensor]) -> dict[str, float]:
    """Milliseconds, once, of torch's forms: the chunked one, its covariance pass, and the recursion token by token."""
    from surgery.kernels.bayesian import chunked
    from surgery.kernels.bayesian.reference import bayesian as sequential

    fixed = {name: x.detach() for name, x in arguments.items()}
    v, x = fixed["v"], fixed["precision"][:, None, None]
    keys = chunked.expand_heads(fixed["k"].float(), v.shape[2])
    scalars = (fixed[name] for name in ("cov_decay_sqrt", "process_noise", "observation_noise"))
    leaves = [chunked.by_chunk(tensor, chunked.CHUNK).requires_grad_() for tensor in (keys, *scalars)]
    start = chunked.initial_state(v, keys.shape[-1], None, fixed["initial_covariance"], torch.float32)[1]

    def covariance():
        u, gain, _, end = chunked._covariance(*leaves[:3], x, leaves[3], None, start)
        out = u, gain, end
        torch.autograd.grad(out, leaves, out)

    forward, both = timing.both_ways(functools.partial(chunked.bayesian, unit_gain=True), arguments)
    token_by_token, _ = timing.both_ways(functools.partial(sequential, unit_gain=True), arguments)
    runs = {
        "chunked_forward_ms": forward, "chunked_forward_backward_ms": both,
        "chunked_covariance_forward_backward_ms": covariance, "sequential_forward_ms": token_by_token,
    }
    figures = {}
    for name, run in runs.items():
        if name.startswith("chunked"):
            run()
        figures[name] = _once(run)
    return figures


def _kernels(run: Callable, calls: int = 3) -> dict[str, float]:
    """Milliseconds of one call, kernel by kernel, none beside another."""
    from torch.profiler import ProfilerActivity, profile

    from surgery.kernels.bayesian import triton_streams

    usual, triton_streams.SEGMENTS = triton_streams.SEGMENTS, 1
    try:
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
    finally:
        triton_streams.SEGMENTS = usual
    times = {event.key[:60]: event.self_device_time_total / calls / 1e3 for event in recorded.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _layouts(forward: Callable, milliseconds: int) -> dict[str, float]:
    """Milliseconds of the forward pass with the covariance pass laid out otherwise."""
    from surgery.kernels.bayesian import triton_covariance as pass_

    usual, figures = pass_.LAYOUT, {}
    for other in ({}, {"block": 64, "warps": 4}, {"precision": "tf32x3"}):
        pass_.LAYOUT = usual._replace(**other)
        try:
            figures[str(tuple(pass_.LAYOUT))] = timing.median(forward, milliseconds)
        finally:
            pass_.LAYOUT = usual
    return figures


def _one(name: str, dtype: torch.dtype, milliseconds: int) -> dict:
    from surgery.kernels.bayesian.triton import bayesian

    shape = SHAPES[name]
    arguments = inputs(shape, dtype, requires_grad=True)
    forward, both = timing.both_ways(functools.partial(bayesian, unit_gain=True), arguments)
    row = timing.timed(forward, both, milliseconds)
    timing.say(name, row)
    row["shape"] = shape._asdict()
    if name in STORED and dtype == torch.bfloat16:
        theirs = STORED[name]
        row["stored"] = {
            **theirs._asdict(), "forward_ratio": row["forward_ms"] / theirs.forward,
            "both_ratio": row["forward_backward_ms"] / theirs.both,
            "memory_ratio": theirs.memory and row["peak_memory_mib"] / theirs.memory, "targets": TARGETS[theirs.rule],
        }
    return row


def _parts(name: str, dtype: torch.dtype, milliseconds: int) -> dict[str, dict[str, float]]:
    """Each kernel's time; and, of the first shape, other layouts' and torch's forms'."""
    from surgery.kernels.bayesian.triton import bayesian

    arguments = inputs(SHAPES[name], dtype, requires_grad=True)
    forward, both = timing.both_ways(functools.partial(bayesian, unit_gain=True), arguments)
    figures = {"kernels_ms": _kernels(both)}
    timing.say(name, figures["kernels_ms"])
    if name == "GDN-128":
        figures["layouts_ms"] = _layouts(forward, milliseconds // 4)
        timing.say(name, figures["layouts_ms"])
        figures["torch_ms"] = _torch_forms(arguments)
        timing.say(name, figures["torch_ms"])
    return figures


def _decode(dtype: torch.dtype, milliseconds: int) -> dict:
    """One step in place against the time in which M and P could be read and written once at copy bandwidth."""
    from surgery.kernels.bayesian.triton import bayesian_step

    arguments = inputs(DECODE, dtype)
    del arguments["initial_covariance"]
    batch, _, heads, _, key_dim, value_dim = DECODE
    eye = torch.eye(key_dim, device=timing.DEVICE)
    mean = torch.rand(batch, heads, key_dim, value_dim, device=timing.DEVICE)
    state = torch.cat((mean, eye.expand(batch, heads, -1, -1)), -1)
    other = torch.empty_like(state)
    copy = timing.graphed(lambda: other.copy_(state), milliseconds)
    step = timing.graphed(lambda: bayesian_step(**arguments, state=state), milliseconds)
    figures = {"step_ms": step, "copy_ms": copy, "ratio": step / copy}
    timing.say("decode", figures)
    return {"shape": DECODE._asdict(), **figures}


def measure(dtype: str, names: list[str], milliseconds: int, known: Callable[[dict], None]) -> dict:
    """Medians of every shape named, as a JSON-able dictionary; ``known`` gets it whenever it has grown."""
    figures = timing.environment(dtype)
    for name in names:
        figures["shapes"][name] = _one(name, DTYPES[dtype], milliseconds)
        known(figures)
    figures["decode"] = _decode(DTYPES[dtype], milliseconds)
    known(figures)
    for measurement in (_public, _parts):
        for name, row in figures["shapes"].items():
            row |= measurement(name, DTYPES[dtype], milliseconds)
            known(figures)
    return figures


def table(figures: dict) -> str:
    """The figures as text."""
    lines = [
        f"Bayesian on {figures['device']}, {figures['dtype']}, torch {figures['torch']}, triton {figures['triton']}",
        f"{'shape':<10}{'fwd ms':>9}{'fwd+bwd ms':>12}{'MiB':>8}   kernels, ms",
    ]
    for name, row in figures["shapes"].items():
        kernels = ", ".join(f"{name} {value:.3f}" for name, value in row["kernels_ms"].items() if value >= 0.02)
        lines.append(
            f"{name:<10}{row['forward_ms']:>9.3f}{row['forward_backward_ms']:>12.3f}{row['peak_memory_mib']:>8.0f}"
            f"   {kernels}"
        )
        if "stored" in row:
            theirs = row["stored"]
            parts = zip(("forward", "both", "memory"), theirs["targets"], strict=True)
            ratios = [
                f"{part} {theirs[f'{part}_ratio']:.2f} (target {target})" for part, target in parts if target
            ]
            lines.append(f"{'':<10}over {theirs['rule']}'s stored figures: {', '.join(ratios)}")
        for rule, value in row["public"].items():
            lines.append(f"{'':<10}{rule}: {value if isinstance(value, str) else f'{value:.3f}'}")
        for form, value in row.get("torch_ms", {}).items():
            lines.append(f"{'':<10}torch, {form.removesuffix('_ms').replace('_', ' ')}: {value:.1f} ms")
    step = figures["decode"]
    lines.append(
        f"decode {tuple(step['shape'].values())}: {step['step_ms']:.3f} ms, copying M and P {step['copy_ms']:.3f} ms"
        f" ({step['ratio']:.2f} times)"
    )
    return "\n".join(lines)
