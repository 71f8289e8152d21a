"""Settings: precedence, origins, and a sentence for everything that is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.config import Configuration, load_configuration, variable_of
from kvasir_proto.errors import ConfigurationInvalid, UsageError
from kvasir_proto.ids import node_id_of

NODE = node_id_of(bytes(32))
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{NODE}"
EVERYTHING = f"""
model = "demo"
[log]
level = "debug"
format = "json"
[listen]
host = "0.0.0.0"
port = 4001
[data]
port = 4002
[swarm]
bootstrap = ["{ADDRESS}"]
workers_min = 3
holders = 2
electors = ["{NODE}"]
lan = true
[gateway]
enabled = false
host = "0.0.0.0"
port = 8000
names = ["GPU.example.org", "box"]
origins = ["https://chat.example.org", "http://[::1]:3000"]
[node]
ranks = ["bulk", "backbone"]
memory_mib = 512
[engine]
threads = 4
context_tokens = 8192
ubatch_tokens = 256
sessions = 1
device = "Vulkan0"
kernel = "emulated-f16"
kernel_device = "some card"
[models]
cache_mib = 1000
give_mib_per_second = 5
tell_address = true
follow_addresses = true
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvasir.toml"
    file.write_text(text)
    return file


def test_no_file_no_variables_no_flags_is_the_defaults(tmp_path: Path) -> None:
    assert load_configuration(tmp_path / "none.toml", {"HOME": "/h"}) == Configuration()
    assert {str(setting.origin) for setting in Configuration().settings()} == {"default"}


def test_every_key_can_stand_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, EVERYTHING)
    configuration = load_configuration(file, {})
    assert configuration.log_level == "debug"
    assert configuration.log_format == "json"
    assert configuration.listen_host == "0.0.0.0"
    assert (configuration.listen_port, configuration.data_port) == (4001, 4002)
    assert configuration.swarm_bootstrap == (ADDRESS,)
    assert (configuration.swarm_workers_min, configuration.swarm_holders) == (3, 2)
    assert (configuration.swarm_electors, configuration.swarm_lan) == ((NODE,), True)
    assert (configuration.gateway_enabled, configuration.gateway_host) == (False, "0.0.0.0")
    assert (configuration.gateway_port, configuration.gateway_names) == (8000, ("gpu.example.org", "box"))
    assert configuration.gateway_origins == ("https://chat.example.org", "http://[::1]:3000")
    assert (configuration.node_ranks, configuration.node_memory_mib) == (("backbone", "bulk"), 512)
    assert configuration.engine_threads == 4
    assert (configuration.engine_context_tokens, configuration.engine_ubatch_tokens) == (8192, 256)
    assert configuration.engine_sessions == 1
    assert (configuration.engine_device, configuration.engine_kernel) == ("Vulkan0", "emulated-f16")
    assert configuration.engine_kernel_device == "some card"
    assert (configuration.models_cache_mib, configuration.models_cache_bytes) == (1000, 1000 << 20)
    assert configuration.models_give_mib_per_second == 5
    assert configuration.models_tell_address
    assert configuration.models_follow_addresses
    assert configuration.model == "demo"
    assert {str(setting.origin) for setting in configuration.settings()} == {f"file {file}"}


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nthreads = 2\n[log]\nlevel = 'error'\n[data]\nport = 9\n")
    configuration = load_configuration(
        file,
        {"KVASIR_ENGINE_THREADS": "3", "KVASIR_LOG_LEVEL": "warning"},
        {"engine.threads": 4, "log.level": None},
    )
    origins = {setting.name: str(setting.origin) for setting in configuration.settings()}
    assert (configuration.engine_threads, origins["engine.threads"]) == (4, "flag --threads")
    assert (configuration.log_level, origins["log.level"]) == ("warning", "environment KVASIR_LOG_LEVEL")
    assert (configuration.data_port, origins["data.port"]) == (9, f"file {file}")
    assert (configuration.listen_port, origins["listen.port"]) == (0, "default")


def test_a_variable_sets_every_key(tmp_path: Path) -> None:
    for setting in load_configuration(write(tmp_path, EVERYTHING), {}).settings():
        value = setting.value
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        found = load_configuration(tmp_path / "none", {variable_of(setting.name): text})
        assert {each.name: each.value for each in found.settings()}[setting.name] == value


