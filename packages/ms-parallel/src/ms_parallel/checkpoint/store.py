"""Checkpoints in object stores (`s3://`, `gs://`, `hf://`) through fsspec.

A store has no rename, so a checkpoint is published by one small object, `step-N.json`, which is
written after all files are stored and their sizes checked. It names the prefix of the files. Every
upload uses a new prefix, so an interrupted upload or two writers of the same step cannot mix files.
Readers only look at these objects, so they never see an unpublished checkpoint.
"""

import hashlib
import logging
import random
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ms_parallel.arguments import check_integer, shown
from ms_parallel.checkpoint.folder import step_folder
from ms_parallel.checkpoint.manifest import FILE_NAME, MANIFEST, read_manifest
from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.files.durable import publish, sync_folder, sync_tree, writing
from ms_parallel.files.untrusted import check_path, decode_json
from ms_parallel.secret_text import without_secrets

logger = logging.getLogger(__name__)

T = TypeVar("T")
ATTEMPTS = 6
PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
PUBLISHED = re.compile(r"step-([0-9]{8,15})\.json")
PREFIX = re.compile(r"step-[0-9]{8,15}\.[0-9a-f]{16}")


class Publication(msgspec.Struct, frozen=True, kw_only=True, tag="publication.v1"):
    """Content of the object that publishes a checkpoint."""

    step: int
    prefix: str
    """Folder of the files below the URL."""
    manifest_sha256: str
    files: dict[str, int]
    """Size of each file in bytes."""


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
            filesystem, root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.url}: {without_secrets(str(error))}; install the client of this store"
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
        manifest = read_manifest(folder)
        prefix = f"step-{manifest.step:08d}.{secrets.token_hex(8)}"
        # A random prefix: a second writer of the same step cannot overwrite these files.
        files = {name: (folder / name).stat().st_size for name in _names_of(folder)}
        for name in files:
            self._put(folder / name, f"{prefix}/{name}", files[name])
        publication = Publication(
            step=manifest.step,
            prefix=prefix,
            manifest_sha256=hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(),
            files=files,
        )
        content = msgspec.json.encode(publication)
        # One small object, written last: stores show an object completely or not at all.
        name = f"{self._root}/step-{manifest.step:08d}.json"
        self._retry(lambda: self._filesystem.pipe_file(name, content))
        if keep is not None:
            self._delete_old(keep)
        return manifest.step

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
        folder = step_folder(root, publication.step)
        if (folder / MANIFEST).is_file():
            return folder
        # A killed download leaves this folder, and the next one continues in it.
        incomplete = folder.with_name(folder.name + ".partial")
        with writing(folder):
            incomplete.mkdir(parents=True, exist_ok=True)
            for name, size in publication.files.items():
                target = incomplete / name
                if not target.is_file() or target.stat().st_size != size:  # resumes a download
                    source = f"{publication.prefix}/{name}"
                    self._retry(partial(self._get, source, target, size))
            # The manifest has the digests of all other files, which are checked when it is loaded.
            manifest = (incomplete / MANIFEST).read_bytes()
            if hashlib.sha256(manifest).hexdigest() != publication.manifest_sha256:
                raise DamageError(
                    f"{self.url}/{publication.prefix}/{MANIFEST}: bytes differ from the published"
                    " manifest; use an earlier checkpoint"
                )
            sync_tree(incomplete)
            publish(incomplete, folder)
            sync_folder(folder.parent)
        return folder

    def _publication(self, step: int) -> Publication:
        name = f"step-{step:08d}.json"
        content = self._retry(lambda: self._filesystem.cat_file(f"{self._root}/{name}"))
        where = f"{self.url}/{name}"
        publication = decode_json(content, Publication, where=where, error=DamageError)
        # Names become local paths and store keys: reject separators and unknown names.
        names = {*publication.files} - {MANIFEST}
        if (
            publication.step != step
            or MANIFEST not in publication.files
            or not PREFIX.fullmatch(publication.prefix)
            or not all(FILE_NAME.fullmatch(file) for file in names)
        ):
            raise DamageError(f"{where}: names files that no checkpoint has; use another step")
        return publication

    def _delete_old(self, keep: int) -> None:
        for step in self.steps()[:-keep]:
            publication = self._publication(step)
            # Unpublish first: readers must not open a checkpoint with missing files.
            self._retry(partial(self._filesystem.rm_file, f"{self._root}/step-{step:08d}.json"))
            for name in publication.files:
                path = f"{self._root}/{publication.prefix}/{name}"
                self._retry(partial(self._filesystem.rm_file, path))

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

    def _get(self, name: str, target: Path, size: int) -> None:
        self._filesystem.get_file(f"{self._root}/{name}", str(target))
        if target.stat().st_size != size:
            raise OSError(f"sent {target.stat().st_size} of {size} bytes")

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


def _names_of(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files, with the manifest last."""
    files = sorted(path.name for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))
    return [*files, MANIFEST]
