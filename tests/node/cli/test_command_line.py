"""What every command has in common: help, exit statuses, clean streams, strange surroundings."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_node import cli
from kvasir_node.home_lock import HomeLock
from kvasir_proto.ids import node_id_of
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.cli.invocation import TIMEOUT_S, call, call_process

pytestmark = [pytest.mark.loopback, pytest.mark.slow]


def test_a_bare_call_prints_help_and_touches_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    outcome = call_process(home=home)
    assert outcome.status == 0
    for command in (
        "demo",
        "init",
        "run",
        "status",
        "peers",
        "ping",
        "invite",
        "revoke",
        "recover",
        "generate",
        "models",
        "stop",
        "version",
    ):
        assert f"  {command} " in outcome.out
    assert "3 not running" in outcome.out
    assert outcome.err == ""
    assert not home.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("--nosuch",),
        ("status", "--nosuch"),
        ("run", "--listen-port", "x"),
        ("run", "surplus"),
        ("generate",),
        ("generate", "text", "--token-ids", "1"),
        ("generate", ""),
        ("generate", "--token-ids", "1,x"),
        ("generate", "--token-ids", "-1"),
        ("generate", "--token-ids", str(2**31)),
        ("generate", "text", "--tokens", "0"),
        ("generate", "text", "--temperature", "-1"),
        ("generate", "text", "--temperature", "nan"),
        ("generate", "text", "--top-p", "1.5"),
        ("generate", "text", "--seed", "-1"),
        ("demo", "--workers", "0"),
        ("demo", "--kill-worker", "--workers", "2"),
        ("demo", "--prompt", ""),
        ("demo", "--mixed", "--workers", "2"),
        ("demo", "--mixed", "--kill-worker"),
        ("run", "--kernel", "cuda"),
        ("init", "--model", "x"),
        ("init", "--compact-activations"),
        ("init", "--partial-sums"),
        ("init", "--admission", "open"),
        ("init", "--electorate", "pinned"),
        ("models", "add"),
        ("stop", "--timeout", "-1"),
        ("stop", "--timeout", "nan"),
        ("demo", "--temperature", "nan"),
        ("demo", "--prompt", "\udcff"),
        ("init", "--found", "--model", ""),
        ("run", "--model", ""),
        ("models", "add", ""),
        ("--home", "", "status"),
        ("run", "--listen-port", "70000"),
        ("run", "--listen-host", "nowhere"),
        ("run", "--bootstrap", "nonsense"),
        ("run", "--join", "/nonsense"),
        ("ping",),
        ("ping", "all", "--count", "0"),
        ("ping", "all", "--timeout", "nan"),
        ("invite", "--expires", "soon"),
        ("invite", "--ranks", ""),
        ("run", "--threads", "0"),
        ("run", "--device", ""),
        ("measure", "logits", "--model", "x.gguf", "--device", ""),
        ("measure", "logits", "--model", "x.gguf", "--reference-device", " "),
        ("measure", "layer", "--batches", ""),
        ("--log-level", "loud", "status"),
    ],
)
def test_a_wrong_call_exits_2_and_says_so_on_standard_error(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    outcome = call(*arguments, home=tmp_path)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err != ""


def test_a_list_of_batches_that_is_none_is_refused_in_its_own_words(tmp_path: Path) -> None:
    outcome = call("measure", "layer", "--batches", "x", home=tmp_path)
    assert outcome.status == 2
    assert outcome.sentence.startswith("--batches takes numbers of tokens such as 256 or 1x32")
    outcome = call("measure", "logits", "--model", "x.gguf", "--chunks", "1,,2", home=tmp_path)
    assert outcome.sentence.startswith("--chunks takes numbers")


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the single process's file was made")

    monkeypatch.setattr("kvasir_node.cli.measure.prepare_reference", fail)
    model = make_qwen3moe(tmp_path / "model.gguf", ModelShape(n_layer=1, n_vocab=96))
    ask = ("measure", "logits", "--model", str(model), "--token-ids")
    outcome = call(*ask, "5,96,7", home=tmp_path / "home")
    assert outcome.status == 2
    assert "token id 96 is outside the vocabulary of 96" in outcome.err


@pytest.mark.parametrize("command", [("status",), ("init",), ("run",), ("models", "list")])
def test_a_home_whose_path_is_no_utf8_is_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    outcome = call(*command, home=Path(os.fsdecode(os.fsencode(tmp_path) + b"/h\xff")))
    assert outcome.status == 6
    assert "is not valid UTF-8: choose another --home" in outcome.sentence
    assert not list(tmp_path.iterdir())


def test_a_model_whose_path_is_no_utf8_is_refused(tmp_path: Path) -> None:
    outcome = call("models", "add", os.fsdecode(b"/nowhere/m\xff.gguf"), home=tmp_path)
    assert outcome.status == 7
    assert "its path is not valid UTF-8" in outcome.sentence


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("generate", "text", "--top-k", str(10**20)), "--top-k"),
        (("run", "--join", f"/ip4/127.0.0.1/tcp/99999/p2p/{node_id_of(bytes(32))}"), "--join"),
        (("init", "--join", "/ip4/127.0.0.1/tcp/1"), "--join"),
    ],
)
def test_a_wrong_value_is_blamed_on_the_flag_that_had_it(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    outcome = call(*arguments, home=tmp_path / "home")
    assert outcome.status == 2
    assert named in outcome.err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("command", ["status", "generate text", "stop"])
def test_without_a_daemon_the_status_is_3(tmp_path: Path, command: str) -> None:
    outcome = call(*command.split(), home=tmp_path)
    assert outcome.status == 3
    assert "no daemon runs in this home" in outcome.out + outcome.err


def test_status_says_that_nothing_runs_as_json_too(tmp_path: Path) -> None:
    outcome = call("status", "--json", home=tmp_path)
    assert outcome.status == 3
    assert outcome.document["state"] == "not running"
    assert outcome.err == ""
    outcome = call("status", "--check", home=tmp_path)
    assert (outcome.status, outcome.err) == (3, "")


@pytest.mark.parametrize(
    "arguments, content, said",
    [
        (("status",), "nonsense = ", "is not valid TOML"),
        (("status",), 'log.colour = "red"', "log.colour"),
        (("run",), "[listen]\nport = 70000", "listen.port"),
        (("run",), "", "Found one with 'kvasir-node init --found'"),
        (("status",), "[log]\nlevel = 'loud'", "log.level"),
    ],
)
def test_a_configuration_that_cannot_be_used_exits_6_and_names_the_place(
    tmp_path: Path, arguments: tuple[str, ...], content: str, said: str
) -> None:
    (tmp_path / "kvasir.toml").write_text(content)
    flags = () if "[log]" in content else ("--log-level", "error")
    outcome = call(*flags, *arguments, home=tmp_path)
    assert outcome.status == 6, outcome
    assert outcome.out == ""
    assert said in outcome.sentence


def test_a_damaged_file_ends_a_workers_start_with_6(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "engine-generation").write_text("{")
    backbone = f"/ip4/127.0.0.1/tcp/9/p2p/{node_id_of(bytes(32))}"
    outcome = call_process("--log-level", "error", "run", "--bootstrap", backbone, home=tmp_path)
    assert outcome.status == 6, outcome
    assert "engine-generation is damaged" in outcome.sentence


def test_an_unknown_variable_exits_6(tmp_path: Path) -> None:
    outcome = call_process("status", home=tmp_path, environment={"KVASIR_LISTEN_PROT": "1"})
    assert outcome.status == 6
    assert "did you mean KVASIR_LISTEN_PORT" in outcome.sentence


@pytest.mark.parametrize("arguments", [("init",), ("models", "add", "x.gguf"), ("run",), ("demo",)])
def test_a_home_that_is_no_directory_exits_6(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Root may write anywhere, so a place that cannot be written is here a file where a directory must be."""
    home = tmp_path / "file"
    home.write_bytes(b"")
    outcome = call(*arguments, home=home)
    assert outcome.status == 6
    assert str(home) in outcome.sentence


