"""Public functions refuse arguments of the wrong type with their package's error, in one line."""

import importlib
import inspect
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy
import pytest
import torch
from attrs import field, frozen

from ms_parallel.argument_types import check_type, check_types, checked_fields
from ms_parallel.errors import ConfigError

NAMES = tomllib.loads((Path(__file__).parent / "public_names.toml").read_text(encoding="utf-8"))
BASES = {
    "ms_align": "AlignError",
    "ms_compress": "CompressError",
    "ms_parallel": "ParallelError",
    "ms_profile": "ProfileError",
}
"""Packages whose functions are checked by their annotations. Operators have contracts instead."""
ANY_OBJECT = {
    "ms_align.evaluation.harness_model",  # needs an optional library first
    "ms_parallel.report_error",  # never raises, as it is called with any exception
    # These take configurations and stages of transformers models and of users' modules as well,
    # which are no subclasses of what their annotations name.
    "ms_parallel.models.build_model",
    "ms_parallel.models.model_plan",
    "ms_parallel.save_model",
    "ms_parallel.search_schedule",
    "ms_parallel.weights.initialize",
    "ms_parallel.weights.load_weights",
    "ms_parallel.weights.save_model",
    "ms_profile.mark_step",  # is called with any model in every step
}
"""Functions that take any object."""


def public_functions() -> list[str]:
    """List the public functions of the checked packages that need an argument."""
    found = []
    for module, names in NAMES.items():
        if module.split(".")[0] not in BASES or module == "ms_parallel.operators":
            continue
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if inspect.isfunction(value) and required(value):
                found.append(f"{module}.{name}")
    return [name for name in found if name not in ANY_OBJECT]


def required(function: Callable[..., object]) -> list[str]:
    """List the arguments without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


@pytest.mark.parametrize("path", public_functions())
def test_every_public_function_refuses_an_object_of_another_type(path):
    """A new public function without a check fails here."""
    module, name = path.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    package = module.split(".")[0]
    base = getattr(importlib.import_module(f"{package}.errors"), BASES[package])
    with pytest.raises(base) as caught:
        function(**dict.fromkeys(required(function), object()))
    assert "\n" not in str(caught.value)


class Named(Protocol):
    """Protocol with a method and a property."""

    @property
    def name(self) -> str:
        """Name."""
        ...

    def close(self) -> None:
        """Close."""
        ...


@pytest.mark.parametrize(
    ("expected", "accepted", "refused"),
    [
        (bool, [True, False], [None, 0, 1, "no", numpy.int64(1)]),
        (int, [0, -1, numpy.int64(3)], [None, True, 3.5, math.nan, "3", b"3", [3]]),
        (float, [0, 3.5, math.inf, numpy.float32(1)], [None, True, math.nan, "3", [3.5]]),
        (str, ["", "a"], [None, b"a", 3, ["a"]]),
        (str | Path, ["a", Path("a")], [None, b"a", 3]),
        (int | None, [None, 3], [True, "", 3.5]),
        (Literal["a", "b"], ["a", "b"], ["c", "", None, ["a"], torch.ones(2)]),
        (Literal[4, 8], [4], [4.0, True, "4"]),
        (torch.Tensor, [torch.ones(1), torch.nn.Parameter(torch.ones(1))], [None, [1.0], 3]),
        (Sequence[str], [[], ["a"], ("a",)], [None, "a", b"a", {"a": 1}, [3], object()]),
        (tuple[int, ...], [(), (1, 2), [1]], ["", 1, [1.5], [True]]),
        (tuple[int, str], [(1, "a")], [(1,), (1, 2), (1, "a", "b")]),
        (Mapping[str, float], [{}, {"a": 1}], [None, [], "a", {"a": "b"}, {1: 2.0}]),
        (Sequence[Sequence[int]], [[[1]], []], [[1], ["a"], [[None]]]),
        (Callable[[int], object], [print, lambda n: n], [None, 3, "print", {}]),
        (Named, [open(Path(__file__), encoding="utf-8")], [None, "a", 3]),  # noqa: SIM115
        (Any, [None, 3, object()], []),
        (object, [None, 3], []),
    ],
    ids=str,
)
def test_values_are_checked_against_an_annotation(expected, accepted, refused):
    """A bool is no number, a string is no list of strings, and NaN is never a setting."""
    for value in accepted:
        check_type("it", value, expected)
    for value in refused:
        with pytest.raises(ConfigError, match=r"^it must be .*, got ") as caught:
            check_type("it", value, expected)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250


def test_a_checked_function_names_the_argument_and_is_called_as_before():
    """Positional, keyword and default arguments; quoted names that do not exist accept anything."""

    @check_types
    def add(a: int, *rest: str, b: float = 1.0, c: "Missing | None" = None, **more: int) -> float:  # noqa: F821
        """Add."""
        return a + b

    assert add(1, "x", b=2, c=3, more=4) == 3
    assert add.__doc__ == "Add."
    with pytest.raises(ConfigError, match=r"b must be a number, got 'x'"):
        add(1, b="x")
    with pytest.raises(TypeError, match="missing a required argument"):
        add()


def test_fields_are_checked_before_conversion_and_in_subclasses():
    """A converter gets only what its annotation allows."""

    def as_tuple(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    @frozen(field_transformer=checked_fields)
    class Base:
        name: str
        pair: tuple[int, ...] = field(default=(), converter=as_tuple)

    @frozen
    class Child(Base):
        extra: Any = None

    assert Child("a", [1, 2]).pair == (1, 2)
    for wrong in ((3,), ("a", 3), ("a", "bc"), ("a", {1: 2})):
        with pytest.raises(ConfigError, match="must be"):
            Child(*wrong)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, "a\nb", 10**5000, torch.nn.Linear(2, 2), torch.ones(99, 99)], ids=type
)
def test_a_message_shows_a_value_in_one_short_line(value):
    """Large values and modules, whose repr has many lines."""
    with pytest.raises(ConfigError) as caught:
        check_type("it", value, bytes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


def model() -> torch.nn.Module:
    """Return a small causal language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))


