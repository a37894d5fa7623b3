"""One process of a proof: runs each case together with the others and writes its outcome.

Started by `ms_parallel.proof.launch` with the folder of the job.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ConfigError, LayoutError, ModelError, ScheduleError
from ms_parallel.models.staged import StagedModel
from ms_parallel.proof.batches import draw_batch
from ms_parallel.proof.gradients import compare, full_gradients
from ms_parallel.proof.probes import full_logits, probe_changes, probe_generation, probe_packing
from ms_parallel.proof.records import Case, Check, Counterexample, Job, Outcome
from ms_parallel.proof.subject import Subject, open_subject

REFERENCE, SAVED = "reference.safetensors", "saved"
GENERATES = "generates"
"""File that exists if the model can generate in one process."""
LOSS, LOGITS = "the loss", "the logits"
REFUSALS = (LayoutError, ConfigError, ScheduleError, ModelError)
TIMEOUT_S = 60.0
MAX_PER_CHECK = 4


def main() -> int:
    """Run the job in the folder given as argument."""
    folder = Path(sys.argv[1])
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    torch.set_num_threads(1)
    # In float64 a real fault is far above rounding.
    torch.set_default_dtype(torch.float64)
    for number, case in job.cases.items():
        outcome = run_case(job, number, case, folder)
        written = folder / f"{number}.{os.environ['RANK']}.json"
        partial = written.with_suffix(".part")
        # Renamed when complete, because the launcher polls for it.
        partial.write_bytes(msgspec.json.encode(outcome))
        partial.rename(written)
    return 0


def run_case(job: Job, number: int, case: Case, folder: Path) -> Outcome:
    """Run a case together with the other processes; case 0 saves the reference in the folder."""
    torch.manual_seed(job.seed)  # for weights that a user's module draws
    subject = open_subject(job.subject)
    try:
        engine = _engine(subject, case, job.seed)
    except REFUSALS as error:
        return Outcome(case=case, refused=str(error))
    batch = draw_batch(subject.vocabulary, job.seed)
    checks: list[Check] = ["gradients", "loss", "logits", "leak", "causality"]
    if number == 0:
        counterexamples = _save_reference(engine, batch, folder)
        largest, compared = 0.0, 0
    else:
        largest, compared, counterexamples = _compare(engine, batch, job.tolerance, folder)
    counterexamples += probe_changes(engine, batch, job.tolerance)
    if case.processes == 1 and case.recompute == "none" and subject.packs:
        checks.append("packing")
        counterexamples += probe_packing(engine, batch, job.tolerance)
    generation: tuple[Check, ...] | Counterexample = ()
    generates = folder / GENERATES
    # A pipeline may hang if a model cannot generate, so the reference run tries first.
    if number == 0 or generates.exists():
        generation = probe_generation(engine, batch)
        if number == 0 and generation:
            generates.touch()
    if isinstance(generation, Counterexample):
        counterexamples.append(generation)
    else:
        checks += generation
    if all(isinstance(stage, StagedModel) for stage in engine.stages.values()):
        checks.append("folder")
        counterexamples += _folder(engine, folder / f"{SAVED}-{number}", folder / f"{SAVED}-0")
    return Outcome(
        case=case,
        checks=tuple(checks),
        compared=compared,
        apart=largest,
        found=tuple(_first_of_each(counterexamples)),
    )


def _first_of_each(counterexamples: list[Counterexample]) -> Iterator[Counterexample]:
    """Yield the first counterexamples of each check, as one fault changes many weights."""
    counts: Counter[str] = Counter()
    for counterexample in counterexamples:
        counts[counterexample.check] += 1
        if counts[counterexample.check] <= MAX_PER_CHECK:
            yield counterexample


def _engine(subject: Subject, case: Case, seed: int) -> Engine:
    layout = Layout.parse(case.layout)
    model: Any = subject.model
    if isinstance(model, nn.Module):
        model = model.double()
    return Engine(
        model,
        groups=connect(layout, device="cpu", timeout_s=TIMEOUT_S),
        plan=subject.plan,
        schedule=case.schedule,
        microbatch_size=case.microbatch_size,
        recompute=case.recompute,
        context_attention=case.context_attention,
        seed=seed,
    )


def _save_reference(engine: Engine, batch: dict[str, Tensor], folder: Path) -> list[Counterexample]:
    loss, gradients = full_gradients(engine, batch)
    reference = {name: gradient.contiguous() for name, gradient in gradients.items()}
    reference[LOSS], reference[LOGITS] = torch.tensor(loss), full_logits(engine, batch).contiguous()
    save_file(reference, folder / REFERENCE)
    return [
        Counterexample(
            check="gradients", what=f"no gradient reaches {name!r} in one process", parameter=name
        )
        for name, gradient in gradients.items()
        if not gradient.any()
    ]


def _compare(
    engine: Engine, batch: dict[str, Tensor], tolerance: float, folder: Path
) -> tuple[float, int, list[Counterexample]]:
    expected = load_file(folder / REFERENCE)
    loss, gradients = full_gradients(engine, batch)
    rows = len(batch["tokens"]) // engine.data_ranks
    microbatches = -(-rows // (engine.runner.microbatch_size or rows))
    layout = engine.groups.layout
    largest, counterexamples = compare(gradients, expected, tolerance, layout, microbatches)
    expected_loss = float(expected[LOSS])
    if not abs(loss - expected_loss) <= tolerance * abs(expected_loss):
        text = f"the loss is {loss:.15g}, one process's {expected_loss:.15g}"
        counterexamples.insert(
            0, Counterexample(check="loss", what=text, apart=abs(loss / expected_loss - 1))
        )
    logits = full_logits(engine, batch)
    difference = float((logits - expected[LOGITS]).abs().max() / expected[LOGITS].abs().max())
    if not difference <= tolerance:
        counterexample = Counterexample(check="logits", what="logits differ", apart=difference)
        counterexamples.insert(0, counterexample)
    return largest, len(gradients), counterexamples


def _folder(engine: Engine, written: Path, reference: Path) -> Iterator[Counterexample]:
    """Check that a layout saves bitwise the same tensors as one process."""
    try:
        engine.save(written)
    except ModelError as error:  # raised on all processes
        yield Counterexample(check="folder", what=f"cannot save: {error}")
        return
    if engine.groups.mesh.get_rank() != 0 or written == reference:
        return
    saved, expected = _tensors(written), _tensors(reference)
    for name in sorted(saved.keys() ^ expected.keys()):
        state = "lacks" if name in expected else "has an extra"
        yield Counterexample(check="folder", what=f"the saved folder {state} {name!r}")
    for name in sorted(saved.keys() & expected.keys()):
        if not torch.equal(saved[name], expected[name]):
            yield Counterexample(check="folder", what=f"saved {name!r} differs", parameter=name)


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


if __name__ == "__main__":
    sys.exit(main())
