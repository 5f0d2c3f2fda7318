"""A user's own training loop, as small as can be."""

import time

import torch

import decoupled_diloco as dd

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with dd.Learner(model, optimizer=optimizer) as learner:
    going_on = True
    while going_on:
        x = torch.randn(16, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.15)
        going_on = learner.step(loss.item(), tokens=16)
