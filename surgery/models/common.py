"""The part of a language model that does not depend on its family: cache, padding, packing, head, loss, weights.

A family gives a backbone with ``embeddings``, ``layers`` and a final norm, and its blocks; see
:mod:`surgery.models.mamba2` and :mod:`surgery.models.gated_deltanet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from surgery.graft import Graft
from surgery.graft.base import padding
from surgery.graft.cache import chosen
from surgery.memory import create
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.memory.modules import in_dtype_of
from surgery.models import step_graph
from surgery.models.configuration import Swap
from surgery.models.initial import InitialWeights

PACKING = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "cu_seq_lens")


class BackboneOutput(NamedTuple):
    """``last_hidden_state`` [B, T, D] is normed: the head's input."""

    last_hidden_state: Tensor
    cache: Cache | None
    hidden_states: tuple[Tensor, ...] | None


# transformers up to 5.17 or so: generation knows the cache of such models as ``cache_params``, later as ``cache``
OLD_CACHE_NAME = not hasattr(Cache, "get_conv_state")

if OLD_CACHE_NAME:

    @dataclass
    class CausalLMOutput(ModelOutput):
        """Loss, float32 logits [B, T, vocabulary], the cache, and hidden states (see :class:`Backbone`)."""

        loss: Tensor | None = None
        logits: Tensor | None = None
        cache_params: Cache | None = None
        hidden_states: tuple[Tensor, ...] | None = None

        @property
        def cache(self) -> Cache | None:
            return self.cache_params
else:

    @dataclass
    class CausalLMOutput(ModelOutput):
        """Loss, float32 logits [B, T, vocabulary], the cache, and hidden states (see :class:`Backbone`)."""

        loss: Tensor | None = None
        logits: Tensor | None = None
        cache: Cache | None = None
        hidden_states: tuple[Tensor, ...] | None = None


def layer_memory(swap: Swap, geometry: MemoryGeometry, layer: int) -> MemoryRule:
    """The memory of one layer: the swapped rule, or the host's own, which then leaves nothing in a checkpoint."""
    if layer in swap.rules:
        rule, options = swap.rules[layer]
        return create(rule, geometry, **options)
    memory = create("host", geometry)
    memory._non_persistent_buffers_set.add("dose")
    return memory


class Backbone(nn.Module):
    """Embeddings, blocks and a final norm. A family sets ``embeddings``, ``layers`` and ``final_norm``'s name.

    ``hidden_states`` follows each host's own convention: the input of every block and the final norm's output, or,
    where ``embeddings_first`` is False, the output of every block and the final norm's.
    """

    embeddings_first: ClassVar[bool] = True
    norm_name: ClassVar[str]
    gradient_checkpointing = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        reset: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BackboneOutput:
        """[B, T] token ids (or [B, T, D] embeddings) -> normed hidden states; arguments as in the language model."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        replayed = self.training and torch.is_grad_enabled() and any(
            getattr(layer, "gradient_checkpointing", False) for layer in self.layers
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if replayed:
            if cache is not None:
                raise ValueError("gradient checkpointing runs each layer twice and would write the cache twice")
            use_cache = False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask = _padding(attention_mask, hidden.shape[1])
        more = self.layer_arguments(hidden, attention_mask, cache, reset)
        collect = output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states
        states, norm = [hidden], getattr(self, self.norm_name)

        def blocks(hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden, cache=cache, mask=mask, reset=reset, **more)
                if collect:  # otherwise each block's output goes as soon as the next has read it
                    states.append(hidden)
            return norm(hidden)

        if cache is not None and hidden.shape[1] == 1 and reset is None and not more and not collect:
            hidden = step_graph.step((*self.layers, norm), blocks, hidden, cache)
        else:
            hidden = blocks(hidden)
        collected = (*(states[:-1] if self.embeddings_first else states[1:]), hidden) if collect else None
        return BackboneOutput(hidden, cache if use_cache else None, collected)

    def layer_arguments(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Cache | None, reset: Tensor | None
    ) -> dict[str, Any]:
        """What else a family's blocks are called with, made once a call: arguments as in :meth:`forward`."""
        return {}


def _padding(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The padding mask of this call, None where there is none to apply: a decoded token is never padding."""
    if tokens == 1:
        return None
    mask = padding(attention_mask, tokens)
    if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


class GraftedCausalLM(InitialWeights, PreTrainedModel, GenerationMixin):
    """A language model whose mixers are grafts."""

    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = True
    logit_scale: ClassVar[float] = 1.0  # logits are head(hidden) times this

    def finish(self) -> None:
        """The last step of a family's constructor: what stays in float32 on loading, then the initial weights."""
        kept = set(Graft.float32)
        for module in self.modules():
            if isinstance(module, MemoryRule):
                kept.update(f"memory.{name}" for name, _ in module._float32_tensors())
        self._keep_in_fp32_modules_strict = kept
        self.post_init()

    @property
    def backbone_module(self) -> Backbone:
        """The backbone, whatever the family calls it."""
        return getattr(self, self.base_model_prefix)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.backbone_module.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.backbone_module.embeddings = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Generation keeps the plain padding mask: there is no attention to mask."""
        return attention_mask

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> Any:
        """Generation's cache, in older releases under the one name that fits."""
        if not OLD_CACHE_NAME:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = chosen(*(model_kwargs.pop(name, None) for name in ("cache", "cache_params", "past_key_values")))
        if cache is None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            cache = chosen(*(model_kwargs.pop(name, None) for name in ("cache_params", "past_key_values")))
        if cache is not None:
            model_kwargs["cache_params"] = cache
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        reset: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache_params: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ModelOutput | tuple:
        """Next-token logits, and the loss if there are labels.

        Args:
            input_ids: [B, T], or inputs_embeds: [B, T, D].
            attention_mask: [B, S >= T], 0 on padding, normally on the left.
            cache: continues the text it holds, for any T, and is updated; with ``use_cache`` a new one is returned.
            labels: [B, T], shifted inside; -100 is ignored.
            reset: [B, T] bool, True on the first token of each packed document: no memory and no convolution reads
                across it.
            logits_to_keep: the last so many positions (0: all), or their indices.

        Raises:
            ValueError: packing was asked for in another way than ``reset``, which would be ignored.
        """
        given = [name for name in PACKING if kwargs.pop(name, None) is not None]
        if given:
            raise ValueError(f"{given[0]} is not read here: mark the first token of each document in reset [B, T]")
        return_dict = return_dict if return_dict is not None else self.config.return_dict
        out = self.backbone_module(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=chosen(cache, cache_params, past_key_values),
            reset=reset,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = out.last_hidden_state[:, kept]
        logits = self.lm_head(in_dtype_of(self.lm_head, hidden)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = CausalLMOutput(loss, logits, out.cache, out.hidden_states)
        return result if return_dict else result.to_tuple()
