"""The schemes of all targets by name; each target package defines its own in `rules.py`.

This does not import torch, so that reading a run file that names a scheme is fast.
"""

from importlib import import_module
from pkgutil import iter_modules

from attrs import evolve

import ms_compress.targets
from ms_compress.arguments import check_type
from ms_compress.errors import SchemeError
from ms_compress.quantization.scheme import Scheme
from ms_compress.settings import nearest
from ms_compress.targets.gguf.rules import stores_more_bits

TARGETS = tuple(
    module.name for module in iter_modules(ms_compress.targets.__path__) if module.ispkg
)
"""Names of the target packages; a new package is registered automatically."""
_RULES = [import_module(f"ms_compress.targets.{name}.rules") for name in TARGETS]
_SCHEMES: dict[str, Scheme] = {item.name: item for rules in _RULES for item in rules.SCHEMES}
_GROUPED: dict[str, Scheme] = {
    stem: item for rules in _RULES for stem, item in rules.GROUPED.items()
}
NAMES = tuple(_SCHEMES)
"""Names of the schemes; other group sizes, such as `ct.int4_g64`, can be named too."""


def layer_scheme(model_scheme: Scheme, name: str, features: int, layers: int) -> Scheme:
    """Return the scheme of one layer in a model that is prepared for a scheme.

    It differs from the model's scheme for layers that a mixture stores with more bits, and for
    layers whose row length is not a multiple of the scheme's super-block.

    Args:
        model_scheme: scheme of the model.
        name: name of the layer.
        features: number of weights per row.
        layers: number of decoder layers of the model.
    """
    result = model_scheme
    if model_scheme.larger is not None and stores_more_bits(name, layers):
        result = _SCHEMES[model_scheme.larger]
    if result.super_block is not None and features % result.super_block.size and result.fallback:
        result = _SCHEMES[result.fallback]
    return result


def schemes_of_layers(base: Scheme) -> set[Scheme]:
    """Return all schemes that layers can have in a model that is prepared for a scheme."""
    main = {base} if base.larger is None else {base, _SCHEMES[base.larger]}
    return main | {_SCHEMES[item.fallback] for item in main if item.fallback is not None}


def scheme(name: str | Scheme) -> Scheme:
    """Return the scheme with a name such as `"gguf.q4_0"`; a scheme is returned unchanged.

    The target may be left out, as in `"q4_0"`, as scheme names differ between targets.

    Raises:
        SchemeError: the scheme does not exist, or its target does not support the group; the
            message has the nearest name, or the supported groups.
    """
    if isinstance(name, Scheme):
        return name
    check_type("scheme", name, str, "a Scheme or its name", error=SchemeError)
    for full_name in (name, *(f"{target}.{name}" for target in TARGETS)):
        if full_name in _SCHEMES:
            return _SCHEMES[full_name]
        stem, _, group = full_name.rpartition("_g")  # ct.int4_g64: stem ct.int4, group 64
        if stem in _GROUPED and group.isdecimal():
            return evolve(_GROUPED[stem], name=full_name, group_size=int(group))
    choices = NAMES if "." in name else tuple(full.partition(".")[2] for full in NAMES)
    raise SchemeError(f"unknown scheme {name!r}; {nearest(name, choices)}")
