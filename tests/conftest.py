from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # pytest-xdist runs a process per core


@pytest.fixture(scope="session")
def data_root() -> Path:
    folder = os.environ.get("SPEAR_DATA")
    if not folder:
        pytest.skip("real data: set SPEAR_DATA to the folder with CIFAR-10, MNIST and TinyImageNet")
    return Path(folder)
