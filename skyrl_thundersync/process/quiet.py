"""Keep what vLLM, torch and SkyRL say while they are imported off the user's screen."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside, importing them prints no notices below errors; afterwards everything logs as it would have, except that
    Transformers draws no progress bars when it loads weights.

    vLLM configures its logger from the environment when it is imported, so this process stays at errors while processes
    started later, whose logs go to files, see the environment as it was.
    """
    from loguru import logger
    from transformers.utils import logging as transformers_logging

    name, before = "VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL")
    disabled = logging.root.manager.disable
    os.environ[name] = before or "ERROR"
    logging.disable(logging.WARNING)  # torch sets the levels of its own loggers while it is imported
    logger.disable("skyrl")
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.enable("skyrl")
        logging.disable(disabled)
        if before is None:
            del os.environ[name]
