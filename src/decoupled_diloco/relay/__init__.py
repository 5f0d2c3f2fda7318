"""A relay: the process of a site, between the site's learners and the shards (rule 22).

`relay_process.RelayProcess` is the entry. Its children dial it as they would dial a shard. Its
connection to each shard carries theirs. `passed_payloads` fetches each published copy once.
`sum_worker` holds what the children sent until one sum of it goes to the shard.

All of it runs on one event loop, with one worker thread for tensors. It uses the shard's code for
payloads (`syncer.data_plane`, `syncer.sum_uploads`). Only `launch` uses this package.
"""
