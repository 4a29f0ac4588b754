import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "learner"))  # its tiny models, batches and child processes

from plain import save_model  # noqa: E402


@pytest.fixture(scope="session")
def student(tmp_path_factory):
    """Folder of a tiny Qwen3 with tied embeddings."""
    return save_model(tmp_path_factory.mktemp("student"), "qwen3")


@pytest.fixture(scope="session")
def wider(tmp_path_factory):
    """The same family, another shape."""
    return save_model(tmp_path_factory.mktemp("wider"), "qwen3", intermediate_size=64)
