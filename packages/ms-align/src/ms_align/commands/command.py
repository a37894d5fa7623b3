"""The commands: names, what `--help` says, and where the code lies that does it.

Nothing here computes, so that help answers at once; what runs is imported when it is asked for.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

from attrs import field, frozen

from ms_align.run_keys import Key

__all__ = ["COMMANDS", "Command"]

Run = Callable[[dict[str, Any], str], dict[str, Any]]
"""Takes settings and the file's name, for messages; returns what `--json` prints, with `code`."""


@frozen(kw_only=True)
class Command:
    """One subcommand of `ms-align`, run as `ms-align NAME RUN.toml [--set KEY=VALUE]...`."""

    name: str
    help: str
    """One line."""
    sets: str
    """What the example's `--set` changes."""
    settings: str
    """The class whose fields are the run file's keys, as `module:Class`."""
    run: str
    """The function that runs it, as `module:function`."""
    more: tuple[Key, ...] = ()
    """Keys beside those of the class."""
    called: dict[str, str] = field(factory=dict)
    """Fields that run files call by another name."""
    begins_with: dict[str, Any] = field(factory=dict)
    """Values of the template of `init` where there is no default."""

    @property
    def example(self) -> str:
        """A line that can be typed."""
        return f"ms-align {self.name} RUN.toml --set {self.sets}"

    def function(self) -> Run:
        """What runs it, imported."""
        module, _, name = self.run.partition(":")
        return cast(Run, getattr(importlib.import_module(f"ms_align.{module}"), name))


DATASETS = (
    Key(
        name="dataset",
        meaning="JSON Lines file of prompts: texts, tokens, chats, or tables with a key `prompt`.",
        required=True,
    ),
    Key(
        name="response_dataset",
        meaning="JSON Lines file of the known answer to each prompt, in the same order.",
    ),
)


def _online(name: str, kind: str) -> Command:
    return Command(
        name=name,
        help=f"optimise a reward by {name.upper()}; the same command goes on",
        sets="steps=200 --set learning_rate=1e-5",
        settings=f"trainers.{name}:{kind}",
        run=f"commands.online:{name}",
        more=DATASETS,
        called={"policy_model": "model"},
        begins_with={
            "model": "runs/sft/model",
            "reward_model": "runs/reward/model",
            "dataset": "prompts.jsonl",
        },
    )


OFFLINE = {"model": "path/to/model", "sequence_length": 512, "epochs": 1}

COMMANDS: tuple[Command, ...] = (
    Command(
        name="sft",
        help="tune a model on instructions; the same command goes on",
        sets="steps=200 --set learning_rate=1e-5",
        settings="commands.offline:SFTRun",
        run="commands.offline:sft",
        begins_with={**OFFLINE, "dataset": "shards/chat"},
    ),
    Command(
        name="reward",
        help="train a reward model on preference pairs; the same command goes on",
        sets="centring=0.1",
        settings="commands.offline:RewardRun",
        run="commands.offline:reward",
        begins_with={**OFFLINE, "dataset": "shards/pairs"},
    ),
    Command(
        name="dpo",
        help="optimise preferences directly; the same command goes on",
        sets="beta=0.2",
        settings="commands.offline:DPORun",
        run="commands.offline:dpo",
        begins_with={**OFFLINE, "dataset": "shards/pairs"},
    ),
    _online("ppo", "PPOTrainer"),
    _online("grpo", "GRPOTrainer"),
    _online("rloo", "RLOOTrainer"),
    Command(
        name="generate",
        help="write responses to prompts",
        sets="group_size=4 --set out=responses.jsonl",
        settings="commands.generate:Generation",
        run="commands.generate:generate",
        begins_with={
            "model": "runs/sft/model",
            "dataset": "prompts.jsonl",
            "out": "responses.jsonl",
        },
    ),
)
"""In the order in which `--help` lists them."""
