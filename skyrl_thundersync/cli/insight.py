"""Subcommands that explain a run: verify, timeline, report, doctor, bench, simulate, theory, rehearse.

Heavy imports happen when one is used.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_thundersync.errors import ConfigError

JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
FAILED = 1
ELSEWHERE = (
    (
        "bench",
        "skyrl_thundersync.cli.bench",
        "Time one configuration under sync, group and thundersync on the same seeds.",
    ),
    ("simulate", "skyrl_thundersync.simulate.command", "Predict step time, tail and memory in virtual time."),
    ("theory", "skyrl_thundersync.cli.theory", "What overlap is worth by the paper's theory."),
    (
        "rehearse",
        "skyrl_thundersync.cli.rehearse",
        "Does a configuration fit a GPU? The learner's code without data.",
    ),
)
"""Subcommands whose options a module's `command` declares: name, module, help. Loaded when one is used."""


def register(app: typer.Typer) -> None:
    """Add the subcommands to the command line."""
    app.command()(verify)
    app.command()(timeline)
    app.command()(report)
    app.command()(doctor)
    for name, module, what in ELSEWHERE:
        _forward(app, name, module, what)


def _forward(app: typer.Typer, name: str, module: str, what: str) -> None:
    """Add `name`, whose arguments, --help included, go to the module's own `command`."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=what, context_settings=anything, add_help_option=False)
    def forwarded(ctx: typer.Context) -> None:
        inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        inner.command()(import_module(module).command)
        inner(args=ctx.args, prog_name=ctx.command_path)


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with thundersync.record=true.")],
    limit: Annotated[int, typer.Option(help="How many recorded batches to replay.", min=1)] = 10,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a fault, to see that it is found: source-twice, dropped-adjoint, wrong-n, stale-version."
        ),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Prove on recorded batches that streaming changed nothing: replay, compare with the textbook.

    Exits 1 and names the kind of fault when something differs beyond rounding. Uses the devices the run used.
    """
    from skyrl_thundersync.process.quiet import quiet_imports

    with Console(stderr=True).status("loading torch"), quiet_imports():
        from skyrl_thundersync.verify import equivalence
    result = _readable(lambda: equivalence.report(run, limit, plant))
    if as_json:
        print(json.dumps(result))
    else:
        _print_verify(result)
    raise typer.Exit(FAILED if result["findings"] else 0)


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Trace file to write; RUN/trace/trace.json.gz by default.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Write a Chrome/Perfetto trace of a run: open it at ui.perfetto.dev or chrome://tracing.

    Rollout requests, time between turns, tools, teacher, learner work with its queue wait, finish and publish, on one clock.
    """
    import gzip

    from skyrl_thundersync.telemetry import timeline as events_of

    events = _readable(lambda: events_of.read_events(run))
    target = out or run / "trace" / "trace.json.gz"
    text = json.dumps(events_of.chrome_trace(events), separators=(",", ":"))
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".gz":
        target.write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))
    else:
        target.write_text(text, encoding="utf-8")
    busy = {track: sum(e.seconds for e in own) for track, own in events_of.tracks(events).items()}
    span = max((e.start + e.seconds for e in events), default=0.0) - min((e.start for e in events), default=0.0)
    counts = {track: len(own) for track, own in events_of.tracks(events).items()}
    if as_json:
        print(json.dumps({"trace": str(target), "seconds": span, "events": counts, "busy_seconds": busy}))
        return
    table = Table("track", "events", "Σ seconds", "at once", box=None, pad_edge=False)
    for track, count in counts.items():
        table.add_row(track, str(count), f"{busy[track]:.2f}", f"{busy[track] / span:.2f}" if span else "-")
    Console().print(table)
    print(f"{span:.1f} s, {len(events)} events: {target}\nopen it at https://ui.perfetto.dev")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN...]", help="One or more run folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write; report.html in the first run's folder.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Updates at the start of a run that averages leave out.", min=0)] = 1,
    as_json: JSON = False,
) -> None:
    """Write one self-contained HTML page about a run, or a comparison of runs with their speed-up.

    The baseline is the first run with schedule=sync, else the first run named. A run that does other work than the baseline
    (objective, model, tasks, batch, lengths, seed, …) has no speed-up; what differs is said.
    """
    from skyrl_thundersync.report import report as pages
    from skyrl_thundersync.telemetry.rundata import read_run

    read = _readable(lambda: [read_run(run, warmup) for run in runs])
    figures = _readable(lambda: pages.summary(read))
    target = out or runs[0] / "report.html"
    target.write_text(pages.render(read), encoding="utf-8")
    if as_json:
        print(json.dumps({"page": str(target), **figures}))
        return
    table = Table("run", "schedule", "updates", "step", "speed-up", "range", box=None, pad_edge=False)
    for run in figures["runs"]:
        gain = run["speedup"]
        cells = ["not comparable" if run["incomparable"] else "baseline", ""]
        if gain is not None:
            cells = [f"{gain['mean']:.2f}x", f"{gain['low']:.2f}-{gain['high']:.2f}"]
        step = f"{run['mean']['timing/update']:.2f} s"
        table.add_row(run["name"], run["schedule"], str(run["updates"]), step, *cells)
    Console().print(table)
    for run in figures["runs"]:
        for kind, found in (("is not comparable with", run["incomparable"]), ("is not done as", run["differs"])):
            if found:
                print(f"{run['name']} {kind} {figures['baseline']}:", *(f"    {one}" for one in found), sep="\n")
    print(target)


def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...", help="As for `train`.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Check the machine and, with a configuration, whether it fits: versions, devices, engine, sandbox, disk, memory, models.

    Each problem comes with its fix; exits 1 when there is one.
    """
    from skyrl_thundersync.preflight import machine as checks_of

    chosen = [argument for argument in arguments or [] if argument != "+plugin=thundersync"]
    if chosen:
        from skyrl_thundersync.process.quiet import quiet_imports

        with Console(stderr=True).status("reading the configuration"), quiet_imports():
            from skyrl_thundersync.hosts.skyrl.checks import run_checks
            from skyrl_thundersync.hosts.skyrl.compose import build_config
            from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults

            cfg = build_config(chosen)
            apply_host_defaults(cfg)
            checks = [*checks_of.installation_checks(), *run_checks(cfg)]
    else:
        checks = list(checks_of.machine_checks())
    failed = any(check.problems for check in checks)
    if as_json:
        rows = [{"name": c.name, "ok": not c.problems, "problems": c.problems, "seen": c.seen} for c in checks]
        print(json.dumps({"ok": not failed, "checks": rows}))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for check in checks:
            mark = "[red]problem[/]" if check.problems else "[green]ok[/]     "
            console.print(f"{mark} {escape(check.name)}[dim]{' · ' + escape(check.seen) if check.seen else ''}[/]")
            for problem in check.problems:
                console.print(f"        {escape(problem)}")
    raise typer.Exit(FAILED if failed else 0)


