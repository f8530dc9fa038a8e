"""An output directory is absent or complete, whatever happens in between."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surgery.checkpoint import staging
from surgery.checkpoint.manifest import PhaseRecord, RunManifest, read_manifest, write_manifest
from surgery.checkpoint.staging import check_output, staged_directory, write_atomic
from surgery.errors import JobError, UsageError


def test_directory_appears_complete(tmp_path):
    final = tmp_path / "a" / "b" / "out"
    with staged_directory(final) as stage:
        assert stage.parent == final.parent
        (stage / "one").write_text("1")
        assert not final.exists()
    assert [path.name for path in final.iterdir()] == ["one"]
    assert [path.name for path in final.parent.iterdir()] == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert final.stat().st_mode & 0o777 == 0o777 & ~umask


def test_an_empty_directory_may_be_filled(tmp_path):
    final = tmp_path / "out"
    final.mkdir()
    with staged_directory(final) as stage:
        (stage / "one").write_text("1")
    assert (final / "one").read_text() == "1"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing(error, tmp_path):
    with pytest.raises(error), staged_directory(tmp_path / "new" / "out") as stage:
        (stage / "one").write_text("1")
        raise error()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path):
    final = tmp_path / "out"
    final.mkdir()
    (final / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"), staged_directory(final):
        raise AssertionError("the block must not run")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="is a file"):
        check_output(tmp_path / "file")
    with pytest.raises(UsageError, match="is a file"):
        check_output(tmp_path / "file" / "below")
    assert (final / "mine").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "precious"


def test_filled_meanwhile(tmp_path):
    final = tmp_path / "out"
    with pytest.raises(UsageError, match="not empty"), staged_directory(final) as stage:
        (stage / "one").write_text("1")
        final.mkdir()
        (final / "mine").write_text("precious")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (final / "mine").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_rights(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        check_output(tmp_path / "out")


def test_no_space_is_found_first(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(JobError, match=r"2\.0 kB needed, 1\.0 kB free"), staged_directory(tmp_path / "out", 2000):
        raise AssertionError("the block must not run")
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up(tmp_path):
    with pytest.raises(JobError, match="no space left"), staged_directory(tmp_path / "out") as stage:
        (stage / "one").write_text("1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_write_that_fails_for_real(tmp_path):
    with pytest.raises(JobError, match="no space left"), staged_directory(tmp_path / "out") as stage:
        (stage / "one").symlink_to("/dev/full")
        (stage / "one").write_bytes(b"x" * (1 << 16))
    assert list(tmp_path.iterdir()) == []


def test_safetensors_own_word_for_a_full_disk(tmp_path):
    from safetensors import SafetensorError

    with pytest.raises(JobError, match="no space left"), staged_directory(tmp_path / "out"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError), staged_directory(tmp_path / "out"):
        raise SafetensorError("something else")
    assert list(tmp_path.iterdir()) == []


CHILD = """
import signal, sys, time
from pathlib import Path
from surgery.checkpoint.staging import staged_directory
# a shell's background jobs, the tests themselves perhaps, are started with it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
with staged_directory(Path(sys.argv[1])) as stage:
    (stage / "one").write_text("1")
    print("ready", flush=True)
    time.sleep(60)
"""


def start_child(final):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(final)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(sign, tmp_path):
    child = start_child(tmp_path / "out")
    child.send_signal(sign)
    assert child.wait(timeout=30) != 0
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_tidied_up_by_the_next(tmp_path):
    final = tmp_path / "out"
    killed = start_child(final)
    killed.kill()
    killed.wait(timeout=30)
    killed.stdout.close()
    assert not final.exists() and len(list(tmp_path.iterdir())) == 2  # its staging directory and its lock file
    with staged_directory(final) as stage:
        (stage / "two").write_text("2")
        assert stage in tmp_path.iterdir() and len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in final.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [final]


def test_a_living_process_is_named_and_its_work_is_left_alone(tmp_path):
    final = tmp_path / "out"
    alive = start_child(final)
    before = sorted(tmp_path.rglob("*"))
    words = rf"--output {final}: another process holds it \(pid {alive.pid} on .* since"
    with pytest.raises(UsageError, match=words), staged_directory(final):
        raise AssertionError("the block must not run")
    assert sorted(tmp_path.rglob("*")) == before
    alive.terminate()
    alive.wait(timeout=30)
    alive.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_another_machines_staging_is_left_alone_for_a_day(tmp_path, monkeypatch):
    # some file systems keep locks on each machine alone, so that a free one says nothing there
    final = tmp_path / "out"
    mine = staging.neighbour(final, f"{staging.STAGING}{staging._machine()}-x")
    with monkeypatch.context() as patch:
        patch.setattr(staging.socket, "gethostname", lambda: "elsewhere")
        theirs = staging.neighbour(final, f"{staging.STAGING}{staging._machine()}-x")
    old = theirs.with_name(theirs.name[:-1] + "y")
    for directory in (mine, theirs, old):
        directory.mkdir()
        (directory / "weights").write_text("1")
    for path in (old / "weights", old):
        os.utime(path, (0, 0))
    with staged_directory(final):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([theirs, final])


def test_a_long_name_has_hidden_neighbours(tmp_path):
    final = tmp_path / ("x" * 255)
    with staged_directory(final) as stage:
        (stage / "one").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == [final.name]
    others = {staging.neighbour(tmp_path / (letter * 254 + "x"), ".lock").name for letter in "ab"}
    others |= {staging.neighbour(tmp_path / ("a" * 254 + "y"), ".lock").name}
    assert len(others) == 3


def test_one_file_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    monkeypatch.setattr(staging.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(JobError, match="no space"):
        write_atomic(path, "newer")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def manifest():
    phases = [PhaseRecord(name="align", kind="hidden", status="finished", steps=3, tokens=9, figures={"loss": 0.5})]
    return RunManifest(
        surgery="0.1.0", recipe="r", overrides=["seed=1"], base="bundled:x", layers=[1, 2], rule="palimpsa", exact=True,
        drift={"kl": 1e-9}, phases=phases,
    )  # fmt: skip


def test_manifest_is_read_back(tmp_path):
    write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()
    assert '"schema": 2' in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"schema": 2', '"schema": 3'), ["schema 3", "reads 1 and 2"]),
        (('"layers"', '"layer"'), ["run.json"]),
        (('"finished"', '"done"'), ["phases.0.status"]),
        (("}", ""), ["run.json:", "not JSON"]),
    ],
)
def test_manifest_of_another_kind(change, words, tmp_path):
    write_manifest(tmp_path, manifest())
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UsageError) as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value).splitlines()) <= 4
    for word in words:
        assert word in str(caught.value)


def test_no_manifest(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        read_manifest(tmp_path)


def test_a_file_that_the_disk_refuses_is_told_by_the_output(tmp_path):
    with pytest.raises(JobError, match="File too large") as caught, staged_directory(tmp_path / "out"):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # as writing into an open file raises it
    assert str(tmp_path / "out") in str(caught.value) and not list(tmp_path.iterdir())
