"""The example loops run, and agree."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import require

LOOPS = Path(__file__).parent.parent / "examples" / "loops"


@pytest.fixture
def _loops_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(LOOPS))
    yield
    for name in ("task", "torch_loop", "keras_fit", "jax_loop"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_loops_importable")
def test_the_same_clipper_has_the_same_limits_in_each_loop(capsys):
    for framework in ("torch", "keras", "jax", "optax"):
        require(framework)
    import keras

    before = keras.config.floatx()
    limits = {}
    try:
        for name in ("torch_loop", "keras_fit", "jax_loop"):
            limits[name] = importlib.import_module(name).train()
    finally:
        keras.config.set_floatx(before)
    for name, values in limits.items():
        assert len(values) == 56
        np.testing.assert_allclose(values, limits["torch_loop"], rtol=1e-5, err_msg=name)
    shown = capsys.readouterr().out
    assert shown.count("of them clipped") == 3
    assert " 0 of them clipped" not in shown
