"""Settings every test shares."""

from __future__ import annotations

import os
import zlib

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
