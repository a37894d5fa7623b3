"""The commands: names, what `--help` says, and where the code lies that does it.

Each module of `ms_align.trainers` is a command of its name. Nothing here computes, so that help
answers at once; what runs is imported when it is asked for.
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
"""Fields that no file can hold."""

Run = Callable[[Any, dict[str, Any], str], dict[str, Any]]
"""Takes the settings' class, settings, and the file's name for messages; returns what `--json`
prints, with `code`."""


@frozen(kw_only=True)
class Command:
    """One subcommand of `ms-align`, run as `ms-align NAME RUN.toml [--set KEY=VALUE]...`."""

    name: str
    help: str
    """One line."""
    sets: str = "steps=200 --set learning_rate=1e-5"
    """What the example's `--set` changes."""
    settings: str
    """The class whose fields are the run file's keys, as `module:Class`."""
    run: str
    """The function that runs it, as `module:function`."""
    more: tuple[Key, ...] = ()
    """Keys beside those of the class."""
    called: dict[str, str] = field(factory=dict)
    """Fields that run files call by another name."""
    renamed: dict[str, str] = field(factory=dict)
    """Keys that are not known any more, with their new names."""
    begins_with: dict[str, Any] = field(factory=dict)
    """Values of the template of `init` where there is no default."""

    @property
    def example(self) -> str:
        """A line that can be typed."""
        return f"ms-align {self.name} RUN.toml --set {self.sets}"

    def groups(self) -> list[KeyGroup]:
        """List the keys of its run files: those that must be given first, the rest by class."""
        groups = [
            evolve(group, keys=tuple(self._called(key) for key in group.keys))
            for group in groups_of(self.settings, HIDDEN)
        ]
        keys = [*(key for group in groups for key in group.keys), *self.more]
        needed = tuple(key for key in keys if key.required)
        others = KeyGroup(title="Data", keys=tuple(key for key in self.more if not key.required))
        rest = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
        return [KeyGroup(title="Needed", keys=needed), *(g for g in (others, *rest) if g.keys)]

    def _called(self, key: Key) -> Key:
        return evolve(key, name=self.called.get(key.name, key.name))

    def template(self) -> str:
        """Write a run file with every key; those that must be given hold a path to fill in."""
        title = f"ms-align {self.name} RUN.toml: {self.help}."
        return template_text(title, self.groups(), self.begins_with)

    def perform(self, settings: dict[str, Any], where: str) -> dict[str, Any]:
        """Run it with the settings of a run file."""
        return cast(Run, _imported(self.run))(_imported(self.settings), settings, where)


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"ms_align.{module}"), name)


DATASET = Key(
    name="dataset",
    meaning="Folder that `ms-data build --chat-template` wrote; for `sft` also a table of several.",
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
        meaning="File of the known answer to each prompt, in the same order; JSON, CSV or Parquet.",
        kind="str | None",
    ),
)


def _trainer(name: str) -> Command:
    """Build the command of a module of `ms_align.trainers`."""
    source = Path(trainers.__path__[0], f"{name}.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    kind = next(each for each in classes if each.name.endswith("Trainer"))
    summary = (ast.get_docstring(kind) or "").partition("\n")[0].rstrip(".")
    settings = f"trainers.{name}:{kind.name}"
    keys = {key.name for group in groups_of(settings) for key in group.keys}
    online = "policy_model" in keys
    begins: dict[str, Any] = {"model": "path/to/model", "dataset": "shards"}
    begins |= {"sequence_length": 512, "epochs": 1}
    if online:
        begins = {"model": "runs/sft/model", "dataset": "prompts.jsonl"}
        begins |= {"reward_model": "runs/reward/model"}
    return Command(
        name=name,
        help=f"{summary[:1].lower()}{summary[1:]}; the same command resumes",
        settings=settings,
        run=f"commands.train:{'online' if online else 'offline'}",
        more=PROMPTS if online else (DATASET,),
        called={"policy_model": "model"} if online else {},
        renamed={"data": "dataset", "reference": "reference_model", "out": "output_dir"},
        begins_with=begins,
    )


COMMANDS: tuple[Command, ...] = (
    *(_trainer(each.name) for each in pkgutil.iter_modules(trainers.__path__) if not each.ispkg),
    Command(
        name="generate",
        help="write responses to prompts",
        sets="group_size=4 --set out=responses.jsonl",
        settings="commands.generate:Generation",
        run="commands.generate:generate",
        renamed={"policy_model": "model", "prompt_dataset": "dataset", "data": "dataset"},
        begins_with={
            "model": "runs/sft/model",
            "dataset": "prompts.jsonl",
            "out": "responses.jsonl",
        },
    ),
    Command(
        name="evaluate",
        help="ask a model the tasks of lm-evaluation-harness",
        sets="limit=100 --set out=results.json",
        settings="commands.evaluate:Evaluation",
        run="commands.evaluate:evaluate",
        begins_with={"model": "runs/sft/model", "tasks": ["arc_easy", "hellaswag"]},
    ),
)
"""In the order in which `--help` lists them."""
