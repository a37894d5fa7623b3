"""Every command with a run file reports trivial mistakes in it before torch is imported.

To import torch takes seconds, more on a busy machine. Imports are counted here and no time is
taken. The mistakes are made in the file that `init` writes, one at a time.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from packages import module_of

COMMANDS = {
    "ms-parallel train": "timeout_s",
    "ms-parallel inspect": "timeout_s",
    "ms-parallel plan": "timeout_s",
    **{f"ms-align {name}": "batch_size" for name in ("sft", "reward", "dpo")},
    **{f"ms-align {name}": "batch_size" for name in ("ppo", "grpo", "rloo")},
    "ms-align generate": "group_size",
    "ms-align evaluate": "limit",
    **{f"ms-compress {name}": "tuning.steps" for name in ("qat", "prune", "distill")},
    "ms-compress quantize": "rows",
    "ms-compress export": "rows",
    "ms-compress evaluate": "decode_tokens",
}
"""Each command with a key of its run file that takes a number above 0."""
MISTAKES = {
    "missing file": ("NONE.toml", []),
    "not TOML": ("broken.toml", []),
    "unknown key": ("RUN.toml", ["stesp=1"]),
    "table in place of a number": ("RUN.toml", ["NUMBER.stesp=1"]),
    "wrong type": ("RUN.toml", ["NUMBER='four'"]),
    "below the least": ("RUN.toml", ["NUMBER=-3"]),
    "no value": ("RUN.toml", ["NUMBER"]),
    "missing model": ("RUN.toml", ["model=none/model"]),
    "missing data": ("RUN.toml", ["dataset=none/data"]),
}
"""The file and the `--set` of each mistake."""
ALLOWED = {
    ("ms-parallel inspect", "missing data"),  # it counts memory, and data may come later
    ("ms-parallel plan", "missing data"),
    ("ms-align evaluate", "missing data"),  # its data are those of the tasks
    ("ms-compress quantize", "missing data"),  # rounding to nearest looks at none
    ("ms-compress export", "missing data"),
    ("ms-compress evaluate", "missing model"),  # it takes a table of models
    ("ms-compress evaluate", "missing data"),
}
CALL = """
import contextlib, importlib, io, json, sys
module, *runs = json.loads(sys.argv[1])
main = importlib.import_module(module + ".cli").main
outcomes = []
for words in runs:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as ending:
            code = ending.code
    outcomes.append((code, "torch" in sys.modules, said.getvalue()))
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_trivial_mistakes_are_reported_before_torch_is_imported(
    command: str, tmp_path: Path
) -> None:
    """Each with one line, which names the file or key, and exit code 2."""
    package, name = command.split()
    init = ["init"] if package == "ms-parallel" else ["init", name]
    more = ["--cluster", "CLUSTER.toml"] if name == "plan" else []
    (tmp_path / "broken.toml").write_text("model = \n")
    (tmp_path / "CLUSTER.toml").write_text('chip = "h100-sxm"\nnodes = 1\ndevices_per_node = 2\n')
    words = [sys.executable, "-m", module_of(package), *init, "--out", "RUN.toml"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    text = (tmp_path / "RUN.toml").read_text()
    text = re.sub(r'^(model|reward_model) = "\S*/\S*"', r'\1 = "model"', text, flags=re.MULTILINE)
    (tmp_path / "RUN.toml").write_text(text)
    mistakes = {
        mistake: made for mistake, made in MISTAKES.items() if (command, mistake) not in ALLOWED
    }
    runs = []
    for file, settings in mistakes.values():
        changes = [setting.replace("NUMBER", COMMANDS[command]) for setting in settings]
        runs.append([name, file, *more, *(w for change in changes for w in ("--set", change))])
    words = [sys.executable, "-c", CALL, json.dumps([module_of(package), *runs])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    outcomes = dict(zip(mistakes, json.loads(done.stdout), strict=True))
    assert {mistake: torch for mistake, (_, torch, _) in outcomes.items() if torch} == {}
    assert {mistake: said for mistake, (code, _, said) in outcomes.items() if code != 2} == {}
    for mistake, (_, _, said) in outcomes.items():
        assert said.count("\n") == 1, (mistake, said)
