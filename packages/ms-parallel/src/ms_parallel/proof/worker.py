"""One process of a proof: runs each case with the others, and writes what it found.

Started by `ms_parallel.proof.launch` with the folder that holds its job.
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
from ms_parallel.proof.gradients import compare, whole_gradients
from ms_parallel.proof.probes import probe_changes, probe_generation, probe_packing, whole_logits
from ms_parallel.proof.records import Case, Check, Counterexample, Job, Outcome
from ms_parallel.proof.subject import Subject, open_subject

REFERENCE, SAVED = "reference.safetensors", "saved"
GENERATES = "generates"
"""File that the reference leaves where the model generates in one process."""
LOSS, LOGITS = "the loss", "the logits"
REFUSALS = (LayoutError, ConfigError, ScheduleError, ModelError)
TIMEOUT_S = 60.0
MOST_OF_A_CHECK = 4


def main() -> int:
    """Run the cases of the job in the folder that is named; the exit code is 0."""
    folder = Path(sys.argv[1])
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for number, case in job.cases.items():
        outcome = run_case(job, number, case, folder)
        written = folder / f"{number}.{os.environ['RANK']}.json"
        partial = written.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(outcome))
        partial.rename(written)
    return 0


def run_case(job: Job, number: int, case: Case, folder: Path) -> Outcome:
    """Run one case with the other processes; number 0 leaves the reference in the folder."""
    torch.manual_seed(job.seed)  # a module of the user's own draws its weights
    subject = open_subject(job.subject)
    try:
        engine = _engine(subject, case, job.seed)
    except REFUSALS as error:
        return Outcome(case=case, refused=str(error))
    batch = draw_batch(subject.vocabulary, job.seed)
    checks: list[Check] = ["gradients", "loss", "logits", "leak", "causality"]
    if number == 0:
        found = _keep_reference(engine, batch, folder)
        most, compared = 0.0, 0
    else:
        most, compared, found = _compare(engine, batch, job.tolerance, folder)
    found += probe_changes(engine, batch, job.tolerance)
    if case.processes == 1 and case.recompute == "none" and subject.packs:
        checks.append("packing")
        found += probe_packing(engine, batch, job.tolerance)
    made: tuple[Check, ...] | Counterexample = ()
    generates = folder / GENERATES
    if number == 0 or generates.exists():
        made = probe_generation(engine, batch)
        if number == 0 and made:
            generates.touch()
    if isinstance(made, Counterexample):
        found.append(made)
    else:
        checks += made
    if all(isinstance(stage, StagedModel) for stage in engine.stages.values()):
        checks.append("folder")
        found += _folder(engine, folder / f"{SAVED}-{number}", folder / f"{SAVED}-0")
    return Outcome(
        case=case,
        checks=tuple(checks),
        compared=compared,
        apart=most,
        found=tuple(_few_of_each(found)),
    )


def _few_of_each(found: list[Counterexample]) -> Iterator[Counterexample]:
    """Yield the first counterexamples of each check, as one fault breaks many weights."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[each.check] += 1
        if counts[each.check] <= MOST_OF_A_CHECK:
            yield each


def _engine(subject: Subject, case: Case, seed: int) -> Engine:
    layout = Layout.parse(case.layout)
    given: Any = subject.given
    if isinstance(given, nn.Module):
        given = given.double()
    return Engine(
        given,
        groups=connect(layout, device="cpu", timeout_s=TIMEOUT_S),
        plan=subject.plan,
        schedule=case.schedule,
        microbatch_size=case.microbatch_size,
        recompute=case.recompute,
        context_attention=case.context_attention,
        seed=seed,
    )


def _keep_reference(engine: Engine, batch: dict[str, Tensor], folder: Path) -> list[Counterexample]:
    loss, gradients = whole_gradients(engine, batch)
    kept = {name: gradient.contiguous() for name, gradient in gradients.items()}
    kept[LOSS], kept[LOGITS] = torch.tensor(loss), whole_logits(engine, batch).contiguous()
    save_file(kept, folder / REFERENCE)
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
    loss, gradients = whole_gradients(engine, batch)
    rows = len(batch["tokens"]) // engine.data_ranks
    microbatches = -(-rows // (engine.runner.microbatch_size or rows))
    layout = engine.groups.layout
    most, found = compare(gradients, expected, tolerance, layout, microbatches)
    right = float(expected[LOSS])
    if not abs(loss - right) <= tolerance * abs(right):
        what = f"the loss is {loss:.15g}, one process's {right:.15g}"
        found.insert(0, Counterexample(check="loss", what=what, apart=abs(loss / right - 1)))
    logits = whole_logits(engine, batch)
    apart = float((logits - expected[LOGITS]).abs().max() / expected[LOGITS].abs().max())
    if not apart <= tolerance:
        found.insert(0, Counterexample(check="logits", what="logits are others", apart=apart))
    return most, len(gradients), found


def _folder(engine: Engine, written: Path, right: Path) -> Iterator[Counterexample]:
    """Check that a layout saves what one process saves, tensor by tensor and bit by bit."""
    try:
        engine.save(written)
    except ModelError as error:  # on all processes alike
        yield Counterexample(check="folder", what=f"nothing can be saved: {error}")
        return
    if engine.groups.mesh.get_rank() != 0 or written == right:
        return
    found, expected = _tensors(written), _tensors(right)
    for name in sorted(found.keys() ^ expected.keys()):
        state = "lacks" if name in expected else "has an extra"
        yield Counterexample(check="folder", what=f"the saved folder {state} {name!r}")
    for name in sorted(found.keys() & expected.keys()):
        if not torch.equal(found[name], expected[name]):
            yield Counterexample(
                check="folder", what=f"{name!r} is saved otherwise", parameter=name
            )


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


if __name__ == "__main__":
    sys.exit(main())
