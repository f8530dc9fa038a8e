"""Teacher and student in one model.

Teacher and student differ in the swapped mixers alone as long as everything else is frozen. So there is one model, and
each swapped layer holds both mixers behind a switch; the teacher costs those mixers and no second model. Where shared
weights are trained, or have been, the teacher is a model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from surgery.adaptation.losses import Head
from surgery.checkpoint.reading import Checkpoint
from surgery.hosts import adapter_for, load_model
from surgery.memory import create


class Side(Enum):
    """Which mixer a switched layer runs."""

    STUDENT = "student"
    TEACHER = "teacher"
    BOTH = "both"  # the teacher's output goes on; the student's, on the same input, is kept


class SwitchedMixer(nn.Module):
    """A student's mixer and its teacher's in one place.

    Under ``Side.BOTH`` the student runs on the teacher's input, detached, with gradients even where the caller has
    switched them off, and ``pair`` holds both outputs [B, T, D] until it is taken.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False)
        self.side = Side.STUDENT
        self.pair: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.side is Side.STUDENT:
            return self.student(hidden_states, *args, **kwargs)
        with torch.no_grad():
            target = self.teacher(hidden_states, *args, **kwargs)
        if self.side is Side.BOTH:
            with torch.enable_grad():
                self.pair = self.student(hidden_states.detach(), *args, **kwargs), target
        return target

    def take(self) -> tuple[Tensor, Tensor]:
        """The pair of outputs, once."""
        pair, self.pair = self.pair, None
        assert pair is not None, "the mixer has not run on both sides"
        return pair


@dataclass
class Body:
    """A model as the losses use it.

    Attributes:
        model: the whole model.
        trunk: all but the head; see :meth:`run`.
        head: its output head.
        mixers: swapped layer -> name of its mixer module, in order of depth.
        every_block: layer -> block, in order of depth; a block's output is the residual stream.
        switches: swapped layer -> its switch, once a teacher stands beside the student.
    """

    model: nn.Module
    trunk: nn.Module
    head: Head
    mixers: dict[int, str]
    every_block: dict[int, nn.Module]
    switches: dict[int, SwitchedMixer] = field(default_factory=dict)

    def run(self, input_ids: Tensor, reset: Tensor | None = None, mask: Tensor | None = None, **_: Any) -> Tensor:
        """[B, T] tokens -> [B, T, D], what the head reads. ``reset`` [B, T] opens documents, ``mask`` [B, T] is False
        on padding."""
        out = self.trunk(input_ids=input_ids, attention_mask=mask, reset=reset, use_cache=False)
        return out.last_hidden_state

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The swapped layers' blocks."""
        return {layer: self.every_block[layer] for layer in self.mixers}

    def seat(
        self, *, students: Mapping[int, nn.Module] | None = None, teachers: Mapping[int, nn.Module] | None = None
    ) -> None:
        """Put a switch in each swapped layer, between this model's own mixer and the one given for the other side.
        Parameter names inside the model change by that."""
        for layer, name in self.mixers.items():
            own = self.model.get_submodule(name)
            student = students[layer] if students else own
            self.switches[layer] = SwitchedMixer(student, teachers[layer] if teachers else own)
            self.model.set_submodule(name, self.switches[layer])

    @contextmanager
    def turned(self, side: Side) -> Iterator[None]:
        """All switches on ``side`` within the block."""
        for switch in self.switches.values():
            switch.side = side
        try:
            yield
        finally:
            for switch in self.switches.values():
                switch.side = Side.STUDENT

    @contextmanager
    def residuals(self) -> Iterator[dict[int, Tensor]]:
        """Collects the residual stream [B, T, D] after each swapped block."""
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                found[layer] = output[0] if isinstance(output, (tuple, list)) else output

            return hook

        handles = [block.register_forward_hook(keep(layer)) for layer, block in self.blocks.items()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class Lesson:
    """What the teacher says about a batch: the head's input [B, T, D] and the residual stream after each swapped
    block."""

    hidden: Tensor
    residuals: dict[int, Tensor]

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.hidden, *self.residuals.values()))


def layers_since(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[int]:
    """The layers that ``config`` has swapped and ``base`` has not, from both config.json: where a base was operated on
    before, its memories are the teacher's too and keep their dose. All of them, where there are no others."""
    layers = config["surgery"]["layers"]
    earlier = (base.get("surgery") or {}).get("layers", [])
    return [layer for layer in layers if layer not in earlier] or list(layers)


def body_of(model: nn.Module, config: Mapping[str, Any], layers: list[int]) -> Body:
    """The parts of a model of any supported family.

    Args:
        model: loaded with grafts.
        config: the checkpoint's config.json.
        layers: the swapped layers.
    """
    adapter = adapter_for(config)
    names = {id(module): name for name, module in model.named_modules()}
    mixers = adapter.mixers(model)
    return Body(
        model=model,
        trunk=adapter.backbone(model),
        head=Head(adapter.head(model), adapter.logit_scale(config)),
        mixers={layer: names[id(mixers[layer])] for layer in sorted(layers)},
        every_block=dict(enumerate(adapter.blocks(model))),
    )


def teacher_mixers(body: Body, base: Checkpoint) -> dict[int, nn.Module]:
    """The base's mixers of the swapped layers, read from its checkpoint: grafts with the host's own rule."""
    adapter = adapter_for(base.config)
    if base.config.get("surgery"):  # a base that was operated on before: its mixers are what it says they are
        mixers = adapter.mixers(load_model(base.directory, dtype=torch.float32))
        device = next(body.model.parameters()).device
        return {layer: mixers[layer].to(device).requires_grad_(False) for layer in body.mixers}
    found = {}
    for layer, name in body.mixers.items():
        student = body.model.get_submodule(name)
        memory, student.memory = student.memory, None  # the copy needs no second student memory
        teacher = copy.deepcopy(student)
        student.memory = memory
        teacher.memory = create("host", student.geometry)
        prefix = adapter.tensor_prefix(base.config, layer)
        with torch.no_grad():
            for own, parameter in teacher.named_parameters():
                parameter.copy_(base.read(prefix + own))
        found[layer] = teacher.to(next(student.parameters()).device).requires_grad_(False)
    return found


@torch.no_grad()
def shares_weights(body: Body, base: Checkpoint) -> bool:
    """Whether everything outside the swapped mixers is the base's, value for value, so that a teacher can share it."""
    adapter = adapter_for(base.config)
    prefixes = tuple(f"{name}." for name in body.mixers.values())
    for name, parameter in body.model.named_parameters():
        if name.startswith(prefixes):
            continue
        for stored, tensor in adapter.disk_tensors(base.config, body.model, name, parameter).items():
            if stored not in base.tensors or not torch.equal(base.read(stored).to(tensor), tensor):
                return False
    return True


def teacher_model(base: Checkpoint, layers: list[int], device: str) -> Body:
    """A second copy of the base, in float32."""
    model = load_model(base.directory, dtype=torch.float32, device=device)
    return body_of(model.requires_grad_(False), base.config, layers)
