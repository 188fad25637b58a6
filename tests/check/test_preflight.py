"""What a preflight says is what happens: exposed models give real batches away, others do not."""

import copy
import doctest
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import spear
from spear import theory
from spear.check import CheckFiles, Exposure, check_files, compare, preflight
from spear.check.model_structure import examine
from spear.errors import InvalidFile, InvalidOption
from spear.federated import fedavg, fedsgd, mlp
from spear.federated.privacy import Privacy, noise_of
from spear.report import Level
from spear.update import Protocol
from support.command_line import in_this_process
from support.planted import module, plant, worst_error

ROOT = Path(__file__).parents[2]
N, M, B, CLASSES = 60, 120, 8, 10


def layers(*between, first=None, outputs=CLASSES):
    """A network of two linear layers with modules between them."""
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Linear(N, M), *between, nn.Linear(M, outputs))


def net():
    return mlp(N, CLASSES, width=M, depth=3, seed=0)


def judged(model, data="numbers", seconds=60, **told):
    """A preflight with one kind of data; little time is for what fails anyway."""
    return preflight(model, data=data, max_seconds=seconds, **told)


def attacked(model, b=B, seed=0):
    """A real batch, the model's real gradient, the real attack."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, N, generator=generator)
    y = torch.randint(CLASSES, (b,), generator=generator)
    torch.manual_seed(seed)
    return x, spear.invert(spear.observe(model, fedsgd(model, x, y)), max_seconds=5)


def said(found, subject):
    return [remark for remark in found.remarks if remark.subject == subject]


def test_a_plain_mlp_is_exposed_and_gives_its_batch_away():
    found = preflight(net(), samples=B, max_seconds=60)
    assert (found.verdict, found.layer, found.batch_size) == (Exposure.EXPOSED, "0", B)
    assert "all 8 made-up samples came back exactly from layer '0' (60 → 120)" in found.headline
    assert "table rows" in said(found, "rehearsal")[0].words
    assert "standard normal numbers" in said(found, "rehearsal")[0].words
    x, result = attacked(net())
    assert worst_error(result.inputs, x) < 1e-5


@pytest.mark.parametrize("activation", [nn.GELU(), nn.Tanh(), nn.LeakyReLU(), nn.ELU()])
def test_other_activations_leave_nothing_to_attack(activation):
    model = layers(activation)
    found = judged(model, samples=B)
    assert found.verdict is Exposure.NOT_EXPOSED
    assert "no guarantee" in found.headline
    assert type(activation).__name__ in str(found.layers.rows)
    with pytest.raises(spear.NoAttackableLayer):
        attacked(model)
    # An update of one sample is another matter: so is one of unknown size, or among others.
    assert judged(model).verdict is Exposure.UNKNOWN
    assert judged(model, samples=1, clients=5).verdict is Exposure.UNKNOWN
    step = {"lr": 0.1, "local_steps": 1, "local_batch_size": 1}
    assert judged(model, samples=B, **step).verdict is Exposure.EXPOSED


def test_a_batch_of_one_is_exposed_whatever_the_activation():
    for activation, words in (
        (nn.GELU(), "divided by its bias gradient"),
        (nn.ReLU(), "came back"),
    ):
        found = judged(layers(activation), samples=1)
        assert found.verdict is Exposure.EXPOSED
        assert words in found.headline


class HandMade(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(M, N)), nn.Parameter(torch.zeros(M))

    def forward(self, x):
        return torch.relu(x @ self.weight.T + self.bias)


def test_what_is_no_proof_of_safety_is_unknown():
    assert judged(nn.Conv2d(3, 8, 3), samples=4).verdict is Exposure.NOT_EXPOSED
    own = judged(HandMade(), samples=4)
    assert own.verdict is Exposure.UNKNOWN
    assert "'weight' may be a linear layer" in own.headline
    drowned = judged(net(), samples=B, sigma=1.0)
    assert drowned.verdict is Exposure.UNKNOWN
    assert "recovered nothing; real data may differ" in drowned.headline
    full = judged(layers(nn.ReLU()), samples=N, seconds=0.5)
    assert full.verdict is Exposure.UNKNOWN
    assert "full rank" in said(full, "batch against layer")[0].words
    adam = judged(net(), samples=B, lr=0.001, epochs=2, optimizer="Adam")
    assert adam.verdict is Exposure.UNKNOWN
    assert "proves nothing" in said(adam, "optimiser")[0].words
    assert "torch.optim" in judged(net(), samples=B, lr=0.1, optimizer="lion").headline
    alone = judged(net(), samples=B, optimizer="Adam")  # an optimiser trains: no gradient is sent
    assert alone.verdict is Exposure.UNKNOWN
    assert "taken to be 0.01" in said(alone, "assumed")[0].words


def test_an_optimiser_is_no_protection_where_gradients_are_sent():
    found = preflight(net(), protocol=Protocol(samples=B, optimizer="Adam"), data="table")
    assert found.verdict is Exposure.EXPOSED
    assert [remark.level for remark in said(found, "optimiser")] == [Level.NOTE]
    assert "no step of Adam shows" in said(found, "optimiser")[0].words


def test_the_headline_says_so_if_only_some_kinds_of_data_came_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    found = preflight(model, samples=5)
    assert found.verdict is Exposure.EXPOSED
    assert "; it depends on the data (standard normal numbers: exact; table rows" in found.headline


def test_trained_samples_vanish_so_a_full_batch_is_not_safe():
    """Why too many samples are no proof: those whose gradient vanished do not count."""
    model = layers(nn.ReLU())
    x = torch.randn(N + 10, N, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    with torch.no_grad():
        model[2].weight.mul_(1e3)
        model[2].bias.mul_(1e3)  # sure of all labels but the first few, which are wrong
    y[:B] = (y[:B] + 1) % CLASSES
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)))
    assert compare(result.inputs, x[:B]).recovered == B


@pytest.mark.parametrize("clipping", ["per-sample", "per-layer", "global"])
def test_noise_is_safe_only_where_clipping_bounds_any_data(clipping):
    small, clip = min(N * M, M * CLASSES) ** 0.25, 0.5
    told = {"samples": B, "clip": clip, "clipping": clipping}
    enough = judged(net(), sigma=1.01 * clip / small, **told)
    assert enough.verdict is Exposure.NOT_EXPOSED
    assert "clipping and noise hide any batch" in enough.headline
    for less in ({"sigma": 0.99 * clip / small}, {"sigma": 1.9 * clip / small, "steps": 4}):
        assert judged(net(), **less, **told).verdict is Exposure.UNKNOWN


@pytest.mark.parametrize(("m", "n"), [(20, 30), (60, 120), (200, 784)])
def test_noise_at_the_bound_hides_the_loudest_update_there_can_be(m, n):
    """All of C in one singular value is the worst case: of rank one, and of several."""
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 3):
        for _ in range(4):
            D = torch.randn(m, rank, generator=generator).relu()
            X = torch.randn(rank, n, generator=generator)
            clean = D @ X / (D @ X).norm()
            noisy = clean + torch.randn(m, n, generator=generator) / (m * n) ** 0.25
            bias = D.sum(1) / (D @ X).norm() + torch.randn(m, generator=generator) / (m * n) ** 0.25
            W, b = torch.randn(m, n, generator=generator), torch.randn(m, generator=generator)
            result = spear.invert(spear.LayerUpdate(W, b, noisy, bias), max_seconds=2)
            assert compare(result.inputs, X).recovered == 0


@pytest.mark.parametrize(("classes", "verdict"), [(10, Exposure.EXPOSED), (2, Exposure.PARTLY)])
def test_without_a_bias_samples_come_back_at_the_models_scale_or_up_to_one(classes, verdict):
    model = nn.Sequential(nn.Linear(N, M, bias=False), nn.ReLU(), nn.Linear(M, classes))
    found = judged(model, samples=B)
    assert (found.verdict, found.layer) == (verdict, "0")
    assert ("each up to a factor" in found.headline) == (verdict is Exposure.PARTLY)


def test_a_disguised_relu_is_not_called_safe():
    folded = layers(nn.BatchNorm1d(M), nn.ReLU())
    folded[1].running_mean.normal_()
    folded[1].running_var.uniform_(0.5, 2)
    folded.eval()
    found = judged(folded, samples=B)
    # The output layer behind the ReLU is attackable, and the refused one is nearer to the data.
    assert found.verdict is Exposure.PARTLY
    assert "folds" in said(found, "a ReLU in disguise")[0].words
    norm = folded[1]
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
    shift = (norm.bias - norm.running_mean * scale).detach()
    x = torch.randn(B, N, generator=torch.Generator().manual_seed(1))
    g = fedsgd(folded, x, torch.arange(B))
    view = spear.LayerUpdate(
        weight=scale[:, None] * folded[0].weight.detach(),
        bias=scale * folded[0].bias.detach() + shift,
        weight_grad=g["0.weight"] / scale[:, None],
        bias_grad=g["0.bias"] / scale,
    )
    assert worst_error(spear.invert(view).inputs, x) < 1e-4
    assert judged(layers(nn.ReLU6()), samples=B).verdict is Exposure.PARTLY


def test_dropout_is_played_where_it_stands():
    behind = judged(layers(nn.ReLU(), nn.Dropout(0.5)).train(), samples=B)
    assert behind.verdict is Exposure.EXPOSED
    assert "8 of them proved" in said(behind, "rehearsal")[0].words
    assert "Do not take it for protection" in said(behind, "train mode")[0].words
    before = nn.Sequential(nn.Dropout(0.2), nn.Linear(N, M), nn.ReLU(), nn.Linear(M, CLASSES))
    found = judged(before.train(), samples=B)
    assert found.verdict is Exposure.PARTLY
    assert "random entries dropped" in said(found, "train mode, before the layer")[0].words
    assert "what the layer reads" in said(found, "train mode, before the layer")[0].words
    eval_mode = judged(before.eval(), samples=B)
    assert eval_mode.verdict is Exposure.EXPOSED
    assert said(eval_mode, "eval mode")


def test_batch_norm_beside_the_layer_hides_a_made_up_batch():
    model = nn.Sequential(nn.BatchNorm1d(N), nn.Linear(N, M), nn.ReLU(), nn.Linear(M, CLASSES))
    assert judged(model.train(), samples=B, seconds=1).verdict is Exposure.UNKNOWN
    assert not bool(attacked(model)[1].certified.any())
    alone = judged(model, samples=B, clip=1.0)  # no sample has a gradient of its own
    assert alone.headline.startswith(
        "Unknown: not rehearsed: ValueError: Expected more than 1 value"
    )


def test_a_model_is_left_as_it_was():
    model = nn.Sequential(
        nn.BatchNorm1d(N), nn.Linear(N, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, 3)
    )
    before, mode = copy.deepcopy(model.state_dict()), model.training
    state = torch.random.get_rng_state()
    judged(model, samples=B, sigma=1e-4, seconds=0.5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training is mode
    assert torch.equal(state, torch.random.get_rng_state())


def test_convolutions_give_features_back():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 30 * 30, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )
    found = judged(model, "photos", samples=4)
    assert found.verdict is Exposure.PARTLY
    assert "activations behind Conv2d" in found.headline
    assert "1 x 32 x 32" in said(found, "assumed")[0].words


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(50, 16), nn.Linear(16, 300)
        self.out = nn.Linear(300, 4)

    def forward(self, words):
        return self.out(torch.relu(self.hidden(self.table(words))).mean(1))


def test_tokens_count_as_samples_and_embeddings_tell_the_words():
    model = Words()
    found = preflight(model, samples=2, input_shape=(5,), layer="hidden")
    assert "10 rows for 2 samples" in said(found, "assumed")[0].words
    assert said(found, "embedding")[0].level is Level.EXPOSED


def test_a_model_that_tells_the_words_is_not_called_unexposed():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(80, 20), nn.GELU())
    found = preflight(model, samples=2, input_shape=(5,))
    assert found.verdict is Exposure.PARTLY
    assert "which words a client used" in found.headline
    model[0].weight.requires_grad_(False)  # as the advice says
    assert preflight(model, samples=2, input_shape=(5,)).verdict is Exposure.NOT_EXPOSED
    model[0].weight.requires_grad_(True)
    noisy = {"clip": 1.0, "noise_multiplier": 10.0}  # which leaves no row zero
    assert preflight(model, samples=2, input_shape=(5,), **noisy).verdict is not Exposure.PARTLY


class Branching(nn.Module):
    def __init__(self, error=None):
        super().__init__()
        self.inner, self.out, self.unused = nn.Linear(N, M), nn.Linear(M, 3), nn.Linear(2, 2)
        self.error = error

    def forward(self, x):
        h = self.inner(x)
        if self.error and float(h.detach().sum()) < 1e9:  # tracing ends here
            raise self.error
        return self.out(torch.relu(h) if float(h.detach().sum()) < 1e9 else h)


def test_layers_that_are_shared_frozen_or_hidden():
    tied = nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Linear(N, N), nn.ReLU(), nn.Linear(N, 3))
    tied[2].weight = tied[0].weight
    assert "shares its weights" in examine(tied).layers[0].report.why
    frozen = layers(nn.ReLU())
    frozen[0].weight.requires_grad_(False)
    assert "not trained" in examine(frozen).layers[0].report.why
    normed = layers(nn.ReLU(), first=nn.utils.parametrizations.weight_norm(nn.Linear(N, M)))
    assert "parametrised" in examine(normed).layers[0].report.why


def test_layers_that_tracing_does_not_show_are_rehearsed():
    found = judged(Branching(), samples=4)
    assert said(found, "not traceable")
    assert (found.verdict, found.layer) == (Exposure.EXPOSED, "inner")
    broken = judged(Branching(RuntimeError("needs a GPU")), samples=4)
    assert broken.verdict is Exposure.UNKNOWN
    assert "RuntimeError: needs a GPU" in broken.headline
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    wrapped = nn.Sequential(encoder, nn.Flatten(), nn.Linear(80, 3))
    found = judged(wrapped, samples=2, input_shape=(5, 16), seconds=1)
    assert found.verdict is not Exposure.NOT_EXPOSED
    assert "TransformerEncoderLayer" in str(found.layers.rows)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (layers(nn.ReLU(), outputs=1), {}),
        (layers(nn.ReLU(), nn.Linear(M, 1), nn.Sigmoid(), nn.Linear(1, 1), nn.Sigmoid())[:4], {}),
        (layers(nn.ReLU()).double(), {}),
        (layers(nn.ReLU()).bfloat16(), {}),
        (net(), {"clip": 0.1}),
        (net(), {"precision": torch.float16}),
        (net(), {"sigma": 1e-5}),
        (net(), {"lr": (0.1, 0.05, 0.01), "epochs": 3, "momentum": 0.9, "proximal": 0.1}),
        (net(), {"lr": 0.1, "local_steps": 6, "local_batch_size": 4, "weight_decay": 0.01}),
        (net(), {"epochs": 2, "precision": "float64"}),
        (net(), {"clients": 3}),
    ],
)
def test_what_protects_nobody(model, told):
    assert judged(model, samples=B, **told).verdict is Exposure.EXPOSED


def test_a_sum_is_judged_as_what_the_server_sees():
    found = judged(net(), samples=B, clients=9, seconds=1)
    assert found.batch_size == 9 * B
    assert found.verdict is not Exposure.EXPOSED
    assert "if the server only sees the sum of 9 clients" in found.headline
    assert "one client's update by itself, all 8" in said(found, "aggregation")[0].words


def test_rounds_give_away_what_one_update_does_not():
    model = mlp(N, CLASSES, width=40, depth=3, seed=0)
    once = judged(model, samples=20, seconds=1)
    assert once.verdict is not Exposure.EXPOSED
    words = said(once, "several rounds")[0].words
    one, ten = theory.largest_batch(40, 1), theory.largest_batch(40, 10, inputs=N)
    assert f"one update of this layer determines up to {one} samples, and 10 rounds" in words
    assert f"up to {ten}. These 20 take about {theory.rounds_needed(20, 40)} rounds." in words
    assert "(--rounds 10)" in words
    found = judged(model, samples=20, rounds=3, server_lr=0.3)
    assert found.verdict is Exposure.EXPOSED
    assert "all 20 made-up samples came back exactly from layer '0' (60 → 40) over 3 rounds" in (
        found.headline
    )
    assert "at a learning rate of 0.3" in said(found, "assumed")[0].words
    summed = judged(model, samples=10, clients=2, rounds=3, server_lr=0.3)
    assert summed.verdict is Exposure.EXPOSED
    assert "over 3 rounds" in summed.headline


def test_rounds_of_local_training_are_rehearsed():
    model = mlp(N, CLASSES, width=40, depth=2, seed=0)
    found = judged(model, samples=12, rounds=3, lr=0.1, epochs=2)
    assert found.verdict is Exposure.EXPOSED
    assert "over 3 rounds" in found.headline


def test_what_rounds_cannot_do_is_said():
    front = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, M))
    inner = judged(layers(nn.ReLU(), first=front), samples=4, rounds=2)
    assert "Rounds were not combined" in said(inner, "several rounds")[0].words
    assert "over" not in inner.headline
    many = judged(mlp(10, 4, width=20, depth=2), samples=30, rounds=2, seconds=1)
    assert "No number of rounds determines 30." in said(many, "several rounds")[0].words
    assert "30 samples for 2 rounds of a layer with 10 inputs" in (
        said(many, "batch against layer")[0].words
    )


def test_epsilon_covers_every_round():
    pytest.importorskip("opacus")
    noisy = {"samples": B, "clip": 1.0, "noise_multiplier": 5.0, "seconds": 1}
    over, counted, once = (
        said(judged(net(), **noisy, **more), "epsilon")[0].words
        for more in ({"rounds": 4}, {"steps": 4}, {})
    )
    assert over == counted != once


def test_what_is_too_large_to_rehearse_is_said_so(monkeypatch):
    many = judged(net(), samples=10, clients=100)
    assert many.headline == "Unknown: not rehearsed: too large (1,000 samples)."
    monkeypatch.setattr("spear.check.rehearsal._MOST_ENTRIES", N * M - 1)
    found = judged(net(), samples=B)
    assert found.verdict is Exposure.EXPOSED
    assert found.headline.startswith(
        "Exposed: not rehearsed: too large (60 x 120 weights); 8 samples"
    )
    assert judged(net(), samples=B, sigma=1e-3).verdict is Exposure.UNKNOWN


def test_epsilon_is_stated_only_where_clipping_bounds_what_is_sent():
    for clipping, multiplier in (("per-sample", 1.0), ("global", 0.1), ("per-layer", None)):
        noise = noise_of(Protocol(samples=10, clip=1.0, sigma=0.1, clipping=clipping), Privacy())
        assert noise.multiplier == pytest.approx(multiplier)
    assert "No epsilon" in said(judged(net(), samples=6, sigma=1e-4), "epsilon")[0].words
    with pytest.raises(InvalidOption, match="with this clipping"):
        judged(net(), samples=6, clip=1.0, clipping="per-layer", epsilon=8.0)


def test_an_update_is_inverted_instead():
    p = plant(6, m=120, n=60, seed=0)
    found = preflight(p.model, update=p.view, samples=9)
    assert (found.verdict, found.batch_size) == (Exposure.EXPOSED, 6)
    assert "shows 6 samples, but 9 were stated" in said(found, "batch size")[0].words
    alone = spear.LayerUpdate(p.view.weight, p.view.bias, p.view.weight_grad, p.view.bias_grad)
    assert preflight(None, update=alone).verdict is Exposure.EXPOSED
    noise = {name: torch.randn_like(g) for name, g in p.gradients.items()}
    noisy = preflight(p.model, update=spear.observe(p.model, noise), max_seconds=1)
    assert noisy.verdict is Exposure.UNKNOWN
    with pytest.raises(InvalidOption, match="an update is inverted instead of a rehearsal"):
        preflight(p.model, update=p.view, rounds=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 4, "sigma": -1.0}, "sigma > 0"),
        ({"noise_multiplier": 1.0, "clip": 1.0}, "give both"),
        ({"samples": 4, "protocol": Protocol()}, "samples is part of protocol"),
        ({"delta": 0.1, "privacy": Privacy()}, "delta is part of privacy"),
        ({"sample": 4}, "fields of Protocol and Privacy, got 'sample'"),
        ({"data": "music"}, "expected data to be one of photos"),
        ({"rounds": 0}, "expected rounds to be a whole number from 1 to 1,000, got 0"),
        ({"rounds": 2, "server_lr": 0.0}, "expected server_lr > 0, got 0"),
        ({"layer": "nope"}, "no linear layer 'nope'"),
        ({"samples": 4, "input_shape": (3, 7)}, "cannot be run on inputs of shape 3 x 7"),
    ],
)
def test_bad_options_are_told(options, words):
    with pytest.raises(InvalidOption, match=words):
        preflight(net(), **options)


def test_weights_that_are_no_numbers_are_told():
    model = net()
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(InvalidOption, match=r"'0\.weight' holds NaN"):
        preflight(model, samples=4)


def test_the_page_is_drawn_from_the_rows():
    failed, tried = doctest.testfile(str(ROOT / "docs" / "check.md"), module_relative=False)
    assert (failed, tried > 3) == (0, True)
    text = (ROOT / "benchmarks" / "rows" / "preflight.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    drawn = runpy.run_path(str(ROOT / "benchmarks" / "preflight.py"))["table"](rows)
    assert drawn in (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


NET = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(60, 120), nn.ReLU(), nn.Linear(120, 10))
def smooth():
    return nn.Sequential(nn.Linear(60, 120), nn.GELU(), nn.Linear(120, 10))
"""


