"""What every host family is asked, whatever its layout: see ``test_battery.py``.

A family joins by a file ``case_NAME.py`` in this folder with a list ``CASES`` of :class:`Case`; ``conftest.py`` finds
it. Such a file imports from here with ``from hosts_battery import Case, scatter``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY = 260  # 256 bytes, an end of text, and a few ids that no text has


def same_name(name: str) -> str:
    return name


def whole(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Case:
    """One shape of one family.

    Attributes:
        name: the test's id.
        write: writes config.json and safetensors weights of a base with fresh random weights into a directory; the
            vocabulary holds at least 257 ids.
        upstream: the model that such a directory is to be compared with, float32 and in evaluation mode: the upstream
            library's class, or where none runs here an independent form. Called with ``input_ids`` and
            ``attention_mask``, it gives ``.logits``.
        log_decay: log alpha_t from the tensors on disk alone: (read, mixer input [B, T, D]) -> [B, T, H], where
            ``read("A_log")`` is the tensor of that name in the mixer.
        layers: the layers that hold a mixer. swapped: two or so of them.
        exact: the rules whose dose 0 is this host's own rule.
        upstream_name: the upstream model's name of a parameter that the graft model calls so.
        part: the part of that parameter (or its gradient) which the graft model has under this name.
        tolerance: of logits, relative in norm. gradient_tolerance: of each parameter's gradient, likewise.
        masks: whether upstream's forward reads ``attention_mask``.
        learnt: whether gradients are compared. dtype: of the graft model then, float64 where upstream computes in it:
            the gradients of random models are too badly conditioned for float32 against float64.
    """

    name: str
    write: Callable[[Path], None]
    upstream: Callable[[Path], nn.Module]
    log_decay: Callable[[Callable[[str], Tensor], Tensor], Tensor]
    layers: tuple[int, ...]
    swapped: tuple[int, ...]
    exact: frozenset[str] = frozenset({"host", "palimpsa", "bayesian"})
    upstream_name: Callable[[str], str] = same_name
    part: Callable[[str, Tensor], Tensor] = whole
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-4
    masks: bool = True
    learnt: bool = True
    dtype: torch.dtype = torch.float32


def scatter(model: nn.Module) -> nn.Module:
    """Weights at which the logits depend on the text and every decay differs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(0.7 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "conv1d" not in name:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return model.eval()


def write_layout(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A checkpoint of one file, as another library would have left it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def write_recipe(directory: Path, base: Path, layers: Iterable[int], rule: str = "bayesian", **sections: Any) -> Path:
    """A recipe file in a directory; returns its path."""
    path = directory / "recipe.yaml"
    document = {"model": str(base), "layers": list(layers), "memory": {"rule": rule}, **sections}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def raw_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of every tensor in a directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name).contiguous()
                data = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                found[name] = (str(tensor.dtype), tuple(tensor.shape), data)
    return found


def read_tensor(directory: Path, name: str, prefix: str = "") -> Tensor:
    """One tensor by its disk name, ``prefix`` put before it."""
    name = prefix + name
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise KeyError(name)


def apart(measured: Tensor, expected: Tensor) -> float:
    """|measured - expected| / |expected|, Frobenius."""
    return ((measured.double() - expected.double()).norm() / expected.double().norm()).item()


def left_padded(text: Tensor, lengths: list[int]) -> Tensor:
    """A mask [B, T] that leaves the last ``lengths`` tokens of each row."""
    mask = torch.zeros_like(text)
    for row, length in enumerate(lengths):
        mask[row, text.shape[1] - length :] = 1
    return mask
