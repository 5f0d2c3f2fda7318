"""Export of a run's weights: `ddiloco export`, and `load_model` to load a native export.

| format | in the folder | loads with |
|---|---|---|
| `native` | `model.safetensors`, `run.toml`, `export.json` | `decoupled_diloco.load_model` |
| `huggingface` | `model.safetensors`, `config.json`, a tokenizer | `from_pretrained` |
"""
