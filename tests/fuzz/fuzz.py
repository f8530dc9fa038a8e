"""Gives broken inputs to the functions behind the commands, all in one process, and counts what they should not do.

    make fuzz
    python tests/fuzz/fuzz.py --recipes 10000 --checkpoints 2000 --seed 0
    python tests/fuzz/fuzz.py --only config:17 --seed 0     # one case again, with its traceback

Each case is drawn from the seed, its kind and its number alone. An input must be accepted or refused by a message for
the user; a case fails where something else is raised, a message holds the name of a Python type, or more than five
lines about one mistake, an input that is nonsense by construction is accepted, what was accepted makes no sense (token
ids that the model has not, other documents than a plain reading finds, a damaged checkpoint, a model that is not the
run's), or the case takes more than 5 s of CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import random
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz_mutations import STRANGE, TOKENS, bend_bytes, bend_json, bend_safetensors, bend_yaml, json_bytes
from fuzz_sense import Nonsense, header, require_documents, require_ids, same_tensors

RAW = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b|<class |NoneType|object has no attribute|Traceback| object at 0x")
SECONDS = 5.0
CHECKPOINTS = ("header", "config", "tokenizer", "companion", "data", "run")
MAMBA2 = {
    "model_type": "mamba2", "num_heads": 4, "head_dim": 8, "hidden_size": 16, "expand": 2, "state_size": 8,
    "n_groups": 2, "num_hidden_layers": 2, "vocab_size": 260, "tie_word_embeddings": True,
}  # fmt: skip
DELTA = {
    "model_type": "gated_deltanet", "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.0,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 260, "tie_word_embeddings": False,
}  # fmt: skip
RECIPE = """model: base
layers: [0]
memory: {rule: palimpsa}
data: text.txt
seed: 3
max_drift: {kl: 1.0e-6}
phases:
  - name: one
    kind: next-token
    tokens: 4k
    context: 32
    batch: 256
    learning_rate: 1.0e-3
    schedule: cosine
    warmup: 0.1
    trainable: swapped
evaluation:
  text: text.txt
  recall: {lengths: [256]}
