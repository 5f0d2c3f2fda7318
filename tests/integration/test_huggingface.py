"""Exports load in transformers with the same logits; its models are custom workloads."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.run_export import export_run
from decoupled_diloco.merge import layout_of
from decoupled_diloco_lab.simulate.training import train_virtually
from unit.export.export_runs import run_folder

pytestmark = pytest.mark.filterwarnings(
    "default"
)  # the warnings of transformers cannot be fixed here

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DATA = {
    "context": 32,
    "batch_size": 4,
    "text_bytes_max": 100_000,
    "eval_batches": 2,
    "warmup_steps": 0,
    "learning_rate": 1e-2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Return the example as the module that `ddiloco` imports in its folder."""
    spec = importlib.util.spec_from_file_location("finetune_hf", EXAMPLES / "finetune_hf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune_hf"] = module
    spec.loader.exec_module(module)
    return module


def ids() -> torch.Tensor:
    return torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("gpt", {}, "ArceeForCausalLM"),
        ("gpt", {"tied": True, "heads": 1}, "ArceeForCausalLM"),
        ("moe", {}, "MixtralForCausalLM"),
        ("moe", {"tied": True, "experts_per_token": 3}, "MixtralForCausalLM"),
    ],
)
def test_the_logits_are_the_same(
    tmp_path: Path, name: str, options: dict[str, Any], kind: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = run_folder(tmp_path / "run", name, **options)
    out = export_run(tmp_path / "run", format="huggingface").folder
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert type(theirs).__name__ == kind
    with torch.no_grad():
        ours, logits = model(ids()), theirs(ids()).logits
    assert (ours - logits).abs().max() < 1e-5 * ours.abs().max()
    text = "def é(x):\n\treturn '€'  # 0"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_it_continues_a_text_like_our_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = run_folder(tmp_path / "run")
    out = export_run(tmp_path / "run", format="huggingface").folder
    theirs = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"def ")])
    written = theirs.generate(
        prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    assert bytes(written[0, 4:].tolist()) == model.generate(b"def ", 12, temperature=0)


def configuration(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def options(example: ModuleType, **given: Any) -> Any:
    return example.workload({"seed": 0, "total_steps": 24, **DATA, **given})


def virtual(workload: Any) -> Any:
    run = RunConfig(
        run={"name": "small", "learners": 2, "max_steps": 24},
        sync={"fragments": 4, "sync_every": 8, "overlap_steps": 1},
    )
    return train_virtually(run, workload=workload)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_its_configuration_learns(
    tmp_path: Path, example: ModuleType, tied: bool
) -> None:
    folder = configuration(tmp_path / "config", tie_word_embeddings=tied)
    workload = options(example, config=str(folder))
    run = virtual(workload)
    before = workload.evaluate(workload.model())
    after = run.evaluate()
    assert after["loss"] < 0.8 * before["loss"]
    assert after["perplexity"] == pytest.approx(2.718281828 ** after["loss"])
    trained = run.model()
    assert (trained.lm_head.weight is trained.model.embed_tokens.weight) is tied
    for host in run.system.learners.values():
        own = host.model
        assert (own.lm_head.weight is own.model.embed_tokens.weight) is tied


def test_tied_embeddings_are_one_tensor_of_the_layout(tmp_path: Path, example: ModuleType) -> None:
    folder = configuration(tmp_path / "config", tie_word_embeddings=True)
    model = options(example, config=str(folder)).model()
    (embedding,) = [spec for spec in layout_of(model).tensors if spec.role == "embedding"]
    assert embedding.name == "model.embed_tokens.weight"
    assert embedding.aliases == ("lm_head.weight",)


def test_a_saved_model_is_fine_tuned_from_its_folder(tmp_path: Path, example: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    scratch = options(example, config=str(configuration(tmp_path / "config")))
    saved = virtual(scratch).model()
    saved.save_pretrained(tmp_path / "saved")
    scratch.tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the {number}th file of text\n" * 300)
    tuned = options(example, model=str(tmp_path / "saved"), text=[str(tmp_path / "text" / "*.txt")])
    first = tuned.model()
    assert first.training
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), saved.parameters(), strict=True)
    )
    run = virtual(tuned)
    assert run.evaluate()["loss"] < 0.8 * tuned.evaluate(first)["loss"]
    run.model().save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert tuned.evaluate(again) == run.evaluate()


