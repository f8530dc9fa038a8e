"""Every wrong recipe gets at most five lines: file and line, YAML path, remedy, and a suggestion where there is one."""

from __future__ import annotations

import pytest

HEAD = "model: bundled:tiny-gdn\nlayers: [1]\nmemory: {rule: bayesian}\n"  # lines 1 to 3
PHASE = "phases:\n  - kind: logits\n    tokens: 1M\n"  # lines 4 to 6
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

# recipe, line, YAML path, words that the message holds
CASES = {
    "unknown key": (HEAD + "phasess: []\n", 4, "phasess", ["unknown key", "did you mean 'phases'", "known keys"]),
    "unknown key in a phase": (HEAD + PHASE + "    tokns: 1\n", 7, "phases[0].tokns", ["did you mean 'tokens'"]),
    "unknown key in memory": (
        HEAD.replace("{rule: bayesian}", "{rule: bayesian, retension: 1}"), 3, "memory.retension", ["'retention'"]),
    "unknown key in a mixture": (HEAD + "data: [{path: x, wieght: 2}]\n", 4, "data[0].wieght", ["'weight'"]),
    "duplicate key": (HEAD + "seed: 1\nseed: 2\n", 5, "seed", ["duplicate key", "line 4", "keep one"]),
    "duplicate key in a phase": (HEAD + PHASE + "    kind: hidden\n", 7, "phases[0].kind", ["duplicate", "line 5"]),
    "empty": ("", None, "", ["is empty", "model, layers and memory"]),
    "only comments": ("# nothing\n\n", None, "", ["is empty"]),
    "a list": ("- 1\n", 1, "", ["a list, not keys"]),
    "a scalar": ("palimpsa\n", 1, "", ["text, not keys"]),
    "alias bomb": (BOMB, 1, "a", ["anchors and aliases", "write the value out"]),
    "merge key": ("a: {b: 1}\n<<: *a\n", 2, "<<", ["anchors and aliases"]),
    "python tag": (HEAD + "seed: !!python/object/apply:os.system ['touch pwned']\n", 4, "seed", ["!!python", "'!'"]),
    "any tag": (HEAD + "seed: !!int '3'\n", 4, "seed", ["the tag '!!int'"]),
    "second document": (HEAD + "---\n" + HEAD, 4, "", ["second YAML document"]),
    "tab": ("model: x\n\tlayers: [1]\n", 2, "", ["not valid YAML", "tabs"]),
    "unclosed bracket": ("layers: [1, 2\nmodel: x\n", 2, "", ["not valid YAML", "brackets"]),
    "bad character": (HEAD + "seed: \x01\n", 4, "", ["not allowed in YAML"]),
    "too deep": (HEAD + "seed: " + "[" * 5000 + "]" * 5000 + "\n", 4, "seed", ["nested deeper"]),
    "missing model": (HEAD.replace("model: bundled:tiny-gdn\n", ""), 1, "model", ["is missing", "add for example"]),
    "missing rule": (HEAD.replace("rule: bayesian", "start: exact"), 3, "memory.rule", ["is missing", "palimpsa"]),
    "misspelt rule": (HEAD.replace("bayesian", "baysian"), 3, "memory.rule", ["did you mean 'bayesian'"]),
    "another rule's option": (
        HEAD.replace("bayesian}", "bayesian, rank: 4}"), 3, "memory.rank", ["option of rule palimpsa", "noise_groups"]),
    "misspelt kind": (HEAD + PHASE.replace("logits", "logit"), 5, "phases[0].kind", ["did you mean 'logits'"]),
    "negative tokens": (HEAD + PHASE.replace("1M", "-1M"), 6, "phases[0].tokens", ["'-1M' is negative", "300M"]),
    "negative whole tokens": (HEAD + PHASE.replace("1M", "-5"), 6, "phases[0].tokens", ["-5 is negative"]),
    "letter O": (HEAD + PHASE.replace("1M", "1O0M"), 6, "phases[0].tokens", ["'1O0M' is not a size", "300M"]),
    "zero tokens": (HEAD + PHASE.replace("1M", "0"), 6, "phases[0].tokens", ["less than 1"]),
    "true tokens": (HEAD + PHASE.replace("1M", "true"), 6, "phases[0].tokens", ["True is not a size"]),
    "NaN learning rate": (
        HEAD + PHASE + "    learning_rate: .nan\n", 7, "phases[0].learning_rate", ["not a finite", "1.0e-3"]),
    "nan learning rate": (HEAD + PHASE + "    learning_rate: nan\n", 7, "phases[0].learning_rate", ["not a finite"]),
    "infinite learning rate": (HEAD + PHASE + "    learning_rate: .inf\n", 7, "phases[0].learning_rate", ["finite"]),
    "negative learning rate": (
        HEAD + PHASE + "    learning_rate: -1e-3\n", 7, "phases[0].learning_rate", ["not above 0"]),
    "NaN in one of two rates": (
        HEAD + PHASE + "    learning_rate:\n      memory: 1e-3\n      host: .nan\n", 9, "phases[0].learning_rate.host",
        ["not a finite"]),
    "half a pair of rates": (
        HEAD + PHASE + "    learning_rate: {memory: 1e-3}\n", 7, "phases[0].learning_rate.host", ["is missing"]),
    "no budget": (HEAD + "phases:\n  - kind: logits\n", 5, "phases[0]", ["neither tokens nor steps", "100M"]),
    "two budgets": (HEAD + PHASE + "    steps: 10\n", 7, "phases[0].steps", ["both given"]),
    "phases is a mapping": (HEAD + "phases: {kind: hidden}\n", 4, "phases", ["a mapping, not a list"]),
    "a phase is text": (HEAD + "phases: [hidden]\n", 4, "phases[0]", ["text, not a mapping"]),
    "duplicate layers": (HEAD.replace("[1]", "[3, 1, 3]"), 2, "layers[2]", ["layer 3 is named twice"]),
    "no layers": (HEAD.replace("[1]", "[]"), 2, "layers", ["no layer is named", "top: 8"]),
    "layers is a number": (HEAD.replace("[1]", "4"), 2, "layers", ["not understood", "top: 8"]),
    "negative layer": (HEAD.replace("[1]", "[-1]"), 2, "layers[0]", ["-1 is negative"]),
    "top and bottom": (HEAD.replace("[1]", "{top: 1, bottom: 2}"), 2, "layers", ["top and bottom"]),
    "top zero": (HEAD.replace("[1]", "{top: 0}"), 2, "layers.top", ["less than 1"]),
    "misspelt metric": (HEAD.replace("[1]", "{top: 1, by: men}"), 2, "layers.by", ["did you mean 'mean'"]),
    "metric of a random choice": (HEAD.replace("[1]", "{random: 1, by: mean}"), 2, "layers.by", ["means nothing"]),
    "dose above 1": (HEAD + PHASE + "    dose: {to: 1.5}\n", 7, "phases[0].dose.to", ["between 0 and 1"]),
    "dose over nothing": (HEAD + PHASE + "    dose: {over: 0}\n", 7, "phases[0].dose.over", ["fraction"]),
    "batch below context": (HEAD + PHASE + "    batch: 1k\n", 7, "phases[0].batch", ["no sequence of 2048", "2048"]),
    "tokens below context": (
        HEAD + PHASE.replace("1M", "100"), 6, "phases[0].tokens", ["less than one context of 2048"]),
    "warm-up longer than the phase": (
        HEAD + PHASE + "    warmup: 50\n", 7, "phases[0].warmup", ["50 steps of warm-up", "fraction"]),
    "temperature elsewhere": (
        HEAD + PHASE.replace("logits", "hidden") + "    temperature: 2\n", 7, "phases[0].temperature",
        ["kind: logits"]),
    "hidden trains all": (
        HEAD + PHASE.replace("logits", "hidden") + "    trainable: all\n", 7, "phases[0].trainable", ["swapped"]),
    "misspelt trainable": (HEAD + PHASE + "    trainable: swaped\n", 7, "phases[0].trainable", ["mean 'swapped'"]),
    "host trains its memory": (
        HEAD.replace("bayesian", "host") + PHASE.replace("logits", "next-token") + "    trainable: swapped-memory\n",
        7, "phases[0].trainable", ["adds no parameters"]),
    "host has a dose": (
        HEAD.replace("bayesian", "host") + PHASE.replace("logits", "next-token") + "    dose: {to: 1}\n",
        7, "phases[0].dose", ["no dose"]),
    "host starts as in the paper": (
        HEAD.replace("bayesian}", "host, start: paper}"), 3, "memory.start", ["nothing to start"]),
    "host is its own teacher": (HEAD.replace("bayesian", "host") + PHASE, 5, "phases[0].kind", ["next-token"]),
    "instruct on the bundled text": (
        HEAD + PHASE.replace("logits", "instruct"), 5, "phases[0]", ["no questions and answers", "data:"]),
    "no data for another's model": (
        HEAD.replace("bundled:tiny-gdn", "owner/name") + PHASE, 5, "phases[0]", ["no data", "add data: PATH"]),
    "no data to measure N_t": (
        HEAD.replace("bundled:tiny-gdn", "owner/name").replace("[1]", "{top: 1}"), 2, "layers", ["data: PATH"]),
    "empty data": (HEAD + "data: []\n", 4, "data", ["empty"]),
    "negative weight": (HEAD + "data: [{path: x, weight: -1}]\n", 4, "data[0].weight", ["not above 0"]),
    "NaN drift": (HEAD + "max_drift: {kl: .nan}\n", 4, "max_drift.kl", ["not a finite"]),
    "phase names that clash": (
        HEAD + PHASE + "    name: a\n  - kind: logits\n    tokens: 1M\n    name: a\n", 10, "phases[1].name",
        ["own name"]),
    "phase name that is no folder": (HEAD + PHASE + "    name: ../up\n", 7, "phases[0].name", ["folder"]),
    "recall too short": (
        HEAD + "evaluation: {recall: {lengths: [8]}}\n", 4, "evaluation.recall.lengths[0]", ["128 or more"]),
    "unknown dtype": (HEAD + "export: {dtype: bf16}\n", 4, "export.dtype", ["bfloat16"]),
    "bad shard size": (HEAD + "export: {shard_size: 5G}\n", 4, "export.shard_size", ["5GB"]),
}  # fmt: skip


