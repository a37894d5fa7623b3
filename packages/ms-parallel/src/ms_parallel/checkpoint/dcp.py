"""Checkpoints of torch.distributed.checkpoint (DCP): torchtitan's, Megatron's and any script's.

`load_distributed` fills an engine's state from a DCP folder under any layout: each process reads
only its own boxes. `save_distributed` writes a folder that `torch.distributed.checkpoint.load`
and torchtitan read.
"""

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from ms_parallel.checkpoint.dcp_metadata import METADATA, DcpChunk, DcpIndex, read_dcp_index
from ms_parallel.checkpoint.megatron import EMBEDDING as MEGATRON_EMBEDDING
from ms_parallel.checkpoint.megatron import (
    MASTERS,
    STATES,
    iteration_of,
    megatron_rules,
    saved_states,
)
from ms_parallel.checkpoint.state import without_warning
from ms_parallel.checkpoint.torchtitan import EMBEDDING, torchtitan_rules
from ms_parallel.entry import one_line
from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.files.durable import publish, sync_folder, writing
from ms_parallel.files.untrusted import check_path, open_file
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.family import family_of
from ms_parallel.models.registry import model_plan, weight_shapes
from ms_parallel.models.weight_names import Box, WeightSlice, slices_of
from ms_parallel.split.part import part_of

Names = Literal["torchtitan", "huggingface"]
NAMES: tuple[Names, ...] = ("torchtitan", "huggingface")
HF_EMBEDDING = "model.embed_tokens.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
TAKEN, STEP = "optimizer.taken", "engine.step"
"""Counters in an engine's state."""
OBJECT_BYTES = 1 << 20


@frozen(kw_only=True)
class RunPosition:
    """Position of a run whose checkpoint was loaded."""

    step: int
    """Number of steps taken."""
    tokens: int | None
    """Tokens trained on, if recorded."""


def is_distributed(folder: str | Path) -> bool:
    """Return True if a folder is a checkpoint of torch.distributed.checkpoint.

    Raises:
        CheckpointError: folder is not a path.
    """
    check_path("folder", folder, error=CheckpointError)
    return (Path(folder) / METADATA).is_file()


def load_distributed(
    folder: str | Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    step: int | None = None,
    weights_only: bool = False,
) -> RunPosition:
    """Load weights, AdamW moments and the step of a DCP folder into an engine's state, in place.

    With `weights_only`, or a `torch_dist` folder of Megatron-Core without optimizer states, the
    optimizer keeps its initial state, and the step is 0 or `step`.

    Args:
        folder: folder with `.metadata`: torchtitan's `checkpoint/step-N`, Megatron's `iter_N`, or a
            folder of your own script with Hugging Face names and an AdamW state by parameter name.
        config: configuration of the model.
        state: result of `Engine.state_dict`; pass it to `Engine.load_state_dict` afterwards.
        step: number of steps taken, if the folder does not record it.
        weights_only: load the weights alone.

    Returns:
        The step and the number of tokens.

    Raises:
        DamageError: the folder is damaged, or its metadata is not plain checkpoint metadata.
        CheckpointError: the folder has another model or no AdamW state, or the step is unknown.
    """
    check_path("folder", folder, error=CheckpointError)
    source = DcpFolder(Path(folder))
    tensors = _Tensors(config, source, weights_only=weights_only)
    if tensors.weights_only:
        for name in tensors.shapes.keys() & state.keys():
            tensors.fill(name, state[name], tensors.weights(name))
        if STEP in state:
            state[STEP].fill_(step or 0)
        return RunPosition(step=step or 0, tokens=None)
    moments = [f"optimizer.{moment}." for moment in MOMENTS]
    other = [n for n in state if n.startswith("optimizer.") and n != TAKEN]
    if any(not n.startswith(tuple(moments)) for n in other):
        raise CheckpointError(
            f"{folder} can only be loaded with optimizer='AdamW', and this run uses another; set"
            " optimizer to AdamW"
        )
    counts = set()
    for name, tensor in state.items():
        if name in tensors.shapes:
            tensors.fill(name, tensor, tensors.weights(name))
        elif name.startswith("optimizer.") and name != TAKEN:
            _, moment, parameter = name.split(".", 2)
            pieces = tensors.moments(parameter, moment)
            tensors.fill(parameter, tensor, pieces)
            counts |= {tensors.updates(pieces[0].tensor, moment)}
    updates = counts.pop() if len(counts) == 1 else None
    recorded = iteration_of(Path(folder).resolve().name) if tensors.of_megatron else None
    recorded = source.number("train_state.step") if recorded is None else recorded
    if counts or (updates is None and recorded is None and step is None):
        raise CheckpointError(
            f"{folder} does not say after which step it was saved; pass step= (--step)"
        )
    position = next(n for n in (step, recorded, updates) if n is not None)
    with torch.no_grad():
        for name, value in ((TAKEN, position if updates is None else updates), (STEP, position)):
            if name in state:
                state[name].fill_(value)
    return RunPosition(step=position, tokens=source.number("train_state.ntokens_seen"))


