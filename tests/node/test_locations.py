"""Where a home's files are, for every kind of environment a node is started in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvasir_node.locations import SOCKET_PATH_BYTES_MAX, locate
from kvasir_proto.errors import ConfigurationInvalid


def test_home_overrides_everything() -> None:
    environment = {
        "HOME": "/home/ada",
        "XDG_DATA_HOME": "/xdg/data",
        "XDG_RUNTIME_DIR": "/run/user/7",
        "KVASIR_HOME": "/elsewhere",
    }
    locations = locate(Path("/srv/kvasir"), environment)
    assert all(path.is_relative_to("/srv/kvasir") for path in locations.named().values())


def test_the_variable_stands_in_for_the_flag() -> None:
    assert locate(None, {"HOME": "/home/ada", "KVASIR_HOME": "/srv/k"}) == locate(
        Path("/srv/k"), {"HOME": "/h"}
    )


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(Path("node-1"), {"HOME": "/home/ada"}).data == tmp_path / "node-1"


def test_xdg_directories() -> None:
    locations = locate(
        None,
        {
            "HOME": "/home/ada",
            "XDG_CONFIG_HOME": "/c",
            "XDG_DATA_HOME": "/d",
            "XDG_STATE_HOME": "/s",
            "XDG_CACHE_HOME": "/k",
            "XDG_RUNTIME_DIR": "/run/user/7",
        },
    )
    assert locations.config_file == Path("/c/kvasir/kvasir.toml")
    assert locations.identity_file == Path("/d/kvasir/identity.pem")
    assert locations.models == Path("/d/kvasir/models")
    assert locations.state == Path("/s/kvasir")
    assert locations.cache == Path("/k/kvasir")
    assert locations.control_socket == Path("/run/user/7/kvasir/control.sock")


def test_xdg_defaults_and_relative_values_are_ignored() -> None:
    locations = locate(None, {"HOME": "/home/ada", "XDG_DATA_HOME": "not/absolute"})
    assert locations.data == Path("/home/ada/.local/share/kvasir")
    assert locations.config_file == Path("/home/ada/.config/kvasir/kvasir.toml")
    assert locations.runtime == Path("/home/ada/.local/state/kvasir/run")


def test_termux_prefix_holds_the_runtime_directory() -> None:
    prefix = "/data/data/com.termux/files/usr"
    locations = locate(None, {"HOME": "/data/data/com.termux/files/home", "PREFIX": prefix})
    assert locations.runtime == Path(prefix, "var/run/kvasir")
    assert locate(None, {"HOME": "/h", "PREFIX": "/p", "TERMUX_VERSION": "0.118"}).runtime == Path(
        "/p/var/run/kvasir"
    )


def test_prefix_of_a_build_environment_is_not_termux() -> None:
    assert locate(None, {"HOME": "/h", "PREFIX": "/usr/local"}).runtime == Path("/h/.local/state/kvasir/run")


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_without_home_the_user_database_is_asked(environment: dict[str, str]) -> None:
    import pwd

    expected = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/share/kvasir"
    assert locate(None, environment).data == expected


def test_without_any_home_the_user_is_told_what_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_uid: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(ConfigurationInvalid, match="--home"):
        locate(None, {})


def test_a_long_home_gets_a_short_socket() -> None:
    home = Path("/" + "deep/" * 30)
    for environment in (
        {"HOME": "/home/ada"},
        {"HOME": "/home/ada", "XDG_RUNTIME_DIR": "/run/user/7"},
    ):
        first, again = locate(home, environment), locate(home, environment)
        other = locate(home / "other", environment)
        assert len(os.fsencode(first.control_socket)) <= SOCKET_PATH_BYTES_MAX
        assert first == again
        assert first.runtime != other.runtime, "two homes must not share a socket"
        assert first.data == home


def test_the_longest_socket_path_that_fits_is_used_and_works(tmp_path: Path) -> None:
    import socket

    room = SOCKET_PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - len("/run/control.sock") - 1
    home = tmp_path / ("h" * room)
    locations = locate(home, {"HOME": "/h"})
    assert len(os.fsencode(locations.control_socket)) == SOCKET_PATH_BYTES_MAX
    locations.prepare()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(locations.control_socket))
    assert not locate(tmp_path / ("h" * (room + 1)), {"HOME": "/h"}).runtime.is_relative_to(tmp_path)


def test_no_place_short_enough_for_the_socket_is_an_error() -> None:
    deep = "/" + "deep/" * 30
    with pytest.raises(ConfigurationInvalid, match="107 bytes"):
        locate(Path(deep), {"HOME": deep})


def test_nothing_is_ever_put_in_a_shared_temporary_directory() -> None:
    locations = locate(None, {"HOME": "/home/ada", "TMPDIR": "/tmp", "TEMP": "/tmp"})
    assert not any(path.is_relative_to("/tmp") for path in locations.named().values())


def test_prepare_makes_private_directories_and_tightens_open_ones(tmp_path: Path) -> None:
    locations = locate(tmp_path / "home", {"HOME": "/h"})
    (tmp_path / "home").mkdir(mode=0o755)
    locations.prepare()
    locations.prepare()
    for directory in (locations.data, locations.models, locations.state, locations.cache, locations.runtime):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_prepare_says_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the home should be")
    with pytest.raises(ConfigurationInvalid, match="home"):
        locate(tmp_path / "home", {"HOME": "/h"}).prepare()


def test_prepare_refuses_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationInvalid, match="another user"):
        locate(tmp_path / "home", {"HOME": "/h"}).prepare()
