"""`ms-align generate`: responses to prompts, as JSON Lines with tokens and log-probabilities."""

from pathlib import Path
from typing import Any

import msgspec
from attrs import Attribute, field, fields, frozen

from ms_align.chance import LARGEST_SEED
from ms_align.commands.command import Command
from ms_align.durable import publish, write_synced, writing
from ms_align.errors import ConfigError
from ms_align.generation import LocalGenerator, Responses
from ms_align.model_folder import load_model
from ms_align.prompts import Prompt, read_prompts
from ms_align.run_file import build
from ms_align.sampling import Sampling
from ms_align.settings import text, whole
from ms_align.tokenizer import Tokenizer, load_tokenizer

__all__ = ["COMMAND"]


def _file(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not (isinstance(value, str) and Path(value).name):
        raise ConfigError(f"out is {value!r}; give a file")


@frozen(kw_only=True, slots=False)
class Generation(Sampling):
    """Settings of the command, beside those of sampling."""

    policy_model: str = field(validator=text())
    """Folder of the model."""
    tokenizer: str = field(validator=text())
    prompt_dataset: str = field(validator=text())
    """JSON Lines file of prompts."""
    out: str = field(validator=_file)
    """JSON Lines file to write; whole or not at all."""
    group_size: int = field(default=1, validator=whole())
    """Responses to each prompt."""
    slots: int = field(default=64, validator=whole())
    seed: int = field(default=0, validator=whole(least=0, most=LARGEST_SEED))


def _run(settings: dict[str, Any], where: str) -> int:
    given = build(Generation, settings, where=where)
    tokenizer = load_tokenizer(given.tokenizer)
    prompts = read_prompts(given.prompt_dataset, tokenizer)
    sampling = Sampling(**{each.name: getattr(given, each.name) for each in fields(Sampling)})
    generator = LocalGenerator(
        load_model(given.policy_model), slots=given.slots, decode=tokenizer.decode
    )
    responses = generator(
        [prompt.tokens for prompt in prompts], sampling, count=given.group_size, seed=given.seed
    )
    _write(Path(given.out), prompts, responses, tokenizer, given.group_size)
    return 0


def _write(
    path: Path,
    prompts: list[Prompt],
    responses: Responses,
    tokenizer: Tokenizer,
    group_size: int,
) -> None:
    lines = []
    for row in range(len(responses.lengths)):
        prompt, tokens = prompts[row // group_size], responses.row(row)
        assert responses.logprobs is not None
        fact = {
            "prompt": prompt.text,
            "response": tokenizer.decode(tokens),
            "tokens": tokens,
            "logprobs": responses.logprobs[row, : len(tokens)].tolist(),
            "stopped": bool(responses.stopped[row]),
        }
        lines.append(msgspec.json.encode(fact))
    aside = path.with_name(path.name + ".partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        write_synced(aside, b"\n".join(lines) + b"\n")
        publish(aside, path)


COMMAND = Command(
    name="generate",
    help="write responses to prompts",
    example="ms-align generate RUN.toml --set group_size=4 --set out=responses.jsonl",
    run=_run,
)
