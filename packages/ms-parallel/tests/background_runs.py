"""Background checkpoints with planted failures, for `run_processes`."""

import os
import signal
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from runs import build, train
from torch import Tensor

from ms_parallel import CheckpointError, checkpoint
from ms_parallel.checkpoint import shared_memory
from ms_parallel.checkpoint.background import BackgroundSaver
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout

SCRIPT = str(Path(__file__).with_name("planted_writer.py"))
STEPS, KEPT = (1, 2, 3), 2


def state_of(step: int) -> dict[str, Tensor]:
    """State of a step: replicated tensors and a tensor that only this rank has."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model.weight": torch.full((40, 5), float(step)),
        "engine.step": torch.tensor(step),
        "model.empty": torch.zeros(0, 3),
        f"model.stage-{rank}": torch.arange(100).double() * step,
    }


def plant(failure: str, point: int, counts: Path) -> None:
    """Plant a failure in the writing process that is started next."""
    shared_memory.PROGRAM = [SCRIPT, failure, str(point), str(counts)]


def saves(folder: str, failure: str, point: int, rank: int = 0, world: int = 1) -> str:
    """Save three times with a planted failure in one rank's writer; return the error message.

    Steps reported as saved are listed in the file `reported`.
    """
    root = Path(folder)
    if world > 1:
        connect(Layout(data=world), device="cpu", timeout_s=60)
    own_rank = dist.get_rank() if world > 1 else 0
    if own_rank == rank:
        plant(failure, point, root / "points")
    saver = BackgroundSaver(root / "checkpoints", KEPT)
    message = ""
    try:
        for step in STEPS:
            state = state_of(step)

            def note(step: int = step) -> None:
                if own_rank == 0:
                    with (root / "reported").open("a") as file:
                        file.write(f"{step}\n")

            saver.save(step, state, facts={"step": step}, note=note)
            for tensor in state.values():
                tensor.zero_()  # must not affect the checkpoint
            for _ in range(5):
                saver.poll()
                sleep(0.001)
        saver.finish()
    except CheckpointError as error:
        message = str(error)
    saver.close()
    return message


def start_and_die(note: str) -> None:
    """Start a writing process, write its pid to a file, and die."""
    process = shared_memory.WritingProcess(shared_memory.SharedMemory())
    Path(note).write_text(str(process._process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def both_ways(layout: str, folder: str) -> list[str]:
    """Differences between background checkpoints and blocking ones."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    engine = build({"tie_word_embeddings": True}, groups)
    root = Path(folder)
    saver = BackgroundSaver(root, 9)
    for step in (1, 2):
        train(engine, 1)
        facts = {"step": step}
        checkpoint.save(root / f"plain-{step}", engine.state_dict(), step=step, facts=facts)
        saver.save(step, engine.state_dict(), facts=facts, note=lambda: None)
    saver.finish()
    saver.close()
    if dist.get_rank() > 0:
        return []
    differences = []
    for step in (1, 2):
        blocking = checkpoint.read_manifest(root / f"plain-{step}")
        background = checkpoint.read_manifest(checkpoint.step_folder(root, step))
        files = {path.name for path in (root / f"plain-{step}").iterdir()}
        if files != {path.name for path in checkpoint.step_folder(root, step).iterdir()}:
            differences.append(f"files of {step}")
        differences += [n for n in blocking.tensors if _boxes(blocking, n) != _boxes(background, n)]
        if (
            blocking.facts != background.facts
            or blocking.tensors.keys() != background.tensors.keys()
        ):
            differences.append(f"facts of {step}")
    return differences


def _boxes(manifest: checkpoint.Manifest, name: str) -> Any:
    """Chunks of a tensor with their checksums."""
    return sorted((c.offsets, c.shape, c.crc32) for c in manifest.tensors[name].chunks)
