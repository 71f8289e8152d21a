"""Addresses of models: which are taken, and how they are shown."""

from __future__ import annotations

import pytest

from kvasir_node.model.model_url import ModelUrl
from kvasir_proto.errors import UsageError


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a.gguf",
        "https:///a.gguf",
        "https://host/",
        "https://host:port/a.gguf",
        "https://user:s3cret@/a.gguf",
        "https://user:s3cret@host:port/a.gguf",
        "https://user:s3cret@host/a.gguf",
        "https://user:s3cret@host/",
        "https://host/%1b[2J%0a.gguf",
        "https://host/a%2f..%2f..%2fb.gguf",
        "https://host/a b.gguf",
        "https://h\u00f6st/a.gguf",
        "https://host/" + "a" * 3000,
    ],
)
def test_what_is_no_address_of_a_file_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        ModelUrl(url)
    assert "s3cret" not in str(refused.value)
    assert str(refused.value).isprintable()


def test_an_address_is_shown_without_what_gives_access() -> None:
    assert str(ModelUrl("https://host/dir/a.gguf?signature=1#b")) == "https://host/dir/a.gguf"
    assert ModelUrl("https://host/dir/a%20b.gguf").name == "a b.gguf"
    assert ModelUrl("https://host/dir/a.gguf?x").with_name("b c.gguf").url == "https://host/dir/b%20c.gguf?x"
