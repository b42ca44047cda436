"""Proposition 1 on a federation small enough to compute every term of its bound.

Full-batch softmax regression in float64. All clients share the samples of a label and differ in how often
they meet it, p_i(y): the gradient of E_{x|y} l is then common to all, as the proof (Appendix A) assumes.

The proof's inequality 2, that clipping brings the mean no farther from any w_i, is false; so the bound is
asserted where clipping does not bind, the counterexample is kept, and the repaired bound is checked.

Legend: K clients, Y labels (C as logits), M samples of a label, D features, P = Y x D weights, T local steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.server.detection.divergence import delta_of, divergence


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices of 3 x 4: threads have nothing to share, and on a busy machine wait tenfold their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def norms(rows: Tensor) -> Tensor:
    return rows.square().sum(-1).sqrt()


@dataclass(frozen=True)
class Federation:
    """Clients with the same samples of each label, x (Y, M, D), and distributions of labels p (K, Y)."""

    x: Tensor
    p: Tensor
    eta: float
    steps: int

    @property
    def weights(self) -> int:
        return self.x.shape[0] * self.x.shape[2]

    def gradients(self, w_P: Tensor) -> Tensor:
        """The gradient of E_{x|y} l at w for each y, (..., Y, P): the mean of (softmax - one-hot) x^T."""
        labels, samples, features = self.x.shape
        w_CD = w_P.reshape(*w_P.shape[:-1], labels, features)
        error_YMC = torch.einsum("ymd,...cd->...ymc", self.x, w_CD).softmax(-1)
        error_YMC = error_YMC - torch.eye(labels, dtype=torch.float64)[:, None, :]
        return torch.einsum("...ymc,ymd->...ycd", error_YMC, self.x).flatten(-2) / samples

    def g_max(self, w_P: Tensor) -> Tensor:
        return norms(self.gradients(w_P)).amax(-1)

    def local(self, w_P: Tensor) -> Tensor:
        """w_i^(r, 0..T) of every client i, (K, T+1, P): T steps down its expected gradient (Alg. 1, c7)."""
        path = [w_P.expand(len(self.p), -1)]
        for _ in range(self.steps):
            path.append(path[-1] - self.eta * torch.einsum("ky,kyp->kp", self.p, self.gradients(path[-1])))
        return torch.stack(path, dim=1)

    def gradient_term(self, paths_KTP: Tensor) -> float:
        """The second term of the bound (Eq. 6), at the local steps that were taken."""
        # lambda_{x|y}: a sample's Hessian is (diag(s) - s s^T) (x) x x^T with s = softmax. The rows of the
        # first factor have absolute sums 2 s_c (1 - s_c) <= 1/2, so by Gershgorin it is at most I/2; x x^T is
        # no less than 0, so the mean Hessian is at most I/2 (x) mean(x x^T): half the largest eigenvalue of
        # the latter is a Lipschitz constant of the gradient.
        second_YDD = self.x.transpose(1, 2) @ self.x / self.x.shape[1]
        lambda_Y = torch.linalg.eigvalsh(second_YDD)[:, -1] / 2
        a_K = (1 + self.eta * self.p @ lambda_Y).tolist()
        g_KT = self.g_max(paths_KTP).tolist()
        apart_KK = (self.p[:, None] - self.p[None]).abs().sum(-1).tolist()
        total = sum(
            apart_KK[i][j] * sum(a_i**t * g_T[self.steps - 1 - t] for t in range(self.steps))
            for i, a_i in enumerate(a_K)
            for j, g_T in enumerate(g_KT)
        )
        return float(self.eta / len(self.p) ** 2 * total)


def drawn(seed: int, *, clients: int, labels: int, features: int, eta: float, steps: int) -> Federation:
    """A federation of overlapping labels, from clients who hold nearly one label to such who hold all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(labels, 6, features, generator=generator, dtype=torch.float64)
    x += 2 * torch.randn(labels, 1, features, generator=generator, dtype=torch.float64)
    sharpness = 4 * torch.rand(clients, 1, generator=generator, dtype=torch.float64)
    p = (sharpness * torch.randn(clients, labels, generator=generator, dtype=torch.float64)).softmax(1)
    return Federation(x, p, eta, steps)