def test_values_out_of_range_are_refused_before_they_do_harm(tmp_path):
    """Each of these was once accepted silently or ended in an exception of another library."""
    import ms_align
    import ms_compress
    import ms_parallel
    import ms_profile
    from ms_parallel import checkpoint, schedules

    tokens, row = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(1, 4)
    costs = schedules.SegmentCosts(forward=[1], backward_input=[1], backward_weight=[1])
    attempts = {
        "microbatch_size": lambda: ms_align.LocalEngine(model(), microbatch_size=0),
        "heads.value": lambda: ms_align.LocalEngine(model(), heads={"value": 0}),
        "max_num_seqs": lambda: ms_align.LocalGenerator(model(), max_num_seqs=0),
        "gamma": lambda: ms_align.gae(row, row, row, gamma=1.5),
        "lam": lambda: ms_align.gae(row, row, row, lam=-1),
        "rewards": lambda: ms_align.gae(row[0], row, row),
        "least_statements": lambda: ms_align.PythonParses(least_statements=0),
        "on_event": lambda: ms_align.SFTTrainer(model="m", steps=1, on_event="print"),
        "stop_token_ids": lambda: ms_align.Sampling(stop_token_ids=b"x"),
        "batch_size": lambda: ms_compress.perplexity(model(), tokens, batch_size=0),
        "the text": lambda: ms_compress.perplexity(model(), {"tokens": tokens}),
        "share": lambda: ms_compress.prune(model(), "2:4", share=1.5),
        "accuracy_level": lambda: ms_compress.export(model(), tmp_path / "o", accuracy_level=5),
        "model": lambda: ms_compress.export([], tmp_path / "o"),
        "mtp_weight": lambda: ms_parallel.NextTokenLoss(mtp_weight=-1.0),
        "timeout_s": lambda: ms_parallel.connect(ms_parallel.Layout(), timeout_s=0),
        "'abc' is not a device": lambda: ms_parallel.load_model(tmp_path, device="abc"),
        "count": lambda: checkpoint.keep_last(tmp_path, 0),
        "step": lambda: checkpoint.step_folder(tmp_path, -1),
        "effort": lambda: schedules.balance(costs, placement=[0], microbatches=1, effort=-1),
        "a schedule needs": lambda: schedules.balance(costs, placement=[], microbatches=1),
        "tries": lambda: ms_profile.read_clocks(0),
        "capacity": lambda: ms_profile.Recorder(tmp_path / "ring", capacity=0),
        "rank": lambda: ms_profile.EventLog(tmp_path, rank=-1),
        "window": lambda: ms_profile.analyse(tmp_path, window=-1),
        "sizes and times": lambda: ms_profile.fit_link([1, 2], "abc"),
    }
    bases = (
        ms_align.AlignError,
        ms_compress.CompressError,
        ms_parallel.ParallelError,
        ms_profile.ProfileError,
    )
    for start, attempt in attempts.items():
        with pytest.raises(bases) as caught:
            attempt()
        assert str(caught.value).startswith(start)
        assert "\n" not in str(caught.value)
