#!/usr/bin/env python
"""Write the generated parts of docs/configuration.md from the code: options, host defaults, refusals.

.venv/bin/python scripts/config_docs.py            rewrite the file
.venv/bin/python scripts/config_docs.py --check    exit 1 when it is out of date
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from skyrl_thundersync.hosts.skyrl import config
from skyrl_thundersync.hosts.skyrl import defaults as host_defaults
from skyrl_thundersync.hosts.skyrl.rules import RULES
from skyrl_thundersync.options.choices import CHOICES

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    docs = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def options(cls: type, prefix: str) -> Iterator[str]:
    """A heading and a table for each block of options, outer block first."""
    docs, nested = field_docs(cls), []
    yield f"### `{prefix}`\n\n{inspect.getdoc(cls)}\n\n| option | default | what it is |\n|---|---|---|"
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            nested.append((field.type, f"{prefix}.{field.name}"))
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        choices = CHOICES.get(f"{prefix}.{field.name}")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        said = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        yield f"| `{field.name}` | `{yaml_text(default)}` | {docs[field.name]}{said} |"
    for inner, name in nested:
        yield ""
        yield from options(inner, name)


def yaml_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def defaults() -> Iterator[str]:
    """HOST_DEFAULTS with the comment above each entry."""
    source = inspect.getsource(host_defaults)
    yield "| option | here | why |\n|---|---|---|"
    for option, value in host_defaults.HOST_DEFAULTS.items():
        why = re.search(rf'((?:    #[^\n]*\n)*)(?:    "[^"]+": [^\n]*\n)*?    "{re.escape(option)}"', source).group(1)
        yield f"| `{option}` | `{yaml_text(value)}` | {' '.join(line.strip(' #') for line in why.splitlines())} |"


def refusals() -> Iterator[str]:
    yield "| option | why | what to do |\n|---|---|---|"
    for rule in RULES:
        yield f"| `{rule.option}` | {rule.why} | {rule.advice} |"


def page(text: str) -> str:
    """`text` with everything between `<!-- begin NAME -->` and `<!-- end NAME -->` written anew."""
    parts = {
        "options": options(config.ThunderSyncConfig, "thundersync"),
        "defaults": defaults(),
        "refusals": refusals(),
    }
    for name, lines in parts.items():
        between = f"<!-- begin {name} -->\n" + "\n".join(lines) + f"\n<!-- end {name} -->"
        text, found = re.subn(
            rf"<!-- begin {name} -->.*?<!-- end {name} -->", lambda _, between=between: between, text, flags=re.DOTALL
        )
        assert found == 1, f"{PAGE} must hold one generated part {name!r}, holds {found}"
    return text


def main() -> None:
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            sys.exit(f"{PAGE} is out of date: run scripts/config_docs.py")
        return
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
