"""`ms-compress distill`: cut a student, train it on its teacher's logits, and save it."""

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import DistillRun
from ms_compress.jobs.dataset import check_tokenizers, training_rows
from ms_compress.jobs.loading import load, save
from ms_compress.jobs.output import run_output
from ms_compress.jobs.training import outcome_of, train
from ms_compress.methods.student import cut_student


def run(options: DistillRun) -> Outcome:
    """Cut, train and save the student."""
    with run_output("distill", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        teacher = load(options.model)
        text = training_rows(options, teacher)
        student = cut_student(teacher, layers=options.layers, inner=options.inner)
        losses = train(student, text, options, output, teacher=teacher)
        save(student, options.output_dir, source=options.model, before_publish=output.seal)
        output.end()
    student_size, teacher_size = (
        sum(param.numel() for param in module.parameters()) for module in (student, teacher)
    )
    result = f"{student_size:,} parameters of the teacher's {teacher_size:,}"
    sizes = {"parameters": student_size, "teacher_parameters": teacher_size}
    return outcome_of(options.output_dir, result, losses, **sizes)
