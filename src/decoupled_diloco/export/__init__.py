"""The weights of a run as something to use: `ddiloco export`, and `load_exported` for the way back.

| format | in the folder | loads with |
|---|---|---|
| `native` | `model.safetensors`, `run.toml`, `export.json` | `decoupled_diloco.load_exported` |
| `huggingface` | `model.safetensors`, `config.json`, a tokenizer | `from_pretrained` |
"""
