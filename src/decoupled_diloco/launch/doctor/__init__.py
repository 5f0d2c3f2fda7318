"""Would a run work here, and with that syncer? Facts are gathered in one place, judged in another.

`facts` and `transport.reachability` look; `machine` and `syncer` judge what was seen, as pure
functions; `examine` puts them in order and keeps the time.

A check is here if a run would go wrong later, slowly or without a clear sentence. What a command
refuses at once by itself (a missing program, an unreadable secret) is not checked again.
"""
