"""Chat templates: Jinja programs from strangers that turn messages into a prompt, rendered as transformers does.

The environment is jinja2's `ImmutableSandboxedEnvironment` (trim_blocks, lstrip_blocks, loop controls) with the names a
published template may use: `raise_exception`, `strftime_now`, `tojson`, and `{% generation %}...{% endgeneration %}`,
whose character ranges come back beside the text (for loss masks).  Reference: `render_jinja_template` of transformers
5.24.  What a template sees is rebuilt from JSON first, so that no object's methods can be reached.  The sandbox refuses
access to internals and bounds `range`; it does not bound nested loops or the size of a string.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OPEN, _CLOSE = "_generation_open", "_generation_close"  # template variables that hold this rendering's marks


class RenderedChat(NamedTuple):
    """A conversation as text, and where its generated parts lie."""

    text: str
    spans: tuple[tuple[int, int], ...]  # (start, end) in characters of every generation block, by start; end excluded


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Render `messages` (dicts with "role" and "content") with a Jinja chat template.

    Keys whose value is None are left out of a message; `variables` are further template variables (`tools`,
    `enable_thinking`, ...).  `bos_token` and `eos_token` stay undefined when None.  Raises ValueError in one line for a
    template that does not compile, that refuses the conversation, or that does what the sandbox forbids.
    """
    given = {"bos_token": bos_token, "eos_token": eos_token}
    tokens = {name: token for name, token in given.items() if token is not None}
    data = _plain({"tools": None, "documents": None} | tokens | dict(variables or {}))
    chat = [{key: value for key, value in message.items() if value is not None} for message in _plain(list(messages))]
    nonce = secrets.token_hex(16)  # unknown to the author of a message: a mark cannot be forged
    marks = {_OPEN: f"<{nonce}>", _CLOSE: f"</{nonce}>"}
    try:
        program = _compile(template)
        text = program.render(data | marks, messages=chat, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template is a program: it may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"chat template failed: {reason}: check the messages, or correct the template") from error
    return _cut_marks(text, marks[_OPEN], marks[_CLOSE])


def _plain(value: Any) -> Any:
    """`value` rebuilt from JSON types."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"chat messages must hold JSON values only (dict, list, str, number): {error}") from error


def _cut_marks(text: str, opening: str, closing: str) -> RenderedChat:
    """The text without the marks, and the ranges that they enclosed."""
    pieces, open_starts, spans, length = [], [], [], 0
    for part in re.split(f"({re.escape(opening)}|{re.escape(closing)})", text):
        if part == opening:
            open_starts.append(length)
        elif part == closing:
            spans.append((open_starts.pop(), length))
        else:
            pieces.append(part)
            length += len(part)
    return RenderedChat("".join(pieces), tuple(sorted(spans)))


class _Generation(Extension):
    """`{% generation %}body{% endgeneration %}`: the body between two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Macro) -> str:
        return f"{context[_OPEN]}{caller()}{context[_CLOSE]}"


class _PlainNamespace(Namespace):
    """A `namespace` whose attributes cannot start with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # noqa: B902, N805 - as jinja2: a template may pass `self=`
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute must not start with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=_PlainNamespace,
    )
    return environment.from_string(template)
