"""`spear invert`: whatever kind of file, the same verdict; whatever is wrong, one clear sentence."""

import copy
import dataclasses
import json
import os
import stat

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("typer", reason="needs the cli extra")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the cli extra")

import spear
from spear.errors import InvalidOption
from spear.federated import fedavg, fedsgd
from spear.files.update_files import UpdateFiles
from spear.files.user_code import build_model, load_object
from spear.inversion import Outcome
from spear.report import from_files
from spear.report.from_files import invert_files
from spear.update.plain_mlp import linear_layers, plain_mlp
from support.command_line import in_a_process, in_this_process
from support.planted import plant, worst_error


def run(*arguments, **options):
    return in_this_process("invert", *arguments, **options)


def save(path, tensors):
    """A dict or list of tensors in the kind of file that the path names."""
    if path.suffix in (".pt", ".pth"):
        torch.save(tensors, path)
    elif path.suffix == ".npz" and isinstance(tensors, dict):
        np.savez(path, **{name: t.detach().numpy() for name, t in tensors.items()})
    elif path.suffix == ".npz":
        np.savez(path, *(t.detach().numpy() for t in tensors))
    else:
        safetensors.save_file({name: t.detach().clone() for name, t in tensors.items()}, path)
    return path


@pytest.fixture
def case(tmp_path):
    planted = plant(5, m=60, n=48, depth=3, seed=3)
    weights = save(tmp_path / "before.safetensors", planted.model.state_dict())
    update = save(tmp_path / "grads.safetensors", planted.gradients)
    return planted, weights, update


@pytest.mark.parametrize("kind", [".safetensors", ".npz", ".pt", ".pth"])
def test_every_kind_of_file_gives_the_batch_and_its_labels(tmp_path, kind):
    planted = plant(5, seed=1)
    weights = save(tmp_path / f"w{kind}", dict(planted.model.state_dict()))
    update = save(tmp_path / f"g{kind}", dict(planted.gradients))
    finding = invert_files(UpdateFiles(weights, update)).findings[0]
    assert finding.outcome is Outcome.EXACT
    assert finding.proof is spear.Proof.REPLAY
    assert worst_error(finding.inputs, planted.inputs) < 1e-4
    assert sorted(finding.labels.tolist()) == sorted(planted.labels.tolist())
    assert "plain MLP, 50 -> 60 -> 60 -> 10" in finding.notes[0]
    assert finding.notes[1] == "The replay confirms that it is one."


@pytest.mark.parametrize("kind", [".npz", ".pt"])
def test_lists_are_taken_in_order(tmp_path, kind):
    planted = plant(5, seed=2)
    weights = save(tmp_path / f"w{kind}", [p.detach() for p in planted.model.parameters()])
    update = save(tmp_path / f"g{kind}", list(planted.gradients.values()))
    for source in (weights, save(tmp_path / "w.safetensors", planted.model.state_dict())):
        finding = invert_files(UpdateFiles(source, update)).findings[0]
        assert finding.outcome is Outcome.EXACT
        assert worst_error(finding.inputs, planted.inputs) < 1e-4


@pytest.mark.parametrize("around", ["module.{}", "{}.grad", "_orig_mod.{}_grad", "grads.{}"])
def test_names_may_be_wrapped(tmp_path, around):
    planted = plant(4, seed=4)
    weights = save(tmp_path / "w.pt", planted.model.state_dict())
    update = save(tmp_path / "g.pt", {around.format(n): g for n, g in planted.gradients.items()})
    assert invert_files(UpdateFiles(weights, update)).outcome is Outcome.EXACT


def test_a_checkpoint_around_the_weights_is_opened(tmp_path):
    planted = plant(4, seed=5)
    checkpoint = {"epoch": 7, "state_dict": planted.model.state_dict()}
    weights = save(tmp_path / "w.pt", checkpoint)
    update = save(tmp_path / "g.pt", planted.gradients)
    assert invert_files(UpdateFiles(weights, update)).outcome is Outcome.EXACT


