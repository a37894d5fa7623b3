"""What a run leaves behind: a model's folder that opens elsewhere and knows how a text ends.

    output_dir/model      config.json, weights, generation_config.json, the tokenizer's files
    output_dir/adapter    of a model with adapters, peft's two files

Each appears whole or not at all, and only with weights that are finite.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.errors import NonFiniteError
from ms_align.files.durable import whole_folder
from ms_align.lora.adapters import AdaptedModel
from ms_align.models.folder import save_model
from ms_align.tokenizer_files import TokenizerFiles, complete

__all__ = ["check_finite", "result_of", "whole_on_all", "write_result"]


def result_of(engine: Engine, output_dir: Path, *, merge: bool = True) -> Path:
    """The folder that `write_result` writes last."""
    spread = getattr(engine, "adapters", None) is not None
    adapted = isinstance(getattr(engine, "module", None), AdaptedModel) and not merge
    return output_dir / ("adapter" if spread or adapted else "model")


def write_result(
    engine: Engine, output_dir: Path, tokenizer: TokenizerFiles | None, *, merge: bool = True
) -> None:
    """Write what an engine has learnt. Every process must call it.

    Args:
        engine: of one process or of many; one that can neither show its module nor `save` writes
            nothing.
        output_dir: of the run.
        tokenizer: is put beside the model.
        merge: with adapters in one process, write the merged model too.

    Raises:
        NonFiniteError: a weight is infinite or no number; nothing is written.
        WriteError: the place cannot be written.
    """
    check_finite(engine)
    module: Any = getattr(engine, "module", None)
    adapters = getattr(engine, "adapters", None)
    if adapters is not None:
        adapters.save_pretrained(output_dir / "adapter")
    elif isinstance(module, AdaptedModel):
        module.save_pretrained(output_dir / "adapter")
        if merge:
            with module.as_merged() as plain:
                _write(output_dir / "model", plain, tokenizer)
    elif _is_of_peft(module):
        module.save_pretrained(output_dir / "adapter")
        if merge:
            _write(output_dir / "model", _merged_by_peft(module), tokenizer)
    elif isinstance(module, nn.Module):
        _write(output_dir / "model", module, tokenizer)
    elif hasattr(engine, "save"):
        with whole_on_all(output_dir / "model") as aside:
            cast(Any, engine).save(aside)
            processes.barrier()
            if processes.rank() == 0:
                complete(aside, tokenizer)


def check_finite(engine: Engine) -> None:
    """Refuse weights that are not finite. Every process must call it.

    Raises:
        NonFiniteError: names the first tensor that is not.
    """
    found = next((name for name, tensor in _weights(engine) if not _is_finite(tensor)), None)
    if processes.any_of(found is not None):
        where = f"the weight {found!r} holds" if found else "a weight on another process holds"
        raise NonFiniteError(
            f"{where} an infinity or NaN; nothing is written, for whoever used such a model would "
            "get no numbers; take a model whose weights are finite, or a lower learning_rate"
        )


@contextmanager
def whole_on_all(folder: Path) -> Iterator[Path]:
    """A folder aside for all processes, which takes the name `folder` when all of them are done."""
    if processes.rank():
        processes.barrier()
        yield folder.with_name(f"{folder.name}.partial")
        processes.barrier()
        return
    with whole_folder(folder, overwrite=True) as aside:
        processes.barrier()
        yield aside
        processes.barrier()


def _write(folder: Path, module: nn.Module, tokenizer: TokenizerFiles | None) -> None:
    with whole_on_all(folder) as aside:
        save_model(module, aside)
        processes.barrier()
        if processes.rank() == 0:
            complete(aside, tokenizer)


def _weights(engine: Engine) -> Iterable[tuple[str, Tensor]]:
    """Every weight that this process holds: the module's, or those of an engine's state."""
    module = getattr(engine, "module", None)
    if isinstance(module, nn.Module):
        yield from module.named_parameters()
        return
    for name, tensor in engine.state_dict().items():
        if not name.startswith(("optimizer.", "engine.")):
            yield name, tensor


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    part: Tensor = cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor
    return not part.is_floating_point() or bool(torch.isfinite(part).all())


def _is_of_peft(module: Any) -> bool:
    return hasattr(module, "merge_and_unload") and hasattr(module, "peft_config")


def _merged_by_peft(module: Any) -> nn.Module:
    """A copy with its adapters in its weights; the module itself is left as it is."""
    return cast(nn.Module, copy.deepcopy(module).merge_and_unload())
