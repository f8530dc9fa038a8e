"""From a data specification to batches: what is read, what is kept for the resume, what is never trained on."""

from __future__ import annotations

import json

import pytest
import torch

from surgery.adaptation import data
from surgery.data.texts import documents, load_text
from surgery.errors import UsageError


def test_the_held_out_part_of_the_bundled_text_is_never_read(make_recipe, phase, tokenizer, tmp_path):
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token")], data="bundled")
    built = data.build(recipe, 0, 10**5, tokenizer, 260, tmp_path / "data")
    ids = built.sources[0].ids
    text = tokenizer.decode(ids.tolist())
    assert text == "<|end|>".join([*documents("bundled", "train"), ""])
    held = [part for part in load_text("bundled").text.split("\n\n") if len(part) > 200]
    assert len(held) > 20 and not any(part in text for part in held)


def test_tokens_are_made_once_and_stay(make_recipe, phase, tokenizer, tmp_path, text_file):
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token")])
    first = data.build(recipe, 0, 24, tokenizer, 260, tmp_path / "data")
    before = [first[i]["input_ids"] for i in range(24)]
    text_file.write_text("another text altogether " * 500)  # the run goes on with what it began with
    again = data.build(recipe, 0, 24, tokenizer, 260, tmp_path / "data")
    assert all(torch.equal(again[i]["input_ids"], before[i]) for i in range(24))


def test_no_more_is_tokenised_than_the_phase_reads(make_recipe, phase, tokenizer, tmp_path):
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token")])
    built = data.build(recipe, 0, 20, tokenizer, 260, tmp_path / "data")
    assert len(built.sources[0].ids) == (20 + 10) * 32 + 1 and built.passes(20) == [0]


def test_a_mixture_keeps_its_sources_apart(make_recipe, phase, tokenizer, tmp_path, text_file):
    other = tmp_path / "other.txt"
    other.write_text("Z" * 3000)
    mixture = [{"path": str(text_file), "weight": 1}, {"path": str(other), "weight": 3}]
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token", data=mixture)])
    built = data.build(recipe, 0, 400, tokenizer, 260, tmp_path / "data")
    letter = tokenizer("Z")["input_ids"][0]
    share = sum(int(built[i]["input_ids"][2] == letter) for i in range(400)) / 400
    assert 0.65 < share < 0.85


def test_phases_draw_from_seeds_of_their_own(make_recipe, phase, tokenizer, tmp_path):
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token"), phase("next-token", name="more")])
    orders = [
        [data.build(recipe, n, 24, tokenizer, 260, tmp_path)[i]["input_ids"][:8].tolist() for i in range(24)]
        for n in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context": 20_000, "batch": 20_000}, "shorter than one context of 20000"),
        ({"data": "absent.txt"}, "absent.txt: no such file"),
    ],
)
def test_what_cannot_be_read_is_found_early_with_its_line(make_recipe, phase, tokenizer, keys, message):
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token", **keys)])
    with pytest.raises(UsageError, match=rf"(?s)recipe\.yaml:\d+: .*{message}"):
        data.check(recipe, 0, tokenizer)


def test_records_are_checked_to_the_last(make_recipe, phase, tokenizer, tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' * 40 + '{"prompt": "a"}\n')
    recipe = make_recipe("bundled:tiny-mamba2", [phase("instruct", data=str(path))])
    with pytest.raises(UsageError, match=r"qa\.jsonl, record 41: no answer"):
        data.check(recipe, 0, tokenizer)
    path.write_text('{"prompt": "a", "answer": "' + "b" * 500 + '"}\n')
    with pytest.raises(UsageError, match="no example fits a context of 32"):
        data.check(recipe, 0, tokenizer)


def test_a_bad_record_of_a_later_phase_is_found_before_the_first_step(make_base, make_recipe, phase, tmp_path):
    from surgery.adaptation.run import distill
    from surgery.validation import validate_recipe

    path = tmp_path / "late.jsonl"
    path.write_text('{"text": "fine and long enough to fill a context of so many tokens"}\n' * 500 + '{"text": null}\n')
    recipe = make_recipe(make_base(), [phase("hidden"), phase("next-token", data=str(path))])
    place = r"recipe\.yaml:\d+: phases\[1\]\.data: .*late\.jsonl, record 501: 'text' is null"
    with pytest.raises(UsageError, match=place):
        validate_recipe(recipe)
    with pytest.raises(UsageError, match=place):
        distill(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "phases" / "01-hidden" / "metrics.jsonl").exists()


def test_an_entry_names_its_column(make_recipe, phase, tokenizer, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": 7, "body": "' + "the body of it " * 30 + '"}\n')
    entry = {"path": str(path), "column": "body"}
    built = [
        data.build(make_recipe("bundled:tiny-mamba2", [phase("next-token", data=spec)]), 0, 4, tokenizer, 260, tmp_path)
        for spec in (entry, [entry], f"{path},column=body")
    ]
    ids = built[0].sources[0].ids
    assert tokenizer.decode(ids.tolist()).startswith("the body of it")
    assert all((other.sources[0].ids == ids).all() for other in built)


def test_a_run_keeps_to_the_commit_that_it_began_with(make_recipe, phase, tokenizer, tmp_path, monkeypatch):
    import sys
    import types

    from surgery.data import hub

    loaded = []

    def load(name, config=None, *, split, revision, streaming):
        loaded.append(revision)
        return iter([{"text": f"as of {revision} " * 40}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    recipe = make_recipe("bundled:tiny-mamba2", [phase("next-token", data="hub:owner/name")])
    for head in ("a" * 40, "b" * 40):
        hub._commit.cache_clear()  # another process

        def info(self, name, *, revision=None, timeout=None, head=head):
            return types.SimpleNamespace(sha=revision or head)

        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
        # another length reads the stream again
        data.build(recipe, 0, len(loaded) + 1, tokenizer, 260, tmp_path / "data")
    assert loaded == ["a" * 40] * 2
    assert json.loads((tmp_path / "data.json").read_text()) == {"owner/name@main": "a" * 40}
    hub._commit.cache_clear()
