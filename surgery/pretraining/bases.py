"""The bases' configurations and where their training starts: two that are bundled, and two that can recall.

The bundled ones have just under 5 million parameters, so that bf16 weights stay under 10 MB, and heads with 32 x 32
states. ``recall-mamba2`` and ``recall-gdn`` have 11 million and are trained to recall exactly (``curriculum``). Their
memories are to be what limits that within 2048 tokens, which hold up to 200 pairs: a layer of ``recall-gdn`` has 5
heads with keys of 16, so that no head tells more than 16 keys apart and none of the layers more than 80; a layer of
``recall-mamba2`` has one key of 32 for all its heads, whose writes nothing erases. Of each there is the same with
another memory in every layer, ``recall-gdn-bayesian`` for example, trained from scratch at the full dose or at a given
one.

All have tied embeddings, and memories whose length differs from layer to layer: each layer's heads start with
forgetting horizons N = 1/(1 - alpha) spread around a centre of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from surgery.errors import UsageError
from surgery.memory import RULES as RULE_CLASSES
from surgery.memory import draw_memory
from surgery.pretraining.tokenizer import VOCABULARY

CONTEXT = 1024

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 9,
    "expand": 2,
    "num_heads": 16,
    "head_dim": 32,
    "state_size": 32,
    "n_groups": 1,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "chunk_size": 64,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

GATED_DELTANET: dict[str, Any] = {
    "model_type": "gated_deltanet",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "attn_mode": "chunk",
    "expand_v": 1.0,
    "use_gate": True,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "head_dim": 32,
    "num_heads": 6,
    "num_v_heads": 6,
    "max_position_embeddings": CONTEXT,
    "hidden_ratio": 4,
    "intermediate_size": 576,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "attn": None,
    "use_cache": True,
    "initializer_range": 0.02,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "use_l2warp": False,
    "output_gate_activation": "swish",
    "attnres_block_size": None,
    "tie_word_embeddings": True,
    "pad_token_id": None,  # an embedding with a padding index gets no gradient there, and id 0 begins every document
    "bos_token_id": 0,
    "eos_token_id": 0,
}

BASES = {"tiny-mamba2": MAMBA2, "tiny-gdn": GATED_DELTANET}
RECALL_CONTEXT = 2048
RECALL = {
    "recall-mamba2": {
        **MAMBA2, "hidden_size": 384, "num_hidden_layers": 10, "num_heads": 12, "head_dim": 64, "state_size": 32,
    },
    "recall-gdn": {
        **GATED_DELTANET, "hidden_size": 320, "num_hidden_layers": 8, "num_heads": 5, "num_v_heads": 5, "head_dim": 16,
        "expand_v": 4.0, "intermediate_size": 832, "max_position_embeddings": RECALL_CONTEXT,
    },
}  # fmt: skip
RULES = ("bayesian", "palimpsa")  # that recall bases are trained with in every layer, beside the host's own
# where each layer's forgetting horizons start: short beside long, the longest in the middle and late
HORIZONS = {
    "tiny-mamba2": (6, 12, 200, 25, 800, 12, 400, 25, 100),
    "tiny-gdn": (6, 12, 200, 25, 800, 25, 400, 50),
    "recall-mamba2": (6, 25, 400, 50, 1600, 25, 800, 100, 1600, 200),
    "recall-gdn": (6, 25, 400, 50, 1600, 100, 1600, 200),
}
HORIZON_WIDTH = 4.0  # heads start log-evenly between centre / WIDTH and centre * WIDTH
DT_RANGE = (0.02, 0.2)


def base_names() -> list[str]:
    """Every base that can be trained."""
    return [*BASES, *RECALL, *(f"{name}-{rule}" for name in RECALL for rule in RULES)]


def parts_of(name: str) -> tuple[str, str | None]:
    """The host of a base by name, and the memory rule in its layers; None for the host's own.

    Raises:
        UsageError: no such base.
    """
    if name not in base_names():
        raise UsageError(f"base {name!r}: choose one of {', '.join(base_names())}")
    host, _, rule = name.rpartition("-")
    return (host, rule) if rule in RULES else (name, None)


def base_config(name: str) -> dict[str, Any]:
    """The configuration of a base by name; that of its host, where its layers hold another memory.

    Raises:
        UsageError: no such base.
    """
    return dict({**BASES, **RECALL}[parts_of(name)[0]])


def horizons_of(name: str) -> tuple[float, ...]:
    """Where each layer's forgetting horizons start, in tokens."""
    return HORIZONS[parts_of(name)[0]]


