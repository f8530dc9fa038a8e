"""Candidates after prompts of different lengths in one batch, as after each prompt alone, on every family."""

from __future__ import annotations

import random

import torch

from surgery.evaluation.perplexity import evaluating
from surgery.evaluation.scoring import State, candidate_scores, greedy, takes_padding
from surgery.hosts import load_model


def test_padding_on_the_left_changes_no_score(case_base, fresh_seed):
    model = load_model(case_base, dtype=torch.float32)
    rng = random.Random(fresh_seed)
    entries = min(model.config.get_text_config().vocab_size, 40)
    prompts, values = (
        [[rng.randrange(2, entries) for _ in range(length)] for length in lengths]
        for lengths in ((9, 13, 6), (3, 1, 4))
    )
    assert takes_padding(model)
    with evaluating(model):
        state = State.of(model, prompts)
        together = candidate_scores(state, [values] * len(prompts))
        answers = greedy(state, 4)
        for prompt, scores, answer in zip(prompts, together, answers.tolist(), strict=True):
            for value, score in zip(values, scores, strict=True):
                logs = model(torch.tensor([prompt + value]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                expected = logs.float().log_softmax(-1).gather(1, torch.tensor(value)[:, None]).sum()
                torch.testing.assert_close(score, expected, atol=2e-3, rtol=1e-3)
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.max(-1).values, atol=2e-3, rtol=1e-3)
