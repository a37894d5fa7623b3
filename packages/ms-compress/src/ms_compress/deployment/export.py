"""Export: a prepared model as a folder that its target runs, whole or not at all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from ms_compress.deployment.assets import read_assets, write_assets
from ms_compress.deployment.verification import verify as verify_folder
from ms_compress.errors import ConfigError, ExportError, LayerError
from ms_compress.files.durable import writing
from ms_compress.files.untrusted import check_path
from ms_compress.models.whole_model import WholeModel
from ms_compress.place_lock import new_folder
from ms_compress.quantisation.scheme import Scheme
from ms_compress.targets.footprint import footprint
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import Target, find_target


def export(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    target: str | Scheme | None = None,
    verify: bool = False,
    tokenizer: str | Path | None = None,
    accuracy_level: int = 1,
    overwrite: bool = False,
    stored_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    on_written: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """Write a prepared model for its scheme's target. Every process of a layout must call it.

    Codes and scales are those that the model computes with. Nothing is gathered but the tensor
    that is being written; the files are the same, byte for byte, under every layout. The folder
    appears when all is written, and verified if asked.

    Args:
        model: whole, or this process's stage or stages; plain, split or sharded.
        folder: gets `model.safetensors` and `config.json` (ct), `model.gguf` (gguf), or
            `model.onnx` and `model.onnx.data` (ort); and what says how its texts end.
        target: refuses a model that is prepared for another scheme.
        verify: read it back through the target's own runtime and compare logits; needs that
            runtime, and the whole model in one process.
        tokenizer: a tokenizer.json, or a folder with one, to go with it, with the settings, the
            chat template and the generation_config.json that lie beside it. Without one, a GGUF
            file has tokens without texts: llama.cpp then takes and gives numbers alone.
        accuracy_level: of MatMulNBits: 1 computes in float32, 4 rounds inputs to 8 bits.
        overwrite: replace the folder if there is one.
        stored_dtypes: dtypes of unprepared floating-point tensors in a compressed-tensors folder,
            by name, such as those of the base model's folder; others keep their own. The model's
            tensors are rounded to them.
        on_written: called with the folder, which is returned, before it has its name.

    Raises:
        LayerError: a layer that the target does not know, or nothing is prepared.
        ExportError: the model as a whole is unknown to the target, the disk refuses, or another
            process failed.
        VerifyError: the runtime reads another model than this one; nothing is left.
    """
    check_path("folder", folder, error=ExportError, written="folder")
    check_path("tokenizer", tokenizer, error=ExportError, optional=True)
    folder, whole = Path(folder), WholeModel(model, stored_dtypes=stored_dtypes)
    with whole.collective:
        whole.round_to_stored()
        written_for = find_target(_scheme_of(whole, target).target)
        assets = read_assets(whole.config, tokenizer)
        written_for.check(whole, assets)
        to_verify = _in_one_process(model) if verify else None
        place = new_folder(folder, overwrite=overwrite) if whole.is_first else nullcontext(folder)
        with place as aside:
            with writing(folder):
                written_for.write(whole, aside, assets, accuracy_level)
                if whole.is_first:
                    write_assets(assets, aside)
            if whole.is_first:
                _open(aside, written_for)
            if to_verify is not None:
                verify_folder(to_verify, aside, written_for.name)
            if whole.is_first:
                on_written(aside)
    return folder


def check_export(
    model: nn.Module, target: str | Scheme, *, tokenizer: str | Path | None = None
) -> None:
    """Raise what `export` would of a model for a target, before work that is to end in it.

    Args:
        model: whole, in one process; prepared or not yet.
        target: the scheme.
        tokenizer: as of `export`.

    Raises:
        LayerError, ExportError: as of `export`.
    """
    whole = WholeModel(model)
    find_target(scheme(target).target).check(whole, read_assets(whole.config, tokenizer))


def _in_one_process(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    raise ConfigError("verify needs the whole model in one process; verify the folder there")


def _open(folder: Path, target: Target) -> None:
    """Read what was written as its users will: by the format's library, and once by its runtime.

    A file that the runtime refuses is then never left, though nobody asked for `verify`.
    """
    footprint(folder)
    if target.opens_cheaply and all(find_spec(name) is not None for name in target.libraries):
        runtime = target.opens(folder, threads=1, strict=True)
        runtime.logits(torch.zeros(1, 1, dtype=torch.int64))


def _scheme_of(model: WholeModel, target: str | Scheme | None) -> Scheme:
    """Return the one scheme of a model's layers."""
    schemes = {entry.scheme for entry in model.tensors.values() if entry.scheme is not None}
    if not schemes:
        wanted = f"{scheme(target)}" if target is not None else "ct.int4_g32"
        raise LayerError(
            f"no layer is prepared; call qat(model, {wanted!r}) or gptq(model, {wanted!r}, batches)"
        )
    if len(schemes) > 1:
        raise LayerError(f"layers are of several schemes: {', '.join(sorted(map(str, schemes)))}")
    (found,) = schemes
    if target is not None and scheme(target) != found:
        raise LayerError(f"the model is prepared for {found}, not for {scheme(target)}")
    return found
