"""Arguments that no command takes."""

from __future__ import annotations

import pytest
from cli_problems import refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["warp"], "wrap"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "--seeds", "0"], "seeds"),
        (["run", "--training.epoch", "3"], "training.epoch"),
        (["run", "--data.train_fraction", "1.0"], "data.train_fraction"),
        (["run", "--data.held_out_classes", "[10]"], "held_out_classes"),
        (["run", "--posteriors", "[]"], "number of posteriors"),
        (["wrap"], "model"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert message in refused(arguments, capsys)