"""


@dataclass
class Outcome:
    """One case: accepted or not, what was said, CPU seconds, and what is wrong with that (nothing, if empty)."""

    case: str
    accepted: bool
    message: str
    seconds: float
    fault: str = ""
    trace: str = ""


class Fuzzer:
    """Small bases in a folder of their own, and the cases that are made of them.

    Args:
        folder: empty; everything is written there.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.bases = [save_base(config, folder / f"base{number}") for number, config in enumerate((MAMBA2, DELTA))]
        words = random.Random(0)
        text = " ".join("".join(words.choices("abcdefgh", k=words.randint(2, 7))) for _ in range(4000))
        (folder / "text.txt").write_text(text.replace("a ", "a. "))
        shutil.copytree(self.bases[0], folder / "base")
        from surgery.opening import open_base
        from surgery.recipe import load_recipe, shipped
        from surgery.validation import validate_recipe

        for base in self.bases:  # untouched, they are accepted: a refusal is of what was done to them
            (folder / "whole.yaml").write_text(RECIPE.replace("model: base", f"model: {base}"))
            open_base(load_recipe(folder / "whole.yaml"))
            validate_recipe(load_recipe(folder / "whole.yaml"))
        self.recipes = [RECIPE, *(path.read_text() for path in shipped().values())]

    def case(self, kind: str, number: int) -> Outcome:
        """Run one case."""
        from surgery.errors import MOST, UserError

        rng = random.Random(f"{self.seed}:{kind}:{number}")
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            run, nonsense = getattr(self, f"_{kind}")(rng, work)
        except (UnicodeEncodeError, RecursionError):  # an input that cannot even be written
            return Outcome(f"{kind}:{number}", False, "", 0.0)
        accepted, message, trace, fault = True, "", "", ""
        start = time.process_time()
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                run()
        except UserError as error:
            accepted, message = False, str(error)
        except Nonsense as error:
            message, fault = str(error), f"accepted, though {error}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            accepted, message, trace = False, f"{type(error).__name__}: {error}", traceback.format_exc()
            fault = "not a message for the user"
        seconds = time.process_time() - start
        raw = RAW.search(message)
        if not fault and raw:
            fault = f"names a type: {raw[0]}"
        elif not fault and (long := next((one for one in message.split("\nerror: ") if one.count("\n") > 4), None)):
            fault = f"more than five lines: {long[:60]}"
        elif not fault and message.count("\nerror: ") > MOST:
            fault = f"more than {MOST} errors at once"
        elif accepted and nonsense:
            fault = f"accepted, though {nonsense}"
        elif seconds > SECONDS:
            fault = f"took {seconds:.1f} s of CPU"
        return Outcome(f"{kind}:{number}", accepted, message, seconds, fault, trace)

    # each kind writes its input and returns what to call and why no one may accept it (empty: it may be accepted)

    def _recipe(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        from surgery.recipe import load_recipe

        text = self.recipes[0] if rng.random() < 0.5 else rng.choice(self.recipes)
        overrides, nonsense = [], ""
        kind = rng.randrange(10)
        if kind == 0:
            key = "".join(rng.choices("abcdefg", k=9))
            text, nonsense = f"{text}\n{key}: 1\n", "it has a key that there is not"
        elif kind == 1:
            number = rng.choice(("-1", "-4k", ".nan", ".inf", "1e400", "[]", "{}", "'x y'"))
            text = re.sub(r"tokens: \S+", f"tokens: {number}", text)
            nonsense = f"its tokens are {number}"
        elif kind == 2:
            text, nonsense = re.sub(r"(?m)^layers: .*$", "layers: [0, 0, -7]", text), "a layer is negative"
        elif kind == 3:
            overrides = [f"{rng.choice(('phases.0.tokens', 'seed', 'memory', 'a.b', '', '0'))}={rng.choice(TOKENS)}"]
        elif kind == 4:
            (work / "r.yaml").write_bytes(bend_bytes(rng, text.encode(), 6))
            return lambda: load_recipe(work / "r.yaml"), ""
        else:
            text = bend_yaml(rng, text)
        (work / "r.yaml").write_text(text, encoding="utf-8")
        return lambda: load_recipe(work / "r.yaml", overrides), nonsense

    def _header(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        base, check = self._base(rng, work)
        file = base / "model.safetensors"
        before = file.read_bytes()
        file.write_bytes(bend_safetensors(rng, before))
        return check, "" if same_tensors(before, file.read_bytes()) else "its tensors are others than its model's"

    def _config(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        base, check = self._base(rng, work)
        file = base / "config.json"
        config = json.loads(file.read_text())
        nonsense = ""
        if rng.random() < 0.3:
            sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "num_heads", "head_dim")
            key = rng.choice(sizes)
            wrong = [value for value in STRANGE if value != config[key] and value is not None]
            config[key] = rng.choice(wrong)
            nonsense = f"{key} is {config[key]!r}"
            file.write_text(json.dumps(config))
        else:
            file.write_bytes(json_bytes(rng, config))
        return check, nonsense

    def _tokenizer(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        from surgery.evaluation.loading import load_tokenizer

        base, _ = self._base(rng, work)
        file = base / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
        file.write_bytes(json_bytes(rng, json.loads(file.read_text())))
        return lambda: require_ids(load_tokenizer(base, 260)), ""

    def _companion(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        base, check = self._base(rng, work)
        name = rng.choice(("special_tokens_map.json", "added_tokens.json", "generation_config.json", "index"))
        if name != "index":
            document = {"eos_token": "<|end|>", "max_new_tokens": 3, "<|end|>": 256}
            (base / name).write_bytes(json_bytes(rng, document))
            return check, ""
        names = list(header((base / "model.safetensors").read_bytes()) or ())
        document = {"metadata": {"total_size": 1}, "weight_map": {key: "model.safetensors" for key in names}}
        nonsense = ""
        if rng.random() < 0.5:
            place = rng.choice(("../base0/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors"))
            document["weight_map"][rng.choice(names)] = place
            nonsense = f"its index leads to {place!r}"
        data = json.dumps(document).encode() if nonsense else json_bytes(rng, document)
        (base / "model.safetensors.index.json").write_bytes(data)
        return check, nonsense

    def _data(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        from surgery.recipe import load_recipe
        from surgery.validation import validate_recipe

        shutil.copytree(self.folder / "base", work / "base")
        rows = [{"text": "a text of some words. " * 30, "id": number} for number in range(8)]
        chat = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}] * 8
        name = rng.choice(("d.txt", "d.jsonl", "d.jsonl", "d.json", "d.csv"))
        if name == "d.txt":
            data = (self.folder / "text.txt").read_bytes()
        elif name == "d.csv":
            data = b"text,id\n" + b"".join(f'"{row["text"]}",1\n'.encode() for row in rows)
        else:
            rows = rng.choice((rows, chat))
            if rng.random() < 0.6:
                rows = [bend_json(rng, row) if rng.random() < 0.4 else row for row in rows]
            lines = [json.dumps(row) for row in rows]
            data = ("[" + ",".join(lines) + "]" if name == "d.json" else "\n".join(lines)).encode()
        if rng.random() < 0.7:
            data = bend_bytes(rng, data, 8)
        (work / name).write_bytes(data)
        (work / "text.txt").write_bytes((self.folder / "text.txt").read_bytes())
        kind = "kind: instruct" if rng.random() < 0.3 else "kind: next-token"
        text = RECIPE.replace("data: text.txt", f"data: {name}").replace("kind: next-token", kind)
        (work / "r.yaml").write_text(text.replace("model: base", f"model: {work / 'base'}"))

        def check() -> None:
            validate_recipe(load_recipe(work / "r.yaml"))
            if kind != "kind: instruct":
                require_documents(work / name)

        return check, ""

    def _run(self, rng: random.Random, work: Path) -> tuple[Callable[[], object], str]:
        from surgery.adaptation.checkpoints import complete, last_whole
        from surgery.evaluation.loading import check_loadable, locate

        run = work / "run"
        manifest = {
            "schema": 1, "surgery": "0.1.0", "recipe": "r", "overrides": [], "base": "base", "revision": None,
            "layers": [0], "rule": "palimpsa", "exact": True, "drift": {"kl": 0.0},
            "phases": [{"name": "one", "kind": "next-token", "status": "finished", "steps": 1, "tokens": 1}],
        }  # fmt: skip
        shutil.copytree(rng.choice(self.bases), run / "phases" / "01-one" / "model")
        folder = run / "phases" / "01-one" / "checkpoints"
        (folder / "checkpoint-1").mkdir(parents=True)
        listed = {"files": {"a.bin": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}}}
        (folder / "checkpoint-1" / "a.bin").write_bytes(b"abc")
        which = rng.randrange(3)
        (folder / "checkpoint-1" / "complete.json").write_bytes(
            json_bytes(rng, listed) if which == 0 else json.dumps(listed).encode()
        )
        (run / "run.json").write_bytes(json_bytes(rng, manifest) if which else json.dumps(manifest).encode())
        def check() -> None:
            complete(folder)
            whole = last_whole(folder, lambda text: None)
            if whole is not None and json.loads((whole / "complete.json").read_text()) != listed:
                raise Nonsense("a checkpoint is whole, and its list is not what was written")
            located = locate(str(run))
            if not located.path.resolve().is_relative_to(run.resolve()):
                raise Nonsense(f"the run's model is {located.path}")
            check_loadable(located)

        return check, ""

    def _base(self, rng: random.Random, work: Path) -> tuple[Path, Callable[[], object]]:
        """A copy of a base, and what validate, apply, eval or inspect look at before they work."""
        from surgery.evaluation.loading import check_loadable, locate
        from surgery.inspection.measure import inspect_static
        from surgery.opening import open_base
        from surgery.recipe import load_recipe

        base = work / "base"
        shutil.copytree(rng.choice(self.bases), base)
        (work / "r.yaml").write_text(RECIPE.replace("model: base", f"model: {base}"))
        check = rng.choice(
            (
                lambda: open_base(load_recipe(work / "r.yaml")),
                lambda: open_base(load_recipe(work / "r.yaml")),
                lambda: (check_loadable(locate(str(base))), open_base(load_recipe(work / "r.yaml"))),
                lambda: (inspect_static(str(base)), open_base(load_recipe(work / "r.yaml"))),
            )
        )
        return base, check


def save_base(config: dict, directory: Path) -> Path:
    """A random model of ``config`` with a tokenizer of bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from surgery.hosts import adapter_for

    directory.mkdir()
    model = adapter_for(config).build(config)
    tied = adapter_for(config).ties(config)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def run(cases: list[tuple[str, int]], seed: int, say: Callable[[str], object] = print) -> list[Outcome]:
    """Run cases in this process; each fault is said when it is found."""
    logging.disable(logging.WARNING)  # nothing above it may be printed either: a refusal is the message alone
    outcomes = []
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            fuzzer = Fuzzer(Path(folder), seed)
            for kind, number in cases:
                outcomes.append(fuzzer.case(kind, number))
                if outcomes[-1].fault:
                    say(f"{outcomes[-1].case}: {outcomes[-1].fault}\n  {outcomes[-1].message[:600]}")
    finally:
        logging.disable(logging.NOTSET)
    return outcomes


def summary(outcomes: list[Outcome]) -> str:
    """Counts, CPU times and the process's peak memory."""
    lines = []
    for kind in dict.fromkeys(one.case.split(":")[0] for one in outcomes):
        mine = [one for one in outcomes if one.case.split(":")[0] == kind]
        times = sorted(one.seconds for one in mine)
        lines.append(
            f"{kind:10} {len(mine):6} cases, {sum(one.accepted for one in mine):6} accepted, "
            f"{sum(bool(one.fault) for one in mine):4} faults; CPU median {1000 * statistics.median(times):.0f} ms, "
            f"most {times[-1]:.2f} s"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    faults = Counter(one.fault.split(":")[0] for one in outcomes if one.fault)
    times = [one.seconds for one in outcomes]
    lines.append(f"all: CPU median {1000 * statistics.median(times):.0f} ms; peak memory {peak:.2f} GB; {dict(faults)}")
    return "\n".join(lines)


def mixed(count: int, kinds: tuple[str, ...]) -> list[tuple[str, int]]:
    """``count`` cases, the kinds in turn."""
    return [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=2_000, help="headers, configs, tokenizers, data, runs: all")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case, with its traceback")
    chosen = parser.parse_args()
    cases = mixed(chosen.recipes, ("recipe",)) + mixed(chosen.checkpoints, CHECKPOINTS)
    if chosen.only:
        kind, number = chosen.only.split(":")
        cases = [(kind, int(number))]
    outcomes = run(cases, chosen.seed, lambda line: print(line, flush=True))
    if chosen.only:
        print(outcomes[0].message or "accepted", outcomes[0].trace, sep="\n")
    print(summary(outcomes))
    return int(any(one.fault for one in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
