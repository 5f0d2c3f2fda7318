"""The live page of a run, which shard 0 of the syncer serves to browsers.

`site` answers requests at the shard's port and has the sign-in. `feed` passes messages on to
viewers, `fold` folds the tape, and `document` defines what the page shows. The page's files are in
``static``. Start at `Site`. `site` and `feed` run on the shard's event loop and must not block it.
While at least one page is open, `feed` therefore runs one process for all viewers, ``python -m
decoupled_diloco.show.page.fold``. That process reads tapes and only writes to its standard output.
"""
