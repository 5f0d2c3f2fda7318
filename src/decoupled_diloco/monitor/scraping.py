"""Files for Prometheus and Grafana: alert rules, dashboard, scrape configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import alternatives, on_this_machine, url_of
from decoupled_diloco.config.run import host_and_port
from decoupled_diloco.monitor.metric_table import METRICS_PATH
from decoupled_diloco.transport.tls import TLSConfig

JOB = "ddiloco"
"""Name of the scrape job; the alert rules select targets by it."""

RULES_FILE = "ddiloco-rules.yml"
"""Rule file that the scrape configuration refers to."""


@dataclass(frozen=True)
class Target:
    """A process that can be scraped: its URL, and the labels that identify it."""

    url: str
    labels: dict[str, str]


def shipped_file(name: str) -> str:
    """Return the text of a file in this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def targets_of(config: RunConfig, addresses: Iterable[str]) -> list[Target]:
    """Return the processes of a run whose addresses are known.

    Args:
        config: The run's configuration.
        addresses: Addresses of the shards, in order, each with that of its standby.
    """
    found = [
        Target(url, {"run": config.run.name, "shard": str(shard)})
        for shard, address in enumerate(addresses)
        for url in alternatives(address)
    ]
    for index, name in enumerate(config.learner_ids):
        address = config.learner.metrics_of(index)
        if address is not None and not address.endswith(":0"):
            url = on_this_machine(url_of(*host_and_port("metrics_address", address)))
            found.append(Target(url, {"run": config.run.name, "learner": name}))
    return found


def scrape_config(
    targets: Iterable[Target], token_file: Path | None, note: str = "", tls: TLSConfig | None = None
) -> str:
    """Return a configuration for Prometheus in YAML; strings are quoted as in JSON.

    Args:
        targets: The processes to scrape.
        token_file: File with the bearer token for the targets.
        note: A comment for its head.
        tls: CA and client certificate for encrypted connections.
    """
    scraped = list(targets)
    schemes = sorted({urlsplit(target.url).scheme for target in scraped})
    lines = [f"# {line}" for line in note.splitlines()]
    lines += ["global:", "  scrape_interval: 15s", "  evaluation_interval: 15s", ""]
    lines += [f"rule_files: [{RULES_FILE}]  # ddiloco metrics rules > {RULES_FILE}", ""]
    lines += ["scrape_configs:"]
    for scheme in schemes:
        own = [target for target in scraped if urlsplit(target.url).scheme == scheme]
        lines += _job(scheme, own, token_file, tls if scheme == "https" else None)
    return "\n".join(lines) + "\n"


def _job(
    scheme: str, targets: list[Target], token_file: Path | None, tls: TLSConfig | None
) -> Iterator[str]:
    name = JOB if scheme == "http" else f"{JOB}-{scheme}"
    yield f"  - job_name: {name}"
    yield f"    scheme: {scheme}"
    yield f"    metrics_path: {METRICS_PATH}"
    if token_file is not None:
        yield f"    authorization: {{credentials_file: {json.dumps(str(token_file))}}}"
    if tls is not None:
        given = {"ca_file": tls.ca_cert, "cert_file": tls.cert, "key_file": tls.key}
        files = {key: str(Path(file).absolute()) for key, file in given.items() if file is not None}
        entries = ", ".join(f"{key}: {json.dumps(file)}" for key, file in files.items())
        yield f"    tls_config: {{{entries}}}"
    if name != JOB:
        yield f"    relabel_configs: [{{target_label: job, replacement: {JOB}}}]"
    yield "    static_configs:"
    for target in targets:
        parts = urlsplit(target.url)
        labels = dict(target.labels)
        if parts.path.strip("/"):
            labels["__metrics_path__"] = parts.path.rstrip("/") + METRICS_PATH
        yield f"      - targets: [{json.dumps(parts.netloc)}]"
        entries = ", ".join(f"{key}: {json.dumps(value)}" for key, value in labels.items())
        yield f"        labels: {{{entries}}}"
