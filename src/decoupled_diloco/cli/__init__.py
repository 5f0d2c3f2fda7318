"""The command line, `ddiloco`, which begins in `decoupled_diloco.__main__`.

Exit codes: 0 done; 1 other failures; 2 wrong configuration or usage; 3 protocol; 4 transport;
5 access refused; 6 storage; 7 merge; 8 another process acts for the shard; 130 interrupted.
"""
