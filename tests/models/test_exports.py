"""What the package exports, and what loading it costs."""

from __future__ import annotations

import subprocess
import sys

import models


def test_every_exported_name_can_be_loaded():
    assert all(getattr(models, name).__module__.startswith("models.") for name in models.__all__)
    assert not hasattr(models, "Nothing")


def test_samples_negatives_and_the_pipeline_do_without_torch():
    code = """
import sys
import models, models.samples, models.negatives, models.parameters, models.metrics
import models.index, models.taste, models.recommend
models.MicroBatch, models.NegativeSampler, models.Taste
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
