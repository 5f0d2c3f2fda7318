"""A run for other people's tools: metrics, alert rules, a dashboard, logs of experiments."""
