"""The whole road: from the running Python's own library to models that answer in three runtimes.

    python examples/road/road.py

Each stage is a command that also works alone; `--list` prints them. A stage whose outputs are
there, made from the same inputs and settings, is skipped. Stop it at any moment, even with kill -9:
the same command resumes. It ends in one page, `road/road.html`, which needs no network.
"""

import argparse
import ctypes
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stages import HERE, Command, Stage, all_stages, python_line
from stamps import Stamp, identity, made, read_stamp, state, write_stamp

SET_DEATH_SIGNAL = 1
"""Linux's number of prctl's request for a signal when the parent dies."""


class RoadError(Exception):
    """What a user can mend; one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the road; 0 done, 1 a stage failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        stages = with_settings(all_stages(), options.set)
        chosen = choose(stages, only=options.only, skip=options.skip, first=options.first)
        if options.list:
            show(stages, options.folder)
            return 0
        options.folder.mkdir(parents=True, exist_ok=True)
        with held(options.folder) as lock:
            return walk(chosen, options.folder, lock, anew=options.first is not None)
    except (RoadError, OSError) as error:
        print(f"road: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="road",
        description="From the running Python's own library to models that answer in three runtimes."
        " A stage that is done, from the same inputs and settings, is skipped.",
        epilog="example: python examples/road/road.py --folder road --from ppo",
    )
    parser.add_argument("--folder", type=Path, default=Path("road"), help="where everything goes")
    parser.add_argument("--list", action="store_true", help="print stages, state and commands")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="this stage")
    parser.add_argument("--skip", action="append", default=[], metavar="STAGE", help="all but this")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="do it and all after it anew")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="STAGE.KEY=VALUE",
        help="change a key of a stage's run file",
    )
    return parser


def with_settings(stages: Sequence[Stage], given: Sequence[str]) -> list[Stage]:
    """The stages with keys of their run files changed.

    Raises:
        RoadError: a setting is of no stage with a run file.
    """
    known = {stage.name for stage in stages if stage.has_run_file}
    for each in given:
        name, dot, rest = each.partition(".")
        if name not in known or not dot or "=" not in rest:
            raise RoadError(
                f"--set {each}: give STAGE.KEY=VALUE, of a stage with a run file:"
                f" {', '.join(sorted(known))}"
            )
    return [
        stage.changed(
            [each.partition(".")[2] for each in given if each.startswith(f"{stage.name}.")]
        )
        for stage in stages
    ]


def choose(
    stages: Sequence[Stage], *, only: Sequence[str], skip: Sequence[str], first: str | None
) -> list[Stage]:
    """The stages that are asked for, in order.

    Raises:
        RoadError: there is no stage of a name.
    """
    names = [stage.name for stage in stages]
    for name in (*only, *skip, *([first] if first else [])):
        if name not in names:
            raise RoadError(f"there is no stage {name!r}; there are {', '.join(names)}")
    begin = names.index(first) if first else 0
    return [
        stage
        for stage in stages[begin:]
        if (not only or stage.name in only) and stage.name not in skip
    ]


def show(stages: Sequence[Stage], folder: Path) -> None:
    """Print each stage, its state, and its commands as a user types them in the folder."""
    for stage in stages:
        print(f"{stage.name:<10} {state(stage, folder):<8} {stage.what}")
        for line in stage.lines():
            print(f"    {line}")


@contextmanager
def held(folder: Path) -> Iterator[IO[bytes]]:
    """Hold the folder for one walk; processes of a killed one hold it until they have ended."""
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another walk in {folder} to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def walk(stages: Sequence[Stage], folder: Path, lock: IO[bytes], *, anew: bool = False) -> int:
    """Do what is not done, one stage after another; 0, or 1 where one failed."""
    began, expected, taken = time.monotonic(), 0.0, 0.0
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage.name}"
        check_inputs(stage, folder)
        now = "changed" if anew else state(stage, folder)
        if now == "done":
            print(f"{head}: done before", flush=True)
            continue
        left = sum(one.typical_s for one in stages[number - 1 :])
        pace = taken / expected if expected else 1.0
        print(f"{head}: {stage.what}", flush=True)
        own, all_left = span(stage.typical_s * pace), span(left * pace)
        print(f"    about {own}; {all_left} left in all", flush=True)
        stamp = prepare(stage, folder, now)
        code, stamp = perform(stage, folder, stamp, lock)
        if code:
            print(f"road: {stage.name} failed with exit code {code}; mend what it says above, and"
                  " the same command resumes", file=sys.stderr)  # fmt: skip
            return 1
        expected, taken = expected + stage.typical_s, taken + stamp.wall_s
        print(f"    {stage.name} took {span(stamp.wall_s)}", flush=True)
    print(f"all {len(stages)} stages are done, in {span(time.monotonic() - began)}", flush=True)
    return 0


def check_inputs(stage: Stage, folder: Path) -> None:
    """Refuse a stage that reads what nobody made.

    Raises:
        RoadError: names the stage that makes it.
    """
    for name in stage.reads:
        if not (folder / name).exists():
            maker = next((one.name for one in all_stages() if name in one.makes), "an earlier one")
            raise RoadError(f"{stage.name} reads {folder / name}, which is not there; run {maker}")


def prepare(stage: Stage, folder: Path, now: str) -> Stamp:
    """Note that a stage is begun; what was made from other inputs is removed first."""
    stamp = read_stamp(stage, folder)
    if now == "begun" and stamp is not None:
        return stamp
    for name in stage.owns:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    stamp = Stamp(identity=identity(stage, folder))
    write_stamp(stage, folder, stamp)
    return stamp


def perform(stage: Stage, folder: Path, stamp: Stamp, lock: IO[bytes]) -> tuple[int, Stamp]:
    """Run a stage's commands; their exit code, and the stamp with what they made and took."""
    began, processor, code = time.monotonic(), processor_s(), 0
    try:
        for command in stage.commands:
            code = run(command, folder, lock)
            if code:
                break
    finally:
        stamp = Stamp(
            identity=stamp.identity,
            made="" if code else made(stage, folder),
            wall_s=stamp.wall_s + time.monotonic() - began,
            processor_s=stamp.processor_s + processor_s() - processor,
            load=os.getloadavg()[0],
        )
        write_stamp(stage, folder, stamp)
    if not code and not stamp.made:
        raise RoadError(f"{stage.name} ended well, and {', '.join(stage.makes)} is not all there")
    return code, stamp


def run(command: Command, folder: Path, lock: IO[bytes]) -> int:
    """Run a command in the folder, and keep what it prints where that is asked for."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    kept = None if command.facts is None else folder / command.facts
    aside = None
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = kept.with_suffix(".part")
    output = None if aside is None else aside.open("wb")
    try:
        process = subprocess.Popen(
            python_line(command),
            cwd=folder,
            env=environment,
            stdout=output,
            pass_fds=(lock.fileno(),),
            preexec_fn=_die_with_the_parent,
        )
        code = wait(process)
    finally:
        if output is not None:
            output.close()
    if code == 0 and aside is not None and kept is not None:
        aside.replace(kept)
    return code


def _die_with_the_parent() -> None:
    """Have Linux end this process, which then ends its own, when the walk is killed."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; Ctrl-C reaches it too, and it is given the time to save what it has."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def processor_s() -> float:
    """Seconds of processor time of all processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def span(seconds: float) -> str:
    """A time for people: `48 s`, `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("road: stopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