def test_layers_are_ordered_by_number_not_by_letter():
    sizes = [(f"fc{i}", 7) for i in range(12)]
    state = {}
    for name, size in sorted(sizes):
        state[f"{name}.weight"], state[f"{name}.bias"] = torch.ones(size, size), torch.ones(size)
    assert [layer.name for layer in linear_layers(state)] == [name for name, _ in sizes]


def test_names_that_say_nothing_are_ordered_by_their_sizes():
    shapes = {"head": (3, 5), "in": (8, 9), "mid": (5, 8)}
    state = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    state |= {f"{name}.bias": torch.ones(shape[0]) for name, shape in shapes.items()}
    assert [layer.name for layer in linear_layers(state)] == ["in", "mid", "head"]
    assert plain_mlp(state)(torch.ones(2, 9)).shape == (2, 3)


def test_what_is_no_plain_mlp_is_judged_by_one_layer(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.LayerNorm(60), nn.Linear(60, 4))
    x, y = torch.randn(4, 40), torch.tensor([0, 1, 2, 3])
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    weights = save(tmp_path / "w.pt", net.state_dict())
    update = save(tmp_path / "g.pt", list(grads))
    finding = invert_files(UpdateFiles(weights, update)).findings[0]
    assert (finding.outcome, finding.proof) == (Outcome.EXACT, spear.Proof.PATTERN)
    assert worst_error(finding.inputs, x) < 1e-4
    assert "'0' alone was judged" in finding.notes[0]


def test_a_wrong_guess_of_the_model_is_taken_back(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 4)
    )
    x, y = torch.randn(4, 40), torch.tensor([0, 1, 2, 3])
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    weights = save(tmp_path / "w.pt", net.state_dict())
    update = save(tmp_path / "g.pt", list(grads))
    finding = invert_files(UpdateFiles(weights, update)).findings[0]
    assert (finding.outcome, finding.cause) == (Outcome.APPROXIMATE, spear.Cause.UNFIT)
    assert worst_error(finding.inputs, x) < 1e-4
    assert "likely exact" in finding.reason
    assert "does not reproduce the update" in finding.reason
    assert "Nothing confirms that" in finding.notes[1]


@pytest.mark.parametrize(("loss", "name"), [(nn.MSELoss(), "mse"), (nn.BCEWithLogitsLoss(), "bce")])
def test_other_losses_are_noticed_and_named(tmp_path, loss, name):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 1))
    x, y = torch.randn(6, 40), torch.tensor([0, 1, 1, 0, 1, 0])
    grads = torch.autograd.grad(loss(net(x)[:, 0], y.float()), list(net.parameters()))
    weights, update = (
        save(tmp_path / "w.pt", net.state_dict()),
        save(tmp_path / "g.pt", list(grads)),
    )
    unnamed = invert_files(
        UpdateFiles(weights, update, protocol=spear.Protocol(samples=6))
    ).findings[0]
    assert (unnamed.outcome, unnamed.proof) == (Outcome.EXACT, spear.Proof.REPLAY)
    named = invert_files(
        UpdateFiles(weights, update, loss=name, protocol=spear.Protocol(samples=6))
    ).findings[0]
    assert (named.outcome, named.proof) == (Outcome.EXACT, spear.Proof.REPLAY)
    assert worst_error(named.inputs, x) < 1e-4
    nearest = torch.cdist(named.inputs, x).argmin(1)
    assert torch.equal(named.labels, y[nearest])


def test_an_inner_layer_gives_activations_and_says_so(tmp_path, case):
    _, weights, update = case
    finding = invert_files(UpdateFiles(weights, update, layer="2")).findings[0]
    assert finding.activations
    assert "activations, not the data" in finding.headline
    assert not invert_files(UpdateFiles(weights, update)).findings[0].activations


def test_what_the_guess_of_the_model_was_worth_is_said(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 4))
    x, y = torch.randn(4, 40), torch.tensor([0, 1, 2, 3])
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    weights, update = (
        save(tmp_path / "w.pt", net.state_dict()),
        save(tmp_path / "g.pt", list(grads)),
    )
    finding = invert_files(UpdateFiles(weights, update)).findings[0]
    assert finding.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)
    assert "Nothing confirms that" in finding.notes[1]


