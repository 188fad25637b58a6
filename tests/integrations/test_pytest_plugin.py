"""The pytest plugin, in runs of its own: found by its entry point, and torch waits for its use."""

import os
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
UPDATE = """
import torch
import spear
from spear.federated import fedsgd, mlp

net = mlp(48, 4, width=60, depth=3, seed=0)
x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
gradients = fedsgd(net, x, torch.arange(4))
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest where SPEAR is installed, as its pyproject.toml says it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["pytest11"].items()
    folder = pytester.mkdir("installed") / "spear_fl-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: spear-fl\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[pytest11]\n{} = {}\n".format(*entry))
    paths = [str(folder.parent), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def run(code, *arguments):
        pytester.makepyfile(code)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    return run


def test_it_is_there_and_imports_no_torch(run):
    result = run(
        """
        import sys

        def test_nothing_heavy(spear_audit):
            assert "torch" not in sys.modules
            assert "numpy" not in sys.modules
        """,
        *("-p", "no:hypothesispytest"),
    )
    result.assert_outcomes(passed=1)


def test_an_update_that_gives_everything_away_fails_the_test_with_the_reason(run):
    result = run(
        f"""{UPDATE}
def test_model_and_gradients(spear_audit):
    spear_audit(net, gradients, name="client 7")

def test_a_view(spear_audit):
    spear_audit(spear.observe(net, gradients), allow="partial")

def test_weights_sent_back(spear_audit):
    after = {{name: value - 0.1 * gradients[name] for name, value in net.state_dict().items()}}
    spear_audit(net, after=after, lr=0.1, local_steps=1, max_seconds=60, allow=spear.Outcome.PARTIAL)
""",
        "--junitxml=own.xml",
    )
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: client 7 gives away more than allowed: EXACT, allowed FAILED",
            "*All 4 samples visible in the update were recovered exactly, proved by replay.",
            "*Severity: Every sample, exactly*",
        ]
    )
    assert "pytest_plugin.py" not in result.stdout.str()  # the traceback ends in the user's test
    assert (
        "were recovered, proved by" not in result.stdout.str()
    )  # the reason is the headline again
    text = Path("own.xml").read_text(encoding="utf-8")
    assert '<property name="spear outcome of client 7" value="exact" />' in text


def test_what_is_allowed_passes_and_gives_the_finding(run):
    result = run(
        f"""{UPDATE}
import pytest
from torch import nn

def test_allowed(spear_audit):
    found = spear_audit(net, gradients, allow="exact")
    assert found.recovered == 4

def test_a_zero_gradient(spear_audit):
    spear_audit(net, [0 * g for g in gradients.values()], allow="inconclusive")

def test_nothing_to_attack_cannot_be_told(spear_audit):
    bare = nn.Linear(4, 2)
    gradients = {{name: torch.ones_like(p) for name, p in bare.named_parameters()}}
    spear_audit(bare, gradients, allow="inconclusive")
    with pytest.raises(AssertionError, match="INCONCLUSIVE, allowed FAILED"):
        spear_audit(bare, gradients)

def test_wrong_words(spear_audit):
    with pytest.raises(spear.InvalidOption, match="allow to be one of failed, inconclusive"):
        spear_audit(net, gradients, allow="none")
    with pytest.raises(spear.InvalidOption, match="gradients, lr cannot be given beside a view"):
        spear_audit(spear.observe(net, gradients), gradients, lr=0.1)
""",
    )
    result.assert_outcomes(passed=4)
