"""Errors of the whole program, and which one of several to report."""


class ConfigError(ValueError):
    """A configuration or input that cannot run. The message says what is wrong, where it came from and what to do.

    The command line prints it without a traceback and exits 2.
    """


class DeadActorError(RuntimeError):
    """A process that the run cannot do without is gone."""


def first_cause(error: BaseException) -> BaseException:
    """The first error inside exception groups: what went wrong, not what was cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
