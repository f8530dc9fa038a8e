"""The adaptation losses, one implementation of each.

Every function returns a *sum* over tokens in float32. The caller divides by a count taken over the whole batch of an
optimizer step, all devices and micro-batches together, so that splitting a batch changes nothing but rounding.

    N  tokens, flattened over batch and time        D  hidden width        S  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.data.packing import IGNORED

SMOOTHING = 1e-3  # of the teacher's norm: below it a difference is rounding, and its gradient fades out


@dataclass(frozen=True)
class Head:
    """An output head: [N, D] -> logits [N, S] in float32, as the host's own forward pass makes them.

    Attributes:
        projection: the linear map, ``weight`` [S, D].
        scale: the host's factor on the logits.
        softcap: logits are softcap tanh(logits / softcap); None: they are not.
    """

    projection: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.projection(hidden).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.projection.parameters() if parameter.requires_grad]


def relative_l2(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum over tokens of the L2 norm of ``student - teacher`` relative to the teacher's norm, smoothed near zero.

    With r = |student - teacher| / |teacher| a token counts sqrt(r^2 + e^2) - e, e = ``SMOOTHING``; the form below has
    no cancellation and is exactly zero, with a zero gradient, where both are equal.

    Args:
        student, teacher: [..., D]; the teacher gets no gradient.
        valid: [...] bool, tokens that count; None: all.
    """
    target = teacher.detach().float()
    difference = student.float() - target
    floor = torch.finfo(torch.float32).tiny
    ratio = difference.square().sum(-1) / target.square().sum(-1).clamp_min(floor)
    token = ratio / ((ratio + SMOOTHING**2).sqrt() + SMOOTHING)
    return _masked_sum(token, valid)


def squared_difference(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum over tokens and channels of (student - teacher)^2; [..., D] each, the teacher gets no gradient."""
    return _masked_sum((student.float() - teacher.detach().float()).square().sum(-1), valid)


def squared(hidden: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum over tokens and channels of hidden^2."""
    return _masked_sum(hidden.detach().float().square().sum(-1), valid)


def cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Sum of the next-token cross-entropy in nats, logits made a chunk of tokens at a time.

    Args:
        hidden: [..., D], what the head reads.
        targets: [...] int64, the token that follows, ``IGNORED`` where none is scored.
        head: the output head; its trained parameters get a gradient.
    """
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    scored = wanted != IGNORED
    # what is not scored is left out, except in a recorded CUDA graph, whose shapes are fixed: there it counts nothing
    if not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()) and not bool(scored.all()):
        flat, wanted = flat[scored], wanted[scored]

    def loss(part: Tensor, start: int, stop: int) -> Tensor:
        return F.cross_entropy(head(part), wanted[start:stop], reduction="sum", ignore_index=IGNORED)

    return _chunked(loss, flat, head)


def kl_divergence(
    student: Tensor,
    teacher: Tensor,
    head: Head,
    teacher_head: Head | None = None,
    *,
    temperature: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Sum of T^2 KL(teacher || student) in nats, the forward divergence with both softmaxes at ``temperature`` T.

    The divergence's gradient with respect to the logits shrinks as 1 / T^2; the factor keeps its size, so that a
    learning rate and the weight of other terms suit every temperature (Hinton, Vinyals and Dean 2015, section 2). At
    T = 1 it is the divergence itself. Neither model's logits ever stand for all tokens at once.

    Args:
        student, teacher: [..., D], what the heads read; the teacher gets no gradient.
        head, teacher_head: the two heads; None: the same one.
        valid: [...] bool, tokens that count; None: all.
    """
    own, other = student.flatten(0, -2), teacher.detach().flatten(0, -2)
    if valid is not None and not bool(valid.all()):
        keep = valid.flatten()
        own, other = own[keep], other[keep]
    reference = teacher_head or head

    def loss(part: Tensor, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            target = F.log_softmax(reference(other[start:stop]) / temperature, dim=-1)
        prediction = F.log_softmax(head(part) / temperature, dim=-1)
        return F.kl_div(prediction, target, reduction="sum", log_target=True)

    divergence = _chunked(loss, own, head)
    return divergence if temperature == 1.0 else temperature**2 * divergence


def _masked_sum(token: Tensor, valid: Tensor | None) -> Tensor:
    return (token if valid is None else token.masked_fill(~valid, 0.0)).sum()


def _chunked(loss: Callable[[Tensor, int, int], Tensor], hidden: Tensor, head: Head) -> Tensor:
    # logits of one chunk: 32 MB in float32 on a CPU, 256 MB on a GPU, of which a handful are alive at once
    size = max(1, (2**26 if hidden.is_cuda else 2**23) // head.projection.weight.shape[0])
    return _ChunkedLoss.apply(loss, size, hidden, *head.trained)


class _ChunkedLoss(torch.autograd.Function):
    """A loss summed over chunks of tokens, whose gradients are taken chunk by chunk in the forward pass: the logits
    of a chunk are made once and dropped before the next."""

    @staticmethod
    def forward(ctx, loss, size: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
        wants_hidden, wants = ctx.needs_input_grad[2], any(ctx.needs_input_grad[2:])
        trained = [p for p, needed in zip(parameters, ctx.needs_input_grad[3:], strict=True) if needed]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if wants_hidden else None
        sums = [torch.zeros_like(p) for p in trained]
        for start in range(0, hidden.shape[0], size):
            stop = min(start + size, hidden.shape[0])
            with torch.set_grad_enabled(wants):
                part = hidden[start:stop].detach().requires_grad_(wants_hidden)
                value = loss(part, start, stop)
            total += value.detach()
            if not wants:
                continue
            grads = torch.autograd.grad(value, ([part] if wants_hidden else []) + trained)
            if wants_hidden:
                gradient[start:stop] = grads[0]
                grads = grads[1:]
            for accumulated, grad in zip(sums, grads, strict=True):
                accumulated += grad
        ctx.save_for_backward(*([gradient] if wants_hidden else []), *sums)
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) * scale if ctx.needs_input_grad[2] else None
        rest = [saved.pop(0) * scale if needed else None for needed in ctx.needs_input_grad[3:]]
        return None, None, hidden, *rest
