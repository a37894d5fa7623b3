"""`ms-compress distill`: cut a student from a teacher, train it on its logits, save it."""

from typing import Any

from attrs import field, frozen

from ms_compress.commands.command import Command
from ms_compress.commands.finish import text_of
from ms_compress.commands.loading import load, save
from ms_compress.commands.run_options import ModelRun
from ms_compress.commands.training import output, train, trained
from ms_compress.run_file import build
from ms_compress.settings import whole
from ms_compress.student import cut_student

__all__ = ["DISTILL"]


@frozen(kw_only=True)
class DistillRun(ModelRun):
    """Settings of the command; `model` is the teacher."""

    layers: int | None = field(default=None, validator=whole(optional=True))
    """Of the student; all by default."""
    inner: int | None = field(default=None, validator=whole(optional=True))
    """Neurons of each feed-forward of the student; all by default."""


def run(settings: dict[str, Any], where: str) -> int:
    """Cut, train, save; prints the folder."""
    options = build(DistillRun, settings, where=where)
    with output(options):
        teacher = load(options.model)
        text = text_of(options, teacher)
        student = cut_student(teacher, layers=options.layers, inner=options.inner)
        train(student, text, options, teacher=teacher)
        save(student, options.output_dir, beside=options.model)
        trained(options)
    counts = [sum(p.numel() for p in m.parameters()) for m in (student, teacher)]
    print(f"{options.output_dir}: {counts[0]:,} parameters of the teacher's {counts[1]:,}")
    return 0


DISTILL = Command(
    name="distill",
    help="cut a student from a teacher and train it on the teacher's logits",
    example="ms-compress distill RUN.toml --set layers=3 --set tuning.steps=500",
    run=run,
)
