"""A child process that renders a model's chat template, which is a stranger's program.

jinja2's immutable sandbox keeps a template from Python's insides and from changing what it is given. It
bounds neither time nor memory (``{{ 9 ** (9 ** 9) }}`` is one operation that no thread can be called back
from), so rendering has a process of its own, with limits of the operating system: processor time for each
text, memory, no file or socket beyond those it has, no process, nothing written to a disk. What breaks
through the sandbox is still in there.

One text after another (`confinement`), in JSON. It says ``prompt``; or ``refused`` with the template's own
words to whoever wrote the messages; or ``failed`` with what is wrong with the template. `chat_template` is
the other end.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox

from kvasir_node.confinement import answer_requests, confine

REQUEST_BYTES_MAX: Final = 16 << 20
PROMPT_LENGTH_MAX: Final = 2 << 20
"""Characters of what a template makes of messages: twice what messages may have."""
ANSWER_BYTES_MAX: Final = 4 * PROMPT_LENGTH_MAX + 4096
PROCESSOR_TIME_S: Final = 3
"""For one text, or up to a second more: the kernel counts whole ones."""
MEMORY_BYTES: Final = 512 << 20
_WORDS_MAX: Final = 500


class _Refused(Exception):
    """The template itself says that it makes nothing of these messages."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant says, for training. Here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        """What is in between, as if nothing was around it."""
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    """Not jinja2's ``tojson``, which is for HTML: here a quotation mark is one."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def compiled(template: str) -> jinja2.Template:
    """The template, in the environment that those of models are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        auto_reload=False,
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def rendered(template: jinja2.Template, variables: dict[str, Any], now_s: int) -> str:
    """What the template makes of ``variables``. Raises `_Refused`, or whatever goes wrong in it."""

    def raise_exception(words: object) -> None:
        raise _Refused(str(words))

    def strftime_now(form: str) -> str:
        return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime(form)

    parts: list[str] = []
    n_characters = 0
    for part in template.generate(variables, raise_exception=raise_exception, strftime_now=strftime_now):
        n_characters += len(part)
        if n_characters > PROMPT_LENGTH_MAX:
            raise OverflowError(f"it makes more than {PROMPT_LENGTH_MAX} characters")
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any], known: dict[str, jinja2.Template]) -> dict[str, str]:
    """One text. ``known`` has the template of last time, so that it is compiled once."""
    source = request["template"]
    try:
        if source not in known:
            known.clear()
            known[source] = compiled(source)
        prompt = rendered(known[source], request["variables"], request["now_s"])
        prompt.encode("utf-8")
    except _Refused as refused:
        return {"refused": _encodable(str(refused))}
    except Exception as error:  # a stranger's program may raise anything
        return {"failed": _encodable(f"{type(error).__name__}: {error}")}
    return {"prompt": prompt}


def _encodable(words: str) -> str:
    return words[:_WORDS_MAX].encode("utf-8", "replace").decode("utf-8")


def _main() -> None:
    # What is imported late would need a file: each is used once before there are no more.
    known: dict[str, jinja2.Template] = {}
    for source in ("{{ strftime_now('%d %b %Y') }}{{ [1] | tojson }}{{ x.y }}", "{{ 1 / 0 }}", "{% broken"):
        answer({"template": source, "variables": {}, "now_s": 0}, known)
    confine(MEMORY_BYTES)

    def answer_encoded(body: bytes) -> bytes:
        return json.dumps(answer(json.loads(body), known), ensure_ascii=False).encode()

    answer_requests(sys.stdin.buffer, sys.stdout.buffer, answer_encoded, REQUEST_BYTES_MAX, int(sys.argv[1]))


if __name__ == "__main__":
    _main()
