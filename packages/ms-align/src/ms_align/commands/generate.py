"""`ms-align generate`: write responses to prompts, as JSON Lines with tokens and logprobs."""

from pathlib import Path
from typing import Any, Literal

import msgspec
from attrs import field, fields, frozen
from attrs.converters import optional

from ms_align.engines.assembly import open_model
from ms_align.engines.options import DeviceOptions
from ms_align.errors import ConfigError
from ms_align.files.durable import write_file, writing
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling, token_ids
from ms_align.generation.stops import resolve_tokenizer, with_stops
from ms_align.models.folder import vocabulary_of
from ms_align.rollouts.prompts import Prompt, read_prompts
from ms_align.rollouts.vllm.client import VllmClient
from ms_align.rollouts.vllm.options import VllmOptions, check_generator, vllm_options
from ms_align.seeds import MAX_SEED
from ms_align.settings import integer, one_of, valid_path
from ms_align.settings.run_file import build
from ms_align.tokenizer import Tokenizer, load_tokenizer
from ms_align.tokenizer_files import check_same_tokenizer, files_of


@frozen(kw_only=True, slots=False)
class Generation(Sampling, DeviceOptions):
    """Settings of `ms-align generate`, in addition to the sampling settings."""

    model: str = field(validator=valid_path())
    """Folder of the model."""
    tokenizer: str | None = field(default=None, validator=valid_path(optional=True))
    """Tokenizer: a folder, a `tokenizer.json`, or `bytes`. Default: the tokenizer of the model."""
    dataset: str = field(validator=valid_path())
    """File of prompts: JSON Lines, a JSON array, CSV or Parquet."""
    stop_token_ids: Any = field(default=None, converter=optional(token_ids))
    """Token ids that end a response. Default: the end-of-text tokens of the model."""
    output_path: str = field(validator=valid_path(written="file"))
    """JSON Lines file to write."""
    num_generations: int = field(default=1, validator=integer())
    """Responses per prompt."""
    generator: Literal["policy", "vllm"] = field(
        default="policy", validator=one_of("policy", "vllm")
    )
    """Where responses are generated: `policy` for the model in this process, or `vllm` for vLLM
    servers, which must already serve it unless `vllm.python` starts one."""
    vllm: VllmOptions | None = field(
        default=None,
        converter=vllm_options,
        validator=check_generator,
        metadata={"table": VllmOptions},
    )
    """Servers of `generator = "vllm"`."""
    max_num_seqs: int = field(default=64, validator=integer())
    """Responses generated at the same time."""
    seed: int = field(default=0, validator=integer(minimum=0, maximum=MAX_SEED))
    """Random seed."""


def generate(
    options_class: type[Generation], settings: dict[str, Any], where: str
) -> dict[str, Any]:
    """Run `ms-align generate`."""
    options = build(options_class, settings, where=where)
    tokenizer_path = resolve_tokenizer(options.tokenizer, options.model)
    if tokenizer_path is None:
        raise ConfigError(f"{where}: {options.model} has no tokenizer; set tokenizer")
    tokenizer = load_tokenizer(tokenizer_path)
    files = files_of(tokenizer_path, tokenizer)
    if options.tokenizer is not None:
        check_same_tokenizer(
            files_of(options.model),
            f"the model {options.model}",
            files,
            "`tokenizer`",
            remedy="leave `tokenizer` out",
        )
    prompts = read_prompts(options.dataset, tokenizer, name="dataset")
    sampling_settings = {item.name: getattr(options, item.name) for item in fields(Sampling)}
    sampling = Sampling(**{**sampling_settings, "stop_token_ids": options.stop_token_ids or ()})
    sampling = with_stops(sampling, options.stop_token_ids, tokenizer, files)
    tokens = [prompt.tokens for prompt in prompts]
    responses = _responses(options, tokens, sampling, tokenizer)
    _write(Path(options.output_path), prompts, responses, tokenizer, options.num_generations)
    count, stopped = len(responses.lengths), int(responses.stopped.sum())
    print(
        f"wrote {count} responses to {len(prompts)} prompts to {options.output_path}: "
        f"{stopped} stopped, {count - stopped} cut at max_new_tokens = {options.max_new_tokens}",
        flush=True,
    )
    return {
        "code": 0,
        "output_path": options.output_path,
        "prompts": len(prompts),
        "responses": len(responses.lengths),
        "tokens": int(responses.lengths.sum()),
        "stopped": stopped,
        "truncated": count - stopped,
    }


def _responses(
    options: Generation, prompts: list[Any], sampling: Sampling, tokenizer: Tokenizer
) -> Responses:
    """Generate in this process or with vLLM servers."""
    count, seed, decode = options.num_generations, options.seed, tokenizer.decode
    if options.vllm is None:
        model = open_model(options.model, device=options.device)
        generator = LocalGenerator(model, max_num_seqs=options.max_num_seqs, decode=decode)
        return generator(prompts, sampling, count=count, seed=seed)
    client = VllmClient(
        options.vllm,
        vocabulary=vocabulary_of(options.model),
        max_num_seqs=options.max_num_seqs,
        log_path=Path(f"{options.output_path}.vllm-server.log"),
        decode=decode,
    )
    try:
        client.open(Path(options.model))
        return client(prompts, sampling, count=count, seed=seed)
    finally:
        client.close()


def _write(
    path: Path,
    prompts: list[Prompt],
    responses: Responses,
    tokenizer: Tokenizer,
    num_generations: int,
) -> None:
    # A server only knows the log-probabilities of the distribution that it samples from.
    in_process = responses.logprobs is not None
    logprobs = responses.logprobs if in_process else responses.sampling_logprobs
    assert logprobs is not None
    lines = []
    for row in range(len(responses.lengths)):
        prompt, tokens = prompts[row // num_generations], responses.row(row)
        record = {
            "prompt": prompt.text,
            "response": tokenizer.decode(tokens),
            "tokens": tokens,
            "logprobs": logprobs[row, : len(tokens)].tolist(),
            "stopped": bool(responses.stopped[row]),
        }
        lines.append(msgspec.json.encode(record))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, b"\n".join(lines) + b"\n")
