"""From `+config=GROUP/NAME key=value …` to a checked, typed configuration.

Three layers, later ones win: the plugin's defaults, the preset, the command line. Every leaf remembers which layer it
came from, so that a wrong key or value is refused with its origin and the nearest right name, before anything heavy
loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.registry import nearest
from skyrl_thundersync.options.types import dataclass_in, fields, not_a_choice, optional_blocks, type_problem

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Override:
    """One option's value and where it was said: a preset's path, "command line" or "plugin default"."""

    key: str
    value: Any
    origin: str


def own_presets() -> Path:
    """Folder of this package's presets: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def preset_names(folder: Path) -> list[str]:
    """Every `GROUP/NAME` in a presets folder, sorted."""
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml"))


def split_arguments(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate `+plugin=` and `+config=` from the overrides.

    Raises:
        ConfigError: another `+name`, one given twice, or an argument that is not `key=value`.
    """
    selectors: dict[str, str] = {}
    overrides = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or not key:
            raise ConfigError(f"{arg!r} ({COMMAND_LINE}): overrides are written key=value, for example trainer.seed=7")
        if key in ("plugin", "config"):
            raise ConfigError(f"{arg!r} ({COMMAND_LINE}): no option is called {key!r}. Did you mean '+{arg}'?")
        if not key.startswith("+"):
            overrides.append(arg)
            continue
        if key not in ("+plugin", "+config"):
            raise ConfigError(
                f"{arg!r} ({COMMAND_LINE}): '+' is for +plugin=NAME and +config=GROUP/NAME only. "
                f"{nearest(key, ['+plugin', '+config'])} To set an option, leave the '+' out."
            )
        if key[1:] in selectors:
            raise ConfigError(f"{key} is given twice ({COMMAND_LINE}): {selectors[key[1:]]!r} and {value!r}. Keep one.")
        selectors[key[1:]] = value
    return selectors, overrides


def preset_path(name: str, folder: Path) -> Path:
    """The file that `+config=name` means: `GROUP/NAME` in `folder`, or any path that ends in .yaml or .yml.

    Raises:
        ConfigError: there is no such preset or file.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"+config={name}: no such file (looked at {path.resolve()})")
        return path
    names = preset_names(folder)
    if name not in names:
        raise ConfigError(f"+config={name}: no such preset in {folder}. {nearest(name, names)}")
    return folder / f"{name}.yaml"


def read_preset(name: str, folder: Path) -> list[tuple[dict, str]]:
    """A preset's layers, base first: `extends: GROUP/NAME` at its top names the preset it changes.

    Returns:
        (nested mapping, origin) pairs.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    layers: list[tuple[dict, str]] = []
    seen: list[str] = []
    while name:
        if name in seen:
            raise ConfigError(f"+config={seen[0]}: presets extend each other in a circle: {' -> '.join([*seen, name])}")
        seen.append(name)
        path = preset_path(name, folder)
        try:
            tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must hold a mapping of options, but holds {type(tree).__name__}")
        name = tree.pop("extends", "")
        layers.insert(0, (tree, str(path)))
    return layers


def parse_override(arg: str) -> dict:
    """`a.b=value` as a nested mapping; the value is read as YAML, as SkyRL reads it.

    Raises:
        ConfigError: the argument cannot be parsed.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.from_cli([arg]), resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{arg!r} ({COMMAND_LINE}) cannot be parsed: {error}") from error


def leaf_keys(config_class: type, prefix: str = "") -> Iterable[str]:
    """Every option of a configuration dataclass, dotted, depth first."""
    for name, kind in fields(config_class).items():
        nested = dataclass_in(kind)
        if nested is None or nested in optional_blocks(kind):
            yield prefix + name
        else:
            yield from leaf_keys(nested, f"{prefix}{name}.")


def flatten(
    tree: Mapping, config_class: type, origin: str, choices: Mapping[str, tuple[str, ...]], within: str = ""
) -> list[Override]:
    """Check a nested mapping against a configuration dataclass and list its leaves. `within`: what their names begin with.

    Raises:
        ConfigError: a key that does not exist, or a value of the wrong type or outside its choices.
    """
    leaves: list[Override] = []

    def visit(node: Mapping, cls: type, prefix: str) -> None:
        kinds = fields(cls)
        for name, value in node.items():
            key = f"{prefix}{name}"
            if name not in kinds:
                raise ConfigError(
                    _unknown(key, str(name), prefix, list(kinds), list(leaf_keys(config_class, within)), origin)
                )
            nested = dataclass_in(kinds[name])
            if nested is not None and isinstance(value, Mapping):
                visit(value, nested, f"{key}.")
                continue
            problem = type_problem(key, kinds[name], value)
            if problem:
                raise ConfigError(f"{key}={value!r} ({origin}): {problem}")
            if key in choices and (wrong := not_a_choice(value, choices[key])) is not None:
                raise ConfigError(
                    f"{key}={value!r} ({origin}): must be one of {', '.join(choices[key])}. "
                    f"{nearest(wrong, list(choices[key]))}"
                )
            leaves.append(Override(key, value, origin))

    visit(tree, config_class, within)
    return leaves


def resolve(
    args: Sequence[str],
    config_class: type,
    presets: Path,
    defaults: Mapping[str, Any] | None = None,
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Override]:
    """Merge defaults, preset and command line into one checked value per option.

    Args:
        args: `[+config=GROUP/NAME] key=value …`.
        config_class: the dataclass whose fields are the options.
        presets: folder of presets.
        defaults: option -> value, the lowest layer.
        choices: option -> allowed values, where the type does not say.

    Returns:
        option -> its value and origin. Mappings under one free-form option (such as `engine_init_kwargs`) are merged.

    Raises:
        ConfigError: whatever cannot be right, with its origin.
    """
    selectors, overrides = split_arguments(args)
    merged = {key: Override(key, value, "plugin default") for key, value in (defaults or {}).items()}
    layers = read_preset(selectors["config"], presets) if "config" in selectors else []
    layers += [(parse_override(arg), COMMAND_LINE) for arg in overrides]
    for tree, origin in layers:
        for leaf in flatten(tree, config_class, origin, choices or {}):
            before = merged.get(leaf.key)
            if before is not None and isinstance(before.value, Mapping) and isinstance(leaf.value, Mapping):
                leaf = dataclasses.replace(leaf, value=_deep_merge(before.value, leaf.value))
            merged[leaf.key] = leaf
    return merged


def _unknown(key: str, name: str, prefix: str, siblings: list[str], everywhere: list[str], origin: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        advice = f"Did you mean {prefix + close[0]!r}?"
    else:
        same_leaf = [other for other in everywhere if other.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        best = difflib.get_close_matches(key, same_leaf or everywhere, n=1, cutoff=0.0 if same_leaf else 0.5)
        where = f"{prefix.rstrip('.')!r} has" if prefix else "At the top there is"
        advice = f"Did you mean {best[0]!r}?" if best else f"{where}: {', '.join(siblings) or 'no options'}."
    return f"unknown option {key!r} ({origin}). {advice}"


def _deep_merge(below: Mapping, above: Mapping) -> dict:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _deep_merge(merged[key], value) if both else value
    return merged
