"""Compare every causal language model of the installed transformers with our engine.

Each class is built at a small size with random weights, and every class that the engine accepts is
compared with transformers in float32. Several checks run in a forked process. If a check crashes or
hangs, its cell of the table says so, and the remaining checks run in the next process. Run it with
`nox -s sweep`, or for some rows:

    python benchmarks/transformers_sweep.py llama qwen3_next --checks logits gradients
"""

# ruff: noqa: RUF001 - writes a Chinese page

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
import transformers
from attrs import asdict, frozen
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import ms_align
from ms_parallel import Engine, Layout, NextTokenLoss, ParallelError, load_model
from ms_parallel.commands.explain import explain
from ms_parallel.models import TransformersModel
from ms_parallel.models.family import families
from ms_parallel.models.huggingface.config import causal_classes
from ms_parallel.models.huggingface.small import small_model
from ms_parallel.models.registry import read_config, weight_slices
from ms_parallel.proof.gradients import full_gradients
from ms_parallel.proof.records import Case, Job
from ms_parallel.proof.worker import run_case

ROWS, LENGTHS, LAYERS = 2, ((17, 7), (5, 19)), 4
"""Rows of a batch, and the documents packed into each."""
TOLERANCE = 1e-5
"""Allowed difference, relative to the maximum value or 1."""
MARGIN = 3
"""Allowed difference as a multiple of transformers' own rounding error, against float64."""
SPREAD = 0.2
"""Standard deviation of random matrices."""
RATE, UPDATES = 0.01, 2
NEW_TOKENS = 6
MAX_LENGTH = 600
"""Maximum number of characters of a refusal."""
TIMEOUT_S = 240.0
LAYOUTS = ("data=2", "tensor=2", "pipeline=2", "context=2", "data=2,expert=2")
PROCESSES = 2
BY_FOLDER = ("load_model", "align", "explain", "prove")
"""Checks of functions that select the implementation by folder or name."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "phi4_multimodal": {  # vision and audio towers, which text does not use
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
}
"""Settings needed because transformers' defaults do not run or are not small."""
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("gemma4_text", {"num_kv_shared_layers": 10}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("phi", {"tie_word_embeddings": True}),
)
"""Settings of published models with other features than the type's defaults."""
REFUSALS = (ParallelError, ms_align.AlignError)
COARSE = ("engine", "logits", "packed", "gradients", "load_model", "save", "generate", "align")
SGD = {
    "name": "SGD",
    "momentum": 0.0,
    "learning_rate": RATE,
    "weight_decay": 0.0,
    "max_grad_norm": None,
}


@frozen(kw_only=True)
class Row:
    """A model of the table."""

    label: str
    model_type: str
    """Its `model_type`."""
    settings: Mapping[str, Any] = {}
    """Settings other than the type's defaults."""
    native: bool = False
    """Run ms-parallel's implementation of the family, as `Engine(folder)` does."""

    by_folder: bool = True
    """Whether a function that gets the folder runs this implementation."""

    @property
    def checks(self) -> tuple[str, ...]:
        """Checks that apply; some always run ms-parallel's implementation if the family has one."""
        return tuple(name for name in CHECKS if self.by_folder or name not in BY_FOLDER)


def all_rows() -> dict[str, Row]:
    """List the rows of the table by label."""
    native = {family.name for family in families()}
    rows = []
    for model_type in causal_classes():
        rows.append(
            Row(
                label=model_type,
                model_type=model_type,
                settings=SETTINGS.get(model_type, {}),
                native=model_type in native,
            )
        )
        if model_type in native:
            label = f"{model_type} (code of transformers)"
            rows.append(Row(label=label, model_type=model_type, by_folder=False))
    for model_type, settings in VARIANTS:
        (text,) = (f"{name}={value}" for name, value in settings.items())
        rows.append(Row(label=f"{model_type} ({text})", model_type=model_type, settings=settings))
    return {row.label: row for row in sorted(rows, key=lambda row: row.label)}


@frozen(kw_only=True)
class Cell:
    """Result of a check of a class."""

    state: str
    """`right`, `refused`, `wrong`, `raw` (a foreign exception) or `unchecked` (no reference)."""
    why: str = ""
    apart: float = 0.0


Check = Callable[[Row, Path], float]
"""Returns the maximum difference; raises `WrongError` or a refusal."""


class WrongError(Exception):
    """A value differs from the reference."""


