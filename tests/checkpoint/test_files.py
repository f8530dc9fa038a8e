"""Copies, links, and what they do where neither reflink nor hard link can be had."""

from __future__ import annotations

import errno
import os

import pytest

from surgery.checkpoint import files
from surgery.checkpoint.files import copy_file, link_file


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(files.REPORT + 3 * files.BLOCK + 7))
    return path


@pytest.mark.parametrize("size", [0, 1, files.BLOCK, files.BLOCK + 1, files.REPORT, None])
def test_a_copy_holds_the_same_bytes_and_reports_them(source, tmp_path, size):
    if size is not None:
        os.truncate(source, size)
    reports = []
    target = tmp_path / "new" / "target"
    how = copy_file(source, target, reports.append)
    assert target.read_bytes() == source.read_bytes()
    assert sum(reports) == source.stat().st_size
    assert how in ("copy", "reflink") and not target.samefile(source)


def test_a_copy_survives_short_writes(source, tmp_path, monkeypatch):
    """A raw write may take less than it is given, as on a nearly full disk or a pipe."""
    opened = files.Path.open

    class Short:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[: max(1, len(data) // 3)])

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def short(self, mode="r", **options):
        file = opened(self, mode, **options)
        return Short(file) if "w" in mode else file

    monkeypatch.setattr(files.Path, "open", short)
    monkeypatch.setattr(files, "_clone", lambda *_: False)
    copy_file(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def test_a_link_shares_the_bytes(source, tmp_path):
    reports = []
    target = tmp_path / "target"
    how = link_file(source, target, reports.append)
    assert how in ("hard link", "reflink")
    assert target.samefile(source) == (how == "hard link")
    assert target.read_bytes() == source.read_bytes() and reports == [source.stat().st_size]


def test_a_link_to_a_symbolic_link_is_to_the_file(source, tmp_path):
    (tmp_path / "alias").symlink_to(source)
    link_file(tmp_path / "alias", tmp_path / "target")
    assert not (tmp_path / "target").is_symlink()
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_link_that_cannot_be_made_is_a_copy(source, tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "_clone", lambda *_: False)
    monkeypatch.setattr(files.os, "link", refuse)
    reports = []
    assert link_file(source, tmp_path / "target", reports.append) == "copy"
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert not (tmp_path / "target").samefile(source) and sum(reports) == source.stat().st_size
