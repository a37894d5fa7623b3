"""A new loss is one function and its registration in one source file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ms_align

SOURCE = Path(ms_align.__file__).parent
NEW = {
    "losses/preference.py": (
        "LOSSES: Final",
        '''def squared(pairs: Pairs, options: "DPOOptions") -> "Tensor":
    """(1 - βΔ)²."""
    return (1 - options.beta * score_difference(pairs, options)).square()


''',
        ("(sigmoid, sigmoid_norm,", "(squared, sigmoid, sigmoid_norm,"),
        "squared",
    ),
    "losses/surrogates.py": (
        "LOSS_TYPES: Final",
        '''def unclipped(terms: Terms) -> "tuple[Tensor, Tensor]":
    """-r·A."""
    ratios = terms.log_ratios.exp()
    return -ratios * terms.advantages, ratios.new_zeros(ratios.shape).bool()


''',
        ('    "grpo": (clipped,', '    "unclipped": (unclipped, "token"),\n    "grpo": (clipped,'),
        "unclipped",
    ),
    "losses/unpaired.py": (
        "LOSSES: Final",
        '''def linear(rows: LabeledRows, options: "KTOOptions") -> "Tensor":
    """-s·β·r."""
    return -rows.signs * options.beta * rows.log_ratios


''',
        ('    "kto": (kto, "kl"),', '    "linear": (linear, "none"),\n    "kto": (kto, "kl"),'),
        "linear",
    ),
}
"""Source file: the statement that the new function precedes, the function, the edit that registers
it, and the name of the loss."""
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ms_align
from small_models import decoder, vowels
from ms_align.tokenizer import ByteTokenizer
from ms_data import PreferenceStream, UnpairedStream
name, sets = sys.argv[1], Path(sys.argv[3])
common = dict(loss_type=name, steps=2, progress=False, output_dir="out", learning_rate=1e-3)
sizes = dict(sequence_length=64, batch_size=4)
if name == "squared":
    trainer = ms_align.DPOTrainer(model=decoder(), **common)
    result = trainer.train(PreferenceStream(sets / "pairs", **sizes))
elif name == "linear":
    trainer = ms_align.KTOTrainer(model=decoder(), **common)
    result = trainer.train(UnpairedStream(sets / "pairs", **sizes))
else:
    trainer = ms_align.GRPOTrainer(
        policy_model=decoder(), reward_model=vowels, tokenizer=ByteTokenizer(), batch_size=8,
        num_generations=4, max_new_tokens=4, **common
    )
    result = trainer.optimize(["hello", "a"])
assert result.finished
assert Path(ms_align.__file__).is_relative_to(Path.cwd())
"""


@pytest.mark.parametrize("file", NEW)
def test_a_new_loss_touches_one_file(sets: Path, tmp_path: Path, file: str) -> None:
    """In a copy of the package with one edited file, the loss trains."""
    shutil.copytree(SOURCE, tmp_path / "ms_align", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "ms_align" / file
    text = path.read_text()
    before, function, (old, new), name = NEW[file]
    assert text.count(f"\n{before}") == text.count(old) == 1
    path.write_text(text.replace(f"\n{before}", f"\n{function}{before}").replace(old, new))
    tests = str(Path(__file__).parent)
    environment_paths = [str(tmp_path), *sys.path]
    code = f"import sys; sys.path[:0] = {json.dumps(environment_paths)}\n{RUN}"
    command = [sys.executable, "-c", code, name, tests, str(sets)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
