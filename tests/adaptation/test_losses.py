"""The losses against plain restatements, and the identities they must keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from surgery.adaptation import losses
from surgery.adaptation.losses import IGNORED


def head_of(weight, scale=1.0, softcap=None):
    projection = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    trained = isinstance(weight, torch.nn.Parameter)
    projection.weight = weight if trained else torch.nn.Parameter(weight, requires_grad=False)
    return losses.Head(projection, scale, softcap)


def test_relative_l2_is_the_smoothed_norm():
    student, teacher = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    valid = torch.rand(3, 5) < 0.7
    expected = 0.0
    for b in range(3):
        for t in range(5):
            if valid[b, t]:
                norm = teacher[b, t].norm()
                d = (student[b, t] - teacher[b, t]).norm()
                eps = 1e-3 * norm
                expected += ((d**2 + eps**2).sqrt() - eps) / norm
    assert losses.relative_l2(student, teacher, valid).item() == pytest.approx(float(expected), rel=1e-5)


def test_relative_l2_of_equal_outputs_is_exactly_zero_with_no_gradient():
    teacher = torch.randn(4, 6)
    student = teacher.clone().requires_grad_()
    loss = losses.relative_l2(student, teacher)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_relative_l2_does_not_amplify_rounding():
    teacher = torch.randn(1, 64)
    near = (teacher * (1 + 1e-7)).requires_grad_()
    far = (teacher * 1.5).requires_grad_()
    losses.relative_l2(near, teacher).backward()
    losses.relative_l2(far, teacher).backward()
    assert near.grad.norm() < 1e-3 * far.grad.norm()


def test_relative_l2_leaves_the_teacher_alone():
    teacher = torch.randn(4, 6, requires_grad=True)
    losses.relative_l2(torch.randn(4, 6, requires_grad=True), teacher).backward()
    assert teacher.grad is None


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_cross_entropy_and_its_gradients(monkeypatch, chunk, softcap):
    tokens, width, vocabulary = 14, 6, 11
    hidden = torch.randn(2, 7, width, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, width))
    targets = torch.randint(vocabulary, (2, 7))
    targets[torch.rand(2, 7) < 0.3] = IGNORED
    head = head_of(weight, scale=0.5, softcap=softcap)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    apply = losses._ChunkedLoss.apply
    sizes = []

    def chunked(loss, size, flat, *parameters):
        sizes.append(flat.shape[0])
        return apply(loss, chunk, flat, *parameters)

    monkeypatch.setattr(losses._ChunkedLoss, "apply", chunked)
    loss = losses.cross_entropy(hidden, targets, head)
    found = torch.autograd.grad(loss, [hidden, weight])
    assert sizes == [int((targets != IGNORED).sum())] and sizes[0] <= tokens
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_is_teacher_to_student(temperature):
    width, vocabulary = 6, 11
    student, teacher = torch.randn(3, 4, width, requires_grad=True), torch.randn(3, 4, width)
    weight, other = torch.randn(vocabulary, width), torch.randn(vocabulary, width)
    valid = torch.rand(3, 4) < 0.6
    p = (F.linear(teacher, other) / temperature).softmax(-1)
    log_q = (F.linear(student, weight) / temperature).log_softmax(-1)
    expected = temperature**2 * ((p * (p.log() - log_q)).sum(-1) * valid).sum()
    loss = losses.kl_divergence(
        student, teacher, head_of(weight), head_of(other), temperature=temperature, valid=valid
    )
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected, student)
    (found,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(found, wanted)


def test_the_kls_gradient_keeps_its_size_at_every_temperature():
    """At a high temperature it tends to (s - t) / vocabulary, of centred logits s and t, whatever the temperature."""
    student, teacher = torch.randn(40, 6), torch.randn(40, 6)
    head = head_of(torch.eye(6))  # hidden states that are the logits
    limit = (student - student.mean(1, keepdim=True) - teacher + teacher.mean(1, keepdim=True)) / 6
    for temperature in (100.0, 300.0):
        given = student.clone().requires_grad_()
        losses.kl_divergence(given, teacher, head, temperature=temperature).backward()
        torch.testing.assert_close(given.grad, limit, rtol=0.05, atol=0.005)


def test_kl_of_equal_hidden_states_is_zero():
    hidden = torch.randn(2, 9, 6)
    student = hidden.clone().requires_grad_()
    loss = losses.kl_divergence(student, hidden, head_of(torch.randn(11, 6)))
    loss.backward()
    assert loss.item() == 0.0
    assert student.grad.abs().max() < 1e-6


def test_kl_is_not_symmetric_in_its_arguments():
    a, b = torch.randn(5, 6), 2 * torch.randn(5, 6)
    head = head_of(torch.randn(11, 6))
    assert losses.kl_divergence(a, b, head).item() != pytest.approx(losses.kl_divergence(b, a, head).item(), rel=1e-3)


def test_no_logits_of_all_tokens_at_once():
    seen = []
    head = head_of(torch.randn(2**20, 2))
    head.projection.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    hidden = torch.randn(20, 2, requires_grad=True)
    losses.kl_divergence(hidden, torch.randn(20, 2), head).backward()
    assert max(seen) == 8 and sum(seen) == 2 * 20


def test_only_the_gradients_that_are_wanted():
    hidden = torch.randn(5, 3, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(7, 3), requires_grad=False)
    losses.cross_entropy(hidden, torch.randint(7, (5,)), head_of(weight)).backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not losses.cross_entropy(hidden, torch.randint(7, (5,)), head_of(weight)).requires_grad


def test_nothing_scored_is_zero_with_a_gradient_of_zero():
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = losses.cross_entropy(hidden, torch.full((2, 3), IGNORED), head_of(torch.randn(7, 4)))
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_squares_count_valid_tokens_only():
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    valid = torch.tensor([[True, False, True], [False, True, True]])
    torch.testing.assert_close(
        losses.squared_difference(student, teacher, valid), ((student - teacher)[valid] ** 2).sum()
    )
    torch.testing.assert_close(losses.squared(teacher, valid), (teacher[valid] ** 2).sum())
