"""Control and data planes between learners and shards: one interface for real and virtual."""