def check(result, tmp_path, words):
    """At most five lines of plain words, on stderr alone, exit code 2, and nothing written."""
    assert result.code == 2, result.err
    assert result.out == ""
    lines = result.err.splitlines()
    assert 1 <= len(lines) <= 5, result.err
    assert lines[0].startswith("error: ")
    for sign in ("Traceback", "pydantic", "yaml.", 'File "'):
        assert sign not in result.err
    for word in words:
        assert word in result.err, result.err
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.yaml"}


@pytest.mark.parametrize("name", CASES)
def test_wrong_recipe(name, surgery, write_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, line, place, words = CASES[name]
    path = write_recipe(text)
    for command in (("validate", path), ("apply", path, "--output", tmp_path / "out")):
        result = surgery(*command)
        check(result, tmp_path, words)
        where = f"error: {path}:{line}: " if line else f"error: {path}: "
        assert result.err.startswith(f"{where}{place}: " if place else where), result.err


@pytest.mark.parametrize(
    ("setting", "place", "words"),
    [
        ("phases.0.tokens=1O0M", "phases[0].tokens: ", ["'1O0M' is not a size", "300M"]),
        ("phases[0].tokens=-1", "phases[0].tokens: ", ["negative"]),
        ("phases.0.tokns=1M", "phases[0].tokns: ", ["did you mean 'tokens'"]),
        ("phases.7.tokens=1M", "there is no phases.7", ["has 1 in all"]),
        ("phases.x.tokens=1M", "there is no phases.x", ["phases[0]"]),
        ("sed=1", "sed: ", ["did you mean 'seed'"]),
        ("seed.x=1", "seed: ", ["not a whole number"]),
        ("model.x=1", "model holds a value", ["as a whole"]),
        ("export.typo.deep=1", "export.typo: ", ["unknown key"]),
        ("seed", "is not KEY=VALUE", ["--set phases.0.tokens=1M"]),
        ("=3", "is not KEY=VALUE", []),
        ("seed=", "seed: ", ["has no value"]),
        ("layers=[1", "", ["not valid YAML"]),
        ("seed=&a 1", "", ["anchors"]),
        ("layers=[2, 2]", "layers[1]: ", ["named twice"]),
        ("phases.0.batch=1k", "phases[0].batch: ", ["no sequence"]),
    ],
)
def test_wrong_override_is_named(setting, place, words, surgery, write_recipe, tmp_path):
    result = surgery("validate", write_recipe(HEAD + PHASE), "--set", setting)
    check(result, tmp_path, words)
    assert result.err.startswith(f"error: --set {setting}"), result.err
    assert place in result.err


def test_every_problem_is_said_with_its_line(surgery, write_recipe, tmp_path):
    path = write_recipe(HEAD + PHASE.replace("1M", "-1") + "    context: none\n")
    places = [f"error: {path}:6: phases[0].tokens: ", f"error: {path}:7: phases[0].context: "]
    check(surgery("validate", path), tmp_path, places)
    path = write_recipe(HEAD + PHASE + "    steps: 4\n    dose: {to: 1}\n")
    result = surgery("validate", path, "--set", "memory.rule=host", "--set", "evaluation.recall.lengths=[9]")
    assert result.code == 2
    said = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[2] for line in said if not line.startswith("error: --set")] == [
        "phases[0].kind", "phases[0].steps", "phases[0].dose"
    ]  # fmt: skip
    assert any("evaluation.recall.lengths[0]" in line for line in said)


