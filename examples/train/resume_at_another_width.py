"""How do I resume with fewer or more processes?

    python examples/train/resume_at_another_width.py

torchrun starts the same run file three times: with two processes to step 6, with one to step 9, and
with two tensor ranks to step 12. Checkpoints are independent of the layout, and the data order
continues. With `reproducible = true` the number of data ranks does not change a bit: the losses to
step 9 equal the losses of a run in a single process.
"""

import argparse
import email
import json
import os
import subprocess
import sys
from pathlib import Path

RUN = """
model = "llama"
dataset = "{corpus}"
output_dir = "{output}"
steps = {steps}
sequence_length = 64
batch_size = 8
learning_rate = 3e-3
learning_rate_decay = {{ name = "wsd" }}
warmup_steps = 2
vocab_size = 512
device = "cpu"
log_every = 1
checkpoint_every = 3
reproducible = {reproducible}
[model_config]
hidden_size = 32
intermediate_size = 80
num_hidden_layers = 2
[layout]
{axis} = {count}
"""


def train(folder: Path, name: str, axis: str, count: int, steps: int) -> list[float]:
    """Train to step `steps`, resuming if possible; return the losses from step 1."""
    run_file = folder / f"{name}-{steps}.toml"
    text = RUN.format(
        corpus=Path(email.__file__).parent,
        output=folder / name,
        steps=steps,
        axis=axis,
        count=count,
        reproducible="true" if axis == "data" else "false",
    )
    run_file.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "ms_parallel", "train", str(run_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    with (folder / name / "events.jsonl").open() as lines:
        events = [json.loads(line) for line in lines]
    losses = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    return [losses[step] for step in sorted(losses)]


def main(arguments: list[str] | None = None) -> None:
    """Train with two, one and two processes, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("another-width"))
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    train(folder, "changing", "data", 2, 6)
    resumed = train(folder, "changing", "data", 1, 9)
    single = train(folder, "alone", "data", 1, 9)
    for step, (loss, expected) in enumerate(zip(resumed, single, strict=True), 1):
        print(f"step {step}: {loss!r} {expected!r} {'equal' if loss == expected else 'DIFFERS'}")
    assert resumed == single
    continued = train(folder, "changing", "tensor", 2, 12)
    print(f"resumed to step {len(continued)} as two tensor ranks: loss {continued[-1]:.4f}")


if __name__ == "__main__":
    main()
