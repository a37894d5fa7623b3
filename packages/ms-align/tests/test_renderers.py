"""Tokens of conversations with tools; `nox -s gateway` compares them with the package renderers."""

import os
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_tokens_of_turns_are_those_of_renderers() -> None:
    """Id by id, over random conversations; MS_CHAT_TEMPLATES names a folder of TRL's templates."""
    pytest.importorskip("renderers")
    folder = os.environ.get("MS_CHAT_TEMPLATES")
    if folder is None:
        pytest.skip("MS_CHAT_TEMPLATES is not set")
    from renderers_turns import FAMILIES, compare

    agreements = {name: compare(Path(folder), name, 10) for name in FAMILIES}
    assert [a.different_prompts for a in agreements.values()] == [[]] * len(agreements)
    assert sum(a.prompts for a in agreements.values()) > 100
    # The template of DeepSeek-R1 opens neither a thought nor another list of results after the
    # results of a tool, and renderers does both.
    assert {name for name, a in agreements.items() if a.different} <= {"deepseekv3"}
    assert sum(a.equal for a in agreements.values()) > 400
