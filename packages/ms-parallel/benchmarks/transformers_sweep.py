"""Compare every causal language model of the installed transformers with our engine.

Each class is built at a small size with random weights. Everything that the engine takes is
compared with transformers in float32, each check in a process of its own, so that a crash or a hang
is one cell of the table. Run it with `nox -s sweep`, or for some classes:

    python benchmarks/transformers_sweep.py llama qwen3_next --checks logits gradients
"""

# ruff: noqa: RUF001 - one of its pages is Chinese

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
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
from ms_parallel.models.foreign.config import causal_classes
from ms_parallel.models.foreign.small import small_model
from ms_parallel.models.registry import read_config, weight_slices
from ms_parallel.proof.gradients import whole_gradients
from ms_parallel.proof.records import Case, Job
from ms_parallel.proof.worker import run_case

ROWS, LENGTHS, LAYERS = 2, ((17, 7), (5, 19)), 4
"""Rows of a batch, and the documents packed into each."""
TOLERANCE = 1e-5
"""Allowed difference, as a share of the largest value, at least 1."""
MARGIN = 3
"""Allowed difference as a multiple of transformers' own rounding error, against float64."""
SPREAD = 0.2
"""Standard deviation of random matrices."""
RATE, UPDATES = 0.01, 2
NEW_TOKENS = 6
TIMEOUT_S = 240.0
LAYOUTS = ("data=2", "tensor=2", "pipeline=2", "context=2", "data=2,expert=2")
PROCESSES = 2
UNSET: Mapping[str, Mapping[str, int]] = {"deepseek_v2": {"num_experts_per_tok": 2}}
"""Settings without which transformers' own default does not run."""
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
class Cell:
    """Result of one check of one class."""

    state: str
    """`right`, `refused`, `wrong`, `raw` (a foreign exception) or `unchecked` (no reference)."""
    why: str = ""
    apart: float = 0.0


class WrongError(Exception):
    """A value differs from the reference."""


def near(name: str, found: Tensor, expected: Tensor, rounding: float = 0.0) -> float:
    """Return the difference, as a share of the largest expected value or 1.

    Args:
        name: name of the value in messages.
        found: value of ms-parallel.
        expected: value of transformers in float32.
        rounding: difference of transformers' float32 from its float64, as such a share.

    Raises:
        WrongError: it is above the tolerance, and above `MARGIN` times the rounding.
    """
    if found.shape != expected.shape:
        raise WrongError(f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.abs().max()))
    apart = float((found.float() - expected.float()).abs().max()) / scale
    if not apart <= max(TOLERANCE, MARGIN * rounding):
        raise WrongError(f"{name} differs by {apart:.1e}")
    return apart


# The reference: transformers alone, in eager attention and float32.


def batch_of(vocabulary: int) -> dict[str, Tensor]:
    """Draw two packed rows, (B, S)."""
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


