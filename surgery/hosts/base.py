"""What the tools need to know of a model family; one adapter each.

An adapter reads configurations as the plain dictionaries that config.json holds, and speaks of tensors by their names
on disk. Nothing here imports transformers until a configuration is parsed or a model is built.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from surgery.checkpoint.layout import CONFIG
from surgery.checkpoint.reading import check_unquantised, explained, raw_config, read_header, shapes_there
from surgery.checkpoint.sizes import check_sizes
from surgery.errors import JobError, UsageError, plain_reason
from surgery.memory.base import HostStyle, MemoryGeometry

Implementation = Literal["graft", "upstream"]

# keys of a base's config.json that an upgraded one gives other values, and keeps under surgery.replaced
REPLACED = ("model_type", "architectures", "auto_map")


class HostAdapter:
    """One model family, base and upgraded checkpoints alike.

    Attributes:
        name: the family; an upgraded checkpoint's model type is ``surgery_`` + name.
        base_type: the base's model type, where it is not the name; None where its config.json has none.
        backbone_prefix: disk prefix of everything but the head.
        mixer_name: the mixer's name inside a block; not needed where :meth:`tensor_prefix` and :meth:`mixers` say it.
        title: the family as people call it; checkpoints: examples, hub ids; note: what of it is refused, or nothing.
        style, channel_decay: of its mixers' geometries.
    """

    name: ClassVar[str]
    base_type: ClassVar[str | None] = ""
    backbone_prefix: ClassVar[str]
    mixer_name: ClassVar[str]
    title: ClassVar[str]
    checkpoints: ClassVar[tuple[str, ...]] = ()
    note: ClassVar[str] = ""
    style: ClassVar[HostStyle]
    channel_decay: ClassVar[bool] = False

    @property
    def model_types(self) -> tuple[str | None, str]:
        """The base's model type and the upgraded checkpoint's."""
        return self.name if self.base_type == "" else self.base_type, f"surgery_{self.name}"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family, base or upgraded."""
        return config.get("model_type") in self.model_types

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """A base's config.json with what only the tensors say, by their disk names and shapes."""
        return config

    def read(self, path: str | Path) -> dict[str, Any]:
        """config.json of a directory of this family, completed.

        Raises:
            UsageError: there is none, or it makes no sense beside the weights.
        """
        directory = Path(path)
        config, shapes = raw_config(directory), shapes_there(directory)
        check_sizes(config, shapes, str(directory / CONFIG))
        with explained(directory):
            return self.completed(config, shapes)

    # configuration

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        """The configuration and model classes, imported here and no earlier."""
        raise NotImplementedError

    def _refusal(self, config: Any) -> str | None:
        """Why a parsed configuration cannot be run, or None.

        Raises:
            ValueError: what it says of swapped layers is wrong.
        """
        from surgery.models.configuration import Swap

        Swap.of(config)
        return self._classes(False)[1].refusal(config)

    def _foreign(self, config: Mapping[str, Any]) -> str | None:
        """Why a configuration of this model type is another library's, or None."""
        return None

    def parse(self, config: Mapping[str, Any]) -> Any:
        """The configuration object, defaults filled in.

        Raises:
            UsageError: the configuration is another library's, invalid, or asks for something not supported.
        """
        reason = self._foreign(config)
        if reason is None:
            check_sizes(config, {}, "config.json")
            config_class, _ = self._classes(config.get("model_type") == self.model_types[1])
            given = {key: value for key, value in config.items() if key != "auto_map"}  # no code of a model's is run
            try:
                with _silent():
                    parsed = config_class.from_dict(decode_floats(copy.deepcopy(given)))
                reason = self._refusal(parsed)
            except MemoryError:
                raise
            except Exception as error:  # validation raises several types, whose texts run over many lines
                reason = plain_reason(error, 300)
        if reason is not None:
            raise UsageError(f"config.json: {reason}")
        return parsed

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        """What a memory rule sees of layer ``layer``."""
        raise NotImplementedError

    def mixer_layers(self, config: Mapping[str, Any]) -> list[int]:
        """Indices of the layers that hold a mixer of this family."""
        return list(range(self.parse(config).num_hidden_layers))

    def surgery_config(self, config: Mapping[str, Any], surgery: Mapping[str, Any]) -> dict[str, Any]:
        """The upgraded checkpoint's config.json: the base's keys, another model type, and ``surgery``. Strict JSON."""
        written = {key: value for key, value in dict(config).items() if key not in REPLACED}
        replaced = (config.get("surgery") or {}).get("replaced")
        if replaced is None:
            replaced = {key: config[key] for key in REPLACED if key in config}
        written["model_type"] = self.model_types[1]
        written["architectures"] = [self._classes(True)[1].__name__]
        written["surgery"] = {**copy.deepcopy(dict(surgery)), "replaced": replaced} if surgery else {}
        return encode_floats(written)

    def base_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The base's config.json again, from an upgraded checkpoint's."""
        written = {key: value for key, value in dict(config).items() if key not in (*REPLACED, "surgery")}
        replaced = (config.get("surgery") or {}).get("replaced")
        if replaced is None:  # written before it was kept: what the family's own configurations say
            base_type, classes = self.model_types[0], [self._classes(False)[1].__name__]
            replaced = {} if base_type is None else {"model_type": base_type, "architectures": classes}
        return encode_floats({**written, **replaced})

    # tensors on disk

    def tensor_prefix(self, config: Mapping[str, Any], layer: int) -> str:
        """Disk prefix of the mixer of layer ``layer``, with its final dot."""
        return f"{self.backbone_prefix}layers.{layer}.{self.mixer_name}."

    def expected_tensors(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this configuration must hold, swapped memories included.

        A tied tensor is left out: it may be on disk or not (see :meth:`ties`).
        """
        parsed = self.parse(config)
        _, model_class = self._classes(config.get("model_type") == self.model_types[1])
        with torch.device("meta"):
            model = model_class(parsed)
        tied = self.ties(config)
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}

    def disk_name(self, config: Mapping[str, Any], name: str) -> str:
        """What a checkpoint calls the tensor that a loaded model calls ``name``."""
        return name

    def disk_tensors(
        self, config: Mapping[str, Any], model: nn.Module, name: str, tensor: Tensor
    ) -> dict[str, Tensor]:
        """What a checkpoint holds instead of the tensor that ``model`` calls ``name``, by disk name."""
        return {self.disk_name(config, name): tensor}

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of that disk name is one that this family's checkpoints may carry and nothing reads."""
        patterns = getattr(self._classes(False)[1], "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def ties(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Tensors that share another's storage: name -> that other's name."""
        tied = config.get("tie_word_embeddings", False)
        return {"lm_head.weight": f"{self.backbone_prefix}embeddings.weight"} if tied else {}

    def static_log_decay(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[int, Tensor]:
        """Data-free estimate of the log decay, layer -> [H] float32: the gate where its projection is 0.

        Args:
            tensors: at least every layer's ``A_log`` and ``dt_bias`` by disk name.
        """
        estimate = {}
        for layer in self.mixer_layers(config):
            prefix = self.tensor_prefix(config, layer)
            step = torch.nn.functional.softplus(tensors[prefix + "dt_bias"].float())
            estimate[layer] = -tensors[prefix + "A_log"].float().exp() * self._limit_step(step, config)
        return estimate

    def _limit_step(self, step: Tensor, config: Mapping[str, Any]) -> Tensor:
        return step

    # models

    def load(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device = "cpu",
        implementation: Implementation = "graft",
        placement: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """The model of a checkpoint directory, in evaluation mode.

        Args:
            dtype: what to load in; None for the checkpoint's own. Decay parameters and memories stay in float32.
            implementation: ``graft`` (every mixer is a graft, with the host's rule where nothing was swapped) or
                ``upstream`` (the library that the base comes from; base checkpoints only).
            placement: instead of ``device``, transformers' own options for where weights go (``device_map`` and those
                beside it); see :mod:`surgery.hosts.streaming`.

        Raises:
            UsageError: unsupported configuration, or no upstream implementation to load it with.
            JobError: the weights are missing, damaged, or not those that the configuration asks for.
        """
        config = self.read(path)
        upgraded = config.get("model_type") == self.model_types[1]
        parsed = self.parse(config)
        if implementation == "upstream":
            if upgraded:
                raise UsageError(f"{path}: an upgraded model has no upstream implementation; load it as a graft")
            model_class = self._upstream()
        else:
            model_class = self._classes(upgraded)[1]
        model = _load_weights(model_class, path, parsed if implementation == "graft" else None, dtype, placement or {})
        return (model if placement else model.to(device)).eval()

    def build(
        self, config: Mapping[str, Any], *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """A model with fresh random weights (torch's global generator), in float32 unless ``dtype``."""
        parsed = self.parse(config)
        model = self._classes(config.get("model_type") == self.model_types[1])[1](parsed)
        return model.to(device=device, dtype=dtype)

    def _upstream(self) -> type:
        """The model class of the library that the base comes from."""
        raise NotImplementedError

    def mixers(self, model: nn.Module) -> dict[int, nn.Module]:
        """Layer -> its mixer (a graft, in a model loaded as such)."""
        layers = enumerate(self.backbone(model).layers)
        return {layer: getattr(block, self.mixer_name) for layer, block in layers if hasattr(block, self.mixer_name)}

    def blocks(self, model: nn.Module) -> nn.ModuleList:
        """The residual blocks; a block's first argument and its result are the residual stream [B, T, D]."""
        return self.backbone(model).layers

    def backbone(self, model: nn.Module) -> nn.Module:
        """All but the head; called with input_ids it gives ``.last_hidden_state`` [B, T, D], the head's input."""
        return getattr(model, self.backbone_prefix.rstrip("."))

    def head(self, model: nn.Module) -> nn.Linear:
        """The output projection [vocabulary, D]."""
        return model.lm_head

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        """Logits are head(hidden) times this."""
        return 1.0


def decode_floats(value: Any) -> Any:
    """transformers' {"__float__": "Infinity"} back to floats."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"].replace("Infinity", "inf"))
        return {key: decode_floats(item) for key, item in value.items()}
    return [decode_floats(item) for item in value] if isinstance(value, list) else value


def encode_floats(value: Any) -> Any:
    """Non-finite floats as transformers writes them, so that the result is JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: encode_floats(item) for key, item in value.items()}
    return [encode_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


def _load_weights(
    model_class: type, path: str | Path, config: Any, dtype: torch.dtype | str | None, placement: Mapping[str, Any]
) -> nn.Module:
    if not any(Path(path).glob("*.safetensors")):
        raise JobError(f"{path}: no *.safetensors file there; convert the weights to safetensors first")
    _check_dtypes(Path(path))
    options = {} if config is None else {"config": config}
    try:
        with _quiet():
            model, report = model_class.from_pretrained(
                str(path),
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                **options,
                **placement,
            )
    except Exception as error:  # safetensors', OSError, RuntimeError: all mean that these weights cannot be read
        raise JobError(f"{path}: the weights cannot be loaded: {plain_reason(error, 400)}") from error
    wrong = [f"{name} {list(found)}, not {list(due)}" for name, found, due in report.get("mismatched_keys") or ()]
    problems = {"missing tensors": report.get("missing_keys"), "unexpected tensors": report.get("unexpected_keys")}
    for problem, names in {**problems, "wrong shapes": wrong}.items():
        if names:
            names = sorted(names)
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise JobError(f"{path}: {problem}: {shown}")
    return model


def _check_dtypes(path: Path) -> None:
    """Refuse integers and 8-bit floats, which loading would turn into the model's dtype without their scales."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            entries = read_header(file)
        except UsageError:
            continue  # damaged: loading says so
        check_unquantised(path, entries)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """transformers without a word: what it cannot set it prints, the whole configuration with it, and then raises."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its load report and progress bar; what matters in them is raised instead."""
    from transformers.utils import logging as words

    level, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    words.set_verbosity_error()
    words.disable_progress_bar()
    try:
        yield
    finally:
        words.set_verbosity(level)
        if bars:
            words.enable_progress_bar()
