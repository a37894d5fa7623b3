"""Runs lm-evaluation-harness tasks and formats the results."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

from ms_align.entry import one_line
from ms_align.errors import AlignError, ConfigError, DataError

Results = dict[str, dict[str, float]]
"""Metrics per task by name, such as `acc` or `acc,stderr`."""


def run_tasks(
    model: Any,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Results:
    """Run tasks on a model.

    Args:
        model: result of `harness_model`.
        tasks: names of tasks, groups or tags.
        folder: folder with YAML files of tasks; if it has all tasks, the harness's own tasks are
            not indexed.
        num_fewshot: few-shot examples per question. None: the task's own number.
        chat: format questions with the model's chat template.
        limit: maximum number of questions per task.
        seed: seed for choosing examples.

    Returns:
        Metrics by task on the first process of a host; empty elsewhere, as in the harness.

    Raises:
        ConfigError: a task is unknown.
        DataError: a task cannot run: its file is invalid, or its data is unavailable.
    """
    import lm_eval

    task_manager = _task_manager(tasks, folder)
    try:
        output = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=task_manager,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            limit=limit,
            bootstrap_iters=1000,  # for standard errors; the default of 100,000 is slow
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except AlignError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"the tasks {list(tasks)} cannot run: {_line(error)}") from error
    results = {} if output is None else output["results"]
    return {name: _numeric_metrics(metrics) for name, metrics in results.items()}


def _task_manager(tasks: Sequence[str], folder: str | None) -> Any:
    """Index the tasks of the harness and of `folder`, and check that all `tasks` exist."""
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"include_path must be a folder of YAML files, got {folder}; correct it")
    try:
        # Indexing the harness's own tasks takes seconds, so try without them.
        manager = TaskManager(include_path=folder, include_defaults=False)
        if not set(tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
    except Exception as error:  # a task file may raise anything when it is read
        raise DataError(f"the tasks of {folder} cannot be read: {_line(error)}") from error
    missing = next((name for name in tasks if name not in manager.all_tasks), None)
    if missing is not None:
        closest = get_close_matches(missing, manager.all_tasks, n=1)
        raise ConfigError(
            f"task {missing!r} is unknown{f'; did you mean {closest[0]!r}?' if closest else ''}; "
            "set include_path to use your own tasks"
        )
    return manager


def format_results(results: Results) -> str:
    """Format results as one line per metric."""
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


def _numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Select a task's numbers; the harness names them `acc,none` and `acc_stderr,none`."""
    numbers = {}
    for key, value in metrics.items():
        name, _, filter_name = key.partition(",")
        if not filter_name or not isinstance(value, Real):
            continue  # the task's name, or a standard error of "N/A"
        base_name, is_stderr = name.removesuffix("_stderr"), name.endswith("_stderr")
        label = base_name if filter_name == "none" else f"{base_name},{filter_name}"
        numbers[f"{label},stderr" if is_stderr else label] = float(value)
    return numbers


def _line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:300]
