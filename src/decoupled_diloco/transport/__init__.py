"""Control and data planes between learners and shards: one interface, in memory and over HTTP."""
