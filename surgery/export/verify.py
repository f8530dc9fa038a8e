"""Load an exported directory the way its users will, in a process of its own, and compare its logits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import JobError, plain_reason
from surgery.evaluation.finite import first_nonfinite

TOKENS = 256

RELOAD = """\
import sys
import torch
directory, given, result, threads, code = sys.argv[1:]
if not code:
    import surgery
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(threads))
model, found = AutoModelForCausalLM.from_pretrained(
    directory, local_files_only=True, output_loading_info=True, trust_remote_code=bool(code))
wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
if wrong:
    sys.exit(f"tensors do not fit: {wrong}")
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # aligned in memory, as in the process that compares
if code and "surgery" in sys.modules:
    sys.exit("its own code was to be run, and the package was imported")
with torch.no_grad():
    logits = model.eval()(load_file(given)["ids"]).logits
save_file({"logits": logits.float().contiguous()}, result)
"""


@dataclass(frozen=True)
class Check:
    """The exported model's logits, loaded afresh, against the run's.

    Attributes:
        tokens: positions compared. text: of what.
        bit_exact: equal to the run's in the exported dtype, bit for bit; otherwise nothing is exported.
        cast: whether the exported dtype is another than the run's. The other figures are then against the run's own:
        kl: mean over positions of KL(run || export), nats. max_logit_difference: over positions and vocabulary.
    """

    text: str
    tokens: int
    bit_exact: bool
    cast: bool
    run_dtype: str
    kl: float
    max_logit_difference: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def reload_logits(directory: Path, ids: Tensor, code: bool = False) -> Tensor:
    """Logits [1, T, vocabulary] of ``ids`` [1, T] from a fresh Python that imports transformers alone and runs the code
    in ``directory``, or, without ``code``, imports surgery as well.

    Raises:
        JobError: it failed; its last line is the message.
    """
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "ids.safetensors"), Path(folder, "logits.safetensors")
        save_file({"ids": ids}, given)
        command = [sys.executable, "-c", RELOAD, str(directory), str(given), str(result), str(torch.get_num_threads())]
        command.append("code" if code else "")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_MODULES_CACHE": folder, "SURGERY_AUTOLOAD": "0" if code else "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            reason = plain_reason(ValueError(last), 300)
            raise JobError(f"the exported model does not load in a fresh process, nothing was written\n  {reason}")
        return load_file(result)["logits"]


def model_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The same of a model in this process, on the CPU."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def check_export(
    adapter: Any, run: Path, run_dtype: str, exported: Path, dtype: str, name: str, ids: Tensor, code: bool = False
) -> Check:
    """Compare an exported directory with the model it was made from.

    Args:
        run: the checkpoint that was exported; run_dtype: what a plain load of it gives.
        exported: the new directory; dtype: what it was written in.
        name: of the text that ``ids`` [1, T] come from.
        code: load it with the code that lies beside the weights, not with this package.

    Raises:
        JobError: the exported model does not load, or its logits are not the run's in the exported dtype.
    """
    fresh = reload_logits(exported, ids, code)
    model = adapter.load(run, dtype=getattr(torch, dtype))
    same = model_logits(model, ids)
    if not bool(same.isfinite().all()):
        raise JobError(
            f"{run}: its logits in {dtype} are not finite; first not finite: {first_nonfinite(model, ids)}; nothing "
            f"was written\n  every weight is finite, but what they give leaves the range of {dtype}"
        )
    del model
    if not torch.equal(fresh, same):
        worst = (fresh - same).abs().max().item()
        raise JobError(
            f"the exported model's logits differ from the run's in {dtype} by up to {worst:.3g}; nothing was written\n"
            "  this is a fault of the export: please report it with the base's name and the recipe"
        )
    cast = dtype != run_dtype
    own = model_logits(adapter.load(run, dtype=getattr(torch, run_dtype)), ids) if cast else same
    p, q = own.double().log_softmax(-1), fresh.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    return Check(name, ids.numel(), True, cast, run_dtype, kl, (own - fresh).abs().max().item())
