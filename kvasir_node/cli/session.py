"""What every command gets: where the home is, what is configured, and logging set up accordingly."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvasir_node.config import Configuration, load_configuration
from kvasir_node.locations import Locations, locate
from kvasir_node.telemetry import configure_telemetry


@dataclass
class CommandSession:
    """One invocation of the command line. ``flags`` maps dotted configuration keys to what was given."""

    home: Path | None
    flags: dict[str, object] = field(default_factory=dict)

    @cached_property
    def locations(self) -> Locations:
        """The paths of this home."""
        return locate(self.home, os.environ)

    def configure(self, *, is_daemon: bool = False, **flags: object) -> Configuration:
        """The settings, with this command's own flags on top (``listen_port`` for ``listen.port``).

        Sets up logging as well: a command that is no daemon logs warnings only, unless it was told what to
        log. Raises `ConfigurationInvalid`.
        """
        own = {name.replace("_", ".", 1): value for name, value in flags.items()}
        configuration = load_configuration(self.locations.config_file, os.environ, self.flags | own)
        chosen = is_daemon or "log.level" in configuration.origins
        level = configuration.log_level if chosen else "warning"
        configure_telemetry(level, configuration.log_format, os.environ)
        return configuration
