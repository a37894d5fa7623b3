"""Every command with a run file reports trivial mistakes in it before torch is imported.

Importing torch takes seconds, more on a busy machine. The test checks imports and measures no time.
Each mistake is made separately in the file that `init` writes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packages import module_of

COMMANDS = {
    "ms-parallel train": "timeout_s",
    "ms-parallel inspect": "timeout_s",
    "ms-parallel plan": "timeout_s",
    **{f"ms-align {name}": "batch_size" for name in ("sft", "reward", "dpo", "kto", "gkd")},
    **{f"ms-align {name}": "batch_size" for name in ("ppo", "grpo", "rloo")},
    "ms-align generate": "num_generations",
    "ms-align evaluate": "limit",
    **{f"ms-compress {name}": "tuning.steps" for name in ("qat", "prune", "distill")},
    "ms-compress quantize": "rows",
    "ms-compress evaluate": "decode_tokens",
}
"""Each command, with a key of its run file that must be a positive number."""
MISTAKES = {
    "missing file": ("NONE.toml", []),
    "not a file": ("model", []),
    "not TOML": ("broken.toml", []),
    "not text": ("binary.toml", []),
    "empty": ("empty.toml", []),
    "unknown key": ("RUN.toml", ["stesp=1"]),
    "table in place of a number": ("RUN.toml", ["NUMBER.stesp=1"]),
    "wrong type": ("RUN.toml", ["NUMBER='four'"]),
    "below the least": ("RUN.toml", ["NUMBER=-3"]),
    "no value": ("RUN.toml", ["NUMBER"]),
    "missing model": ("RUN.toml", ["model=none/model"]),
    "missing data": ("RUN.toml", ["dataset=none/data"]),
    "data of the wrong type": ("RUN.toml", ["dataset=3"]),
    "model of the Hub": ("RUN.toml", ["model=meta-llama/Llama-3.2-1B"]),
    "output in place of a file": ("RUN.toml", ["output_dir=CLUSTER.toml"]),
    "unknown optimizer": ("RUN.toml", ["optimizer=AdamWW"]),
    "unknown setting of an optimizer": ("RUN.toml", ["optimizer={name='AdamW',beta1=0.1}"]),
    "setting that the optimizer lacks": ("RUN.toml", ["optimizer=SGD", "betas=[0.8,0.9]"]),
    "one number in place of two": ("RUN.toml", ["betas=[0.9]"]),
    "unknown axis": ("RUN.toml", ["layout.tensr=2"]),
    "ranks below 1": ("RUN.toml", ["layout.tensor=-2"]),
    "unknown precision": ("RUN.toml", ["mixed_precision=fp8"]),
    "unknown mode": ("RUN.toml", ["recompute=fulll"]),
    "two lengths": ("RUN.toml", ["epochs=1", "steps=3"]),
    "uneven rollouts": ("RUN.toml", ["batch_size=7", "num_generations=2"]),
    "target without coefficient": ("RUN.toml", ["kl_target=0.1", "kl_coeff=0"]),
    "unknown scheme": ("RUN.toml", ["scheme=gguf.q4_9"]),
    "unknown pattern": ("RUN.toml", ["pattern=3:2"]),
    "unknown key of a table": ("RUN.toml", ["tuning.stesp=2"]),
}
"""Run file and `--set` values of each mistake. A command is tested with the mistakes whose keys it
has, and with mistakes that need no key."""
ALLOWED = {
    ("ms-parallel inspect", "missing data"),  # it estimates memory without data
    ("ms-parallel plan", "missing data"),
    ("ms-parallel inspect", "output in place of a file"),
    ("ms-parallel plan", "output in place of a file"),
    *((f"ms-align {name}", "two lengths") for name in ("ppo", "grpo", "rloo")),  # passes, updates
    *((f"ms-align {name}", "uneven rollouts") for name in ("generate", "evaluate")),
    ("ms-align evaluate", "missing data"),  # its data come from the tasks
    ("ms-compress quantize", "missing data"),  # rounding to nearest needs no data
    ("ms-compress evaluate", "missing model"),  # it has a table of models
    ("ms-compress evaluate", "missing data"),
}
CALL = """
import contextlib, importlib, io, json, sys
module, *runs = json.loads(sys.argv[1])
main = importlib.import_module(module + ".cli").main
outcomes = []
for arguments in runs:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as ending:
            code = ending.code
    outcomes.append((code, "torch" in sys.modules, stderr.getvalue()))
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_trivial_mistakes_are_reported_before_torch_is_imported(
    command: str, tmp_path: Path
) -> None:
    """Each is exit code 2 and one line that names the file or key."""
    package, name = command.split()
    init = ["init"] if package == "ms-parallel" else ["init", name]
    cluster = ["--cluster", "CLUSTER.toml"] if name == "plan" else []
    (tmp_path / "broken.toml").write_text("model = \n")
    (tmp_path / "CLUSTER.toml").write_text('chip = "h100-sxm"\nnodes = 1\ndevices_per_node = 2\n')
    command_line = [sys.executable, "-m", module_of(package), *init, "--out", "RUN.toml"]
    subprocess.run(command_line, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    text = (tmp_path / "RUN.toml").read_text()
    text = re.sub(
        r'^(model|reward_model|teacher_model) = "\S*/\S*"',
        r'\1 = "model"',
        text,
        flags=re.MULTILINE,
    )
    (tmp_path / "RUN.toml").write_text(text)
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    keys = {"NUMBER", "stesp", *re.findall(r"^#? ?(\w+) = ", text, flags=re.MULTILINE)}
    keys |= set(re.findall(r"^#? ?\[(\w+)\]", text, flags=re.MULTILINE))
    mistakes = {
        mistake: files_and_settings
        for mistake, files_and_settings in MISTAKES.items()
        if (command, mistake) not in ALLOWED
        and {re.split(r"\W", setting)[0] for setting in files_and_settings[1]} <= keys
    }
    assert len(mistakes) >= 12
    runs = []
    for file, settings in mistakes.values():
        changes = [setting.replace("NUMBER", COMMANDS[command]) for setting in settings]
        runs.append([name, file, *cluster, *(w for change in changes for w in ("--set", change))])
    command_line = [sys.executable, "-c", CALL, json.dumps([module_of(package), *runs])]
    result = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, check=True)
    outcomes = dict(zip(mistakes, json.loads(result.stdout), strict=True))
    assert {mistake: torch for mistake, (_, torch, _) in outcomes.items() if torch} == {}
    assert {mistake: message for mistake, (code, _, message) in outcomes.items() if code != 2} == {}
    for mistake, (_, _, message) in outcomes.items():
        assert message.count("\n") == 1, (mistake, message)
