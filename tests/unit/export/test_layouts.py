"""Files for transformers, tested without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from decoupled_diloco import load_model
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.huggingface import byte_tokenizer
from decoupled_diloco.export.run_export import export_run
from decoupled_diloco.storage.weight_files import load_metadata, load_weights
from unit.export.export_runs import run_folder


def test_the_tokenizer_has_bytes_for_tokens() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer()))
    text = "".join(map(chr, range(0x250))) + "  €\n\t∑ 😀 "
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text


def test_every_parameter_is_there_under_its_other_name(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", format="huggingface")
    written = load_weights(tmp_path / "out/model.safetensors")
    assert load_metadata(tmp_path / "out/model.safetensors") == {"format": "pt"}
    assert len(written) == len(list(model.parameters()))
    expand = model.blocks[1].mlp.expand.weight
    assert written["model.layers.1.mlp.up_proj.weight"].equal(expand)


def test_an_expert_is_written_with_a_copy_as_gate(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "run", "moe")
    export_run(tmp_path / "run", tmp_path / "out", format="huggingface")
    written = load_weights(tmp_path / "out/model.safetensors")
    expert = "model.layers.0.block_sparse_moe.experts.2"
    own = model.blocks[0].mlp.experts[2]
    assert written[f"{expert}.w1.weight"].equal(own.expand.weight)
    assert written[f"{expert}.w3.weight"].equal(own.expand.weight)
    assert written[f"{expert}.w2.weight"].equal(own.project.weight)


def test_a_tied_head_is_left_to_the_configuration(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", tied=True)
    export_run(tmp_path / "run", tmp_path / "out", format="huggingface")
    assert "lm_head.weight" not in load_weights(tmp_path / "out/model.safetensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


def test_models_without_a_transformers_layout_are_rejected(tmp_path: Path) -> None:
    run_folder(tmp_path / "vit", "vit")
    with pytest.raises(ConfigError) as error:
        export_run(tmp_path / "vit", format="huggingface")
    assert str(error.value) == (
        "a Vit cannot be written for transformers, because it has no save_pretrained: "
        "use --format native"
    )
    run_folder(tmp_path / "moe", "moe", experts_per_token=1)
    with pytest.raises(ConfigError, match="experts_per_token=1 has no counterpart"):
        export_run(tmp_path / "moe", format="huggingface")


def test_an_export_for_transformers_is_not_loaded_back(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    out = export_run(tmp_path / "run", format="huggingface").folder
    with pytest.raises(ConfigError, match="is an export for transformers: load it with from_p"):
        load_model(out)
