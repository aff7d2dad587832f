"""The wheel and the sdist: what they contain, and that an empty environment needs no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace

import pytest

import fullshard
from tests import structure

ROOT = structure.SOURCE.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "src")
NAME = f"fullshard-{fullshard.__version__}"
PACKAGES = ("fullshard", "fullshard_train")


def build(folder: Path, kind: str, out: Path) -> Path:
    """A distribution of the sources in a folder, by the backend that pip calls, offline."""
    out.mkdir(parents=True, exist_ok=True)
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, text=True
    )
    return out / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist of this tree, and the wheel that the sdist builds."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, tree / name)
    sdist = build(tree, "sdist", folder / "dist")
    shutil.rmtree(tree / "src" / "fullshard.egg-info")
    wheel = build(tree, "wheel", folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "extracted", filter="data")
    again = build(folder / "extracted" / NAME, "wheel", folder / "again")
    return SimpleNamespace(sdist=sdist, wheel=wheel, again=again)


@pytest.mark.exhaustive
def test_a_wheel_has_every_file_of_both_packages_and_what_a_reader_of_metadata_looks_for(built):
    assert built.sdist.name == f"{NAME}.tar.gz"
    assert built.wheel.name == f"{NAME}-py3-none-any.whl"  # nothing is compiled
    found = contents(built.wheel)
    info = f"{NAME}.dist-info"
    wanted = {
        str(path.relative_to(structure.SOURCE))
        for package in PACKAGES
        for path in (structure.SOURCE / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in found if not name.startswith(info)} == wanted
    assert {f"{package}/py.typed" for package in PACKAGES} <= wanted
    metadata = message_from_bytes(found[f"{info}/METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("fullshard", "0.1.0")
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == (
        "BSD-3-Clause",
        ">=3.11",
    )
    required = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert required == ["torch<3,>=2.11"]
    assert metadata.get_payload().startswith("# fullshard\n")
    assert b"fullshard = fullshard.cli.main:main" in found[f"{info}/entry_points.txt"]


def test_the_only_license_is_that_of_the_project_because_no_file_is_by_others(built):
    found = contents(built.wheel)
    licenses = [name for name in found if "license" in name.lower()]
    assert licenses == [f"{NAME}.dist-info/licenses/LICENSE"]
    assert found[licenses[0]] == (ROOT / "LICENSE").read_bytes()
    # A file that is copied from others would say so, or come in a form that nobody wrote by hand.
    notices = (b"copyright", b"@license", b"spdx-license")
    others = [name for name in found if name not in licenses and ".dist-info/" not in name]
    assert [name for name in others if any(word in found[name].lower() for word in notices)] == []
    suffixes = {Path(name).suffix for name in others if Path(name).name != "py.typed"}
    assert suffixes == {".py", ".j2", ".css", ".js"}
    assert all(len(line) < 500 for name in others for line in found[name].splitlines())


def test_an_sdist_builds_the_wheel_that_the_tree_builds(built):
    assert contents(built.again) == contents(built.wheel)


@pytest.mark.exhaustive
def test_an_empty_environment_without_a_compiler_passes_the_doctor(built, tmp_path):
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([sys.executable, "-m", *install, str(built.wheel)], check=True)
    # torch, and the packages of the extra `cli`, come from here: a download would take minutes.
    site = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {"PATH": str(place / "bin"), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert shutil.which("cc", path=clean["PATH"]) is None

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=clean, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    where = run(str(python), "-c", "import fullshard; print(fullshard.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(site), where
    done = run(str(place / "bin" / "fullshard"), "doctor", "--quick")
    is_serious = "- serious: " in done.stdout  # about this machine, such as a full disk
    assert done.returncode == int(is_serious), done
    assert ["fullshard", fullshard.__version__] in [
        line.split() for line in done.stdout.splitlines()
    ]
    assert os.listdir(tmp_path) == ["environment"]
