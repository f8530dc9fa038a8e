"""Compile what the kernels' host code launches for a GPU that need not be there: ``compile_for_gpus.py CAPABILITY
[PROBLEM ...]``, all problems but ``slow`` if none is named.

The interpreter runs kernels that the compiler refuses (a variable that changes its shape in a loop, say) and knows no
limit of shared memory. Prints a line of JSON a kernel. It needs Triton's compiler: TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.runtime.jit as jit
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surgery.kernels import triton_convolution, triton_gated_norm
from surgery.kernels.additive import triton_chunks as additive
from surgery.kernels.additive import triton_decode as additive_decode
from surgery.kernels.additive import triton_states as additive_states
from surgery.kernels.bayesian import triton_covariance_backward as bayesian_covariance
from surgery.kernels.bayesian import triton_decode as bayesian_decode
from surgery.kernels.bayesian.triton import bayesian
from surgery.kernels.delta import triton_chunks as delta
from surgery.kernels.delta import triton_decode as delta_decode
from surgery.kernels.delta import triton_states as delta_states
from surgery.kernels.palimpsa import triton_common as palimpsa_common
from surgery.kernels.palimpsa.triton import palimpsa, palimpsa_step

SHARED = {80: 166912, 89: 101376, 90: 232448}  # bytes that a program may take, by compute capability
SLOW = {"adjoint_kernel"}  # takes most of a minute for all shapes
NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.bool: "i1",
}


def launch(kernel, capability: int, arguments: tuple, options: dict) -> None:
    """What a launch compiles, as Triton specialises it: by dtypes, constants, and what 16 divides."""
    options = {key: value for key, value in options.items() if key not in ("grid", "warmup")}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    given |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + NAMES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif value is None or parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if not isinstance(value, float) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    known = (kernel.__name__, repr(signature), repr(sorted(constants.items())), repr(options))
    if known in SEEN or (kernel.__name__ in SLOW and PROBLEM[0] != "slow"):
        return
    SEEN.add(known)
    told = {"kernel": kernel.__name__, "options": repr(options), "problem": PROBLEM[0]}
    try:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        told |= {"shared": compiled.metadata.shared, "limit": SHARED[capability]}
    except Exception as error:
        told["failed"] = f"{type(error).__name__}: {str(error)[-300:]}"
    print(json.dumps(told), flush=True)


SEEN: set[tuple] = set()
PROBLEM = [""]


def problem(length: int, heads: int, groups: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """The launches of two chunks of ``length`` tokens, each way, and of a step."""
    chunks = (1, 2, length)
    q, k = (torch.randn(*chunks, groups, key_dim).to(dtype) for _ in range(2))
    v = torch.randn(*chunks, heads, value_dim).to(dtype)
    by_head = torch.rand(1, 2, heads, length)
    total, whole = by_head.double(), torch.rand(1, 2, heads)
    gates = (by_head, total, by_head, by_head, whole)
    state = torch.zeros(1, heads, key_dim, value_dim)
    write, sums = by_head.transpose(2, 3).contiguous(), total.transpose(2, 3).contiguous()
    if dtype == torch.float32:
        square, met = torch.rand(1, 2, heads, length, length), torch.rand(1, 2, heads, key_dim, value_dim)
        delta_states.scan(square, by_head, v, k, by_head, by_head, whole, state)
        corrections = torch.rand(1, 2, heads, length, value_dim)
        delta_states.adjoint(square, by_head, corrections, k, by_head, by_head, whole, met, state)
        additive_states.states(k, v, write, whole, state.mT.contiguous(), False)
    else:
        _, _, *kept = delta.forward(q, k, v, *gates, state)
        delta.backward(v, state, q, k, v, *gates, *kept)
        if max(key_dim, value_dim) <= 128:
            met = torch.rand(1, 2, heads, value_dim, key_dim).to(dtype)
            additive_states.states(k, v, write, whole, state.mT.contiguous(), False)
            additive.output(q, k, v, write, met, sums)
            additive.gradients(q, k, v, write, v, met, met, sums)
    tokens = {"q": q, "k": k, "v": v, "b": torch.rand(v.shape).to(dtype), "log_decay": write}
    tokens = {name: x.flatten(1, 2).repeat(1, 9, *[1] * (x.dim() - 3)).requires_grad_() for name, x in tokens.items()}
    o = palimpsa(**tokens, prior=torch.ones(heads))[0]
    torch.autograd.grad(o.sum(), list(tokens.values()))
    with torch.no_grad():
        one = {name: x[:, :1].contiguous() for name, x in tokens.items()}
        palimpsa_step(**one, prior=torch.ones(heads), state=torch.rand(1, 2, heads, value_dim, key_dim))
        gate = torch.rand(1, 1, heads)
        values = (gate, gate, gate, torch.ones(heads), gate, gate, gate, gate)
        memory = torch.rand(1, heads, key_dim, value_dim + key_dim)
        given = one["q"], one["k"], one["v"]
        bayesian_decode.step(*given, values, memory, memory)
        delta_decode.step(*given, gate, gate, state, reset := torch.zeros(1, 1, dtype=torch.bool), True)
        delta_decode.step(*given, gate[..., None].expand(-1, -1, -1, key_dim), gate, state, None, True)
        additive_decode.step(*given, gate, gate, state.mT, reset, False)


def mixers(dtype: torch.dtype) -> None:
    """The convolution, plain and of heads of two widths, and the gated norm with a skip and by heads."""
    reset = torch.zeros(1, 70, dtype=torch.bool)
    for channels, heads in ((150, None), (768, triton_convolution.Heads(1, 256, 0.1, 1e-6)),
                            (232, triton_convolution.Heads(3, 32, 0.1, 1e-6))):
        x, weight = torch.randn(1, 70, channels).to(dtype), torch.randn(channels, 4)
        outs = triton_convolution.forward(x, weight, None, reset, heads)
        triton_convolution.backward(outs, x, weight, None, reset, heads)
    x, weight = torch.randn(1, 70, 512).to(dtype), torch.randn(512)
    for skip, groups in (((x, weight), 1), ((None, None), 4)):
        given = (x, x, weight, *skip, groups, 1e-5, False, True)
        triton_gated_norm.forward(*given)
        triton_gated_norm.backward(x, *given)


def slow() -> None:
    """Palimpsa's backward kernel, and all of the Bayesian rule's, as a Gated DeltaNet and as a Mamba2 host has it."""
    problem(64, 2, 1, 128, 64, torch.bfloat16)
    for dtype, key_dim in ((torch.bfloat16, 128), (torch.float32, 64)):
        q, k = (torch.randn(1, 130, 1, key_dim).to(dtype).requires_grad_() for _ in range(2))
        v = torch.randn(1, 130, 2, key_dim).to(dtype).requires_grad_()
        gates = [torch.rand(1, 130, 2, requires_grad=True) for _ in range(7)]
        shared = [torch.ones(2, requires_grad=True) for _ in range(2)]
        names = ("decay", "cov_decay_sqrt", "process_noise", "observation_noise", "erase", "shrink", "write")
        given = {"q": q, "k": k, "v": v, **dict(zip(names, gates, strict=True))}
        given |= {"precision": shared[0], "initial_covariance": shared[1]}
        for unit_gain in (True, False):
            o = bayesian(**given, unit_gain=unit_gain)[0]
            torch.autograd.grad(o.sum(), list(given.values()), allow_unused=True)
            with torch.no_grad():
                bayesian(**given, unit_gain=unit_gain)


PROBLEMS = {
    "mixers": lambda: mixers(torch.bfloat16),
    "mamba2": lambda: problem(64, 2, 1, 128, 64, torch.bfloat16),
    "float32": lambda: problem(64, 2, 2, 128, 128, torch.float32),
    "gdn": lambda: problem(64, 1, 1, 256, 256, torch.bfloat16),
    "short": lambda: problem(16, 2, 1, 24, 160, torch.bfloat16),
    "slow": slow,
}


def main(capability: int, *names: str) -> None:
    for module in (palimpsa_common, bayesian_covariance):
        module.shared_memory = lambda device: SHARED[capability]
    jit.JITFunction.run = lambda kernel, *given, **options: launch(kernel, capability, given, options)
    for name in names or [name for name in PROBLEMS if name != "slow"]:
        PROBLEM[0] = name
        PROBLEMS[name]()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
