"""Locks a run's output folder for all ranks and reports changed settings."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import fields

from ms_parallel import checkpoint
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.errors import ConfigError
from ms_parallel.files.run_folder import SEAL, inside, lock_run_folder, read_seal
from ms_parallel.files.untrusted import read_bytes
from ms_parallel.optim.optimizer import named_optimizer
from ms_parallel.progress import RunDisplay
from ms_parallel.training.dataset import is_url, remote_shards
from ms_parallel.training.options import Options

KIND = "ms-parallel train"
WAIT_S = 20.0
"""Time to wait for a run that is just ending, such as one whose launcher was killed."""
WORK = ("checkpoints", "model", "shards")
"""Entries that a run creates; a folder without any of them holds no work."""
FIXED = ("seed", "sequence_length", "optimizer")
"""Settings that must not change when a run resumes."""
MODEL = "model_config."
TABLES = ("model_arch", "model_config", "parallel_config", "optimizer")
NOT_COMPARED = (
    "async_checkpoints",
    "checkpoint_store",
    "dataset_cache",
    "dataset_cache_mib",
    "log_every",
    "on_event",
    "output_dir",
    "progress",
    "resume",
    "timeout_s",
)
"""Settings that do not affect the trained model."""


@contextmanager
def output_lock(
    options: Options, dataset: str | Path, *, epochs: float | None, steps: int | None
) -> Iterator[list[str]]:
    """Lock `output_dir` for this run; all ranks enter this context.

    If a run fails before it creates anything, its record is removed, so another run may use the
    folder.

    Yields:
        A description of each setting that changed since the last launch.

    Raises:
        ConfigError: the model to load is inside `output_dir`.
        FolderError: another process uses the folder, it belongs to another run, or a setting
            changed that must not.
    """
    folder = options.output_dir
    if options.model_folder is not None and inside(options.model_folder, folder):
        raise ConfigError(
            f"the model {options.model_folder} is inside output_dir {folder}, which this run"
            " overwrites; set another output_dir"
        )
    display = RunDisplay(total=1, every=1, active=options.progress)
    with ExitStack() as stack:

        def lock() -> list[str]:
            settings = _settings(options) | {"epochs": epochs, "steps": steps}
            changes = stack.enter_context(
                lock_run_folder(
                    folder,
                    command=KIND,
                    identity={"model": _model(options), "dataset": _dataset(dataset, options)},
                    settings=settings,
                    fixed=_fixed(folder, settings),
                    writes=WORK,
                    wait_s=WAIT_S,
                    note=display.note,
                )
            )
            # Runs before the lock is released, since an ExitStack unwinds in reverse.
            stack.callback(_release_if_empty, folder)
            return [str(change) for change in changes]

        yield run_on_rank_zero(lock)


def _release_if_empty(folder: Path) -> None:
    if not any((folder / name).exists() for name in WORK):
        (folder / SEAL).unlink(missing_ok=True)


def _fixed(folder: Path, settings: dict[str, Any]) -> list[str]:
    """List the settings that must not change once the run has a checkpoint."""
    if not checkpoint.was_begun(folder / "checkpoints"):
        return []
    seal = read_seal(folder)
    # Settings of the previous launch too, so that a removed one is noticed.
    names = [*settings, *(seal.settings if seal is not None else ())]
    return [*FIXED, *(name for name in names if name.startswith(MODEL))]


def _settings(options: Options) -> dict[str, Any]:
    """Collect all settings that affect the trained model, as JSON values."""
    names = [f.name for f in fields(type(options)) if f.init and f.name not in NOT_COMPARED]
    plain = {name: _plain(getattr(options, name)) for name in names if name not in TABLES}
    model = {f"{MODEL}{name}": value for name, value in options.model_config.items()}
    name, optimizer_settings = named_optimizer(options.optimizer)
    optimizer = {"optimizer": name} | {
        f"optimizer.{key}": _plain(optimizer_settings[key]) for key in optimizer_settings
    }
    return {**plain, **model, **optimizer, "layout": str(options.parallel_config or "all on data")}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def _model(options: Options) -> str:
    folder = options.model_folder
    return options.model_arch if folder is None else str(folder.resolve())


def _dataset(dataset: str | Path, options: Options) -> str:
    """Identify shards by content, so that they may be moved, and raw text by path."""
    path = Path(dataset)
    index = path / "index.json"
    content = read_bytes(index, error=ConfigError) if index.is_file() else None
    if is_url(dataset):
        content = remote_shards(str(dataset), options).read_index_if_present()
    if content is not None:
        return f"shards {blake2b(content, digest_size=8).hexdigest()}"
    return str(path.resolve()) if path.exists() else str(dataset)
