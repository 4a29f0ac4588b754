"""The command `skyrl`: picks a plugin and a preset, checks every option, and goes in through SkyRL's own front door.

    skyrl train +plugin=thundersync +config=opd/quickstart trainer.seed=7
    skyrl train +plugin=thundersync +config=opd/qwen3.8-27b --dry-run

SkyRL wheels ship no console script. What this one does after its checks is what
`python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=MODULE key=value …` does. Importing this module,
and asking it for help, loads neither torch nor vLLM nor SkyRL.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync import __version__
from skyrl_thundersync.cli import data as data_cli
from skyrl_thundersync.cli import evaluate as eval_cli
from skyrl_thundersync.cli import insight
from skyrl_thundersync.errors import ConfigError, tell
from skyrl_thundersync.hosts.skyrl.door import enter_skyrl, to_dotlist
from skyrl_thundersync.options import presets
from skyrl_thundersync.options import registry as plugins

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language-model agents with SkyRL.",
)
INTERRUPTED = 130

TRAIN_HELP = """Train, with a plugin's algorithm or with SkyRL's own.

    skyrl train +plugin=NAME +config=GROUP/NAME key=value …

+plugin=NAME picks an installed plugin (see `skyrl plugins`); without it stock SkyRL runs. +config=GROUP/NAME picks one
of the plugin's presets, +config=path.yaml a file. key=value sets an option over the preset, for example
trainer.policy.optimizer_config.lr=1e-6. Unknown options, plugins and presets are refused with the nearest right name.
"""


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        print(f"skyrl_thundersync {__version__}")
        raise typer.Exit()


insight.register(app)
app.add_typer(data_cli.app, name="data")
eval_cli.register(app)


@app.command(help=TRAIN_HELP)
def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[+plugin=NAME] [+config=GROUP/NAME] [key=value]...")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print configuration and placement, check all that can be checked, start nothing."
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --dry-run: print every option, not only what was changed.")
    ] = False,
) -> None:
    raise typer.Exit(run(arguments or [], dry_run=dry_run, full=full))


@app.command("plugins", help="List installed plugins and their presets.")
def list_plugins() -> None:
    table = Table("plugin", "presets", box=None, pad_edge=False)
    for name in sorted(plugins.available()):
        plugin = plugins.find(name)
        table.add_row(name, "\n".join(presets.preset_names(plugin.presets)) or "none")
    Console().print(table)


def run(arguments: list[str], *, dry_run: bool = False, full: bool = False) -> int:
    """Train as `skyrl train` does, in this process.

    Args:
        arguments: `[+plugin=NAME] [+config=GROUP/NAME] key=value …`.
        dry_run: check instead of train.
        full: print every option in a dry run.

    Returns:
        0, or the dry run's exit code.

    Raises:
        ConfigError: what the user has to put right.
    """
    if not arguments and not dry_run:
        raise ConfigError(
            "say what to train, for example: skyrl train +plugin=thundersync +config=opd/quickstart. `skyrl plugins` lists "
            "plugins and presets, `skyrl train --help` explains"
        )
    selectors, overrides = presets.split_arguments(arguments)
    if full and not dry_run:
        raise ConfigError("--full belongs to --dry-run")
    entry = [arg for arg in overrides if arg.startswith("trainer.override_entrypoint=")]
    if "plugin" not in selectors:
        if "config" in selectors:
            raise ConfigError(
                f"+config={selectors['config']}: presets belong to a plugin; say which, for example +plugin=thundersync"
            )
        if dry_run:
            raise ConfigError("--dry-run needs a plugin, for example +plugin=thundersync")
        enter_skyrl(overrides)
        return 0
    if entry:
        raise ConfigError(
            f"{entry[0]!r}: +plugin={selectors['plugin']} already names the entry point. Leave one of them out."
        )

    plugin = plugins.find(selectors["plugin"])
    chosen = ([f"+config={selectors['config']}"] if "config" in selectors else []) + overrides
    merged = presets.resolve(
        chosen,
        plugins.load(plugin.config_class),
        plugin.presets,
        plugins.load(plugin.defaults) if plugin.defaults else None,
        plugins.load(plugin.choices) if plugin.choices else None,
    )
    if dry_run:
        if plugin.dry_run is None:
            raise ConfigError(f"the plugin {plugin.name} has no dry run")
        return plugins.load(plugin.dry_run)(chosen, full)
    arguments = to_dotlist(merged)
    if plugin.check is not None:
        with Console(stderr=True).status("checking"):
            plugins.load(plugin.check)(*arguments)
    enter_skyrl([f"trainer.override_entrypoint={plugin.entrypoint}", *arguments])
    return 0


def main() -> None:
    """The console script. What a user can put right is printed without a traceback; everything else keeps its own."""
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        sys.exit(tell(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
