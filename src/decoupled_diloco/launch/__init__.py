"""Starting and watching the processes of a run on this machine."""
