"""The phase's loss: what it is, what it must not depend on, what it reaches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from surgery.adaptation import teaching
from surgery.adaptation.distiller import Distiller
from surgery.adaptation.losses import IGNORED
from surgery.adaptation.teaching import Side
from surgery.hosts import adapter_for, load_model
from surgery.recipe.kinds import KINDS, objective

FAMILIES = [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")]


def batch_of(rows=4, tokens=24, masked=False):
    ids = torch.randint(260, (rows, tokens + 1))
    reset = torch.rand(rows, tokens) < 0.1
    targets = ids[:, 1:].clone()
    targets[torch.rand(rows, tokens) < 0.1] = IGNORED
    batch = {"input_ids": ids[:, :-1], "targets": targets, "reset": reset}
    if masked:
        lengths = torch.randint(tokens // 3, tokens, (rows,))
        batch["mask"] = torch.arange(tokens) < lengths[:, None]
        batch["targets"] = targets.masked_fill(~batch["mask"], IGNORED)
    return batch


def distiller_of(body, base, kind, **options):
    if kind in ("hidden", "logits"):
        body.seat(teachers=teaching.teacher_mixers(body, base))
    teacher = options.pop("teacher", None)
    return Distiller(body, objective(kind)(**options), teacher=teacher)


def whole(distiller, batch):
    return distiller(**batch, count=distiller.counted(**batch))


@pytest.mark.parametrize("kind", ["hidden", "logits"])
@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
def test_a_student_that_is_its_teacher_has_no_loss(make_body, family, kind):
    distiller = distiller_of(*make_body(family, "host"), kind)
    out = whole(distiller, batch_of())
    assert out["loss"].item() == 0.0 and out["terms"].abs().max() == 0.0


@pytest.mark.parametrize("kind", ["hidden", "logits"])
@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_at_dose_zero_the_loss_is_rounding(make_body, family, rule, kind):
    distiller = distiller_of(*make_body(family, rule, dose=0.0), kind)
    assert whole(distiller, batch_of())["loss"].item() < 1e-6


@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_hidden_feeds_each_mixer_the_teachers_input(make_body, family, rule):
    body, base = make_body(family, rule)
    students = {layer: copy.deepcopy(body.model.get_submodule(name)) for layer, name in body.mixers.items()}
    batch = batch_of(masked=True)
    teacher = load_model(base.directory, dtype=torch.float32)
    seen = {}
    for layer, mixer in adapter_for(base.config).mixers(teacher).items():
        mixer.register_forward_hook(
            lambda module, args, output, layer=layer: seen.__setitem__(layer, (args[0].detach(), output.detach()))
        )
    teacher(batch["input_ids"], attention_mask=batch["mask"], reset=batch["reset"])
    terms = []
    for layer in (0, 2):
        read, target = seen[layer]
        given = students[layer](read, None, batch["mask"], batch["reset"])
        norm, d = target.norm(dim=-1), (given - target).norm(dim=-1)
        eps = 1e-3 * norm
        terms.append((((d**2 + eps**2).sqrt() - eps) / norm)[batch["mask"]].mean())
    out = whole(distiller_of(body, base, "hidden"), batch)
    assert min(terms) > 1e-3
    torch.testing.assert_close(out["terms"], torch.stack(terms).detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out["loss"], sum(terms), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_logits_is_kl_plus_the_boundaries(make_body, family, rule):
    body, base = make_body(family, rule)
    batch = batch_of(masked=True)
    mask = batch["mask"]
    teacher = load_model(base.directory, dtype=torch.float32)
    call = {"attention_mask": mask, "reset": batch["reset"], "output_hidden_states": True, "use_cache": False}
    # the residual stream after block i: the input of block i + 1, or what the final norm reads
    streams = []
    for model in (teacher, body.model):
        found = {}
        for layer, block in enumerate(adapter_for(base.config).blocks(model)):
            block.register_forward_hook(lambda m, a, output, layer=layer, to=found: to.__setitem__(layer, output))
        logits = model(batch["input_ids"], **call).logits
        streams.append((logits, {layer: found[layer] for layer in (0, 2)}))
    (t_logits, t_stream), (s_logits, s_stream) = streams
    p = (t_logits / 2.0).softmax(-1)
    kl = 2.0**2 * (p * ((t_logits / 2.0).log_softmax(-1) - (s_logits / 2.0).log_softmax(-1))).sum(-1)[mask].mean()
    parts = [
        (s_stream[layer] - t_stream[layer])[mask].square().mean() / t_stream[layer][mask].square().mean()
        for layer in (0, 2)
    ]
    distiller = distiller_of(body, base, "logits", temperature=2.0, boundary_weight=0.3)
    out = whole(distiller, batch)
    assert min(kl, *parts) > 1e-5
    torch.testing.assert_close(out["terms"], torch.stack([kl, *parts]).detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(out["loss"], kl + 0.3 * sum(parts), rtol=1e-4, atol=1e-7)
    assert distiller.objective.weighted(out["terms"].tolist()) == pytest.approx(out["loss"].item(), rel=1e-5)


def test_next_token_scores_what_follows(make_body):
    body, base = make_body()
    batch = batch_of()
    logits = body.model(batch["input_ids"], reset=batch["reset"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
    for kind in ("next-token", "instruct"):
        torch.testing.assert_close(whole(distiller_of(body, base, kind), batch)["loss"], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_splitting_a_batch_changes_no_gradient(make_body, kind, masked):
    distiller = distiller_of(*make_body(), kind)
    batch = batch_of(6, masked=masked)
    mixer = distiller.student.model.get_submodule(distiller.student.mixers[0])
    mixer = getattr(mixer, "student", mixer)
    parameters = list(mixer.parameters())
    out = whole(distiller, batch)
    wanted = torch.autograd.grad(out["loss"], parameters)
    count = distiller.counted(**batch)
    pieces = [{key: value[a:b] for key, value in batch.items()} for a, b in ((0, 1), (1, 4), (4, 6))]
    squares = None
    if kind == "logits":
        squares = sum(distiller.squares_of(distiller.teach(**piece), piece.get("mask")) for piece in pieces)
    found = [torch.zeros_like(p) for p in parameters]
    loss = 0.0
    for number, piece in enumerate(pieces):
        lesson = distiller.teach(**piece) if number == 1 and kind == "logits" else None
        part = distiller(**piece, count=count, squares=squares, lesson=lesson)
        loss += part["loss"].item()
        for total, grad in zip(found, torch.autograd.grad(part["loss"], parameters), strict=True):
            total += grad
    assert loss == pytest.approx(out["loss"].item(), rel=1e-5)
    for one, other in zip(wanted, found, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(make_body, kind):
    distiller = distiller_of(*make_body(), kind)
    batch = batch_of(2, 16)
    longer = {
        "input_ids": F.pad(batch["input_ids"], (0, 9), value=5),
        "targets": F.pad(batch["targets"], (0, 9), value=IGNORED),
        "reset": F.pad(batch["reset"], (0, 9)),
        "mask": F.pad(torch.ones(2, 16, dtype=torch.bool), (0, 9)),
    }
    torch.testing.assert_close(whole(distiller, batch)["loss"], whole(distiller, longer)["loss"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_the_teachers_side_is_the_base(make_body, family, rule):
    body, base = make_body(family, rule)
    batch = batch_of()
    body.seat(teachers=teaching.teacher_mixers(body, base))
    teacher = load_model(base.directory, dtype=torch.float32)
    call = {"reset": batch["reset"], "use_cache": False}
    with torch.no_grad(), body.turned(Side.TEACHER):
        assert torch.equal(body.model(batch["input_ids"], **call).logits, teacher(batch["input_ids"], **call).logits)
    with torch.no_grad():
        assert not torch.equal(
            body.model(batch["input_ids"], **call).logits, teacher(batch["input_ids"], **call).logits
        )


@pytest.mark.parametrize("kind", ["hidden", "logits"])
def test_a_second_model_teaches_the_same(make_body, kind):
    body, base = make_body()
    batch = batch_of()
    apart = teaching.teacher_model(base, [0, 2], "cpu")
    if kind == "hidden":
        apart.seat(students={layer: body.model.get_submodule(name) for layer, name in body.mixers.items()})
    one = whole(Distiller(body, objective(kind)(), teacher=apart), batch)["loss"]
    torch.testing.assert_close(one, whole(distiller_of(body, base, kind), batch)["loss"], rtol=1e-6, atol=1e-9)


def test_a_hidden_student_is_taught_by_the_base_after_shared_weights_moved(make_body):
    body, base = make_body()
    batch = batch_of()
    assert teaching.shares_weights(body, base)
    students = {layer: body.model.get_submodule(name) for layer, name in body.mixers.items()}
    apart = teaching.teacher_model(base, [0, 2], "cpu")
    apart.seat(students=students)
    distiller = Distiller(body, objective("hidden")(), teacher=apart)
    before = whole(distiller, batch)["loss"].item()
    with torch.no_grad():
        body.model.get_input_embeddings().weight.mul_(1.5)
    assert not teaching.shares_weights(body, base)
    assert whole(distiller, batch)["loss"].item() == before > 0


def test_hidden_trains_layers_apart(make_body):
    distiller = distiller_of(*make_body(), "hidden")
    first, second = (distiller.student.switches[layer] for layer in (0, 2))
    batch = batch_of()
    whole(distiller, batch)["loss"].backward()
    reached = {name for name, p in distiller.model.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in distiller.model.named_parameters() if ".student." in name}
    alone = second.student.in_proj.weight.grad.clone()
    with torch.no_grad():
        first.student.in_proj.weight.zero_()
    distiller.zero_grad()
    whole(distiller, batch)["loss"].backward()
    assert torch.equal(second.student.in_proj.weight.grad, alone) and alone.norm() > 0


def test_a_trained_head_gets_its_gradient(make_body):
    body, base = make_body("gated_deltanet", "bayesian", tie_word_embeddings=False)
    apart = teaching.teacher_model(base, [0, 2], "cpu")
    batch = batch_of()
    head = body.model.lm_head.weight
    loss = whole(Distiller(body, objective("logits")(boundary_weight=0.0), teacher=apart), batch)["loss"]
    (found,) = torch.autograd.grad(loss, head)
    call = {"reset": batch["reset"], "use_cache": False}
    teacher = apart.model(batch["input_ids"], **call).logits.softmax(-1)
    student = body.model(batch["input_ids"], **call).logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((teacher * (teacher.log() - student)).sum(-1).mean(), head)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
