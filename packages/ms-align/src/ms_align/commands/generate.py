"""`ms-align generate`: responses to prompts, as JSON Lines with tokens and log-probabilities."""

from pathlib import Path
from typing import Any

import msgspec
from attrs import field, fields, frozen
from attrs.converters import optional

from ms_align.engines.assembly import open_model
from ms_align.engines.options import DeviceOptions
from ms_align.errors import ConfigError
from ms_align.files.durable import write_file, writing
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling, token_numbers
from ms_align.generation.stops import beside, with_stops
from ms_align.rollouts.prompts import Prompt, read_prompts
from ms_align.seeds import LARGEST_SEED
from ms_align.settings import a_path, whole
from ms_align.settings.run_file import build
from ms_align.tokenizer import Tokenizer, load_tokenizer
from ms_align.tokenizer_files import check_same_tokenizer, files_of


@frozen(kw_only=True, slots=False)
class Generation(Sampling, DeviceOptions):
    """Settings of the command, beside those of sampling."""

    model: str = field(validator=a_path())
    """Folder of the model."""
    tokenizer: str | None = field(default=None, validator=a_path(optional=True))
    """A folder, a `tokenizer.json`, or `bytes`; by default the one that lies beside the model."""
    dataset: str = field(validator=a_path())
    """File of prompts: JSON Lines, a JSON array, CSV or Parquet."""
    stop_tokens: Any = field(default=None, converter=optional(token_numbers))
    """Each ends a response; by default those that end a text of the model."""
    out: str = field(validator=a_path(written="file"))
    """JSON Lines file to write; whole or not at all."""
    group_size: int = field(default=1, validator=whole())
    """Responses to each prompt."""
    slots: int = field(default=64, validator=whole())
    """Responses that are written at once."""
    seed: int = field(default=0, validator=whole(least=0, most=LARGEST_SEED))
    """Seed of the random numbers."""


def generate(kind: type[Generation], settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Run `ms-align generate`."""
    given = build(kind, settings, where=where)
    place = beside(given.tokenizer, given.model)
    if place is None:
        raise ConfigError(f"{where}: no tokenizer lies in {given.model}; give tokenizer")
    tokenizer = load_tokenizer(place)
    files = files_of(place, tokenizer)
    if given.tokenizer is not None:
        check_same_tokenizer(
            files_of(given.model),
            f"the model {given.model}",
            files,
            "`tokenizer`",
            remedy="leave `tokenizer` out",
        )
    prompts = read_prompts(given.dataset, tokenizer, what="dataset")
    drawn = {each.name: getattr(given, each.name) for each in fields(Sampling)}
    sampling = Sampling(**{**drawn, "stop_tokens": given.stop_tokens or ()})
    sampling = with_stops(sampling, given.stop_tokens, tokenizer, files)
    generator = LocalGenerator(
        open_model(given.model, device=given.device), slots=given.slots, decode=tokenizer.decode
    )
    responses = generator(
        [prompt.tokens for prompt in prompts], sampling, count=given.group_size, seed=given.seed
    )
    _write(Path(given.out), prompts, responses, tokenizer, given.group_size)
    count, stopped = len(responses.lengths), int(responses.stopped.sum())
    print(
        f"wrote {count} responses to {len(prompts)} prompts to {given.out}: {stopped} stopped, "
        f"{count - stopped} cut at max_new_tokens = {given.max_new_tokens}",
        flush=True,
    )
    return {
        "code": 0,
        "out": given.out,
        "prompts": len(prompts),
        "responses": len(responses.lengths),
        "tokens": int(responses.lengths.sum()),
        "stopped": stopped,
        "truncated": count - stopped,
    }


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
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, b"\n".join(lines) + b"\n")
