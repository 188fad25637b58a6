"""For tests and doctests alike: same random numbers, only what is installed, no network."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

# Before torch: some virtual machines name AMX and forbid it, and half precision then ends the process
# (SIGILL). Below AMX it runs everywhere.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Tests that share what takes long to set up, or of which no two may run at a time: one worker runs
# them. Marks do not help: pytest-xdist 3.8 loses its groups beside pytest 9.2.
_TOGETHER = {
    "test_ray.py": "ray",
    "in_flowers_simulation": "ray",
    "test_flower_deployment.py": "ray",
    "in_nvflares_simulator": "ray",
    "test_docs.py": "docs",
    "test_secrets.py": "tour",
    "every_command_works_without_a_network": "tour",
    "test_parallel.py": "pool",
    "test_data_survey.py": "survey",
    "in_training_": "trained",
    "test_the_demo_recovers": "demo",
    "test_the_demo_of_one_round": "demo",
    "test_page.py": "browser",
}
# The longest come first, so that both workers are busy to the end.
_FIRST = [*_TOGETHER, "test_trials", "test_tutorial", "test_faults", "test_examples", "test_load"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Spread tests over the cores one by one, but for those that belong together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _TOGETHER.get(_first(nodeid, _TOGETHER) or "", nodeid)

    return Scheduling(config, log)


def _first(nodeid: str, parts: Iterable[str]) -> str | None:
    return next((part for part in parts if part in nodeid), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first."""
    order = [*_FIRST, None]
    items.sort(key=lambda item: order.index(_first(item.nodeid, _FIRST)))


collect_ignore = []
if find_spec("typer") is None or find_spec("rich") is None:
    collect_ignore.append("src/spear/cli")
if find_spec("opacus") is None:
    collect_ignore += ["src/spear/integrations/opacus.py", "src/spear/federated/dpsgd.py"]
if find_spec("flwr") is None:
    collect_ignore.append("src/spear/integrations/flower")
if find_spec("nvflare") is None:
    collect_ignore.append("src/spear/integrations/nvflare")
if find_spec("ray") is None:
    collect_ignore += ["src/spear/integrations/ray.py", "src/spear/integrations/ray_session.py"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)  # weights and inputs drawn without a generator of their own


# Whoever connects to another machine fails, here and in every Python process that a test starts.
_GUARD = Path(__file__).parent / "tests" / "support" / "network_guard"
_LOG = Path(tempfile.mkstemp(prefix="spear-network-")[1])
os.environ["SPEAR_NETWORK_LOG"] = str(_LOG)
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(_GUARD) not in _PATHS:  # a worker of pytest-xdist inherits them
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_GUARD), *filter(None, _PATHS)])
if "sitecustomize" not in sys.modules or not hasattr(sys.modules["sitecustomize"], "guard"):
    sys.path.insert(0, str(_GUARD))
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")
    sys.path.remove(str(_GUARD))


@pytest.fixture(autouse=True)
def _stays_on_this_machine() -> Iterator[None]:
    yield
    told = _LOG.read_text(encoding="utf-8")
    _LOG.write_text("")
    assert not told, f"a connection to another machine, or a port that others reach:\n{told}"


def pytest_unconfigure() -> None:
    """The log goes with the session."""
    _LOG.unlink(missing_ok=True)
