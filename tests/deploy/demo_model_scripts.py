"""Loads the modules of deploy/demo-model, which is a folder of scripts and not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "deploy" / "demo-model"


def load_script(name: str) -> ModuleType:
    """The module of that name, under a name of its own so that it shadows nothing."""
    specification = importlib.util.spec_from_file_location(f"demo_model_{name}", SCRIPTS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
