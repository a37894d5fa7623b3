"""Replace symbolic links into `shared_source/` with the files themselves in an sdist.

Wheels already contain the linked content; an sdist would contain dangling links.
"""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RealFiles(BuildHookInterface[Any]):
    """Build hook that includes the target of each symbolic link instead of the link."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Replace the links among the included files; `version` is the build type."""
        forced = build_data["force_include"]  # contains this script too, also a link
        for file in [*self.build_config.builder.recurse_included_files()]:
            if os.path.islink(file.path):
                forced.pop(file.path, None)
                forced[os.path.realpath(file.path)] = file.relative_path
