"""deploy/requirements.txt locks the requirements of pyproject.toml; `.ci/lock` generates it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "deploy" / "requirements.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WANTED = [Requirement(item) for item in (*PROJECT["dependencies"], *EXTRAS["serve"], *EXTRAS["grpc"])]  # what a flag of the image needs
LOCKED = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", LOCK, re.MULTILINE)}


@pytest.mark.parametrize("requirement", [item for item in WANTED if item.name != "torch"], ids=str)
def test_each_requirement_is_locked_within_its_bounds(requirement):
    assert requirement.specifier.contains(LOCKED[canonicalize_name(requirement.name)])


def test_every_requirement_has_hashes():
    packages = re.split(r"\n(?=\w)", LOCK.partition("\n")[2])
    assert len(packages) > 40 and all("--hash=sha256:" in package for package in packages)


def test_torch_is_not_locked():
    assert not {"torch", "triton"} & LOCKED.keys()
