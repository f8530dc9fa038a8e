"""Compiled mixers compute what they compute otherwise, and only where they are asked to."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from surgery.errors import UsageError
from surgery.graft import GatedDeltaGraft, Mamba2Graft, base, compiling
from surgery.memory import MemoryGeometry, create

GRAFTS = {"additive": Mamba2Graft, "delta": GatedDeltaGraft}


def make(style: str, rule: str = "host", key_dim: int = 8):
    return GRAFTS[style](create(rule, MemoryGeometry(style, 24, 4, 2, key_dim, 12)))


def exact(style: str, rule: str = "host"):
    """In float64, in which two orders of the same sums agree far below any fault."""
    return make(style, rule).double()


def normal(*shape: int, **options):
    return torch.randn(*shape, dtype=torch.float64, **options)


@pytest.fixture
def compilations(monkeypatch):
    """torch.compile without a code generator, which counts the graphs that it is given."""
    graphs = []

    def backend(graph, inputs, options=None):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: original(function, backend=backend, **options))
    forget()
    yield graphs
    forget()


def forget():
    compiling.compiled.cache_clear()
    compiling._verdicts.clear()
    torch.compiler.reset()


def gradients(graft, hidden, reset, mask=None, weight=1.0):
    hidden = hidden.clone().requires_grad_()
    out = graft(1 * hidden, None, mask, reset)  # as in a model, where no layer's input is a leaf
    parameters = [parameter for parameter in graft.parameters() if parameter.requires_grad]
    return out, *torch.autograd.grad((out * weight).sum(), [hidden, *parameters])


@pytest.mark.parametrize("style", GRAFTS)
def test_compiled_equals_eager(compilations, style):
    layers = [exact(style) for _ in range(3)]
    hidden, reset = normal(2, 37, 24), torch.rand(2, 37) < 0.1
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[1, :5] = False
    for graft in layers:
        for options in ((reset, None), (None, mask)):
            expected = gradients(graft, hidden, *options)
            with compiling.compiled_mixers():
                found = gradients(graft, hidden, *options)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
    # all layers share a compilation for packed and one for padded batches, each in one piece
    assert len(compilations) == 2


def test_within_activation_checkpointing(compilations):
    graft, hidden, reset = exact("delta"), normal(2, 17, 24, requires_grad=True), torch.rand(2, 17) < 0.1
    expected = torch.autograd.grad(graft(hidden, None, None, reset).square().sum(), [hidden, *graft.parameters()])
    with compiling.compiled_mixers():
        out = checkpoint(graft, 1 * hidden, None, None, reset, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), [hidden, *graft.parameters()])
    assert len(compilations) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", ["output", "gradient", "nan"])
def test_a_compilation_that_errs_is_not_used(monkeypatch, wrong):
    """As when a compiler reads a buffer wrongly; it is asked once for all mixers alike, and again for others."""
    made = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def compiled(function):
        def run(graft, hidden, *rest):
            made.append(hidden.requires_grad)
            out = function(graft, Doubled.apply(hidden) if wrong == "gradient" else hidden, *rest)
            return out if wrong == "gradient" else out * (1.5 if wrong == "output" else torch.nan)

        return run

    monkeypatch.setattr(compiling, "compiled", compiled)
    monkeypatch.setattr(compiling, "_verdicts", {})
    hidden, reset = normal(2, 9, 24), torch.rand(2, 9) < 0.2
    layers = [exact("delta"), exact("delta")]
    state = torch.random.get_rng_state()
    with compiling.compiled_mixers(), pytest.warns(UserWarning, match=r"GatedDeltaGraft, compiled, .*runs uncompiled"):
        found = [gradients(graft, hidden, reset) for graft in layers]
        again = gradients(layers[0], hidden, reset)
    assert made == [True]
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, graft in zip((*found, again), (*layers, layers[0]), strict=True):
        for x, y in zip(one, gradients(graft, hidden, reset), strict=True):
            torch.testing.assert_close(x, y)
    with compiling.compiled_mixers(), torch.no_grad():
        if wrong == "gradient":  # of which there is none now
            layers[0](hidden)
        else:
            with pytest.warns(UserWarning):
                layers[0](hidden)
    assert len(made) == 2 + (wrong == "gradient")


@pytest.mark.parametrize("rows", [1.0, 0.0])
def test_norms_are_compared_too(monkeypatch, rows):
    """And what is zero throughout agrees with itself."""
    monkeypatch.setattr(compiling, "compiled", lambda function: lambda *given: function(*given) * 1.5)
    monkeypatch.setattr(compiling, "_verdicts", {})
    norm, x = base.RMSNorm(24, 1e-6).requires_grad_(False), rows * normal(2, 9, 24)
    with compiling.compiled_mixers():
        if rows:
            with pytest.warns(UserWarning, match=r"RMSNorm, compiled, is 5.0e-01 off"):
                found = norm(x)
        else:
            found = norm(x)
    assert torch.equal(found, norm(x)) and list(compiling._verdicts.values()) == [not rows]


@pytest.mark.parametrize("wrong", [False, True])
def test_what_rounding_makes_is_no_fault(monkeypatch, wrong):
    """A compilation that rounds in another order moves this output by more than a tenth; a fault moves it further."""

    def steep(module, x):
        return (1000 * x).sin()

    def compiled(function):
        return lambda module, x: function(module, x * (1 + 2.0**-12)) * (3.0 if wrong else 1.0)

    monkeypatch.setattr(compiling, "compiled", compiled)
    monkeypatch.setattr(compiling, "_verdicts", {})
    x = torch.randn(2, 9, 24)
    off = (steep(None, x * (1 + 2.0**-12)) - steep(None, x)).norm() / steep(None, x).norm()
    assert off > compiling.TOLERANCE
    with compiling.compiled_mixers():
        if wrong:
            with pytest.warns(UserWarning, match="off what it compiles, in the output"):
                compiling.run(steep, base.RMSNorm(24, 1e-6), (), x)
        else:
            compiling.run(steep, base.RMSNorm(24, 1e-6), (), x)
    assert list(compiling._verdicts.values()) == [not wrong]


@pytest.mark.parametrize("rest_is_wrong", [False, True])
def test_what_is_not_finite_hides_no_fault(monkeypatch, rest_is_wrong):
    def function(module, x):
        return torch.where(torch.arange(24) == 3, torch.inf * x, x)

    wrong = 1.0 - 8.0 * rest_is_wrong * (torch.arange(24) != 3)
    monkeypatch.setattr(compiling, "compiled", lambda function: lambda module, x: function(module, x) * wrong)
    monkeypatch.setattr(compiling, "_verdicts", {})
    norm, x = base.RMSNorm(24, 1e-6).requires_grad_(False), torch.randn(2, 9, 24)
    with compiling.compiled_mixers():
        if rest_is_wrong:
            with pytest.warns(UserWarning, match="off what it compiles, in the output"):
                compiling.run(function, norm, (), x)
        else:
            compiling.run(function, norm, (), x)


def test_small_gradients_are_compared_too(monkeypatch):
    """Of what a memory adds, beside projections with gradients a million times as large."""
    graft, hidden = exact("additive", "palimpsa"), normal(2, 9, 24)
    graft.memory.dose.fill_(1.0)

    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return -grad

    def compiled(function):
        def run(module, *given):
            kept = module.memory.b_scale
            del module.memory.b_scale
            module.memory.b_scale = Negated.apply(kept)
            try:
                return function(module, *given)
            finally:
                del module.memory.b_scale
                module.memory.b_scale = kept

        return run

    monkeypatch.setattr(compiling, "compiled", compiled)
    monkeypatch.setattr(compiling, "_verdicts", {})
    monkeypatch.setattr(type(graft.memory), "compiles", lambda self, device: True)
    with compiling.compiled_mixers(), pytest.warns(UserWarning, match="in the gradient of memory.b_scale"):
        graft(1 * hidden.requires_grad_())


def test_a_gradient_that_is_lost(monkeypatch):
    """As torch 2.11 loses those of an autograd.Function that returns the result of an idle conversion."""
    monkeypatch.setattr(compiling, "compiled", lambda function: lambda m, x, *r: function(m, x.detach() + 0 * x, *r))
    monkeypatch.setattr(compiling, "_verdicts", {})
    with compiling.compiled_mixers(), pytest.warns(UserWarning, match=r"off .* in the gradient of its input"):
        exact("additive")(normal(2, 9, 24).requires_grad_() * 1)


def test_what_memory_cannot_hold_twice_is_not_compared(monkeypatch):
    graft, hidden = exact("delta"), normal(2, 9, 24)
    written = base._mixed

    def mixed(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(base, "_mixed", mixed)
    monkeypatch.setattr(compiling, "compiled", lambda function: written)
    monkeypatch.setattr(compiling, "_verdicts", {})
    with compiling.compiled_mixers(), pytest.warns(UserWarning, match="out of GPU memory"):
        out = graft(hidden)
    assert torch.equal(out, graft(hidden))


def test_what_is_not_compiled(compilations):
    hidden = normal(1, 9, 24)
    graft = exact("additive")
    graft(hidden)
    with compiling.compiled_mixers():
        with compiling.compiled_mixers(False):
            graft(hidden)
        graft(hidden[:, :1])
        exact("additive", "palimpsa")(hidden)  # its form on a CPU is a loop
        seen = []
        handle = graft.memory.register_forward_hook(lambda *_: seen.append(True))
        graft(hidden)
        handle.remove()
        assert seen and not compilations
        graft(hidden)
    assert len(compilations) == 1


HOOKS = {
    "forward": lambda module, run: module.register_forward_hook(lambda _, inputs, out: run(out)),
    "forward-pre": lambda module, run: module.register_forward_pre_hook(lambda _, inputs: (run(inputs[0]),)),
    "backward": lambda module, run: module.register_full_backward_hook(lambda _, dx, dy: (run(dx[0]),)),
    "backward-pre": lambda module, run: module.register_full_backward_pre_hook(lambda _, dy: (run(dy[0]),)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_projections_are_called(compilations, kind):
    """Also those that come when the mixer has been compiled."""
    graft, hidden = exact("delta"), normal(2, 17, 24)
    with compiling.compiled_mixers():
        before = gradients(graft, hidden, None)
    assert len(compilations) == 1
    handle = HOOKS[kind](graft.k_proj, lambda x: 1.5 * x)
    expected = gradients(graft, hidden, None)
    assert any(not torch.allclose(one, other) for one, other in zip(before, expected, strict=True))
    with compiling.compiled_mixers():
        found = gradients(graft, hidden, None)
    handle.remove()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["forward", "forward-pre"])
def test_hooks_inside_a_compiled_model(kind):
    graft, hidden = exact("delta"), normal(2, 17, 24)
    HOOKS[kind](graft.k_proj, lambda x: 1.5 * x)
    expected = gradients(graft, hidden, None)
    torch.compiler.reset()
    found = gradients(torch.compile(graft, backend="eager"), hidden, None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_where_training_compiles(monkeypatch):
    monkeypatch.setattr(compiling, "TRITON", True)
    monkeypatch.delenv("SURGERY_COMPILE", raising=False)
    assert compiling.wanted("cuda") and not compiling.wanted("cpu")
    assert "SURGERY_COMPILE=0" in compiling.remark("cuda") and compiling.remark("cpu") is None
    monkeypatch.setattr(compiling, "TRITON", False)
    assert not compiling.wanted("cuda:1")
    assert "C compiler" in compiling.remark("cuda:1") and compiling.remark("cpu") is None
    monkeypatch.setattr(compiling, "TRITON", True)
    monkeypatch.setenv("SURGERY_COMPILE", "0")
    assert not compiling.wanted("cuda") and compiling.remark("cuda") is None
    monkeypatch.setenv("SURGERY_COMPILE", "1")
    assert compiling.wanted("cuda")
    monkeypatch.setenv("SURGERY_COMPILE", "yes")
    with pytest.raises(UsageError, match="SURGERY_COMPILE=yes: choose 0 or 1"):
        compiling.wanted("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("style", "rule", "kernels", "key_dim"),
    [
        ("additive", "host", "", 8), ("additive", "host", "chunked", 8), ("additive", "palimpsa", "", 8),
        ("delta", "host", "triton", 8), ("delta", "host", "", 64), ("delta", "host", "chunked", 8),
        ("delta", "bayesian", "", 8), ("delta", "bayesian", "", 64),
    ],
)
def test_compiled_on_a_gpu(monkeypatch, style, rule, kernels, key_dim):
    """Inductor's kernels under bfloat16 autocast, against the float32 mixer: no further off than the eager mixer."""
    monkeypatch.setenv("SURGERY_KERNELS", kernels)
    graft = make(style, rule, key_dim).cuda()
    graft.memory.dose.fill_(1.0)
    hidden, reset = torch.randn(2, 333, 24, device="cuda"), torch.rand(2, 333, device="cuda") < 0.02
    weight = torch.randn(2, 333, 24, device="cuda")
    expected = gradients(graft, hidden, reset, weight=weight)
    with torch.autocast("cuda", torch.bfloat16):
        eager = gradients(graft, hidden, reset, weight=weight)
        with compiling.compiled_mixers():
            found = gradients(graft, hidden, reset, weight=weight)
    names = ["output", "input", *(name for name, p in graft.named_parameters() if p.requires_grad)]
    for name, one, two, exact in zip(names, found, eager, expected, strict=True):
        error, usual = ((x.float() - exact).norm() / exact.norm() for x in (one, two))
        assert error < 2 * usual + 1e-2, (name, error, usual)
