"""``surgery check``: what would run here, and whether it computes what it should."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from surgery.cli.common import DeviceOption, JsonOption, err, out, pick_device, write_json


def check(
    device: DeviceOption = "auto",
    json: JsonOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a rule is out of tolerance.")] = False,
) -> None:
    """Show versions, device and the form that runs each memory rule, and compare that form with the reference.

    The comparison runs each rule on the device in float32, forward and backward, and reports relative errors against
    the sequential rule in float64 on the CPU. A rule out of tolerance is a warning; with --strict, an error.

    [dim]Examples[/dim]
      surgery check
      surgery check --device cuda --json -
      surgery check --strict
      SURGERY_KERNELS=chunked surgery check
    """
    import platform
    from importlib import metadata

    import torch

    import surgery
    from surgery import kernel_check
    from surgery.errors import JobError, UsageError
    from surgery.kernels import dispatch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    device = pick_device(device)
    versions = {"surgery": surgery.__version__, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("torch", "triton", "transformers")}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        hardware = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{platform.machine()}, threads: {torch.get_num_threads()}"
    rules = []
    for rule in dispatch.RULES:
        err.print(f"checking {rule} on {device}", highlight=False)
        try:
            rules.append(kernel_check.check(rule, device))
        except ValueError as error:
            raise UsageError(str(error)) from error
    result = {
        "versions": versions,
        "device": device,
        "hardware": hardware,
        "rules": [rule.as_dict() for rule in rules],
        "passed": all(rule.passed for rule in rules),
    }
    if not write_json(result, json):
        _show(versions, f"{device} ({hardware})", rules)
    failed = [rule for rule in rules if not rule.passed]
    if failed:
        names = ", ".join(f"{rule.rule} ({rule.form})" for rule in failed)
        message = (
            f"out of tolerance on {device}: {names}\n"
            "results of these rules cannot be trusted here; SURGERY_KERNELS=chunked or =reference runs another form"
        )
        if strict:
            raise JobError(message)
        err.print(Text("warning:", style="red") + f" {message}", highlight=False)


def _show(versions: dict[str, str | None], device: str, rules: list) -> None:
    from rich.table import Table

    for name, value in {**versions, "device": device}.items():
        out.print(f"{name:<13}{value or 'not installed'}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rule", "sequences", "one token", "output error", "gradient error", "tolerance"):
        table.add_column(title, justify="right" if "error" in title else "left", no_wrap=True)
    for rule in rules:
        verdict = Text("within", style="green") if rule.passed else Text("over", style="red")
        errors = f"{rule.output_error:.1e}", f"{rule.gradient_error:.1e}"
        table.add_row(rule.rule, rule.form, rule.decode_form, *errors, verdict + f" {rule.tolerance:.0e}")
    out.print(table)


def register(app: typer.Typer) -> None:
    app.command()(check)
