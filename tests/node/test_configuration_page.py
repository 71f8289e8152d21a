"""`docs/reference/configuration.md` lists every setting as the code has it, and none that it has not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvasir_node.cli import cli
from kvasir_node.cli.run import run
from kvasir_node.config import Configuration, flag_of, load_configuration, variable_of
from kvasir_node.locations import locate
from kvasir_proto.errors import ConfigurationInvalid

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text("utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    if len(cells) == 5
}
SETTINGS = {setting.name: setting for setting in Configuration().settings()}
FLAGS = {name for command in (cli, run) for each in command.params for name in each.opts}


def test_the_page_lists_every_setting_and_no_other() -> None:
    assert list(ROWS) == list(SETTINGS)
    for key in SETTINGS:
        assert f"`{key}`" in PAGE.split("What they are for:")[1], key


@pytest.mark.parametrize("key", SETTINGS)
def test_default_variable_and_flag_are_those_of_the_code(key: str) -> None:
    _, default, variable, flag = ROWS[key]
    value = SETTINGS[key].value
    if value is None:
        assert default == "unset"
    else:
        shown = tomllib.loads(f"value = {default.strip('`')}")["value"]
        assert (tuple(shown) if isinstance(shown, list) else shown) == value
    assert variable.startswith(f"`{variable_of(key)}`")
    if flag_of(key) in FLAGS:
        assert f"{flag_of(key)}`" in flag
    else:
        assert flag == "none"


@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if "whole number" in row[0]])
def test_bounds_are_those_of_the_code(key: str) -> None:
    match = re.match(r"whole number, (\d+) to (\d+)", ROWS[key][0])
    assert match is not None
    low, high = int(match[1]), int(match[2])
    for accepted in (low, high):
        load_configuration(Path("none"), {variable_of(key): str(accepted)})
    for refused in (low - 1, high + 1):
        with pytest.raises(ConfigurationInvalid):
            load_configuration(Path("none"), {variable_of(key): str(refused)})


@pytest.mark.parametrize("key", ["log.level", "log.format"])
def test_choices_are_those_of_the_code(key: str) -> None:
    choices = re.findall(r"`(\w+)`", ROWS[key][0])
    for choice in choices:
        load_configuration(Path("none"), {variable_of(key): choice})
    with pytest.raises(ConfigurationInvalid, match="one of " + ", ".join(choices) + "$"):
        load_configuration(Path("none"), {variable_of(key): "other"})


def test_the_example_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    (tmp_path / "kvasir.toml").write_text(example[1])
    assert load_configuration(tmp_path / "kvasir.toml", {}).swarm_holders == 2


def test_paths_are_those_of_the_code() -> None:
    home, default = locate(Path("/h"), {"HOME": "/u"}), locate(None, {"HOME": "/u"})
    for with_home, without in (
        (home.config_file, default.config_file),
        (home.data, default.data),
        (home.state, default.state),
        (home.cache, default.cache),
        (home.control_socket, default.control_socket),
    ):
        row = f"| `HOME{str(with_home).removeprefix('/h')}` | `~{str(without).removeprefix('/u')}` |"
        assert row in PAGE
