"""Damped rotations: the rule written out with matrices, over many tokens, and where they cannot be."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from surgery.errors import UsageError
from surgery.memory import create
from surgery.memory.rotations import phases, turn

DOSE = 0.6


def rotation_matrix(angles: torch.Tensor) -> torch.Tensor:
    """[K / 2] -> the block-diagonal [K, K]."""
    blocks = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles.tolist()]
    return torch.block_diag(*torch.tensor(blocks, dtype=torch.float64))


def written_out(memory, given):
    """Outputs, means and covariances of constant noise per head, Proposition 1 of the paper with A_t = a_t R."""
    batch, tokens, heads, value_dim = given.v.shape
    width, share = memory.geometry.key_dim, heads // given.k.shape[2]
    outputs = torch.zeros_like(given.v)
    means, covariances, dose = {}, {}, memory.dose.double().item()
    for b in range(batch):
        for h in range(heads):
            step = rotation_matrix(dose * memory.rotation[h // share].detach().double())
            l2, p0 = (1 + dose * math.expm1(getattr(memory, name)[h].item()) for name in ("log_l2", "log_p0"))
            mean, covariance = torch.zeros(width, value_dim).double(), p0 * torch.eye(width).double()
            for t in range(tokens):
                if given.mask is not None and not given.mask[b, t]:
                    continue
                if given.reset is not None and given.reset[b, t]:
                    mean, covariance = 0 * mean, p0 * torch.eye(width).double()
                k, q = given.k[b, t, h // share], given.q[b, t, h // share]
                moves = given.log_decay[b, t, h].exp() * step
                mean = moves @ mean
                covariance = dose * moves @ covariance @ moves.T + l2 * torch.eye(width).double()
                r2 = 1 / given.write[b, t, h] - k @ k
                gain = covariance @ k / (r2 + k @ covariance @ k)
                mean = mean + torch.outer(gain, given.v[b, t, h] - mean.T @ k)
                covariance = covariance - torch.outer(gain, k @ covariance)
                outputs[b, t, h] = mean.T @ q
            means[b, h], covariances[b, h] = mean, covariance
    return outputs, means, covariances


@pytest.mark.parametrize("form", ("reference", "chunked"))
def test_the_memory_turns_as_its_dynamics_say(geometry, inputs, moved, form, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", form)
    memory = moved(create("bayesian", geometry("delta"), noise="constant", rotations=True), DOSE).double()
    with torch.no_grad():
        memory.rotation.mul_(5)  # more than a full turn within the sequence
    given = inputs(memory.geometry, 40, padded=True, packed=True)
    o, state = memory(given)
    outputs, means, covariances = written_out(memory, given)
    real = given.mask[..., None, None]
    torch.testing.assert_close(o * real, outputs * real, rtol=1e-9, atol=1e-9)
    for (b, h), mean in means.items():
        torch.testing.assert_close(state[b, h, :, :6], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state[b, h, :, 6:14], covariances[b, h], rtol=1e-9, atol=1e-9)


def test_angles_that_are_learned_from_0(geometry, inputs):
    memory = create("bayesian", geometry("delta"), rotations=True)
    memory.dose.fill_(DOSE)
    assert not memory.rotation.any() and memory.rotation.shape == (2, 4)
    o, _ = memory(inputs(memory.geometry, 30))
    (gradient,) = torch.autograd.grad((torch.sin(torch.arange(o.numel())).view_as(o) * o).sum(), memory.rotation)
    assert gradient.abs().min() > 1e-6


def test_a_turn_of_many_tokens_keeps_its_digits():
    angle = torch.tensor([[0.7, 1e-3]])
    phase = phases(angle, 200_000, None)
    assert phase.shape == (1, 200_000, 1, 2) and phase.min() >= 0 and phase.max() < 2 * math.pi
    exact = [math.fmod(200_000 * x, 2 * math.pi) for x in angle[0].double().tolist()]
    torch.testing.assert_close(phase[0, -1, 0], torch.tensor(exact, dtype=torch.float64), rtol=0, atol=1e-8)
    mask = torch.tensor([[False, True, False, True]])
    torch.testing.assert_close(phases(angle, 4, mask)[0, :, 0, 0], torch.tensor([0, 1, 1, 2]) * angle[0, 0].double())


def test_half_precision_inputs_keep_their_type():
    x = torch.randn(2, 3, 1, 8, dtype=torch.bfloat16)
    turned = turn(x, torch.zeros(1, 3, 1, 4, dtype=torch.float64))
    assert turned.dtype == torch.bfloat16 and turned.equal(x)
    torch.testing.assert_close(turn(x, torch.full((1, 3, 1, 4), math.pi).double()), -x)


def test_the_gain_is_of_the_turned_memory(geometry, inputs, moved):
    """A write of zero values turns the read at its key into 1 - gain of what the turned, decayed memory gives there."""
    memory = moved(create("bayesian", geometry("delta"), noise="constant", rotations=True), DOSE).double()
    given = inputs(memory.geometry, 20)
    _, state = memory(given.span(slice(0, 19)))
    last = given.span(slice(19, None))
    last = dataclasses.replace(last, q=last.k, v=torch.zeros_like(last.v))
    before = dataclasses.replace(last, write=torch.full_like(last.write, 1e-12))  # writes nothing
    share = memory(last, state)[0] / memory(before, state)[0]
    gain = memory.write_diagnostics(last, state)["gain"].double()
    torch.testing.assert_close(gain, 1 - share.mean((0, 1, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    (({"key_dim": 7}, "keys of an odd width"), ({"channel_decay": True}, "decays each key channel on its own")),
)
def test_hosts_whose_keys_cannot_rotate_are_refused(geometry, changes, says):
    with pytest.raises(UsageError, match=says) as error:
        create("bayesian", geometry("delta", **changes), rotations=True)
    assert "memory.rotations" in str(error.value) and len(str(error.value).splitlines()) == 1
    create("bayesian", geometry("delta", **changes), rotations=False)
