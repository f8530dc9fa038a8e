"""mamba_ssm's own checkpoints, ``state-spaces/mamba2-*``: no model type, a padded vocabulary, ``ssm_cfg``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.errors import UsageError
from surgery.hosts.mamba2 import Mamba2Layout

# in a configuration that tensors completed: what it said before, of the keys that then changed
COMPLETED = "completed"


class MambaSSMAdapter(Mamba2Layout):
    """Mamba-2 in the layout of its authors' library."""

    name = "mamba_ssm"
    base_type = None
    title = "Mamba-2, its authors' layout"
    checkpoints = ("state-spaces/mamba2-2.7b",)
    note = "not with attention or MLPs beside the mixers (`state-spaces/mamba2attn-2.7b`)"

    def claims(self, config: Mapping[str, Any]) -> bool:
        if config.get("model_type"):
            return config["model_type"] == self.model_types[1]
        return "ssm_cfg" in config

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Shapes that ``ssm_cfg`` leaves to the library's defaults are taken from the first mixer, and the vocabulary
        from the embeddings; what the configuration does say is checked against the tensors elsewhere."""
        found = dict(config)
        embedding = shapes.get("backbone.embedding.weight")
        if embedding is not None:
            rows, width = embedding
            found.setdefault("d_model", width)
            multiple = max(found.get("pad_vocab_size_multiple", 8), 1)
            named = found.get("vocab_size", rows)
            if -(-named // multiple) * multiple != rows >= named:
                found["vocab_size"], found["pad_vocab_size_multiple"] = rows, 1
        if "n_layer" not in found:
            names = [name.split(".")[2] for name in shapes if name.startswith("backbone.layers.")]
            found["n_layer"] = 1 + max((int(name) for name in names if name.isdigit()), default=-1)
        given = {key: value for key, value in (found.get("ssm_cfg") or {}).items() if value is not None}
        taken = _mixer_shapes(shapes, found.get("d_model", 0), given)
        if taken:
            found["ssm_cfg"] = {**taken, **given}
        before = {key: config[key] for key in found if key in config and config[key] != found[key]}
        return {**found, **({COMPLETED: before} if before else {})}

    def surgery_config(self, config: Mapping[str, Any], surgery: Mapping[str, Any]) -> dict[str, Any]:
        written = super().surgery_config({key: value for key, value in config.items() if key != COMPLETED}, surgery)
        if surgery:
            written["surgery"]["replaced"] = {**config.get(COMPLETED, {}), **written["surgery"]["replaced"]}
        return written

    def base_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().base_config({key: value for key, value in config.items() if key != COMPLETED})

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import mamba_ssm as models

        if upgraded:
            return models.SurgeryMambaSSMConfig, models.SurgeryMambaSSMForCausalLM
        return models.MambaSSMConfig, models.MambaSSMForCausalLM

    def ties(self, config: Mapping[str, Any]) -> dict[str, str]:
        return {"lm_head.weight": "backbone.embedding.weight"} if config.get("tie_embeddings", True) else {}

    def _upstream(self) -> type:
        raise UsageError("mamba_ssm: its own implementation needs a GPU and is not called; load the model as a graft")


def _mixer_shapes(shapes: Mapping[str, tuple[int, ...]], d_model: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``ssm_cfg`` as the first mixer's tensors have them, where they are not the library's defaults."""
    from surgery.models.mamba2_configuration import SSM_DEFAULTS

    prefix = "backbone.layers.0.mixer."
    needed = ("A_log", "D", "conv1d.weight", "in_proj.weight", "out_proj.weight")
    if not d_model or any(prefix + name not in shapes for name in needed):
        return {}
    heads, skips, conv, rows, inner = (shapes[prefix + name] for name in needed)
    heads, skips, inner = heads[0], skips[0], inner[1]
    keys = (rows[0] - 2 * inner - heads) // 2  # G N
    memory = conv[0] - 2 * keys  # d_ssm
    groups = given.get("ngroups", SSM_DEFAULTS["ngroups"])
    if min(keys, memory, heads, groups) < 1:
        return {}
    found = {
        "d_state": keys // groups,
        "d_conv": conv[2],
        "expand": inner // d_model if inner % d_model == 0 else inner / d_model,
        "headdim": memory // heads,
        "d_ssm": memory,
        "D_has_hdim": skips == memory != heads,
        "rmsnorm": prefix + "norm.weight" in shapes,
        "bias": prefix + "in_proj.bias" in shapes,
        "conv_bias": prefix + "conv1d.bias" in shapes,
    }
    defaults = {**SSM_DEFAULTS, "d_ssm": inner, "D_has_hdim": False, "rmsnorm": True, "bias": False, "conv_bias": True}
    return {key: value for key, value in found.items() if value != defaults[key] and key not in given}
