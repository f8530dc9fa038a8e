"""A base's model card, written from what its training and its measurement reported."""

from __future__ import annotations

from typing import Any

HOSTS = {
    "mamba2": "Mamba2 (transformers' `mamba2` format)",
    "gated_deltanet": "Gated DeltaNet (flash-linear-attention's `gated_deltanet` format)",
}

TEXTS = {
    "books-heldout.txt.xz": ", three books that no training file holds (Smith, The Wealth of Nations; Darwin, On the "
    "Origin of Species; Austen, Pride and Prejudice; of 300 passages of 60 characters drawn from them, none occurs in "
    "the training books; `xz -9` takes 1.87 bits a byte)"
}


def model_card(
    name: str, config: dict[str, Any], size: int, parameters: int, training: dict[str, Any], measured: dict[str, Any]
) -> str:
    """README.md of base ``name``.

    Args:
        config: its configuration. size: bytes of its weights.
        training: what ``train`` reported. measured: what ``evaluate`` reported on a text that was held out.
    """
    settings = training["settings"]
    speed = training["history"][-1]["tokens_per_second"]
    language, spread = measured["language"], measured["horizons"]
    text = measured["text"].rsplit("/", 1)[-1]
    stream = "--stream stream.npy --tokenizer TOKENIZER"
    rates = f"--muon-lr {settings['muon_lr']} --adam-lr {settings['adam_lr']}"
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "tags: [pretrained, small]",
        "---",
        "",
        f"# {name}",
        "",
        f"A small {HOSTS[config['model_type']]} language model, pretrained to have something real to operate on: "
        f"{parameters:,} parameters, {size:,} bytes of safetensors (bf16; `A_log` and `dt_bias` in float32).",
        "",
        _shape(config),
        "",
        "It continues 19th-century English prose and Python source passably, recalls what it was told a page ago, and "
        "knows nothing. Do not use it as a source of facts or for anything but research on memories.",
        "",
        "## Bars",
        "",
        _bars(measured),
        "",
        "Measured by one command, on any text file that was not trained on:",
        "",
        "```",
        f"python -m surgery.pretraining.evaluate bundled:{name} --text FILE",
        "```",
        "",
        f"Here `FILE` is `{text}`{TEXTS.get(text, '')}: {language['bytes']:,} bytes, {language['tokens']:,} tokens, "
        "read once from an empty memory with the state carried on to the end.",
        "",
        "## Recall by length",
        "",
        "One needle (\"One of the special magic numbers for KEY is: VALUE.\") in that text, asked for at the end; "
        "right means that the true value is the most probable of ten of equal token length (chance 0.1). Five depths "
        "from start to end, Wilson's 95% intervals. Training windows were "
        f"{settings['context']} tokens long; longer rows show how far the memory reaches beyond them.",
        "",
        _recall(measured["recall"]),
        "",
        "The wording is the training documents' own, so this measures the memory, not the ability to follow new "
        "instructions. In other text the curve is lower.",
        "",
        "## Forgetting horizons",
        "",
        f"N = 1/(1 - alpha), averaged over heads and the first {spread['tokens']:,} tokens of that text, each value "
        "capped at 2^24. Layers started at different horizons on purpose.",
        "",
        _horizons(spread),
        "",
        "## Training",
        "",
        f"- {training['tokens']:,} tokens in {training['steps']:,} steps of {settings['batch']} x "
        f"{settings['context']}, on one {training['device']} at {speed:,.0f} tokens a second, torch "
        f"{training['torch']}.",
        "- 82% public-domain English books (260 of them, 19th century and earlier), 5% source of Python's standard "
        "library without `pydoc_data` and tests, 13% generated recall documents: needles in book text and source, and "
        "listings of keys and values. Each document begins with `<|endoftext|>`.",
        "- Every row of a batch reads one contiguous part of the token stream; its memory is carried from window to "
        f"window and starts anew with probability {settings['restart']}.",
        f"- Muon at {settings['muon_lr']} on hidden matrices, AdamW at {settings['adam_lr']} on the rest, weight decay "
        f"{settings['weight_decay']}; 2% warm-up, the last 60% linear to zero; float32 weights, bf16 products, seed "
        f"{settings['seed']}.",
        "- The code is `surgery/pretraining` (`python -m surgery.pretraining --help`):",
        "",
        "```",
        "python -m surgery.pretraining tokenizer --corpus BOOKS --output TOKENIZER",
        "python -m surgery.pretraining tokens --corpus BOOKS --tokenizer TOKENIZER --output stream.npy --tokens 330M",
        f"python -m surgery.pretraining train --base {name} {stream} --output {name} \\",
        f"    --tokens {settings['tokens']} {rates} --text FILE",
        "```",
        "",
        "The tokenizer is byte-level BPE with 4096 entries, trained on a sixth of the books, a quarter of the library "
        "source and recall documents; digits are single tokens. Both bases share it.",
        "",
        "`config.json` gives `dtype` float32, so that a reader that follows it computes with the decays as they are "
        "stored; the bf16 weights lose nothing by it.",
        "",
        "## Licence",
        "",
        "The weights are under Apache-2.0, as this project. The books are in the public domain; Python's standard "
        "library is under the PSF licence. Neither text is part of this project.",
    ]
    return "\n".join(lines) + "\n"


def _shape(config: dict[str, Any]) -> str:
    layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_heads"]
    if config["model_type"] == "mamba2":
        state = f"{config['head_dim']} x {config['state_size']}"
        rest = f"convolution width {config['conv_kernel']}"
    else:
        state = f"{config['head_dim']} x {round(config['head_dim'] * config['expand_v'])}"
        rest = f"convolution width {config['conv_size']}, MLP width {config['intermediate_size']}"
    return f"{layers} layers, width {width}, {heads} heads a layer with a {state} state each, {rest}, tied embeddings."


def _bars(measured: dict[str, Any]) -> str:
    rows = ["| bar | asked | measured | |", "|---|---|---|---|"]
    for name, bar in measured["bars"].items():
        least = name != "bits_per_byte"
        met = bar["measured"] >= bar["bar"] if least else bar["measured"] <= bar["bar"]
        asked = f"at {'least' if least else 'most'} {bar['bar']:g}"
        rows.append(f"| {name.replace('_', ' ')} | {asked} | {bar['measured']:.3f} | {'met' if met else 'missed'} |")
    return "\n".join(rows)


def _recall(recall: dict[str, Any]) -> str:
    kinds = list(recall)
    rows = [f"| tokens | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for items in zip(*(recall[kind]["lengths"] for kind in kinds), strict=True):
        cells = [
            f"{item['right']}/{item['total']} = {item['fraction']:.2f} "
            f"({item['interval'][0]:.2f} to {item['interval'][1]:.2f})"
            for item in items
        ]
        rows.append(f"| {items[0]['length']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _horizons(spread: dict[str, Any]) -> str:
    rows = ["| layer | mean N | exp of mean log N |", "|---|---|---|"]
    for layer, (mean, log_mean) in enumerate(zip(spread["mean"], spread["log_mean"], strict=True)):
        rows.append(f"| {layer} | {mean:,.0f} | {log_mean:,.0f} |")
    return "\n".join([*rows, "", f"Largest over smallest mean: {spread['spread']:,.0f}."])
