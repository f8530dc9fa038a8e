"""Time whole models on this machine's GPU, swapped and unswapped: ``python -m surgery.benchmark [GROUP or ROW ...]``.

Rows run in a process of their own, which a failure ends and the next row starts again. Each is printed when it is
measured, and written to --json with those before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from surgery.benchmark.rows import GROUPS, ROWS

EXAMPLES = """examples:
  python -m surgery.benchmark                          everything
  python -m surgery.benchmark mixer gdn --json x.json  two groups
  python -m surgery.benchmark 'train mamba2-2.7b 4x2048 palimpsa'
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows that are named; returns the exit status, 1 where there is no CUDA device."""
    parser = argparse.ArgumentParser(
        prog="python -m surgery.benchmark", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows, or groups of them: {', '.join(GROUPS)}")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the figures there too, row by row")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = [row for name in options.names or GROUPS for row in ROWS if name in (row, ROWS[row].group)]
    unknown = [name for name in options.names if name not in GROUPS and name not in ROWS]
    if unknown:
        parser.error(f"no row or group {unknown[0]!r}; groups are {', '.join(GROUPS)}, --list shows the rows")
    if options.list:
        print("\n".join(names))
        return 0
    if options.worker:
        return work(names)

    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device to time anything on.", file=sys.stderr)
        return 1
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": {}}
    print(f"{figures['device']}, torch {figures['torch']}", flush=True)
    for name, result in measured(names):
        figures["rows"][name] = result
        print(line(name, result), flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measured(names: list[str]):
    """Each row's name and figures, or its failure, from processes that are started again after a failure."""
    pending = list(names)
    while pending:
        command = [sys.executable, "-m", "surgery.benchmark", "--worker", *pending]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            for text in worker.stdout:
                if text.startswith("{"):
                    result = json.loads(text)
                    yield pending.pop(0), result
        if worker.returncode == 0:
            return
        if worker.returncode != FAILED and pending:
            yield pending.pop(0), {"failed": f"its process ended with status {worker.returncode}"}


FAILED = 3  # the worker's exit status after a row that it has reported as failed


def work(names: list[str]) -> int:
    """Measure rows one after the other and print each as a line of JSON, up to the first failure."""
    import torch

    from surgery.benchmark import measures

    for name in names:
        row = ROWS[name]
        try:
            result = getattr(measures, row.measure)(**row.arguments)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}), flush=True)
            return FAILED
        print(json.dumps(result), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def line(name: str, result: dict[str, Any]) -> str:
    """A row's figures as one line of text."""
    if "failed" in result:
        return f"{name:<44} failed: {result['failed']}"
    text = f"{name:<44}{result['ms']:>10.2f} ms{result['peak_mib']:>9.0f} MiB"
    if "ratio" in result:
        text += f"   {result['ratio']:.2f} times its projections ({result['projections_ms']:.2f} ms)"
    if "tokens_per_second" in result:
        text += f"{result['tokens_per_second']:>10.0f} tokens/s"
    if "written_ms" in result:
        text += f"   without a CUDA graph {result['written_ms']:.2f} ms"
    return text


if __name__ == "__main__":
    sys.exit(main())
