"""Environments of the OpenEnv server of the tests, whose port is in OPENENV_PORT."""

import os
from collections.abc import Mapping
from typing import Any

from ms_align.environments.openenv import OpenEnvEnvironment


class Countdown(OpenEnvEnvironment):
    """One text field each."""

    base_url = f"http://127.0.0.1:{os.environ.get('OPENENV_PORT', '1')}"
    observation_field = "text"
    timeout_s = 30.0

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for misbehavior."""
        return {"fault": row["fault"]} if "fault" in row else {}


class WrongField(Countdown):
    """A field that the observation lacks."""

    observation_field = "answer"
