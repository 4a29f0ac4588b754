"""Errors of the whole program, which one of several to report, and how a user's own are told."""

import sys

USAGE_ERROR = 2


class ConfigError(ValueError):
    """A configuration or input that cannot run. The message says what is wrong, where it came from and what to do.

    The command line prints it without a traceback and exits 2 (`tell`).
    """


class DeadActorError(RuntimeError):
    """A process that the run cannot do without is gone."""


class MachineFullError(RuntimeError):
    """There is no room for another update. Raised between updates, where everything before can still be saved."""


def first_cause(error: BaseException) -> BaseException:
    """The first error inside exception groups: what went wrong, not what was cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def own_error(error: BaseException) -> BaseException:
    """What an actor raised, without Ray's wrapping and traceback; any other error as it is."""
    from ray.exceptions import RayTaskError

    return first_cause(error.cause) if isinstance(error, RayTaskError) else error


def tell(error: ConfigError) -> int:
    """Print it for a person; returns the exit status."""
    from rich.console import Console
    from rich.markup import escape

    Console(file=sys.stderr, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
    return USAGE_ERROR
