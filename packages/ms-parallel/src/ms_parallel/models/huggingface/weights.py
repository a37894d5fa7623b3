"""Mapping of checkpoint tensors to parameters of a transformers model, by transformers' rules."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.experts import PairedExperts
from ms_parallel.models.huggingface.plans import meta_model, shapes_of
from ms_parallel.models.staged import named_weights
from ms_parallel.models.weight_names import WeightRule, WeightRules, WeightSlice, renamed

MERGED, JOINED = "MergeModulelist", "Concatenate"


@lru_cache(maxsize=16)
def rules_of(config: TransformersModel) -> WeightRules:
    """Rules by name pattern for all parameters and persistent buffers."""
    names = _Names(meta_model(config))
    weights = shapes_of(config, named_weights)
    patterns = {re.sub(r"\.\d+(?=\.|$)", ".*", name): None for name in weights}
    return {pattern: _rule(pattern, names) for pattern in patterns}


def _rule(pattern: str, names: "_Names") -> WeightRule:
    blank = pattern.replace("*", "{}")

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        name = blank.format(*wildcards)
        conversion = names.sources(name)
        if conversion is None and pattern in names.packed:
            yield from _halves(names.on_disk(name), shape)
            return
        if conversion is None:
            yield from renamed(names.on_disk(name))((), shape)
            return
        sources, operations = conversion
        if operations not in ([MERGED], [MERGED, JOINED]) or len(shape) < 3:
            raise ModelError(
                f"transformers converts {sources[0]!r} in a checkpoint to {name!r} by"
                f" {' and '.join(operations)}, which is not supported; train this model with"
                " transformers"
            )
        yield from _stacked(sources, names.on_disk, shape)

    return rule


def _halves(tensor: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
    """Yield slices for a parameter (E, n, R, C) stored as one tensor (E, n·R, C)."""
    experts, parts, rows, columns = shape
    every, across = slice(0, experts), slice(0, columns)
    for index in range(parts):
        yield WeightSlice(
            tensor=tensor,
            shape=(experts, parts * rows, columns),
            part=(every, slice(index * rows, (index + 1) * rows), across),
            box=(every, slice(index, index + 1), slice(0, rows), across),
            dims=(0, None, 1, 2),
        )


def _stacked(
    sources: list[str], on_disk: Callable[[str], str], shape: tuple[int, ...]
) -> Iterator[WeightSlice]:
    """Yield slices for a parameter (E, n·R, C) or (E, n, R, C) stored as E · n tensors (R, C)."""
    parts, (rows, columns) = len(sources), shape[-2:]
    packed = len(shape) == 4
    height = rows if packed else rows // parts
    part = (slice(0, height), slice(0, columns))
    for expert in range(shape[0]):
        for index, source in enumerate(sources):
            expert_slice = slice(expert, expert + 1)
            box = (
                (expert_slice, slice(index, index + 1), *part)
                if packed
                else (expert_slice, slice(index * height, (index + 1) * height), part[1])
            )
            yield WeightSlice(
                tensor=on_disk(source.replace("*", str(expert))),
                shape=(height, columns),
                part=part,
                box=box,
                dims=(None, None, 0, 1) if packed else (None, 0, 1),
            )


class _Names:
    """Checkpoint names of a model's parameters, as transformers writes them.

    Args:
        model: transformers model.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.packed = {
            re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{param_name}")
            for name, module in model.named_modules()
            if isinstance(module, PairedExperts)
            for param_name in module.packed
        }
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        converters: list[Any] = [entry for entry in mapping if hasattr(entry, "operations")]
        self.converters = [(entry, entry.reverse_transform()) for entry in converters]
        renamings = [
            entry
            for entry in mapping
            # PrefixChange is an optional prefix, written only if the source checkpoint had it.
            if not hasattr(entry, "operations") and type(entry).__name__ != "PrefixChange"
        ]
        # They map checkpoint names to parameter names, and are undone in reverse order.
        self.renamings = [entry.reverse_transform() for entry in reversed(renamings)]

    def sources(self, name: str) -> tuple[list[str], list[str]] | None:
        """Return a parameter's checkpoint tensors (`*` for the expert) and conversion steps."""
        # Each converter is applied in reverse: from parameter name to checkpoint names.
        for converter, reverse in self.converters:
            first, matched = reverse.rename_source_key(name)
            if matched is not None:
                patterns = reverse.target_patterns
                sources = [first.replace(patterns[0], target, 1) for target in patterns]
                return sources, [type(target).__name__ for target in converter.operations]
        return None

    def on_disk(self, name: str) -> str:
        """Translate a parameter name of transformers to its checkpoint name."""
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name
