"""Export: a prepared model as a folder that its target runs, whole or not at all."""

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from ms_compress.decoder_config import decoder_config
from ms_compress.durable import writing
from ms_compress.errors import ConfigError, ExportError, LayerError
from ms_compress.parts import Source
from ms_compress.place_lock import new_folder
from ms_compress.schemes import Scheme, scheme
from ms_compress.targets import compressed_tensors, gguf, onnx
from ms_compress.targets.gguf_tokenizer import check_tokenizer
from ms_compress.verification import verify as verify_folder

__all__ = ["check_export", "export"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def export(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    target: str | Scheme | None = None,
    verify: bool = False,
    tokenizer: str | Path | None = None,
    accuracy_level: int = 1,
    overwrite: bool = False,
) -> Path:
    """Write a prepared model for its scheme's target. Every process of a layout must call it.

    Codes and scales are those that the model computes with. Nothing is gathered but the tensor
    that is being written; the files are the same, byte for byte, under every layout. The folder
    appears when all is written, and verified if asked.

    Args:
        model: whole, or this process's stage or stages; plain, split or sharded.
        folder: gets `model.safetensors` and `config.json` (ct), `model.gguf` (gguf), or
            `model.onnx` and `model.onnx.data` (ort).
        target: refuses a model that is prepared for another scheme.
        verify: read it back through the target's own runtime and compare logits; needs that
            runtime, and the whole model in one process.
        tokenizer: a tokenizer.json, or a folder with one, to go with it.
        accuracy_level: of MatMulNBits: 1 computes in float32, 4 rounds inputs to 8 bits.
        overwrite: replace the folder if there is one.

    Returns:
        The folder.

    Raises:
        LayerError: a layer that the target does not know, or nothing is prepared.
        ExportError: the model as a whole is unknown to the target, the disk refuses, or another
            process failed.
        VerifyError: the runtime reads another model than this one; nothing is left.
    """
    folder = Path(folder)
    source = Source(model)
    with source.together:
        how = _scheme_of(source, target)
        tokenizer_path = _tokenizer(tokenizer)
        _check(source, how, tokenizer_path)
        if verify and not isinstance(model, nn.Module):
            raise ConfigError(
                "verify needs the whole model in one process; verify the folder there"
            )
        with _aside(folder, source, overwrite=overwrite) as aside:
            with writing(folder):
                _write(how, source, aside, tokenizer_path, accuracy_level)
                if source.is_first and tokenizer_path is not None:
                    _copy_tokenizer(tokenizer_path, aside)
            if verify:
                assert isinstance(model, nn.Module)
                verify_folder(model, aside, how.target)
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
    _check(Source(model), scheme(target), _tokenizer(tokenizer))


def _check(source: Source, how: Scheme, tokenizer: Path | None) -> None:
    {"ct": compressed_tensors, "gguf": gguf, "ort": onnx}[how.target].check(source)
    if how.target == "gguf" and tokenizer is not None:
        check_tokenizer(tokenizer, decoder_config(source.config, "GGUF"))


def _aside(folder: Path, source: Source, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Where the first process writes; others write nothing."""
    return new_folder(folder, overwrite=overwrite) if source.is_first else nullcontext(folder)


def _write(
    how: Scheme, source: Source, aside: Path, tokenizer: Path | None, accuracy_level: int
) -> None:
    if how.target == "gguf":
        gguf.write(source, aside, tokenizer)
    elif how.target == "ort":
        onnx.write(source, aside, accuracy_level)
    else:
        compressed_tensors.write(source, aside)


def _scheme_of(source: Source, target: str | Scheme | None) -> Scheme:
    """The one scheme of a model's layers."""
    schemes = {entry.scheme for entry in source.entries.values() if entry.scheme is not None}
    if not schemes:
        wanted = f"{scheme(target)}" if target is not None else "ct.int4_g32"
        raise LayerError(
            f"no layer is prepared; call qat(model, {wanted!r}) or quantize(model, {wanted!r})"
        )
    if len(schemes) > 1:
        raise LayerError(f"layers are of several schemes: {', '.join(sorted(map(str, schemes)))}")
    (how,) = schemes
    if target is not None and scheme(target) != how:
        raise LayerError(f"the model is prepared for {how}, not for {scheme(target)}")
    return how


def _tokenizer(given: str | Path | None) -> Path | None:
    if given is None:
        return None
    path = Path(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ExportError(f"{path}: there is no such tokenizer; give a tokenizer.json")
    try:
        known = "vocab" in json.loads(path.read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ExportError(f"{path}: it holds no tokenizer; give a tokenizer.json")
    return path


def _copy_tokenizer(path: Path, folder: Path) -> None:
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in TOKENIZER_FILES[1:]:
        if (path.parent / name).is_file():
            shutil.copyfile(path.parent / name, folder / name)
