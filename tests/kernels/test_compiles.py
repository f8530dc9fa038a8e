"""The kernels through Triton's compiler, for GPUs that need not be there: they compile, and fit into shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_for_gpus.py")


def compiled(capability: int, *problems: str, cache: Path) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), str(capability), *problems]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict]) -> None:
    assert not [kernel for kernel in kernels if "failed" in kernel]
    assert not [kernel for kernel in kernels if kernel["shared"] > kernel["limit"]]


@pytest.mark.parametrize(
    ("capability", "problems"), [(90, ()), pytest.param(89, ("float32", "gdn"), marks=pytest.mark.slow)]
)
def test_kernels_compile_and_fit(tmp_path, capability, problems):
    kernels = compiled(capability, *problems, cache=tmp_path)
    assert len({kernel["kernel"] for kernel in kernels}) > 12
    check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_slow_kernels_compile_and_fit(tmp_path, capability):
    check(compiled(capability, "slow", cache=tmp_path))
