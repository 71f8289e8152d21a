"""What may stand in this repository, and how it is written."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import PurePath

from tests.tidy.repository import ROOT, files, python_files, text_of, tree_of

SIZE_BYTES_MAX = 1 << 20
LARGE_ON_PURPOSE = {"kvasir_node/data/demo-q8_0.gguf": 24 * 1000 * 1000}
"""Issue 2 allows the demo model 24 MB."""
NAMES_THAT_NAME_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
PROSE = (".py", ".md", ".toml", ".cpp", ".h", ".cl", ".sh", ".yml", ".yaml", ".txt", "Makefile", "/run")
# Put together here, so that this file does not contain what it looks for.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w.\-])/(wo" + r"rk|ro" + r"ot|t" + r"mp)/")
REGISTRY = re.compile(
    "|".join(("py" + "pi.org", "python" + "hosted", "npm" + "js", "deb" + ".debian.org", "proxy" + ".golang"))
)
# Libp2p's word, which may be said of libp2p and of the operating system's functions of that name, in the one
# option of `bench` that names other programs, and of the command that lists members: people look for that.
PEER = re.compile(r"(?<![A-Za-z])[Pp]eers?(?![a-z])|_PEER_")
PEER_OF_OTHERS = re.compile(
    r"libp2p peer id|--peers\b|peer-to-peer|"
    r"peer[ _]credentials|SO_PEERCRED|get_?peer_?(name|cert)\w*|[\"'`]peers?[\"'`]|kvasir-node peers",
    re.I,
)


def prose() -> list[tuple[str, str]]:
    return [(path, text) for path in files() if path.endswith(PROSE) and (text := text_of(path)) is not None]


def test_the_rules_see_the_files() -> None:
    assert {"pyproject.toml", "Makefile", ".ci/run", "kvasir_node/__init__.py"} <= set(files())
    assert len(prose()) > 30


def test_no_large_files() -> None:
    for path in files():
        size = (ROOT / path).stat().st_size
        assert size <= LARGE_ON_PURPOSE.get(path, SIZE_BYTES_MAX), f"{path} has {size} bytes"


def test_modules_are_named_after_what_they_are_about() -> None:
    for path in python_files("kvasir_proto", "kvasir_node", "tests"):
        for part in PurePath(path).with_suffix("").parts:
            assert part not in NAMES_THAT_NAME_NOTHING, f"{path}: name what is in it"


def test_nothing_is_left_unfinished() -> None:
    for path, text in prose():
        for number, line in enumerate(text.splitlines(), 1):
            assert not UNFINISHED.search(line), f"{path}:{number}: finish it, or file an issue"


def test_no_path_of_one_machine_and_no_registry() -> None:
    for path, text in prose():
        for number, line in enumerate(text.splitlines(), 1):
            assert not MACHINE_PATH.search(line), f"{path}:{number} names a path that only one machine has"
            assert not REGISTRY.search(line), f"{path}:{number} names a package registry's host"


def test_members_are_not_called_by_libp2ps_word() -> None:
    for path in python_files("kvasir_proto", "kvasir_node", "tests"):
        if path.startswith(("kvasir_node/net/", "tests/loopback/", "tests/node/net/", "tests/tidy/")):
            continue
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            rest = PEER_OF_OTHERS.sub("", line)
            assert not PEER.search(rest), f"{path}:{number}: say node or member ({line.strip()!r})"


def test_every_module_says_what_it_is() -> None:
    for path in python_files("kvasir_proto", "kvasir_node"):
        docstring = ast.get_docstring(tree_of(path))
        assert docstring, f"{path} has no docstring"
        assert docstring.split("\n")[0].rstrip().endswith((".", "?", "!")), (
            f"{path}: the first line is a sentence"
        )


def test_every_text_ends_with_a_line_end_and_has_no_tabs_in_python() -> None:
    for path, text in prose():
        assert not text or text.endswith("\n"), f"{path} does not end with a line end"
        if path.endswith(".py"):
            assert "\t" not in text, f"{path} has a tab"


def test_every_native_file_is_part_of_the_build() -> None:
    """setuptools takes no wildcards: a forgotten source fails at load, a header at its next change."""
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    sources = {path for path in files() if re.fullmatch(r"native/src/[^/]+\.cpp", path)}
    headers = {path for path in files() if re.fullmatch(r"native/(src|include)/[^/]+\.h", path)}
    assert set(module["sources"]) == sources
    assert set(module["depends"]) == headers


def test_what_is_required_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = set(project["project"]["dependencies"])
    for group in ("tests", "typing", "lint"):
        required |= set(project["dependency-groups"][group])
    text = (ROOT / "deploy/constraints.txt").read_text().lower().replace("_", "-")
    pinned = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    for requirement in required:
        name = re.split(r"[=<>]", requirement)[0]
        assert name in pinned, f"{name} is not in deploy/constraints.txt"
        exact = re.fullmatch(r"[a-z0-9-]+==([\d.]+)", requirement)
        assert exact is None or pinned[name] == exact[1], f"{name}: pyproject.toml and constraints.txt differ"


def test_commands_see_errors_and_not_groups_of_them() -> None:
    """What leaves a plain nursery is a group, which no command's ending knows: a traceback and status 120."""
    of_commands = python_files("kvasir_node/cli", "kvasir_node/bench", "kvasir_node/measure")
    for path in (*of_commands, "kvasir_node/control.py", "kvasir_node/demo.py", "kvasir_node/foreground.py"):
        assert "trio.open_nursery" not in (text_of(path) or ""), f"{path}: use open_unwrapping_nursery"
