from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuwarden.exporter.classification import is_kernel, loaded_framework

if TYPE_CHECKING:
    from tests.exporter.nodes import Children


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        ("python -m ipykernel_launcher -f /run/user/1000/jupyter/kernel-1.json", True),
        ("/usr/bin/python3 -Xfrozen_modules=off -m ipykernel_launcher -f x", True),
        ("python /opt/lib/ipykernel_launcher.py -f x", True),
        ("python -m ipykernel -f x", True),
        ("python train.py --notes jupyter", False),
        ("python -m torch.distributed.run ipykernel_launcher", False),
        ("python a b c d ipykernel_launcher", False),
        ("", False),
    ],
)
def test_kernels(line: str, kernel: bool) -> None:
    """A Jupyter kernel is one by the module it runs, not by a word somewhere in its line."""
    assert is_kernel(line.split()) is kernel


def test_no_framework(children: Children) -> None:
    """A process without a framework's library has none; neither has nobody."""
    assert loaded_framework(children.start().pid) == ""
    assert loaded_framework(2**22 - 1) == ""
