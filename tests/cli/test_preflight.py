"""What validate passes, apply and distill accept; what they would refuse, validate refuses, all of it at once."""

from __future__ import annotations

import random
import shutil

import pytest

from surgery.errors import UserError
from surgery.recipe import load_recipe

HEAD = "model: base\nlayers: [1]\nmemory: {rule: palimpsa}\ndata: text.txt\n"
HEAD += "evaluation: {text: text.txt, recall: {lengths: [256]}}\n"
PHASE = "phases:\n  - {kind: next-token, steps: 2, context: 32, batch: 64}\n"  # lines 6 and 7
OTHER = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'


@pytest.fixture
def here(bases, tmp_path, monkeypatch):
    """A folder with a base, texts and records, which is the current one."""
    shutil.copytree(bases["mamba2"], tmp_path / "base")
    (tmp_path / "text.txt").write_text("Some text, long enough for all. " * 400)
    (tmp_path / "short.txt").write_text("Too short.\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "other.jsonl").write_text(OTHER)
    (tmp_path / "late.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 100 + OTHER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def phase(more: str) -> str:
    return HEAD + PHASE.replace("batch: 64}", f"batch: 64, {more}}}")


# recipe, the lines and keys that are named, words
REFUSED = {
    "no inspection text": (
        HEAD.replace("[1]", "{top: 1}") + "inspection: {data: txet.txt}\n",
        ["6: inspection.data"], ["no such file", "near it: text.txt"]),
    "short inspection text": (
        HEAD.replace("[1]", "{top: 1}") + "inspection: {data: short.txt}\n", ["6: inspection.data"], ["shorter"]),
    "nothing trained": (phase("trainable: [nomatch]"), ["7: phases[0].trainable"], ["'nomatch' matches no parameter"]),
    "one of two patterns": (phase("trainable: ['*memory*', nomatch]"), ["7: phases[0].trainable"], ["'nomatch'"]),
    "hidden outside": (
        phase("trainable: ['*embeddings*']").replace("next-token", "hidden"),
        ["7: phases[0].trainable"], ["does not reach"]),
    "nothing learns at dose 0": (
        phase("trainable: swapped-memory, dose: {from: 0, to: 0}"), ["7: phases[0].trainable"], ["at dose 0"]),
    "records of another kind": (
        phase("data: other.jsonl").replace("next-token", "instruct"), ["7: phases[0].data"], ["record 1", "no answer"]),
    "a late record of another kind": (
        phase("data: late.jsonl").replace("next-token", "instruct"), ["7: phases[0].data"], ["record 101"]),
    "a context that no text fills": (phase("data: short.txt"), ["7: phases[0].data"], ["context of 32"]),
    "a context beyond memory": (
        HEAD + PHASE.replace("32", "64M").replace("64}", "64M}"), ["7: phases[0].context"], ["16777216"]),
    "steps without end": (
        HEAD + PHASE.replace("steps: 2", "steps: 100000000000000"), ["7: phases[0].steps"], ["no run reads"]),
    "evaluation text": (
        HEAD.replace("evaluation: {text: text", "evaluation: {text: short"), ["5: evaluation.text"], ["shorter"]),
    "recall beyond the text": (
        HEAD.replace("256", "256, 64000") + PHASE, ["5: evaluation.recall.lengths[1]"], ["64000"]),
    "recall twice": (HEAD.replace("256", "256, 256"), ["5: evaluation.recall.lengths[1]"], ["twice"]),
    "lists in a list": (HEAD.replace("data: text.txt", "data: [[text.txt]]"), ["4: data[0]"], ["is not text"]),
    "seed": (HEAD + "seed: 9223372036854775808\n", ["6: seed"], ["below 2^63", "0 to 9 223 372 036 854 775 807"]),
    "longer seed": (HEAD + f"seed: 1{'0' * 60}\n", ["6: seed"], ["0 to 9 223 372 036 854 775 807"]),
    "negative seed": (HEAD + "seed: -1\n", ["6: seed"], ["negative", "0 to 9 223 372 036 854 775 807"]),
    "a choice's seed": (
        HEAD.replace("[1]", "{random: 1, seed: 9223372036854775808}"), ["2: layers.seed"], ["below 2^63"]),
    "infinite option": (HEAD.replace("palimpsa", "palimpsa, b_scale: [1, .inf]"), ["3: memory.b_scale"], ["finite"]),
    "infinite in float32": (
        HEAD.replace("palimpsa", "palimpsa, b_scale: [1, 1e39]"), ["3: memory.b_scale"], ["infinite in float32"]),
    "beyond every float": (
        HEAD.replace("palimpsa", "palimpsa, b_scale: [1, 1e999]"), ["3: memory.b_scale"], ["1e999", "finite"]),
    "zero in float32": (phase("learning_rate: 1e-50"), ["7: phases[0].learning_rate"], ["zero in float32"]),
    "beyond every weight": (
        HEAD.replace("palimpsa", "palimpsa, b_scale: [0, 1e7]"), ["3: memory.b_scale"], ["beyond 1,000,000"]),
    "a rate beyond every weight": (phase("learning_rate: 1e30"), ["7: phases[0].learning_rate"], ["beyond 1,000,000"]),
    "hot": (phase("temperature: 1e30").replace("next-token", "logits"), ["7: phases[0].temperature"], ["beyond"]),
    "cold": (phase("temperature: 1e-30").replace("next-token", "logits"), ["7: phases[0].temperature"], ["overflow"]),
    "a weight alone": (
        phase("boundary_weight: 1e30").replace("next-token", "logits"), ["7: phases[0].boundary_weight"], ["beyond"]),
    "a step too long": (HEAD + PHASE.replace("batch: 64", "batch: 2B"), ["7: phases[0].batch"], ["one step may read"]),
    "NaN option": (
        HEAD.replace("palimpsa", "bayesian, retention: .nan"), ["3: memory.retention"], ["not a finite number"]),
    "rank": (HEAD.replace("palimpsa", "palimpsa, rank: 1M"), ["3: memory.rank"], ["width of 16"]),
    "noise groups": (HEAD.replace("palimpsa", "bayesian, noise_groups: 3"), ["3: memory"], ["does not divide"]),
    "layers": (HEAD.replace("[1]", "[1, 9, 8]"), ["2: layers[1]", "2: layers[2]"], ["layer 9", "layer 8", "0 to 3"]),
    "a path and not a hub": (
        HEAD.replace("data: text.txt", "data: base/absent") + PHASE, ["4: data"], ["no such file"]),
    "a model's path": (HEAD.replace("model: base", "model: ./bass"), ["1: model"], ["no such directory", "base"]),
    "true as a name": (HEAD + PHASE.replace("kind", "name: true, kind"), ["7: phases[0].name"], ["in quotes"]),
    "all at once": (
        HEAD.replace("[1]", "[7]").replace("palimpsa", "palimpsa, rank: 99").replace("data: text", "data: txt")
        .replace("text: text", "text: txet") + PHASE.replace("64}", "64, trainable: [no]}"),
        ["2: layers[0]", "3: memory.rank", "4: data", "5: evaluation.text", "7: phases[0].trainable"], ["near it"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_validate_refuses_what_a_job_would(name, surgery, write_recipe, here):
    text, places, words = REFUSED[name]
    path = write_recipe(text)
    result = surgery("validate", path)
    assert result.code == 2 and result.out == "", result.err
    said = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [line.removeprefix(f"error: {path}:").split(": ")[:2] for line in said] == [
        place.split(": ") for place in places
    ], result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize("name", ["records of another kind", "nothing trained", "all at once"])
def test_distill_refuses_the_same_in_the_same_words_before_it_writes(name, surgery, write_recipe, here):
    path = write_recipe(REFUSED[name][0])
    told = surgery("validate", path).err
    result = surgery("distill", path, "--run", here / "run", "--device", "cpu")
    assert result.code == 2 and result.err.endswith(told), result.err
    assert not (here / "run" / "applied").exists()


def test_every_needle_that_distill_will_ask_for_is_drawn_before(surgery, write_recipe, here, monkeypatch):
    from surgery.errors import UsageError
    from surgery.evaluation import recall

    drawn, prompt = [], recall.needle_prompt

    def fails_late(haystack, rng, length, depth, *rest):
        drawn.append(depth)
        if depth == 1.0 and drawn.count(1.0) == 5:
            raise UsageError("found no prompt")
        return prompt(haystack, rng, length, depth, *rest)

    monkeypatch.setattr(recall, "needle_prompt", fails_late)
    result = surgery("validate", write_recipe(HEAD + PHASE))
    assert result.code == 2 and "5: evaluation.recall.lengths[0]: found no prompt" in result.err, result.err


def test_what_validate_passes_apply_accepts(write_recipe, here):
    """Recipes drawn from good and bad values; the property holds for each."""
    from surgery.operation import apply
    from surgery.validation import validate_recipe

    choices = {
        "model": ["base", "base", "./base", "bass"],
        "layers": ["[1]", "[0, 3]", "{top: 2}", "{random: 2, seed: 3}", "{bottom: 9}", "[9]"],
        "memory": [
            "{rule: palimpsa}", "{rule: palimpsa, rank: 4}", "{rule: palimpsa, rank: 400}", "{rule: host}",
            "{rule: bayesian, noise_groups: 2}", "{rule: bayesian, noise_groups: 3}",
            "{rule: bayesian, noise: constant, start: paper}",
        ],
        "data": ["text.txt", "text.txt", "[text.txt, short.txt]", "short.txt", "absent.txt", "[{path: text.txt}]"],
        "inspection": ["{tokens: 512}", "{tokens: 300, data: text.txt}", "{data: short.txt}", "{data: absent.txt}"],
        "seed": ["0", "9223372036854775807", "9223372036854775808"],
        "evaluation": ["{text: text.txt}", "{text: text.txt}", "{text: short.txt}", "{text: absent.txt}"],
    }  # fmt: skip
    rng = random.Random(0)
    passed = refused = 0
    for _ in range(40):
        text = "".join(f"{key}: {rng.choice(values)}\n" for key, values in choices.items())
        try:
            recipe = load_recipe(write_recipe(text))
            validate_recipe(recipe)
        except UserError:
            refused += 1
            continue
        passed += 1
        report = apply(recipe, None, dry_run=True)
        for layer in report.plan.layers:
            report.plan.create_memory(layer)
    assert passed >= 5 and refused >= 15


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("revision: 3e48291", "revision", "3e48291"),
        ("revision: 1234567", "revision", "1234567"),
        ("revision: 0123", "revision", "0123"),
        ("revision: 1_000", "revision", "1_000"),
        ("revision: .inf", "revision", ".inf"),
        ("revision: 2024-01-01", "revision", "2024-01-01"),
        ("revision: on", "revision", "on"),
        ("data: 2024", "data", "2024"),
        ("data: [2024, 1e3]", "data", ("2024", "1e3")),
    ],
)
def test_text_that_yaml_reads_as_a_number_is_the_text(written, key, value, write_recipe):
    recipe = load_recipe(write_recipe(f"model: 2024\nlayers: [1]\nmemory: {{rule: palimpsa}}\n{written}\n"))
    assert recipe.model == "2024" and getattr(recipe, key) == value
    plain = load_recipe("demo-palimpsa", [written.replace(": ", "=")]).model_dump(mode="json", warnings=False)
    assert plain[key] == (list(value) if isinstance(value, tuple) else value)


def test_numbers_stay_plain_numbers(write_recipe):
    text = HEAD + "seed: 7\n" + phase("learning_rate: 1e-3, warmup: 1, boundary_weight: 2").replace(HEAD, "")
    recipe = load_recipe(write_recipe(text.replace("next-token", "logits")))
    found = recipe.phases[0]
    assert [type(value) for value in (recipe.seed, found.context, found.warmup)] == [int, int, int]
    assert [type(value) for value in (found.learning_rate, found.boundary_weight)] == [float, float]
    assert type(recipe.layers[0]) is int
