"""Privacy of contributions (rules 24 and 25).

What lives here: the arithmetic and the keys of secure sums. All of it is pure: the callers provide
randomness and send the messages. The decisions of a round are in `protocol/secure_rounds.py`.
"""
