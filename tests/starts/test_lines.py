"""to_line: lines that are nearest to ReLU on the data, in the place of removed ReLUs."""

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.starts.lines import least_squares
from helpers.nets import images, make, thinned


def pre_activations(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every site of a net with hand-written calls sees, by a plain forward with hooks."""
    seen: dict[str, torch.Tensor] = {}
    sites = {name: m for name, m in net.named_modules() if isinstance(m, fastbcd.MaskedReLU)}
    for name, act in sites.items():
        act.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    with torch.no_grad():
        net(x)
    return seen


@pytest.mark.parametrize("name", ["mlp", "resnet", "preactivation", "untraceable"])
def test_lines_are_those_of_least_squares(name) -> None:
    net, (x, labels) = thinned(make(name)), images(70)
    lines = fastbcd.to_line(net, (x, labels))
    for site, z in pre_activations(net, x).items():
        z = z.movedim(1, 0).flatten(1).double()
        for channel, row in enumerate(z):
            columns = torch.stack([torch.ones_like(row), row], 1)
            expected = torch.linalg.lstsq(columns, row.relu()[:, None]).solution.flatten()
            found = lines.get_submodule(site).coef[:, channel].detach().double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_copy_has_the_weights_masks_and_mode_of_the_net() -> None:
    net, (x, labels) = make("resnet"), images(20)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    lines = fastbcd.to_line(net.train(), (x, labels))
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert lines.training
    assert all(m.training for m in lines.modules())
    assert torch.equal(lines.eval()(x), net.eval()(x))  # no ReLU is removed
    assert not any(m._forward_pre_hooks for m in [*net.modules(), *lines.modules()])
    fastbcd.set_masks(net, fastbcd.masks(net).without([3, 5]))
    assert torch.equal(
        fastbcd.masks(fastbcd.to_line(net, (x, labels))).bits, fastbcd.masks(net).bits
    )
    with torch.no_grad():
        fastbcd.to_line(net, (x, labels)).get_submodule("0").weight.zero_()
    assert net.get_submodule("0").weight.any()


def test_a_channel_without_variance() -> None:
    """No line is nearer than another: the slope is ReLU's."""
    for value, expected in ((2.0, [0.0, 1.0]), (-2.0, [0.0, 0.0]), (0.0, [0.0, 0.0])):
        z = torch.full((1, 50), value, dtype=torch.float64)
        r = z.relu()
        sums = (s.sum(1) for s in (torch.ones_like(z), z, z * z, r, z * r))
        torch.testing.assert_close(least_squares(*sums).flatten(), torch.tensor(expected).double())


def test_a_removal_changes_the_logits_less_than_by_the_identity() -> None:
    net, (x, labels) = make("resnet"), images(200)
    lines, logits = fastbcd.to_line(net, (x, labels)), net(x)
    gone = fastbcd.masks(net).sample(100, seed=0, step=0, trial=0)
    for one in (net, lines):
        fastbcd.set_masks(one, fastbcd.masks(one).without(gone))
    nearer, other = ((one(x) - logits).square().sum() for one in (lines, net))
    assert nearer < 0.5 * other


def test_other_sites_stay_and_quadratics_begin_as_lines() -> None:
    net, data = make("mixture"), images(20)
    mixed = fastbcd.to_line(net, data)
    assert isinstance(mixed.act, fastbcd.MaskedPoly)
    assert isinstance(mixed.act2, fastbcd.MaskedLine)
    lines = thinned(fastbcd.to_line(make("resnet"), data))
    poly = fastbcd.to_poly(lines)
    assert all(not isinstance(m, fastbcd.MaskedLine) for m in poly.modules())
    torch.testing.assert_close(poly(data[0]), lines(data[0]), atol=0, rtol=0)


def test_lines_are_trained_slower_than_weights_and_are_recorded(tmp_path) -> None:
    net, data = thinned(fastbcd.to_line(make("resnet"), images(40))), images(40)
    before = [m.coef.detach().clone() for m in net.modules() if isinstance(m, fastbcd.MaskedLine)]
    tune = fastbcd.Finetune(epochs=1, lr=0.01, batch_size=10, padding=1)
    fastbcd.bcd(
        net, data, fastbcd.masks(net).count() - 5, drc=5, rt=1, finetune=tune, run_dir=tmp_path
    )
    after = [m.coef.detach() for m in net.modules() if isinstance(m, fastbcd.MaskedLine)]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    config = fastbcd.load_run(tmp_path).config["settings"]["finetune"]
    assert config["coefficients_lr"] == [0.1, 0.03, 0.01]
    tuner = fastbcd.Finetuner(net, data, tune)
    with tuner.session():
        tuner.epoch(0, 0.01)
        rates = {p: group["lr"] for group in tuner.optimizer.param_groups for p in group["params"]}
    slow = {m.coef for m in net.modules() if isinstance(m, fastbcd.MaskedLine)}
    assert all(rate == pytest.approx(0.001 if p in slow else 0.01) for p, rate in rates.items())
    assert set(net.parameters()) == set(rates)
