"""``surgery inspect --capacity``: a model's recall of lists as a table, with what it says of its memory."""

from __future__ import annotations

from typing import Any


def print_capacity(out: Any, result: dict[str, Any]) -> None:
    """Print shares by number of pairs and length, and the verdict."""
    from rich.table import Table

    from surgery.cli.common import bold
    from surgery.inspection.capacity import LENGTHS

    out.print(bold(result["model"]) + ": share of a list's values recalled", highlight=False, soft_wrap=True)
    cells = {(cell["pairs"], cell["length"]): cell for cell in result["cells"]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("pairs", "tokens", "list alone", *(f"in {length:,}" for length in LENGTHS)):
        table.add_column(title, justify="right", no_wrap=True)
    for pairs in dict.fromkeys(cell["pairs"] for cell in result["cells"]):
        alone = cells.get((pairs, None))
        shares = [_share(cells.get((pairs, length))) for length in (None, *LENGTHS)]
        table.add_row(str(pairs), f"{alone['tokens']:,}" if alone else "", *shares)
    out.print(table)
    out.print(result["verdict"]["words"], style="bold", highlight=False)
    most = max(cell["documents"] for cell in result["cells"])
    notes = [
        f"{result['scores']['forced']}; up to {most} documents each, text from {result['haystack']} between list and "
        "questions; 95% intervals by document in --json",
    ]
    reasons = dict.fromkeys(cell["reason"] for cell in result["left_out"])
    notes += [f"not asked: {reason}" for reason in reasons if " pairs and their questions take " not in reason]
    for note in notes:
        out.print(note, style="dim", highlight=False)


def plot_capacity(result: dict[str, Any], path: str) -> None:
    """Draw the shares by number of pairs, a line for each length."""
    from surgery.evaluation.plots import MODEL_COLOUR, new_figure, save_figure
    from surgery.evaluation.task_plots import task_panel

    figure = new_figure(6.4, 4.4)
    task_panel(figure.subplots(), "list_recall", [({"name": result["model"], "tasks": result}, MODEL_COLOUR)])
    save_figure(figure, path)


def _share(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['scores']['forced']['mean']:.2f}"
