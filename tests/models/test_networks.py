"""DLRM's interaction, the towers and the losses against definitions written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.dlrm import dlrm_logits, dlrm_tensors, interact, top_inputs
from models.gather import Index, embed, unique_keys
from models.losses import binary_cross_entropy, sampled_softmax
from models.parameters import DenseLayout
from models.two_tower import item_vectors, two_tower_tensors, user_vectors


def dense_of(tensors, seed=0):
    layout = DenseLayout(tensors, 8)
    values = np.random.default_rng(seed).normal(size=(layout.chunks, 8)).astype(np.float32)
    return {name: torch.from_numpy(view) for name, view in layout.unpack(values).items()}


def test_the_published_shape_has_367_top_inputs():
    # Naumov et al. 2019 on Criteo: 26 embeddings of width 16 give 16 + 26·27/2.
    assert top_inputs(26, 16) == 367
    inputs = interact(torch.zeros(2, 16), torch.zeros(2, 26, 16))
    assert tuple(inputs.shape) == (2, 367)
    weights = dlrm_tensors(26, 13, 16, (512, 256), (512, 256), 0.0)
    assert next(t for t in weights if t.name == "ranking.top.0.weight").shape == (367, 512)
    assert next(t for t in weights if t.name == "ranking.bottom.0.weight").shape == (13, 512)


def test_interaction_takes_each_pair_once_and_no_square():
    generator = torch.Generator().manual_seed(0)
    bottom = torch.randn(3, 4, generator=generator)
    embeddings = torch.randn(3, 5, 4, generator=generator)
    inputs = interact(bottom, embeddings)
    for row in range(3):
        vectors = [bottom[row], *embeddings[row]]
        dots = [float(vectors[i] @ vectors[j]) for i in range(6) for j in range(i)]
        np.testing.assert_allclose(inputs[row, :4], bottom[row])
        np.testing.assert_allclose(inputs[row, 4:], dots, atol=1e-5)


def test_scoring_first_leaves_nothing_that_breaks_training():
    with torch.inference_mode():
        interact(torch.zeros(1, 3), torch.zeros(1, 41, 3))  # a width that nobody else asks for
    bottom = torch.ones(1, 3, requires_grad=True)
    interact(bottom, torch.ones(1, 41, 3)).sum().backward()
    assert bottom.grad is not None


def test_logits_are_bottom_interaction_top():
    dense = dense_of(dlrm_tensors(3, 2, 4, (5,), (6,), 0.0))
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(7, 3, 4, generator=generator)
    numbers = torch.randn(7, 2, generator=generator)

    def layer(x, name):
        return x @ dense[f"{name}.weight"] + dense[f"{name}.bias"]

    bottom = layer(layer(numbers, "ranking.bottom.0").relu(), "ranking.bottom.1").relu()
    top = layer(layer(interact(bottom, embeddings), "ranking.top.0").relu(), "ranking.top.1")
    np.testing.assert_allclose(dlrm_logits(embeddings, numbers, dense), top[:, 0], atol=1e-4)
    assert float(top.min()) < 0 < float(top.max())


def test_towers_are_a_gated_sum_plus_a_perceptron():
    dense = dense_of(two_tower_tensors((2, 1), (3, 2), 4, 5))
    generator = torch.Generator().manual_seed(2)
    vectors, numbers = torch.randn(6, 3, 4, generator=generator), torch.randn(6, 2, generator=generator)
    inputs = torch.cat([vectors.reshape(6, 12), numbers], dim=1)
    hidden = (inputs @ dense["item.hidden.weight"] + dense["item.hidden.bias"]).relu()
    gated = sum(dense["item.gates"][n] * vectors[:, n] for n in range(3))
    expected = gated + numbers @ dense["item.linear"] + hidden @ dense["item.out.weight"]
    expected[:, -1] = (numbers @ dense["item.bias"])[:, 0]
    np.testing.assert_allclose(item_vectors(vectors, numbers, dense), expected, atol=1e-4)
    users = user_vectors(vectors[:, :2], numbers[:, :1], dense)
    np.testing.assert_array_equal(users[:, -1], 1)
    assert users[:, :-1].std() > 0


def test_sampled_softmax_by_hand():
    scores = torch.tensor([[2.0, 1.0, 5.0], [0.0, 0.0, 0.0]])
    log_q = torch.tensor([[0.5, -0.5, torch.inf], [0.0, 0.0, torch.inf]])
    # Corrected logits 1.5, 1.5 and -inf in the first row; weights 2 and 3.
    loss = sampled_softmax(scores, log_q, torch.tensor([2.0, 3.0]))
    assert float(loss) == pytest.approx(5 * np.log(2))


def test_correction_recovers_true_log_probabilities():
    # Negatives drawn from q, corrected by log q: the best scores are log p up to a constant, not log p/q.
    generator = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    scores = torch.zeros(4, requires_grad=True)
    optimiser = torch.optim.Adam([scores], lr=0.01)
    for _ in range(1_500):
        candidates = np.concatenate(
            [generator.choice(4, (256, 1), p=p), generator.choice(4, (256, 8), p=q)], axis=1
        )
        log_q = torch.from_numpy(np.log(q)[candidates].astype(np.float32))
        log_q[:, 1:][torch.from_numpy(candidates[:, 1:] == candidates[:, :1])] = torch.inf
        optimiser.zero_grad()
        loss = sampled_softmax(scores[torch.from_numpy(candidates)], log_q, torch.ones(256) / 256)
        torch.autograd.backward(loss)
        optimiser.step()
    found = (scores - torch.logsumexp(scores, 0)).detach().exp().numpy()
    # With 8 negatives a bias towards even remains; without the correction item 0 would get above 0.8.
    assert found[0] == pytest.approx(p[0], abs=0.1)
    assert list(np.argsort(-found)) == [0, 1, 2, 3]


def test_binary_cross_entropy_by_hand():
    logits, label = torch.tensor([0.0, np.log(3.0)]), torch.tensor([1.0, 0.0])
    loss = binary_cross_entropy(logits, label, torch.tensor([1.0, 2.0]))
    assert float(loss) == pytest.approx(np.log(2) + 2 * np.log(4), rel=1e-6)


def test_embeddings_are_looked_up_and_lists_averaged():
    from featurestore.encoded import Encoded, Ragged

    entities = Encoded(
        np.array([[30], [10], [30]], np.uint64),
        np.zeros((3, 0), np.float32),
        (Ragged(np.array([10, 20, 20], np.uint64), np.array([0, 2, 2, 3])),),
    )
    keys = unique_keys((entities,))
    np.testing.assert_array_equal(keys, [10, 20, 30])
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    vectors = embed(Index.into(keys, entities), rows)
    np.testing.assert_array_equal(vectors[:, 0], [[3, 3], [1, 0], [3, 3]])
    np.testing.assert_array_equal(vectors[:, 1], [[0.5, 1], [0, 0], [0, 2]])
