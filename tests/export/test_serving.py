"""``transformers serve`` answers an OpenAI-style request with an exported model, over loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from surgery.export.run import export


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs transformers[serving]")
@pytest.mark.parametrize("way", ["the code beside the weights", "the package, not imported"])
def test_transformers_serves_it(make_run, tmp_path, way):
    output = tmp_path / "out"
    export(str(make_run("gated_deltanet", "bayesian")), output)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "from transformers.cli.transformers import main; main()"
    trust = ["--trust-remote-code"] if way.startswith("the code") else []
    if not trust:
        # as torch does where the package is installed; an editable tree may be older than this entry point
        start = f"import surgery_autoload; surgery_autoload.autoload(); {start}"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment["SURGERY_AUTOLOAD"] = "0" if trust else "1"
    command = [sys.executable, "-c", start, "serve", str(output), "--host", "127.0.0.1", "--port", str(port), *trust]
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen([*command, "--device", "cpu"], env=environment, stdout=log, stderr=log)
    try:
        request = {"model": str(output), "prompt": "some words", "max_tokens": 5, "temperature": 0, "stream": False}
        answer = ask(server, log, f"http://127.0.0.1:{port}/v1/completions", request)
        assert answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 5
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def ask(server, log, address, request):
    body = json.dumps(request).encode()
    for _ in range(120):
        assert server.poll() is None, _tail(log)
        try:
            call = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(call, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()[:500]}\n{_tail(log)}") from None
        except OSError:
            time.sleep(1)
    raise AssertionError(_tail(log))


def _tail(log):
    log.seek(0)
    return log.read()[-3000:]
