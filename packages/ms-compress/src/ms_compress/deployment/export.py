"""Export a prepared model as a folder that its target runs; it appears complete or not at all."""

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
from ms_compress.output_lock import new_folder
from ms_compress.quantization.scheme import Scheme
from ms_compress.targets.footprint import footprint
from ms_compress.targets.rules import scheme, schemes_of_layers
from ms_compress.targets.target import Target, find_target, has_kv_cache_scales


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
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write a prepared model for its scheme's target; a collective call on every process.

    The folder stores exactly the codes and scales that the model computes with. Tensors are
    gathered one at a time, and the files are byte-identical for every layout. The folder appears
    when everything is written, and verified if requested.

    Args:
        model: complete, or this process's stage or stages; plain, split or sharded.
        folder: output folder for `model.safetensors` and `config.json` (ct), `model.gguf` (gguf),
            or `model.onnx` and `model.onnx.data` (ort), and the generation settings.
        target: expected scheme; raise if the model is prepared for another one.
        verify: run the result in the target's runtime and compare logits; needs that runtime, and
            the complete model in one process.
        tokenizer: tokenizer.json, or a folder with one, to export together with the tokenizer
            settings, chat template and generation_config.json next to it. Without it, a GGUF
            file has no token texts, and llama.cpp can only be used with token ids.
        accuracy_level: accuracy_level of MatMulNBits: 1 computes in float32, 4 rounds inputs to 8
            bits.
        overwrite: replace an existing folder.
        stored_dtypes: dtypes of unprepared floating-point tensors in a compressed-tensors folder,
            by name, such as those of the base model's folder; other tensors keep their dtype. The
            model's tensors are rounded to them.
        on_written: called with the complete folder before it gets its final name.
        progress: called with the number of tensors that were quantized, and their total.

    Raises:
        LayerError: the target does not support a layer, or no layer is prepared.
        ExportError: the target does not support the model, the folder cannot be written, or another
            process failed.
        VerifyError: the runtime's results differ from the model's; nothing is left on disk.
    """
    check_path("folder", folder, error=ExportError, written="folder")
    check_path("tokenizer", tokenizer, error=ExportError, optional=True)
    folder = Path(folder)
    whole_model = WholeModel(model, stored_dtypes=stored_dtypes, progress=progress)
    # Reads are collective, so an error on one rank must end the export on all of them.
    with whole_model.collective:
        whole_model.round_to_stored()
        export_target = find_target(_scheme_of(whole_model, target).target)
        if has_kv_cache_scales(whole_model) and not export_target.reads_kv_cache_scales:
            raise LayerError(
                f"{export_target.runtime} does not read key-value cache scales; export for a ct.*"
                " scheme, or without calibrate_kv_cache"
            )
        assets = read_assets(whole_model.config, tokenizer)
        export_target.check(whole_model, assets)
        to_verify = _in_one_process(model) if verify else None
        output = (
            new_folder(folder, overwrite=overwrite) if whole_model.is_first else nullcontext(folder)
        )
        with output as partial:
            with writing(folder):
                export_target.write(whole_model, partial, assets, accuracy_level)
                if whole_model.is_first:
                    write_assets(assets, partial)
            if whole_model.is_first:
                _open(partial, export_target)
            if to_verify is not None:
                verify_folder(to_verify, partial, export_target.name)
            if whole_model.is_first:
                # Last, as the caller seals the folder, which marks it as complete.
                on_written(partial)
    return folder


def check_export(
    model: nn.Module, target: str | Scheme, *, tokenizer: str | Path | None = None
) -> None:
    """Raise the errors of `export` for a model and target, before work that ends in an export.

    Args:
        model: complete, in one process; prepared or not.
        target: scheme.
        tokenizer: as in `export`.

    Raises:
        LayerError, ExportError: as in `export`.
    """
    whole_model = WholeModel(model)
    find_target(scheme(target).target).check(
        whole_model, read_assets(whole_model.config, tokenizer)
    )


def _in_one_process(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    raise ConfigError("verify needs the complete model in one process; verify the folder there")


def _open(folder: Path, target: Target) -> None:
    """Read the exported files with the format's library, and once with its runtime.

    So a file that the runtime rejects is never left behind, even without `verify`.
    """
    footprint(folder)
    if target.opens_cheaply and all(find_spec(name) is not None for name in target.libraries):
        runtime = target.opens(folder, threads=1, strict=True)
        runtime.logits(torch.zeros(1, 1, dtype=torch.int64))


def _scheme_of(model: WholeModel, target: str | Scheme | None) -> Scheme:
    """Return the single scheme that a model is prepared for."""
    schemes = {entry.scheme for entry in model.tensors.values() if entry.scheme is not None}
    if not schemes:
        scheme_name = f"{scheme(target)}" if target is not None else "ct.int4_g32"
        raise LayerError(
            f"no layer is prepared; call qat(model, {scheme_name!r}) or"
            f" gptq(model, {scheme_name!r}, batches)"
        )
    requested = None if target is None else scheme(target)
    # Layers of a mixture, and those with a fallback, have other schemes than the model.
    candidates = schemes if requested is None else {requested}
    for candidate in sorted(candidates, key=str):
        if schemes <= schemes_of_layers(candidate):
            return candidate
    if len(schemes) > 1:
        raise LayerError(f"layers have several schemes: {', '.join(sorted(map(str, schemes)))}")
    raise LayerError(f"the model is prepared for {schemes.pop()}, not for {requested}")
