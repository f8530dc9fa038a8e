"""Settings every test shares."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from importlib import metadata

# the hub is never reached from a test, whatever the machine's network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# without a GPU, Triton's kernels run in its interpreter; that is settled when Triton is first imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def fresh_seed(request):
    """Each test draws from the seed of its name, so that no run fails by a rare draw; ``make nightly`` draws fresh
    ones. A failing test prints its seed, and SURGERY_TEST_SEED repeats it."""
    asked = os.environ.get("SURGERY_TEST_SEED", "")
    if asked == "fresh":
        seed = int.from_bytes(os.urandom(4), "little")
    else:
        seed = int(asked) if asked else zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    request.node.user_properties.append(("seed", seed))
    print(f"SURGERY_TEST_SEED={seed}")
    return seed


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    """The suite runs in two processes on two cores: one thread each."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What the tests find good, or convert, is kept in no one's home."""
    os.environ["SURGERY_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def _distributions(*roots: str) -> set[str]:
    """Names of the distributions that ``roots`` need, with their own, as installed here."""
    from packaging.requirements import Requirement

    found, wanted = set(), list(roots)
    while wanted:
        name = wanted.pop()
        if name not in found:
            try:
                required = metadata.requires(name) or ()
            except metadata.PackageNotFoundError:  # not needed on this system, or the test that needs it will say so
                continue
            found.add(name)
            parsed = map(Requirement, required)
            wanted += [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """Run Python text in an environment of torch and transformers alone, made of links to the packages installed here.

    Called with the text, arguments for its ``sys.argv``, and further distributions; returns what it printed.
    """

    def python(code: str, *arguments: object, more: tuple[str, ...] = ()) -> str:
        site = tmp_path_factory.mktemp("site")
        for name in _distributions("torch", "transformers", *more):
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                link = site / top
                if not link.exists() and not top.endswith(".pth"):
                    link.symlink_to(distribution.locate_file(top))
        start = (
            f"import sys, importlib.util; sys.path.insert(0, {str(site)!r})\n"
            "assert importlib.util.find_spec('surgery') is None, 'surgery can be imported here'\n"
        )
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SURGERY_", "TRITON"))
        }
        environment |= {"HF_HOME": str(site / "home"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-S", "-I", "-c", start + code, *map(str, arguments)],
            cwd=site, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return python
