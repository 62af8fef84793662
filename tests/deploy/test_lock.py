"""deploy/requirements.txt locks what pyproject.toml asks for: remade by `.ci/lock` when that changes."""

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


def test_every_file_is_known_by_its_hash():
    packages = re.split(r"\n(?=\w)", LOCK.partition("\n")[2])
    assert len(packages) > 40 and all("--hash=sha256:" in package for package in packages)


def test_torch_is_left_to_the_builder():
    assert not {"torch", "triton"} & LOCKED.keys()
