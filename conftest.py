"""For tests and doctests alike: the same random numbers each time, and only what is installed."""

from importlib.util import find_spec

import pytest
import torch

collect_ignore = []
if find_spec("typer") is None or find_spec("rich") is None:
    collect_ignore += ["src/spear/cli.py", "src/spear/cli_data.py", "src/spear/cli_reproduce.py"]
if find_spec("opacus") is None:
    collect_ignore.append("src/spear/integrations/opacus")
if find_spec("flwr") is None:
    collect_ignore.append("src/spear/integrations/flower")
if find_spec("ray") is None:
    collect_ignore += ["src/spear/integrations/ray.py", "src/spear/integrations/ray_session.py"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)  # weights and inputs drawn without a generator of their own
