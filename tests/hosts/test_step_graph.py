"""A decoded step that is recorded and replayed does what the step as it is written does: on a CPU with a recorder that
runs the step again, on a GPU with CUDA graphs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from surgery.errors import UsageError
from surgery.models import step_graph


class Recorder:
    """In place of CUDA's: nothing runs while a step is recorded, and all of it whenever it is replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self.recordings = 0

    def __call__(self, blocks, given):
        self.recordings += 1
        made = torch.full_like(given, torch.nan)

        def replay():
            self.replays += 1
            made.copy_(blocks(given))

        return made, replay


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def recorder(device, monkeypatch):
    recorder = Recorder()
    capture = step_graph._capture

    def counted(blocks, given):
        made, replay = capture(blocks, given)
        recorder.recordings += 1

        def again():
            recorder.replays += 1
            replay()

        return made, again

    if device == "cpu":
        monkeypatch.setattr(step_graph, "_on_a_gpu", lambda x: True)
    monkeypatch.setattr(step_graph, "_capture", recorder if device == "cpu" else counted)
    return recorder


def as_written(call, *args, **options):
    """``call(*args, **options)`` without recordings."""
    with step_graph.as_written():
        return call(*args, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def stepped(model, text, tokens, **options):
    """The logits after a prompt and each of ``tokens``."""
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for piece in (text, *tokens.split(1, 1)):
            logits.append(model(piece, cache=cache, use_cache=True, **options).logits[:, -1])
    return torch.stack(logits)


def test_logits_and_states(upgraded, text, device, recorder):
    model, text = upgraded.to(device), text.to(device)
    tokens = torch.randint(3, 64, (2, 11), device=device)
    close(stepped(model, text, tokens), as_written(stepped, model, text, tokens))
    assert recorder.recordings == 1 and recorder.replays == 11 - step_graph.AFTER


@pytest.mark.parametrize("beams", [1, 3])
def test_generation(upgraded, text, device, recorder, beams):
    """Beam search puts other tensors into the cache at each step."""
    model, text = upgraded.to(device), text.to(device)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False, "attention_mask": mask}
    options |= {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}
    found = model.generate(text, **options)
    assert recorder.recordings == 1 and recorder.replays >= 12 - 1 - step_graph.AFTER
    expected = as_written(model.generate, text, **options)
    for one, other in zip(found.scores, expected.scores, strict=True):
        kept = torch.isfinite(other)
        close(one[kept], other[kept])


def test_texts_in_turn_and_longer_pieces_between(upgraded, text, device, recorder):
    """Two caches, each with a recording of its own; a prompt's pieces write the memory that it reads."""
    model, text = upgraded.to(device), text.to(device)

    def run():
        caches, found = [DynamicCache(config=model.config) for _ in range(2)], []
        with torch.no_grad():
            for piece in (slice(0, 9), *(slice(n, n + 1) for n in range(9, 20)), slice(20, 25), slice(25, 26)):
                for cache, rows in zip(caches, (text, text.flip(0)), strict=True):
                    found.append(model(rows[:, piece], cache=cache, use_cache=True).logits[:, -1])
        return torch.stack(found)

    close(run(), as_written(run))
    assert recorder.recordings == 2 and recorder.replays == 2 * (11 - step_graph.AFTER + 1)


def test_what_changes_between_steps(model, text, device, recorder):
    """Weights in place are seen; exchanged ones, hooks, another batch and gradients do without the recording."""
    model, text = model.to(device), text.to(device)
    cache, token = DynamicCache(config=model.config), text[:, :1]
    layer = model.backbone_module.layers[1]

    def step():
        before = recorder.replays
        with torch.no_grad():
            logits = model(token, cache=cache, use_cache=True).logits
        return logits, recorder.replays - before

    for _ in range(step_graph.AFTER + 3):
        _, replayed = step()
    assert replayed == 1
    final = getattr(model.backbone_module, model.backbone_module.norm_name).weight
    with torch.no_grad():
        final.zero_()
    logits, replayed = step()
    assert replayed == 1 and not logits.any()
    replays = recorder.replays
    calls = []
    hook = layer.register_forward_hook(lambda *_: calls.append(1))
    assert step()[1] == 0 and calls == [1]
    hook.remove()
    final.data = torch.ones_like(final)
    logits, replayed = step()
    assert replayed == 0 and logits.any()
    assert model(token, cache=cache, use_cache=True).logits.requires_grad
    with torch.no_grad():
        hidden = model(token, cache=cache, use_cache=True, output_hidden_states=True).hidden_states
    assert len(hidden) > 3 and recorder.replays == replays
    cache.reset()
    assert step()[1] == 0


def test_a_cache_is_let_go(model, text, device, recorder):
    model, text = model.to(device), text.to(device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for _ in range(step_graph.AFTER + 2):
            model(text[:, :1], cache=cache, use_cache=True)
    assert recorder.recordings == 1
    gone, cache = weakref.ref(cache), None
    if device == "cuda":  # the recorder for CPUs holds what it runs
        gc.collect()
        assert gone() is None


def test_what_cannot_be_recorded_runs_as_it_is_written(model, text, monkeypatch):
    tried = []

    def capture(blocks, given):
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(step_graph, "_on_a_gpu", lambda x: True)
    monkeypatch.setattr(step_graph, "_capture", capture)
    tokens = torch.randint(3, 64, (2, 9))
    with pytest.warns(UserWarning, match=r"without a CUDA graph .*: operation not permitted when stream is capturing$"):
        found = stepped(model, text, tokens)
    assert tried == [1]
    close(found, as_written(stepped, model, text, tokens))


def test_a_switch_turns_it_off(model, text, device, recorder, monkeypatch):
    model, text = model.to(device), text.to(device)
    monkeypatch.setenv(step_graph.SWITCH, "0")
    stepped(model, text, text[:, :6])
    assert recorder.recordings == 0
    monkeypatch.setenv(step_graph.SWITCH, "yes")
    with pytest.raises(UsageError, match="choose 0 or 1"):
        stepped(model, text, text[:, :6])
