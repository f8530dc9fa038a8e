"""An evaluation report as tables."""

from __future__ import annotations

from typing import Any

SHORT = {"written": "written", "chosen": "chosen", "forced": "all keys"}  # how a document is scored -> a column


def others(report: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """``baseline`` and ``control``, as far as the report has them, each with its figures and the difference to it."""
    pairs = (("baseline", "difference"), ("control", "control_difference"))
    return [(role, report[role], report[key]) for role, key in pairs if report.get(role) is not None]


def print_report(out: Any, report: dict[str, Any]) -> None:
    """Print the report as tables: the model beside each of the others, then its tasks."""
    from surgery.cli.common import bold

    beside = others(report)
    entries = [report["model"], *(entry for _, entry, _ in beside)]
    text = report["text"]
    out.print(
        bold(text["name"]) + f": {text['tokens']:,} tokens, {text['bytes']:,} bytes, state carried on",
        highlight=False,
        soft_wrap=True,
    )
    for _, entry, difference in beside or [("", None, None)]:
        out.print(_text_table(report["model"], entry, difference))
    notes = [f"nats at positions of separate windows of {report['context']} tokens; intervals are 95%"]
    found = report["model"]["recall"]
    if all(entry["recall"] for entry in entries):
        asked = f"{found['lengths'][0]['total']} prompts a length, haystack {found['haystack']}"
        notes.append(f"recall (RULER-style): the right value first of {found['candidates']}; {asked}")
    begin = text.get("begin_token")
    notes.append(f"every text and prompt begins with {begin}" if begin else "no token is put before a text or a prompt")
    notes += [f"{entry['name']}: commit {entry['revision']}" for entry in entries if entry.get("revision")]
    if any(not difference["paired"] for _, _, difference in beside):
        notes.append("the two read different tokens: only bits per byte compare")
    for note in notes:
        out.print(note, style="dim", highlight=False)
    if report["model"].get("tasks"):
        print_tasks(out, report)


def _text_table(model: dict[str, Any], other: dict[str, Any] | None, difference: dict[str, Any] | None) -> Any:
    """What a model does on the text and on needles, and what another does."""
    from rich.table import Table

    entries = [model] if other is None else [model, other]
    difference = difference or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for entry in entries:
        table.add_column(entry["name"], justify="right", overflow="fold")
    if difference:
        table.add_column("difference", justify="right", no_wrap=True)
    rows = [
        ("perplexity", "perplexity", 3, _times(difference.get("perplexity_ratio"))),
        ("bits per byte", "bits_per_byte", 4, f"{difference['bits_per_byte']:+.4f}" if difference else ""),
        ("nats per token", "nll", 4, _interval(difference.get("nll"), 4)),
    ]
    for label, key, digits, compared in rows:
        table.add_row(label, *(f"{entry[key]:,.{digits}f}" for entry in entries), *[compared] * bool(difference))
    by_start = {bucket["from"]: bucket for bucket in difference.get("positions", ())}
    for index, bucket in enumerate(model["positions"]):
        label = f"  at {bucket['from']}-{bucket['to'] - 1}"
        values = (f"{entry['positions'][index]['mean']:.4f}" for entry in entries)
        table.add_row(label, *values, *[_interval(by_start.get(bucket["from"]), 4)] * bool(difference), style="dim")
    recalls = [entry["recall"] for entry in entries]
    if all(recalls):
        table.add_row("recall")
        for index, row in enumerate(recalls[0]["lengths"]):
            table.add_row(f"  {row['length']} tokens", *(_share(recall["lengths"][index]) for recall in recalls))
    return table


def print_tasks(out: Any, report: dict[str, Any]) -> None:
    """Print a row for each task, length and number of pairs, and below it the differences to the other models."""
    from rich.table import Table

    found = report["model"]["tasks"]
    scores = list(found["scores"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task")
    for name in scores:
        table.add_column(SHORT[name], justify="right", no_wrap=True)
    beside = [(role, entry, _by_cell(difference.get("tasks", ()))) for role, entry, difference in others(report)]
    unpaired, before = [], None
    for cell in found["cells"]:
        if cell["task"] != before:
            table.add_row(cell["task"], style="bold")
            before = cell["task"]
        size = f"{cell['pairs']} pairs, " if cell["pairs"] else ""
        table.add_row(f"  {size}{cell['tokens']:,} tokens", *(_mean(cell["scores"].get(name)) for name in scores))
        for role, entry, cells in beside:
            compared = cells.get(_key(cell))
            if compared is not None:
                values = (_interval(compared["scores"].get(name), 2) for name in scores)
                table.add_row(f"    minus {role}", *values, style="dim")
                continue
            twin = _by_cell(entry["tasks"]["cells"]).get(_key(cell), {"scores": {}})
            table.add_row(f"    {role}", *(_mean(twin["scores"].get(name)) for name in scores), style="dim")
            unpaired.append(role)
    out.print()
    out.print(table)
    notes = [f"{SHORT[name]}: {about}" for name, about in found["scores"].items()]
    notes.append(
        f"RULER-style tasks and lists; {found['samples']} documents each, haystack {found['haystack']}; "
        "95% intervals by document"
    )
    notes += [f"left out: {cell['reason']}" for cell in found["left_out"]]
    notes += [f"the {role} reads other tokens: it is not paired" for role in dict.fromkeys(unpaired)]
    for note in notes:
        out.print(note, style="dim", highlight=False)


def _by_cell(cells: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {_key(cell): cell for cell in cells}


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["task"], cell["length"], cell["pairs"]


def _mean(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"{value['mean']:.2f}"
    return f"{value['mean']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _interval(value: dict[str, Any] | None, digits: int) -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"{value['mean']:+.{digits}f}"
    return f"{value['mean']:+.{digits}f} ± {(value['high'] - value['low']) / 2:.{digits}f}"


def _times(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"x {value['mean']:.4f}"
    return f"x {value['mean']:.4f} ({value['low']:.4f}-{value['high']:.4f})"


def _share(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['fraction']:.2f} ({low:.2f}-{high:.2f})"
