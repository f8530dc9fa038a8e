"""Keep the shell's environment from changing what is computed, and say what is in force.

accelerate and transformers read dozens of variables (``ACCELERATE_*``, ``FSDP_*`` and others) that change precision,
device, accumulation or sharding of a training that never named them. A command takes them out of its environment and
says so; what cannot be taken out is refused by name; what is left and matters stands in a run's ``run.json``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surgery.errors import UsageError

OVERRIDDEN = (
    "ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "FP8_", "DEEPSPEED_", "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT",
)  # fmt: skip
# they say how to log and where to run threads, nothing of the result
HARMLESS = {
    "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_DISABLE_RICH", "ACCELERATE_ENABLE_RICH",
    "ACCELERATE_LOG_LEVEL",
}  # fmt: skip
# NVIDIA's libraries read it when they are loaded, and it outranks whatever a program asks for
REFUSED = ("NVIDIA_TF32_OVERRIDE",)
# left as they are, and written down: libraries' choices of kernels and threads, this project's own switches
RECORDED = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN_", "DNNL_", "FLASH_ATTENTION_", "KMP_", "MKL_", "NCCL_", "OMP_", "ONEDNN_",
    "PYTORCH_", "SURGERY_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "TRITON_", "USE_HUB_KERNELS",
)  # fmt: skip
UNRECORDED = ("KEY", "PASSWORD", "SECRET", "TOKEN", "_DIR", "_HOME", "_PATH")  # secrets, and places of caches
LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ignored: set[str] = set()  # taken out by the blocks around
PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "triton")


def processes(environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's number and how many share the work, as torchrun says; 0 and 1 without torchrun.

    Raises:
        UsageError: variables that only a launcher sets stand alone, which would split the batch among processes that
            are not there.
    """
    if "LOCAL_RANK" in environment:
        missing = [name for name in LAUNCHED if not environment.get(name)]
        if missing:
            raise UsageError(
                f"LOCAL_RANK is set in the environment, but {missing[0]} is not\n"
                "  unset LOCAL_RANK, or start the command with torchrun, which sets both"
            )
        return _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    for name in SIZES:
        if environment.get(name) and _number(environment, name) > 1:
            raise UsageError(
                f"{name}={environment[name]} is set in the environment, but torchrun did not start this process\n"
                f"  unset {name}, or start the command with torchrun"
            )
    return 0, 1


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{name}={environment[name]} in the environment is no number; unset it") from None


@contextlib.contextmanager
def shielded(device: str, say: Callable[[str], None] = lambda text: None) -> Iterator[list[str]]:
    """Compute what was asked for, whatever the shell's environment says; puts everything back at the end.

    float32 products are computed in float32, and the variables in ``OVERRIDDEN`` are taken out of the environment.

    Yields:
        The names of the variables that were taken out, here and by the blocks around.

    Raises:
        UsageError: on a GPU, a variable that cannot be overridden.
    """
    import torch

    for name in REFUSED:
        if device == "cuda" and name in os.environ:
            raise UsageError(
                f"{name}={os.environ[name]} is set in the environment and would change what is computed\n"
                f"  NVIDIA's libraries obey it before anything else: unset {name}"
            )
    taken = {name: value for name, value in os.environ.items() if _overridden(name)}
    for name in taken:
        del os.environ[name]
    if taken:
        shown = ", ".join(f"{name}={value}" for name, value in sorted(taken.items()))
        say(f"the environment's {shown} would change what is computed and is ignored")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    _ignored.update(taken)
    try:
        yield sorted(_ignored)
    finally:
        _ignored.difference_update(taken)
        torch.set_float32_matmul_precision(precision)
        os.environ.update(taken)


def _overridden(name: str) -> bool:
    return name.startswith(OVERRIDDEN) and name not in HARMLESS


def in_force(device: str, world: int, ignored: list[str]) -> dict[str, Any]:
    """What a run computes with, for ``run.json``.

    Args:
        ignored: names of the variables that were taken out.
    """
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    kept = {key: value for key, value in sorted(os.environ.items()) if key.startswith(RECORDED)}
    return {
        "host": socket.gethostname(),
        "device": device,
        "device_name": name,
        "dtype": "float32",
        "autocast": "bfloat16" if device == "cuda" else None,
        "world_size": world,
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
        "versions": _versions(),
        "cuda": torch.version.cuda,
        "environment": {key: value for key, value in kept.items() if not any(word in key for word in UNRECORDED)},
        "ignored": ignored,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import surgery

    found = {"surgery": surgery.__version__}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
