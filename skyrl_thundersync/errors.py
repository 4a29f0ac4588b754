"""The error a user can act on: the command line prints its message without a traceback and exits 2."""


class ConfigError(ValueError):
    """A configuration or input that cannot run. The message says what is wrong, where it came from and what to do."""
