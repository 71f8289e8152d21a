"""Another build is another word, and the same build the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node import __version__
from kvasir_node.certification import kernel_build as module
from kvasir_node.certification.kernel_build import kernel_build


def test_the_same_build_has_the_same_word() -> None:
    assert kernel_build() == kernel_build()
    assert kernel_build().startswith(f"{__version__}+")
    assert len(kernel_build()) <= 64


def test_a_driver_a_source_a_library_and_a_processor_each_make_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "reference.py").write_text("a = 1")
    (tmp_path / "_native.so").write_bytes(b"1")
    processor = tmp_path / "cpuinfo"
    processor.write_text("processor: 0\nflags: avx2\n")
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    monkeypatch.setattr(module, "_PROCESSOR_FILE", processor)
    seen = {kernel_build(), kernel_build("driver 1"), kernel_build("driver 2")}
    for path, text in [
        (kernels / "reference.py", "a = 2"),
        (kernels / "another.py", ""),
        (tmp_path / "_native.so", "2"),
        (processor, "processor: 0\nflags: avx2 avx512f\n"),
    ]:
        path.write_text(text)
        seen.add(kernel_build())
    program = tmp_path / "host"
    for text in ("1", "2"):
        program.write_text(text)
        seen.add(kernel_build(programs=[str(program)]))
    assert len(seen) == 9
    processor.unlink()
    assert kernel_build() not in seen


def test_the_libraries_that_compute_are_part_of_it() -> None:
    names = [each for each in module._contents() if len(each) < 64]
    assert b"_native" in names
    assert {b"libggml-base", b"libggml-cpu"} <= {*names}
