"""Checkpoints in object stores (`s3://`, `gs://`, `hf://`) through fsspec.

A store has no rename, so a checkpoint is published by one small object, `step-N.json`, which is
written after all files are stored and their sizes checked. It names the prefix of the files. Every
upload uses a new prefix, so an interrupted upload or two writers of the same step cannot mix files.
Readers only look at these objects, so they never see an unpublished checkpoint.

`CheckpointUploader` does this in a thread of rank 0, so that training never waits for the store.
"""

import hashlib
import logging
import random
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from attrs import frozen

from .arguments import check_integer, shown
from .errors import CheckpointError, DamageError
from .files.durable import publish, sync_folder, sync_tree, writing
from .files.untrusted import check_path, decode_json
from .secret_text import without_secrets

logger = logging.getLogger(__name__)

T = TypeVar("T")
ATTEMPTS = 6
PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
PUBLISHED = re.compile(r"step-([0-9]{8,15})\.json")
PREFIX = re.compile(r"step-([0-9]{8,15})\.[0-9a-f]{16}")
FOLDER = re.compile(r"step-([0-9]{8,15})")
FILE_NAME = re.compile(r"rank-[0-9]{5,10}\.safetensors")


class Publication(msgspec.Struct, frozen=True, kw_only=True, tag="publication.v1"):
    """Content of the object that publishes a checkpoint."""

    step: int
    prefix: str
    """Folder of the files below the URL."""
    manifest_sha256: str
    files: dict[str, int]
    """Size of each file in bytes."""
    sha256: dict[str, str] = {}
    """SHA-256 of each file; empty in publications that do not record it."""