def grafted_config(
    config: dict[str, Any], rule: str | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A host's configuration with ``rule`` in every layer, or as it is without one.

    Args:
        options: of the rule, as a recipe's ``memory`` has them; those that it does not have are left out.

    Raises:
        UsageError: a value that an option does not take.
    """
    if rule is None:
        return config
    chosen = {name: value for name, value in (options or {}).items() if name in RULE_CLASSES[rule].defaults}
    from surgery.hosts import adapter_for

    adapter = adapter_for(config)
    with torch.device("meta"):
        options = draw_memory(rule, adapter.geometry(config, 0), chosen, "exact", 0, 0).options
    swap = {"schema": 1, "rule": rule, "layers": list(range(config["num_hidden_layers"])), "options": options}
    return adapter.surgery_config(config, swap)


def create(config: dict[str, Any], dose: float = 1.0, seed: int = 0):
    """A float32 model of the project's own class for ``config``, its host's parameters not yet initialised for
    training; swapped memories start as an operation starts them, but at ``dose``."""
    from surgery.hosts import adapter_for

    adapter = adapter_for(config)
    model = adapter.build(config).float()
    swap = config.get("surgery") or {}
    for layer in swap.get("layers", ()):
        geometry = adapter.geometry(config, layer)
        memory = draw_memory(swap["rule"], geometry, swap["options"], "exact", seed, layer)
        memory.dose.fill_(dose)
        adapter.mixers(model)[layer].memory = memory
    return model


def initialise(model, horizons: tuple[float, ...], seed: int) -> None:
    """Set every host parameter's start: matrices normal with deviation 1/sqrt(inputs), those that write to the residual
    stream scaled down by the depth, norms one, and the decays so that layer i's horizons surround ``horizons[i]``.

    The decay of a step is exp(-A dt). With dt drawn log-evenly from DT_RANGE, A = 1/(N dt) gives the horizon N.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = len(horizons)

    def log_even(low: float, high: float, count: int) -> torch.Tensor:
        return torch.exp(math.log(low) + math.log(high / low) * torch.rand(count, generator=generator))

    with torch.no_grad():
        # what a swapped memory adds has its own start
        parameters = {name: x for name, x in model.named_parameters() if ".memory." not in name}
        for name, parameter in parameters.items():
            if name.endswith("norm.weight") or name.endswith("norm_f.weight") or name.endswith(".D"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            elif "conv1d" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
            elif "embeddings" in name or name.startswith("lm_head"):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 2:
                scale = 1 / math.sqrt(parameter.shape[1])
                if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
                    scale /= math.sqrt(2 * depth)
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            elif not name.endswith(("A_log", "dt_bias")):
                raise AssertionError(f"no start is known for {name} {tuple(parameter.shape)}")
        decays = [(name, parameters[name.replace("A_log", "dt_bias")]) for name in parameters if name.endswith("A_log")]
        assert len(decays) == depth, f"{len(decays)} layers, {depth} horizons"
        for (name, dt_bias), centre in zip(decays, horizons, strict=True):
            heads = dt_bias.numel()
            even = torch.linspace(-1, 1, heads)[torch.randperm(heads, generator=generator)]
            horizon = centre * HORIZON_WIDTH**even
            dt = log_even(*DT_RANGE, heads)
            dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
            parameters[name].copy_(-torch.log(horizon.clamp(min=1.5) * dt))
