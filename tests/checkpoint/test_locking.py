"""One process holds a directory; its lock ends with it, however it ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

from surgery.checkpoint import locking
from surgery.checkpoint.locking import LOCK, hold, is_locked, refuse_if_held
from surgery.checkpoint.staging import claimed, claimed_run
from surgery.errors import UsageError

CHILD = """
import os, sys, time
from pathlib import Path
from surgery.checkpoint.locking import hold
with hold(Path(sys.argv[1]), "it"):
    child = len(sys.argv) == 2 or os.fork()
    if len(sys.argv) == 2 or child == 0:
        print("ready", flush=True)
    time.sleep(60 if child else 5)
"""


def start(file, *more):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(file), *more], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def test_the_second_is_told_who_holds_it_and_changes_nothing(tmp_path):
    file = tmp_path / LOCK
    child = start(file)
    content = file.read_bytes()
    for attempt in (lambda: hold(file, "--run x").__enter__(), lambda: refuse_if_held(file, "--run x")):
        with pytest.raises(UsageError) as told:
            attempt()
        text = str(told.value)
        assert text.startswith(f"--run x: another process holds it (pid {child.pid} on {os.uname().nodename} since 20")
        assert "test_locking" not in text and "-c" in text  # its command, not this one's
        assert "nothing was changed" in text and text.count("\n") == 1
    assert file.read_bytes() == content
    child.kill()
    child.wait(timeout=30)
    child.stdout.close()
    refuse_if_held(file, "--run x")
    with hold(file, "--run x"):  # the file that a killed process leaves holds nothing up
        assert is_locked(file)
    assert not file.exists()


def test_a_child_that_was_forked_does_not_keep_the_lock(tmp_path):
    child = start(tmp_path / LOCK, "fork")
    child.kill()
    child.wait(timeout=30)
    with hold(tmp_path / LOCK, "it"):
        assert is_locked(tmp_path / LOCK)
    child.stdout.close()


def test_a_thread_may_hold_again_and_another_may_not(tmp_path):
    file = tmp_path / LOCK
    told = []

    def other():
        try:
            with hold(file, "it"):
                pass
        except UsageError as error:
            told.append(str(error))

    with hold(file, "it"), hold(file, "it"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(told) == 1 and f"pid {os.getpid()} " in told[0]
    assert not file.exists() and not is_locked(file)


def test_waiting_for_the_holder(tmp_path):
    file = tmp_path / LOCK
    order = []

    def other():
        with hold(file, "it", wait=True):
            order.append("second")

    with hold(file, "it"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"] and not file.exists()


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locking.fcntl, "flock", refuse)
    monkeypatch.setitem(locking._state, "told", False)
    for _ in range(2):
        with hold(tmp_path / LOCK, "it"):
            assert not is_locked(tmp_path / LOCK)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: this file system has no locks (No locks available), so nothing keeps two processes apart: start "
        "one at a time"
    ]


def test_a_run_and_an_output_of_the_same_name_exclude_each_other(tmp_path):
    place = tmp_path / "new" / "place"
    told = []

    def try_both():
        for what in (claimed, claimed_run):
            try:
                with what(place):
                    raise AssertionError("held twice")
            except UsageError as error:
                told.append(str(error))

    for what in (claimed, claimed_run):
        with what(place):
            thread = threading.Thread(target=try_both)
            thread.start()
            thread.join()
    assert len(told) == 4
    assert all("another process holds it" in text for text in (told[0], told[1], told[3]))
    assert "is not empty" in told[2]  # the run has begun
    assert list(tmp_path.iterdir()) == []
