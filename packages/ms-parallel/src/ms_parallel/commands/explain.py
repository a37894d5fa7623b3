"""`ms-parallel explain`: say whether a model trains under a layout, and how that was verified."""

from argparse import ArgumentParser, Namespace
from itertools import combinations
from typing import Any

import msgspec

from ms_parallel.command_line import add_json, print_json

OPTIONS = ("sharding", "schedule", "recompute", "context_attention")
HELP = "say whether a model trains under a layout, and which feature pairs were verified"
EXAMPLE = "ms-parallel explain data=2,pipeline=2 qwen3 --schedule zb-v --sharding zero2"


class LayoutExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Support of a model under a layout."""

    features: list[str]
    refused: str | None
    """Reason why an engine rejects the layout; None if it accepts it."""
    layouts: int
    """Number of random layouts verified by the oracle."""
    pairs: dict[str, int]
    """Number of those layouts that have both features of a pair."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("layout", metavar="LAYOUT", help="such as data=2,tensor=2")
    parser.add_argument("model", metavar="MODEL", help="a family, or a folder with a config.json")
    for name in OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="NAME", help=f"{name} of the engine, unless the default")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the explanation; return 1 if the layout is refused."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.model_name import missing_model

    if (problem := missing_model(options.model)) is not None:
        raise ConfigError(f"MODEL must be an architecture or a local folder: {problem}")
    explanation = explain(options.layout, options.model, **_selected_options(options))
    if options.json:
        print_json(explanation)
    else:
        print(_text(explanation))
    return 0 if explanation.refused is None else 1


def _selected_options(options: Namespace) -> dict[str, str]:
    return {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}


def explain(layout: str, model: str, **options: str) -> LayoutExplanation:
    """Return whether an engine accepts a model under a layout, and which feature pairs were tested.

    Builds the engine of rank 0 on meta tensors in a fake process group.

    Args:
        layout: text in the form of `Layout.parse`.
        model: architecture, or folder with a config.json.
        options: `sharding`, `schedule`, `recompute` and `context_attention` of the engine.

    Raises:
        LayoutError: the text is not a layout.
        ConfigError: the model does not exist, or an option has an unknown value.
    """
    from ms_parallel.cluster.layout import Layout
    from ms_parallel.models import architecture
    from ms_parallel.planner.refusal import LayoutArguments, refusal
    from ms_parallel.proof.combinations import features_of, pair_name, proved_pairs
    from ms_parallel.training.options import Options

    names: dict[str, Any] = dict(options)
    Options(model_arch=model, **names)  # an unknown name is bad input, not a refused layout
    parsed, config = Layout.parse(layout), architecture(model)
    proved = proved_pairs()
    features = features_of(parsed, config, options)
    pairs = [pair_name(*pair) for pair in combinations(features, 2)]
    return LayoutExplanation(
        features=features,
        refused=refusal(LayoutArguments(model=model, layout=parsed, options=options)),
        layouts=proved.layouts,
        pairs={name: proved.pairs.get(name, 0) for name in pairs},
    )


def _text(explanation: LayoutExplanation) -> str:
    lines = [f"uses      {', '.join(explanation.features) or 'one process with all weights'}"]
    lines.append(
        f"refused   {explanation.refused}"
        if explanation.refused
        else "accepted  an engine can train it"
    )
    if explanation.pairs:
        lines.append(f"\nverified against one process, of {explanation.layouts} random layouts")
    width = max((len(name) for name in explanation.pairs), default=0)
    lines += [f"  {name:{width}}  {count or 'none'}" for name, count in explanation.pairs.items()]
    return "\n".join(lines)
