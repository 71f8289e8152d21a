"""What llama.cpp would refuse later is refused when a model is added, with llama.cpp's own reason."""

from __future__ import annotations

import math
import resource
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_node.backbone import trial
from kvasir_node.backbone.trial import try_backbone_file
from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_node.cli import main
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import ModelUnusable
from tests.model_makers import MAKERS, ModelShape, make_deepseek2, make_qwen3moe


def with_other_key(old: bytes, new: bytes) -> Callable[[Path], Path]:
    """A model with another key or name of the same length: our reader has nothing to say to that."""
    assert len(old) == len(new)

    def make(path: Path) -> Path:
        data = make_qwen3moe(path, ModelShape(n_layer=1)).read_bytes()
        assert data.count(old) >= 1
        path.write_bytes(data.replace(old, new))
        return path

    return make


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "hyper-parameter missing": (
        with_other_key(b"qwen3moe.context_length", b"qwen3moe.context_lengXX"),
        r"error loading model hyperparameters: key not found in model: qwen3moe\.context_length$",
    ),
    "hyper-parameter that contradicts tensors": (
        with_other_key(b"qwen3moe.attention.head_count\x04", b"qwen3moe.attention.head_counX\x04"),
        r"tensor 'blk\.0\.attn_q\.weight' has wrong shape",
    ),
    "vocabulary missing": (
        with_other_key(b"tokenizer.ggml.model", b"tokenizer.ggml.modeX"),
        r"error loading model vocabulary: key not found in model: tokenizer\.ggml\.model$",
    ),
    "tensor missing": (
        with_other_key(b"blk.0.attn_q.weight", b"blk.0.attn_X.weight"),
        r"tensor 'blk\.0\.attn_q\.weight' not found$",
    ),
    "unknown architecture": (
        with_other_key(b"qwen3moe", b"qwen9moe"),
        "unknown model architecture: 'qwen9moe'$",
    ),
    "groups that do not divide the experts": (
        lambda path: make_deepseek2(path, ModelShape(n_expert=7)),
        r"llama\.cpp gave up on the model: GGML_ASSERT\(hparams\.n_expert % .*\) failed$",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_refuses_is_not_added(case: str, tmp_path: Path) -> None:
    make, reason = REFUSED[case]
    path = make(tmp_path / "bad.gguf")
    store = ModelStore(tmp_path / "models")
    with pytest.raises(ModelUnusable, match=reason) as caught:
        store.add(path, judge=try_backbone_file)
    assert str(caught.value).startswith(f"{path} cannot be used: llama.cpp ")
    assert not store.list()


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["qwen3moe-scales", "deepseek2-merged", "gpt-oss", "llama4"])
def test_what_llama_cpp_takes_is_added_and_judged_again(maker: str, tmp_path: Path) -> None:
    path = MAKERS[maker](tmp_path / "good.gguf", ModelShape())
    store = ModelStore(tmp_path / "models")
    assert store.add(path, judge=try_backbone_file) == store.add(path, judge=try_backbone_file)


def with_epsilon(path: Path, epsilon: float) -> Path:
    """A model whose norms have this epsilon, which our own reader would refuse."""
    data = make_qwen3moe(path, ModelShape(n_layer=1)).read_bytes()
    good = b"layer_norm_rms_epsilon" + struct.pack("<If", 6, 1e-6)
    assert data.count(good) == 1
    path.write_bytes(data.replace(good, b"layer_norm_rms_epsilon" + struct.pack("<If", 6, epsilon)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [-1e-6, math.nan, -math.inf])
def test_what_ends_llama_cpp_at_the_first_token_is_found_out(epsilon: float, tmp_path: Path) -> None:
    path = with_epsilon(tmp_path / "model.gguf", epsilon)
    with pytest.raises(
        ModelUnusable, match=r"^llama\.cpp gave up on the model: GGML_ASSERT\(eps >= 0.*failed$"
    ):
        try_backbone_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("base", [0.0, math.nan, -1.0, 1e-45])
def test_a_model_without_finite_logits_is_found_out(base: float, tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "model.gguf", ModelShape(n_layer=1))
    data = path.read_bytes()
    good = b"rope.freq_base" + struct.pack("<If", 6, 10000.0)
    assert data.count(good) == 1
    path.write_bytes(data.replace(good, b"rope.freq_base" + struct.pack("<If", 6, base)))
    with pytest.raises(ModelUnusable, match=r"^the model gives no finite logits at position [01]$"):
        try_backbone_file(path)


@pytest.mark.slow
def test_of_a_large_trunk_only_the_header_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_epsilon(tmp_path / "model.gguf", -1.0)
    assert trial.is_decoded(path)
    for limit in ("DECODED_BYTES_MAX", "DECODED_FILE_BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(trial, limit, 0)
            assert not trial.is_decoded(path)
    Trunk(path, TrunkSettings(n_ctx=64, n_ubatch=64, n_threads=1), None, header_only=True).close()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("init", "--found", "--model"), ("models", "add")])
def test_commands_end_with_7_and_the_reason(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = REFUSED["hyper-parameter missing"][0](tmp_path / "bad.gguf")
    home = str(tmp_path / "home")
    assert main(["--home", home, *command, str(path)]) == 7
    said = capsys.readouterr().err
    assert "key not found in model: qwen3moe.context_length" in said
    assert main(["--home", home, "models", "list"]) == 0
    assert "no models yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "returncode, out, err, sentence",
    [
        (-11, b"", b"", "does not survive this model: it ended with SIGSEGV"),
        (-6, b"", b"terminate called\n", "it ended with SIGABRT$"),
        (1, b"", b"MemoryError", "it ended with status 1"),
        (7, b"", b"", "it ended with status 7"),
        (7, b"reason " * 1000, b"", "^reason reason"),
    ],
)
def test_every_end_of_the_child_is_a_sentence(
    returncode: int, out: bytes, err: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], returncode, out, err)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ModelUnusable, match=sentence) as caught:
        try_backbone_file(Path("backbone.gguf"))
    assert len(str(caught.value)) <= 1024


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 0.01)
    with pytest.raises(ModelUnusable, match="did not finish trying the model"):
        try_backbone_file(tmp_path / "backbone.gguf")


@pytest.mark.slow
def test_a_file_that_is_quoted_does_not_write_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = with_other_key(b"qwen3moe", b"q\x1b[2\nmoe")(tmp_path / "model.gguf")
    assert main(["--home", str(tmp_path / "home"), "models", "add", str(path)]) == ModelUnusable.exit_code
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("kvasir-node: ")
    assert said.isprintable()


@pytest.mark.slow
def test_nothing_is_kept_of_a_model_that_llama_cpp_refuses(tmp_path: Path) -> None:
    path = make_deepseek2(tmp_path / "model.gguf", ModelShape(n_expert=7))
    with pytest.raises(ModelUnusable):
        ModelStore(tmp_path / "models").add(path, None, try_backbone_file)
    assert not list((tmp_path / "models").glob("*/backbone.gguf"))


@pytest.mark.parametrize(
    "limit, allowed, bound",
    [(8, resource.RLIM_INFINITY, 8), (8, 4, 4), (8, 16, 8), (0, resource.RLIM_INFINITY, 0), (0, 4, 0)],
)
def test_a_tighter_limit_of_this_user_is_kept(limit: int, allowed: int, bound: int) -> None:
    assert trial._within(limit, allowed) == bound
