"""What an evaluation leaves for people: summary.json, summary.md and pass.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyrl_thundersync.evaluate.plot import pass_plot


def markdown(summary: dict[str, Any], title: str) -> str:
    """The same as a Markdown table, with one line per task."""
    lines = [f"# {title}", "", "| | first k | unbiased |", "|---|---|---|"]
    lines += [f"| pass@{k} | {v['first_k']:.2f} | {v['unbiased']:.2f} |" for k, v in summary["pass_at_k"].items()]
    lines += ["", f"| task | solved of {summary['attempts']} |", "|---|---|"]
    lines += [f"| {task} | {count} |" for task, count in summary["solved"].items()]
    return "\n".join(lines) + "\n"


def write(summary: dict[str, Any], title: str, output: Path) -> None:
    """summary.json, summary.md and pass.svg."""
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (output / "summary.md").write_text(markdown(summary, title), encoding="utf-8")
    (output / "pass.svg").write_text(pass_plot(summary, title), encoding="utf-8")
