"""Evaluate the run of train_ddp.toml during training; this is the run's `evaluate_command`."""

import torch
from train_ddp import Gpt, batch_of, read_text

import decoupled_diloco as dd

model = Gpt()
held_out = batch_of(read_text(), 64, torch.Generator().manual_seed(0))
with dd.Observer(model) as observer:
    for step in observer.updates():
        with torch.no_grad():
            loss = model(held_out).item()
        observer.log(loss=loss)
        print(f"step {step}: held-out loss {loss:.3f}")
