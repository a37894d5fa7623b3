"""Count the functions, files and stack frames of ms-parallel in one training step.

Trains a small dense model in one process and profiles one step, from one batch of the stream to the
next. Run it before and after changing the main path:

    python tools/walk_step.py            # three numbers
    python tools/walk_step.py --calls    # also list every function in order of first call
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

import torch

import ms_parallel
from ms_parallel import DistributedTrainer

PACKAGE = str(Path(ms_parallel.__file__).parent)
ATTENTION = "operators/plain.py:attention"
NEXT_BATCH = "TokenStream.__next__"
STEPS, PROFILED = 4, 3
"""Length of the run and the profiled step; the first steps fill caches."""


class Walk:
    """Code objects of ms-parallel in order of first call."""

    def __init__(self) -> None:
        self.depths: dict[CodeType, int] = {}
        """Number of package frames from `train` to the function at its first call."""
        self.batches = 0

    def enter(self, frame: FrameType, event: str, arg: object) -> None:
        """Record a call; comprehensions and lambdas count as their enclosing function."""
        code = frame.f_code
        if event != "call":
            return
        self.batches += code.co_qualname == NEXT_BATCH
        if self.batches != PROFILED or not is_counted(code) or code in self.depths:
            return
        depth = 0
        caller: FrameType | None = frame
        while caller is not None:
            depth += is_counted(caller.f_code)
            if caller.f_code is DistributedTrainer.train.__code__:
                break
            caller = caller.f_back
        self.depths[code] = depth

    def until(self, last: str | None) -> dict[str, int]:
        """Map `file:function` to its depth, up to the first call of `last` (None: full step)."""
        names: dict[str, int] = {}
        for code, depth in self.depths.items():
            name = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
            names[name] = depth
            if last is not None and name.endswith(last):
                break
        return names


def is_counted(code: CodeType) -> bool:
    """Whether the code belongs to ms-parallel and is not a comprehension or lambda."""
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def main() -> None:
    """Train and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", action="store_true", help="also list the functions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("The quick brown fox jumps over the lazy dog.\n" * 2000)
        trainer = DistributedTrainer(
            "llama",
            model_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
            vocab_size=300,
            sequence_length=32,
            batch_size=2,
            output_dir=Path(folder) / "run",
            held_out_fraction=0.0,
            device="cpu",
            progress=False,
        )
        sys.setprofile(walk.enter)
        try:
            trainer.train(corpus, steps=STEPS)
        finally:
            sys.setprofile(None)
    lines: list[str] = []
    if options.calls:
        for name, depth in walk.until(None).items():
            sys.stdout.write(f"{depth:3}  {'  ' * depth}{name}\n")
    attention = next(name for name in walk.until(None) if name.endswith(ATTENTION))
    for title, names in (
        ("to attention", walk.until(attention)),
        ("full step", walk.until(None)),
    ):
        files = {name.partition(":")[0] for name in names}
        lines.append(
            f"{title}: {len(names)} functions, {len(files)} files, {max(names.values())} frames"
        )
    lines.append(f"attention is called at frame {walk.until(None)[attention]}")

    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
