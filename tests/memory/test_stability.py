"""The Bayesian rule under gates made to hurt: nothing decays, noise from 1e-6 to 1e6, repeated and near parallel keys.

The state is carried from segment to segment, with gradients inside each. Needed: finite outputs, states and gradients;
gains from 0 to the host's own or 1; no eigenvalue of P below -8 eps K times the largest.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from surgery.memory import MemoryGeometry, MemoryInputs, create

K, V, H, D = 16, 8, 4, 16
KEYS = ("random", "repeated", "parallel", "pair")
STEPS = {"half": 0.5, "near 0": 1e-6, "near 1": 1 - 1e-7, "mixed": None}


def keys(kind: str, tokens: int) -> torch.Tensor:
    """[1, T, H, K] unit keys; a pair is one key and others almost it, in turn."""
    base, free = F.normalize(torch.randn(K), dim=0), torch.randn(1, tokens, H, K)
    made = {
        "random": lambda: free,
        "repeated": lambda: base.expand(1, tokens, H, K),
        "parallel": lambda: base + 1e-3 * free,
        "pair": lambda: torch.where((torch.arange(tokens) % 2 == 0)[:, None, None], base, base + 1e-2 * free),
    }[kind]()
    return F.normalize(made, dim=-1)


def run(memory, kind, step, dtype, segments, tokens, device="cpu"):
    """Carry a state through ``segments`` and assert at each what must hold."""
    state, eps = None, torch.finfo(torch.float32).eps
    for _ in range(segments):
        k = keys(kind, tokens).to(device, dtype)
        write = torch.rand(1, tokens, H) if STEPS[step] is None else torch.full((1, tokens, H), STEPS[step])
        leaves = [k.clone().requires_grad_(), torch.randn(1, tokens, H, V).to(device, dtype).requires_grad_()]
        leaves.append(write.to(device).requires_grad_())
        hidden = torch.randn(1, tokens, D).to(device, dtype)
        given = MemoryInputs(hidden, k, leaves[0], leaves[1], torch.zeros(1, tokens, H, device=device), leaves[2])
        if state is not None:
            gain = memory.write_diagnostics(given, state)["gain"]
            host = (write[:, 0].to(device) * k[:, 0].float().square().sum(-1)).amax()
            assert (gain >= 0).all() and (gain <= torch.maximum(host, torch.ones_like(host)) + 1e-5).all()
        o, state = memory(given, state)
        memory.zero_grad()
        o.float().square().mean().backward()
        state = state.detach()
        assert torch.isfinite(o).all() and torch.isfinite(state).all()
        for tensor in (*leaves, *memory.parameters()):
            assert tensor.grad is None or torch.isfinite(tensor.grad).all()
        values = torch.linalg.eigvalsh(state[..., V : V + K].double())
        assert (values[..., 0] >= -8 * eps * K * values[..., -1]).all()
    return state


def made(noise, noise_from, level):
    memory = create("bayesian", MemoryGeometry("delta", D, H, H, K, V), noise=noise, noise_from=noise_from)
    with torch.no_grad():
        memory.dose.fill_(1.0)
        getattr(memory, "log_l2" if noise == "constant" else "log_nu").fill_(level)
        if noise_from == "token":
            memory.noise_proj.normal_(std=3.0)
    return memory


CASES = list(itertools.product(("constant", "restoring"), ("head", "token"), (-13.8, 0.0, 13.8)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("noise", "noise_from", "level"), CASES)
def test_gates_made_to_hurt(noise, noise_from, level, dtype):
    for kind, step in itertools.product(KEYS, STEPS):
        run(made(noise, noise_from, level), kind, step, dtype, segments=2, tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "noise_from"), list(itertools.product(("constant", "restoring"), ("head", "token"))))
def test_a_million_steps(noise, noise_from):
    """In segments of 4096, as a long text is read; the kinds of keys and steps take turns."""
    memory = made(noise, noise_from, 0.0)
    for kind, step in itertools.product(("repeated", "pair"), ("near 1", "half")):
        run(memory, kind, step, torch.float32, segments=62, tokens=4096)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("noise", "noise_from", "level"), CASES)
def test_gates_made_to_hurt_on_a_gpu(noise, noise_from, level, dtype):
    for kind, step in itertools.product(KEYS, STEPS):
        run(made(noise, noise_from, level).cuda(), kind, step, dtype, segments=4, tokens=4096, device="cuda")


def test_constant_noise_keeps_the_papers_gain_until_the_floor_of_the_observation_noise():
    """A repeated unit key with l^2 = r^2 = 1 and nothing forgotten has a gain of 0.618. What was never observed grows
    by 1 a step, and after 2e4 steps the floor of 1e-4 of it passes r^2; the gain falls from there on."""
    memory = made("constant", "head", 0.0)
    tokens, key = 1000, F.normalize(torch.ones(K), dim=0).expand(1, 1000, H, K)
    given = MemoryInputs(
        torch.zeros(1, tokens, D), key, key, torch.zeros(1, tokens, H, V), torch.zeros(1, tokens, H),
        torch.full((1, tokens, H), 0.5),
    )
    gains, state = {}, None
    with torch.no_grad():
        for thousand in range(26):
            _, state = memory(given, state)
            gains[thousand + 1] = memory.write_diagnostics(given, state)["gain"][0].item()
    assert gains[1] == pytest.approx(0.618034, abs=1e-4) and gains[19] == pytest.approx(0.618034, abs=1e-3)
    assert gains[26] < 0.6
