"""Weights that are not finite or not plausible are found, wherever they stand, and named with their value."""

from __future__ import annotations

import itertools
import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file

from surgery.checkpoint import values
from surgery.checkpoint.reading import Checkpoint, read_header
from surgery.checkpoint.values import check_values, extremes
from surgery.errors import UsageError


@pytest.fixture
def write(tmp_path):
    """A checkpoint of the given tensors; calling again writes over it, a second later by the file's own time."""
    times = itertools.count(1)

    def make(**tensors):
        save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        os.utime(tmp_path / "model.safetensors", (next(times),) * 2)
        (tmp_path / "config.json").write_text(json.dumps({}))
        entries = {entry.name: entry for entry in read_header(tmp_path / "model.safetensors")}
        return Checkpoint(tmp_path, {}, ("model.safetensors",), entries, {})

    return make


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.0e7])
def test_one_wrong_value_is_named_in_every_block(write, dtype, value, monkeypatch):
    if dtype == torch.float16 and math.isfinite(value):
        pytest.skip("half precision holds no such number")
    monkeypatch.setattr(values, "BLOCK", 64)  # several blocks in each tensor
    for index in (0, 17, 104):
        weight = torch.randn(7, 15).to(dtype)
        weight.view(-1)[index] = value
        checkpoint = write(a=torch.ones(3), b__weight=weight)
        with pytest.raises(UsageError) as caught:
            check_values(checkpoint)
        shown = f"{weight.view(-1)[index].item():.4g}"
        assert f"b.weight holds {shown} at [{index // 15}, {index % 15}], with 1 of its 105" in str(caught.value)
        assert str(checkpoint.directory / "model.safetensors") in str(caught.value)
        assert len(str(caught.value).splitlines()) == 2


def test_sound_weights_pass_and_their_largest_is_known(write):
    weight = torch.randn(40, 9)
    weight[31, 4] = -70_000.0
    more = {"d": torch.arange(4), "e__A_log": torch.tensor([70.0])}
    checkpoint = write(a=torch.zeros(0), b=torch.tensor(3.0), c=weight, **more)
    check_values(checkpoint)
    assert {one.name: one.value for one in extremes(checkpoint)} == {"b": 3.0, "c": -70_000.0, "e.A_log": 70.0}
    assert max(extremes(checkpoint), key=lambda one: abs(one.value)).place == [31, 4]


def test_exponents_have_a_limit_of_their_own(write):
    with pytest.raises(UsageError, match=r"layers.2.A_log holds 90 at \[1\].*exponential overflows"):
        check_values(write(layers__2__A_log=torch.tensor([1.0, 90.0]), dt_bias=torch.tensor([90.0])))


def test_what_nothing_reads_may_hold_anything(write):
    checkpoint = write(a=torch.ones(3), rest=torch.full((2,), math.nan))
    check_values(checkpoint, lambda name: name == "rest")
    del checkpoint.tensors["rest"]
    check_values(checkpoint)


def test_a_file_that_changed_is_read_again(write):
    check_values(write(a=torch.ones(3)))
    with pytest.raises(UsageError, match="nan at"):
        check_values(write(a=torch.full((4,), math.nan)))
