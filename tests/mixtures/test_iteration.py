"""The iteration of EM, and its bound log p(X | θ) = L(q, θ) + KL(q ‖ p)."""

import warnings
from typing import NamedTuple

import pytest
import torch

from torch_lla_em.mixtures.iteration import BoundWarning, iterate, split_evidence

torch.set_num_threads(1)


class Root(NamedTuple):
    """An estimate of √2; Newton's steps come to it from above."""

    value: float


def newton(state: Root) -> Root:
    return Root((state.value + 2 / state.value) / 2)


def close(old: Root, new: Root) -> bool:
    return abs(old.value - new.value) < 1e-12


def never(old: Root, new: Root) -> bool:
    return False


def height(state: Root) -> float:
    return -state.value


def test_states_lead_to_the_fixed_point():
    states = list(iterate(newton, Root(2.0), max_steps=50, settled=close, objective=height))
    assert states[0] == newton(Root(2.0))
    assert states[-1].value == pytest.approx(2**0.5, abs=1e-12)
    assert len(states) < 10


def test_stops_after_max_steps():
    assert len(list(iterate(newton, Root(2.0), max_steps=3, settled=never))) == 3
    assert list(iterate(newton, Root(2.0), max_steps=0, settled=never)) == []


def test_the_settled_state_is_yielded():
    states = list(iterate(newton, Root(2.0), max_steps=50, settled=lambda old, new: True))
    assert states == [newton(Root(2.0))]


def test_a_step_is_taken_only_when_asked_for():
    taken = []
    states = iterate(lambda s: taken.append(s) or s, Root(1.0), max_steps=9, settled=never)
    assert taken == []
    next(states), next(states)
    assert len(taken) == 2


def test_a_fall_is_told_with_step_and_values():
    values = iter([2.0, 3.0, 2.5])
    states = iterate(
        lambda s: Root(next(values)),
        Root(1.0),
        max_steps=3,
        settled=never,
        objective=lambda s: s.value,
    )
    assert [next(states).value, next(states).value] == [2.0, 3.0]
    with pytest.warns(BoundWarning, match=r"fell in step 3, from 3 to 2\.5 \(by 0\.5\)"):
        next(states)


def test_an_objective_that_is_not_a_number_is_told():
    steps = iterate(
        lambda s: Root(float("nan")),
        Root(1.0),
        max_steps=1,
        settled=never,
        objective=lambda s: s.value,
    )
    with pytest.warns(BoundWarning, match="not a number after step 1"):
        next(steps)


@pytest.mark.parametrize("start", [1.0, -1.0, 1e8, -1e8, 0.0])
def test_rounding_is_forgiven_in_proportion_to_the_value(start):
    def fall(by):
        list(
            iterate(
                lambda s: Root(start - by * max(1.0, abs(start))),
                Root(start),
                max_steps=1,
                settled=never,
                objective=lambda s: s.value,
            )
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fall(by=5e-10)
    with pytest.warns(BoundWarning, match="promises ascent"):
        fall(by=2e-9)


def test_no_promise_no_check_and_an_unknown_start():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(iterate(lambda s: Root(s.value - 1), Root(0.0), max_steps=3, settled=never))
        start = Root(float("-inf"))
        list(iterate(lambda s: Root(0.0), start, max_steps=2, settled=never, objective=height))


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="max_steps must be 0 or more, not -1"):
        next(iterate(newton, Root(2.0), max_steps=-1, settled=never))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bound_plus_divergence_is_the_log_evidence(dtype):
    generator = torch.Generator().manual_seed(0)
    log_joint = torch.randn(50, 4, generator=generator, dtype=dtype) * 3 - 5
    q = torch.rand(50, 4, generator=generator, dtype=dtype)
    q[:10, 0] = 0
    q /= q.sum(-1, keepdim=True)
    evidence = split_evidence(log_joint, q)
    log_evidence = log_joint.exp().sum(-1).log().sum()
    torch.testing.assert_close(evidence.lower_bound + evidence.divergence, log_evidence)
    assert evidence.divergence > 0
    entropy = -torch.special.xlogy(q, q).sum()
    torch.testing.assert_close(evidence.lower_bound, (q * log_joint).sum() + entropy)


def test_the_posterior_closes_the_gap():
    log_joint = torch.tensor([[0.0, -1.0], [-3.0, -float("inf")]], dtype=torch.float64)
    evidence = split_evidence(log_joint, log_joint.softmax(-1))
    torch.testing.assert_close(evidence.divergence, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(evidence.lower_bound, log_joint.logsumexp(-1).sum())
