"""Built-in language models in the layouts of Hugging Face transformers, without a download.

| workload | layout | logits |
|---|---|---|
| `gpt`, `paced` | `ArceeForCausalLM`: Llama's attention, norms and positions with a ReLU² MLP | the same |
| `moe` | `MixtralForCausalLM` with a ReLU gate; gate and value are copies, so that their product is ReLU² | the same |

Writing them does not need transformers. A custom model is written by its `save_pretrained`.
"""  # noqa: E501 (a table's rows)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.storage.weight_files import save_weights
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.gpt import VOCABULARY, GptOptions, GptWorkload
from decoupled_diloco.workloads.transformer import ROTARY_BASE

FILE = "model.safetensors"
SEPARATOR = 0
"""The byte that separates files of the text: it begins and ends each one."""

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.project.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.expand.weight": "mlp.up_proj.weight",
    "mlp.project.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}
_EXPERT_NAMES = {"expand": ("w1", "w3"), "project": ("w2",)}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(expand|project)\.weight")


def require_huggingface(workload: Workload, model: nn.Module) -> None:
    """Reject models for which transformers has no layout.

    Raises:
        ConfigError: The workload or option is not supported; it is named.
    """
    if isinstance(workload, GptWorkload):
        if getattr(workload.options, "experts_per_token", None) == 1:
            raise ConfigError(
                "experts_per_token=1 has no counterpart in transformers, where a single expert "
                "always has weight 1: use --format native, or train with experts_per_token=2"
            )
    elif not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"a {type(model).__name__} cannot be written for transformers, because it has no "
            "save_pretrained: use --format native"
        )


def write_huggingface(workload: Workload, model: nn.Module, folder: Path) -> None:
    """Write weights, configuration and tokenizer into an empty folder.

    If the workload has an attribute `tokenizer`, it is written too.

    Raises:
        ConfigError: transformers has no layout for it.
        StorageError: The files cannot be written.
    """
    require_huggingface(workload, model)
    if not isinstance(workload, GptWorkload):
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer = getattr(workload, "tokenizer", None)
        if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        return
    options = workload.options
    named = dict(_renamed(model, tied=options.tied))
    save_weights(folder / FILE, named, {"format": "pt"})
    _write_json(folder / "config.json", configuration(options))
    _write_json(folder / "tokenizer.json", byte_tokenizer())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": options.context,
            "clean_up_tokenization_spaces": False,
        },
    )


def configuration(options: GptOptions) -> dict[str, Any]:
    """Return the `config.json` of a built-in language model."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "head_dim": options.width // options.heads,
        "max_position_embeddings": options.context,
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "rope_theta": ROTARY_BASE,
        "tie_word_embeddings": options.tied,
        "attention_bias": False,
        "bos_token_id": SEPARATOR,
        "eos_token_id": SEPARATOR,
    }
    if hasattr(options, "experts"):
        mixture: Any = options
        return common | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "relu",
            "intermediate_size": mixture.expert_hidden,
            "num_local_experts": mixture.experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "router_aux_loss_coef": mixture.balance_weight,
            "sliding_window": None,
        }
    return common | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
        "intermediate_size": 4 * options.width,
        "mlp_bias": False,
    }


def byte_tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` of a tokenizer whose 256 ids are the bytes of UTF-8."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> Iterator[str]:
    """Yield the visible character for each byte in byte-level vocabularies (those of GPT-2)."""
    hidden = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(256 + hidden)
            hidden += 1


def _renamed(model: nn.Module, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if tied and name == "head.weight":
            continue
        prefix, rest = "", name
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            prefix = f"model.layers.{number}."
        expert = _EXPERT.fullmatch(rest)
        if expert is None:
            yield prefix + _NAMES[rest], parameter
            continue
        for other in _EXPERT_NAMES[expert[2]]:
            # A clone, because tensors that share memory are stored once, under one name only.
            yield f"{prefix}block_sparse_moe.experts.{expert[1]}.{other}.weight", parameter.clone()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
