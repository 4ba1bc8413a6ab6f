"""A model's files and settings as plain values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3kv.connectors.model_identity import file_digest, local_files, local_weights, plain, spelled


def test_objects_of_no_stable_text_do_not_make_every_start_another_namespace() -> None:
    assert plain({"a": object(), "b": {2, 1}, "c": float("inf")}) == {
        "a": "a object",
        "b": [1, 2],
        "c": "inf",
    }


def test_a_very_long_configuration_is_told_by_its_digest() -> None:
    long = {"names": ["x" * 100] * 2000}
    assert len(spelled(long)) == 64
    assert spelled(long) != spelled({"names": ["x" * 100] * 2001})


def test_files_count_if_they_may_change_what_is_computed(tmp_path: Path) -> None:
    ignored = ["config.json", "tokenizer.json", "notes.txt"]
    for name in (*ignored, "modeling.py", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")

    def names(**settings: Any) -> list[str]:
        model: Any = SimpleNamespace(model=str(tmp_path), **settings)
        return sorted(local_files(model) or {})

    assert names(multimodal_config=None) == ["modeling.py"]
    assert names(multimodal_config=object()) == ["modeling.py", "tokenizer_config.json"], (
        "it may name the class of the processor"
    )


def test_a_changed_file_has_another_digest_and_an_unreadable_one_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    before = file_digest(str(scales))
    scales.write_text("2")
    assert None not in {before, file_digest(str(scales))}
    assert before != file_digest(str(scales))
    assert file_digest(None) is None
    assert not caplog.text
    assert file_digest(str(tmp_path / "gone")) is None
    assert "set another model_id" in caplog.text


def test_random_weights_have_no_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model: Any = SimpleNamespace(model=str(tmp_path))
    read, drawn = (SimpleNamespace(load_format=kind) for kind in ("auto", "dummy"))
    assert local_weights(model, read, "sampled")  # type: ignore[arg-type]
    assert local_weights(model, drawn, "sampled") is None  # type: ignore[arg-type]
