"""How tensors of a folder make up a model of transformers, from what transformers says of it."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.config import TransformersModel
from ms_parallel.models.foreign.experts import PairedExperts
from ms_parallel.models.foreign.plans import described, shapes_of
from ms_parallel.models.staged import named_weights
from ms_parallel.models.weight_names import Rule, Rules, WeightSlice, renamed

MERGED, JOINED = "MergeModulelist", "Concatenate"


@lru_cache(maxsize=16)
def rules_of(config: TransformersModel) -> Rules:
    """Make a rule for each pattern of names of parameters and persistent buffers."""
    names = _Names(described(config))
    weights = shapes_of(config, named_weights)
    patterns = {re.sub(r"\.\d+(?=\.|$)", ".*", name): None for name in weights}
    return {pattern: _rule(pattern, names) for pattern in patterns}


def _rule(pattern: str, names: "_Names") -> Rule:
    blank = pattern.replace("*", "{}")

    def rule(stars: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        name = blank.format(*stars)
        found = names.sources(name)
        if found is None and pattern in names.packed:
            yield from _halves(names.on_disk(name), shape)
            return
        if found is None:
            yield from renamed(names.on_disk(name))((), shape)
            return
        sources, operations = found
        if operations not in ([MERGED], [MERGED, JOINED]) or len(shape) < 3:
            raise ModelError(
                f"transformers makes {name!r} from {sources[0]!r} in a folder by"
                f" {' and '.join(operations)}, which is not supported; train this model with"
                " transformers"
            )
        yield from _stacked(sources, names.on_disk, shape)

    return rule


def _halves(tensor: str, shape: tuple[int, ...]) -> Iterator[WeightSlice]:
    """Yield the matrices of a parameter (E, n, R, C), as slices of one tensor (E, n·R, C)."""
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
    """Yield a slice for each expert and source of a parameter (E, n·R, C), or (E, n, R, C)."""
    parts, (rows, columns) = len(sources), shape[-2:]
    packed = len(shape) == 4
    height = rows if packed else rows // parts
    part = (slice(0, height), slice(0, columns))
    for expert in range(shape[0]):
        for index, source in enumerate(sources):
            one = slice(expert, expert + 1)
            box = (
                (one, slice(index, index + 1), *part)
                if packed
                else (one, slice(index * height, (index + 1) * height), part[1])
            )
            yield WeightSlice(
                tensor=on_disk(source.replace("*", str(expert))),
                shape=(height, columns),
                part=part,
                box=box,
                dims=(None, None, 0, 1) if packed else (None, 0, 1),
            )


class _Names:
    """Names on disk of a model's parameters, as transformers writes them.

    Args:
        model: of transformers.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.packed = {
            re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{own}")
            for name, module in model.named_modules()
            if isinstance(module, PairedExperts)
            for own in module.packed
        }
        said = get_model_conversion_mapping(model, add_legacy=False)
        converters: list[Any] = [each for each in said if hasattr(each, "operations")]
        self.converters = [(each, each.reverse_transform()) for each in converters]
        others = [
            each
            for each in said
            # A prefix that a folder may have or not, which transformers writes only if it read it.
            if not hasattr(each, "operations") and type(each).__name__ != "PrefixChange"
        ]
        self.renamings = [each.reverse_transform() for each in reversed(others)]

    def sources(self, name: str) -> tuple[list[str], list[str]] | None:
        """Name what a parameter is made from, `*` for an expert, and the operations."""
        for converter, back in self.converters:
            first, matched = back.rename_source_key(name)
            if matched is not None:
                patterns = back.target_patterns
                sources = [first.replace(patterns[0], each, 1) for each in patterns]
                return sources, [type(each).__name__ for each in converter.operations]
        return None

    def on_disk(self, name: str) -> str:
        """Translate transformers' name of a tensor to the folder's."""
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name
