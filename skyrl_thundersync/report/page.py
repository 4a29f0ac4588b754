"""The page around charts: one HTML file with its own style, light and dark, that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--panel:#fff;--ink:#1d2329;--soft:#5c6670;--line:#e3e5e8;--muted:#b9c0c7;
--rollout:#5b8db8;--tail:#dd7a3c;--finish:#57a27c;--publish:#9a78b5;--forward:#8cc9a8;--sweep:#2f7d58;--tools:#c9a227;
--teacher:#b5658f;--run0:#2f6fbb;--run1:#d1603d;--run2:#3a9a74;--run3:#8a63b8;--run4:#a58419}
@media(prefers-color-scheme:dark){:root{--bg:#14181c;--panel:#1b2026;--ink:#e4e8ec;--soft:#9aa5b0;--line:#2d343c;
--muted:#59636d;--rollout:#6fa3d0;--run0:#6ba4e8;--run1:#ee8a66;--run2:#63c39c;--run3:#b594de;--run4:#d3b24a}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1140px;margin:0 auto;padding:28px 20px 60px}h1{font-size:22px;margin:0 0 18px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 8px}h3{font-size:13px;font-weight:600;margin:4px 0;color:var(--soft)}
section{margin:0 0 22px}.panel{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:16px 18px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px}
.card{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.card b{display:block;font-size:27px;line-height:1.2;font-variant-numeric:tabular-nums}.card span{display:block}
.card small,.note{color:var(--soft);font-size:13px}.note{margin:6px 0 0}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:10px 22px}
.grid2>div{max-width:640px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
svg text.label{font-size:11.5px}svg .grid{stroke:var(--line)}svg .axis{stroke:var(--muted)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:0 0 6px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
td,th{padding:4px 18px 4px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{font-weight:600;color:var(--soft)}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document. `body` is HTML, `title` text."""
    name = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name}</title><style>{STYLE}</style></head>'
        f"<body><main><h1>{name}</h1>{body}</main></body></html>\n"
    )


def figure(title: str, body: str, note: str) -> str:
    """A titled panel. `body` is HTML, the rest text."""
    return f'<section class="panel"><h2>{escape(title)}</h2>{body}<p class="note">{escape(note)}</p></section>'


def card(value: str, what: str, note: str) -> str:
    """One headline figure."""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span><small>{escape(note)}</small></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; all columns but the first are figures."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'
