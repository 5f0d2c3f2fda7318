"""Monitoring with external tools: metrics, alert rules, a dashboard, experiment trackers, traces.

Start at `metric_table`, the table of all metrics. `counters` has the counters that a process must
keep for it. `shard_metrics` and `learner_metrics` read everything else from the process's state at
each scrape, so a step costs nothing. `endpoint` is a learner's own address. `scraping` configures
Prometheus. `sinks` are TensorBoard, Weights & Biases and MLflow. `traces` folds the tape into
spans.

A process's metrics are read on its event loop. They may not wait, and may not write to the run.
Sinks and traces read tapes in a separate process or, for a single learner, on a thread of
`step_log`.
"""
