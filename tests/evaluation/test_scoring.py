"""Scores from a prompt's state are those of whole forward passes, padded or not, and leave the state alone."""

from __future__ import annotations

import random

import pytest
import torch

from surgery.errors import JobError
from surgery.evaluation.perplexity import evaluating
from surgery.evaluation.scoring import (
    State,
    batches,
    candidate_scores,
    check_finite,
    greedy,
    takes_padding,
    teacher_forced,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 50, "tie_word_embeddings": False}
DELTA = {"num_heads": 2, "num_v_heads": 4, "expand_v": 1.0, "intermediate_size": 32}
CONFIGS = {
    "gated_deltanet": {**SMALL, **DELTA, "model_type": "gated_deltanet"},
    "mamba2": {**SMALL, "model_type": "mamba2", "num_heads": 4, "state_size": 8, "n_groups": 2},
}
CONFIGS["with attention"] = {**CONFIGS["gated_deltanet"], "attn": {"layers": [1], "num_heads": 2, "window_size": 7}}


@pytest.fixture(params=CONFIGS)
def model(request):
    from surgery.hosts import adapter_for

    model = adapter_for(CONFIGS[request.param]).build(CONFIGS[request.param]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # sharp enough that a wrong state shows
    return model


def draw(rng, *lengths):
    return [[rng.randrange(1, 50) for _ in range(length)] for length in lengths]


def after(model, prompt, value):
    """Log-probability of a value after a prompt, and whether it is what the model would write, in one forward pass."""
    logs = model(torch.tensor([prompt + value]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(value)
    return logs.gather(1, wanted[:, None]).sum().item(), bool((logs.argmax(-1) == wanted).all())


def test_candidates_then_an_answer_from_padded_prompts(model, fresh_seed, monkeypatch):
    rng = random.Random(fresh_seed)
    prompts = draw(rng, 9, 12, 5)
    values = [draw(rng, 3, 1, 4), draw(rng, 2, 2), draw(rng, 1)]
    monkeypatch.setattr("surgery.evaluation.scoring.STATE_BYTES", 1)  # a copy of the state for each candidate alone
    assert takes_padding(model)
    with evaluating(model):
        state = State.of(model, prompts)
        for _ in range(2):  # the second time finds the same state
            for prompt, row, scores in zip(prompts, values, candidate_scores(state, values), strict=True):
                assert scores.tolist() == pytest.approx([after(model, prompt, value)[0] for value in row], abs=2e-3)
        written = greedy(state, 6).tolist()
        for prompt, answer in zip(prompts, written, strict=True):
            logs = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            chosen = logs.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert torch.allclose(chosen, logs.max(-1).values, atol=2e-3)  # or as good as the best


@pytest.mark.parametrize("plain_head", [True, False])
def test_teacher_forcing_is_one_forward_pass_of_each_document(model, plain_head, fresh_seed, monkeypatch):
    if not plain_head:  # as where a configuration scales the logits: the model itself has to make them
        model.config.logits_scaling = 2.0
    monkeypatch.setattr("surgery.evaluation.scoring.HEAD_TOKENS", 4)
    rng = random.Random(fresh_seed)
    documents = draw(rng, 20, 14)
    for document in documents:  # an answer of two tokens that the model would write itself
        with torch.no_grad():
            for at in (6, 7):
                document[at] = int(model(torch.tensor([document[:at]]), use_cache=False).logits[0, -1].argmax())
    answers = [[(6, 8), (15, 18)], [(6, 8), (9, 10), (12, 14)]]
    with evaluating(model):
        right, nats = teacher_forced(model, documents, answers)
        for document, spans, hits, logs in zip(documents, answers, right, nats, strict=True):
            expected = [after(model, document[:start], document[start:stop]) for start, stop in spans]
            assert logs == pytest.approx([log for log, _ in expected], abs=2e-3)
            assert hits[0] and hits[1:] == [hit for _, hit in expected][1:]


def test_batches_hold_prompts_of_about_one_length(model, make_model, monkeypatch):
    lengths = [100, 30, 100, 31, 99, 30]
    assert list(batches(lengths, model)) == [[1, 5, 3], [4, 0, 2]]
    assert list(batches(lengths, model, padded=False)) == [[1, 5], [3], [4], [0, 2]]
    assert not takes_padding(make_model()) and list(batches([5, 5, 6], make_model())) == [[0, 1], [2]]
    monkeypatch.setattr("surgery.evaluation.scoring.BATCH_TOKENS", 200)
    assert list(batches(lengths, model)) == [[1, 5, 3], [4, 0], [2]]
    assert list(batches([500, 400], model)) == [[1], [0]]  # longer than a batch: alone


def test_an_upstream_model_continues_its_state_alike(make_model, fresh_seed):
    model, rng = make_model(50), random.Random(fresh_seed)
    prompts, values = draw(rng, 9, 9), [draw(rng, 4, 4), draw(rng, 4)]
    with evaluating(model):
        for prompt, row, scores in zip(
            prompts, values, candidate_scores(State.of(model, prompts), values), strict=True
        ):
            assert scores.tolist() == pytest.approx([after(model, prompt, value)[0] for value in row], abs=2e-3)


def test_scores_that_are_no_numbers_are_refused(model):
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
        scores = candidate_scores(State.of(model, [[1, 2]]), [[[3, 4]]])[0]
    with pytest.raises(JobError, match="a task at 2 tokens: probabilities that are not numbers; first not finite"):
        check_finite(scores, model, [1, 2], "a task at 2 tokens")