def test_training_in_an_unknown_order_does_not_blame_the_model(tmp_path):
    """It is the plain MLP that it was taken for; only the order of the mini-batches is not known."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 4))
    x, y = torch.randn(8, 40), torch.arange(8) % 4
    weights = save(tmp_path / "w.pt", net.state_dict())
    sent = copy.deepcopy(net)
    optimizer = torch.optim.SGD(sent.parameters(), lr=0.01)
    for _ in range(5):
        for batch in torch.randperm(8).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(sent(x[batch]), y[batch]).backward()
            optimizer.step()
    after = save(tmp_path / "a.pt", sent.state_dict())
    told = spear.Protocol.of(sends="weights", samples=8, lr=0.01, epochs=5, local_batch_size=4)
    finding = invert_files(UpdateFiles(weights, after=after, protocol=told)).findings[0]
    assert (finding.outcome, finding.proof) == (Outcome.EXACT, spear.Proof.PATTERN)
    assert "order of the client's mini-batches" in finding.notes[1]
    assert "differ" not in " ".join(finding.notes)


def test_a_duplicate_is_not_called_exact_for_another_loss(tmp_path):
    """The replay refuses it; weighing another loss, or the layer alone, must not undo that."""
    inputs = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    inputs[4] = inputs[3]
    planted = plant(5, inputs=inputs, labels=torch.tensor([0, 1, 2, 3, 3]))
    weights = save(tmp_path / "w.pt", planted.model.state_dict())
    update = save(tmp_path / "g.pt", planted.gradients)
    assert invert_files(UpdateFiles(weights, update)).outcome is Outcome.PARTIAL


def test_weights_after_local_training(tmp_path):
    planted = plant(4, m=80, seed=6)
    sent = fedavg(planted.model, planted.inputs, planted.labels, lr=0.05, epochs=3)
    weights = save(tmp_path / "w.safetensors", planted.model.state_dict())
    after = save(tmp_path / "a.safetensors", sent)
    files = UpdateFiles(
        weights, after=after, protocol=spear.Protocol(sends="weights", lr=0.05, epochs=3)
    )
    finding = invert_files(files).findings[0]
    assert finding.outcome is Outcome.EXACT
    assert worst_error(finding.inputs, planted.inputs) < 1e-2


def test_the_command_writes_what_is_asked_and_says_so_in_its_exit_code(tmp_path, case):
    planted, weights, update = case
    truth = save(tmp_path / "truth.npz", {"inputs": planted.inputs, "labels": planted.labels})
    out, result, page = tmp_path / "out", tmp_path / "r.json", tmp_path / "r.html"
    done = run(
        *("--weights", weights, "--update", update, "--shape", "3x4x4", "--mean", "0.1,0.2,0.3"),
        *("--std", "2", "--out", out, "--json", result, "--report", page, "--truth", truth),
    )
    assert done.returncode == 20, done.stderr
    assert (
        "EXACT: all 5 samples visible in the update were recovered, proved by replay" in done.stdout
    )
    assert "\x1b" not in done.stdout
    loaded = spear.load(result)
    assert loaded.outcome is Outcome.EXACT
    assert min(loaded.findings[0].truth.psnr) > 100
    tensors = safetensors.load_file(out / "recovered.safetensors")
    assert torch.equal(tensors["inputs"], loaded.findings[0].inputs)
    assert bool(tensors["certified"].all())
    assert sorted(p.name for p in out.glob("*.png")) == [f"sample-0{i}.png" for i in range(1, 6)]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    if os.name == "posix":
        for path in (result, page, *out.iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_redacted_files_hold_nothing_that_was_recovered(tmp_path, case):
    _, weights, update = case
    result, page = tmp_path / "r.json", tmp_path / "r.html"
    done = run(
        *("--weights", weights, "--update", update, "--shape", "3x4x4", "--redact"),
        *("--json", result, "--report", page),
    )
    assert done.returncode == 20, done.stderr
    assert spear.load(result).is_redacted
    assert "base64" not in result.read_text(encoding="utf-8")
    assert "data:image/png" not in page.read_text(encoding="utf-8")
    refused = run("--weights", weights, "--update", update, "--redact", "--out", tmp_path / "o")
    assert refused.returncode == 2
    assert not (tmp_path / "o").exists()


def test_json_on_the_terminal_is_json_alone(case):
    _, weights, update = case
    done = in_a_process("invert", "--weights", weights, "--update", update, "--json", "-")
    assert done.returncode == 20, done.stderr
    content = json.loads(done.stdout)
    assert (content["schema"], content["outcome"]) == ("spear.report/2", "exact")
    assert "EXACT" in done.stderr


def test_names_of_features_make_rows_of_people(tmp_path, case):
    """One file of names, or a list: two inputs are one feature, the others numbers."""
    planted, weights, update = case
    count = planted.inputs.shape[1]
    names = ["sex=f", "sex=m", *(f"x{i}" for i in range(count - 2))]
    (tmp_path / "names.txt").write_text("\n".join(names), encoding="utf-8")
    page, given = tmp_path / "r.html", ("--weights", weights, "--update", update)
    for columns in (tmp_path / "names.txt", ",".join(names)):
        done = run(*given, "--columns", columns, "--report", page)
        assert done.returncode == 20, done.stderr
        text = page.read_text(encoding="utf-8")
        assert "The rows that came back" in text
        assert f'data-name="x{count - 3}"' in text
    assert "What to do now" in done.stdout
    assert f"spear check --weights {weights}" in done.stdout
    few = run(*given, "--columns", "a,b", "--report", page)
    assert few.returncode == 2
    assert f"each of the layer's {count} inputs in --columns, got 2" in few.stderr
    both = run(*given, "--columns", "a,b", "--shape", "1x1x2")
    assert "give one" in both.stderr


def test_the_truth_of_another_batch_is_noticed(tmp_path, case):
    planted, weights, update = case
    own = save(tmp_path / "own.npz", {"inputs": planted.inputs})
    other = save(tmp_path / "other.npz", {"inputs": planted.inputs.flip(1)})
    files = UpdateFiles(weights, update)
    assert not any("truth" in note for note in invert_files(files, truth=own).findings[0].notes)
    assert (
        "Is that really the batch behind this update?"
        in invert_files(files, truth=other).findings[0].notes[-1]
    )


def test_partly_nothing_and_cannot_tell_have_exit_codes_of_their_own(tmp_path, case):
    planted, weights, _ = case
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: g + 1e-4 * torch.randn(g.shape, generator=generator)
        for n, g in planted.gradients.items()
    }
    some = run("--weights", weights, "--update", save(tmp_path / "n.pt", noisy), "-q")
    assert (some.returncode, some.stdout.split(":")[0]) == (10, "APPROXIMATE"), some.stdout
    zero = {n: torch.zeros_like(g) for n, g in planted.gradients.items()}
    none = run("--weights", weights, "--update", save(tmp_path / "z.pt", zero), "-q")
    assert (none.returncode, none.stdout.split(":")[0]) == (0, "FAILED"), none.stdout
    many = plant(100, m=60, n=48, depth=3, seed=3)  # more than the layer can tell apart
    weights = save(tmp_path / "w.pt", many.model.state_dict())
    lost = run("--weights", weights, "--update", save(tmp_path / "m.pt", many.gradients), "-q")
    said = lost.stdout.split(":")[0]
    assert (lost.returncode, said) == (30, "INCONCLUSIVE (cannot tell)"), lost.stdout


ASSUMED = ("no samples [bold]merged", "weight and bias gradient were scaled alike")


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (Outcome.EXACT, 20, "EXACT: "),
        (Outcome.PARTIAL, 10, "PARTIAL: "),
        (Outcome.APPROXIMATE, 10, "APPROXIMATE (likely exact, not proved): "),
        (Outcome.INCONCLUSIVE, 30, "INCONCLUSIVE (cannot tell): "),
        (Outcome.FAILED, 0, "FAILED: "),
    ],
)
def test_the_exit_code_and_the_terminal_tell_the_outcome(monkeypatch, case, outcome, code, said):
    """Whatever `invert` says, it is said on, with what the verdict rests on."""
    _, weights, update = case

    def told(view, **options):
        result = spear.invert(view, **options)
        return dataclasses.replace(result, outcome=outcome, assumptions=ASSUMED)

    monkeypatch.setattr(from_files, "invert", told)
    done = run("--weights", weights, "--update", update)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    start = lines.index("Assumed, because it cannot be tested:")
    assert any(line.startswith(said) for line in lines[:start])
    assert lines[start + 1 : start + 3] == [f"  - {words}" for words in ASSUMED]
    quiet = run("--weights", weights, "--update", update, "-q")
    assert quiet.stdout.startswith(said)
    assert "Assumed, because" not in quiet.stdout


@pytest.mark.parametrize("option", ["--samples", "-b"])
def test_the_number_of_samples_is_handed_on(tmp_path, monkeypatch, case, option):
    planted, weights, update = case
    seen = []

    def only_look(view, **options):
        seen.append(view.samples)
        return spear.invert(view, **options)

    monkeypatch.setattr(from_files, "invert", only_look)
    assert run("--weights", weights, "--update", update, option, "5").returncode == 20
    sent = fedavg(planted.model, planted.inputs, planted.labels, lr=0.05, epochs=1)
    after = save(tmp_path / "after.pt", sent)
    run("--weights", weights, "--after", after, "--lr", "0.05", "--epochs", "1", option, "5")
    with_more = {**planted.model.state_dict(), "scale": torch.ones(3)}  # no plain MLP: one layer
    bare = save(tmp_path / "bare.pt", with_more)
    run("--weights", bare, "--update", update, option, "5")
    run("--weights", weights, "--update", update)
    assert seen == [5, 5, 5, None]
    none = run("--weights", weights, "--update", update, option, "0")
    assert none.returncode == 2
    assert "Traceback" not in none.stderr


FACTORY = """
from torch import nn

