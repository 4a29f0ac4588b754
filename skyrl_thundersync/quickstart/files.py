"""The quickstart's files: two small models that travel in the package, and datasets made on the spot.

The assets hold FP16 weights only. `materialise` turns them into what the run reads: folders that Transformers and vLLM
load (FP32, configuration, tokenizer) and JSON lines of tasks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from skyrl_thundersync.data.byte_tokenizer import END_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer
from skyrl_thundersync.data.terminal_tasks import write_dataset

ASSETS = Path(__file__).parent / "assets"
LAYOUT = "1"
"""Raised whenever what `materialise` writes changes, so that an older folder is written anew."""

TRAIN_SEED, HELDOUT_SEED = 1, 2
DEMONSTRATION_SEEDS = (1001, 1002)
"""Seeds of the tasks in teacher's and student's demonstrations, others than the datasets' own."""


@dataclass(frozen=True)
class QuickstartFiles:
    """Where things are: `student` and `teacher` are model folders, `train` and `heldout` JSON lines."""

    student: Path
    teacher: Path
    train: Path
    heldout: Path


def model_config() -> Qwen3Config:
    """0.66M parameters, of Qwen3's shape. head_dim 32 is the smallest that vLLM's CPU attention takes.

    The rotary base fits conversations of a few hundred tokens: most frequencies tell neighbours apart, which copying needs.
    """
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
    )


def save_asset(folder: Path, name: str, model: PreTrainedModel) -> Path:
    """Write `model`'s weights as FP16 safetensors, `folder/name.safetensors`. Returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_file({key: value.detach().half().contiguous() for key, value in model.state_dict().items()}, path)
    path.chmod(0o644)
    return path


def load_asset(name: str, folder: Path = ASSETS) -> Qwen3ForCausalLM:
    """The "teacher" or "student" of the package, FP32 (its FP16 values exactly), in eval mode.

    Raises:
        FileNotFoundError: the asset is missing; the message says how to make it.
    """
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with `python -m skyrl_thundersync.quickstart.prepare`")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(model_config())
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    return model.eval()


def materialise(folder: str | Path, n_train: int = 2048, n_heldout: int = 128) -> QuickstartFiles:
    """Write the quickstart's models and datasets into `folder`, once: a complete, current folder is left as it is.

    The folder appears whole or not at all, also when two processes try at the same time.

    Raises:
        FileNotFoundError: an asset is missing.
    """
    folder = Path(folder).expanduser().absolute()
    stamp = f"{LAYOUT} {n_train} {n_heldout} {_digest()}\n"
    files = QuickstartFiles(folder / "student", folder / "teacher", folder / "train.jsonl", folder / "heldout.jsonl")
    if (folder / "stamp").is_file() and (folder / "stamp").read_text() == stamp:
        return files
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    for name in ("student", "teacher"):
        load_asset(name).save_pretrained(fresh / name)
        byte_tokenizer().save_pretrained(fresh / name)
    write_dataset(fresh / "train.jsonl", "train", n_train, TRAIN_SEED)
    write_dataset(fresh / "heldout.jsonl", "heldout", n_heldout, HELDOUT_SEED)
    (fresh / "stamp").write_text(stamp)
    fresh.chmod(0o755)
    _replace(fresh, folder)
    return files


def _digest() -> str:
    digest = hashlib.sha256()
    for name in ("student", "teacher"):
        path = ASSETS / f"{name}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; make it with `python -m skyrl_thundersync.quickstart.prepare`")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _replace(fresh: Path, folder: Path) -> None:
    """Put `fresh` in the place of `folder`; what was there goes."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        os.replace(folder, old / "folder")
        os.replace(fresh, folder)
        shutil.rmtree(old)
    else:
        os.replace(fresh, folder)
