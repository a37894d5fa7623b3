"""`ms-align evaluate`: run lm-evaluation-harness tasks on a model."""

import json
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ms_align.commands.launch import check_launched
from ms_align.engines.layout import check_layout, layout_of
from ms_align.engines.options import ComputeOptions
from ms_align.errors import ConfigError
from ms_align.evaluation import harness_model
from ms_align.evaluation.tasks import format_results, run_tasks
from ms_align.files.durable import write_file, writing
from ms_align.seeds import MAX_SEED
from ms_align.settings import flag, integer, valid_path
from ms_align.settings.run_file import build
from ms_align.used_settings import UsedIf, check_used


def _names(instance: object, attribute: Any, value: object) -> None:
    if not (isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)):
        raise ConfigError(
            f'{attribute.name} must be a list of names such as ["lambada"], got {value!r}; '
            "correct it"
        )


def _ranks(instance: Any, attribute: Any, value: object) -> None:
    check_layout(value)
    if value is None:
        instance.check_single_process()


@frozen(kw_only=True, slots=False)
class Evaluation(ComputeOptions):
    """Settings of `ms-align evaluate`."""

    model: str = field(validator=valid_path())
    """Folder of the model, or of a model exported by ms-compress."""
    tasks: list[str] = field(validator=_names)
    """Tasks, groups or tags of the harness, or task files in `include_path`."""
    include_path: str | None = field(default=None, validator=valid_path(optional=True))
    """Folder with YAML files of custom tasks; these need no network."""
    tokenizer: str | None = field(default=None, validator=valid_path(optional=True))
    """Tokenizer: a folder, a `tokenizer.json`, or `bytes`. Default: the tokenizer of the model."""
    runtime: str | None = field(default=None)
    """Runtime of an exported model, such as `gguf`, `ort` or `ct`; opened by ms-compress.
    Default: the model runs on an engine."""
    layout: Any = field(default=None, validator=_ranks)
    """Ranks per ms-parallel axis, such as `{ data = 2, tensor = 2 }`. None: one process."""
    num_fewshot: int | None = field(default=None, validator=integer(minimum=0, optional=True))
    """Number of few-shot examples per question. Default: the task's own number."""
    apply_chat_template: bool = field(default=False, validator=flag)
    """Format questions with the model's chat template."""
    limit: int | None = field(default=None, validator=integer(optional=True))
    """Maximum number of questions per task. Default: all."""
    max_length: int | None = field(default=None, validator=integer(optional=True))
    """Maximum number of tokens per request. Default: the model's context length."""
    batch_size: int = field(default=16, validator=integer())
    """Rows per forward pass, over all processes."""
    seed: int = field(default=0, validator=integer(minimum=0, maximum=MAX_SEED))
    """Seed for choosing few-shot examples and for sampling."""
    output_path: str | None = field(
        default=None, validator=valid_path(written="file", optional=True)
    )
    """JSON file for the results. Default: results are only printed."""

    def __attrs_post_init__(self) -> None:
        rule = UsedIf("device", "without runtime", lambda run: run.runtime is None)
        check_used(self, (rule,), error=ConfigError)


def evaluate(
    options_class: type[Evaluation], settings: dict[str, Any], where: str
) -> dict[str, Any]:
    """Run `ms-align evaluate`."""
    options = build(options_class, settings, where=where)
    if options.runtime is not None and options.layout is not None:
        raise ConfigError(f"{where}: an exported model runs in one process; remove layout")
    # Checked before the model is loaded.
    if options.layout is not None:
        check_launched(layout_of(options.layout).world_size)
    model = harness_model(
        options.model
        if options.runtime is None
        else _open_exported(options.model, options.runtime),
        # An exported model does not know its folder, which has the tokenizer.
        options.tokenizer or (None if options.runtime is None else options.model),
        layout=options.layout,
        context=options.max_length,
        batch_size=options.batch_size,
        seed=options.seed,
        options=options,
    )
    results = run_tasks(
        model,
        options.tasks,
        folder=options.include_path,
        num_fewshot=options.num_fewshot,
        chat=options.apply_chat_template,
        limit=options.limit,
        seed=options.seed,
    )
    report: dict[str, Any] = {
        "model": options.model,
        "runtime": options.runtime,
        "results": results,
    }
    report["truncated"] = model.truncated
    if _is_rank_zero():
        print(format_results(results), flush=True)
        if model.truncated:
            print(
                f"{model.truncated} requests were truncated on the left to the context of "
                f"{model.max_length} tokens",
                flush=True,
            )
        if options.output_path is not None:
            path = Path(options.output_path)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(report, indent=2).encode() + b"\n")
    return {"code": 0, **report}


def _open_exported(folder: str, runtime: str) -> Any:
    try:
        from ms_compress import CompressError, open_runtime
    except ImportError as error:
        raise ConfigError(
            "runtime needs ms-compress; install it with `pip install 'ms-align[compress]'`"
        ) from error
    try:
        return open_runtime(Path(folder), runtime)
    except CompressError as error:
        raise ConfigError(str(error)) from error


def _is_rank_zero() -> bool:
    from ms_align import processes

    return processes.rank() == 0