class CheckpointStore:
    """Checkpoints of a run below a URL. One process per run uses it, such as rank 0.

    Args:
        url: URL of fsspec, such as `s3://bucket/run`. Credentials come from the client's
            environment and are never stored or printed.
        attempts: number of attempts per request.
        options: options of the fsspec file system, such as `endpoint_url`.

    Raises:
        CheckpointError: the URL is invalid or its client is not installed.
    """

    manifest_name: ClassVar[str] = "checkpoint.json"
    """File that makes a checkpoint folder complete."""

    def __init__(
        self, url: str, *, attempts: int = ATTEMPTS, options: dict[str, Any] | None = None
    ) -> None:
        if not isinstance(url, str) or "://" not in url:
            raise CheckpointError(
                f"url must be a URL such as s3://bucket/run, got {shown(url)}; pass one"
            )
        check_integer("attempts", attempts, minimum=1, error=CheckpointError)
        parts = urlsplit(url)
        self.url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        """URL without user, password and query."""
        self.attempts = attempts
        try:
            fsspec = import_module("fsspec")
            folders = {"auto_mkdir": True} if parts.scheme == "file" else {}
            filesystem, root = fsspec.core.url_to_fs(url, **folders, **(options or {}))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.url}: {without_secrets(str(error))}; install the client of this store, such"
                " as s3fs, gcsfs or huggingface_hub"
            ) from error
        self._filesystem, self._root = filesystem, str(root).rstrip("/")

    def steps(self) -> list[int]:
        """List the steps of all published checkpoints, in ascending order.

        Raises:
            CheckpointError: the store does not answer.
        """
        names = self._retry(self._names)
        return sorted(int(match[1]) for name in names if (match := PUBLISHED.fullmatch(name)))

    def upload(self, folder: str | Path, *, keep: int | None = None) -> int:
        """Store a complete checkpoint folder and publish it; return its step.

        Args:
            folder: folder with a manifest, such as `checkpoints/step-00000100`.
            keep: delete all but the newest published checkpoints. None: delete nothing.

        Raises:
            DamageError: the folder is incomplete.
            CheckpointError: the store does not accept a file, after retries.
        """
        check_path("folder", folder, error=CheckpointError)
        check_integer("keep", keep or 1, minimum=1, error=CheckpointError)
        folder = Path(folder)
        step_name = FOLDER.fullmatch(folder.name)
        if step_name is None or not (folder / self.manifest_name).is_file():
            raise DamageError(
                f"folder must be a complete checkpoint such as step-00000100, got {folder}, which"
                f" has {'another name' if step_name is None else f'no {self.manifest_name}'}"
            )
        step = int(step_name[1])
        prefix = f"step-{step:08d}.{secrets.token_hex(8)}"
        # A random prefix: a second writer of the same step cannot overwrite these files.
        files = {name: (folder / name).stat().st_size for name in self._names_in(folder)}
        for name in files:
            self._put(folder / name, f"{prefix}/{name}", files[name])
        digests = {name: _sha256(folder / name) for name in files}
        publication = Publication(
            step=step,
            prefix=prefix,
            manifest_sha256=digests[self.manifest_name],
            files=files,
            sha256=digests,
        )
        content = msgspec.json.encode(publication)
        # One small object, written last: writing an object is atomic in a store.
        name = f"{self._root}/step-{step:08d}.json"
        self._retry(lambda: self._filesystem.pipe_file(name, content))
        if keep is not None:
            self._delete_old(keep)
        return step

    def download(self, root: str | Path, *, step: int | None = None) -> Path | None:
        """Fetch the newest published checkpoint, or the given step's, into a run's folder.

        Args:
            root: the run's `checkpoints` folder. An existing checkpoint is not replaced.
            step: step to fetch; None for the newest.

        Returns:
            The checkpoint's folder; None if nothing is published.

        Raises:
            DamageError: the files differ from the published files.
            CheckpointError: the step is not published, or the store does not answer.
        """
        check_path("root", root, error=CheckpointError, written="folder")
        published = self.steps()
        if step is not None and step not in published:
            raise CheckpointError(
                f"{self.url} has no checkpoint of step {step}; it has {published}"
            )
        if not published:
            return None
        publication = self._publication(published[-1] if step is None else step)
        folder = Path(root) / f"step-{publication.step:08d}"
        if (folder / self.manifest_name).is_file():
            return folder
        # A killed download leaves this folder, and the next one resumes it.
        incomplete = folder.with_name(folder.name + ".download")
        with writing(folder):
            incomplete.mkdir(parents=True, exist_ok=True)
            for name, size in publication.files.items():
                target = incomplete / name
                digest = publication.sha256.get(name, "")
                if not _is_copy(target, size, digest):  # resumes a download
                    source = f"{publication.prefix}/{name}"
                    self._retry(partial(self._get, source, target, size, digest))
            # The manifest has the checksums of all other files, which are checked on loading.
            if _sha256(incomplete / self.manifest_name) != publication.manifest_sha256:
                shutil.rmtree(incomplete)  # files of another upload of this step
                raise DamageError(
                    f"{self.url}/{publication.prefix}/{self.manifest_name}: bytes differ from the"
                    " published manifest; use an earlier checkpoint"
                )
            sync_tree(incomplete)
            publish(incomplete, folder)
            sync_folder(folder.parent)
            for other in folder.parent.glob("step-*.download"):  # killed downloads of other steps
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def _publication(self, step: int) -> Publication:
        name = f"step-{step:08d}.json"
        content = self._retry(lambda: self._filesystem.cat_file(f"{self._root}/{name}"))
        where = f"{self.url}/{name}"
        publication = decode_json(content, Publication, where=where, error=DamageError)
        # Names become local paths and store keys: reject separators and unknown names.
        names = {*publication.files} - {self.manifest_name}
        if (
            publication.step != step
            or self.manifest_name not in publication.files
            or not PREFIX.fullmatch(publication.prefix)
            or not all(FILE_NAME.fullmatch(file) for file in names)
        ):
            raise DamageError(f"{where}: names files that no checkpoint has; use another step")
        return publication

    def _names_in(self, folder: Path) -> list[str]:
        """Return the names of a checkpoint's files, with the manifest last."""
        files = sorted(path.name for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))
        return [*files, self.manifest_name]

    def _delete_old(self, keep: int) -> None:
        """Delete all but the newest checkpoints, and files that killed uploads left behind."""
        names = self._retry(self._names)
        steps = sorted(int(match[1]) for name in names if (match := PUBLISHED.fullmatch(name)))
        for step in steps[:-keep]:
            publication = self._publication(step)
            # Unpublish first: readers must not open a checkpoint with missing files.
            self._retry(partial(self._filesystem.rm_file, f"{self._root}/step-{step:08d}.json"))
            for name in publication.files:
                path = f"{self._root}/{publication.prefix}/{name}"
                self._retry(partial(self._filesystem.rm_file, path))
        # Only prefixes older than all kept checkpoints: a newer one may be an upload in progress of
        # another process, and deleting its files would break the checkpoint that it publishes.
        for name in names:
            match = PREFIX.fullmatch(name)
            if match and int(match[1]) < steps[-keep:][0]:
                self._retry(partial(self._remove_prefix, name))

    def _remove_prefix(self, name: str) -> None:
        """Delete a prefix with all its files, unless it is already gone."""
        try:
            self._filesystem.rm(f"{self._root}/{name}", recursive=True)
        except FileNotFoundError:
            return

    def _names(self) -> list[str]:
        # fsspec caches listings, which would hide checkpoints of other writers.
        self._filesystem.invalidate_cache()
        try:
            entries = self._filesystem.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def _put(self, source: Path, name: str, size: int) -> None:
        """Store a file and check its size."""
        target = f"{self._root}/{name}"
        stored = -1
        # A transfer may be cut short without an error, so the size is read back.
        for _ in range(self.attempts):
            self._retry(lambda: self._filesystem.put_file(str(source), target))
            stored = self._retry(lambda: self._filesystem.info(target)["size"])
            if stored == size:
                return
        raise CheckpointError(
            f"{self.url}/{name}: the store has {stored} of {size} bytes; check the store"
        )

    def _get(self, name: str, target: Path, size: int, digest: str) -> None:
        self._filesystem.get_file(f"{self._root}/{name}", str(target))
        if target.stat().st_size != size:
            raise OSError(f"the store sent {target.stat().st_size} of {size} bytes")
        if not _is_copy(target, size, digest):
            raise OSError("the store sent bytes that do not match the published checksum")

    def _retry(self, request: Callable[[], T]) -> T:
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                # Exponential backoff with jitter, so that processes do not retry in lockstep.
                pause = min(PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.5)
                logger.debug("%s: %s; trying again in %.1f s", self.url, problem, pause)
                time.sleep(pause)
            try:
                return request()
            except Exception as error:  # clients have no common exception class
                text = " ".join(f"{type(error).__name__}: {error}".split())
                problem = without_secrets(text)[:200]
        raise CheckpointError(
            f"{self.url}: the request failed {self.attempts} times, last {problem}; check the store"
            " and your access rights"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_copy(path: Path, size: int, digest: str) -> bool:
    """Return True if a file has the published size and, if one is published, the digest."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    return not digest or _sha256(path) == digest


@frozen(kw_only=True)
class Upload:
    """Outcome of one upload."""

    step: int
    seconds: float
    size_bytes: int
    problem: str = ""
    """Reason of the failure; empty after a success."""


class CheckpointUploader:
    """Uploads complete checkpoints in a thread, one at a time. Used on rank 0 only.

    If checkpoints complete faster than they upload, a new one replaces the pending one, so some
    are skipped. A failed upload is reported, and the next checkpoint is uploaded as usual. If the
    process is killed, the store keeps its earlier checkpoints.

    Args:
        store: store of the run.
        keep: number of published checkpoints to keep.
    """

    def __init__(self, store: CheckpointStore, *, keep: int) -> None:
        self.store, self.keep = store, keep
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._running: Path | None = None
        self._outcomes: list[Upload] = []
        self.last_problem = ""
        """Reason why the last upload failed; empty after a success."""
        self._thread: threading.Thread | None = None

    def submit(self, folder: Path) -> None:
        """Upload a checkpoint folder as soon as the previous upload is done."""
        with self._changed:
            self._waiting = folder
            if self._thread is None:
                # A daemon, so that a failing process does not hang on an unresponsive store.
                self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def pinned(self) -> set[Path]:
        """Folders that must not be deleted, because they are being uploaded or will be."""
        with self._changed:
            return {folder for folder in (self._waiting, self._running) if folder is not None}

    def report(self, emit: Callable[[str, dict[str, int | float | str]], object]) -> None:
        """Log the uploads that finished or failed since the last call, by `emit(event, fields)`."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        for upload in outcomes:
            if upload.problem:
                logger.warning(
                    "failed to upload checkpoint %d; training continues, and the next one will be "
                    "uploaded: %s",
                    upload.step,
                    upload.problem,
                )
                emit("upload_failed", {"step": upload.step, "problem": upload.problem})
            else:
                sizes = {"size_bytes": upload.size_bytes, "seconds": upload.seconds}
                emit("upload", {"step": upload.step, **sizes})

    def wait(self) -> None:
        """Wait until no upload is running or waiting."""
        with self._changed:
            while self._waiting is not None or self._running is not None:
                # With a timeout, so that the main thread still handles signals.
                self._changed.wait(timeout=0.5)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._changed.wait()
                folder = self._running = self._waiting
                self._waiting = None
            outcome = self._upload(folder)
            with self._changed:
                self._running = None
                self._outcomes.append(outcome)
                self.last_problem = outcome.problem
                self._changed.notify_all()

    def _upload(self, folder: Path) -> Upload:
        started, problem, size = time.monotonic(), "", 0
        try:
            size = sum(path.stat().st_size for path in folder.iterdir())
            self.store.upload(folder, keep=self.keep)
        except Exception as error:  # reported by the main thread: training continues
            problem = without_secrets(" ".join(str(error).split())) or type(error).__name__
        return Upload(
            step=int(folder.name.removeprefix("step-")),
            seconds=round(time.monotonic() - started, 3),
            size_bytes=size,
            problem=problem,
        )