def _print_verify(result: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    kind = f"{result['objective']}{', LoRA' if result['lora'] else ''}, {result['ranks']} learner ranks"
    console.print(f"{escape(result['run'])}: {kind}, work in the order in which it became ready")
    columns = ("batch", "N_k", "|g|", "FP64", "FP32", "rounding", "Δ sync", "Δ AdamW", "Δ rounding")
    table = Table(*columns, box=None, pad_edge=False)
    for index, row in enumerate(result["batches"]):
        norm, errors, delta = "-", ["-"] * 3, ["-"] * 3
        if index < len(result["delta"]):
            norm = f"{row['replayed_norm']:.4g}"
            delta = [f"{d:.0e}" for d in (*result["delta"][index], row["delta_limit"])]
        if "float32" in row:
            exact, single = row["float64"], row["float32"]
            errors = [f"{value:.1e}" for value in (exact["error"], single["error"], single["rounding"])]
        table.add_row(str(row["version"]), str(row["n_scored"]), norm, *errors, *delta)
    console.print(table)
    console.print(
        "[dim]|g|: norm of the replayed update's gradient, normalised, before clipping. FP64, FP32: relative error of the "
        "streamed gradient to the textbook's. rounding: of the FP32 textbook to its FP64 self.\n"
        "Δ: parameters after replayed updates, streamed against sync and AdamW in FP64; what rounding can do to them.[/]"
    )
    rows = [row["float32"] for row in result["batches"] if "float32" in row]
    if rows:
        worst = max(rows, key=lambda row: row["error"])
        console.print(
            f"worst parameter: {worst['worst_parameter']}, relative error {worst['worst_error']:.1e}, "
            f"{worst['worst_share']:.0%} of its batch's squared error"
        )
    for finding in result["findings"]:
        console.print(f"[red]batch {finding['version']}: {finding['kind']}[/]: {escape(finding['detail'])}")
    console.print("[red]NOT the same update.[/]" if result["findings"] else "[green]The same update.[/]")


def _readable(action):
    """What `action` returns; what the user can put right, as one line instead of a traceback."""
    try:
        return action()
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