def test_a_thousand_problems_are_counted(surgery, write_recipe):
    result = surgery("validate", write_recipe(HEAD + "".join(f"key{number}: 1\n" for number in range(1000))))
    assert result.code == 2 and result.err.count("error: ") == 20
    assert result.err.endswith("(980 more after these)\n")


@pytest.mark.parametrize("setting", ["--set sed=1 --set seeed=2", "--set a --set b"])
def test_every_wrong_override_is_said(setting, surgery, write_recipe):
    result = surgery("validate", write_recipe(HEAD), *setting.split())
    assert result.code == 2 and result.err.count("error: ") == 2


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "".join(f"key{number}: 1\n" for number in range(5_000)),
        HEAD + "phases:\n" + "  - {kind: logits, tokens: 1M}\n" * 4_000,
        HEAD + "phases:\n" + "  - {kind: logits, tokens: 1M, name: a, tokns: 1}\n" * 2_000,
        HEAD + f"evaluation: {{recall: {{lengths: [{'1, ' * 10_000}1]}}}}\n",
    ],
    ids=["unknown keys", "phases", "unknown keys in phases", "lengths"],
)
def test_long_recipes_take_linear_work(text, write_recipe):
    """Counted in calls rather than in seconds: n entries may not cost n squared."""
    import sys

    from surgery.errors import UsageError
    from surgery.recipe import load_recipe

    path = write_recipe(text)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        load_recipe(path)
    except UsageError as error:
        assert len(str(error)) < 20_000
    finally:
        sys.setprofile(None)
    assert calls < 15 * len(text)


