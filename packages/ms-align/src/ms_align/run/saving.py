"""Writes the trained model.

    output_dir/model      config.json, weights, generation_config.json, tokenizer files
    output_dir/adapter    with LoRA: the two files of peft, tokenizer files

Each folder appears atomically, and only if all weights are finite.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from ms_align import processes
from ms_align.engines.parallel import StageAdapters
from ms_align.engines.protocol import Engine
from ms_align.errors import NonFiniteError
from ms_align.files.durable import atomic_folder
from ms_align.models.finite import first_not_finite
from ms_align.tokenizer_files import TokenizerFiles, write_tokenizer_files


def result_folder(engine: Engine, output_dir: Path, *, merge: bool = True) -> Path:
    """Return the folder that `write_result` creates last."""
    return output_dir / ("model" if merge or engine.adapters is None else "adapter")


def write_result(
    engine: Engine,
    output_dir: Path,
    tokenizer: TokenizerFiles | None,
    *,
    merge: bool = True,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the trained model. Collective.

    Args:
        engine: engine that holds the model.
        output_dir: output folder of the run.
        tokenizer: tokenizer files to write with the model.
        merge: with adapters, also write the merged model.
        base: folder of the base model; see `write_tokenizer_files`.
        dtype: dtype of the saved weights. None: the engine's.

    Raises:
        NonFiniteError: a weight is infinite or NaN; nothing is written.
        WriteError: the folder cannot be written.
    """
    check_finite(engine)
    if engine.adapters is not None:
        with _atomic_folder_on_all_ranks(output_dir / "adapter") as partial:
            engine.adapters.save_pretrained(partial)
            processes.barrier()
            if processes.rank() == 0:
                write_tokenizer_files(partial, tokenizer, base=base)
    if engine.adapters is not None and not merge:
        return
    stage_adapters = engine.adapters if isinstance(engine.adapters, StageAdapters) else None
    merged = nullcontext() if stage_adapters is None else stage_adapters.as_merged()
    with _atomic_folder_on_all_ranks(output_dir / "model") as partial, merged:
        if dtype is None:
            engine.save(partial)
        else:
            engine.save(partial, dtype=dtype)
        processes.barrier()
        if processes.rank() == 0:
            write_tokenizer_files(partial, tokenizer, base=base)


def check_finite(engine: Engine) -> None:
    """Check that all weights are finite. Collective.

    Raises:
        NonFiniteError: names the first tensor that is not finite.
    """
    name = first_not_finite(weights_of(engine))
    if processes.any_of(name is not None):
        where = f"the weight {name!r} contains" if name else "a weight on another process contains"
        raise NonFiniteError(
            f"{where} an infinity or NaN, so nothing is written; use a model with finite weights, "
            "or lower learning_rate"
        )


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Return the weights of this process by name; frozen ones only if it holds the module."""
    if engine.module is not None:
        return dict(engine.module.named_parameters())
    state = engine.state_dict()
    # The state of an engine also holds its optimizer and counters.
    return {n: t for n, t in state.items() if not n.startswith(("optimizer.", "engine."))}


@contextmanager
def _atomic_folder_on_all_ranks(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to all processes and rename it to `folder` when all are done."""
    # Rank 0 creates the folder before the first barrier and publishes it after the second.
    if processes.rank():
        processes.barrier()
        yield folder.with_name(f"{folder.name}.partial")
        processes.barrier()
        return
    with atomic_folder(folder, overwrite=True) as partial:
        processes.barrier()
        yield partial
        processes.barrier()
