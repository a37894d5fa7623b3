"""Subcommands of `ms-align`: names, help and the code that runs them.

Each module of `ms_align.trainers` is a command of the same name. Nothing heavy is imported here,
so that `--help` is fast; a command's code is imported when it runs.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from attrs import evolve, field, frozen

from ms_align import trainers
from ms_align.settings.keys import Key, KeyGroup, groups_of
from ms_align.settings.template import template_text

HIDDEN = {"on_event", "algorithm"}
"""Fields that cannot be set in a run file."""

Run = Callable[[Any, dict[str, Any], str], dict[str, Any]]
"""Function of a command: takes the settings class, the settings and the name of their file, and
returns the `--json` summary with its exit `code`."""


@frozen(kw_only=True)
class Command:
    """One subcommand of `ms-align`, run as `ms-align NAME RUN.toml [KEY=VALUE]...`."""

    name: str
    help: str
    """One-line description."""
    example_overrides: str = "steps=200 learning_rate=1e-5"
    """Overrides in the example command line."""
    settings: str
    """Class whose fields are the keys of the run file, as `module:Class`."""
    run: str
    """Function that runs the command, as `module:function`."""
    extra_keys: tuple[Key, ...] = ()
    """Keys that are not fields of the class."""
    run_file_names: dict[str, str] = field(factory=dict)
    """Run-file names of fields that have another name in Python."""
    placeholders: dict[str, Any] = field(factory=dict)
    """Placeholders for keys without a default in the template that `init` writes."""

    @property
    def example(self) -> str:
        """Example command line."""
        return f"ms-align {self.name} RUN.toml {self.example_overrides}"

    def groups(self) -> list[KeyGroup]:
        """List the keys of a run file: required keys first, the others grouped by class."""
        groups = [
            evolve(group, keys=tuple(self._with_run_file_name(key) for key in group.keys))
            for group in groups_of(self.settings, HIDDEN)
        ]
        keys = [*(key for group in groups for key in group.keys), *self.extra_keys]
        required = tuple(key for key in keys if key.required)
        data = KeyGroup(
            title="Data", keys=tuple(key for key in self.extra_keys if not key.required)
        )
        optional = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
        return [KeyGroup(title="Needed", keys=required), *(g for g in (data, *optional) if g.keys)]

    def _with_run_file_name(self, key: Key) -> Key:
        return evolve(key, name=self.run_file_names.get(key.name, key.name))

    def template(self) -> str:
        """Return a run file with every key; required keys hold a placeholder."""
        title = f"ms-align {self.name} RUN.toml: {self.help}."
        return template_text(title, self.groups(), self.placeholders)

    def perform(self, settings: dict[str, Any], where: str) -> dict[str, Any]:
        """Run the command with the settings of a run file."""
        return cast(Run, _import(self.run))(_import(self.settings), settings, where)


def _import(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(f"ms_align.{module}"), name)


DATASET = Key(
    name="dataset",
    meaning="Folder written by `ms-data build --chat-template`; for `sft` and `gkd` also a table of"
    " several.",
    kind="str | dict",
    required=True,
)
PROMPTS = (
    Key(
        name="dataset",
        meaning="File of prompts: JSON Lines or a JSON array of texts, tokens, chats or objects"
        " with a key `prompt`, or a CSV or Parquet table with a column `prompt`.",
        kind="str",
        required=True,
    ),
    Key(
        name="response_dataset",
        meaning="File of the reference answers in the order of the prompts: JSON, CSV or Parquet.",
        kind="str | None",
    ),
)


def _trainer(name: str) -> Command:
    """Build the command for a module of `ms_align.trainers`."""
    # Parsed rather than imported, as importing a trainer imports torch.
    source = Path(trainers.__path__[0], f"{name}.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    trainer_class = next(item for item in classes if item.name.endswith("Trainer"))
    summary = (ast.get_docstring(trainer_class) or "").partition("\n")[0].rstrip(".")
    settings = f"trainers.{name}:{trainer_class.name}"
    keys = {key.name for group in groups_of(settings) for key in group.keys}
    online = "policy_model" in keys  # only online trainers generate responses
    placeholders: dict[str, Any] = {"model": "path/to/model", "dataset": "shards"}
    placeholders |= {"sequence_length": 512, "epochs": 1, "teacher_model": "path/to/teacher"}
    if online:
        placeholders = {"model": "runs/sft/model", "dataset": "prompts.jsonl"}
        placeholders |= {"reward_model": "runs/reward/model"}
    return Command(
        name=name,
        help=f"{summary[:1].lower()}{summary[1:]}; the same command resumes",
        settings=settings,
        run=f"commands.train:{'online' if online else 'offline'}",
        extra_keys=PROMPTS if online else (DATASET,),
        run_file_names={"policy_model": "model"} if online else {},
        placeholders=placeholders,
    )


COMMANDS: tuple[Command, ...] = (
    *(_trainer(item.name) for item in pkgutil.iter_modules(trainers.__path__) if not item.ispkg),
    Command(
        name="generate",
        help="write responses to prompts",
        example_overrides="num_generations=4 output_path=responses.jsonl",
        settings="commands.generate:Generation",
        run="commands.generate:generate",
        placeholders={
            "model": "runs/sft/model",
            "dataset": "prompts.jsonl",
            "output_path": "responses.jsonl",
        },
    ),
    Command(
        name="evaluate",
        help="run tasks of lm-evaluation-harness on a model",
        example_overrides="limit=100 output_path=results.json",
        settings="commands.evaluate:Evaluation",
        run="commands.evaluate:evaluate",
        placeholders={"model": "runs/sft/model", "tasks": ["arc_easy", "hellaswag"]},
    ),
)
"""Commands in the order of `--help`."""
