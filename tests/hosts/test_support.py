"""The table of supported hosts says what the adapters do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surgery import hosts
from surgery.hosts.support import RULES, markdown, standing, support
from surgery.memory import create

README = Path(__file__).parents[2] / "README.md"


def test_readme_holds_the_table_that_the_adapters_give():
    assert markdown().strip() in README.read_text(encoding="utf-8")


def test_every_adapter_has_its_row():
    assert [row.host for row in support()] == [adapter.name for adapter in hosts.ADAPTERS]
    assert len({row.title for row in support()}) == len(hosts.ADAPTERS)


def test_a_case_is_what_its_host_s_row_says(case, case_base):
    """Every adapter's claims against a checkpoint of its family: the rules that are exact, and the mixers' geometry."""
    config = hosts.read_config(case_base)
    adapter = hosts.adapter_for(config)
    assert {rule for rule in RULES if standing(adapter, rule) == "exact"} == case.exact - {"host"}
    for layer in adapter.mixer_layers(config):
        geometry = adapter.geometry(config, layer)
        assert (geometry.style, geometry.channel_decay) == (adapter.style, adapter.channel_decay)
        for rule in RULES:
            if not standing(adapter, rule).startswith("refused"):
                assert create(rule, geometry).exact_limit == (rule in case.exact)


def test_every_family_is_asked_the_battery(cases, base_of):
    found = {hosts.adapter_for(hosts.read_config(base_of(case))).name for case in cases.values()}
    assert found == {adapter.name for adapter in hosts.ADAPTERS}


@pytest.mark.parametrize("flag", ["--json=-", "--markdown"])
def test_hosts_command(flag):
    from surgery import cli

    cli._register()
    result = CliRunner().invoke(cli.app, ["hosts", flag])
    assert result.exit_code == 0
    if flag == "--markdown":
        assert result.stdout == markdown()
    else:
        assert json.loads(result.stdout) == json.loads(json.dumps([row.as_dict() for row in support()]))