def test_status_of_a_home_that_is_no_directory_is_not_running(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_bytes(b"")
    assert call("status", home=home).status in (3, 6)


@pytest.mark.parametrize("command", ["version", "status", "models list"])
def test_without_home_and_colours_and_with_any_locale_commands_work(tmp_path: Path, command: str) -> None:
    surroundings: dict[str, str | None] = {
        "HOME": None,
        "XDG_RUNTIME_DIR": None,
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "LC_ALL": "C",
        "LANG": None,
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
    outcome = call_process(*command.split(), environment=surroundings)
    assert outcome.status == (3 if command == "status" else 0), outcome
    assert "\x1b" not in outcome.out + outcome.err


def test_letters_that_the_locale_lacks_are_replaced(tmp_path: Path) -> None:
    outcome = call_process(
        "models", "add", "näme…gone.gguf", home=tmp_path, environment={"PYTHONIOENCODING": "ascii"}
    )
    assert outcome.status == 7
    assert "gone.gguf" in outcome.sentence


@pytest.mark.parametrize("arguments", [("version",), ("version", "--json"), ()])
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvasir_node", "--home", str(tmp_path), *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""


def run_in_shell(command: str, home: Path) -> subprocess.CompletedProcess[bytes]:
    """Run ``command``, in which `$B` is the command line in ``home``, as a shell would."""
    begin = shlex.join([sys.executable, "-m", "kvasir_node", "--home", str(home)])
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("$B", begin)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "command, status, said",
    [
        ("$B status >&-", 1, b"kvasir-node: standard output cannot be written: Bad file descriptor\n"),
        ("$B status --json >&-", 1, b"kvasir-node: standard output cannot be written: Bad file descriptor\n"),
        ("$B models list --json >/dev/full", 1, b"output cannot be written: No space left on device\n"),
        ("$B status --check >&-", 3, b""),
        ("$B version >&- 2>&-", 1, b""),
        ("$B generate x >&-", 3, b"no daemon runs in this home"),
        ("$B generate - <&-", 2, b"kvasir-node: the prompt is empty\n"),
        ("printf 'a\\377b' | $B generate -", 2, b"kvasir-node: the prompt is not text in UTF-8\n"),
        ("$B generate \"$(printf 'a\\377b')\"", 2, b"kvasir-node: the prompt is not text in UTF-8\n"),
    ],
)
def test_closed_full_and_odd_streams_end_with_a_sentence(
    tmp_path: Path, command: str, status: int, said: bytes
) -> None:
    done = run_in_shell(command, tmp_path)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 1, done.stderr


def test_a_closed_output_is_taken_by_no_other_file(tmp_path: Path) -> None:
    """What is opened first would get its number, and whatever a child printed."""
    code = (
        "import os, sys; from kvasir_node.cli import main; main(['version']);"
        "sys.stderr.write(os.readlink('/proc/self/fd/1'))"
    )
    command = f"exec {shlex.join([sys.executable, '-c', code])} >&-"
    assert run_in_shell(command, tmp_path).stderr.endswith(b"/dev/null")


STOPPED_AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from kvasir_node.__main__ import main
sys.argv = ['kvasir-node', '--home', {home!r}, {command!r}]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["kvasir_node.cli", "click", "kvasir_node.cli.generate", "trio"])
def test_ctrl_c_while_a_module_is_imported_is_a_sentence(tmp_path: Path, module: str) -> None:
    """It comes exactly when that module is looked for."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from kvasir_node.__main__ import main\n"
        f"sys.argv = ['kvasir-node', '--home', {str(tmp_path)!r}, 'generate', 'x']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, b"kvasir-node: interrupted")


@pytest.mark.parametrize("module", ["kvasir_node.cli", "click", "trio", "kvasir_node.app"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command, status", [("demo", 1), ("run", 0)])
def test_being_told_to_stop_while_a_module_is_imported_has_the_documented_status(
    tmp_path: Path, module: str, number: signal.Signals, command: str, status: int
) -> None:
    code = STOPPED_AT_IMPORT.format(module=module, number=int(number), home=str(tmp_path), command=command)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    said = b"" if status == 0 else f"kvasir-node: {how}".encode()
    assert (done.returncode, done.stderr.strip()) == (status, said)


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + STOPPED_AT_IMPORT.format(
        module="click", number=int(signal.SIGHUP), home=str(tmp_path), command="status"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3, done.stderr


def test_version_needs_neither_libp2p_nor_llama(tmp_path: Path) -> None:
    code = (
        "import sys; from kvasir_node.cli import main; status = main(['version', '--json']);"
        "sys.exit(any(each in sys.modules for each in ('libp2p', 'llama_cpp', 'trio')) or status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) >= {"kvasir", "protocol", "python", "llama_cpp_python", "libp2p"}


def test_a_second_daemon_in_one_home_exits_4(tmp_path: Path) -> None:
    assert call("init", "--found", home=tmp_path).status == 0
    with HomeLock(tmp_path / "lock"):
        outcome = call_process("run", home=tmp_path)
        assert outcome.status == 4
        assert f"process {os.getpid()} runs a node" in outcome.sentence


def test_every_command_that_is_listed_can_be_loaded_and_helps(tmp_path: Path) -> None:
    for name in cli._COMMANDS:
        assert call(name, "--help", home=tmp_path).status == 0, name
