"""FedAvg and FedProx of Flower, in its simulation engine, for the clients of `phones_flower`.

    python flower_phones.py TASK

It follows Flower's documentation ("Run simulations", "Design stateful ClientApps"). The strategies
are Flower's; only their random sampling of nodes is replaced by the cohorts of the task. The file
of the task has a list of runs with the clients' data. The final models are written next to it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx, fedavg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F

PATH = "PHONES_TASK"
"""Environment variable with the path of the task, for the processes of the clients."""

NO_EVALUATION = {"fraction_evaluate": 0.0}

client = ClientApp()
server = ServerApp()


def read() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = torch.load(os.environ[PATH])
    return runs


def reply(message: Message, **content: Any) -> Message:
    return Message(content=RecordDict(content), reply_to=message)


@client.query()
def number(message: Message, context: Context) -> Message:
    """Report which client a node is; node ids are random."""
    return reply(
        message, metrics=MetricRecord({"client": int(context.node_config["partition-id"])})
    )


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train for the steps of one round, with the client's next batches."""
    config, part = message.content["config"], int(context.node_config["partition-id"])
    run = read()[config["run"]]
    images, labels, order = run["clients"][part]
    hidden = nn.Linear(64, run["hidden"])
    model = nn.Sequential(hidden, nn.ReLU(), nn.Linear(run["hidden"], run["classes"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=run["lr"])
    visits = f"steps of run {config['run']}"
    before = int(context.state[visits]["steps"]) if visits in context.state else 0
    for chosen in order[before : before + run["steps"]]:
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        if "proximal-mu" in config:
            pairs = zip(model.parameters(), start, strict=True)
            loss = loss + config["proximal-mu"] / 2 * sum((p - s).square().sum() for p, s in pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    context.state[visits] = MetricRecord({"steps": before + run["steps"]})
    metrics = MetricRecord({"num-examples": len(images)})
    return reply(message, arrays=ArrayRecord(model.state_dict()), metrics=metrics)


@server.main()
def main(grid: Grid, context: Context) -> None:
    runs, finals = read(), []
    nodes = list(grid.get_node_ids())
    asked = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    found = grid.send_and_receive(asked)
    node_of = {each.content["metrics"]["client"]: each.metadata.src_node_id for each in found}
    sizes: dict[str, int] = {}
    send = grid.send_and_receive

    def measured(messages: Any, **named: Any) -> Any:
        messages = list(messages)
        replies = list(send(messages, **named))
        if messages:  # there is no evaluation
            sizes["down"] = sum(message_to_proto(each).ByteSize() for each in messages)
            sizes["up"] = sum(message_to_proto(each).ByteSize() for each in replies)
        return replies

    grid.send_and_receive = measured  # type: ignore[method-assign]
    for number, run in enumerate(runs):
        rounds = iter(run["cohorts"])
        fedavg.sample_nodes = lambda *_, to=rounds: ([node_of[each] for each in next(to)], nodes)
        prox = {"proximal_mu": run["mu"]}
        strategy = FedProx(**prox, **NO_EVALUATION) if run["mu"] else FedAvg(**NO_EVALUATION)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(run["model"]),
            num_rounds=len(run["cohorts"]),
            train_config=ConfigRecord({"run": number}),
        )
        finals.append({"model": result.arrays.to_torch_state_dict(), "bytes": dict(sizes)})
    torch.save(finals, Path(os.environ[PATH]).with_name("finals.pt"))


if __name__ == "__main__":
    os.environ[PATH] = sys.argv[1]
    one = {"num_cpus": 1}
    backend = {"client_resources": one, "init_args": one}
    run_simulation(server, client, len(read()[0]["clients"]), backend_config=backend)
