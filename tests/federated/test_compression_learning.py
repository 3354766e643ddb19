"""Learning digits with compression both ways: as good as without, for a fiftieth of the bytes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from federated import LocalTraining, Perceptron, device_generator, local_update
from federated.compression import DownloadChain, Grid, make_scheme
from federated.device import COMPRESSION

CLIENTS, ITERATIONS, FRAME_BYTES = 10, 25, 40
MODEL = Perceptron(64, (64,), 10)
TRAINING = LocalTraining(epochs=3, batch_size=20, rate=0.1)


def learn(upload: str, bits: int) -> tuple[float, float, float]:
    """Accuracy on a quarter of the digits, and mean bytes of an upload and of a download."""
    inputs, labels = load_digits(return_X_y=True)
    inputs = (inputs / 16.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, *parts = np.array_split(order[:450], 1) + np.array_split(order[450:], CLIENTS)
    layout = MODEL.layout()
    weights = MODEL.initial(np.random.default_rng(1)).astype(np.float64)
    chain = DownloadChain.begin(Grid.for_layout(layout, bits), weights.astype(np.float32)) if bits else None
    scheme = make_scheme(upload) if upload else None
    residuals = None
    sent, fetched = list[int](), list[int]()
    for iteration in range(ITERATIONS):
        start = weights.astype(np.float32) if chain is None else chain.vector()
        updates = [
            local_update(
                MODEL,
                layout,
                start,
                inputs[rows],
                labels[rows],
                TRAINING,
                device_generator(1, client, iteration),
            )
            for client, rows in enumerate(parts)
        ]
        differences = np.stack([update.vectors["difference"] for update in updates])
        if scheme is not None:
            generators = [device_generator(1, client, iteration, COMPRESSION) for client in range(CLIENTS)]
            encoded = scheme.encode_batch(differences, generators, residuals)
            differences, residuals = encoded.decoded, encoded.residuals
        bodies = [bytes(4 * layout.size)] if scheme is None else encoded.bodies
        sent += [len(body) + FRAME_BYTES for body in bodies]
        weights += differences.mean(axis=0)
        if chain is None:
            fetched.append(4 * layout.size + FRAME_BYTES)
        else:
            # The first one is the whole model.
            fetched.append(len(chain.body_for(iteration - 1 if iteration else None)) + FRAME_BYTES)
            chain.publish(weights.astype(np.float32))
    final = weights.astype(np.float32) if chain is None else chain.vector()
    accuracy = float((MODEL.logits(final, inputs[test]).argmax(axis=1) == labels[test]).mean())
    return accuracy, float(np.mean(sent)), float(np.mean(fetched))


@pytest.mark.parametrize(
    "upload", ["rotate | random_mask:0.5 | quantise:1:drive", "top_k:0.05 | quantise:2:nearest | deflate"]
)
def test_digits_are_learned_as_well_for_a_fiftieth_up_and_a_tenth_down(upload: str) -> None:
    plain, whole_sent, whole_fetched = learn("", 0)
    accuracy, sent, fetched = learn(upload, 8)
    assert plain > 0.94
    # 450 test rows: one of them is .22 points.
    assert accuracy > plain - 0.012
    assert whole_sent / sent > 50.0
    assert whole_fetched / fetched > 10.0


def test_compression_imports_nothing_but_numpy_and_the_standard_library() -> None:
    program = (
        "import sys, federated.compression; "
        "outside = {m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'__main__'}; "
        "print(*sorted(n for n in outside if not n.startswith(('_', 'sitecustomize'))))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) <= {"federated", "numpy", "cython_runtime", "typing_extensions"}
