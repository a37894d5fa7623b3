"""`ms-parallel explain` reports tested combinations, and why a layout is refused."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from combinations_table import FILE, PAGE, count_all_pairs, encode, page_table, table
from processes import run_command

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.commands.explain import explain
from ms_parallel.errors import ConfigError, LayoutError

pytestmark = pytest.mark.usefixtures("no_process_group")


def test_the_tables_match_the_random_jobs() -> None:
    """In the package and the docs; `python tests/combinations_table.py` writes both."""
    pairs = count_all_pairs()
    assert FILE.read_bytes() == encode(pairs)
    assert page_table(PAGE.read_text()) == table(pairs)


def test_features_of_a_layout_are_counted_in_pairs() -> None:
    """Axes, the sharding, the schedule, and features of the model."""
    explanation = explain("data=2,pipeline=2", "qwen3_moe", sharding="zero2", schedule="zb-h1")
    assert explanation.refused is None
    features = {"data", "pipeline", "sharding=zero2", "schedule=zb-h1", "experts"}
    assert features <= set(explanation.features)
    assert explanation.pairs["experts x pipeline"] > 10
    assert (
        len(explanation.pairs) == len(explanation.features) * (len(explanation.features) - 1) // 2
    )


@pytest.mark.parametrize(
    ("layout", "model", "options", "message"),
    [
        ("tensor=3", "llama", {}, "tensor=3 does not divide"),
        ("data=4,expert=2", "qwen3_moe", {"sharding": "replicate"}, "expert=2 distributes experts"),
        ("tensor=4,context=4", "llama", {"context_attention": "ulysses"}, "must divide"),
    ],
)
def test_a_refusal_is_that_of_the_engine(
    layout: str, model: str, options: dict[str, str], message: str
) -> None:
    """With its message and remedy."""
    explanation = explain(layout, model, **options)
    assert explanation.refused is not None
    assert message in explanation.refused


def test_a_process_with_a_group_asks_a_subprocess() -> None:
    """In a rank of a run, or after an engine ran: the same message, and the group stays intact."""
    connect(Layout(), device="cpu")
    explanation = explain("tensor=3", "llama")
    assert explanation.refused is not None
    assert "tensor=3 does not divide" in explanation.refused
    assert dist.get_world_size() == 1


def test_bad_input_is_refused_by_name() -> None:
    """An invalid layout and an unknown model."""
    with pytest.raises(LayoutError):
        explain("dta=2", "llama")
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        explain("data=2", "lama")


def test_the_command_exits_with_1_for_a_refused_layout(tmp_path: Path) -> None:
    """As text and as JSON."""
    ended = run_command(["-m", "ms_parallel", "explain", "tensor=3", "llama"], folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "refused   tensor=3 does not divide" in ended.stdout
    command = ["-m", "ms_parallel", "explain", "tensor=2,pipeline=2", "llama", "--json"]
    ended = run_command(command, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["pairs"]["pipeline x tensor"] > 10
