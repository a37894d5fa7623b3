"""One process of a run: calls a command's `main` in a forked process."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")  # -O0: g++ takes most of a compiled run

import torch

WARM = (
    *(
        f"ms_align.trainers.{name}"
        for name in ("sft", "reward", "dpo", "kto", "gkd", "ppo", "grpo", "rloo")
    ),
    *(f"ms_compress.commands.{name}" for name in ("qat", "prune", "distill", "quantize")),
    *("ms_align.commands.train", "ms_align.engines.parallel", "ms_data.building.build"),
    *("ms_data", "ms_kernels", "ms_parallel.training.trainer", "ms_parallel.commands.train"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint"),
)
"""Modules that the commands need, imported once for all forked processes."""
for _name in WARM:
    import_module(_name)

sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "ms-align" / "tests"))
import fake_vllm  # noqa: E402

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def vowels(samples: Sequence[Any]) -> list[float]:
    """A reward: the fraction of vowels among the bytes of a response."""
    return [
        sum(token < 256 and token in b"aeiou" for token in sample.response_tokens)
        / max(1, len(sample.response_tokens))
        for sample in samples
    ]


def perform(
    command: str,
    run_file: str,
    log: str,
    kill_at: str | None = None,
    served_model: str | None = None,
    port: int = 0,
) -> int:
    """Run `ms-... COMMAND FILE`; return its exit code.

    Args:
        command: package and subcommand, such as `ms-align sft`.
        run_file: path of the run file.
        log: prefix of the files for standard output and error; the rank is appended.
        kill_at: event log of the run; the process kills itself at the first checkpoint event.
        served_model: folder of the model that a server at `port` serves during the run.
        port: port of the server.
    """
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    if served_model is not None and rank == "0":
        _start_server(Path(served_model), port)
    if os.environ["WORLD_SIZE"] == "1":
        for name in LAUNCHER:
            os.environ.pop(name, None)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{log}.{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    if kill_at is not None:
        threading.Thread(target=_kill_at_checkpoint, args=(Path(kill_at),), daemon=True).start()
    package, name = command.split()
    module = package.replace("-", "_")
    sys.argv = [package, name, run_file]
    try:
        code = import_module(f"{module}.cli").main([name, run_file])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)


def _start_server(folder: Path, port: int) -> None:
    """Fork a server with vLLM's endpoints; it exits when the only writer of its pipe closes.

    The port is bound before the fork, so connections wait until the model is loaded.
    """
    server = ThreadingHTTPServer(("127.0.0.1", port), fake_vllm.Handler)
    server.daemon_threads = True
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        server.socket.close()
        os.set_inheritable(writer, False)
        return
    os.close(writer)
    fake_vllm.Handler.model = fake_vllm.Model(folder)
    fake_vllm.Handler.served = Counter()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.read(reader, 1)
    os._exit(0)


def _kill_at_checkpoint(events: Path) -> None:
    while True:
        if events.exists() and '"kind":"checkpoint"' in events.read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a run; empty without a log."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