def test_layers_are_compared_a_few_times_each(write_recipe):
    from surgery.recipe import load_recipe
    from surgery.recipe.semantics import problems

    class Layer(int):
        compared = 0

        def __eq__(self, other):
            Layer.compared += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    recipe = load_recipe(write_recipe(HEAD))
    many = recipe.model_copy(update={"layers": tuple(Layer(number % 1500) for number in range(3000))})
    assert len(list(problems(many))) == 1500
    assert Layer.compared < 10 * 3000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: \xff\xfe\n", [":1: ", "UTF-8"]),
        (b"# " + b"x" * 2_000_000, ["larger than"]),
    ],
)
def test_files_that_are_no_text(content, words, surgery, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    check(surgery("validate", path), tmp_path, [str(path), *words])


def test_paths_that_are_no_recipe(surgery, tmp_path):
    check(surgery("validate", tmp_path), tmp_path, ["is a directory"])
    check(surgery("validate", tmp_path / "none.yaml"), tmp_path, ["no such file", "surgery recipes"])
    check(surgery("validate", "demo-baysian"), tmp_path, ["did you mean 'demo-bayesian'"])
    check(surgery("recipes", "show", "demo-baysian"), tmp_path, ["did you mean 'demo-bayesian'"])


def test_an_alias_bomb_costs_no_memory(write_recipe):
    import tracemalloc

    from surgery.errors import UsageError
    from surgery.recipe import load_recipe

    path = write_recipe(BOMB)
    tracemalloc.start()
    with pytest.raises(UsageError):
        load_recipe(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_debug_shows_the_traceback(surgery, write_recipe):
    from surgery.errors import UsageError

    with pytest.raises(UsageError):
        surgery("validate", write_recipe(HEAD + "sed: 1\n"), "--debug")