class DcpFolder:
    """Tensors and numbers of a DCP folder, read by box; only plain values are unpickled.

    Raises:
        DamageError: the folder has no `.metadata`, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: DcpIndex = read_dcp_index(folder)
        self._last: tuple[DcpChunk, Tensor] | None = None

    def read(self, name: str, box: Box) -> Tensor:
        """Read the part of a tensor inside a box, whose slices may have a step."""
        saved = self.index.tensors[name]
        # Read the box densely, and apply its steps at the end.
        steps = tuple(slice(None, None, dim.step) for dim in box)
        dense = [range(dim.start, dim.stop) for dim in box]
        values = torch.zeros([len(dim) for dim in dense], dtype=saved.dtype)
        missing = values.numel()
        for chunk in saved.chunks:
            # Intersection of chunk and box, relative to the chunk (source) and to the box (target).
            source, target = [], []
            for dim, offset, size in zip(dense, chunk.offsets, chunk.shape, strict=True):
                start, stop = max(dim.start, offset), min(dim.stop, offset + size)
                source.append(slice(start - offset, max(stop - offset, start - offset)))
                target.append(slice(start - dim.start, max(stop, start) - dim.start))
            if all(part.start < part.stop for part in source):
                values[tuple(target)] = self._chunk(name, chunk, saved.dtype)[tuple(source)]
                missing -= math.prod(part.stop - part.start for part in source)
        # The index checks that the chunks' sizes add up to the tensor's, so a gap means an overlap.
        if missing:
            raise DamageError(
                f"{self.folder / METADATA}: the chunks of {name!r} overlap; copy the folder again"
            )
        return values[steps]

    def number(self, name: str) -> int | None:
        """Return a saved integer (an object or a one-element tensor); None if it is missing."""
        if name in self.index.objects and self.index.objects[name].size_bytes <= OBJECT_BYTES:
            value = self._archive(name, self.index.objects[name])
        elif name in self.index.tensors and math.prod(self.index.tensors[name].shape) == 1:
            shape = self.index.tensors[name].shape
            value = self.read(name, tuple(slice(0, size) for size in shape))
        else:
            return None
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        # AdamW's step counter is float32, which is exact up to 2^24.
        if type(number) not in (int, float) or not 0 <= number < 1 << 62 or number % 1:
            shown = f"{number:g}" if isinstance(number, float) else type(number).__name__
            raise DamageError(
                f"{self.folder}: {name} must be a whole number, got {shown}; copy the folder again"
            )
        return int(number)

    def _chunk(self, name: str, chunk: DcpChunk, dtype: torch.dtype) -> Tensor:
        # Slices of one tensor are read consecutively, so caching one chunk is enough.
        if self._last is None or self._last[0] is not chunk:
            tensor = self._archive(name, chunk)
            if type(tensor) is not Tensor or tensor.dtype != dtype or tensor.shape != chunk.shape:
                raise DamageError(
                    f"{self.folder / chunk.file}: {name} is not the {dtype} tensor of shape"
                    f" {chunk.shape} that {METADATA} lists; copy the folder again"
                )
            self._last = (chunk, tensor)
        return self._last[1]

    def _archive(self, name: str, chunk: DcpChunk) -> Any:
        """Read a `torch.save` archive of tensors and plain values."""
        path = self.folder / chunk.file
        try:
            with open_file(path, error=DamageError) as stream:
                stream.seek(chunk.begin)
                content = io.BytesIO(_read_exactly(stream, chunk.size_bytes))
            # torch stores entries uncompressed. A larger total would be a decompression bomb.
            with zipfile.ZipFile(content) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > chunk.size_bytes:
                    raise DamageError(
                        f"{path}: {name} is larger than its bytes on disk; copy the folder again"
                    )
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=True)
        except OSError as error:
            raise DamageError(f"{path}: cannot be read: {error.strerror or error}") from error
        except DamageError:
            raise
        # torch.load raises many exception types for a damaged archive.
        except Exception as error:
            reason = one_line(str(error))[:120] or type(error).__name__
            raise DamageError(
                f"{path}: {name} is damaged ({reason}); copy the folder again"
            ) from None


def _read_exactly(stream: io.RawIOBase, size_bytes: int) -> bytes:
    content = bytearray(size_bytes)
    view = memoryview(content)
    while view and (count := stream.readinto(view)):
        view = view[count:]
    if view:
        raise OSError("the file is shorter than before")
    return bytes(content)


class _Tensors:
    """Maps a model's parameters and their moments to the tensors of a folder."""

    def __init__(self, config: ModelConfig, source: DcpFolder, *, weights_only: bool) -> None:
        self.config, self.source = config, source
        self.shapes = weight_shapes(config)
        names = source.index.tensors
        self.prefix, self.optimizer = "", "optimizer.state."
        self.weights_only = weights_only
        self.of_megatron = MEGATRON_EMBEDDING in names
        if self.of_megatron:
            shapes = {name: tensor.shape for name, tensor in names.items()}
            if not weights_only:
                entries = [*names, *source.index.objects]
                try:
                    saved = saved_states(entries, shapes)
                except CheckpointError as error:
                    raise CheckpointError(f"{source.folder}: {error}") from None
                self.weights_only = not saved
                # The weights themselves may be rounded to bfloat16.
                masters = [f"{STATES}{state}." for state in MASTERS if state in saved]
                self.prefix = masters[0] if masters else ""
            self.weight_rules = self.moment_rules = megatron_rules(config, shapes)
            return
        if EMBEDDING in names:
            # torchtitan: weights of q, k and v are always saved separately, moments may be fused.
            fused = any(".wqkv.weight.exp_avg" in name for name in names)
            self.weight_rules = torchtitan_rules(config, fused=False, names=names)
            self.moment_rules = torchtitan_rules(config, fused=fused, names=names)
            return
        # Scripts nest their states, such as {"model": ..., "optim": ...}, so the prefixes of
        # weights and moments are detected from the embedding, which every model has.
        prefixes = [n.removesuffix(HF_EMBEDDING) for n in names if n.endswith(HF_EMBEDDING)]
        states = [
            n.removesuffix(f"{HF_EMBEDDING}.exp_avg")
            for n in names
            if n.endswith(f"{HF_EMBEDDING}.exp_avg")
        ]
        if not prefixes:
            raise CheckpointError(
                f"{source.folder} has neither {EMBEDDING!r} (torchtitan) nor {HF_EMBEDDING!r}"
                f" (Hugging Face) nor {MEGATRON_EMBEDDING!r} (Megatron), so its names are unknown;"
                " save it with one of them"
            )
        # The shortest prefix, as a folder may also hold other weights, such as an average.
        self.prefix = min(prefixes, key=len)
        self.optimizer = min(states, key=len) if states else self.optimizer
        self.weight_rules = self.moment_rules = family_of(config).weights(config)

    def weights(self, name: str) -> list[WeightSlice]:
        """Return the slices of the folder's tensors that make up a weight."""
        pieces = list(slices_of(self.weight_rules, name, self.shapes[name]))
        return [_renamed(piece, f"{self.prefix}{piece.tensor}") for piece in pieces]

    def moments(self, name: str, moment: str) -> list[WeightSlice]:
        """Return the slices of the folder's tensors that make up a weight's moment."""
        if name not in self.shapes:
            raise CheckpointError(
                f"{name!r} is not a weight of this model, so it has no moments; use its own state"
            )
        pieces = list(slices_of(self.moment_rules, name, self.shapes[name]))
        if self.of_megatron:
            return [_renamed(piece, f"{STATES}{moment}.{piece.tensor}") for piece in pieces]
        return [_renamed(piece, f"{self.optimizer}{piece.tensor}.{moment}") for piece in pieces]

    def updates(self, tensor: str, moment: str) -> int | None:
        """Return the number of updates that a moment has seen."""
        return self.source.number(f"{tensor.removesuffix(moment)}step")

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor, pieces: list[WeightSlice]) -> None:
        """Copy slices into this process's part of a weight or moment."""
        part = part_of(tensor)
        for piece in pieces:
            saved = self.source.index.tensors.get(piece.tensor)
            if saved is None or saved.shape != piece.shape:
                problem = "is missing" if saved is None else f"has shape {saved.shape}"
                raise CheckpointError(
                    f"{self.source.folder}: {piece.tensor!r} {problem} but this run's {name} needs"
                    f" {piece.shape}; set model_config as in the run that saved it"
                )
            # None: the slice does not overlap this process's part, so nothing is read.
            inside = piece.within(part.box) if part.local.numel() else None
            if inside is not None:
                values = piece.to_parameter(self.source.read(piece.tensor, inside[0]))
                part.local[inside[1]].copy_(values)


