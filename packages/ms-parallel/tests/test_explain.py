"""`ms-parallel explain` says what the oracle has held, and why a layout is refused."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from combinations_table import FILE, PAGE, counted, encoded, page_table, table
from processes import run_command

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.commands.explain import explain
from ms_parallel.errors import ConfigError, LayoutError


def test_the_tables_are_what_the_oracle_draws() -> None:
    """In the package and in the docs; `python tests/combinations_table.py` writes both."""
    found = counted()
    assert FILE.read_bytes() == encoded(found)
    assert page_table(PAGE.read_text()) == table(found)


def test_what_a_layout_uses_is_counted_pair_by_pair() -> None:
    """Axes, how weights are shared out, the schedule, and what the model has."""
    found = explain("data=2,pipeline=2", "qwen3_moe", sharding="zero2", schedule="zb-h1")
    assert found.refused is None
    used = {"data", "pipeline", "sharding=zero2", "schedule=zb-h1", "experts"}
    assert used <= set(found.features)
    assert found.pairs["experts x pipeline"] > 10
    assert len(found.pairs) == len(found.features) * (len(found.features) - 1) // 2


@pytest.mark.parametrize(
    ("layout", "model", "options", "says"),
    [
        ("tensor=3", "llama", {}, "tensor=3 does not divide"),
        ("data=4,expert=2", "qwen3_moe", {"sharding": "replicate"}, "expert=2 distributes experts"),
        ("tensor=4,context=4", "llama", {"context_attention": "ulysses"}, "must divide"),
    ],
)
def test_a_refusal_is_the_engines_own(
    layout: str, model: str, options: dict[str, str], says: str
) -> None:
    """In its words, with the remedy."""
    found = explain(layout, model, **options)
    assert found.refused is not None
    assert says in found.refused


def test_a_process_that_has_a_group_asks_another() -> None:
    """As one of a run, or after an engine has worked: the engine's words, and the group is left."""
    connect(Layout(), device="cpu")
    found = explain("tensor=3", "llama")
    assert found.refused is not None
    assert "tensor=3 does not divide" in found.refused
    assert dist.get_world_size() == 1


def test_bad_input_is_refused_by_name() -> None:
    """A layout that is none, and a model that is not known."""
    with pytest.raises(LayoutError):
        explain("dta=2", "llama")
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        explain("data=2", "lama")


def test_the_command_prints_facts_and_exits_with_1_where_it_is_refused(tmp_path: Path) -> None:
    """As text and as JSON."""
    ended = run_command(["-m", "ms_parallel", "explain", "tensor=3", "llama"], folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "refused   tensor=3 does not divide" in ended.stdout
    command = ["-m", "ms_parallel", "explain", "tensor=2,pipeline=2", "llama", "--json"]
    ended = run_command(command, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["pairs"]["pipeline x tensor"] > 10
