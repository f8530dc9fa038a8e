"""Models by their names on a hub, without a network: a cache as the hub leaves it, a hub that answers with errors."""

from __future__ import annotations

import json
import shutil
import sys

import huggingface_hub
import pytest
import torch
from hosts_battery import raw_tensors
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from surgery import hosts
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.checkpoint.pickles import pickles_allowed
from surgery.checkpoint.writing import COMPANIONS
from surgery.errors import UsageError
from surgery.export.card import model_card
from surgery.operation import apply
from surgery.recipe import load_recipe

NAME = "some-owner/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
# what the hub answers: huggingface_hub's error -> what a user reads
ANSWERS = {
    "GatedRepoError": ("access is restricted", "hf auth login", NAME),
    "RepositoryNotFoundError": ("no such model on the hub", "private", NAME),
    "RevisionNotFoundError": ("no revision 'v9'", NAME),
    "LocalEntryNotFoundError": ("not in the local cache", NAME, "v9"),
    "OfflineModeIsEnabled": ("not in the local cache", NAME),
    "HfHubHTTPError": ("cannot be reached", NAME),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Factory: a hub cache that holds files of ``NAME`` at two commits, ``main`` being the first."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "surgery"))

    def fill(base, other=None):
        repository = cache / "models--some-owner--some-model"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        for commit, source in ((COMMIT, base), (OTHER, other or base)):
            snapshot = repository / "snapshots" / commit
            snapshot.mkdir(parents=True)
            for file in source.iterdir():
                blob = repository / "blobs" / f"{commit}-{file.name}"
                blob.parent.mkdir(exist_ok=True)
                shutil.copy2(file, blob)
                (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
        return repository / "snapshots" / COMMIT

    return fill


@pytest.fixture
def base(bases, tmp_path):
    """A checkpoint with a tokenizer."""
    from hosts_battery import write_tokenizer

    config = hosts.read_config(bases["mamba2"]) | {"vocab_size": 260}
    directory = tmp_path / "source"
    hosts.adapter_for(config).build(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def recipe(tmp_path):
    def make(more="", revision="main"):
        path = tmp_path / "recipe.yaml"
        path.write_text(
            f"model: {NAME}\nrevision: {revision}\nlayers: [0, 2]\nmemory: {{rule: palimpsa}}\ndata: bundled\n{more}"
        )
        return load_recipe(path)

    return make


def error(name):
    kind = getattr(errors, name)
    made = kind.__new__(kind)  # their constructors want a response of the hub
    Exception.__init__(made, "many\nlines of an answer\nwith a request id")
    return made


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_is_one_line(name, monkeypatch):
    def answer(*_, **__):
        raise error(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(UsageError) as caught:
        hosts.resolve(NAME, "v9")
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and "Traceback" not in message
    for word in ANSWERS[name]:
        assert word in message


def test_what_is_asked_of_the_hub(base, monkeypatch, tmp_path):
    asked = []

    def answer(model, **options):
        asked.append((model, options))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    assert hosts.resolve(NAME, "v2", offline=True) == base
    (model, options), *more = asked
    assert not more and model == NAME and options["revision"] == "v2" and options["local_files_only"] is True
    assert not any(pattern.endswith((".bin", ".py")) for pattern in options["allow_patterns"])
    for pattern in COMPANIONS:  # what a swapped checkpoint takes from its base must have come with it
        name = pattern.replace("*", "3")
        assert list(filter_repo_objects([name], allow_patterns=options["allow_patterns"])), name
    weights = ["model-00001-of-00003.safetensors", "consolidated.safetensors"]
    kept = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(weights, **kept)) == weights[:1]
    assert "token" not in options  # huggingface_hub finds it: HF_TOKEN, or that of a login


def test_a_cached_model_is_found_offline(base, hub):
    snapshot = hub(base)
    assert hosts.resolve(NAME) == snapshot
    assert hosts.resolve(NAME, "main", offline=True) == snapshot
    assert hosts.resolve(NAME, OTHER) == snapshot.parent / OTHER
    assert hosts.commit(snapshot) == COMMIT and hosts.commit(base) is None
    with pytest.raises(UsageError, match="not in the local cache"):
        hosts.resolve(NAME, "v9")
    with pytest.raises(UsageError, match=r"offline"):
        hosts.resolve("some-owner/other-model")


def test_the_commit_is_recorded(base, hub, recipe, tmp_path):
    hub(base)
    out = tmp_path / "out"
    apply(recipe(), out, drift="skip")
    assert json.loads((out / "config.json").read_text())["surgery"]["revision"] == COMMIT
    assert f"(commit {COMMIT})" in (out / "README.md").read_text()

    phase = "phases: [{kind: next-token, steps: 1, context: 16, batch: 16, learning_rate: 1.0e-3}]\n"
    distill(recipe(phase), tmp_path / "run", options=Options(device="cpu"), evaluate=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["revision"] == COMMIT

    from surgery.export.source import open_source

    class Unchecked:
        text, tokens, cast = "text", 1, False

    card = model_card(open_source(str(tmp_path / "run")), "name", "float32", Unchecked(), None, None, None)
    assert f"(commit {COMMIT})" in card and f"base_model: {NAME}" in card


@pytest.fixture
def surgery(monkeypatch, tmp_path):
    """Run ``surgery ARGS... --json FILE``; returns what the file holds."""
    from surgery.cli import main

    def run(*args):
        target = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, args), "--json", str(target)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        return json.loads(target.read_text())

    return run


@pytest.fixture
def two_commits(base, hub, tmp_path):
    """Other weights at OTHER than at COMMIT; the directories that the hub's files came from."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    hosts.adapter_for(hosts.read_config(base)).build(hosts.read_config(base)).save_pretrained(other)
    hub(base, other)
    return base, other


def test_eval_reads_and_records_the_revisions_asked_for(two_commits, surgery):
    quick = ("--tokens", 300, "--recall-lengths", "none")
    found = surgery("eval", NAME, "--revision", OTHER, "--baseline", NAME, "--baseline-revision", "main", *quick)
    alone = [surgery("eval", directory, *quick)["model"] for directory in two_commits]
    assert (found["baseline"]["revision"], found["model"]["revision"]) == (COMMIT, OTHER)
    assert [found["baseline"]["nll"], found["model"]["nll"]] == [one["nll"] for one in alone]
    assert alone[0]["nll"] != alone[1]["nll"] and alone[0]["revision"] is None
    assert surgery("eval", NAME, *quick)["model"] == found["baseline"]  # main, where none is named


def test_inspect_records_the_revision_and_its_recipe_names_it(two_commits, surgery, tmp_path):
    drafted = tmp_path / "drafted.yaml"
    found = surgery("inspect", NAME, "--static", "--revision", OTHER, "--recipe", drafted, "--top", 1)
    assert found["revision"] == OTHER
    assert load_recipe(drafted).revision == OTHER
    assert surgery("inspect", two_commits[0], "--static", "--recipe", tmp_path / "local.yaml")["revision"] is None
    assert load_recipe(tmp_path / "local.yaml").revision == "main"


def test_revert_of_a_revision(base, hub, recipe, surgery, tmp_path):
    snapshot = hub(base)
    swapped = tmp_path / "swapped"
    apply(recipe(), swapped, drift="skip")
    shutil.rmtree(snapshot.parent / OTHER)
    shutil.copytree(swapped, snapshot.parent / OTHER)
    found = surgery("revert", NAME, "--revision", OTHER, "--output", tmp_path / "restored")
    assert found["layers"] == [0, 2] and found["identical"]


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "bundled:tiny-gdn", "--revision", "v1"),
        ("inspect", "HERE", "--revision", "v1"),
        ("revert", "HERE", "--revision", "v1", "--output", "absent"),
        ("eval", "bundled:tiny-gdn", "--baseline", "HERE", "--baseline-revision", "v1"),
        ("eval", NAME, "--baseline-revision", "v1"),
    ],
)
def test_a_revision_that_would_be_ignored_is_refused(words, base, monkeypatch, capsys):
    from surgery.cli import main

    monkeypatch.setattr(sys, "argv", ["surgery", *(str(base) if word == "HERE" else word for word in words)])
    with pytest.raises(SystemExit) as stop:
        main()
    message = capsys.readouterr().err
    assert stop.value.code == 2 and len(message.splitlines()) == 1, message
    assert "revision v1: " in message and ("no hub id" in message or "add --baseline" in message)


def test_a_pickle_of_a_hub_is_asked_for_once_it_is_allowed(base, hub, tmp_path, monkeypatch):
    model = hosts.load_model(base)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((base / "config.json").read_bytes())
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    snapshot = hub(pickled)
    with pytest.raises(UsageError, match="--allow-pickle") as caught:
        hosts.resolve(NAME)
    assert NAME in str(caught.value) and len(str(caught.value).splitlines()) == 1
    real, patterns = huggingface_hub.snapshot_download, []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: patterns.append(options["allow_patterns"]) or real(name, **options),
    )
    with pickles_allowed():
        directory = hosts.resolve(NAME)
    assert hosts.commit(directory) == COMMIT and not directory.is_relative_to(snapshot)
    assert any(pattern.endswith(".bin") for pattern in patterns[-1])
    assert {name: value[2] for name, value in raw_tensors(directory).items()} == {
        name: value[2] for name, value in raw_tensors(base).items()
    }


def test_without_a_network_the_cache_serves(base, hub, monkeypatch):
    """Not asked to be offline, and the hub does not answer."""
    snapshot = hub(base)
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def answer(name, **options):
        if not options["local_files_only"]:
            raise ConnectionError("no route to host")
        return real(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    assert hosts.resolve(NAME, OTHER) == snapshot.parent / OTHER
    with pytest.raises(UsageError, match=r"cannot be reached \(ConnectionError\)"):
        hosts.resolve("some-owner/other-model")


@pytest.mark.parametrize(("vocabulary", "named"), [(50277, True), (50288, True), (260, False)])
def test_a_pickle_without_a_tokenizer_gets_its_authors(vocabulary, named, hub, base, tmp_path, monkeypatch):
    """mamba_ssm's own checkpoints hold none; which one they were trained with is known by the vocabulary alone."""
    config = {
        "d_model": 8, "n_layer": 1, "vocab_size": vocabulary, "pad_vocab_size_multiple": 16, "tie_embeddings": True,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 4},
    }  # fmt: skip
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(config))
    torch.save(hosts.adapter_for(config).build(config).state_dict(), pickled / "pytorch_model.bin")
    hub(pickled)
    real, asked = huggingface_hub.snapshot_download, []

    def answer(name, **options):
        asked.append(name)
        return str(base) if name == "EleutherAI/gpt-neox-20b" else real(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pickles_allowed():
        directory = hosts.resolve(NAME)
    assert ("EleutherAI/gpt-neox-20b" in asked) == named == (directory / "tokenizer.json").is_file()
    if named:
        assert (directory / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    asked.clear()
    assert hosts.resolve(NAME) == directory and asked.count("EleutherAI/gpt-neox-20b") == 0


def test_code_of_a_repository_is_never_run(base, tmp_path):
    """A known architecture is read without it, an unknown one refused with the reason."""
    trace = tmp_path / "ran"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py"):
        (base / name).write_text(f"open({str(trace)!r}, 'w')\n")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    (base / "config.json").write_text(json.dumps(config))
    assert hosts.load_model(base).config.num_hidden_layers == 3
    with pytest.raises(UsageError, match="never run"):
        hosts.adapter_for(config | {"model_type": "something_new"})
    from surgery.evaluation.loading import load_tokenizer

    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.T", null]}}')
    with pytest.raises(UsageError, match="no tokenizer can be read"):
        load_tokenizer(base)
    assert not trace.exists()
