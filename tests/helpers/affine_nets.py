"""A net of every affine step, and the collapsed engine by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastbcd import MaskedReLU, masks, set_masks
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.engine import Collapsed
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import make_program
from helpers.nets import randomize


class Zoo(nn.Module):
    """Every kind of affine step, on small images."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6, 1, 1))
        self.gain = nn.Parameter(torch.randn(6, 8, 8))
        self.one, self.act1 = nn.Conv2d(3, 6, 3, padding=1), MaskedReLU((6, 8, 8))
        self.norm, self.act2 = nn.BatchNorm2d(6), MaskedReLU((6, 8, 8))
        self.same = nn.Conv2d(6, 4, 3, padding="same", dilation=(2, 1))
        self.groups = nn.Conv2d(6, 4, 3, stride=(2, 3), padding=(2, 1), groups=2)
        self.act3, self.act4 = MaskedReLU((4, 8, 8)), MaskedReLU((4, 5, 3))
        self.reflect = nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
        self.weight = nn.Parameter(torch.randn(5, 8, 2, 2))
        self.drop, self.edge = nn.Dropout(0.5), nn.ConstantPad2d(1, 3.0)
        self.bias = nn.Linear(20, 7)
        self.act5, self.bn1 = MaskedReLU((7,)), nn.BatchNorm1d(7)
        self.act6, self.pool = MaskedReLU((5, 5, 5)), nn.AvgPool2d(2)
        self.head = nn.Parameter(torch.randn(5, 7 + 5 + 5 + 2 + 4))

    def forward(self, x):
        a = self.act1(self.one(x)) - self.shift
        b = self.act2(self.norm(0.5 * a) * self.gain + 1.5)
        c = self.act3(self.drop(self.same(b / 2)))
        d = self.act4(self.groups(a))
        wide = torch.cat([c[:, :, ::2, ::2], -F.pad(d, (0, 1, 0, -1), value=2.0)], 1)
        e = self.act6(F.conv2d(self.edge(wide), self.weight, padding=0))
        f = F.adaptive_avg_pool2d(c, (5, 1)).permute(0, 2, 1, 3).flatten(1)
        g = self.act5(self.bn1(self.bias(f)))
        h = self.reflect(c).mean((2, 3)) - g[:, 1:3]
        tall = self.pool(e).sum((2, 3)).unsqueeze(2).squeeze(2)
        small = e.mean(dim=(2, 3)).view(e.size(0), -1)
        means = torch.transpose(d, 1, 2).reshape(x.size(0), 5, 12).mean(2).contiguous()[:, 1:]
        return F.linear(torch.cat([g, tall, small, h, means], 1), self.head)


def zoo() -> nn.Module:
    torch.manual_seed(3)
    net = randomize(Zoo()).eval()
    net.bn1.running_var.uniform_(0.5, 1.5)
    return net


def engine_of(net, x, with_image=False) -> Collapsed:
    """The engine for a net in eval mode, without the plan around it."""
    now = masks(net).copy()
    with torch.inference_mode():
        x = x.contiguous(memory_format=torch.channels_last)
        request = Request(net, now, [], 1, len(x), x[:2], None, 2**40)
        builder = FormBuilder(make_program(net, x[:1]), request)
        return Collapsed(builder.build(with_image), builder.net, AffineCache())


def worst_difference(net, engine, x, removals: dict, lanes: int) -> float:
    """The largest difference of logits from the net's own, relative to the largest logit."""
    now = masks(net).copy()
    worst = 0.0
    with torch.inference_mode():
        given = x.contiguous(memory_format=torch.channels_last)
        seen = []
        for numbers, logits in engine.logits(given, engine.prepare(removals, lanes), True):
            for number, found in zip(numbers, logits, strict=True):
                set_masks(net, now if number < 0 else now.without(removals[number]))
                truth = net(x)
                worst = max(worst, float((found - truth).abs().max() / truth.abs().max()))
                seen.append(number)
    set_masks(net, now)
    assert sorted(seen) == [-1, *sorted(k for k, ids in removals.items() if len(ids))]
    return worst


def some_removals(net, count=6, size=4) -> dict[int, torch.Tensor]:
    now = masks(net)
    kept = now.bits.nonzero().flatten()
    found = {t: now.sample(size, seed=0, step=0, trial=t) for t in range(count)}
    # The last ReLUs only, a single one, and all of them.
    return found | {90: kept[-2:], 91: kept[len(kept) // 2 :][:1], 92: kept}
