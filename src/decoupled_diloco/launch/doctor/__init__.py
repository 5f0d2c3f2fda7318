"""Check whether a run would work on this machine and with a syncer.

`machine_facts` and `transport.reachability` measure. `machine` and `syncer_findings` judge the
measurements, as pure functions. `examine` orders the checks and limits their time.

The doctor checks what would otherwise fail late, slowly or without a clear message. It does not
check what a command rejects at once itself, such as a missing program or an unreadable secret.
"""
