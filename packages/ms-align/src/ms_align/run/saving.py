"""What a run leaves behind: a model's folder that opens elsewhere and knows how a text ends.

    output_dir/model      config.json, weights, generation_config.json, the tokenizer's files
    output_dir/adapter    of a model with adapters, peft's two files and the tokenizer's

Each appears whole or not at all, and only with weights that are finite.
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
from ms_align.files.durable import whole_folder
from ms_align.models.finite import first_not_finite
from ms_align.tokenizer_files import TokenizerFiles, complete


def result_folder(engine: Engine, output_dir: Path, *, merge: bool = True) -> Path:
    """Return the folder that `write_result` writes last."""
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
    """Write what an engine has learnt. Every process must call it.

    Args:
        engine: of one process or of many.
        output_dir: of the run.
        tokenizer: is put beside the model.
        merge: with adapters, write the merged model too.
        base: folder of the model that was trained; see `complete`.
        dtype: of the saved weights; by default the engine's.

    Raises:
        NonFiniteError: a weight is infinite or no number; nothing is written.
        WriteError: the place cannot be written.
    """
    check_finite(engine)
    if engine.adapters is not None:
        engine.adapters.save_pretrained(output_dir / "adapter")
        if processes.rank() == 0 and (output_dir / "adapter").is_dir():
            complete(output_dir / "adapter", tokenizer, base=base)
    if engine.adapters is not None and not merge:
        return
    staged = engine.adapters if isinstance(engine.adapters, StageAdapters) else None
    merged = nullcontext() if staged is None else staged.as_merged()
    with _whole_on_all(output_dir / "model") as aside, merged:
        if dtype is None:
            engine.save(aside)
        else:
            engine.save(aside, dtype=dtype)
        processes.barrier()
        if processes.rank() == 0:
            complete(aside, tokenizer, base=base)


def check_finite(engine: Engine) -> None:
    """Refuse weights that are not finite. Every process must call it.

    Raises:
        NonFiniteError: names the first tensor that is not.
    """
    found = first_not_finite(weights_of(engine))
    if processes.any_of(found is not None):
        where = f"the weight {found!r} holds" if found else "a weight on another process holds"
        raise NonFiniteError(
            f"{where} an infinity or NaN; nothing is written, for whoever used such a model would "
            "get no numbers; take a model whose weights are finite, or a lower learning_rate"
        )


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """List every weight that this process holds; the frozen ones too, where it holds the module."""
    if engine.module is not None:
        return dict(engine.module.named_parameters())
    state = engine.state_dict()
    return {n: t for n, t in state.items() if not n.startswith(("optimizer.", "engine."))}


@contextmanager
def _whole_on_all(folder: Path) -> Iterator[Path]:
    """Yield a folder aside for all processes, which is named `folder` when all of them are done."""
    if processes.rank():
        processes.barrier()
        yield folder.with_name(f"{folder.name}.partial")
        processes.barrier()
        return
    with whole_folder(folder, overwrite=True) as aside:
        processes.barrier()
        yield aside
        processes.barrier()
