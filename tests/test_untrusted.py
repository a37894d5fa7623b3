"""What all packages' reader of untrusted files promises; each has the same copy of it."""

from pathlib import Path
from typing import Any

import pytest

from ms_profile.files.untrusted import decode_json, read_toml

DIGITS = "9" * 400


@pytest.mark.parametrize("kind", [Any, dict[str, float], dict[str, list[int]]])
@pytest.mark.parametrize("text", [f'{{"a": [1, {DIGITS}]}}', f'{{"a": [-{DIGITS}]}}'])
def test_no_whole_number_is_longer_than_128_bits(kind: Any, text: str) -> None:
    """It would end as an OverflowError wherever it is first made a float."""
    for content in (text, text.encode()):
        with pytest.raises(KeyError, match="a file: a whole number of more than 128 bits"):
            decode_json(content, kind, where="a file", error=KeyError)


def test_texts_and_fractions_may_have_as_many_digits_as_they_like() -> None:
    """Only whole numbers are without an end in Python."""
    text = f'{{"a": "{DIGITS}", "b": {2**128 - 1}, "c": 0.{DIGITS}}}'
    found: dict[str, Any] = decode_json(text, dict, where="a file", error=KeyError)
    assert found == {"a": DIGITS, "b": 2**128 - 1, "c": 1.0}


def test_run_files_hold_no_longer_ones(tmp_path: Path) -> None:
    """In a table of a table too."""
    path = tmp_path / "RUN.toml"
    path.write_text(f'[a]\nb = [{{c = {DIGITS}}}]\nd = "{DIGITS}"\n')
    with pytest.raises(KeyError, match=r"RUN\.toml: a whole number of more than 128 bits"):
        read_toml(path, error=KeyError)