def test_bfloat16_parameters_are_trained_as_such(tmp_path: Path, example: ModuleType) -> None:
    folder = configuration(tmp_path / "config", tie_word_embeddings=True)
    run = virtual(options(example, config=str(folder), dtype="bfloat16"))
    model = run.model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {spec.dtype for spec in layout_of(model).tensors} == {"bfloat16"}
    before = run.workload.evaluate(run.workload.model())
    assert run.evaluate()["loss"] < 0.8 * before["loss"]


def exported_model(folder: Path, example: ModuleType, **config: Any) -> tuple[Path, nn.Module]:
    run = folder / "run"
    source = configuration(folder / "config", **config)
    return run, run_folder(run, "finetune_hf:workload", config=str(source), **DATA)


@pytest.mark.parametrize("tied", [True, False])
def test_its_export_loads_in_both_formats(tmp_path: Path, example: ModuleType, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, model = exported_model(tmp_path, example, tie_word_embeddings=tied)
    export_run(run, tmp_path / "native")
    export_run(run, tmp_path / "hf", format="huggingface")
    loaded = dd.load_model(tmp_path / "native")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = model.eval()(ids()).logits
        assert torch.equal(loaded(ids()).logits, expected)
        assert torch.equal(theirs(ids()).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("ab").input_ids == [97, 98]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "give exactly one, a model to fine-tune or a config to train from scratch"),
        ({"model": "a", "config": "b"}, "give exactly one"),
        ({"model": "no/such-model"}, "'no/such-model' is neither a folder nor in the local cache"),
        ({"config": "EMPTY"}, "empty' cannot be loaded: "),
        ({"config": "CONFIG", "context": 65}, "context=65 exceeds the 64 positions of"),
        ({"config": "SMALLER"}, "the tokenizer has 256 tokens, more than vocab_size=99"),
        ({"config": "CONFIG", "text": ["none/*.txt"]}, r"text=\['none/\*\.txt'\] matches no file"),
        ({"config": "CONFIG", "lr": 1.0}, "unknown key 'lr' in"),
    ],
)
def test_invalid_options_are_reported(
    tmp_path: Path, example: ModuleType, given: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    known = {
        "EMPTY": str(tmp_path / "empty"),
        "CONFIG": str(configuration(tmp_path / "config")),
        "SMALLER": str(configuration(tmp_path / "smaller", vocab_size=99)),
    }
    given = {k: known.get(v, v) if isinstance(v, str) else v for k, v in given.items()}
    with pytest.raises(ConfigError, match=sentence):
        next(options(example, **given).batches(0, 1))


def test_a_tokenizer_that_prepends_a_space_does_so_once(
    tmp_path: Path, example: ModuleType
) -> None:
    """Like Llama's tokenizer: if lines were tokenized separately, each would start with a space."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    text = "a b\n\nab\n a\n" * 20
    letters = {letter: i for i, letter in enumerate("?ab\n\u2581")}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "text").write_text(text)
    options = {"tokenizer": str(tmp_path / "tokenizer"), "text": [str(tmp_path / "text")]}
    workload = example.workload({"config": str(tmp_path), **DATA, **options})
    train, held_out = workload.tokens_of_text
    assert [*train.tolist(), *held_out.tolist()] == [
        letters[letter] for letter in "\u2581" + text.replace(" ", "\u2581")
    ]


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity(
    tmp_path: Path, example: ModuleType
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    workload = example.workload({"config": str(tmp_path), **DATA})
    model = workload.model()
    with torch.no_grad():
        model.lm_head.weight *= 1e9
    found = workload.evaluate(model)
    assert found["loss"] > 710
    assert found["perplexity"] == math.inf
