"""A small base, and what a command finds in it before it works: each attack must end in a message for the user."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
RAW = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b|<class |NoneType|has no attribute")


@pytest.fixture(scope="session")
def whole_base(tmp_path_factory):
    from fuzz import MAMBA2, save_base

    return save_base(MAMBA2, tmp_path_factory.mktemp("attacks") / "base")


@pytest.fixture
def base(whole_base, tmp_path):
    """A private copy, to be damaged."""
    return shutil.copytree(whole_base, tmp_path / "base")


@pytest.fixture
def edit(base):
    """Change keys of the base's config.json, or of another of its JSON files."""

    def change(name="config.json", **keys):
        file = base / name
        document = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**document, **keys}))
        return file

    return change


@pytest.fixture
def refused(base):
    """Open the base as every command does: by its recipe, as a model, and for its figures without data."""
    from surgery.errors import UsageError
    from surgery.evaluation.loading import check_loadable, locate
    from surgery.inspection.measure import inspect_static
    from surgery.opening import open_base
    from surgery.recipe import load_recipe

    def check(*words, ways=3):
        recipe = base.parent / "recipe.yaml"
        recipe.write_text(f"model: {base}\nlayers: [0]\nmemory: {{rule: palimpsa}}\n")
        calls = (
            lambda: open_base(load_recipe(recipe)),
            lambda: check_loadable(locate(str(base))),
            lambda: inspect_static(str(base)),
        )
        for call in calls[:ways]:
            with pytest.raises(UsageError) as caught:
                call()
            text = str(caught.value)
            assert len(text.splitlines()) <= 5, text
            assert not RAW.search(text), text
            for word in words:
                assert word in text, text

    return check
