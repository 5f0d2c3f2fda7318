"""The commands that this distribution adds to `ddiloco`; heavy imports wait until one runs."""

from __future__ import annotations

from decoupled_diloco.cli.command_line import command
from decoupled_diloco_plan.bandwidth.plan_options import PlanOptions
from decoupled_diloco_plan.goodput.goodput_options import GoodputOptions


@command(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict utilization, traffic and cost on given links, or find settings for a utilization."""
    from decoupled_diloco_plan.bandwidth.plan_command import run

    run(options)


@command(GoodputOptions)
def goodput(options: GoodputOptions) -> None:
    """Simulate a cluster with failures: goodput, uptime, and where the chip time goes."""
    from decoupled_diloco_plan.goodput.goodput_command import run

    run(options)
