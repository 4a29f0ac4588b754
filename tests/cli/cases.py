"""Model folders and task files for tests, good ones and spoiled ones."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_model(folder: Path, positions: int = 4096) -> Path:
    """A model folder complete enough for checks that load no weights."""
    from skyrl_thundersync.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

    byte_tokenizer().save_pretrained(folder)
    config = {"model_type": "qwen3", "max_position_embeddings": positions, "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def write_tasks(path: Path, *changes: dict) -> Path:
    """A task file: one good row, changed by each of `changes` in turn (a None value takes a field out)."""
    row = {
        "prompt": [{"role": "user", "content": "Make ans."}],
        "env_class": "terminal",
        "files": "{}",
        "checker": "[ -e ans ]",
        "max_turns": 2,
    }
    rows = [row | {"task_id": f"make-{number}"} | change for number, change in enumerate(changes, 1)]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
