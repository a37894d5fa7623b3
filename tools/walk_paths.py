"""Count the functions, files and stack frames of the main path of each package.

Runs each path on a small input in one process and profiles it. Run it before and after changing a
main path:

    python tools/walk_paths.py                 # one line per path
    python tools/walk_paths.py step --calls    # every function of a path in order of first call
    python tools/walk_paths.py build --files   # the files that a path enters more than once
"""

import argparse
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch

WARM_CALLS = 2
"""Calls of a path that only fill caches before it is profiled."""
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 2000
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Walk:
    """Functions of one package in order of their first call.

    Args:
        package: name of the package.
        marker: qualified name of a function that is called once per pass of the path; the calls
            between two of its calls are recorded. None: all calls.
    """

    def __init__(self, package: str, marker: str | None = None) -> None:
        self.root = str(Path(sys.modules[package].__file__ or "").parent)
        self.marker, self.passes = marker, 0
        self.depths: dict[CodeType, int] = {}
        """Number of package frames on the stack at the first call of a function."""
        self.entries: Counter[str] = Counter()
        """Number of functions of a file whose first call comes from another file."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of all threads."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        self.passes += code.co_qualname == self.marker
        is_active = self.marker is None or self.passes == WARM_CALLS + 1
        if not is_active or not self._is_counted(code) or code in self.depths:
            return
        callers = [caller.f_code for caller in _callers(frame) if self._is_counted(caller.f_code)]
        self.depths[code] = len(callers) + 1
        if not callers or callers[0].co_filename != code.co_filename:
            self.entries[self._file(code)] += 1

    def _is_counted(self, code: CodeType) -> bool:
        """Whether code is the package's; comprehensions and lambdas belong to their function."""
        return code.co_filename.startswith(self.root) and not code.co_name.startswith("<")

    def _file(self, code: CodeType) -> str:
        return str(Path(code.co_filename).relative_to(self.root))

    def lines(self, name: str, *, calls: bool, files: bool) -> Iterator[str]:
        """Yield the counts, and optionally the calls or the files that are entered repeatedly."""
        functions = list(self.depths)
        for code in functions if calls else ():
            depth = self.depths[code]
            yield f"{depth:3}  {'  ' * depth}{self._file(code)}:{code.co_qualname}"
        yield f"{name}: {self._counts(functions)}"
        # How far a reader has to go to see the model compute.
        attention = [code for code in functions if code.co_qualname == "attention"]
        if attention:
            end = functions.index(attention[0]) + 1
            yield f"{name} to attention: {self._counts(functions[:end])}"
        for file, entries in self.entries.most_common() if files else ():
            if entries > 1:
                yield f"  {entries} entries of {file}"

    def _counts(self, functions: Sequence[CodeType]) -> str:
        files = len({code.co_filename for code in functions})
        frames = max(self.depths[code] for code in functions)
        return f"{len(functions)} functions, {files} files, {frames} frames"


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def walk_step(folder: Path) -> Walk:
    """Walk a step of ms-parallel, from one `Engine.step` to the next."""
    from ms_parallel import DistributedTrainer

    (folder / "corpus.txt").write_text(TEXT)
    trainer = DistributedTrainer(
        "llama",
        model_config=MODEL,
        vocab_size=300,
        sequence_length=32,
        batch_size=2,
        output_dir=folder / "run",
        held_out_fraction=0.0,
        device="cpu",
        progress=False,
    )
    walk = Walk("ms_parallel", marker="Engine.step")
    with walk.recording():
        trainer.train(folder / "corpus.txt", steps=WARM_CALLS + 2)
    return walk


def walk_ppo(folder: Path) -> Walk:
    """Walk a PPO update with its rollout in ms-align, from one update to the next."""
    from ms_align import PPOTrainer

    trainer = PPOTrainer(
        policy_model=_model_folder(folder),
        reward_model=lambda samples: [float(index) for index, _ in enumerate(samples)],
        kl_coeff=0.1,
        batch_size=4,
        epochs=1,  # a rollout for each update
        max_new_tokens=4,
        stop_token_ids=[2],
        steps=WARM_CALLS + 2,
        output_dir=folder / "run",
        device="cpu",
        progress=False,
    )
    walk = Walk("ms_align", marker="RolloutLearner.update")
    with walk.recording():
        trainer.optimize([[5, 6, 7], [8, 9], [10, 11], [12]])
    return walk


def walk_build(folder: Path) -> Walk:
    """Walk a document to a shard in ms-data."""
    import ms_data

    (folder / "corpus.txt").write_text(TEXT)
    tokenizer = ms_data.train_tokenizer(folder / "corpus.txt", vocab_size=300)
    ms_data.build(folder / "corpus.txt", tokenizer=tokenizer, out=folder / "warm")
    walk = Walk("ms_data")
    with walk.recording():
        ms_data.build(folder / "corpus.txt", tokenizer=tokenizer, out=folder / "shards")
    return walk


def walk_batch(folder: Path) -> Walk:
    """Walk a token from a shard to a batch in ms-data."""
    import ms_data

    walk_build(folder)
    stream = ms_data.TokenStream(folder / "shards", sequence_length=32, batch_size=2, seed=0)
    for _ in range(WARM_CALLS):
        next(stream)
    walk = Walk("ms_data")
    with walk.recording():
        next(stream)
    return walk


def walk_export(folder: Path) -> Walk:
    """Walk a trained weight to the exported file in ms-compress."""
    from ms_compress import export, qat
    from ms_parallel import load_model

    model = load_model(_model_folder(folder))
    qat(model, "ct.int4_g32")
    export(model, folder / "warm")
    walk = Walk("ms_compress")
    with walk.recording():
        export(model, folder / "exported")
    return walk


def walk_report(folder: Path) -> Walk:
    """Walk a trace event to the HTML page in ms-profile."""
    from ms_profile import analyse, write_report

    with torch.profiler.profile() as profiler:
        for _ in range(3):
            torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.step()
    profiler.export_chrome_trace(str(folder / "rank0.json"))
    analyse(folder / "rank0.json")
    walk = Walk("ms_profile")
    with walk.recording():
        write_report(analyse(folder / "rank0.json"), folder / "report.html")
    return walk


def walk_operator(folder: Path) -> Walk:
    """Walk a call of an operator in ms-kernels."""
    from ms_kernels import rms_norm

    x, weight = torch.ones(4, 32), torch.ones(32)
    for _ in range(WARM_CALLS):
        rms_norm(x, weight)
    walk = Walk("ms_kernels")
    with walk.recording():
        rms_norm(x, weight)
    return walk


def _model_folder(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict({"vocab_size": 64, **MODEL})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


PATHS: dict[str, Callable[[Path], Walk]] = {
    "step": walk_step,
    "ppo": walk_ppo,
    "build": walk_build,
    "batch": walk_batch,
    "export": walk_export,
    "report": walk_report,
    "operator": walk_operator,
}


def main() -> None:
    """Walk the selected paths and print their counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(PATHS)}")
    parser.add_argument("--calls", action="store_true", help="list the functions")
    parser.add_argument("--files", action="store_true", help="list files entered repeatedly")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in options.paths or PATHS:
        with tempfile.TemporaryDirectory() as folder:
            walk = PATHS[name](Path(folder))
        for line in walk.lines(name, calls=options.calls, files=options.files):
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
