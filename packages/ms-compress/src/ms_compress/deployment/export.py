"""Export: a prepared model as a folder that its target runs, whole or not at all."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from attrs import frozen
from torch import nn

from ms_compress.deployment.verification import verify as verify_folder
from ms_compress.errors import ConfigError, LayerError
from ms_compress.files.durable import write_synced, writing
from ms_compress.models.decoder_config import decoder_config
from ms_compress.models.whole_model import Source
from ms_compress.place_lock import new_folder
from ms_compress.quantisation.scheme import Scheme, scheme
from ms_compress.targets.ct import write as compressed_tensors
from ms_compress.targets.footprint import footprint
from ms_compress.targets.gguf import write as gguf
from ms_compress.targets.gguf.tokenizer import check_tokenizer
from ms_compress.targets.ort import write as onnx
from ms_compress.targets.target import open_runtime
from ms_compress.tokenizer_files import (
    TextEnds,
    TokenizerFiles,
    read_tokenizer,
    text_ends,
    without_tokenizer,
)

__all__ = ["check_export", "export", "write_export"]


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
            `model.onnx` and `model.onnx.data` (ort); and what says how its texts end.
        target: refuses a model that is prepared for another scheme.
        verify: read it back through the target's own runtime and compare logits; needs that
            runtime, and the whole model in one process.
        tokenizer: a tokenizer.json, or a folder with one, to go with it, with the settings, the
            chat template and the generation_config.json that lie beside it. Without one, a GGUF
            file has tokens without texts: llama.cpp then takes and gives numbers alone.
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
    return write_export(
        model,
        Path(folder),
        target=target,
        verify=verify,
        tokenizer=tokenizer,
        accuracy_level=accuracy_level,
        overwrite=overwrite,
    )


def write_export(
    model: nn.Module | Sequence[nn.Module],
    folder: Path,
    *,
    target: str | Scheme | None = None,
    verify: bool = False,
    tokenizer: str | Path | None = None,
    accuracy_level: int = 1,
    overwrite: bool = False,
    last: Callable[[Path], object] = lambda aside: None,
) -> Path:
    """`export`, whose folder `last` is given once all else is in it, before it has its name."""
    source = Source(model)
    with source.together:
        how = _scheme_of(source, target)
        beside = _Beside.of(source, tokenizer)
        _check(source, how, beside)
        if verify and not isinstance(model, nn.Module):
            raise ConfigError(
                "verify needs the whole model in one process; verify the folder there"
            )
        with _aside(folder, source, overwrite=overwrite) as aside:
            with writing(folder):
                _write(how, source, aside, beside, accuracy_level)
                if source.is_first:
                    beside.write(aside)
            if source.is_first:
                _open(aside, how.target)
            if verify:
                assert isinstance(model, nn.Module)
                verify_folder(model, aside, how.target)
            if source.is_first:
                last(aside)
    return folder


@frozen(kw_only=True)
class _Beside:
    """What goes with the weights."""

    files: TokenizerFiles | None
    ends: TextEnds

    @classmethod
    def of(cls, source: Source, tokenizer: str | Path | None) -> "_Beside":
        """Read; the model's configuration is told how its texts end, where it does not say."""
        files = None if tokenizer is None else read_tokenizer(tokenizer)
        vocabulary = int(source.config.get("vocab_size") or 2**31)
        if files is not None:
            files.check_fits(vocabulary)
        ends = text_ends(files, source.config, vocabulary)
        for key, value in ends.ids().items():
            if source.config.get(key) is None:
                source.config[key] = value
        return cls(files=files, ends=ends)

    def write(self, folder: Path) -> None:
        """The tokenizer's files, and how a text is generated."""
        files = without_tokenizer(self.ends) if self.files is None else self.files.files(self.ends)
        for name, content in files.items():
            write_synced(folder / name, content)


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
    source = Source(model)
    _check(source, scheme(target), _Beside.of(source, tokenizer))


def _check(source: Source, how: Scheme, beside: _Beside) -> None:
    {"ct": compressed_tensors, "gguf": gguf, "ort": onnx}[how.target].check(source)
    if how.target == "gguf" and beside.files is not None:
        vocabulary = decoder_config(source.config, "GGUF").vocabulary
        check_tokenizer(beside.files, beside.ends, vocabulary)


def _aside(folder: Path, source: Source, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Where the first process writes; others write nothing."""
    return new_folder(folder, overwrite=overwrite) if source.is_first else nullcontext(folder)


def _write(how: Scheme, source: Source, aside: Path, beside: _Beside, accuracy_level: int) -> None:
    if how.target == "gguf":
        gguf.write(source, aside, beside.files, beside.ends)
    elif how.target == "ort":
        onnx.write(source, aside, accuracy_level)
    else:
        compressed_tensors.write(source, aside)


def _open(folder: Path, target: str) -> None:
    """Read what was written as its users will: by the format's library, and once by its runtime.

    A file that the runtime refuses is then never left, though nobody asked for `verify`. Reading
    compressed-tensors takes transformers and the whole model in memory: there headers are read.
    """
    footprint(folder)
    library = {"ort": "onnxruntime", "gguf": "llama_cpp"}.get(target)
    if library is not None and find_spec(library) is not None:
        open_runtime(folder, target).logits(torch.zeros(1, 1, dtype=torch.int64))


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
