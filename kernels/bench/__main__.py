"""Time a memory rule's kernels on this machine's GPU: ``python -m surgery.kernels.bench RULE [--json PATH]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

BENCHES = ("palimpsa", "bayesian", "hosts")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m surgery.kernels.bench", description=__doc__)
    parser.add_argument("rule", choices=BENCHES)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of queries, keys and values")
    parser.add_argument("--shape", action="append", help="only this shape; may be given several times")
    parser.add_argument("--milliseconds", type=int, default=200, help="to repeat each measurement for")
    parser.add_argument(
        "--json", metavar="PATH", help="write the figures there, as they become known; - writes them alone, to stdout"
    )
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device to time anything on.", file=sys.stderr)
        return 1
    bench = importlib.import_module(f".{options.rule}", __package__)
    unknown = set(options.shape or ()) - set(bench.SHAPES)
    if unknown:
        parser.error(f"no shape {sorted(unknown)}; there are {', '.join(bench.SHAPES)}")
    path = None if options.json in (None, "-") else Path(options.json)
    names = options.shape or list(bench.SHAPES)
    figures = bench.measure(options.dtype, names, options.milliseconds, lambda figures: _write(path, figures))
    _write(path, figures)
    print(json.dumps(figures, indent=2) if options.json == "-" else bench.table(figures))
    return 0


def _write(path: Path | None, figures: dict) -> None:
    """The figures known so far, in one piece: a run that is stopped leaves them."""
    if path is not None:
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