def _renamed(piece: WeightSlice, tensor: str) -> WeightSlice:
    return WeightSlice(
        tensor=tensor, shape=piece.shape, part=piece.part, box=piece.box, dims=piece.dims
    )


def save_distributed(
    folder: str | Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    names: Names = "torchtitan",
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    tokens: int = 0,
) -> None:
    """Write a complete engine's state as a DCP folder that torch and torchtitan load.

    Weights and moments are converted and written one tensor at a time. With torchtitan's names the
    moments of q, k and v are written fused and separately, so that models with either value of
    `fuse_qkv` load it.

    Args:
        folder: folder to create; it appears when it is complete.
        config: configuration of the model.
        state: result of `Engine.state_dict` of an engine in a single process.
        names: `"torchtitan"`; or `"huggingface"`, with the moments as
            `optimizer.state.NAME.exp_avg`.
        groups: settings of AdamW by our parameter name (`lr`, `betas`, `weight_decay`, ...), which
            an optimizer takes over when it loads them.
        tokens: number of tokens trained on.

    Raises:
        CheckpointError: the folder exists or cannot be written, or torchtitan's names for this
            model are not known.
    """
    check_path("folder", folder, error=CheckpointError, written="folder")
    if names not in NAMES:
        raise CheckpointError(
            f"names must be {' or '.join(map(repr, NAMES))}, got {str(names)[:60]!r}; set one"
            " of them"
        )
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; use another folder")
    if not all(type(tensor) is Tensor for tensor in state.values()):
        raise CheckpointError(
            "the state must be complete, got sharded tensors; use a single process"
        )
    entries = dict(_entries(config, state, names, groups or {}))
    entries["train_state.step"] = int(state[STEP])
    entries["train_state.ntokens_seen"] = tokens
    entries["lr_scheduler.last_epoch"] = int(state[TAKEN])
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder), without_warning():
        # DCP plans the files from examples that have the right size but take no memory.
        sizes = {
            name: entry.example if isinstance(entry, _Lazy) else entry
            for name, entry in entries.items()
        }
        state_dict_saver.save(
            sizes,
            storage_writer=FileSystemWriter(partial, per_thread_copy_ahead=1),
            planner=_LazyPlanner(entries),
            no_dist=True,
        )
        sync_folder(partial)
        publish(partial, folder)


