"""`scripts/rehearse-device` reads what a machine has, and finds what it lacks; its steps run by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PIP_LIST = """Package         Version
--------------- -----------
jax             0.11.2
huggingface_hub 1.33.0
wheel           46
torch           2.11.0+cu130
"""
PIP_FREEZE = "jax==0.11.2\nhuggingface_hub==1.33.0\nwheel==46\ntorch==2.11.0+cu130\n"
PAGE = """JAX ran on Linux 6.18; pip list: huggingface_hub 1.33.0, jax 0.11.2, other 1.0.
Packages: huggingface-hub, jax, torch, wheel."""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "rehearse-device"))


@pytest.mark.parametrize("text", [PIP_LIST, PIP_FREEZE, PAGE], ids=["pip list", "pip freeze", "a page"])
def test_a_list_of_packages_is_read(script: dict[str, Any], text: str) -> None:
    names, versions = script["read_list"](text)
    assert names == {"jax", "huggingface-hub", "wheel", "torch"}
    assert (versions["jax"], versions["huggingface-hub"]) == ("0.11.2", "1.33.0")
    assert "other" not in versions


def test_what_a_machine_lacks_is_what_the_project_requires_and_it_has_not(script: dict[str, Any]) -> None:
    needed = {script["name_of"](one) for one in script["requirements"]()}
    assert {"jax", "msgspec", "pyelftools", "huggingface-hub"} <= needed
    lacks = {script["name_of"](one) for one in script["lacking"](needed - {"msgspec", "pyzmq"})}
    assert lacks == {"msgspec", "pyzmq"}