def test_the_command(tmp_path):
    pytest.importorskip("typer", reason="needs the cli extra")
    (tmp_path / "net.py").write_text(NET)
    asked = ("check", "--data", "numbers", "--model")
    written = ("--json", "c.json", "--report", "c.html")
    done = in_this_process(*asked, "net.py:net", "-b", 8, *written, cwd=tmp_path)
    assert done.returncode == 20, done.stderr
    assert done.stdout.startswith("Exposed: all 8 made-up samples came back exactly")
    assert "What to do" in done.stdout
    report = spear.load(tmp_path / "c.json")
    assert (report.kind, report.settings["verdict"]) == ("check", "exposed")
    assert report.headline in done.stdout
    assert (tmp_path / "c.html").stat().st_size
    bad = in_this_process(*asked, "net.py:net", "--precision", "float7", cwd=tmp_path)
    assert bad.returncode == 2
    assert "expected --precision" in bad.stderr
    quiet = in_this_process(*asked, "net.py:smooth", "-b", 8, "-q", cwd=tmp_path)
    assert (quiet.returncode, len(quiet.stdout.splitlines())) == (0, 1)
    private = in_this_process(*asked, "net.py:net", "-b", 8, "-q", "--sigma", 1.0, cwd=tmp_path)
    assert private.returncode == 10
    over = ("-b", 8, "-q", "--rounds", 2, "--server-lr", 0.1)
    rounds = in_this_process(*asked, "net.py:net", *over, cwd=tmp_path)
    assert rounds.returncode == 20
    assert "over 2 rounds" in rounds.stdout


