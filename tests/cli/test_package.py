"""What a user installs: presets and assets inside the wheel, nothing left out, the docs true to the options."""

import configparser
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_travels_in_the_wheel(wheel):
    """The package list in setup.cfg is written by hand; this finds a package that it forgot."""
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "skyrl_thundersync").rglob("*.py")}
    assert modules - contents(wheel) == set()


def test_presets_assets_and_templates_travel_in_the_wheel(wheel):
    held = contents(wheel)
    presets = {f"skyrl_thundersync/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert presets
    assert presets - held == set()
    for folder in ("quickstart/assets", "report/templates"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "skyrl_thundersync" / folder).iterdir()}
        assert files and files - held == set()
    assert not [name for name in held if name.startswith(("tests/", "configs/"))]


def test_the_installed_package_finds_its_own_presets(site):
    script = (
        "from skyrl_thundersync.options import presets as p; print(p.own_presets(), p.preset_names(p.own_presets()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=site, capture_output=True, text=True, check=True)
    assert str(site / "skyrl_thundersync" / "configs") in done.stdout
    assert "opd/quickstart" in done.stdout


def test_metadata_names_licence_commands_and_plugin(site):
    distribution = PathDistribution(next(site.glob("skyrl_thundersync-*.dist-info")))
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    assert any(file.name == "LICENSE" for file in distribution.files)
    points = {(point.group, point.name): point.value for point in distribution.entry_points}
    assert points["console_scripts", "skyrl"] == points["console_scripts", "skyrl-thundersync"]
    assert points["skyrl.plugins", "thundersync"] == "skyrl_thundersync.hosts.skyrl.plugin:PLUGIN"
    assert set(distribution.metadata.get_all("Provides-Extra")) == {"cpu", "gpu", "dev", "harbor", "swebench"}


def test_direct_dependencies_are_pinned_as_in_the_locks():
    """A pin in setup.cfg, in the .in files and in the lock is one and the same."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    base = setup["options"]["install_requires"].split()
    extras = {name: setup["options.extras_require"][name].split() for name in ("cpu", "gpu", "dev")}
    for engine in ("cpu", "gpu"):
        lock = (ROOT / "requirements" / f"{engine}.txt").read_text()
        for requirement in base + extras[engine] + extras["dev"]:
            name, pin = requirement.split("==")
            assert f"\n{name.partition('[')[0]}=={pin} " in lock, (
                f"{requirement} is not what requirements/{engine}.txt locks"
            )


def test_the_configuration_page_is_what_the_code_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "config_docs.py"), "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "configuration.md").read_text()
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig
    from skyrl_thundersync.options.presets import leaf_keys

    for option in leaf_keys(TrainConfig):
        if option.startswith("thundersync."):
            assert f"`{option.rpartition('.')[2]}`" in page, f"{option} is not documented"
