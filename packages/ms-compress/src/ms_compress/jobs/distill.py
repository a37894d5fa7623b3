"""`ms-compress distill`: cut a student from a teacher, train it on its logits, save it."""

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import DistillRun
from ms_compress.jobs.dataset import check_tokenizers, training_rows
from ms_compress.jobs.loading import load, save
from ms_compress.jobs.output import run_output
from ms_compress.jobs.training import outcome_of, train
from ms_compress.methods.student import cut_student


def run(options: DistillRun) -> Outcome:
    """Cut, train, save."""
    with run_output("distill", options) as place:
        if place.finished:
            return place.already()
        check_tokenizers(options)
        teacher = load(options.model)
        text = training_rows(options, teacher)
        student = cut_student(teacher, layers=options.layers, inner=options.inner)
        losses = train(student, text, options, place, teacher=teacher)
        save(student, options.output_dir, beside=options.model, last=place.seal)
        place.end()
    own, teachers = (sum(p.numel() for p in m.parameters()) for m in (student, teacher))
    result = f"{own:,} parameters of the teacher's {teachers:,}"
    sizes = {"parameters": own, "teacher_parameters": teachers}
    return outcome_of(options.output_dir, result, losses, **sizes)