def test_files_without_a_model(tmp_path):
    model, weights, update = net(), tmp_path / "w.pt", tmp_path / "g.pt"
    torch.save(model.state_dict(), weights)
    x = torch.randn(B, N, generator=torch.Generator().manual_seed(0))
    torch.save(fedsgd(model, x, torch.arange(B)), update)
    found = check_files(CheckFiles(weights=weights), protocol=Protocol(samples=B))
    assert found.verdict is Exposure.EXPOSED
    assert "taken for a plain MLP" in str(said(found, "assumed"))
    seen = check_files(CheckFiles(weights=weights, update=update))
    assert (seen.verdict, seen.batch_size) == (Exposure.EXPOSED, B)
    after = fedavg(model, x, torch.arange(B), lr=0.1)
    moved = {name: new - model.state_dict()[name] for name, new in after.items()}
    torch.save(after, tmp_path / "after.pt")
    torch.save(moved, tmp_path / "moved.pt")
    known = Protocol(sends="weights", lr=0.1, epochs=1)
    for sent in ({"after": tmp_path / "after.pt"}, {"difference": tmp_path / "moved.pt"}):
        back = check_files(CheckFiles(weights=weights, **sent), protocol=known)
        assert (back.verdict, back.batch_size) == (Exposure.EXPOSED, B)
    pictures = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 50))
    torch.save(pictures.state_dict(), weights)
    unknown = check_files(CheckFiles(weights=weights))
    assert unknown.verdict is Exposure.UNKNOWN
    assert "36 → 50" in str(unknown.layers.rows)
    with pytest.raises(InvalidOption, match="got neither"):
        CheckFiles()
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(InvalidFile):
        check_files(CheckFiles(f"{tmp_path}/net.py:net", weights))


@pytest.mark.parametrize(
    "tail",
    [
        lambda o: o.squeeze(),
        lambda o: o[:, 0],
        lambda o: torch.sigmoid(o).view(-1),
        lambda o: {"features": 2 * o, "out": o.squeeze()},
    ],
)
@pytest.mark.parametrize("told", [{"samples": 6}, {"samples": 1}, {"samples": 6, "clip": 1.0}])
def test_models_that_squeeze_their_output_are_rehearsed(tail, told):
    torch.manual_seed(0)
    model = module(
        lambda self, x: tail(self.head(torch.relu_(self.fc(x)))),
        fc=nn.Linear(N, M),
        head=nn.Linear(M, 1),
    )
    found = judged(model, seconds=5, **told)
    assert found.verdict is Exposure.EXPOSED, found.headline
