"""What a model's folder says of its images decides about the KV of a prompt with one.

vLLM hashes an image by its content, the model's name and the options that were given to the
processor. What the processor's own files say is in none of these.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lab import vision
from lab.engine import Ask
from tests.system.e2e.conftest import Rig, cached, patient_for, tokens
from tests.system.e2e.pictures import Pictures, counters, ec_connector

PROMPTS = [Ask([20 + n % 9 for n in range(104)], images=[image]) for image in range(1, 9)]
"""With an image of 32 tokens first: one chunk of 128 tokens and eight more."""
WITH_PREFIX_CACHE = {"enable_prefix_caching": True}


@pytest.fixture
def model(models_dir: Path, tmp_path: Path) -> Path:
    """A model of this test's own, whose files it may change."""
    return Path(shutil.copytree(vision.build(models_dir), tmp_path / "model"))


def test_another_image_processor_is_never_answered_with_old_pictures(rig: Rig, model: Path) -> None:
    """The same weights, folder, prompts and settings; other means and deviations of the colours."""
    pictures = Pictures(rig.s3, model, rig.tmp_path)
    args = {**WITH_PREFIX_CACHE, "connector": patient_for(rig.s3, rig.bucket)}
    with pictures(None, **args) as engine:
        before = engine.generate(PROMPTS)
    file = model / "preprocessor_config.json"
    colours = {"image_mean": [0.9, 0.1, 0.6], "image_std": [0.05, 0.4, 0.1]}
    file.write_text(json.dumps(json.loads(file.read_text()) | colours))
    with pictures(None, **WITH_PREFIX_CACHE) as engine:
        right = engine.generate(PROMPTS)
    differ = [a != b for a, b in zip(tokens(right), tokens(before), strict=True)]
    assert sum(differ) > len(PROMPTS) // 2, "colours matter"

    with pictures(ec_connector(rig.s3, rig.bucket), **args) as engine:
        answers = engine.generate(PROMPTS)
        encoded = counters(engine)["encoded"]
        engine.call("lab.audit:audit")
    assert tokens(answers) == tokens(right)
    assert (cached(answers), encoded) == ([0] * len(PROMPTS), len(PROMPTS))

    # The control: with the old file the old namespace, in which all of it is found.
    shutil.copy(vision.build(model.parent / "again") / file.name, file)
    with pictures(None, **args) as engine:
        again = engine.generate(PROMPTS)
    assert cached(again) == [128] * len(PROMPTS)
