"""`ms-compress distill`: cut a student, train it on its teacher's logits, and save it."""

from ms_compress.methods.student import cut_student
from ms_compress.options import DistillRun
from ms_compress.run.dataset import check_tokenizers, training_rows
from ms_compress.run.model import load, save
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import run_output
from ms_compress.run.training import train


def run(options: DistillRun) -> Outcome:
    """Cut, train and save the student."""
    with run_output("distill", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        teacher = load(options.model)
        rows = training_rows(options, teacher)
        student = cut_student(teacher, layers=options.layers, inner=options.inner)
        losses = train(student, rows, options, output, teacher=teacher)
        save(student, options.output_dir, source=options.model, before_publish=output.seal)
        output.end()
    student_size, teacher_size = (
        sum(param.numel() for param in module.parameters()) for module in (student, teacher)
    )
    result = f"{student_size:,} parameters of the teacher's {teacher_size:,}"
    sizes = {"parameters": student_size, "teacher_parameters": teacher_size}
    return Outcome.of_folder(options.output_dir, result, losses, **sizes)