def net(width=60):
    return nn.Sequential(
        nn.Linear(48, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )

class NeedsSizes(nn.Module):
    def __init__(self, size):
        super().__init__()

def broken():
    raise RuntimeError("no weights here")

number = 3
"""


def test_the_users_own_model_is_found_in_a_file_or_the_current_folder(tmp_path, case):
    _, weights, update = case
    (tmp_path / "own_nets.py").write_text(FACTORY)
    for spec in (f"{tmp_path / 'own_nets.py'}:net", "own_nets:net"):
        done = run("--weights", weights, "--update", update, "--model", spec, cwd=tmp_path)
        assert done.returncode == 20, done.stderr
        assert "No model was given" not in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "has no 'nothing'; it has"),
        ("NeedsSizes", "cannot be called without arguments"),
        ("broken", "RuntimeError: no weights here"),
        ("number", "is a int, expected a function or class"),
    ],
)
def test_what_is_no_factory_is_told(tmp_path, name, words):
    path = tmp_path / f"nets_{name}.py"
    path.write_text(FACTORY)
    with pytest.raises(InvalidOption, match=words):
        build_model(f"{path}:{name}")


@pytest.mark.parametrize("spec", ["nonsense", "no.such.module:x", "missing.py:x", ":x", "json:"])
def test_names_of_nothing_are_told(spec):
    with pytest.raises(InvalidOption, match=r"expected|there is no"):
        load_object(spec)


def test_mistakes_are_said_first_and_attacked_or_not_told_apart_from_safe(tmp_path, case):
    """Weights as --update, a difference as it, the weights themselves, Adam, no layer to attack."""
    planted, weights, _ = case
    sent = fedavg(planted.model, planted.inputs, planted.labels, lr=0.05)
    own = dict(planted.model.state_dict())
    moved = {name: sent[name] - own[name] for name in own}
    signs = {name: own[name] - 1e-3 * planted.gradients[name].sign() for name in own}
    cases = {
        ("update", 20, "this was given as a gradient, but it is close to the weights"): sent,
        ("update", 20, "has the sign of a difference, after minus before"): moved,
        ("after", 20, "this was given as weights, but it is far from the weights"): moved,
        (
            "difference",
            20,
            "given as a difference of weights, but it is close",
        ): sent,
        ("update", 30, "not attacked: what was sent equals the model"): own,
        ("after", 30, "not attacked: what was sent equals the model"): own,
        ("after", 30, "the update looks like one of Adam"): signs,
    }
    for (option, code, words), tensors in cases.items():
        file = save(tmp_path / "u.pt", tensors)
        done = run("--weights", weights, f"--{option}", file, "-q")
        assert done.returncode == code, done.stdout + done.stderr
        assert words in done.stdout.split(";")[0]
    told = ("--optimizer", "adam", "--lr", "0.05")
    done = run("--weights", weights, "--after", save(tmp_path / "a.pt", sent), *told, "-q")
    assert (done.returncode, "train with adam" in done.stdout) == (30, True)
    (tmp_path / "smooth.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Linear(48, 60), nn.Tanh(), "
        "nn.Linear(60, 10))\n"
    )
    smooth = nn.Sequential(nn.Linear(48, 60), nn.Tanh(), nn.Linear(60, 10))
    state = save(tmp_path / "s.pt", smooth.state_dict())
    gradients = save(tmp_path / "g.pt", fedsgd(smooth, planted.inputs, planted.labels))
    done = run(
        "--weights", state, "--update", gradients, "--model", f"{tmp_path}/smooth.py:net", "-q"
    )
    assert done.returncode == 30, done.stdout + done.stderr
    assert "expected a linear layer next to a ReLU" in done.stdout


def as_shown(error):
    """As the command line words an error."""
    if not isinstance(error, spear.InvalidOption):
        return str(error)
    return error.worded(lambda name: f"--{name.replace('_', '-')}")


def test_what_is_wrong_is_said_in_one_sentence(tmp_path, case):
    planted, weights, update = case
    other = save(tmp_path / "other.pt", {"conv.weight": torch.ones(3, 3)})
    short = save(tmp_path / "short.pt", list(planted.gradients.values())[:3])
    wrong = {
        **planted.gradients,
        "0.weight": torch.ones(7, 7),
    }
    shapes = save(tmp_path / "shapes.pt", wrong)
    broken = dict.fromkeys(("0.weight", "0.bias"), float("nan"))
    unscaled = {n: g + broken.get(n, 0.0) for n, g in planted.gradients.items()}
    nan = save(tmp_path / "nan.pt", unscaled)
    cases = {
        ("--weights", weights): "expected either gradients (--update)",
        ("--weights", weights, "--update", tmp_path / "no.pt"): "does not exist",
        ("--weights", weights, "--update", tmp_path): "is a folder: expected a file named",
        ("--update", update): "expected the weights the client was sent",
        ("--weights", weights, "--update", update, "--lr", "0.1"): "--lr belongs to local training",
        ("--weights", weights, "--after", update, "--lr", "0"): "expected --lr > 0, got 0.0",
        ("--weights", weights, "--update", other): "there is no 'conv.weight' among the weights",
        ("--weights", weights, "--update", short): "got 3",
        (
            "--weights",
            weights,
            "--update",
            shapes,
        ): "'0.weight' has shape (7, 7), expected (60, 48)",
        ("--weights", update, "--update", weights): "were weights and update swapped?",
        ("--weights", weights, "--update", nan): "has NaN or infinite entries (so have 1 more)",
        ("--weights", weights, "--update", update, "--layer", "fc"): "no linear layer 'fc'",
        ("--weights", weights, "--update", update, "--shape", "3x5x5"): "the layer has 48 inputs",
        ("--weights", weights, "--update", update, "--shape", "big"): "expected --shape like",
        ("--weights", weights, "--update", update, "--loss", "hinge"): "expected one of the losses",
        (
            "--weights",
            weights,
            "--update",
            update,
            "--finder",
            "luck",
        ): "expected finder to be one of",
        ("--weights", weights, "--update", update, "--report", tmp_path): "got the folder",
        ("--weights", weights, "--update", update, "--truth", update): "expected an array 'inputs'",
        ("--weights", weights, "--update", update, "--model", "a:b"): "there is no module 'a'",
    }
    from typer.testing import CliRunner

    from spear.cli.app import app

    for arguments, words in cases.items():
        done = CliRunner().invoke(app, ["invert", *map(str, arguments)])
        assert isinstance(done.exception, spear.SpearError), (arguments, done.output)
        assert words in as_shown(done.exception), arguments
    one = in_a_process("invert", "--weights", weights, "--update", tmp_path / "no.pt")
    assert one.returncode == 2
    assert one.stdout == ""
    assert one.stderr.startswith("spear: ")
    assert "Traceback" not in one.stderr
    assert (
        "Traceback" in run("--debug", "--weights", weights, "--update", tmp_path / "no.pt").stderr
    )


NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(40, 60), nn.Linear(60, 1)

    def forward(self, x):
        return {"out": self.head(torch.relu_(self.fc(x))).squeeze()}

def loss(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs["out"], targets)
"""


@pytest.mark.parametrize("named", [(), ("--loss", "bce"), ("--loss", "nets.py:loss")])
def test_squeezed_outputs_and_losses_of_their_own(tmp_path, named):
    (tmp_path / "nets.py").write_text(NETS)
    torch.manual_seed(0)
    net = build_model(f"{tmp_path / 'nets.py'}:Net")
    x, y = torch.randn(5, 40), torch.tensor([0, 1, 1, 0, 1])
    loss = load_object(f"{tmp_path / 'nets.py'}:loss")
    save(tmp_path / "w.pt", net.state_dict())
    save(tmp_path / "g.pt", fedsgd(net, x, y.float(), loss))
    words = ("--model", "nets.py:Net", "--weights", "w.pt", "--update", "g.pt", *named)
    told = run(*words, "--json", "found.json", cwd=tmp_path)
    assert told.returncode == 20, told.stdout + told.stderr
    finding = spear.load(tmp_path / "found.json").findings[0]
    nearest = torch.cdist(finding.inputs.double(), x.double()).argmin(1)
    assert torch.equal(finding.labels, y[nearest])


def test_a_layer_that_is_not_there_or_not_attackable_is_said_with_those_that_are(tmp_path, case):
    planted, weights, update = case
    (tmp_path / "other.py").write_text(
        "from collections import OrderedDict\nfrom torch import nn\n\ndef net():\n"
        "    return nn.Sequential(OrderedDict(fc=nn.Linear(48, 60), r=nn.ReLU()))\n"
    )
    model = f"{tmp_path}/other.py:net"
    sent = {n: t for n, t in planted.gradients.items() if not n.startswith("0.")}
    partly = save(tmp_path / "part.pt", sent)
    mixed = save(
        tmp_path / "mixed.pt", {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(2, 9)}
    )
    told = {
        ("invert", "--weights", weights, "--update", update, "--model", model, "--layer", "0"): (
            "there is no '0.bias' in the model; expected names such as 'fc.weight', 'fc.bias'"
        ),
        ("check", "--weights", weights, "--model", model): "there is no '0.bias' in the model",
        ("invert", "--weights", weights, "--update", partly, "--layer", "0"): (
            "layer '0' cannot be attacked (the update has no gradient of its weight and bias); others "
            "that can: '2', '4'"
        ),
        ("check", "--weights", mixed, "--layer", "fc"): (
            "the model has no linear layer 'fc'; its linear layers: 'a', 'b'"
        ),
    }
    for arguments, words in told.items():
        done = in_this_process(*arguments)
        assert words in done.stdout + done.stderr, (arguments, done.stdout, done.stderr)
