"""`ms-parallel explain`: say whether a model trains under a layout, and what was proved of it."""

from argparse import ArgumentParser, Namespace
from itertools import combinations

import msgspec

from ms_parallel.command_line import add_json, print_json

OPTIONS = ("sharding", "schedule", "recompute", "context_attention")
HELP = "say whether a model trains under a layout, and which of its combinations were proved"
EXAMPLE = "ms-parallel explain data=2,pipeline=2 qwen3 --schedule zb-v --sharding zero2"


class LayoutExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model under a layout."""

    features: list[str]
    refused: str | None
    """Why an engine does not take it; None where it does."""
    layouts: int
    """Drawn by the oracle in all."""
    pairs: dict[str, int]
    """In how many of them both features of a pair were held against one process."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("layout", metavar="LAYOUT", help="such as data=2,tensor=2")
    parser.add_argument("model", metavar="MODEL", help="a family, or a folder with a config.json")
    for name in OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="NAME", help=f"{name} of the engine, if not the default")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print what is known; 1 where the layout is refused."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.model_name import missing_model

    if (problem := missing_model(options.model)) is not None:
        raise ConfigError(f"MODEL must be an architecture or a local folder: {problem}")
    found = explain(options.layout, options.model, **_given(options))
    if options.json:
        print_json(found)
    else:
        print(_text(found))
    return 0 if found.refused is None else 1


def _given(options: Namespace) -> dict[str, str]:
    return {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}


def explain(layout: str, model: str, **options: str) -> LayoutExplanation:
    """Say whether an engine takes a model under a layout, and which pairs the oracle has held.

    The engine of the first process is built without memory, in a cluster that is not there.

    Args:
        layout: as `Layout.parse` reads it.
        model: a family, or a folder with a config.json.
        options: `sharding`, `schedule`, `recompute` and `context_attention` of the engine.

    Raises:
        LayoutError: the text is no layout.
        ConfigError: there is no such model.
    """
    from ms_parallel.cluster.layout import Layout
    from ms_parallel.models import architecture
    from ms_parallel.planner.refusal import LayoutQuestion, refusal
    from ms_parallel.proof.combinations import features_of, pair_name, proved_pairs

    chosen, config = Layout.parse(layout), architecture(model)
    known = proved_pairs()
    features = features_of(chosen, config, options)
    names = [pair_name(*pair) for pair in combinations(features, 2)]
    return LayoutExplanation(
        features=features,
        refused=refusal(LayoutQuestion(model=model, layout=chosen, options=options)),
        layouts=known.layouts,
        pairs={name: known.pairs.get(name, 0) for name in names},
    )


def _text(found: LayoutExplanation) -> str:
    lines = [f"uses      {', '.join(found.features) or 'one process with all weights'}"]
    lines.append(f"refused   {found.refused}" if found.refused else "accepted  an engine takes it")
    if found.pairs:
        lines.append(f"\nheld against one process, of {found.layouts} drawn layouts")
    width = max((len(name) for name in found.pairs), default=0)
    lines += [f"  {name:{width}}  {count or 'none'}" for name, count in found.pairs.items()]
    return "\n".join(lines)
