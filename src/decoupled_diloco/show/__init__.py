"""User-facing views of a run: terminal, report, comparison, explanations, live page.

The view model is in `status` (a run at one instant) and `tables` (a whole run). The renderers are
`terminal`, `report`, `explain` and `page`. `figures` draws the pictures on the canvas of `charts`,
and every command prints through `console`. Start at `status_of`, `totals`, `tables_of`,
`write_report` or `explain_round`. All of these are pure functions of a `RunModel`, on the caller's
thread; only `write_report` and `write_comparison` write files. The live page runs in a separate
process, see `page`. Commands, `launch` and `monitor` call this package; it calls none of them.
"""
