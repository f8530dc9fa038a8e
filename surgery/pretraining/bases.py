"""The two bundled bases: their configurations and where training starts.

Both have just under 5 million parameters, so that bf16 weights stay under 10 MB, heads with 32 x 32 states, tied
embeddings, and memories whose length differs from layer to layer: each layer's heads start with forgetting horizons
N = 1/(1 - alpha) spread around a centre of its own.
"""

from __future__ import annotations

import math
from typing import Any

from surgery.errors import UsageError
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
# where each layer's forgetting horizons start: short beside long, the longest in the middle and late
HORIZONS = {
    "tiny-mamba2": (6, 12, 200, 25, 800, 12, 400, 25, 100),
    "tiny-gdn": (6, 12, 200, 25, 800, 25, 400, 50),
}
HORIZON_WIDTH = 4.0  # heads start log-evenly between centre / WIDTH and centre * WIDTH
DT_RANGE = (0.02, 0.2)


def base_config(name: str) -> dict[str, Any]:
    """The configuration of a base by name.

    Raises:
        UsageError: no such base.
    """
    if name not in BASES:
        raise UsageError(f"base {name!r}: choose one of {', '.join(BASES)}")
    return dict(BASES[name])


def create(config: dict[str, Any]):
    """A float32 model of the project's own class for ``config``, not yet initialised for training."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    if config["model_type"] == "mamba2":
        from transformers import Mamba2Config

        from surgery.models.mamba2 import Mamba2ForCausalLM

        return Mamba2ForCausalLM(Mamba2Config(**settings)).float()
    from surgery.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**settings)).float()


def initialise(model, horizons: tuple[float, ...], seed: int) -> None:
    """Set every parameter's start: matrices normal with deviation 1/sqrt(inputs), those that write to the residual
    stream scaled down by the depth, norms one, and the decays so that layer i's horizons surround ``horizons[i]``.

    The decay of a step is exp(-A dt). With dt drawn log-evenly from DT_RANGE, A = 1/(N dt) gives the horizon N.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    depth = len(horizons)

    def log_even(low: float, high: float, count: int) -> torch.Tensor:
        return torch.exp(math.log(low) + math.log(high / low) * torch.rand(count, generator=generator))

    with torch.no_grad():
        parameters = dict(model.named_parameters())
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
