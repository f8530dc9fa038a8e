"""On a GPU, beside flash-linear-attention itself: the mixer against its recurrent and chunked forwards, and a model
read from what that library wrote. Skipped where it is not installed.

Run with: pytest -m gpu tests/hosts/test_gpu_fla.py
"""

from __future__ import annotations

import pytest
import torch

from surgery import hosts
from surgery.graft import GatedDeltaGraft
from surgery.memory import MemoryGeometry, create

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = [
    {"num_heads": 4},
    {"num_heads": 2, "num_v_heads": 4, "allow_neg_eigval": True},
    {"num_heads": 2, "use_short_conv": False, "use_gate": False},
]


@pytest.fixture
def fla_layer():
    """Factory: (the library's layer, the graft with its parameters), on the GPU in a dtype."""
    pytest.importorskip("fla")
    from fla.layers.gated_deltanet import GatedDeltaNet

    def make(dtype, *, num_heads, num_v_heads=None, use_short_conv=True, use_gate=True, allow_neg_eigval=False):
        options = {"use_short_conv": use_short_conv, "use_gate": use_gate}
        theirs = GatedDeltaNet(
            hidden_size=256, expand_v=1, head_dim=64, num_heads=num_heads, num_v_heads=num_v_heads, layer_idx=0,
            allow_neg_eigval=allow_neg_eigval, norm_eps=1e-5, **options,
        )  # fmt: skip
        shape = MemoryGeometry(
            style="delta", hidden_size=256, num_heads=num_v_heads or num_heads, num_key_heads=num_heads, key_dim=64,
            value_dim=64, negative_eigenvalues=allow_neg_eigval,
        )  # fmt: skip
        mine = GatedDeltaGraft(create("host", shape), norm_eps=1e-5, **options)
        mine.load_state_dict(theirs.state_dict(), strict=False)
        decays = {name: value.data for name, value in theirs.named_parameters() if name in ("A_log", "dt_bias")}
        theirs = theirs.to("cuda", dtype).eval()
        for name, value in decays.items():
            theirs.get_parameter(name).data = value.to("cuda")
        return theirs, mine.to("cuda", dtype).eval()

    return make


def relative(measured, expected):
    return ((measured.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("tokens", [37, 64, 1000])  # up to 64 tokens the library runs its recurrent form
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
def test_forward_equals_the_library(fla_layer, options, tokens, dtype, tolerance):
    """The library's chunked products run in tf32 or bf16, so its own precision bounds the agreement."""
    theirs, mine = fla_layer(dtype, **options)
    hidden = torch.randn(2, tokens, 256, device="cuda", dtype=dtype)
    with torch.no_grad():
        expected = theirs(hidden)[0]
        measured = mine(hidden)
        exact = mine.double()(hidden.double())
    assert relative(measured, expected) < tolerance
    # no further from the layer in float64 than the library is, up to the rounding of the output itself
    assert relative(measured, exact) < 1.5 * relative(expected, exact) + torch.finfo(dtype).eps


@pytest.mark.parametrize("options", LAYERS)
def test_padding_equals_the_library(fla_layer, options):
    theirs, mine = fla_layer(torch.float32, **options)
    hidden = torch.randn(2, 150, 256, device="cuda")
    mask = torch.ones(2, 150, dtype=torch.long, device="cuda")
    mask[0, :41] = 0
    with torch.no_grad():
        expected, measured = theirs(hidden, attention_mask=mask)[0], mine(hidden, attention_mask=mask)
    assert relative(measured[mask.bool()], expected[mask.bool()]) < 5e-3


def test_reads_what_the_library_wrote(tmp_path):
    models = pytest.importorskip("fla.models")
    config = models.GatedDeltaNetConfig(
        hidden_size=256, num_heads=2, num_v_heads=4, head_dim=64, expand_v=1, num_hidden_layers=3, vocab_size=512
    )
    upstream = models.GatedDeltaNetForCausalLM(config).cuda().eval()
    upstream.save_pretrained(tmp_path)
    mine = hosts.load_model(tmp_path, device="cuda")
    text = torch.randint(3, 512, (2, 300), device="cuda")
    with torch.no_grad():
        expected, measured = upstream(text).logits, mine(text).logits
    assert relative(measured, expected) < 5e-3
    mine.save_pretrained(tmp_path / "again")
    _, report = models.GatedDeltaNetForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
