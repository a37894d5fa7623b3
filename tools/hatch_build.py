"""Put real files into an sdist where the tree links to `shared_source/`.

A wheel holds the content of a linked file already; an sdist would hold a dangling link.
"""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RealFiles(BuildHookInterface[Any]):
    """Includes the target of each link in place of the link."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Replace the links among the files to include; `version` is the kind of build."""
        forced = build_data["force_include"]  # holds this script itself, a link as well
        for file in [*self.build_config.builder.recurse_included_files()]:
            if os.path.islink(file.path):
                forced.pop(file.path, None)
                forced[os.path.realpath(file.path)] = file.relative_path
