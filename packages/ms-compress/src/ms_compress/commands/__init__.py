"""The commands of `ms-compress` and their settings; importing them does not import torch."""

from ms_compress.commands.command import Command, Outcome
from ms_compress.commands.options import (
    CompareRun,
    DistillRun,
    EvaluateRun,
    PruneRun,
    QatRun,
    QuantizeRun,
)

__all__ = ["COMMANDS", "Command", "Outcome"]

COMMANDS: tuple[Command, ...] = (
    Command(
        name="qat",
        help="train a model with its target's quantization, and export it",
        example="ms-compress qat RUN.toml scheme=gguf.q4_0 tuning.steps=200",
        options=QatRun,
        job="qat",
        flags=("verify",),
    ),
    Command(
        name="prune",
        help="prune a model's weights or experts, retrain it, and save it",
        example="ms-compress prune RUN.toml pattern=2:4 method=wanda",
        options=PruneRun,
        job="prune",
    ),
    Command(
        name="distill",
        help="cut a smaller student from a teacher and train it on the teacher's logits",
        example="ms-compress distill RUN.toml layers=3 tuning.steps=500",
        options=DistillRun,
        job="distill",
    ),
    Command(
        name="quantize",
        help="quantize a model without training (RTN, GPTQ, AWQ, SmoothQuant), and export it",
        example="ms-compress quantize RUN.toml method=awq scheme=ct.int4_g32",
        options=QuantizeRun,
        job="quantize",
        flags=("verify",),
        arguments=("scheme", "method", "output_dir", "dataset"),
    ),
    Command(
        name="compare-schemes",
        help="quantize a model to several schemes, and draw divergence against size",
        example="ms-compress compare-schemes RUN.toml schemes=w8a8,int4_g32 methods=rtn,awq",
        options=CompareRun,
        job="compare_schemes",
        arguments=("schemes", "methods", "output_dir", "dataset"),
    ),
    Command(
        name="evaluate",
        help="measure exported folders in their runtimes; write a table and a page with charts",
        example="ms-compress evaluate RUN.toml output_dir=report",
        options=EvaluateRun,
        job="evaluate",
    ),
)
"""In the order of `--help`."""
