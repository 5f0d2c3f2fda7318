"""The commands that this distribution adds to `ddiloco`: light, until one of them runs."""

from __future__ import annotations

from decoupled_diloco.cli.command_line import command
from decoupled_diloco_plan.bandwidth.options import PlanOptions
from decoupled_diloco_plan.goodput.options import GoodputOptions


@command(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Which link, which settings: utilisation, traffic, cost; or what setting reaches an aim."""
    from decoupled_diloco_plan.bandwidth.command import run

    run(options)


@command(GoodputOptions)
def goodput(options: GoodputOptions) -> None:
    """What failures cost a cluster: goodput, uptime, and where the rest of the chip-time goes."""
    from decoupled_diloco_plan.goodput.command import run

    run(options)