def near(name: str, actual: Tensor, expected: Tensor, rounding: float = 0.0) -> float:
    """Return the maximum difference, relative to the maximum expected value or 1.

    Args:
        name: name of the value in messages.
        actual: value of ms-parallel.
        expected: value of transformers in float32.
        rounding: relative difference of transformers' float32 from its float64.

    Raises:
        WrongError: the difference exceeds the tolerance and `MARGIN` times the rounding.
    """
    if actual.shape != expected.shape:
        raise WrongError(f"{name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.abs().max()))
    difference = float((actual.float() - expected.float()).abs().max()) / scale
    if not difference <= max(TOLERANCE, MARGIN * rounding):
        raise WrongError(f"{name} differs by {difference:.1e}")
    return difference


# The reference: transformers alone, in eager attention and float32.


def batch_of(vocabulary: int) -> dict[str, Tensor]:
    """Two packed rows (B, S) of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocabulary, (ROWS, sum(LENGTHS[0])), generator=generator)
    positions = [torch.cat([torch.arange(n) for n in row]) for row in LENGTHS]
    documents = [
        torch.cat([torch.full((n,), at, dtype=torch.int32) for at, n in enumerate(row)])
        for row in LENGTHS
    ]
    targets = tokens.roll(-1, 1)
    for row, lengths in enumerate(LENGTHS):
        targets[row, torch.tensor(lengths).cumsum(0) - 1] = -100
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": torch.stack(positions),
        "documents": torch.stack(documents),
    }


def separate_logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute logits (B, S, V) from a separate forward of each document."""
    rows = []
    for tokens, lengths in zip(batch["tokens"], LENGTHS, strict=True):
        parts = [
            model(part[None], use_cache=False, return_dict=True).logits[0]
            for part in tokens.split(list(lengths))
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def mean_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean loss over all targets, from separate documents."""
    return cross_entropy(separate_logits(model, batch).flatten(0, 1), batch["targets"].flatten())


@torch.no_grad()
def scatter(model: Any, seed: int) -> None:
    """Randomize all weights and persistent buffers, so that they all affect the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        path, _, buffer_name = name.rpartition(".")
        if buffer_name in model.get_submodule(path)._non_persistent_buffers_set:
            continue
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1 and isinstance(value, torch.nn.Parameter):
            value.copy_(noise * SPREAD)
        else:
            value.add_(noise * 0.1)


def small_config(row: Row) -> TransformersModel:
    """Return the small configuration of a row."""
    document = {"model_type": row.model_type, **row.settings}
    return small_model(TransformersModel(document), layers=LAYERS, spread=SPREAD)


def random_model(row: Row) -> Any:
    """Build transformers' small model of a row with random weights."""
    settings = small_config(row).settings
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    model = model.eval()
    scatter(model, 1)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def prepare_weights(row: Row, folder: Path) -> float:
    """Write the folder `begin` of a model type."""
    random_model(row).save_pretrained(folder / "begin")
    return 0.0


def prepare_reference(row: Row, folder: Path) -> float:
    """Write results of transformers with the weights of `begin`."""
    model = random_model(row)
    batch = batch_of(model.config.get_text_config().vocab_size)
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        results["logits"] = model(batch["tokens"], use_cache=False, return_dict=True).logits
        results["packed"] = separate_logits(model, batch)
        text = batch["tokens"][:1, :7]
        for _ in range(NEW_TOKENS):
            logits = model(text, use_cache=False, return_dict=True).logits
            text = torch.cat((text, logits[:, -1:].argmax(-1)), 1)
        results["generated"] = text[0, 7:]
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    losses = []
    for step in range(UPDATES):
        model.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            if step == 0:
                total = sum(
                    (p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None
                )
                results["norm"] = torch.as_tensor(total).sqrt()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
    results["losses"] = torch.stack(losses)
    model.save_pretrained(folder / "after")
    results["rounding"] = torch.tensor(rounding_of(random_model(row), batch))
    save_file({name: value.contiguous() for name, value in results.items()}, folder / "reference")
    # Gradients by tensor name on disk: save them as if they were weights.
    model.load_state_dict(weights)
    model.zero_grad()
    mean_loss(model, batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    model.save_pretrained(folder / "gradients")
    return 0.0


def rounding_of(model: Any, batch: Mapping[str, Tensor]) -> list[float]:
    """Compare transformers in float32 with float64: logits, gradients, and updated weights."""
    results = []
    default, begin = torch.get_default_dtype(), deepcopy(model.state_dict())
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            model = model.to(dtype)
            model.load_state_dict(begin)
            with torch.no_grad():
                values = [[separate_logits(model, batch).double()]]
            for step in range(UPDATES):
                model.zero_grad()
                mean_loss(model, batch).backward()
                trained = [p for p in model.parameters() if p.grad is not None]
                if step == 0:
                    values.append([p.grad.double() for p in trained])
                with torch.no_grad():
                    for parameter in trained:
                        parameter.sub_(RATE * parameter.grad)
            results.append([*values, [p.detach().double() for p in trained]])
    except RuntimeError:  # some models cannot run in float64 and get the plain tolerance
        return [0.0, 0.0, 0.0]
    finally:
        torch.set_default_dtype(default)
    return [
        max(float((a - b).abs().max()) for a, b in zip(low, high, strict=True))
        / max(1.0, *(float(b.abs().max()) for b in high))
        for low, high in zip(*results, strict=True)
    ]


def reference(folder: Path) -> dict[str, Tensor]:
    """Read the results of transformers."""
    return load_file(folder / "reference")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a model's folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


# The checks, in separate processes.


def engine_of(row: Row, folder: Path, **options: Any) -> Engine:
    """Start an engine from the small folder."""
    begin = folder / "begin"
    model = begin if row.native else TransformersModel(begin)
    # transformers' forward has no balance loss or bias update.
    return Engine(model, device="cpu", optimizer=SGD, balance="none", **options)


def plain(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the documents."""
    return {name: batch[name] for name in ("tokens", "targets")}


def logits_of(engine: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute logits by an engine."""
    return engine.evaluate(batch, lambda output, _: output.logits())


def check_engine(row: Row, folder: Path) -> float:
    """Build an engine, which shows whether a class is accepted."""
    engine_of(row, folder)
    return 0.0


def check_build(row: Row, folder: Path) -> float:
    """Build an engine with initial weights instead of a folder."""
    Engine(small_config(row), device="cpu")
    return 0.0


def check_logits(row: Row, folder: Path) -> float:
    """Compare logits of full rows."""
    engine, expected = engine_of(row, folder), reference(folder)
    batch = plain(batch_of(engine.config.vocab_size))
    rounding = float(expected["rounding"][0])
    return near("logits", logits_of(engine, batch), expected["logits"], rounding)


def check_packed(row: Row, folder: Path) -> float:
    """Compare packed documents with separate ones."""
    engine, expected = engine_of(row, folder), reference(folder)
    batch = batch_of(engine.config.vocab_size)
    rounding = float(expected["rounding"][0])
    return near("packed logits", logits_of(engine, batch), expected["packed"], rounding)


def check_gradients(row: Row, folder: Path) -> float:
    """Compare the gradient of every weight."""
    engine = engine_of(row, folder)
    expected = tensors(folder / "gradients")
    _, gradients = full_gradients(engine, batch_of(engine.config.vocab_size))
    rounding = float(reference(folder)["rounding"][1])
    slices, maximum, seen = weight_slices(engine.config), 0.0, set[str]()
    scale = max(float(value.abs().max()) for value in expected.values() if value.numel())
    for name, gradient in gradients.items():
        for piece in slices[name]:
            part = piece.to_tensor(gradient[piece.box])
            right = expected[piece.tensor][piece.part]
            seen.add(piece.tensor)
            difference = float((part - right).abs().max()) / max(1.0, scale)
            maximum = max(maximum, difference)
            if not difference <= max(TOLERANCE, MARGIN * rounding):
                raise WrongError(f"the gradient of {name} differs by {difference:.1e}")
    missing = [name for name, value in expected.items() if name not in seen and value.any()]
    buffers = {piece.tensor for name in set(slices) - set(gradients) for piece in slices[name]}
    missing = [name for name in missing if name not in buffers]
    if missing:
        raise WrongError(f"no gradient of {missing[0]}")
    return maximum


def check_updates(row: Row, folder: Path) -> float:
    """Compare losses, weights and the saved folder of two updates."""
    return two_updates(engine_of(row, folder), folder, folder / "updated")


def two_updates(engine: Engine, folder: Path, saved: Path) -> float:
    """Take two updates on packed rows, save, and compare losses and every saved tensor."""
    batch, expected = batch_of(engine.config.vocab_size), reference(folder)
    rows = len(batch["tokens"]) // engine.data_ranks
    local_rows = slice(engine.data_rank * rows, (engine.data_rank + 1) * rows)
    local = {name: value[local_rows] for name, value in batch.items()}
    updates = [engine.step(local, NextTokenLoss()) for _ in range(UPDATES)]
    difference = near("loss", torch.tensor([update.loss for update in updates]), expected["losses"])
    norm = torch.tensor(updates[0].grad_norm)
    scale = max(1.0, float(expected["norm"]))
    rounding = float(expected["rounding"][1])
    difference = max(
        difference, near("gradient norm", norm / scale, expected["norm"] / scale, rounding)
    )
    engine.save(saved)
    if engine.groups.mesh.get_rank():
        return difference
    actual, reference_tensors = tensors(saved), tensors(folder / "after")
    if actual.keys() != reference_tensors.keys():
        raise WrongError(
            f"saved tensors differ: {sorted(actual.keys() ^ reference_tensors.keys())[:2]}"
        )
    rounding = float(expected["rounding"][2])
    return max(
        [
            difference,
            *(
                near(f"saved {name}", actual[name], reference_tensors[name], rounding)
                for name in reference_tensors
            ),
        ]
    )


def check_load_model(row: Row, folder: Path) -> float:
    """Compare logits of `load_model`."""
    model = load_model(folder / "begin").eval()
    batch = batch_of(read_config(folder / "begin").vocab_size)
    with torch.no_grad():
        expected = reference(folder)
        rounding = float(expected["rounding"][0])
        return near("logits", model(batch["tokens"]), expected["logits"], rounding)


def check_save(row: Row, folder: Path) -> float:
    """Save, and load the folder in transformers."""
    engine_of(row, folder).save(folder / "saved")
    saved, original = tensors(folder / "saved"), tensors(folder / "begin")
    if saved.keys() != original.keys():
        raise WrongError(f"saved tensors differ: {sorted(saved.keys() ^ original.keys())[:2]}")
    changed = [name for name in original if not torch.equal(saved[name], original[name])]
    if changed:
        raise WrongError(f"{changed[0]} is saved with other values")
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder / "saved", attn_implementation="eager").eval()
    batch = batch_of(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        logits = model(batch["tokens"], use_cache=False, return_dict=True).logits
    return near("logits", logits, reference(folder)["logits"])


def check_generate(row: Row, folder: Path) -> float:
    """Compare greedy tokens; ours uses a cache."""
    engine = engine_of(row, folder)
    prompt = batch_of(engine.config.vocab_size)["tokens"][0, :7].tolist()
    (tokens,) = engine.generate(
        [prompt], max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token=None
    )
    expected = reference(folder)["generated"].tolist()
    if list(tokens) != expected:
        raise WrongError(f"generated {list(tokens)}, transformers {expected}")
    return 0.0


def check_align(row: Row, folder: Path) -> float:
    """Open the folder in ms-align, and compare logits."""
    engine: Any = ms_align.start_engine(folder / "begin")
    vocabulary = small_config(row).vocab_size
    batch = {name: value.numpy() for name, value in batch_of(vocabulary).items()}
    logits = engine.evaluate(batch, lambda output, _: output.logits())
    logits = torch.as_tensor(logits)  # its last position has no next token
    expected = reference(folder)
    rounding = float(expected["rounding"][0])
    return near("packed logits", logits, expected["packed"][:, : logits.shape[1]], rounding)


def check_fresh(row: Row, folder: Path) -> float:
    """Train from initial weights, which must have transformers' distribution.

    Tensors that are equal in two models of transformers, such as constants, must be equal here.
    Random matrices must have the same standard deviation within 8 standard errors.
    """
    config = read_config(folder / "begin") if row.native else small_config(row)
    engine = Engine(config, device="cpu", optimizer=SGD)
    engine.save(folder / "fresh")
    update = engine.step(batch_of(engine.config.vocab_size), NextTokenLoss())
    if not 0.0 < update.grad_norm < float("inf"):
        raise WrongError(f"the first gradient norm of fresh weights is {update.grad_norm}")
    if row.native:  # ms-parallel's families have other initializations
        return 0.0
    initial, auto = tensors(folder / "fresh"), transformers.AutoModelForCausalLM
    samples = []
    for seed in range(2):
        torch.manual_seed(seed)
        auto.from_config(small_config(row).settings).save_pretrained(folder / f"fresh-{seed}")
        samples.append(tensors(folder / f"fresh-{seed}"))
    for name, sample in samples[0].items():
        if torch.equal(sample, samples[1][name]):
            near(f"initial {name}", initial[name], sample)
        elif sample.numel() >= 256:
            error = abs(float(initial[name].std() / sample.std()) - 1.0)
            if not error <= 8 / sample.numel() ** 0.5:
                raise WrongError(f"the standard deviation of initial {name} is {error:.0%} off")
    return 0.0


def check_explain(row: Row, folder: Path) -> float:
    """Explain each layout; a refusal must be one line."""
    for layout in LAYOUTS:
        refused = explain(layout, str(folder / "begin")).refused or ""
        if "\n" in refused or len(refused) > MAX_LENGTH:
            raise WrongError(f"explain {layout} gives as its reason {refused[:80]!r}")
    return 0.0


def check_prove(row: Row, folder: Path) -> float:
    """Run the first cases of `prove` in float32, by model type if that is sufficient."""
    cases = {
        0: Case(layout="data=1", processes=1),
        1: Case(layout="data=1", processes=1, microbatch_size=3),
    }
    subject = str(folder / "begin") if row.settings else row.model_type
    job = Job(subject=subject, seed=0, tolerance=2e-6, cases=cases)
    (folder / "prove").mkdir()
    torch.set_default_dtype(torch.float64)
    for index, case in cases.items():
        outcome = run_case(job, index, case, folder / "prove")
        if outcome.refused:
            raise ParallelError(outcome.refused)
        bad = [error.what for error in outcome.found if "no gradient reaches" not in error.what]
        if bad:
            raise WrongError(bad[0])
    return 0.0


def check_layout(layout: str) -> Check:
    """Return a check of two updates under a layout of two processes."""

    def check(row: Row, folder: Path) -> float:
        options = {"microbatch_size": 1} if "pipeline" in layout else {}
        engine = engine_of(row, folder, layout=Layout.parse(layout), **options)
        return two_updates(engine, folder, folder / f"saved-{layout}")

    return check


CHECKS: dict[str, Check] = {
    "engine": check_engine,
    "logits": check_logits,
    "packed": check_packed,
    "gradients": check_gradients,
    "updates": check_updates,
    "load_model": check_load_model,
    "save": check_save,
    "generate": check_generate,
    "align": check_align,
    "fresh": check_fresh,
    "explain": check_explain,
    "prove": check_prove,
    **{layout: check_layout(layout) for layout in LAYOUTS},
}


# Processes, forked after torch was imported.


def judge(check: Check, row: Row, folder: Path) -> Cell:
    """Run a check and return its cell."""
    try:
        return Cell(state="right", apart=check(row, folder))
    except WrongError as error:
        return Cell(state="wrong", why=str(error))
    except REFUSALS as error:
        line = str(error)
        state = "refused" if "\n" not in line and len(line) < MAX_LENGTH else "raw"
        return Cell(state=state, why=line)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "ms_" in frame.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        text = " ".join(str(error).split())[:160]
        return Cell(state="raw", why=f"{type(error).__name__}: {text} ({where})")


def start(
    checks: Mapping[str, Check], row: Row, folder: Path, environment: Mapping[str, str]
) -> tuple[int, Path]:
    """Fork a process that runs checks in order and appends their cells to a file."""
    results = Path(tempfile.mkstemp(dir=folder, suffix=".cells")[1])
    child = os.fork()
    if child:
        return child, results
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        torch.set_num_threads(1)
        for name, check in checks.items():
            cell = judge(check, row, folder)
            with results.open("a") as file:
                file.write(json.dumps([name, asdict(cell)]) + "\n")
    finally:
        os._exit(0)


def collect(children: Sequence[tuple[int, Path]], limit_s: float) -> dict[str, Cell]:
    """Wait for processes, and kill them if they write no cell for too long.

    Returns:
        The worst cell of each check that all processes have finished.
    """
    running, size, until = dict(children), 0, monotonic() + limit_s
    while running and monotonic() < until:
        for child in list(running):
            if os.waitpid(child, os.WNOHANG)[0]:
                del running[child]
        written = sum(answer.stat().st_size for _, answer in children)
        if written > size:
            size, until = written, monotonic() + limit_s
        sleep(0.02)
    for child in running:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    answers = [dict(map(json.loads, answer.read_text().splitlines())) for _, answer in children]
    order = ("raw", "wrong", "refused", "right")
    return {
        name: min(
            (Cell(**answer[name]) for answer in answers), key=lambda cell: order.index(cell.state)
        )
        for name in answers[0]
        if all(name in answer for answer in answers)
    }


def run_checks(
    checks: Mapping[str, Check], row: Row, folder: Path, limit_s: float, processes: int = 1
) -> dict[str, Cell]:
    """Run checks in a process, or in the ranks of a job, and restart after a crash."""
    cells: dict[str, Cell] = {}
    remaining = dict(checks)
    while remaining:
        environments: list[dict[str, str]] = [{}]
        if processes > 1:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environments = [
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
                for rank in range(processes)
            ]
        cells |= collect([start(remaining, row, folder, env) for env in environments], limit_s)
        remaining = {name: check for name, check in remaining.items() if name not in cells}
        if remaining:
            name = next(iter(remaining))
            del remaining[name]
            cells[name] = Cell(state="raw", why=f"the process died or was silent for {limit_s:g} s")
    return cells


def load_class(model_type: str) -> None:
    """Import a model type's code once for the processes of all its checks."""
    try:
        settings = transformers.AutoConfig.for_model(model_type).get_text_config()
        transformers.AutoModelForCausalLM._model_mapping[type(settings)]
    except Exception:  # the checks hit the same error and report it
        return


def sweep_row(row: Row, checks: Sequence[str], limit_s: float) -> dict[str, Cell]:
    """Run the checks of a row."""
    torch.set_num_threads(1)
    load_class(row.model_type)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(names: Mapping[str, Check], processes: int = 1) -> dict[str, Cell]:
            return run_checks(names, row, folder, limit_s, processes)

        prepared = run({"weights": prepare_weights, "engine": check_engine})
        if prepared["weights"].state != "right":
            # No small model of transformers as a reference; ours may still refuse with one line.
            built = run({"build": check_build})["build"]
            unchecked = Cell(state="unchecked", why=prepared["weights"].why)
            return {"engine": unchecked if built.state == "right" else built}
        cells = {"engine": prepared["engine"]}
        if cells["engine"].state != "right":
            return cells
        computed = run({"reference": prepare_reference})["reference"]
        if computed.state != "right":
            return {"engine": Cell(state="unchecked", why=computed.why)}
        selected = [name for name in row.checks if name in checks and name != "engine"]
        separate = [name for name in selected if name in ("explain", "prove")]
        layouts = [name for name in selected if name in LAYOUTS]
        together = [name for name in selected if name not in (*separate, *layouts)]
        for names, processes in (
            (together, 1),
            *(([name], 1) for name in separate),
            (layouts, PROCESSES),
        ):
            cells |= run({name: CHECKS[name] for name in names}, processes)
        return {name: cells[name] for name in CHECKS if name in cells}


# The results file, and the pages written from it.


def read_results(file: Path | None) -> dict[str, dict[str, Any]]:
    """Read the cells of finished rows, by label and check."""
    if file is None or not file.exists():
        return {}
    document: dict[str, Any] = json.loads(file.read_text())
    return dict(document["cells"])


def write_results(file: Path, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Write cells with the versions of torch and transformers."""
    document = {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "cells": dict(sorted(cells.items())),
    }
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(document, indent=1))
    new.replace(file)


def is_supported(row: Mapping[str, Any]) -> bool:
    """Return whether an engine was built from the folder."""
    return bool(row["engine"]["state"] == "right")


MEANINGS = {
    "engine": ("the engine is built from a folder", "从文件夹构建引擎"),
    "logits": ("logits of whole rows", "整行的 logits"),
    "packed": (
        "logits of packed documents, against each document alone",
        "打包文档的 logits，与单独计算每个文档比较",
    ),
    "gradients": ("gradient of every weight", "每个权重的梯度"),
    "updates": (
        "losses, gradient norm and saved weights of two updates",
        "两次更新的损失、梯度范数与保存的权重",
    ),
    "load_model": ("logits of `load_model`", "`load_model` 的 logits"),
    "save": (
        "saved weights are unchanged, and the folder opens in transformers",
        "保存的权重不变，且 transformers 能打开该文件夹",
    ),
    "generate": ("greedy tokens, with a cache", "带缓存的贪心生成"),
    "align": ("logits of `ms_align.start_engine`", "`ms_align.start_engine` 的 logits"),
    "fresh": (
        "fresh weights: equal constants, equal spread of drawn weights",
        "全新权重：常数相同，随机权重的标准差相同",
    ),
    "explain": ("`explain` answers for each layout", "`explain` 对每种布局给出答案"),
    "prove": (
        "`prove` finds no difference in its first cases",
        "`prove` 的前几个用例没有差异",
    ),
    **{
        layout: (f"`updates` on two processes, `{layout}`", f"两个进程上的 `updates`，`{layout}`")
        for layout in LAYOUTS
    },
}
"""Meaning of each check, in English and Chinese."""


ALL_FOREIGN = ("all with the code `transformers`", "所有使用 `transformers` 代码的模型")
"""Names a list of all model types that transformers' code runs, in English and Chinese."""


def plain_reason(model_type: str, reason: str) -> str:
    """Remove names of classes and layers from a refusal, so that equal reasons can be grouped."""
    text = re.sub(r"\bmodel\.layers\.[\w.*]+", "a layer", reason)
    names = r"\b(?:[A-Z]\w*(?:ForCausalLM|HeadModel|Attention|MLP|Layer|Decoder)|Block|\w+Block)\b"
    text = re.sub(names, "this model", text)
    text = re.sub(
        r"(cannot split|cannot cut|not supported for) \w+\b(?! model)", r"\1 this model", text
    )
    text = re.sub(rf"\b{re.escape(model_type)}(_text)?\b", "this model", text)
    text = text.replace("this this model", "this model").replace("<", "&lt;").replace("|", "\\|")
    text = re.sub(r"\bits \d+ layers", "its layers", text)
    return text if re.match(r"[\w.]+[=.]", text) else text[0].upper() + text[1:]


def reasons_table(
    refusals: Sequence[tuple[str, str, str]], rows: Mapping[str, Row]
) -> list[tuple[str, str]]:
    """Group refusals (label, check, reason) by reason; return cells of reasons and of labels."""
    groups: dict[tuple[str, str], list[str]] = {}
    for label, check, reason in refusals:
        model_type = rows[label].model_type
        groups.setdefault((check, plain_reason(model_type, reason)), []).append(f"`{label}`")
    order = list(CHECKS)
    merged: dict[tuple[str, str], list[str]] = {}
    for (check, reason), labels in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]), item[0][1])
    ):
        merged.setdefault((reason, ", ".join(labels)), []).append(check)
    return [
        (
            reason
            if checks[0] in ("engine", *LAYOUTS)
            else f"{', '.join(f'`{check}`' for check in checks)}: {reason}",
            labels,
        )
        for (reason, labels), checks in merged.items()
    ]


def write_pages(file: Path, page: Path) -> None:
    """Write the English page of a results file, and the Chinese page next to it."""
    document = json.loads(file.read_text())
    rows = all_rows()
    cells: dict[str, dict[str, Any]] = {
        label: document["cells"][label] for label in rows if label in document["cells"]
    }
    taken = {label: row for label, row in cells.items() if is_supported(row)}
    refused = {label: row for label, row in cells.items() if row["engine"]["state"] == "refused"}
    other = {
        label: row for label, row in cells.items() if label not in taken and label not in refused
    }
    ours = sum(rows[label].native for label in taken)
    states = Counter(cell["state"] for row in cells.values() for cell in row.values())
    missing = sum(len(set(rows[label].checks) - set(row)) for label, row in taken.items())
    missing += len(rows) - len(cells)
    counts = (
        (len({rows[label].model_type for label in cells}), "model types", "模型类型"),
        (len({rows[label].model_type for label in taken}), "taken", "接受"),
        (len({rows[label].model_type for label in refused}), "refused", "拒绝"),
        (
            len({rows[label].model_type for label in other}),
            "not compared: transformers runs no small model",
            "未比较：transformers 不能运行小模型",
        ),
        (
            len(cells),
            f"models compared: types run by both ms-parallel's own code ({ours}) and"
            " transformers' code count twice, and a few types have a variant",
            f"比较的模型：有 ms-parallel 自己代码的类型（{ours} 种）与 transformers 代码各计一次，"
            "少数类型另有变体",
        ),
        (states["right"], "checks right", "正确的检查"),
        (
            states["refused"] - len(refused),
            "checks refused with one line, of models that are taken",
            "已接受的模型中，用一行文字拒绝的检查",
        ),
        (states["wrong"], "checks with a wrong number", "数值错误的检查"),
        (states["raw"], "raw exceptions", "原始异常"),
        (missing, "checks not run", "未运行的检查"),
    )
    versions = f"transformers {document['transformers']}, torch {document['torch']}"

    def refusals(table: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
        return [
            (label, name, cell["why"])
            for label, row in table.items()
            for name, cell in row.items()
            if cell["state"] != "right"
        ]

    def supported_lines() -> list[str]:
        lines = []
        for label, row in taken.items():
            right = [name for name, cell in row.items() if cell["state"] == "right"]
            layouts = ", ".join(name for name in LAYOUTS if name in right)
            others = sum(name not in LAYOUTS for name in right)
            total = sum(name not in LAYOUTS for name in row)
            code = "ms-parallel" if rows[label].native else "transformers"
            lines.append(f"| `{label}` | {code} | {others} of {total} | {layouts} |")
        return lines

    def table(header: str, lines: Sequence[str]) -> list[str]:
        return [header, "|" + "---|" * (header.count("|") - 1), *lines]

    theirs = ", ".join(f"`{label}`" for label in taken if not rows[label].native)

    def group_refusals(refused_cells: list[tuple[str, str, str]], every: str) -> list[str]:
        return [
            f"| {why} | {every if types == theirs else types} |"
            for why, types in reasons_table(refused_cells, rows)
        ]

    english = [
        "# Models of transformers",
        "",
        "`nox -s sweep` builds every causal language model of transformers at a small size with"
        " random weights, and compares ms-parallel and ms-align with transformers in float32. A"
        f" model is taken, or refused with one line. Results with {versions} on CPU:",
        "",
        *table("| count | of |", [f"| {number} | {what} |" for number, what, _ in counts]),
        "",
        "A check is right if values differ by at most 1e-5 of the largest one (or of 1, if that is"
        " larger). Where transformers' float32 itself is further from its float64, 3 times that"
        " distance is allowed.",
        "",
        "## Checks",
        "",
        *table("| check | compares |", [f"| `{name}` | {MEANINGS[name][0]} |" for name in CHECKS]),
        "",
        "## Models that are taken",
        "",
        "`Engine(folder)` runs ms-parallel's own code where it has the family, else transformers'"
        " code. Checks other than layouts are counted; layouts that are right are listed.",
        "",
        *table("| model type | code | checks right | layouts right |", supported_lines()),
        "",
        "## Refused checks of these models",
        "",
        *table("| reason | model types |", group_refusals(refusals(taken), ALL_FOREIGN[0])),
        "",
        "## Models that are refused",
        "",
        *table(
            "| reason | model types |",
            group_refusals(refusals(refused), ALL_FOREIGN[0]),
        ),
    ]
    chinese = [
        "# transformers 的模型",
        "",
        "`nox -s sweep` 用随机权重构建 transformers 的每一种因果语言模型（小尺寸），并在 float32"
        " 下把 ms-parallel 和 ms-align 的结果与 transformers 比较。每种模型要么被接受，"
        f"要么用一行文字拒绝。结果（{versions}，CPU）：",
        "",
        *table("| 数量 | 含义 |", [f"| {number} | {what} |" for number, _, what in counts]),
        "",
        "差异不超过最大值（小于 1 时取 1）的 1e-5 即为正确；"
        "若 transformers 自身 float32 与 float64 的差更大，则允许该差的 3 倍。",
        "",
        "## 检查项",
        "",
        *table("| 检查 | 比较内容 |", [f"| `{name}` | {MEANINGS[name][1]} |" for name in CHECKS]),
        "",
        "## 接受的模型",
        "",
        "`Engine(folder)` 对已有模型族使用 ms-parallel 自己的代码，其余使用 transformers 的代码。"
        "布局之外的检查给出数量，正确的布局逐一列出。",
        "",
        *table("| 模型类型 | 代码 | 正确的检查 | 正确的布局 |", supported_lines()),
        "",
        "## 这些模型中被拒绝的检查",
        "",
        *table("| 原因 | 模型类型 |", group_refusals(refusals(taken), ALL_FOREIGN[1])),
        "",
        "## 拒绝的模型",
        "",
        *table("| 原因 | 模型类型 |", group_refusals(refusals(refused), ALL_FOREIGN[1])),
    ]
    if other:
        english += [
            "",
            "## Models that are not compared",
            "",
            *table("| reason of transformers | model types |", group_refusals(refusals(other), "")),
        ]
        chinese += [
            "",
            "## 未比较的模型",
            "",
            *table("| transformers 的原因 | 模型类型 |", group_refusals(refusals(other), "")),
        ]
    page.write_text("\n".join(english) + "\n")
    page.with_suffix(".zh.md").write_text("\n".join(chinese) + "\n")


def main() -> int:
    """Sweep, and print or write the table; exit with 1 if a cell is wrong or raw."""
    rows = all_rows()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labels", nargs="*", metavar="ROW", help="model types; all by default")
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--coarse", action="store_true", help="leave out layouts and prove")
    parser.add_argument("--json", type=Path, help="file for the cells; finished rows are kept")
    parser.add_argument("--page", type=Path, help="write the pages of --json, and run nothing")
    parser.add_argument("--workers", type=int, default=2, help="rows at a time")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    options = parser.parse_args()
    if options.page is not None:
        if options.json is None:
            parser.error("--page needs --json, the results file")
        write_pages(options.json, options.page)
        return 0
    unknown = [label for label in options.labels if label not in rows]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a row; rows: {', '.join(rows)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    checks = COARSE if options.coarse else options.checks
    table = read_results(options.json)
    labels = options.labels or [label for label in rows if label not in table]
    fork = get_context("fork")
    with ProcessPoolExecutor(options.workers, mp_context=fork) as pool:
        running = {
            pool.submit(sweep_row, rows[label], checks, options.timeout_s): label
            for label in labels
        }
        for done in as_completed(running):
            label, cells = running[done], done.result()
            before = table.get(label, {}) if cells["engine"].state == "right" else {}
            table[label] = {**before, **{name: asdict(cell) for name, cell in cells.items()}}
            print(f"{label}: {dict(Counter(cell.state for cell in cells.values()))}", flush=True)
            for name, cell in cells.items():
                if cell.state != "right":
                    print(f"    {name}: {cell.state}: {cell.why[:300]}", flush=True)
            if options.json:
                write_results(options.json, table)
    bad = [
        1 for row in table.values() for cell in row.values() if cell["state"] in ("wrong", "raw")
    ]
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
