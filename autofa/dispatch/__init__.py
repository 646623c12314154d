"""Which kernel answers a call: the ladder of evidence, the table of winners, the public face."""
