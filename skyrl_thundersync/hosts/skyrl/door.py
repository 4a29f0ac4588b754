"""SkyRL's own front door, as its command line goes in. Importing this loads nothing of SkyRL."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console

from skyrl_thundersync.options.presets import Override
from skyrl_thundersync.process.quiet import quiet_imports


def to_dotlist(merged: Mapping[str, Override]) -> list[str]:
    """`key=value` arguments that SkyRL's own parser reads back to the same values."""
    from skyrl.train.config.config import overrides_dict_to_dotlist

    return overrides_dict_to_dotlist({key: leaf.value for key, leaf in merged.items()})


def enter_skyrl(arguments: list[str]) -> None:
    """SkyRL's own way in: its `main()` reads `sys.argv`, imports the entry point named there and calls its `main()`."""
    sys.argv = ["skyrl.train.entrypoints.main_base", *arguments]
    with Console(stderr=True).status("loading SkyRL, vLLM and torch"), quiet_imports():
        from skyrl.train.entrypoints import main_base
    main_base.main()
