"""Code shared by the shells of all processes.

`driver.Driver` is the only class that runs a state machine. It runs in the event loop of its
process. A learner's training thread may use it to decide a step boundary, under the driver's
monitor.
"""
