"""The road as a list: what each stage runs, reads and makes.

Every command runs in the road's folder, so that a run file names `shards` and not a path. It is
what a user would type there; `python road.py --list` prints the lines.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve, field, frozen

HERE = Path(__file__).resolve().parent
VOCABULARY = 4096
TASKS = ("add", "describe", "implement")
EXPORTS = {"ct": "ct.int4_g32", "onnx": "ort.matmulnbits", "gguf": "gguf.q4_0"}
"""Folder of `deploy/` and the scheme that it is written in."""


@frozen(kw_only=True)
class Command:
    """One line that a stage runs."""

    words: tuple[str, ...]
    """Without the Python that runs it: `-m ms_data clean ...`, or a script and its arguments."""
    facts: str | None = None
    """File that keeps what it prints on standard output; None leaves it on the terminal."""


@frozen(kw_only=True)
class Stage:
    """A part of the road that is done whole, or gone on with."""

    name: str
    what: str
    """One line for people."""
    commands: tuple[Command, ...]
    settings: tuple[Path, ...] = ()
    """Run files and scripts whose contents decide what comes of it."""
    reads: tuple[str, ...] = ()
    """Files and folders that earlier stages made."""
    makes: tuple[str, ...]
    """Files and folders that later stages read."""
    owns: tuple[str, ...] = field()
    """All that it writes lies here, and is removed where its settings have changed."""
    typical_s: float
    """Seconds on 2 quiet cores, for the time that is left."""

    @owns.default
    def _owns(self) -> tuple[str, ...]:
        return self.makes

    @property
    def has_run_file(self) -> bool:
        """Whether its last command takes `RUN.toml --set KEY=VALUE`."""
        words = self.commands[-1].words
        return any(word.endswith(".toml") for word in words) and "ms_data" not in words

    def changed(self, given: Sequence[str]) -> "Stage":
        """The stage with keys of its run file changed, each as `KEY=VALUE`."""
        if not given:
            return self
        *before, last = self.commands
        more = tuple(part for each in given for part in ("--set", each))
        return evolve(self, commands=(*before, evolve(last, words=(*last.words, *more))))

    def lines(self) -> Iterator[str]:
        """Its commands as a user types them."""
        for command in self.commands:
            yield " ".join(["python", *command.words])


def data(*words: str, facts: str) -> Command:
    """A command of ms-data, whose facts are kept."""
    return Command(words=("-m", "ms_data", *words, "--json"), facts=f"facts/{facts}.json")


def trained(name: str, *words: str, processes: int = 1) -> Command:
    """A command that trains, recorded by ms-profile into `profile/NAME`."""
    several = () if processes == 1 else ("--nproc-per-node", str(processes))
    recorder = ("-m", "ms_profile", "run", "--train-script", str(HERE / "module.py"))
    places = ("--output-dir", f"profile/{name}", "--overwrite", "--every", "150")
    return Command(words=(*recorder, *places, *several, "--", *words))


def settings(name: str) -> Path:
    """A run file, or a script, of this folder."""
    return HERE / name


def data_stages() -> list[Stage]:
    """From the standard library's source to token shards, and to tasks."""
    tokenizer = ("--tokenizer", "tokenizer.json")
    return [
        Stage(
            name="clean",
            what="read the standard library's source, repair texts, mask personal data",
            commands=(
                data("clean", "stdlib", str(settings("clean.toml")), "--out", "cleaned",
                     facts="clean"),
            ),
            settings=(settings("clean.toml"),),
            makes=("cleaned",),
            typical_s=6,
        ),
        Stage(
            name="dedup",
            what="keep one of the files that are the same, or nearly",
            commands=(data("dedup", "cleaned", "--out", "unique", facts="dedup"),),
            reads=("cleaned",),
            makes=("unique",),
            typical_s=5,
        ),
        Stage(
            name="tokenizer",
            what=f"learn a byte-level BPE of {VOCABULARY} tokens",
            commands=(
                data("tokenizer", "unique", "--vocab-size", str(VOCABULARY), "--out",
                     "tokenizer.json", facts="tokenizer"),
            ),
            reads=("unique",),
            makes=("tokenizer.json",),
            typical_s=9,
        ),
        Stage(
            name="shards",
            what="write compressed, checked token shards",
            commands=(
                data("build", "unique", *tokenizer,
                     "--held-out-fraction", "0.02", "--out", "shards",
                     facts="shards"),
            ),
            reads=("unique", "tokenizer.json"),
            makes=("shards",),
            typical_s=5,
        ),
        tasks_stage(tokenizer),
    ]  # fmt: skip


