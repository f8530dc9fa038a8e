"""The recipe: the shipped ones, defaults, sizes, overrides, doses, and what is handed on."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from surgery.errors import UsageError
from surgery.recipe import LayerChoice, load_recipe, shipped
from surgery.recipe.schema import OPTIONS_OF
from surgery.sizes import format_count, parse_bytes, parse_count

SHIPPED = (
    "demo-bayesian",
    "demo-bayesian-control",
    "demo-palimpsa",
    "demo-palimpsa-control",
    "gdn-340m-bayesian",
    "gdn-340m-control",
    "gpu-bayesian",
    "gpu-bayesian-control",
    "gpu-palimpsa",
    "gpu-palimpsa-control",
    "mamba2-2.7b-control",
    "mamba2-2.7b-palimpsa",
)
MINIMAL = "model: bundled:tiny-gdn\nlayers: [1]\nmemory: {rule: bayesian}\n"


@pytest.fixture
def load(tmp_path):
    def read(text, *overrides):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path, overrides)

    return read


def test_shipped_names():
    assert tuple(shipped()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_is_valid_and_verbatim(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.text == Path(shipped()[name]).read_text(encoding="utf-8")
    assert recipe.phases


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("demo")])
def test_demo_budgets_are_plain_scalars_on_their_own_lines(name):
    recipe = load_recipe(name)
    for key in ("tokens", "learning_rate"):
        lines = re.findall(rf"(?m)^ {{4}}{key}: ([0-9.]+e?-?[0-9]*[kM]?)\s*(?:#.*)?$", recipe.text)
        assert len(lines) == len(recipe.phases)
    assert sum(phase.tokens for phase in recipe.phases) == 100_000
    assert recipe.bundled


def test_a_recipe_with_its_control_differs_in_the_memory_alone():
    for name, control in (
        ("demo-bayesian", "demo-bayesian-control"),
        ("demo-palimpsa", "demo-palimpsa-control"),
        ("gdn-340m-bayesian", "gdn-340m-control"),
        ("gpu-bayesian", "gpu-bayesian-control"),
        ("gpu-palimpsa", "gpu-palimpsa-control"),
        ("mamba2-2.7b-palimpsa", "mamba2-2.7b-control"),
    ):
        treated, untreated = load_recipe(name), load_recipe(control)
        assert untreated.memory.rule == "host"
        for key in ("model", "revision", "layers", "inspection", "seed", "data", "evaluation", "export"):
            assert getattr(treated, key) == getattr(untreated, key), (name, key)
        assert {phase.kind for phase in untreated.phases} <= {"next-token", "instruct"}
        # as the treated one's last phase, before which it may train less, on shorter texts
        last = treated.phases[-1]
        assert {phase.trainable for phase in untreated.phases} <= {phase.trainable for phase in treated.phases}
        assert untreated.phases[-1].trainable == last.trainable and untreated.phases[-1].context == last.context
        assert sum(p.tokens for p in treated.phases) == sum(p.tokens for p in untreated.phases)
        assert {p.context for p in untreated.phases} <= {p.context for p in treated.phases}


def test_the_papers_figures():
    palimpsa = load_recipe("mamba2-2.7b-palimpsa")
    assert palimpsa.layers == LayerChoice(top=8, by="log-mean")
    assert [phase.tokens for phase in palimpsa.phases[:2]] == [10_000_000_000, 5_000_000_000]
    assert palimpsa.phases[1].context == 32768
    assert [phase.kind for phase in palimpsa.phases] == ["next-token", "next-token", "instruct"]
    assert palimpsa.phases[0].warmup_steps == 200
    bayesian = load_recipe("gdn-340m-bayesian")
    assert bayesian.layers == (5, 11, 17, 23)
    assert [(p.kind, p.tokens, p.context) for p in bayesian.phases] == [
        ("hidden", 100_000_000, 2048),
        ("logits", 300_000_000, 2048),
    ]


def test_documented_defaults(load):
    recipe = load(MINIMAL + "phases: [{kind: logits, tokens: 100M}]\n")
    assert (recipe.revision, recipe.seed, recipe.memory.start) == ("main", 0, "exact")
    assert recipe.inspection.tokens == 256_000
    assert recipe.inspection_data == "bundled"
    phase = recipe.phases[0]
    assert (phase.context, phase.batch, phase.learning_rate, phase.schedule) == (2048, 64_000, 1.0e-3, "cosine")
    assert (phase.warmup, phase.trainable, phase.temperature, phase.boundary_weight) == (200, "swapped", 1.0, 1.0)
    assert recipe.data_for(phase) == "bundled"
    assert recipe.evaluation_text == "bundled"
    assert recipe.evaluation.recall.lengths == (512, 1024, 2048)
    assert (recipe.export.dtype, recipe.export.shard_size) == ("bfloat16", 5_000_000_000)
    assert recipe.drift_limit(exact=True) == 1.0e-6
    assert recipe.drift_limit(exact=False) is None
    assert load(MINIMAL).phases == ()
    assert load(MINIMAL + "max_drift: {kl: 0.5}\n").drift_limit(exact=False) == 0.5


def test_memory_options_are_those_of_the_rules(load):
    from surgery.memory import RULES
    from surgery.recipe.schema import OPTIONS_OF, Memory

    assert set(RULES) == set(OPTIONS_OF)
    for rule, names in OPTIONS_OF.items():
        assert set(names) == set(RULES[rule].defaults)
        defaults = {name: getattr(Memory(rule=rule), name) for name in names}
        assert defaults == {k: tuple(v) if isinstance(v, list) else v for k, v in RULES[rule].defaults.items()}
    assert load(MINIMAL).memory.options == {}
    given = load("model: bundled:x\nlayers: [1]\nmemory: {rule: palimpsa, rank: 4, b_scale: [0, 2]}\n")
    assert given.memory.options == {"rank": 4, "b_scale": [0.0, 2.0]}


@pytest.mark.parametrize(
    ("text", "number"),
    [("300M", 300_000_000), ("1.5B", 1_500_000_000), ("2k", 2000), ("2K", 2000), (2048, 2048), ("0.25k", 250),
     ("1_000", 1000), ("+7", 7), (3.0, 3)],
)  # fmt: skip
def test_sizes(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize(
    "text",
    ["1O0M", "-5M", "5m", "M", "", "1.0001k", "1e3", "5GB", True, None, float("nan"), float("inf"), [1], "٣", "1 k k"],
)
def test_not_sizes(text):
    with pytest.raises(ValueError):
        parse_count(text)


def test_sizes_written_are_read_back():
    for _ in range(2000):
        number = random.randrange(10 ** random.randrange(1, 18))
        assert parse_count(format_count(number)) == number
    assert (format_count(300_000_000), format_count(1_500_000_000), format_count(2048)) == ("300M", "1.5B", "2048")
    assert (parse_bytes("5GB"), parse_bytes("500MB"), parse_bytes(7)) == (5_000_000_000, 500_000_000, 7)


def test_scalars_follow_yaml_1_2(load):
    recipe = load(MINIMAL + "seed: 010\nphases: [{kind: next-token, tokens: 1M, learning_rate: 1e-3}]\n")
    assert recipe.seed == 10
    assert recipe.phases[0].learning_rate == 1e-3


def test_budget_to_steps(load):
    phases = "phases: [{{kind: next-token, {}, context: 100, batch: 1k}}]\n"

    def read(budget):
        return load(MINIMAL + phases.format(budget)).phases[0]

    phase = read("tokens: 10001")
    assert (phase.sequences, phase.total_steps, phase.total_tokens) == (10, 11, 11_000)
    assert phase.warmup_steps == 1  # the default of 200 steps is cut to a tenth
    assert read("steps: 50, warmup: 0.1").warmup_steps == 5
    assert read("steps: 500, warmup: 20").warmup_steps == 20


def test_learning_rates(load):
    text = MINIMAL + "phases: [{kind: next-token, tokens: 1M, learning_rate: %s}]\n"
    both = load(text % "2.0e-4").phases[0].rates
    assert (both.memory, both.host) == (2e-4, 2e-4)
    apart = load(text % "{memory: 1.0e-3, host: 1.0e-5}").phases[0].rates
    assert (apart.memory, apart.host) == (1e-3, 1e-5)


def test_doses(load):
    phase = "  - {kind: logits, tokens: 1M%s}\n"
    phases = "phases:\n" + phase % "" + phase + phase % ""
    paper = MINIMAL.replace("bayesian}", "bayesian, start: paper}")
    assert load(MINIMAL + phases % "").doses() == ((0, 1, 0.5), (1, 1, 1), (1, 1, 1))
    named = phases % ", dose: {to: 0.5, over: 0.25}"
    assert load(MINIMAL + named).doses() == ((0, 0, 1), (0, 0.5, 0.25), (0.5, 0.5, 1))
    assert load(paper + phases % "").doses() == ((1, 1, 1),) * 3
    jump = phases % ", dose: {from: 0.2}"
    assert load(paper + jump).doses() == ((1, 1, 1), (0.2, 1, 0.5), (1, 1, 1))
    host = MINIMAL.replace("bayesian}", "host}") + "phases: [{kind: next-token, tokens: 1M}]\n"
    assert load(host).doses() == ((0, 0, 1),)


def test_data_is_handed_on_as_plain_values(load):
    text = MINIMAL.replace("bundled:tiny-gdn", "owner/model") + (
        "data: [{path: a.txt, weight: 2}, {path: b.txt}]\n"
        "phases:\n  - {kind: next-token, tokens: 1M}\n  - {kind: logits, tokens: 1M, data: [x.txt, y.txt]}\n"
        "  - {kind: logits, tokens: 1M, data: 'hub:owner/name,config=c'}\n"
    )
    recipe = load(text)
    assert [recipe.data_for(phase) for phase in recipe.phases] == [
        [{"path": "a.txt", "weight": 2.0}, {"path": "b.txt", "weight": 1.0}],
        ["x.txt", "y.txt"],
        "hub:owner/name,config=c",
    ]
    assert recipe.inspection_data == recipe.data_for(recipe.phases[0])


def test_overrides(load):
    text = MINIMAL + "phases:\n  - {kind: logits, tokens: 1M}\n"
    settings = ("phases.0.tokens=2M", "phases[0].learning_rate={memory: 1e-3, host: 1e-4}", "layers=[0, 2]",
                "export.dtype=float32", "seed=3")  # fmt: skip
    recipe = load(text, *settings)
    assert recipe.phases[0].tokens == 2_000_000
    assert recipe.phases[0].rates.host == 1e-4
    assert (recipe.layers, recipe.export.dtype, recipe.seed) == ((0, 2), "float32", 3)
    assert recipe.text == text
    assert recipe.overrides == settings
    assert load(text, "seed=3", "seed=4").overrides == ("seed=4",)


def test_a_recipe_is_frozen(load):
    recipe = load(MINIMAL)
    with pytest.raises(ValueError):
        recipe.seed = 3


def test_line_ends_and_byte_order_mark_are_kept_or_read(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    recipe = load_recipe(path)
    assert recipe.memory.rule == "bayesian"
    assert recipe.text.encode() == path.read_bytes()


def test_every_error_points_at_the_deepest_place_that_exists(load):
    recipe = load(MINIMAL + "phases:\n  - kind: logits\n    tokens: 1M\n")
    assert str(recipe.error(("phases", 0, "tokens"), "a", "b")).split(":")[1] == "6"
    assert str(recipe.error(("phases", 0, "context"), "a", "b")).split(":")[1] == "5"
    assert str(recipe.error(("max_drift", "kl"), "a", "b")).split(":")[1] == "1"
    with pytest.raises(UsageError, match="--set seed=x"):
        load(MINIMAL, "seed=x")


def test_missing_file_and_unknown_name():
    with pytest.raises(UsageError, match="did you mean 'demo-palimpsa'"):
        load_recipe("demo-palimsa")
    with pytest.raises(UsageError, match="no such file"):
        load_recipe("nowhere/recipe.yaml")


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_name_every_option_of_their_rule(name):
    """What is not named changes with the defaults; rank is read off the model's width."""
    memory = load_recipe(name).memory
    assert set(OPTIONS_OF[memory.rule]) - {"rank"} <= memory.model_fields_set
