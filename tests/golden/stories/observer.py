"""A user's own evaluation of the run of `program.py`."""

import torch

import decoupled_diloco as dd

model = torch.nn.Linear(8, 8)
x = torch.eye(8)
with dd.Observer(model) as observer:
    for _ in observer.updates():
        with torch.no_grad():
            observer.log(loss=torch.nn.functional.mse_loss(model(x), x.flip(1)).item())
