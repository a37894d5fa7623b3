"""`ms-compress distill`: cut a student from a teacher, train it on its logits, save it."""

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import DistillRun
from ms_compress.jobs.finish import text_of, training_of
from ms_compress.jobs.loading import load, save
from ms_compress.jobs.output import run_output
from ms_compress.jobs.training import train
from ms_compress.methods.student import cut_student

__all__ = ["run"]


def run(options: DistillRun) -> Outcome:
    """Cut, train, save."""
    with run_output("distill", options) as place:
        if place.finished:
            return place.already()
        teacher = load(options.model)
        text = text_of(options, teacher)
        student = cut_student(teacher, layers=options.layers, inner=options.inner)
        losses = train(student, text, options, place, teacher=teacher)
        save(student, options.output_dir, beside=options.model, last=place.seal)
        place.end()
    mine, theirs = (sum(p.numel() for p in m.parameters()) for m in (student, teacher))
    told, facts = training_of(losses)
    return Outcome(
        lines=(*told, f"{options.output_dir}: {mine:,} parameters of the teacher's {theirs:,}"),
        facts={
            "folder": str(options.output_dir),
            "parameters": mine,
            "teacher_parameters": theirs,
            **facts,
        },
    )
