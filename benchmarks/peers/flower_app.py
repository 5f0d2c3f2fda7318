"""The Flower App: a `ServerApp` with `FedAvgM`, and a `ClientApp` that trains for a period.

It follows the PyTorch example of Flower's documentation ("Quickstart PyTorch") and "Design stateful
ClientApps". A round is one period. The state of the inner optimizer is kept in the context's state,
because a new ClientApp is created for every message. `FedAvgM` is SGD on the mean of the clients'
changes, with heavy-ball momentum; all other systems of the comparison have Nesterov momentum. In
runs with faults the server saves the model after each round ("Save and load model checkpoints").
"""

import io
from pathlib import Path
from typing import Any

import torch
from common import Task, Training, save
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM

client = ClientApp()
server = ServerApp()

MODEL = "final.pt"
"""File in which the server saves the final model."""


@client.train()
def train(message: Message, context: Context) -> Message:
    """Run one period of inner steps from the server's model."""
    task = Task.read(str(context.node_config["task"]))
    training, config = Training(task), message.content["config"]
    training.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    if "inner" in context.state:
        saved = io.BytesIO(context.state["inner"]["optimizer"])
        training.optimizer.load_state_dict(torch.load(saved))
    rounds = config["rounds-before"] + config["server-round"]
    training.go_to((rounds - 1) * task.period)
    if rounds == 1:
        training.wait_for_others()
    tokens = 0
    while training.steps < rounds * task.period:
        tokens += training.step()
        training.ended()
    kept = io.BytesIO()
    torch.save(training.optimizer.state_dict(), kept)
    context.state["inner"] = ConfigRecord({"optimizer": kept.getvalue()})
    content = {
        "arrays": ArrayRecord(training.model.state_dict()),
        "metrics": MetricRecord({"num-examples": tokens}),
    }
    return Message(content=RecordDict(content), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    task = Task.read(str(context.run_config["task"]))
    strategy = FedAvgM(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=task.workers,
        min_available_nodes=task.workers,
        server_learning_rate=task.outer_lr,
        server_momentum=task.outer_momentum,
    )
    arrays, before = ArrayRecord(Training(task).model.state_dict()), 0
    snapshot = Path(task.folder) / "server.snapshot"
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=False)
        arrays, before = ArrayRecord(saved["model"]), saved["rounds"]
        strategy.momentum_vector = saved["momentum"]

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        """Save the state; called before the first round and after each."""
        state: dict[str, Any] = {"model": arrays.to_torch_state_dict()}
        state |= {"momentum": strategy.momentum_vector, "rounds": before + server_round}
        save(state, snapshot)

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=task.steps // task.period - before,
        train_config=ConfigRecord({"rounds-before": before}),
        evaluate_fn=keep if task.snapshots else None,
    )
    save(result.arrays.to_torch_state_dict(), Path(task.folder) / MODEL)
