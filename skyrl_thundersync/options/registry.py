"""Training plugins, found through the entry-point group `skyrl.plugins`.

A package offers one by naming a `Plugin` in its metadata:

    [options.entry_points]
    skyrl.plugins =
        thundersync = skyrl_thundersync.hosts.skyrl.plugin:PLUGIN

Nothing here imports torch, vLLM or SkyRL: a plugin names its heavy parts as "module:attribute" and they load on use.
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.types import MODULE_CLASS

GROUP = "skyrl.plugins"


@dataclass(frozen=True)
class Plugin:
    """What the command `skyrl` has to know of a plugin.

    Attributes:
        name: what `+plugin=NAME` says; equal to the entry point's name.
        presets: folder of `GROUP/NAME.yaml` files, what `+config=GROUP/NAME` picks from.
        entrypoint: module whose `main()` trains with `sys.argv[1:]`; what `trainer.override_entrypoint` names.
        config_class: "module:attribute" of the configuration dataclass that options are checked against.
        defaults: "module:attribute" of a mapping of option values that the plugin wants where SkyRL's default differs.
        choices: "module:attribute" of a mapping from options to the values they may have, where the type does not say.
        check: "module:attribute" of `check(*args)`, which raises ConfigError for a run that cannot work, before SkyRL loads;
            None where there is none.
        dry_run: "module:attribute" of `run(args, full) -> int`, which checks a run without starting it; None where there
            is none.
    """

    name: str
    presets: Path
    entrypoint: str
    config_class: str
    defaults: str | None = None
    choices: str | None = None
    check: str | None = None
    dry_run: str | None = None


def load(path: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def load_class(path: str, said: str) -> Any:
    """What "module:Class" names, of a user's or a package's own; the working folder is looked into last.

    A console script does not look there, `python -m` does; Ray's processes look where their driver was started.

    Args:
        said: the option and its value, for errors.

    Raises:
        ConfigError: it is not written so, the module cannot be imported, or holds nothing of that name.
    """
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{said}: a class of one's own is named {MODULE_CLASS}, for example mine:Mine")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = import_module(module)
    except Exception as error:  # whatever somebody else's module raises
        raise ConfigError(
            f"{said}: the module {module!r} cannot be imported: {type(error).__name__}: {error}. It must be installed, on "
            f"PYTHONPATH, or in the working folder ({os.getcwd()})."
        ) from error
    if not hasattr(found, attribute):
        names = [name for name, held in vars(found).items() if isinstance(held, type) and held.__module__ == module]
        raise ConfigError(f"{said}: {found.__file__} holds no {attribute!r}. {nearest(attribute, names)}")
    return getattr(found, attribute)


def offered(group: str) -> dict[str, str]:
    """What installed packages offer in an entry-point group: "module:attribute" by name; nothing is imported."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def available() -> dict[str, EntryPoint]:
    """Installed plugins by name; none is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def nearest(word: str, words: list[str]) -> str:
    """A sentence that offers the word most like `word`, or, when none is like it, what there is."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"There is: {', '.join(sorted(words))}." if words else "There is none."


def find(name: str) -> Plugin:
    """The installed plugin called `name`.

    Raises:
        ConfigError: no plugin of that name is installed, or the installed one cannot be loaded.
    """
    installed = available()
    if name not in installed:
        raise ConfigError(
            f"+plugin={name}: no plugin of that name is installed (entry-point group {GROUP!r}). "
            f"{nearest(name, list(installed))}"
        )
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"+plugin={name}: its entry point {installed[name].value!r} cannot be loaded: {error}. "
            f"Install the package that provides it again."
        ) from error
