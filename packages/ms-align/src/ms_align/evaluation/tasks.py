"""Runs tasks of lm-evaluation-harness and keeps of its results what people read."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

from ms_align.errors import AlignError, ConfigError, DataError

Results = dict[str, dict[str, float]]
"""Metrics by name, as `acc` or `acc,stderr`, of each task."""


def run_tasks(
    model: Any,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    few_shot: int | None = None,
    chat: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Results:
    """Ask a model of the harness all that some tasks ask.

    Args:
        model: as `harness_model` gives it.
        tasks: names of tasks, groups or tags.
        folder: of YAML files of tasks; where all tasks lie there, the harness's own are not read.
        few_shot: examples before each question; None for what the task has.
        chat: ask through the model's chat template.
        limit: questions of each task at most.
        seed: of examples.

    Returns:
        Metrics by task, in the first process of a host; elsewhere nothing, as the harness has it.

    Raises:
        ConfigError: there is no such task.
        DataError: a task cannot be asked: its file is wrong, or its data are not there.
    """
    import lm_eval

    known = _known(tasks, folder)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=known,
            num_fewshot=few_shot,
            apply_chat_template=chat,
            limit=limit,
            bootstrap_iters=1000,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except AlignError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"the tasks {list(tasks)} cannot be asked: {_line(error)}") from error
    given = {} if found is None else found["results"]
    return {name: _numbers(metrics) for name, metrics in given.items()}


def _known(tasks: Sequence[str], folder: str | None) -> Any:
    """Find the tasks that the harness knows, `folder`'s too, and check that each is there."""
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"task_folder is {folder}, which is no folder; give one with YAML files")
    try:
        known = TaskManager(include_path=folder, include_defaults=False)
        if not set(tasks) <= set(known.all_tasks):
            known = TaskManager(include_path=folder)
    except Exception as error:  # whatever a file of a task makes of its reader
        raise DataError(f"the tasks of {folder} cannot be read: {_line(error)}") from error
    missing = next((name for name in tasks if name not in known.all_tasks), None)
    if missing is not None:
        near = get_close_matches(missing, known.all_tasks, n=1)
        raise ConfigError(
            f"there is no task {missing!r}{f'; did you mean {near[0]!r}?' if near else ''}; "
            "task_folder names a folder of tasks of your own"
        )
    return known


def shown_results(results: Results) -> str:
    """Write a line a metric, as commands print them."""
    rows = [
        (task, metric, f"{value:.4f}", f"± {metrics[f'{metric},stderr']:.4f}")
        if f"{metric},stderr" in metrics
        else (task, metric, f"{value:.4f}", "")
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if not metric.endswith(",stderr")
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value:>{widths[2]}}  {error}".rstrip()
        for task, metric, value, error in rows
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Read the metrics of a task; the harness writes them as `acc,none` and `acc_stderr,none`."""
    numbers = {}
    for key, value in metrics.items():
        name, _, kept = key.partition(",")
        if not kept or not isinstance(value, Real):
            continue  # the task's own name, or a standard error that is "N/A"
        plain, stderr = name.removesuffix("_stderr"), name.endswith("_stderr")
        label = plain if kept == "none" else f"{plain},{kept}"
        numbers[f"{label},stderr" if stderr else label] = float(value)
    return numbers


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