@pytest.mark.parametrize(
    "text, names",
    [
        ("[log]\nlevel = 'loud'", ["log.level", "loud", "debug, info"]),
        ("[listen]\nport = 65536", ["listen.port", "65536", "65535"]),
        ("[listen]\nport = -1", ["listen.port"]),
        ("[listen]\nport = '4001x'", ["listen.port"]),
        ("[listen]\nport = true", ["listen.port", "True"]),
        ("[listen]\nport = '4001'", ["listen.port", "'4001'", "a whole number"]),
        ("[swarm]\nworkers_min = '3'", ["swarm.workers_min", "'3'"]),
        ("[swarm]\nlan = 'true'", ["swarm.lan", "true or false"]),
        ("[listen]\nport = 1.5", ["listen.port"]),
        ("[listen]\nhost = 'localhost'", ["listen.host", "IP address"]),
        ("[listen]\nhost = 7", ["listen.host"]),
        ("[engine]\nthreads = 0", ["engine.threads"]),
        ("[swarm]\nlan = 1", ["swarm.lan", "true or false"]),
        ("[swarm]\nlan = 'yes'", ["swarm.lan", "true or false"]),
        ("[swarm]\nelectors = ['me']", ["swarm.electors", "node ids"]),
        ("[swarm]\nelectors = 7", ["swarm.electors", "node ids"]),
        ("[gateway]\nhost = 'localhost'", ["gateway.host", "IP address"]),
        ("[gateway]\nnames = ['a b']", ["gateway.names", "host names"]),
        ("[gateway]\nnames = ['a:80']", ["gateway.names"]),
        ("[gateway]\nnames = [7]", ["gateway.names"]),
        ("[gateway]\norigins = ['chat.example.org']", ["gateway.origins", "https://"]),
        ("[gateway]\norigins = ['https://chat.example.org/']", ["gateway.origins"]),
        ("[gateway]\norigins = ['https://Chat.example.org']", ["gateway.origins"]),
        ("[gateway]\norigins = ['*']", ["gateway.origins"]),
        ("[gateway]\norigins = 'null'", ["gateway.origins"]),
        ("[gateway]\ntoken = 'secret'", ["gateway.token"]),
        ("[node]\nranks = []", ["node.ranks", "backbone, output, bulk"]),
        ("[node]\nranks = ['bulk', 'bulk']", ["node.ranks", "at most once"]),
        ("[node]\nranks = 'worker'", ["node.ranks", "backbone, output, bulk"]),
        ("[engine]\ndevice = ''", ["engine.device", "doctor"]),
        ("[engine]\ndevice = 'CUDA0,CUDA1'", ["engine.device", "one device"]),
        ("[engine]\ndevice = 0", ["engine.device"]),
        ("[swarm]\nbootstrap = ['/ip4/127.0.0.1/tcp/4001']", ["swarm.bootstrap", "/p2p/"]),
        ("[swarm]\nbootstrap = [1]", ["swarm.bootstrap"]),
        ("[swarm]\nbootstrap = 1", ["swarm.bootstrap"]),
        (f"[swarm]\nbootstrap = ['/ip4/127.0.0.1/tcp/70000/p2p/{NODE}']", ["swarm.bootstrap"]),
        ("[swarm]\nbootstrap = ['/ip4/127.0.0.1/tcp/4001/p2p/QmNotOurs']", ["swarm.bootstrap"]),
        ("[swarm]\nholders = 0", ["swarm.holders"]),
        ("model = ''", ["model"]),
        ("model = 3", ["model"]),
        ("[log]\nlevle = 'info'", ["log.levle", "did you mean log.level?"]),
        ("nonsense = 1", ["nonsense"]),
        ("[nonsense]", ["nonsense"]),
        ("[node.ranks]", ["node.ranks"]),
        ("[log.level]\ndeep = 1", ["log.level"]),
        ("log = 1", ["log"]),
        ("= what", ["TOML", "line 1"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, names: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigurationInvalid) as refusal:
        load_configuration(file, {})
    assert refusal.value.exit_code == 6
    for name in [*names, str(file)]:
        assert name in str(refusal.value)


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigurationInvalid, match=r"KVASIR_LOG_LEVLE.*did you mean KVASIR_LOG_LEVEL\?"):
        load_configuration(Path("none"), {"KVASIR_LOG_LEVLE": "info"})


def test_what_all_variables_begin_with_is_no_likeness() -> None:
    with pytest.raises(ConfigurationInvalid, match=r"KVASIR_FOO \(environment\)$"):
        load_configuration(Path("none"), {"KVASIR_FOO": "1"})


def test_the_variable_that_names_the_home_is_not_a_key() -> None:
    assert load_configuration(Path("none"), {"KVASIR_HOME": "/srv/k"}) == Configuration()


def test_a_bad_flag_and_a_bad_variable_are_named() -> None:
    with pytest.raises(UsageError, match="flag --listen-port"):
        load_configuration(Path("none"), {}, {"listen.port": 70000})
    with pytest.raises(ConfigurationInvalid, match="environment KVASIR_LISTEN_PORT"):
        load_configuration(Path("none"), {"KVASIR_LISTEN_PORT": "٣"})
    with pytest.raises(ConfigurationInvalid, match=r"no setting engine\.speed"):
        load_configuration(Path("none"), {}, {"engine.speed": 1})


def test_a_file_that_is_not_text_or_not_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kvasir.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationInvalid, match="UTF-8"):
        load_configuration(tmp_path / "kvasir.toml", {})
    with pytest.raises(ConfigurationInvalid, match="cannot read"):
        load_configuration(tmp_path, {})


def test_an_empty_variable_for_a_list_is_an_empty_list() -> None:
    assert load_configuration(Path("none"), {"KVASIR_SWARM_BOOTSTRAP": ""}).swarm_bootstrap == ()


@pytest.mark.parametrize("text, reason", [("a=" + 1000 * "[", "nested"), ("a=" + 5000 * "1", "too long")])
def test_a_file_that_python_cannot_read_for_its_depth_or_a_number_is_an_error(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigurationInvalid, match=reason):
        load_configuration(write(tmp_path, text), {})
