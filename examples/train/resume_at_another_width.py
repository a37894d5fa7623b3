"""How do I resume with fewer or more processes?

    python examples/train/resume_at_another_width.py

The same run file is started three times by torchrun: in two processes to step 6, in one to step 9,
and in two again, now as tensor ranks, to step 12. Checkpoints know no layout, the data goes on in
its order. With `reproducible = true` data ranks change nothing to the bit: the losses to step 9 are
those of a run that one process did alone.
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
    """Train on to a step, and return the losses of the whole run so far."""
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
    """Two, one, two processes; then one alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("another-width"))
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    train(folder, "changing", "data", 2, 6)
    changing = train(folder, "changing", "data", 1, 9)
    alone = train(folder, "alone", "data", 1, 9)
    for step, (ours, theirs) in enumerate(zip(changing, alone, strict=True), 1):
        print(f"step {step}: {ours!r} {theirs!r} {'the same' if ours == theirs else 'DIFFERS'}")
    assert changing == alone
    further = train(folder, "changing", "tensor", 2, 12)
    print(f"on to step {len(further)} as two tensor ranks: loss {further[-1]:.4f}")


if __name__ == "__main__":
    main()
