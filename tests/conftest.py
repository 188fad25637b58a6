from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pytest
import torch

from datasets_on_disk import write_tiny_imagenet

# Ray reads these when it is imported. It listens on the network: only these tests have the token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # pytest-xdist runs a process per core


@pytest.fixture(scope="session")
def data_root() -> Path:
    folder = os.environ.get("SPEAR_DATA")
    if not folder:
        pytest.skip("real data: set SPEAR_DATA to the folder with CIFAR-10, MNIST and TinyImageNet")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory) -> Path:
    pytest.importorskip("PIL", reason="needs the cli extra")
    folder = tmp_path_factory.mktemp("source")
    write_tiny_imagenet(folder)
    return folder


@pytest.fixture
def tiny(tiny_source, tmp_path) -> Path:
    """A small TinyImageNet of one's own, to be damaged."""
    return shutil.copytree(tiny_source, tmp_path / "tiny-imagenet-200")
