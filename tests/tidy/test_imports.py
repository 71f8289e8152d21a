"""Who may know whom. DESIGN, "The house", draws it; docs/architecture.md explains it."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.tidy.repository import imports, python_files, tree_of

# What reads a clock, draws a number, touches a file, a socket, a process or another thread.
IMPURE = frozenset(
    (
        "asyncio",
        "concurrent",
        "ctypes",
        "fcntl",
        "http",
        "importlib",
        "io",
        "locale",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "platform",
        "random",
        "resource",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
        "warnings",
    )
)
PURE_LIBRARIES = frozenset({"msgpack", "cryptography"})
CORES = ("membership", "election", "placement", "audit", "sessions")


def test_the_rules_see_the_code() -> None:
    assert any(
        each.importer == "kvasir_proto/codec.py" and each.top == "msgpack" for each in imports("kvasir_proto")
    )
    assert len(python_files("kvasir_proto")) > 10


def test_the_protocol_is_pure() -> None:
    for each in imports("kvasir_proto"):
        allowed = (
            each.top == "kvasir_proto"
            or each.top in PURE_LIBRARIES
            or (each.top in sys.stdlib_module_names and (each.top not in IMPURE or each.for_types_only))
        )
        assert allowed, f"{each}: kvasir_proto is given what it needs, it does not fetch it"


def test_the_protocol_opens_nothing_and_reads_no_clock() -> None:
    for path in python_files("kvasir_proto"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("open", "print", "input", "exec", "eval"), (
                    f"{path}:{node.lineno} calls {called}"
                )
                assert not called.endswith((".now", ".today", ".utcnow", ".generate")), (
                    f"{path}:{node.lineno} calls {called}: time and keys are arguments"
                )


@pytest.mark.parametrize("core", CORES)
def test_the_cores_are_strangers(core: str) -> None:
    for each in imports(f"kvasir_proto/{core}"):
        for other in CORES:
            assert other == core or not each.is_in(f"kvasir_proto.{other}"), (
                f"{each}: cores do not know each other"
            )


def test_only_the_net_package_knows_libp2p() -> None:
    for each in imports("kvasir_proto", "kvasir_node", "tests", "deploy"):
        if each.top in ("libp2p", "multiaddr"):
            assert each.importer.startswith(("kvasir_node/net/", "tests/loopback/", "tests/node/net/")), str(
                each
            )


@pytest.mark.parametrize(
    "adapter, strangers",
    [
        ("net", ("model", "kernels", "backbone", "worker", "engine", "cli", "app", "driver", "supervisor")),
        ("model", ("net", "kernels", "backbone", "worker", "engine", "cli", "app", "driver", "supervisor")),
        ("kernels", ("net", "backbone", "worker", "cli", "app", "driver", "supervisor")),
    ],
)
def test_adapters_do_not_know_each_other(adapter: str, strangers: tuple[str, ...]) -> None:
    for each in imports(f"kvasir_node/{adapter}"):
        for stranger in strangers:
            assert not each.is_in(f"kvasir_node.{stranger}"), f"{each}: {adapter} is an adapter behind a port"


def test_nothing_depends_on_the_command_line() -> None:
    for each in imports("kvasir_proto", "kvasir_node"):
        if each.is_in("kvasir_node.cli"):
            assert each.importer.startswith(("kvasir_node/cli/", "kvasir_node/__main__.py")), str(each)


def test_one_module_loads_the_native_library() -> None:
    for path in python_files("kvasir_node"):
        if path == "kvasir_node/native_library.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in ("CDLL", "PyDLL", "LoadLibrary", "cdll", "pydll"), (
                    f"{path}:{node.lineno}: shared libraries are loaded by native_library alone, "
                    "which sees to it that there is one ggml"
                )


def test_the_product_does_not_import_its_tests() -> None:
    for each in imports("kvasir_proto", "kvasir_node", "deploy"):
        assert each.top != "tests", str(each)
