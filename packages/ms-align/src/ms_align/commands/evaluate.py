"""`ms-align evaluate`: tasks of lm-evaluation-harness, asked of a model."""

import json
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ms_align.commands.launch import check_launched
from ms_align.engines.layout import check_layout, layout_of
from ms_align.engines.options import ComputeOptions
from ms_align.errors import ConfigError
from ms_align.evaluation import harness_model
from ms_align.evaluation.tasks import run_tasks, shown_results
from ms_align.files.durable import write_file, writing
from ms_align.seeds import LARGEST_SEED
from ms_align.settings import a_path, flag, whole
from ms_align.settings.run_file import build

ALSO = {"include_path": "task_folder", "num_fewshot": "few_shot", "output_path": "out"}
ALSO |= {"apply_chat_template": "chat"}
"""Names of lm-evaluation-harness for keys that have another one here; both are taken."""


def _names(instance: object, attribute: Any, value: object) -> None:
    if not (isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)):
        raise ConfigError(f'{attribute.name} is {value!r}; give a list of names, as ["lambada"]')


def _ranks(instance: Any, attribute: Any, value: object) -> None:
    check_layout(value)
    if value is None:
        instance.check_alone()


@frozen(kw_only=True, slots=False)
class Evaluation(ComputeOptions):
    """Settings of the command."""

    model: str = field(validator=a_path())
    """Folder of the model, or of what was exported from one."""
    tasks: list[str] = field(validator=_names)
    """Names of tasks, groups or tags of the harness, or of files in `task_folder`."""
    task_folder: str | None = field(default=None, validator=a_path(optional=True))
    """Folder of YAML files of tasks of your own; such tasks need no network."""
    tokenizer: str | None = field(default=None, validator=a_path(optional=True))
    """A folder, a `tokenizer.json`, or `bytes`; by default the one that lies beside the model."""
    runtime: str | None = field(default=None)
    """The target that the folder was exported for, as `gguf`, `ort` or `ct`: ms-compress opens it
    in that target's own runtime. By default the engine runs it."""
    layout: Any = field(default=None, validator=_ranks)
    """Ranks of ms-parallel's axes, as `{ data = 2, tensor = 2 }`; None runs in one process."""
    few_shot: int | None = field(default=None, validator=whole(least=0, optional=True))
    """Examples before each question; by default as the task has it."""
    chat: bool = field(default=False, validator=flag)
    """Ask through the model's chat template."""
    limit: int | None = field(default=None, validator=whole(optional=True))
    """Questions of each task at most; all by default."""
    context: int | None = field(default=None, validator=whole(optional=True))
    """Tokens that the model reads at most; by default what the model says."""
    batch_size: int = field(default=16, validator=whole())
    """Rows that pass at once, of all processes together."""
    seed: int = field(default=0, validator=whole(least=0, most=LARGEST_SEED))
    """Seed of examples and of answers that are drawn."""
    out: str | None = field(default=None, validator=a_path(written="file", optional=True))
    """JSON file for the results, whole or not at all; else they are only printed."""


def evaluate(kind: type[Evaluation], settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Run `ms-align evaluate`."""
    for theirs, ours in ALSO.items():
        if theirs in settings and ours in settings:
            raise ConfigError(f"{where}: {theirs} and {ours} are one setting; give one of them")
        if theirs in settings:
            settings[ours] = settings.pop(theirs)
    given = build(kind, settings, where=where)
    if given.runtime is not None and given.layout is not None:
        raise ConfigError(f"{where}: an exported model runs in one process; leave out layout")
    if given.layout is not None:
        check_launched(layout_of(given.layout).world_size)
    model = harness_model(
        given.model if given.runtime is None else _exported(given.model, given.runtime),
        given.tokenizer or (None if given.runtime is None else given.model),
        layout=given.layout,
        context=given.context,
        batch_size=given.batch_size,
        seed=given.seed,
        options=given,
    )
    results = run_tasks(
        model,
        given.tasks,
        folder=given.task_folder,
        few_shot=given.few_shot,
        chat=given.chat,
        limit=given.limit,
        seed=given.seed,
    )
    facts: dict[str, Any] = {"model": given.model, "runtime": given.runtime, "results": results}
    facts["truncated"] = model.truncated
    if _is_first():
        print(shown_results(results), flush=True)
        if model.truncated:
            print(
                f"{model.truncated} requests lost their beginning: they are longer than the "
                f"{model.max_length} tokens that the model reads",
                flush=True,
            )
        if given.out is not None:
            path = Path(given.out)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(facts, indent=2).encode() + b"\n")
    return {"code": 0, **facts}


def _exported(folder: str, runtime: str) -> Any:
    """Open an exported model in its runtime."""
    try:
        from ms_compress import CompressError, open_runtime
    except ImportError as error:
        raise ConfigError(
            "runtime needs ms-compress; pip install 'ms-align[compress]' brings it"
        ) from error
    try:
        return open_runtime(Path(folder), runtime)
    except CompressError as error:
        raise ConfigError(str(error)) from error


def _is_first() -> bool:
    from ms_align import processes

    return processes.rank() == 0