def tasks_stage(tokenizer: Sequence[str]) -> Stage:
    """From the same source to tasks with known answers, made by scripts of their own."""
    chat = (*tokenizer, "--chat-template", str(settings("chat.jinja")))
    build = [
        data("build", f"tasks/{task}.jsonl", *chat,
             "--held-out-fraction", "0.02", "--out", f"chats/{task}",
             facts=task)
        for task in TASKS
    ]  # fmt: skip
    pairs = ("build", "tasks/pairs.jsonl", "--pairs", *chat, "--held-out-fraction", "0.05")
    makers = (HERE.parent / "docstrings.py", settings("tasks.py"))
    return Stage(
        name="tasks",
        what="make docstring tasks, sums, preference pairs and held-out questions",
        commands=(
            Command(words=(str(makers[0]), "docstrings")),
            Command(words=(str(makers[1]), "docstrings", "tasks")),
            *build,
            data(*pairs, "--out", "chats/pairs", facts="pairs"),
        ),
        settings=(*makers, settings("chat.jinja")),
        reads=("tokenizer.json",),
        makes=("tasks", "chats"),
        owns=("docstrings", "tasks", "chats"),
        typical_s=12,
    )  # fmt: skip


def training(name: str, what: str, *command: str, processes: int = 1, **more: object) -> Stage:
    """A stage that trains by the run file of its name."""
    file = settings(f"{name}.toml")
    words = (*command, str(file))
    return evolve(
        Stage(
            name=name,
            what=what,
            commands=(trained(name, *words, processes=processes),),
            settings=(file,),
            makes=(f"{name}/model", f"{name}/events.jsonl"),
            owns=(name, f"profile/{name}"),
            typical_s=100,
        ),
        **more,  # type: ignore[arg-type]
    )


def training_stages() -> list[Stage]:
    """From shards and tasks to a model that was optimized for a reward."""
    return [
        training(
            "pretrain", "pre-train a Llama-style decoder on two processes",
            "ms_parallel", "train", processes=2, reads=("shards",), typical_s=110,
        ),
        training(
            "sft", "tune it on three tasks, drawn by their difficulty",
            "ms_align", "sft", reads=("pretrain/model", "chats"), typical_s=115,
        ),
        training(
            "reward", "train a reward model on right and wrong answers",
            "ms_align", "reward", reads=("sft/model", "chats"), typical_s=35,
        ),
        training(
            "ppo", "optimize sums by PPO with a reward that is checked",
            "ms_align", "ppo", reads=("sft/model", "reward/model", "tasks"), typical_s=155,
            settings=(settings("ppo.toml"), settings("rewards.py")),
        ),
    ]  # fmt: skip


def export_stages() -> list[Stage]:
    """Training with rounded weights, a folder for each runtime, and questions to all of them."""
    file = settings("qat.toml")
    llama = importlib.util.find_spec("llama_cpp") is not None
    found = []
    for name, scheme in EXPORTS.items():
        verify = str(name != "gguf" or llama).lower()
        given = (f"scheme={scheme}", f"output_dir=deploy/{name}", f"verify={verify}")
        sets = tuple(part for each in given for part in ("--set", each))
        found.append(
            Stage(
                name=f"qat-{name}",
                what=f"train on with weights rounded as {scheme}, the float model as teacher",
                commands=(trained(f"qat-{name}", "ms_compress", "qat", str(file), *sets),),
                settings=(file,),
                reads=("ppo/model", "tasks"),
                makes=(f"deploy/{name}",),
                owns=(f"deploy/{name}", f"deploy/{name}.training", f"profile/qat-{name}"),
                typical_s=35,
            )
        )
    return found


def closing_stages(folders: Sequence[str]) -> list[Stage]:
    """Questions to each model, sizes and speeds, and the page."""
    evaluate = ("-m", "ms_compress", "evaluate", str(settings("evaluate.toml")), "--json")
    waiting = ("-m", "ms_profile", "report", "profile/pretrain")
    events = tuple(f"{name}/events.jsonl" for name in ("pretrain", "sft", "reward", "ppo"))
    return [
        Stage(
            name="ask",
            what="put held-out questions to each model in its own runtime",
            commands=(Command(words=(str(settings("ask.py")), ".")),),
            settings=(settings("ask.py"),),
            reads=("pretrain/model", "sft/model", "ppo/model", "tasks", *folders),
            makes=("facts/answers.json",),
            typical_s=12,
        ),
        Stage(
            name="evaluate",
            what="measure size, speed and perplexity of each export",
            commands=(Command(words=evaluate, facts="facts/evaluate.json"),),
            settings=(settings("evaluate.toml"),),
            reads=("ppo/model", "tasks", *folders),
            makes=("facts/evaluate.json",),
            owns=("facts/evaluate.json", "report"),
            typical_s=6,
        ),
        Stage(
            name="page",
            what="draw one page of all that happened",
            commands=(
                Command(words=(*waiting, "--json"), facts="facts/waiting.json"),
                Command(words=(*waiting, "--out", "waiting.html")),
                Command(words=(str(settings("page.py")), ".", "--out", "road.html")),
            ),
            settings=(settings("page.py"), settings("chart.py")),
            reads=("facts/answers.json", "facts/evaluate.json", *events),
            makes=("road.html",),
            owns=("road.html", "waiting.html"),
            typical_s=6,
        ),
    ]


def all_stages() -> list[Stage]:
    """The whole road, in order."""
    folders = [f"deploy/{name}" for name in EXPORTS]
    return [*data_stages(), *training_stages(), *export_stages(), *closing_stages(folders)]


def python_line(command: Command) -> list[str]:
    """A command for the running Python."""
    return [sys.executable, *command.words]
