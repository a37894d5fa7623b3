"""The commands of `ms-compress`, one module each; this table does not import torch."""

from importlib import import_module
from typing import Any

from attrs import evolve, field, frozen

from ms_compress.options import (
    CompareRun,
    DistillRun,
    EvaluateRun,
    PruneRun,
    QatRun,
    QuantizeRun,
)
from ms_compress.run.outcome import Outcome
from ms_compress.settings.keys import KeyGroup, class_path, groups_of
from ms_compress.settings.template import template_text

__all__ = ["COMMANDS", "Command"]


@frozen(kw_only=True)
class Command:
    """A subcommand of `ms-compress`, run as `ms-compress NAME RUN.toml [KEY=VALUE]...`."""

    name: str
    help: str
    """Help text, one line."""
    example: str
    options: type
    """attrs class of its settings."""
    flags: tuple[str, ...] = field(default=())
    """Settings that a command-line option of the same name sets to true."""
    arguments: tuple[str, ...] = field(default=())
    """Settings that are also command-line options, for use with a model folder instead of a run
    file."""
    by_torchrun: bool = field(default=False)
    """True if torchrun may start it in several processes."""
    begins_with: tuple[str, ...] = ("dataset",)
    """Optional keys that a new run file includes, because most runs need them."""

    def groups(self) -> list[KeyGroup]:
        """Return the keys of its run files: required ones first, then the others by class."""
        groups = groups_of(class_path(self.options))
        needed = tuple(key for group in groups for key in group.keys if key.required)
        optional = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
        return [KeyGroup(title="Needed", keys=needed), *(group for group in optional if group.keys)]

    def template(self) -> str:
        """Return a run file with every key, with examples for required and usual keys."""
        title = f"ms-compress {self.name} RUN.toml: {self.help}."
        groups = self.groups()
        examples = {
            key.name: _example(key.example, self.name)
            for group in groups
            for key in group.keys
            if key.example is not None and (key.required or key.name in self.begins_with)
        }
        return template_text(title, groups, examples)

    def run(self, options: Any) -> Outcome:
        """Import the command's module, with torch, and run it with these settings."""
        module = import_module(f"ms_compress.commands.{self.name.replace('-', '_')}")
        outcome: Outcome = module.run(options)
        return outcome


def _example(value: Any, command: str) -> Any:
    return value.replace("{command}", command) if isinstance(value, str) else value


COMMANDS: tuple[Command, ...] = (
    Command(
        name="qat",
        help="train a model with its target's quantization, and export it",
        example="ms-compress qat RUN.toml scheme=gguf.q4_0 tuning.steps=200",
        options=QatRun,
        flags=("verify",),
    ),
    Command(
        name="prune",
        help="prune a model's weights or experts, retrain it, and save it",
        example="ms-compress prune RUN.toml pattern=2:4 method=wanda",
        options=PruneRun,
    ),
    Command(
        name="distill",
        help="cut a smaller student from a teacher and train it on the teacher's logits",
        example="ms-compress distill RUN.toml layers=3 tuning.steps=500",
        options=DistillRun,
    ),
    Command(
        name="quantize",
        help="quantize a model without training (GPTQ, AutoRound, AWQ, SmoothQuant), and export it",
        example="ms-compress quantize RUN.toml method=awq scheme=ct.int4_g32",
        options=QuantizeRun,
        flags=("verify",),
        arguments=("scheme", "method", "output_dir", "dataset"),
        by_torchrun=True,
    ),
    Command(
        name="compare-schemes",
        help="quantize a model to several schemes, and draw divergence against size",
        example="ms-compress compare-schemes RUN.toml schemes=w8a8,int4_g32 methods=rtn,awq",
        options=CompareRun,
        arguments=("schemes", "methods", "output_dir", "dataset"),
    ),
    Command(
        name="evaluate",
        help="measure exported folders in their runtimes; write a table and a page with charts",
        example="ms-compress evaluate RUN.toml output_dir=report",
        options=EvaluateRun,
    ),
)
"""In the order of `--help`."""
