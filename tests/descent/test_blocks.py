"""What a step removes, against all sets of ReLUs of small nets."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd.descent.blocks import Account
from fastbcd.descent.budget import limits_of
from fastbcd.descent.goals import Goal

losses = st.lists(
    st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=3
).filter(lambda sites: sum(map(len, sites)) <= 9)


@given(losses, st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_set_saves_as_much_for_less_loss(sites, data) -> None:
    loss = np.array([x for site in sites for x in site], dtype=float)
    where = np.repeat(np.arange(len(sites)), [len(site) for site in sites])
    numbers = st.lists(st.integers(0, 6), min_size=len(sites), max_size=len(sites))
    price = np.array(data.draw(numbers), dtype=float)
    bonus = np.array(data.draw(numbers), dtype=float)
    account = Account(loss, where, price, bonus)

    every = np.array(list(product([False, True], repeat=len(loss))))
    emptied = np.stack([every[:, where == x].all(1) for x in range(len(sites))], 1)
    saved = every @ price[where] + emptied @ bonus
    lost = every @ loss

    need = data.draw(st.floats(0, 1)) * saved.max()
    worth = account.worth(need)
    chosen = np.minimum(account.alone, account.pays[where]) <= worth
    mine = int(np.flatnonzero((every == chosen).all(1))[0])
    assert saved[mine] >= need * (1 - 1e-9)
    better = (saved >= saved[mine] - 1e-9) & (lost < lost[mine] - 1e-9)
    assert not better.any(), (every[better], chosen)
    # A site is emptied beyond that at the least loss beyond its worth, also if it must be.
    beyond = account.beyond(worth, np.ones(len(sites)))
    value = lost - worth * saved
    best = value.min()
    for x in range(len(sites)):
        assert np.isclose(value[emptied[:, x]].min(), best + max(beyond[x], 0.0), atol=1e-9)


def test_a_site_that_saves_nothing_is_never_emptied() -> None:
    account = Account(np.array([1.0]), np.array([1]), np.zeros(2), np.zeros(2))
    assert np.isinf(account.pays).all()
    assert account.worth(1.0) == 0


def test_a_site_of_one_relu_is_in_use() -> None:
    """It is emptied where fewer sites may be in use, and the last site in use is not."""
    net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 4), fastbcd.MaskedReLU(4))
    masks = fastbcd.masks(net).without([0, 1, 2])
    limits = limits_of(8, net, max_sites=1)
    assert Goal(masks, limits, limits).emptied([], [0, 1]) == [0]
    alone = limits_of(0, net)
    assert Goal(masks, alone, alone).emptied([1, 0], []) == [1]