def alone(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute logits (B, S, V) of each document of a batch by itself."""
    rows = []
    for tokens, lengths in zip(batch["tokens"], LENGTHS, strict=True):
        parts = [
            model(part[None], use_cache=False, return_dict=True).logits[0]
            for part in tokens.split(list(lengths))
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def mean_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean loss over all targets, each document alone."""
    return cross_entropy(alone(model, batch).flatten(0, 1), batch["targets"].flatten())


@torch.no_grad()
def scatter(model: Any, seed: int) -> None:
    """Draw all weights and buffers that count, so that each of them shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        path, _, own = name.rpartition(".")
        if own in model.get_submodule(path)._non_persistent_buffers_set:
            continue
        if not value.is_floating_point():
            continue
        drawn = torch.randn(value.shape, generator=generator)
        if value.ndim > 1 and isinstance(value, torch.nn.Parameter):
            value.copy_(drawn * SPREAD)
        else:
            value.add_(drawn * 0.1)


def small_config(kind: str) -> TransformersModel:
    """Return the small configuration of a model type."""
    document = {"model_type": kind, **UNSET.get(kind, {})}
    return small_model(TransformersModel(document), layers=LAYERS, spread=SPREAD)


def random_model(kind: str) -> Any:
    """Build transformers' own small model of a type with random weights."""
    settings = small_config(kind).settings
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    model = model.eval()
    scatter(model, 1)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def prepare_weights(kind: str, folder: Path) -> float:
    """Write the folder `begin` of a model type."""
    random_model(kind).save_pretrained(folder / "begin")
    return 0.0


def prepare_reference(kind: str, folder: Path) -> float:
    """Write what transformers computes from the weights of `begin`."""
    model = random_model(kind)
    batch = batch_of(model.config.get_text_config().vocab_size)
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        kept["logits"] = model(batch["tokens"], use_cache=False, return_dict=True).logits
        kept["packed"] = alone(model, batch)
        text = batch["tokens"][:1, :7]
        for _ in range(NEW_TOKENS):
            logits = model(text, use_cache=False, return_dict=True).logits
            text = torch.cat((text, logits[:, -1:].argmax(-1)), 1)
        kept["generated"] = text[0, 7:]
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
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
                kept["norm"] = torch.as_tensor(total).sqrt()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
    kept["losses"] = torch.stack(losses)
    model.save_pretrained(folder / "after")
    kept["rounding"] = torch.tensor(rounding_of(random_model(kind), batch))
    save_file({name: each.contiguous() for name, each in kept.items()}, folder / "reference")
    # Gradients by the names of tensors on disk: write them as if they were the weights.
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
    """Compare transformers' packed logits and gradients in float32 with those in float64."""
    results = []
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            model = model.to(dtype)
            model.zero_grad()
            mean_loss(model, batch).backward()
            grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                results.append([[alone(model, batch).double()], grads])
    except RuntimeError:  # some models cannot run in float64; then the plain tolerance holds
        return [0.0, 0.0]
    finally:
        torch.set_default_dtype(default)
    return [
        max(float((a - b).abs().max()) for a, b in zip(low, high, strict=True))
        / max(1.0, *(float(b.abs().max()) for b in high))
        for low, high in zip(*results, strict=True)
    ]


def reference(folder: Path) -> dict[str, Tensor]:
    """Read what transformers computed."""
    return load_file(folder / "reference")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a model's folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


# The checks, each in a process of its own.


def engine_of(folder: Path, **options: Any) -> Engine:
    """Start an engine from the small folder."""
    return Engine(TransformersModel(folder / "begin"), device="cpu", optimizer=SGD, **options)


def plain(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave the documents out."""
    return {name: batch[name] for name in ("tokens", "targets")}


def logits_of(engine: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute logits by an engine."""
    return engine.evaluate(batch, lambda output, _: output.logits())


def check_engine(kind: str, folder: Path) -> float:
    """Build an engine: decides whether a class is taken."""
    engine_of(folder)
    return 0.0


def check_build(kind: str, folder: Path) -> float:
    """Build an engine with fresh weights, where there is no folder."""
    Engine(small_config(kind), device="cpu")
    return 0.0


def check_logits(kind: str, folder: Path) -> float:
    """Compare logits of whole rows."""
    engine, expected = engine_of(folder), reference(folder)
    batch = plain(batch_of(engine.config.vocab_size))
    rounding = float(expected["rounding"][0])
    return near("logits", logits_of(engine, batch), expected["logits"], rounding)


def check_packed(kind: str, folder: Path) -> float:
    """Compare packed documents with each document alone."""
    engine, expected = engine_of(folder), reference(folder)
    batch = batch_of(engine.config.vocab_size)
    rounding = float(expected["rounding"][0])
    return near("packed logits", logits_of(engine, batch), expected["packed"], rounding)


def check_gradients(kind: str, folder: Path) -> float:
    """Compare the gradient of every weight."""
    engine = engine_of(folder)
    expected = tensors(folder / "gradients")
    _, found = whole_gradients(engine, batch_of(engine.config.vocab_size))
    rounding = float(reference(folder)["rounding"][1])
    slices, most, seen = weight_slices(engine.config), 0.0, set[str]()
    scale = max(float(each.abs().max()) for each in expected.values() if each.numel())
    for name, gradient in found.items():
        for piece in slices[name]:
            part = piece.to_tensor(gradient[piece.box])
            right = expected[piece.tensor][piece.part]
            seen.add(piece.tensor)
            apart = float((part - right).abs().max()) / max(1.0, scale)
            most = max(most, apart)
            if not apart <= max(TOLERANCE, MARGIN * rounding):
                raise WrongError(f"the gradient of {name} differs by {apart:.1e}")
    missing = [name for name, each in expected.items() if name not in seen and each.any()]
    buffers = {piece.tensor for name in set(slices) - set(found) for piece in slices[name]}
    missing = [name for name in missing if name not in buffers]
    if missing:
        raise WrongError(f"no gradient of {missing[0]}")
    return most


def check_updates(kind: str, folder: Path) -> float:
    """Compare losses and weights of two updates, and what is saved."""
    return two_updates(engine_of(folder), folder, folder / "updated")


def two_updates(engine: Engine, folder: Path, saved: Path) -> float:
    """Take two updates on packed rows, save, and compare losses and every saved tensor."""
    batch, expected = batch_of(engine.config.vocab_size), reference(folder)
    rows = len(batch["tokens"]) // engine.data_ranks
    own = slice(engine.data_rank * rows, (engine.data_rank + 1) * rows)
    mine = {name: value[own] for name, value in batch.items()}
    made = [engine.step(mine, NextTokenLoss()) for _ in range(UPDATES)]
    most = near("loss", torch.tensor([each.loss for each in made]), expected["losses"])
    norm = torch.tensor(made[0].grad_norm)
    scale = max(1.0, float(expected["norm"]))
    most = max(most, near("gradient norm", norm / scale, expected["norm"] / scale))
    engine.save(saved)
    if engine.groups.mesh.get_rank():
        return most
    found, right = tensors(saved), tensors(folder / "after")
    if found.keys() != right.keys():
        raise WrongError(f"saved tensors differ: {sorted(found.keys() ^ right.keys())[:2]}")
    return max([most, *(near(f"saved {name}", found[name], right[name]) for name in right)])


def check_load_model(kind: str, folder: Path) -> float:
    """Compare logits of `load_model`."""
    model = load_model(folder / "begin").eval()
    batch = batch_of(read_config(folder / "begin").vocab_size)
    with torch.no_grad():
        expected = reference(folder)
        rounding = float(expected["rounding"][0])
        return near("logits", model(batch["tokens"]), expected["logits"], rounding)


def check_save(kind: str, folder: Path) -> float:
    """Save, and open the folder in transformers."""
    engine_of(folder).save(folder / "saved")
    found, right = tensors(folder / "saved"), tensors(folder / "begin")
    if found.keys() != right.keys():
        raise WrongError(f"saved tensors differ: {sorted(found.keys() ^ right.keys())[:2]}")
    changed = [name for name in right if not torch.equal(found[name], right[name])]
    if changed:
        raise WrongError(f"{changed[0]} is saved with other values")
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder / "saved", attn_implementation="eager").eval()
    batch = batch_of(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        logits = model(batch["tokens"], use_cache=False, return_dict=True).logits
    return near("logits", logits, reference(folder)["logits"])


def check_generate(kind: str, folder: Path) -> float:
    """Compare greedy tokens, which ours computes with a cache."""
    engine = engine_of(folder)
    prompt = batch_of(engine.config.vocab_size)["tokens"][0, :7].tolist()
    (made,) = engine.generate([prompt], max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token=None)
    expected = reference(folder)["generated"].tolist()
    if list(made) != expected:
        raise WrongError(f"generated {list(made)}, transformers {expected}")
    return 0.0


def check_align(kind: str, folder: Path) -> float:
    """Open the folder in ms-align, and compare logits."""
    engine: Any = ms_align.start_engine(folder / "begin")
    vocabulary = small_config(kind).vocab_size
    batch = {name: value.numpy() for name, value in batch_of(vocabulary).items()}
    logits = engine.evaluate(batch, lambda output, _: output.logits())
    logits = torch.as_tensor(logits)  # its last position has no next token
    expected = reference(folder)
    rounding = float(expected["rounding"][0])
    return near("packed logits", logits, expected["packed"][:, : logits.shape[1]], rounding)


def check_fresh(kind: str, folder: Path) -> float:
    """Train from fresh weights: the first gradient is finite and not 0, for every weight."""
    engine = Engine(small_config(kind), device="cpu", optimizer=SGD)
    update = engine.step(batch_of(engine.config.vocab_size), NextTokenLoss())
    if not update.grad_norm > 0.0:
        raise WrongError(f"the first gradient norm of fresh weights is {update.grad_norm}")
    return 0.0


def check_explain(kind: str, folder: Path) -> float:
    """Ask whether it trains under two data ranks."""
    explain("data=2", str(folder / "begin"))
    return 0.0


def check_prove(kind: str, folder: Path) -> float:
    """Run the first cases of `prove` by the model type's name, in float64."""
    torch.set_default_dtype(torch.float64)
    cases = {
        0: Case(layout="data=1", processes=1),
        1: Case(layout="data=1", processes=1, microbatch_size=3),
    }
    job = Job(subject=kind, seed=0, tolerance=2e-6, cases=cases)
    (folder / "prove").mkdir()
    for number, case in cases.items():
        outcome = run_case(job, number, case, folder / "prove")
        if outcome.refused:
            raise ParallelError(outcome.refused)
        bad = [each.what for each in outcome.found if "no gradient reaches" not in each.what]
        if bad:
            raise WrongError(bad[0])
    return 0.0


def check_layout(layout: str) -> Callable[[str, Path], float]:
    """Return the check of two updates under a layout of two processes."""

    def check(kind: str, folder: Path) -> float:
        options = {"microbatch_size": 1} if "pipeline" in layout else {}
        engine = engine_of(folder, layout=Layout.parse(layout), **options)
        return two_updates(engine, folder, folder / f"saved-{layout}")

    return check


CHECKS: dict[str, Callable[[str, Path], float]] = {
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


# Processes: one per check, or two where there is a layout, forked from one that imported torch.


def judge(check: Callable[[str, Path], float], kind: str, folder: Path) -> Cell:
    """Run a check and say how it ended."""
    try:
        return Cell(state="right", apart=check(kind, folder))
    except WrongError as error:
        return Cell(state="wrong", why=str(error))
    except REFUSALS as error:
        line = str(error)
        state = "refused" if "\n" not in line and len(line) < 600 else "raw"
        return Cell(state=state, why=line)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)
        ours = [at for at in place if "ms_" in at.filename] or place
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        text = " ".join(str(error).split())[:160]
        return Cell(state="raw", why=f"{type(error).__name__}: {text} ({where})")


def run(
    act: Callable[[], Cell], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, Path]:
    """Fork a process that writes its cell to a file."""
    answer = Path(tempfile.mkstemp(dir=folder, suffix=".cell")[1])
    child = os.fork()
    if child:
        return child, answer
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment or {})
        torch.set_num_threads(1)
        cell = act()
        answer.write_text(json.dumps(asdict(cell)))
    finally:
        os._exit(0)


def collect(children: Sequence[tuple[int, Path]], limit_s: float) -> Cell:
    """Wait for processes; the worst of their cells."""
    until, left = monotonic() + limit_s, dict(children)
    while left and monotonic() < until:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                del left[child]
        sleep(0.02)
    for child in left:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if left:
        return Cell(state="raw", why=f"no result in {limit_s:.0f} s")
    texts = [answer.read_text() for _, answer in children]
    cells = [
        Cell(**json.loads(text)) if text else Cell(state="raw", why="the process died")
        for text in texts
    ]
    order = ("raw", "wrong", "refused", "right")
    return min(cells, key=lambda cell: order.index(cell.state))


def load_class(kind: str) -> None:
    """Import a model type's code, so that the processes of its checks need not."""
    try:
        settings = transformers.AutoConfig.for_model(kind).get_text_config()
        transformers.AutoModelForCausalLM._model_mapping[type(settings)]
    except Exception:  # its checks meet it again, and report it
        return


def sweep_class(kind: str, checks: Sequence[str], limit_s: float) -> dict[str, Cell]:
    """Run all checks of one model type."""
    cells: dict[str, Cell] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def alone(act: Callable[[str, Path], float]) -> Cell:
            return collect([run(lambda: judge(act, kind, folder), folder)], limit_s)

        written = alone(prepare_weights)
        if written.state != "right":
            # Transformers has no small model to compare with; ours may still refuse it in a line.
            built = alone(check_build)
            unchecked = Cell(state="unchecked", why=written.why)
            return {"engine": unchecked if built.state == "right" else built}
        cells["engine"] = alone(check_engine)
        if cells["engine"].state != "right":
            return cells
        computed = alone(prepare_reference)
        if computed.state != "right":
            return {"engine": Cell(state="unchecked", why=computed.why)}
        for check in checks:
            if check == "engine":
                continue
            act = CHECKS[check]
            if "=" not in check:
                ended = [run(lambda act=act: judge(act, kind, folder), folder)]
            else:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                ended = [
                    run(
                        lambda act=act: judge(act, kind, folder),
                        folder,
                        {
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "WORLD_SIZE": str(PROCESSES),
                            "LOCAL_WORLD_SIZE": str(PROCESSES),
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(store.port),
                            "TORCHELASTIC_USE_AGENT_STORE": "True",
                        },
                    )
                    for rank in range(PROCESSES)
                ]
            cells[check] = collect(ended, limit_s)
    return cells


# The results file, and the pages made from it.


def read_results(file: Path | None) -> dict[str, dict[str, Any]]:
    """Read cells of finished classes, by model type and check."""
    if file is None or not file.exists():
        return {}
    document: dict[str, Any] = json.loads(file.read_text())
    return dict(document["cells"])


def write_results(file: Path, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Write cells with the date and the versions that they were computed with."""
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "cells": dict(sorted(cells.items())),
    }
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(document, indent=1))
    new.replace(file)


def is_taken(row: Mapping[str, Any]) -> bool:
    """Return whether an engine was built from the folder."""
    return bool(row["engine"]["state"] == "right")


def results_table(cells: Mapping[str, Mapping[str, Any]], header: str) -> list[str]:
    """Write one line per model type: number of right checks, and all other cells with reasons."""
    lines = [header, "|---|---|---|---|"]
    for kind, row in cells.items():
        others = [
            f"{name}: {cell['state']}: {cell['why']}" if name != "engine" else cell["why"]
            for name, cell in row.items()
            if cell["state"] != "right"
        ]
        right = sum(cell["state"] == "right" for cell in row.values())
        state = "taken" if is_taken(row) else row["engine"]["state"]
        text = "<br>".join(line.replace("|", "\\|").replace("<", "&lt;") for line in others)
        lines.append(f"| `{kind}` | {state} | {right} | {text} |")
    return lines


def write_pages(file: Path, page: Path) -> None:
    """Write the English page of a results file, and the Chinese one next to it."""
    document = json.loads(file.read_text())
    cells: dict[str, dict[str, Any]] = document["cells"]
    taken = [row for row in cells.values() if is_taken(row)]
    ran = [name for name in CHECKS if any(name in row for row in taken)]
    missing = [name for name in CHECKS if name not in ran]
    states = Counter(cell["state"] for row in cells.values() for cell in row.values())
    engines = Counter(row["engine"]["state"] for row in cells.values())
    left = sorted(set(causal_classes()) - set(cells))
    names = ", ".join(f"`{name}`" for name in ran)
    absent = ", ".join(f"`{name}`" for name in missing)
    rest = ", ".join(f"`{name}`" for name in left)
    checked = states["right"] + states["wrong"]
    english = [
        "# Models of transformers",
        "",
        "`nox -s sweep` builds every causal language model of transformers at a small size with"
        " random weights and compares ms-parallel and ms-align with transformers in float32. A"
        " model is taken, or refused with one line.",
        "",
        f"Run on {document['date']} with transformers {document['transformers']} and torch"
        f" {document['torch']}, on CPU.",
        "",
        "| count | value |",
        "|---|---|",
        f"| model types | {len(cells)} |",
        f"| taken | {engines['right']} |",
        f"| refused | {engines['refused']} |",
        f"| unchecked (transformers does not run the small model) | {engines['unchecked']} |",
        f"| cells compared with transformers | {checked} |",
        f"| cells refused, of models that are taken | {states['refused'] - engines['refused']} |",
        f"| raw exceptions | {states['raw']} |",
        f"| wrong | {states['wrong']} |",
        "",
        f"Cells that ran: {names}.",
        *(["", f"Cells not yet run for all types: {absent}."] if missing else []),
        *(["", f"Model types not yet run: {rest}."] if left else []),
        "",
        "A cell is right if it differs by at most 1e-5 of the largest value, or of 1 if that is"
        " larger; or by at most 3 times the rounding error of transformers in float32 against"
        " float64, if that is more.",
        "",
        *results_table(cells, "| model type | engine | right cells | refusals and differences |"),
    ]
    chinese = [
        "# transformers 的模型",
        "",
        "`nox -s sweep` 用随机权重构建 transformers 的每一种因果语言模型（小尺寸），并在 float32"
        " 下把 ms-parallel 和 ms-align 的结果与 transformers 比较。每种模型要么被接受（taken），"
        "要么用一行文字说明拒绝的原因（refused）。",
        "",
        f"运行日期：{document['date']}；transformers {document['transformers']}，torch"
        f" {document['torch']}，CPU。",
        "",
        "| 计数 | 值 |",
        "|---|---|",
        f"| 模型类型 | {len(cells)} |",
        f"| 接受 | {engines['right']} |",
        f"| 拒绝 | {engines['refused']} |",
        f"| 未检查（transformers 不能运行小模型） | {engines['unchecked']} |",
        f"| 与 transformers 比较过的单元 | {checked} |",
        f"| 已接受模型中被拒绝的单元 | {states['refused'] - engines['refused']} |",
        f"| 原始异常 | {states['raw']} |",
        f"| 错误 | {states['wrong']} |",
        "",
        f"已运行的单元：{names}。",
        *(["", f"尚未对所有类型运行的单元：{absent}。"] if missing else []),
        *(["", f"尚未运行的模型类型：{rest}。"] if left else []),
        "",
        "单元的差异不超过最大值（小于 1 时取 1）的 1e-5，"
        "或不超过 transformers 自身 float32 舍入误差（相对 float64）的 3 倍，即为正确。",
        "",
        *results_table(cells, "| 模型类型 | 引擎 | 正确单元 | 拒绝与差异 |"),
    ]
    page.write_text("\n".join(english) + "\n")
    page.with_suffix(".zh.md").write_text("\n".join(chinese) + "\n")


def main() -> int:
    """Sweep, and print or write the table; exit code 1 if a cell is wrong or raw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="model types; all by default")
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--coarse", action="store_true", help="leave out layouts and prove")
    parser.add_argument("--json", type=Path, help="file for the cells; finished classes are kept")
    parser.add_argument("--page", type=Path, help="write the pages of --json, and run nothing")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    options = parser.parse_args()
    if options.page is not None:
        if options.json is None:
            parser.error("--page needs --json, the results file")
        write_pages(options.json, options.page)
        return 0
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    checks = COARSE if options.coarse else options.checks
    kinds = options.kinds or sorted(causal_classes())
    table = read_results(options.json)
    for kind in kinds:
        if kind in table and not options.kinds:
            continue
        began = monotonic()
        load_class(kind)
        cells = sweep_class(kind, checks, options.timeout_s)
        table[kind] = {**table.get(kind, {}), **{n: asdict(cell) for n, cell in cells.items()}}
        shown = Counter(cell.state for cell in cells.values())
        print(f"{kind}: {dict(shown)} in {monotonic() - began:.0f} s", flush=True)
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