@frozen(kw_only=True)
class _Lazy:
    """A tensor that is computed when it is written."""

    example: Tensor
    """Expanded scalar of the same shape and dtype, which takes no memory."""
    compute: Callable[[], Tensor]


class _LazyPlanner(DefaultSavePlanner):
    """Computes each tensor when it is written, so that only one is in memory at a time."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.entries = entries

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value of an entry."""
        entry = self.entries[index.fqn]
        return entry.compute() if isinstance(entry, _Lazy) else entry


def _entries(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    names: Names,
    groups: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a DCP folder: lazy tensors, and the optimizer's settings."""
    if names == "torchtitan":
        weights = torchtitan_rules(config, fused=False)
        # Both forms of q, k and v, for either value of `fuse_qkv`. All other names are equal in
        # both, and the dict of entries keeps one of each.
        moments = [torchtitan_rules(config, fused=fused) for fused in (True, False)]
    else:
        weights = family_of(config).weights(config)
        moments = [weights]
    shapes = weight_shapes(config)
    yield from _assembled(weights, shapes, state, "")
    # torchtitan's folders also have the head of a model with tied weights.
    for owner, copy in model_plan(config).tied:
        if names == "torchtitan" and owner in state:
            (piece,) = slices_of(weights, copy, shapes[owner])
            yield from ((piece.tensor, state[owner]),)
    for rules in moments:
        for moment in MOMENTS:
            prefix = f"optimizer.{moment}."
            local = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            for name, entry in _assembled(rules, shapes, local, ""):
                yield f"optimizer.state.{name}.{moment}", entry
        # AdamW's own counter and settings, which torchtitan flattens by parameter name.
        for name in (n for n in shapes if f"optimizer.exp_avg.{n}" in state):
            for piece in slices_of(rules, name, shapes[name]):
                yield f"optimizer.state.{piece.tensor}.step", state[TAKEN].float()
                for key, value in groups.get(name, {}).items():
                    yield f"optimizer.param_groups.{piece.tensor}.{key}", value


def _assembled(
    rules: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    tensors: Mapping[str, Tensor],
    prefix: str,
) -> Iterator[tuple[str, _Lazy]]:
    """Yield each tensor of a folder, assembled lazily from slices of the parameters."""
    # Invert the rules: for each tensor of the folder, its slices and their parameters.
    sources: dict[str, list[tuple[WeightSlice, Tensor]]] = {}
    for name, tensor in tensors.items():
        for piece in slices_of(rules, name, shapes[name]) if name in shapes else ():
            sources.setdefault(piece.tensor, []).append((piece, tensor))
    for name, pieces in sources.items():
        shape, dtype = pieces[0][0].shape, pieces[0][1].dtype

        # Defaults bind the loop's current values.
        def compute(
            pieces: list[tuple[WeightSlice, Tensor]] = pieces,
            shape: tuple[int, ...] = shape,
            dtype: torch.dtype = dtype,
        ) -> Tensor:
            values = torch.empty(shape, dtype=dtype)
            for piece, source in pieces:
                values[piece.part] = piece.to_tensor(source[piece.box].cpu())
            return values

        example = torch.empty((), dtype=dtype).expand(shape)
        yield f"{prefix}{name}", _Lazy(example=example, compute=compute)
