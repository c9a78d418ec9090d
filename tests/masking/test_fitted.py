"""to_line, to_poly: lines and quadratics close to ReLU on the data, in place of removed ReLUs."""

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.masking.fitted import SQUARES, nearest
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


def by_channel(net: nn.Module, x: torch.Tensor):
    """Site, channel and its pre-activations, for all of them."""
    for site, z in pre_activations(net, x).items():
        for channel, row in enumerate(z.movedim(1, 0).flatten(1).double()):
            yield site, channel, row


def least_squares(row: torch.Tensor, goal: torch.Tensor, degree: int) -> torch.Tensor:
    columns = torch.stack([row**power for power in range(degree + 1)], 1)
    return torch.linalg.lstsq(columns, goal[:, None]).solution.flatten()


NETS = ["mlp", "resnet", "preactivation", "untraceable"]


@pytest.mark.parametrize("name", NETS)
def test_lines_are_those_of_least_squares(name) -> None:
    net, (x, labels) = thinned(make(name)), images(70)
    lines = fastbcd.to_line(net, (x, labels))
    for site, channel, row in by_channel(net, x):
        expected = least_squares(row, row.relu(), 1)
        found = lines.get_submodule(site).coef[:, channel].detach().double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NETS)
def test_quadratics_have_a_share_of_the_c2_of_least_squares(name) -> None:
    """And the line that is nearest to what their square leaves of ReLU."""
    net, (x, labels) = thinned(make(name)), images(70)
    poly = fastbcd.to_poly(net, (x, labels))
    for site, channel, row in by_channel(net, x):
        c2 = SQUARES * least_squares(row, row.relu(), 2)[2]
        expected = torch.cat([least_squares(row, row.relu() - c2 * row**2, 1), c2[None]])
        found = poly.get_submodule(site).coef[:, channel].detach().double()
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


def moments(z: torch.Tensor) -> torch.Tensor:
    r = z.relu()
    return torch.stack([t.mean(1) for t in (z, z**2, z**3, z**4, r, z * r, z * z * r)])


def test_a_channel_without_variance() -> None:
    """No line is nearer than another: the slope is ReLU's. No square is needed."""
    for value, expected in ((2.0, [0.0, 1.0]), (-2.0, [0.0, 0.0]), (0.0, [0.0, 0.0])):
        given = moments(torch.full((1, 50), value, dtype=torch.float64))
        for share in (0.0, SQUARES):
            coef = nearest(given, share).flatten().tolist()
            torch.testing.assert_close(coef, [*expected, 0.0])


def test_a_channel_with_two_values_has_a_line() -> None:
    given = moments(torch.tensor([[-1.0, 2.0] * 20], dtype=torch.float64))
    torch.testing.assert_close(nearest(given, SQUARES), nearest(given, 0.0))


def test_a_removal_changes_the_logits_less_than_by_the_identity() -> None:
    net, data = make("resnet"), images(200)
    nets, x = [fastbcd.to_poly(net, data), fastbcd.to_line(net, data), net], data[0]
    logits = [one(x) for one in nets]
    assert all(torch.equal(other, logits[-1]) for other in logits)  # no ReLU is removed yet
    gone = fastbcd.masks(net).sample(100, seed=0, step=0, trial=0)
    for one in nets:
        fastbcd.set_masks(one, fastbcd.masks(one).without(gone))
    poly, lines, identity = ((one(x) - logits[0]).square().sum() for one in nets)
    assert poly < lines < 0.5 * identity


def test_other_sites_stay_and_quadratics_begin_as_lines() -> None:
    net, data = make("mixture"), images(20)
    mixed = fastbcd.to_line(net, data)
    assert isinstance(mixed.act, fastbcd.MaskedPoly)
    assert isinstance(mixed.act2, fastbcd.MaskedLine)
    lines = thinned(fastbcd.to_line(make("resnet"), data))
    poly = fastbcd.to_poly(lines, data)
    assert all(not isinstance(m, fastbcd.MaskedLine) for m in poly.modules())
    torch.testing.assert_close(poly(data[0]), lines(data[0]), atol=0, rtol=0)


def test_lines_are_trained_slower_than_weights() -> None:
    net, data = thinned(fastbcd.to_line(make("resnet"), images(40))), images(40)
    tune = fastbcd.Finetune(epochs=1, lr=0.01, batch_size=10, padding=1)
    tuner = fastbcd.Finetuner(net, data, tune)
    with tuner.session() as session:
        session.epoch(0, 0.01)
        rates = {
            p: group["lr"] for group in session.optimizer.param_groups for p in group["params"]
        }
    slow = {m.coef for m in net.modules() if isinstance(m, fastbcd.MaskedLine)}
    assert all(rate == pytest.approx(0.001 if p in slow else 0.01) for p, rate in rates.items())
    assert set(net.parameters()) == set(rates)
