"""Would a run work here, and with that syncer? Facts are gathered in one place, judged in another.

`facts` and `transport.reach` look; `machine` and `syncer` judge what was seen, as pure functions;
`examine` puts them in order and keeps the time.
"""