def gaussian(weights: int, sigma: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sigma * torch.randn(weights, generator=generator, dtype=torch.float64)


def clip(updates_KP: Tensor, limit: float) -> Tensor:
    """Clip(u, S) of Eq. 4: shortened to norm S where it is longer."""
    return updates_KP / (norms(updates_KP)[:, None] / limit).clamp(min=1)


federations = st.builds(
    drawn,
    st.integers(0, 2**32 - 1),
    clients=st.integers(3, 4),
    labels=st.integers(3, 4),
    features=st.integers(3, 5),
    eta=st.sampled_from([0.01, 0.1, 1.0]),
    steps=st.sampled_from([1, 3, 8]),
)
sigmas = st.sampled_from([0.0, 0.01, 1.0])


def test_the_gradients_are_those_of_cross_entropy() -> None:
    """Else all that follows would hold for some other problem."""
    fed = drawn(0, clients=3, labels=4, features=5, eta=0.1, steps=1)
    w_P = gaussian(fed.weights, 1.0, 1).requires_grad_()
    for y, gradient_P in enumerate(fed.gradients(w_P.detach())):
        logits = fed.x[y] @ w_P.reshape(4, 5).T
        loss = torch.nn.functional.cross_entropy(logits, torch.full((len(logits),), y))
        (expected_P,) = torch.autograd.grad(loss, w_P)
        torch.testing.assert_close(gradient_P, expected_P)


@given(fed=federations, sigma=sigmas, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_w_div_is_within_the_bound(fed: Federation, sigma: float, seed: int) -> None:
    """Proposition 1 over three rounds. Also 0 <= Delta: around a plain mean, noise only adds divergence."""
    w_P = gaussian(fed.weights, 1.0, seed)
    for r in range(3):
        paths_KTP = fed.local(w_P)
        w_KP, noise_P = paths_KTP[:, -1], gaussian(fed.weights, sigma, seed + r + 1)
        w_P = w_KP.mean(0) + noise_P
        term = fed.gradient_term(paths_KTP)
        assert divergence(w_KP, w_P) <= (float(noise_P.norm()) + term) * (1 + 1e-9)
        assert -1e-9 <= delta_of(w_KP, w_P, noise_P) <= term + 1e-9


def opposed(eta: float, steps: int = 1) -> Federation:
    """Two clients with one label each, both of whose only sample is x = 1."""
    return Federation(torch.ones(2, 1, 1, dtype=torch.float64), torch.eye(2, dtype=torch.float64), eta, steps)


@pytest.mark.parametrize("eta", [0.1, 1.0, 7.0])
def test_two_clients_by_hand(eta: float) -> None:
    """At w = 0 softmax is (1/2, 1/2), so the gradients of the two labels are (-1/2, 1/2) and (1/2, -1/2).

    One step takes the clients to eta (1/2, -1/2) and eta (-1/2, 1/2), each eta / sqrt(2) from their mean, 0.
    The bound: eta / 4, times 2 ordered pairs, times sum_y |p_0(y) - p_1(y)| = 2, times g_max = 1 / sqrt(2) is
    the very same number. So it is tight: half of its gradient term, or 99% of it, would be exceeded.
    """
    fed = opposed(eta)
    paths_KTP = fed.local(torch.zeros(2, dtype=torch.float64))
    w_KP = paths_KTP[:, -1]
    torch.testing.assert_close(w_KP, eta * torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64))
    assert divergence(w_KP, w_KP.mean(0)) == pytest.approx(eta / math.sqrt(2))
    assert fed.gradient_term(paths_KTP) == pytest.approx(eta / math.sqrt(2))
    assert divergence(w_KP, w_KP.mean(0)) > 0.99 * fed.gradient_term(paths_KTP)


def test_three_steps_of_the_bound_by_hand() -> None:
    """lambda = 1/2 (x = 1) and eta = 1 make a = 1.5; the weights of the steps are then 1.5^2, 1.5 and 1.

    By symmetry both clients have the same g_max after t steps. The other client's label is the worse one: its
    gradient is sqrt(2) (1 - s) long, with s = 1 / (1 + e^gap), where the gap between the two logits starts at
    0 and grows by 2 s a step.
    """
    gap, g_T = 0.0, []
    for _ in range(3):
        s = 1 / (1 + math.exp(gap))
        g_T.append(math.sqrt(2) * (1 - s))
        gap += 2 * s
    fed = opposed(eta=1.0, steps=3)
    found = fed.gradient_term(fed.local(torch.zeros(2, dtype=torch.float64)))
    assert found == pytest.approx(1.5**2 * g_T[0] + 1.5 * g_T[1] + g_T[2])


def test_identical_clients_have_no_divergence_and_a_bound_of_zero() -> None:
    fed = drawn(3, clients=4, labels=3, features=4, eta=0.5, steps=8)
    fed = Federation(fed.x, fed.p[:1].expand(4, -1), fed.eta, fed.steps)
    paths_KTP = fed.local(gaussian(fed.weights, 1.0, 0))
    w_KP = paths_KTP[:, -1]
    # Four equal numbers add up and divide by four without rounding: exactly zero, not nearly.
    assert divergence(w_KP, w_KP.mean(0)) == 0
    assert fed.gradient_term(paths_KTP) == 0
    noise_P = gaussian(fed.weights, 0.1, 1)
    assert divergence(w_KP, w_KP.mean(0) + noise_P) == pytest.approx(float(noise_P.norm()))
    assert delta_of(w_KP, w_KP.mean(0) + noise_P, noise_P) == pytest.approx(0, abs=1e-12)


def test_the_bound_is_not_vacuous() -> None:
    """Random federations: after one step w_div is a fifth to a half of it. a_i^t makes it loose after eight.

    (Softmax regression is convex, where a_i = 1 would do for a small eta; the paper's a_i serves any model.)
    """

    def ratio(seed: int, steps: int) -> float:
        fed = drawn(seed, clients=3, labels=3, features=3, eta=0.1, steps=steps)
        paths_KTP = fed.local(gaussian(fed.weights, 1.0, seed))
        w_KP = paths_KTP[:, -1]
        return divergence(w_KP, w_KP.mean(0)) / fed.gradient_term(paths_KTP)

    one, eight = ([ratio(seed, steps) for seed in range(20)] for steps in (1, 8))
    assert min(one) > 0.15
    assert max(one) > 0.4
    assert all(late < early for early, late in zip(one, eight, strict=True))


def test_clipping_breaks_the_bound() -> None:
    """Appendix A, inequality 2 claims ||w_i - (w + mean Clip(u_j, S))|| <= ||w_i - mean w_j||. It is false.

    Identical clients whose updates have norm 30, with S = 15: the right side is 0, and so is the bound of
    Proposition 1 without noise; but w stops half way, 15 short of every w_i. Delta then has no limit of zero.
    """
    fed = drawn(5, clients=4, labels=3, features=4, eta=1.0, steps=1)
    p = fed.p[:1].expand(4, -1)
    start_P = gaussian(fed.weights, 1.0, 0)
    eta = 30 / float((p[0] @ fed.gradients(start_P)).norm())
    fed = Federation(fed.x, p, eta, steps=1)
    paths_KTP = fed.local(start_P)
    w_KP = paths_KTP[:, -1]
    updates_KP = w_KP - start_P
    assert norms(updates_KP).tolist() == pytest.approx([30.0] * 4)

    bound = fed.gradient_term(paths_KTP)
    assert bound == 0
    assert divergence(w_KP, w_KP.mean(0)) == 0
    assert divergence(w_KP, start_P + clip(updates_KP, 15).mean(0)) == pytest.approx(15)
    assert divergence(w_KP, start_P + clip(updates_KP, 31).mean(0)) == pytest.approx(0, abs=1e-12)


@given(fed=federations, sigma=sigmas, share=st.sampled_from([0.1, 0.5, 0.9, 1.0, 2.0]), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_with_clipping_the_bound_needs_what_was_cut_off(fed: Federation, sigma: float, share: float, seed: int) -> None:
    """Repaired: w_div <= noise + gradient term + mean of max(0, ||u_j|| - S).

    The last is how far clipping can move the mean (triangle inequality); it is 0 where clipping does not bind
    (here S at or above the longest update), and the whole of w_div in the counterexample above.
    """
    w_P = gaussian(fed.weights, 1.0, seed)
    paths_KTP = fed.local(w_P)
    w_KP, noise_P = paths_KTP[:, -1], gaussian(fed.weights, sigma, seed + 1)
    updates_KP = w_KP - w_P
    limit = share * float(norms(updates_KP).max())
    w_P = w_P + clip(updates_KP, limit).mean(0) + noise_P
    cut_off = float((norms(updates_KP) - limit).clamp(min=0).mean())
    if share >= 1:
        assert cut_off == 0
    bound = float(noise_P.norm()) + fed.gradient_term(paths_KTP) + cut_off
    assert divergence(w_KP, w_P) <= bound * (1 + 1e-9)
