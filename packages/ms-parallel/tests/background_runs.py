"""Checkpoints written beside the training, with what can happen to them; for `run_processes`."""

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
    """What is saved at a step: replicated, and of this rank alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model.weight": torch.full((40, 5), float(step)),
        "engine.step": torch.tensor(step),
        "model.empty": torch.zeros(0, 3),
        f"model.stage-{rank}": torch.arange(100).double() * step,
    }


def plant(how: str, point: int, counts: Path) -> None:
    """Let something happen to the writing process that is started next."""
    shared_memory.PROGRAM = [SCRIPT, how, str(point), str(counts)]


def saves(folder: str, how: str, point: int, rank: int = 0, world: int = 1) -> str:
    """Save three times, while something happens to one rank's writer; what was said of it.

    Each step that is reported as saved stands in the file `reported`.
    """
    root = Path(folder)
    if world > 1:
        connect(Layout(data=world), device="cpu", timeout_s=60)
    own = dist.get_rank() if world > 1 else 0
    if own == rank:
        plant(how, point, root / "points")
    saver = BackgroundSaver(root / "checkpoints", KEPT)
    said = ""
    try:
        for step in STEPS:
            state = state_of(step)

            def note(step: int = step) -> None:
                if own == 0:
                    with (root / "reported").open("a") as file:
                        file.write(f"{step}\n")

            saver.save(step, state, facts={"step": step}, note=note)
            for tensor in state.values():
                tensor.zero_()  # what is written is what it was
            for _ in range(5):
                saver.poll()
                sleep(0.001)
        saver.finish()
    except CheckpointError as error:
        said = str(error)
    saver.close()
    return said


def start_and_die(note: str) -> None:
    """Start a writing process, note its number, and be killed."""
    process = shared_memory.WritingProcess(shared_memory.SharedMemory())
    Path(note).write_text(str(process._process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def both_ways(layout: str, folder: str) -> list[str]:
    """What differs between a checkpoint that is written beside the training and one that is not."""
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
    found = []
    for step in (1, 2):
        one = checkpoint.read_manifest(root / f"plain-{step}")
        other = checkpoint.read_manifest(checkpoint.step_folder(root, step))
        files = {path.name for path in (root / f"plain-{step}").iterdir()}
        if files != {path.name for path in checkpoint.step_folder(root, step).iterdir()}:
            found.append(f"files of {step}")
        found += [n for n in one.tensors if _boxes(one, n) != _boxes(other, n)]
        if one.facts != other.facts or one.tensors.keys() != other.tensors.keys():
            found.append(f"facts of {step}")
    return found


def _boxes(manifest: checkpoint.Manifest, name: str) -> Any:
    """The boxes of a tensor with their checksums."""
    return sorted((c.offsets, c.shape, c.crc32) for c in manifest.tensors[name].chunks)
