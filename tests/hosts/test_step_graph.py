"""A decoded step that is recorded and replayed does what the step as it is written does: on a CPU with a recorder that
plays its operators again, on a GPU with CUDA graphs."""

from __future__ import annotations

import gc
import weakref

import accelerate
import pytest
import torch
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from surgery import hosts
from surgery.errors import UsageError
from surgery.graft import Graft
from surgery.kernels import dispatch
from surgery.models import step_graph


class Tape(TorchDispatchMode):
    """In place of a CUDA graph: the operators that ran, on the tensors that they ran on, and no Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = []
        self.before = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for value, argument in zip(args, operator._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.setdefault(id(value), (value, value.clone()))
        out = operator(*args, **(kwargs or {}))
        self.operators.append((operator, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for operator, args, kwargs, out in self.operators:
            again = operator(*args, **kwargs)
            for one, other in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(one, torch.Tensor) and one is not other:
                    one.copy_(other)


class Recorder:
    """Counts; on a CPU it records with a :class:`Tape`, and puts back what ran: nothing does in a recording."""

    def __init__(self, capture) -> None:
        self.capture = capture
        self.replays = self.recordings = 0

    def __call__(self, blocks, given):
        self.recordings += 1
        if self.capture is None:
            with Tape() as tape:
                made = blocks(given)
            for value, before in tape.before.values():
                value.copy_(before)
            made.fill_(torch.nan)
            replay = tape.replay
        else:
            made, replay = self.capture(blocks, given)

        def counted():
            self.replays += 1
            replay()

        return made, counted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def recorder(device, monkeypatch):
    recorder = Recorder(step_graph._capture if device == "cuda" else None)
    if device == "cpu":
        monkeypatch.setattr(step_graph, "_on_a_gpu", lambda x: True)
    monkeypatch.setattr(step_graph, "_capture", recorder)
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


def test_steps_are_the_whole_text(upgraded, text, device, recorder, monkeypatch):
    """Token by token, by the rules' kernels for one token, which write a cache's states in place."""
    if device == "cpu":  # in Triton's interpreter
        monkeypatch.setattr(dispatch, "steps", lambda q, k, v, state: v.shape[1] == 1 and state is not None)
    model, text = upgraded.to(device), text.to(device)
    with torch.no_grad():
        whole = model(text).logits.transpose(0, 1)[-12:]
    given = model, text[:, :-11], text[:, -11:]
    # the tape does not see what the interpreter does
    close(as_written(stepped, *given) if device == "cpu" else stepped(*given), whole)


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
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1)):
        assert step()[1] == 0 and len(calls) > 3
    final.data = torch.ones_like(final)
    logits, replayed = step()
    assert replayed == 0 and logits.any()
    assert model(token, cache=cache, use_cache=True).logits.requires_grad
    with torch.no_grad():
        hidden = model(token, cache=cache, use_cache=True, output_hidden_states=True).hidden_states
    assert len(hidden) > 3 and recorder.replays == replays
    cache.reset()
    assert step()[1] == 0


class Louder(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **options):
        return 2 * self.block(*args, **options)


def wrap(model):
    model.backbone_module.layers[1] = Louder(model.backbone_module.layers[1])


def replace_forward(model):
    block = model.backbone_module.layers[1]
    forward = block.forward
    block.forward = lambda *args, **options: 2 * forward(*args, **options)


def offload(model):
    accelerate.cpu_offload(model.backbone_module.layers[1].mixer.out_proj, next(model.parameters()).device)


def parametrise(model):
    parametrizations.orthogonal(model.backbone_module.layers[1].mixer.out_proj)


def exchange_layers(model):
    layers = model.backbone_module.layers
    layers[0], layers[2] = layers[2], layers[0]
    layers[0].mixer.layer_idx, layers[2].mixer.layer_idx = 0, 2  # each goes on with the other's states


def train(model):
    model.train()


@pytest.mark.parametrize("change", [wrap, replace_forward, offload, parametrise, exchange_layers, train])
def test_other_blocks_than_were_recorded(bases, text, device, recorder, change):
    def run():
        model = hosts.load_model(bases["mamba2"]).to(device)
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            for number in range(16):
                if number == 8:
                    change(model)
                found.append(model(text.to(device)[:, number : number + 1], cache=cache, use_cache=True).logits)
        return torch.stack(found)

    found, before = run(), recorder.replays
    again = 8 - step_graph.AFTER if change in (exchange_layers, train) else 0
    assert before == (8 - 1 - step_graph.AFTER) + again
    close(found, as_written(run))


def exchange(one, two):
    one[0], two[0] = two[0], one[0]


def share(one, two):
    two[0] = one[0]


@pytest.mark.parametrize(("change", "replayed"), [(exchange, 9), (share, 7)])
def test_states_that_layers_exchange_or_share(model, text, device, recorder, change, replayed):
    """Exchanged ones are put in their places; of a shared one a recording, which has two, would make another thing."""
    model, text = model.to(device), text.to(device)

    def run():
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            for number in range(9):
                if number == 7:
                    change(cache.layers[0].recurrent_states, cache.layers[2].recurrent_states)
                found.append(model(text[:, number : number + 1], cache=cache, use_cache=True).logits)
        return torch.stack(found)

    close(run(), as_written(run))
    assert recorder.replays == replayed - 1 - step_graph.AFTER


def test_saved_states_are_known_to_be_overwritten(upgraded, text, device, recorder, monkeypatch):
    """By a kernel for one token, which autograd does not see, and by a replay."""
    if device == "cpu":
        monkeypatch.setattr(dispatch, "steps", lambda q, k, v, state: v.shape[1] == 1 and state is not None)
        monkeypatch.setattr(recorder, "capture", lambda blocks, given: (blocks(given), lambda: None))
    model, text = upgraded.to(device), text.to(device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, cache=cache, use_cache=True)
        for _ in range(step_graph.AFTER + 2):
            for layer in cache.layers:
                before = layer.recurrent_states[0]._version
                model(text[:, :1], cache=cache, use_cache=True)
                assert layer.recurrent_states[0]._version > before
    assert recorder.replays


def test_a_hook_on_the_memory_sees_both_states(upgraded, text, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(dispatch, "steps", lambda q, k, v, state: v.shape[1] == 1 and state is not None)
    model, text = upgraded.to(device), text.to(device)
    cache, seen = DynamicCache(config=model.config), []
    with torch.no_grad():
        model(text, cache=cache, use_cache=True)
        memory = next(module.memory for module in model.modules() if isinstance(module, Graft))
        memory.register_forward_hook(lambda _, given, made: seen.append(torch.equal(given[1], made[1])))
        model(text[:, :1], cache=cache, use_cache=True)
    assert seen == [False]


def test_compiled_in_one_graph(model, text, recorder, device):
    """A compiled model decodes without recordings of its own."""
    if device == "cuda":
        pytest.skip("its code is made for a CPU here")
    tokens = torch.randint(3, 64, (2, 6))
    expected = as_written(stepped, model, text, tokens)
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        found.append(model(text, cache=cache, use_cache=True).logits[:, -1])
        found += [step(token, cache=cache, use_cache=True).logits[:, -1] for token in tokens.split(1, 1)]
    close(torch.stack(found), expected)
    assert recorder.recordings == 0


def test_inference_mode_between(model, text, device, recorder):
    model, text = model.to(device), text.to(device)

    def run():
        cache, found = DynamicCache(config=model.config), []
        for number in range(18):
            with torch.inference_mode() if 6 <= number < 12 else torch.no_grad():
                found.append(model(text[:, number : number + 1], cache=cache, use_cache=True).logits.clone())
        return torch.stack(found)

    close(run(), as_written(run))
    assert recorder.recordings == 3


def test_cache_and_model_are_let_go(base, text, device, recorder):
    model, text = hosts.load_model(base).to(device), text.to(device)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            for _ in range(step_graph.AFTER + 2):
                model(text[:, :1], cache=cache, use_cache=True)
    assert recorder.recordings == 2
    gone, cache = weakref.ref(caches[0]), caches[1]
    caches.clear()
    gc.collect()
    assert gone() is None
    gone, model = weakref.ref(model), None
    gc.collect()
    assert gone() is None and cache is not None


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_what_cannot_be_recorded_runs_as_it_is_written(model, text, monkeypatch, kind):
    tried = []

    def capture(blocks, given):
        tried.append(1)
        raise kind("operation not permitted when stream is capturing\nand more")

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
